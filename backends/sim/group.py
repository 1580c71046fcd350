"""One step group in SimPy: an engine core, its host thread and its devices, which run one step at a time."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple, Protocol

import numpy as np
import simpy

from backends.sim.steptime import StepTimer
from backends.sim.stretch import Stretch, StretchClock, plan_stretch
from backends.sim.verifier import Verifier
from deepinfer.engine.core import (
    Advance,
    Advanced,
    Agree,
    Answer,
    Arrivals,
    Arrived,
    Collect,
    Deliver,
    Fetch,
    Plans,
    Submit,
    Wish,
    run_engine,
)
from deepinfer.engine.deployment import Deployment
from deepinfer.metrics.record import Floats, StepColumns, SubmittedStep
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.step import Ints, StepResult

Process = Generator[simpy.Event, Any, Any]


class Outlet(Protocol):
    """Where a step group's tokens go, and where the KV of its requests comes from."""

    def deliver(self, request_ids: Ints, tokens: Ints, now: float) -> None:
        """Requests have new tokens; each id occurs once."""
        ...

    def deliver_stretch(self, request_ids: Ints, tokens: Ints, times: Floats) -> None:
        """The same requests have tokens at each of `times`: a row per time, a column per id."""
        ...

    def finish(self, request_id: int, now: float) -> None:
        """A request is complete here."""
        ...

    def fetch(self, place: tuple[StepGroup, int], request_id: int) -> None:
        """An attention replica is ready to receive a request's KV."""
        ...


class _Ticket(NamedTuple):
    """A submitted step: its plans, their cached tokens, its seconds on the device, when it ends, the event of that."""

    plans: Plans
    context_tokens: int
    seconds: float
    end_s: float
    done: simpy.Event


