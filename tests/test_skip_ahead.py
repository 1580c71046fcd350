"""Skipping ahead over equal decisions changes nothing but the time it takes: against stepping one by one."""

from __future__ import annotations

from typing import Any

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim import SimBackend
from deepinfer.cost.compose import finish_times, makespan, operator_seconds
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.record import RunRecord
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import Arrivals, ClosedLoop, LognormalLength, PoissonArrivals, Workload

ACCEPTANCE = Acceptance(rates=(0.8, 0.5), source="test")
MACHINES = {"deepseek-v4.1-flash": "b200", "deepseek-v3": "h200"}


def deployment_of(model: str, layout: LayoutSpec, replicas: int, workload: Workload, **changes: Any) -> Deployment:
    settings_ = EngineSettings(**({"max_num_seqs": 6, "max_tokens_per_step": 1024} | changes))
    pools = (Pool(replicas=replicas, layout=layout, settings=settings_),)
    plan = Plan(
        model=model, hardware=MACHINES[model], gpus=8 * replicas, pools=pools, workload=workload, acceptance=ACCEPTANCE
    )
    (deployment,) = resolve(plan)
    return deployment


def serve(deployment: Deployment, workload: Workload, every_step: bool) -> RunRecord:
    backend = SimBackend(check_integrity=not every_step, every_step=every_step)
    return backend.run((deployment,), workload, ACCEPTANCE, generate_requests(workload))


def assert_same(fast: RunRecord, slow: RunRecord) -> None:
    """Every time and count of the two records, to rounding."""
    for name in ("arrival_s", "first_token_s", "last_token_s", "finish_s", "output_tokens"):
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=1e-9, atol=1e-12, err_msg=name)
    for name in ("end_s", "seconds", "decodes", "decode_rows", "prefill_rows", "context_tokens", "kept_tokens"):
        # Engines that step independently enter a stretch at its end: compare without their order.
        a, b = (np.sort(np.asarray(getattr(record.steps, name))) for record in (fast, slow))
        np.testing.assert_allclose(a, b, rtol=1e-9, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(np.sort(fast.delivery_s), np.sort(slow.delivery_s), rtol=1e-9)
    assert sorted(fast.delivery_tokens) == sorted(slow.delivery_tokens)
    assert fast.num_preemptions == slow.num_preemptions
    assert fast.num_hit_tokens == slow.num_hit_tokens
    (gaps, counts, tokens), (gaps_2, counts_2, tokens_2) = fast.gaps(), slow.gaps()
    assert tokens == tokens_2
    np.testing.assert_allclose(np.sort(np.repeat(gaps, counts)), np.sort(np.repeat(gaps_2, counts_2)), rtol=1e-7)


@settings(max_examples=20)
@given(
    model=st.sampled_from(sorted(MACHINES)),
    layout=st.sampled_from([LayoutSpec(dp=8, ep=8), LayoutSpec(cp=8, ep=8), LayoutSpec(dp=2, cp=4, ep=8)]),
    replicas=st.integers(1, 2),
    nextn=st.integers(0, 3),
    asynchronous=st.booleans(),
    arrivals=st.sampled_from(
        [PoissonArrivals(rate=0.5), PoissonArrivals(rate=20), ClosedLoop(concurrency=10, ramp_s=2.0)]
    ),
    num_blocks=st.sampled_from([None, 12, 30]),
    seed=st.integers(0, 5),
)
def test_a_run_that_skips_ahead_is_the_run_step_by_step(
    model: str,
    layout: LayoutSpec,
    replicas: int,
    nextn: int,
    asynchronous: bool,
    arrivals: Arrivals,
    num_blocks: int | None,
    seed: int,
) -> None:
    from dataclasses import replace

    workload = Workload(
        isl=LognormalLength(mean=300, sigma=0.8, maximum=900),
        osl=LognormalLength(mean=60, sigma=0.8, maximum=250),
        arrivals=arrivals,
        num_requests=16,
        seed=seed,
    )
    deployment = deployment_of(model, layout, replicas, workload, nextn=nextn, async_scheduling=asynchronous)
    if num_blocks is not None:
        deployment = replace(deployment, budget=replace(deployment.budget, num_blocks=num_blocks))
    assert_same(serve(deployment, workload, every_step=False), serve(deployment, workload, every_step=True))


def test_skipping_ahead_skips() -> None:
    """One user of 2,000 tokens: some dozens of scheduling decisions instead of hundreds."""
    workload = Workload(
        isl=LognormalLength(mean=300, sigma=0.1),
        osl=LognormalLength(mean=2000, sigma=0.01),
        arrivals=PoissonArrivals(rate=1),
        num_requests=1,
    )
    deployment = deployment_of("deepseek-v4.1-flash", LayoutSpec(cp=8, ep=8), 1, workload)
    decided = {}
    for every_step in (True, False):
        backend = SimBackend(every_step=every_step)
        calls = count_decisions(backend, deployment, workload)
        decided[every_step] = calls
    assert decided[False] < decided[True] / 20


def count_decisions(backend: SimBackend, deployment: Deployment, workload: Workload) -> int:
    from deepinfer.scheduler.scheduler import Scheduler

    original, calls = Scheduler.schedule, 0

    def counted(self: Scheduler) -> Any:
        nonlocal calls
        calls += 1
        return original(self)

    Scheduler.schedule = counted  # type: ignore[method-assign]
    try:
        backend.run((deployment,), workload, ACCEPTANCE, generate_requests(workload))
    finally:
        Scheduler.schedule = original  # type: ignore[method-assign]
    return calls


counts = st.integers(0, 60).map(float)


@settings(max_examples=40)
@given(
    model=st.sampled_from(sorted(MACHINES)),
    shapes=st.lists(
        st.tuples(counts, st.integers(1, 20_000), counts, st.integers(1, 8000), st.integers(0, 9000)),
        min_size=2,
        max_size=5,
    ),
)
def test_runs_of_operators_have_the_makespan_of_the_operators(
    model: str, shapes: list[tuple[float, int, float, int, int]]
) -> None:
    """Operators that only follow one another are taken together."""
    workload = Workload(
        isl=LognormalLength(mean=300, sigma=0.1), osl=LognormalLength(mean=9, sigma=0.1),
        arrivals=PoissonArrivals(rate=1), num_requests=1,
    )  # fmt: skip
    deployment = deployment_of(model, LayoutSpec(dp=2, cp=4, ep=8), 1, workload, nextn=2)
    graph, costs = deployment.graph(), CostModel(deployment.cluster.accelerator)
    for decodes, context, prompts, rows, start in shapes:
        shape = StepShape(
            Sequences.decoding(decodes, 2.0, float(context)),
            (Sequences(prompts, float(rows), float(start), min(140.0, rows), 1.0),),
            mean_rows=decodes + prompts * rows / 2,
            mean_kept_rows=decodes + prompts,
        )
        seconds, _ = operator_seconds(graph, shape, costs)
        assert np.isclose(float(makespan(graph, seconds)), max(finish_times(graph, seconds)), rtol=1e-9)
