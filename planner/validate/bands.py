"""The band of an entry's prediction, from the steps behind it."""

from __future__ import annotations

from deepinfer.cost.model import CostModel
from deepinfer.cost.uncertainty import Band, Part, load_spreads, mixed_parts, parts_band, step_parts
from planner.validate.predict import Prediction, WeightedSteps
from planner.validate.targets import Target


def entry_parts(steps: WeightedSteps, costs: CostModel) -> dict[str, Part]:
    """What each cost-profile entry makes of the time behind a prediction."""
    total = sum(weight * step.seconds for weight, step in steps)
    return mixed_parts(
        (weight * step.seconds / total, step_parts(step.graph, step.shape, costs, step.host_s))
        for weight, step in steps
    )


def single_kernel(steps: WeightedSteps) -> bool:
    """Whether one operator was timed on its own, not a pass of many."""
    return all(len(step.graph.steps) == 1 for _, step in steps)


def entry_band(target: Target, prediction: Prediction, costs: CostModel) -> Band:
    """Factors on the predicted value; a condition that is a range widens them.

    A ratio of two layouts of one engine has the band of such pairs.
    """
    if target.metric == "ratio":
        band = Band.of(load_spreads().other_layout.log_sigma)
    else:
        band = parts_band(entry_parts(prediction.steps, costs), single_kernel(prediction.steps))
    return Band(band.low * prediction.low / prediction.value, band.high * prediction.high / prediction.value)
