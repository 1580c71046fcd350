"""The simulator on whole plans: what goes in comes out, and times that were added up by hand."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from backends.sim import SimBackend
from backends.sim.steptime import StepTimer
from backends.sim.verifier import Verifier
from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.engine.simulate import simulate_plan
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.host import HostProfile
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.record import RunRecord
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.scheduler.step import DecodeBatch, PrefillChunk, StepPlan
from deepinfer.workload.generate import RequestSpec, generate_requests
from deepinfer.workload.spec import (
    Arrivals,
    ClosedLoop,
    FixedLength,
    Lengths,
    LognormalLength,
    PoissonArrivals,
    TraceArrivals,
    Workload,
)
from deepinfer.workload.trace import trace_source

ACCEPTANCE = Acceptance(rates=(0.7,), source="test")
SIM = SimBackend(check_integrity=True)

FLASH = ("deepseek-v4.1-flash", "b200")
V3 = ("deepseek-v3", "h200")
WIDE, NARROW = LayoutSpec(dp=8, ep=8), LayoutSpec(cp=8, ep=8)


def make_plan(
    machine: tuple[str, str] = FLASH,
    layout: LayoutSpec = WIDE,
    arrivals: Arrivals | None = None,
    num_requests: int = 40,
    isl: Lengths | None = None,
    osl: Lengths | None = None,
    **changes: Any,
) -> Plan:
    """A plan for 8 accelerators; keyword arguments are engine settings."""
    model, hardware = machine
    settings: dict[str, Any] = {"max_num_seqs": 8, "max_tokens_per_step": 2048} | changes
    workload = Workload(
        isl=isl or LognormalLength(mean=1500, sigma=0.8),
        osl=osl or LognormalLength(mean=40, sigma=0.6),
        arrivals=arrivals or PoissonArrivals(rate=30),
        num_requests=num_requests,
        seed=3,
    )
    pool = Pool(replicas=1, layout=layout, settings=EngineSettings(**settings))
    return Plan(
        model=model, hardware=hardware, gpus=8, pools=(pool,), workload=workload, acceptance=ACCEPTANCE
    )  # fmt: skip


def deploy(plan: Plan, num_blocks: int | None = None, host_s: dict[str, float] | None = None) -> Deployment:
    """The plan's only deployment, with another pool size or other host times if given."""
    (deployment,) = resolve(plan)
    if num_blocks is not None:
        deployment = replace(deployment, budget=replace(deployment.budget, num_blocks=num_blocks))
    times = {name: getattr(deployment.host, name).model_copy(update={"value": s}) for name, s in (host_s or {}).items()}
    return replace(deployment, host=deployment.host.model_copy(update=times))


def run(plan: Plan, deployment: Deployment | None = None) -> tuple[RunRecord, list[RequestSpec]]:
    requests = generate_requests(plan.workload)
    return SIM.run((deployment or deploy(plan),), plan.workload, plan.acceptance, requests), requests


def assert_conserved(record: RunRecord, requests: list[RequestSpec]) -> None:
    """Every request was served in full, in the order of time, and every token was delivered once."""
    assert record.output_tokens.tolist() == [r.output_tokens for r in requests]
    assert sum(record.delivery_tokens) == sum(r.output_tokens for r in requests)
    assert record.arrival_s == pytest.approx([r.arrival_s for r in requests], rel=1e-12)
    assert (record.first_token_s > record.arrival_s).all()
    assert (record.first_token_s <= record.last_token_s).all()
    assert (record.last_token_s == record.finish_s).all()


# Conservation and determinism


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize("layout", [WIDE, LayoutSpec(dp=2, cp=4, ep=8)], ids=str)
@pytest.mark.parametrize(
    ("machine", "changes"),
    [(FLASH, {"nextn": 3, "replay": "compact"}), (FLASH, {"nextn": 0}), (V3, {"nextn": 1})],
    ids=["flash-compact-3", "flash-off-0", "v3-1"],
)
def test_every_request_gets_its_tokens(
    machine: tuple[str, str], changes: dict[str, Any], layout: LayoutSpec, asynchronous: bool
) -> None:
    record, requests = run(make_plan(machine, layout, async_scheduling=asynchronous, **changes))
    assert_conserved(record, requests)
    assert not record.refused


