"""Work of execution graphs against published FLOP and byte tables, hand formulas, brute force and simulation.

The V4.1 tables count every product of the official engine's estimator (2 FLOP per multiply-add), evaluated apart
from this code; the reads per decode step follow from the record sizes of its cache engine.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from dataclasses import fields
from functools import lru_cache
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.build.common import BuildContext, Phase, Replay
from deepinfer.graph.build.experts import distinct_ranks
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.ops import Operator, OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape, visible_entries
from deepinfer.hardware.spec import ClusterSpec, load_hardware
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad, busiest_over_mean
from deepinfer.model.hf import load_model
from deepinfer.model.parameters import parameters
from deepinfer.model.spec import MoE

V41, V3 = "deepseek-v4.1-flash", "deepseek-v3"
V32, FLASH, PRO, KIMI, QWEN = "deepseek-v3.2", "deepseek-v4-flash", "deepseek-v4-pro", "kimi-k2", "qwen3-235b-a22b"
MODELS = [V41, V3, V32, FLASH, PRO, KIMI, QWEN]
KEEP = 140.0
CONTEXTS = [4096, 16_384, 65_536, 131_072, 262_144, 1_048_576]
ONE = ParallelLayout()
EVEN, UNSKEWED = ExpertLoad(balanced=True), ExpertLoad(sigma=0.0, drift=0.0, text_spread=0.0)
Select = Callable[[Operator], bool]


@lru_cache
def graph(
    model: str,
    layout: ParallelLayout = ONE,
    phase: Phase = "mixed",
    replay: Replay = "off",
    nextn: int = 0,
    load: ExpertLoad = TYPICAL_LOAD,
) -> ExecutionGraph:
    cluster = ClusterSpec(load_hardware("b200"), 16)
    features = GraphFeatures(phase, replay, nextn, expert_load=load)
    return build_graph(load_model(model), layout, cluster, features)


def prompt(rows: float, context: float = 0.0, kept: float | None = None) -> StepShape:
    return StepShape(None, (Sequences(1.0, rows, context, rows if kept is None else kept, 1.0),))


def decode(context: float, count: float = 1.0, drafts: float = 0.0) -> StepShape:
    """Requests whose last row sees `context` tokens, itself included."""
    return StepShape(Sequences.decoding(count, drafts, context - 1.0 - drafts))


def works(g: ExecutionGraph, shape: StepShape, select: Select = lambda _: True) -> list[Work]:
    """Work of every issued operator that `select` picks, repeated layers repeated."""
    done = [operator.work(shape) for operator in g.operators]
    return [done[step.operator] for step in g.steps if select(g.operators[step.operator])]


def flops(g: ExecutionGraph, shape: StepShape, select: Select = lambda _: True) -> float:
    return float(sum(w.flops for w in works(g, shape, select)))


def named(*names: str) -> Select:
    return lambda operator: operator.name in names


# --- published totals -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("replay", "gflop_per_token"),
    [("off", [34.0, 34.6, 35.3, 36.0, 37.4, 45.5]), ("compact", [17.8, 17.6, 17.8, 18.2, 19.0, 23.8])],
)
def test_v41_prefill_flops_are_the_published_ones(replay: Replay, gflop_per_token: list[float]) -> None:
    g = graph(V41, phase="prefill", replay=replay)
    kept = KEEP if replay == "compact" else None
    found = [flops(g, prompt(float(n), kept=kept)) / n / 1e9 for n in CONTEXTS]
    assert found == pytest.approx(gflop_per_token, rel=5e-3)


def test_v41_decode_flops_are_the_published_ones() -> None:
    found = [flops(graph(V41, phase="decode"), decode(float(n))) / 1e9 for n in CONTEXTS]
    assert found == pytest.approx([35.7, 36.4, 37.4, 38.7, 41.4, 57.5], rel=5e-3)


@pytest.mark.parametrize(
    ("phase", "published"), [("decode", [10.25, 3.22, 1.88, 20.7, 1.32]), ("prefill", [5.15, 1.54, 0.40, 10.69, 0.0])]
)
def test_v41_flops_at_64k_split_as_published(phase: Phase, published: list[float]) -> None:
    """Projections, core attention, index logits, experts with router, mHC and Engram, LM head."""
    tokens = 65_536.0
    if phase == "decode":
        g, shape, per = graph(V41, phase="decode"), decode(tokens), 1e9
    else:
        g, shape, per = graph(V41, phase="prefill", replay="compact"), prompt(tokens, kept=KEEP), tokens * 1e9
    parts = [
        named("q_a_kv", "q_b", "o_a", "o_b", "compressor", "index_keys", "index_q", "index_weights"),
        named("attention_decode", "attention_prefill"),
        named("index_score"),
        lambda o: o.name.startswith(("shared", "experts", "router", "engram", "hc_")),
        named("lm_head"),
    ]
    found = [flops(g, shape, part) / per for part in parts]
    assert found == pytest.approx(published, rel=1e-2, abs=0.01)
    assert sum(found) == pytest.approx(flops(g, shape) / per, rel=1e-9)  # nothing is outside the five


@pytest.mark.parametrize("context", [4096, 16_384, 65_536, 1_048_576])
def test_v41_decode_reads_of_a_sequence(context: int) -> None:
    """170 B of index keys per token of context, the reindexers' candidates, 38 x 512 records, 40 windows."""
    g, shape = graph(V41, phase="decode"), decode(float(context))
    scanned = sum(w.bytes_read for w in works(g, shape, named("index_score")))
    assert scanned == pytest.approx(170 * context + 4 * min(context, 16_384) * 68, rel=1e-6)
    queries = 40 * 64 * 512 * 2
    gathered = sum(w.bytes_read for w in works(g, shape, named("attention_decode"))) - queries
    assert gathered == pytest.approx(5.60e6 + 2.70e6, rel=1e-3)
    engram = sum(w.bytes_read for w in works(g, shape, named("engram_lookup")))
    assert engram == pytest.approx(12.7e3, rel=3e-3)


