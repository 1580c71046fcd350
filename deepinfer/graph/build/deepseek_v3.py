"""Execution graph of DeepSeek-V3 and R1: multi-head latent attention, grouped experts, MTP draft.

Decode attends in latent space (absorbed projections); prefill expands the latent to heads (DeepSeek-V2 paper, 2.1).
"""

from __future__ import annotations

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    decode_group,
    every_row,
    ffn_operators,
    gather_kv_operator,
    head_operators,
    total,
)
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import StepShape, View, visible_entries
from deepinfer.model.spec import BF16, DenseFFN, DraftSpec, LatentAttention, LayerSpec, MoE
from deepinfer.numeric import Num, larger


def build_blocks(ctx: BuildContext) -> tuple[Block, ...]:
    """Blocks of a V3 step in order: embedding, dense and MoE layers, head, draft."""
    cache: dict[DenseFFN | MoE, Block] = {}
    blocks = [_embedding(ctx, every_row)]
    for layer in ctx.model.layers:
        if layer.ffn not in cache:
            cache[layer.ffn] = _layer_block(ctx, layer, every_row)
        blocks.append(cache[layer.ffn])
    ops = OperatorList()
    head_operators(ctx, ops, lambda s: ctx.split(s.logit_rows), ("ffn_out", "tokens"))
    blocks.append(Block("head", tuple(ops.operators)))
    if ctx.features.nextn and ctx.model.draft is not None:
        blocks += _draft_blocks(ctx, ctx.model.draft)
    return tuple(blocks)


def _embedding(ctx: BuildContext, view: View) -> Block:
    row_bytes = ctx.model.hidden_size * ACTIVATION_BYTES
    rows = ctx.rows(view)
    ops = OperatorList()
    ops.add(
        "embedding",
        OpKind.GATHER,
        ("tokens", "ffn_out"),
        lambda s: Work(bytes_read=rows(s) * row_bytes, bytes_written=rows(s) * row_bytes),
        rows,
    )
    return Block("embedding", tuple(ops.operators))


def _layer_block(ctx: BuildContext, layer: LayerSpec, view: View) -> Block:
    assert isinstance(layer.attention, LatentAttention)
    hidden, rows = ctx.model.hidden_size, ctx.rows(view)
    ops = OperatorList()
    norm = (2 * hidden * ACTIVATION_BYTES, hidden * (ACTIVATION_BYTES + FP8_ACTIVATION_BYTES))
    ops.elementwise("attn_norm", ("ffn_out shared_out attn_out", "attn_in"), rows, norm)
    _attention(ctx, ops, layer.attention, view)
    ops.elementwise("ffn_norm", ("attn_out", "ffn_in"), rows, norm)
    ffn_operators(ctx, ops, layer.ffn, view)
    return Block("dense layer" if isinstance(layer.ffn, DenseFFN) else "moe layer", tuple(ops.operators))


def _attention(ctx: BuildContext, ops: OperatorList, attention: LatentAttention, view: View) -> None:
    dense, rows, hidden = ctx.model.dense_format, ctx.rows(view), ctx.model.hidden_size
    latent = attention.kv_lora_rank + attention.rope_dim
    entry_bytes = ctx.model.kv.main_bytes
    heads, q_head = attention.num_heads, attention.nope_dim + attention.rope_dim
    ops.gemm("q_a_kv_a", ("attn_in", "q_latent latent"), rows, hidden, attention.q_lora_rank + latent, dense)
    ops.elementwise(
        "norm_rope_store",
        ("q_latent latent", "q_latent kv"),
        rows,
        (
            (attention.q_lora_rank + latent) * ACTIVATION_BYTES,
            attention.q_lora_rank * FP8_ACTIVATION_BYTES + entry_bytes,
        ),
    )
    gather_kv_operator(ctx, ops, "gather_kv", view, entry_bytes, "kv")
    ops.gemm("q_b", ("q_latent", "q"), rows, attention.q_lora_rank, heads * q_head, dense)
    if ctx.has("decode"):
        _decode_attention(ctx, ops, attention, view)
    if ctx.has("prefill"):
        _prefill_attention(ctx, ops, attention, view)
    ops.gemm("o", ("attn_heads", "attn_out"), rows, heads * attention.v_dim, hidden, dense)


