"""Tensor parallelism, sliced experts and the exchange of rows: by hand, by enumeration, and against DeepEP's README."""

from __future__ import annotations

import itertools
from functools import lru_cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.build.experts import distinct_domains, distinct_ranks
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.ops import Message, OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.spec import ClusterSpec, load_hardware
from deepinfer.layout.memory import memory_budget, weight_items
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import ExpertLoad
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.hf import load_model
from deepinfer.model.spec import MoE

V3, QWEN, FLASH = "deepseek-v3", "qwen3-235b-a22b", "deepseek-v4-flash"
MODELS = [V3, QWEN, FLASH, "deepseek-v3.2", "deepseek-v4.1-flash"]
EVEN = ExpertLoad(balanced=True)
HIDDEN, VOCABULARY = 7168, 129_280


@lru_cache
def graph(model: str, layout: ParallelLayout, hardware: str = "h800", load: ExpertLoad = EVEN) -> ExecutionGraph:
    cluster = ClusterSpec(load_hardware(hardware), layout.num_ranks)
    return build_graph(load_model(model), layout, cluster, GraphFeatures("decode", expert_load=load))


def decode(count: float) -> StepShape:
    return StepShape(Sequences.decoding(count, 0.0, 1000.0))


def issued(g: ExecutionGraph, shape: StepShape, name: str) -> list[Work]:
    """Work of every issued operator of a name."""
    done = [operator.work(shape) for operator in g.operators]
    return [done[step.operator] for step in g.steps if g.operators[step.operator].name == name]


def sent(work: Work) -> tuple[float, float]:
    assert isinstance(work.message, Message)
    return float(work.message.scale_up_bytes), float(work.message.scale_out_bytes)


# --- collectives ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [ParallelLayout(tp=8, ep=8), ParallelLayout(tp=8, etp=8), ParallelLayout(tp=8)])
def test_a_tensor_parallel_step_sums_twice_a_layer_and_exchanges_nothing(layout: ParallelLayout) -> None:
    g, rows = graph(V3, layout), 64.0
    for name, count in (("reduce_attention", 61), ("reduce_ffn", 61), ("reduce_embedding", 1)):
        sums = issued(g, decode(rows), name)
        assert len(sums) == count
        assert sent(sums[0]) == pytest.approx((2 * rows * HIDDEN * 2 * 7 / 8, 0.0))
    (logits,) = issued(g, decode(rows), "gather_logits")
    assert sent(logits) == pytest.approx((rows * VOCABULARY * 2 * 7 / 8, 0.0))
    assert all(w.message is None for name in ("dispatch", "combine") for w in issued(g, decode(rows), name))
    experts = issued(g, decode(rows), "experts")[-1]
    assert experts.flops == pytest.approx(2 * rows * 8 * 3 * HIDDEN * 2048 / 8)


def test_tp_beyond_a_domain_sends_a_share_of_the_domains_part() -> None:
    """16 ranks in domains of 8: reduce-scatter and all-gather inside, and between the pair with the same place."""
    work = issued(graph(V3, ParallelLayout(tp=16, ep=16)), decode(64.0), "reduce_attention")[0]
    size = 64 * HIDDEN * 2
    assert sent(work) == pytest.approx((2 * size * 7 / 8, 2 * size / 8 / 2))


def test_ranks_with_the_same_rows_divide_them_before_dispatch() -> None:
    """Four replicas of two ranks over EP8, 64 rows each: a rank routes, shares and sends 32 of them."""
    g, shape = graph(V3, ParallelLayout(dp=4, tp=2, ep=8)), decode(64.0)
    names = {o.name for o in g.operators}
    assert {"scatter_attention", "gather_ffn", "dispatch"} <= names
    assert len(issued(g, shape, "reduce_attention")) == len(issued(g, shape, "reduce_ffn")) == 3  # dense layers
    scatter, gather = issued(g, shape, "scatter_attention"), issued(g, shape, "gather_ffn")
    assert len(scatter) == len(gather) == 58
    assert sent(scatter[0]) == sent(gather[0]) == pytest.approx((64 * HIDDEN * 2 / 2, 0.0))
    assert issued(g, shape, "router")[0].rows == issued(g, shape, "shared_up")[0].rows == 32
    plain = issued(graph(V3, ParallelLayout(dp=8, ep=8)), decode(32.0), "dispatch")[0]
    assert sent(issued(g, shape, "dispatch")[0]) == sent(plain)


