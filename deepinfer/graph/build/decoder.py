"""Skeleton of decoder-only models with one residual stream: embedding, layers, head, MTP draft."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    all_reduce_operator,
    every_row,
    head_operators,
)
from deepinfer.graph.build.draft import mtp_blocks
from deepinfer.graph.build.experts import ffn_operators
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import View
from deepinfer.model.spec import Attention, DenseFFN, LayerSpec, MoE

AttentionOperators = Callable[[BuildContext, OperatorList, LayerSpec, View], None]
"""Attention of a layer, from slot `attn_in` to slot `attn_out`."""


def decoder_blocks(ctx: BuildContext, attention: AttentionOperators) -> tuple[Block, ...]:
    """Blocks of a step in order: embedding, layers (alike ones share a block), head, draft."""
    cache: dict[tuple[Attention, DenseFFN | MoE], Block] = {}
    blocks = [_embedding(ctx, every_row)]
    for layer in ctx.model.layers:
        alike = (layer.attention, layer.ffn)
        if alike not in cache:
            cache[alike] = _layer_block(ctx, layer, every_row, attention)
        blocks.append(cache[alike])
    ops = OperatorList()
    head_operators(ctx, ops, lambda s: ctx.split(s.logit_rows), ("ffn_out", "tokens"))
    blocks.append(Block("head", tuple(ops.operators)))
    draft = ctx.model.draft
    if ctx.features.nextn and draft is not None:
        blocks += mtp_blocks(
            ctx,
            lambda ops, view: _draft_input(ctx, ops, view),
            lambda view: _layer_block(ctx, draft.layers[0], view, attention, draft=True),
            lambda ops, rows: head_operators(ctx, ops, rows, ("ffn_out", "tokens")),
        )
    return tuple(blocks)


def _draft_input(ctx: BuildContext, ops: OperatorList, view: View) -> None:
    hidden = ctx.model.hidden_size
    ops.gemm("project", ("ffn_out tokens", "ffn_out"), ctx.rows(view), 2 * hidden, hidden, ctx.model.dense_format)


def _embedding(ctx: BuildContext, view: View) -> Block:
    row_bytes = ctx.model.hidden_size * ACTIVATION_BYTES
    rows = ctx.rows(view)
    ops = OperatorList()
    ops.add(
        "embedding",
        OpKind.GATHER,
        ("tokens", "ffn_out"),
        lambda s: Work(bytes_read=rows(s) * row_bytes, bytes_written=rows(s) * row_bytes),
    )
    # Each tp rank has a part of the vocabulary: a row is found on one of them.
    all_reduce_operator(ctx, ops, "reduce_embedding", ("ffn_out", "ffn_out"), rows)
    return Block("embedding", tuple(ops.operators))


def _layer_block(
    ctx: BuildContext, layer: LayerSpec, view: View, attention: AttentionOperators, draft: bool = False
) -> Block:
    hidden, rows = ctx.model.hidden_size, ctx.rows(view)
    ops = OperatorList()
    norm = (2 * hidden * ACTIVATION_BYTES, hidden * (ACTIVATION_BYTES + FP8_ACTIVATION_BYTES))
    ops.elementwise("attn_norm", ("ffn_out shared_out attn_out", "attn_in"), rows, norm)
    attention(ctx, ops, layer, view)
    scatter = isinstance(layer.ffn, MoE) and ctx.layout.scatters_rows
    name = "scatter_attention" if scatter else "reduce_attention"
    all_reduce_operator(ctx, ops, name, ("attn_out", "attn_out"), rows, passes=1 if scatter else 2)
    ops.elementwise("ffn_norm", ("attn_out", "ffn_in"), ctx.routed_rows(view) if scatter else rows, norm)
    ffn_operators(ctx, ops, layer.ffn, view, draft)
    name = "dense layer" if isinstance(layer.ffn, DenseFFN) else "moe layer"
    return Block(name, tuple(ops.operators), is_layer=True)