def test_v41_windows_are_read_alone_by_window_only_layers() -> None:
    g = graph(V41, phase="decode")
    block = next(b for b in g.blocks if b.name == "encoder window-only")
    attention = next(o for o in block.operators if o.name == "attention_decode")
    assert attention.work(decode(9000.0)).bytes_read == 128 * 528 + 64 * 512 * 2
    assert attention.work(decode(60.0)).bytes_read == 60 * 528 + 64 * 512 * 2


def test_v41_reads_every_dense_weight_once_a_step() -> None:
    """What a product reads beyond its rows is its weights: the intercept of bytes over rows."""
    g, products = graph(V41, phase="decode"), lambda o: o.kind is OpKind.GEMM
    two, four = (sum(w.bytes_read for w in works(g, decode(4096.0, n), products)) for n in (2.0, 4.0))
    dense = [p for p in parameters(load_model(V41)) if p.owner == "backbone" and p.placement == "replicated"]
    stored = sum(p.num_bytes for p in dense if p.item not in ("embedding", "hyper_connections"))
    assert 2 * two - four == pytest.approx(stored, rel=1e-9)


@pytest.mark.parametrize("ep", [1, 8])
def test_v41_reads_the_touched_experts_once_a_step(ep: int) -> None:
    g, layout_rows = graph(V41, ParallelLayout(dp=ep, ep=ep)), 4096.0
    experts = 288.8e9 / ep
    many = sum(w.bytes_read for w in works(g, decode(1000.0, layout_rows), named("experts")))
    activations = 40 * layout_rows * 6 * 5120 * 33 / 32
    assert many - activations == pytest.approx(experts, rel=1e-2)
    one = sum(w.bytes_read for w in works(graph(V41), decode(1000.0), named("experts")))
    assert one == pytest.approx(4.51e9, rel=1e-2)  # published: active expert bytes of a token


# --- V3, by hand ----------------------------------------------------------------------------------------------------

V3_QUERIES = 7168 * 1536 + 1536 * 128 * 192 + 7168 * 576
V3_OUTPUT = 128 * 128 * 7168
V3_EXPAND = 512 * 128 * (128 + 128)
V3_MOE = 9 * 3 * 7168 * 2048 + 7168 * 256
V3_FFN = 3 * (3 * 7168 * 18_432) + 58 * V3_MOE
V3_HEAD = 7168 * 129_280


@pytest.mark.parametrize("context", [1, 1000, 4096, 163_840])
def test_v3_decode_flops_by_hand(context: int) -> None:
    """Absorbed: 128 heads attend over 576 numbers a token and sum 512 of them."""
    core = 128 * (576 + 512) * context
    macs = 61 * (V3_QUERIES + V3_EXPAND + V3_OUTPUT + core) + V3_FFN + V3_HEAD
    assert flops(graph(V3, phase="decode"), decode(float(context))) == pytest.approx(2 * macs, rel=1e-9)


@pytest.mark.parametrize(("rows", "context"), [(1, 0), (4096, 0), (512, 8192)])
def test_v3_prefill_flops_by_hand(rows: int, context: int) -> None:
    """Expanded: keys and values of the whole context for every head, then causal attention of 192 and 128."""
    core = 128 * (192 + 128) * sum(range(context + 1, context + rows + 1))
    attention = rows * (V3_QUERIES + V3_OUTPUT) + (context + rows) * V3_EXPAND + core
    macs = 61 * attention + rows * V3_FFN + V3_HEAD
    shape = prompt(float(rows), float(context))
    assert flops(graph(V3, phase="prefill"), shape) == pytest.approx(2 * macs, rel=1e-9)


def test_v3_token_without_context_costs_its_active_parameters_twice() -> None:
    assert flops(graph(V3, phase="decode"), decode(1.0)) == pytest.approx(2 * 36.6e9, rel=2e-3)


