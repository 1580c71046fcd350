"""Commands of `deepinfer` that compute tokens: what a user types, one call each, and what is printed of it."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

from deepinfer.errors import UsageError

if TYPE_CHECKING:
    from deepinfer.engine.serve import ServedPlan
    from deepinfer.layout.plan import Plan
    from deepinfer.llm import Generation, RequestOutput
    from deepinfer.metrics.summary import Summary
    from deepinfer.sampling.prompts import Prompt

Backend = Annotated[str, typer.Option(help="cuda, cpu, or auto: cuda where there is a GPU.")]
LoadFormat = Annotated[str, typer.Option(help="auto: the folder's weights; dummy: made up, of true shapes.")]
AsJson = Annotated[bool, typer.Option("--json", help="Print everything as JSON.")]


def generate(
    model: Annotated[str, typer.Option(help="Folder of a checkpoint; with --load-format dummy also a model card.")],
    prompt: Annotated[list[str] | None, typer.Option(help="A prompt; may be given several times.")] = None,
    prompt_file: Annotated[Path | None, typer.Option(help="File with a prompt in each line that is not empty.")] = None,
    prompt_ids: Annotated[list[str] | None, typer.Option(help="A prompt as token ids: '1 2 3'.")] = None,
    backend: Backend = "auto",
    load_format: LoadFormat = "auto",
    dtype: Annotated[str, typer.Option(help="Of activations: auto, bfloat16 or float32; float64 to test.")] = "auto",
    ep: Annotated[int, typer.Option(help="Ranks that hold all experts together.")] = 1,
    dp: Annotated[int, typer.Option(help="Attention replicas; 0: max(1, ep / cp).")] = 0,
    cp: Annotated[int, typer.Option(help="Ranks of an attention replica.")] = 1,
    max_model_len: Annotated[int | None, typer.Option(help="Longest prompt and output [default: 4096].")] = None,
    max_num_seqs: Annotated[int, typer.Option(help="Requests that run at once per attention replica.")] = 256,
    nextn: Annotated[int, typer.Option(help="Drafts verified per request and step.")] = 0,
    replay: Annotated[
        str, typer.Option(help="off, or compact: prompts skip the decoder layers; mask checks it.")
    ] = "off",
    max_tokens: Annotated[int, typer.Option(help="Most output tokens of a prompt.")] = 16,
    temperature: Annotated[float, typer.Option(help="0 takes the most likely token.")] = 1.0,
    top_p: Annotated[float, typer.Option(help="Fewest tokens with so much probability.")] = 1.0,
    top_k: Annotated[int, typer.Option(help="So many likeliest tokens; -1: all.")] = -1,
    stop: Annotated[
        list[str] | None, typer.Option(help="Text that ends an output; may be given several times.")
    ] = None,
    ignore_eos: Annotated[bool, typer.Option(help="Go on to --max-tokens.")] = False,
    logprobs: Annotated[int | None, typer.Option(help="Log-probabilities per token.")] = None,
    seed: Annotated[int, typer.Option(help="Of everything drawn.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Generate text on this machine."""
    from deepinfer.llm import LLM, SamplingParams
    from deepinfer.progress import progress_bar

    prompts = read_prompts(prompt or [], prompt_file, prompt_ids or [])
    params = SamplingParams(
        temperature=temperature,
        top_p=top_p,
        top_k=top_k,
        max_tokens=max_tokens,
        stop=stop or None,
        ignore_eos=ignore_eos,
        logprobs=logprobs,
    )
    engine: dict[str, Any] = {
        "load_format": load_format,
        "dtype": dtype,
        "seed": seed,
        "expert_parallel_size": ep,
        "data_parallel_size": dp,
        "context_parallel_size": cp,
        "max_model_len": max_model_len,
        "max_num_seqs": max_num_seqs,
        "nextn": nextn,
        "replay": replay,
    }
    with LLM(model, backend=backend, **engine) as llm, progress_bar("generating") as progress:
        done = llm.run(prompts, params, progress)
        speaks = llm.speaks
    if speaks:
        _print_generation(done, nextn, as_json)


def run(
    plan: Annotated[str, typer.Argument(help="Plan file.")],
    backend: Backend = "auto",
    model: Annotated[str | None, typer.Option(help="Folder of the model's weights.")] = None,
    load_format: LoadFormat = "auto",
    requests: Annotated[
        int | None, typer.Option(help="Serve only the first so many and measure the whole run.", min=1)
    ] = None,
    output: Annotated[Path | None, typer.Option(help="Write what was measured and predicted, as JSON.")] = None,
    as_json: AsJson = False,
) -> None:
    """Serve a plan's workload on this machine, and print what its users see beside what was predicted."""
    from deepinfer.engine.serve import serve_plan
    from deepinfer.files import write_file
    from deepinfer.layout.plan import load_plan
    from deepinfer.progress import progress_bar

    if load_format not in ("auto", "dummy"):
        raise UsageError(f"load_format must be auto or dummy, got {load_format!r}")
    loaded = load_plan(plan)
    with progress_bar("serving") as progress:
        served = serve_plan(loaded, backend, model, cast("Any", load_format), requests, progress)
    if not served.speaks:
        return
    text = ""
    if output is not None or as_json:
        text = json.dumps(_as_json(loaded, served, load_format), indent=2)
    if output is not None:
        write_file(output, (text + "\n").encode())
    if as_json:
        print(text)
    else:
        _print_served(loaded, served, load_format, output)


