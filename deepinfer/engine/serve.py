"""Serves a plan's workload on hardware: the same plan, requests and figures as `engine.simulate`, another clock."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from deepinfer.engine.arguments import deploy, engine_source
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import (
    GenerationRequest,
    GenerationRun,
    LoadFormat,
    Pacing,
    Progress,
    runner_backend,
)
from deepinfer.errors import UsageError
from deepinfer.hardware.spec import load_hardware
from deepinfer.layout.plan import Plan
from deepinfer.metrics.record import RunRecord
from deepinfer.metrics.summary import Summary, summarize
from deepinfer.model.hf import load_model
from deepinfer.model.spec import ModelSpec
from deepinfer.sampling.params import SamplingParams, derived_seed
from deepinfer.workload.generate import RequestSpec, generate_requests
from deepinfer.workload.spec import Arrivals, ClosedLoop, PoissonArrivals, open_loop_window
from deepinfer.workload.tokens import prompt_tokens


@dataclass(frozen=True)
class ServedPlan:
    """A plan as one of its engines ran it on the machine at hand, what was measured, and whether to print it here."""

    plan: Plan
    deployment: Deployment
    run: GenerationRun
    measured: Summary
    speaks: bool


def serve_plan(
    plan: Plan,
    backend: str = "auto",
    model: str | None = None,
    load_format: LoadFormat = "auto",
    num_requests: int | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> ServedPlan:
    """Serve a plan's requests with one of its engines, which gets its share of them.

    `model` replaces the plan's: its card by the folder of its weights. Prompts are drawn, and outputs have the
    workload's lengths whatever the model says. Measured is the plan's own window, or with `num_requests` the whole run
    of the first so many. Raises UsageError for a plan that one engine cannot serve, and InfeasibleError when nothing
    finishes in the window.
    """
    chosen = runner_backend(backend)
    single = one_engine(plan, model)
    spec = load_model(single.model)
    specs = generate_requests(single.workload)[:num_requests]
    longest = max(request.prompt_tokens + request.output_tokens for request in specs)
    if longest > spec.max_context:
        raise UsageError(f"a request of {longest} tokens exceeds the {spec.max_context} of {spec.name}")
    source = engine_source(single.model, load_format, "auto", single.workload.seed, longest)
    single = _with_kv(single, spec)
    # Accelerators that the plan pays for and leaves idle count in its figures per accelerator.
    deployment = replace(deploy(single, chosen, longest), num_gpus=plan.gpus / plan.serving.replicas)
    arrivals = single.workload.arrivals
    requests = generation_requests(specs, arrivals, spec.vocab_size, single.workload.seed)
    runner = chosen.load(deployment, source)
    try:
        run = runner.generate(requests, progress, pacing(arrivals, whole=num_requests is not None))
    finally:
        runner.close()
    if num_requests is None:
        run.record.window_start_s, run.record.window_end_s = measurement_window(arrivals, run.record)
    measured = summarize(run.record, plan.slo.ttft_s, plan.slo.tpot_s)
    return ServedPlan(single, deployment, run, measured, runner.speaks)


def one_engine(plan: Plan, model: str | None = None) -> Plan:
    """A plan's mixed pool as one engine, with its share of the users or of the arrivals, on its own accelerators.

    Raises UsageError for a plan with two pools, and for several engines that share the times of a trace.
    """
    if plan.prefill is not None:
        raise UsageError("the plan prefills in one pool and decodes in another; run serves plans of one mixed pool")
    pool, workload = plan.serving, plan.workload
    engines = pool.replicas
    arrivals: Arrivals
    match workload.arrivals:
        case ClosedLoop(concurrency=users):
            arrivals = workload.arrivals.model_copy(update={"concurrency": max(users // engines, 1)})
        case PoissonArrivals(rate=rate):
            arrivals = PoissonArrivals(rate=rate / engines)
        case trace_times:
            if engines > 1:
                raise UsageError(
                    f"the plan's {engines} engines share a trace's arrivals; run serves one engine: make a plan for one"
                )
            arrivals = trace_times
    count = workload.num_requests and max(workload.num_requests // engines, 1)
    update = {
        "model": model or plan.model,
        "gpus": pool.layout.resolve().num_ranks,
        "pools": (pool.model_copy(update={"replicas": 1, "gpus": None}),),
        "workload": workload.model_copy(update={"arrivals": arrivals, "num_requests": count}),
    }
    return plan.model_copy(update=update)


def generation_requests(
    specs: Sequence[RequestSpec], arrivals: Arrivals, vocab_size: int, seed: int
) -> list[GenerationRequest]:
    """The requests with tokens: sampled at temperature 1, of exactly the workload's lengths.

    Those that start a closed loop arrive evenly over its ramp.
    """
    requests = []
    for spec, tokens in zip(specs, prompt_tokens(specs, vocab_size, seed), strict=True):
        params = SamplingParams(max_tokens=spec.output_tokens, ignore_eos=True, seed=derived_seed(seed, spec.id))
        arrival_s = spec.arrival_s
        if isinstance(arrivals, ClosedLoop):
            arrival_s = arrivals.ramp_s * min(spec.id / arrivals.concurrency, 1.0)
        requests.append(GenerationRequest(tokens, params, arrival_s))
    return requests


def pacing(arrivals: Arrivals, whole: bool) -> Pacing:
    """How requests follow each other: a closed loop's number of users, and its end unless it is to be run `whole`."""
    if not isinstance(arrivals, ClosedLoop):
        return Pacing()
    return Pacing(arrivals.concurrency, None if whole else arrivals.measured_until_s)


