"""The `sim` backend: serves a workload on the step groups of a deployment, in simulated time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from typing import Any

import simpy

from backends.sim.group import StepGroup
from backends.sim.steptime import StepTimer
from backends.sim.timeline import simulate_step
from backends.sim.verifier import Verifier
from deepinfer.cost.model import CostModel
from deepinfer.engine.backend import engine_request
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.shape import ReplicaLoad, step_shape
from deepinfer.metrics.record import RunRecord
from deepinfer.metrics.timeline import Span
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.generate import RequestSpec
from deepinfer.workload.spec import Arrivals, ClosedLoop, Workload

WARM_UP = 0.2
"""Share of the time from an open loop's first arrival to its last that passes before measurement starts."""


class SimBackend:
    """Runs plans in simulation; deterministic: the same plan gives the same record, event by event."""

    def __init__(self, check_integrity: bool = False, every_step: bool = False) -> None:
        self._check_integrity, self._every_step = check_integrity, every_step

    def run(
        self, deployment: Deployment, workload: Workload, acceptance: Acceptance, requests: Sequence[RequestSpec]
    ) -> RunRecord:
        """Serve the requests as the workload's arrivals say and return what happened."""
        verifier = Verifier(acceptance, workload.seed, deployment.settings.nextn, len(requests))
        run = _Run(deployment, workload.arrivals, verifier, len(requests))
        for group in run.groups:
            group.check_integrity, group.every_step = self._check_integrity, self._every_step
        return run.serve(requests)

    def timeline(self, deployment: Deployment, num_requests: int, context: float) -> list[Span]:
        """Operators of one step in which every attention replica decodes `num_requests`, as spans."""
        load = ReplicaLoad(num_requests, deployment.settings.nextn, context)
        rows = float(load.num_rows)
        shape = step_shape(load, rows, rows, deployment.settings.graph_rows)
        return simulate_step(deployment.graph(), shape, CostModel(deployment.cluster.accelerator))


class _Run:
    """One simulation: the step groups, the users who send requests, and the record."""

    def __init__(self, deployment: Deployment, arrivals: Arrivals, verifier: Verifier, num_requests: int) -> None:
        self.env = simpy.Environment()
        self._arrivals = arrivals
        self._block_tokens = deployment.settings.block_tokens
        num_gpus = deployment.replicas * deployment.gpus_per_replica
        self.record = RunRecord(num_requests, num_gpus, deployment.step_groups)
        timer = StepTimer(deployment, CostModel(deployment.cluster.accelerator))
        self.groups = [
            StepGroup(self.env, deployment, timer, verifier, self.record, self._finished)
            for _ in range(deployment.step_groups)
        ]
        self._places = [(g, r) for g in self.groups for r in range(len(g.schedulers))]
        self._next: Iterator[RequestSpec] = iter(())
        self._last_sent = self.env.event()

    def serve(self, requests: Sequence[RequestSpec]) -> RunRecord:
        self._next = iter(requests)
        for group in self.groups:
            self.env.process(group.run())
        record = self.record
        if isinstance(self._arrivals, ClosedLoop):
            self._serve_closed(self._arrivals)
        else:
            self.env.process(self._open_loop(requests))
            self.env.run()
            # Leave out the filling and the emptying of the system.
            first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
            record.window_start_s = first_s + WARM_UP * (last_s - first_s)
            record.window_end_s = last_s if last_s > first_s else self.env.now
        for group in self.groups:
            group.settle()
            for scheduler in group.schedulers:
                record.num_preemptions += scheduler.num_preemptions
                record.num_hit_tokens += scheduler.num_hit_tokens
                record.num_prompt_tokens += scheduler.num_prompt_tokens
        return record

    def _serve_closed(self, arrivals: ClosedLoop) -> None:
        """Run until the time is over, or the last request is sent: until then every user is busy."""
        self.env.process(self._ramp(arrivals))
        start_s = arrivals.ramp_s + arrivals.warm_up_s
        over: simpy.Event = self._last_sent
        if arrivals.measure_s is not None:
            over = over | self.env.timeout(start_s + arrivals.measure_s)
        self.env.run(until=over)
        self.record.window_start_s, self.record.window_end_s = start_s, self.env.now

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
        for request in self._next:
            if self._send(request):
                return
        if not self._last_sent.triggered:
            self._last_sent.succeed()

    def _send(self, spec: RequestSpec) -> bool:
        """Give a request to the least loaded attention replica, the first of equals; False when it cannot fit."""
        now = self.env.now
        request = engine_request(spec, self._block_tokens, now)
        group, replica = min(self._places, key=lambda place: place[0].load(place[1]))
        self.record.arrival_s[spec.id] = now
        fits = group.schedulers[replica].fits(request)
        if fits:
            group.send(replica, request)
        else:
            self.record.refused.append(spec.id)
        return fits
