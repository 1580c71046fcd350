"""Parts of DeepSeek-V4 and V4.1 layers: residual streams, compressed KV, sparse attention with a window."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    PREFILL_GATHER_REUSE,
    SPARSE_HEADS,
    BuildContext,
    OperatorList,
    RowsOf,
    all_reduce_operator,
    decode_group,
    every_row,
    gather_kv_operator,
    total,
)
from deepinfer.graph.build.experts import ffn_operators
from deepinfer.graph.build.indexer import IndexScan, indexer_operators
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import Operator, OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape, View, visible_entries
from deepinfer.model.spec import BF16, CompressedAttention, LayerSpec
from deepinfer.numeric import Num, larger

Enter = Callable[[BuildContext, OperatorList, str, str, RowsOf], None]
"""(ctx, ops, sublayer, target slot, rows): from the residual streams to a sublayer's input."""


def attention_of(layer: LayerSpec) -> CompressedAttention:
    """The layer's attention, which must be compressed."""
    assert isinstance(layer.attention, CompressedAttention)
    return layer.attention


def layer_operators(
    ctx: BuildContext, layer: LayerSpec, view: View, enter: Enter, draft: bool = False
) -> list[Operator]:
    """One layer as parts, each shared with the other layers that have the same one."""
    a, rows = attention_of(layer), ctx.rows(view)
    # The owner of global KV writes it for every row, also where the rest of the layer sees kept rows only.
    entered = every_row if a.owns_kv else view
    operators: list[Operator] = []
    operators += ctx.part(("enter", entered), lambda ops: enter(ctx, ops, "attention", "attn_in", ctx.rows(entered)))
    if a.owns_kv:
        operators += ctx.part(("compressor", a.ratio), lambda ops: _compressor(ctx, ops, a))
    operators += ctx.part(("queries", view), lambda ops: _queries(ctx, ops, a, view))
    if a.runs_indexer:
        operators += ctx.part(("indexer", a.ratio, a.index_limit, view), lambda ops: _indexer(ctx, ops, a, view))
    operators += ctx.part(("attention", a.ratio, view), lambda ops: _attention(ctx, ops, a, view))
    operators += ctx.part(("output", view), lambda ops: _output(ctx, ops, a, rows))
    operators += ctx.part(("enter ffn", view), lambda ops: enter(ctx, ops, "ffn", "ffn_in", rows))
    operators += ctx.part(("ffn", layer.ffn, view, draft), lambda ops: ffn_operators(ctx, ops, layer.ffn, view, draft))
    return operators


def stream_embedding(ctx: BuildContext) -> Block:
    """Embedding rows, copied into every residual stream."""
    row_bytes = ctx.model.hidden_size * ACTIVATION_BYTES
    rows = ctx.rows(every_row)
    ops = OperatorList()

    def work(shape: StepShape) -> Work:
        m = rows(shape)
        return Work(bytes_read=m * row_bytes, bytes_written=m * row_bytes * ctx.model.hc_mult, rows=m)

    ops.add("embedding", OpKind.GATHER, ("tokens", "streams"), work)
    # Each tp rank has a part of the vocabulary: a row is found on one of them.
    all_reduce_operator(ctx, ops, "reduce_embedding", ("streams", "streams"), rows)
    return Block("embedding", tuple(ops.operators))


def _compressor(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention) -> None:
    """Global KV and index keys of every row: projection, pooling over `ratio` tokens, quantised store."""
    dim, rows, hidden = attention.head_dim, ctx.rows(every_row), ctx.model.hidden_size
    width, kv = attention.compressor_width * dim, ctx.model.kv
    ops.gemm("compressor", ("attn_in", "latent"), rows, hidden, width, BF16)
    entry_bytes, read = kv.main_bytes, width
    if attention.runs_indexer:
        entry_bytes += kv.index_bytes
        read += _index_keys(ctx, ops, attention, rows)
    stored = entry_bytes / attention.ratio
    ops.elementwise("store_global_kv", ("latent index_k", "global_kv"), rows, (read * ACTIVATION_BYTES, stored))
    gather_kv_operator(ctx, ops, "gather_global_kv", every_row, stored, "global_kv")


def _index_keys(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, rows: RowsOf) -> int:
    """Index keys: pooled by a compressor of their own, or projected from the entries; numbers made of a row."""
    dim = attention.index_dim
    if attention.index_compressor:
        width = attention.compressor_width * dim
        ops.gemm("index_keys", ("attn_in", "index_k"), rows, ctx.model.hidden_size, width, BF16)
        return width

    def entries(shape: StepShape) -> Num:
        return rows(shape) / attention.ratio

    ops.gemm("index_keys", ("latent", "index_k"), entries, attention.head_dim, dim, BF16)
    return dim


