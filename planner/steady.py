"""Engines in steady state, through the same closed form that the simulator uses, as arrays.

An attention replica with R requests: each step verifies 1 + nextn rows per decoding request and keeps tau of them; to
feed that, prefill has to compute `computed` / osl prompt rows per kept token. A chunk of C rows therefore runs in a
share f of the steps, and since the m replicas of a group meet in every expert layer, a step is slowed by prefill when
any of them has a chunk. A pool that only decodes is the same with the replayed windows as its prompt rows; one that
only prefills computes full chunks.
"""

from __future__ import annotations

from dataclasses import dataclass, fields

import numpy as np
import numpy.typing as npt

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel, load_profile
from deepinfer.graph.build import build_graph, drafts_in_graph
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.host import HostProfile
from deepinfer.layout.memory import (
    STATE_SLOTS_RATIO,
    kv_bytes_per_token,
    state_bytes_per_request,
    weight_items,
    workspace_bytes,
)
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import ExpertLoad
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.spec import ModelSpec
from deepinfer.numeric import Floats, Ints, Num
from deepinfer.scheduler.speculation import Acceptance
from planner.columns import Columns
from planner.resources import start_ups_longer
from planner.space import DECODE_CHUNK_ROWS_PER_GPU, PREFILL_ROWS_PER_GPU, EngineKind, Refusals, Replay, SearchSpace

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
class EnginePoints(Columns):
    """Single engines as parallel arrays; `kind` indexes a list of kinds. `capacity_rps` is one engine's.

    `ttft_s` is what this engine adds to the time to first token, its queue at `UTILIZATION` included where it prefills.
    """

    kind: Ints
    max_num_seqs: Ints
    chunk_rows: Ints
    nextn: Ints
    step_s: Floats
    tpot_s: Floats
    ttft_s: Floats
    capacity_rps: Floats


