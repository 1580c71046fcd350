"""Explanations against planted bottlenecks: what was made scarce is what must be named."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

import deepinfer.hardware.spec as hardware
from deepinfer.errors import UsageError
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import ExpertLoad
from deepinfer.layout.plan import Slo
from planner.explain import explain
from planner.pipeline import SearchResult, make_screen
from planner.problem import Problem, Question, make_problem
from planner.reasons import binding_line
from planner.refine import make_plan, run_finalist
from planner.space import EngineKind
from planner.why import parse_point, why_lines

CATALOG = Path(hardware.__file__).parent / "catalog"
WIDE = EngineKind("mixed", ParallelLayout(dp=8, ep=8), "off")


def changed(tmp_path: Path, name: str, quantity: str, value: float) -> str:
    """A hardware file like a shipped one with another value of one quantity, the first of that name."""
    text = (CATALOG / f"{name}.toml").read_text()
    pattern = rf"(?m)^({quantity} = {{ value = )[0-9.e+]+"
    assert re.search(pattern, text)
    path = tmp_path / "planted.toml"
    path.write_text(re.sub(pattern, rf"\g<1>{value!r}", text, count=1))
    return str(path)


def answer(problem: Problem, kind: EngineKind = WIDE) -> SearchResult:
    """The best of one kind of engine, simulated: a search with one finalist."""
    screening = make_screen(problem, only=[kind]).run()
    points = screening.points
    within = (points.tpot_s <= 0.9 * problem.slo.tpot_s) & (points.ttft_s <= 0.5 * problem.slo.ttft_s)
    best = int(np.flatnonzero(within)[np.argmax(points.output_per_gpu[within])])
    return SearchResult(problem, screening, (run_finalist(best, make_plan(problem, screening, best)),))


def ask(hardware: str, **changes: object) -> Problem:
    return make_problem(
        Question(gpus=8, model="qwen3-235b-a22b", hardware=hardware, isl=1000, osl=200, slo=Slo(tpot_s=0.08), **changes)
    )  # type: ignore[arg-type]


def test_a_slow_link_is_named(tmp_path: Path) -> None:
    explanation = explain(answer(ask(changed(tmp_path, "h200", "bytes_per_s", 1e10))))
    assert explanation.binding is not None
    assert explanation.binding.name == "scale-up links twice as fast"
    assert "scale-up links" in binding_line(explanation)


def test_a_hot_expert_is_named() -> None:
    hot = ExpertLoad(sigma=2.5, eplb=False)
    explanation = explain(answer(ask("h200", expert_load=hot)))
    assert explanation.binding is not None
    assert explanation.binding.name == "experts loaded evenly"


def test_too_little_room_for_kv_is_named(tmp_path: Path) -> None:
    explanation = explain(answer(ask(changed(tmp_path, "h200", "hbm_bytes", 8.5e10))))
    assert explanation.binding is not None
    assert explanation.binding.name == "twice the HBM, for KV"


def test_a_limit_that_binds_is_named() -> None:
    """Close to the shortest step there is, a longer limit buys many more requests."""
    problem = ask("h200")
    tight = replace(problem, slo=problem.slo.model_copy(update={"tpot_s": 0.035}))
    explanation = explain(answer(tight))
    assert explanation.binding is not None
    by_name = {w.name: w.ratio for w in explanation.what_ifs}
    assert by_name["TPOT limit a quarter longer"] > 1.2


@pytest.fixture(scope="module")
def usual() -> SearchResult:
    return answer(ask("h200"))


def test_what_is_worse_never_gains_and_what_is_better_never_loses(usual: SearchResult) -> None:
    explanation = explain(usual)
    for what_if in explanation.what_ifs:
        if what_if.group != "assumption":
            assert what_if.ratio >= 1.0, what_if
        elif what_if.name in ("acceptance a tenth lower", "prompts a quarter longer"):
            assert what_if.ratio <= 1.0, what_if


@pytest.mark.parametrize(
    ("point", "said"),
    [
        ("ep=64", "has 64 ranks, the cluster 8 accelerators"),
        ("ep=1", "needs .* per GPU"),
        ("tp=3 ep=3", "do not divide"),
        ("requests=4000", "needs .* per GPU|does not fit beside the weights"),
        ("nextn=7", "gives at most 0 drafts, not 7"),
        ("requests=1", "less than the plan's simulated"),
    ],
)
def test_why_not_a_point(usual: SearchResult, point: str, said: str) -> None:
    assert re.search(said, " ".join(why_lines(usual.plan, point)))


def test_words_that_are_no_point_are_refused(usual: SearchResult) -> None:
    with pytest.raises(UsageError, match="cannot read 'banana'"):
        parse_point("ep=8 banana", usual.plan)