def _queries(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, view: View) -> None:
    """Queries and window KV of the rows."""
    dense, window_bytes, rows = ctx.model.dense_format, ctx.model.kv.window_bytes, ctx.rows(view)
    hidden, q_rank, dim = ctx.model.hidden_size, attention.q_lora_rank, attention.head_dim
    ops.gemm("q_a_kv", ("attn_in", "q_latent window_latent"), rows, hidden, q_rank + dim, dense)
    ops.elementwise(
        "norm_rope_store",
        ("q_latent window_latent", "q_latent window_kv"),
        rows,
        ((q_rank + dim) * ACTIVATION_BYTES, q_rank * FP8_ACTIVATION_BYTES + window_bytes),
    )
    gather_kv_operator(ctx, ops, "gather_window_kv", view, window_bytes, "window_kv")
    ops.gemm("q_b", ("q_latent", "q"), rows, q_rank, ctx.heads(attention.num_heads) * dim, dense)


def _attention(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, view: View) -> None:
    """Sparse attention over window and selected entries, one kernel for each phase."""
    if ctx.has("decode"):
        _sparse_attention(ctx, ops, attention, view, "decode")
    if ctx.has("prefill"):
        _sparse_attention(ctx, ops, attention, view, "prefill")
        _rotate_heads(ctx, ops, attention, view)


def _rotate_heads(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, view: View) -> None:
    """What passes over all heads of prompt rows: queries normalised and rotated, outputs rotated back and quantised.

    Decode's few rows stay in caches between the kernels, which start together: measured modules show no such time.
    """
    numbers = ctx.heads(attention.num_heads) * attention.head_dim

    def rows(shape: StepShape) -> Num:
        return total(view(shape).prefill, lambda s: s.rows) / ctx.cp

    row_bytes = (2 * numbers * ACTIVATION_BYTES, numbers * (ACTIVATION_BYTES + FP8_ACTIVATION_BYTES))
    ops.elementwise("rotate_heads", ("attn_heads", "attn_heads"), rows, row_bytes)


def _output(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, rows: RowsOf) -> None:
    """Grouped output projection; tensor parallelism splits the groups."""
    dense, groups, rank = ctx.model.dense_format, ctx.heads(attention.o_groups), attention.o_lora_rank
    group_dim = attention.num_heads * attention.head_dim // attention.o_groups
    ops.gemm("o_a", ("attn_heads", "o_latent"), rows, group_dim, rank, dense, groups)
    ops.gemm("o_b", ("o_latent", "attn_out"), rows, groups * rank, ctx.model.hidden_size, dense)
    all_reduce_operator(ctx, ops, "reduce_attention", ("attn_out", "attn_out"), rows)


def _indexer(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, view: View) -> None:
    assert attention.topk is not None
    scan = IndexScan(
        num_heads=attention.index_heads,
        dim=attention.index_dim,
        topk=attention.topk,
        q_lora_rank=attention.q_lora_rank,
        keys="global_kv",
        ratio=attention.ratio,
        limit=attention.index_limit,
    )
    indexer_operators(ctx, ops, scan, view)


def _sparse_attention(
    ctx: BuildContext,
    ops: OperatorList,
    attention: CompressedAttention,
    view: View,
    phase: Literal["decode", "prefill"],
) -> None:
    """Attention over the window and the selected entries; every row gathers its own."""
    kv, heads = ctx.model.kv, ctx.heads(attention.num_heads)
    if phase == "prefill":
        heads = max(heads, SPARSE_HEADS)
    q_dim = heads * attention.head_dim
    reuse = 1.0 if phase == "decode" else PREFILL_GATHER_REUSE

    def window_entries(s: Sequences) -> Num:
        return visible_entries(s.context, s.rows, 1.0, attention.window)

    def global_entries(s: Sequences) -> Num:
        if not attention.ratio:
            return 0.0
        return visible_entries(s.context, s.rows, attention.ratio, attention.topk)

    def of_phase(shape: StepShape) -> tuple[Sequences, ...]:
        seen = view(shape)
        return decode_group(seen) if phase == "decode" else seen.prefill

    def work(shape: StepShape) -> Work:
        sequences = of_phase(shape)
        window = total(sequences, window_entries) / ctx.cp
        selected = total(sequences, global_entries) / ctx.cp
        m = total(sequences, lambda s: s.rows) / ctx.cp
        return Work(
            flops=4.0 * q_dim * (window + selected),
            bytes_read=(window * kv.window_bytes + selected * kv.main_bytes) / reuse + m * q_dim * ACTIVATION_BYTES,
            bytes_written=m * q_dim * ACTIVATION_BYTES,
            rows=(window + selected) / larger(m, 1e-9) if phase == "prefill" else float(heads),
        )

    kind = OpKind.SPARSE_ATTENTION_DECODE if phase == "decode" else OpKind.SPARSE_ATTENTION_PREFILL
    # Prompt rows go into the same tensor as decoding ones, behind them.
    begun = " attn_heads" if phase == "prefill" and ctx.has("decode") else ""
    ops.add(f"attention_{phase}", kind, ("q window_kv global_kv selected" + begun, "attn_heads"), work)
