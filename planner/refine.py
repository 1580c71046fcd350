"""Refinement: the most promising points become plans, and the simulator serves the workload with each of them.

Screening ranks by means; limits are on percentiles, which the simulation shows. So it goes in rounds: what the
finalists of a layout showed beyond their screened figures corrects the screen of that layout for the next round.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from deepinfer.engine.simulate import parts_of, simulate_plan
from deepinfer.errors import DeepinferError
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import Summary
from deepinfer.numeric import Floats, Ints
from deepinfer.workload.spec import ClosedLoop, SteadyStart
from planner.columns import pareto
from planner.problem import Problem
from planner.screen import Candidate, Points, Screening
from planner.space import EngineKind
from planner.steady import prefill_requests

ROUNDS = (8, 4, 4)
"""Finalists per round."""
MAX_PER_LAYOUT = 3
"""Finalists of one layout in the first round, so that the answer is compared with other layouts."""
MIN_MEASURED = 384
"""Requests measured at least, so that a 90th percentile means something: its standard error is 1.5 percentiles."""
WARM_UP_LIFETIMES, MEASURED_LIFETIMES, MOST_LIFETIMES = 1.0, 1.0, 8.0
"""A closed loop is measured for so many lifetimes of a request, or until `MIN_MEASURED` end, after a ramp of one."""
SETTLE_LIFETIMES, STEADY_LIFETIMES = 0.2, 0.75
"""The simulator begins amid requests instead: it settles for so many lifetimes, and measures so many at least."""
OPEN_LOOP_LIFETIMES = 6.0
"""An open loop lasts so long; the first fifth of it, more than a lifetime, fills the system."""
MIN_OPEN_LOOP_REQUESTS, MAX_OPEN_LOOP_REQUESTS = 800, 20_000
MOST_LATER = 3.0
"""What a finalist tells of TTFT at most: one whose prefill was saturated says little about others of its layout."""
FIRST_USERS = 0.8
"""Users of two pools over the screened number, before the first round: the screen knows no uneven steps in prefill."""
FIRST_WAIT = 0.5
"""Mean TTFT of two pools over the screened one, which is that of more users, before the first round."""
NEARLY_FULL = 0.97
"""Share of the requests/s at which two pools queued that they are run at instead."""
FIRST_GUESS = (1.05, 1.5)
"""Simulated percentile over screened mean of TPOT and TTFT, before the first round has shown it."""


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


def make_plan(problem: Problem, screening: Screening, point: int, known: Sequence[Finalist] = ()) -> Plan:
    """The plan of one screened point, with the workload it is to be simulated on.

    How many users keep two pools busy without a queue is known better after `known` finalists have been simulated.
    """
    points = screening.points
    candidate = screening.candidates[points.candidate[point]]
    users = float(points.users[point]) * (_fewer_users(problem, screening, known, point) if candidate.prefill else 1.0)
    ttft, decode = float(points.ttft_s[point]), float(problem.load.osl * points.tpot_s[point])
    lifetime = ttft + decode
    pools = _pools(problem, candidate, points, point)
    plan = Plan(
        model=problem.model_name,
        hardware=problem.hardware_name,
        gpus=candidate.gpus if problem.objective == "gpus" else problem.num_gpus,
        pools=pools,
        workload=problem.workload(ClosedLoop(concurrency=1), 1),
        acceptance=problem.acceptance,
        objective=problem.objective,
        slo=problem.slo,
        router=problem.router,
        expert_load=problem.expert_load,
        network=problem.network,
    )
    if problem.load.rate is None:
        parts = parts_of(plan)
        loop, requests = _closed_loop(max(round(users / parts), 1), lifetime)
        wait = ttft * _shorter_wait(problem, screening, known, point)
        # A trace's requests find in the prefix cache what came before them: that has to be simulated.
        steady = None if problem.source else _steady_start(loop.concurrency, wait, decode)
        loop = loop.model_copy(update={"concurrency": loop.concurrency * parts, "steady": steady})
        workload = problem.workload(loop, requests * parts)
    else:
        workload = problem.workload(None, _open_loop_requests(plan, lifetime * problem.load.rate))
    return plan.model_copy(update={"workload": workload})


def _open_loop_requests(plan: Plan, in_system: float) -> int:
    """Requests of an open loop in which so many are in the system at once, on average."""
    enough = math.ceil(OPEN_LOOP_LIFETIMES * in_system)
    if enough <= MAX_OPEN_LOOP_REQUESTS:
        return max(enough, MIN_OPEN_LOOP_REQUESTS)
    parts = parts_of(plan)  # one of them is simulated
    return parts * min(max(math.ceil(enough / parts), MIN_OPEN_LOOP_REQUESTS), MAX_OPEN_LOOP_REQUESTS)


def _fewer_users(problem: Problem, screening: Screening, known: Sequence[Finalist], point: int) -> float:
    """Users that keep two pools busy, over those of the screen, by the finalists laid out like a point; at most 1.

    By Little's law, at a little less than the requests/s that they reached and without their queue for prefill.
    """
    points, family = screening.points, _families(screening)
    ratios = []
    for f in known:
        if f.failure or family[f.point] != family[point] or not isinstance(f.plan.workload.arrivals, ClosedLoop):
            continue
        users: float = f.plan.workload.arrivals.concurrency
        if _had_too_many_users(problem, screening, f):
            rate = f.summary.output_tokens_per_s_per_gpu * f.plan.gpus / problem.load.osl
            users = NEARLY_FULL * rate * (f.summary.e2e_s.mean - f.summary.ttft_s.mean + points.ttft_s[f.point])
        ratios.append(users / points.users[f.point])
    return min(float(np.mean(ratios)), 1.0) if ratios else FIRST_USERS


def _shorter_wait(problem: Problem, screening: Screening, known: Sequence[Finalist], point: int) -> float:
    """Mean TTFT over the screened one, by the finalists laid out like a point."""
    points, family = screening.points, _families(screening)
    ratios = [
        f.summary.ttft_s.mean / points.ttft_s[f.point]
        for f in known
        if not f.failure and family[f.point] == family[point] and not _had_too_many_users(problem, screening, f)
    ]
    if ratios:
        return float(np.mean(ratios))
    return FIRST_WAIT if points.prefill_rows[point] else 1.0


def _pools(problem: Problem, candidate: Candidate, points: Points, point: int) -> tuple[Pool, ...]:
    """The pools of one point: the prefill pool first, if there is one."""
    seqs, nextn = int(points.max_num_seqs[point]), int(points.nextn[point])
    apart = problem.prefill_cluster is not None
    serving = Pool(
        role=candidate.kind.role,
        gpus=problem.cluster.num_gpus if apart else None,
        replicas=candidate.replicas,
        layout=LayoutSpec.of(candidate.kind.layout),
        settings=EngineSettings(
            max_num_seqs=seqs,
            max_tokens_per_step=seqs * (1 + nextn) + int(points.chunk_rows[point]),
            nextn=nextn,
            replay=candidate.kind.replay,
            **_choices(problem, candidate.kind),
        ),
    )
    if candidate.prefill is None:
        return (serving,)
    rows, replay = int(points.prefill_rows[point]), candidate.prefill.replay
    settings = EngineSettings(
        max_num_seqs=int(prefill_requests(np.asarray([rows]), problem.load)[0]),
        max_tokens_per_step=rows,
        replay=replay,
        # The decode pool replays the windows, and computes the first token with them.
        keep_tokens=1 if replay == "compact" else EngineSettings().keep_tokens,
        **_choices(problem, candidate.prefill),
    )
    prefill = Pool(
        role="prefill",
        hardware=problem.prefill_hardware_name,
        gpus=problem.prefill_cluster.num_gpus if problem.prefill_cluster else None,
        replicas=candidate.prefill_replicas,
        layout=LayoutSpec.of(candidate.prefill.layout),
        settings=settings,
    )
    return (prefill, serving)


def _choices(problem: Problem, kind: EngineKind) -> dict[str, Any]:
    """Settings that a kind of engine fixes."""
    return {"overlap": kind.overlap, "moe": kind.moe, "kv_format": kind.kv_format or problem.kv_format}


def _closed_loop(users: int, lifetime_s: float) -> tuple[ClosedLoop, int]:
    """The closed loop of one engine's users, and more requests than they can send in it."""
    measured = max(MEASURED_LIFETIMES, min(MIN_MEASURED / users, MOST_LIFETIMES))
    loop = ClosedLoop(
        concurrency=users,
        ramp_s=round(lifetime_s, 4),
        warm_up_s=round(WARM_UP_LIFETIMES * lifetime_s, 4),
        measure_s=round(measured * lifetime_s, 4),
    )
    return loop, math.ceil(users * (1.0 + WARM_UP_LIFETIMES + measured) * 2.0) + 8


