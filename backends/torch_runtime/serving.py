"""What every rank of an engine does: load its part, serve the requests of its replica, answer what came of them."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from backends.torch_runtime.assemble import rank_context
from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.devices import device_kind
from backends.torch_runtime.engine import CollectedStep, Delivery, Inbox, RankEngine
from backends.torch_runtime.engram import compressed_token_map, made_up_token_map
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.inputs import Track
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.steps import StepBuilder
from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.load import load_weights
from backends.torch_runtime.weights.rank import ModelWeights, RankPart
from backends.torch_runtime.worker import Channel, RankPlace
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import EngineSource, FinishReason, GenerationRequest, Pacing, stop_checkers
from deepinfer.errors import UsageError
from deepinfer.model.folder import eos_token_ids, model_folder, tokenizer_file
from deepinfer.scheduler.request import Request

_REPORT_EVERY_S = 0.1


@dataclass(frozen=True)
class EnginePayload:
    """What a rank is started with. `device` names a `DeviceKind`."""

    deployment: Deployment
    source: EngineSource
    device: str


@dataclass(frozen=True)
class ServeMessage:
    """Requests to serve, by place; all ranks get all of them."""

    requests: tuple[GenerationRequest, ...]
    pacing: Pacing


@dataclass(frozen=True)
class ReplicaProgress:
    """What a replica has done since its last report: new tokens of requests, and who finished."""

    tokens: dict[int, list[int]]
    finished: tuple[int, ...]


@dataclass(frozen=True)
class RequestEnd:
    """How a request ended, with its tokens."""

    token_ids: tuple[int, ...]
    reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[Mapping[int, float], ...] | None


@dataclass(frozen=True)
class ReplicaResult:
    """What one rank tells of a run; requests only from the first rank of a replica, steps only from those too."""

    step_group: int
    wall_s: float
    ends: dict[int, RequestEnd] = field(default_factory=dict)
    let_in_s: dict[int, float] = field(default_factory=dict)
    deliveries: list[Delivery] = field(default_factory=list)
    steps: list[CollectedStep] = field(default_factory=list)
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_prompt_tokens: int = 0


def worker(context: RankPlace, payload: EnginePayload, channel: Channel) -> None:
    """Load this rank's part of the engine, then serve message after message."""
    rank = _Rank(context, payload)
    for message in channel:
        channel.reply(rank.serve(message, channel))


class _Rank:
    def __init__(self, context: RankPlace, payload: EnginePayload) -> None:
        deployment, source = payload.deployment, payload.source
        self._deployment, self._source, self._number = deployment, source, context.rank
        kind = device_kind(payload.device)
        device = kind.take(context.device_index)
        numerics = deployment.model.numerics
        tables = numerics is not None and numerics.engram is not None
        self._comm = comm = Communicator(deployment.layout, context.rank, device, lockstep=tables)
        dtype = kind.dtype if source.dtype == "auto" else getattr(torch, source.dtype)
        token_map = _token_map(deployment, source)  # says what is wrong with a tokenizer before weights are read
        kernels = kind.kernels(dtype)
        weights = _weights(deployment, source, comm, dtype, kernels)
        rank = rank_context(deployment, weights, comm, kernels, dtype, source.max_model_len, token_map)
        builder = StepBuilder(rank)
        executor = Executor(rank, deployment.graph())
        self._engine = RankEngine(rank, deployment, kind.launcher(rank, executor, builder, deployment), builder)
        self._checkers = stop_checkers(source, eos_token_ids(source.model))

    def serve(self, message: ServeMessage, channel: Channel) -> ReplicaResult:
        """Serve the requests of this rank's replica."""
        layout, place = self._deployment.layout, self._comm.replica.place
        replicas = layout.num_ranks // layout.replica_ranks
        replica = self._number // layout.replica_ranks
        concurrency = message.pacing.concurrency
        serving = min(replicas, concurrency or replicas)  # a replica without a place would never finish
        mine = {i: r for i, r in enumerate(message.requests) if i % serving == replica}
        wanted = {i: _engine_request(i, r, self._deployment.settings.block_tokens) for i, r in mine.items()}
        fitting = {i: request for i, request in wanted.items() if self._engine.scheduler.fits(request)}
        tracks = {i: self._track(mine[i]) for i in fitting}
        share = None if concurrency is None else concurrency // serving + (replica < concurrency % serving)
        inbox = Inbox([(mine[i].arrival_s, request) for i, request in fitting.items()], share)
        report = _Reporter(channel, tracks) if place == 0 else None
        self._comm.agree_max(0)  # start together
        deliveries, steps, counts = self._engine.serve(tracks, inbox, message.pacing.stop_s, report)
        if report is not None:
            report.flush()
        ends_s = [step.at_s for step in steps[-1:]] + [delivery.at_s for delivery in deliveries[-1:]]
        wall_s = max(ends_s, default=0.0)
        group = self._number // layout.step_group
        if place:
            return ReplicaResult(group, wall_s)
        ends = {i: _end(tracks[i]) for i in fitting}
        tokens = self._deployment.settings.block_tokens * self._engine.scheduler.config.num_blocks
        ends |= {i: _ignored(mine[i], tokens) for i in wanted.keys() - fitting.keys()}
        return ReplicaResult(
            group,
            wall_s,
            ends,
            inbox.let_in_s,
            deliveries,
            steps,
            *counts,
        )

    def _track(self, request: GenerationRequest) -> Track:
        params, prompt = request.params, list(request.prompt_token_ids)
        return Track(params, params.seed or 0, len(prompt), prompt, self._checkers(params))


