"""The engine loop: a generator that yields what it wants done and receives what came of it.

It decides and does nothing else: a hardware driver launches kernels and waits for devices, the SimPy driver lets
modelled time pass, a test answers from a list. One core runs the attention replicas that step together because
they share experts; on hardware each process runs the core with its own replica and `Agree` joins them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Generator, Sequence
from dataclasses import dataclass

from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.step import StepOutput, StepPlan, StepResult

Plans = tuple[StepPlan | None, ...]
"""One plan per replica of the core; None for a replica that only takes part in the collectives."""


@dataclass(frozen=True, slots=True)
class Arrivals:
    """Wants new requests; answered by `Arrived`. With `block`, wait until there is one (or none will come)."""

    block: bool


@dataclass(frozen=True, slots=True)
class Arrived:
    """(replica, request) pairs; `closed` when no request will ever follow."""

    requests: tuple[tuple[int, Request], ...]
    closed: bool


@dataclass(frozen=True, slots=True)
class Agree:
    """Wants to know whether any process of the group has a step to run; answered by a bool."""

    has_step: bool


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


Wish = Arrivals | Agree | Submit | Collect | Deliver
Answer = Arrived | bool | int | tuple[StepResult | None, ...] | None


def run_engine(schedulers: Sequence[Scheduler], asynchronous: bool) -> Generator[Wish, Answer, None]:
    """Run the replicas of one step group until no request is left and none will come.

    Asynchronous: step N + 1 is decided and submitted before step N is collected. Synchronous: after. Requests must
    fit their scheduler (`Scheduler.fits`).
    """
    depth = 1 if asynchronous else 0
    in_flight: deque[tuple[int, Plans]] = deque()
    closed = False
    while True:
        idle = not in_flight and not any(s.num_running or s.num_waiting for s in schedulers)
        if not closed:
            arrived = yield Arrivals(block=idle)
            assert isinstance(arrived, Arrived)
            closed = arrived.closed
            for replica, request in arrived.requests:
                schedulers[replica].add(request)
        elif idle:
            return
        plans = tuple(scheduler.schedule() for scheduler in schedulers)
        go = yield Agree(any(plan is not None for plan in plans))
        if go:
            ticket = yield Submit(plans)
            assert isinstance(ticket, int)
            in_flight.append((ticket, plans))
        if in_flight and (len(in_flight) > depth or not go):
            yield from _take_in(schedulers, *in_flight.popleft())


def _take_in(schedulers: Sequence[Scheduler], ticket: int, plans: Plans) -> Generator[Wish, Answer, None]:
    """Collect one step, commit it and deliver its tokens."""
    results = yield Collect(ticket)
    assert isinstance(results, tuple)
    outputs = tuple(
        None if plan is None or result is None else scheduler.commit(plan, result)
        for scheduler, plan, result in zip(schedulers, plans, results, strict=True)
    )
    yield Deliver(outputs)
