"""What a workload is: lengths, arrivals, number of requests and seed. Part of a plan file: JSON in and out.

A malformed workload is refused by pydantic (`ValidationError`): NaN, infinities, zero, negative numbers.
"""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

MAX_TOKENS = 999_999_999
"""The longest prompt or output of a workload or a trace; keeps arithmetic on lengths exact in int64."""

OPEN_WARM_UP = 0.2
"""Share of the time from an open loop's first arrival to its last that passes before measurement starts."""

TraceFormat = Literal["mooncake", "azure"]
Tokens = Annotated[int, Field(ge=1, le=MAX_TOKENS)]
RequestsPerSecond = Annotated[float, Field(gt=0)]

_EDGE = ConfigDict(extra="forbid", frozen=True, strict=True, allow_inf_nan=False)


class FixedLength(BaseModel):
    """Every request has `tokens` tokens."""

    model_config = _EDGE

    kind: Literal["fixed"] = "fixed"
    tokens: Tokens


class LognormalLength(BaseModel):
    """Lognormal lengths in tokens, rounded to the nearest integer, then clipped to `minimum` .. `maximum`.

    `mean` is the mean of the distribution itself before clipping, exp(mu + sigma^2 / 2), and `sigma` the
    standard deviation of its logarithm. Clipping moves the mean of what is drawn; without a `maximum` only
    MAX_TOKENS clips. A sigma above 10 is refused: its mean comes from draws at sigma deviations, never seen.
    """

    model_config = _EDGE

    kind: Literal["lognormal"] = "lognormal"
    mean: float = Field(gt=0, le=MAX_TOKENS)
    sigma: float = Field(gt=0, le=10)
    minimum: Tokens = 1
    maximum: Tokens | None = None

    @model_validator(mode="after")
    def _mean_within_bounds(self) -> LognormalLength:
        if self.mean < self.minimum:
            raise ValueError(f"mean {self.mean:g} is below minimum {self.minimum}")
        if self.maximum is not None and self.mean > self.maximum:
            raise ValueError(f"mean {self.mean:g} is above maximum {self.maximum}")
        return self


class PoissonArrivals(BaseModel):
    """Independent exponential gaps; `rate` in requests/s counts the whole cluster, not one engine."""

    model_config = _EDGE

    kind: Literal["poisson"] = "poisson"
    rate: RequestsPerSecond


class SteadyStart(BaseModel):
    """How a simulator begins a closed loop amid its requests, as if the loop had run for long.

    Of a mean request's `lifetime_s` the first `ttft_s` pass before its first token: that share of the users waits for
    one at the start, all others are somewhere in their outputs. Measurement starts after `settle_s` and lasts
    `measure_s`.
    """

    model_config = _EDGE

    ttft_s: float = Field(gt=0)
    lifetime_s: float = Field(gt=0)
    settle_s: float = Field(ge=0)
    measure_s: float = Field(gt=0)

    @model_validator(mode="after")
    def _first_token_within_a_life(self) -> SteadyStart:
        if self.ttft_s >= self.lifetime_s:
            raise ValueError(f"ttft_s {self.ttft_s:g} is not below lifetime_s {self.lifetime_s:g}")
        return self


class ClosedLoop(BaseModel):
    """Always `concurrency` requests in the system: a finished one is replaced at once.

    The first ones arrive evenly over `ramp_s` seconds, so that they do not march in step. Measurement starts
    `warm_up_s` after that and lasts `measure_s` (None: until the last request is sent). A simulator does without ramp
    and warm-up if it is told how to begin `steady`; devices cannot, their KV has to be computed.
    """

    model_config = _EDGE

    kind: Literal["closed"] = "closed"
    concurrency: int = Field(ge=1)
    ramp_s: float = Field(default=0.0, ge=0)
    warm_up_s: float = Field(default=0.0, ge=0)
    measure_s: float | None = Field(default=None, gt=0)
    steady: SteadyStart | None = None

    @property
    def measured_from_s(self) -> float:
        """When measurement starts, seconds from the start of the run."""
        return self.ramp_s + self.warm_up_s

    @property
    def measured_until_s(self) -> float | None:
        """When measurement ends unless the last request is sent before; None without such a time."""
        return None if self.measure_s is None else self.measured_from_s + self.measure_s


