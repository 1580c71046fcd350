"""Screening: engines in steady state become plans, mixed ones and prefill beside decode in every split of the GPUs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np
import numpy.typing as npt

from deepinfer.engine.transfer import Side, kv_transfer
from deepinfer.hardware.host import HostProfile
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.layout.plan import PoolRole, Slo
from deepinfer.numeric import Floats, Ints
from deepinfer.scheduler.speculation import Acceptance
from planner.columns import Columns, pareto
from planner.space import EngineKind, Refusals, SearchSpace
from planner.splits import best_split, fewest_engines
from planner.steady import UTILIZATION, EnginePoints, Load, SteadyState

CLOSER_LOOKS = 6
"""Kinds of engines per role that are evaluated on the whole grid, and in their variants."""
CLOSE_TO_BEST = 0.85
"""Share of the best engines' requests/s per GPU at their latency that an engine of a pair needs."""
WORTH_A_VARIANT = 0.005
"""What a variant has to gain to be a plan of its own."""
PoolChoice = Literal["any", "mixed", "split"]
"""Whether a plan may have one mixed pool, a prefill and a decode pool, or either."""


@dataclass(frozen=True)
class Candidate:
    """Pools that points share: engines of a kind, and how many of them; points differ in the other settings.

    `family` numbers candidates that differ only in how many engines they have, and in variants of these.
    """

    kind: EngineKind
    replicas: int
    family: int
    prefill: EngineKind | None = None
    prefill_replicas: int = 0

    @property
    def gpus(self) -> int:
        """Accelerators that the pools use."""
        used = self.replicas * self.kind.layout.num_ranks
        return used + (self.prefill_replicas * self.prefill.layout.num_ranks if self.prefill else 0)

    def __str__(self) -> str:
        serving = f"{self.replicas} x {self.kind.layout}"
        if self.prefill is None:
            return serving
        return f"{self.prefill_replicas} x {self.prefill.layout} > {serving}"


@dataclass(frozen=True)
class Points(Columns):
    """Screened points as parallel arrays. `candidate` indexes `Screening.candidates`; rates are per cluster GPU.

    `max_num_seqs`, `chunk_rows`, `nextn` and `step_s` are those of the pool that decodes; `prefill_rows` of a step of
    the pool that only prefills (0: there is none). `users` are in the whole system at once.
    """

    candidate: Ints
    max_num_seqs: Ints
    chunk_rows: Ints
    nextn: Ints
    prefill_rows: Ints
    users: Floats
    step_s: Floats
    tpot_s: Floats
    ttft_s: Floats
    output_per_gpu: Floats
    capacity_rps: Floats


@dataclass(frozen=True)
class Screening:
    """All points that are feasible in memory and load, and the refused ones counted by reason.

    `best_capacity_rps` is the most requests/s that any point could serve within the limits. `num_screened` counts
    the points that were evaluated: of the splits of two pools between the same engines only the best is kept.
    """

    candidates: tuple[Candidate, ...]
    points: Points
    refusals: Refusals
    best_capacity_rps: float
    num_screened: int


