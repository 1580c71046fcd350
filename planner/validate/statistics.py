"""How far predictions are off: medians and quantiles of errors by group, and whether curves are ranked right."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable
from dataclasses import dataclass

import numpy as np

from planner.validate.outcome import Outcome
from planner.validate.targets import Target

GROUPINGS: dict[str, Callable[[Target], str]] = {
    "kind": lambda t: t.kind,
    "tier": lambda t: t.tier,
    "engine": lambda t: t.engine,
    "hardware": lambda t: t.hardware,
    "model": lambda t: t.model,
    "operator": lambda t: t.op.name if t.op else "",
    "server": lambda t: "" if t.kind != "decode" else "aggregated" if t.aggregated else "decode only",
    "layout": lambda t: "" if t.kind == "kernel" else "tp > 1" if t.layout.tp > 1 else "tp 1",
}
"""Ways to group entries; an entry without a name in one is left out of it."""


@dataclass(frozen=True)
class GroupStats:
    """Errors of a group: `num` entries, `expressible` of them predicted; statistics are None where none is.

    `inside` is the share of the entries with a band whose measured value lies in it. `kendall` is Kendall's rank
    correlation over the `pairs` of points that lie on one curve, 1 when all are in order.
    """

    grouping: str
    name: str
    num: int
    expressible: int
    median: float | None
    median_absolute: float | None
    p90_absolute: float | None
    inside: float | None
    kendall: float | None
    pairs: int


def group_stats(outcomes: Iterable[Outcome]) -> list[GroupStats]:
    """Statistics of all entries and of every group, in the order of `GROUPINGS`, largest group first."""
    outcomes = list(outcomes)
    found = [_stats("all", "all", outcomes)]
    for grouping, name_of in GROUPINGS.items():
        groups: dict[str, list[Outcome]] = defaultdict(list)
        for outcome in outcomes:
            groups[name_of(outcome.target)].append(outcome)
        groups.pop("", None)
        ordered = sorted(groups.items(), key=lambda item: (-len(item[1]), item[0]))
        found += [_stats(grouping, name, members) for name, members in ordered]
    return found


def _stats(grouping: str, name: str, outcomes: list[Outcome]) -> GroupStats:
    errors = np.asarray([o.error for o in outcomes if o.error is not None], dtype=np.float64)
    in_order, pairs = _ranked_pairs(outcomes)
    kendall = in_order / pairs if pairs else None
    if not len(errors):
        return GroupStats(grouping, name, len(outcomes), 0, None, None, None, None, kendall, pairs)
    size = np.abs(errors)
    median, median_size, p90 = float(np.median(errors)), float(np.median(size)), float(np.quantile(size, 0.9))
    held = [o.inside for o in outcomes if o.inside is not None]
    inside = float(np.mean(held)) if held else None
    return GroupStats(grouping, name, len(outcomes), len(errors), median, median_size, p90, inside, kendall, pairs)


def _ranked_pairs(outcomes: list[Outcome]) -> tuple[int, int]:
    """(pairs in order less pairs out of order, pairs) over points of one curve whose measured values differ."""
    curves: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for o in outcomes:
        if o.prediction is not None:
            curves[curve_of(o.target)].append((o.target.value, o.prediction.value))
    in_order = pairs = 0
    for points in curves.values():
        for i, (measured, predicted) in enumerate(points):
            for other_measured, other_predicted in points[:i]:
                if measured != other_measured:
                    pairs += 1
                    in_order += int(np.sign((measured - other_measured) * (predicted - other_predicted)))
    return in_order, pairs


def curve_of(target: Target) -> str:
    """What points of one curve have in common: all conditions but the number of requests and the context."""
    loads = {"requests_per_gpu", "context_tokens", "verify_tokens", "prefill_tokens_per_gpu", "isl"}
    free = {"id", "value", "notes", "source", "tier", "op"}
    fixed = target.model_dump_json(exclude=loads | free)
    return f"{fixed} {target.op.name if target.op else ''} {target.aggregated}"
