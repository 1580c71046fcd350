"""What a plan costs in money and energy: prices and facility power per accelerator over what users receive."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.hardware.spec import Quantity, load_hardware
from deepinfer.layout.plan import Plan
from deepinfer.metrics.summary import Summary
from deepinfer.workload.spec import FixedLength, PoissonArrivals


@dataclass(frozen=True)
class Economics:
    """Figures of a plan with a prediction, prompts included; None where the catalog has no number for its hardware.

    Power is all-in facility power per accelerator, whether it is busy or not: energy per token is an upper bound.
    """

    usd_per_hour: float | None
    usd_per_million_output_tokens: float | None
    watts: float | None
    joules_per_output_token: float | None
    sources: tuple[str, ...]


def economics(plan: Plan) -> Economics:
    """Cost and energy of a plan. Only for plans with a prediction."""
    assert plan.prediction is not None
    output_per_s = _output_per_s(plan, plan.prediction)
    dollars = _total(plan, "price_usd_per_hour")
    watts = _total(plan, "power_w")
    return Economics(
        usd_per_hour=dollars,
        usd_per_million_output_tokens=None if dollars is None else dollars / 3600 / output_per_s * 1e6,
        watts=watts,
        joules_per_output_token=None if watts is None else watts / output_per_s,
        sources=tuple(dict.fromkeys(_sources(plan))),
    )


def _output_per_s(plan: Plan, prediction: Summary) -> float:
    """Output tokens/s of the whole plan: at a rate what it brings, not what a sample of it happened to."""
    arrivals, osl = plan.workload.arrivals, plan.workload.osl
    if isinstance(arrivals, PoissonArrivals) and isinstance(osl, FixedLength):
        return arrivals.rate * osl.tokens
    return prediction.output_tokens_per_s_per_gpu * plan.gpus


def accelerators(plan: Plan) -> list[tuple[str, int]]:
    """(hardware, accelerators paid for) of a plan: its pools' own, the rest of its cluster and what encodes images."""
    own = [(pool.hardware, pool.gpus) for pool in plan.pools if pool.hardware is not None and pool.gpus is not None]
    rest = plan.gpus - sum(gpus for _, gpus in own) + (plan.encode.gpus if plan.encode else 0)
    return [(plan.hardware, rest), *own] if rest else own


def _total(plan: Plan, name: str) -> float | None:
    total = 0.0
    for hardware, gpus in accelerators(plan):
        quantity: Quantity | None = getattr(load_hardware(hardware), name)
        if quantity is None:
            return None
        total += quantity.value * gpus
    return total


def _sources(plan: Plan) -> list[str]:
    found = []
    for hardware, _ in accelerators(plan):
        accelerator = load_hardware(hardware)
        for quantity in (accelerator.price_usd_per_hour, accelerator.power_w):
            if quantity is not None:
                found.append(f"{quantity.value:g} {quantity.unit} for {hardware}: {quantity.source}, {quantity.date}")
    return found


def economics_line(plan: Plan) -> str:
    """Cost and energy in one sentence, or why there is none."""
    found = economics(plan)
    parts = []
    if found.usd_per_million_output_tokens is not None:
        parts.append(f"{found.usd_per_million_output_tokens:.3f} USD per million output tokens")
    if found.joules_per_output_token is not None:
        parts.append(
            f"{found.joules_per_output_token:.2f} J per output token at all-in facility power (an upper bound)"
        )
    if not parts:
        return f"no price or power of {plan.hardware} is in the catalog"
    included = "prompts and images" if plan.encode else "prompts"
    return f"{' and '.join(parts)}, {included} included ({'; '.join(found.sources)})"