class _Reporter:
    """Sends what was delivered, some times a second."""

    def __init__(self, channel: Channel, tracks: Mapping[int, Track]) -> None:
        self._channel, self._tracks = channel, tracks
        self._sent: dict[int, int] = {}
        self._changed: set[int] = set()
        self._finished: list[int] = []
        self._last_s = time.perf_counter()

    def __call__(self, delivery: Delivery) -> None:
        self._changed.update(delivery.request_ids.tolist())
        self._finished += delivery.finished
        now = time.perf_counter()
        if now - self._last_s < _REPORT_EVERY_S:
            return
        self._last_s = now
        self.flush()

    def flush(self) -> None:
        """Send what has not been sent."""
        tokens = {i: self._tracks[i].generated[self._sent.get(i, 0) :] for i in sorted(self._changed)}
        for i, new in tokens.items():
            self._sent[i] = self._sent.get(i, 0) + len(new)
        self._channel.progress(ReplicaProgress(tokens, tuple(self._finished)))
        self._changed, self._finished = set(), []


def _weights(
    deployment: Deployment, source: EngineSource, comm: Communicator, dtype: torch.dtype, kernels: KernelTable
) -> ModelWeights:
    layout, model = deployment.layout, deployment.model
    part = RankPart(comm.expert.place, layout.ep, comm.rank, layout.num_ranks)
    if source.load_format == "dummy":
        return dummy_weights(model, part, comm.device, dtype, source.seed, arranged=kernels.arranged)
    folder = model_folder(source.model)
    if folder is None:
        raise UsageError(f"{source.model} is a model card without weights")
    return load_weights(Path(folder), model, part, comm.device, dtype, arranged=kernels.arranged)


def _token_map(deployment: Deployment, source: EngineSource) -> torch.Tensor | None:
    numerics = deployment.model.numerics
    if numerics is None or numerics.engram is None:
        return None
    path = tokenizer_file(source.model)
    if path is not None:
        return compressed_token_map(path, numerics.engram, deployment.model.vocab_size)
    return made_up_token_map(numerics.engram, deployment.model.vocab_size) if source.load_format == "dummy" else None


def _engine_request(number: int, request: GenerationRequest, block_tokens: int) -> Request:
    hashes = block_hashes(request.prompt_token_ids, block_tokens)
    length = len(request.prompt_token_ids)
    return Request(number, length, request.params.max_tokens, hashes, request.arrival_s)


def block_hashes(tokens: Sequence[int], block_tokens: int) -> tuple[int, ...]:
    """A hash of each full block of tokens and all before it."""
    found, last = [], b""
    for start in range(0, len(tokens) - block_tokens + 1, block_tokens):
        text = ",".join(map(str, tokens[start : start + block_tokens])).encode()
        last = hashlib.blake2b(last + text, digest_size=8).digest()
        found.append(int.from_bytes(last, "big"))
    return tuple(found)


def _end(track: Track) -> RequestEnd:
    reason: FinishReason = "length"
    cause: str | int | None = None
    if track.stop is not None:
        reason, cause = "stop", track.stop.cause
    elif not track.finished:
        reason, cause = "aborted", "the run ended first"
    logprobs = tuple(track.logprobs) if track.params.logprobs is not None else None
    return RequestEnd(tuple(track.generated), reason, cause, logprobs)


def _ignored(request: GenerationRequest, tokens: int) -> RequestEnd:
    length = len(request.prompt_token_ids)
    sentence = f"{length} prompt and up to {request.params.max_tokens} output tokens exceed the KV memory of {tokens}"
    return RequestEnd((), "ignored", sentence, None)