class SteadyState:
    """Evaluates kinds of engines of one model on one cluster for one load."""

    def __init__(
        self,
        space: SearchSpace,
        load: Load,
        acceptance: Acceptance,
        host: HostProfile,
        expert_load: ExpertLoad,
        start_ups: float = 1.0,
    ) -> None:
        self.space, self.model, self.cluster = space, space.model, space.cluster
        self.load, self.acceptance, self.host, self.expert_load = load, acceptance, host, expert_load
        self._start_ups = start_ups
        profile = load_profile(self.cluster.accelerator.family)
        self._costs = CostModel(self.cluster.accelerator, start_ups_longer(profile, start_ups))
        self._defaults = EngineSettings()
        self._known_bytes: dict[tuple[str | None, int, int, int], tuple[Floats, Floats]] = {}

    def on(self, space: SearchSpace) -> SteadyState:
        """The same for another space of the same model on the same cluster."""
        return SteadyState(space, self.load, self.acceptance, self.host, self.expert_load, self._start_ups)

    def mixed(self, kind: EngineKind, number: int, nextns: list[int], refusals: Refusals) -> EnginePoints | None:
        """Feasible engines of a kind that prefill and decode: requests x chunk x draft length."""
        return self._serving(kind, number, nextns, self.space.chunk_rows_per_gpu, self.load, refusals)

    def decode(self, kind: EngineKind, number: int, nextns: list[int], refusals: Refusals) -> EnginePoints | None:
        """Feasible engines of a kind that decode what others prefilled."""
        replayed = 0.0
        chunks: tuple[int, ...] = DECODE_CHUNK_ROWS_PER_GPU[:1]
        if self.model.supports_compact_replay:
            replayed = float(max(self.model.window, self._defaults.keep_tokens))
            chunks = DECODE_CHUNK_ROWS_PER_GPU
        load = Load(self.load.isl, min(replayed, self.load.isl), self.load.osl)
        return self._serving(kind, number, nextns, chunks, load, refusals)

    def prefill(self, kind: EngineKind, number: int, refusals: Refusals) -> EnginePoints | None:
        """Feasible engines of a kind that only prefill: rows of a step."""
        steps = np.asarray(PREFILL_ROWS_PER_GPU, dtype=np.int64) * kind.layout.replica_ranks
        seqs: Ints = prefill_requests(steps, self.load)
        table: Ints = np.stack([seqs, steps - seqs, np.zeros_like(steps)], axis=1)
        table = table[self._fits(kind, table, self.load.isl, refusals)]
        if not len(table):
            return None
        graph = self._graph(kind, 0)
        rows: Floats = (table[:, 0] + table[:, 1]).astype(np.float64)
        step_s = self._prefill_step_seconds(kind, graph, rows)
        capacity = rows / (self.load.computed * step_s)  # prompts/s of a replica
        # A prompt waits for the step being computed and, at this utilisation, for those before it (M/D/1).
        service = np.ceil(self.load.computed / rows) * step_s
        wait = UTILIZATION / (2.0 * (1.0 - UTILIZATION)) * step_s * np.minimum(1.0, self.load.computed / rows)
        return EnginePoints(
            kind=np.full(len(table), number),
            max_num_seqs=table[:, 0],
            chunk_rows=rows.astype(np.int64),
            nextn=table[:, 2],
            step_s=step_s,
            tpot_s=np.zeros(len(table)),
            ttft_s=service + 0.5 * step_s + wait,
            capacity_rps=capacity * _replicas(kind.layout),
        )

    def _serving(
        self,
        kind: EngineKind,
        number: int,
        nextns: list[int],
        chunks: tuple[int, ...],
        load: Load,
        refusals: Refusals,
    ) -> EnginePoints | None:
        parts = []
        for group in _graph_groups(self.model, nextns):
            grid = [
                (requests * kind.layout.replica_ranks, chunk * kind.layout.replica_ranks, nextn)
                for nextn in group
                for chunk in chunks
                for requests in self.space.requests_per_gpu
            ]
            table = np.asarray(grid, dtype=np.int64)
            table = table[self._fits(kind, table, load.isl + load.osl, refusals)]
            if len(table):
                parts.append(self._steady_state(kind, self._graph(kind, group[-1]), table, number, load))
        return EnginePoints.concatenate(parts) if parts else None

    def _graph(self, kind: EngineKind, nextn: int) -> ExecutionGraph:
        return build_graph(self._model_of(kind), kind.layout, self.cluster, kind.features(nextn, self.expert_load))

    def _model_of(self, kind: EngineKind) -> ModelSpec:
        return self.model.with_kv(kind.kv_format) if kind.kv_format else self.model

    def _fits(self, kind: EngineKind, table: Ints, tokens: float, refusals: Refusals) -> npt.NDArray[np.bool_]:
        """Which rows (max_num_seqs, chunk, nextn) leave KV for all requests at full length; the rest are refused."""
        model, settings, layout = self._model_of(kind), self._defaults, kind.layout
        usable = self.cluster.accelerator.hbm_bytes.value * settings.memory_utilization
        weights = sum(size for _, size in weight_items(model, layout))
        seqs, chunk, nextn = (table[:, i].astype(np.float64) for i in range(3))
        state, per_token = self._bytes(kind, int(nextn.max()))
        work = workspace_bytes(model, layout, seqs * (1 + nextn) + chunk, seqs * (1 + nextn))
        slots = np.ceil(STATE_SLOTS_RATIO * seqs) * state[table[:, 2]]
        left = usable - weights - work - slots
        blocks = np.ceil((tokens + nextn + 1) / settings.block_tokens) * seqs
        fits: npt.NDArray[np.bool_] = left >= blocks * per_token[table[:, 2]] * settings.block_tokens
        too_heavy = np.asarray(weights + work > usable)
        refusals.add("weights and workspace exceed the GPU's memory", f"{kind}", int(too_heavy.sum()))
        refusals.add("the KV of all requests does not fit", f"{kind}", int((~fits & ~too_heavy).sum()))
        return fits

    def _bytes(self, kind: EngineKind, nextn: int) -> tuple[Floats, Floats]:
        """Bytes of a request's state, and of a token's KV on one rank, with 0 to `nextn` drafts."""
        key, layout = (kind.kv_format, kind.layout.tp, kind.layout.dcp, nextn), kind.layout
        if key not in self._known_bytes:
            model, drafts = self._model_of(kind), range(nextn + 1)
            state = np.asarray([state_bytes_per_request(model, n) for n in drafts])
            per_token = np.asarray([kv_bytes_per_token(model, n, layout.tp, layout.dcp) for n in drafts])
            self._known_bytes[key] = (state, per_token)
        return self._known_bytes[key]

    def _steady_state(
        self, kind: EngineKind, graph: ExecutionGraph, table: Ints, number: int, load: Load
    ) -> EnginePoints:
        seqs, chunk, nextn = (table[:, i].astype(np.float64) for i in range(3))
        taus = np.asarray([self.acceptance.tau(int(n)) for n in range(int(nextn.max()) + 1)])
        tau = taus[table[:, 2]]
        # Prompt rows per step that keep `decoding` requests supplied; a chunk cannot be exceeded, so fewer decode.
        rows_per_token = load.computed / load.osl
        decoding = np.minimum(seqs, chunk / np.maximum(rows_per_token * tau, 1e-9))
        share, prompt_rows = _prompt_rows(decoding * tau / load.osl, load.computed, chunk)
        quiet_s, busy_s = self._step_seconds(kind, graph, decoding, prompt_rows, nextn, share, load)
        any_busy = 1.0 - (1.0 - np.minimum(share, 1.0)) ** _replicas(kind.layout)
        step_s = any_busy * busy_s + (1.0 - any_busy) * quiet_s
        ttft_s = 0.5 * step_s
        if load.computed:
            # A prompt runs in whole chunks behind the one being computed (M/D/1 wait on the replica's prefill).
            busy = np.minimum(decoding * tau / load.osl * load.computed / chunk, 0.99)
            ttft_s = ttft_s + np.ceil(load.computed / chunk) * busy_s * (1.0 + busy / (2.0 * (1.0 - busy)))
            # Where prefill is the bottleneck, the requests that do not decode queue for it (Little's law).
            ttft_s = np.maximum(ttft_s, (seqs - decoding) * step_s * load.osl / (decoding * tau))
        # Requests that wait for or run their prefill are not decoding.
        lifetime = ttft_s + load.osl / tau * step_s
        served = np.minimum(seqs / lifetime, decoding * tau / step_s / load.osl)
        return EnginePoints(
            kind=np.full(len(table), number),
            max_num_seqs=table[:, 0],
            chunk_rows=table[:, 1],
            nextn=table[:, 2],
            step_s=step_s,
            tpot_s=step_s / tau,
            ttft_s=ttft_s,
            capacity_rps=served * _replicas(kind.layout),
        )

    def _step_seconds(
        self,
        kind: EngineKind,
        graph: ExecutionGraph,
        decoding: Floats,
        prompt_rows: Floats,
        nextn: Floats,
        share: Floats,
        load: Load,
    ) -> tuple[Floats, Floats]:
        """Seconds of a step without and with prompt rows on the busiest replica, host time included."""
        graph_rows = self._defaults.graph_rows
        rows = 1.0 + nextn
        context = np.full_like(decoding, load.isl + load.osl / 2)
        padded = np.ceil(decoding * rows / graph_rows) * graph_rows / rows
        # Chunks do not matter here: many points are the same step.
        alike, index = np.unique(np.stack([decoding, padded, rows, context]), axis=1, return_inverse=True)
        index = index.reshape(-1)
        quiet = StepShape(
            Sequences(alike[1], alike[2], alike[3], alike[2], alike[2]),
            mean_rows=alike[0] * alike[2],  # padding has no experts to go to
            mean_kept_rows=alike[0] * alike[2],
        )
        if not load.computed:
            quiet_s = step_seconds(graph, quiet, self._costs, self.host, alike[0], captured=True)[index]
            return quiet_s, quiet_s
        prompts = self._prompts(prompt_rows, kind.replay, load, self._defaults.keep_tokens)
        busy = StepShape(
            Sequences(decoding, rows, context, rows, rows),
            (prompts,),
            mean_rows=decoding * rows + share * prompt_rows,
            mean_kept_rows=decoding * rows + share * prompts.count * prompts.kept_rows,
        )
        both = _one_behind_the_other(quiet, busy)
        device_s = np.asarray(step_cost(graph, both, self._costs).seconds)
        num_quiet = alike.shape[1]
        quiet_s = _with_host(graph, device_s[:num_quiet], self.host, alike[0], captured=True)[index]
        return quiet_s, _with_host(graph, device_s[num_quiet:], self.host, decoding, captured=False)

    def _prefill_step_seconds(self, kind: EngineKind, graph: ExecutionGraph, rows: Floats) -> Floats:
        """Seconds of a step of so many prompt rows per replica, none of them kept in bounded layers."""
        prompts = self._prompts(rows, kind.replay, self.load, 1)
        shape, count = StepShape(prefill=(prompts,)), np.asarray(prompts.count)
        return step_seconds(graph, shape, self._costs, self.host, count, captured=False)

    @staticmethod
    def _prompts(rows: Floats, replay: Replay, load: Load, keep_tokens: int) -> Sequences:
        """So many prompt rows as whole prompts, or as a part of one in the middle of it."""
        count, ended = np.maximum(rows / load.computed, 1.0), np.minimum(rows / load.computed, 1.0)
        each = rows / count
        before = load.isl - load.computed + np.maximum(load.computed - rows, 0.0) / 2
        kept = each
        if replay == "compact":
            # Only the last chunk of a prompt holds kept rows; the others run one placeholder.
            kept = np.minimum(each, ended * keep_tokens + (1.0 - ended))
        return Sequences(count, each, before, kept, ended)


