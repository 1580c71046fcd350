"""The planner against brute force, against its own simulator, and against common sense."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import InfeasibleError
from deepinfer.hardware.host import load_host
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.plan import Slo
from deepinfer.layout.settings import EngineSettings
from planner.pipeline import SearchResult, run_search
from planner.plots import new_figure, plot_pareto, to_png
from planner.problem import Problem, Question, make_problem
from planner.refine import choose_points, make_plan, run_finalist
from planner.screen import Points, Screen, Screening, pareto
from planner.space import SearchSpace


def problem(gpus: int = 8, model: str = "deepseek-v4.1-flash", hardware: str = "b200", **changes: Any) -> Problem:
    return make_problem(Question(gpus, model, hardware, **changes))


def screen(asked: Problem, space: SearchSpace | None = None) -> Screening:
    space = space or SearchSpace(asked.model, asked.cluster.num_gpus)
    return Screen(space, asked.cluster, asked.load, asked.acceptance, load_host(), asked.slo).run()


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=40))
def test_the_pareto_front_by_brute_force(values: list[tuple[float, float]]) -> None:
    x, y = (np.asarray(column) for column in zip(*values, strict=True))
    front = {(x[i], y[i]) for i in pareto(x, y)}
    unbeaten = {(a, b) for a, b in values if not any((c >= a and d >= b) and (c > a or d > b) for c, d in values)}
    assert front == unbeaten


def test_every_point_of_the_space_is_screened_or_refused() -> None:
    asked = problem(8)
    space = SearchSpace(asked.model, 8)
    found = screen(asked, space)
    # ep 1, 2, 4, 8 and cp 1, 2, 4, 8 divide one another; two replay modes; drafts 0 to 5; the other drafts are refused.
    grid = len(space.requests_per_gpu) * len(space.chunk_rows_per_gpu)
    assert len(found.points) + found.refusals.total == 16 * 2 * 6 * grid + 2 * grid


@pytest.mark.parametrize("model", ["deepseek-v4.1-flash", "deepseek-v3"])
def test_screening_refuses_for_memory_exactly_what_the_budget_refuses(model: str) -> None:
    asked = problem(16, model, "h200")
    space = SearchSpace(asked.model, 16, requests_per_gpu=(1, 64, 512), chunk_rows_per_gpu=(512, 8192))
    found = screen(asked, space)
    screened = {
        (str(found.candidates[c].layout), int(s), int(r), int(n))
        for c, s, r, n in zip(
            found.points.candidate, found.points.max_num_seqs, found.points.chunk_rows, found.points.nextn, strict=True
        )
    }
    for layout in space.layouts(found.refusals):
        for requests in space.requests_per_gpu:
            for chunk in (rows * layout.cp for rows in space.chunk_rows_per_gpu):
                for nextn in (0, 1, 5):
                    seqs = requests * layout.cp
                    settings = EngineSettings(
                        max_num_seqs=seqs, max_tokens_per_step=seqs * (1 + nextn) + chunk, nextn=nextn
                    )
                    try:
                        budget = memory_budget(asked.model, layout, asked.cluster.accelerator, settings)
                        fits = budget.max_requests(5000 + nextn + 1, settings.block_tokens) >= seqs
                    except InfeasibleError:
                        fits = False
                    assert fits == ((str(layout), seqs, chunk, nextn) in screened)


def test_screened_means_agree_with_the_simulation() -> None:
    """Same cost formula, but closed-form queueing against the real scheduler: within 15% where the load is moderate."""
    asked = problem(8)
    found = screen(asked)
    points = found.points
    wanted = [(8, 512, 3), (32, 2048, 3), (64, 4096, 1)]
    for layout in ("ep8 dp8", "ep8 dp2 cp4"):
        for requests, chunk, nextn in wanted:
            candidate = next(
                i for i, c in enumerate(found.candidates) if str(c.layout) == layout and c.replay == "compact"
            )
            cp = found.candidates[candidate].layout.cp
            (index,) = np.flatnonzero(
                (points.candidate == candidate)
                & (points.max_num_seqs == requests * cp)
                & (points.chunk_rows == chunk * cp)
                & (points.nextn == nextn)
            )
            summary = run_finalist(int(index), make_plan(asked, found, int(index))).summary
            assert summary.output_tokens_per_s_per_gpu == pytest.approx(points.output_per_gpu[index], rel=0.15)
            assert summary.tpot_s.mean == pytest.approx(points.tpot_s[index], rel=0.15)


@pytest.fixture(scope="module")
def result() -> SearchResult:
    return run_search(problem(8), jobs=1)


def test_the_winner_is_the_best_finalist_within_the_limits(result: SearchResult) -> None:
    good = [f for f in result.finalists if result.feasible(f)]
    best = max(f.summary.output_tokens_per_s_per_gpu for f in good)
    assert result.winner.summary.output_tokens_per_s_per_gpu >= 0.99 * best
    slo, summary = result.problem.slo, result.winner.summary
    assert summary.ttft_s.p90 <= slo.ttft_s
    assert summary.tpot_s.p90 <= slo.tpot_s


def test_finalists_are_distinct_and_of_more_than_one_layout(result: SearchResult) -> None:
    plans = [f.plan.pools[0].model_dump_json() for f in result.finalists]
    assert len(set(plans)) == len(plans)
    assert len({f.plan.pools[0].layout.model_dump_json() for f in result.finalists}) > 1


def test_the_plot_is_the_same_bytes_twice(result: SearchResult) -> None:
    pictures = []
    for _ in range(2):
        figure, ax = new_figure()
        plot_pareto(result, ax)
        pictures.append(to_png(figure))
    assert pictures[0] == pictures[1]


def test_tighter_limits_never_raise_the_output(result: SearchResult) -> None:
    points = result.screening.points
    loose, tight = (points.output_per_gpu[points.tpot_s <= limit].max() for limit in (0.030, 0.010))
    assert tight <= loose


def test_a_rate_is_served_and_its_output_follows_from_it() -> None:
    found = run_search(problem(8, rate=4.0, isl=2000, osl=300), jobs=1)
    summary = found.winner.summary
    assert summary.output_tokens_per_s_per_gpu == pytest.approx(4.0 * 300 / 8, rel=0.1)
    assert found.feasible(found.winner)


def test_an_impossible_limit_names_the_nearest() -> None:
    with pytest.raises(InfeasibleError, match=r"the lowest simulated are .* ms, the lowest screened mean TPOT is"):
        run_search(problem(8, slo=Slo(tpot_s=1e-4)), jobs=1)


def test_idle_gpus_count_against_a_plan() -> None:
    """Nine GPUs run one engine of eight: the same engine, spread over nine."""
    eight, nine = (screen(problem(gpus, hardware="b200")) for gpus in (8, 9))

    def best(found: Screening) -> float:
        points: Points = found.points
        wide = [i for i, c in enumerate(found.candidates) if str(c.layout) == "ep8 dp8"]
        return float(points.output_per_gpu[np.isin(points.candidate, wide)].max())

    assert best(nine) * 9 == pytest.approx(best(eight) * 8)


def test_chosen_points_are_within_reach_of_the_limits() -> None:
    asked = problem(8)
    found = screen(asked)
    chosen = choose_points(asked, found, [], 6, spread=2)
    assert len(chosen) == len(set(chosen)) >= 5
    assert (found.points.tpot_s[chosen] <= asked.slo.tpot_s).all()


@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["gb200-nvl72", "b200", "h200", "h800"])
@pytest.mark.parametrize("model", ["deepseek-v4.1-flash", "deepseek-v3"])
def test_the_winner_is_close_to_the_best_screened_point(model: str, hardware: str) -> None:
    """No search may end on a corner of the space because all its finalists just missed a limit."""
    asked = problem(64, model, hardware)
    found = run_search(asked, jobs=-1)
    points = found.screening.points
    within = (points.tpot_s <= asked.slo.tpot_s) & (points.ttft_s <= asked.slo.ttft_s)
    assert found.winner.summary.output_tokens_per_s_per_gpu >= 0.7 * points.output_per_gpu[within].max()


def test_a_high_rate_is_measured_in_steady_state() -> None:
    """Filling the system must not be counted: what arrives is what is served."""
    found = run_search(problem(8, rate=20.0, isl=500, osl=200), jobs=1)
    summary = found.winner.summary
    assert summary.output_tokens_per_s_per_gpu == pytest.approx(20.0 * 200 / 8, rel=0.06)
    assert found.capacity_rps(found.winner) > 20.0
