"""Refinement: the most promising points become plans, and the simulator serves the workload with each of them."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from deepinfer.engine.simulate import simulate_plan
from deepinfer.errors import DeepinferError
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import Summary
from deepinfer.workload.spec import ClosedLoop
from planner.problem import Problem
from planner.screen import Points, Screening, pareto

MIN_REQUESTS = 64
"""Requests measured at least, so that a 90th percentile means something."""
OPEN_LOOP_LIFETIMES = 5.0
MIN_OPEN_LOOP_REQUESTS, MAX_OPEN_LOOP_REQUESTS = 500, 2000
MAX_PER_LAYOUT = 3
"""Finalists of one layout, so that the answer is compared with other layouts."""
SLACK = 1.15
"""Screened latencies may exceed a limit by this much and still be worth simulating."""


@dataclass(frozen=True)
class Finalist:
    """A plan and what the simulator measured of it; `failure` says why there is no measurement."""

    point: int
    plan: Plan
    failure: str = ""

    @property
    def summary(self) -> Summary:
        """The measurement. Only for finalists without a failure."""
        assert self.plan.prediction is not None
        return self.plan.prediction


def run_finalist(point: int, plan: Plan) -> Finalist:
    """Simulate one plan; a plan that cannot run is a finalist with a failure."""
    try:
        return Finalist(point, plan.model_copy(update={"prediction": simulate_plan(plan)}))
    except DeepinferError as error:
        return Finalist(point, plan, str(error))


def make_plan(problem: Problem, screening: Screening, point: int) -> Plan:
    """The plan of one screened point, with the workload it is to be simulated on."""
    points = screening.points
    candidate = screening.candidates[points.candidate[point]]
    layout, seqs, nextn = candidate.layout, int(points.max_num_seqs[point]), int(points.nextn[point])
    settings = EngineSettings(
        max_num_seqs=seqs,
        max_tokens_per_step=seqs * (1 + nextn) + int(points.chunk_rows[point]),
        nextn=nextn,
        replay=candidate.replay,
    )
    lifetime = float(points.ttft_s[point] + problem.load.osl * points.tpot_s[point])
    if problem.load.rate is None:
        engines = candidate.replicas * (layout.num_ranks // layout.replica_ranks)
        users = seqs * engines
        # Each replica of the plan is measured on its own share of users: they need enough requests there.
        more = max(users, MIN_REQUESTS * candidate.replicas)
        workload = problem.workload(ClosedLoop(concurrency=users, ramp_s=round(lifetime, 3)), users + more)
    else:
        enough = math.ceil(OPEN_LOOP_LIFETIMES * lifetime * problem.load.rate)
        workload = problem.workload(None, min(max(enough, MIN_OPEN_LOOP_REQUESTS), MAX_OPEN_LOOP_REQUESTS))
    return Plan(
        model=problem.model_name,
        hardware=problem.hardware_name,
        gpus=problem.cluster.num_gpus,
        pools=(Pool(replicas=candidate.replicas, layout=LayoutSpec.of(layout), settings=settings),),
        workload=workload,
        acceptance=problem.acceptance,
        objective=problem.objective,
        slo=problem.slo,
    )


def choose_points(problem: Problem, points: Points, count: int) -> list[int]:
    """The points worth simulating: the best under the limits, no two alike, then some along the Pareto front.

    Screening ranks by means; percentiles come from the simulation. So for each of the best configurations also the
    next lower load is taken, in case the first one breaks a limit.
    """
    chosen = best_points(problem, points, math.ceil(count * 0.75), SLACK)
    front = pareto(1.0 / points.tpot_s, points.output_per_gpu)
    room = count - len(chosen)
    spread = front[np.unique(np.linspace(0, len(front) - 1, min(room, len(front))).astype(int))] if room else front[:0]
    return list(dict.fromkeys([*chosen, *(int(i) for i in spread)]))[:count]


def best_points(problem: Problem, points: Points, count: int, slack: float) -> list[int]:
    """At most `count` points, by output per GPU, whose screened latencies are within `slack` times the limits."""
    slo = problem.slo
    within = (points.tpot_s <= slo.tpot_s * slack) & (points.ttft_s <= slo.ttft_s * slack)
    chosen: list[int] = []
    for index in _ranked(points, within):
        if len(chosen) >= count:
            break
        same_layout = [other for other in chosen if points.candidate[other] == points.candidate[index]]
        same_drafts = [other for other in same_layout if points.nextn[other] == points.nextn[index]]
        if len(same_layout) < MAX_PER_LAYOUT and len(same_drafts) < 2:
            chosen.append(index)
    return chosen


def _ranked(points: Points, within: npt.NDArray[np.bool_]) -> Iterator[int]:
    """Points within the limits by output per GPU, the faster of equals first."""
    index = np.flatnonzero(within)
    order = np.lexsort((points.tpot_s[index], -np.round(points.output_per_gpu[index], 3)))
    return (int(i) for i in index[order])
