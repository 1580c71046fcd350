"""Plans of a prefill and a decode pool on the simulator: what goes in comes out, and times added up by hand."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from backends.sim.backend import _Run
from backends.sim.steptime import StepTimer
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.engine.transfer import KVTransfer, Side, kv_transfer
from deepinfer.errors import UsageError
from deepinfer.layout.plan import LayoutSpec, Plan, Pool, PoolRole, RouterName, load_plan
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
    giving, taking = (
        EngineSettings(**{"max_num_seqs": 6, "max_tokens_per_step": 1024} | (own or {})) for own in (prefill, decode)
    )
    pools = (
        Pool(role="prefill", replicas=replicas[0], layout=layouts[0], settings=giving),
        Pool(role="decode", replicas=replicas[1], layout=layouts[1], settings=taking),
    )
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
    deployments: Sequence[Deployment], workload: Workload, every_step: bool = False, at_once: bool = False
) -> tuple[RunRecord, list[RequestSpec], list[Scheduler]]:
    """The record, the requests, and the schedulers of both pools as the run left them; integrity is checked."""
    requests = generate_requests(workload)
    if at_once:
        requests = [replace(r, arrival_s=0.0) for r in requests]
    run = _Run(deployments, workload, ACCEPTANCE, len(requests))
    for group in run.groups:
        group.check_integrity, group.every_step = True, every_step
    return run.serve(requests), requests, [s for group in run.groups for s in group.schedulers]


# What goes in comes out


def bytes_of_a_transfer(model: str, prompt_tokens: int, nextn: int, decode: LayoutSpec) -> float:
    """KV that all receiving ranks read for one prompt, counted from the model cards.

    V4.1 on SM100: (3 owners at ratio 2 and one at 1) x (288 + 68) B = 890 B a token, and windows are replayed.
    V4-Flash: 21 CSA layers with 584 + 68 B per 4 tokens, 20 HCA layers with 584 B per 128; per request 43 rings, and
    one of the draft, of 128 + 1 + nextn records, and FP32 values and gates of open entries: 4 numbers a dimension of
    512 + 128 for 8 tokens in CSA, 2 of 512 for 128 tokens in HCA, and for the drafts. V3: a latent of 512 + 64 in BF16
    per layer, and that of the draft's layer; dcp ranks have a share each.
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


@settings(max_examples=40)
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


@settings(max_examples=15)
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


def test_a_tiny_decode_pool_holds_back_the_prefill_pool_and_preempts() -> None:
    """Twelve prompts of 450 tokens (4 blocks) at once; 10 blocks to prefill in, so that two are held at most.

    Requests grow from 4 to 7 blocks where they decode: four of them fill 17 blocks long before one has ended.
    """
    workload = Workload(
        isl=FixedLength(tokens=450), osl=FixedLength(tokens=400), arrivals=PoissonArrivals(rate=10_000), num_requests=12
    )
    plan = two_pools("deepseek-v3", workload, decode={"nextn": 1})
    record, requests, schedulers = serve(deploy(plan, (10, 17)), workload)
    assert_conserved(record, requests, closed=False)
    assert_returned(schedulers)
    assert record.num_preemptions > 0
    assert record.prefill is not None
    assert record.transfers is not None
    steps, moved_s = record.prefill.steps, np.asarray(record.transfers.end_s)
    prefilled = np.cumsum(np.asarray(steps.prefill_rows)) // 450
    held = prefilled - np.searchsorted(moved_s, np.asarray(steps.end_s), side="right")
    assert held.max() == 2
    assert moved_s[-1] > record.finish_s.min(), "the last prompts wait until the first requests have left"


