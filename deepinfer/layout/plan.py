"""The plan: the file between planner and engine. Versioned and strict; a backend runs it, a report explains it."""

from __future__ import annotations

import json
import math
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from deepinfer.errors import UsageError
from deepinfer.files import first_fault, read_json
from deepinfer.hardware.cluster import Network
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import Summary
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.spec import Workload

PLAN_VERSION = 1

Objective = Literal["throughput", "goodput", "cost", "energy", "gpus"]
PoolRole = Literal["mixed", "prefill", "decode"]
RouterName = Literal["round_robin", "least_loaded", "cache_aware"]
Seconds = Annotated[float, Field(gt=0, allow_inf_nan=False)]

_STRICT = ConfigDict(extra="forbid", frozen=True, strict=True)


class LayoutSpec(BaseModel):
    """Degrees of a `ParallelLayout` in a plan file."""

    model_config = _STRICT

    dp: int = 1
    cp: int = 1
    tp: int = 1
    ep: int = 1
    etp: int = 1
    redundant_experts: int = 0
    dcp: int = 1

    @classmethod
    def of(cls, layout: ParallelLayout) -> LayoutSpec:
        """The degrees of a layout."""
        return cls(**asdict(layout))

    def resolve(self) -> ParallelLayout:
        """The layout itself. Raises UsageError when the degrees do not fit together."""
        return ParallelLayout(**self.model_dump())


class Pool(BaseModel):
    """`replicas` engines of one role, alike in layout and settings.

    Its accelerators are `gpus` of kind `hardware`; without these, its ranks of the plan's kind.
    """

    model_config = _STRICT

    role: PoolRole = "mixed"
    hardware: str | None = None
    gpus: Annotated[int, Field(ge=1)] | None = None
    replicas: Annotated[int, Field(ge=1)]
    layout: LayoutSpec
    settings: EngineSettings


class EncodePool(BaseModel):
    """Accelerators of the plan's kind that encode images, beside those of its pools: a cost, which no backend runs.

    A request brings `images_per_request` on average, of `image_tokens` tokens of its prompt each; one accelerator
    encodes `images_per_batch` at once, in `seconds_per_image` times as many.
    """

    model_config = _STRICT

    gpus: Annotated[int, Field(ge=1)]
    images_per_request: Annotated[float, Field(gt=0, allow_inf_nan=False)]
    image_tokens: Annotated[int, Field(ge=1)]
    images_per_batch: Annotated[int, Field(ge=1)]
    seconds_per_image: Seconds

    @property
    def seconds_per_request(self) -> float:
        """What a request waits for its images on one idle accelerator: as many whole batches as they fill."""
        batches = math.ceil(self.images_per_request / self.images_per_batch)
        return batches * self.images_per_batch * self.seconds_per_image


class Slo(BaseModel):
    """Limits on time to first token and time per output token, both at one percentile of the requests."""

    model_config = _STRICT

    ttft_s: Seconds = 2.0
    tpot_s: Seconds = 0.030
    percentile: Literal[50, 90, 95, 99] = 90

    def met_by(self, summary: Summary) -> bool:
        """Whether a run kept both limits."""
        return summary.ttft_s.at(self.percentile) <= self.ttft_s and summary.tpot_s.at(self.percentile) <= self.tpot_s


class Plan(BaseModel):
    """What to run, on what, for which workload and goal, and what the planner expects of it.

    `gpus` counts every accelerator paid for, of whatever kind and whether a pool uses it or not, but for those of
    `encode`.
    """

    model_config = _STRICT

    version: Literal[1] = 1
    model: str
    hardware: str
    gpus: Annotated[int, Field(ge=1)]
    pools: Annotated[tuple[Pool, ...], Field(min_length=1)]
    workload: Workload
    acceptance: Acceptance
    objective: Objective = "throughput"
    slo: Slo = Slo()
    host: str = "deepinfer"
    router: RouterName = "least_loaded"
    expert_load: ExpertLoad = TYPICAL_LOAD
    network: Network | None = None
    encode: EncodePool | None = None
    prediction: Summary | None = None

    @model_validator(mode="after")
    def _pools_that_serve(self) -> Plan:
        roles = sorted(pool.role for pool in self.pools)
        if roles not in (["mixed"], ["decode", "prefill"]):
            raise ValueError(f"pools must be one mixed, or one prefill and one decode, got {', '.join(roles)}")
        return self

    @property
    def serving(self) -> Pool:
        """The pool that decodes."""
        return next(pool for pool in self.pools if pool.role != "prefill")

    @property
    def prefill(self) -> Pool | None:
        """The pool that only prefills, if there is one."""
        return next((pool for pool in self.pools if pool.role == "prefill"), None)

    def to_json(self) -> str:
        """The plan as the text of its file."""
        return json.dumps(self.model_dump(mode="json"), indent=2) + "\n"


def load_plan(path: str) -> Plan:
    """Read a plan file. Raises UsageError when it cannot be read, is of another version, or not a plan."""
    raw = read_json(Path(path), "plan")
    if raw.get("version") != PLAN_VERSION:
        raise UsageError(f"plan {path} has version {raw.get('version')!r}; this deepinfer reads version {PLAN_VERSION}")
    try:
        return Plan.model_validate_json(json.dumps(raw))
    except ValidationError as error:
        raise UsageError(f"plan {path}: {first_fault(error)}") from None
