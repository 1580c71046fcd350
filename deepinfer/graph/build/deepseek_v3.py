"""Execution graph of DeepSeek-V3, R1 and Kimi-K2: multi-head latent attention, grouped experts, MTP draft.

Decode attends in latent space (absorbed projections); prefill expands the latent to heads (DeepSeek-V2 paper, 2.1).
"""

from __future__ import annotations

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    cache_precision,
    decode_group,
    total,
)
from deepinfer.graph.build.context import gather_context, gather_queries, merge_outputs
from deepinfer.graph.build.decoder import decoder_blocks
from deepinfer.graph.build.latent import absorbed_operators, output_operator, query_operators
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import StepShape, View, visible_entries
from deepinfer.model.spec import LatentAttention, LayerSpec
from deepinfer.numeric import Num, larger


def build_blocks(ctx: BuildContext) -> tuple[Block, ...]:
    """Blocks of a V3 step in order: embedding, dense and MoE layers, head, draft."""
    return decoder_blocks(ctx, _attention)


def _attention(ctx: BuildContext, ops: OperatorList, layer: LayerSpec, view: View) -> None:
    attention = layer.attention
    assert isinstance(attention, LatentAttention)
    query_operators(ctx, ops, attention, view)
    if ctx.has("decode"):
        _decode_attention(ctx, ops, attention, view)
    if ctx.has("prefill"):
        _prefill_attention(ctx, ops, attention, view)
    output_operator(ctx, ops, attention, view)


def _decode_attention(ctx: BuildContext, ops: OperatorList, attention: LatentAttention, view: View) -> None:
    """Absorbed: queries into latent space, attention over the latent cache, values back to heads."""
    heads, rank, entry_bytes = ctx.heads(attention.num_heads), attention.kv_lora_rank, ctx.model.kv.main_bytes
    latent, dcp = rank + attention.rope_dim, ctx.layout.dcp

    attending, precision = heads * dcp, cache_precision(entry_bytes / latent)

    def rows(shape: StepShape) -> Num:
        return total(decode_group(view(shape)), lambda s: s.rows) / ctx.cp

    def work(shape: StepShape) -> Work:
        sequences, m = decode_group(view(shape)), rows(shape)
        pairs = total(sequences, lambda s: visible_entries(s.context, s.rows)) / (ctx.cp * dcp)
        cached = total(sequences, lambda s: s.context + s.rows) / (ctx.cp * dcp)
        per_sequence = sequences[0].rows if sequences else 1.0
        return Work(
            flops=2.0 * attending * (latent + rank) * pairs,
            precision=precision,
            bytes_read=cached * entry_bytes + m * attending * latent * ACTIVATION_BYTES,
            bytes_written=m * attending * rank * ACTIVATION_BYTES,
            rows=attending * per_sequence,
        )

    def core() -> None:
        gather_queries(ctx, ops, "q_absorbed", rows, heads * latent)
        ops.add(
            "attention_decode",
            OpKind.ATTENTION_DECODE,
            ("q_absorbed kv", "attn_latent"),
            work,
        )
        merge_outputs(ctx, ops, "attn_latent", rows, heads, rank)

    absorbed_operators(ctx, ops, attention, rows, core)


def _prefill_attention(ctx: BuildContext, ops: OperatorList, attention: LatentAttention, view: View) -> None:
    """Expanded: keys and values of the whole context for every head, then causal attention."""
    heads, q_head = ctx.heads(attention.num_heads), attention.nope_dim + attention.rope_dim
    width = heads * (attention.nope_dim + attention.v_dim)
    precision = cache_precision(ctx.model.kv.main_bytes / (attention.kv_lora_rank + attention.rope_dim))

    def cached(shape: StepShape) -> Num:
        # Every rank of a replica expands the whole context: only its queries are split.
        return total(view(shape).prefill, lambda s: s.context + s.rows)

    def work(shape: StepShape) -> Work:
        sequences = view(shape).prefill
        pairs = total(sequences, lambda s: visible_entries(s.context, s.rows)) / ctx.cp
        m = total(sequences, lambda s: s.rows) / ctx.cp
        return Work(
            flops=2.0 * heads * (q_head + attention.v_dim) * pairs,
            precision=precision,
            bytes_read=(cached(shape) * (width + heads * attention.rope_dim) + m * heads * q_head) * ACTIVATION_BYTES,
            bytes_written=m * heads * attention.v_dim * ACTIVATION_BYTES,
            # Efficiency depends on how many keys a row sees, not on how many rows or prompts there are.
            rows=pairs / larger(m, 1e-9),
        )

    gather_context(ctx, ops, view, ctx.model.kv.main_bytes)
    ops.gemm("kv_b", ("kv", "keys_values"), cached, attention.kv_lora_rank, width, ctx.model.dense_format)
    # Every head's keys are put together: their own part, and the rotated one that all heads share.
    key_bytes = (heads * attention.nope_dim * ACTIVATION_BYTES, heads * q_head * ACTIVATION_BYTES)
    ops.elementwise("assemble_keys", ("keys_values", "keys_values"), cached, key_bytes)
    ops.add("attention_prefill", OpKind.ATTENTION_PREFILL, ("q keys_values", "attn_heads"), work)