@pytest.mark.parametrize("asynchronous", [True, False])
def test_a_tiny_pool_preempts_and_still_serves_everyone(asynchronous: bool) -> None:
    """Requests grow from 4 to 7 blocks each: five of them fill the pool of 20 before any of them ends."""
    plan = make_plan(
        layout=NARROW, nextn=2, isl=FixedLength(tokens=450), osl=FixedLength(tokens=400), num_requests=12,
        arrivals=PoissonArrivals(rate=1000), async_scheduling=asynchronous,
    )  # fmt: skip
    record, requests = run(plan, deploy(plan, num_blocks=20))
    assert record.num_preemptions > 0
    assert_conserved(record, requests)


@pytest.mark.parametrize("arrivals", [PoissonArrivals(rate=30), ClosedLoop(concurrency=16, ramp_s=0.1)])
def test_the_same_plan_gives_the_same_summary(arrivals: Arrivals) -> None:
    plan = make_plan(arrivals=arrivals, num_requests=60, nextn=3)
    assert simulate_plan(plan) == simulate_plan(plan.model_copy(deep=True))


@pytest.mark.parametrize("arrivals", [PoissonArrivals(rate=30), ClosedLoop(concurrency=4)])
def test_requests_too_long_for_the_pool_are_refused_and_the_run_ends(arrivals: Arrivals) -> None:
    """A pool of 12 blocks of 128 tokens: prompt, output, and one row more must fit 1,536 tokens."""
    plan = make_plan(layout=NARROW, arrivals=arrivals, num_requests=40)
    record, requests = run(plan, deploy(plan, num_blocks=12))
    too_long = [r.id for r in requests if r.prompt_tokens + r.output_tokens + 1 > 1536]
    sent = [r.id for r in requests if record.arrival_s[r.id] >= 0]
    assert 5 < len(too_long) < 35
    assert record.refused == [i for i in too_long if i in sent]
    assert (record.output_tokens[too_long] == 0).all()
    if isinstance(arrivals, PoissonArrivals):
        assert (record.finish_s >= 0).sum() == 40 - len(too_long)


def test_a_closed_loop_of_refusals_ends() -> None:
    """Each refused request is replaced at once, thousands of times at the same instant."""
    plan = make_plan(layout=NARROW, arrivals=ClosedLoop(concurrency=2), num_requests=3000, isl=FixedLength(tokens=999))
    record, _ = run(plan, deploy(plan, num_blocks=4))
    assert len(record.refused) == 3000


# By hand


def prefill_plan(*chunks: tuple[int, int, int, bool]) -> StepPlan:
    """A step of one replica: chunks as (start, rows, kept rows, last)."""
    nobody = np.zeros(0, dtype=np.int64)
    return StepPlan(0, tuple(PrefillChunk(0, *c) for c in chunks), DecodeBatch(nobody, nobody, 0))


def decode_plan(contexts: list[int], drafts: int = 0) -> StepPlan:
    return StepPlan(0, (), DecodeBatch(np.arange(len(contexts)), np.array(contexts, dtype=np.int64), drafts))


HOST_S = {
    "schedule_s": 1.5e-3, "schedule_s_per_request": 2e-4, "deliver_s_per_request": 3e-4,
    "launch_s_per_kernel": 1e-6, "step_gap_s": 1e-4,
}  # fmt: skip


def one_request(asynchronous: bool) -> tuple[RunRecord, float, list[float], list[float], HostProfile, int]:
    """5,000 prompt tokens in chunks of 2,048, 4 output tokens, alone on one replica.

    Also returned: arrival, seconds of the three chunks, seconds of the three decode steps, the host, and the kernels.
    """
    plan = make_plan(
        V3, NARROW, isl=FixedLength(tokens=5000), osl=FixedLength(tokens=4), num_requests=1,
        arrivals=PoissonArrivals(rate=1), async_scheduling=asynchronous,
    )  # fmt: skip
    deployment = deploy(plan, host_s=HOST_S)
    record, (request,) = run(plan, deployment)
    timer = StepTimer(deployment, CostModel(deployment.cluster.accelerator))
    chunks = ((0, 2048, 2048, False), (2048, 2048, 2048, False), (4096, 904, 904, True))
    prefill_s = [timer.seconds([prefill_plan(chunk)], (), 0, 1) for chunk in chunks]
    decode_s = [timer.seconds([decode_plan([context])], (), 0, 1) for context in (5000, 5001, 5002)]
    return record, request.arrival_s, prefill_s, decode_s, deployment.host, timer.num_kernels


