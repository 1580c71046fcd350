"""Serves a plan's workload on the `sim` backend: for the planner's finalists and for `deepinfer simulate`."""

from __future__ import annotations

from dataclasses import replace

from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.layout.plan import Plan
from deepinfer.metrics.summary import Summary, summarize
from deepinfer.registry import load_backend
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import ClosedLoop, Workload


def simulate_plan(plan: Plan) -> Summary:
    """Figures of a simulated run. The same plan gives the same figures, digit by digit.

    Raises UsageError for a plan that does not fit together and InfeasibleError for one that cannot run.
    """
    (deployment,) = resolve(plan)
    workload, deployment = share_of_one_replica(plan.workload, deployment)
    record = load_backend("sim").run(deployment, workload, plan.acceptance, generate_requests(workload))
    return summarize(record, plan.slo.ttft_s, plan.slo.tpot_s)


def share_of_one_replica(workload: Workload, deployment: Deployment) -> tuple[Workload, Deployment]:
    """One replica with its part of a closed loop's users and requests: there replicas do not affect each other.

    Open loops, and users that do not divide evenly, are left as they are.
    """
    arrivals, replicas = workload.arrivals, deployment.replicas
    if not isinstance(arrivals, ClosedLoop) or arrivals.concurrency % replicas or workload.num_requests is None:
        return workload, deployment
    users = arrivals.model_copy(update={"concurrency": arrivals.concurrency // replicas})
    share = workload.model_copy(update={"arrivals": users, "num_requests": max(workload.num_requests // replicas, 1)})
    return share, replace(deployment, replicas=1)
