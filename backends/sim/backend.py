"""The `sim` backend: serves a workload on the step groups of a deployment, in simulated time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import simpy

from backends.sim.group import AcceptanceTable, StepGroup
from backends.sim.steptime import StepTimer
from backends.sim.timeline import simulate_step
from deepinfer.cost.model import CostModel
from deepinfer.engine.backend import engine_request
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.shape import ReplicaLoad, step_shape
from deepinfer.layout.plan import Plan
from deepinfer.metrics.record import RequestRecord, RunRecord
from deepinfer.metrics.timeline import Span
from deepinfer.workload.generate import RequestSpec
from deepinfer.workload.spec import ClosedLoop


class SimBackend:
    """Runs plans in simulation; deterministic: the same plan gives the same record, event by event."""

    def __init__(self, check_integrity: bool = False) -> None:
        self._check_integrity = check_integrity

    def run(self, plan: Plan, deployment: Deployment, requests: Sequence[RequestSpec]) -> RunRecord:
        """Serve the requests as the plan's arrivals say and return what happened."""
        run = _Run(plan, deployment, CostModel(deployment.cluster.accelerator))
        for group in run.groups:
            group.check_integrity = self._check_integrity
        return run.serve(requests)

    def timeline(self, deployment: Deployment, costs: CostModel, num_requests: int, context: float) -> list[Span]:
        """Operators of one step in which every attention replica decodes `num_requests`, as spans."""
        load = ReplicaLoad(num_requests, deployment.settings.nextn, context, ())
        rows = float(load.num_rows)
        shape = step_shape(load, rows, rows, deployment.settings.graph_rows)
        return simulate_step(deployment.graph(), shape, costs)


class _Run:
    """One simulation: the groups, the users who send requests, and the record."""

    def __init__(self, plan: Plan, deployment: Deployment, costs: CostModel) -> None:
        self.env = simpy.Environment()
        self._arrivals = plan.workload.arrivals
        self._block_tokens = deployment.settings.block_tokens
        gpus = deployment.replicas * deployment.layout.num_ranks
        self.record = RunRecord(gpus, deployment.step_groups)
        acceptance = AcceptanceTable(plan.acceptance, plan.workload.seed, deployment.settings.nextn)
        timer = StepTimer(deployment, costs)
        self.groups = [
            StepGroup(self.env, deployment, timer, acceptance, self.record, self._finished)
            for _ in range(deployment.step_groups)
        ]
        self._places = [(g, r) for g in self.groups for r in range(len(g.schedulers))]
        self._next: Iterator[RequestSpec] = iter(())
        self._last_sent = self.env.event()

    def serve(self, requests: Sequence[RequestSpec]) -> RunRecord:
        self._next = iter(requests)
        for group in self.groups:
            self.env.process(group.run())
        if isinstance(self._arrivals, ClosedLoop):
            self._serve_closed(self._arrivals)
        else:
            self.env.process(self._open_loop(requests))
            self.env.run()
            self.record.window_end_s = self.env.now
        for group in self.groups:
            for scheduler in group.schedulers:
                self.record.num_preemptions += scheduler.num_preemptions
                self.record.num_hit_tokens += scheduler.num_hit_tokens
                self.record.num_prompt_tokens += scheduler.num_prompt_tokens
        return self.record

    def _serve_closed(self, arrivals: ClosedLoop) -> None:
        """Run until the last request is sent: every user is busy from the end of the ramp to then."""
        self.env.process(self._ramp(arrivals))
        self.env.run(until=self._last_sent)
        self.record.window_start_s = arrivals.ramp_s
        self.record.window_end_s = self.env.now

    def _open_loop(self, requests: Sequence[RequestSpec]) -> Generator[simpy.Event, Any, None]:
        for request in requests:
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self._send(request)
        for group in self.groups:
            group.close()

    def _ramp(self, arrivals: ClosedLoop) -> Generator[simpy.Event, Any, None]:
        for _ in range(arrivals.concurrency):
            self._send_next()
            yield self.env.timeout(arrivals.ramp_s / arrivals.concurrency)

    def _finished(self, request_id: int) -> None:
        del request_id
        if isinstance(self._arrivals, ClosedLoop):
            self._send_next()

    def _send_next(self) -> None:
        request = next(self._next, None)
        if request is not None:
            self._send(request)
        elif not self._last_sent.triggered:
            self._last_sent.succeed()

    def _send(self, spec: RequestSpec) -> None:
        """Give a request to the least loaded attention replica, the first of equals."""
        now = self.env.now
        request = engine_request(spec, self._block_tokens, now)
        group, replica = min(self._places, key=lambda place: place[0].load(place[1]))
        self.record.requests[spec.id] = RequestRecord(spec.id, spec.prompt_tokens, now)
        if group.schedulers[replica].fits(request):
            group.send(replica, request)
        else:
            self.record.refused.append(spec.id)
            self._finished(spec.id)
