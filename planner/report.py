"""What a search tells its user: a table for the terminal, a Markdown report, and the files of `--out`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict
from io import StringIO
from pathlib import Path

from rich.console import Console
from rich.table import Table

from deepinfer.files import write_file
from deepinfer.layout.plan import Plan
from deepinfer.metrics.text import summary_lines
from deepinfer.units import format_seconds
from deepinfer.workload.spec import describe_workload
from planner.describe import (
    chunk_rows,
    describe_pools,
    engines,
    memory_lines,
    serving_deployment,
    step_breakdown,
)
from planner.economics import accelerators, economics_line
from planner.encode import encode_line
from planner.explain import Explanation
from planner.pipeline import SearchResult
from planner.plots import new_figure, plot_breakdown, plot_pareto, to_png
from planner.reasons import assumption_lines, why_lines
from planner.refine import Finalist
from planner.uncertainty import (
    output_band,
    tpot_band,
)


def finalists_table(result: SearchResult, top: int) -> Table:
    """The best finalists, one line each, within 80 columns."""
    slo = result.problem.slo
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("")
    table.add_column("engines", no_wrap=True)
    for name in (
        "req/\nGPU", "rows/\nGPU", "next\nn", "output\ntok/s\n/GPU", "tok/s\n/user",
        f"TTFT\np{slo.percentile}", f"TPOT\np{slo.percentile}", "ok",
    ):  # fmt: skip
        table.add_column(name, justify="right", no_wrap=True)
    for rank, finalist in enumerate(result.finalists[:top], start=1):
        table.add_row(str(rank), *_finalist_row(result, finalist), style="bold" if rank == 1 else None)
    return table


def finalists_text(result: SearchResult, top: int) -> str:
    """The same as plain text."""
    console = Console(file=StringIO(), width=100, highlight=False, color_system=None, force_jupyter=False)
    with console.capture() as captured:
        console.print(finalists_table(result, top))
    return "\n".join(line.rstrip() for line in captured.get().splitlines())


def _finalist_row(result: SearchResult, finalist: Finalist) -> list[str]:
    pool = finalist.plan.serving
    settings, layout = pool.settings, pool.layout.resolve()
    row = [
        engines(finalist.plan),
        f"{settings.max_num_seqs / layout.replica_ranks:g}",
        f"{_prompt_rows_per_gpu(finalist.plan):g}",
        str(settings.nextn),
    ]
    if finalist.failure:
        return [*row, "-", "-", "-", "-", "failed"]
    summary, percentile = finalist.summary, result.problem.slo.percentile
    return [
        *row,
        f"{summary.output_tokens_per_s_per_gpu:,.0f}",
        f"{summary.tokens_per_s_per_user:.1f}",
        format_seconds(summary.ttft_s.at(percentile)),
        format_seconds(summary.tpot_s.at(percentile)),
        "yes" if result.feasible(finalist) else "no",
    ]


def _prompt_rows_per_gpu(plan: Plan) -> float:
    """Prompt rows that a step takes on a GPU of the pool that prefills."""
    if plan.prefill is not None:
        return plan.prefill.settings.max_tokens_per_step / plan.prefill.layout.resolve().replica_ranks
    return chunk_rows(plan.serving) / plan.serving.layout.resolve().replica_ranks


def _title(result: SearchResult) -> str:
    """The model, and the accelerators that its plan is charged for."""
    parts = " and ".join(f"{gpus:,} x {name}" for name, gpus in accelerators(result.plan))
    return f"{result.problem.model.name} on {parts}"


def markdown_report(result: SearchResult) -> str:
    """The report of a search, from question to assumptions; the same search gives the same text."""
    problem, plan = result.problem, result.plan
    deployment, explanation = serving_deployment(plan), result.explain()
    slo = problem.slo
    sections = [
        f"# {_title(result)}",
        f"Goal: {problem.objective} within TTFT {format_seconds(slo.ttft_s)} and TPOT {format_seconds(slo.tpot_s)} at "
        f"p{slo.percentile}. Workload: {describe_workload(plan.workload)}.",
        f"## The plan\n\n{describe_pools(plan)}.",
        _markdown_pairs(("figure", "simulated"), summary_lines(result.winner.summary, plan.serving.settings.nextn)),
        f"Cost and energy: {economics_line(plan)}.",
        f"Encode pool: {encode_line(plan)}." if plan.encode else "",
        "![latency against throughput](pareto.png)",
        "## Why this one\n\n" + "\n\n".join(why_lines(result, explanation)),
        "![what the mean step is made of](step_breakdown.png)",
        "## What would change it\n\n" + _markdown_what_ifs(explanation),
        "## Finalists\n\n" + _markdown_finalists(result),
        "## Pareto set\n\n" + _markdown_pareto(result),
        "## Memory of one GPU\n\n" + _markdown_pairs(("item", "size"), memory_lines(deployment)),
        "## Points not considered\n\n" + _markdown_refusals(result),
        "## Assumptions\n\n" + "\n".join(f"- {line}" for line in assumption_lines(result, deployment)),
        "## Reproduce\n\n`deepinfer simulate plan.json` serves the same workload with the same seed and prints the "
        "same figures; `planner show plan.json` prints the plan.",
    ]
    return "\n\n".join(section for section in sections if section) + "\n"


def _markdown_what_ifs(explanation: Explanation) -> str:
    text = (
        "The same engines screened again with one thing changed, and their settings free: output (under a rate, the "
        "requests/s they could serve) beside now. What gains most is what binds."
    )
    rows = [(w.group, w.name, f"{w.ratio - 1.0:+.1%}" if w.ratio else "nothing feasible") for w in explanation.what_ifs]
    return text + "\n\n" + _markdown_table(("", "if", "output"), rows)


def _markdown_finalists(result: SearchResult) -> str:
    percentile = result.problem.slo.percentile
    header = (
        "", "engines", "requests/GPU", "prompt rows/GPU", "nextn", "output tok/s/GPU", "tok/s/user",
        f"TTFT p{percentile}", f"TPOT p{percentile}", "within limits", "screened tok/s/GPU",
        "80% band of output", "of TPOT",
    )  # fmt: skip
    points = result.screening.points
    rows = [
        (str(rank), *_finalist_row(result, f), f"{points.output_per_gpu[f.point]:,.0f}", *_bands(f))
        for rank, f in enumerate(result.finalists, start=1)
    ]
    return _markdown_table(header, rows)


def _bands(finalist: Finalist) -> tuple[str, str]:
    if finalist.failure:
        return "-", "-"
    return str(output_band(finalist.plan)), str(tpot_band(finalist.plan))


def pareto_set(result: SearchResult, most: int = 16) -> list[dict[str, object]]:
    """The Pareto front for JSON."""
    return [asdict(point) for point in result.pareto(most)]


def _markdown_pareto(result: SearchResult) -> str:
    rows = [
        (
            p.engines, f"{p.requests_per_gpu:g}", f"{p.prompt_rows_per_gpu:g}", str(p.nextn),
            f"{p.tokens_per_s_per_user:.1f}", f"{p.output_tokens_per_s_per_gpu:,.0f}", format_seconds(p.mean_ttft_s),
        )
        for p in result.pareto()
    ]  # fmt: skip
    header = ("engines", "requests/GPU", "prompt rows/GPU", "nextn", "tok/s/user", "output tok/s/GPU", "TTFT")
    return "Screened means; finalists above are simulated.\n\n" + _markdown_table(header, rows)


def _markdown_refusals(result: SearchResult) -> str:
    refusals = result.screening.refusals
    text = f"{result.screening.num_screened:,} points screened, {refusals.total:,} refused:"
    rows = [(f"{n:,}", reason, refusals.examples[reason]) for reason, n in refusals.counts.most_common()]
    return text + "\n\n" + _markdown_table(("points", "reason", "first example"), rows)


def _markdown_pairs(header: tuple[str, str], rows: Iterable[tuple[str, str]]) -> str:
    return _markdown_table(header, rows)


def _markdown_table(header: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    head = list(header)
    lines = ["| " + " | ".join(head) + " |", "|" + " --- |" * len(head)]
    lines += ["| " + " | ".join(row) + " |" for row in rows]
    return "\n".join(lines)


def write_report(result: SearchResult, folder: Path) -> list[Path]:
    """Write plan.json, report.md, pareto.png and step_breakdown.png; each is there whole or not at all.

    Raises UsageError when the folder cannot be written.
    """
    figure, ax = new_figure()
    plot_pareto(result, ax).set_title(_title(result))
    breakdown, bars = new_figure(8.0, 4.6)
    items, title = step_breakdown(result.plan)
    plot_breakdown(items, title, bars)
    files = {
        "plan.json": result.plan.to_json().encode(),
        "report.md": markdown_report(result).encode(),
        "pareto.png": to_png(figure),
        "step_breakdown.png": to_png(breakdown),
    }
    for name, content in files.items():
        write_file(folder / name, content)
    return [folder / name for name in files]
