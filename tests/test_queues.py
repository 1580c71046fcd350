"""Two pools against queueing theory: a recursion that is exact, closed forms, Little's law, and overload."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from backends.sim import SimBackend
from backends.sim.steptime import StepTimer
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.engine.simulate import simulate_plan
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.record import RunRecord
from deepinfer.numeric import Floats
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.scheduler.step import DecodeBatch, PrefillChunk, StepPlan
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import (
    Arrivals,
    ClosedLoop,
    FixedLength,
    Lengths,
    LognormalLength,
    PoissonArrivals,
    Workload,
)

ACCEPTANCE = Acceptance(rates=(0.7,), source="test")
PROMPT = 2048
"""Prompt tokens, and the rows of a step: each prompt fills one, so prompts are served one by one."""

NO_HOST_S = dict.fromkeys(
    ("schedule_s", "schedule_s_per_request", "deliver_s_per_request", "launch_s_per_kernel", "step_gap_s"), 1e-12
)
SLOW_HOST_S = {
    "schedule_s": 4e-3, "schedule_s_per_request": 2e-4, "deliver_s_per_request": 3e-3, "launch_s_per_kernel": 1e-6,
    "step_gap_s": 1e-4,
}  # fmt: skip


def queue_plan(arrivals: Arrivals, num_requests: int, osl: Lengths | None = None, **changes: Any) -> Plan:
    """One attention replica of V3 on 8 H200 prefills, 8 of a rank each decode; `changes` are settings of the former."""
    layouts = (LayoutSpec(cp=8, ep=8), LayoutSpec(dp=8, ep=8))
    own = EngineSettings(**{"max_num_seqs": 64, "max_tokens_per_step": PROMPT} | changes)
    pools = (
        Pool(role="prefill", replicas=1, layout=layouts[0], settings=own),
        Pool(role="decode", replicas=1, layout=layouts[1], settings=EngineSettings(max_num_seqs=64)),
    )
    workload = Workload(
        isl=FixedLength(tokens=PROMPT), osl=osl or FixedLength(tokens=1), arrivals=arrivals, num_requests=num_requests
    )
    return Plan(
        model="deepseek-v3", hardware="h200", gpus=16, pools=pools, workload=workload, acceptance=ACCEPTANCE
    )  # fmt: skip


def deploy(plan: Plan, host_s: dict[str, float]) -> tuple[Deployment, ...]:
    deployments = resolve(plan)
    host = deployments[0].host
    times = {name: getattr(host, name).model_copy(update={"value": s}) for name, s in host_s.items()}
    return tuple(replace(d, host=host.model_copy(update=times)) for d in deployments)


def prompt_timer(plan: Plan) -> StepTimer:
    deployment = resolve(plan)[0]
    return StepTimer(deployment, CostModel(deployment.cluster.accelerator))


def prompt_seconds(plan: Plan) -> float:
    """Seconds on the device of the step that computes one prompt."""
    nobody = np.zeros(0, dtype=np.int64)
    step = StepPlan(0, (PrefillChunk(0, 0, PROMPT, PROMPT, True),), DecodeBatch(nobody, nobody, 0))
    return prompt_timer(plan).seconds([step], (), 0, 1)


def run(plan: Plan, host_s: dict[str, float]) -> RunRecord:
    return SimBackend().run(deploy(plan, host_s), plan.workload, ACCEPTANCE, generate_requests(plan.workload))


def waits(arrival_s: Floats, service_s: float) -> Floats:
    """Lindley's recursion W' = max(W + service - gap, 0) from an empty queue, as the walk's height over its minimum."""
    walk = np.concatenate(([0.0], np.cumsum(service_s - np.diff(arrival_s))))
    return walk - np.minimum.accumulate(walk)


RHO = [0.3, 0.6, 0.8]


