"""Host time around a step: what the engine's CPU side costs, as numbers with sources."""

from __future__ import annotations

from pathlib import Path

from pydantic import BaseModel, ConfigDict

from deepinfer.errors import unknown_name
from deepinfer.files import read_toml
from deepinfer.hardware.spec import Quantity

_PROFILES = Path(__file__).parent / "hosts"


class HostProfile(BaseModel):
    """Seconds of one engine process: deciding and launching a step before it, taking its tokens in after it.

    Steps that only decode replay a captured graph; others launch every kernel. `step_gap_s` is what the device idles
    between two steps even when the next one is ready.
    """

    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)

    name: str
    schedule_s: Quantity
    schedule_s_per_request: Quantity
    deliver_s_per_request: Quantity
    launch_s_per_kernel: Quantity
    step_gap_s: Quantity

    def submit_seconds(self, num_requests: int, num_kernels: int, captured: bool) -> float:
        """Deciding and launching one step with so many requests on the busiest replica."""
        decide = self.schedule_s.value + num_requests * self.schedule_s_per_request.value
        return decide + (0 if captured else num_kernels) * self.launch_s_per_kernel.value

    def deliver_seconds(self, num_requests: int) -> float:
        """Taking in the tokens of one step."""
        return num_requests * self.deliver_s_per_request.value


def load_host(name: str = "deepinfer") -> HostProfile:
    """A shipped host profile. Raises UsageError for an unknown name."""
    names = sorted(path.stem for path in _PROFILES.glob("*.toml"))
    if name not in names:
        raise unknown_name("host profile", name, names)
    return HostProfile.model_validate(read_toml(_PROFILES / f"{name}.toml", "host profile"))
