"""What is asked of a search: model, hardware, workload, goal; resolved once from names and numbers."""

from __future__ import annotations

import math
from dataclasses import dataclass

from deepinfer.engine.deployment import fit_to_hardware
from deepinfer.errors import NoDataError, UsageError
from deepinfer.hardware.spec import Accelerator, ClusterSpec, load_hardware
from deepinfer.layout.plan import Objective, Slo
from deepinfer.model.hf import load_model
from deepinfer.model.spec import ModelSpec
from deepinfer.scheduler.speculation import Acceptance, default_acceptance
from deepinfer.workload.spec import (
    Arrivals,
    ClosedLoop,
    FixedLength,
    PoissonArrivals,
    TraceArrivals,
    TraceSource,
    Workload,
)
from deepinfer.workload.trace import Trace, read_trace, trace_source
from planner.screen import Load

DEFAULT_ISL, DEFAULT_OSL = 4000, 1000


@dataclass(frozen=True)
class Problem:
    """A search's question, with names resolved to specs. `rate` is in requests/s for the whole cluster."""

    model_name: str
    hardware_name: str
    model: ModelSpec
    cluster: ClusterSpec
    acceptance: Acceptance
    objective: Objective
    slo: Slo
    load: Load
    isl: int | None
    osl: int | None
    source: TraceSource | None
    trace_requests: int
    seed: int

    def workload(self, arrivals: ClosedLoop | None, num_requests: int) -> Workload:
        """The workload a finalist is simulated on; `arrivals` only for a load that is not given as a rate."""
        chosen: Arrivals
        if arrivals is not None:
            chosen = arrivals
        elif self.source is not None:
            chosen = TraceArrivals(rate=self.load.rate)
        else:
            assert self.load.rate is not None, "an open loop needs a rate"
            chosen = PoissonArrivals(rate=self.load.rate)
        if self.source is not None:
            count = min(num_requests, self.trace_requests)
            return Workload(trace=self.source, arrivals=chosen, num_requests=count, seed=self.seed)
        assert self.isl is not None
        assert self.osl is not None
        return Workload(
            isl=FixedLength(tokens=self.isl),
            osl=FixedLength(tokens=self.osl),
            arrivals=chosen,
            num_requests=num_requests,
            seed=self.seed,
        )


def make_problem(
    gpus: int,
    model: str,
    hardware: str,
    isl: int | None,
    osl: int | None,
    trace: str | None,
    rate: float | None,
    slo: Slo,
    objective: Objective,
    acceptance: float | None,
    seed: int,
) -> Problem:
    """Resolve and check a question. Raises UsageError or NoDataError in one sentence for what cannot be asked."""
    if gpus < 1:
        raise UsageError(f"--gpus must be at least 1, got {gpus}")
    if trace is not None and (isl is not None or osl is not None):
        raise UsageError("--trace brings its own lengths: it cannot be combined with --isl or --osl")
    for flag, value in (("--rate", rate), ("--ttft", slo.ttft_s), ("--tpot", slo.tpot_s)):
        if value is not None and not (math.isfinite(value) and value > 0):
            raise UsageError(f"{flag} must be a positive number, got {value}")
    accelerator = load_hardware(hardware)
    _check_objective(objective, accelerator)
    spec = fit_to_hardware(load_model(model), accelerator)
    read = read_trace(trace) if trace is not None else None
    if read is None:
        isl, osl = DEFAULT_ISL if isl is None else isl, DEFAULT_OSL if osl is None else osl
        load = _fixed_load(isl, osl, rate)
    else:
        load = _trace_load(read, rate)
    if load.isl + load.osl > spec.max_context:
        raise UsageError(f"{load.isl + load.osl:.0f} tokens a request exceed the {spec.max_context} of {spec.name}")
    return Problem(
        model_name=model,
        hardware_name=hardware,
        model=spec,
        cluster=ClusterSpec(accelerator, gpus),
        acceptance=_acceptance(spec, acceptance),
        objective=objective,
        slo=slo,
        load=load,
        isl=isl,
        osl=osl,
        source=trace_source(trace) if trace is not None else None,
        trace_requests=len(read.prompt_tokens) if read else 0,
        seed=seed,
    )


def _check_objective(objective: Objective, accelerator: Accelerator) -> None:
    if objective == "cost" and accelerator.price_usd_per_hour is None:
        raise NoDataError(f"hardware {accelerator.name} has no price_usd_per_hour: --objective cost needs one")
    if objective == "energy":
        raise NoDataError("--objective energy needs power by load, which no catalog entry has yet")
    if objective == "gpus":
        raise NoDataError("--objective gpus needs a search over cluster sizes, which this version does not have yet")


def _acceptance(model: ModelSpec, rate: float | None) -> Acceptance:
    if rate is None:
        return default_acceptance(model.family, model.draft.kind if model.draft else None)
    if not 0 <= rate <= 1:
        raise UsageError(f"--acceptance must lie between 0 and 1, got {rate}")
    return Acceptance(rates=(rate,), source="given on the command line, one conditional rate")


def _fixed_load(isl: int, osl: int, rate: float | None) -> Load:
    for flag, value in (("--isl", isl), ("--osl", osl)):
        if value < 1:
            raise UsageError(f"{flag} must be at least 1, got {value}")
    return Load(float(isl), float(isl), float(osl), rate)


def _trace_load(trace: Trace, rate: float | None) -> Load:
    """Means of a trace; prompt blocks seen earlier in it count as cached, as they do for a cache that holds all."""
    isl, osl = float(trace.prompt_tokens.mean()), float(trace.output_tokens.mean())
    seen: set[int] = set()
    repeated = 0
    for ids in trace.block_ids:
        repeated += sum(block in seen for block in ids)
        seen.update(ids)
    num_blocks = sum(len(ids) for ids in trace.block_ids)
    hit = repeated / num_blocks if num_blocks else 0.0
    return Load(isl, isl * (1.0 - hit), osl, rate)