class Screen:
    """Evaluates a search space for one workload and acceptance.

    With a `prefill_space` prompts are prefilled there and decoded in `space`; otherwise pools share one cluster. With
    `only` no other kinds of engines are evaluated than these, each on the whole grid. With `sizing` the spaces limit
    single engines only, and plans have the fewest of them that serve the load's rate.
    """

    def __init__(
        self,
        space: SearchSpace,
        load: Load,
        acceptance: Acceptance,
        host: HostProfile,
        slo: Slo,
        expert_load: ExpertLoad = TYPICAL_LOAD,
        pools: PoolChoice = "any",
        prefill_space: SearchSpace | None = None,
        only: Sequence[EngineKind] | None = None,
        sizing: bool = False,
        start_ups: float = 1.0,
    ) -> None:
        self.only, self.sizing = only, sizing
        self._rate = load.rate or 0.0
        self.space, self.load, self.slo = space, load, slo
        self.prefill_space = prefill_space
        self.pools: PoolChoice = "split" if prefill_space else pools
        self._serving = SteadyState(space, load, acceptance, host, expert_load, start_ups)
        self._prefilling = self._serving.on(prefill_space or space)
        self.num_gpus = space.gpus + (prefill_space.gpus if prefill_space else 0)
        self.refusals = Refusals()
        self._best_capacity_rps = 0.0
        self._num_screened = 0
        self._families: dict[tuple[ParallelLayout | None, ...], int] = {}

    def run(self) -> Screening:
        """Screen the space: all layouts coarsely, then the most promising ones closely and in their variants."""
        nextns = self.space.nextn(self.refusals)
        candidates: list[Candidate] = []
        parts: list[Points] = []
        if self.pools != "split":
            parts += self._mixed(nextns, candidates)
        if self.pools != "mixed" and (self.prefill_space is not None or self.space.gpus > 1):
            parts += self._split(nextns, candidates)
        return Screening(
            tuple(candidates), Points.concatenate(parts), self.refusals, self._best_capacity_rps, self._num_screened
        )

    def _evaluate(self, where: SteadyState, kind: EngineKind, number: int, nextns: list[int]) -> EnginePoints | None:
        match kind.role:
            case "prefill":
                engines = where.prefill(kind, number, self.refusals)
            case "decode":
                engines = where.decode(kind, number, nextns, self.refusals)
            case _:
                engines = where.mixed(kind, number, nextns, self.refusals)
        self._num_screened += len(engines) if engines else 0
        return engines

    def _explored(
        self, where: SteadyState, role: PoolRole, nextns: list[int]
    ) -> tuple[list[EngineKind], list[EnginePoints]]:
        """Kinds for a role with their points: every layout on a coarse grid, the best closely and in their variants."""
        if self.only is not None:
            kinds = [kind for kind in self.only if kind.role == role]
            return kinds, [p for i, k in enumerate(kinds) if (p := self._evaluate(where, k, i, nextns)) is not None]
        kinds = list(where.space.kinds(role, self.refusals))
        coarse, few = where.on(where.space.coarse()), where.space.coarse_nextn(nextns)
        points = [self._evaluate(coarse, kind, i, few) for i, kind in enumerate(kinds)]
        worth = [-1.0 if p is None else self._best_per_gpu(kinds[i], p) for i, p in enumerate(points)]
        best = sorted(range(len(kinds)), key=lambda i: -worth[i])[:CLOSER_LOOKS]
        for i in best:
            if worth[i] <= 0:
                continue
            closer = points[i] = self._evaluate(where, kinds[i], i, nextns)
            enough = (1.0 + WORTH_A_VARIANT) * (self._best_per_gpu(kinds[i], closer) if closer else 0.0)
            for variant in where.space.variants(kinds[i]):
                first = self._evaluate(coarse, variant, len(kinds), few)
                if first is None or self._best_per_gpu(variant, first) < worth[i]:
                    continue
                found = self._evaluate(where, variant, len(kinds), nextns)
                if found is not None and self._best_per_gpu(variant, found) >= enough:
                    points.append(found)
                    kinds.append(variant)
        return kinds, [p for p in points if p is not None]

    def _best_per_gpu(self, kind: EngineKind, engines: EnginePoints) -> float:
        """The most requests/s per GPU of a kind within the limits, whole engines on the cluster; 0 outside."""
        gpus = (self._prefilling if kind.role == "prefill" else self._serving).space.gpus
        within = (engines.tpot_s <= self.slo.tpot_s) & (engines.ttft_s <= self.slo.ttft_s)
        best = float(engines.capacity_rps[within].max(initial=0.0))
        return best * (gpus // kind.layout.num_ranks) / gpus

    def _mixed(self, nextns: list[int], candidates: list[Candidate]) -> list[Points]:
        """Plans of one pool: as many engines as the cluster holds, or as the load needs."""
        kinds, found = self._explored(self._serving, "mixed", nextns)
        parts: list[Points] = []
        for engines in found:
            kind = kinds[int(engines.kind[0])]
            replicas = np.full(len(engines), self.space.gpus // kind.layout.num_ranks)
            if self.sizing:
                (replicas,) = fewest_engines(self._rate, engines.capacity_rps)
            counts, index = np.unique(replicas, return_inverse=True)
            capacity = engines.capacity_rps * replicas
            per_engine = kind.layout.num_ranks // kind.layout.replica_ranks
            points = self._points(
                engines,
                rate=np.full(len(engines), self._rate) if self.sizing else capacity,
                capacity=capacity,
                gpus=replicas * kind.layout.num_ranks,
                users=None if self.sizing else engines.max_num_seqs * replicas * float(per_engine),
            )
            kept = self._kept(replace(points, candidate=len(candidates) + index.reshape(-1)), str(kind))
            parts += [] if kept is None else [kept]
            candidates += [Candidate(kind, count, self._family(kind)) for count in counts.tolist()]
        return parts

    def _split(self, nextns: list[int], candidates: list[Candidate]) -> list[Points]:
        """Plans of two pools: for each pair of engines the split of the GPUs that serves most.

        Of each kind only engines that no other of the kind beats in speed and capacity are paired.
        """
        givers, prefilling = self._explored(self._prefilling, "prefill", [0])
        takers, decoding = self._explored(self._serving, "decode", nextns)
        senders = _worth_pairing(prefilling, givers, "ttft_s")
        receivers = _worth_pairing(decoding, takers, "tpot_s")
        found = (self._paired(senders, i, receivers, givers, takers) for i in range(len(senders)))
        pairs = [pair for pair in found if pair is not None]
        if not pairs:
            return []
        keys = np.concatenate([key for key, _ in pairs])
        points = Points.concatenate([point for _, point in pairs])
        points = self._as_full_as_fed(points, keys, EnginePoints.concatenate(decoding))
        seated = _with_seats_to_fill(points, keys)
        points, keys = points.take(seated), keys[seated]
        unique, index = np.unique(keys, axis=0, return_inverse=True)
        first = len(candidates)
        for giver, taker, num_giving, num_taking in unique.tolist():
            family = self._family(takers[taker], givers[giver])
            candidates.append(Candidate(takers[taker], num_taking, family, givers[giver], num_giving))
        kept = self._kept(replace(points, candidate=first + index.reshape(-1)), "two pools")
        return [] if kept is None else [kept]

    def _as_full_as_fed(self, points: Points, keys: Ints, engines: EnginePoints) -> Points:
        """Decode engines with the requests that they get: fewer than they could hold where prefill is the bottleneck.

        `keys` has the engines of each point: kind of prefill and of decode engines, and number of either. How long a
        token takes at an engine's requests/s is read off the engines of its kind with fewer requests.
        """
        rate = points.users / (points.ttft_s + self.load.osl * points.tpot_s)
        tpot_s = points.tpot_s.copy()
        alike = np.stack([keys[:, 1], points.nextn, points.chunk_rows], axis=1)
        unique, group = np.unique(alike, axis=0, return_inverse=True)
        for number, (kind, nextn, chunk) in enumerate(unique.tolist()):
            rows = np.flatnonzero(group.reshape(-1) == number)
            same = (engines.kind == kind) & (engines.nextn == nextn) & (engines.chunk_rows == chunk)
            curve = engines.take(same)
            order = np.argsort(curve.capacity_rps)
            read = np.interp(rate[rows] / keys[rows, 3], curve.capacity_rps[order], curve.tpot_s[order])
            tpot_s[rows] = np.minimum(read, tpot_s[rows])
        users = rate * (points.ttft_s + self.load.osl * tpot_s)
        return replace(points, users=users, tpot_s=tpot_s, step_s=points.step_s * tpot_s / points.tpot_s)

    def _family(self, kind: EngineKind, prefill: EngineKind | None = None) -> int:
        """A number for pools whose engines are laid out alike, whatever their variants."""
        alike = tuple(replace(k.layout, redundant_experts=0) if k else None for k in (kind, prefill))
        return self._families.setdefault(alike, len(self._families))

    def _paired(
        self,
        senders: EnginePoints,
        sender: int,
        receivers: EnginePoints,
        givers: Sequence[EngineKind],
        takers: Sequence[EngineKind],
    ) -> tuple[Ints, Points] | None:
        """One prefill engine beside every decode engine, at the split that serves most; and the four counts of each.

        When the size of the cluster is asked for, the fewest engines that serve the load.
        """
        giver = givers[senders.kind[sender]]
        size = np.asarray([kind.layout.num_ranks for kind in takers])[receivers.kind]
        can_give, can_take = float(senders.capacity_rps[sender]), receivers.capacity_rps
        if self.sizing:
            giving, taking = fewest_engines(self._rate, np.full(len(size), can_give), can_take)
            rate = np.full(len(size), self._rate)
            self._num_screened += len(size)
        else:
            here, there = self.space.gpus, self.prefill_space
            gpus = here if there is None else (there.gpus, here)
            giving, taking, rate, compared = best_split(can_give, giver.layout.num_ranks, can_take, size, gpus)
            self._num_screened += compared
        same_kv = np.asarray([kind.kv_format == giver.kv_format for kind in takers])[receivers.kind]
        rows = np.flatnonzero((rate > 0) & same_kv)
        if not len(rows):
            return None
        engines, giving, taking, rate = receivers.take(rows), giving[rows], taking[rows], rate[rows]
        waits = senders.ttft_s[sender] + self._transfer_seconds(giver, engines, takers) + engines.ttft_s
        points = self._points(
            replace(engines, ttft_s=waits),
            rate=rate,
            capacity=np.minimum(can_give * giving, engines.capacity_rps * taking),
            gpus=giving * giver.layout.num_ranks + taking * size[rows],
            prefill_rows=int(senders.chunk_rows[sender]),
        )
        return np.stack([np.full(len(rows), senders.kind[sender]), engines.kind, giving, taking], axis=1), points

    def _transfer_seconds(self, giver: EngineKind, engines: EnginePoints, takers: Sequence[EngineKind]) -> Floats:
        """Seconds that a mean prompt's KV is on its way to each engine."""
        there = Side(giver.layout, (self.prefill_space or self.space).cluster)
        model = self.space.model.with_kv(giver.kv_format) if giver.kv_format else self.space.model
        seconds: dict[tuple[int, int], float] = {}
        for kind, nextn in set(zip(engines.kind.tolist(), engines.nextn.tolist(), strict=True)):
            transfer = kv_transfer(model, nextn, there, Side(takers[kind].layout, self.space.cluster))
            seconds[kind, nextn] = transfer.seconds(self.load.isl)
        return np.asarray([seconds[key] for key in zip(engines.kind.tolist(), engines.nextn.tolist(), strict=True)])

    def _points(
        self,
        engines: EnginePoints,
        rate: Floats,
        capacity: Floats,
        gpus: Ints,
        users: Floats | None = None,
        prefill_rows: int = 0,
    ) -> Points:
        """Engines as plans that serve `rate` requests/s on `gpus` accelerators.

        Users follow by Little's law if not given. A cluster of a given size is paid for whether a plan uses it or not.
        """
        paid = gpus if self.sizing else self.num_gpus
        return Points(
            candidate=engines.kind,
            max_num_seqs=engines.max_num_seqs,
            chunk_rows=engines.chunk_rows,
            nextn=engines.nextn,
            prefill_rows=np.full(len(engines), prefill_rows),
            users=rate * (engines.ttft_s + self.load.osl * engines.tpot_s) if users is None else users,
            step_s=engines.step_s,
            tpot_s=engines.tpot_s,
            ttft_s=engines.ttft_s,
            output_per_gpu=rate * self.load.osl / paid,
            capacity_rps=capacity,
        )

    def _kept(self, points: Points, example: str) -> Points | None:
        """Points to rank; under a rate those that can serve it, as they run then."""
        within = (points.tpot_s <= self.slo.tpot_s) & (points.ttft_s <= self.slo.ttft_s)
        self._best_capacity_rps = max(self._best_capacity_rps, float(points.capacity_rps[within].max(initial=0.0)))
        if self.load.rate is None or self.sizing:
            return points
        return self._at_rate(points, example)

    def _at_rate(self, points: Points, example: str) -> Points | None:
        """Points as they run under the given rate, one for each candidate and chunk and draft length.

        It may run as many requests as its limits bear (`max_num_seqs`), which sets what it could serve
        (`capacity_rps`, `output_per_gpu`); its latencies are those at the load that the rate brings.
        """
        rate, slo = self.load.rate or 0.0, self.slo
        bears = (points.tpot_s <= slo.tpot_s) & (points.ttft_s <= slo.ttft_s)
        served = points.capacity_rps * UTILIZATION >= rate
        self.refusals.add(f"cannot serve {rate:g} requests/s", example, int((~served).sum()))
        self.refusals.add("breaks the limits at that rate", example, int((served & ~bears).sum()))
        alike = np.stack([points.candidate, points.chunk_rows, points.nextn, points.prefill_rows], axis=1)
        _, group = np.unique(alike, axis=0, return_inverse=True)
        group = group.reshape(-1)
        most = _last_of_each(group, np.where(served & bears, points.capacity_rps, -1.0))
        now = _last_of_each(group, np.where(served, -points.max_num_seqs, -np.inf))
        kept = (served & bears)[most]
        if not kept.any():
            return None
        best, light = points.take(most[kept]), points.take(now[kept])
        return replace(
            best,
            users=rate * (light.ttft_s + self.load.osl * light.tpot_s),
            step_s=light.step_s,
            tpot_s=light.tpot_s,
            ttft_s=light.ttft_s,
        )


def _with_seats_to_fill(points: Points, keys: Ints) -> npt.NDArray[np.bool_]:
    """Pairs whose decode engines serve more than the same ones with fewer requests: others have seats left empty."""
    alike = np.column_stack([keys, points.nextn, points.chunk_rows, points.prefill_rows])
    _, group = np.unique(alike, axis=0, return_inverse=True)
    order = np.lexsort((points.max_num_seqs, group.reshape(-1)))
    first = np.append(True, np.diff(group.reshape(-1)[order]) != 0)
    rate = points.output_per_gpu[order]
    more = np.append(True, rate[1:] > (1.0 + WORTH_A_VARIANT) * rate[:-1])
    seated = np.zeros(len(points), dtype=bool)
    seated[order] = first | more
    return seated


def _last_of_each(group: Ints, value: Floats) -> Ints:
    """Per group, in order of groups, the index of its largest value."""
    order = np.lexsort((value, group))
    last = np.flatnonzero(np.append(np.diff(group[order]) != 0, True))
    found: Ints = order[last]
    return found


def _worth_pairing(found: Sequence[EnginePoints], kinds: Sequence[EngineKind], latency: str) -> EnginePoints:
    """Engines that are close to the best of any kind at their latency, and the best of their kind.

    The split leaves no GPU idle with engines that divide the cluster: those may be a little behind.
    """
    engines = EnginePoints.concatenate([_unbeaten(p, getattr(p, latency)) for p in found])
    if not len(engines):
        return engines
    per_gpu = engines.capacity_rps / np.asarray([kind.layout.num_ranks for kind in kinds])[engines.kind]
    order = np.argsort(getattr(engines, latency), kind="stable")
    best_so_far = np.empty(len(engines))
    best_so_far[order] = np.maximum.accumulate(per_gpu[order])
    return engines.take(per_gpu >= CLOSE_TO_BEST * best_so_far)


def _unbeaten(engines: EnginePoints, latency_s: Floats) -> EnginePoints:
    """Engines that no other beats in both latency and capacity."""
    return engines.take(pareto(1.0 / latency_s, engines.capacity_rps))
