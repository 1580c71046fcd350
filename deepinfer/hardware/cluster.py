"""A cluster of its own: which accelerators, how many, for what, on which network; read from a TOML file."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer.errors import UsageError
from deepinfer.files import file_exists, first_fault, read_toml
from deepinfer.hardware.spec import Accelerator, Quantity

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class Network(BaseModel):
    """The scale-out network of a cluster where it differs from what the catalog says of its accelerators.

    Bytes/s are of one accelerator and direction; an `oversubscription` of 2 leaves half of them when all send at once.
    """

    model_config = _STRICT

    bytes_per_s: Quantity | None = None
    latency_s: Quantity | None = None
    oversubscription: Quantity | None = None

    @model_validator(mode="after")
    def _at_least_one(self) -> Network:
        if self.oversubscription is not None and self.oversubscription.value < 1.0:
            raise ValueError(f"oversubscription must be at least 1, got {self.oversubscription.value:g}")
        return self

    def under(self, accelerator: Accelerator) -> Accelerator:
        """The accelerator with this network as its scale-out link."""
        link = accelerator.scale_out
        rate = self.bytes_per_s or link.bytes_per_s
        if self.oversubscription is not None:
            rate = rate.model_copy(update={"value": rate.value / self.oversubscription.value})
        changed = link.model_copy(update={"bytes_per_s": rate, "latency_s": self.latency_s or link.latency_s})
        return accelerator.model_copy(update={"scale_out": changed})


class Part(BaseModel):
    """Accelerators of one kind in a cluster, and which pools may use them."""

    model_config = _STRICT

    hardware: str
    gpus: Annotated[int, Field(ge=1)]
    role: Literal["any", "prefill", "decode"] = "any"


class ClusterFile(BaseModel):
    """A cluster: one part, or one that prefills and one that decodes."""

    model_config = _STRICT

    name: str
    description: str
    part: Annotated[list[Part], Field(min_length=1, max_length=2)]
    network: Network | None = None

    @model_validator(mode="after")
    def _roles(self) -> ClusterFile:
        roles = sorted(part.role for part in self.part)
        if roles not in (["any"], ["decode", "prefill"]):
            raise ValueError(f"parts must be one for any role, or one prefill and one decode, got {', '.join(roles)}")
        return self

    @property
    def serving(self) -> Part:
        """The part that decodes."""
        return next(part for part in self.part if part.role != "prefill")

    @property
    def prefill(self) -> Part | None:
        """The part that only prefills, if there is one."""
        return next((part for part in self.part if part.role == "prefill"), None)


def load_cluster(path: str) -> ClusterFile:
    """Read a cluster file. Raises UsageError for one that is unreadable or not of the form."""
    if not file_exists(path):
        raise UsageError(f"cluster file {path} does not exist")
    try:
        return ClusterFile.model_validate(read_toml(Path(path), "cluster file"))
    except ValidationError as error:
        raise UsageError(f"cluster file {path}: {first_fault(error)}") from None
