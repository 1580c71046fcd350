"""Plans of a prefill and a decode pool on the simulator: what goes in comes out, and times that were added up by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim.backend import SimBackend, _Run
from backends.sim.steptime import StepTimer
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.layout.plan import LayoutSpec, Plan, Pool, RouterName
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.record import RunRecord
from deepinfer.scheduler.scheduler import Scheduler
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
    Workload,
)

ACCEPTANCE = Acceptance(rates=(0.8, 0.5), source="test")
MACHINES = {"deepseek-v4.1-flash": "b200", "deepseek-v4-flash": "b200", "deepseek-v3": "h200"}
WIDE, MIXED, NARROW = LayoutSpec(dp=8, ep=8), LayoutSpec(dp=2, cp=4, ep=8), LayoutSpec(cp=8, ep=8)
SHARED_CONTEXT = LayoutSpec(tp=8, ep=8, dcp=8)


def two_pools(
    model: str,
    workload: Workload,
    layouts: tuple[LayoutSpec, LayoutSpec] = (NARROW, NARROW),
    replicas: tuple[int, int] = (1, 1),
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    **changes: Any,
) -> Plan:
    """A plan of a prefill and a decode pool; `prefill` and `decode` are engine settings, `changes` the plan's."""
    common = {"max_num_seqs": 6, "max_tokens_per_step": 1024}
    pools = (
        Pool(role="prefill", replicas=replicas[0], layout=layouts[0], settings=EngineSettings(**common | (prefill or {}))),
        Pool(role="decode", replicas=replicas[1], layout=layouts[1], settings=EngineSettings(**common | (decode or {}))),
    )  # fmt: skip
    return Plan(
        model=model, hardware=MACHINES[model], gpus=8 * sum(replicas), pools=pools, workload=workload,
        acceptance=ACCEPTANCE, **changes,
    )  # fmt: skip


def deploy(
    plan: Plan, num_blocks: tuple[int | None, int | None] = (None, None), host_s: dict[str, float] | None = None
) -> tuple[Deployment, ...]:
    """The plan's deployments, with other pool sizes or other host times if given."""
    deployments = []
    for deployment, blocks in zip(resolve(plan), num_blocks, strict=True):
        budget = deployment.budget if blocks is None else replace(deployment.budget, num_blocks=blocks)
        host = deployment.host
        times = {name: getattr(host, name).model_copy(update={"value": s}) for name, s in (host_s or {}).items()}
        deployments.append(replace(deployment, budget=budget, host=host.model_copy(update=times)))
    return tuple(deployments)


def serve(
    deployments: Sequence[Deployment], workload: Workload, every_step: bool = False
) -> tuple[RunRecord, list[RequestSpec], list[Scheduler]]:
    """The record, the requests, and the schedulers of both pools as the run left them; integrity is checked."""
    requests = generate_requests(workload)
    run = _Run(deployments, workload, ACCEPTANCE, len(requests))
    for group in run.groups:
        group.check_integrity, group.every_step = True, every_step
    return run.serve(requests), requests, [s for group in run.groups for s in group.schedulers]


# What goes in comes out


def bytes_of_a_transfer(model: str, prompt_tokens: int, nextn: int, decode: LayoutSpec) -> float:
    """KV that all receiving ranks read for one prompt, counted from the model cards.

    V4.1 on SM100: (3 owners at ratio 2 and one at 1) x (288 + 68) B = 890 B a token, and windows are replayed. V4-Flash:
    21 CSA layers with 584 + 68 B per 4 tokens, 20 HCA layers with 584 B per 128; per request 43 rings, and one of the
    draft, of 128 + 1 + nextn records, and FP32 values and gates of open entries: 4 numbers a dimension of 512 + 128 for
    8 tokens in CSA, 2 of 512 for 128 tokens in HCA, and for the drafts. V3: a latent of 512 + 64 in BF16 per layer, and
    that of the draft's layer; dcp ranks have a share each.
    """
    ranks = decode.cp * decode.tp
    drafting = int(nextn > 0)
    if model == "deepseek-v4.1-flash":
        return ranks * 890 * prompt_tokens
    if model == "deepseek-v3":
        return ranks * (61 + drafting) * 2 * 576 * prompt_tokens / decode.dcp
    windows = (43 + drafting) * (129 + nextn) * 584
    tails = 21 * 4 * 4 * 640 * (8 + nextn) + 20 * 4 * 2 * 512 * (128 + nextn)
    return ranks * (windows + tails + (21 * 652 / 4 + 20 * 584 / 128) * prompt_tokens)


