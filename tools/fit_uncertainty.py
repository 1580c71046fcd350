"""Fit the spreads in `deepinfer/cost/uncertainty.toml` to published measurements, and leave families out to see.

    python tools/fit_uncertainty.py TARGETS.json [--write]

A spread is the smallest with which `SHARE_FITTED` of the residuals lie in their band, beyond what the operators of each
entry contribute; what is written is never smaller than what was shipped. Families (an engine on an accelerator, or a
kernel) weigh as the square root of their rows, so that the best measured one does not decide. The table then leaves
each family out: its coverage by spreads fitted without it, as an unseen one's.
"""

from __future__ import annotations

import argparse
import itertools
import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

from deepinfer.cost import uncertainty
from deepinfer.cost.uncertainty import Z_INSIDE, Part, difference_log_sigma, load_spreads
from planner.validate.bands import entry_parts, single_kernel
from planner.validate.mapping import map_case
from planner.validate.outcome import Outcome, validate
from planner.validate.statistics import curve_of
from planner.validate.targets import Target, load_targets

SHARE_FITTED = 0.85
"""More than a band promises: what to model was chosen with these measurements in view, unseen ones are further off."""
FITTED_SOURCES = ("deepseek-ai/DeepEP README", "deepseek-ai/DeepGEMM PR#316")
"""Publications whose points `fit_profiles.py` fits beside the kernel timings: they tell nothing about its errors."""
MOSTLY = 0.5
"""Share of unmeasured entries from which a prediction tells about `unmeasured`, below which about `step`."""


@dataclass(frozen=True)
class Residual:
    """log(measured / predicted time) of a family's entry or pair; `known` is the spread its operators explain."""

    name: str
    family: str
    log_error: float
    known: float


@dataclass(frozen=True)
class Entry:
    """An entry's outcome and what its time is made of."""

    target: Target
    log_error: float
    parts: dict[str, Part]
    single: bool

    @property
    def family(self) -> str:
        """What is left out at once: an engine on an accelerator, or a kernel wherever it was timed."""
        if self.single and self.target.op is not None:
            return self.target.op.name
        return f"{self.target.engine} {self.target.hardware}"

    @property
    def unmeasured(self) -> float:
        """Share of the time that entries make which nobody measured."""
        return sum(p.share for p in self.parts.values() if p.log_sigma is None)

    @property
    def kind(self) -> str:
        """The spread that the entry tells about."""
        if self.unmeasured >= MOSTLY:
            return "unmeasured"
        return "kernel" if self.single else "step"

    def measured_sigma(self) -> float:
        """What the measured operators contribute."""
        return math.sqrt(sum((p.share * p.log_sigma) ** 2 for p in self.parts.values() if p.log_sigma is not None))


def entries_of(outcomes: Iterable[Outcome]) -> list[Entry]:
    """Entries with a prediction that were not fitted; rates turned into times, ratios left out."""
    found = []
    for o in outcomes:
        if o.prediction is None or o.target.metric == "ratio" or o.target.source.startswith(FITTED_SOURCES):
            continue
        is_time = o.target.metric.endswith("_s")
        log_error = math.log(o.target.value / o.prediction.value) * (1.0 if is_time else -1.0)
        parts = entry_parts(o.prediction.steps, map_case(o.target).costs)
        found.append(Entry(o.target, log_error, parts, single_kernel(o.prediction.steps)))
    return found


def residuals(entries: Sequence[Entry], kind: str) -> list[Residual]:
    """Residuals that tell about one spread."""
    if kind in ("same_layout", "other_layout"):
        return list(_pairs(entries, kind == "same_layout"))
    return [Residual(e.target.id, e.family, e.log_error, e.measured_sigma()) for e in entries if e.kind == kind]


def _pairs(entries: Sequence[Entry], same_layout: bool) -> Iterable[Residual]:
    """Differences between points of one kind of step, model, engine and hardware, on one curve or not."""
    for a, b in itertools.combinations(entries, 2):
        x, y = a.target, b.target
        alike = all(getattr(x, name) == getattr(y, name) for name in ("kind", "engine", "hardware", "model", "weights"))
        if alike and a.kind == "step" and (curve_of(x) == curve_of(y)) is same_layout:
            known = difference_log_sigma(a.parts, b.parts)
            yield Residual(f"{x.id} {y.id}", a.family, a.log_error - b.log_error, known)


def covered(rows: Sequence[Residual], sigma: float) -> float:
    """Share of rows within the band, families weighing as the square root of their rows."""
    count = Counter(r.family for r in rows)
    inside = sum(_inside(r, sigma) / math.sqrt(count[r.family]) for r in rows)
    return inside / sum(math.sqrt(n) for n in count.values())


