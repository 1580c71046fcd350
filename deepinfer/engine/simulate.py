"""Serves a plan's workload on the `sim` backend: for the planner's finalists and for `deepinfer simulate`."""

from __future__ import annotations

from deepinfer.engine.deployment import resolve
from deepinfer.layout.plan import Plan
from deepinfer.metrics.summary import Summary, summarize
from deepinfer.registry import load_backend
from deepinfer.workload.generate import generate_requests


def simulate_plan(plan: Plan) -> Summary:
    """Figures of a simulated run. The same plan gives the same figures, digit by digit.

    Raises UsageError for a plan that does not fit together and InfeasibleError for one that cannot run.
    """
    (deployment,) = resolve(plan)
    requests = generate_requests(plan.workload)
    record = load_backend("sim").run(plan, deployment, requests)
    return summarize(record, plan.slo.ttft_s, plan.slo.tpot_s)
