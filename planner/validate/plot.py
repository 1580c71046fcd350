"""Predicted against measured, one point per entry."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from matplotlib.axes import Axes

from planner.plots import new_figure, to_png
from planner.validate.outcome import Outcome
from planner.validate.statistics import group_stats

_COLORS = ("#2f6db3", "#d9652b", "#3f8f5f", "#8a56a5", "#b8860b", "#c2185b", "#607d8b", "#9aa3ad")
_MARKERS = {"decode": "o", "prefill": "s", "step": "^", "kernel": "x"}


def plot_validation(outcomes: list[Outcome]) -> bytes:
    """A PNG of three log-log panels, by metric: bands as bars, coloured by engine and marked by kind."""
    figure, first = new_figure(15.0, 5.6)
    first.remove()
    predicted = [o for o in outcomes if o.prediction is not None]
    engines = sorted({o.target.engine for o in predicted})
    for ax, (title, belongs) in zip(figure.subplots(1, len(_PANELS)), _PANELS.items(), strict=True):
        _draw(ax, [o for o in predicted if belongs(o.target.metric)], engines)
        ax.set_title(title, fontsize=10)
    overall = group_stats(outcomes)[0]
    if overall.median_absolute is not None:
        figure.suptitle(
            f"{overall.expressible} of {overall.num} published measurements predicted, median |error| "
            f"{overall.median_absolute:.0%}, {overall.inside or 0.0:.0%} in their 80% bands (bars; lines: exact, 30%)",
            fontsize=11,
        )
    return to_png(figure)


def _is_rate(metric: str) -> bool:
    return not metric.endswith("_s") or metric.endswith("per_s")


_PANELS: dict[str, Callable[[str], bool]] = {
    "kernels and forwards, seconds": lambda metric: not _is_rate(metric) and metric != "tpot_s",
    "time per output token, seconds": lambda metric: metric == "tpot_s",
    "tokens/s per GPU, or ratios": _is_rate,
}


def _draw(ax: Axes, outcomes: list[Outcome], engines: list[str]) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    ax.set_xlabel("measured")
    ax.set_ylabel("predicted")
    if not outcomes:
        ax.text(0.5, 0.5, "no entries", ha="center", transform=ax.transAxes)
        return
    ax.set_xscale("log")
    ax.set_yscale("log")
    values = [v for o in outcomes if o.prediction for v in (o.target.value, o.prediction.value)]
    ends = np.asarray([min(values) / 1.5, max(values) * 1.5])
    for factor, style in ((1.0, "-"), (1.3, ":"), (1 / 1.3, ":")):
        ax.plot(ends, ends * factor, style, color="#9aa3ad", linewidth=0.9, zorder=1)
    for (engine, kind), group in _grouped(outcomes).items():
        color = _COLORS[engines.index(engine) % len(_COLORS)]
        for o in group:
            ax.plot([o.target.value] * 2, o.ends or [np.nan] * 2, color=color, linewidth=0.7, alpha=0.45, zorder=2)
        ax.scatter(
            [o.target.value for o in group],
            [o.prediction.value for o in group if o.prediction],
            s=20,
            linewidths=1.0,
            color=color,
            marker=_MARKERS[kind],
            alpha=0.8,
            label=engine if engine == kind else f"{engine}, {kind}",
            zorder=3,
        )
    ax.legend(fontsize=8, frameon=False, loc="upper left")


def _grouped(outcomes: list[Outcome]) -> dict[tuple[str, str], list[Outcome]]:
    groups: dict[tuple[str, str], list[Outcome]] = {}
    for outcome in outcomes:
        groups.setdefault((outcome.target.engine, outcome.target.kind), []).append(outcome)
    return dict(sorted(groups.items()))