@pytest.mark.parametrize("rho", RHO)
def test_prompts_wait_as_in_m_d_1(rho: float) -> None:
    """Poisson arrivals, equal services, one server, first come first served, and a host that takes no time.

    Each request's wait is that of Lindley's recursion on the same arrivals. The mean of the recursion over a million
    arrivals is that of Pollaczek and Khinchine, rho s / (2 (1 - rho)), within 3%: at rho = 0.8 waits decorrelate over
    some 90 services, which leaves about 14,000 independent ones, or 1% of standard error. A million simulated requests
    would take minutes; 1,500 of them follow the recursion one by one.
    """
    draft = queue_plan(PoissonArrivals(rate=1), 1)
    service_s = prompt_seconds(draft)
    plan = queue_plan(PoissonArrivals(rate=rho / service_s), 1500)
    record = run(plan, NO_HOST_S)
    simulated = record.finish_s - record.arrival_s - service_s
    np.testing.assert_allclose(simulated, waits(record.arrival_s, service_s), atol=1e-7)

    many = np.random.default_rng(5).exponential(1 / rho, 1_000_000).cumsum()
    assert waits(many, 1.0).mean() == pytest.approx(rho / (2 * (1 - rho)), rel=0.03)


@pytest.mark.parametrize("rho", RHO)
def test_what_the_host_adds_to_the_wait(rho: float) -> None:
    """A host that takes D before and A after each step, and a device that idles G between two.

    Synchronous: every service is D + s + A. Asynchronous: a step that was decided while the one ahead ran follows G
    after it. Requests that arrive during a step with none behind it are first seen at its end, as when synchronous. So
    each response lies between that of a queue whose services are s + G and the synchronous one.
    """
    service_s = prompt_seconds(queue_plan(PoissonArrivals(rate=1), 1))
    arrivals = PoissonArrivals(rate=rho / (service_s + 8e-3))
    response: dict[bool, Floats] = {}
    for asynchronous in (True, False):
        plan = queue_plan(arrivals, 600, async_scheduling=asynchronous)
        record = run(plan, SLOW_HOST_S)
        response[asynchronous] = record.finish_s - record.arrival_s
    before, after = 4.2e-3 + prompt_timer(plan).num_kernels * 1e-6, 3e-3
    alone = before + service_s + after
    np.testing.assert_allclose(response[False], waits(record.arrival_s, alone) + alone, atol=1e-9)
    assert (response[True] <= response[False] + 1e-9).all()
    assert (response[True] >= waits(record.arrival_s, service_s + 1e-4) + alone - 1e-9).all()
    gained = (response[False] - response[True]).mean()
    assert gained > (0.3e-3 if rho < 0.5 else 1e-3)


def test_littles_law_of_the_system_and_of_its_pools() -> None:
    """Users = rate x time in the system; decoding requests = rate x time from first to last token; a device's busy
    share = rate x service. The left sides are counted by step, the right ones by request.
    """
    loop = ClosedLoop(concurrency=48, ramp_s=1.0, warm_up_s=2.0)
    plan = queue_plan(loop, 900, osl=LognormalLength(mean=80, sigma=0.4))
    summary = simulate_plan(plan)
    rate = summary.requests_measured / summary.window_s
    assert rate * summary.e2e_s.mean == pytest.approx(48, rel=0.03)
    decoding = summary.running_per_gpu * summary.num_gpus
    assert rate * (summary.e2e_s.mean - summary.ttft_s.mean) == pytest.approx(decoding, rel=0.05)
    assert summary.prefill is not None
    assert summary.prefill.device_busy == pytest.approx(rate * prompt_seconds(plan), rel=0.03)
    assert summary.prefill.prompt_rows == PROMPT
    assert summary.transfer is not None
    assert summary.transfer.requests == pytest.approx(rate * summary.window_s, rel=0.05)


def test_an_overloaded_prefill_pool_falls_behind_linearly() -> None:
    """Arrivals at 1.5 times what the device can do: a third of all that have arrived wait, at any time.

    After n arrivals n / 1.5 are served, give or take 3 standard deviations of a Poisson count.
    """
    service_s = prompt_seconds(queue_plan(PoissonArrivals(rate=1), 1))
    record = run(queue_plan(PoissonArrivals(rate=1.5 / service_s), 1200), NO_HOST_S)
    finish_s = np.sort(record.finish_s)
    assert np.diff(finish_s)[5:] == pytest.approx(service_s, rel=1e-6), "the device never idles"
    for arrived in (300, 600, 900, 1200):
        served = int(np.searchsorted(finish_s, record.arrival_s[arrived - 1]))
        assert arrived - served == pytest.approx(arrived / 3, abs=3 * arrived**0.5 / 1.5)
