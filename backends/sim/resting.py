"""Replicas of a step group that decode the same batch in every step: their acceptances are drawn at once.

What each of them adds to the coming steps is a column of arrays over the group's steps, so that a step costs a few
array operations for all of them together.
"""

from __future__ import annotations

from collections.abc import Container
from dataclasses import dataclass

import numpy as np

from backends.sim.outlet import Outlet
from backends.sim.steptime import most_loaded
from backends.sim.verifier import Verifier
from deepinfer.engine.core import Rest
from deepinfer.engine.shape import ReplicaLoad
from deepinfer.metrics.record import EvenDelivery
from deepinfer.numeric import Floats, Ints

MOST_STEPS = 512
"""Steps worked out at once for one replica; a longer rest is several."""
MOST_DRAWS = 8192
"""Acceptances drawn at once for one replica, in at least `LEAST_STEPS` steps: a rest that is cut short wastes them."""
LEAST_STEPS = 32
FEWEST_STEPS = 3
"""A shorter rest costs more than it spares."""


@dataclass(frozen=True, eq=False)
class _Resting:
    """A replica's rest: its requests, the step that it began before, and kept tokens (a row per step)."""

    request_ids: Ints
    start: int
    kept: Ints


class RestingReplicas:
    """`step` counts the steps that the group has delivered; contexts and kept tokens have a row per step from there."""

    def __init__(self, num_replicas: int, drafts: int, verifier: Verifier, outlet: Outlet) -> None:
        self._drafts, self._verifier, self._outlet = drafts, verifier, outlet
        self._rests: dict[int, _Resting] = {}
        self._fresh: list[_Resting] = []  # whose first step is not delivered yet
        self._origin = 0
        self._contexts = np.zeros((2 * MOST_STEPS, num_replicas), dtype=np.int64)
        self._all_contexts = np.zeros(len(self._contexts), dtype=np.int64)  # summed over replicas
        self._all_kept = np.zeros_like(self._all_contexts)
        self._last_delivery_s = 0.0
        self.step = 0
        self.counts: Ints = np.zeros(num_replicas, dtype=np.int64)
        self.num_requests = self.most_requests = 0

    @property
    def replicas(self) -> Container[int]:
        """Those that rest."""
        return self._rests

    def offer(self, wish: Rest) -> int:
        """Take over a replica for as long as nobody can end; the steps of that, 0 if they are too few."""
        batch, count = wish.batch, len(wish.batch)
        # One token short of the end, and one for the step in flight: then the scheduler has to look.
        room = wish.room - 2
        most = min(wish.most, MOST_STEPS, max(MOST_DRAWS // count, LEAST_STEPS), int(room.min()))
        if most < FEWEST_STEPS:
            return 0
        kept = self._verifier.peek(batch.request_ids, most)
        sums = kept.cumsum(axis=0)
        # Sums grow, so what is within comes first.
        steps = int(np.count_nonzero((sums <= room).all(axis=1)))
        if steps < FEWEST_STEPS:
            return 0
        self._make_room(steps)
        rest = _Resting(batch.request_ids, self.step, kept[:steps])
        self._rests[wish.replica] = rest
        self._fresh.append(rest)
        at, totals = self.step - self._origin, sums[:steps].sum(axis=1)
        contexts = np.full(steps, batch.contexts.sum())
        contexts[1:] += totals[:-1]
        totals[1:] -= totals[:-1].copy()
        self._contexts[at : at + steps, wish.replica] = contexts
        self._all_contexts[at : at + steps] += contexts
        self._all_kept[at : at + steps] += totals
        self._count(wish.replica, count)
        return steps

    def wake(self, replica: int) -> Ints:
        """End a rest; tokens that its requests have kept in it."""
        rest = self._rests.pop(replica)
        at, left = self.step - self._origin, rest.kept[self.step - rest.start :].sum(axis=1)
        if len(left):
            ahead = slice(at, at + len(left))
            self._all_contexts[ahead] -= self._contexts[ahead, replica]
            self._all_kept[ahead] -= left
            self._contexts[ahead, replica] = 0
        self._count(replica, 0)
        return self._settle(rest)

    def settle(self) -> None:
        """The run is cut off: note what resting replicas have delivered so far."""
        for rest in self._rests.values():
            self._settle(rest)

    def heaviest(self) -> list[ReplicaLoad]:
        """The replicas that could be the slowest of the next step: with most requests, and with most cached tokens."""
        contexts = self._contexts[self.step - self._origin]
        found = {int(replica) for replica in most_loaded(self.counts, contexts)}
        return [
            ReplicaLoad(count, self._drafts, int(contexts[r]) / count)
            for r in sorted(found)
            if (count := int(self.counts[r]))
        ]

    def contexts(self, num_steps: int) -> Ints:
        """Cached tokens of each replica's requests in the next steps: [steps, replicas]."""
        at = self.step - self._origin
        return self._contexts[at : at + num_steps]

    def all_contexts(self, num_steps: int) -> Ints:
        """Cached tokens in each of the next steps, summed over replicas."""
        at = self.step - self._origin
        return self._all_contexts[at : at + num_steps]

    def all_kept(self, num_steps: int) -> Ints:
        """Tokens kept in each of the next steps, summed over replicas."""
        at = self.step - self._origin
        return self._all_kept[at : at + num_steps]

    def deliver(self, request_ids: list[Ints], tokens: list[Ints], now: float) -> None:
        """Note the next step's delivery to these and to the requests of resting replicas."""
        others, num_others, fresh_tokens = None, self.num_requests, 0
        for rest in self._fresh:
            # Their last delivery may have been another one for each request.
            request_ids.append(rest.request_ids)
            tokens.append(rest.kept[0])
            num_others -= len(rest.request_ids)
            fresh_tokens += int(rest.kept[0].sum())
        if num_others:
            others = EvenDelivery(num_others, int(self.all_kept(1)[0]) - fresh_tokens, now - self._last_delivery_s)
        self._outlet.deliver(_joined(request_ids), _joined(tokens), now, others)
        self._fresh = []
        self._last_delivery_s = now
        self.step += 1
        self._make_room(1)

    def deliver_steps(self, times: Floats) -> None:
        """Note the next steps' deliveries, when only resting replicas have any."""
        if not len(times):
            return
        first_s, last_s = float(times[0]), float(times[-1])
        self.deliver([], [], first_s)
        if len(times) > 1:
            kept = self.all_kept(len(times) - 1)
            self._outlet.deliver_evenly(self.num_requests, kept, times[1:], first_s)
            self._last_delivery_s = last_s
            self.step += len(times) - 1
            self._make_room(1)

    def _settle(self, rest: _Resting) -> Ints:
        steps = self.step - rest.start
        totals: Ints = rest.kept[:steps].sum(axis=0)
        self._verifier.pass_rounds(rest.request_ids, steps)
        if steps > 1:  # the first one is noted
            self._outlet.note_later(rest.request_ids, totals - rest.kept[0], self._last_delivery_s)
        self._fresh = [other for other in self._fresh if other is not rest]
        return totals

    def _count(self, replica: int, count: int) -> None:
        self.counts[replica] = count
        self.num_requests, self.most_requests = int(self.counts.sum()), int(self.counts.max())

    def _make_room(self, steps: int) -> None:
        """Move the origin to the next step when the arrays end before the last one wanted."""
        at = self.step - self._origin
        if at + steps <= len(self._contexts):
            return
        for columns in (self._contexts, self._all_contexts, self._all_kept):
            columns[: len(columns) - at] = columns[at:].copy()
            columns[len(columns) - at :] = 0
        self._origin = self.step


def _joined(parts: list[Ints]) -> Ints:
    if len(parts) == 1:
        return parts[0]
    return np.concatenate(parts) if parts else _NOBODY


_NOBODY: Ints = np.zeros(0, dtype=np.int64)
