"""Where experts lie, and how evenly they are used: EPLB as pure functions, and the load of the busiest rank.

EPLB: deepseek-ai/EPLB (MIT), its algorithm in our own words. Popularity: log-normal over experts with a sigma that
matches published Gini coefficients (DODOCO, arXiv 2605.20982).
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist
from typing import Annotated

import numpy as np
from pydantic import BaseModel, ConfigDict, Field

from deepinfer.errors import UsageError
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.spec import MoE
from deepinfer.numeric import Floats, Ints, Num, larger, smaller

NUM_DRAWS = 64
"""Random placements that the load without EPLB is averaged over: its standard error is below 1%."""


class ExpertLoad(BaseModel):
    """How evenly tokens choose experts, and what is done about it.

    Log popularity of the experts is normal with `sigma`: 0.43 is the Gini coefficient of 0.24 that DODOCO (arXiv
    2605.20982) measured for MLA models on real text, sigma = 2 erfinv(Gini). `eplb` places experts by their popularity,
    else at random; what it places by is out of date by `drift`, the sigma of a popularity that it does not know:
    0.16 leaves the busiest of 32 ranks with 288 slots 11% above the mean, as TensorRT-LLM's wide-EP blog measured
    for R1. Rows of one text choose alike: `text_spread` is the relative spread of a slot's load from one text to the
    next, as if slots were independent, which a few long prompts do not average out. Two prefills of R1 on EP32 with
    prompts of 4,096 tokens were 1.18 times as fast in perfect balance as with EPLB: 2.6 explains it on H100 (SGLang's
    large-scale EP blog), 3.6 on 910C (CloudMatrix384 paper, arXiv 2506.12708); their mean here. `balanced` routing is
    forced to be even, as benchmarks do: neither skew nor sampling noise.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    sigma: Annotated[float, Field(ge=0, le=3)] = 0.43
    drift: Annotated[float, Field(ge=0, le=3)] = 0.16
    text_spread: Annotated[float, Field(ge=0, le=10)] = 3.1
    balanced: bool = False
    eplb: bool = True


TYPICAL_LOAD = ExpertLoad()
"""Real text, placed by EPLB."""


