"""How long a step takes: the graph's closed form, remembered by the shape of the step."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from deepinfer.cost.compose import StepCosts
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.shape import ReplicaLoad, heaviest, replica_load, step_shape
from deepinfer.scheduler.step import StepPlan

Floats = npt.NDArray[np.float64]

STEPS_PER_OCTAVE = 16
"""Requests, rows and tokens are rounded to the nearest of 16 values per doubling: 2.2% off at most, unbiased."""


class StepTimer:
    """Seconds of a step group's step from the plans of its replicas."""

    def __init__(self, deployment: Deployment, costs: CostModel) -> None:
        self._steps = StepCosts(deployment.graph(), costs)
        self._settings = deployment.settings
        self._known: dict[tuple[ReplicaLoad, float, float], float] = {}
        self.num_kernels = len(self._steps.graph.steps)

    def seconds(self, plans: Sequence[StepPlan | None]) -> float:
        """The step's time: replicas meet in every expert layer, so the heaviest one sets the pace."""
        loads = [replica_load(plan) for plan in plans if plan is not None]
        rows = sum(load.num_rows for load in loads) / len(plans)
        kept = sum(load.num_kept_rows for load in loads) / len(plans)
        return max(self._one(_rounded(load), _on_grid(rows), _on_grid(kept)) for load in heaviest(loads))

    def decode_seconds(self, loads: Sequence[ReplicaLoad], num_replicas: int, growth: Floats) -> list[float]:
        """Seconds of successive steps that only decode, as replicas' mean contexts grow.

        `growth` has a row per step and a column per load: tokens on top of the load's mean context.
        """
        counts = np.asarray([load.num_decodes for load in loads])
        cached = counts * (np.asarray([load.mean_context for load in loads]) + growth)
        rows = sum(load.num_rows for load in loads) / num_replicas
        most_rows = np.flatnonzero(counts == counts.max())
        candidates = (most_rows[np.argmax(cached[:, most_rows], axis=1)], np.argmax(cached, axis=1))
        seconds = np.zeros(len(growth))
        for replicas in candidates:
            contexts = cached[np.arange(len(growth)), replicas] / counts[replicas]
            # Alike rounded contexts of alike batches have one time.
            alike = counts[replicas] * 4096 + np.rint(np.log2(np.maximum(contexts, 1.0)) * STEPS_PER_OCTAVE)
            _, first, inverse = np.unique(alike, return_index=True, return_inverse=True)
            values = [
                self._one(
                    _rounded(loads[replicas[i]]._replace(mean_context=float(contexts[i]))),
                    _on_grid(rows),
                    _on_grid(rows),
                )
                for i in first
            ]
            seconds = np.maximum(seconds, np.asarray(values)[inverse])
        return [float(s) for s in seconds]

    def _one(self, load: ReplicaLoad, mean_rows: float, mean_kept_rows: float) -> float:
        key = (load, mean_rows, mean_kept_rows)
        seconds = self._known.get(key)
        if seconds is None:
            shape = step_shape(load, mean_rows, mean_kept_rows, self._settings.graph_rows)
            seconds = self._known[key] = self._steps.seconds(shape)
        return seconds


def _rounded(load: ReplicaLoad) -> ReplicaLoad:
    return load._replace(
        num_decodes=round(_on_grid(load.num_decodes)),
        mean_context=_on_grid(load.mean_context),
        prompt_rows=round(_on_grid(load.prompt_rows)),
        prompt_start=_on_grid(load.prompt_start),
        kept_rows=round(_on_grid(load.kept_rows)),
    )


def _on_grid(value: float) -> float:
    """The nearest of `STEPS_PER_OCTAVE` values per doubling; small numbers stay as they are."""
    if value <= STEPS_PER_OCTAVE:
        return value
    return math.exp2(round(math.log2(value) * STEPS_PER_OCTAVE) / STEPS_PER_OCTAVE)