def step_seconds(
    graph: ExecutionGraph, shape: StepShape, costs: CostModel, host: HostProfile, requests: Floats, captured: bool
) -> Floats:
    """Seconds from step to step: the longer of what the device and what the host need.

    `requests` are those of an attention replica; steps that are not `captured` launch every kernel.
    """
    return _with_host(graph, np.asarray(step_cost(graph, shape, costs).seconds), host, requests, captured)


def _with_host(graph: ExecutionGraph, device_s: Floats, host: HostProfile, requests: Floats, captured: bool) -> Floats:
    """The longer of what the device, its gap between steps included, and what the host need for a step."""
    host_s = host.submit_seconds(0, len(graph.steps), captured) + requests * (
        host.schedule_s_per_request.value + host.deliver_s_per_request.value
    )
    return np.maximum(device_s + host.step_gap_s.value, host_s)


def _one_behind_the_other(quiet: StepShape, busy: StepShape) -> StepShape:
    """Steps that only decode, then steps with prompts, as one array: a pass over a graph costs little more for both.

    No prompts are prompts of one row, none of which there are.
    """
    assert quiet.decode is not None
    assert busy.decode is not None
    (prompts,) = busy.prefill
    none = np.zeros_like(quiet.decode.count)
    no_prompts = Sequences(none, none + 1.0, none, none + 1.0, none)
    return StepShape(
        _joined(quiet.decode, busy.decode),
        (_joined(no_prompts, prompts),),
        mean_rows=_both(quiet.mean_rows, busy.mean_rows),
        mean_kept_rows=_both(quiet.mean_kept_rows, busy.mean_kept_rows),
    )


