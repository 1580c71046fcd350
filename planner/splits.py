"""How many engines of a kind: the split of a cluster between two pools, or the fewest for a load. Pure arithmetic."""

from __future__ import annotations

import numpy as np

from deepinfer.numeric import Floats, Ints
from planner.steady import UTILIZATION

PART = 128
"""Accelerators of one of the alike parts that a large cluster is divided into, about: one of them is simulated."""
ENGINES_OF_A_PART = 16
"""Engines of the smaller pool in such a part, at least, when the size of the cluster is asked for."""


def best_split(
    giving_rps: float, giving_ranks: int, taking_rps: Floats, taking_ranks: Ints, gpus: tuple[int, int] | int
) -> tuple[Ints, Ints, Floats, int]:
    """The split that serves most, for one prefill engine beside each of many decode engines.

    `gpus` of one cluster, or of one for each pool. Rates are of one engine at its most; the prefill pool is loaded to
    `UTILIZATION` of it. Returns the engines of either pool, the requests/s they serve (0: none fits), and how many
    splits were compared. Of large clusters the counts are multiples of a step, so that parts of them are alike.
    """
    together = isinstance(gpus, int)
    there, here = (gpus, gpus) if isinstance(gpus, int) else gpus
    most = there // giving_ranks
    parts = min(there, here) // PART
    step = np.maximum(np.minimum(parts, np.minimum(most, here // taking_ranks)), 1)
    giving = np.arange(1, most // int(step.min(initial=1)) + 1)[None, :] * step[:, None]
    left = here - giving * giving_ranks if together else np.broadcast_to(here, giving.shape)
    taking = np.maximum(left // taking_ranks[:, None], 0) // step[:, None] * step[:, None]
    rates = np.minimum(UTILIZATION * giving_rps * giving, taking_rps[:, None] * taking)
    rates = np.where(giving <= most, rates, 0.0)
    if not rates.size:
        return np.zeros(len(taking_rps), int), np.zeros(len(taking_rps), int), np.zeros(len(taking_rps)), 0
    best = rates.argmax(axis=1)
    rows = np.arange(len(best))
    return giving[rows, best], taking[rows, best], rates[rows, best], rates.size


def fewest_engines(rate: float, *capacities_rps: Floats) -> list[Ints]:
    """Engines of each pool that serve `rate` requests/s at `UTILIZATION`, per point.

    Large counts are rounded up to multiples of a step that the pools share, so that the cluster is made of alike parts.
    """
    exact = [np.ceil(rate / (UTILIZATION * np.maximum(c, 1e-300))) for c in capacities_rps]
    parts = np.maximum(np.floor(np.min(exact, axis=0) / ENGINES_OF_A_PART), 1.0)
    counts: list[Ints] = [(np.ceil(n / parts) * parts).astype(np.int64) for n in exact]
    return counts