def expert_slots(moe: MoE, layout: ParallelLayout, draft: bool = False) -> int:
    """Physical experts of a layer over its expert group.

    A draft module takes no part in balancing: only as many copies as make its slots divide evenly. Raises UsageError
    when the backbone's slots do not divide by ep.
    """
    if draft:
        return -(-moe.num_experts // layout.ep) * layout.ep
    slots = moe.num_experts + layout.redundant_experts
    if slots % layout.ep:
        raise UsageError(
            f"layout {layout}: {moe.num_experts} experts and {layout.redundant_experts} redundant ones do not "
            f"divide evenly over ep {layout.ep}"
        )
    return slots


def pack_evenly(weights: Floats, num_bins: int) -> Ints:
    """The bin of each of n items, n / num_bins in each: heaviest first, each into the lightest bin with room."""
    room = np.full(num_bins, len(weights) // num_bins)
    filled = np.zeros(num_bins)
    bins = np.zeros(len(weights), dtype=np.int64)
    for item in np.argsort(-weights, kind="stable"):
        lightest = int(np.argmin(np.where(room > 0, filled, np.inf)))
        bins[item] = lightest
        room[lightest] -= 1
        filled[lightest] += weights[item]
    return bins


def replicate(weights: Floats, num_slots: int) -> Ints:
    """The expert of each slot: one slot each, then further ones for whichever has most load per copy."""
    copies = np.ones(len(weights))
    experts = list(range(len(weights)))
    for _ in range(num_slots - len(weights)):
        heaviest = int(np.argmax(weights / copies))
        copies[heaviest] += 1
        experts.append(heaviest)
    return np.asarray(experts, dtype=np.int64)


def place_experts(weights: Floats, num_slots: int, num_ranks: int, num_groups: int = 1, num_nodes: int = 1) -> Ints:
    """EPLB: the expert in each of `num_slots` slots, rank by rank; `weights` are the experts' loads.

    When the groups divide over the nodes, groups are packed onto nodes first, and experts are copied and packed within
    them (for node-limited routing); else all ranks are one node. `num_slots` must divide by `num_ranks`, and that by
    `num_nodes`.
    """
    if num_groups % num_nodes:
        num_groups = num_nodes = 1
    members = np.arange(len(weights)).reshape(num_groups, -1)
    nodes = pack_evenly(weights[members].sum(axis=1), num_nodes)
    placed = []
    for node in range(num_nodes):
        local = members[nodes == node].ravel()
        slots = replicate(weights[local], num_slots // num_nodes)
        copies = np.bincount(slots, minlength=len(local))
        ranks = pack_evenly(weights[local][slots] / copies[slots], num_ranks // num_nodes)
        placed.append(local[slots[np.argsort(ranks, kind="stable")]])
    return np.concatenate(placed)


def rank_loads(weights: Floats, slots: Ints, num_ranks: int) -> Floats:
    """Load of each rank when an expert's copies share its load evenly."""
    copies = np.bincount(slots, minlength=len(weights))
    loads: Floats = (weights / np.maximum(copies, 1))[slots].reshape(num_ranks, -1).sum(axis=1)
    return loads


def expert_popularity(num_experts: int, topk: int, sigma: float) -> Floats:
    """How likely each expert is among a token's `topk`, at the expected quantiles of a log-normal popularity.

    That is a typical draw: where a single expert decides (sigma 1 on 64 ranks without redundant ones), draws scatter.

    Drawing k of them without replacement is a race of exponential clocks with rates p: by the time t at which k are
    expected to have rung, expert e has with probability 1 - exp(-p_e t).
    """
    normal = NormalDist()
    quantiles = [(i - 0.375) / (num_experts + 0.25) for i in range(1, num_experts + 1)]
    rates = np.exp(sigma * np.asarray([normal.inv_cdf(q) for q in quantiles]))
    low, high = 0.0, 1e6 / float(rates.min())
    for _ in range(100):
        middle = 0.5 * (low + high)
        low, high = (middle, high) if float((1 - np.exp(-rates * middle)).sum()) < topk else (low, middle)
    popularity: Floats = 1 - np.exp(-rates * high)
    return popularity


@lru_cache(maxsize=1024)
def placement_skew(num_experts: int, topk: int, num_slots: int, num_ranks: int, load: ExpertLoad) -> float:
    """Expected load of the busiest rank over the mean, without sampling noise; at least 1.

    Drift is an independent spread of each slot's load beside what the placement leaves: they add up in squares.
    """
    if num_ranks == 1 or load.balanced:
        return 1.0
    weights = expert_popularity(num_experts, topk, load.sigma)
    mean = float(weights.sum()) / num_ranks
    if load.eplb:
        placed = float(rank_loads(weights, place_experts(weights, num_slots, num_ranks), num_ranks).max()) / mean - 1.0
        spread = (math.exp(load.drift**2) - 1.0) * num_ranks / num_slots
        return 1.0 + math.sqrt(placed**2 + _largest(num_ranks) ** 2 * spread)
    # Copies of no particular expert share its load with it.
    slots = np.arange(num_slots) % num_experts
    rng = np.random.default_rng(0)
    busiest = [rank_loads(weights, rng.permutation(slots), num_ranks).max() for _ in range(NUM_DRAWS)]
    return float(np.mean(busiest)) / mean


def text_variance(num_slots: int, num_ranks: int, load: ExpertLoad) -> float:
    """Relative variance of a rank's load from one text to the next; its slots are as many independent ones."""
    return 0.0 if load.balanced else load.text_spread**2 * num_ranks / num_slots


def busiest_over_mean(choices: Num, num_ranks: int, skew: float = 1.0, alike: Num = 0.0) -> Num:
    """Load of the busiest of `num_ranks` ranks over the mean when tokens make `choices` expert choices.

    Sampling noise: a normal approximation of the largest of so many binomial counts. The excess of `skew`
    (`placement_skew`) is an independent spread, and so is `alike`, the relative variance of a rank's load that comes
    from rows of one text choosing alike: they add up in squares.
    """
    if num_ranks == 1:
        return 1.0
    noise = _largest(num_ranks) ** 2 * ((num_ranks - 1.0) / larger(choices, 1e-9) + alike)
    # Never more than all choices on one rank.
    return smaller(1.0 + ((skew - 1.0) ** 2 + noise) ** 0.5, float(num_ranks))


@lru_cache
def _largest(count: int) -> float:
    """Expected maximum of so many standard normals (Blom's quantile)."""
    return NormalDist().inv_cdf((count - 0.375) / (count + 0.25))
