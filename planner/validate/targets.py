"""Published measurements as a file gives them: a JSON list of entries in SI units, null where a source says nothing."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer.errors import UsageError
from deepinfer.files import first_fault, read_text

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)
AGGREGATED = "aggregated server"
"""Notes that begin so state a condition: prompts are computed on the GPUs that decode."""
FUSED_EXPERTS = "a2a megamoe"
"""Notes that name this exchange state a condition: expert layers ran as one fused kernel."""

Degree = Annotated[int, Field(ge=1)]
Positive = Annotated[float, Field(gt=0, allow_inf_nan=False)]


class TargetLayout(BaseModel):
    """Degrees of the one engine measured: tp x dp x cp x pp ranks, expert groups of `ep` ranks, slices over the rest.

    A part of two dies has `ranks_per_gpu` 2 where its ranks are dies.
    """

    model_config = _STRICT

    tp: Degree
    dp: Degree
    cp: Degree
    pp: Degree
    ep: Degree
    redundant_experts: Annotated[int, Field(ge=0)]
    overlap: str
    ranks_per_gpu: Degree


class Speculation(BaseModel):
    """Drafts verified per step and request, and tokens kept of them, the bonus token included."""

    model_config = _STRICT

    nextn: Annotated[int, Field(ge=0)]
    accepted_len: Annotated[float, Field(ge=1, allow_inf_nan=False)]


class KernelOp(BaseModel):
    """An operator timed on its own: its name and shape."""

    model_config = _STRICT

    name: str
    params: dict[str, float | int | str]


class Target(BaseModel):
    """One published measurement with its conditions; its `value` is no part of a prediction."""

    model_config = _STRICT

    id: Annotated[str, Field(min_length=1)]
    source: str
    tier: str
    engine: str
    kind: Literal["kernel", "step", "prefill", "decode"]
    model: str
    hardware: str
    gpus: Degree
    layout: TargetLayout
    weights: str | None
    kv: str | None
    requests_per_gpu: Positive | None
    context_tokens: Annotated[float, Field(ge=0, allow_inf_nan=False)] | None
    prefill_tokens_per_gpu: Positive | None
    isl: Positive | None
    osl: Positive | None
    spec: Speculation | None
    verify_tokens: Positive | None
    expert_load: Literal["balanced", "real", "unknown"] | None
    op: KernelOp | None
    metric: Annotated[str, Field(min_length=1)]
    value: Positive
    notes: str | None

    @model_validator(mode="after")
    def _consistent(self) -> Target:
        if (self.kind == "kernel") != (self.op is not None):
            raise ValueError("op belongs to entries of kind kernel, and only to them")
        return self

    @property
    def aggregated(self) -> bool:
        """Whether the GPUs that decoded also computed prompts."""
        return (self.notes or "").lower().startswith(AGGREGATED)

    @property
    def random_tokens(self) -> bool:
        """Whether prompts were random token ids: a benchmark's notes say so."""
        return re.search(r"\brandom\b", (self.notes or "").lower()) is not None

    @property
    def fused_experts(self) -> bool:
        """Whether one kernel exchanged rows and multiplied them: a server's notes say so."""
        return FUSED_EXPERTS in (self.notes or "").lower()

    @property
    def stated_chunk(self) -> int | None:
        """Prompt tokens of a step, over all replicas, where a server's notes state its setting."""
        found = re.search(r"chunked_prefill (\d+)", self.notes or "")
        return int(found.group(1)) if found else None


def load_targets(path: str) -> list[Target]:
    """The entries of a file. Raises UsageError, naming the entry, for a fault of the schema or a repeated id."""
    try:
        raw = json.loads(read_text(Path(path), "targets file"))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"targets file {path} is not valid JSON: {error}") from None
    if not isinstance(raw, list):
        raise UsageError(f"targets file {path} holds no JSON list of entries")
    targets = [_parse(entry, position, path) for position, entry in enumerate(raw)]
    seen: set[str] = set()
    for target in targets:
        if target.id in seen:
            raise UsageError(f"targets file {path}: id {target.id!r} appears twice")
        seen.add(target.id)
    return targets


def _parse(entry: Any, position: int, path: str) -> Target:
    name = entry.get("id") if isinstance(entry, dict) else None
    which = f"entry {name!r}" if isinstance(name, str) and name else f"entry {position + 1}"
    try:
        return Target.model_validate(entry)
    except ValidationError as error:
        raise UsageError(f"targets file {path}: {which}: {first_fault(error)}") from None
