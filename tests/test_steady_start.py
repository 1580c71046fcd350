"""A closed loop that begins amid its requests: what they come with, that they end whole, and that figures are those of
a loop that was ramped up."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from backends.sim import SimBackend
from backends.sim.verifier import Verifier
from deepinfer.engine import simulate
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.engine.simulate import simulate_plan
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.record import RunRecord
from deepinfer.metrics.summary import Summary, summarize
from deepinfer.scheduler.policy import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.scheduler.step import StepResult
from deepinfer.workload.generate import RequestSpec, generate_requests
from deepinfer.workload.spec import (
    Arrivals,
    ClosedLoop,
    FixedLength,
    Lengths,
    LognormalLength,
    SteadyStart,
    TraceSource,
    Workload,
)
from deepinfer.workload.steady import lives_amid
from planner.pipeline import make_screen
from planner.problem import Question, make_problem
from planner.refine import make_plan

ACCEPTANCE = Acceptance(rates=(0.8, 0.5), source="test")
MACHINES = {"deepseek-v4.1-flash": "b200", "deepseek-v4-flash": "b200", "deepseek-v3": "h200"}
WIDE, NARROW = LayoutSpec(dp=8, ep=8), LayoutSpec(cp=8, ep=8)
START = SteadyStart(ttft_s=0.5, lifetime_s=4.0, settle_s=1.0, measure_s=20.0)


def plan_of(
    model: str, layout: LayoutSpec, arrivals: Arrivals, split: bool = False, outputs: int = 80, **changes: Any
) -> Plan:
    """A plan of one mixed pool or of two alike, of eight GPUs each; `changes` are settings of what decodes."""
    serving = EngineSettings(**{"max_num_seqs": 48, "max_tokens_per_step": 2048} | changes)
    pools = (Pool(role="decode" if split else "mixed", replicas=1, layout=layout, settings=serving),)
    if split:
        prefill = EngineSettings(max_num_seqs=16, max_tokens_per_step=4096)
        pools = (Pool(role="prefill", replicas=1, layout=layout, settings=prefill), *pools)
    return Plan(
        model=model,
        hardware=MACHINES[model],
        gpus=8 * len(pools),
        pools=pools,
        workload=Workload(
            isl=LognormalLength(mean=300, sigma=0.5, maximum=1500),
            osl=LognormalLength(mean=outputs, sigma=0.4, maximum=4 * outputs),
            arrivals=arrivals,
            num_requests=12_000,
        ),
        acceptance=ACCEPTANCE,
    )


def served(deployments: Sequence[Deployment], workload: Workload, every_step: bool = False) -> RunRecord:
    backend = SimBackend(check_integrity=not every_step, every_step=every_step)
    return backend.run(deployments, workload, ACCEPTANCE, generate_requests(workload))


def requests_of(prompt: Lengths, output: Lengths, count: int) -> list[RequestSpec]:
    """Requests of a closed loop, by length."""
    return generate_requests(
        Workload(isl=prompt, osl=output, arrivals=ClosedLoop(concurrency=count), num_requests=count)
    )


def test_ages_of_equal_requests_are_even() -> None:
    requests = requests_of(FixedLength(tokens=100), FixedLength(tokens=1000), 1000)
    lives = lives_amid(requests, START)
    assert [life.spec.id for life in lives] == list(range(1000))
    assert sum(life.joins_s > 0 for life in lives) == pytest.approx(125, abs=1)  # 0.5 of 4 s before the first token
    counts, _ = np.histogram([life.generated for life in lives if not life.joins_s], bins=10, range=(0, 1000))
    np.testing.assert_allclose(counts, 87.5, atol=2)
    joins = np.diff([life.joins_s for life in lives if life.joins_s])
    assert (joins >= 0).all()
    assert joins.max() < 3 * joins.mean()


def test_long_requests_are_found_as_much_more_often_as_they_live_longer() -> None:
    """The mean of what an inspector finds is the length-biased one, and half of it has passed."""
    requests = requests_of(FixedLength(tokens=100), LognormalLength(mean=500, sigma=0.8), 4000)
    start = SteadyStart(ttft_s=1e-6, lifetime_s=4.0, settle_s=0.0, measure_s=1.0)
    lives = lives_amid(requests, start)
    outputs = np.asarray([spec.output_tokens for spec in requests], dtype=np.float64)
    found = np.asarray([life.spec.output_tokens for life in lives], dtype=np.float64)
    assert found.mean() == pytest.approx((outputs**2).mean() / outputs.mean(), rel=0.01)
    assert np.mean([life.generated for life in lives]) == pytest.approx(found.mean() / 2, rel=0.02)


@given(outputs=st.lists(st.integers(1, 50), min_size=1, max_size=40), share=st.floats(0.001, 0.999))
def test_nobody_has_all_tokens_before_the_start(outputs: list[int], share: float) -> None:
    requests = [RequestSpec(i, 0.0, 10, tokens) for i, tokens in enumerate(outputs)]
    for life in lives_amid(requests, SteadyStart(ttft_s=share, lifetime_s=1.0, settle_s=0.0, measure_s=1.0)):
        assert 1 <= life.generated <= max(life.spec.output_tokens - 1, 1)
        assert life.generated == 1 or not life.joins_s


def test_rounds_of_the_past_are_those_that_would_have_been_drawn() -> None:
    ids, tokens = np.arange(20), np.arange(20) * 60
    verifier = Verifier(ACCEPTANCE, 3, 2, 20)
    rounds, kept = verifier.pass_tokens(ids, tokens)
    drawn = Verifier(ACCEPTANCE, 3, 2, 20).peek(ids, 1200).cumsum(axis=0)
    for request_id in ids:
        before = drawn[rounds[request_id] - 1, request_id] if rounds[request_id] else 0
        assert before == kept[request_id] <= tokens[request_id] < drawn[rounds[request_id], request_id]
    np.testing.assert_array_equal(verifier.peek(ids, 1)[0], drawn[rounds, ids] - kept)


@pytest.mark.parametrize("window", [0, 128])
def test_a_request_that_decoded_elsewhere_goes_on_where_it_was(window: int) -> None:
    """With windows of its own too: they come with it, so nothing is replayed."""
    config = SchedulerConfig(
        max_num_seqs=4, max_tokens_per_step=64, num_blocks=50, block_tokens=16, num_slots=4, transfer_window=window
    )
    scheduler = Scheduler(config)
    scheduler.add(Request(0, 100, 10, transferred_tokens=106, generated_tokens=7))
    assert scheduler.schedule() is None
    assert scheduler.to_fetch() == (0,)
    scheduler.received(0)
    contexts, tokens = [], 0
    while (plan := scheduler.schedule()) is not None:
        assert not plan.prefill
        contexts += plan.decode.contexts.tolist()
        tokens += int(scheduler.commit(plan, StepResult(np.ones(1, dtype=np.int64))).tokens.sum())
        scheduler.check_integrity()
    assert (contexts, tokens) == ([106, 107, 108], 3)


@settings(max_examples=12)
@given(
    model=st.sampled_from(sorted(MACHINES)),
    layout=st.sampled_from([WIDE, NARROW, LayoutSpec(dp=2, cp=4, ep=8)]),
    split=st.booleans(),
    nextn=st.integers(0, 3),
    users=st.integers(1, 24),
    ttft_s=st.sampled_from([0.01, 0.5, 3.9]),
    num_blocks=st.sampled_from([None, 24]),
)
def test_requests_that_the_run_began_amid_end_whole(
    model: str, layout: LayoutSpec, split: bool, nextn: int, users: int, ttft_s: float, num_blocks: int | None
) -> None:
    """With preemptions too, where there are few blocks; and skipping ahead is stepping one by one."""
    steady = SteadyStart(ttft_s=ttft_s, lifetime_s=4.0, settle_s=1.0, measure_s=7.0)
    plan = plan_of(model, layout, ClosedLoop(concurrency=users, steady=steady), split, nextn=nextn)
    deployments = resolve(plan)
    if num_blocks is not None:
        deployments = tuple(replace(d, budget=replace(d.budget, num_blocks=num_blocks)) for d in deployments)
    record = served(deployments, plan.workload)
    lives = lives_amid(generate_requests(plan.workload)[:users], steady)
    longer = [life.spec for life in lives if life.spec.output_tokens > 1]
    wanted = [spec.output_tokens for spec in longer]
    ids = [spec.id for spec in longer]
    assert (record.finish_s[ids] > 0).all()
    assert record.output_tokens[ids].tolist() == wanted
    assert (record.first_token_s[ids] < record.finish_s[ids]).all()
    slowly = served(deployments, plan.workload, every_step=True)
    np.testing.assert_allclose(record.finish_s, slowly.finish_s, rtol=1e-9, atol=1e-12)
    np.testing.assert_allclose(record.first_token_s, slowly.first_token_s, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize(
    ("model", "layout", "split", "nextn", "users"),
    [
        ("deepseek-v4.1-flash", NARROW, False, 2, 40),
        ("deepseek-v4.1-flash", WIDE, True, 2, 320),
        ("deepseek-v3", WIDE, False, 0, 200),
        ("deepseek-v4-flash", NARROW, True, 0, 30),
    ],
)
def test_figures_are_those_of_a_loop_that_was_ramped_up(
    model: str, layout: LayoutSpec, split: bool, nextn: int, users: int
) -> None:
    ramped = ClosedLoop(concurrency=users, ramp_s=1.5, warm_up_s=4.0, measure_s=20.0)
    truth = figures(plan_of(model, layout, ramped, split, nextn=nextn))
    life_s = truth.e2e_s.mean
    steady = SteadyStart(ttft_s=truth.ttft_s.mean, lifetime_s=life_s, settle_s=0.2 * life_s, measure_s=20 * life_s)
    begun = figures(plan_of(model, layout, ClosedLoop(concurrency=users, steady=steady), split, nextn=nextn))
    assert begun.output_tokens_per_s_per_gpu == pytest.approx(truth.output_tokens_per_s_per_gpu, rel=0.015)
    assert begun.tpot_s.mean == pytest.approx(truth.tpot_s.mean, rel=0.01)
    assert begun.tpot_s.p90 == pytest.approx(truth.tpot_s.p90, rel=0.02)
    assert begun.ttft_s.mean == pytest.approx(truth.ttft_s.mean, rel=0.03)
    assert begun.mean_context == pytest.approx(truth.mean_context, rel=0.02)


def figures(plan: Plan) -> Summary:
    """What was measured of a whole plan; nothing stands for anything."""
    return summarize(served(resolve(plan), plan.workload), 1.0, 1.0)


def test_a_start_that_supposed_another_ttft_is_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Until the loop shows what it began with; after three starts, or where a queue is long, it is ramped up."""
    start = SteadyStart(ttft_s=0.05, lifetime_s=8.0, settle_s=1.0, measure_s=5.0)
    loop = ClosedLoop(concurrency=40, ramp_s=2.0, warm_up_s=1.0, measure_s=3.0, steady=start)
    plan = plan_of("deepseek-v4.1-flash", NARROW, loop)
    starts: list[SteadyStart | None] = []

    def note(record: RunRecord, *limits: float) -> Summary:
        return shown.model_copy(update={"ttft_s": shown.ttft_s.model_copy(update={"mean": next(means)})})

    shown = simulate_plan(plan)
    original = SimBackend.run

    def run(self: SimBackend, deployments: Any, workload: Workload, *others: Any) -> RunRecord:
        assert isinstance(workload.arrivals, ClosedLoop)
        starts.append(workload.arrivals.steady)
        return original(self, deployments, workload, *others)

    monkeypatch.setattr(SimBackend, "run", run)
    monkeypatch.setattr(simulate, "summarize", note)
    means = iter([0.3, 0.25])
    assert simulate_plan(plan).ttft_s.mean == 0.25
    assert [one and (one.ttft_s, one.lifetime_s) for one in starts] == [(0.05, 8.0), (0.3, 8.25)]
    starts.clear()
    means = iter([0.3, 0.5, 0.3, 0.2])
    assert simulate_plan(plan).ttft_s.mean == 0.2
    assert starts[-1] is None
    assert len(starts) == 4
    starts.clear()
    means = iter([0.9, 0.8])
    assert simulate_plan(plan).ttft_s.mean == 0.8
    assert starts == [start, None]