@pytest.mark.parametrize("every_step", [True, False])
def test_a_replica_may_only_receive_while_its_peers_decode(every_step: bool) -> None:
    """Two replicas step together; one decodes for long before the other's first request has its KV."""
    workload = Workload(
        isl=FixedLength(tokens=300), osl=FixedLength(tokens=100), arrivals=PoissonArrivals(rate=10_000), num_requests=16
    )
    decode = {"max_num_seqs": 2, "max_tokens_per_step": 128}
    plan = two_pools(
        "deepseek-v3", workload, (WIDE, MIXED), (2, 1), {"max_tokens_per_step": 256, "async_scheduling": False}, decode,
        router="round_robin",
    )  # fmt: skip
    record, requests, schedulers = serve(deploy(plan), workload, every_step)
    assert_conserved(record, requests, closed=False)
    assert_returned(schedulers)


# By hand

HOST_S = {
    "schedule_s": 1.5e-3, "schedule_s_per_request": 2e-4, "deliver_s_per_request": 3e-4,
    "launch_s_per_kernel": 1e-6, "step_gap_s": 1e-4,
}  # fmt: skip
NIC_BYTES_PER_S = 0.86 * 50e9
"""What a read of KV reaches of a NIC of 400 Gb/s, which B200 and H200 hosts have one of per GPU; 10 us are latency."""


def prompt_step(start: int, rows: int, kept: int, is_last: bool) -> StepPlan:
    nobody = np.zeros(0, dtype=np.int64)
    return StepPlan(0, (PrefillChunk(0, start, rows, kept, is_last),), DecodeBatch(nobody, nobody, 0))


def decode_step(context: int) -> StepPlan:
    return StepPlan(0, (), DecodeBatch(np.zeros(1, dtype=np.int64), np.array([context], dtype=np.int64), 0))


def timers(deployments: Sequence[Deployment]) -> list[StepTimer]:
    return [StepTimer(d, CostModel(d.cluster.accelerator)) for d in deployments]


@pytest.mark.parametrize("asynchronous", [True, False])
@pytest.mark.parametrize(
    ("model", "replay", "replayed"),
    [("deepseek-v3", "off", 0), ("deepseek-v4.1-flash", "off", 128), ("deepseek-v4.1-flash", "compact", 140)],
)
def test_one_request_by_hand(model: str, replay: str, replayed: int, asynchronous: bool) -> None:
    """5,000 prompt tokens in chunks of 2,048 and 4 output tokens, alone in both pools; every rank of 8 has a NIC.

    Before each step the host takes 1.7 ms, and 1 us per kernel unless the step only decodes; 0.3 ms after one that has
    a token. V3: the prefill pool's token reaches the user with the KV, and three steps follow. V4.1: the last tokens of
    the prompt are computed again, which gives the first token. Asynchronous: only the first launch and the last
    delivery of each pool are not hidden, and steps are a gap apart.
    """
    workload = Workload(
        isl=FixedLength(tokens=5000), osl=FixedLength(tokens=4), arrivals=PoissonArrivals(rate=1), num_requests=1
    )
    own: dict[str, Any] = {"async_scheduling": asynchronous, "max_tokens_per_step": 2048}
    settings_ = own | {"replay": replay}
    plan = two_pools(model, workload, prefill=settings_ | {"keep_tokens": 1}, decode=settings_)
    deployments = deploy(plan, host_s=HOST_S)
    record, (request,), _ = serve(deployments, workload)
    giving, taking = timers(deployments)

    kept = (1, 1, 1) if replay == "compact" else (2048, 2048, 904)
    starts, rows = (0, 2048, 4096), (2048, 2048, 904)
    chunks = [
        giving.seconds([prompt_step(a, n, k, a == 4096)], (), 0, 1) for a, n, k in zip(starts, rows, kept, strict=True)
    ]
    decodes = [taking.seconds([decode_step(context)], (), 0, 1) for context in (5000, 5001, 5002)]
    bytes_per_token = 61 * 2 * 576 if model == "deepseek-v3" else 890
    transfer = 10e-6 + 5000 * bytes_per_token / NIC_BYTES_PER_S
    before, after, gap = 1.7e-3, 0.3e-3, 1e-4

    launch = giving.num_kernels * 1e-6
    prefilled = sum(chunks) + after + (before + launch + 2 * gap if asynchronous else 3 * (before + launch))
    first = prefilled + transfer
    if replayed:
        again = taking.seconds([prompt_step(5000 - replayed, replayed, replayed, True)], (), 0, 1)
        first += before + taking.num_kernels * 1e-6 + again + after
    if asynchronous:
        assert min(chunks + decodes) > before + launch + after
        finish = first + sum(decodes) + (3 * gap if replayed else before + 2 * gap + after)
    else:
        finish = first + sum(decodes) + 3 * (before + after)
    assert record.first_token_s[0] - request.arrival_s == pytest.approx(first, rel=1e-12)
    assert record.finish_s[0] - request.arrival_s == pytest.approx(finish, rel=1e-12)
    assert record.transfers is not None
    assert record.transfers.seconds[0] == pytest.approx(transfer, rel=1e-9)
    assert record.transfers.num_bytes[0] == 8 * 5000 * bytes_per_token


