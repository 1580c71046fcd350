"""Operators timed on their own, as graphs of the planner's operators with the shape that the entry gives."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    every_row,
)
from deepinfer.graph.build.experts import ffn_operators
from deepinfer.graph.graph import Block, ExecutionGraph
from deepinfer.graph.ops import Operator, OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.graph.transform import fuse_moe
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.spec import LatentAttention, LayerSpec, ModelSpec, MoE
from planner.validate.mapping import Case
from planner.validate.targets import Target

Timed = tuple[ExecutionGraph, StepShape]


def kernel_step(case: Case) -> Timed:
    """The graph and shape of a kernel entry. Raises UsageError for an operator or a shape that has no counterpart."""
    op = case.target.op
    assert op is not None, "a kernel entry has an op"
    if op.name not in _KERNELS:
        raise UsageError(f"kernel {op.name!r} is not modelled; modelled are {', '.join(sorted(_KERNELS))}")
    return _KERNELS[op.name](case, Parameters(case.target))


class Parameters:
    """Shape parameters of an entry's operator, by name. Raises UsageError for one that is missing or not positive."""

    def __init__(self, target: Target) -> None:
        assert target.op is not None
        self._op = target.op

    def __call__(self, *names: str, default: float | None = None) -> float:
        for name in names:
            value = self._op.params.get(name)
            if isinstance(value, int | float):
                if not value > 0:
                    raise UsageError(f"kernel {self._op.name}: parameter {name!r} must be positive, got {value}")
                return float(value)
        if default is None:
            raise UsageError(f"kernel {self._op.name}: parameter {names[0]!r} is not stated")
        return default


Kernel = Callable[[Case, Parameters], Timed]


def _experts(case: Case, get: Parameters) -> Timed:
    """Dispatch, both expert products and combine in one kernel, of an expert group of its own."""
    graph, shape = _moe(case, get, get("moe_intermediate"))
    return fuse_moe(_only(graph, ("dispatch", "experts", "combine"))), shape


def _exchange(case: Case, get: Parameters) -> Timed:
    """Dispatch or combine alone; the payload scales the message."""
    assert case.target.op is not None
    name = case.target.op.name.removeprefix("ep_")
    graph, shape = _moe(case, get, get("moe_intermediate", default=1.0))
    usual = 8 * (FP8_ACTIVATION_BYTES if name == "dispatch" else ACTIVATION_BYTES)
    bits = get("payload_bits", default=usual)
    (operator,) = _only(graph, (name,)).operators
    if bits != round(usual):
        operator = _scaled(operator, bits / usual)
    return _alone(operator), shape


def _moe(case: Case, get: Parameters, width: float) -> Timed:
    ranks, tokens = int(get("ranks", default=case.layout.num_ranks)), get("tokens_per_rank")
    experts = next((x.ffn for x in case.model.layers if isinstance(x.ffn, MoE)), None)
    num_experts = int(get("experts", default=experts.num_experts if experts else 0))
    moe = MoE(num_experts, int(get("top_k")), int(width), 0)
    model = replace(case.model, hidden_size=int(get("hidden", default=case.model.hidden_size)))
    layout, features = ParallelLayout(dp=ranks, ep=ranks), GraphFeatures(expert_load=case.expert_load)
    ctx = BuildContext(model, layout, replace(case.cluster, num_gpus=ranks), features)
    ops = OperatorList()
    ffn_operators(ctx, ops, moe, every_row)
    graph = ExecutionGraph("routed experts", (Block("experts", tuple(ops.operators)),))
    return graph, StepShape(Sequences.decoding(tokens, 0.0, 0.0))


def _expert_gemm(case: Case, get: Parameters) -> Timed:
    """One of the two grouped products: `local_experts` matrices k x n, each met by `mean_rows_per_expert` rows.

    Its results count with what it reads: the passes over written rows that a cost profile may have for an expert layer
    (activation, quantisation) are not part of one product.
    """
    local, k, n = get("local_experts"), get("k"), get("n")
    rows = get("mean_rows_per_expert")
    fmt, total = case.model.expert_format, local * rows
    work = Work(
        flops=2.0 * k * n * total,
        precision=fmt.precision,
        bytes_read=local * k * n * fmt.bytes_per_parameter + total * (k * FP8_ACTIVATION_BYTES + n * ACTIVATION_BYTES),
        rows=rows,
        depth=k,
    )
    return _alone(_operator("experts", OpKind.GROUPED_GEMM, work)), StepShape()


def _gemm(case: Case, get: Parameters) -> Timed:
    """A dense product m x k times k x n in the entry's weight format, or the model's, without quantising its input."""
    ops, m = OperatorList(), get("m", "tokens", "rows")
    fmt = case.model.expert_format if case.target.weights else case.model.dense_format
    ops.gemm("gemm", ("x", "y"), lambda _: m, int(get("k")), int(get("n")), fmt)
    (product,) = ops.operators
    return _alone(_operator("gemm", OpKind.GEMM, replace(product.work(StepShape()), activation_bytes=0.0))), StepShape()


