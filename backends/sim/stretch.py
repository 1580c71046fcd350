"""A stretch of steps in which every replica rests, worked out at once: the same times that step by step would give.

One cycle of the engine loop is: poll for requests, submit a step, collect the oldest one in flight, deliver its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from deepinfer.metrics.record import SubmittedStep
from deepinfer.numeric import Floats, Ints


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
    """Cycles done, one entry each: seconds, end and cached tokens of the step submitted; when one was collected; the
    poll that follows its delivery. The steps collected are the `oldest`, if there is one, and then the submitted ones.
    """

    oldest: SubmittedStep | None
    seconds: Floats
    ends_s: Floats
    contexts: Ints
    collected_s: Floats
    polls_s: Floats

    @property
    def num_steps(self) -> int:
        """Cycles of the stretch."""
        return len(self.polls_s)

    def cut(self, now_s: float) -> Stretch:
        """What was collected and delivered by then; the last collected step may not be delivered yet."""
        collected, delivered = (int(x.searchsorted(now_s, side="right")) for x in (self.collected_s, self.polls_s))
        return self._first(delivered, collected)

    def until(self, arrival_s: float) -> Stretch:
        """The stretch up to the first poll at which a request that arrives then is seen."""
        n = min(int(self.polls_s.searchsorted(arrival_s)) + 1, self.num_steps)
        return self._first(n, n)

    def collected(self) -> tuple[Floats, Ints]:
        """Seconds and cached tokens of the collected steps."""
        n = len(self.collected_s)
        if self.oldest is None:
            return self.seconds[:n], self.contexts[:n]
        seconds = np.concatenate(([self.oldest.seconds], self.seconds))[:n]
        return seconds, np.concatenate(([self.oldest.context_tokens], self.contexts))[:n]

    def _first(self, cycles: int, collected: int) -> Stretch:
        return replace(self, collected_s=self.collected_s[:collected], polls_s=self.polls_s[:cycles])


def plan_stretch(clock: StretchClock, seconds: Floats, contexts: Ints) -> Stretch:
    """The engine loop's cycles with given device seconds and cached tokens of the submitted steps."""
    oldest = clock.oldest
    times = _device_bound(clock, seconds) if oldest is not None else _synchronous(clock, seconds)
    ends_s, collected_s = _walk(clock, seconds) if times is None else times
    return Stretch(oldest, seconds, ends_s, contexts, collected_s, collected_s + clock.deliver_s)


def _first_end(clock: StretchClock, seconds: Floats) -> float:
    return max(clock.now_s + clock.submit_s, clock.device_free_s + clock.gap_s) + float(seconds[0])


def _synchronous(clock: StretchClock, seconds: Floats) -> tuple[Floats, Floats]:
    """When steps end, which is when they are collected: host and device take turns."""
    period = seconds + max(clock.deliver_s + clock.submit_s, clock.gap_s)
    ends_s = _first_end(clock, seconds) + np.concatenate(([0.0], period[1:].cumsum()))
    return ends_s, ends_s


def _device_bound(clock: StretchClock, seconds: Floats) -> tuple[Floats, Floats] | None:
    """When steps end and are collected if the device never waits for the host; None if it does."""
    assert clock.oldest is not None
    host_s = clock.deliver_s + clock.submit_s
    first_s, collected_s = _first_end(clock, seconds), max(clock.now_s + clock.submit_s, clock.oldest.end_s)
    if collected_s + host_s > first_s or float(seconds.min()) + clock.gap_s < host_s:
        return None
    ends_s = first_s + np.concatenate(([0.0], (seconds[1:] + clock.gap_s).cumsum()))
    return ends_s, np.concatenate(([collected_s], ends_s[:-1]))


def _walk(clock: StretchClock, seconds: Floats) -> tuple[Floats, Floats]:
    """When steps end and are collected, cycle by cycle."""
    now, free = clock.now_s, clock.device_free_s
    assert clock.oldest is not None
    oldest_s, ends_s, collected_s = clock.oldest.end_s, [], []
    for step_s in seconds.tolist():
        now += clock.submit_s
        free = max(now, free + clock.gap_s) + step_s
        ends_s.append(free)
        now = max(now, oldest_s)
        collected_s.append(now)
        now += clock.deliver_s
        oldest_s = free
    return np.asarray(ends_s), np.asarray(collected_s)