@pytest.mark.parametrize(
    ("layouts", "replicas", "links", "rounds"),
    [
        ((NARROW, NARROW), (1, 2), 8, (1, 2)),  # one sender, two receivers: its 8 NICs serve one after the other
        ((NARROW, NARROW), (2, 1), 8, (1, 2)),  # two senders, one receiver
        ((NARROW, NARROW), (2, 2), 8, (1, 1)),  # two of each
        ((NARROW, WIDE), (1, 1), 1, (1, 1)),  # receivers of one NIC each: the sender's 8 have room for both
        ((WIDE, NARROW), (1, 1), 1, (1, 1)),  # senders of one NIC each: they send 8 copies
        ((WIDE, WIDE), (1, 1), 1, (1, 1)),
        ((NARROW, MIXED), (1, 1), 4, (1, 1)),
    ],
)
def test_prompts_that_end_together_share_links(
    layouts: tuple[LayoutSpec, LayoutSpec], replicas: tuple[int, int], links: int, rounds: tuple[int, int]
) -> None:
    """Two prompts of 700 tokens fit one step; their KV goes at once where there are links for both, else in turns."""
    workload = Workload(
        isl=FixedLength(tokens=700), osl=FixedLength(tokens=5), arrivals=PoissonArrivals(rate=1), num_requests=2
    )
    plan = two_pools("deepseek-v3", workload, layouts, replicas, {"max_tokens_per_step": 2048})
    record, _, _ = serve(deploy(plan), workload, at_once=True)
    taker = layouts[1]
    one = 10e-6 + 700 * 61 * 2 * 576 * taker.cp * taker.tp / links / NIC_BYTES_PER_S
    assert record.transfers is not None
    assert sorted(record.transfers.seconds) == pytest.approx([one * n for n in rounds], rel=1e-6)
    ends = np.asarray(record.transfers.end_s)
    assert ends[1] - ends[0] == pytest.approx(one * (rounds[1] - 1), abs=1e-9)


# Pools of unequal kinds, and plans that ask for what does not go together


def plan_of(*pools: Pool, gpus: int = 16, hardware: str = "b200", model: str = "deepseek-v4.1-flash") -> Plan:
    workload = Workload(
        isl=FixedLength(tokens=300), osl=FixedLength(tokens=9), arrivals=PoissonArrivals(rate=50), num_requests=12
    )
    return Plan(model=model, hardware=hardware, gpus=gpus, pools=pools, workload=workload, acceptance=ACCEPTANCE)


def pool_of(role: PoolRole, layout: LayoutSpec = NARROW, **changes: Any) -> Pool:
    own = EngineSettings(max_num_seqs=6, max_tokens_per_step=1024, kv_format=changes.pop("kv_format", None))
    return Pool(role=role, replicas=1, layout=layout, settings=own, **changes)


def link_of(plan: Plan) -> KVTransfer:
    giver, taker = resolve(plan)
    return kv_transfer(taker.model, 0, Side(giver.layout, giver.cluster), Side(taker.layout, taker.cluster))


