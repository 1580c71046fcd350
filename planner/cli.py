"""The `planner` command: parse, call one function, print."""

from __future__ import annotations

import json
import sys
from dataclasses import asdict
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Annotated, Any, cast

import typer

from deepinfer.console import run_app
from deepinfer.errors import UsageError

app = typer.Typer(no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False, rich_markup_mode=None)


class ObjectiveName(StrEnum):
    """Goals of a search."""

    THROUGHPUT = "throughput"
    GOODPUT = "goodput"
    COST = "cost"
    ENERGY = "energy"
    GPUS = "gpus"


class PoolsName(StrEnum):
    """Which pools a plan may have."""

    ANY = "any"
    MIXED = "mixed"
    SPLIT = "split"


class RouterOption(StrEnum):
    """Policies of the router in front of a pool's replicas."""

    ROUND_ROBIN = "round_robin"
    LEAST_LOADED = "least_loaded"
    CACHE_AWARE = "cache_aware"


class ReplayName(StrEnum):
    """What prefill may skip in layers that see only a window of a prompt."""

    OFF = "off"
    COMPACT = "compact"


@app.callback()
def planner() -> None:
    """Plan how to serve a large mixture-of-experts model on a cluster of accelerators."""


@app.command()
def search(
    gpus: Annotated[
        int | None, typer.Option(help="Accelerators of the cluster; with --objective gpus, of one engine at most.")
    ] = None,
    model: Annotated[str, typer.Option(help="Model card, or path of a Hugging Face config.json.")] = (
        "deepseek-v4.1-flash"
    ),
    hardware: Annotated[str, typer.Option(help="Accelerator of the catalog, or path of a TOML file.")] = "gb200-nvl72",
    isl: Annotated[int | None, typer.Option(help="Prompt tokens of a request [default: 4000].")] = None,
    osl: Annotated[int | None, typer.Option(help="Output tokens of a request [default: 1000].")] = None,
    trace: Annotated[str | None, typer.Option(help="Request trace: Mooncake JSONL or Azure CSV.")] = None,
    rate: Annotated[
        float | None, typer.Option(help="Requests/s for the whole cluster; without it, closed loop.")
    ] = None,
    load: Annotated[
        str | None, typer.Option(help="The rate in other words: 100req/s, 2e9tok/day (prompt and output tokens).")
    ] = None,
    ttft: Annotated[float, typer.Option(help="Limit on time to first token, seconds.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Limit on time per output token, seconds.")] = 0.030,
    percentile: Annotated[int, typer.Option(help="Percentile of the requests that keep both: 50, 90, 95, 99.")] = 90,
    objective: Annotated[ObjectiveName, typer.Option(help="What to optimise within the limits.")] = (
        ObjectiveName.THROUGHPUT
    ),
    acceptance: Annotated[
        float | None, typer.Option(help="Chance that a draft is accepted [default: published for the model].")
    ] = None,
    pools: Annotated[PoolsName, typer.Option(help="One mixed pool, prefill and decode apart, or either.")] = (
        PoolsName.ANY
    ),
    router: Annotated[RouterOption, typer.Option(help="How requests are given to replicas.")] = (
        RouterOption.LEAST_LOADED
    ),
    replay: Annotated[
        ReplayName | None, typer.Option(help="Prompt rows in bounded layers [default: compact if the model can].")
    ] = None,
    skew: Annotated[
        float | None, typer.Option(help="Sigma of the experts' lognormal popularity [default: 0.43, real text].")
    ] = None,
    prefill_hardware: Annotated[str | None, typer.Option(help="Prefill on accelerators of this kind instead.")] = None,
    prefill_gpus: Annotated[int | None, typer.Option(help="How many of them, beside --gpus.")] = None,
    cluster: Annotated[
        str | None, typer.Option(help="Cluster file: accelerators and network, instead of --gpus and --hardware.")
    ] = None,
    images: Annotated[
        float, typer.Option(help="Images of a request, on average; their tokens are part of --isl.")
    ] = 0.0,
    image_tokens: Annotated[
        int | None, typer.Option(help="Tokens of an image [default: the most of the model, e.g. 1024].")
    ] = None,
    out: Annotated[Path | None, typer.Option(help="Folder for plan.json, report.md and plots.")] = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print the plan and finalists as JSON.")] = False,
    top: Annotated[int, typer.Option(help="Finalists to print.", min=1)] = 5,
    jobs: Annotated[int, typer.Option(help="Processes for the simulations; 0: one per core.", min=0)] = 0,
    executor: Annotated[str, typer.Option(help="Where they run: local, ray[:ADDRESS] or dask[:ADDRESS].")] = "local",
    seed: Annotated[int, typer.Option(help="Seed of workload and acceptances.", min=0)] = 0,
) -> None:
    """Find the best layout and settings for a workload."""
    from deepinfer.layout.placement import TYPICAL_LOAD
    from planner.pipeline import run_search
    from planner.problem import Question, make_problem

    if skew is not None and not 0 <= skew <= 3:
        raise UsageError(f"--skew must lie between 0 and 3, got {skew}")
    asked = Question(
        gpus=gpus,
        model=model,
        hardware=hardware,
        isl=isl,
        osl=osl,
        trace=trace,
        rate=rate,
        load=load,
        slo=_slo(ttft, tpot, percentile),
        objective=objective.value,
        acceptance=acceptance,
        seed=seed,
        pools=pools.value,
        router=router.value,
        replay=replay.value if replay else None,
        expert_load=TYPICAL_LOAD if skew is None else TYPICAL_LOAD.model_copy(update={"sigma": skew}),
        prefill_hardware=prefill_hardware,
        prefill_gpus=prefill_gpus,
        cluster=cluster,
        images=images,
        image_tokens=image_tokens,
    )
    problem = make_problem(asked)
    if out is not None:
        _check_writable(out)
    with _progress(quiet=as_json) as tell:
        result = run_search(problem, jobs or -1, tell, executor, None if as_json else partial(_print_screening, top))
    paths: list[Path] = []
    if out is not None:
        from planner.report import write_report

        paths = write_report(result, out)  # before printing, which a closed pipe may end
    _print_result(result, top, as_json)
    if paths and not as_json:
        print("wrote " + ", ".join(str(p) for p in paths))


