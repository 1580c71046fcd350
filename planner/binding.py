"""What a step is bound by: how much longer it gets when one resource gets a little worse.

Every term of the closed form is a time, and a time is proportional to the start-ups or to the reciprocal of one rate;
sums, maxima and rounded maxima of them are homogeneous of degree 1. So the step's relative sensitivities to all of
them add up to 1 (Euler's theorem), and each is the share of the step that its resource accounts for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt

from deepinfer.cost.model import CostModel, CostProfile, load_profile
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.shape import StepShape
from deepinfer.hardware.host import HostProfile
from deepinfer.hardware.spec import Accelerator, Link, Quantity
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.spec import ModelSpec
from planner.steady import step_seconds

Floats = npt.NDArray[np.float64]

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


def _longer(quantity: Quantity) -> Quantity:
    return quantity.model_copy(update={"value": quantity.value * WORSE})


def _slower(quantity: Quantity) -> Quantity:
    return quantity.model_copy(update={"value": quantity.value / WORSE})


def _start_up(engine: Engine) -> Engine:
    """Start-ups of operators and messages, and what a single tile or message waits for however small it is."""
    profile = engine.profile or load_profile(engine.accelerator.family)
    times = ("startup_s", "bulk_startup_s", "per_peer_s", "depth_s")
    operators = {
        name: p.model_copy(update={time: getattr(p, time) * WORSE for time in times})
        for name, p in profile.operators.items()
    }
    accelerator = engine.accelerator.model_copy(
        update={name: _later(getattr(engine.accelerator, name)) for name in ("scale_up", "scale_out")}
    )
    return replace(engine, accelerator=accelerator, profile=profile.model_copy(update={"operators": operators}))


def _later(link: Link) -> Link:
    return link.model_copy(update={"latency_s": _longer(link.latency_s)}) if link.latency_s else link


def _compute(engine: Engine) -> Engine:
    """Products and exponentials."""
    a = engine.accelerator
    rates = {name: _slower(rate) for name, rate in a.flops_per_s.items()}
    exp = _slower(a.exp_per_s) if a.exp_per_s else None
    return replace(engine, accelerator=a.model_copy(update={"flops_per_s": rates, "exp_per_s": exp}))


def _hbm(engine: Engine) -> Engine:
    slower = {"hbm_bytes_per_s": _slower(engine.accelerator.hbm_bytes_per_s)}
    return replace(engine, accelerator=engine.accelerator.model_copy(update=slower))


def _links(engine: Engine) -> Engine:
    """Bandwidth of the scale-up and scale-out links."""
    a = engine.accelerator
    slower = {
        name: link.model_copy(update={"bytes_per_s": _slower(link.bytes_per_s)})
        for name, link in (("scale_up", a.scale_up), ("scale_out", a.scale_out))
    }
    return replace(engine, accelerator=a.model_copy(update=slower))


def _host(engine: Engine) -> Engine:
    """Deciding, launching, and the gap between steps."""
    slower = {
        name: _longer(value)
        for name in type(engine.host).model_fields
        if isinstance(value := getattr(engine.host, name), Quantity)
    }
    return replace(engine, host=engine.host.model_copy(update=slower))


RESOURCES: dict[str, Callable[[Engine], Engine]] = {
    "start-up": _start_up,
    "HBM": _hbm,
    "compute": _compute,
    "links": _links,
    "host": _host,
}
