"""A measured run beside what a plan predicts of it, figure by figure."""

from __future__ import annotations

from typing import NamedTuple

from deepinfer.metrics.summary import Summary
from deepinfer.units import format_seconds

_RATES = (
    "output_tokens_per_s_per_gpu",
    "full_acceptance_tokens_per_s_per_gpu",
    "steps_per_s",
    "tau",
    "input_tokens_per_s_per_gpu",
    "tokens_per_s_per_user",
)
_LATENCIES = ("ttft_s", "tpot_s", "itl_s", "e2e_s")
_PERCENTILES = ("p50", "p90", "p99")
_SHARES = ("goodput", "running_per_gpu", "mean_context", "prompt_rows", "device_busy")


class Comparison(NamedTuple):
    """One figure of a `Summary`, by its path there: what was measured and what was predicted."""

    name: str
    measured: float
    predicted: float

    @property
    def error(self) -> float | None:
        """predicted / measured - 1, as `planner validate` has it; None where nothing was measured."""
        return self.predicted / self.measured - 1.0 if self.measured else None

    def as_row(self) -> tuple[str, str, str, str]:
        """Name, measured, predicted and signed error for a terminal."""
        error = "-" if self.error is None else f"{self.error:+.1%}"
        return self.name, self._text(self.measured), self._text(self.predicted), error

    def as_json(self) -> dict[str, str | float | None]:
        """The same as numbers."""
        return {**self._asdict(), "error": self.error}

    def _text(self, value: float) -> str:
        if self.name.partition(".")[0] in _LATENCIES:
            return format_seconds(value)
        return f"{value:,.1f}" if abs(value) >= 100 else f"{value:.3f}"


def compare(measured: Summary, predicted: Summary) -> list[Comparison]:
    """The figures that both have: throughputs with the accepted length, latencies, and the load they were taken at."""

    def figure(name: str) -> Comparison:
        return Comparison(name, float(getattr(measured, name)), float(getattr(predicted, name)))

    def latency(name: str, at: str) -> Comparison:
        return Comparison(f"{name}.{at}", getattr(getattr(measured, name), at), getattr(getattr(predicted, name), at))

    latencies = [latency(name, at) for name in _LATENCIES for at in _PERCENTILES]
    return [*map(figure, _RATES), *latencies, *map(figure, _SHARES)]