def read_prompts(texts: list[str], path: Path | None, ids: list[str]) -> list[Prompt]:
    """Prompts of a command line, in the order text, file, token ids. Raises UsageError when there is none."""
    from deepinfer.files import read_text

    lines = read_text(path, "prompt file").splitlines() if path else []
    prompts: list[Prompt] = [*texts, *(line for line in lines if line.strip()), *map(_token_ids, ids)]
    if not prompts:
        raise UsageError("no prompt: give --prompt, --prompt-file or --prompt-ids")
    return prompts


def _token_ids(text: str) -> list[int]:
    try:
        return [int(word) for word in text.replace(",", " ").split()]
    except ValueError:
        raise UsageError(f"--prompt-ids must be whole numbers, got {text!r}") from None


def _print_generation(done: Generation, nextn: int, as_json: bool) -> None:
    import math

    from deepinfer.metrics.summary import summarize

    finished = done.run is not None and bool((done.run.record.finish_s >= 0).any())
    summary = summarize(done.run.record, math.inf, math.inf) if done.run and finished else None
    if as_json:
        figures = summary.model_dump(mode="json") if summary else None
        wall_s = done.run.wall_s if done.run else 0.0
        outputs = [_output_as_json(output) for output in done.outputs]
        print(json.dumps({"outputs": outputs, "wall_s": wall_s, "summary": figures}, indent=2))
        return
    for output in done.outputs:
        _print_output(output)
    if summary is not None and done.run is not None:
        _print_figures(summary, nextn, done.run.wall_s)


def _print_output(output: RequestOutput) -> None:
    completion = output.outputs[0]
    prompt = output.prompt if output.prompt is not None else list(output.prompt_token_ids)
    text = completion.text if completion.text is not None else list(completion.token_ids)
    why = f": {completion.stop_reason}" if completion.finish_reason in ("ignored", "aborted") else ""
    print(f"prompt: {prompt!r}\noutput: {text!r}  ({completion.finish_reason}{why})\n")


def _print_figures(summary: Summary, nextn: int, wall_s: float) -> None:
    from deepinfer.metrics.text import throughput_lines
    from deepinfer.units import format_seconds

    latency = f"{format_seconds(summary.ttft_s.p50)}, {format_seconds(summary.tpot_s.p50)}"
    requests = f"{summary.requests_finished:,} in {format_seconds(wall_s)}"
    rows = [("requests", requests), *throughput_lines(summary, nextn), ("TTFT, TPOT p50", latency)]
    _print_table(rows)


def _print_served(plan: Plan, served: ServedPlan, load_format: str, output: Path | None) -> None:
    from deepinfer.engine.serve import differences
    from deepinfer.metrics.compare import compare
    from deepinfer.metrics.text import summary_lines
    from deepinfer.workload.spec import describe_workload

    print(describe_workload(served.plan.workload))
    _print_table(summary_lines(served.measured, served.plan.serving.settings.nextn))
    if plan.prediction is None:
        print("\nthe plan has no prediction to compare with")
    else:
        print("\nagainst the plan's prediction (error: predicted / measured - 1)")
        _print_table(
            [c.as_row() for c in compare(served.measured, plan.prediction)], "figure", "measured", "predicted", "error"
        )
        for sentence in differences(plan, served, cast("Any", load_format)):
            print(sentence)
    if output is not None:
        print(f"wrote {output}")


def _as_json(plan: Plan, served: ServedPlan, load_format: str) -> dict[str, Any]:
    from deepinfer.engine.serve import differences
    from deepinfer.metrics.compare import compare

    predicted = plan.prediction
    return {
        "plan": served.plan.model_dump(mode="json"),
        "hardware": served.deployment.cluster.accelerator.name,
        "load_format": load_format,
        "wall_s": served.run.wall_s,
        "measured": served.measured.model_dump(mode="json"),
        "comparison": [c.as_json() for c in compare(served.measured, predicted)] if predicted else [],
        "differences": differences(plan, served, cast("Any", load_format)),
    }


def _output_as_json(output: RequestOutput) -> dict[str, Any]:
    completion = output.outputs[0]
    logprobs = completion.logprobs
    return {
        "request_id": output.request_id,
        "prompt": output.prompt,
        "prompt_token_ids": output.prompt_token_ids,
        "text": completion.text,
        "token_ids": completion.token_ids,
        "finish_reason": completion.finish_reason,
        "stop_reason": completion.stop_reason,
        "logprobs": None if logprobs is None else [dict(token) for token in logprobs],
        "metrics": None if output.metrics is None else asdict(output.metrics),
    }


def _print_table(rows: list[Any], *header: str) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(*header, box=None, show_header=bool(header), pad_edge=False)
    for row in rows:
        table.add_row(*row)
    Console(highlight=False).print(table)
