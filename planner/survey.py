"""The best plan on each kind of accelerator, beside one another: what to buy, with cost and energy, or why not."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from deepinfer.errors import InfeasibleError, NoDataError
from deepinfer.layout.plan import Plan
from deepinfer.units import format_seconds
from planner.describe import engines
from planner.economics import economics
from planner.explain import explain
from planner.pipeline import run_search
from planner.problem import Question, make_problem

HEADER = (
    "model", "hardware", "engines", "req/GPU", "nextn", "output tok/s/GPU", "tok/s/user", "TTFT", "TPOT",
    "USD/M output", "J/output", "binds most",
)  # fmt: skip


@dataclass(frozen=True)
class Surveyed:
    """A model on a kind of accelerator: its plan and what binds it, or the reason why there is none."""

    model: str
    hardware: str
    plan: Plan | None
    binding: str = ""
    reason: str = ""


def survey(
    question: Question, models: Sequence[str], hardware: Sequence[str], jobs: int = -1,
    tell: Callable[[str], None] | None = None,
) -> Iterator[Surveyed]:  # fmt: skip
    """Search each model on each kind of accelerator, everything else as in the question."""
    for model in models:
        for name in hardware:
            if tell:
                tell(f"{model} on {name}")
            yield _one(replace(question, model=model, hardware=name), jobs)


def _one(question: Question, jobs: int) -> Surveyed:
    try:
        result = run_search(make_problem(question), jobs)
    except (InfeasibleError, NoDataError) as error:
        return Surveyed(question.model, question.hardware, None, reason=str(error))
    binding = explain(result).binding
    words = f"{binding.name} ({binding.ratio - 1.0:+.0%})" if binding else "nothing by itself"
    return Surveyed(question.model, question.hardware, result.plan, binding=words)


def survey_row(found: Surveyed) -> tuple[str, ...]:
    """One line of a survey's table, in the order of `HEADER`; a reason stands where there is no plan."""
    if found.plan is None:
        return (found.model, found.hardware, f"no plan: {found.reason}", *[""] * (len(HEADER) - 3))
    plan, percentile = found.plan, found.plan.slo.percentile
    assert plan.prediction is not None
    summary, money = plan.prediction, economics(plan)
    pool = plan.serving
    return (
        found.model,
        found.hardware,
        engines(plan),
        f"{pool.settings.max_num_seqs / pool.layout.resolve().replica_ranks:g}",
        str(pool.settings.nextn),
        f"{summary.output_tokens_per_s_per_gpu:,.0f}",
        f"{summary.tokens_per_s_per_user:.0f}",
        format_seconds(summary.ttft_s.at(percentile)),
        format_seconds(summary.tpot_s.at(percentile)),
        "-" if money.usd_per_million_output_tokens is None else f"{money.usd_per_million_output_tokens:.3f}",
        "-" if money.joules_per_output_token is None else f"{money.joules_per_output_token:.2f}",
        found.binding,
    )