def test_a_window_of_deliveries_has_whole_steps() -> None:
    record = RunRecord(1, 1.0, 1)
    for second in range(1, 11):
        record.deliver(np.asarray([0]), np.asarray([7]), float(second))
    record.window_of_deliveries(2.9, 9.5)
    inside = (np.asarray(record.delivery_s) >= record.window_start_s) & (
        np.asarray(record.delivery_s) <= record.window_end_s
    )
    tokens = np.asarray(record.delivery_tokens)[inside].sum()
    assert tokens / (record.window_end_s - record.window_start_s) == pytest.approx(7.0)
    assert inside.sum() == 7


def test_goodput_of_requests_whose_first_token_nobody_saw() -> None:
    """They count by the share of first tokens in time: half of those seen here."""
    record = RunRecord(4, 1.0, 1)
    for request_id in (0, 1):
        record.take_over(request_id, 5, 0.0)
    record.arrival_s[2:] = 1.0
    for second, ids in ((2.0, [0, 1, 2]), (3.0, [0, 1, 3]), (4.0, [0, 1, 2, 3])):
        record.deliver(np.asarray(ids), np.ones(len(ids), dtype=np.int64), second)
    record.finish_s[:2] = 4.0
    record.window_start_s, record.window_end_s = 0.5, 5.0
    record.date_back(np.asarray([0, 1]), np.asarray([4, 4]))
    summary = summarize(record, 1.5, 2.0)  # TTFT of 1 and 2 s
    assert summary.goodput == 0.5
    assert summary.ttft_s.mean == 1.5
    gap_s = float(record.gaps(0.5, 5.0)[0] @ record.gaps(0.5, 5.0)[1] / record.gaps(0.5, 5.0)[1].sum())
    assert summary.tpot_s.mean == pytest.approx((4.0 + 4 * gap_s) / 7)
    assert summary.e2e_s.mean == pytest.approx(4.0 + 4 * gap_s + 1.5)


