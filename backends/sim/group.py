"""One step group in SimPy: an engine core, its host thread and its devices, which run one step at a time."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Sequence
from typing import Any

import simpy

from backends.sim.steptime import StepTimer
from deepinfer.engine.core import (
    Agree,
    Answer,
    Arrivals,
    Arrived,
    Collect,
    Deliver,
    Plans,
    Submit,
    Wish,
    run_engine,
)
from deepinfer.engine.deployment import Deployment
from deepinfer.metrics.record import RunRecord
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.scheduler.step import StepPlan, StepResult

Process = Generator[simpy.Event, Any, Any]


class AcceptanceTable:
    """Tokens kept in each verification round of each request, drawn when first asked for."""

    def __init__(self, acceptance: Acceptance, seed: int, nextn: int) -> None:
        self._acceptance, self._seed, self._nextn = acceptance, seed, nextn
        self._rounds: dict[int, deque[int]] = {}
        self._drawn: dict[int, int] = {}

    def next(self, request_id: int) -> int:
        """Tokens kept in the request's next round."""
        if self._nextn == 0:
            return 1
        rounds = self._rounds.get(request_id)
        if not rounds:
            rounds = self._draw(request_id)
        return rounds.popleft()

    def forget(self, request_id: int) -> None:
        """Drop the rounds of a finished request."""
        self._rounds.pop(request_id, None)
        self._drawn.pop(request_id, None)

    def _draw(self, request_id: int, count: int = 256) -> deque[int]:
        first = self._drawn.get(request_id, 0)
        rounds = deque(self._acceptance.draw(self._seed, request_id, first, count, self._nextn))
        self._rounds[request_id] = rounds
        self._drawn[request_id] = first + count
        return rounds


class StepGroup:
    """Drives `run_engine` for the attention replicas of one step group: every wish becomes modelled time."""

    def __init__(
        self,
        env: simpy.Environment,
        deployment: Deployment,
        timer: StepTimer,
        acceptance: AcceptanceTable,
        record: RunRecord,
        on_finish: Callable[[int], None],
    ) -> None:
        self._env, self._host, self._timer = env, deployment.host, timer
        self._acceptance, self._record, self._on_finish = acceptance, record, on_finish
        self._asynchronous = deployment.settings.async_scheduling
        config = deployment.scheduler_config()
        self.schedulers = [Scheduler(config) for _ in range(deployment.replicas_per_group)]
        self._inbox: list[tuple[int, Request]] = []
        self._queued = [0] * len(self.schedulers)
        self._bell = env.event()
        self._closed = False
        self._cpu = simpy.Resource(env, capacity=1)
        self._device_free_s = 0.0
        self._tickets: list[tuple[Plans, simpy.Event]] = []
        self.check_integrity = False

    def load(self, replica: int) -> int:
        """Waiting requests count four times (vLLM's data-parallel balancer: 4 x waiting + running)."""
        scheduler = self.schedulers[replica]
        return 4 * (scheduler.num_waiting + self._queued[replica]) + scheduler.num_running

    def send(self, replica: int, request: Request) -> None:
        """Put a request into the inbox of a replica."""
        self._inbox.append((replica, request))
        self._queued[replica] += 1
        self._ring()

    def close(self) -> None:
        """No request will follow."""
        self._closed = True
        self._ring()

    def run(self) -> Process:
        """The group's SimPy process."""
        core = run_engine(self.schedulers, self._asynchronous)
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
            case Arrivals(block):
                return (yield from self._arrivals(block))
            case Agree(has_step):
                return has_step  # all replicas of the group are in this process

    def _arrivals(self, block: bool) -> Generator[simpy.Event, Any, Arrived]:
        if block and not self._inbox and not self._closed:
            self._bell = self._env.event()
            yield self._bell
        arrived = Arrived(tuple(self._inbox), self._closed)
        self._inbox = []
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
        self._device_free_s = start + seconds
        self._record.device_busy_s += seconds
        self._tickets.append((plans, self._env.timeout(start + seconds - self._env.now)))
        return len(self._tickets) - 1

    def _collect(self, ticket: int) -> Generator[simpy.Event, Any, tuple[StepResult | None, ...]]:
        plans, done = self._tickets[ticket]
        self._tickets[ticket] = ((), done)
        yield done
        self._note_step(plans)
        return tuple(None if plan is None else self._result(plan) for plan in plans)

    def _result(self, plan: StepPlan) -> StepResult:
        draw = self._acceptance.next
        return StepResult(tuple([draw(rows.request_id) for rows in plan.decode]))

    def _note_step(self, plans: Sequence[StepPlan | None]) -> None:
        record = self._record
        decodes = rows = prefill = 0
        for plan in plans:
            if plan is not None:
                decodes += len(plan.decode)
                rows += len(plan.decode) * (plan.decode[0].drafts + 1) if plan.decode else 0
                prefill += sum(c.rows for c in plan.prefill)
        record.step_end_s.append(self._env.now)
        record.step_decodes.append(decodes)
        record.step_decode_rows.append(rows)
        record.step_prefill_rows.append(prefill)

    def _deliver(self, delivery: Deliver) -> Process:
        most = max((len(out.tokens) for out in delivery.outputs if out is not None), default=0)
        yield from self._busy(self._host.deliver_seconds(most))
        now, record = self._env.now, self._record
        total = 0
        for output in delivery.outputs:
            if output is None:
                continue
            for request_id, num_tokens in output.tokens:
                record.deliver(request_id, num_tokens, now)
                total += num_tokens
            for request_id in output.finished:
                record.requests[request_id].finish_s = now
                self._acceptance.forget(request_id)
                self._on_finish(request_id)
        record.delivery_s.append(now)
        record.delivery_tokens.append(total)

    def _busy(self, seconds: float) -> Process:
        """Hold the engine's CPU thread."""
        with self._cpu.request() as turn:
            yield turn
            yield self._env.timeout(seconds)
