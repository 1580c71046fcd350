"""Predictions of entries: steps (or operators) of the planner's own graph, through the planner's own cost formula."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal, cast

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostProfile
from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.build.common import Phase
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.ops import OpKind
from deepinfer.graph.shape import Sequences, StepShape
from planner.validate.kernels import kernel_step
from planner.validate.mapping import Case, map_case
from planner.validate.targets import Target

UNSTATED_CHUNKS = (4096.0, 32768.0)
"""Tokens per GPU and forward where an entry states none: DeepEP's test size, and the most that an entry states."""


@dataclass(frozen=True)
class TimedStep:
    """One kind of step behind a prediction: its graph and shape, device seconds, and seconds of host and idling."""

    title: str
    graph: ExecutionGraph
    shape: StepShape
    device_s: float
    host_s: float

    @property
    def seconds(self) -> float:
        """From the start of this step to the start of the next one."""
        return self.device_s + self.host_s


Overlap = Literal["none", "two-batch"]
WeightedSteps = tuple[tuple[float, TimedStep], ...]
"""Kinds of steps, each with how many of it an entry's mean step takes."""


@dataclass(frozen=True)
class Prediction:
    """A predicted `value` in the entry's metric, with `low` and `high` where a condition is a range, and its steps.

    `steps` are (weight, step): the time of the entry's mean step is the weighted sum.
    """

    value: float
    low: float
    high: float
    steps: WeightedSteps


def predict(target: Target, profile: CostProfile | None = None) -> Prediction:
    """The prediction of one entry, with another cost profile than its hardware's if one is given.

    Raises a `DeepinferError` with the reason where there is none.
    """
    if target.metric == "ratio":
        return _ratio(target, profile)
    return _KINDS[target.kind](map_case(target, profile))


def _ratio(target: Target, profile: CostProfile | None) -> Prediction:
    """Throughput with the entry's overlap over the throughput without."""
    if target.kind == "kernel":
        raise UsageError("a ratio of kernels is not defined by the schema")
    rate = target.model_copy(update={"metric": "tokens_per_s_per_gpu"})
    plain = rate.model_copy(update={"layout": target.layout.model_copy(update={"overlap": "none"})})
    with_overlap, without = predict(rate, profile), predict(plain, profile)
    value = with_overlap.value / without.value
    return Prediction(value, value, value, with_overlap.steps)


def _kernel(case: Case) -> Prediction:
    if not case.target.metric.endswith("_s") or case.target.metric.endswith("per_s"):
        raise UsageError(f"metric {case.target.metric!r} of a kernel is not modelled")
    graph, shape = kernel_step(case)
    seconds = float(step_cost(graph, shape, case.costs).seconds)
    step = TimedStep(graph.name, graph, shape, seconds, 0.0)
    return Prediction(seconds, seconds, seconds, ((1.0, step),))


def _decode(case: Case) -> Prediction:
    """Seconds of a step over the tokens kept of it; an aggregated server's steps also carry its prompts."""
    target = case.target
    requests, nextn, tau = _decoding(case), _nextn(case), _tau(case)
    decode = Sequences.decoding(max(requests, 1.0), float(nextn), decode_context(target))
    mean_rows = requests * (1.0 + nextn)
    quiet = _timed(case, "decode step", "decode", nextn, StepShape(decode, mean_rows=mean_rows))
    steps: WeightedSteps = ((1.0, quiet),)
    if target.aggregated and target.isl is not None and target.osl is not None:
        steps = _with_prefill(case, quiet, decode, mean_rows)
    step_s = sum(weight * step.seconds for weight, step in steps)
    per_gpu = requests * case.replicas * case.stages / target.gpus
    return _in_metric(target.metric, step_s / tau, per_gpu * tau / step_s, steps)


