"""The pictures of a report. Each function draws into an `ax` it is given and returns it."""

from __future__ import annotations

import textwrap
from io import BytesIO
from typing import TYPE_CHECKING

import numpy as np

from deepinfer.cost.compose import PathItem
from planner.columns import pareto
from planner.pipeline import SearchResult
from planner.refine import Finalist

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

BLUE, ORANGE, GREY, GREEN = "#2f6db3", "#d9652b", "#9aa3ad", "#3f8f5f"
STREAM_COLORS = {"compute": BLUE, "comm": ORANGE}


def plot_pareto(result: SearchResult, ax: Axes) -> Axes:
    """Output tokens/s per GPU against tokens/s per user: screened points, their front, finalists, the winner.

    Under a given rate the output is what a plan could serve within the limits, and the user's speed is at the rate.
    """
    from matplotlib.ticker import LogLocator, NullFormatter, StrMethodFormatter

    points, slo, rated = result.screening.points, result.problem.slo, result.problem.load.rate is not None
    user = 1.0 / points.tpot_s
    ax.scatter(user, points.output_per_gpu, s=3, color=GREY, alpha=0.25, linewidths=0, rasterized=True,
               label=f"{len(points):,} screened plans (closed form, means)")  # fmt: skip
    front = pareto(user, points.output_per_gpu)
    ax.step(
        user[front], points.output_per_gpu[front], where="pre", color=GREY, linewidth=1.2, label="their Pareto front"
    )

    def place(finalist: Finalist) -> tuple[float, float]:
        summary = finalist.summary
        output = points.output_per_gpu[finalist.point] if rated else summary.output_tokens_per_s_per_gpu
        return summary.tokens_per_s_per_user, float(output)

    for feasible, color in ((True, BLUE), (False, ORANGE)):
        group = [place(f) for f in result.finalists if not f.failure and result.feasible(f) is feasible]
        label = "simulated, within the limits" if feasible else "simulated, breaks a limit"
        if group:
            ax.scatter([x for x, _ in group], [y for _, y in group], s=34, color=color, zorder=3, label=label)
    best = place(result.winner)
    ax.scatter(best[0], best[1], s=190, marker="*", color=GREEN, edgecolor="white", zorder=4, label="chosen plan")
    ax.axvline(1.0 / slo.tpot_s, color=ORANGE, linewidth=1, linestyle="--", label=f"TPOT limit {slo.tpot_s * 1e3:g} ms")
    ax.set_xscale("log")
    ax.xaxis.set_major_locator(LogLocator(10, subs=(1.0, 2.0, 5.0)))
    ax.xaxis.set_major_formatter(StrMethodFormatter("{x:g}"))
    ax.xaxis.set_minor_formatter(NullFormatter())
    ax.yaxis.set_major_formatter(StrMethodFormatter("{x:,.0f}"))
    ax.set_xlabel("tokens/s per user (1 / TPOT)" + (f" at {result.problem.load.rate:g} requests/s" if rated else ""))
    ax.set_ylabel("output tokens/s per GPU" + (" it could serve within the limits" if rated else ""))
    ax.set_ylim(bottom=0)
    legend = ax.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(0.0, -0.13), ncols=3)
    legend.legend_handles[0].set(sizes=[16.0], alpha=1.0)  # type: ignore[union-attr]
    return ax


def plot_breakdown(items: list[PathItem], title: str, ax: Axes, most: int = 14) -> Axes:
    """Where a step's time goes: milliseconds of the critical path by operator, largest on top."""
    shown, rest = items[:most], items[most:]
    names = [i.operator for i in shown]
    seconds = [i.seconds for i in shown]
    colors = [STREAM_COLORS.get(i.stream, GREY) for i in shown]
    if rest:
        names.append(f"{len(rest)} more operators")
        seconds.append(sum(i.seconds for i in rest))
        colors.append(GREY)
    total = sum(i.seconds for i in items)
    positions = np.arange(len(names))
    ax.barh(positions, np.asarray(seconds) * 1e3, color=colors)
    for position, value in zip(positions, seconds, strict=True):
        ax.annotate(f"{value / total:.0%}", (value * 1e3, position), xytext=(4, 0), textcoords="offset points",
                    va="center", fontsize=8)  # fmt: skip
    ax.set_yticks(positions, names, fontsize=8)
    ax.invert_yaxis()
    ax.margins(x=0.1)
    ax.set_xlabel("milliseconds on the critical path (blue: compute, orange: communication not hidden)")
    ax.set_title("\n".join(textwrap.wrap(f"{title}: {total * 1e3:.2f} ms", 90)), fontsize=10)
    return ax


def new_figure(width: float = 8.0, height: float = 5.0) -> tuple[Figure, Axes]:
    """A figure with one plain axes, independent of pyplot and of any display."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    return figure, _plain(figure.add_subplot())


def _plain(ax: Axes) -> Axes:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)
    return ax


def pyplot_axes(width: float, height: float) -> Axes:
    """A new axes of pyplot's, which a notebook shows."""
    import matplotlib.pyplot as plt

    _, ax = plt.subplots(figsize=(width, height), layout="constrained")
    return _plain(ax)


def to_png(figure: Figure) -> bytes:
    """The figure as PNG; without metadata, so that the same figure is the same bytes."""
    buffer = BytesIO()
    figure.savefig(buffer, format="png", dpi=140, metadata={"Software": None})
    return buffer.getvalue()
