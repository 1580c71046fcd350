"""What a run leaves behind: per request times and counts, per engine steps and rows. Filled by every backend."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from deepinfer.scheduler.step import DecodeBatch, Ints, StepPlan

Floats = npt.NDArray[np.float64]


class RunRecord:
    """Events of one run of `num_requests` requests with ids from 0; times are seconds on the run's clock.

    Per request (arrays over ids): arrival, first token, last token and finish, -1 for what has not happened, and
    output tokens. `steps` has a row per step of any engine. Counters
    cover the whole run; rates and percentiles are taken in the window. `step_groups` engines step independently;
    `num_gpus` is their part of the cluster, idle accelerators included.

    Where one pool prefills for another, `steps` and `step_groups` are those of the pool that decodes, `prefill` has
    those of the other, and `transfers` what went between them; `num_gpus` counts both.
    """

    def __init__(self, num_requests: int, num_gpus: float, step_groups: int) -> None:
        self.num_gpus, self.step_groups = num_gpus, step_groups
        self.window_start_s = 0.0
        self.window_end_s = 0.0
        self.arrival_s: Floats = np.full(num_requests, -1.0)
        self.first_token_s: Floats = np.full(num_requests, -1.0)
        self.last_token_s: Floats = np.full(num_requests, -1.0)
        self.finish_s: Floats = np.full(num_requests, -1.0)
        self.output_tokens: Ints = np.zeros(num_requests, dtype=np.int64)
        self.steps = StepColumns()
        self.delivery_s: array[float] = array("d")
        self.delivery_tokens: array[int] = array("q")
        self._intervals: list[tuple[float, Floats, Ints, int]] = []
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.refused: list[int] = []
        self.prefill: PoolRecord | None = None
        self.transfers: TransferRecord | None = None

    def deliver(self, request_ids: Ints, tokens: Ints, now: float) -> None:
        """Note that requests got new tokens at `now`; each id occurs once."""
        last = self.last_token_s[request_ids]
        later = last >= 0
        if not later.all():
            self.first_token_s[request_ids[~later]] = now
        gaps = now - last[later]
        self._intervals.append((now, gaps, np.ones(len(gaps), dtype=np.int64), int(tokens[later].sum())))
        self.last_token_s[request_ids] = now
        self.output_tokens[request_ids] += tokens
        self.delivery_s.append(now)
        self.delivery_tokens.append(int(tokens.sum()))

    def deliver_stretch(self, request_ids: Ints, tokens: Ints, times: Floats) -> None:
        """Note that the same requests got tokens at each of `times`: `tokens` has a row per time, a column per id."""
        self.deliver(request_ids, tokens[0], float(times[0]))
        everyone = np.asarray([len(request_ids)], dtype=np.int64)
        for before, now, row in zip(times[:-1], times[1:], tokens[1:].sum(axis=1), strict=True):
            self._intervals.append((float(now), np.asarray([now - before]), everyone, int(row)))
        self.last_token_s[request_ids] = times[-1]
        self.output_tokens[request_ids] += tokens[1:].sum(axis=0)
        self.delivery_s.extend(times[1:])
        self.delivery_tokens.extend(tokens[1:].sum(axis=1))

    def gaps(self, start_s: float = -math.inf, end_s: float = math.inf) -> tuple[Floats, Ints, int]:
        """Seconds between two deliveries to a request, how many requests waited so long, and all tokens delivered.

        Over deliveries in the range, a request's first token left out. One token of each delivery to a request has its
        gap as inter-token latency, the others of the same step have 0.
        """
        inside = [x for x in self._intervals if start_s <= x[0] <= end_s]
        seconds = [np.zeros(0), *(x[1] for x in inside)]
        counts = [np.zeros(0, dtype=np.int64), *(x[2] for x in inside)]
        return np.concatenate(seconds), np.concatenate(counts), sum(x[3] for x in inside)


class PoolRecord:
    """Steps of the engines of one pool, which step in `step_groups` groups on `num_gpus` accelerators."""

    def __init__(self, num_gpus: float, step_groups: int) -> None:
        self.num_gpus, self.step_groups = num_gpus, step_groups
        self.steps = StepColumns()


class TransferRecord:
    """Transfers of KV between two pools, in order of their ends: end, seconds from request to end, bytes moved."""

    def __init__(self) -> None:
        self.end_s: array[float] = array("d")
        self.seconds: array[float] = array("d")
        self.num_bytes: array[float] = array("d")

    def append(self, end_s: float, seconds: float, num_bytes: float) -> None:
        """Note a transfer."""
        self.end_s.append(end_s)
        self.seconds.append(seconds)
        self.num_bytes.append(num_bytes)


class SubmittedStep(NamedTuple):
    """A step on the device: its seconds there, when it ends, and the cached tokens of its decoding requests."""

    seconds: float
    end_s: float
    context_tokens: int


@dataclass(slots=True)
class StepColumns:
    """One entry per step of any engine, in order of their ends: its seconds on the device, its decoding requests, their
    rows, their cached tokens and the tokens they kept, and its prompt rows.
    """

    end_s: array[float] = field(default_factory=lambda: array("d"))
    decodes: array[int] = field(default_factory=lambda: array("q"))
    decode_rows: array[int] = field(default_factory=lambda: array("q"))
    prefill_rows: array[int] = field(default_factory=lambda: array("q"))
    context_tokens: array[int] = field(default_factory=lambda: array("q"))
    kept_tokens: array[int] = field(default_factory=lambda: array("q"))
    seconds: array[float] = field(default_factory=lambda: array("d"))

    def append(
        self, end_s: float, seconds: float, plans: Sequence[StepPlan], context_tokens: int, kept_tokens: int
    ) -> None:
        """Note a step of the replicas with these plans: its end, its seconds on the device, cached and kept tokens."""
        self.end_s.append(end_s)
        self.seconds.append(seconds)
        self.decodes.append(sum(len(plan.decode) for plan in plans))
        self.decode_rows.append(sum(plan.decode.num_rows for plan in plans))
        self.prefill_rows.append(sum(chunk.rows for plan in plans for chunk in plan.prefill))
        self.context_tokens.append(context_tokens)
        self.kept_tokens.append(kept_tokens)

    def append_stretch(
        self, ends_s: Floats, steps: Sequence[SubmittedStep], batches: Sequence[DecodeBatch], kept: Ints
    ) -> None:
        """Note steps that decode the same batches: when each was collected, and the tokens each kept."""
        num_steps = len(steps)
        self.end_s.extend(ends_s)
        self.seconds.extend(step.seconds for step in steps)
        self.decodes.extend([sum(len(batch) for batch in batches)] * num_steps)
        self.decode_rows.extend([sum(batch.num_rows for batch in batches)] * num_steps)
        self.prefill_rows.extend([0] * num_steps)
        self.context_tokens.extend(step.context_tokens for step in steps)
        self.kept_tokens.extend(kept)
