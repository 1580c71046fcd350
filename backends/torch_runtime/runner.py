"""The runner of the backends on torch: starts an engine's ranks, hands them requests, puts their answers together."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import chain
from typing import Any

import numpy as np

from backends.torch_runtime.assemble import check_runnable
from backends.torch_runtime.engine import CollectedStep
from backends.torch_runtime.launch import RankError, RankGroup
from backends.torch_runtime.serving import EnginePayload, ReplicaProgress, ReplicaResult, RequestEnd, ServeMessage
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import (
    AT_ONCE,
    EngineSource,
    GenerationOutput,
    GenerationRequest,
    GenerationRun,
    Pacing,
    Progress,
)
from deepinfer.errors import EngineLostError
from deepinfer.metrics.record import RunRecord, SubmittedStep
from deepinfer.model.folder import eos_token_ids

_WORKER = "backends.torch_runtime.serving:worker"


class TorchRunner:
    """An engine on local ranks, or on those that torchrun started. See `deepinfer.engine.runner.Runner`."""

    def __init__(self, deployment: Deployment, source: EngineSource, device: str) -> None:
        check_runnable(deployment)
        self._deployment = deployment
        self._eos = eos_token_ids(source.model)
        self._ranks = RankGroup(_WORKER, EnginePayload(deployment, source, device), deployment.layout.num_ranks)

    @property
    def speaks(self) -> bool:
        """Whether this process is the engine's own or, under torchrun, its rank 0."""
        return self._ranks.rank == 0

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Tokens that end a sequence."""
        return self._eos

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[Progress], None] | None = None,
        pacing: Pacing = AT_ONCE,
    ) -> GenerationRun:
        """Serve requests to their ends. Raises EngineLostError, with what they had produced, when a rank dies."""
        follower = _Follower(len(requests), progress)
        try:
            replies = self._ranks.call(ServeMessage(tuple(requests), pacing), follower)
        except RankError as error:
            raise lost(len(requests), error) from error
        return merged(self._deployment, len(requests), [r for r in replies if isinstance(r, ReplicaResult)])

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()


class _Follower:
    """Follows the reports of all replicas."""

    def __init__(self, num_requests: int, progress: Callable[[Progress], None] | None) -> None:
        self._total, self._progress = num_requests, progress
        self._start_s = time.perf_counter()
        self._finished: set[int] = set()
        self._tokens: dict[int, list[int]] = {}

    def __call__(self, report: Any) -> None:
        if not isinstance(report, ReplicaProgress):
            return
        self._finished.update(report.finished)
        for request_id, tokens in report.tokens.items():
            self._tokens.setdefault(request_id, []).extend(tokens)
        if self._progress is not None:
            count = sum(map(len, self._tokens.values()))
            self._progress(Progress(len(self._finished), self._total, count, time.perf_counter() - self._start_s))


def lost(num_requests: int, error: RankError) -> EngineLostError:
    """The error with what every request had produced, as far as the ranks had told."""
    finished: set[int] = set()
    tokens: dict[int, list[int]] = {}
    for report in chain.from_iterable(error.replies.values()):
        if isinstance(report, ReplicaResult):
            finished.update(i for i, end in report.ends.items() if end.reason != "aborted")
            tokens.update({i: list(end.token_ids) for i, end in report.ends.items()})
        elif isinstance(report, ReplicaProgress):
            finished.update(report.finished)
            for request_id, new in report.tokens.items():
                tokens.setdefault(request_id, []).extend(new)
    known = {i: tuple(tokens.get(i, ())) for i in range(num_requests)}
    return EngineLostError(
        str(error),
        {i: found for i, found in known.items() if i in finished},
        {i: found for i, found in known.items() if i not in finished},
    )


def merged(deployment: Deployment, num_requests: int, results: Sequence[ReplicaResult]) -> GenerationRun:
    """One run of what the replicas tell."""
    layout = deployment.layout
    record = RunRecord(num_requests, deployment.num_gpus, layout.num_ranks // layout.step_group)
    wall_s = record.window_end_s = max((result.wall_s for result in results), default=0.0)
    ends: dict[int, RequestEnd] = {}
    for result in results:
        ends |= result.ends
        record.num_preemptions += result.num_preemptions
        record.num_hit_tokens += result.num_hit_tokens
        record.num_prompt_tokens += result.num_prompt_tokens
        for request_id, at_s in result.let_in_s.items():
            record.arrival_s[request_id] = at_s
    record.refused += [i for i, end in ends.items() if end.reason == "ignored"]
    for delivery in sorted((d for r in results for d in r.deliveries), key=lambda d: d.at_s):
        record.deliver(delivery.request_ids, delivery.tokens, delivery.at_s)
        record.finish_s[list(delivery.finished)] = delivery.at_s
    for step in sorted(_group_steps(results), key=lambda s: s.at_s):
        record.steps.append(step.at_s, step.step, step.kept)
    outputs = tuple(_output(i, ends[i], record) for i in range(num_requests) if i in ends)
    return GenerationRun(outputs, record, wall_s)


def _output(request_id: int, end: RequestEnd, record: RunRecord) -> GenerationOutput:
    first, arrival = float(record.first_token_s[request_id]), float(record.arrival_s[request_id])
    last = max(float(record.finish_s[request_id]), float(record.last_token_s[request_id]))
    has_tokens = first >= 0
    return GenerationOutput(
        request_id,
        end.token_ids,
        end.reason,
        end.logprobs,
        first - arrival if has_tokens else 0.0,
        last if has_tokens else 0.0,
        end.stop_reason,
    )


def _group_steps(results: Iterable[ReplicaResult]) -> list[CollectedStep]:
    """Steps of each group of ranks once: its replicas' parts together, as long as the longest took."""
    groups: dict[int, list[list[CollectedStep]]] = {}
    for result in results:
        if result.steps:
            groups.setdefault(result.step_group, []).append(result.steps)
    return [_together(parts) for replicas in groups.values() for parts in zip(*replicas, strict=False)]


def _together(parts: Sequence[CollectedStep]) -> CollectedStep:
    columns = np.asarray([part.step for part in parts])
    seconds, end_s = columns[:, :2].max(0).tolist()
    decodes, rows, prompts, context = (int(total) for total in columns[:, 2:].sum(0))
    step = SubmittedStep(seconds, end_s, decodes, rows, prompts, context)
    return CollectedStep(max(part.at_s for part in parts), step, sum(part.kept for part in parts))