def _with_prefill(case: Case, quiet: TimedStep, decode: Sequences, mean_rows: float) -> WeightedSteps:
    """Steps of an aggregated server in a steady state, weighted per step in which a request decodes.

    Every kept token needs isl / osl prompt rows (flow balance), which come in batches of whole prompts, or of a chunk.
    A replica computes prompts in a share of its steps; with m of them in a group a step is slowed when any does, as in
    the planner's screening. Where prompts have steps of their own a replica does not decode in them, others do.
    """
    target, nextn, separate = case.target, _nextn(case), case.engine.prefill == "separate"
    prompt = _mean_prompt(target)
    rows = mean_rows / (1.0 + nextn) * _tau(case) * (target.isl or 0.0) / (target.osl or 1.0)
    batch = min(max(prompt, rows), case.chunk_rows)
    per_decode = rows / batch
    share = per_decode / (1.0 + per_decode) if separate else min(per_decode, 1.0)
    aligned = case.engine.stated_chunk_aligned and target.stated_chunk is not None
    any_share = share if aligned else 1.0 - (1.0 - share) ** case.replicas
    mean_rows = ((1.0 - share / any_share) if separate else 1.0) * mean_rows + share * batch / any_share
    prompts = StepShape(None if separate else decode, prompt_chunks(batch, prompt), mean_rows=mean_rows)
    busy = _timed(case, "step with prompts", "prefill" if separate else "mixed", nextn, prompts)
    if separate and case.replicas > 1:
        # Replicas meet in every expert layer: those that decode beside the prompts may be the last to finish.
        beside = _timed(case, "step beside prompts", "decode", nextn, StepShape(decode, mean_rows=mean_rows))
        busy = max(busy, beside, key=lambda step: step.seconds)
    scale = 1.0 / (1.0 - share) if separate else 1.0
    return ((1.0 - any_share) * scale, quiet), (any_share * scale, busy)


def _step(case: Case) -> Prediction:
    """One forward over `verify_tokens` tokens: decoding requests with their drafts, no draft pass."""
    target = case.target
    if target.verify_tokens is None:
        raise UsageError("verify_tokens is not stated")
    tokens = target.verify_tokens / case.replicas
    requests = min(_requests(case), tokens) if target.requests_per_gpu else tokens
    per_request = max(tokens / requests, 1.0)
    decode = Sequences.decoding(requests, per_request - 1.0, decode_context(target))
    shape = StepShape(decode, mean_rows=tokens)
    step = _timed(case, "verify step", "decode", 0, shape)
    rate = target.verify_tokens / step.seconds / target.gpus
    return _in_metric(target.metric, step.seconds, rate, ((1.0, step),))


def _prefill(case: Case) -> Prediction:
    """A forward of so many prompt tokens; over a range of sizes where the entry states none."""
    stated = case.target.prefill_tokens_per_gpu
    if stated is not None:
        return _prefill_of(case, stated)
    low, high = (_prefill_of(case, tokens) for tokens in UNSTATED_CHUNKS)
    middle = _prefill_of(case, math.sqrt(UNSTATED_CHUNKS[0] * UNSTATED_CHUNKS[1]))
    values = (low.value, middle.value, high.value)
    return replace(middle, low=min(values), high=max(values))


def _prefill_of(case: Case, tokens_per_gpu: float) -> Prediction:
    target = case.target
    prompt = target.context_tokens or target.isl
    if not prompt:
        raise UsageError("the prompt's length is not stated")
    rows = tokens_per_gpu * target.gpus / case.replicas
    step = _timed(case, "prefill step", "prefill", 0, StepShape(None, prompt_chunks(rows, prompt)))
    rate = tokens_per_gpu / (step.seconds / case.stages)
    if target.metric != "ttft_s":
        return _in_metric(target.metric, step.seconds, rate, ((1.0, step),))
    seconds = step.seconds * math.ceil(prompt / rows)
    return Prediction(seconds, seconds, seconds, ((1.0, step),))


def prompt_chunks(rows: float, prompt: float) -> tuple[Sequences, ...]:
    """`rows` prompt rows of one replica: whole prompts, or one chunk at the mean position within a longer prompt."""
    if rows >= prompt:
        return (Sequences(rows / prompt, prompt, 0.0, prompt, 1.0),)
    return (Sequences(1.0, rows, (prompt - rows) / 2.0, rows, rows / prompt),)


