"""Latency against throughput of one engine, without a search: the closed form of a step, over arrays.

The steps are those that the search screens with and the simulator takes time for: the same graph, cost model and host
profile. What binds a step is found by asking again with each resource a little worse.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import numpy.typing as npt

from deepinfer.engine.deployment import fit_to_hardware
from deepinfer.errors import InfeasibleError, UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.host import load_host
from deepinfer.hardware.spec import Accelerator, ClusterSpec, load_hardware
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.hf import load_model
from deepinfer.model.spec import ModelSpec
from deepinfer.numeric import Floats
from deepinfer.scheduler.speculation import Acceptance, default_acceptance
from planner.binding import Engine, bound_by, shares
from planner.space import MoEKernel, Overlap, Replay, SearchSpace

Bools = npt.NDArray[np.bool_]
Numbers = Sequence[float] | Floats


@dataclass(frozen=True)
class DecodeCurve:
    """Steps that only decode, one for each of `requests_per_gpu`; all arrays are parallel to it.

    `step_s` is from step to step, host and idle device included. The throughputs are three different things:
    `steps_per_s` of the engine; `full_acceptance_tokens_per_s_per_gpu` as if every draft were kept (DeepInfer's
    benchmark convention, an upper bound); `output_tokens_per_s_per_gpu`, what users receive when a step keeps `tau`
    tokens a request. `tokens_per_s_per_user` is one request's share of it, without prompts in between.

    `fits` says whether weights, workspace and the KV of so many requests fit in memory. `shares[resource]` is the part
    of the step that this resource accounts for: by how many percent the step gets longer when it gets 1% worse. They
    add up to about 1; `bound_by` names the largest.
    """

    requests_per_gpu: Floats
    step_s: Floats
    steps_per_s: Floats
    full_acceptance_tokens_per_s_per_gpu: Floats
    output_tokens_per_s_per_gpu: Floats
    tokens_per_s_per_user: Floats
    fits: Bools
    shares: dict[str, Floats]
    tau: float

    @property
    def bound_by(self) -> list[str]:
        """The resource that each step spends most of its time on."""
        return bound_by(self.shares)


@dataclass(frozen=True)
class PrefillCurve:
    """Prompts of `prompt_tokens` computed on every attention replica, and nothing else; arrays parallel to it.

    `latency_s` is what a prompt takes that finds the engine idle, from its launch to its first token.
    `input_tokens_per_s_per_gpu` counts computed tokens when steps follow each other. `shares` and `bound_by` are as in
    `DecodeCurve`.
    """

    prompt_tokens: Floats
    latency_s: Floats
    input_tokens_per_s_per_gpu: Floats
    shares: dict[str, Floats]

    @property
    def bound_by(self) -> list[str]:
        """The resource that each prompt spends most of its time on."""
        return bound_by(self.shares)


def decode_curve(
    model: str | ModelSpec = "deepseek-v4.1-flash",
    hardware: str | Accelerator = "gb200-nvl72",
    *,
    layout: ParallelLayout,
    requests_per_gpu: Numbers,
    context: float,
    nextn: int = 0,
    acceptance: Acceptance | float | None = None,
    overlap: Overlap = "none",
    moe: MoEKernel | None = None,
    kv_format: str | None = None,
    expert_load: ExpertLoad = TYPICAL_LOAD,
) -> DecodeCurve:
    """Decode of one engine of `layout` with so many requests a GPU, each with `context` tokens in its KV cache.

    `acceptance` is the chance that a draft is accepted when those before it were, or an `Acceptance` with its
    convention; by default what is published for the model. `moe` is "fused" where there is a kernel, unless given.

    Raises UsageError for what does not fit together; what does not fit in memory is marked in `fits`.
    """
    asked = _positive("requests_per_gpu", requests_per_gpu)
    _positive("context", [context])
    features = GraphFeatures("decode", "off", nextn, overlap, expert_load=expert_load)
    engine = _engine(model, hardware, layout, features, moe, kv_format)
    accepted = _acceptance(engine.model, acceptance)
    tau = accepted.tau(nextn)
    requests, rows = asked * layout.replica_ranks, 1.0 + nextn
    step = EngineSettings().graph_rows  # captured graphs are padded to whole multiples
    padded = np.ceil(requests * rows / step) * step / rows
    alike = Sequences.decoding(padded, float(nextn), np.full_like(padded, context))
    shape = StepShape(alike, (), requests * rows, requests * rows)  # padding has no experts to go to
    seconds = engine.seconds(shape, requests, captured=True)
    return DecodeCurve(
        requests_per_gpu=asked,
        step_s=seconds,
        steps_per_s=1.0 / seconds,
        full_acceptance_tokens_per_s_per_gpu=asked * (1.0 + nextn) / seconds,
        output_tokens_per_s_per_gpu=asked * tau / seconds,
        tokens_per_s_per_user=tau / seconds,
        fits=np.asarray([_fits(engine, int(np.ceil(r)), nextn, context) for r in requests]),
        shares=shares(engine, lambda changed: changed.seconds(shape, requests, captured=True)),
        tau=tau,
    )


def prefill_curve(
    model: str | ModelSpec = "deepseek-v4.1-flash",
    hardware: str | Accelerator = "gb200-nvl72",
    *,
    layout: ParallelLayout,
    prompt_tokens: Numbers,
    prompts: float = 1.0,
    cached_tokens: float = 0.0,
    chunk_rows_per_gpu: float | None = None,
    replay: Replay | None = None,
    overlap: Overlap = "none",
    moe: MoEKernel | None = None,
    kv_format: str | None = None,
    expert_load: ExpertLoad = TYPICAL_LOAD,
) -> PrefillCurve:
    """Prefill on one engine of `layout`: `prompts` together on each attention replica, all replicas at once.

    `prompt_tokens` are to be computed, `cached_tokens` before them are not. Steps have at most `chunk_rows_per_gpu`
    rows (None: a prompt is one step). `replay` is what bounded layers skip of a prompt: "compact" where the model
    supports it, unless given. Raises UsageError for what does not fit together.
    """
    tokens = _positive("prompt_tokens", prompt_tokens)
    chunk = np.inf if chunk_rows_per_gpu is None else float(_positive("chunk_rows_per_gpu", [chunk_rows_per_gpu])[0])
    _positive("prompts", [prompts])
    known = _model(model, hardware, kv_format)
    mode: Replay = replay or ("compact" if known.supports_compact_replay else "off")
    features = GraphFeatures("prefill", mode, 0, overlap, expert_load=expert_load)
    engine = _engine(model, hardware, layout, features, moe, kv_format)
    counts = np.ceil(prompts * tokens / (chunk * layout.replica_ranks)).astype(np.int64)
    counts = np.maximum(counts, 1)
    first = np.concatenate(([0], np.cumsum(counts)[:-1]))
    number = np.arange(counts.sum()) - np.repeat(first, counts)  # of a chunk within its prompt
    each = np.repeat(tokens / counts, counts)
    last = number == np.repeat(counts, counts) - 1
    kept = each
    if mode == "compact":  # only a prompt's last rows pass the bounded layers; before the last chunk one placeholder
        kept = np.minimum(each, np.where(last, EngineSettings().keep_tokens, 1.0))
    alike = Sequences(np.full_like(each, prompts), each, cached_tokens + number * each, kept, last.astype(np.float64))
    shape, requests = StepShape(prefill=(alike,)), np.full_like(each, prompts)

    def seconds(changed: Engine) -> Floats:
        total: Floats = np.add.reduceat(changed.seconds(shape, requests, captured=False), first)
        return total

    steps_s = seconds(engine)
    return PrefillCurve(
        prompt_tokens=tokens,
        latency_s=engine.launch_seconds(prompts) + steps_s,
        input_tokens_per_s_per_gpu=prompts * tokens / steps_s / layout.replica_ranks,
        shares=shares(engine, seconds),
    )


def _engine(
    model: str | ModelSpec,
    hardware: str | Accelerator,
    layout: ParallelLayout,
    features: GraphFeatures,
    moe: MoEKernel | None,
    kv_format: str | None,
) -> Engine:
    accelerator = load_hardware(hardware) if isinstance(hardware, str) else hardware
    fitted = _model(model, accelerator, kv_format)
    cluster = ClusterSpec(accelerator, layout.num_ranks)
    if moe is None:
        can = SearchSpace(fitted, cluster).can_fuse(layout) and features.overlap == "none"
        moe = "fused" if can else "separate"
    graph = build_graph(fitted, layout, cluster, replace(features, moe=moe))
    return Engine(fitted, accelerator, layout, graph, load_host())


def _model(model: str | ModelSpec, hardware: str | Accelerator, kv_format: str | None) -> ModelSpec:
    accelerator = load_hardware(hardware) if isinstance(hardware, str) else hardware
    return fit_to_hardware(load_model(model) if isinstance(model, str) else model, accelerator, kv_format)


def _acceptance(model: ModelSpec, given: Acceptance | float | None) -> Acceptance:
    if isinstance(given, Acceptance):
        return given
    if given is None:
        return default_acceptance(model.family, model.draft.kind if model.draft else None)
    if not 0 <= given <= 1:
        raise UsageError(f"acceptance must lie between 0 and 1, got {given}")
    return Acceptance(rates=(given,), source="given, one conditional rate")


def _positive(name: str, values: Numbers) -> Floats:
    array: Floats = np.atleast_1d(np.asarray(values, dtype=np.float64))
    if array.ndim != 1 or not array.size or not np.all(np.isfinite(array) & (array > 0)):
        raise UsageError(f"{name} must be positive numbers, got {values}")
    return array


def _fits(engine: Engine, requests: int, nextn: int, context: float) -> bool:
    """Whether a replica holds so many requests at that context, as a decode engine without prompts."""
    settings = EngineSettings(max_num_seqs=requests, max_tokens_per_step=requests * (1 + nextn), nextn=nextn)
    try:
        budget = memory_budget(engine.model, engine.layout, engine.accelerator, settings)
    except InfeasibleError:
        return False
    return budget.max_requests(context + nextn + 1, settings.block_tokens) >= requests
