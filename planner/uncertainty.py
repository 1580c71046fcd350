"""How far a search's figures may be off, and whether that can turn its order round.

A plan's figures are off as the steps behind them are (`deepinfer.cost.uncertainty`). Speed per user follows the pool
that decodes. Output of a loop with so many requests is their number over the time one spends in the system (Little's
law), so each pool counts by the share of that time spent in it: next to none where prompts pass quickly, all of it
where requests queue for a pool. Two plans of a search share model, hardware and most operators, and what is wrong with
these is wrong with both: their order is judged by the band of the ratio of their figures, narrower than each one's.

Accepted lengths and the workload are taken as given: they are what was asked, not what was predicted.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.cost.uncertainty import Band, Parts, mixed_parts, parts_band, ratio_band, step_parts
from deepinfer.engine.deployment import Deployment, by_role, resolve
from deepinfer.graph.shape import StepShape
from deepinfer.layout.plan import Plan
from planner.describe import mean_prefill_step, mean_steps

ACCEPTANCE_LINE = (
    "That length depends on the text: DSpark on Qwen3-4B keeps 4.6 of 6 tokens on mathematics, 4.4 on code and 3.2 in "
    "chat (its paper)."
)


@dataclass(frozen=True)
class PlanParts:
    """What cost-profile entries make of a request's time in the system, and of its time per token.

    `prefill_share` is the share of that time before a pool of its own has prefilled the prompt.
    """

    request: Parts
    token: Parts
    prefill_share: float = 0.0


@dataclass(frozen=True)
class Comparison:
    """One plan's figure over another's, as predicted, with the band of that ratio."""

    ratio: float
    band: Band

    @property
    def told_apart(self) -> bool:
        """Whether four of five such ratios, if measured, would be on the same side of 1."""
        return not self.ratio * self.band.low <= 1.0 <= self.ratio * self.band.high


@lru_cache(maxsize=64)
def plan_parts(plan: Plan) -> PlanParts:
    """The parts of a plan that has been simulated."""
    prefill, serving = by_role(resolve(plan))
    figures = plan.prediction
    assert figures is not None
    token = _mean(serving, mean_steps(plan, serving))
    if prefill is None:
        return PlanParts(token, token)
    share = figures.ttft_s.mean / figures.e2e_s.mean
    prompt = _mean(prefill, [(1.0, mean_prefill_step(plan, prefill))])
    return PlanParts(mixed_parts(((share, prompt), (1.0 - share, token))), token, share)


def _mean(deployment: Deployment, steps: list[tuple[float, StepShape]]) -> Parts:
    """The parts of an engine's time, given the shares of its steps."""
    graph, costs = deployment.graph(), CostModel(deployment.cluster.accelerator)
    seconds = [share * float(step_cost(graph, shape, costs).seconds) for share, shape in steps]
    total = sum(seconds)
    return mixed_parts(
        (spent / total, step_parts(graph, shape, costs)) for spent, (_, shape) in zip(seconds, steps, strict=True)
    )


def output_band(plan: Plan) -> Band:
    """Factors on output tokens/s per GPU of a plan that has been simulated."""
    return parts_band(plan_parts(plan).request)


def tpot_band(plan: Plan) -> Band:
    """Factors on the time per output token of a plan that has been simulated, and on tokens/s per user."""
    return parts_band(plan_parts(plan).token)


def compare(plan: Plan, other: Plan, ratio: float) -> Comparison:
    """How well `ratio`, the output of `plan` over that of `other` by simulation, is known."""
    found, others = plan_parts(plan), plan_parts(other)
    return Comparison(ratio, ratio_band(found.request, others.request, _other_layout(plan, other)))


def _other_layout(plan: Plan, other: Plan) -> float:
    """Share of a request's time that two plans spend in engines of other layouts."""
    if (plan.prefill is None) != (other.prefill is None) or plan.serving.layout != other.serving.layout:
        return 1.0
    if plan.prefill is None or other.prefill is None or plan.prefill.layout == other.prefill.layout:
        return 0.0
    return max(plan_parts(plan).prefill_share, plan_parts(other).prefill_share)


def bands_json(plan: Plan) -> dict[str, list[float]]:
    """The ends of the bands in the units of the plan's prediction; the time per token is the mean one."""
    figures, output, tpot = plan.prediction, output_band(plan), tpot_band(plan)
    assert figures is not None
    return {
        "output_tokens_per_s_per_gpu": _ends(figures.output_tokens_per_s_per_gpu, output),
        "tpot_s": _ends(figures.tpot_s.mean, tpot),
    }


def _ends(value: float, band: Band) -> list[float]:
    return [value * band.low, value * band.high]


def bands_line(plan: Plan) -> str:
    """One sentence on the bands of a plan."""
    return (
        f"four of five measurements should fall within {output_band(plan)} of its output and {tpot_band(plan)} of its "
        "time per token, given the accepted length"
    )


def compared_words(found: Comparison) -> str:
    """Whether a rival's distance means something, in words that follow the distance itself."""
    if found.told_apart:
        return f"more than the error of their ratio ({found.band})"
    return f"within the error of their ratio ({found.band}): measure both before preferring one"
