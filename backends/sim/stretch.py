"""A stretch of equal decisions, worked out at once: the same times that step by step would give.

One cycle of the engine loop is: poll for requests, submit a step, collect the oldest one in flight, deliver its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from backends.sim.steptime import StepTimer
from backends.sim.verifier import Verifier
from deepinfer.engine.core import Advance
from deepinfer.engine.shape import ReplicaLoad
from deepinfer.metrics.record import SubmittedStep
from deepinfer.scheduler.step import DecodeBatch, Ints

Floats = npt.NDArray[np.float64]

MOST_STEPS = 512
"""Steps worked out at once; a longer stretch is several."""


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
    delivery; and the tokens kept (a column per request).
    """

    submitted: list[SubmittedStep]
    collected: list[SubmittedStep]
    collected_s: Floats
    polls_s: Floats
    kept: Ints

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
            self.kept,
        )


def plan_stretch(wish: Advance, clock: StretchClock, timer: StepTimer, verifier: Verifier) -> Stretch | None:
    """The longest stretch in which nobody ends; None when it has less than two steps."""
    batches = [batch for batch in wish.batches if batch is not None]
    everyone = np.concatenate([batch.request_ids for batch in batches])
    # One token short of the end, and one for the step in flight: then the scheduler has to look.
    room = np.concatenate([room for room in wish.rooms if room is not None]) - 2
    kept = _kept_until(verifier, everyone, room, min(wish.most, MOST_STEPS))
    if len(kept) < 2:
        return None
    before = np.cumsum(kept, axis=0) - kept
    seconds = timer.decode_seconds(_loads(batches), len(wish.batches), _mean_growth(batches, before))
    contexts = sum(int(batch.contexts.sum()) for batch in batches) + before.sum(axis=1)
    return _cycles(clock, seconds, kept, contexts)


def _kept_until(verifier: Verifier, everyone: Ints, room: Ints, most: int) -> Ints:
    """Tokens kept in the rounds before the first one that leaves somebody without room."""
    least = int(room.min())
    if least < 1:
        return np.zeros((0, len(everyone)), dtype=np.int64)
    kept = verifier.peek(everyone, min(most, least))
    within = (np.cumsum(kept, axis=0) <= room).all(axis=1)
    return kept[: int(within.sum())]  # sums grow, so what is within comes first


def _loads(batches: list[DecodeBatch]) -> list[ReplicaLoad]:
    return [ReplicaLoad(len(b), b.drafts, float(b.contexts.sum()) / len(b)) for b in batches]


def _mean_growth(batches: list[DecodeBatch], before: Ints) -> Floats:
    """Mean tokens kept so far by each batch's requests: a row per step, a column per batch."""
    sizes = [len(batch) for batch in batches]
    starts = np.concatenate(([0], np.cumsum(sizes)[:-1]))
    sums: Ints = np.add.reduceat(before, starts, axis=1)
    mean: Floats = sums / np.asarray(sizes)
    return mean


def _cycles(clock: StretchClock, seconds: list[float], kept: Ints, contexts: Ints) -> Stretch:
    """Walk the engine loop's cycles with given device seconds and cached tokens of the submitted steps."""
    now, free, oldest = clock.now_s, clock.device_free_s, clock.oldest
    submitted: list[SubmittedStep] = []
    collected: list[SubmittedStep] = []
    collected_s: list[float] = []
    polls_s: list[float] = []
    for step_s, context_tokens in zip(seconds, contexts, strict=True):
        now += clock.submit_s
        free = max(now, free + clock.gap_s) + step_s
        step = SubmittedStep(step_s, free, int(context_tokens))
        submitted.append(step)
        done = step if oldest is None else oldest
        now = max(now, done.end_s)
        collected.append(done)
        collected_s.append(now)
        now += clock.deliver_s
        polls_s.append(now)
        oldest = None if oldest is None else step
    return Stretch(submitted, collected, np.asarray(collected_s), np.asarray(polls_s), kept)
