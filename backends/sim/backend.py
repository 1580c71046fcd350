"""The `sim` backend: serves a workload on the pools of a plan, in simulated time."""

from __future__ import annotations

from collections.abc import Generator, Iterator, Sequence
from dataclasses import replace
from typing import Any

import simpy

from backends.sim.amid import Amid
from backends.sim.group import StepGroup
from backends.sim.handover import FromHandOver, HandOver
from backends.sim.outlet import ToUsers
from backends.sim.pool import SimPool
from backends.sim.timeline import simulate_step
from backends.sim.verifier import Verifier
from deepinfer.cost.model import CostModel
from deepinfer.engine.backend import engine_request
from deepinfer.engine.deployment import Deployment, by_role
from deepinfer.engine.shape import ReplicaLoad, step_shape
from deepinfer.engine.transfer import Side, kv_transfer
from deepinfer.metrics.record import PoolRecord, RunRecord
from deepinfer.metrics.timeline import Span
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.generate import RequestSpec
from deepinfer.workload.spec import ClosedLoop, SteadyStart, Workload, open_loop_window
from deepinfer.workload.steady import Life, lives_amid


class SimBackend:
    """Runs plans in simulation; deterministic: the same plan gives the same record, event by event."""

    def __init__(self, check_integrity: bool = False, every_step: bool = False) -> None:
        self._check_integrity, self._every_step = check_integrity, every_step

    def run(
        self,
        deployments: Sequence[Deployment],
        workload: Workload,
        acceptance: Acceptance,
        requests: Sequence[RequestSpec],
    ) -> RunRecord:
        """Serve the requests as the workload's arrivals say and return what happened."""
        run = _Run(deployments, workload, acceptance, len(requests))
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
    """One simulation: the pools, the users who send requests, and the record."""

    def __init__(
        self, deployments: Sequence[Deployment], workload: Workload, acceptance: Acceptance, num_requests: int
    ) -> None:
        self.env = simpy.Environment()
        self._arrivals = workload.arrivals
        prefilling, serving = by_role(deployments)
        self._block_tokens = (prefilling or serving).settings.block_tokens
        self.record = record = RunRecord(num_requests, sum(d.num_gpus for d in deployments), serving.step_groups)
        self._hand_over: HandOver | None = None
        outlet = ToUsers(record, self._finished)
        if prefilling is not None:
            giver, taker = (Side(d.layout, d.cluster) for d in (prefilling, serving))
            transfer = kv_transfer(serving.model, serving.settings.nextn, giver, taker)
            self._hand_over = HandOver(self.env, transfer, record, self._finished, self._close_if_done)
            outlet = FromHandOver(record, self._finished, self._hand_over)

        def verifier(deployment: Deployment) -> Verifier:
            return Verifier(acceptance, workload.seed, deployment.settings.nextn, num_requests)

        self._verifier = verifier(serving)
        self._serving = SimPool(self.env, serving, self._verifier, record.steps, outlet)
        self._entry = self._serving
        if prefilling is not None and self._hand_over is not None:
            record.prefill = PoolRecord(prefilling.num_gpus, prefilling.step_groups)
            self._entry = SimPool(self.env, prefilling, verifier(prefilling), record.prefill.steps, self._hand_over)
            self._hand_over.decode = self._serving
            self._hand_over.replays_windows = serving.scheduler_config().transfer_window > 0
        self._next: Iterator[RequestSpec] = iter(())
        self._last_sent = self.env.event()
        self._all_sent = False

    @property
    def groups(self) -> list[StepGroup]:
        """Step groups of all pools."""
        prefilling = [] if self._entry is self._serving else self._entry.groups
        return [*prefilling, *self._serving.groups]

    def serve(self, requests: Sequence[RequestSpec]) -> RunRecord:
        self._next = iter(requests)
        for group in self.groups:
            self.env.process(group.run())
        record, amid = self.record, None
        if isinstance(self._arrivals, ClosedLoop) and self._arrivals.steady is not None:
            amid = self._serve_steadily(self._arrivals.concurrency, self._arrivals.steady, requests)
        elif isinstance(self._arrivals, ClosedLoop):
            self._serve_closed(self._arrivals)
        else:
            self.env.process(self._open_loop(requests))
            self.env.run()
            first_s, last_s = requests[0].arrival_s, requests[-1].arrival_s
            record.window_start_s, record.window_end_s = open_loop_window(first_s, last_s, self.env.now)
        for group in self.groups:
            group.settle()
        if amid is not None:
            amid.measure(self.env.now)
        for scheduler in (s for group in self.groups for s in group.schedulers):
            record.num_preemptions += scheduler.num_preemptions
            record.num_hit_tokens += scheduler.num_hit_tokens
            record.num_prompt_tokens += scheduler.num_prompt_tokens
        return record

    def _serve_closed(self, arrivals: ClosedLoop) -> None:
        """Run until the time is over, or the last request is sent: until then every user is busy."""
        self.env.process(self._ramp(arrivals))
        over: simpy.Event = self._last_sent
        if arrivals.measured_until_s is not None:
            over = over | self.env.timeout(arrivals.measured_until_s)
        self.env.run(until=over)
        self.record.window_start_s, self.record.window_end_s = arrivals.measured_from_s, self.env.now

    def _serve_steadily(self, users: int, steady: SteadyStart, requests: Sequence[RequestSpec]) -> Amid:
        """Begin amid the users' requests, and run until the time is over or the last request is sent."""
        self._next = iter(requests[users:])
        lives = lives_amid(requests[:users], steady)
        amid = Amid(lives, steady, self._verifier, self.record)
        self.env.process(self._join(amid, lives))
        self.env.run(until=self._last_sent | self.env.timeout(steady.settle_s + steady.measure_s))
        return amid

    def _join(self, amid: Amid, lives: Sequence[Life]) -> Generator[simpy.Event, Any, None]:
        """Give requests amid their lives to the pool where they decode, each when its prompt is computed."""
        for life in lives:
            if life.joins_s > self.env.now:
                yield self.env.timeout(life.joins_s - self.env.now)
            request = amid.join(life, self._block_tokens, self.env.now)
            if not self._serving.fits(request):
                self.record.refused.append(request.id)
            elif request.generated_tokens < request.max_new_tokens:
                self._serving.send(request)
                continue
            self._send_next()

    def _open_loop(self, requests: Sequence[RequestSpec]) -> Generator[simpy.Event, Any, None]:
        for request in requests:
            if request.arrival_s > self.env.now:
                yield self.env.timeout(request.arrival_s - self.env.now)
            self._send(request)
        self._all_sent = True
        self._close_if_done()

    def _close_if_done(self) -> None:
        """Tell the pools when nothing will follow: no request, and no KV on its way between them."""
        if self._all_sent and not (self._hand_over and self._hand_over.num_open):
            for pool in {self._entry, self._serving}:
                pool.close()

    def _ramp(self, arrivals: ClosedLoop) -> Generator[simpy.Event, Any, None]:
        for _ in range(arrivals.concurrency):
            self._send_next()
            yield self.env.timeout(arrivals.ramp_s / arrivals.concurrency)

    def _finished(self) -> None:
        if isinstance(self._arrivals, ClosedLoop):
            self._send_next()

    def _send_next(self) -> None:
        for request in self._next:
            if self._send(request):
                return
        if not self._last_sent.triggered:
            self._last_sent.succeed()

    def _send(self, spec: RequestSpec) -> bool:
        """Give a request to the pool where it starts; False when it cannot fit in memory there or where it decodes."""
        request = engine_request(spec, self._block_tokens, self.env.now)
        self.record.arrival_s[spec.id] = self.env.now
        if self._hand_over is None:
            fits = self._serving.fits(request)
            if fits:
                self._serving.send(request)
        else:
            first = replace(request, max_new_tokens=1, keeps_blocks=True)
            then = replace(request, block_hashes=(), transferred_tokens=request.prompt_tokens)
            fits = self._entry.fits(first) and self._serving.fits(then)
            if fits:
                self._hand_over.enter(then, self._entry.send(first))
        if not fits:
            self.record.refused.append(spec.id)
        return fits