def test_v3_decode_reads_its_cache() -> None:
    g = graph(V3, phase="decode")
    near, far = (sum(w.bytes_read for w in works(g, decode(c, 7.0), named("attention_decode"))) for c in (1e3, 9e3))
    assert far - near == pytest.approx(7 * 8000 * 70_272, rel=1e-9)


# --- V3.2, V4, Kimi-K2, Qwen3: by hand, and the published ratios ------------------------------------------------------

WEIGHT = {"fp4": 1.0, "fp8": 2.0, "bf16": 4.0, "tf32": 8.0}  # cost of a product (DeepInfer 0.1.0, flops_estimator.hpp)


@pytest.mark.parametrize(("model", "share"), [(FLASH, 0.10), (PRO, 0.27)])
def test_v4_decodes_at_1m_for_the_published_share_of_v32s_flops(model: str, share: float) -> None:
    """Published for a single token at 1M: V4-Flash 10% (9.8 times fewer), V4-Pro 27%, in FP8 equivalents."""
    ours, theirs = (
        sum(w.flops * WEIGHT[w.precision] for w in works(graph(m, phase="decode"), decode(1_048_576.0)))
        for m in (model, V32)
    )
    assert ours / theirs == pytest.approx(share, rel=0.02)


@pytest.mark.parametrize(
    ("model", "published"),
    [(FLASH, 13.27e9), (PRO, 49e9), (V32, 37.45e9), (KIMI, 32.6e9 - 163_840 * 7168), (QWEN, 22e9)],
)
def test_a_token_without_context_costs_its_active_parameters_twice(model: str, published: float) -> None:
    assert flops(graph(model, phase="decode"), decode(1.0)) == pytest.approx(2 * published, rel=0.025)


@pytest.mark.parametrize("context", [1, 1000, 4096, 163_840])
def test_v32_decode_flops_by_hand(context: int) -> None:
    """Absorbed attention over 2,048 tokens at most; 64 index heads of 128 score all of them."""
    core = 128 * (576 + 512) * min(context, 2048)
    index = 64 * 128 * context + 7168 * 128 + 1536 * 64 * 128 + 7168 * 64
    macs = 61 * (V3_QUERIES + V3_EXPAND + V3_OUTPUT + core + index) + V3_FFN + V3_HEAD
    assert flops(graph(V32, phase="decode"), decode(float(context))) == pytest.approx(2 * macs, rel=1e-9)


@pytest.mark.parametrize(("rows", "context"), [(1, 0), (4096, 0), (512, 8192)])
def test_v32_prefill_attends_to_the_selected_tokens_only(rows: int, context: int) -> None:
    seen_tokens = range(context + 1, context + rows + 1)
    g, shape = graph(V32, phase="prefill"), prompt(float(rows), float(context))
    core = 61 * 2 * 128 * (576 + 512) * sum(min(n, 2048) for n in seen_tokens)
    assert flops(g, shape, named("attention_prefill")) == pytest.approx(core, rel=1e-9)
    assert flops(g, shape, named("index_score")) == pytest.approx(61 * 2 * 64 * 128 * sum(seen_tokens), rel=1e-9)


@pytest.mark.parametrize("context", [512, 8192, 1_048_576])
def test_v4_flash_decode_attention_by_hand(context: int) -> None:
    """21 CSA layers: 512 of context / 4; 20 HCA layers: all of context / 128; 128 of window in all 43."""
    g, shape = graph(FLASH, phase="decode"), decode(float(context))
    entries = 43 * min(context, 128) + 21 * min(context / 4, 512) + 20 * context / 128
    assert flops(g, shape, named("attention_decode")) == pytest.approx(4 * 64 * 512 * entries, rel=1e-9)
    scored = 21 * context / 4
    assert flops(g, shape, named("index_score")) == pytest.approx(2 * 64 * 128 * scored, rel=1e-9)
    assert sum(w.bytes_read for w in works(g, shape, named("index_score"))) == pytest.approx(68 * scored, rel=1e-9)
    read = sum(w.bytes_read for w in works(g, shape, named("attention_decode")))
    assert read == pytest.approx(584 * entries + 43 * 2 * 64 * 512, rel=1e-9)


def test_v4_flash_writes_its_kv() -> None:
    """3,514.25 B of global KV a token, by 41 owners."""
    stores = works(graph(FLASH, phase="decode"), decode(4096.0, 32.0), named("store_global_kv"))
    assert len(stores) == 41
    assert sum(w.bytes_written for w in stores) == pytest.approx(32 * 3514.25, rel=1e-12)


def test_v4_hash_layers_dispatch_without_waiting_for_the_router() -> None:
    layout = ParallelLayout(dp=8, ep=8)
    reads = [o.inputs for b in graph(FLASH, layout).blocks for o in b.operators if o.name == "dispatch"]
    assert reads == [("ffn_in",)] * 3 + [("ffn_in", "routing")] * 40


