"""What a run leaves behind: per request times and counts, per engine steps and rows. Filled by every backend."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from deepinfer.scheduler.step import Ints, StepPlan

Floats = npt.NDArray[np.float64]


class RunRecord:
    """Events of one run of `num_requests` requests with ids from 0; times are seconds on the run's clock.

    Per request (arrays over ids): arrival, first token, last token and finish, -1 for what has not happened, and
    output tokens. `steps` has a row per step of any engine. Counters
    cover the whole run; rates and percentiles are taken in the window. `step_groups` engines step independently;
    `num_gpus` is their part of the cluster, idle accelerators included.
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
        self._gaps: list[Floats] = []
        self._gap_tokens: list[Ints] = []
        self._gaps_s: list[float] = []
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.refused: list[int] = []

    def deliver(self, request_ids: Ints, tokens: Ints, now: float) -> None:
        """Note that requests got new tokens at `now`; each id occurs once."""
        last = self.last_token_s[request_ids]
        later = last >= 0
        self._gaps_s.append(now)
        if later.all():
            self._gaps.append(now - last)
            self._gap_tokens.append(tokens)
        else:
            self.first_token_s[request_ids[~later]] = now
            self._gaps.append(now - last[later])
            self._gap_tokens.append(tokens[later])
        self.last_token_s[request_ids] = now
        self.output_tokens[request_ids] += tokens

    def gaps(self, start_s: float = -math.inf, end_s: float = math.inf) -> tuple[Floats, Ints]:
        """Seconds between two deliveries to a request, and the tokens delivered at the second, which is in the range.

        The first of those tokens has this inter-token latency, the others of the same step have 0.
        """
        inside = [i for i, now in enumerate(self._gaps_s) if start_s <= now <= end_s]
        if not inside:
            return np.zeros(0), np.zeros(0, dtype=np.int64)
        return np.concatenate([self._gaps[i] for i in inside]), np.concatenate([self._gap_tokens[i] for i in inside])


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

    def append(self, end_s: float, seconds: float, plans: Sequence[StepPlan], kept_tokens: int) -> None:
        """Note a step of the replicas with these plans, its seconds on the device, and the tokens it kept."""
        self.end_s.append(end_s)
        self.seconds.append(seconds)
        self.decodes.append(sum(len(plan.decode) for plan in plans))
        self.decode_rows.append(sum(plan.decode.num_rows for plan in plans))
        self.prefill_rows.append(sum(chunk.rows for plan in plans for chunk in plan.prefill))
        self.context_tokens.append(sum(int(plan.decode.contexts.sum()) for plan in plans))
        self.kept_tokens.append(kept_tokens)
