"""The search: enumerate, refuse with a reason, screen, simulate, choose."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.cost.compose import PathItem
from deepinfer.errors import InfeasibleError
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import Plan, Slo
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import Summary
from deepinfer.model.spec import MoE
from planner.encode import with_encode
from planner.executor import LOCAL, Run, connected
from planner.pareto import ParetoPoint, pareto_points
from planner.problem import Problem
from planner.refine import MEASURED_LIFETIMES, ROUNDS, Finalist, choose_points, make_plan, run_finalist
from planner.screen import Screen, Screening
from planner.space import EngineKind, SearchSpace
from planner.steady import UTILIZATION

KEEPS_UP = 0.9
"""Requests finished per request arrived in the window, below which a plan is falling behind."""
REQUIRED_ROWS = 512
"""Prompt rows a step must take at least, for the smallest cluster that fits."""
Progress = Callable[[int, int], None]
"""Told how many of how many simulations are done."""
Screened = Callable[[Screening, Sequence[int]], None]
"""Told of the screening and of the points that are simulated first."""

if TYPE_CHECKING:
    from matplotlib.axes import Axes

    from planner.explain import Explanation


@dataclass(frozen=True)
class SearchResult:
    """What a search found: screened points, simulated finalists (best first), and the chosen one.

    The winner is the best finalist by the objective that keeps the limits.
    """

    problem: Problem
    screening: Screening
    finalists: tuple[Finalist, ...]

    @property
    def winner(self) -> Finalist:
        """The chosen finalist."""
        return self.finalists[0]

    @property
    def plan(self) -> Plan:
        """The chosen plan, prediction included."""
        return self.winner.plan

    def pareto(self, most: int = 16) -> tuple[ParetoPoint, ...]:
        """Screened points that no other beats in speed per user and output per GPU, `most` along the front at most."""
        return pareto_points(self.screening, most)

    def breakdown(self) -> tuple[PathItem, ...]:
        """The operators that the plan's mean step is made of, longest first; their seconds add up to the step's."""
        from planner.describe import step_breakdown

        return tuple(step_breakdown(self.plan)[0])

    def explain(self) -> Explanation:
        """What binds the plan, what would change it, and what sets it apart from the runner-up."""
        return self._explanation

    @cached_property
    def _explanation(self) -> Explanation:
        from planner.explain import explain

        return explain(self)

    def table(self, top: int = 5) -> str:
        """The best finalists as text, one line each."""
        from planner.report import finalists_text

        return finalists_text(self, top)

    def plot_pareto(self, ax: Axes | None = None) -> Axes:
        """Draw output per GPU against speed per user into `ax` (a new one if None), and return it."""
        from planner.plots import plot_pareto, pyplot_axes

        return plot_pareto(self, ax if ax is not None else pyplot_axes(8.0, 5.5))

    def plot_breakdown(self, ax: Axes | None = None) -> Axes:
        """Draw what the mean step is made of into `ax` (a new one if None), and return it."""
        from planner.describe import step_breakdown
        from planner.plots import plot_breakdown, pyplot_axes

        items, title = step_breakdown(self.plan)
        return plot_breakdown(items, title, ax if ax is not None else pyplot_axes(8.0, 4.6))

    def feasible(self, finalist: Finalist) -> bool:
        """Whether a finalist was measured, kept the limits, and kept up with the arrivals."""
        return not finalist.failure and _keeps_limits(self.problem, finalist.summary)

    def capacity_rps(self, finalist: Finalist) -> float:
        """Requests/s for the whole cluster that a finalist could serve within the limits, by the screen."""
        return float(self.screening.points.capacity_rps[finalist.point])

    def worth(self, finalist: Finalist) -> float:
        """A finalist's output over the winner's; under a rate, what it could serve over what the winner could."""
        if self.problem.objective == "gpus":
            return self.winner.plan.gpus / finalist.plan.gpus
        if self.problem.load.rate is not None:
            return self.capacity_rps(finalist) / self.capacity_rps(self.winner)
        ours, theirs = finalist.summary, self.winner.summary
        ratio = ours.output_tokens_per_s_per_gpu / theirs.output_tokens_per_s_per_gpu
        return ratio * ours.goodput / max(theirs.goodput, 1e-9) if self.problem.objective == "goodput" else ratio


def run_search(
    problem: Problem,
    jobs: int = -1,
    progress: Progress | None = None,
    executor: str = LOCAL,
    screened: Screened | None = None,
) -> SearchResult:
    """Search a problem's space; finalists run in `jobs` processes (-1: one per core) of the executor.

    `screened` is told of the screening and the points simulated first, before they are. The result does not depend on
    where they run. Raises InfeasibleError, with the nearest feasible change, when no plan fits or none keeps the
    limits, and UsageError for an executor that cannot be reached.
    """
    with connected(executor, jobs) as run:
        return _search(problem, run, progress, screened)


def _search(problem: Problem, run: Run, progress: Progress | None, screened: Screened | None) -> SearchResult:
    screening = _with_requests_for(problem, make_screen(problem).run())
    if not len(screening.points):
        raise InfeasibleError(_nothing_fits(problem, screening))
    finalists: list[Finalist] = []
    for number, count in enumerate(ROUNDS):
        chosen = choose_points(problem, screening, finalists, count, spread=0 if number else 2)
        if screened and not number:
            screened(screening, chosen)
        plans = [make_plan(problem, screening, point, finalists) for point in chosen]
        finalists += _simulate(chosen, plans, run, _from(progress, len(finalists), sum(ROUNDS)))
    ranked = sorted(finalists, key=lambda f: _merit(problem, screening, f))
    result = SearchResult(problem, screening, tuple(replace(f, plan=with_encode(problem, f.plan)) for f in ranked))
    if not result.feasible(result.winner) and (problem.objective != "goodput" or result.winner.failure):
        raise InfeasibleError(_limits_too_tight(result))
    return result


def make_screen(problem: Problem, only: Sequence[EngineKind] | None = None) -> Screen:
    """The screen of a problem's space, or of some kinds of engines in it."""
    space = SearchSpace(problem.model, problem.cluster, problem.replay)
    apart = problem.prefill_cluster
    return Screen(
        space=space,
        load=problem.load,
        acceptance=problem.acceptance,
        host=problem.host,
        start_ups=problem.start_ups,
        slo=problem.slo,
        expert_load=problem.expert_load,
        pools=problem.pools,
        prefill_space=replace(space, cluster=apart) if apart else None,
        only=only,
        sizing=problem.objective == "gpus",
    )


