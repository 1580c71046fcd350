"""What a run leaves behind: per request times and counts, per engine steps and rows. Filled by every backend."""

from __future__ import annotations

import math
from array import array
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np

from deepinfer.numeric import Floats, Ints


class RunRecord:
    """Events of one run of `num_requests` requests with ids from 0; times are seconds on the run's clock.

    Per request (arrays over ids): arrival, first token, last token and finish, -1 for what has not happened, and
    output tokens. A request that the run began amid has an unknown arrival (NaN), and its earlier tokens count. `steps`
    has a row per step of any engine. Counters cover the whole run; rates and percentiles are taken in the window.
    `step_groups` engines step independently; `num_gpus` is their part of the cluster, idle accelerators included.

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
        self._later_tokens: array[int] = array("q")  # of each delivery, without first tokens
        self._gap_at_s: array[float] = array("d")
        self._gap_s: array[float] = array("d")
        self._gap_requests: array[int] = array("q")
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0
        self.refused: list[int] = []
        self.prefill: PoolRecord | None = None
        self.transfers: TransferRecord | None = None

    def take_over(self, request_id: int, tokens: int, now: float) -> None:
        """Note a request that the run begins amid, and that joins it now: it has so many tokens, the last one now."""
        self.arrival_s[request_id] = math.nan
        self.first_token_s[request_id] = self.last_token_s[request_id] = now
        self.output_tokens[request_id] = tokens

    def date_back(self, request_ids: Ints, rounds: Ints) -> None:
        """Date the first tokens of requests that the run began amid, so many decoding rounds before they joined it.

        Those rounds, and the ones until the window, in which the run settled, are taken to have lasted as long as the
        window's do on average.
        """
        start_s, joined_s = self.window_start_s, self.first_token_s[request_ids]
        round_s, settling_s = self._mean_gap(start_s, self.window_end_s), self._mean_gap(-math.inf, start_s)
        stretched = round_s / settling_s if settling_s else 1.0
        self.first_token_s[request_ids] = (
            joined_s - np.maximum(start_s - joined_s, 0.0) * (stretched - 1.0) - rounds * round_s
        )

    def _mean_gap(self, start_s: float, end_s: float) -> float:
        gaps_s, counts, _ = self.gaps(start_s, end_s)
        return float((gaps_s * counts).sum() / max(counts.sum(), 1))

    def window_of_deliveries(self, start_s: float, end_s: float) -> None:
        """Measure from the last delivery before `start_s`, itself not included, to the last one before `end_s`.

        A window that cuts off a part of a long step is wrong by that part.
        """
        times = np.asarray(self.delivery_s)
        before, last = times[times <= start_s], times[times <= end_s]
        self.window_start_s = float(np.nextafter(before[-1], np.inf)) if len(before) else start_s
        self.window_end_s = float(last[-1]) if len(last) and last[-1] > self.window_start_s else end_s

    def deliver(self, request_ids: Ints, tokens: Ints, now: float, others: EvenDelivery | None = None) -> None:
        """Note a delivery at `now`: requests that got tokens (each id once), and `others` that are noted later."""
        later_tokens = total = int(tokens.sum())
        if len(request_ids):
            later_tokens -= self._note_gaps(request_ids, tokens, now)
            self.last_token_s[request_ids] = now
            self.output_tokens[request_ids] += tokens
        if others is not None:
            self._note_gap(now, others.gap_s, others.num_requests)
            later_tokens, total = later_tokens + others.tokens, total + others.tokens
        self.delivery_s.append(now)
        self.delivery_tokens.append(total)
        self._later_tokens.append(later_tokens)

    def deliver_evenly(self, num_requests: int, tokens: Ints, times: Floats, before_s: float) -> None:
        """Note deliveries to so many requests, at each of `times` and, before those, at `before_s`."""
        self.delivery_s.frombytes(times.tobytes())
        self.delivery_tokens.frombytes(tokens.tobytes())
        self._later_tokens.frombytes(tokens.tobytes())
        self._gap_at_s.frombytes(times.tobytes())
        self._gap_s.frombytes(np.diff(times, prepend=before_s).tobytes())
        self._gap_requests.extend([num_requests] * len(times))

    def note_later(self, request_ids: Ints, tokens: Ints, last_s: float) -> None:
        """Note what requests got in deliveries up to `last_s` that counted them among others."""
        self.last_token_s[request_ids] = last_s
        self.output_tokens[request_ids] += tokens

    def gaps(self, start_s: float = -math.inf, end_s: float = math.inf) -> tuple[Floats, Ints, int]:
        """Seconds between two deliveries to a request, how many requests waited so long, and all tokens delivered.

        Over deliveries in the range, a request's first token left out. One token of each delivery to a request has its
        gap as inter-token latency, the others of the same step have 0.
        """
        at_s, times = np.asarray(self._gap_at_s), np.asarray(self.delivery_s)
        inside = (at_s >= start_s) & (at_s <= end_s)
        tokens = np.asarray(self._later_tokens)[(times >= start_s) & (times <= end_s)]
        return np.asarray(self._gap_s)[inside], np.asarray(self._gap_requests)[inside], int(tokens.sum())

    def _note_gaps(self, request_ids: Ints, tokens: Ints, now: float) -> int:
        """Note how long requests have waited; returns the tokens of those that had none before."""
        last = self.last_token_s[request_ids]
        latest = float(last.max())
        alike = last == latest  # nearly always all of them
        num_alike = int(np.count_nonzero(alike))
        if latest >= 0:
            self._note_gap(now, now - latest, num_alike)
            if num_alike == len(last):
                return 0
        first = last < 0
        for since in last[~(alike | first)].tolist():
            self._note_gap(now, now - since, 1)
        self.first_token_s[request_ids[first]] = now
        return int(tokens[first].sum())

    def _note_gap(self, now: float, seconds: float, num_requests: int) -> None:
        self._gap_at_s.append(now)
        self._gap_s.append(seconds)
        self._gap_requests.append(num_requests)


class EvenDelivery(NamedTuple):
    """A delivery to requests that all had their last one `gap_s` ago."""

    num_requests: int
    tokens: int
    gap_s: float


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
    """A step on the device: its seconds there and when it ends; its decoding requests, their rows, its prompt rows, and
    the cached tokens of its decoding requests.
    """

    seconds: float
    end_s: float
    decodes: int
    decode_rows: int
    prefill_rows: int
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

    def append(self, collected_s: float, step: SubmittedStep, kept_tokens: int) -> None:
        """Note a step, when it was collected, and the tokens it kept."""
        self.end_s.append(collected_s)
        self.seconds.append(step.seconds)
        self.decodes.append(step.decodes)
        self.decode_rows.append(step.decode_rows)
        self.prefill_rows.append(step.prefill_rows)
        self.context_tokens.append(step.context_tokens)
        self.kept_tokens.append(kept_tokens)

    def extend(
        self, collected_s: Floats, seconds: Floats, decodes: int, decode_rows: int, context_tokens: Ints, kept: Ints
    ) -> None:
        """Note steps that decode as many requests each: arrays with an entry per step."""
        num_steps = len(collected_s)
        self.end_s.frombytes(collected_s.tobytes())
        self.seconds.frombytes(seconds.tobytes())
        self.decodes.extend([decodes] * num_steps)
        self.decode_rows.extend([decode_rows] * num_steps)
        self.prefill_rows.extend([0] * num_steps)
        self.context_tokens.frombytes(context_tokens.tobytes())
        self.kept_tokens.frombytes(kept.tobytes())
