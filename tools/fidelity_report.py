"""Regenerate the pictures and tables of `docs/fidelity.md`.

    python tools/fidelity_report.py [TARGETS.json] [--kernels KERNELS_DIR]

TARGETS.json is `tests/data/published.json` by default. Tables stand between `<!-- name -->` and `<!-- end -->`; the one
that needs measured kernels (`leave_one_out.py`) is left as it is without KERNELS_DIR.
"""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import NormalDist

import leave_one_out
from fit_uncertainty import entries_of, spreads_of, table
from matplotlib.axes import Axes

from deepinfer.cost.uncertainty import SHARE_INSIDE, Z_INSIDE
from planner.plots import new_figure, to_png
from planner.validate.outcome import Outcome, validate
from planner.validate.plot import plot_validation
from planner.validate.statistics import GroupStats, group_stats
from planner.validate.targets import load_targets

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "fidelity.md"
KINDS = {"decode": ("#2f6db3", "o"), "prefill": ("#d9652b", "s"), "step": ("#8a56a5", "^"), "kernel": ("#3f8f5f", "x")}
SHOWN = ("all", "kind", "engine", "hardware", "model")
WORST = 15


def log_error(outcome: Outcome) -> float:
    """log(predicted / measured) of a time: above 0 is too slow, for rates as well."""
    assert outcome.prediction is not None
    is_time = outcome.target.metric.endswith("_s")
    return math.log(outcome.prediction.value / outcome.target.value) * (1.0 if is_time else -1.0)


def normalised(outcome: Outcome) -> float:
    """The error in standard deviations of the entry's own band."""
    assert outcome.band is not None
    return log_error(outcome) / (math.log(outcome.band.high / outcome.band.low) / 2 / Z_INSIDE)


def by_hardware(outcomes: Sequence[Outcome], ax: Axes) -> None:
    """One row per accelerator, one mark per entry."""
    names = [g.name for g in group_stats(outcomes) if g.grouping == "hardware"][::-1]
    for kind, (color, marker) in KINDS.items():
        group = [o for o in outcomes if o.target.kind == kind]
        rows = [names.index(o.target.hardware) + 0.11 * (list(KINDS).index(kind) - 1) for o in group]
        if group:
            _marks(ax, [log_error(o) for o in group], rows, color, marker, kind)
    ax.set_yticks(range(len(names)), names)
    ax.axvline(0.0, color="#9aa3ad", linewidth=1)
    _factors(ax.set_xticks, ax)
    ax.set_xlabel("predicted / measured time")
    ax.legend(fontsize=8, frameon=False, loc="lower right")


def by_batch(outcomes: Sequence[Outcome], ax: Axes) -> None:
    """Decode entries over requests per GPU."""
    engines = sorted({o.target.engine for o in outcomes if o.target.kind == "decode"})
    colors = ("#2f6db3", "#607d8b", "#8a56a5", "#b8860b", "#c2185b", "#3f8f5f")
    for engine, color in zip(engines, colors, strict=False):
        group = [o for o in outcomes if o.target.kind == "decode" and o.target.engine == engine]
        loads = [o.target.requests_per_gpu or 0.0 for o in group]
        _marks(ax, loads, [log_error(o) for o in group], color, "o", engine)
    ax.set_xscale("log")
    ax.axhline(0.0, color="#9aa3ad", linewidth=1)
    _factors(ax.set_yticks, ax)
    ax.set_xlabel("requests per GPU (decode)")
    ax.set_ylabel("predicted / measured time")
    ax.legend(fontsize=8, frameon=False, loc="lower right")


def _marks(ax: Axes, x: list[float], y: list[float], color: str, marker: str, label: str) -> None:
    ax.scatter(x, y, s=22, color=color, marker=marker, alpha=0.75, linewidths=1.0, label=label, zorder=3)


def _factors(set_ticks: Callable[[list[float], list[str]], object], ax: Axes) -> None:
    """Ticks of a logarithm, named as factors."""
    factors = (0.5, 0.6, 0.7, 0.8, 0.9, 1.0, 1.1, 1.25, 1.5, 1.75)
    set_ticks([math.log(f) for f in factors], [f"{f:g}" for f in factors])
    _plain(ax)


def _plain(ax: Axes) -> None:
    ax.spines[["top", "right"]].set_visible(False)
    ax.grid(alpha=0.25, linewidth=0.6)
    ax.set_axisbelow(True)


