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

from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import FOREVER, Scheduler
from deepinfer.scheduler.step import DecodeBatch, Ints, StepOutput, StepPlan, StepResult

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
class Advance:
    """Wants the last decision repeated up to `most` times at once, while no request arrives; answered by `Advanced`.

    Per replica: the batch it would decode next (None: nothing), and the tokens that its requests may still generate,
    fewer than which they must keep. A driver that has nothing to gain answers that it did no step.
    """

    batches: tuple[DecodeBatch | None, ...]
    rooms: tuple[Ints | None, ...]
    most: int


@dataclass(frozen=True, slots=True)
class Advanced:
    """What came of it: steps done, and the tokens that each replica's requests kept in them."""

    num_steps: int
    kept: tuple[Ints | None, ...]


Wish = Advance | Arrivals | Agree | Fetch | Submit | Collect | Deliver
Answer = Advanced | Arrived | Activity | int | tuple[StepResult | None, ...] | None


def run_engine(
    schedulers: Sequence[Scheduler], asynchronous: bool, skip_ahead: bool = False
) -> Generator[Wish, Answer, None]:
    """Run the replicas of one step group until no process of the group has a request left or will get one.

    Asynchronous: step N + 1 is decided and submitted before step N is collected. Synchronous: after. Requests must
    fit their scheduler (`Scheduler.fits`). With `skip_ahead` the driver is offered stretches of equal decisions.
    """
    depth = 1 if asynchronous else 0
    in_flight: deque[tuple[int, Plans]] = deque()
    closed = stuck = False
    while True:
        if skip_ahead and len(in_flight) == depth:
            yield from _skip_ahead(schedulers)
        if not closed:
            idle = not any(s.num_running or s.num_waiting for s in schedulers)
            arrived = yield Arrivals(block=not in_flight and (idle or stuck))
            assert isinstance(arrived, Arrived)
            closed = arrived.closed
            _take_arrivals(schedulers, arrived)
        plans = tuple(scheduler.schedule() for scheduler in schedulers)
        fetch = tuple((i, r) for i, scheduler in enumerate(schedulers) for r in scheduler.to_fetch())
        if fetch:
            yield Fetch(fetch)
        activity = yield Agree(_activity(plans, busy=bool(in_flight) or not closed))
        if activity == Activity.STEPPING:
            ticket = yield Submit(plans)
            assert isinstance(ticket, int)
            in_flight.append((ticket, plans))
        if in_flight and (len(in_flight) > depth or activity != Activity.STEPPING):
            yield from _take_in(schedulers, *in_flight.popleft())
            stuck = False
        elif activity == Activity.DRAINED:
            return
        else:
            # Nothing to compute or in flight: requests wait for KV from another pool, or for one to read theirs.
            stuck = not in_flight


def _take_arrivals(schedulers: Sequence[Scheduler], arrived: Arrived) -> None:
    for replica, request in arrived.requests:
        schedulers[replica].add(request)
    for replica, request_id in arrived.received:
        schedulers[replica].received(request_id)
    for replica, request_id in arrived.released:
        schedulers[replica].release(request_id)


def _skip_ahead(schedulers: Sequence[Scheduler]) -> Generator[Wish, Answer, None]:
    """Offer the driver the stretch over which no decision can differ from the last one."""
    most = min(scheduler.steady_steps() for scheduler in schedulers)
    if not 1 < most < FOREVER:
        return
    busy = [scheduler.num_running > 0 for scheduler in schedulers]
    advanced = yield Advance(
        batches=tuple(s.decoding() if b else None for s, b in zip(schedulers, busy, strict=True)),
        rooms=tuple(s.room() if b else None for s, b in zip(schedulers, busy, strict=True)),
        most=most,
    )
    assert isinstance(advanced, Advanced)
    if advanced.num_steps:
        for scheduler, kept in zip(schedulers, advanced.kept, strict=True):
            if kept is not None:
                scheduler.advance(kept)


def _activity(plans: Plans, busy: bool) -> Activity:
    if any(plan is not None for plan in plans):
        return Activity.STEPPING
    return Activity.WAITING if busy else Activity.DRAINED


def _take_in(schedulers: Sequence[Scheduler], ticket: int, plans: Plans) -> Generator[Wish, Answer, None]:
    """Collect one step, commit it and deliver its tokens."""
    results = yield Collect(ticket)
    assert isinstance(results, tuple)
    outputs = tuple(
        None if plan is None or result is None else scheduler.commit(plan, result)
        for scheduler, plan, result in zip(schedulers, plans, results, strict=True)
    )
    yield Deliver(outputs)
