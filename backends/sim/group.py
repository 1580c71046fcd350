"""One step group in SimPy: an engine core, its host thread and its devices, which run one step at a time."""

from __future__ import annotations

from collections.abc import Generator
from typing import Any, NamedTuple

import numpy as np
import simpy

from backends.sim.outlet import Outlet
from backends.sim.resting import RestingReplicas
from backends.sim.steptime import StepTimer
from backends.sim.stretch import Stretch, StretchClock, plan_stretch
from backends.sim.verifier import Verifier
from deepinfer.engine.core import (
    Advance,
    Agree,
    Answer,
    Arrivals,
    Arrived,
    Collect,
    Deliver,
    Fetch,
    Plans,
    Rest,
    Submit,
    Wake,
    Wish,
    run_engine,
)
from deepinfer.engine.deployment import Deployment
from deepinfer.metrics.record import StepColumns, SubmittedStep
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.step import StepOutput, StepPlan, StepResult

_LATER = object()

Process = Generator[simpy.Event, Any, Any]


class _Ticket(NamedTuple):
    """A submitted step, its plans, and the event of its end."""

    plans: Plans
    step: SubmittedStep
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
        self._rows_per_request = config.nextn + 1
        self._resting = RestingReplicas(len(self.schedulers), config.nextn, verifier, outlet)
        self._inbox: list[tuple[int, Request]] = []
        self._queued = [0] * len(self.schedulers)
        self._received: list[tuple[int, int]] = []
        self._released: list[tuple[int, int]] = []
        self._bell = env.event()
        self._closed = False
        self._device_free_s = 0.0
        self._num_submitted = 0
        self._tickets: list[_Ticket] = []  # oldest first
        self.check_integrity = False
        self.every_step = False
        self._under_way: Stretch | None = None

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
            answer = self._at_once(wish)
            if answer is _LATER:
                answer = yield from self._fulfil(wish)
            try:
                wish = core.send(answer)
            except StopIteration:
                return

    @property
    def _has_news(self) -> bool:
        return bool(self._inbox or self._received or self._released)

    def _ring(self) -> None:
        if not self._bell.triggered:
            self._bell.succeed()

    def _at_once(self, wish: Wish) -> Any:
        """The answer to a wish that takes no time, else `_LATER`."""
        match wish:
            case Arrivals(block) if self._has_news or self._closed or not block:
                return self._take_inbox()
            case Agree(activity):
                return activity  # all replicas of the group are in this process
            case Rest():
                return self._resting.offer(wish)
            case Wake(replicas):
                return tuple(self._resting.wake(replica) for replica in replicas)
        return _LATER

    def _fulfil(self, wish: Wish) -> Generator[simpy.Event, Any, Answer]:
        match wish:
            case Submit(plans):
                return (yield from self._submit(plans))
            case Collect():
                return (yield from self._collect())
            case Deliver(outputs):
                yield from self._deliver([output for output in outputs if output is not None])
                return None
            case Fetch(requests):
                for replica, request_id in requests:
                    self._outlet.fetch((self, replica), request_id)
                return None
            case Advance(most):
                return (yield from self._advance(most))
            case _:
                self._bell = self._env.event()
                yield self._bell
                return self._take_inbox()

    def _advance(self, most: int) -> Generator[simpy.Event, Any, int]:
        """Let steps in which every replica rests pass at once, up to the first poll that sees a new request."""
        if self._has_news:
            return 0
        stretch = self._plan_stretch(most)
        self._bell = self._env.event()
        self._under_way = stretch
        over = self._env.timeout(float(stretch.polls_s[-1]) - self._env.now)
        yield over | self._bell
        if not over.processed:
            self._under_way = stretch = stretch.until(self._env.now)
            yield self._env.timeout(max(float(stretch.polls_s[-1]) - self._env.now, 0.0))
        self._under_way = None
        self._note_stretch(stretch)
        last = stretch.num_steps - 1
        self._device_free_s = end_s = float(stretch.ends_s[last])
        if self._asynchronous:
            plans, step, _ = self._tickets[-1]
            context_tokens = int(stretch.contexts[last])
            step = step._replace(seconds=float(stretch.seconds[last]), end_s=end_s, context_tokens=context_tokens)
            self._tickets[-1] = _Ticket(plans, step, self._env.timeout(max(end_s - self._env.now, 0.0)))
        return stretch.num_steps

    def _plan_stretch(self, most: int) -> Stretch:
        resting = self._resting
        clock = StretchClock(
            now_s=self._env.now,
            device_free_s=self._device_free_s,
            oldest=self._tickets[-1].step if self._asynchronous else None,
            submit_s=self._host.submit_seconds(resting.most_requests, 0, captured=True),
            deliver_s=self._host.deliver_seconds(resting.most_requests),
            gap_s=self._host.step_gap_s.value,
        )
        contexts, busy = resting.contexts(most), np.flatnonzero(resting.counts)
        seconds = self._timer.decode_seconds(resting.counts[busy], contexts[:, busy], len(self.schedulers))
        return plan_stretch(clock, seconds, resting.all_contexts(most).copy())

    def settle(self) -> None:
        """The run is cut off now: note what a stretch that is under way and resting replicas have done so far."""
        if self._under_way is not None:
            self._note_stretch(self._under_way.cut(self._env.now))
            self._under_way = None
        self._resting.settle()

    def _note_stretch(self, stretch: Stretch) -> None:
        resting, (seconds, contexts) = self._resting, stretch.collected()
        decodes = resting.num_requests
        self._steps.extend(
            stretch.collected_s,
            seconds,
            decodes,
            decodes * self._rows_per_request,
            contexts,
            resting.all_kept(len(seconds)),
        )
        resting.deliver_steps(stretch.polls_s)

    def _take_inbox(self) -> Arrived:
        if not self._has_news:
            return Arrived((), self._closed)
        arrived = Arrived(tuple(self._inbox), self._closed, tuple(self._received), tuple(self._released))
        self._inbox, self._received, self._released = [], [], []
        self._queued = [0] * len(self.schedulers)
        return arrived

    def _submit(self, plans: Plans) -> Generator[simpy.Event, Any, int]:
        if self.check_integrity:
            for scheduler in self.schedulers:
                scheduler.check_integrity()
        awake = [plan for _, plan in self._awake(plans)]
        step = self._step(awake)
        captured = not step.prefill_rows
        most = max((len(plan.decode) + len(plan.prefill) for plan in awake), default=0)
        most = max(most, self._resting.most_requests)
        yield self._env.timeout(self._host.submit_seconds(most, self._timer.num_kernels, captured))
        start = max(self._env.now, self._device_free_s + self._host.step_gap_s.value)
        end_s = self._device_free_s = start + step.seconds
        done = self._env.timeout(end_s - self._env.now)
        self._tickets.append(_Ticket(plans, step._replace(end_s=end_s), done))
        self._num_submitted += 1
        return self._num_submitted

    def _awake(self, plans: Plans) -> list[tuple[int, StepPlan]]:
        """Replicas that take part in a step and do not rest, with their plans."""
        resting = self._resting.replicas
        return [(r, plan) for r, plan in enumerate(plans) if plan is not None and r not in resting]

    def _step(self, awake: list[StepPlan]) -> SubmittedStep:
        """The next step: of the replicas with these plans, and of the resting ones."""
        resting = self._resting
        decodes = resting.num_requests + sum([len(plan.decode) for plan in awake])
        rows = resting.num_requests * self._rows_per_request
        seconds = self._timer.seconds(awake, resting.heaviest(), rows, len(self.schedulers))
        contexts = int(resting.all_contexts(1)[0]) + sum([int(plan.decode.contexts.sum()) for plan in awake])
        prefill_rows = sum([chunk.rows for plan in awake for chunk in plan.prefill])
        return SubmittedStep(seconds, 0.0, decodes, decodes * self._rows_per_request, prefill_rows, contexts)

    def _collect(self) -> Generator[simpy.Event, Any, tuple[StepResult | None, ...]]:
        ticket = self._tickets.pop(0)
        yield ticket.done
        awake = self._awake(ticket.plans)
        found = self._verifier.results([plan for _, plan in awake])
        kept = sum([int(result.decode_tokens.sum()) for result in found if result is not None])
        self._steps.append(self._env.now, ticket.step, kept + int(self._resting.all_kept(1)[0]))
        results: list[StepResult | None] = [None] * len(ticket.plans)
        for (replica, _), result in zip(awake, found, strict=True):
            results[replica] = result
        return tuple(results)

    def _deliver(self, outputs: list[StepOutput]) -> Process:
        most = max((len(output.request_ids) for output in outputs), default=0)
        yield self._env.timeout(self._host.deliver_seconds(max(most, self._resting.most_requests)))
        now = self._env.now
        self._resting.deliver([output.request_ids for output in outputs], [output.tokens for output in outputs], now)
        for output in outputs:
            for request_id in output.finished:
                self._outlet.finish(request_id, now)
