"""Accelerators, hosts and cost profiles with one resource better or worse: what explanations and curves ask about."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.cost.model import CostProfile
from deepinfer.hardware.host import HostProfile
from deepinfer.hardware.spec import Accelerator, Quantity

Change = Callable[[Accelerator, float], Accelerator]

_START_UPS = ("startup_s", "bulk_startup_s", "per_peer_s", "depth_s")


def compute_faster(accelerator: Accelerator, factor: float) -> Accelerator:
    """Products and exponentials so many times as fast."""
    rates = {name: _times(rate, factor) for name, rate in accelerator.flops_per_s.items()}
    exp = _times(accelerator.exp_per_s, factor) if accelerator.exp_per_s else None
    return accelerator.model_copy(update={"flops_per_s": rates, "exp_per_s": exp})


def hbm_faster(accelerator: Accelerator, factor: float) -> Accelerator:
    """HBM bandwidth so many times as high."""
    return accelerator.model_copy(update={"hbm_bytes_per_s": _times(accelerator.hbm_bytes_per_s, factor)})


def hbm_larger(accelerator: Accelerator, factor: float) -> Accelerator:
    """So many times as much HBM."""
    return accelerator.model_copy(update={"hbm_bytes": _times(accelerator.hbm_bytes, factor)})


def scale_up_faster(accelerator: Accelerator, factor: float) -> Accelerator:
    """Scale-up bandwidth so many times as high; latencies stay."""
    return _link_faster(accelerator, "scale_up", factor)


def scale_out_faster(accelerator: Accelerator, factor: float) -> Accelerator:
    """Scale-out bandwidth so many times as high; latencies stay."""
    return _link_faster(accelerator, "scale_out", factor)


def latencies_longer(accelerator: Accelerator, factor: float) -> Accelerator:
    """Latencies of both links so many times as long."""
    links = {name: getattr(accelerator, name) for name in ("scale_up", "scale_out")}
    longer = {
        name: link.model_copy(update={"latency_s": _times(link.latency_s, factor)}) if link.latency_s else link
        for name, link in links.items()
    }
    return accelerator.model_copy(update=longer)


def start_ups_longer(profile: CostProfile, factor: float) -> CostProfile:
    """Start-ups of operators and messages, and what one tile waits for however small, so many times as long."""
    operators = {
        name: p.model_copy(update={time: getattr(p, time) * factor for time in _START_UPS})
        for name, p in profile.operators.items()
    }
    return profile.model_copy(update={"operators": operators})


def host_slower(host: HostProfile, factor: float) -> HostProfile:
    """Every host time so many times as long."""
    longer = {
        name: _times(value, factor)
        for name in type(host).model_fields
        if isinstance(value := getattr(host, name), Quantity)
    }
    return host.model_copy(update=longer)


def _link_faster(accelerator: Accelerator, name: str, factor: float) -> Accelerator:
    link = getattr(accelerator, name)
    faster = link.model_copy(update={"bytes_per_s": _times(link.bytes_per_s, factor)})
    return accelerator.model_copy(update={name: faster})


def _times(quantity: Quantity, factor: float) -> Quantity:
    return quantity.model_copy(update={"value": quantity.value * factor})
