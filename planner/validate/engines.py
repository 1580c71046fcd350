"""What serving engines do around the device's work: one entry of `engines.toml` per engine, each with its source."""

from __future__ import annotations

from functools import lru_cache
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field

from deepinfer.errors import NoDataError
from deepinfer.files import read_toml
from deepinfer.hardware.spec import Accelerator
from deepinfer.model.spec import ModelSpec

_FILE = Path(__file__).parent / "engines.toml"
LARGE_MEMORY_BYTES = 160e9
UNKNOWN_ENGINE = "vllm"
"""Whose behaviour stands in for an engine without an entry."""


class EngineProfile(BaseModel):
    """An engine's host profile (None: no host time) and how an aggregated server of it computes prompts.

    A step takes at most `chunk_tokens` prompt tokens, `large_chunk_tokens` on accelerators from 160 GB on; with
    `chunk_shared` that is for all attention replicas together, else for each; with `stated_chunk_aligned` servers whose
    setting is stated compute the prompts of all replicas in the same steps. `exchange_wait_s` is what a dispatch takes
    longer in a running server than on its own, with experts evenly used. `eager_s_per_layer` is the least that a step
    whose kernels are launched one by one takes, by model family, where it has been measured.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    host: str | None = None
    prefill: Literal["separate", "mixed"] = "separate"
    chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    large_chunk_tokens: Annotated[int, Field(ge=1)] | None = None
    chunk_shared: bool = False
    stated_chunk_aligned: bool = False
    exchange_wait_s: Annotated[float, Field(ge=0)] = 0.0
    eager_s_per_layer: dict[str, Annotated[float, Field(gt=0)]] = Field(default_factory=dict)
    source: Annotated[str, Field(min_length=8)]

    def eager_seconds(self, model: ModelSpec) -> float:
        """The least a step takes whose kernels are launched one by one; 0 where nobody measured it."""
        return self.eager_s_per_layer.get(model.family, 0.0) * len(model.layers)

    def chunk_rows(self, accelerator: Accelerator, replicas: int, stated: int | None) -> float:
        """Most prompt rows of a step of one of so many attention replicas; `stated` is a setting for all of them.

        Raises NoDataError for an engine whose setting is not known.
        """
        if stated is not None:
            return stated / replicas
        if self.chunk_tokens is None:
            raise NoDataError("how many prompt tokens this engine computes in a step is not in the engine file")
        large = accelerator.hbm_bytes.value >= LARGE_MEMORY_BYTES and self.large_chunk_tokens is not None
        rows = self.large_chunk_tokens if large and self.large_chunk_tokens else self.chunk_tokens
        return rows / replicas if self.chunk_shared else float(rows)


@lru_cache
def _profiles() -> dict[str, EngineProfile]:
    return {name: EngineProfile.model_validate(entry) for name, entry in read_toml(_FILE, "engine file").items()}


def load_engine(name: str) -> EngineProfile:
    """The profile of an engine; one that is not known behaves like the stand-in."""
    profiles = _profiles()
    return profiles.get(name.lower(), profiles[UNKNOWN_ENGINE])
