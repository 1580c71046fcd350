"""Mesh arithmetic against enumeration, memory against published sizes, and plan files against bad input."""

from __future__ import annotations

import itertools
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from deepinfer.errors import InfeasibleError, UsageError
from deepinfer.files import write_file
from deepinfer.hardware.spec import Accelerator, load_hardware
from deepinfer.layout.memory import memory_budget, state_bytes_per_request, weight_items
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import LayoutSpec, Plan, Pool, Slo, load_plan
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import Percentiles, Summary
from deepinfer.model.hf import load_model
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.spec import FixedLength, LognormalLength, PoissonArrivals, Workload

V41, V3 = load_model("deepseek-v4.1-flash"), load_model("deepseek-v3")

# --- ranks ----------------------------------------------------------------------------------------------------------

DEGREES = st.integers(1, 8)


@given(dp=DEGREES, cp=st.sampled_from([1, 2, 3, 4, 8]), tp=st.sampled_from([1, 2, 4]), data=st.data())
@settings(max_examples=300, deadline=None)
def test_both_planes_number_the_same_ranks(dp: int, cp: int, tp: int, data: st.DataObject) -> None:
    ranks = dp * cp * tp
    group = data.draw(st.sampled_from([n for n in range(1, ranks + 1) if ranks % n == 0]))
    assume(group % (cp * tp) == 0 or (cp * tp) % group == 0)
    etp = data.draw(st.sampled_from([n for n in range(1, group + 1) if group % n == 0]))
    layout = ParallelLayout(dp, cp, tp, group // etp, etp)

    attention = [layout.coordinates(r) for r in range(ranks)]
    expert = [layout.expert_coordinates(r) for r in range(ranks)]
    # In order and each once: the planes are two ways to read the rank as a mixed-radix number.
    assert attention == list(itertools.product(range(dp), range(cp), range(tp)))
    assert expert == list(itertools.product(range(layout.copies), range(layout.ep), range(etp)))
    assert layout.copies * layout.ep * layout.etp == layout.num_ranks == ranks

    # Ranks step together when a chain of shared replicas and shared expert groups joins them.
    leader = list(range(ranks))
    for key in [[a[0] for a in attention], [e[0] for e in expert]] * ranks:
        lowest = {k: min(leader[r] for r in range(ranks) if key[r] == k) for k in set(key)}
        joined = [lowest[k] for k in key]
        if joined == leader:
            continue
        leader = joined
    assert leader == [r // layout.step_group * layout.step_group for r in range(ranks)]


@given(dp=DEGREES, cp=DEGREES, tp=st.integers(1, 3), ep=st.integers(1, 16), etp=st.integers(1, 3))
@settings(max_examples=200, deadline=None)
def test_a_layout_is_refused_exactly_when_the_planes_do_not_fit(dp: int, cp: int, tp: int, ep: int, etp: int) -> None:
    covers = (dp * cp * tp) % (ep * etp) == 0
    nested = (cp * tp) % (ep * etp) == 0 or (ep * etp) % (cp * tp) == 0
    if covers and nested:
        ParallelLayout(dp, cp, tp, ep, etp)
        return
    with pytest.raises(UsageError, match=rf"ep x etp = {ep * etp}"):
        ParallelLayout(dp, cp, tp, ep, etp)


@pytest.mark.parametrize(
    ("flags", "ranks", "dp", "copies"),
    [({"ep": 8}, 8, 8, 1), ({"ep": 2, "dp": 8}, 8, 8, 4), ({"ep": 2, "cp": 8}, 8, 1, 4)],
)
def test_deepinfers_own_examples(flags: dict[str, int], ranks: int, dp: int, copies: int) -> None:
    layout = ParallelLayout.from_flags(**flags)
    assert (layout.num_ranks, layout.dp, layout.copies) == (ranks, dp, copies)
    assert layout.step_group == max(flags["ep"], flags.get("cp", 1))


@pytest.mark.parametrize("name", ["dp", "cp", "tp", "ep", "etp"])
def test_degrees_below_one_are_named(name: str) -> None:
    with pytest.raises(UsageError, match=f"{name} must be at least 1, got 0"):
        ParallelLayout(**{name: 0})


# --- memory ---------------------------------------------------------------------------------------------------------


def settings_of(**changes: Any) -> EngineSettings:
    return EngineSettings(**({"max_num_seqs": 32, "max_tokens_per_step": 2048, "nextn": 5} | changes))


def with_memory(accelerator: Accelerator, num_bytes: float) -> Accelerator:
    hbm = accelerator.hbm_bytes.model_copy(update={"value": num_bytes})
    return accelerator.model_copy(update={"hbm_bytes": hbm})


@given(
    ep=st.sampled_from([4, 8, 16]),
    cp=st.sampled_from([1, 2, 4]),
    seqs=st.integers(1, 300),
    rows=st.integers(1, 8192),
    nextn=st.integers(0, 5),
    share=st.floats(0.8, 1.0),
)
@settings(max_examples=80, deadline=None)
def test_a_budget_spends_the_usable_memory(ep: int, cp: int, seqs: int, rows: int, nextn: int, share: float) -> None:
    """Items and KV blocks leave less than one block over."""
    layout = ParallelLayout(dp=ep // cp, cp=cp, ep=ep)
    chosen = settings_of(max_num_seqs=seqs, max_tokens_per_step=rows, nextn=nextn, memory_utilization=share)
    budget = memory_budget(V41, layout, load_hardware("gb200-nvl72"), chosen)
    assert budget.usable_bytes == pytest.approx(186e9 * share)
    left = budget.usable_bytes - sum(size for _, size in budget.items) - budget.kv_bytes
    assert -1.0 <= left < budget.block_bytes
    assert all(size >= 0 for _, size in budget.items)
    assert budget.num_blocks >= seqs
    assert budget.num_slots >= 1.2 * seqs


def test_request_state_is_the_published_one() -> None:
    """DeepInfer 0.1.0's cache engine, draft length 5: 3,128,928 B with its alignment."""
    assert state_bytes_per_request(V41, 5) == pytest.approx(3_128_928, rel=5e-4)
    assert state_bytes_per_request(V3, 1) == 0


def test_state_of_a_v4_request() -> None:
    """Rings of 128 + 2 records in 43 layers and the MTP block; FP32 tails of 21 CSA and 20 HCA compressors.

    transformers 5.24.0: CSA makes 2 x 512 values and gates a token, 2 x 128 of each for index keys, pools 8 tokens;
    HCA makes 512 of each and pools 128.
    """
    rings = 44 * 130 * 584
    tails = 21 * 4 * (4 * 512 + 4 * 128) * (8 + 1) + 20 * 4 * (2 * 512) * (128 + 1)
    assert state_bytes_per_request(load_model("deepseek-v4-flash"), 1) == rings + tails


def test_a_kv_block_is_the_published_one() -> None:
    budget = memory_budget(V41, ParallelLayout(dp=8, ep=8), load_hardware("b200"), settings_of())
    assert budget.block_bytes == 113_920
    assert budget.max_requests(tokens=1000.0, block_tokens=128) == budget.num_blocks // 8


@pytest.mark.parametrize("model", [V41, V3])
def test_more_gpus_never_leave_less_kv(model: Any) -> None:
    accelerator = load_hardware("gb200-nvl72")
    wider = [ParallelLayout(dp=n, ep=n) for n in (8, 16, 32, 64)]
    context = [ParallelLayout(dp=8 // n, cp=n, ep=8) for n in (1, 2, 4, 8)]
    for layouts in (wider, context):
        blocks = [memory_budget(model, x, accelerator, settings_of()).num_blocks for x in layouts]
        assert blocks == sorted(blocks)
        assert blocks[-1] > blocks[0]


def test_weights_of_all_ranks_cover_the_checkpoint() -> None:
    """510.29 GB (audit of the checkpoint): once over the ranks, but for what is replicated on purpose."""
    whole = dict(weight_items(V41, ParallelLayout()))
    assert sum(whole.values()) == pytest.approx(510.29e9, rel=1e-3)
    for layout in (ParallelLayout(dp=8, ep=8), ParallelLayout(dp=16, ep=8), ParallelLayout(dp=2, cp=8, ep=4, etp=2)):
        rank = dict(weight_items(V41, layout))
        assert rank["dense weights"] == whole["dense weights"]
        assert rank["Engram tables"] * layout.num_ranks == pytest.approx(whole["Engram tables"])
        assert rank["expert weights"] * layout.num_ranks == pytest.approx(layout.copies * whole["expert weights"])
        draft_experts = 3 * 128 * 35_389_440 * (0.5 + 1 / 32)
        shared_draft = whole["draft weights"] - draft_experts
        assert rank["draft weights"] == pytest.approx(shared_draft + draft_experts / layout.expert_group)


def test_what_does_not_fit_says_by_how_much() -> None:
    """With the missing bytes it fits, with a little less it does not."""
    accelerator, layout, chosen = load_hardware("h800"), ParallelLayout(dp=8, ep=8), settings_of(nextn=1)
    with pytest.raises(InfeasibleError) as caught:
        memory_budget(V3, layout, accelerator, chosen)
    found = re.search(
        r"deepseek-v3 on h800 with ep8 dp8 needs .* per GPU for 32 requests, ([\d.]+) GB more than the "
        r"usable 72 GB",
        str(caught.value),
    )
    assert found
    missing = float(found[1]) * 1e9 / chosen.memory_utilization
    assert missing > 671e9 / 8 - 80e9
    enough, short = (with_memory(accelerator, 80e9 + missing * share) for share in (1.02, 0.98))
    assert memory_budget(V3, layout, enough, chosen).num_blocks >= 32
    with pytest.raises(InfeasibleError):
        memory_budget(V3, layout, short, chosen)


# --- plan files -----------------------------------------------------------------------------------------------------


def summary(value: float = 0.25) -> Summary:
    latencies = {
        f"{name}_s": Percentiles(mean=value, p50=value, p90=1.0, p95=1.5, p99=2.0)
        for name in ("ttft", "tpot", "itl", "e2e")
    }
    numbers = {name: 1.5 for name, field in Summary.model_fields.items() if field.annotation is float}
    counts = {name: 7 for name, field in Summary.model_fields.items() if field.annotation is int}
    return Summary.model_validate(numbers | counts | latencies)


def plan(**changes: Any) -> Plan:
    pool = Pool(replicas=2, layout=LayoutSpec(dp=8, ep=8), settings=settings_of(replay="compact", kv_format="fp4"))
    workload = Workload(
        isl=LognormalLength(mean=4000.0, sigma=0.7, maximum=32_000),
        osl=FixedLength(tokens=500),
        arrivals=PoissonArrivals(rate=1 / 3),
        num_requests=100,
    )
    acceptance = Acceptance(rates=(0.9, 0.8, 0.1 + 0.2), source="made up for tests")
    fields: dict[str, Any] = {
        "model": "deepseek-v4.1-flash",
        "hardware": "b200",
        "gpus": 16,
        "pools": (pool,),
        "workload": workload,
        "acceptance": acceptance,
        "slo": Slo(ttft_s=1.0, tpot_s=0.02, percentile=99),
        "prediction": summary(),
    }
    return Plan(**(fields | changes))


def written(folder: Path, text: str | bytes) -> str:
    path = folder / "plan.json"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def edited(**changes: Any) -> str:
    """The plan's file with some fields replaced, None: left out."""
    fields = json.loads(plan().to_json()) | changes
    return json.dumps({name: value for name, value in fields.items() if value is not None})


@pytest.mark.parametrize("prediction", [None, summary(), summary(float("inf"))])
def test_a_plan_survives_its_file(prediction: Summary | None, tmp_path: Path) -> None:
    before = plan(prediction=prediction)
    assert load_plan(written(tmp_path, before.to_json())) == before


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "not valid JSON"),
        ("{", "not valid JSON"),
        (b"\xff\xfe", "not UTF-8"),
        ("[1]", "holds no JSON object"),
        ("null", "holds no JSON object"),
        (edited(version=2), "version 2; this deepinfer reads version 1"),
        (edited(version="1"), "version '1'"),
        (edited(version=None), "version None"),
        (edited(colour="red"), "colour"),
        (edited(gpus=0), "gpus"),
        (edited(gpus="many"), "gpus"),
        (edited(model=None), "model"),
        (edited(pools=[]), "pools"),
        (edited(pools=[{"replicas": 1, "layout": {"pp": 2}, "settings": {}}]), r"pools\.0\.layout\.pp"),
        (edited(pools=[{"replicas": 1, "layout": {}, "settings": {"nextn": -1}}]), r"pools\.0\.settings\.nextn"),
        (edited(slo={"ttft_s": float("nan")}), r"slo\.ttft_s"),
        (edited(acceptance={"rates": [1.5], "source": "x"}), r"acceptance\.rates\.0"),
        (edited(workload={"arrivals": {"kind": "poisson", "rate": 1}}), "workload"),
    ],
)
def test_what_is_no_plan_is_refused(text: str | bytes, says: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=says):
        load_plan(written(tmp_path, text))


def test_a_plan_that_cannot_be_read(tmp_path: Path) -> None:
    for path in (tmp_path / "none.json", tmp_path):
        with pytest.raises(UsageError, match=f"cannot read plan {re.escape(str(path))}: "):
            load_plan(str(path))


def test_degrees_that_do_not_fit_are_refused_when_resolved() -> None:
    layout = ParallelLayout(dp=2, cp=2, tp=4, ep=8, etp=2, redundant_experts=8, dcp=2)
    assert LayoutSpec.of(layout).resolve() == layout
    assert str(layout) == "ep8 dp2 cp2 tp4 dcp2 etp2 +8 experts"
    with pytest.raises(UsageError, match="does not divide"):
        LayoutSpec(dp=2, ep=3).resolve()


# --- files are there whole or not at all ----------------------------------------------------------------------------


def test_a_file_is_written_into_new_folders_and_replaced(tmp_path: Path) -> None:
    path = tmp_path / "a" / "b" / "plan.json"
    for content in (b"first", b"second"):
        write_file(path, content)
        assert path.read_bytes() == content
    assert list(path.parent.iterdir()) == [path]


def test_a_parent_that_is_a_file(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"kept")
    for path in (tmp_path / "file" / "plan.json", tmp_path / "file" / "deeper" / "plan.json"):
        with pytest.raises(UsageError, match="cannot write"):
            write_file(path, b"content")
    assert [p.name for p in tmp_path.iterdir()] == ["file"]
    assert (tmp_path / "file").read_bytes() == b"kept"


def test_a_target_that_is_a_folder(tmp_path: Path) -> None:
    (tmp_path / "plan.json").mkdir()
    with pytest.raises(UsageError, match="cannot write"):
        write_file(tmp_path / "plan.json", b"content")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]


@pytest.mark.skipif(os.name != "posix" or os.geteuid() == 0, reason="the superuser writes into any folder")
def test_a_read_only_folder(tmp_path: Path) -> None:
    tmp_path.chmod(0o555)
    try:
        with pytest.raises(UsageError, match="cannot write"):
            write_file(tmp_path / "plan.json", b"content")
        assert not list(tmp_path.iterdir())
    finally:
        tmp_path.chmod(0o755)


@pytest.mark.parametrize("error", [OSError(28, "No space left on device"), KeyboardInterrupt()])
def test_a_write_that_breaks_off_keeps_the_old_file(
    error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    write_file(path, b"old")

    def fail(*_: object) -> None:
        raise error

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises((UsageError, KeyboardInterrupt)):
        write_file(path, b"new")
    assert [p.name for p in tmp_path.iterdir()] == ["plan.json"]
    assert path.read_bytes() == b"old"
