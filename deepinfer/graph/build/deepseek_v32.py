"""Execution graph of DeepSeek-V3.2: V3 with an indexer in every layer; a row attends to the top-k that it selects.

Both phases attend in latent space: FlashMLA's sparse kernels, decode and prefill, read the latent cache.
"""

from __future__ import annotations

from typing import Literal

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    PREFILL_GATHER_REUSE,
    SPARSE_HEADS,
    BuildContext,
    OperatorList,
    decode_group,
    total,
)
from deepinfer.graph.build.decoder import decoder_blocks
from deepinfer.graph.build.indexer import IndexScan, indexer_operators
from deepinfer.graph.build.latent import absorbed_operators, output_operator, query_operators
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape, View, visible_entries
from deepinfer.model.spec import LatentAttention, LayerSpec
from deepinfer.numeric import larger


def build_blocks(ctx: BuildContext) -> tuple[Block, ...]:
    """Blocks of a V3.2 step in order: embedding, dense and MoE layers, head, draft."""
    return decoder_blocks(ctx, _attention)


def _attention(ctx: BuildContext, ops: OperatorList, layer: LayerSpec, view: View) -> None:
    attention = layer.attention
    assert isinstance(attention, LatentAttention)
    indexer = attention.indexer
    assert indexer is not None
    query_operators(ctx, ops, attention, view)
    scan = IndexScan(indexer.num_heads, indexer.dim, indexer.topk, attention.q_lora_rank, "kv")
    indexer_operators(ctx, ops, scan, view)

    def core() -> None:
        if ctx.has("decode"):
            _sparse_attention(ctx, ops, attention, indexer.topk, view, "decode")
        if ctx.has("prefill"):
            _sparse_attention(ctx, ops, attention, indexer.topk, view, "prefill")

    absorbed_operators(ctx, ops, attention, ctx.rows(view), core)
    output_operator(ctx, ops, attention, view)


def _sparse_attention(
    ctx: BuildContext,
    ops: OperatorList,
    attention: LatentAttention,
    topk: int,
    view: View,
    phase: Literal["decode", "prefill"],
) -> None:
    """Attention over the selected latents; every row gathers its own."""
    heads, rank, entry_bytes = ctx.heads(attention.num_heads), attention.kv_lora_rank, ctx.model.kv.main_bytes
    heads = max(heads, SPARSE_HEADS)
    latent = rank + attention.rope_dim
    reuse = 1.0 if phase == "decode" else PREFILL_GATHER_REUSE

    def of_phase(shape: StepShape) -> tuple[Sequences, ...]:
        seen = view(shape)
        return decode_group(seen) if phase == "decode" else seen.prefill

    def work(shape: StepShape) -> Work:
        sequences = of_phase(shape)
        selected = total(sequences, lambda s: visible_entries(s.context, s.rows, 1.0, topk)) / ctx.cp
        m = total(sequences, lambda s: s.rows) / ctx.cp
        return Work(
            flops=2.0 * heads * (latent + rank) * selected,
            bytes_read=selected * entry_bytes / reuse + m * heads * latent * ACTIVATION_BYTES,
            bytes_written=m * heads * rank * ACTIVATION_BYTES,
            rows=selected / larger(m, 1e-9) if phase == "prefill" else float(heads),
        )

    kind = OpKind.SPARSE_ATTENTION_DECODE if phase == "decode" else OpKind.SPARSE_ATTENTION_PREFILL
    ops.add(f"attention_{phase}", kind, ("q_absorbed kv selected", "attn_latent"), work)