def _decode_attention(ctx: BuildContext, ops: OperatorList, attention: LatentAttention, view: View) -> None:
    """Absorbed: queries into latent space, attention over the latent cache, values back to heads."""
    heads, rank, entry_bytes = attention.num_heads, attention.kv_lora_rank, ctx.model.kv.main_bytes
    latent = rank + attention.rope_dim

    def rows(shape: StepShape) -> Num:
        return total(decode_group(view(shape)), lambda s: s.rows) / ctx.cp

    def work(shape: StepShape) -> Work:
        sequences, m = decode_group(view(shape)), rows(shape)
        pairs = total(sequences, lambda s: visible_entries(s.context, s.rows)) / ctx.cp
        cached = total(sequences, lambda s: s.context + s.rows) / ctx.cp
        per_sequence = sequences[0].rows if sequences else 1.0
        return Work(
            flops=2.0 * heads * (latent + rank) * pairs,
            bytes_read=cached * entry_bytes + m * heads * latent * ACTIVATION_BYTES,
            bytes_written=m * heads * rank * ACTIVATION_BYTES,
            rows=heads * per_sequence,
        )

    ops.gemm("absorb_q", ("q", "q_absorbed"), rows, attention.nope_dim, rank, BF16, groups=heads)
    ops.add(
        "attention_decode", OpKind.ATTENTION_DECODE, ("q_absorbed kv", "attn_latent"), work, lambda s: view(s).decode
    )
    ops.gemm("absorb_v", ("attn_latent", "attn_heads"), rows, rank, attention.v_dim, BF16, groups=heads)


def _prefill_attention(ctx: BuildContext, ops: OperatorList, attention: LatentAttention, view: View) -> None:
    """Expanded: keys and values of the whole context for every head, then causal attention."""
    heads, q_head = attention.num_heads, attention.nope_dim + attention.rope_dim
    width = heads * (attention.nope_dim + attention.v_dim)

    def cached(shape: StepShape) -> Num:
        # Every rank of a replica expands the whole context: only its queries are split.
        return total(view(shape).prefill, lambda s: s.context + s.rows)

    def work(shape: StepShape) -> Work:
        sequences = view(shape).prefill
        pairs = total(sequences, lambda s: visible_entries(s.context, s.rows)) / ctx.cp
        m = total(sequences, lambda s: s.rows) / ctx.cp
        return Work(
            flops=2.0 * heads * (q_head + attention.v_dim) * pairs,
            bytes_read=(cached(shape) * (width + heads * attention.rope_dim) + m * heads * q_head) * ACTIVATION_BYTES,
            bytes_written=m * heads * attention.v_dim * ACTIVATION_BYTES,
            # Efficiency depends on how many keys a row sees, not on how many rows or prompts there are.
            rows=pairs / larger(m, 1e-9),
        )

    ops.gemm("kv_b", ("kv", "keys_values"), cached, attention.kv_lora_rank, width, ctx.model.dense_format)
    ops.add(
        "attention_prefill", OpKind.ATTENTION_PREFILL, ("q keys_values", "attn_heads"), work, lambda s: view(s).prefill
    )


def _draft_blocks(ctx: BuildContext, draft: DraftSpec) -> list[Block]:
    """MTP: the first pass also caches the verified rows; each further pass runs one row a request."""
    blocks: list[Block] = []
    for position in range(ctx.features.nextn):
        width = 1.0 + ctx.features.nextn if position == 0 else 1.0

        def view(shape: StepShape, width: float = width) -> StepShape:
            return shape.drafting(width)

        ops = OperatorList("draft_")
        hidden = ctx.model.hidden_size
        ops.gemm("project", ("ffn_out tokens", "ffn_out"), ctx.rows(view), 2 * hidden, hidden, ctx.model.dense_format)
        blocks.append(Block("draft input", tuple(ops.operators)))
        blocks.append(Block("draft layer", _layer_block(ctx, draft.layers[0], view).operators))
        ops = OperatorList("draft_")
        head_operators(ctx, ops, ctx.rows(lambda s: s.drafting(1.0)), ("ffn_out", "tokens"))
        blocks.append(Block("draft head", tuple(ops.operators)))
    return blocks
