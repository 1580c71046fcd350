"""The planner against brute force, against its own simulator, and against common sense."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from deepinfer.errors import InfeasibleError
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import Slo
from deepinfer.layout.settings import EngineSettings
from planner.columns import pareto
from planner.pipeline import SearchResult, make_screen, run_search
from planner.plots import new_figure, plot_pareto, to_png
from planner.problem import Problem, Question, make_problem
from planner.refine import choose_points, make_plan, run_finalist
from planner.screen import Points, Screening
from planner.space import EngineKind, Refusals, SearchSpace
from planner.splits import best_split, fewest_engines
from planner.steady import UTILIZATION, SteadyState


def problem(gpus: int = 8, model: str = "deepseek-v4.1-flash", hardware: str = "b200", **changes: Any) -> Problem:
    return make_problem(Question(gpus, model, hardware, **changes))


def screen(asked: Problem) -> Screening:
    return make_screen(asked).run()


@given(st.lists(st.tuples(st.floats(0.1, 100), st.floats(0.1, 100)), min_size=1, max_size=40))
def test_the_pareto_front_by_brute_force(values: list[tuple[float, float]]) -> None:
    x, y = (np.asarray(column) for column in zip(*values, strict=True))
    front = {(x[i], y[i]) for i in pareto(x, y)}
    unbeaten = {(a, b) for a, b in values if not any((c >= a and d >= b) and (c > a or d > b) for c, d in values)}
    assert front == unbeaten


def test_every_layout_is_screened_or_refused() -> None:
    """Against an enumeration of the degrees that divide one another, heads and widths on 8 accelerators."""
    asked = problem(8, "deepseek-v3", "h200")
    found = {(k.ep, k.cp, k.tp, k.etp) for k in SearchSpace(asked.model, asked.cluster).layouts(Refusals())}
    one_of_many = {(ep, cp, 1, 1) for ep in (1, 2, 4, 8) for cp in (1, 2, 4, 8)}
    heads = {(ep, 1, tp, 1) for ep in (1, 2, 4, 8) for tp in (2, 4, 8)}
    sliced = {(ep, 1, tp, tp) for ep in (1, 2, 4, 8) for tp in (2, 4, 8) if ep * tp <= 8}
    assert found == one_of_many | heads | sliced


def test_every_point_is_screened_or_refused() -> None:
    asked = problem(8)
    space = SearchSpace(asked.model, asked.cluster, requests_per_gpu=(1, 64, 65536), chunk_rows_per_gpu=(512, 8192))
    (kind, *_) = (k for k in space.kinds("mixed", Refusals()) if k.layout.ep == 8 and k.layout.cp == 1)
    refusals = Refusals()
    steady = SteadyState(space, asked.load, asked.acceptance, asked.host, asked.expert_load)
    engines = steady.mixed(kind, 0, [0, 3], refusals)
    assert engines is not None
    assert len(engines) + refusals.total == 2 * 3 * 2
    assert refusals.total > 0


@pytest.mark.parametrize("layout", [ParallelLayout(dp=16, ep=16), ParallelLayout(dp=2, tp=8, ep=16)], ids=str)
@pytest.mark.parametrize("model", ["deepseek-v4.1-flash", "deepseek-v3"])
def test_screening_refuses_for_memory_exactly_what_the_budget_refuses(model: str, layout: ParallelLayout) -> None:
    asked = problem(16, model, "h200")
    space = SearchSpace(asked.model, asked.cluster, requests_per_gpu=(1, 64, 512), chunk_rows_per_gpu=(512, 8192))
    steady = SteadyState(space, asked.load, asked.acceptance, asked.host, asked.expert_load)
    engines = steady.mixed(EngineKind("mixed", layout, "off"), 0, [0, 1, 5], Refusals())
    assert engines is not None
    screened = set(
        zip(*(column.tolist() for column in (engines.max_num_seqs, engines.chunk_rows, engines.nextn)), strict=True)
    )
    per_gpu = layout.replica_ranks
    for seqs, chunk, nextn in itertools.product((1, 64, 512), (512, 8192), (0, 1, 5)):
        seqs, chunk = seqs * per_gpu, chunk * per_gpu
        settings = EngineSettings(max_num_seqs=seqs, max_tokens_per_step=seqs * (1 + nextn) + chunk, nextn=nextn)
        try:
            budget = memory_budget(asked.model, layout, asked.cluster.accelerator, settings)
            fits = budget.max_requests(5000 + nextn + 1, settings.block_tokens) >= seqs
        except InfeasibleError:
            fits = False
        assert fits == ((seqs, chunk, nextn) in screened)


def test_screened_means_agree_with_the_simulation() -> None:
    """Same cost formula, but closed-form queueing against the real scheduler: one pool within 6% where it is not full.

    Two pools are simulated with four fifths of the screened users: TPOT within 15%, and at least so much output.
    """
    asked = problem(8)
    kinds = [
        EngineKind("mixed", ParallelLayout(dp=8, ep=8), "compact"),
        EngineKind("mixed", ParallelLayout(dp=2, cp=4, ep=8), "compact"),
        EngineKind("prefill", ParallelLayout(dp=4, ep=4), "compact"),
        EngineKind("decode", ParallelLayout(dp=4, ep=4), "compact"),
    ]
    found = make_screen(asked, only=kinds).run()
    points = found.points
    rng = np.random.default_rng(1)
    moderate = np.flatnonzero((points.tpot_s < 0.04) & (points.ttft_s < 0.5) & (points.users < 600))
    for split, output, tpot in ((False, 0.94, 0.06), (True, 0.8, 0.15)):
        for index in rng.choice(moderate[(points.prefill_rows[moderate] > 0) == split], 4, replace=False):
            summary = run_finalist(int(index), make_plan(asked, found, int(index))).summary
            assert output <= summary.output_tokens_per_s_per_gpu / points.output_per_gpu[index] <= 1.06
            assert summary.tpot_s.mean == pytest.approx(points.tpot_s[index], rel=tpot)


@given(
    giving=st.floats(0.1, 10.0),
    ranks=st.sampled_from([1, 2, 4, 8]),
    takers=st.lists(st.tuples(st.floats(0.1, 10.0), st.sampled_from([1, 2, 4, 8, 16])), min_size=1, max_size=4),
    gpus=st.integers(2, 31),
)
def test_the_best_split_by_enumeration(giving: float, ranks: int, takers: list[tuple[float, int]], gpus: int) -> None:
    rates, sizes = (np.asarray(column) for column in zip(*takers, strict=True))
    _, _, served, _ = best_split(giving, ranks, rates, sizes, gpus)
    for i, (rate, size) in enumerate(takers):
        splits = [
            min(UTILIZATION * giving * p, rate * d)
            for p in range(1, gpus + 1)
            for d in range(1, gpus + 1)
            if p * ranks + d * size <= gpus
        ]
        assert served[i] == pytest.approx(max(splits, default=0.0))


@given(st.floats(0.5, 5e4), st.floats(0.1, 20.0), st.floats(0.1, 20.0))
def test_the_fewest_engines_serve_a_load_and_little_more(rate: float, giving: float, taking: float) -> None:
    counts = fewest_engines(rate, np.asarray([giving]), np.asarray([taking]))
    for count, capacity in zip((int(c[0]) for c in counts), (giving, taking), strict=True):
        exact = rate / (UTILIZATION * capacity)
        assert exact <= count * (1 + 1e-12)
        assert count <= max(np.ceil(exact), 1) + exact / 8


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
    plans = [f.plan.model_dump_json(exclude={"prediction"}) for f in result.finalists]
    assert len(set(plans)) == len(plans)
    assert len({f.plan.serving.layout.model_dump_json() for f in result.finalists}) > 1
    assert {len(f.plan.pools) for f in result.finalists} == {1, 2}


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
        wide = [i for i, c in enumerate(found.candidates) if str(c.kind.layout) == "ep8 dp8" and c.prefill is None]
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
