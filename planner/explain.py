"""Why a plan is the answer: what binds it, what would change it, and what it rests on, all by asking again.

Each what-if changes one thing of the question (a resource twice as good, a limit relaxed, an assumption moved) and
screens the plan's own kinds of engines again, with the settings free. What gains most is what binds.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Literal

import numpy as np

from deepinfer.layout.plan import Plan, Pool
from planner.pipeline import SearchResult, make_screen
from planner.problem import Problem
from planner.refine import Finalist, corrections
from planner.resources import (
    Change,
    compute_faster,
    hbm_faster,
    hbm_larger,
    host_slower,
    latencies_longer,
    scale_out_faster,
    scale_up_faster,
)
from planner.screen import Points
from planner.space import EngineKind
from planner.steady import UTILIZATION

Group = Literal["resource", "limit", "assumption"]
NEGLIGIBLE = 0.005
"""Changes of output below half a percent are not told apart."""


@dataclass(frozen=True)
class WhatIf:
    """One change, and the output it leads to over that of the plan as screened (requests/s it could serve, at a rate).

    0 when nothing is feasible any more.
    """

    group: Group
    name: str
    ratio: float


@dataclass(frozen=True)
class Explanation:
    """What-ifs of a plan, largest gain first within their groups, and its differences from the runner-up."""

    what_ifs: tuple[WhatIf, ...]
    differences: tuple[str, ...]

    @property
    def binding(self) -> WhatIf | None:
        """The resource or limit that holds the plan back most; None when none of them gains anything."""
        gains = [w for w in self.what_ifs if w.group != "assumption" and w.ratio > 1.0 + NEGLIGIBLE]
        return max(gains, key=lambda w: w.ratio, default=None)


def explain(result: SearchResult) -> Explanation:
    """Explain a search's answer. A small screen per what-if: about a second in all."""
    problem, winner = result.problem, result.winner
    candidate = result.screening.candidates[result.screening.points.candidate[winner.point]]
    kinds = [kind for kind in (candidate.prefill, candidate.kind) if kind is not None]
    now = _best(problem, kinds, result, winner)
    found = [
        WhatIf(group, name, _best(changed, kinds, result, winner) / now) for group, name, changed in _changes(problem)
    ]
    order: list[Group] = ["resource", "limit", "assumption"]
    found.sort(key=lambda w: (order.index(w.group), -w.ratio))
    rival = next((f for f in result.finalists[1:] if result.feasible(f)), None)
    return Explanation(
        what_ifs=tuple(found),
        differences=tuple(differences(winner.plan, rival.plan)) if rival else (),
    )


def differences(plan: Plan, other: Plan) -> Iterator[str]:
    """What another plan does differently, as `name: ours, theirs`."""
    if [p.role for p in plan.pools] != [p.role for p in other.pools]:
        yield f"pools: {_roles(plan)}, {_roles(other)}"
        return
    for ours, theirs in zip(plan.pools, other.pools, strict=True):
        pool = "" if ours.role == "mixed" else f"{ours.role} "
        for (name, a), (_, b) in zip(_choices(ours), _choices(theirs), strict=True):
            if a != b:
                yield f"{pool}{name}: {a}, {b}"


def _roles(plan: Plan) -> str:
    return " and ".join(pool.role for pool in plan.pools)


def _choices(pool: Pool) -> Iterator[tuple[str, object]]:
    yield "engines", pool.replicas
    yield from pool.layout.model_dump().items()
    yield from pool.settings.model_dump().items()


def _best(problem: Problem, kinds: list[EngineKind], result: SearchResult, winner: Finalist) -> float:
    """The most output of these kinds of engines within the limits, corrected as the winner's simulation showed."""
    points = make_screen(problem, only=kinds).run().points
    if not len(points):
        return 0.0
    tpot, ttft, _ = (float(c[winner.point]) for c in corrections(result.problem, result.screening, [winner]))
    slo = problem.slo
    within = (points.tpot_s * tpot <= slo.tpot_s * TOLERANCE) & (points.ttft_s * ttft <= slo.ttft_s * TOLERANCE)
    return float(_worth(points, problem)[within].max(initial=0.0))


TOLERANCE = 1.001
"""The winner itself must not fail its limits by rounding."""


def _worth(points: Points, problem: Problem) -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    worth: np.ndarray[tuple[int], np.dtype[np.float64]] = points.output_per_gpu
    if problem.load.rate is not None:
        worth = points.capacity_rps * UTILIZATION
    return worth


def _changes(problem: Problem) -> Iterator[tuple[Group, str, Problem]]:
    for name, better in RESOURCES.items():
        yield "resource", name, _on(problem, better, 2.0)
    halved = replace(_on(problem, latencies_longer, 0.5), start_ups=0.5)
    yield "resource", "kernels and messages started twice as fast", halved
    even = problem.expert_load.model_copy(update={"balanced": True})
    yield "resource", "experts loaded evenly", replace(problem, expert_load=even)
    yield "resource", "host twice as fast", replace(problem, host=host_slower(problem.host, 0.5))
    slo = problem.slo
    yield (
        "limit",
        "TPOT limit a quarter longer",
        replace(problem, slo=slo.model_copy(update={"tpot_s": slo.tpot_s * 1.25})),
    )
    yield "limit", "TTFT limit twice as long", replace(problem, slo=slo.model_copy(update={"ttft_s": slo.ttft_s * 2.0}))
    yield from _moved_assumptions(problem)


def _moved_assumptions(problem: Problem) -> Iterator[tuple[Group, str, Problem]]:
    for name, factor in (("acceptance a tenth lower", 0.9), ("acceptance a tenth higher", 1.1)):
        if problem.model.draft is not None:
            rates = tuple(min(rate * factor, 1.0) for rate in problem.acceptance.rates)
            yield (
                "assumption",
                name,
                replace(problem, acceptance=problem.acceptance.model_copy(update={"rates": rates})),
            )
    load = problem.load
    for name, factor in (("prompts a quarter shorter", 0.75), ("prompts a quarter longer", 1.25)):
        yield (
            "assumption",
            name,
            replace(problem, load=replace(load, isl=load.isl * factor, computed=load.computed * factor)),
        )
    sigma = min(problem.expert_load.sigma * 2.0, 3.0)
    skewed = problem.expert_load.model_copy(update={"sigma": sigma, "drift": min(problem.expert_load.drift * 2.0, 3.0)})
    yield "assumption", "expert popularity twice as skewed", replace(problem, expert_load=skewed)


def _on(problem: Problem, change: Change, factor: float) -> Problem:
    """The same question on other accelerators."""
    apart = problem.prefill_cluster
    return replace(
        problem,
        cluster=replace(problem.cluster, accelerator=change(problem.cluster.accelerator, factor)),
        prefill_cluster=replace(apart, accelerator=change(apart.accelerator, factor)) if apart else None,
    )


RESOURCES: dict[str, Change] = {
    "compute twice as fast": compute_faster,
    "HBM twice as fast": hbm_faster,
    "twice the HBM, for KV": hbm_larger,
    "scale-up links twice as fast": scale_up_faster,
    "scale-out links twice as fast": scale_out_faster,
}
