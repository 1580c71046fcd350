"""Plans in words and numbers: their pools, their memory, and what their mean step is made of."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.cost.compose import PathItem, critical_path
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, by_role, resolve
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import Summary
from deepinfer.units import format_bytes


def describe_pools(plan: Plan) -> str:
    """One line: engines, layout and settings of a plan's pools."""
    return "; ".join(_describe_pool(pool) for pool in plan.pools)


def _describe_pool(pool: Pool) -> str:
    settings, layout = pool.settings, pool.layout.resolve()
    engines = f"{pool.replicas} x ({layout}) on {layout.num_ranks} GPUs each"
    if pool.hardware is not None:
        engines += f" of {pool.hardware}"
    engines += "".join(f", {variant}" for variant in _variants(settings))
    if pool.role == "prefill":
        return f"prefill: {engines}, steps of {settings.max_tokens_per_step} rows, replay {settings.replay}"
    role = "decode: " if pool.role == "decode" else ""
    return (
        f"{role}{engines}, {settings.max_num_seqs} requests per attention replica, prefill chunks of "
        f"{chunk_rows(pool)} rows, nextn {settings.nextn}, replay {settings.replay}"
    )


def _variants(settings: EngineSettings) -> list[str]:
    """What an engine does unlike the plainest of its layout."""
    found = ["two-batch overlap"] if settings.overlap == "two-batch" else []
    found += ["fused experts"] if settings.moe == "fused" else []
    return found + ([f"KV in {settings.kv_format}"] if settings.kv_format else [])


def chunk_rows(pool: Pool) -> int:
    """The prefill chunk: prompt rows that a step takes beside a full decode batch."""
    settings = pool.settings
    return settings.max_tokens_per_step - settings.max_num_seqs * (1 + settings.nextn)


def engines(plan: Plan) -> str:
    """A plan's engines for a table: `4x ep8-cp4`; `4x ep4 > 1x ep32+32` (redundant experts) from prefill to decode."""
    pools = [plan.prefill, plan.serving] if plan.prefill else [plan.serving]
    return " > ".join(f"{pool.replicas}x {_short(pool.layout.resolve())}" for pool in pools if pool)


def _short(layout: ParallelLayout) -> str:
    """The layout without its dp, where the other degrees give it, and with its redundant experts as a number."""
    derived = f"dp{layout.step_group // layout.replica_ranks}"
    shown = str(replace(layout, redundant_experts=0)).split()
    redundant = f"+{layout.redundant_experts}" if layout.redundant_experts else ""
    return "-".join(part for part in shown if part != derived) + redundant


def unused_gpus(plan: Plan) -> int:
    """Accelerators of the cluster that no pool uses."""
    return plan.gpus - sum(pool.replicas * pool.layout.resolve().num_ranks for pool in plan.pools)


def serving_deployment(plan: Plan) -> Deployment:
    """The deployment of the pool that decodes."""
    return by_role(resolve(plan))[1]


def step_breakdown(plan: Plan) -> tuple[list[PathItem], str]:
    """What the mean step of a plan's simulation is made of, and what that step is in words.

    Steps with prompt rows and steps without are two shapes; each counts by its share of the steps.
    """
    deployment = serving_deployment(plan)
    figures = plan.prediction
    assert figures is not None
    costs, graph = CostModel(deployment.cluster.accelerator), deployment.graph()
    replicas, decoding = deployment.replicas_per_group, _decoding(plan, deployment)
    totals: dict[tuple[str, str], float] = {}
    for share, shape in mean_steps(plan, deployment):
        for item in critical_path(graph, shape, costs):
            key = (item.operator, item.stream)
            totals[key] = totals.get(key, 0.0) + share * item.seconds
    items = [PathItem(name, stream, seconds) for (name, stream), seconds in totals.items()]
    requests = "1 request" if decoding < 1.5 else f"{decoding:,.0f} requests"
    prompt = f"{figures.prompt_rows / replicas:,.0f} prompt rows in {figures.prompt_steps:.0%} of the steps"
    text = (
        f"mean step per attention replica ({requests} decoding at a context of {figures.mean_context:,.0f}, {prompt})"
    )
    return sorted(items, key=lambda item: -item.seconds), text


def mean_steps(plan: Plan, deployment: Deployment) -> list[tuple[float, StepShape]]:
    """Mean steps of the pool that decodes, without and with prompt rows, each with its share of the steps."""
    figures = plan.prediction
    assert figures is not None
    decoding = max(_decoding(plan, deployment), 1.0)
    decode = Sequences.decoding(decoding, float(deployment.settings.nextn), figures.mean_context)
    rows = figures.prompt_rows / deployment.replicas_per_group
    kinds = ((1.0 - figures.prompt_steps, 0.0), (figures.prompt_steps, rows))
    return [(share, StepShape(decode, _prompts(plan, figures, rows))) for share, rows in kinds if share]


def _decoding(plan: Plan, deployment: Deployment) -> float:
    """Requests that an attention replica of the pool that decodes decodes, on average."""
    assert plan.prediction is not None
    return plan.prediction.running_per_gpu * plan.gpus / deployment.attention_replicas


def mean_prefill_step(plan: Plan, deployment: Deployment) -> StepShape:
    """The mean step of the pool that only prefills."""
    figures = plan.prediction
    assert figures is not None
    assert figures.prefill is not None
    rows = figures.prefill.prompt_rows / deployment.replicas_per_group
    prompt = max(_computed_tokens(figures), 1.0)
    count = max(rows / prompt, 1.0)
    each = rows / count
    kept = 1.0 if deployment.settings.replay == "compact" else each
    return StepShape(None, (Sequences(count, each, max(prompt - rows, 0.0) / 2, kept, min(rows / prompt, 1.0)),))


def _computed_tokens(figures: Summary) -> float:
    """Prompt tokens computed per request."""
    return figures.input_tokens_per_s_per_gpu * figures.num_gpus * figures.window_s / figures.requests_measured


def _prompts(plan: Plan, figures: Summary, rows: float) -> tuple[Sequences, ...]:
    """Prompt rows of a replica's step as sequences: whole prompts of the mean computed length, or part of one."""
    if not rows:
        return ()
    if plan.prefill is None:
        computed = _computed_tokens(figures)
    else:  # the decode pool's prompt rows are replayed windows
        config = serving_deployment(plan).scheduler_config()
        computed = float(max(config.transfer_window, config.keep_tokens or 0))
    count = max(rows / computed, 1.0)
    settings = plan.serving.settings
    ended = rows / computed / count  # chunks that end their prompt
    kept = settings.keep_tokens * ended + 1.0 - ended if settings.replay == "compact" else rows / count
    return (Sequences(count, rows / count, max(computed - rows, 0.0) / 2, min(kept, rows / count), ended),)


def memory_lines(deployment: Deployment) -> list[tuple[str, str]]:
    """Memory of one GPU, itemised."""
    budget = deployment.budget
    lines = [(name, format_bytes(size)) for name, size in budget.items]
    lines.append(("KV blocks", f"{format_bytes(budget.kv_bytes)} in {budget.num_blocks:,} blocks"))
    lines.append(
        (
            "usable",
            f"{format_bytes(budget.usable_bytes)} of {format_bytes(deployment.cluster.accelerator.hbm_bytes.value)}",
        )
    )
    return lines
