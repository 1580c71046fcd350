"""The `validate` command behind its flags: read, predict, write, print."""

from __future__ import annotations

import difflib
from pathlib import Path

from deepinfer.errors import UsageError
from deepinfer.files import write_file
from planner.validate.outcome import Outcome
from planner.validate.outcome import validate as validate_targets
from planner.validate.targets import load_targets


def run_validation(path: str, as_json: bool, plot: Path | None, explained: str | None) -> None:
    """Predict the entries of a file and print how far off they are. Raises UsageError for what was asked wrongly."""
    if explained is not None and (as_json or plot is not None):
        raise UsageError("--explain shows one entry: it cannot be combined with --json or --plot")
    targets = load_targets(path)
    if explained is not None:
        chosen = [t for t in targets if t.id == explained]
        if not chosen:
            close = difflib.get_close_matches(explained, [t.id for t in targets], n=1, cutoff=0.0)
            hint = f", the nearest is {close[0]!r}" if close else ""
            raise UsageError(f"targets file {path} has no entry {explained!r} among its {len(targets)}{hint}")
        _print_explanation(validate_targets(chosen)[0])
        return
    outcomes = validate_targets(targets)
    if plot is not None:
        from planner.validate.plot import plot_validation

        write_file(plot, plot_validation(outcomes))  # before printing, which a closed pipe may end
    if as_json:
        from planner.validate.report import to_json

        print(to_json(outcomes))
        return
    _print_report(outcomes)
    if plot is not None:
        print(f"wrote {plot}")


def _print_report(outcomes: list[Outcome]) -> None:
    from rich.console import Console

    from planner.validate.report import groups_table, reason_lines, worst_table

    console = Console(highlight=False)
    console.print(groups_table(outcomes))
    console.print()
    console.print(worst_table(outcomes))
    lines = reason_lines(outcomes)
    if lines:
        console.print("\n[bold]not predicted[/]")
        for line in lines:
            console.print(line, soft_wrap=True, markup=False)


def _print_explanation(outcome: Outcome) -> None:
    from rich.console import Console

    from planner.validate.explain import explain
    from planner.validate.report import explanation_lines, explanation_table

    if outcome.prediction is None:
        print(f"{outcome.target.id}: not predicted: {outcome.reason}")
        return
    console = Console(highlight=False)
    explanations = explain(outcome)
    entry, *steps = explanation_lines(outcome, explanations)
    console.print(entry, soft_wrap=True, markup=False)
    for line, found in zip(steps, explanations, strict=True):
        console.print(f"\n{line}", soft_wrap=True, markup=False)
        console.print(explanation_table(found))