def test_one_request_by_hand_synchronous() -> None:
    """Host and device take turns, and the host takes longer than the gap between steps: all times add up.

    Deciding costs 1.5 + 0.2 ms, launching 1 us for each kernel unless the step only decodes, taking in a token 0.3 ms.
    """
    record, arrival, prefill_s, decode_s, _, kernels = one_request(asynchronous=False)
    ttft = 3 * (1.7e-3 + kernels * 1e-6) + sum(prefill_s) + 0.3e-3
    assert record.first_token_s[0] - arrival == pytest.approx(ttft, rel=1e-12)
    finish = ttft + 3 * (1.7e-3 + 0.3e-3) + sum(decode_s)
    assert record.finish_s[0] - arrival == pytest.approx(finish, rel=1e-12)


def test_one_request_by_hand_asynchronous() -> None:
    """Steps follow each other with the gap alone: the host's part of step N + 1 falls into step N.

    Chunks and decode steps are longer than the host's 2 ms for each, which is checked; what remains visible is the
    first launch and the last delivery.
    """
    record, arrival, prefill_s, decode_s, host, kernels = one_request(asynchronous=True)
    assert min(prefill_s + decode_s) > 1.7e-3 + kernels * 1e-6 + 0.3e-3
    gap = host.step_gap_s.value
    first = 1.7e-3 + kernels * 1e-6 + sum(prefill_s) + 2 * gap + 0.3e-3
    assert record.first_token_s[0] - arrival == pytest.approx(first, rel=1e-12)
    assert record.finish_s[0] - arrival == pytest.approx(first + sum(decode_s) + 3 * gap, rel=1e-12)


@pytest.mark.parametrize("schedule_s", [5e-5, 4e-3, 40e-3])
@pytest.mark.parametrize("asynchronous", [True, False])
def test_the_period_of_steady_decode(asynchronous: bool, schedule_s: float) -> None:
    """Six requests decode together without drafts; every step takes T on the device, D on the host before it and
    A after it, and the device idles at least G between steps.

    Synchronous: step N + 1 is decided when N's tokens are in, so it starts max(A + D, G) after N's end: the period is
    T + max(A + D, G). Asynchronous: N + 1 is already queued when N ends, unless the host is the slower one, which does
    A + D for each step: the period is max(T + G, A + D).
    """
    plan = make_plan(
        V3, NARROW, isl=FixedLength(tokens=300), osl=FixedLength(tokens=60), num_requests=7,
        arrivals=ClosedLoop(concurrency=6), async_scheduling=asynchronous,
    )  # fmt: skip
    deployment = deploy(plan, host_s={"schedule_s": schedule_s})
    host = deployment.host
    steps = run(plan, deployment)[0].steps
    steady = slice(10, 50)
    assert set(steps.decodes[steady]) == {6}
    assert set(steps.prefill_rows[steady]) == {0}
    period = np.diff(np.asarray(steps.end_s))[9:49]
    device = np.asarray(steps.seconds)[steady]
    on_host = schedule_s + 6 * host.schedule_s_per_request.value + 6 * host.deliver_s_per_request.value
    gap = host.step_gap_s.value
    expected = np.maximum(device + gap, on_host) if asynchronous else device + max(on_host, gap)
    if asynchronous and schedule_s > device.max():  # collected only when the host comes round to it
        assert period.mean() == pytest.approx(on_host, rel=1e-9)
    else:
        assert period == pytest.approx(expected, rel=1e-9)


# Queues