def _inside(row: Residual, sigma: float) -> bool:
    return abs(row.log_error) <= Z_INSIDE * math.hypot(row.known, sigma)


def fit(rows: Sequence[Residual]) -> float:
    """The smallest spread that covers `SHARE_FITTED`, rounded up to three digits."""
    low, high = 0.0, 3.0
    for _ in range(40):
        middle = (low + high) / 2
        low, high = (low, middle) if covered(rows, middle) >= SHARE_FITTED else (middle, high)
    return float(f"{1.005 * high:.3g}")


def shipped_or_fitted(kind: str, rows: Sequence[Residual]) -> float:
    """The larger of both: what was modelled better with these measurements in view says nothing of unseen ones."""
    shipped: float = getattr(load_spreads(), kind).log_sigma
    return max(shipped, fit(rows))


def leave_out(rows: Sequence[Residual]) -> dict[str, tuple[int, float, float]]:
    """By family: rows, the spread fitted on the others, and the share of its rows that this one covers."""
    found = {}
    for family, count in Counter(r.family for r in rows).most_common():
        others = [r for r in rows if r.family != family]
        if others:
            sigma = fit(others)
            own = [r for r in rows if r.family == family]
            found[family] = count, sigma, sum(_inside(r, sigma) for r in own) / count
    return found


def spreads_of(entries: Sequence[Entry]) -> dict[str, list[Residual]]:
    """Residuals by the spread they tell about; `unmeasured` is fitted beyond `step`."""
    found = {kind: residuals(entries, kind) for kind in ("kernel", "step", "same_layout", "other_layout")}
    step = shipped_or_fitted("step", found["step"])
    found["unmeasured"] = [
        Residual(e.target.id, e.family, e.log_error, math.hypot(e.measured_sigma(), step))
        for e in entries
        if e.kind == "unmeasured"
    ]
    return found


WHAT = {
    "kernel": "kernels timed alone by others than the profile's: beyond the spread of their entries",
    "step": "steps, forwards and drafts of at least half measured entries: engine, host, imbalance, measuring",
    "unmeasured": "entries without a measurement behind them, off together, beyond `step`",
    "same_layout": "pairs on one curve, all conditions alike but load and context: beyond the difference of operators",
    "other_layout": "pairs of one engine, hardware, model and weight format on different curves",
}


def to_toml(found: dict[str, list[Residual]]) -> str:
    """The file that `deepinfer.cost.uncertainty` reads."""
    lines = ["# Written by tools/fit_uncertainty.py."]
    for kind, rows in found.items():
        families = len({r.family for r in rows})
        lines += ["", f"[{kind}]", f"log_sigma = {shipped_or_fitted(kind, rows)}", f"rows_fitted = {len(rows)}"]
        weighing = f"{families} families of published measurements, each weighing as the root of its rows"
        lines.append(f'source = "{WHAT[kind]}; {weighing}"')
    return "\n".join(lines) + "\n"


def table(found: dict[str, list[Residual]]) -> list[str]:
    """Markdown: each spread, then each family by the spreads fitted without it."""
    lines = ["| spread | left out | rows | fitted on the others | inside |", "| --- | --- | --- | --- | --- |"]
    for kind, rows in found.items():
        out = leave_out(rows)
        whole = f"| {kind} | nothing | {len(rows)} | {fit(rows)} | {covered(rows, fit(rows)):.0%} |"
        lines.append(whole)
        for family, (count, sigma, inside) in out.items():
            lines.append(f"| {kind} | {family} | {count} | {sigma} | {inside:.0%} |")
        num = sum(count for count, _, _ in out.values())
        if num:
            mean = sum(count * inside for count, _, inside in out.values()) / num
            lines.append(f"| {kind} | each in turn | {num} | | {mean:.0%} |")
    return lines


def main() -> None:
    """Fit, print the table, and write the spreads with --write."""
    parser = argparse.ArgumentParser(description="Fit the spreads of predictions to published measurements.")
    parser.add_argument("targets", help="JSON list of published measurements")
    parser.add_argument("--write", action="store_true", help="rewrite deepinfer/cost/uncertainty.toml")
    arguments = parser.parse_args()
    found = spreads_of(entries_of(validate(load_targets(arguments.targets))))
    print("\n".join(table(found)))
    if arguments.write:
        path = Path(uncertainty.__file__).with_suffix(".toml")
        path.write_text(to_toml(found), encoding="utf-8")


if __name__ == "__main__":
    main()