class TraceArrivals(BaseModel):
    """The trace's own times; `rate` (requests/s) stretches them so that the whole trace has this mean."""

    model_config = _EDGE

    kind: Literal["trace"] = "trace"
    rate: RequestsPerSecond | None = None


class TraceSource(BaseModel):
    """A trace file, and what it held when the plan was made; `path` may be relative to the working folder."""

    model_config = _EDGE

    path: str = Field(min_length=1)
    format: TraceFormat
    sha256: str = Field(pattern=r"^[0-9a-f]{64}$")


Lengths = Annotated[FixedLength | LognormalLength, Field(discriminator="kind")]
Arrivals = Annotated[PoissonArrivals | ClosedLoop | TraceArrivals, Field(discriminator="kind")]


class Workload(BaseModel):
    """The requests of a run: lengths from `isl` (prompt) and `osl` (output), or both from `trace`.

    A trace's lengths combine with any arrivals; the trace's own times need a trace. `num_requests` takes
    the first ones of a trace, None all of them.
    """

    model_config = _EDGE

    isl: Lengths | None = None
    osl: Lengths | None = None
    trace: TraceSource | None = None
    arrivals: Arrivals
    num_requests: int | None = Field(default=None, ge=1)
    seed: int = Field(default=0, ge=0)

    @model_validator(mode="after")
    def _one_source_of_lengths(self) -> Workload:
        if self.trace is not None:
            if self.isl is not None or self.osl is not None:
                raise ValueError("isl and osl contradict trace: lengths come from one or the other")
            if isinstance(self.arrivals, ClosedLoop) and self.arrivals.steady is not None:
                raise ValueError("a steady start contradicts trace: its requests find cached what came before them")
            return self
        if self.isl is None or self.osl is None:
            raise ValueError("lengths need both isl and osl, or a trace")
        if isinstance(self.arrivals, TraceArrivals):
            raise ValueError("arrivals of kind 'trace' need a trace")
        if self.num_requests is None:
            raise ValueError("num_requests is required without a trace")
        return self


def open_loop_window(first_s: float, last_s: float, over_s: float) -> tuple[float, float]:
    """From when to when an open loop is measured: without the filling and the emptying of the system.

    From its first and last arrival, and the end of the run, which a loop of one moment is measured to; seconds.
    """
    return first_s + OPEN_WARM_UP * (last_s - first_s), last_s if last_s > first_s else over_s


def describe_workload(workload: Workload) -> str:
    """The workload in one line."""
    arrivals = workload.arrivals
    if workload.trace is not None:
        what = f"{workload.num_requests or 'all'} requests of trace {workload.trace.path}"
    else:
        assert workload.isl is not None
        assert workload.osl is not None
        lengths = f"{_describe_lengths(workload.isl)} prompt and {_describe_lengths(workload.osl)} output tokens"
        what = f"{workload.num_requests:,} requests of {lengths}"
    match arrivals:
        case ClosedLoop(concurrency=users):
            how = f"closed loop of {users:,} users on the whole cluster"
        case PoissonArrivals(rate=rate):
            how = f"Poisson arrivals at {rate:g} requests/s for the whole cluster"
        case TraceArrivals(rate=rate):
            how = "the trace's arrivals" + (f" rescaled to {rate:g} requests/s for the whole cluster" if rate else "")
    return f"{what}; {how}; seed {workload.seed}"


def _describe_lengths(lengths: Lengths) -> str:
    return f"{lengths.tokens:,}" if isinstance(lengths, FixedLength) else f"about {lengths.mean:,.0f}"
