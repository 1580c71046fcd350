"""Serves a plan's workload on the `sim` backend: for the planner's finalists and for `deepinfer simulate`."""

from __future__ import annotations

import math
from dataclasses import replace

from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.layout.plan import Plan
from deepinfer.metrics.summary import Summary, summarize
from deepinfer.registry import load_backend
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import Arrivals, ClosedLoop, PoissonArrivals, Workload

MAX_ROUTED_REQUESTS = 4000


def simulate_plan(plan: Plan) -> Summary:
    """Figures of a simulated run. The same plan gives the same figures, digit by digit.

    Raises UsageError for a plan that does not fit together and InfeasibleError for one that cannot run.
    """
    deployments = resolve(plan)
    workload, deployments = smallest_part(plan.workload, deployments)
    record = load_backend("sim").run(deployments, workload, plan.acceptance, generate_requests(workload))
    return summarize(record, plan.slo.ttft_s, plan.slo.tpot_s)


def smallest_part(workload: Workload, deployments: tuple[Deployment, ...]) -> tuple[Workload, tuple[Deployment, ...]]:
    """The smallest part of a cluster with its part of the users or requests, where that stands for all.

    Pools of 12 and 8 replicas are 4 times 3 and 2. In a closed loop such parts do not affect each other. Poisson
    arrivals are shared out only when there are more than `MAX_ROUTED_REQUESTS`: at random, which is Poisson again and a
    little harder on a part than the router. Traces, and users that do not divide evenly, are left as they are.
    """
    arrivals, count = workload.arrivals, workload.num_requests
    parts = math.gcd(*(d.replicas for d in deployments))
    share: Arrivals
    match arrivals:
        case ClosedLoop(concurrency=users) if users % parts == 0:
            share = arrivals.model_copy(update={"concurrency": users // parts})
        case PoissonArrivals(rate=rate) if count is not None and count > MAX_ROUTED_REQUESTS:
            share = PoissonArrivals(rate=rate / parts)
        case _:
            return workload, deployments
    part = None if count is None else max(count // parts, 1)
    smaller = tuple(replace(d, replicas=d.replicas // parts, num_gpus=d.num_gpus / parts) for d in deployments)
    return workload.model_copy(update={"arrivals": share, "num_requests": part}), smaller
