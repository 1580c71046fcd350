"""The engine loop: a generator that yields what it wants done and receives what came of it.

It decides and does nothing else: a hardware driver launches kernels and waits for devices, the SimPy driver lets
modelled time pass, a test answers from a list. One core runs the attention replicas that step together because
they share experts; on hardware each process runs the core with its own replica and `Agree` joins them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from enum import IntEnum

import numpy as np

from deepinfer.numeric import Ints
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import FOREVER, Scheduler
from deepinfer.scheduler.step import DecodeBatch, StepOutput, StepPlan, StepResult

Plans = tuple[StepPlan | None, ...]
"""One plan per replica of the core; None for a replica that only takes part in the collectives."""


class Activity(IntEnum):
    """What a process of a step group has before it; the group does what its most active member needs."""

    DRAINED = 0
    WAITING = 1
    STEPPING = 2


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Wants new requests; answered by `Arrived`. With `block`, wait until there is one, or none will come.

    A driver whose process has peers does not wait: they may need it for a step.
    """

    block: bool


@dataclass(frozen=True, slots=True)
class Arrived:
    """(replica, request) pairs; `closed` when nothing will ever follow.

    Between pools: `received` are (replica, request id) pairs whose KV has been read from another pool, `released` those
    whose KV another pool has read from here.
    """

    requests: tuple[tuple[int, Request], ...]
    closed: bool
    received: tuple[tuple[int, int], ...] = ()
    released: tuple[tuple[int, int], ...] = ()

    @property
    def is_empty(self) -> bool:
        """Whether nothing has arrived."""
        return not (self.requests or self.received or self.released)


@dataclass(frozen=True, slots=True)
class Agree:
    """Wants the greatest `Activity` over the processes of the group; a process alone is answered its own."""

    activity: Activity


@dataclass(frozen=True, slots=True)
class Submit:
    """Wants a step started on the device, behind those before it; answered by a ticket as soon as it is launched."""

    plans: Plans


@dataclass(frozen=True, slots=True)
class Collect:
    """Wants the results of a submitted step; answered, once it is done, by a `StepResult` per replica."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Deliver:
    """Hands a committed step's outputs to the users, one per replica; answered by None."""

    outputs: tuple[StepOutput | None, ...]


@dataclass(frozen=True, slots=True)
class Fetch:
    """Wants the KV of (replica, request id) pairs read from the pool that prefilled them; answered by None at once.

    Their memory is ready. `Arrived.received` reports each when its KV is there.
    """

    requests: tuple[tuple[int, int], ...]


@dataclass(frozen=True, slots=True)
class Rest:
    """Offers a replica's rest: up to `most` decisions that can only be its last one again, to decode `batch`.

    Answered by how many of them the driver carries out on its own (0: none): a request must keep fewer tokens than its
    `room` in all of them together. The replica's part of the steps submitted meanwhile, and of the one in flight
    before them, is neither collected nor delivered through the core.
    """

    replica: int
    batch: DecodeBatch
    room: Ints
    most: int


