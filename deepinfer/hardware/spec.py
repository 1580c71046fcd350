"""What a cluster is: accelerators with their memories and links, read from a TOML file where every number has a source.

A user's own file is read exactly as the shipped ones are (`deepinfer/hardware/catalog/*.toml`).
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer.errors import NoDataError, UsageError, unknown_name
from deepinfer.files import file_exists, first_fault, read_toml

_CATALOG = Path(__file__).parent / "catalog"

Precision = Literal["fp4", "fp8", "bf16", "tf32"]
Rate = Literal["fp4", "fp8", "int8", "bf16", "tf32"]
# Whose rate serves a precision that a part has no units for: FP4 products run as FP8, 8-bit products as INT8.
_STAND_INS: dict[Precision, tuple[Rate, ...]] = {"fp4": ("fp8", "int8"), "fp8": ("int8",)}
Kind = Literal["datasheet", "measured", "published", "derived", "roadmap"]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class Quantity(BaseModel):
    """A number from outside: value in SI, unit, where it comes from, when, and what kind of number it is."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    value: Positive
    unit: str
    kind: Kind
    source: str = Field(min_length=8)
    date: str = Field(pattern=r"^\d{4}(-\d{2}){0,2}$")


class Link(BaseModel):
    """One kind of link of an accelerator: bytes/s per direction, and what one message waits beyond its start-up."""

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    bytes_per_s: Quantity
    latency_s: Quantity | None = None


class Accelerator(BaseModel):
    """One accelerator of the catalog. `flops_per_s` are dense peaks by precision; `family` picks cost profiles.

    `exp_per_s` are exponentials of the special function units, which softmax waits for; cost profiles of some families
    need it.

    `kv_format` by model family and `weight_format` by checkpoint format name what a model is converted to where its own
    formats have no kernels.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    description: str
    family: str
    flops_per_s: dict[Rate, Quantity]
    num_sms: Quantity
    hbm_bytes: Quantity
    hbm_bytes_per_s: Quantity
    scale_up: Link
    scale_up_domain: Quantity
    scale_out: Link
    gpus_per_host: Quantity
    exp_per_s: Quantity | None = None
    power_w: Quantity | None = None
    price_usd_per_hour: Quantity | None = None
    kv_format: dict[str, str] = Field(default_factory=dict)
    weight_format: dict[str, str] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _whole_counts(self) -> Accelerator:
        for name in ("num_sms", "scale_up_domain", "gpus_per_host"):
            if getattr(self, name).value % 1:
                raise ValueError(f"{name} must be a whole number, got {getattr(self, name).value:g}")
        return self

    def peak_flops_per_s(self, precision: Precision) -> float:
        """Dense peak at a precision, or at the nearest wider one of 8 bits that the part has units for.

        Raises NoDataError when the catalog has no number for it.
        """
        for rate in (precision, *_STAND_INS.get(precision, ())):
            if rate in self.flops_per_s:
                return self.flops_per_s[rate].value
        raise NoDataError(f"hardware {self.name}: flops_per_s.{precision} is not in the catalog; add it with a source")

    def part(self, parts: int) -> Accelerator:
        """One of so many equal parts (dies) with its share of units, memory and links; itself for one."""
        if parts == 1:
            return self

        def share(quantity: Quantity, factor: float = 1.0 / parts) -> Quantity:
            return quantity.model_copy(update={"value": quantity.value * factor})

        def link(whole: Link) -> Link:
            return whole.model_copy(update={"bytes_per_s": share(whole.bytes_per_s)})

        shared: dict[str, Any] = {
            name: share(getattr(self, name))
            for name in ("num_sms", "hbm_bytes", "hbm_bytes_per_s", "exp_per_s", "power_w", "price_usd_per_hour")
            if getattr(self, name) is not None
        }
        shared |= {name: share(getattr(self, name), parts) for name in ("scale_up_domain", "gpus_per_host")}
        shared |= {"scale_up": link(self.scale_up), "scale_out": link(self.scale_out)}
        shared["flops_per_s"] = {rate: share(peak) for rate, peak in self.flops_per_s.items()}
        return self.model_copy(update=shared)


@dataclass(frozen=True)
class ClusterSpec:
    """`num_gpus` accelerators of one kind; ranks are numbered so that a scale-up domain holds neighbours."""

    accelerator: Accelerator
    num_gpus: int

    @property
    def domain(self) -> int:
        """Accelerators that reach each other over the scale-up links."""
        return min(int(self.accelerator.scale_up_domain.value), self.num_gpus)


def hardware_names() -> list[str]:
    """Names of the shipped accelerators."""
    return sorted(path.stem for path in _CATALOG.glob("*.toml"))


def load_hardware(name_or_path: str) -> Accelerator:
    """An accelerator of the catalog, or of a user's TOML file of the same form.

    Raises UsageError for an unknown name or a file that is unreadable or not of the form.
    """
    path = Path(name_or_path)
    if name_or_path.lower() in hardware_names():
        path = _CATALOG / f"{name_or_path.lower()}.toml"
    elif not file_exists(name_or_path):
        raise unknown_name("hardware", name_or_path, hardware_names())
    try:
        return Accelerator.model_validate(read_toml(path, "hardware file"))
    except ValidationError as error:
        raise UsageError(f"hardware file {path}: {first_fault(error)}") from None