@pytest.mark.parametrize("nextn", [1, 3])
def test_v4_mtp_drafts_one_row_a_pass(nextn: int) -> None:
    """A window-only block of 6.6B, 7 of 257 experts touched; the streams and the token are projected: 5 rows."""
    shape = decode(5000.0, 10.0, float(nextn))
    g = graph(FLASH, phase="decode", nextn=nextn)
    extra = flops(g, shape) - flops(graph(FLASH, phase="decode"), shape)
    block = 106_954_752 + 7 * 25_165_824 + 4096 * 256 + 786_432 + 5 * 4096 * 4096 + 2 * 64 * 512 * 128
    rows = 10 * (1 + nextn) + 10 * (nextn - 1)
    assert extra == pytest.approx(2 * (rows * block + nextn * 10 * 529_530_880), rel=2e-3)


@pytest.mark.parametrize("context", [1, 4096, 40_960])
def test_qwen3_decode_by_hand(context: int) -> None:
    """64 query heads over 4 key and value heads of 128, 94 layers, no shared expert; 192,512 B of cache a token."""
    layer = 4096 * (64 + 2 * 4) * 128 + 64 * 128 * 4096 + 8 * 3 * 4096 * 1536 + 4096 * 128
    macs = 94 * (layer + 2 * 64 * 128 * context) + 4096 * 151_936
    g = graph(QWEN, phase="decode")
    assert flops(g, decode(float(context))) == pytest.approx(2 * macs, rel=1e-9)
    near, far = (sum(w.bytes_read for w in works(g, decode(c, 7.0), named("attention_decode"))) for c in (1e3, 9e3))
    assert far - near == pytest.approx(7 * 8000 * 192_512, rel=1e-9)


@pytest.mark.parametrize(("rows", "context"), [(1, 0), (4096, 0), (512, 8192)])
def test_qwen3_prefill_attention_by_hand(rows: int, context: int) -> None:
    pairs = sum(range(context + 1, context + rows + 1))
    found = flops(graph(QWEN, phase="prefill"), prompt(float(rows), float(context)), named("attention_prefill"))
    assert found == pytest.approx(94 * 4 * 64 * 128 * pairs, rel=1e-9)


def test_kimi_decode_flops_by_hand() -> None:
    """V3's layers with 64 heads, 384 experts and one dense layer."""
    attention = 7168 * 1536 + 1536 * 64 * 192 + 7168 * 576 + 512 * 64 * 256 + 64 * 128 * 7168 + 64 * 1088 * 4096
    ffn = 3 * 7168 * 18_432 + 60 * (9 * 3 * 7168 * 2048 + 7168 * 384)
    macs = 61 * attention + ffn + 7168 * 163_840
    assert flops(graph(KIMI, phase="decode"), decode(4096.0)) == pytest.approx(2 * macs, rel=1e-9)


@pytest.mark.parametrize("model", MODELS)
def test_every_model_reads_its_dense_weights_once_a_step(model: str) -> None:
    """A V4 or V3 decode step, rows taken out: FP8 weights that prefill would expand are read in BF16 when absorbed."""
    g, products = graph(model, phase="decode"), lambda o: o.kind is OpKind.GEMM
    two, four = (sum(w.bytes_read for w in works(g, decode(4096.0, n), products)) for n in (2.0, 4.0))
    dense = [p for p in parameters(load_model(model)) if p.owner == "backbone" and p.placement == "replicated"]
    stored = sum(p.num_bytes for p in dense if p.item not in ("embedding", "hyper_connections"))
    assert 2 * two - four == pytest.approx(stored, rel=0.07 if model in (V3, V32, KIMI) else 1e-9)


# --- what rows see --------------------------------------------------------------------------------------------------


def seen(position: int, ratio: int, cap: int | None) -> int:
    """Whole entries before and at a position, counted one by one."""
    entries = sum(1 for entry in range(position + 1) if (entry + 1) * ratio <= position + 1)
    return entries if cap is None else min(entries, cap)


@given(
    context=st.integers(0, 300),
    rows=st.integers(1, 120),
    ratio=st.sampled_from([1, 2]),
    cap=st.one_of(st.none(), st.integers(1, 150)),
)
@settings(max_examples=150, deadline=None)
def test_visible_entries_against_counting(context: int, rows: int, ratio: int, cap: int | None) -> None:
    exact = sum(seen(t, ratio, cap) for t in range(context, context + rows))
    found = visible_entries(float(context), float(rows), float(ratio), None if cap is None else float(cap))
    assert abs(found - exact) <= (0.5 * rows if ratio > 1 else 1e-6)


