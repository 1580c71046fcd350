"""The `deepinfer` command: parse, call one function, print."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from deepinfer.commands import generate, run
from deepinfer.console import run_app

if TYPE_CHECKING:
    from deepinfer.layout.plan import Plan
    from deepinfer.metrics.summary import Summary

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)
app.command()(generate)
app.command()(run)


@app.callback()
def deepinfer() -> None:
    """Run plans for large mixture-of-experts models."""


@app.command()
def simulate(
    plan: Annotated[str, typer.Argument(help="Plan file.")],
    trace: Annotated[str | None, typer.Option(help="Serve this whole trace instead of the plan's workload.")] = None,
    timeline: Annotated[
        Path | None, typer.Option(help="Write the operators of a typical decode step for ui.perfetto.dev.")
    ] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the figures as JSON.")] = False,
) -> None:
    """Serve a plan's workload in simulation and print what its users would see."""
    from deepinfer.layout.plan import load_plan

    loaded = load_plan(plan)
    if trace is not None:
        loaded = _with_trace(loaded, trace)
    summary = _simulate(loaded)
    if timeline is not None:
        _write_timeline(loaded, summary, timeline)
    if as_json:
        print(json.dumps(summary.model_dump(mode="json"), indent=2))
        return
    from rich.console import Console
    from rich.table import Table

    from deepinfer.metrics.text import summary_lines
    from deepinfer.workload.spec import describe_workload

    table = Table(box=None, show_header=False, pad_edge=False)
    for row in summary_lines(summary, loaded.serving.settings.nextn):
        table.add_row(*row)
    console = Console(highlight=False)
    console.print(describe_workload(loaded.workload), soft_wrap=True)
    console.print(table)
    if timeline is not None:
        console.print(f"wrote {timeline}")


def _simulate(plan: Plan) -> Summary:
    from deepinfer.engine.simulate import simulate_plan

    return simulate_plan(plan)


def _with_trace(plan: Plan, path: str) -> Plan:
    """The plan with all requests of a trace, at the plan's rate if it has one, else at the trace's own times."""
    from deepinfer.workload.spec import ClosedLoop, TraceArrivals, Workload
    from deepinfer.workload.trace import trace_source

    old = plan.workload.arrivals
    arrivals = TraceArrivals(rate=None if isinstance(old, ClosedLoop) else old.rate)
    workload = Workload(trace=trace_source(path), arrivals=arrivals, seed=plan.workload.seed)
    return plan.model_copy(update={"workload": workload, "prediction": None})


def _write_timeline(plan: Plan, summary: Summary, path: Path) -> None:
    from deepinfer.engine.deployment import by_role, resolve
    from deepinfer.files import write_file
    from deepinfer.metrics.timeline import to_chrome_trace
    from deepinfer.registry import load_backend

    _, deployment = by_role(resolve(plan))
    requests = max(round(summary.running_per_gpu * deployment.layout.replica_ranks), 1)
    spans = load_backend("sim").timeline(deployment, requests, summary.mean_context)
    title = f"{plan.model}, one rank, decode step of {requests} requests per replica"
    write_file(path, to_chrome_trace(spans, title).encode())


def main() -> None:
    """Entry point of the `deepinfer` command."""
    run_app(app)