def _decoding(case: Case, get: Parameters) -> StepShape:
    """Requests whose last rows see `kv_len` entries, those rows among them."""
    rows, length = get("query_tokens", default=1.0), get("kv_len")
    return StepShape(Sequences.decoding(get("batch", "requests"), rows - 1.0, length - rows))


def _prompts(case: Case, get: Parameters) -> StepShape:
    """Prompt chunks whose last row sees `kv_len` entries; a whole prompt where that is not stated."""
    rows = get("query_tokens", "seq_len", "tokens", "q_len")
    before = get("kv_len", default=rows) - rows
    return StepShape(None, (Sequences(get("batch", "requests", default=1.0), rows, before, rows, 1.0),))


def _layer_operator(name: str, shape_of: Callable[[Case, Parameters], StepShape]) -> Kernel:
    """An operator of the model's first layer that has it, on one rank of the entry's layout."""

    def timed(case: Case, get: Parameters) -> Timed:
        model = _with_heads(case.model, get)
        graph = build_graph(model, case.layout, case.cluster, GraphFeatures(expert_load=case.expert_load))
        found = [o for o in graph.operators if o.name == name]
        if not found:
            raise UsageError(f"model {model.name} has no operator {name}")
        return _alone(found[0]), shape_of(case, get)

    return timed


def _with_heads(model: ModelSpec, get: Parameters) -> ModelSpec:
    """The model with the latent attention that the operator's parameters give; another attention as it is."""
    layer = model.layers[0]
    if not isinstance(layer.attention, LatentAttention):
        return model
    attention = replace(
        layer.attention,
        num_heads=int(get("heads", default=layer.attention.num_heads)),
        kv_lora_rank=int(get("kv_lora_rank", default=layer.attention.kv_lora_rank)),
        rope_dim=int(get("rope_dim", default=layer.attention.rope_dim)),
    )
    return replace(model, layers=(LayerSpec(0, attention, layer.ffn),), draft=None)


def _draft_step(case: Case, get: Parameters) -> Timed:
    """One pass of the model's draft module for every request."""
    draft = case.model.draft
    if draft is None:
        raise UsageError(f"model {case.model.name} has no draft module")
    drafts = draft.max_drafts if draft.kind == "dspark" else 1
    features = GraphFeatures("decode", nextn=drafts, expert_load=case.expert_load)
    graph = build_graph(case.model, case.layout, case.cluster, features)
    blocks = tuple(b for b in graph.blocks if b.name.startswith("draft"))
    requests = get("requests", "batch") / case.replicas
    decode = Sequences.decoding(max(requests, 1.0), float(drafts), get("kv_len"))
    shape = StepShape(decode, mean_rows=requests * (1.0 + drafts))
    return ExecutionGraph("draft pass", blocks), shape


def _only(graph: ExecutionGraph, names: tuple[str, ...]) -> ExecutionGraph:
    """The named operators of a graph, in order."""
    blocks = (Block(b.name, tuple(o for o in b.operators if o.name in names)) for b in graph.blocks)
    return ExecutionGraph(" + ".join(names), tuple(b for b in blocks if b.operators))


def _alone(operator: Operator) -> ExecutionGraph:
    return ExecutionGraph(operator.name, (Block(operator.name, (operator,)),))


def _operator(name: str, kind: OpKind, work: Work) -> Operator:
    return Operator(name, kind, (), (), lambda _: work)


def _scaled(operator: Operator, factor: float) -> Operator:
    """The same operator with so many times the message."""

    def work(shape: StepShape) -> Work:
        full = operator.work(shape)
        message = full.message
        if message is None:
            return full
        up, out = message.scale_up_bytes * factor, message.scale_out_bytes * factor
        return replace(full, message=replace(message, scale_up_bytes=up, scale_out_bytes=out))

    return replace(operator, work=work)


_KERNELS: dict[str, Kernel] = {
    "moe_fused": _experts,
    "ep_dispatch": _exchange,
    "ep_combine": _exchange,
    "expert_gemm_up": _expert_gemm,
    "expert_gemm_down": _expert_gemm,
    "gemm": _gemm,
    "attention_decode": _layer_operator("attention_decode", _decoding),
    "sparse_attention_decode": _layer_operator("attention_decode", _decoding),
    "attention_prefill": _layer_operator("attention_prefill", _prompts),
    "sparse_attention_prefill": _layer_operator("attention_prefill", _prompts),
    "index_score": _layer_operator("index_score", _decoding),
    "indexer_logits": _layer_operator("index_score", _decoding),
    "draft_step": _draft_step,
}
