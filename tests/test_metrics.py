"""Figures of a run against lists and loops: every token is written down with its time."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from backends.sim import SimBackend
from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.engine.shape import ReplicaLoad, step_shape
from deepinfer.errors import InfeasibleError
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.record import RunRecord, SubmittedStep
from deepinfer.metrics.summary import Percentiles, Summary, summarize
from deepinfer.metrics.timeline import Span, to_chrome_trace
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import FixedLength, PoissonArrivals, Workload

START, END = 2.0, 9.0
GPUS, GROUPS = 4.0, 2
TTFT_LIMIT, TPOT_LIMIT = 1.0, 0.4


@dataclass(frozen=True)
class Step:
    """One step of an engine: its end, seconds, decoding requests with their contexts, drafts, and prompt rows."""

    end_s: float
    seconds: float
    contexts: tuple[int, ...]
    drafts: int
    prompt_rows: int
    kept: int


class Diary:
    """A run written down twice: as a `RunRecord`, and as plain lists."""

    def __init__(self, seed: int, num_requests: int = 40) -> None:
        rng = random.Random(seed)
        self.record = RunRecord(num_requests, GPUS, GROUPS)
        self.record.window_start_s, self.record.window_end_s = START, END
        self.tokens: dict[int, list[float]] = defaultdict(list)  # the time of every token
        self.deliveries: dict[int, list[tuple[float, int]]] = defaultdict(list)
        self.arrival = {i: rng.uniform(0, 8) for i in range(num_requests)}
        self.finish: dict[int, float] = {}
        self.steps: list[Step] = []
        for i, t in self.arrival.items():
            self.record.arrival_s[i] = t
        self._serve(rng, {i: rng.randint(1, 12) for i in self.arrival})

    def _serve(self, rng: random.Random, wanted: dict[int, int]) -> None:
        for now in itertools.accumulate(rng.uniform(0.1, 0.4) for _ in range(40)):
            seconds = rng.uniform(0.05, 0.1)
            unfinished = [i for i in wanted if self.arrival[i] < now - seconds and len(self.tokens[i]) < wanted[i]]
            ids = sorted(rng.sample(unfinished, min(len(unfinished), rng.randint(0, 6))))
            contexts = tuple(rng.randint(1, 999) for i in ids if self.tokens[i])
            step = Step(now, seconds, contexts, 3, rng.randint(0, 50), sum(rng.randint(1, 4) for _ in contexts))
            self._deliver(now + 0.01, ids, [min(rng.randint(1, 4), wanted[i] - len(self.tokens[i])) for i in ids])
            for i in ids:
                if len(self.tokens[i]) == wanted[i]:
                    self.finish[i] = self.record.finish_s[i] = now + 0.01
            self.steps.append(step)
            rows, contexts_sum = len(contexts) * (step.drafts + 1), sum(contexts)
            submitted = SubmittedStep(seconds, now, len(contexts), rows, step.prompt_rows, contexts_sum)
            self.record.steps.append(step.end_s, submitted, step.kept)

    def _deliver(self, now: float, ids: list[int], counts: list[int]) -> None:
        counts = [1 if not self.tokens[i] else n for i, n in zip(ids, counts, strict=True)]
        self.record.deliver(np.array(ids, dtype=np.int64), np.array(counts, dtype=np.int64), now)
        for i, n in zip(ids, counts, strict=True):
            self.tokens[i] += [now] * n
            self.deliveries[i].append((now, n))

    def summary(self) -> Summary:
        return summarize(self.record, TTFT_LIMIT, TPOT_LIMIT)

    def done(self) -> list[int]:
        return [i for i, t in self.finish.items() if START <= t <= END]

    def tpot(self, i: int) -> float:
        return (self.tokens[i][-1] - self.tokens[i][0]) / (len(self.tokens[i]) - 1) if len(self.tokens[i]) > 1 else 0.0


@pytest.fixture(scope="module", params=range(3))
def diary(request: pytest.FixtureRequest) -> Diary:
    return Diary(request.param)


def interpolated(values: Sequence[float]) -> Percentiles:
    """By the standard library: linear between the two nearest values."""
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    return Percentiles(mean=statistics.fmean(values), p50=cuts[49], p90=cuts[89], p95=cuts[94], p99=cuts[98])


def nearest_rank(values: Sequence[float]) -> Percentiles:
    """The smallest value that at least so many percent of all values do not exceed."""
    ordered = sorted(values)

    def at(percent: int) -> float:
        return next(v for n, v in enumerate(ordered, start=1) if 100 * n >= percent * len(ordered))

    return Percentiles(mean=statistics.fmean(values), p50=at(50), p90=at(90), p95=at(95), p99=at(99))


def assert_alike(found: Percentiles, expected: Percentiles) -> None:
    assert found.model_dump() == pytest.approx(expected.model_dump(), rel=1e-9)


def test_tpot_of_every_finished_request(diary: Diary) -> None:
    """Requests of a single token have none."""
    tpots = [diary.tpot(i) for i in diary.done() if len(diary.tokens[i]) > 1]
    assert_alike(diary.summary().tpot_s, interpolated(tpots))
    assert diary.summary().tokens_per_s_per_user == pytest.approx(1 / statistics.median(tpots))


def test_ttft_of_every_request_that_started_in_the_window(diary: Diary) -> None:
    firsts = {i: times[0] for i, times in diary.tokens.items() if times}
    inside = [t - diary.arrival[i] for i, t in firsts.items() if START <= t <= END]
    assert_alike(diary.summary().ttft_s, interpolated(inside))


def test_itl_of_every_token_in_the_window(diary: Diary) -> None:
    """Successive tokens of a request, those of one step at the same time; the first token has no gap."""
    gaps = [
        later - earlier
        for times in diary.tokens.values()
        for earlier, later in itertools.pairwise(times)
        if START <= later <= END
    ]
    assert 0 < gaps.count(0.0) < len(gaps)
    assert_alike(diary.summary().itl_s, nearest_rank(gaps))


def test_tau_is_tokens_kept_per_decode_step_and_request_in_the_window(diary: Diary) -> None:
    inside = [step for step in diary.steps if START <= step.end_s <= END]
    decodes = sum(len(step.contexts) for step in inside)
    assert diary.summary().tau == pytest.approx(sum(step.kept for step in inside) / decodes)


def test_end_to_end_and_goodput(diary: Diary) -> None:
    done, summary = diary.done(), diary.summary()
    assert_alike(summary.e2e_s, interpolated([diary.finish[i] - diary.arrival[i] for i in done]))
    good = [
        i for i in done if diary.tokens[i][0] - diary.arrival[i] <= TTFT_LIMIT and diary.tpot(i) <= TPOT_LIMIT
    ]  # fmt: skip
    assert 0 < len(good) < len(done)
    assert summary.goodput == pytest.approx(len(good) / len(done))
    assert (summary.requests_measured, summary.requests_finished) == (len(done), len(diary.finish))


def test_the_three_throughputs(diary: Diary) -> None:
    """Steps per second of one engine; rows as if all were kept; tokens that users got: each over the same window."""
    summary, seconds = diary.summary(), END - START
    steps = [s for s in diary.steps if START <= s.end_s <= END]
    rows = sum(len(s.contexts) * (s.drafts + 1) for s in steps)
    tokens = sum(START <= t <= END for times in diary.tokens.values() for t in times)
    assert summary.steps_per_s == pytest.approx(len(steps) / seconds / GROUPS)
    assert summary.full_acceptance_tokens_per_s_per_gpu == pytest.approx(rows / seconds / GPUS)
    assert summary.output_tokens_per_s_per_gpu == pytest.approx(tokens / seconds / GPUS)
    prompt = sum(s.prompt_rows for s in steps)
    assert summary.input_tokens_per_s_per_gpu == pytest.approx(prompt / seconds / GPUS)


def test_the_load_of_the_engines(diary: Diary) -> None:
    """Decoding requests, their contexts, and the part of the window in which a device worked."""
    summary = diary.summary()
    steps = [s for s in diary.steps if START <= s.end_s <= END]
    contexts = [c for s in steps for c in s.contexts]
    assert summary.mean_context == pytest.approx(statistics.fmean(contexts))
    assert summary.running_per_gpu == pytest.approx(len(contexts) / len(steps) * GROUPS / GPUS)
    busy = sum(max(0.0, min(s.end_s, END) - max(s.end_s - s.seconds, START)) for s in diary.steps)
    assert summary.device_busy == pytest.approx(busy / (END - START) / GROUPS)


def test_a_window_in_which_nothing_finished_is_refused() -> None:
    record = Diary(0).record
    record.window_start_s = record.window_end_s = 100.0
    with pytest.raises(InfeasibleError, match="no request finished"):
        summarize(record, 1.0, 1.0)


# Throughputs of a whole run, and timelines of a real step


def make_plan(model: str, hardware: str, layout: LayoutSpec, nextn: int, rate: float) -> Plan:
    workload = Workload(
        isl=FixedLength(tokens=400),
        osl=FixedLength(tokens=1 + 8 * (nextn + 1)),  # a first token, then whole steps: the end clips nothing
        arrivals=PoissonArrivals(rate=20),
        num_requests=30,
    )
    settings = EngineSettings(max_num_seqs=8, nextn=nextn)
    pool = Pool(replicas=1, layout=layout, settings=settings)
    acceptance = Acceptance(rates=(rate,), source="test")
    return Plan(model=model, hardware=hardware, gpus=8, pools=(pool,), workload=workload, acceptance=acceptance)


@pytest.mark.parametrize("rate", [0.0, 0.6, 1.0])
def test_output_is_at_most_full_acceptance(rate: float) -> None:
    """Decode tokens against decode rows of one run; they are equal when every draft is kept and never clipped.

    Synchronous steps, so that no row is computed after a request's end.
    """
    plan = make_plan("deepseek-v4.1-flash", "b200", LayoutSpec(dp=8, ep=8), 3, rate)
    pool = plan.pools[0]
    settings = pool.settings.model_copy(update={"async_scheduling": False})
    plan = plan.model_copy(update={"pools": (pool.model_copy(update={"settings": settings}),)})
    (deployment,) = resolve(plan)
    record = SimBackend().run((deployment,), plan.workload, plan.acceptance, generate_requests(plan.workload))
    record.window_start_s, record.window_end_s = 0.0, float(record.finish_s.max())
    summary = summarize(record, 1.0, 1.0)
    gpu_seconds = summary.window_s * summary.num_gpus
    rows = summary.full_acceptance_tokens_per_s_per_gpu * gpu_seconds
    later_tokens = summary.output_tokens_per_s_per_gpu * gpu_seconds - 30  # prompts yield the first ones
    assert later_tokens == pytest.approx(30 * 32)
    if rate == 1.0:
        assert rows == pytest.approx(later_tokens)
    else:
        assert rows > later_tokens * (1.2 if rate else 3.99)


@pytest.fixture(
    scope="module",
    params=[("deepseek-v4.1-flash", "b200", 3), ("deepseek-v3", "h200", 1)],
    ids=lambda p: p[0],
)
def step(request: pytest.FixtureRequest) -> tuple[Deployment, list[Span]]:
    model, hardware, nextn = request.param
    (deployment,) = resolve(make_plan(model, hardware, LayoutSpec(dp=8, ep=8), nextn, 0.5))
    return deployment, SimBackend().timeline(deployment, 16, 4000.0)


def test_spans_of_a_track_follow_each_other(step: tuple[Deployment, list[Span]]) -> None:
    tracks: dict[str, list[Span]] = defaultdict(list)
    for span in step[1]:
        tracks[span.track].append(span)
    assert len(tracks) > 1
    for spans in tracks.values():
        for earlier, later in itertools.pairwise(spans):
            assert earlier.start_s + earlier.seconds <= later.start_s + 1e-12


def test_a_timeline_ends_when_the_closed_form_says(step: tuple[Deployment, list[Span]]) -> None:
    deployment, spans = step
    drafts = deployment.settings.nextn
    rows = 16.0 * (drafts + 1)
    shape = step_shape(ReplicaLoad(16, drafts, 4000.0), rows, rows, deployment.settings.graph_rows)
    closed = step_cost(deployment.graph(), shape, CostModel(deployment.cluster.accelerator)).seconds
    assert max(span.start_s + span.seconds for span in spans) == pytest.approx(closed, rel=1e-9)


def test_a_chrome_trace_holds_every_span(step: tuple[Deployment, list[Span]]) -> None:
    """Valid JSON; microseconds; one named thread a track, on which complete events do not overlap."""
    spans = step[1]
    events = json.loads(to_chrome_trace(spans, "one step"))["traceEvents"]
    threads = {e["tid"]: e["args"]["name"] for e in events if e["ph"] == "M" and e["name"] == "thread_name"}
    complete = [e for e in events if e["ph"] == "X"]
    found = sorted((threads[e["tid"]], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in complete)
    expected = sorted((s.track, s.name, s.start_s, s.seconds) for s in spans)
    assert [f[:2] for f in found] == [e[:2] for e in expected]
    assert [f[2:] for f in found] == [pytest.approx(e[2:], abs=1e-10) for e in expected]
    for tid in threads:
        mine = [e for e in complete if e["tid"] == tid]
        for earlier, later in itertools.pairwise(mine):
            assert earlier["ts"] + earlier["dur"] <= later["ts"] + 2e-4  # rounded to 0.1 ns each