def measurement_window(arrivals: Arrivals, record: RunRecord) -> tuple[float, float]:
    """From when to when a run of these arrivals is measured, seconds of its clock; as the `sim` backend does it.

    A closed loop after its warm-up, until its time is over or the last request has been sent; an open loop without its
    first fifth, until the last arrival.
    """
    sent = record.arrival_s[record.arrival_s >= 0]
    first_s, last_s = (float(sent.min()), float(sent.max())) if len(sent) else (0.0, 0.0)
    if not isinstance(arrivals, ClosedLoop):
        return open_loop_window(first_s, last_s, record.window_end_s)
    all_sent = len(sent) == len(record.arrival_s)
    ends = [last_s] if all_sent else []
    if arrivals.measured_until_s is not None:
        ends.append(arrivals.measured_until_s)
    return arrivals.measured_from_s, min(ends, default=record.window_end_s)


def differences(planned: Plan, served: ServedPlan, load_format: LoadFormat) -> list[str]:
    """In what, a sentence each, a run was not what the plan's prediction is of."""
    machine, kv = served.deployment.cluster.accelerator, served.deployment.model.kv.name
    said = []
    if machine.name != (planned.serving.hardware or planned.hardware):
        said.append(f"measured on {machine.name}, predicted for {planned.serving.hardware or planned.hardware}")
    if replace(load_model(planned.model), name="") != replace(load_model(served.plan.model), name=""):
        said.append(f"measured with the model {served.plan.model}, predicted for {planned.model}")
    planned_kv = load_hardware(planned.serving.hardware or planned.hardware).kv_format
    predicted_kv = planned.serving.settings.kv_format or planned_kv.get(served.deployment.model.family, kv)
    if predicted_kv != kv:
        said.append(f"measured with KV as {kv}, predicted for {predicted_kv}")
    if load_format == "dummy":
        said.append("measured with made-up weights, whose routing and acceptance are not the model's")
    if planned.serving.replicas > 1:
        said.append(f"measured on one of {planned.serving.replicas} engines, with its share of the load")
    return said


def _with_kv(plan: Plan, model: ModelSpec) -> Plan:
    """The plan with the KV format written out: kernels here read the model's own, which catalogs need not assume."""
    settings = plan.serving.settings
    if settings.kv_format is not None:
        return plan
    pool = plan.serving.model_copy(update={"settings": settings.model_copy(update={"kv_format": model.kv.name})})
    return plan.model_copy(update={"pools": (pool,)})