@given(context=st.integers(0, 3000), rows=st.integers(1, 900), kept_share=st.floats(0.0, 1.0))
@settings(max_examples=60, deadline=None)
def test_bounded_layers_compute_a_prompts_last_rows(context: int, rows: int, kept_share: float) -> None:
    """Decoder layers under compact replay: attention of exactly the last rows, their whole prefix visible."""
    kept = max(1, round(kept_share * rows))
    shape = prompt(float(rows), float(context), float(kept))
    g = graph(V41, phase="prefill", replay="compact")
    block = next(b for b in g.blocks if b.name == "decoder reuse")
    operators = {o.name: o for o in block.operators}
    positions = np.arange(context + rows - kept, context + rows) + 1
    entries = np.minimum(positions, 128).sum() + np.minimum(positions, 512).sum()
    assert operators["attention_prefill"].work(shape).flops == pytest.approx(4 * 64 * 512 * entries, rel=1e-9)
    assert operators["q_b"].work(shape).rows == kept
    assert shape.bounded.logit_rows == shape.logit_rows


@pytest.mark.parametrize("block", ["decoder reuse", "decoder reindex"])
def test_skipped_rows_cost_bounded_layers_nothing(block: str) -> None:
    """A compacted prompt is, to a decoder layer, the prompt's last rows after a cached prefix."""
    operators = next(b for b in graph(V41, replay="compact").blocks if b.name == block).operators
    for operator in operators:
        assert operator.work(prompt(4096.0, 500.0, KEEP)) == operator.work(prompt(KEEP, 4596.0 - KEEP)), operator.name


def test_the_owner_of_global_kv_writes_it_for_skipped_rows_too() -> None:
    g = graph(V41, phase="prefill", replay="compact")
    owner = {o.name: o for b in g.blocks if b.name == "decoder full" for o in b.operators}
    shape = prompt(4096.0, kept=KEEP)
    assert owner["compressor"].work(shape).rows == owner["hc_attention"].work(shape).rows == 4096
    assert owner["store_global_kv"].work(shape).bytes_written == 4096 * (288 + 68)
    assert owner["q_b"].work(shape).rows == KEEP
    assert owner["experts"].work(shape).flops == pytest.approx(2 * 6 * 35_389_440 * KEEP)


def test_compact_replay_does_not_change_decode_steps() -> None:
    off, compact = (graph(V41, replay=replay, nextn=5) for replay in ("off", "compact"))
    shape = decode(5000.0, 16.0, 3.0)
    assert [w.flops for w in works(off, shape)] == [w.flops for w in works(compact, shape)]


# --- ranks ----------------------------------------------------------------------------------------------------------


def engine_flops(model: str, layout: ParallelLayout, phase: Phase, select: Select) -> float:
    """FLOPs of all ranks for one load of 64 requests, routed evenly."""
    per_replica = 64.0 / layout.dp
    rows = per_replica * (1.0 if phase == "decode" else 512.0)
    group = Sequences(per_replica, rows / per_replica, 3000.0, rows / per_replica, 1.0)
    shape = StepShape(group) if phase == "decode" else StepShape(None, (group,))
    return layout.num_ranks * flops(graph(model, layout, phase, load=EVEN), shape, select)