def _joined(first: Sequences, second: Sequences) -> Sequences:
    return Sequences(*(_both(getattr(first, f.name), getattr(second, f.name)) for f in fields(Sequences)))


def _both(first: Num | None, second: Num | None) -> Floats:
    return np.concatenate((np.asarray(first), np.asarray(second)))


def _prompt_rows(prompts_per_step: Floats, computed: float, chunk: Floats) -> tuple[Floats, Floats]:
    """The share of a replica's steps that have prompt rows, and how many those have.

    Prompts longer than a chunk keep a replica busy for as many steps as they have chunks; shorter ones that arrive
    between two steps, at random, are computed together.
    """
    alone = np.minimum(prompts_per_step * computed / chunk, 1.0)
    together = -np.expm1(-prompts_per_step)
    share: Floats = np.where(computed > chunk, alone, together)
    return share, np.minimum(prompts_per_step * computed / np.maximum(share, 1e-12), chunk)


def prefill_requests(rows: Ints, load: Load) -> Ints:
    """Prompts that a replica of a prefill pool holds at once: those of two steps, and as many again being read."""
    requests: Ints = 4 * np.ceil(rows / load.computed).astype(np.int64)
    return np.minimum(requests, rows // 2)


def _graph_groups(model: ModelSpec, nextns: list[int]) -> list[list[int]]:
    """Draft lengths that share one graph."""
    groups: dict[int, list[int]] = {}
    for nextn in nextns:
        groups.setdefault(drafts_in_graph(model, nextn), []).append(nextn)
    return list(groups.values())


def _replicas(layout: ParallelLayout) -> int:
    """Attention replicas of one engine, which is one step group."""
    return layout.num_ranks // layout.replica_ranks
