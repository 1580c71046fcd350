"""Settings of one engine: what a plan fixes beside the layout, resolved once and never changed."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator


class EngineSettings(BaseModel):
    """Settings of one engine; defaults are DeepInfer 0.1.0's where it has them.

    `max_num_seqs` requests run at once per attention replica; a step computes at most `max_tokens_per_step` rows
    of it. `nextn` drafts are verified per request. With `replay` "compact" only the last `keep_tokens` rows of a prompt
    go through bounded layers; "mask" computes all of them and lets them see as little, to check "compact" against.
    `overlap` "two-batch" runs a step as two halves whose exchanges hide behind each other's compute; `moe` "fused"
    dispatches, computes and combines in one kernel, where the accelerator has one.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    max_num_seqs: Annotated[int, Field(ge=1)] = 256
    max_tokens_per_step: Annotated[int, Field(ge=1)] = 4096
    nextn: Annotated[int, Field(ge=0)] = 0
    replay: Literal["off", "mask", "compact"] = "off"
    keep_tokens: Annotated[int, Field(ge=1)] = 140
    block_tokens: Annotated[int, Field(ge=1)] = 128
    prefix_cache: bool = True
    async_scheduling: bool = True
    graph_rows: Annotated[int, Field(ge=1)] = 8
    memory_utilization: Annotated[float, Field(gt=0, le=1)] = 0.90
    kv_format: str | None = None
    overlap: Literal["none", "two-batch"] = "none"
    moe: Literal["separate", "fused"] = "separate"

    @model_validator(mode="after")
    def _one_way_to_hide_an_exchange(self) -> EngineSettings:
        if self.overlap == "two-batch" and self.moe == "fused":
            raise ValueError(
                "overlap two-batch and moe fused exclude each other: a fused kernel hides its exchange itself"
            )
        return self
