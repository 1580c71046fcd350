"""Entries with their predictions, bands and errors."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.cost.model import CostProfile
from deepinfer.cost.uncertainty import Band
from deepinfer.errors import DeepinferError
from planner.validate.bands import entry_band
from planner.validate.mapping import map_case
from planner.validate.predict import Prediction, predict
from planner.validate.targets import Target


@dataclass(frozen=True)
class Outcome:
    """An entry with its prediction and the band around it, or with the reason why there is none."""

    target: Target
    prediction: Prediction | None
    reason: str | None
    band: Band | None = None

    @property
    def error(self) -> float | None:
        """Predicted over measured, less one; None without a prediction."""
        return None if self.prediction is None else self.prediction.value / self.target.value - 1.0

    @property
    def ends(self) -> tuple[float, float] | None:
        """The band's ends, in the entry's metric."""
        if self.prediction is None or self.band is None:
            return None
        return self.prediction.value * self.band.low, self.prediction.value * self.band.high

    @property
    def inside(self) -> bool | None:
        """Whether the measured value lies in the band."""
        return None if self.ends is None else self.ends[0] <= self.target.value <= self.ends[1]


def validate(targets: list[Target], profile: CostProfile | None = None) -> list[Outcome]:
    """Every entry predicted, or with a reason; with one cost profile for all hardware if it is given."""
    return [_outcome(target, profile) for target in targets]


def _outcome(target: Target, profile: CostProfile | None) -> Outcome:
    try:
        prediction, costs = predict(target, profile), map_case(target, profile).costs
        return Outcome(target, prediction, None, entry_band(target, prediction, costs))
    except DeepinferError as error:
        return Outcome(target, None, str(error))
