"""Execution graph of Qwen3 mixture-of-experts models: grouped-query attention, experts without a shared one."""

from __future__ import annotations

from typing import Literal

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    cache_precision,
    decode_group,
    gather_kv_operator,
    total,
)
from deepinfer.graph.build.context import gather_context, gather_queries, merge_outputs
from deepinfer.graph.build.decoder import decoder_blocks
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape, View, visible_entries
from deepinfer.layout.sharding import kv_share, local_kv_heads
from deepinfer.model.spec import GroupedQueryAttention, LayerSpec
from deepinfer.numeric import Num, larger


def build_blocks(ctx: BuildContext) -> tuple[Block, ...]:
    """Blocks of a step in order: embedding, layers, head."""
    return decoder_blocks(ctx, _attention)


def _attention(ctx: BuildContext, ops: OperatorList, layer: LayerSpec, view: View) -> None:
    attention = layer.attention
    assert isinstance(attention, GroupedQueryAttention)
    dense, rows, hidden = ctx.model.dense_format, ctx.rows(view), ctx.model.hidden_size
    kv_heads, kv_bytes = local_kv_heads(attention, ctx.layout.tp), _kv_bytes(ctx, attention)
    q_dim = ctx.heads(attention.num_heads) * attention.head_dim
    width = q_dim + 2 * kv_heads * attention.head_dim
    ops.gemm("qkv", ("attn_in", "q new_kv"), rows, hidden, width, dense)
    # Queries and keys are normalised per head, rotated, and written: queries as activations, the rest to the cache.
    row_bytes = (width * ACTIVATION_BYTES, q_dim * ACTIVATION_BYTES + kv_bytes)
    ops.elementwise("norm_rope_store", ("q new_kv", "q kv"), rows, row_bytes)
    gather_kv_operator(ctx, ops, "gather_kv", view, kv_bytes, "kv")
    if ctx.has("decode"):
        _core(ctx, ops, attention, view, "decode")
    if ctx.has("prefill"):
        _core(ctx, ops, attention, view, "prefill")
    ops.gemm("o", ("attn_heads", "attn_out"), rows, q_dim, hidden, dense)


def _kv_bytes(ctx: BuildContext, attention: GroupedQueryAttention) -> float:
    """Cache of one token and layer on one rank."""
    return ctx.model.kv.main_bytes * kv_share(attention, ctx.layout.tp)


def _core(
    ctx: BuildContext,
    ops: OperatorList,
    attention: GroupedQueryAttention,
    view: View,
    phase: Literal["decode", "prefill"],
) -> None:
    """Causal attention over the whole context; the queries of a group share their reads of keys and values."""
    heads, kv_bytes = ctx.heads(attention.num_heads), _kv_bytes(ctx, attention)
    decoding = phase == "decode"
    precision = cache_precision(ctx.model.kv.main_bytes / (2 * attention.num_kv_heads * attention.head_dim))
    # Ranks that share the context of decoding requests attend for one another.
    dcp = ctx.layout.dcp if decoding else 1
    q_dim, group = heads * dcp * attention.head_dim, heads * dcp // local_kv_heads(attention, ctx.layout.tp)

    def of_phase(shape: StepShape) -> tuple[Sequences, ...]:
        seen = view(shape)
        return decode_group(seen) if decoding else seen.prefill

    def work(shape: StepShape) -> Work:
        sequences = of_phase(shape)
        pairs = total(sequences, lambda s: visible_entries(s.context, s.rows)) / (ctx.cp * dcp)
        m = rows(shape)
        # The ranks of a replica share its decoding requests; every one of them reads the prompts' whole context.
        cached = total(sequences, lambda s: s.context + s.rows) / (ctx.cp * dcp if decoding else 1)
        per_sequence = sequences[0].rows if sequences else 1.0
        return Work(
            flops=4.0 * q_dim * pairs,
            precision=precision,
            bytes_read=cached * kv_bytes + m * q_dim * ACTIVATION_BYTES,
            bytes_written=m * q_dim * ACTIVATION_BYTES,
            rows=group * per_sequence if decoding else pairs / larger(m, 1e-9),
        )

    def rows(shape: StepShape) -> Num:
        return total(of_phase(shape), lambda s: s.rows) / ctx.cp

    if decoding:
        gather_queries(ctx, ops, "q", rows, heads * attention.head_dim)
    else:
        gather_context(ctx, ops, view, kv_bytes)
    kind = OpKind.ATTENTION_DECODE if decoding else OpKind.ATTENTION_PREFILL
    ops.add(f"attention_{phase}", kind, ("q kv", "attn_heads"), work)
    if decoding:
        merge_outputs(ctx, ops, "attn_heads", rows, heads, attention.head_dim)