def test_a_closed_loop_keeps_its_users_busy() -> None:
    """Summed over the window, requests in the system times seconds are exactly users times seconds."""
    plan = make_plan(arrivals=ClosedLoop(concurrency=24, ramp_s=0.5), num_requests=150, nextn=3)
    record, _ = run(plan)
    start, end = record.window_start_s, record.window_end_s
    arrived = record.arrival_s[record.arrival_s >= 0]
    left = np.where(record.finish_s >= 0, record.finish_s, np.inf)[record.arrival_s >= 0]
    inside = np.maximum(np.minimum(left, end) - np.maximum(arrived, start), 0.0)
    assert inside.sum() == pytest.approx(24 * (end - start), rel=1e-12)


def test_littles_law() -> None:
    """Users = finished requests per second x mean time in the system, on the summary's own figures."""
    plan = make_plan(
        arrivals=ClosedLoop(concurrency=16, ramp_s=0.5), num_requests=500, nextn=3,
        isl=LognormalLength(mean=300, sigma=0.5), osl=LognormalLength(mean=30, sigma=0.5),
    )  # fmt: skip
    summary = simulate_plan(plan)
    assert summary.requests_measured / summary.window_s * summary.e2e_s.mean == pytest.approx(16, rel=0.03)


# Prefix cache