def test_finalists_begin_steadily_unless_a_trace_has_a_history(tmp_path: Path) -> None:
    """Traces are ramped up: what their requests find in the prefix cache came before them."""
    line = '{"timestamp": %d, "input_length": 600, "output_length": 20, "hash_ids": [1, %d]}\n'
    path = tmp_path / "trace.jsonl"
    path.write_text("".join(line % (i * 1000, i + 2) for i in range(400)))
    for question in (Question(8, hardware="b200"), Question(8, hardware="b200", trace=str(path))):
        asked = make_problem(question)
        found = make_screen(asked).run()
        arrivals = make_plan(asked, found, 0).workload.arrivals
        assert isinstance(arrivals, ClosedLoop)
        assert arrivals.ramp_s > 0  # which hardware needs
        if question.trace:
            assert arrivals.steady is None
            continue
        assert arrivals.steady is not None
        life_s = found.points.ttft_s[0] + asked.load.osl * found.points.tpot_s[0]
        assert arrivals.steady.lifetime_s == pytest.approx(life_s, rel=0.1)


def test_a_steady_start_needs_drawn_lengths_and_a_life_longer_than_its_wait() -> None:
    trace = TraceSource(path="trace.jsonl", format="mooncake", sha256="0" * 64)
    with pytest.raises(ValidationError, match="contradicts trace"):
        Workload(trace=trace, arrivals=ClosedLoop(concurrency=1, steady=START))
    with pytest.raises(ValidationError, match="ttft_s 5 is not below lifetime_s 4"):
        SteadyStart(ttft_s=5.0, lifetime_s=4.0, settle_s=0.0, measure_s=1.0)
