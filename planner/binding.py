"""What a step is bound by: how much longer it gets when one resource gets a little worse.

Every term of the closed form is a time, and a time is proportional to the start-ups or to the reciprocal of one rate;
sums, maxima and rounded maxima of them are homogeneous of degree 1. So the step's relative sensitivities to all of
them add up to 1 (Euler's theorem), and each is the share of the step that its resource accounts for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np

from deepinfer.cost.model import CostModel, CostProfile, load_profile
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.shape import StepShape
from deepinfer.hardware.host import HostProfile
from deepinfer.hardware.spec import Accelerator
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.spec import ModelSpec
from deepinfer.numeric import Floats
from planner.resources import (
    Change,
    compute_faster,
    hbm_faster,
    host_slower,
    latencies_longer,
    scale_out_faster,
    scale_up_faster,
    start_ups_longer,
)
from planner.steady import step_seconds

WORSE = 1.01
"""By how much a resource is made worse: small enough for a derivative, far above rounding."""


@dataclass(frozen=True)
class Engine:
    """One engine whose steps are timed: a graph, and what it runs on."""

    model: ModelSpec
    accelerator: Accelerator
    layout: ParallelLayout
    graph: ExecutionGraph
    host: HostProfile
    profile: CostProfile | None = field(default=None)

    def seconds(self, shape: StepShape, requests: Floats, captured: bool) -> Floats:
        """Seconds from step to step with so many requests on an attention replica."""
        return step_seconds(self.graph, shape, CostModel(self.accelerator, self.profile), self.host, requests, captured)

    def launch_seconds(self, requests: float) -> float:
        """Host time before an idle device starts a step that is not a captured graph."""
        launch = self.host.submit_seconds(0, len(self.graph.steps), captured=False)
        return launch + requests * self.host.schedule_s_per_request.value


def shares(engine: Engine, seconds: Callable[[Engine], Floats]) -> dict[str, Floats]:
    """Per resource, the share of `seconds(engine)` that it accounts for."""
    now = seconds(engine)
    return {name: (seconds(worse(engine)) / now - 1.0) / (WORSE - 1.0) for name, worse in RESOURCES.items()}


def bound_by(shares: dict[str, Floats]) -> list[str]:
    """The name of the largest share, point by point."""
    names = list(shares)
    return [names[i] for i in np.argmax([shares[name] for name in names], axis=0)]


def _start_up(engine: Engine) -> Engine:
    profile = engine.profile or load_profile(engine.accelerator.family)
    accelerator = latencies_longer(engine.accelerator, WORSE)
    return replace(engine, accelerator=accelerator, profile=start_ups_longer(profile, WORSE))


def _on(change: Change, *more: Change) -> Callable[[Engine], Engine]:
    def worse(engine: Engine) -> Engine:
        accelerator = engine.accelerator
        for one in (change, *more):
            accelerator = one(accelerator, 1.0 / WORSE)
        return replace(engine, accelerator=accelerator)

    return worse


RESOURCES: dict[str, Callable[[Engine], Engine]] = {
    "start-up": _start_up,
    "HBM": _on(hbm_faster),
    "compute": _on(compute_faster),
    "links": _on(scale_up_faster, scale_out_faster),
    "host": lambda engine: replace(engine, host=host_slower(engine.host, WORSE)),
}