@pytest.mark.parametrize(
    ("machine", "replay", "window"), [(FLASH, "compact", 128), (FLASH, "off", 128), (V3, "off", 0)]
)
def test_hits_of_a_trace_counted_by_hand(machine: tuple[str, str], replay: str, window: int, tmp_path: Path) -> None:
    """Conversations that grow turn by turn, 10 seconds apart in a pool that holds them all.

    By hand: whole blocks of 128 tokens that an earlier prompt had at the same place after the same beginning, the last
    prompt token excluded; hits that leave nothing to skip after the replay of a window count as misses.
    """
    rng = random.Random(0)
    talks: list[list[int]] = [[], [], []]
    lines, prompts = [], []
    for i in range(30):
        talk = rng.choice(talks)
        talk += [1000 * i + b for b in range(rng.randint(0, 2))]
        ids = [*talk, 1000 * i + 999]
        tokens = len(talk) * 512 + rng.randint(1, 512)
        prompts.append((tokens, ids))
        lines.append({"timestamp": 10_000 * i, "input_length": tokens, "output_length": 3, "hash_ids": ids})
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    plan = make_plan(machine, NARROW, replay=replay, keep_tokens=140)
    plan = plan.model_copy(update={"workload": Workload(trace=trace_source(str(path)), arrivals=TraceArrivals())})

    seen: set[tuple[int, ...]] = set()
    hits = 0
    for tokens, ids in prompts:
        blocks = [(*ids[: b // 4 + 1], b % 4) for b in range(tokens // 128)]  # named by all before them
        found = 0
        while found < (tokens - 1) // 128 and blocks[found] in seen:
            found += 1
        skipped = 128 * found
        if window:
            skipped = min(skipped - window, tokens - (140 if replay == "compact" else 0))
        hits += 128 * found if skipped > 0 else 0
        seen.update(blocks)
    record, _ = run(plan)
    assert hits > 10_000
    assert record.num_hit_tokens == hits
    assert record.num_prompt_tokens == sum(tokens for tokens, _ in prompts)


# Step times


def random_plans(rng: random.Random, replicas: int, most_chunks: int, drafts: int) -> list[StepPlan | None]:
    """Any mixture of decoding requests and prompt chunks, up to 4,000 tokens into their prompts."""
    plans: list[StepPlan | None] = []
    for _ in range(replicas):
        chunks = [
            (rng.randint(0, 4000), rows, rows, True)
            for rows in (rng.randint(1, 2000) for _ in range(rng.randint(0, most_chunks)))
        ]
        contexts = [rng.randint(1, 20_000) for _ in range(rng.randint(0, 16))]
        decode = decode_plan(contexts, drafts)
        plan = replace(prefill_plan(*chunks), decode=decode.decode)
        plans.append(plan if plan.num_rows else None)
    return plans


def step_seconds(timer: StepTimer, plans: list[StepPlan | None]) -> float:
    """The timer's step of replicas with these plans."""
    return timer.seconds([plan for plan in plans if plan is not None], (), 0, len(plans))


def slowest_by_force(deployment: Deployment, plans: list[StepPlan | None]) -> float:
    """Every replica evaluated at its exact shape, chunk by chunk; what only decodes is padded to the graph's rows."""
    costs, graph = CostModel(deployment.cluster.accelerator), deployment.graph()
    busy = [plan for plan in plans if plan is not None]
    rows = sum(plan.num_rows for plan in busy) / len(plans)
    kept = sum(plan.decode.num_rows + sum(c.kept_rows for c in plan.prefill) for plan in busy) / len(plans)
    slowest = 0.0
    for plan in busy:
        count, width = len(plan.decode), plan.decode.drafts + 1
        padded = count if plan.prefill else -(-count * width // deployment.settings.graph_rows) * 8 / width
        context = float(plan.decode.contexts.mean()) if count else 0.0
        decode = Sequences.decoding(float(padded), float(width - 1), context) if count else None
        prefill = tuple(Sequences(1.0, float(c.rows), float(c.start), float(c.kept_rows), 1.0) for c in plan.prefill)
        seconds = step_cost(graph, StepShape(decode, prefill, rows, kept), costs).seconds
        slowest = max(slowest, float(seconds))
    return slowest


@pytest.mark.parametrize(("machine", "drafts"), [(FLASH, 3), (V3, 1)], ids=["flash", "v3"])
@pytest.mark.parametrize(
    ("replicas", "most_chunks", "low", "high"), [(1, 1, 0.985, 1.015), (8, 1, 0.95, 1.015), (8, 2, 0.88, 1.15)]
)
def test_the_slowest_replica_sets_the_pace(
    machine: tuple[str, str], drafts: int, replicas: int, most_chunks: int, low: float, high: float
) -> None:
    """One replica: exact but for interpolation.

    Several: the timer looks at three candidates for the slowest one and may miss it by a little. With more chunks than
    one in a replica it evaluates a mean chunk for them. Neither may move the mean over many steps by more than 2%.
    """
    layout = WIDE if replicas == 8 else NARROW
    deployment = deploy(make_plan(machine, layout, nextn=drafts))
    timer = StepTimer(deployment, CostModel(deployment.cluster.accelerator))
    rng = random.Random(1)
    ratios = []
    for _ in range(30):
        plans = random_plans(rng, replicas, most_chunks, drafts)
        if any(plans):
            ratios.append(step_seconds(timer, plans) / slowest_by_force(deployment, plans))
    assert low <= min(ratios)
    assert max(ratios) <= high
    assert np.mean(ratios) == pytest.approx(1.0, abs=0.02)


def test_few_rows_deep_in_a_long_prompt_can_be_the_slowest() -> None:
    """V3 attends to all of a prompt: 1,000 rows after 100,000 tokens outlast 1,100 rows at a prompt's beginning."""
    deployment = deploy(make_plan(V3, WIDE))
    timer = StepTimer(deployment, CostModel(deployment.cluster.accelerator))
    plans: list[StepPlan | None] = [None] * 8
    plans[2], plans[5] = prefill_plan((0, 1100, 1100, True)), prefill_plan((100_000, 1000, 1000, True))
    assert step_seconds(timer, plans) == pytest.approx(slowest_by_force(deployment, plans), rel=0.015)


def test_drafts_are_drawn_by_request_and_round() -> None:
    """A request's draws depend on how often it has verified, whoever else is in the step."""
    verifier = Verifier(ACCEPTANCE, seed=9, nextn=3, num_requests=4)
    rounds = {2: 0, 3: 0}
    for ids in ([2], [3, 2], [2], [2, 3], [3], [2]):
        plan = StepPlan(0, (), DecodeBatch(np.array(ids), np.zeros(len(ids), dtype=np.int64), 3))
        (result,) = verifier.results((plan,))
        assert result is not None
        for i, kept in zip(ids, result.decode_tokens.tolist(), strict=True):
            assert kept == ACCEPTANCE.draw(9, np.array([i]), np.array([rounds[i]]), 3)[0]
            rounds[i] += 1