def decode_context(target: Target) -> float:
    """Mean KV length in decode: as stated, else prompt and half of the output; an unstated prompt counts as none."""
    if target.context_tokens is not None:
        return target.context_tokens
    if target.isl is None and target.osl is None:
        raise UsageError("neither the context nor the lengths of the workload are stated")
    return (target.isl or 0.0) + (target.osl or 0.0) / 2.0


def _mean_prompt(target: Target) -> float:
    """Mean prompt length: lengths drawn below the nominal ones shrink the mean context by the same factor."""
    nominal = (target.isl or 0.0) + (target.osl or 0.0) / 2.0
    factor = min((target.context_tokens or nominal) / nominal, 1.0)
    return (target.isl or 0.0) * factor


def _requests(case: Case) -> float:
    """Requests of one attention replica of one pipeline stage, on average."""
    if case.target.requests_per_gpu is None:
        raise UsageError("requests_per_gpu is not stated")
    return case.target.requests_per_gpu * case.target.gpus / case.stages / case.replicas


def _decoding(case: Case) -> float:
    """Requests that a replica decodes: no more than its prompt rows per step can supply when the two share steps."""
    requests, target = _requests(case), case.target
    if not target.aggregated or case.engine.prefill == "separate" or not target.isl or not target.osl:
        return requests
    rows = case.chunk_rows
    return min(requests, rows / (_tau(case) * target.isl / target.osl))


def _nextn(case: Case) -> int:
    return case.target.spec.nextn if case.target.spec else 0


def _tau(case: Case) -> float:
    return case.target.spec.accepted_len if case.target.spec else 1.0


def _timed(case: Case, title: str, phase: Phase, nextn: int, shape: StepShape) -> TimedStep:
    """A step with its host time, what exceeds the device's or the gap to the next step, and what ranks wait for others.

    Single forwards have no host time.
    """
    graph = build_graph(case.model, case.layout, case.cluster, _features(case, phase, nextn))
    device_s = float(step_cost(graph, shape, case.costs).seconds)
    exchanges = sum(graph.operators[step.operator].kind is OpKind.DISPATCH for step in graph.steps)
    waiting_s = exchanges * case.engine.exchange_wait_s
    if case.host is None or case.target.kind == "step":
        return TimedStep(title, graph, shape, device_s, waiting_s)
    count, captured = math.ceil(shape.decode.count) if shape.decode else 0, not shape.prefill
    busy_s = case.host.submit_seconds(count, len(graph.steps), captured) + case.host.deliver_seconds(count)
    if not captured:
        busy_s = max(busy_s, case.engine.eager_seconds(case.model))
    host_s = max(case.host.step_gap_s.value, busy_s - device_s - waiting_s)
    return TimedStep(title, graph, shape, device_s, host_s + waiting_s)


def _features(case: Case, phase: Phase, nextn: int) -> GraphFeatures:
    overlap = case.target.layout.overlap
    if overlap not in ("none", "two-batch"):
        raise UsageError(f"overlap {overlap!r} is not modelled")
    moe: Literal["separate", "fused"] = "fused" if case.target.fused_experts else "separate"
    return GraphFeatures(phase, nextn=nextn, overlap=cast("Overlap", overlap), moe=moe, expert_load=case.expert_load)


def _in_metric(metric: str, seconds: float, tokens_per_s_per_gpu: float, steps: WeightedSteps) -> Prediction:
    if metric == "tokens_per_s_per_gpu":
        value = tokens_per_s_per_gpu
    elif metric.endswith("_s") and not metric.endswith("per_s"):
        value = seconds
    else:
        raise UsageError(f"metric {metric!r} is not modelled")
    return Prediction(value, value, value, steps)


_KINDS: dict[str, Callable[[Case], Prediction]] = {
    "kernel": _kernel,
    "decode": _decode,
    "step": _step,
    "prefill": _prefill,
}