def calibration(outcomes: Sequence[Outcome], ax: Axes) -> None:
    """Share of entries inside bands of every width against the share that a normal error has."""
    shares = [i / 100 for i in range(2, 100, 2)]
    for name, color, belongs in (
        ("all", "black", lambda _: True),
        *((kind, color, lambda o, kind=kind: o.target.kind == kind) for kind, (color, _) in KINDS.items()),
    ):
        sizes = [abs(normalised(o)) for o in outcomes if belongs(o)]
        if len(sizes) >= 5:
            limits = [NormalDist().inv_cdf(0.5 + share / 2) for share in shares]
            found = [sum(size <= limit for size in sizes) / len(sizes) for limit in limits]
            ax.plot(shares, found, color=color, linewidth=1.6, label=f"{name} ({len(sizes)})")
    ax.plot([0, 1], [0, 1], ":", color="#9aa3ad")
    ax.axvline(SHARE_INSIDE, color="#9aa3ad", linewidth=0.8)
    ax.set_xlabel("share that a band is meant to hold")
    ax.set_ylabel("share that it holds")
    ax.legend(fontsize=8, frameon=False, loc="upper left")
    _plain(ax)


def coverage(groups: Sequence[GroupStats], ax: Axes) -> None:
    """Share of entries inside their bands, by engine and by hardware."""
    shown = [g for g in groups if g.grouping in ("engine", "hardware") and g.inside is not None][::-1]
    colors = ["#2f6db3" if g.grouping == "engine" else "#d9652b" for g in shown]
    ax.barh(range(len(shown)), [g.inside or 0.0 for g in shown], color=colors, alpha=0.8, height=0.65)
    ax.set_yticks(range(len(shown)), [f"{g.name} ({g.expressible})" for g in shown])
    ax.axvline(SHARE_INSIDE, color="black", linewidth=0.9, linestyle=":")
    ax.set_xlim(0, 1)
    ax.set_xlabel("share of entries in their 80% band, by engine (blue) and hardware")
    _plain(ax)


def picture(draw: Iterable[Callable[[Axes], None]]) -> bytes:
    """Two panels side by side."""
    figure, first = new_figure(13.0, 5.4)
    first.remove()
    for ax, one in zip(figure.subplots(1, 2), draw, strict=True):
        one(ax)
    return to_png(figure)


def groups_markdown(groups: Sequence[GroupStats]) -> list[str]:
    """Errors by kind, engine, hardware and model."""
    header = ("", "", "entries", "median error", "median abs.", "p90 abs.", "in 80% band", "Kendall tau (pairs)")
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    for g in groups:
        if g.grouping in SHOWN and g.median is not None:
            tau = "" if g.kendall is None else f"{g.kendall:.2f} ({g.pairs})"
            numbers = f"{g.median:+.0%} | {g.median_absolute:.0%} | {g.p90_absolute:.0%} | {g.inside:.0%} | {tau}"
            lines.append(f"| {g.grouping} | {g.name} | {g.expressible} | {numbers} |")
    return lines


def worst_markdown(outcomes: Sequence[Outcome]) -> list[str]:
    """The entries that are furthest off, with their bands."""
    header = ("entry", "predicted / measured time", "80% band", "source")
    lines = ["| " + " | ".join(header) + " |", "| --- " * len(header) + "|"]
    for o in sorted(outcomes, key=lambda o: -abs(log_error(o)))[:WORST]:
        ratio = math.exp(log_error(o))
        lines.append(f"| {o.target.id} | {ratio:.2f} | {o.band} | {o.target.source} |")
    return lines


def replaced(page: str, name: str, lines: Sequence[str]) -> str:
    """The page with the table of that name renewed."""
    found, count = re.subn(
        rf"(<!-- {name} -->\n).*?(<!-- end -->)", lambda m: m[1] + "\n".join(lines) + "\n" + m[2], page, flags=re.S
    )
    if count != 1:
        raise SystemExit(f"{PAGE} has no place for the table {name}")
    return found


def main() -> None:
    """Write the pictures and renew the tables."""
    parser = argparse.ArgumentParser(description="Regenerate the pictures and tables of docs/fidelity.md.")
    parser.add_argument("targets", nargs="?", default=str(ROOT / "tests" / "data" / "published.json"))
    parser.add_argument("--kernels", type=Path, help="folder of measured kernels, one folder per accelerator")
    arguments = parser.parse_args()
    targets = load_targets(arguments.targets)
    everything = validate(targets)
    outcomes, groups = [o for o in everything if o.prediction is not None], group_stats(everything)
    pictures = {
        "fidelity.png": plot_validation(everything),
        "fidelity-errors.png": picture((lambda ax: by_hardware(outcomes, ax), lambda ax: by_batch(outcomes, ax))),
        "fidelity-coverage.png": picture((lambda ax: calibration(outcomes, ax), lambda ax: coverage(groups, ax))),
    }
    for name, content in pictures.items():
        (PAGE.parent / name).write_bytes(content)
    tables = {
        "groups": groups_markdown(groups),
        "worst": worst_markdown(outcomes),
        "spreads": table(spreads_of(entries_of(everything))),
    }
    if arguments.kernels is not None:
        tables["accelerators"] = list(leave_one_out.table(arguments.kernels, targets))
    page = PAGE.read_text(encoding="utf-8")
    for name, lines in tables.items():
        page = replaced(page, name, lines)
    PAGE.write_text(page, encoding="utf-8")


if __name__ == "__main__":
    main()