LAYOUTS = [ParallelLayout(dp=8 // cp, cp=cp, ep=ep) for cp in (1, 2, 4, 8) for ep in (1, 2, 8)]
LAYOUTS += [ParallelLayout(tp=8, ep=8), ParallelLayout(tp=8, etp=8), ParallelLayout(tp=4, ep=2, etp=2)]
LAYOUTS += [ParallelLayout(dp=4, tp=2, ep=8), ParallelLayout(cp=4, tp=2, ep=4, etp=2), ParallelLayout(tp=8, ep=2)]
LAYOUTS += [ParallelLayout(dp=8, etp=8), ParallelLayout(dp=8, ep=4, etp=2), ParallelLayout(dp=2, cp=2, tp=2, ep=2)]
# What every tp rank computes for all of a replica's rows, as servers do.
REPEATED = ("q_a_kv_a", "q_a_kv", "index_keys", "index_q", "index_weights", "index_score", "compressor", "engram_proj")


@pytest.mark.parametrize("phase", ["decode", "prefill"])
@pytest.mark.parametrize("model", [V41, V3, V32, FLASH, QWEN])
def test_total_flops_do_not_depend_on_the_layout(model: str, phase: Phase) -> None:
    layouts = LAYOUTS
    repeated = named(*REPEATED)

    def split(o: Operator) -> bool:
        # V3's prefill expands a prompt's keys and values again on every cp rank of its replica.
        # Sparse kernels compute 64 heads at least, however few a tp rank has.
        padded = o.kind is OpKind.SPARSE_ATTENTION_PREFILL or (model == V32 and o.name == "attention_decode")
        return not (padded or o.name in (*REPEATED, "kv_b", "router") or o.name.startswith("hc_") or o.name == "qkv")

    totals = [engine_flops(model, x, phase, split) for x in layouts]
    assert totals == pytest.approx([totals[0]] * len(layouts), rel=1e-9)
    found = [engine_flops(model, x, phase, repeated) for x in layouts]
    assert found == pytest.approx([found[0] * x.tp for x in layouts], rel=1e-9)
    routers = [engine_flops(model, x, phase, named("router")) for x in layouts]
    assert routers == pytest.approx([routers[0] * (1 if x.scatters_rows else x.tp) for x in layouts], rel=1e-9)
    if model == V3 and phase == "prefill":
        expanded = [engine_flops(model, x, phase, named("kv_b")) for x in layouts]
        assert expanded == pytest.approx([expanded[0] * x.cp for x in layouts], rel=1e-9)


@given(data=st.data())
@settings(max_examples=40, deadline=None)
def test_distinct_ranks_against_enumeration(data: st.DataObject) -> None:
    ep = data.draw(st.sampled_from([1, 2, 3, 4, 6]))
    num_experts = ep * data.draw(st.integers(1, 12 // ep))
    topk = data.draw(st.integers(1, min(4, num_experts)))
    local = num_experts // ep
    counts = [len({e // local for e in choice}) for choice in itertools.combinations(range(num_experts), topk)]
    assert distinct_ranks(MoE(num_experts, topk, 1, 0), ep) == pytest.approx(np.mean(counts), rel=1e-12)


@pytest.mark.parametrize(
    ("ep", "measured"),
    [(8, [0.83, 0.90, 0.95, 0.97, 0.99]), (32, [0.63, 0.79, 0.87, 0.93, 0.97]), (64, [0.49, 0.67, 0.81, 0.90, 0.94])],
)
def test_routing_noise_against_the_measured_balancedness(ep: int, measured: list[float]) -> None:
    """Mean over busiest, uniform routing, 384 experts top-6, 64 to 16,384 tokens a step over the group."""
    found = [1.0 / float(busiest_over_mean(tokens * 6.0, ep)) for tokens in (64, 256, 1024, 4096, 16_384)]
    assert found == pytest.approx(measured, abs=0.05)


@pytest.mark.parametrize(("ep", "tokens"), [(4, 32), (16, 64), (16, 500), (48, 256)])
def test_routing_noise_against_a_simulation(ep: int, tokens: int) -> None:
    rng = np.random.default_rng(3)
    ratios = []
    for _ in range(150):
        experts = np.argpartition(rng.random((tokens, 192)), 8, axis=1)[:, :8]
        load = np.bincount((experts // (192 // ep)).ravel(), minlength=ep)
        ratios.append(load.max() / load.mean())
    assert float(busiest_over_mean(tokens * 8.0, ep)) == pytest.approx(np.mean(ratios), rel=0.03)


@given(st.lists(st.tuples(st.integers(1, 5), st.integers(1, 6)), min_size=1, max_size=4))
def test_companions_against_counting(groups: list[tuple[int, int]]) -> None:
    """Pairs of different rows of one request, over the rows."""
    requests = [rows for count, rows in groups for _ in range(count)]
    pairs = sum(1 for rows in requests for a in range(rows) for b in range(rows) if a != b)
    sequences = tuple(Sequences(float(c), float(r), 0.0, float(r), 1.0) for c, r in groups)
    assert StepShape(None, sequences).companions == pytest.approx(pairs / sum(requests))


def test_longer_prompts_load_experts_less_evenly_and_single_rows_as_independent_ones_do() -> None:
    found = {}
    for length in (1.0, 1024.0, 4096.0):
        shape = StepShape(None, (Sequences(8192.0 / length, length, 0.0, length, 0.0),))
        for spread in (0.0, 3.0):
            load = ExpertLoad(sigma=0.0, drift=0.0, text_spread=spread)
            built = graph("deepseek-v3", ParallelLayout(dp=16, ep=16), load=load)
            found[length, spread] = flops(built, shape, lambda o: o.name == "experts")
    assert found[1.0, 3.0] == found[1.0, 0.0] == found[4096.0, 0.0]
    assert found[1.0, 3.0] < found[1024.0, 3.0] < found[4096.0, 3.0]


@pytest.mark.parametrize("ep", [2, 8, 16])
def test_dispatch_and_combine_carry_each_token_once_per_other_rank(ep: int) -> None:
    """A domain of 8: of the ep - 1 others, 7 at most are near."""
    layout = ParallelLayout(dp=ep, ep=ep)
    rows = 256.0
    tokens = rows * distinct_ranks(MoE(384, 6, 2304, 1), ep) * float(busiest_over_mean(rows * ep * 6, ep))
    near = min(ep, 8) - 1
    for name, record in (("dispatch", 5120 + 160), ("combine", 2 * 5120)):
        message = works(graph(V41, layout, load=UNSKEWED), decode(1000.0, rows), named(name))[0].message
        assert message is not None
        assert message.scale_up_bytes == pytest.approx(tokens * record * near / ep, rel=1e-12)
        assert message.scale_out_bytes == pytest.approx(tokens * record * (ep - 1 - near) / ep, rel=1e-12)


@given(group=st.sampled_from([1, 2, 4, 8, 16, 32, 64]), gpus=st.sampled_from([8, 16, 64]))
def test_link_bytes_against_counting_peers(group: int, gpus: int) -> None:
    cluster = ClusterSpec(load_hardware("b200"), gpus)
    ctx = BuildContext(load_model(V3), ONE, cluster, GraphFeatures())
    near = sum(1 for peer in range(1, group) if peer // cluster.domain == 0)
    assert ctx.link_bytes(1.0, group) == pytest.approx((near / group, (group - 1 - near) / group))


# --- arrays, features, errors ---------------------------------------------------------------------------------------


def random_shape(rng: np.random.Generator, size: int) -> StepShape:
    """`size` shapes at once, some without decoding requests, some with no or an empty prompt."""

    def draw(low: int, high: int, zeros: float = 0.0) -> np.ndarray[Any, np.dtype[np.float64]]:
        return np.where(rng.random(size) < zeros, 0.0, rng.integers(low, high, size).astype(float))

    rows = draw(1, 5000)
    kept = np.minimum(rows, 140.0)
    chunk = Sequences(draw(1, 4, 0.3), rows, draw(0, 200_000, 0.2), kept, draw(0, 2))
    verify = Sequences.decoding(draw(1, 300, 0.3), draw(0, 6), draw(0, 300_000, 0.1))
    return StepShape(verify, (chunk,), draw(1, 4000), draw(1, 2000))


def element(shape: StepShape, i: int) -> StepShape:
    def scalar(s: Sequences) -> Sequences:
        return Sequences(**{f.name: float(np.asarray(getattr(s, f.name))[i]) for f in fields(s)})

    means = [float(np.asarray(m)[i]) for m in (shape.mean_rows, shape.mean_kept_rows)]
    assert shape.decode is not None
    return StepShape(scalar(shape.decode), tuple(map(scalar, shape.prefill)), *means)


@pytest.mark.parametrize(
    ("model", "layout", "phase", "replay", "nextn"),
    [
        (V41, ParallelLayout(dp=8, ep=8), "mixed", "compact", 5),
        (V41, ParallelLayout(dp=2, cp=8, ep=16), "prefill", "compact", 0),
        (V41, ParallelLayout(dp=4, cp=2), "decode", "off", 1),
        (V3, ParallelLayout(dp=8, ep=8), "mixed", "off", 3),
        (V3, ParallelLayout(dp=1, cp=8, ep=2), "prefill", "off", 0),
        (V3, ParallelLayout(dp=16, ep=16), "decode", "off", 1),
        (V32, ParallelLayout(dp=2, cp=8, ep=16), "mixed", "off", 2),
        (FLASH, ParallelLayout(dp=8, ep=8), "mixed", "off", 3),
        (PRO, ParallelLayout(dp=4, cp=2, ep=8), "prefill", "off", 0),
        (QWEN, ParallelLayout(dp=2, cp=8, ep=16), "mixed", "off", 0),
        (QWEN, ParallelLayout(tp=8, etp=8, dcp=2), "mixed", "off", 0),
        (V3, ParallelLayout(dp=4, tp=4, ep=16, dcp=4), "mixed", "off", 1),
        (V32, ParallelLayout(dp=4, tp=4, ep=8, etp=2), "mixed", "off", 0),
        (V41, ParallelLayout(tp=8, ep=8), "mixed", "compact", 5),
    ],
)
def test_arrays_of_shapes_cost_what_each_shape_costs(
    model: str, layout: ParallelLayout, phase: Phase, replay: Replay, nextn: int
) -> None:
    size = 40
    shape = random_shape(np.random.default_rng(11), size)
    singles = [element(shape, i) for i in range(size)]
    costs = CostModel(load_hardware("b200"))
    for operator in graph(model, layout, phase, replay, nextn).operators:
        together = operator.work(shape)
        seconds = np.broadcast_to(costs.cost(operator, together).seconds, size)
        for i, single in enumerate(singles):
            alone = operator.work(single)
            for name in ("flops", "bytes_read", "bytes_written", "rows"):
                found = np.broadcast_to(getattr(together, name), size)[i]
                assert found == pytest.approx(getattr(alone, name), rel=1e-9), (operator.name, name)
            assert (together.message is None) == (alone.message is None)
            if together.message is not None and alone.message is not None:
                for name in ("scale_up_bytes", "scale_out_bytes"):
                    found = np.broadcast_to(getattr(together.message, name), size)[i]
                    assert found == pytest.approx(getattr(alone.message, name), rel=1e-9), operator.name
            assert seconds[i] == pytest.approx(costs.cost(operator, alone).seconds, rel=1e-6), operator.name
            assert seconds[i] >= 0


@pytest.mark.parametrize("model", MODELS)
def test_a_step_without_rows_is_no_work(model: str) -> None:
    layout, nextn = ParallelLayout(dp=8, ep=8), 0 if load_model(model).draft is None else 1
    for w in works(graph(model, layout, nextn=nextn), StepShape(Sequences(0.0, 1.0, 100.0, 1.0, 1.0))):
        sent = w.message.scale_up_bytes + w.message.scale_out_bytes if w.message else 0.0
        assert (w.flops, w.bytes_read, w.bytes_written, sent) == (0, 0, 0, 0)


def test_a_graph_of_one_phase_is_the_mixed_graph_without_the_other() -> None:
    for model in MODELS:
        mixed = flops(graph(model), decode(3000.0, 8.0))
        assert flops(graph(model, phase="decode"), decode(3000.0, 8.0)) == pytest.approx(mixed, rel=1e-12)
        assert flops(graph(model, phase="prefill"), prompt(700.0)) == flops(graph(model), prompt(700.0))


def test_dspark_drafts_five_rows_and_mtp_one_row_a_pass() -> None:
    """DSpark: 0.81B of body and 0.66B of LM head per drafted row, 0.08B of main_proj per committed row."""
    shape = decode(4096.0, 10.0, 5.0)
    drafted = flops(graph(V41, phase="decode", nextn=5), shape) - flops(graph(V41, phase="decode"), shape)
    body = 50 * 2 * (0.81e9 + 0.66e9) + 60 * 2 * (0.0787e9 + 3 * 2.62e6)
    window = 50 * 3 * 4 * 64 * 512 * 128
    markov = 50 * 2 * 256 * 129_280
    assert drafted == pytest.approx(body + window + markov, rel=2e-2)

    layer = V3_QUERIES + V3_EXPAND + V3_OUTPUT + V3_MOE + 2 * 7168 * 7168
    for nextn in (1, 3):
        shape = decode(1001.0 + nextn, 10.0, float(nextn))
        extra = flops(graph(V3, phase="decode", nextn=nextn), shape) - flops(graph(V3, phase="decode"), shape)
        rows = 10 * (1 + nextn) + 10 * (nextn - 1)
        assert extra == pytest.approx(2 * (rows * (layer + 128 * 1088 * 1001) + nextn * 10 * V3_HEAD), rel=2e-2)


def test_features_a_model_has_not_are_refused() -> None:
    with pytest.raises(UsageError, match=r"deepseek-v3 has no bounded layers.*compact"):
        graph(V3, replay="compact")
    with pytest.raises(UsageError, match="drafts 0 to 5 tokens, not 6"):
        graph(V41, nextn=6)
    with pytest.raises(UsageError, match="drafts 0 to 7 tokens, not -1"):
        graph(V3, nextn=-1)
    for layout, says in [
        (ParallelLayout(tp=3), "128 heads or groups of deepseek-v3 do not divide"),
        (ParallelLayout(dp=6, ep=6), "256 experts and 0 redundant ones do not divide evenly over ep 6"),
        (ParallelLayout(dp=8, ep=8, redundant_experts=4), "256 experts and 4 redundant ones"),
        (ParallelLayout(cp=3, tp=2, ep=3), "ep x etp = 3 and tp = 2 one must divide the other"),
        (ParallelLayout(dp=5, etp=5), "width 2048"),
    ]:
        with pytest.raises(UsageError, match=says):
            graph(V3, layout)


@pytest.mark.parametrize("nextn", range(1, 6))
def test_dspark_draws_the_positions_that_are_verified(nextn: int) -> None:
    """Of eight requests: so many rows through the LM head, one position after the other; by any longer graph too."""
    model, shape = load_model(V41), decode(4000.0, 8.0, nextn)
    own = graph(V41, phase="decode", nextn=nextn)
    head = works(own, shape, lambda o: o.name == "draft_lm_head")
    assert [w.flops for w in head] == [2 * 8 * nextn * model.vocab_size * model.hidden_size]
    assert len(works(own, shape, lambda o: o.name == "draft_markov_sample")) == nextn
    costs = CostModel(load_hardware("b200"))
    seconds = float(step_cost(own, shape, costs).seconds)
    for longer in range(nextn, 6):
        asked = step_cost(graph(V41, phase="decode", nextn=longer), shape, costs).seconds
        assert float(asked) == pytest.approx(seconds, rel=1e-12)


@pytest.mark.parametrize("model", [V41, V3])
def test_cp_gathers_prompts_and_not_decoding_rows(model: str) -> None:
    """Each of the four ranks gets from the others three quarters of the prompt's records."""
    layout = ParallelLayout(cp=4, ep=4)
    kv = load_model(model).kv
    record = kv.window_bytes if model == V41 else kv.main_bytes

    def gathered(shape: StepShape) -> set[float]:
        found = works(graph(model, layout), shape, lambda o: o.name in ("gather_window_kv", "gather_kv"))
        return {float(w.message.scale_up_bytes) for w in found if w.message is not None}

    assert gathered(decode(4000.0, 8.0)) == {0.0}
    mixed = StepShape(Sequences.decoding(8.0, 0.0, 4000.0), (Sequences(1.0, 1024.0, 0.0, 1024.0, 1.0),))
    assert gathered(mixed) == {1024 * record * 3 / 4}