def assert_conserved(record: RunRecord, requests: list[RequestSpec], closed: bool) -> None:
    """Every request of an open loop, and every finished one of a closed loop, was served in full and in order."""
    wanted = np.array([r.output_tokens for r in requests])
    finished, sent = record.finish_s >= 0, record.arrival_s >= 0
    assert finished.all() or closed
    assert (record.output_tokens[finished] == wanted[finished]).all()
    assert (record.output_tokens[~finished] < wanted[~finished]).all()
    assert (record.output_tokens[~sent] == 0).all()
    assert sum(record.delivery_tokens) == record.output_tokens.sum()
    begun = record.output_tokens > 0
    assert (record.arrival_s[begun] < record.first_token_s[begun]).all()
    assert (record.first_token_s[begun] <= record.last_token_s[begun]).all()
    assert (record.last_token_s[finished] == record.finish_s[finished]).all()
    alone = finished & (wanted == 1)
    assert (record.first_token_s[alone] == record.finish_s[alone]).all()
    assert not record.refused


def assert_returned(schedulers: list[Scheduler]) -> None:
    """Nobody is left in a pool, and all of its memory is free."""
    for scheduler in schedulers:
        scheduler.check_integrity()
        assert (scheduler.num_waiting, scheduler.num_running, scheduler.num_kept) == (0, 0, 0)
        assert not scheduler.pool.references
        assert not scheduler.to_fetch()


@dataclass(frozen=True)
class Case:
    """A random small plan, and blocks of its pools."""

    plan: Plan
    num_blocks: tuple[int | None, int | None]

    @property
    def closed(self) -> bool:
        return isinstance(self.plan.workload.arrivals, ClosedLoop)

    def serve(self, every_step: bool = False) -> tuple[RunRecord, list[RequestSpec], list[Scheduler]]:
        return serve(deploy(self.plan, self.num_blocks), self.plan.workload, every_step)


OUTPUTS: list[Lengths] = [
    FixedLength(tokens=1),
    FixedLength(tokens=2),
    LognormalLength(mean=4, sigma=1.5, maximum=60),  # a third of them are 1
    LognormalLength(mean=120, sigma=0.6, maximum=300),
]
ARRIVALS: list[Arrivals] = [
    PoissonArrivals(rate=2),
    PoissonArrivals(rate=100),
    PoissonArrivals(rate=10_000),
    ClosedLoop(concurrency=12, ramp_s=0.2),
    ClosedLoop(concurrency=5, ramp_s=0.5, warm_up_s=0.2, measure_s=1.5),
]
ROUTERS: list[RouterName] = ["round_robin", "least_loaded", "cache_aware"]


