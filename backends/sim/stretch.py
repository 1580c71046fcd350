"""A stretch of steps in which every replica rests, worked out at once: the same times that step by step would give.

One cycle of the engine loop is: poll for requests, submit a step, collect the oldest one in flight, deliver its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.metrics.record import SubmittedStep
from deepinfer.scheduler.step import Ints

Floats = npt.NDArray[np.float64]


@dataclass(frozen=True)
class StretchClock:
    """Where host and device stand at the first poll, what a cycle costs the host, and the step in flight, if one is."""

    now_s: float
    device_free_s: float
    oldest: SubmittedStep | None
    submit_s: float
    deliver_s: float
    gap_s: float


@dataclass(frozen=True)
class Stretch:
    """Cycles done, one entry each: the step submitted; the step collected, and when; the poll that follows its
    delivery.
    """

    submitted: list[SubmittedStep]
    collected: list[SubmittedStep]
    collected_s: list[float]
    polls_s: list[float]

    @property
    def num_steps(self) -> int:
        """Cycles of the stretch."""
        return len(self.polls_s)

    def cut(self, now_s: float) -> Stretch:
        """What was collected and delivered by then; the last collected step may not be delivered yet."""
        collected, delivered = (int(np.searchsorted(x, now_s, side="right")) for x in (self.collected_s, self.polls_s))
        return self._first(delivered, collected)

    def until(self, arrival_s: float) -> Stretch:
        """The stretch up to the first poll at which a request that arrives then is seen."""
        n = min(int(np.searchsorted(self.polls_s, arrival_s)) + 1, self.num_steps)
        return self._first(n, n)

    def _first(self, cycles: int, collected: int) -> Stretch:
        return Stretch(
            self.submitted[:cycles],
            self.collected[:collected],
            self.collected_s[:collected],
            self.polls_s[:cycles],
        )


def plan_stretch(clock: StretchClock, seconds: list[float], decodes: int, rows: int, contexts: Ints) -> Stretch:
    """Walk the engine loop's cycles with given device seconds and cached tokens of the submitted steps.

    Each step decodes the same `decodes` requests with `rows` rows in all.
    """
    now, free, oldest = clock.now_s, clock.device_free_s, clock.oldest
    submitted: list[SubmittedStep] = []
    collected: list[SubmittedStep] = []
    collected_s: list[float] = []
    polls_s: list[float] = []
    for step_s, context_tokens in zip(seconds, contexts.tolist(), strict=True):
        now += clock.submit_s
        free = max(now, free + clock.gap_s) + step_s
        step = SubmittedStep(step_s, free, decodes, rows, 0, context_tokens)
        submitted.append(step)
        done = step if oldest is None else oldest
        now = max(now, done.end_s)
        collected.append(done)
        collected_s.append(now)
        now += clock.deliver_s
        polls_s.append(now)
        oldest = None if oldest is None else step
    return Stretch(submitted, collected, collected_s, polls_s)
