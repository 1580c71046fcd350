"""A tiny V4.1 engine on the CPU, and its released tensors: what tests of the runtime share."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any
from unittest.mock import patch

import numpy as np
import torch

from backends.sim import SimBackend
from backends.torch_runtime.assemble import rank_context
from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.engine import CollectedStep, Delivery, Inbox, RankEngine
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.formats import KVStorage
from backends.torch_runtime.inputs import Track
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.launcher import EagerLauncher
from backends.torch_runtime.serving import EnginePayload, worker
from backends.torch_runtime.state import CacheShape
from backends.torch_runtime.steps import StepBuilder
from backends.torch_runtime.tiny import tiny_config
from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.rank import ModelWeights
from backends.torch_runtime.worker import Channel, RankPlace
from deepinfer.engine.deployment import Deployment
from deepinfer.hardware.host import load_host
from deepinfer.hardware.local import host_memory
from deepinfer.hardware.spec import Accelerator, ClusterSpec
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.hf import parse_config
from deepinfer.model.spec import ModelSpec
from deepinfer.numeric import Ints
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import Stop, StopChecker
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.scheduler.step import StepOutput, StepPlan, StepResult
from deepinfer.workload.generate import RequestSpec
from deepinfer.workload.spec import FixedLength, PoissonArrivals, Workload

VOCAB = 320
MAX_MODEL_LEN = 512
BLOCK_TOKENS = 16
LIKELY = (100, 200)
"""Tokens of `undecided_weights`."""
SELECTIVE: dict[str, Any] = {"index_n_heads": 8}
"""More index heads than the tiny model has: scores of zero from all heads, which tie, become rare."""
QUICK: dict[str, Any] = {
    **SELECTIVE,
    "hc_sinkhorn_iters": 2,
    "n_routed_experts": 4,
    "dspark_n_routed_experts": 2,
    "num_nextn_predict_layers": 1,
    "compress_ratios": [0, 0, 2, 2, 1, 1, 1, 1, 0],
}
"""And less of what costs time and has no part in how rows, caches and requests are kept apart."""


def config_with(**changed: Any) -> dict[str, Any]:
    """The tiny model's config.json with other text fields."""
    config = tiny_config()
    config["text_config"].update(changed)
    return config


def tiny_deployment(
    model: ModelSpec,
    layout: ParallelLayout | None = None,
    num_blocks: int = 256,
    machine: Accelerator | None = None,
    **settings: Any,
) -> Deployment:
    """One engine, with few blocks of few tokens, on this host or on accelerators of a `machine`."""
    layout = layout or ParallelLayout()
    machine = machine or host_memory(layout.num_ranks)
    defaults = {"max_num_seqs": 4, "max_tokens_per_step": 64, "block_tokens": BLOCK_TOKENS, "memory_utilization": 0.02}
    chosen = EngineSettings(**{**defaults, **settings})
    budget = replace(memory_budget(model, layout, machine, chosen), num_blocks=num_blocks)
    cluster = ClusterSpec(machine, layout.num_ranks)
    return Deployment(model, cluster, layout, chosen, 1, float(layout.num_ranks), budget, load_host("deepinfer"))


class HeardChecker(StopChecker):
    """A checker that remembers what it was given: every delivered token, once, and none but these."""

    def __init__(self, params: SamplingParams, eos: Collection[int]) -> None:
        super().__init__(params, eos)
        self.heard: list[int] = []

    def accept(self, token_ids: Sequence[int]) -> Stop | None:
        self.heard += token_ids
        return super().accept(token_ids)