@app.command()
def survey(
    gpus: Annotated[int, typer.Option(help="Accelerators of the cluster.")] = 64,
    model: Annotated[str, typer.Option(help="Model cards, separated by commas.")] = "deepseek-v4.1-flash",
    hardware: Annotated[str | None, typer.Option(help="Kinds, separated by commas [default: the catalog].")] = None,
    isl: Annotated[int, typer.Option(help="Prompt tokens of a request.")] = 4000,
    osl: Annotated[int, typer.Option(help="Output tokens of a request.")] = 1000,
    ttft: Annotated[float, typer.Option(help="Limit on time to first token at p90, seconds.")] = 2.0,
    tpot: Annotated[float, typer.Option(help="Limit on time per output token at p90, seconds.")] = 0.030,
    jobs: Annotated[int, typer.Option(help="Processes for the simulations; 0: one per core.", min=0)] = 0,
) -> None:
    """Find the best plan on each kind of accelerator, as a Markdown table with cost and energy."""
    from deepinfer.hardware.spec import hardware_names
    from planner.problem import Question
    from planner.survey import HEADER, survey_row
    from planner.survey import survey as surveyed

    question = Question(gpus=gpus, isl=isl, osl=osl, slo=_slo(ttft, tpot, 90))
    names = hardware.split(",") if hardware else hardware_names()
    print("| " + " | ".join(HEADER) + " |\n|" + " --- |" * len(HEADER))
    for found in surveyed(question, model.split(","), names, jobs or -1):
        print("| " + " | ".join(survey_row(found)) + " |", flush=True)


def _slo(ttft: float, tpot: float, percentile: int) -> Any:
    from deepinfer.layout.plan import Slo

    if not ttft > 0 or not tpot > 0 or ttft == float("inf") or tpot == float("inf"):
        raise UsageError(f"--ttft and --tpot must be positive numbers of seconds, got {ttft} and {tpot}")
    if percentile not in (50, 90, 95, 99):
        raise UsageError(f"--percentile must be 50, 90, 95 or 99, got {percentile}")
    return Slo(ttft_s=ttft, tpot_s=tpot, percentile=cast("Any", percentile))


@app.command()
def show(
    plan: Annotated[str, typer.Argument(help="Plan file.")],
    why: Annotated[
        str | None, typer.Option(help="Why not this point, e.g. 'ep=16 requests=128 nextn=5' (rest as in the plan).")
    ] = None,
) -> None:
    """Print a plan: pools, memory, prediction, step; or what speaks against another point."""
    from rich.console import Console

    from deepinfer.layout.plan import load_plan
    from deepinfer.metrics.text import summary_lines
    from deepinfer.workload.spec import describe_workload
    from planner.describe import describe_pools, memory_lines, serving_deployment, step_breakdown
    from planner.encode import encode_line

    loaded = load_plan(plan)
    if why is not None:
        from planner.why import why_lines

        print("\n".join(why_lines(loaded, why)))
        return
    deployment = serving_deployment(loaded)
    console = Console(highlight=False)
    console.print(f"[bold]{loaded.model}[/] on {loaded.gpus} x {loaded.hardware}, objective {loaded.objective}")
    console.print(f"pool: {describe_pools(loaded)}")
    console.print(f"workload: {describe_workload(loaded.workload)}")
    console.print(f"acceptance: {loaded.acceptance.source}")
    _print_pairs(console, "memory of one GPU", memory_lines(deployment))
    if loaded.prediction is None:
        console.print("no prediction: the plan has not been simulated")
        return
    _print_pairs(console, "prediction (simulated)", summary_lines(loaded.prediction, deployment.settings.nextn))
    if loaded.encode:
        console.print(f"\n[bold]encode[/]: {encode_line(loaded)}", soft_wrap=True)
    items, title = step_breakdown(loaded)
    total = sum(i.seconds for i in items)
    rows = [(i.operator, f"{i.seconds * 1e3:.3f} ms  {i.seconds / total:.1%}") for i in items[:12]]
    _print_pairs(console, f"{title}: {total * 1e3:.2f} ms", rows)