@pytest.mark.parametrize(("ep", "etp"), [(1, 8), (2, 4), (4, 2), (8, 1)])
def test_every_slice_of_an_expert_gets_its_rows(ep: int, etp: int) -> None:
    """Attention DP over 8: a row goes to all etp ranks of each place that it chooses, itself perhaps among them."""
    g = graph(V3, ParallelLayout(dp=8, ep=ep, etp=etp))
    up, _ = sent(issued(g, decode(100.0), "combine")[0])
    copies = distinct_ranks(MoE(256, 8, 2048, 1), ep) * etp
    assert up == pytest.approx(100 * copies * 7 / 8 * HIDDEN * 2)
    experts = issued(g, decode(100.0), "experts")[0]
    assert experts.flops == pytest.approx(2 * 800 * 8 / ep * 3 * HIDDEN * 2048 / etp)


@pytest.mark.parametrize(("tp", "heads"), [(1, 4), (2, 2), (4, 1), (8, 1), (16, 1)])
def test_key_and_value_heads_split_while_there_are_enough(tp: int, heads: int) -> None:
    """Qwen3: 4 KV heads of 128, 94 layers in BF16, 512 B a head, layer and token."""
    g = graph(QWEN, ParallelLayout(tp=tp, ep=tp))
    one, two = (sum(w.bytes_read for w in issued(g, s, "attention_decode")) for s in (decode(1.0), decode(2.0)))
    queries = 94 * 64 // tp * 128 * 2
    assert two - one - queries == pytest.approx(94 * 1001 * 512 * heads)
    layout, accelerator = ParallelLayout(tp=tp, ep=tp), load_hardware("gb200-nvl72")
    budget = memory_budget(load_model(QWEN), layout, accelerator, EngineSettings(max_num_seqs=1)) if tp > 2 else None
    assert budget is None or budget.block_bytes == 94 * 512 * heads * 128


# --- decode context parallelism ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("dcp", [2, 4, 8])
def test_ranks_that_share_a_context_attend_for_one_another(dcp: int) -> None:
    """Per layer R D H 576 2 B of queries and R D H 512 2 B of outputs with their log-sum-exps, H heads of the group."""
    plain, shared = (graph(V3, ParallelLayout(tp=8, ep=8, dcp=d)) for d in (1, dcp))
    shape, heads = decode(32.0), 128 // 8 * dcp
    one, part = (issued(g, shape, "attention_decode")[0] for g in (plain, shared))
    assert part.flops == pytest.approx(one.flops)
    assert part.bytes_read - 32 * heads * 576 * 2 == pytest.approx(32 * 1001 * 1152 / dcp)
    queries, outputs = (issued(shared, shape, name)[0] for name in ("gather_queries", "merge_outputs"))
    assert sent(queries) == pytest.approx((32 * heads * 576 * 2 * (dcp - 1) / dcp, 0.0))
    assert sent(outputs) == pytest.approx((32 * heads * (512 * 2 + 4) * (dcp - 1) / dcp, 0.0))
    accelerator, settings = load_hardware("h200"), EngineSettings(max_num_seqs=8)
    one_gpu, its_part = (
        memory_budget(load_model(V3), ParallelLayout(tp=8, ep=8, dcp=d), accelerator, settings) for d in (1, dcp)
    )
    assert one_gpu.block_bytes == dcp * its_part.block_bytes
    assert its_part.num_blocks == pytest.approx(dcp * one_gpu.num_blocks, abs=dcp)


@pytest.mark.parametrize("model", [V3, QWEN])
def test_sharing_a_context_pays_when_it_is_long(model: str) -> None:
    costs = CostModel(load_hardware("h200"))
    dcp = 8 if model == V3 else 2
    plain, shared = (graph(model, ParallelLayout(tp=8, ep=8, dcp=d), "h200") for d in (1, dcp))
    short, long = (StepShape(Sequences.decoding(64.0, 0.0, context)) for context in (500.0, 60_000.0))
    assert step_cost(shared, short, costs).seconds > step_cost(plain, short, costs).seconds
    assert step_cost(shared, long, costs).seconds < step_cost(plain, long, costs).seconds