def _with_requests_for(problem: Problem, screening: Screening) -> Screening:
    """Without the points whose users a trace has too few requests for: ramp, warm-up and measurement take one each."""
    if problem.source is None or problem.load.rate is not None:
        return screening
    enough = screening.points.users * (2.0 + MEASURED_LIFETIMES) <= problem.trace_requests
    reason = f"the trace's {problem.trace_requests:,} requests do not keep so many users busy: give --rate"
    screening.refusals.add(reason, "closed loop", int((~enough).sum()))
    return replace(screening, points=screening.points.take(enough))


def _from(progress: Progress | None, before: int, total: int) -> Progress:
    """Progress within a round as progress of the search."""
    return lambda done, _: progress(before + done, total) if progress else None


def _simulate(chosen: Sequence[int], plans: Sequence[Plan], run: Run, tell: Progress) -> Iterator[Finalist]:
    from joblib import delayed  # heavy to import: only a search needs it

    tell(0, len(plans))
    work = (delayed(run_finalist)(point, plan) for point, plan in zip(chosen, plans, strict=True))
    # They come back in order, whatever process ran them: two searches write the same bytes.
    for done, finalist in enumerate(run(work), start=1):
        tell(done, len(plans))
        yield finalist


def _keeps_limits(problem: Problem, summary: Summary) -> bool:
    keeps_up = summary.requests_measured >= KEEPS_UP * summary.requests_arrived
    return problem.slo.met_by(summary) and keeps_up