def _steady_start(users: int, ttft_s: float, decode_s: float) -> SteadyStart:
    """How one engine's users begin amid their requests."""
    lifetime_s = ttft_s + decode_s
    measured = max(STEADY_LIFETIMES, min(MIN_MEASURED / users, MOST_LIFETIMES))
    return SteadyStart(
        ttft_s=round(ttft_s, 6),
        lifetime_s=round(lifetime_s, 6),
        settle_s=round(SETTLE_LIFETIMES * lifetime_s, 4),
        measure_s=round(measured * lifetime_s, 4),
    )


def choose_points(
    problem: Problem, screening: Screening, known: Sequence[Finalist], count: int, spread: int = 0
) -> list[int]:
    """The points worth simulating next: the best that should keep the limits, by what is known so far.

    In the first round mixed and split pools get half of them each, no family of candidates more than `MAX_PER_LAYOUT`,
    and `spread` points are taken along the Pareto front within the limits.
    """
    points = screening.points
    tpot, ttft, output = corrections(problem, screening, known)
    slo, family = problem.slo, _families(screening)
    within = (points.tpot_s * tpot <= slo.tpot_s) & (points.ttft_s * ttft <= slo.ttft_s)
    if not within.any():  # then the fastest, to say how far the limits are
        within = points.tpot_s <= np.min(points.tpot_s) * 1.01
    split = points.prefill_rows > 0
    both = bool(split[within].any() and not split[within].all())
    taken = {f.point for f in known if not _had_too_many_users(problem, screening, f)}
    chosen: list[int] = []
    ranked = [i for i in _ranked(points, within, points.output_per_gpu * output) if i not in taken]
    for index in ranked:
        if len(chosen) >= count - spread:
            break
        if known or _adds_something(points, family, chosen, index, (count - spread) // 2 if both else count):
            chosen.append(index)
    inside = np.flatnonzero(within)
    front = inside[pareto(1.0 / points.tpot_s[inside], points.output_per_gpu[inside])]
    along = np.linspace(0, len(front) - 1, spread).astype(int)
    # A point of the front may be chosen already, and too few may differ enough: the next best fill up.
    return list(dict.fromkeys([*chosen, *(int(front[i]) for i in along), *ranked]))[:count]


def _had_too_many_users(problem: Problem, screening: Screening, finalist: Finalist) -> bool:
    """Whether two pools in a closed loop broke only the limit on TTFT: all users that decode did not need queued."""
    if finalist.failure or problem.load.rate is not None or not screening.points.prefill_rows[finalist.point]:
        return False
    summary, slo = finalist.summary, problem.slo
    late, slow = summary.ttft_s.at(slo.percentile) > slo.ttft_s, summary.tpot_s.at(slo.percentile) > slo.tpot_s
    return late and not slow


def _adds_something(points: Points, family: Ints, chosen: Sequence[int], index: int, most_of_a_mode: int) -> bool:
    """Whether a point of the first round differs enough from those already chosen."""
    alike = [i for i in chosen if family[i] == family[index]]
    mode = [i for i in chosen if (points.prefill_rows[i] > 0) == (points.prefill_rows[index] > 0)]
    same_serving = [i for i in alike if points.nextn[i] == points.nextn[index]]
    return len(mode) < most_of_a_mode and len(alike) < MAX_PER_LAYOUT and not same_serving


def corrections(problem: Problem, screening: Screening, known: Sequence[Finalist]) -> tuple[Floats, Floats, Floats]:
    """Per point: simulated over screened TPOT percentile, TTFT percentile and output.

    The mean over its layout's finalists; for a layout without any, over all of as many pools; else a first guess.
    """
    points, percentile, family = screening.points, problem.slo.percentile, _families(screening)
    ratios: dict[int, list[tuple[float, float, float]]] = {}
    for finalist in known:
        if not finalist.failure:
            i, summary = finalist.point, finalist.summary
            if _had_too_many_users(problem, screening, finalist):
                continue
            ratio = (
                summary.tpot_s.at(percentile) / points.tpot_s[i],
                min(summary.ttft_s.at(percentile) / points.ttft_s[i], MOST_LATER),
                summary.output_tokens_per_s_per_gpu / points.output_per_gpu[i] if problem.load.rate is None else 1.0,
            )
            ratios.setdefault(int(family[i]), []).append(ratio)
    split = points.prefill_rows > 0
    table = np.empty((int(family.max(initial=0)) + 1, 3))
    for mode, wait in ((~split, 1.0), (split, FIRST_WAIT)):
        layouts = np.unique(family[mode])
        known_ones = [ratio for one in layouts.tolist() for ratio in ratios.get(one, [])]
        table[layouts] = np.mean(known_ones, axis=0) if known_ones else (FIRST_GUESS[0], FIRST_GUESS[1] * wait, 1.0)
    for one, group in ratios.items():
        table[one] = np.mean(group, axis=0)
    tpot, ttft, output = table[family].T
    return tpot, ttft, output


def _families(screening: Screening) -> Ints:
    """Each point's family of candidates."""
    return np.asarray([c.family for c in screening.candidates], dtype=np.int64)[screening.points.candidate]


def _ranked(points: Points, within: npt.NDArray[np.bool_], output: Floats) -> Iterator[int]:
    """Points within the limits by output per GPU, the faster of equals first."""
    index = np.flatnonzero(within)
    order = np.lexsort((points.tpot_s[index], -np.round(output[index], 3)))
    return (int(i) for i in index[order])
