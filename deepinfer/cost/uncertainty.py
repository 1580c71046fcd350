"""How far a predicted time may be off: bands that should hold four of five measurements.

    log(measured / predicted) = sum over entries k of share_k x error_k + around

An entry of the cost profile has one error: operators that it prices are off together, since their errors come from one
fit, and those of different entries are off independently. `share_k` is what it makes of the time on the critical path.
Its spread is the profile's `log_error_sigma`. Entries that no measurement is behind are off together, as the whole of a
platform is, by the spread `unmeasured`. `around` is what a profile does not know, engine, host, imbalance and the
measuring itself: the spread that end-to-end measurements showed beyond their operators (`uncertainty.toml`, written by
`tools/fit_uncertainty.py`).

Two plans of one model on one hardware share these errors, so the ratio of their times is known better than each:

    log(ratio measured / ratio predicted) = sum over k of (share_k - other share_k) x error_k + apart

with `apart` the spread that pairs of measurements of one engine on one hardware showed, of the `same_layout` or not.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from deepinfer.cost.compose import path_seconds
from deepinfer.cost.model import CostModel
from deepinfer.files import read_toml
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.shape import StepShape

_FILE = Path(__file__).parent / "uncertainty.toml"
SHARE_INSIDE = 0.8
"""Of unseen measurements, the share that a band should hold."""
Z_INSIDE = 1.2815515655446004
"""Standard deviations either way that hold `SHARE_INSIDE` of a normal distribution."""


class Spread(BaseModel):
    """A standard deviation of log(measured / predicted), fitted on so many rows."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    log_sigma: Annotated[float, Field(ge=0)]
    rows_fitted: Annotated[int, Field(ge=1)]
    source: Annotated[str, Field(min_length=8)]


class Spreads(BaseModel):
    """What is off besides the operators that somebody measured; see the module."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    kernel: Spread
    step: Spread
    unmeasured: Spread
    same_layout: Spread
    other_layout: Spread


@lru_cache
def load_spreads() -> Spreads:
    """The shipped spreads."""
    return Spreads.model_validate(read_toml(_FILE, "uncertainty file"))


class Part(NamedTuple):
    """What one cost-profile entry makes of a time, and the spread of its error; None if it was never measured."""

    share: float
    log_sigma: float | None


Parts = Mapping[str, Part]
"""By hardware family and entry; what is missing from a share of 1 is host time and idling."""


@dataclass(frozen=True)
class Band:
    """Factors on a prediction, a time or a rate, between which a measurement lies four times in five."""

    low: float
    high: float

    @classmethod
    def of(cls, log_sigma: float) -> Band:
        """The band of a normal error of the logarithm."""
        half = Z_INSIDE * log_sigma
        return cls(math.exp(-half), math.exp(half))

    def __str__(self) -> str:
        return f"-{1.0 - self.low:.0%} +{self.high - 1.0:.0%}"


def step_parts(graph: ExecutionGraph, shape: StepShape, costs: CostModel, host_s: float = 0.0) -> dict[str, Part]:
    """The entries on the critical path of one step, `host_s` of host time and idling beside it."""
    profile, spent = costs.profile, path_seconds(graph, shape, costs)
    total = sum(spent) + host_s
    parts: dict[str, Part] = {}
    for operator, seconds in zip(graph.operators, spent, strict=True):
        if seconds > 0:
            key = profile.key(operator.kind, operator.work(shape).precision)
            name = f"{profile.family} {key}"
            share = seconds / total + (parts[name].share if name in parts else 0.0)
            parts[name] = Part(share, profile.operators[key].log_error_sigma)
    return parts


def mixed_parts(weighted: Iterable[tuple[float, Parts]]) -> dict[str, Part]:
    """The parts of a time made of several; weights are their shares of it."""
    parts: dict[str, Part] = {}
    for weight, one in weighted:
        for name, part in one.items():
            before = parts[name].share if name in parts else 0.0
            parts[name] = Part(before + weight * part.share, part.log_sigma)
    return parts


def operators_log_sigma(parts: Parts) -> float:
    """What the operators alone contribute to the spread of a time."""
    measured = sum((p.share * p.log_sigma) ** 2 for p in parts.values() if p.log_sigma is not None)
    unmeasured = sum(p.share for p in parts.values() if p.log_sigma is None) * load_spreads().unmeasured.log_sigma
    return math.hypot(math.sqrt(measured), unmeasured)


def parts_band(parts: Parts, single_kernel: bool = False) -> Band:
    """The band of a time: one kernel's, timed on its own, or a step's and what is made of steps."""
    spreads = load_spreads()
    around = spreads.kernel if single_kernel else spreads.step
    return Band.of(math.hypot(operators_log_sigma(parts), around.log_sigma))


def step_band(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> Band:
    """The band of a step's time; `shape` must be one step, not an array of them."""
    return parts_band(step_parts(graph, shape, costs))


def difference_log_sigma(parts: Parts, other: Parts) -> float:
    """What operators contribute to the spread of the ratio of two times of one model on one hardware.

    Entries that nobody measured count apart here: how much they share of a platform's error is not known.
    """
    unmeasured, total = load_spreads().unmeasured.log_sigma, 0.0
    for name in parts.keys() | other.keys():
        share, log_sigma = parts.get(name, Part(0.0, None))
        other_share, other_sigma = other.get(name, Part(0.0, log_sigma))
        sigma = other_sigma if log_sigma is None else log_sigma
        total += ((share - other_share) * (unmeasured if sigma is None else sigma)) ** 2
    return math.sqrt(total)


def ratio_band(parts: Parts, other: Parts, other_layout: float) -> Band:
    """The band of the ratio of two times of one model on one hardware: what both share cancels.

    `other_layout` is the share of the time spent in engines whose layouts differ.
    """
    spreads = load_spreads()
    apart = math.hypot(
        other_layout * spreads.other_layout.log_sigma, (1.0 - other_layout) * spreads.same_layout.log_sigma
    )
    return Band.of(math.hypot(difference_log_sigma(parts, other), apart))