def _merit(problem: Problem, screening: Screening, finalist: Finalist) -> tuple[float, ...]:
    """Sort key, best first: within the limits, by objective (to three digits), then by the time a request takes.

    Goodput has the limits in it: it is the output of requests that keep them. With a rate all that keep up give the
    same output: then what a plan could serve within the limits counts, or how few accelerators it needs.
    """
    if finalist.failure:
        return (2.0,)
    summary = finalist.summary
    # Cost per token on one kind of accelerator falls exactly as output per GPU rises.
    output = summary.output_tokens_per_s_per_gpu
    within = 0.0 if _keeps_limits(problem, summary) else 1.0
    if problem.objective == "goodput":
        output, within = output * summary.goodput, 0.0
    elif problem.objective == "gpus":
        output = 1.0 / finalist.plan.gpus
    elif problem.load.rate is not None:
        output = float(screening.points.capacity_rps[finalist.point])
    return (within, -float(f"{output:.3g}"), summary.e2e_s.mean, finalist.point)


def _nothing_fits(problem: Problem, screening: Screening) -> str:
    counts = "; ".join(f"{reason}: {count:,}" for reason, count in screening.refusals.counts.most_common())
    where = f"{problem.cluster.num_gpus} x {problem.hardware_name}"
    rate = problem.load.rate
    if screening.best_capacity_rps > 0 and rate is not None:
        most = screening.best_capacity_rps * UTILIZATION
        return (
            f"no plan on {where} serves {rate:g} requests/s: the most is about {most:.3g} requests/s "
            f"at {UTILIZATION:.0%} load, so it takes about {math.ceil(rate / most)} times as many "
            f"accelerators ({counts})"
        )
    return f"no layout of {problem.model.name} fits on {where} ({counts}); {_how_far(problem)}"


def _how_far(problem: Problem) -> str:
    """By how much the widest expert group misses, and the smallest cluster that holds the model and one request."""
    settings = EngineSettings(max_num_seqs=1, max_tokens_per_step=REQUIRED_ROWS)
    accelerator, miss = problem.cluster.accelerator, ""
    experts = max(x.ffn.num_experts for x in problem.model.layers if isinstance(x.ffn, MoE))
    for ep in (degree for degree in range(1, experts + 1) if experts % degree == 0):
        try:
            memory_budget(problem.model, ParallelLayout.from_flags(ep=ep), accelerator, settings)
        except InfeasibleError as error:
            miss = str(error) if ep <= problem.cluster.num_gpus else miss
            continue
        return f"{miss}; the smallest count that fits is {ep}" if miss else f"the smallest count that fits is {ep}"
    return f"{miss}; no number of these GPUs holds it"


def _limits_too_tight(result: SearchResult) -> str:
    slo, points = result.problem.slo, result.screening.points
    measured = [f for f in result.finalists if not f.failure]
    if not measured:
        return f"no finalist could be simulated: {result.winner.failure}"
    ttft = min(f.summary.ttft_s.at(slo.percentile) for f in measured)
    tpot = min(f.summary.tpot_s.at(slo.percentile) for f in measured)
    mean = np.min(points.tpot_s) * 1e3
    return (
        f"no plan keeps TTFT {slo.ttft_s:g} s and TPOT {slo.tpot_s * 1e3:g} ms at p{slo.percentile}: the lowest "
        f"simulated are {ttft:.3g} s and {tpot * 1e3:.3g} ms, the lowest screened mean TPOT is {mean:.3g} ms; the "
        f"cheapest relaxation is {_relaxation(slo, measured)}"
    )


def _relaxation(slo: Slo, measured: Sequence[Finalist]) -> str:
    """The smallest factor on either limit, or on both, with which one of the finalists would have kept them."""
    p = slo.percentile
    needed = [(f.summary.ttft_s.at(p) / slo.ttft_s, f.summary.tpot_s.at(p) / slo.tpot_s) for f in measured]
    ttft, tpot = min(needed, key=lambda ratios: max(ratios))
    flags = []
    if ttft > 1.0:
        flags.append(f"--ttft {_rounded_up(ttft * slo.ttft_s):g} ({ttft:.2f} times as long)")
    if tpot > 1.0:
        flags.append(f"--tpot {_rounded_up(tpot * slo.tpot_s):g} ({tpot:.2f} times as long)")
    return " with ".join(flags) or "a rate that the finalists keep up with"


def _rounded_up(value: float) -> float:
    """To three digits, upwards."""
    digits = 2 - math.floor(math.log10(value))
    scale = 10.0**digits
    return math.ceil(value * scale) / scale
