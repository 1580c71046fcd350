"""Serves a plan's workload on the `sim` backend: for the planner's finalists and for `deepinfer simulate`."""

from __future__ import annotations

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
    (deployment,) = resolve(plan)
    workload, deployment = share_of_one_replica(plan.workload, deployment)
    record = load_backend("sim").run(deployment, workload, plan.acceptance, generate_requests(workload))
    return summarize(record, plan.slo.ttft_s, plan.slo.tpot_s)


def share_of_one_replica(workload: Workload, deployment: Deployment) -> tuple[Workload, Deployment]:
    """One replica with its part of the users or requests, where that stands for all.

    In a closed loop replicas do not affect each other. Poisson arrivals are shared out only when there are more than
    `MAX_ROUTED_REQUESTS`: at random, which is Poisson again and a little harder on a replica than the router.
    Traces, and users that do not divide evenly, are left as they are.
    """
    arrivals, replicas, count = workload.arrivals, deployment.replicas, workload.num_requests
    share: Arrivals
    match arrivals:
        case ClosedLoop(concurrency=users) if users % replicas == 0:
            share = arrivals.model_copy(update={"concurrency": users // replicas})
        case PoissonArrivals(rate=rate) if count is not None and count > MAX_ROUTED_REQUESTS:
            share = PoissonArrivals(rate=rate / replicas)
        case _:
            return workload, deployment
    part = None if count is None else max(count // replicas, 1)
    return workload.model_copy(update={"arrivals": share, "num_requests": part}), replace(deployment, replicas=1)
