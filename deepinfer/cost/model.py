"""What an operator costs: `CostModel.cost(operator, work) -> Cost`, and the roofline with fitted efficiencies.

    seconds = startup + (compute^p + (bytes / (bandwidth x e_m))^p)^(1/p) + around + peers x per_peer_s + message
    compute = flops x (1 / (peak x e_c) + exp_share / (flops_per_exp x exp_per_s)) x (1 + rows_half / rows)
              + depth x depth_s
    around  = (activation bytes x read_passes + bytes written x write_passes) / (bandwidth x e_m)

with `rows` those that meet each weight matrix, e_c and e_m the efficiencies that large shapes reach (e_c is a share of
the peak at the work's precision, or at the one an entry names as its `peak`), and p how sharply the roofline's knee is
rounded (p = 1: the two terms add up; p large: the larger one counts). The depth of a work is what one tile walks
through in series, the k of a product or the context of an attention row, at `depth_s` a step however many tiles run.
Attention takes an exponential every `flops_per_exp` FLOPs, of which a share waits for the special function units.
A message takes the longer of its scale-up and scale-out parts, each bytes / (link x efficiency) plus the link's latency
beyond the start-up, if the catalog has one. Within the scale-up domain it is sent by the faster of two protocols, one
that starts at once and one for bulk, which starts `bulk_startup_s` later and reaches more of the link. The message is
added to the rest, or hidden behind it as sharply as an entry's `message_sharpness` above 1 says (a fused kernel sends
while it computes).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal, NamedTuple

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from deepinfer.errors import NoDataError, UsageError, unknown_name
from deepinfer.files import first_fault, read_toml
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.hardware.spec import Accelerator, Link, Precision
from deepinfer.numeric import Floats, Num, larger, smaller, where_positive

_PROFILES = Path(__file__).parent / "profiles"


class Source(IntEnum):
    """Where a cost comes from, weakest first: sums keep the weakest."""

    ROOFLINE = 0
    PUBLISHED = 1
    FITTED = 2
    MEASURED = 3


@dataclass(frozen=True, slots=True)
class Cost:
    """Seconds of one operator (a number, or an array over shapes) and where they come from."""

    seconds: Num
    source: Source


class OperatorParameters(BaseModel):
    """Fitted parameters of one kind of operator on one accelerator family; see the module's formula.

    `peak` is for kernels that run at another precision's rate than their operands suggest: the ratio of two peaks
    differs between parts of one family (FP4 has 2 times FP8's on B200, 3 times on B300). `read_passes` and
    `write_passes` count what kernels around the main one move for each byte of the work's `activation_bytes`
    (quantising, activation function) and of what it writes (permutation). `fitted` names the parameters that were
    fitted, on `rows_fitted` measured rows; `log_error_sigma` is half the central 68 % of log(predicted / measured) over
    rows held out, None if there were none.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    startup_s: Annotated[float, Field(ge=0)]
    compute_efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    peak: Precision | None = None
    memory_efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    rows_half: Annotated[float, Field(ge=0)] = 0.0
    sharpness: Annotated[float, Field(ge=1)] = 4.0
    scale_up_efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    exp_share: Annotated[float, Field(ge=0)] = 0.0
    flops_per_exp: Annotated[float, Field(gt=0)] = 1.0
    depth_s: Annotated[float, Field(ge=0)] = 0.0
    read_passes: Annotated[float, Field(ge=0)] = 0.0
    write_passes: Annotated[float, Field(ge=0)] = 0.0
    scale_out_efficiency: Annotated[float, Field(gt=0, le=1)] = 1.0
    message_sharpness: Annotated[float, Field(ge=1)] = 1.0
    bulk_startup_s: Annotated[float, Field(ge=0)] = 0.0
    bulk_efficiency: Annotated[float, Field(gt=0, le=1)] | None = None
    per_peer_s: Annotated[float, Field(ge=0)] = 0.0
    fitted: tuple[str, ...] = ()
    rows_fitted: Annotated[int, Field(ge=0)] = 0
    log_error_sigma: Annotated[float, Field(gt=0)] | None = None
    kind: Literal["roofline", "published", "fitted", "measured"]
    source: Annotated[str, Field(min_length=8)]


class CostProfile(BaseModel):
    """Parameters of every operator kind, by precision where it matters (`gemm.fp8`), of one accelerator family."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    family: str
    description: str
    operators: dict[str, OperatorParameters]

    def key(self, kind: OpKind, precision: str) -> str:
        """The name of the entry `kind.precision`, else of `kind`. Raises NoDataError when the profile has neither."""
        for name in (f"{kind}.{precision}", str(kind)):
            if name in self.operators:
                return name
        raise NoDataError(
            f"cost profile {self.family} has no parameters for {kind} at {precision}; "
            "calibrate it or add an entry with a source"
        )

    def parameters(self, kind: OpKind, precision: str) -> OperatorParameters:
        """The entry `kind.precision`, else `kind`. Raises NoDataError when the profile has neither."""
        return self.operators[self.key(kind, precision)]


def load_profile(family: str) -> CostProfile:
    """The shipped profile of an accelerator family. Raises UsageError for an unknown family."""
    families = sorted(path.stem for path in _PROFILES.glob("*.toml"))
    if family not in families:
        raise unknown_name("cost profile of hardware family", family, families)
    try:
        return CostProfile.model_validate(read_toml(_PROFILES / f"{family}.toml", "cost profile"))
    except ValidationError as error:
        raise UsageError(f"cost profile {family}: {first_fault(error)}") from None


class _Rates(NamedTuple):
    """What a kind of operator reaches on an accelerator: the reciprocals of its rates."""

    parameters: OperatorParameters
    s_per_flop: float
    s_per_byte: float
    s_per_byte_written: float
    s_per_byte_activation: float
    s_per_byte_up: float
    s_per_byte_bulk: float
    s_per_byte_out: float
    latency_up_s: float
    latency_out_s: float
    source: Source


class CostModel:
    """Costs of operators on one accelerator: its peaks times the efficiencies of its family's profile."""

    def __init__(self, accelerator: Accelerator, profile: CostProfile | None = None) -> None:
        self.accelerator = accelerator
        self.profile = load_profile(accelerator.family) if profile is None else profile
        self._known: dict[tuple[OpKind, Precision], _Rates] = {}

    def cost(self, operator: Operator, work: Work) -> Cost:
        """Seconds that `operator` takes for `work` on one rank, elementwise for arrays; 0 where there is no work."""
        known = self._known.get((operator.kind, work.precision)) or self._look_up(operator.kind, work.precision)
        p = known.parameters
        num_bytes = work.bytes_read + work.bytes_written
        compute = work.flops * known.s_per_flop
        # Terms that a kind does not have are skipped, not added as 0: every step of a search passes here.
        if p.rows_half:
            compute = compute * (1.0 + p.rows_half / larger(work.rows, 1e-9))
        if p.depth_s:
            compute = compute + work.depth * p.depth_s
        seconds = _rounded_maximum(compute, num_bytes * known.s_per_byte, p.sharpness)
        if p.read_passes:
            seconds = seconds + work.activation_bytes * known.s_per_byte_activation
        if p.write_passes:
            seconds = seconds + work.bytes_written * known.s_per_byte_written
        amount = work.flops + num_bytes
        if work.message is not None:
            sent = _message_seconds(work.message, known)
            fused = p.message_sharpness > 1.0
            seconds = _rounded_maximum(seconds, sent, p.message_sharpness) if fused else seconds + sent
            amount = amount + work.message.scale_up_bytes + work.message.scale_out_bytes
        return Cost(where_positive(amount, p.startup_s + seconds), known.source)

    def _look_up(self, kind: OpKind, precision: Precision) -> _Rates:
        p = self.profile.parameters(kind, precision)
        up, out = self.accelerator.scale_up, self.accelerator.scale_out
        exp_s = p.exp_share / p.flops_per_exp / self._exp_per_s() if p.exp_share else 0.0
        s_per_byte = 1.0 / (self.accelerator.hbm_bytes_per_s.value * p.memory_efficiency)
        rates = _Rates(
            parameters=p,
            s_per_flop=1.0 / (self.accelerator.peak_flops_per_s(p.peak or precision) * p.compute_efficiency) + exp_s,
            s_per_byte=s_per_byte,
            s_per_byte_written=p.write_passes * s_per_byte,
            s_per_byte_activation=p.read_passes * s_per_byte,
            s_per_byte_up=1.0 / (up.bytes_per_s.value * p.scale_up_efficiency),
            s_per_byte_bulk=1.0 / (up.bytes_per_s.value * (p.bulk_efficiency or 1.0)),
            s_per_byte_out=1.0 / (out.bytes_per_s.value * p.scale_out_efficiency),
            latency_up_s=_latency_seconds(up),
            latency_out_s=_latency_seconds(out),
            source=Source[p.kind.upper()],
        )
        self._known[kind, precision] = rates
        return rates

    def _exp_per_s(self) -> float:
        if self.accelerator.exp_per_s is None:
            raise NoDataError(
                f"hardware {self.accelerator.name}: exp_per_s is not in the catalog; add it with a source"
            )
        return self.accelerator.exp_per_s.value


def _message_seconds(message: Message, known: _Rates) -> Num:
    p = known.parameters
    up_s = message.scale_up_bytes * known.s_per_byte_up
    if p.bulk_efficiency:
        up_s = smaller(up_s, p.bulk_startup_s + message.scale_up_bytes * known.s_per_byte_bulk)
    out_s = message.scale_out_bytes * known.s_per_byte_out
    return message.peers * p.per_peer_s + larger(
        where_positive(message.scale_up_bytes, up_s + known.latency_up_s),
        where_positive(message.scale_out_bytes, out_s + known.latency_out_s),
    )


def _latency_seconds(link: Link) -> float:
    return link.latency_s.value if link.latency_s else 0.0


def _rounded_maximum(a: Num, b: Num, sharpness: float) -> Num:
    """(a^p + b^p)^(1/p), safe where both are 0; of arrays within 1e-6, by a table that is six times as fast."""
    if sharpness == 1.0:
        return a + b
    high, low = larger(a, b), smaller(a, b)
    ratio = low / larger(high, 1e-300)
    if not isinstance(ratio, np.ndarray):
        exact: Num = high * (1.0 + ratio**sharpness) ** (1.0 / sharpness)
        return exact
    values, slopes = _rounding(sharpness)
    at = ratio * float(_ROUNDING_CELLS)
    cell = at.astype(np.intp)
    rounded: Num = high * (values.take(cell) + (at - cell) * slopes.take(cell))
    return rounded


_ROUNDING_CELLS = 4096


@lru_cache(maxsize=64)
def _rounding(sharpness: float) -> tuple[Floats, Floats]:
    """(1 + r^p)^(1/p) at equal steps of r from 0 to 1, and its slopes from each."""
    values = (1.0 + np.linspace(0.0, 1.0, _ROUNDING_CELLS + 1) ** sharpness) ** (1.0 / sharpness)
    return values, np.diff(values, append=values[-1])
