"""Why a point is not the answer: one plan asked about by its degrees, refused or screened beside the plan at hand."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, fields, replace

from deepinfer.errors import DeepinferError, UsageError
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import Plan
from deepinfer.layout.settings import EngineSettings
from deepinfer.layout.sharding import check_sharding
from deepinfer.units import format_seconds
from planner.describe import chunk_rows
from planner.problem import Problem, problem_of
from planner.space import EngineKind, Refusals, SearchSpace
from planner.steady import EnginePoints, SteadyState

_LAYOUT = ("ep", "cp", "tp", "etp", "dcp", "redundant_experts")


@dataclass(frozen=True)
class AskedPoint:
    """An engine by its degrees, and its settings: requests and prompt rows of a step per GPU, and drafts."""

    ep: int
    cp: int
    tp: int
    etp: int
    dcp: int
    redundant_experts: int
    requests: int
    chunk: int
    nextn: int

    @property
    def layout(self) -> ParallelLayout:
        """The layout of one engine. Raises UsageError for degrees that do not go together."""
        ranks = max(self.ep * self.etp, self.cp * self.tp)
        degrees = {name: getattr(self, name) for name in _LAYOUT}
        return ParallelLayout(dp=max(ranks // (self.cp * self.tp), 1), **degrees)


def parse_point(text: str, plan: Plan) -> AskedPoint:
    """A point like `ep=16 cp=1 requests=128 chunk=2048 nextn=3`; what it does not name is as in the plan.

    Raises UsageError for words that are not of that form.
    """
    pool = plan.serving
    layout = pool.layout.resolve()
    values = {name: getattr(layout, name) for name in _LAYOUT} | {
        "requests": max(pool.settings.max_num_seqs // layout.replica_ranks, 1),
        "chunk": max(chunk_rows(pool) // layout.replica_ranks, 1),
        "nextn": pool.settings.nextn,
    }
    for word in text.replace(",", " ").split():
        found = re.fullmatch(r"([a-z_]+?)=?(\d+)", word)
        if found is None or found.group(1) not in values:
            names = ", ".join(f.name for f in fields(AskedPoint))
            raise UsageError(f"--why cannot read {word!r}: give words like ep=16 requests=128, of {names}")
        name, value = found.group(1), int(found.group(2))
        if value < 1 and name not in ("nextn", "redundant_experts"):
            raise UsageError(f"--why: {name} must be at least 1, got {value}")
        values[name] = value
    return AskedPoint(**values)


def why_lines(plan: Plan, text: str) -> list[str]:
    """What speaks against a point: what refuses it, or its screened figures beside the plan's, and the limits."""
    problem, asked = problem_of(plan), parse_point(text, plan)
    try:
        kind, engines = _evaluate(problem, asked, plan)
    except DeepinferError as error:
        return [f"refused: {error}"]
    note = [] if plan.prefill is None else ["as one mixed pool on all accelerators, beside the plan's two pools:"]
    return [*note, *_figures(problem, kind, engines), *_beside(problem, plan, kind, engines)]


def _evaluate(problem: Problem, asked: AskedPoint, plan: Plan) -> tuple[EngineKind, EnginePoints]:
    """The point in steady state, in the plan's variants of a mixed pool. Raises a DeepinferError if it cannot run."""
    layout, model, gpus = asked.layout, problem.model, problem.cluster.num_gpus
    if layout.num_ranks > gpus:
        raise UsageError(f"{layout} has {layout.num_ranks} ranks, the cluster {gpus} accelerators")
    check_sharding(model, layout)
    most = model.draft.max_drafts if model.draft else 0
    if asked.nextn > most:
        raise UsageError(f"the draft module of {model.name} gives at most {most} drafts, not {asked.nextn}")
    seqs, chunk = asked.requests * layout.replica_ranks, asked.chunk * layout.replica_ranks
    _check_memory(problem, layout, seqs, chunk, asked.nextn)
    space = SearchSpace(model, problem.cluster, problem.replay, (asked.requests,), (asked.chunk,))
    kind = EngineKind("mixed", layout, problem.replay, moe="fused" if space.can_fuse(layout) else "separate")
    chosen = plan.serving.settings
    if plan.prefill is None and layout == plan.serving.layout.resolve():
        kind = replace(kind, overlap=chosen.overlap, moe=chosen.moe, kv_format=chosen.kv_format)
    steady = SteadyState(space, problem.load, problem.acceptance, problem.host, problem.expert_load)
    engines = steady.mixed(kind, 0, [asked.nextn], Refusals())
    assert engines is not None, "the memory has been checked"
    return kind, engines


def _check_memory(problem: Problem, layout: ParallelLayout, seqs: int, chunk: int, nextn: int) -> None:
    """Raises InfeasibleError for what does not fit, UsageError for too little KV for so many requests."""
    settings = EngineSettings(max_num_seqs=seqs, max_tokens_per_step=seqs * (1 + nextn) + chunk, nextn=nextn)
    budget = memory_budget(problem.model, layout, problem.cluster.accelerator, settings)
    tokens = problem.load.isl + problem.load.osl + nextn + 1
    fitting = budget.max_requests(tokens, settings.block_tokens)
    if fitting < seqs:
        raise UsageError(
            f"the KV of {seqs} requests of {tokens:,.0f} tokens does not fit beside the weights: {fitting} do "
            "on an attention replica"
        )


def _figures(problem: Problem, kind: EngineKind, engines: EnginePoints) -> Iterator[str]:
    tpot, ttft = float(engines.tpot_s[0]), float(engines.ttft_s[0])
    yield (
        f"{kind}: screened TPOT {format_seconds(tpot)}, TTFT {format_seconds(ttft)}, "
        f"{_output(problem, kind, engines):,.0f} output tokens/s per GPU"
    )
    slo = problem.slo
    for name, value, limit in (("TPOT", tpot, slo.tpot_s), ("TTFT", ttft, slo.ttft_s)):
        if value > limit:
            yield f"breaks the limit on {name}: its mean is {value / limit:.2f} times {format_seconds(limit)}"


def _beside(problem: Problem, plan: Plan, kind: EngineKind, engines: EnginePoints) -> Iterator[str]:
    if plan.prediction is None:
        return
    ours, theirs = plan.prediction.output_tokens_per_s_per_gpu, _output(problem, kind, engines)
    more = "more" if theirs > ours else "less"
    note = "; screened means are a few percent above what a simulation shows" if theirs > ours else ""
    yield f"{abs(theirs / ours - 1):.1%} {more} than the plan's simulated {ours:,.0f} output tokens/s per GPU{note}"


def _output(problem: Problem, kind: EngineKind, engines: EnginePoints) -> float:
    replicas = problem.cluster.num_gpus // kind.layout.num_ranks
    rate = float(engines.capacity_rps[0]) * replicas
    if problem.load.rate is not None:
        rate = min(rate, problem.load.rate)
    return rate * problem.load.osl / problem.num_gpus
