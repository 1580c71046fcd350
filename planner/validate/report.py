"""What `planner validate` tells: a table by group, the worst entries, reasons, one entry explained, and JSON."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import asdict
from typing import Any

from rich.table import Table

from planner.validate.explain import Explanation
from planner.validate.outcome import Outcome
from planner.validate.statistics import GroupStats, group_stats

WORST = 12
_SHORT = {"tokens_per_s_per_gpu": "tok/s/GPU"}


def to_json(outcomes: list[Outcome]) -> str:
    """Every entry and every group; `error` is predicted / measured - 1, `low` and `high` end the 80% band."""
    entries = [_entry(o) for o in outcomes]
    groups = [asdict(g) for g in group_stats(outcomes)]
    return json.dumps({"entries": entries, "groups": groups}, indent=2)


def _entry(outcome: Outcome) -> dict[str, Any]:
    found = outcome.prediction
    return {
        "id": outcome.target.id,
        "kind": outcome.target.kind,
        "metric": outcome.target.metric,
        "predicted": None if found is None else found.value,
        "low": None if outcome.ends is None else outcome.ends[0],
        "high": None if outcome.ends is None else outcome.ends[1],
        "range": None if found is None or found.low == found.high else [found.low, found.high],
        "measured": outcome.target.value,
        "error": outcome.error,
        "reason": outcome.reason,
    }


def groups_table(outcomes: list[Outcome]) -> Table:
    """Errors by group, one line each."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    for name in ("group", ""):
        table.add_column(name, no_wrap=True)
    for name in (
        "",
        "pre-\ndicted",
        "median\nerror",
        "median\n|error|",
        "p90\n|error|",
        "in\nband",
        "Kendall\ntau",
        "pairs",
    ):
        table.add_column(name, justify="right", no_wrap=True)
    last = ""
    for group in group_stats(outcomes):
        table.add_row(group.grouping if group.grouping != last else "", *_group_row(group))
        last = group.grouping
    return table


def _group_row(group: GroupStats) -> tuple[str, ...]:
    kendall = "" if group.kendall is None else f"{group.kendall:.2f}"
    pairs = str(group.pairs) if group.pairs else ""
    return (
        group.name,
        str(group.num),
        str(group.expressible),
        _percent(group.median, signed=True),
        _percent(group.median_absolute),
        _percent(group.p90_absolute),
        _percent(group.inside),
        kendall,
        pairs,
    )


def _percent(value: float | None, signed: bool = False) -> str:
    if value is None:
        return ""
    return f"{value:+.0%}" if signed else f"{value:.0%}"


def worst_table(outcomes: list[Outcome], most: int = WORST) -> Table:
    """The entries whose predictions are off by the largest factor."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("worst entries", no_wrap=True)
    for name in ("predicted", "measured", "error", "metric"):
        table.add_column(name, justify="right", no_wrap=True)
    for outcome in sorted((o for o in outcomes if o.prediction), key=_factor, reverse=True)[:most]:
        assert outcome.prediction is not None
        target = outcome.target
        value, measured = f"{outcome.prediction.value:.4g}", f"{target.value:.4g}"
        table.add_row(
            target.id, value, measured, _percent(outcome.error, signed=True), _SHORT.get(target.metric, target.metric)
        )
    return table


def _factor(outcome: Outcome) -> float:
    """How many times too large or too small a prediction is."""
    ratio = 1.0 + (outcome.error or 0.0)
    return max(ratio, 1.0 / ratio)


def reason_lines(outcomes: list[Outcome]) -> list[str]:
    """Why entries have no prediction, most frequent reason first."""
    counts = Counter(o.reason for o in outcomes if o.reason)
    return [f"{count:4d}  {reason}" for reason, count in counts.most_common()]


def explanation_table(found: Explanation) -> Table:
    """The operators of one step, longest first."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("operator", no_wrap=True)
    for name in ("times", "us each", "ms", "share"):
        table.add_column(name, justify="right", no_wrap=True)
    for name in ("bound by", "stream", "source"):
        table.add_column(name, no_wrap=True)
    for item in found.items:
        table.add_row(
            item.operator,
            str(item.times),
            f"{item.seconds / item.times * 1e6:,.1f}",
            f"{item.seconds * 1e3:.3f}",
            f"{item.seconds / found.step.seconds:.1%}",
            item.bound,
            item.stream,
            item.source,
        )
    return table


def explanation_lines(outcome: Outcome, explanations: list[Explanation]) -> list[str]:
    """One line on the entry and one on each kind of step behind its prediction."""
    target, found = outcome.target, outcome.prediction
    assert found is not None
    lines = [
        f"{target.id}: predicted {found.value:.4g}, measured {target.value:.4g} {target.metric} "
        f"({_percent(outcome.error, signed=True)}; 80% band {outcome.band})"
    ]
    for e in explanations:
        lines.append(
            f"{e.step.title}: {e.step.seconds * 1e3:.3f} ms, {e.step.device_s * 1e3:.3f} on the device and "
            f"{e.step.host_s * 1e3:.3f} of host and idling; {e.weight:.3g} of them per step of the entry"
        )
    return lines