@dataclass(frozen=True, slots=True)
class Wake:
    """Ends the rest of replicas; answered by the tokens that the requests of each one's batch have kept in it."""

    replicas: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Every replica rests: wants up to `most` steps at once, while no request arrives; answered by their number."""

    most: int


Wish = Advance | Arrivals | Agree | Fetch | Submit | Collect | Deliver | Rest | Wake
Answer = Arrived | Activity | int | tuple[StepResult | None, ...] | tuple[Ints, ...] | None


def run_engine(
    schedulers: Sequence[Scheduler], asynchronous: bool, skip_ahead: bool = False
) -> Generator[Wish, Answer, None]:
    """Run the replicas of one step group until no process of the group has a request left or will get one.

    Asynchronous: step N + 1 is decided and submitted before step N is collected. Synchronous: after. Requests must
    fit their scheduler (`Scheduler.fits`). With `skip_ahead` the driver is offered the rest of replicas whose next
    decisions are known, and stretches of steps in which all of them rest.
    """
    depth = 1 if asynchronous else 0
    group = _Group(schedulers)
    in_flight: deque[tuple[int, Plans]] = deque()
    closed = stuck = False
    while True:
        arrived = Arrived((), closed)
        if not closed:
            answer = yield Arrivals(block=not in_flight and (stuck or group.is_idle()))
            assert isinstance(answer, Arrived)
            arrived, closed = answer, answer.closed
        yield from group.take(arrived)
        if skip_ahead and len(in_flight) == depth:
            yield from group.rest()
            if (yield from group.advance()):
                continue
        plans = group.schedule()
        fetch = group.to_fetch()
        if fetch:
            yield Fetch(fetch)
        activity = yield Agree(_activity(plans, busy=bool(in_flight) or not closed))
        if activity == Activity.STEPPING:
            ticket = yield Submit(plans)
            assert isinstance(ticket, int)
            in_flight.append((ticket, plans))
        if in_flight and (len(in_flight) > depth or activity != Activity.STEPPING):
            yield from group.take_in(*in_flight.popleft())
            stuck = False
        elif activity == Activity.DRAINED:
            return
        else:
            # Nothing to compute or in flight: requests wait for KV from another pool, or for one to read theirs.
            stuck = not in_flight


class _Group:
    """The replicas of a core: those that are asked for a decision in every step, those that rest, and idle ones."""

    def __init__(self, schedulers: Sequence[Scheduler]) -> None:
        self._schedulers = schedulers
        self._latest: list[StepPlan | None] = [None] * len(schedulers)
        self._awake: list[int] = list(range(len(schedulers)))
        self._rest_ends: dict[int, int] = {}  # the step before which a resting replica wakes
        self._next_end = FOREVER
        self._step = 0

    def is_idle(self) -> bool:
        """Whether no replica has a request."""
        return not self._rest_ends and not any(self._has_work(self._schedulers[r]) for r in self._awake)

    def take(self, arrived: Arrived) -> Generator[Wish, Answer, None]:
        """Wake the replicas whose rest is over or that something arrived for, and hand it to them."""
        if not arrived.is_empty or self._next_end <= self._step:
            called = {replica for replica, _ in (*arrived.requests, *arrived.received, *arrived.released)}
            woken = tuple(sorted(r for r, end in self._rest_ends.items() if end <= self._step or r in called))
            if woken:
                kept = yield Wake(woken)
                assert isinstance(kept, tuple)
                for replica, tokens in zip(woken, kept, strict=True):
                    assert isinstance(tokens, np.ndarray)
                    self._schedulers[replica].advance(tokens)
                    self._set_rest(replica, None)
            self._awake = sorted({*self._awake, *woken, *called})
        for replica, request in arrived.requests:
            self._schedulers[replica].add(request)
        for replica, request_id in arrived.received:
            self._schedulers[replica].received(request_id)
        for replica, request_id in arrived.released:
            self._schedulers[replica].release(request_id)

    def to_fetch(self) -> tuple[tuple[int, int], ...]:
        """(replica, request id) pairs whose KV is to be read from another pool now."""
        return tuple((r, request_id) for r in self._awake for request_id in self._schedulers[r].to_fetch())

    def rest(self) -> Generator[Wish, Answer, None]:
        """Offer the driver the rest of replicas whose next decisions can only be the last one again."""
        for replica in tuple(self._awake):
            scheduler = self._schedulers[replica]
            most = scheduler.steady_steps()
            if not 1 < most < FOREVER:
                continue
            steps = yield Rest(replica, scheduler.decoding(), scheduler.room(), most)
            assert isinstance(steps, int)
            if steps:
                self._set_rest(replica, self._step + steps)

    def advance(self) -> Generator[Wish, Answer, bool]:
        """Let the driver do several steps at once if nobody is awake; whether it did."""
        if self._awake or self._next_end - self._step < 2 or not self._rest_ends:
            return False
        steps = yield Advance(self._next_end - self._step)
        assert isinstance(steps, int)
        self._step += steps
        return steps > 0

    def schedule(self) -> Plans:
        """One decision per replica; that of a resting one is its last one again."""
        for replica in tuple(self._awake):
            scheduler = self._schedulers[replica]
            plan = self._latest[replica] = scheduler.schedule()
            if plan is None and not scheduler.num_in_flight and not self._has_work(scheduler):
                self._awake.remove(replica)
        return tuple(self._latest)

    def take_in(self, ticket: int, plans: Plans) -> Generator[Wish, Answer, None]:
        """Collect one step, commit it and deliver its tokens."""
        results = yield Collect(ticket)
        assert isinstance(results, tuple)
        outputs: list[StepOutput | None] = [None] * len(plans)
        for replica in self._awake:
            plan, result = plans[replica], results[replica]
            if plan is not None and isinstance(result, StepResult):
                outputs[replica] = self._schedulers[replica].commit(plan, result)
        yield Deliver(tuple(outputs))
        self._step += 1

    def _set_rest(self, replica: int, end: int | None) -> None:
        if end is None:
            del self._rest_ends[replica]
        else:
            self._awake.remove(replica)
            self._rest_ends[replica] = end
        self._next_end = min(self._rest_ends.values(), default=FOREVER)

    @staticmethod
    def _has_work(scheduler: Scheduler) -> bool:
        return bool(scheduler.num_running or scheduler.num_waiting)


def _activity(plans: Plans, busy: bool) -> Activity:
    if any(plan is not None for plan in plans):
        return Activity.STEPPING
    return Activity.WAITING if busy else Activity.DRAINED
