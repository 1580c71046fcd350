"""Reasons in words: what a plan's step is made of, what binds it, how far rivals are, what the figures rest on."""

from __future__ import annotations

from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment
from deepinfer.graph.build.common import PREFILL_GATHER_REUSE
from deepinfer.layout.placement import ExpertLoad
from deepinfer.units import format_seconds
from planner.describe import describe_pools, step_breakdown, unused_gpus
from planner.encode import encode_assumptions
from planner.explain import Explanation
from planner.pipeline import SearchResult
from planner.refine import Finalist
from planner.uncertainty import ACCEPTANCE_LINE, bands_line, compare, compared_words


def why_lines(result: SearchResult, explanation: Explanation) -> list[str]:
    """What binds the chosen plan, its step, what is left unused, and how far the next finalists are."""
    lines = [binding_line(explanation), _step_line(result)]
    if unused_gpus(result.plan):
        lines.append(f"{unused_gpus(result.plan)} of the {result.plan.gpus} accelerators are not used, and counted.")
    if result.problem.load.rate is not None and result.problem.objective != "gpus":
        lines.append(_rate_line(result))
    others = [f for f in result.finalists[1:] if result.feasible(f)]
    rivals = {f.point: f for f in (others[:1] + [f for f in others if _layout(f) != _layout(result.winner)][:1])}
    for label, rival in zip(("The runner-up", "The best other layout"), rivals.values(), strict=False):
        distance = f"{_compared(result.worth(rival))}, {_significance(result, rival)}"
        lines.append(f"{label} ({describe_pools(rival.plan)}) gives {distance}.")
    if explanation.differences:
        lines.append(f"Chosen and runner-up differ in {'; '.join(explanation.differences)}.")
    return lines


def binding_line(explanation: Explanation) -> str:
    """What holds a plan back most, and what comes next."""
    gains = [w for w in explanation.what_ifs if w.group != "assumption" and w.ratio > 1.0]
    binding = explanation.binding
    if binding is None:
        return "No single resource or limit holds it back by more than half a percent."
    rest = sorted((w for w in gains if w is not binding), key=lambda w: -w.ratio)[:2]
    then = "; then " + ", ".join(f"{w.name} ({w.ratio - 1:+.1%})" for w in rest) if rest else ""
    return f"What binds: with {binding.name} it would give {binding.ratio - 1:+.1%}{then}."


def _step_line(result: SearchResult) -> str:
    items, title = step_breakdown(result.plan)
    total = sum(i.seconds for i in items)
    top = ", ".join(f"{i.operator} {i.seconds / total:.0%}" for i in items[:5])
    exposed = sum(i.seconds for i in items if i.stream == "comm") / total
    step = f"Its {title} takes {format_seconds(total)} on the device: {top}"
    return f"{step}; communication that nothing hides is {exposed:.0%}."


def _significance(result: SearchResult, rival: Finalist) -> str:
    return compared_words(compare(rival.plan, result.plan, result.worth(rival)))


def _layout(finalist: Finalist) -> object:
    return [pool.layout for pool in finalist.plan.pools]


def _rate_line(result: SearchResult) -> str:
    """How much of the plan a given rate uses."""
    rate, capacity = result.problem.load.rate or 0.0, result.capacity_rps(result.winner)
    worth = rate / capacity * result.problem.num_gpus
    return (
        f"It could serve about {capacity:.3g} requests/s within the limits (screened means): {rate:g} requests/s use "
        f"{rate / capacity:.1%} of it, the work of {worth:.1f} of its GPUs. Plans are ranked by that capacity."
    )


def _compared(ratio: float) -> str:
    """An output or a capacity beside the best one's, in words."""
    if abs(ratio - 1.0) < 0.005:
        return "the same within 0.5%"
    return f"{abs(1.0 - ratio):.1%} {'less' if ratio < 1 else 'more'}"


def _load_words(load: ExpertLoad) -> str:
    if load.balanced:
        return "even, as in benchmarks"
    placed = f"placed by EPLB, {load.drift:g} of drift since" if load.eplb else "placed at random"
    return f"lognormal popularity with sigma {load.sigma:g} (0.43: MLA models on real text, DODOCO), {placed}"


def _pool_lines(result: SearchResult) -> list[str]:
    """What two pools rest on."""
    if result.plan.prefill is None:
        return []
    return [
        "A decode pool admits a request before it reads its KV; the KV of a prompt moves when the whole prompt is "
        "computed, on links that collectives do not share.",
        "A prefill pool does not pay for a draft module's own pass over the prompt.",
        "Over scale-up links a transfer has bandwidth only: no start-up of it is published.",
    ]


def assumption_lines(result: SearchResult, deployment: Deployment) -> list[str]:
    """What the figures rest on, each with its source."""
    problem, settings = result.problem, deployment.settings
    tau = problem.acceptance.tau(settings.nextn)
    costs = CostModel(deployment.cluster.accelerator)
    graph = deployment.graph()
    kinds = sorted({operator.kind for operator in graph.operators})
    sources: dict[str, list[str]] = {}
    for name, parameters in costs.profile.operators.items():
        if name.split(".")[0] in kinds:
            sources.setdefault(parameters.kind, []).append(name)
    profile = "; ".join(f"{kind}: {', '.join(sorted(names))}" for kind, names in sorted(sources.items()))
    return [
        f"Acceptance ({problem.acceptance.convention}): {tau:.3f} tokens kept per step at nextn {settings.nextn}; "
        f"{problem.acceptance.source}.",
        f"Operator costs: profile `{costs.profile.family}` ({profile}); the file gives each entry's rows and error.",
        f"Expert load: {_load_words(problem.expert_load)}.",
        "Replicas of a step group prefill when they have a prompt, without waiting for each other.",
        *_pool_lines(result),
        *encode_assumptions(result.plan),
        f"Neighbouring prompt rows share gathered KV entries {PREFILL_GATHER_REUSE:g} times: an assumption that binds "
        "nothing while prefill attention is compute-bound.",
        f"KV format {deployment.model.kv.name}: {deployment.model.kv_bytes_per_token:g} B per token of global KV.",
        f"Host time: profile `{deployment.host.name}`; steps with a prompt launch every kernel, decode steps replay a "
        f"graph padded to {settings.graph_rows} rows.",
        f"Uncertainty: {bands_line(result.plan)}. {ACCEPTANCE_LINE}",
        "No weights of this model have been run by this project: figures are simulated, not measured.",
    ]
