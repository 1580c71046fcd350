"""Screening: every point of the space through the same closed form that the simulator uses, as arrays.

Steady state of one attention replica with R requests: each step verifies 1 + nextn rows per decoding request and
keeps tau of them; to feed that, prefill has to compute isl / osl prompt rows per kept token. A chunk of C rows
therefore runs in a share f of the steps, and since the m replicas of a group meet in every expert layer, a step is
slowed by prefill when any of them has a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal, cast

import numpy as np
import numpy.typing as npt

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.graph.build import GraphFeatures, build_graph, drafts_in_graph
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.host import HostProfile
from deepinfer.hardware.spec import ClusterSpec
from deepinfer.layout.memory import (
    STATE_SLOTS_RATIO,
    kv_bytes_per_token,
    state_bytes_per_request,
    weight_items,
    workspace_bytes,
)
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import Slo
from deepinfer.layout.settings import EngineSettings
from deepinfer.scheduler.speculation import Acceptance
from planner.space import Refusals, SearchSpace

Floats = npt.NDArray[np.float64]
Replay = Literal["off", "compact"]

UTILIZATION = 0.90
"""Share of the most a queue could serve that a plan is loaded to: queues grow without bound towards 1."""


@dataclass(frozen=True)
class Load:
    """What the workload asks for, in means: prompt rows to compute, outputs, and requests/s for the whole cluster.

    `isl` counts all prompt tokens, `computed` those not expected in the prefix cache. Without a `rate` every point
    runs at its own number of requests.
    """

    isl: float
    computed: float
    osl: float
    rate: float | None = None


@dataclass(frozen=True)
class Candidate:
    """One layout with the settings that its graph depends on; points differ in the other settings."""

    layout: ParallelLayout
    replay: Replay
    replicas: int


@dataclass(frozen=True)
class Points:
    """Screened points as parallel arrays. `candidate` indexes `Screening.candidates`; rates are per cluster GPU."""

    candidate: npt.NDArray[np.int64]
    max_num_seqs: npt.NDArray[np.int64]
    chunk_rows: npt.NDArray[np.int64]
    nextn: npt.NDArray[np.int64]
    requests: Floats
    step_s: Floats
    tpot_s: Floats
    ttft_s: Floats
    output_per_gpu: Floats
    capacity_rps: Floats

    def __len__(self) -> int:
        return len(self.candidate)

    def take(self, index: npt.NDArray[np.int64] | npt.NDArray[np.bool_]) -> Points:
        """A subset of the points."""
        return Points(*(getattr(self, f.name)[index] for f in fields(self)))


@dataclass(frozen=True)
class Screening:
    """All points that are feasible in memory and load, and the refused ones counted by reason.

    `best_capacity_rps` is the most requests/s that any point which fits in memory could serve.
    """

    candidates: tuple[Candidate, ...]
    points: Points
    refusals: Refusals
    best_capacity_rps: float


class Screen:
    """Evaluates a search space for one cluster, workload and acceptance."""

    def __init__(
        self,
        space: SearchSpace,
        cluster: ClusterSpec,
        load: Load,
        acceptance: Acceptance,
        host: HostProfile,
        slo: Slo,
    ) -> None:
        self.space, self.cluster, self.load, self.acceptance = space, cluster, load, acceptance
        self.host, self.slo = host, slo
        self._costs = CostModel(cluster.accelerator)
        self._defaults = EngineSettings()
        self.refusals = Refusals()
        self._best_capacity_rps = 0.0

    def run(self) -> Screening:
        """Screen every point of the space."""
        nextns = self.space.nextn(self.refusals)
        candidates: list[Candidate] = []
        parts: list[Points] = []
        for layout in self.space.layouts(self.refusals):
            replicas = self.space.gpus // layout.num_ranks
            for replay in self.space.replay_modes():
                candidate = Candidate(layout, cast("Replay", replay), replicas)
                found = [
                    p for group in self._graph_groups(nextns) if (p := self._points(candidate, group, len(candidates)))
                ]
                if found:
                    candidates.append(candidate)
                    parts += found
        return Screening(tuple(candidates), _concatenate(parts), self.refusals, self._best_capacity_rps)

    def _graph_groups(self, nextns: list[int]) -> list[list[int]]:
        """Draft lengths that share one graph."""
        groups: dict[int, list[int]] = {}
        for nextn in nextns:
            groups.setdefault(drafts_in_graph(self.space.model, nextn), []).append(nextn)
        return list(groups.values())

    def _points(self, candidate: Candidate, nextns: list[int], number: int) -> Points | None:
        """The feasible points of one candidate over requests, chunk and the draft lengths of one graph."""
        grid = [
            (requests * candidate.layout.cp, chunk * candidate.layout.cp, nextn)
            for nextn in nextns
            for chunk in self.space.chunk_rows_per_gpu
            for requests in self.space.requests_per_gpu
        ]
        table = np.asarray(grid, dtype=np.int64)
        table = table[self._fits(candidate.layout, table)]
        if not len(table):
            return None
        graph = build_graph(
            self.space.model, candidate.layout, self.cluster, GraphFeatures("mixed", candidate.replay, nextns[-1])
        )
        points = self._steady_state(candidate, graph, table, number)
        self._best_capacity_rps = max(self._best_capacity_rps, float(points.capacity_rps.max()))
        return points if self.load.rate is None else self._at_rate(candidate, points)

    def _fits(self, layout: ParallelLayout, table: npt.NDArray[np.int64]) -> npt.NDArray[np.bool_]:
        """Which rows (max_num_seqs, chunk, nextn) leave KV for all requests at full length; the rest are refused."""
        model, settings = self.space.model, self._defaults
        usable = self.cluster.accelerator.hbm_bytes.value * settings.memory_utilization
        weights = sum(size for _, size in weight_items(model, layout))
        seqs, chunk, nextn = (table[:, i].astype(np.float64) for i in range(3))
        state = np.asarray([state_bytes_per_request(model, int(n)) for n in range(int(nextn.max()) + 1)])
        work = workspace_bytes(model, layout, seqs * (1 + nextn) + chunk, seqs * (1 + nextn))
        slots = np.ceil(STATE_SLOTS_RATIO * seqs) * state[table[:, 2]]
        left = usable - weights - work - slots
        tokens = self.load.isl + self.load.osl + nextn + 1
        blocks = np.ceil(tokens / settings.block_tokens) * seqs
        per_token = np.asarray([kv_bytes_per_token(model, int(n)) for n in range(int(nextn.max()) + 1)])
        fits: npt.NDArray[np.bool_] = left >= blocks * per_token[table[:, 2]] * settings.block_tokens
        too_heavy = np.asarray(weights + work > usable)
        self.refusals.add("weights and workspace exceed the GPU's memory", f"{layout}", int(too_heavy.sum()))
        self.refusals.add("the KV of all requests does not fit", f"{layout}", int((~fits & ~too_heavy).sum()))
        return fits

    def _steady_state(
        self, candidate: Candidate, graph: ExecutionGraph, table: npt.NDArray[np.int64], number: int
    ) -> Points:
        layout, load = candidate.layout, self.load
        seqs, chunk, nextn = (table[:, i].astype(np.float64) for i in range(3))
        taus = np.asarray([self.acceptance.tau(int(n)) for n in range(int(nextn.max()) + 1)])
        tau = taus[table[:, 2]]
        # Prompt rows per step that keep `decoding` requests supplied; a chunk cannot be exceeded, so fewer decode.
        rows_per_token = load.computed / load.osl
        decoding = np.minimum(seqs, chunk / np.maximum(rows_per_token * tau, 1e-9))
        share = np.minimum(decoding * tau * rows_per_token / chunk, 1.0)
        quiet_s, busy_s = self._step_seconds(candidate, graph, decoding, chunk, nextn, share)
        replicas = layout.step_group // layout.replica_ranks
        any_busy = 1.0 - (1.0 - np.minimum(share, 1.0)) ** replicas
        step_s = any_busy * busy_s + (1.0 - any_busy) * quiet_s
        # A prompt runs in whole chunks behind the one being computed (M/D/1 wait on the replica's prefill).
        busy = np.minimum(share, 0.99)
        prompt_s = np.ceil(load.computed / chunk) * busy_s
        ttft_s = prompt_s * (1.0 + busy / (2.0 * (1.0 - busy))) + 0.5 * step_s
        # Requests that wait for or run their prefill are not decoding.
        lifetime = ttft_s + load.osl / tau * step_s
        served = np.minimum(seqs / lifetime, decoding * tau / step_s / load.osl)
        gpus_used = candidate.replicas * layout.num_ranks
        replicas_total = gpus_used / layout.replica_ranks
        return Points(
            candidate=np.full(len(table), number),
            max_num_seqs=table[:, 0],
            chunk_rows=table[:, 1],
            nextn=table[:, 2],
            requests=seqs,
            step_s=step_s,
            tpot_s=step_s / tau,
            ttft_s=ttft_s,
            output_per_gpu=served * load.osl * replicas_total / self.space.gpus,
            capacity_rps=served * replicas_total,
        )

    def _step_seconds(
        self,
        candidate: Candidate,
        graph: ExecutionGraph,
        decoding: Floats,
        chunk: Floats,
        nextn: Floats,
        share: Floats,
    ) -> tuple[Floats, Floats]:
        """Seconds of a step without and with a prefill chunk on the busiest replica, host time included."""
        load, graph_rows = self.load, self._defaults.graph_rows
        rows = 1.0 + nextn
        context = np.full_like(decoding, load.isl + load.osl / 2)
        padded = np.ceil(decoding * rows / graph_rows) * graph_rows / rows
        quiet = StepShape(Sequences(padded, rows, context, rows, rows))
        chunks_per_prompt = np.maximum(load.computed / chunk, 1.0)
        kept = chunk
        if candidate.replay == "compact":
            # Only the last chunk of a prompt holds kept rows; the others run one placeholder.
            kept = np.minimum(chunk, self._defaults.keep_tokens * np.maximum(chunk / load.computed, 1.0))
            kept = kept / chunks_per_prompt + (1.0 - 1.0 / chunks_per_prompt)
        before = np.full_like(chunk, load.isl - load.computed) + np.maximum(load.computed - chunk, 0.0) / 2
        prompt = Sequences(np.ones_like(chunk), chunk, before, kept, 1.0 / chunks_per_prompt)
        busy = StepShape(
            Sequences(decoding, rows, context, rows, rows),
            (prompt,),
            mean_rows=decoding * rows + share * chunk,
            mean_kept_rows=decoding * rows + share * kept,
        )
        host = self.host
        seconds = []
        for shape, captured in ((quiet, True), (busy, False)):
            device_s = np.asarray(step_cost(graph, shape, self._costs).seconds) + host.step_gap_s.value
            host_s = host.submit_seconds(0, len(graph.steps), captured) + decoding * (
                host.schedule_s_per_request.value + host.deliver_s_per_request.value
            )
            seconds.append(np.maximum(device_s, host_s))
        return seconds[0], seconds[1]

    def _at_rate(self, candidate: Candidate, points: Points) -> Points | None:
        """Points as they run under the given rate, one for each chunk and draft length.

        It may run as many requests as its limits bear (`max_num_seqs`), which sets what it could serve
        (`capacity_rps`, `output_per_gpu`); its latencies are those at the load that the rate brings.
        """
        rate, slo = self.load.rate or 0.0, self.slo
        bears = (points.tpot_s <= slo.tpot_s) & (points.ttft_s <= slo.ttft_s)
        served = points.capacity_rps * UTILIZATION >= rate
        self.refusals.add(f"cannot serve {rate:g} requests/s", f"{candidate.layout}", int((~served).sum()))
        keep: list[int] = []
        at_load: list[int] = []
        for chunk, nextn in sorted({(int(c), int(n)) for c, n in zip(points.chunk_rows, points.nextn, strict=True)}):
            group = (points.chunk_rows == chunk) & (points.nextn == nextn) & served
            if (group & bears).any():
                within = np.flatnonzero(group & bears)
                keep.append(int(within[np.argmax(points.capacity_rps[within])]))
                at_load.append(int(np.flatnonzero(group)[np.argmin(points.max_num_seqs[group])]))
        if not keep:
            return None
        most, now = points.take(np.asarray(keep)), points.take(np.asarray(at_load))
        replicas = candidate.replicas * candidate.layout.num_ranks // candidate.layout.replica_ranks
        in_system = rate / replicas * (now.ttft_s + self.load.osl * now.tpot_s)
        return replace(most, requests=in_system, step_s=now.step_s, tpot_s=now.tpot_s, ttft_s=now.ttft_s)


def _concatenate(parts: list[Points]) -> Points:
    """Points of all candidates as one; no parts make no points."""
    none = np.zeros(0, dtype=np.int64)
    empty = Points(none, none, none, none, *(np.zeros(0) for _ in fields(Points)[4:]))
    return Points(*(np.concatenate([getattr(p, f.name) for p in [empty, *parts]]) for f in fields(Points)))


def pareto(x: Floats, y: Floats) -> npt.NDArray[np.int64]:
    """Indices of points that no other beats in both coordinates (larger is better), by increasing x."""
    order = np.lexsort((-y, -x))
    best = np.maximum.accumulate(y[order])
    first = np.concatenate(([True], y[order][1:] > best[:-1]))
    return order[first][::-1]
