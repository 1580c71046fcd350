"""Speculative decoding as numbers: how many drafts a step keeps, on average and drawn one by one."""

from __future__ import annotations

import itertools
from typing import Annotated, Literal

import numpy as np
import numpy.typing as npt
from pydantic import BaseModel, ConfigDict, Field, model_validator

from deepinfer.numeric import Ints

Probability = Annotated[float, Field(ge=0, le=1, allow_inf_nan=False)]

Words = npt.NDArray[np.uint64]

_SHIFT = np.uint64(11)
_GOLDEN = np.uint64(0x9E3779B97F4A7C15)
_MIX_1, _MIX_2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)


class Acceptance(BaseModel):
    """How likely drafts are accepted, where the numbers come from, and by which convention they are meant.

    `conditional`: rates[i] is the chance that draft i is accepted when all before it were; the last rate holds for
    all later ones, and tau = 1 + sum of products. `linear`: DeepInfer's README convention, tau = 1 + nextn x rate, with
    one rate.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    convention: Literal["conditional", "linear"] = "conditional"
    rates: Annotated[tuple[Probability, ...], Field(min_length=1)]
    source: str

    @model_validator(mode="after")
    def _one_rate_if_linear(self) -> Acceptance:
        if self.convention == "linear" and len(self.rates) > 1:
            raise ValueError(f"the linear convention has one rate for all drafts, got {len(self.rates)}")
        return self

    def survival(self, nextn: int) -> list[float]:
        """Chance that the first k drafts are all accepted, for k = 1..nextn."""
        rates = [self.rates[min(i, len(self.rates) - 1)] for i in range(nextn)]
        if self.convention == "linear":
            return rates
        return list(itertools.accumulate(rates, lambda a, b: a * b))

    def tau(self, nextn: int) -> float:
        """Mean tokens kept per step and request, the bonus token included."""
        return 1.0 + sum(self.survival(nextn))

    def draw(self, seed: int, request_ids: Ints, rounds: Ints, nextn: int) -> Ints:
        """Tokens kept by requests that verify `nextn` drafts for so-many-th time (arrays that broadcast).

        Each is a function of (seed, request, round) alone, whatever the batch, the process or the order of calls.
        """
        return Draws(self, seed, nextn)(request_keys(seed, request_ids), rounds)


class Draws:
    """`Acceptance.draw` for one seed and number of drafts, with requests named by their `request_keys`."""

    def __init__(self, acceptance: Acceptance, seed: int, nextn: int) -> None:
        self._seed, self._nextn = seed, nextn
        self._survival = np.asarray(acceptance.survival(nextn)[::-1])

    def __call__(self, keys: Words, rounds: Ints) -> Ints:
        """Tokens kept by each request in each round (arrays that broadcast)."""
        if self._nextn == 0:
            return np.ones(np.broadcast_shapes(keys.shape, rounds.shape), dtype=np.int64)
        # tokens > k exactly when u < survival[k - 1]: one uniform gives the whole accepted prefix.
        words = _mix(keys + rounds.astype(np.uint64) * _GOLDEN)
        uniform = (words >> _SHIFT) * 2.0**-53
        kept: Ints = 1 + self._nextn - self._survival.searchsorted(uniform, side="right")
        return kept


def request_keys(seed: int, request_ids: Ints) -> Words:
    """A word for each request, from which its draws follow: SplitMix64 (Steele et al., OOPSLA 2014)."""
    seeded = _mix(np.asarray([seed & 0xFFFFFFFFFFFFFFFF], dtype=np.uint64) + _GOLDEN)
    return _mix(seeded ^ (request_ids.astype(np.uint64) + _GOLDEN))


def _mix(word: Words) -> Words:
    word = (word ^ (word >> np.uint64(30))) * _MIX_1
    word = (word ^ (word >> np.uint64(27))) * _MIX_2
    return word ^ (word >> np.uint64(31))


def default_acceptance(family: str, draft: str | None = None) -> Acceptance:
    """Acceptance of a model family with a kind of draft module, from published measurements; rate 0 without any.

    Families with one kind of module are listed without it.
    """
    known = _PUBLISHED.get(f"{family} {draft}") or _PUBLISHED.get(family)
    return known or Acceptance(rates=(0.0,), source="no published acceptance for this model")


# Rates of V4-Pro's MTP block: accept lengths 1.79, 2.27, 2.49, 2.54, 2.55 and no more with 1 to 8 drafts.
_MTP_RATES = (0.79, 0.61, 0.46, 0.23, 0.20, 0.0)
_MTP_SOURCE = (
    "V4-Pro MTP accept lengths 1.79, 2.27, 2.49, 2.54, 2.55 (InferenceX golden_al_distribution: coding, thinking on)"
)
_PUBLISHED = {
    "deepseek-v4.1": Acceptance(
        rates=(0.778,),
        source="V4.1-Flash golden accept length 3.51 at 5 drafts (InferenceX #2964: SPEED-Bench coding, thinking on, "
        "temperature 1, block rule), read as one conditional rate",
    ),
    "deepseek-v4 mtp": Acceptance(rates=_MTP_RATES, source=_MTP_SOURCE),
    "deepseek-v4 dspark": Acceptance(
        rates=(0.739, 0.647, 0.546, 0.667, 0.747, 0.669, 0.494),
        source="V4-Flash-0731 with 7 drafts: survival 0.739, 0.478, 0.261, 0.174, 0.130, 0.087, 0.043 "
        "(vllm-project/vllm-ascend #13640)",
    ),
    "deepseek-v3": Acceptance(
        rates=_MTP_RATES, source=f"{_MTP_SOURCE}; no curve beyond the second token is published for V3"
    ),
    "deepseek-v3.2": Acceptance(rates=_MTP_RATES, source=f"{_MTP_SOURCE}; no curve is published for V3.2"),
    "kimi-k2": Acceptance(
        rates=(0.83, 0.723),
        source="Kimi-K2.5 with an EAGLE3 draft model: accept lengths 1.83 with 1 draft, 3.77 with 8 (InferenceX "
        "golden_al_distribution), read as one rate after the first; K2's own checkpoint has no draft module",
    ),
}