def test_only_ranks_with_the_same_kv_share_it() -> None:
    for model, layout, says in [
        (V3, ParallelLayout(tp=8, ep=8, dcp=8), None),
        (QWEN, ParallelLayout(tp=8, ep=8, dcp=2), None),
        (QWEN, ParallelLayout(tp=8, ep=8, dcp=4), "at most 2 tp ranks of qwen3-235b-a22b hold the same KV"),
        ("deepseek-v3.2", ParallelLayout(tp=8, ep=8, dcp=2), "not modelled for the sparse attention"),
        (FLASH, ParallelLayout(tp=8, ep=8, dcp=2), "not modelled for the sparse attention"),
    ]:
        if says is None:
            graph(model, layout)
            continue
        with pytest.raises(UsageError, match=says):
            graph(model, layout)
    with pytest.raises(UsageError, match="dcp = 3 does not divide tp = 8"):
        ParallelLayout(tp=8, ep=8, dcp=3)


# --- memory ---------------------------------------------------------------------------------------------------------


def test_dense_weights_of_a_v3_rank_by_hand() -> None:
    """tp8: q_b, kv_b, o, FFN, shared expert, embedding and head in eight parts; q_a, kv_a and router whole."""
    fp8 = 1 + 4 / 128**2
    whole = 61 * HIDDEN * (1536 + 576) * fp8 + 58 * HIDDEN * 256 * 2
    attention = 61 * (1536 * 128 * 192 + 512 * 128 * 256 + 128 * 128 * HIDDEN)
    split = (attention + 3 * 3 * HIDDEN * 18_432 + 58 * 3 * HIDDEN * 2048) * fp8 + 2 * VOCABULARY * HIDDEN * 2
    for layout in (ParallelLayout(tp=8, ep=8), ParallelLayout(tp=8, etp=8)):
        items = dict(weight_items(load_model(V3), layout))
        assert items["dense weights"] == pytest.approx(whole + split / 8, rel=1e-9)
        assert items["expert weights"] == pytest.approx(58 * 256 * 3 * HIDDEN * 2048 * fp8 / 8, rel=1e-9)
    scattered = dict(weight_items(load_model(V3), ParallelLayout(dp=4, tp=2, ep=8)))["dense weights"]
    shared = 58 * 3 * HIDDEN * 2048 * fp8
    assert scattered == pytest.approx(whole + (split - shared) / 2 + shared, rel=1e-9)


@pytest.mark.parametrize("layout", [ParallelLayout(tp=8, ep=8), ParallelLayout(dp=4, tp=2, ep=8)])
@pytest.mark.parametrize("model", MODELS)
def test_products_read_the_weights_that_memory_holds(model: str, layout: ParallelLayout) -> None:
    """Bytes beyond the rows, as the intercept of two steps: what the rank holds, but for what is looked up."""
    g, spec = graph(model, layout), load_model(model)
    two, four = (
        sum(o.work(decode(n)).bytes_read * count for o, count in _counted(g) if o.kind is OpKind.GEMM)
        for n in (2.0, 4.0)
    )
    held = dict(weight_items(spec, layout))["dense weights"]
    embedding = spec.vocab_size * spec.hidden_size * 2 / layout.tp
    mixing = 4 * len(spec.layers) * 2 * spec.hc_mult * spec.hidden_size * (2 * spec.hc_mult + spec.hc_mult**2)
    # V3 keeps kv_b in FP8 and multiplies by its parts in BF16 when absorbed.
    others = embedding + mixing + spec.vision_parameters * 2
    assert 2 * two - four == pytest.approx(held - others, rel=0.07 if "v3" in model else 1e-3)


def _counted(g: ExecutionGraph) -> list[tuple[object, int]]:
    counts = np.bincount([step.operator for step in g.steps], minlength=len(g.operators))
    return list(zip(g.operators, counts.tolist(), strict=True))


# --- copies of a row ------------------------------------------------------------------------------------------------