@dataclass
class Served:
    """What a run of the tiny engine left: tokens and log-probabilities of each request, steps, prefix hits."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    steps: list[CollectedStep]
    num_hit_tokens: int
    num_preemptions: int

    def distributions(self, request: int) -> np.ndarray:
        """Log-probabilities [tokens, VOCAB] of a request that asked for those of all tokens."""
        return np.asarray([[of_token[t] for t in range(VOCAB)] for of_token in self.logprobs[request]])

    @property
    def mean_kept(self) -> float:
        """Tokens kept per decoding request and step."""
        return sum(s.kept for s in self.steps) / max(sum(s.step.decodes for s in self.steps), 1)


class TinyEngine:
    """One rank; weights are plain FP32, unless given, and the KV is kept in `storage`.

    `compressed_ids` of tokens, for n-grams, are made up, unless given.
    """

    def __init__(
        self,
        deployment: Deployment,
        weights: ModelWeights | None = None,
        storage: KVStorage = "fp32",
        rank: int = 0,
        dtype: torch.dtype = torch.float32,
        compressed_ids: torch.Tensor | None = None,
    ) -> None:
        model = deployment.model
        self.deployment = deployment
        weights = weights or dummy_weights(model, dtype=dtype, quantized=False)
        shape = replace(
            CacheShape.of(deployment, MAX_MODEL_LEN), storage=storage, num_blocks=deployment.budget.num_blocks
        )
        comm = Communicator(deployment.layout, rank, torch.device("cpu"))
        self.context = rank_context(
            deployment,
            weights,
            comm,
            KernelTable(),
            dtype,
            MAX_MODEL_LEN,
            token_map(model) if compressed_ids is None else compressed_ids,
            shape=shape,
        )
        self.builder = builder = StepBuilder(self.context)
        launcher = EagerLauncher(self.context, Executor(self.context, deployment.graph()), builder)
        self.engine = RankEngine(self.context, deployment, launcher, builder)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        hashes: Sequence[tuple[int, ...]] | None = None,
        concurrency: int | None = None,
        each: Sequence[Mapping[str, Any]] | None = None,
        eos: Collection[int] = (),
        on_delivery: Callable[[Delivery], None] | None = None,
        **params: Any,
    ) -> Served:
        """Generate from prompts of token ids; greedy unless told otherwise. `each` are parameters of one request only.

        Requests are sampled with their number as seed; `tracks` keeps them afterwards. Asserts that checkers heard what
        was delivered.
        """
        common = {"temperature": 0.0, "ignore_eos": not eos, "max_tokens": max_tokens, **params}
        self.tracks: dict[int, Track] = {}
        tracks, requests, checkers = self.tracks, [], []
        for i, prompt in enumerate(prompts):
            sampling = SamplingParams(**{**common, **(each[i] if each else {})})
            checkers.append(HeardChecker(sampling, eos))
            tracks[i] = Track(sampling, i, len(prompt), list(prompt), checkers[i])
            requests.append((0.0, Request(i, len(prompt), sampling.max_tokens, hashes[i] if hashes else ())))
        _, steps, counts = self.engine.serve(tracks, Inbox(requests, concurrency), None, on_delivery)
        for track, checker in zip(tracks.values(), checkers, strict=True):
            heard = checker.heard if track.stop is None else checker.heard[: len(track.generated)]
            assert heard == track.generated, "a checker was given other tokens than were delivered"
            assert track.finished
        return Served(
            [track.generated for track in tracks.values()],
            [track.logprobs for track in tracks.values()],
            steps,
            counts.num_hit_tokens,
            counts.num_preemptions,
        )


def exact_worker(context: RankPlace, payload: EnginePayload, channel: Channel) -> None:
    """The worker of engines of several ranks, with KV kept in FP32: no last bit of a sum tips a rounding of it."""
    with patch("backends.torch_runtime.state.kv_storage", lambda _: "fp32"):
        worker(context, payload, channel)


def token_map(model: ModelSpec) -> torch.Tensor | None:
    """Some map of tokens to compressed ids, many to one."""
    assert model.numerics is not None
    hashing = model.numerics.engram
    return torch.arange(model.vocab_size) % hashing.compressed_vocab if hashing else None


def tiny_model(**changed: Any) -> ModelSpec:
    """The tiny model with other text fields."""
    return parse_config(config_with(**changed), "tiny")


def undecided_weights(model: ModelSpec, seed: int = 5) -> ModelWeights:
    """Weights that find two tokens likely, one or the other, whatever came before: half of all drafts are right."""
    weights = dummy_weights(model, dtype=torch.float32, quantized=False, seed=seed)
    head = torch.zeros_like(weights.head)
    head[LIKELY[0]], head[LIKELY[1]] = 64 * weights.head[LIKELY[0]], -64 * weights.head[LIKELY[0]]
    return replace(weights, head=head)


def random_prompt(seed: int, length: int) -> list[int]:
    """Token ids above the special ones."""
    return np.random.default_rng(seed).integers(64, VOCAB, length).tolist()


@dataclass
class Decisions:
    """What a scheduler decided, step by step, as values that compare; what each request kept, round by round."""

    plans: list[tuple[Any, ...]] = field(default_factory=list)
    kept: dict[int, list[int]] = field(default_factory=dict)


@contextmanager
def recorded_decisions() -> Iterator[Decisions]:
    """The decisions that schedulers of this process make meanwhile, and the results they are given."""
    found = Decisions()
    schedule, commit = Scheduler.schedule, Scheduler.commit

    def recording_schedule(self: Scheduler) -> StepPlan | None:
        plan = schedule(self)
        if plan is not None:
            batch = plan.decode
            decode = (batch.request_ids.tolist(), batch.contexts.tolist(), batch.drafts)
            found.plans.append((plan.index, plan.prefill, decode, plan.new_blocks, plan.preempted))
        return plan

    def recording_commit(self: Scheduler, plan: StepPlan, result: StepResult) -> StepOutput:
        for request_id, kept in zip(plan.decode.request_ids.tolist(), result.decode_tokens.tolist(), strict=True):
            found.kept.setdefault(request_id, []).append(kept)
        self.check_integrity()
        return commit(self, plan, result)

    with patch.object(Scheduler, "schedule", recording_schedule), patch.object(Scheduler, "commit", recording_commit):
        yield found


class _ReplayedVerifier:
    """Answers in the simulator's verifier's place with what requests kept elsewhere, round by round."""

    def __init__(self, kept: Mapping[int, list[int]]) -> None:
        self._rest = {request_id: iter(rounds) for request_id, rounds in kept.items()}

    def results(self, plans: Sequence[StepPlan | None]) -> tuple[StepResult | None, ...]:
        return tuple(None if plan is None else self._result(plan.decode.request_ids) for plan in plans)

    def _result(self, request_ids: Ints) -> StepResult:
        return StepResult(np.asarray([next(self._rest[i]) for i in request_ids.tolist()], dtype=np.int64))


def simulated_decisions(
    deployment: Deployment, requests: Sequence[RequestSpec], kept: Mapping[int, list[int]]
) -> Decisions:
    """What `sim` decides in the same deployment, if requests keep what they kept elsewhere; all come at once."""
    mean = FixedLength(tokens=1)
    workload = Workload(isl=mean, osl=mean, arrivals=PoissonArrivals(rate=1.0), num_requests=len(requests))
    with patch("backends.sim.backend.Verifier", lambda *_: _ReplayedVerifier(kept)), recorded_decisions() as found:
        SimBackend(every_step=True).run([deployment], workload, Acceptance(rates=(0.0,), source="replayed"), requests)
    return found