def test_a_prefill_pool_of_another_kind() -> None:
    """8 H200 prefill for 8 B200: each as fast as its own kind, V4's KV records for both, and 24 GPUs are paid for."""
    prefill = pool_of("prefill", hardware="h200", gpus=8, kv_format="fp8-v4")
    plan = plan_of(prefill, pool_of("decode", gpus=8, kv_format="fp8-v4"), gpus=24)
    deployments = resolve(plan)
    assert [d.cluster.accelerator.name for d in deployments] == ["h200", "b200"]
    assert [d.num_gpus for d in deployments] == [12, 12]
    record, requests, schedulers = serve(deployments, plan.workload)
    assert_conserved(record, requests, closed=False)
    assert_returned(schedulers)
    assert record.num_gpus == 24
    assert link_of(plan).bytes_per_token == 2.5 * (584 + 132)
    assert link_of(plan).link == "scale-out"


@pytest.mark.parametrize(
    ("hardware", "gpus", "layout", "expected"),
    [
        ("b200", None, LayoutSpec(cp=4, ep=4), "scale-up"),  # 8 in all, of a domain of 8
        ("b200", None, NARROW, "scale-out"),  # 16
        ("b200", 4, LayoutSpec(cp=4, ep=4), "scale-up"),
        ("b200", 8, NARROW, "scale-out"),  # either pool would fit a domain, not both
        ("gb200-nvl72", None, NARROW, "scale-up"),
        ("gb200-nvl72", 8, NARROW, "scale-up"),
    ],
)
def test_which_link_joins_pools_of_one_kind(hardware: str, gpus: int | None, layout: LayoutSpec, expected: str) -> None:
    pools = [pool_of(role, layout, gpus=gpus) for role in ("prefill", "decode")]
    transfer = link_of(plan_of(*pools, gpus=2 * layout.cp, hardware=hardware))
    assert transfer.link == expected
    nvlink = {"b200": 900e9, "gb200-nvl72": 900e9}[hardware]
    assert transfer.bytes_per_s == (NIC_BYTES_PER_S if expected == "scale-out" else pytest.approx(0.81 * nvlink))


@pytest.mark.parametrize(
    ("pools", "gpus", "message"),
    [
        ((pool_of("prefill"), pool_of("decode")), 15, "the plan's pools use 16 GPUs, its cluster has 15"),
        ((pool_of("prefill", gpus=4), pool_of("decode")), 16, "the prefill pool uses 8 GPUs and has 4"),
        ((pool_of("prefill", gpus=9), pool_of("decode")), 16, "the plan's pools use 17 GPUs, its cluster has 16"),
        (
            (pool_of("prefill", hardware="h200", gpus=8), pool_of("decode")),
            16,
            "pools must keep KV in one format, got fp8-v4 on h200 and fp4 on b200; set kv_format",
        ),
        ((pool_of("prefill", hardware="h2000"), pool_of("decode")), 16, "h2000"),
    ],
)
def test_pools_that_do_not_go_together(pools: tuple[Pool, ...], gpus: int, message: str) -> None:
    with pytest.raises(UsageError, match=re.escape(message)) as error:
        resolve(plan_of(*pools, gpus=gpus))
    assert "\n" not in str(error.value)


@pytest.mark.parametrize(
    "roles", [("mixed", "mixed"), ("prefill",), ("decode",), ("prefill", "prefill", "decode"), ("mixed", "decode")]
)
def test_pools_of_other_roles_are_refused_in_one_sentence(roles: tuple[PoolRole, ...], tmp_path: Path) -> None:
    good = plan_of(pool_of("prefill"), pool_of("decode")).model_dump(mode="json")
    one = good["pools"][0]
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(good | {"pools": [one | {"role": role} for role in roles]}), encoding="utf-8")
    expected = "pools must be one mixed, or one prefill and one decode, got " + ", ".join(sorted(roles))
    with pytest.raises(UsageError, match=expected) as error:
        load_plan(str(path))
    assert "\n" not in str(error.value)