@given(data=st.data())
@settings(max_examples=30, deadline=None)
def test_domains_of_node_limited_routing_against_enumeration(data: st.DataObject) -> None:
    """Any kept groups, then any top-k within them, each as likely."""
    groups = data.draw(st.sampled_from([1, 2, 4]))
    kept, size = data.draw(st.integers(1, groups)), data.draw(st.sampled_from([2, 4]))
    experts = groups * size
    domains = data.draw(st.sampled_from([d for d in (1, 2, 4, 8) if experts % d == 0]))
    topk = data.draw(st.integers(1, min(3, kept * size)))
    counts = []
    for chosen in itertools.combinations(range(groups), kept):
        eligible = [e for e in range(experts) if e // size in chosen]
        counts += [len({e * domains // experts for e in c}) for c in itertools.combinations(eligible, topk)]
    moe = MoE(experts, topk, 1, 0, num_groups=groups, topk_groups=kept)
    assert distinct_domains(moe, domains) == pytest.approx(np.mean(counts), rel=1e-12)


# DeepEP V1 README, normal kernels on H800: 4,096 tokens of 7168, top-8 of 256 in 4 of the nodes, FP8 out, BF16 back.
# GB/s count the copies to a token's distinct nodes, its own included (tests/test_internode.py).
DEEPEP_NORMAL = [(16, 43e9, 43e9), (32, 58e9, 57e9), (64, 51e9, 50e9)]


@pytest.mark.parametrize(("ep", "dispatch", "combine"), DEEPEP_NORMAL)
def test_prefill_exchange_against_deepep(ep: int, dispatch: float, combine: float) -> None:
    """Each node is a group there; V3's 8 groups over 8 nodes are the same, over 4 or 2 nodes nearly."""
    nodes = ep // 8
    routed = MoE(256, 8, 2048, 1, num_groups=nodes, topk_groups=min(nodes, 4))
    copies = distinct_domains(routed, nodes)
    g, costs = graph(V3, ParallelLayout(dp=ep, ep=ep)), CostModel(load_hardware("h800"))
    for name, rate, size in (("dispatch", dispatch, 33 / 32), ("combine", combine, 2.0)):
        measured_s = 4096 * copies * HIDDEN * size / rate
        operator = next(o for o in g.operators if o.name == name)
        predicted_s = float(costs.cost(operator, operator.work(decode(4096.0))).seconds)
        assert 1 / 1.35 < predicted_s / measured_s < 1.35, (name, predicted_s, measured_s)


@pytest.mark.parametrize("layout", [ParallelLayout(dp=32, ep=32), ParallelLayout(dp=64, ep=32, etp=2)])
def test_traffic_grows_with_rows_without_a_jump(layout: ParallelLayout) -> None:
    rows = np.geomspace(1.0, 30_000.0, 2000)
    message = issued(graph(V3, layout), decode(rows), "dispatch")[0].message  # type: ignore[arg-type]
    assert message is not None
    for num_bytes in (np.asarray(message.scale_up_bytes), np.asarray(message.scale_out_bytes)):
        steps = num_bytes[1:] / num_bytes[:-1]
        assert steps.min() >= 1 - 1e-12
        assert steps.max() < 1.05  # 1.005 a row, times the ratio of forwarded to direct copies
    per_row = np.asarray(message.scale_out_bytes) / rows / (HIDDEN * 33 / 32)
    ranks = distinct_ranks(MoE(256, 8, 2048, 1), 32) * layout.etp
    group, domains = layout.expert_group, layout.expert_group // 8
    assert per_row[0] == pytest.approx(ranks * (group - 8) / group)
    once = distinct_domains(MoE(256, 8, 2048, 1, num_groups=8, topk_groups=4), domains) * (domains - 1) / domains
    assert per_row[-1] == pytest.approx(once)


# --- whole steps ----------------------------------------------------------------------------------------------------

# InferenceX, R1 in FP8 on 8 H200, 1K in and out: SGLang with tp8 and sliced experts, TRT-LLM with tp8 ep8; seconds.
SERVED = [
    (ParallelLayout(tp=8, etp=8), 4.0, 0.01029),
    (ParallelLayout(tp=8, etp=8), 16.0, 0.01663),
    (ParallelLayout(tp=8, ep=8), 4.0, 0.01338),
    (ParallelLayout(tp=8, ep=8), 60.0, 0.03104),
]


@pytest.mark.parametrize(("layout", "requests", "tpot_s"), SERVED)
def test_tensor_parallel_decode_against_servers(layout: ParallelLayout, requests: float, tpot_s: float) -> None:
    g = graph(V3, layout, "h200", ExpertLoad(eplb=False))
    shape = StepShape(Sequences.decoding(requests, 0.0, 1382.0))
    predicted = float(step_cost(g, shape, CostModel(load_hardware("h200"))).seconds)
    assert 1 / 1.35 < predicted / tpot_s < 1.35