@app.command()
def validate(
    targets: Annotated[str, typer.Argument(help="JSON list of published measurements.")],
    as_json: Annotated[bool, typer.Option("--json", help="Print every entry and group as JSON.")] = False,
    plot: Annotated[Path | None, typer.Option(help="PNG of predicted against measured values to write.")] = None,
    explain: Annotated[
        str | None, typer.Option(metavar="ID", help="Show one entry's step, operator by operator.")
    ] = None,
) -> None:
    """Compare predictions with published measurements."""
    from planner.validate.command import run_validation

    run_validation(targets, as_json, plot, explain)


def _print_pairs(console: Any, title: str, rows: list[tuple[str, str]]) -> None:
    from rich.table import Table

    table = Table(box=None, show_header=False, pad_edge=False)
    for row in rows:
        table.add_row(*row)
    console.print(f"\n[bold]{title}[/]", soft_wrap=True)
    console.print(table)


def _print_screening(top: int, screening: Any, chosen: Any) -> None:
    """Something to read while the finalists are simulated."""
    from rich.console import Console

    from planner.firstlook import screened_line, screened_table

    console = Console(highlight=False)
    console.print(screened_line(screening), soft_wrap=True)
    console.print(screened_table(screening, chosen, top))
    console.print()
    sys.stdout.flush()


def _print_result(result: Any, top: int, as_json: bool) -> None:
    from planner.describe import describe_pools
    from planner.economics import economics_line
    from planner.encode import encode_figures, encode_line
    from planner.reasons import why_lines
    from planner.report import finalists_table, pareto_set
    from planner.uncertainty import bands_line

    if as_json:
        finalists = [
            f.plan.model_dump(mode="json") | {"failure": f.failure, "bands": _bands(f)} for f in result.finalists[:top]
        ]
        refused = dict(result.screening.refusals.counts)
        found = {
            "plan": result.plan.model_dump(mode="json"),
            "finalists": finalists,
            "encode": asdict(encoding) if (encoding := encode_figures(result.plan)) else None,
            "pareto": pareto_set(result),
            "screened": result.screening.num_screened,
            "refused": refused,
        }
        print(json.dumps(found, indent=2))
        return
    from rich.console import Console

    console = Console(highlight=False)
    console.print(finalists_table(result, top))
    console.print(f"\n[bold]plan[/]: {describe_pools(result.plan)}", soft_wrap=True)
    console.print(f"[bold]why[/]: {' '.join(why_lines(result, result.explain()))}", soft_wrap=True)
    console.print(f"[bold]costs[/]: {economics_line(result.plan)}", soft_wrap=True)
    if result.plan.encode:
        console.print(f"[bold]encode[/]: {encode_line(result.plan)}", soft_wrap=True)
    console.print(f"[bold]bands[/]: {bands_line(result.plan)}", soft_wrap=True)
    tau = result.winner.summary.tau
    console.print(
        f"[bold]assumes[/]: {tau:.2f} tokens kept per step ({result.problem.acceptance.source}); figures are simulated",
        soft_wrap=True,
    )


def _bands(finalist: Any) -> dict[str, list[float]] | None:
    from planner.uncertainty import bands_json

    return None if finalist.failure else bands_json(finalist.plan)


def _check_writable(folder: Path) -> None:
    """Find out before the work, not after it, that the folder cannot be written."""
    from deepinfer.files import write_file

    made = [parent for parent in (folder, *folder.parents) if not parent.exists()]
    probe = folder / ".planner-probe"
    try:
        write_file(probe, b"")
    except UsageError as error:
        raise UsageError(f"cannot write into folder {folder}: {str(error).rpartition(': ')[2]}") from None
    probe.unlink()
    for parent in made:
        parent.rmdir()


class _progress:  # noqa: N801 - reads as a context manager
    """A progress bar on stderr, when that is a terminal."""

    def __init__(self, quiet: bool) -> None:
        self._quiet = quiet or not sys.stderr.isatty()

    def __enter__(self) -> Any:
        if self._quiet:
            return None
        from rich.console import Console
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

        columns = (TextColumn("simulating finalists"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
        self._bar = Progress(*columns, console=Console(stderr=True), transient=True)
        task = self._bar.add_task("finalists")

        def tell(done: int, total: int) -> None:
            self._bar.start()  # not before: what was screened is printed first
            self._bar.update(task, completed=done, total=total)

        return tell

    def __exit__(self, *exception: object) -> None:
        if not self._quiet:
            self._bar.stop()


def main() -> None:
    """Entry point of the `planner` command."""
    run_app(app)