class StepGroup:
    """Drives `run_engine` for the attention replicas of one step group: every wish becomes modelled time."""

    def __init__(
        self,
        env: simpy.Environment,
        deployment: Deployment,
        timer: StepTimer,
        verifier: Verifier,
        steps: StepColumns,
        outlet: Outlet,
    ) -> None:
        self._env, self._host, self._timer = env, deployment.host, timer
        self._verifier, self._steps, self._outlet = verifier, steps, outlet
        self._asynchronous = deployment.settings.async_scheduling
        config = deployment.scheduler_config()
        self.schedulers = [Scheduler(config) for _ in range(deployment.replicas_per_group)]
        self._inbox: list[tuple[int, Request]] = []
        self._queued = [0] * len(self.schedulers)
        self._received: list[tuple[int, int]] = []
        self._released: list[tuple[int, int]] = []
        self._bell = env.event()
        self._closed = False
        self._cpu = simpy.Resource(env, capacity=1)
        self._device_free_s = 0.0
        self._tickets: list[_Ticket | None] = []
        self.check_integrity = False
        self.every_step = False
        self._under_way: tuple[Advance, Stretch] | None = None

    def num_queued(self, replica: int) -> int:
        """Requests in the inbox of a replica."""
        return self._queued[replica]

    def send(self, replica: int, request: Request) -> None:
        """Put a request into the inbox of a replica."""
        self._inbox.append((replica, request))
        self._queued[replica] += 1
        self._ring()

    def receive(self, replica: int, request_id: int) -> None:
        """A request's KV has arrived from the pool that prefilled it."""
        self._received.append((replica, request_id))
        self._ring()

    def release(self, replica: int, request_id: int) -> None:
        """A request's KV has been read by the pool that decodes it."""
        self._released.append((replica, request_id))
        self._ring()

    def close(self) -> None:
        """No request will follow."""
        self._closed = True
        self._ring()

    def run(self) -> Process:
        """The group's SimPy process."""
        core = run_engine(self.schedulers, self._asynchronous, skip_ahead=not self.every_step)
        wish: Wish = next(core)
        while True:
            answer = yield from self._fulfil(wish)
            try:
                wish = core.send(answer)
            except StopIteration:
                return

    def _ring(self) -> None:
        if not self._bell.triggered:
            self._bell.succeed()

    def _fulfil(self, wish: Wish) -> Generator[simpy.Event, Any, Answer]:
        match wish:
            case Submit(plans):
                return (yield from self._submit(plans))
            case Collect(ticket):
                return (yield from self._collect(ticket))
            case Deliver():
                yield from self._deliver(wish)
                return None
            case Fetch(requests):
                for replica, request_id in requests:
                    self._outlet.fetch((self, replica), request_id)
                return None
            case Advance():
                return (yield from self._advance(wish))
            case Arrivals(block):
                return (yield from self._arrivals(block))
            case Agree(activity):
                return activity  # all replicas of the group are in this process

    def _advance(self, wish: Advance) -> Generator[simpy.Event, Any, Advanced]:
        """Let a stretch of equal decisions pass at once, up to the first poll that sees a new request."""
        ahead = self._tickets[-1] if self._asynchronous and self._tickets else None
        clock = StretchClock(
            now_s=self._env.now,
            device_free_s=self._device_free_s,
            oldest=None if ahead is None else SubmittedStep(ahead.seconds, ahead.end_s, ahead.context_tokens),
            submit_s=self._host.submit_seconds(max(len(b) for b in wish.batches if b is not None), 0, captured=True),
            deliver_s=self._host.deliver_seconds(max(len(b) for b in wish.batches if b is not None)),
            gap_s=self._host.step_gap_s.value,
        )
        news = self._inbox or self._received or self._released
        stretch = None if news else plan_stretch(wish, clock, self._timer, self._verifier)
        if stretch is None:
            return Advanced(0, tuple(None for _ in wish.batches))
        self._bell = self._env.event()
        self._under_way = (wish, stretch)
        over = self._env.timeout(stretch.polls_s[-1] - self._env.now)
        yield over | self._bell
        if not over.processed:
            stretch = stretch.until(self._env.now)
            self._under_way = (wish, stretch)
            yield self._env.timeout(max(stretch.polls_s[-1] - self._env.now, 0.0))
        self._under_way = None
        return self._land(wish, stretch, ahead)

    def settle(self) -> None:
        """The run is cut off now: note what a stretch that is under way has done so far."""
        if self._under_way is not None:
            wish, stretch = self._under_way
            self._note_stretch(wish, stretch.cut(self._env.now))
            self._under_way = None

    def _note_stretch(self, wish: Advance, stretch: Stretch) -> None:
        batches = [batch for batch in wish.batches if batch is not None]
        everyone = np.concatenate([batch.request_ids for batch in batches])
        kept = stretch.kept[: len(stretch.collected)].sum(axis=1)
        self._steps.append_stretch(stretch.collected_s, stretch.collected, batches, kept)
        if stretch.num_steps:
            self._outlet.deliver_stretch(everyone, stretch.kept[: stretch.num_steps], stretch.polls_s)

    def _land(self, wish: Advance, stretch: Stretch, ahead: _Ticket | None) -> Advanced:
        """Enter what a stretch did into the record, the verifier and the device."""
        batches = [batch for batch in wish.batches if batch is not None]
        everyone = np.concatenate([batch.request_ids for batch in batches])
        self._note_stretch(wish, stretch)
        self._verifier.pass_rounds(everyone, stretch.num_steps)
        last = stretch.submitted[-1]
        self._device_free_s = last.end_s
        totals = stretch.kept[: stretch.num_steps].sum(axis=0)
        if ahead is not None:
            done = self._env.timeout(max(last.end_s - self._env.now, 0.0))
            self._tickets[-1] = _Ticket(ahead.plans, last.context_tokens, last.seconds, last.end_s, done)
        parts = iter(np.split(totals, np.cumsum([len(batch) for batch in batches])[:-1]))
        return Advanced(stretch.num_steps, tuple(None if b is None else next(parts) for b in wish.batches))

    def _arrivals(self, block: bool) -> Generator[simpy.Event, Any, Arrived]:
        if block and not (self._inbox or self._received or self._released or self._closed):
            self._bell = self._env.event()
            yield self._bell
        arrived = Arrived(tuple(self._inbox), self._closed, tuple(self._received), tuple(self._released))
        self._inbox, self._received, self._released = [], [], []
        self._queued = [0] * len(self.schedulers)
        return arrived

    def _submit(self, plans: Plans) -> Generator[simpy.Event, Any, int]:
        if self.check_integrity:
            for scheduler in self.schedulers:
                scheduler.check_integrity()
        captured = all(plan is None or not plan.prefill for plan in plans)
        most = max(len(plan.decode) + len(plan.prefill) for plan in plans if plan is not None)
        yield from self._busy(self._host.submit_seconds(most, self._timer.num_kernels, captured))
        seconds = self._timer.seconds(plans)
        start = max(self._env.now, self._device_free_s + self._host.step_gap_s.value)
        end_s = self._device_free_s = start + seconds
        context_tokens = sum(int(plan.decode.contexts.sum()) for plan in plans if plan is not None)
        done = self._env.timeout(end_s - self._env.now)
        self._tickets.append(_Ticket(plans, context_tokens, seconds, end_s, done))
        return len(self._tickets) - 1

    def _collect(self, number: int) -> Generator[simpy.Event, Any, tuple[StepResult | None, ...]]:
        ticket = self._tickets[number]
        assert ticket is not None
        self._tickets[number] = None
        yield ticket.done
        results = self._verifier.results(ticket.plans)
        plans = [plan for plan in ticket.plans if plan is not None]
        kept = sum(int(result.decode_tokens.sum()) for result in results if result is not None)
        self._steps.append(self._env.now, ticket.seconds, plans, ticket.context_tokens, kept)
        return results

    def _deliver(self, delivery: Deliver) -> Process:
        outputs = [output for output in delivery.outputs if output is not None]
        most = max((len(output.request_ids) for output in outputs), default=0)
        yield from self._busy(self._host.deliver_seconds(most))
        tokens = np.concatenate([output.tokens for output in outputs])
        self._outlet.deliver(np.concatenate([output.request_ids for output in outputs]), tokens, self._env.now)
        for output in outputs:
            for request_id in output.finished:
                self._outlet.finish(request_id, self._env.now)

    def _busy(self, seconds: float) -> Process:
        """Hold the engine's CPU thread."""
        with self._cpu.request() as turn:
            yield turn
            yield self._env.timeout(seconds)