@st.composite
def cases(draw: st.DrawFn) -> Case:
    """Plans of two pools; blocks hold a few requests of 7 blocks (900 tokens) and 10 (of 1,200) at most."""
    model = draw(st.sampled_from(sorted(MACHINES)))
    takers = [WIDE, MIXED, NARROW, *([SHARED_CONTEXT] if model == "deepseek-v3" else [])]
    replays = ["off", "compact"] if model == "deepseek-v4.1-flash" else ["off"]
    most_drafts = 3 if model == "deepseek-v4.1-flash" else 1
    asynchronous = st.booleans()
    workload = Workload(
        isl=draw(st.sampled_from([FixedLength(tokens=300), LognormalLength(mean=300, sigma=0.9, maximum=900)])),
        osl=draw(st.sampled_from(OUTPUTS)),
        arrivals=draw(st.sampled_from(ARRIVALS)),
        num_requests=16,
        seed=draw(st.integers(0, 9)),
    )
    plan = two_pools(
        model,
        workload,
        (draw(st.sampled_from([WIDE, MIXED, NARROW])), draw(st.sampled_from(takers))),
        (draw(st.integers(1, 2)), draw(st.integers(1, 2))),
        {
            "async_scheduling": draw(asynchronous),
            "replay": (replay := draw(st.sampled_from(replays))),
            "keep_tokens": 1 if replay == "compact" else 140,
            "max_tokens_per_step": draw(st.sampled_from([256, 1024])),
        },
        {
            "async_scheduling": draw(asynchronous),
            "replay": draw(st.sampled_from(replays)),
            "nextn": draw(st.integers(0, most_drafts)),
            "max_num_seqs": draw(st.sampled_from([2, 6])),
            "max_tokens_per_step": draw(st.sampled_from([128, 1024])),
        },
        router=draw(st.sampled_from(ROUTERS)),
    )
    return Case(plan, (draw(st.sampled_from([None, 8, 16])), draw(st.sampled_from([None, 11, 17]))))


@settings(max_examples=60)
@given(case=cases())
def test_what_goes_in_comes_out(case: Case) -> None:
    """Requests, tokens, bytes on the links and memory, whatever waits, is held back or is preempted."""
    record, requests, schedulers = case.serve()
    assert_conserved(record, requests, case.closed)
    if not case.closed:
        assert_returned(schedulers)
    (_, decode) = case.plan.pools
    sent = {
        r.id: bytes_of_a_transfer(case.plan.model, r.prompt_tokens, decode.settings.nextn, decode.layout)
        for r in requests
        if r.output_tokens > 1
    }
    assert record.transfers is not None
    moved = list(record.transfers.num_bytes)
    if case.closed:  # some are cut off
        begun = [i for i in sent if record.output_tokens[i] > 0]
        assert len(begun) <= len(moved) <= len(sent)
        assert sum(sent[i] for i in begun) <= sum(moved) * (1 + 1e-12)
    else:
        assert sorted(moved) == pytest.approx(sorted(sent.values()), rel=1e-12)
    assert list(record.transfers.end_s) == sorted(record.transfers.end_s)


@settings(max_examples=25)
@given(case=cases())
def test_skipping_ahead_changes_nothing_and_neither_does_repeating(case: Case) -> None:
    fast, slow, again = case.serve()[0], case.serve(every_step=True)[0], case.serve()[0]
    for name in ("arrival_s", "first_token_s", "last_token_s", "finish_s", "output_tokens"):
        np.testing.assert_allclose(getattr(fast, name), getattr(slow, name), rtol=1e-9, atol=1e-12, err_msg=name)
        assert (getattr(fast, name) == getattr(again, name)).all()
    assert fast.num_preemptions == slow.num_preemptions
    assert fast.prefill is not None
    assert slow.prefill is not None
    for a, b in ((fast.steps, slow.steps), (fast.prefill.steps, slow.prefill.steps)):
        for column in ("end_s", "seconds", "decodes", "decode_rows", "prefill_rows", "context_tokens", "kept_tokens"):
            left, right = (np.sort(np.asarray(getattr(steps, column))) for steps in (a, b))
            np.testing.assert_allclose(left, right, rtol=1e-9, atol=1e-12, err_msg=column)
    assert fast.transfers is not None
    assert slow.transfers is not None
    assert again.transfers is not None
    np.testing.assert_allclose(fast.transfers.end_s, slow.transfers.end_s, rtol=1e-9)
    np.testing.assert_allclose(fast.transfers.seconds, slow.transfers.seconds, rtol=1e-6, atol=1e-12)
    assert list(fast.transfers.end_s) == list(again.transfers.end_s)
    assert list(fast.steps.end_s) == list(again.steps.end_s)
    assert list(fast.delivery_s) == list(again.delivery_s)
