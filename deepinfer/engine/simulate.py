"""Serves a plan's workload on the `sim` backend: for the planner's finalists and for `deepinfer simulate`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from deepinfer.engine.deployment import Deployment, Sample, by_role, resolve
from deepinfer.layout.plan import Plan
from deepinfer.metrics.summary import Summary, summarize
from deepinfer.registry import load_backend
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import Arrivals, ClosedLoop, PoissonArrivals, SteadyStart, Workload

STEADY_STARTS, STEADY_TOLERANCE = 3, 0.02
"""Starts amid requests that are tried, each with the mean TTFT that the last one showed, until that differs from what
the start supposed by no more than such a share of the window. Then the loop is ramped up."""
MOST_WAITING = 0.08
"""Share of a life before its first token up to which a loop begins amid requests. More is a queue for prefill, which a
start does not build up: at 0.44 a first lifetime had 20% too much output."""
MAX_ROUTED_REQUESTS = 4000
SAMPLED_GROUPS = 16
"""Step groups of a decode pool that are enough, however few requests they have."""
SAMPLED_REQUESTS = 1024
"""Requests that the simulated attention replicas of a decode pool, or of an engine of a mixed one, can run at once, at
least, if it has so many."""


def simulate_plan(plan: Plan) -> Summary:
    """Figures of a simulated run. The same plan gives the same figures, digit by digit.

    Raises UsageError for a plan that does not fit together and InfeasibleError for one that cannot run.
    """
    workload, deployments = smallest_part(plan.workload, resolve(plan))
    requests = generate_requests(workload)

    def run(arrivals: Arrivals) -> Summary:
        served = workload.model_copy(update={"arrivals": arrivals})
        record = load_backend("sim").run(deployments, served, plan.acceptance, requests)
        return summarize(record, plan.slo.ttft_s, plan.slo.tpot_s)

    arrivals = workload.arrivals
    if isinstance(arrivals, ClosedLoop) and arrivals.steady is not None:
        return _begun_steadily(arrivals, arrivals.steady, run)
    return run(arrivals)


def _begun_steadily(arrivals: ClosedLoop, steady: SteadyStart, run: Callable[[Arrivals], Summary]) -> Summary:
    """Figures of a closed loop that begins amid its requests, once the TTFT that it begins with is the one it shows.

    Of a loop that is ramped up where that does not come about, or where requests queue for long.
    """
    for _ in range(STEADY_STARTS):
        if steady.ttft_s > MOST_WAITING * steady.lifetime_s:
            break
        summary = run(arrivals.model_copy(update={"steady": steady}))
        shown_s = summary.ttft_s.mean
        missed_s = shown_s - steady.ttft_s
        if abs(missed_s) <= STEADY_TOLERANCE * steady.measure_s:
            return summary
        steady = steady.model_copy(update={"ttft_s": shown_s, "lifetime_s": steady.lifetime_s + missed_s})
    return run(arrivals.model_copy(update={"steady": None}))


def smallest_part(workload: Workload, deployments: tuple[Deployment, ...]) -> tuple[Workload, tuple[Deployment, ...]]:
    """The smallest part of a cluster with its part of the users or requests, where that stands for all.

    Of a mixed pool that is one engine: in a closed loop engines do not affect each other. Of a large engine it is some
    of the attention replicas, as long as `SAMPLED_REQUESTS` requests run at once. Of two pools it is the same
    share of each: whole step groups that prefill, because the more replicas step together the rarer they all idle, and
    if need be some attention replicas of one that decodes, as long as `SAMPLED_REQUESTS` decode. Poisson arrivals are
    shared out only when there are more than `MAX_ROUTED_REQUESTS`: at random, which is Poisson again and a little
    harder on a part than the router. Traces, and users that do not divide evenly, are left as they are.
    """
    arrivals, count = workload.arrivals, workload.num_requests
    parts = _num_parts(deployments, isinstance(arrivals, ClosedLoop))
    share: Arrivals
    match arrivals:
        case ClosedLoop(concurrency=users) if users % parts == 0:
            share = arrivals.model_copy(update={"concurrency": users // parts})
        case PoissonArrivals(rate=rate) if count is not None and count > MAX_ROUTED_REQUESTS:
            share = PoissonArrivals(rate=rate / parts)
        case _:
            return workload, deployments
    part = None if count is None else max(count // parts, 1)
    smaller = tuple(_part(deployment, parts) for deployment in deployments)
    return workload.model_copy(update={"arrivals": share, "num_requests": part}), smaller


def parts_of(plan: Plan) -> int:
    """Into how many alike parts a plan's pools are divided in a closed loop, of which one is simulated."""
    return _num_parts(resolve(plan), closed=True)


def _num_parts(deployments: tuple[Deployment, ...], closed: bool) -> int:
    prefill, decode = by_role(deployments)
    if prefill is None:
        return decode.replicas * (_num_shares(decode) if closed else 1)
    common = math.gcd(prefill.step_groups, decode.attention_replicas)
    requests = decode.attention_replicas * decode.settings.max_num_seqs
    enough = max(requests // SAMPLED_REQUESTS, decode.step_groups // SAMPLED_GROUPS, 1)
    return max(k for k in range(1, common + 1) if common % k == 0 and k <= enough)


def _num_shares(engines: Deployment) -> int:
    """Into how many alike shares the attention replicas of an engine are divided, where they all step together."""
    replicas = engines.replicas_per_group
    if engines.step_groups > engines.replicas:
        return 1
    requests = replicas * engines.settings.max_num_seqs
    return max(k for k in range(1, replicas + 1) if replicas % k == 0 and (k == 1 or requests // k >= SAMPLED_REQUESTS))


def _part(deployment: Deployment, parts: int) -> Deployment:
    """One of so many alike parts of a pool: many replicas of few step groups, because those of one wait for each other.

    Whole step groups where they divide evenly, as they do where a pool prefills.
    """
    num_gpus, replicas = deployment.num_gpus / parts, deployment.attention_replicas // parts
    per_group = deployment.replicas_per_group
    groups = next(g for g in range(1, replicas + 1) if replicas % g == 0 and replicas // g <= per_group)
    if deployment.replicas % parts == 0 and replicas // groups == per_group:
        return replace(deployment, replicas=deployment.replicas // parts, num_gpus=num_gpus)
    return replace(deployment, sample=Sample(groups, replicas // groups), num_gpus=num_gpus)
