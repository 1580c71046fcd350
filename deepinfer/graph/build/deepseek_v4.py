"""Execution graph of DeepSeek-V4: CSA, HCA and window layers that own their KV, hyper-connections, MTP or DSpark.

Shapes and formats: the model card; order of operators: transformers 5.24.0, `modeling_deepseek_v4`.
"""

from __future__ import annotations

from dataclasses import replace

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    RowsOf,
    every_row,
    head_operators,
)
from deepinfer.graph.build.compressed import attention_of, layer_operators, stream_embedding
from deepinfer.graph.build.draft import dspark_blocks, mtp_blocks
from deepinfer.graph.graph import Block
from deepinfer.graph.shape import View
from deepinfer.model.parameters import hyper_connection_parameters
from deepinfer.model.spec import DraftSpec, LayerSpec

KIND = {0: "window", 4: "CSA", 128: "HCA"}


def build_blocks(ctx: BuildContext) -> tuple[Block, ...]:
    """Blocks of a V4 step in order: embedding, layers (alike ones share a block), head, draft."""
    cache: dict[LayerSpec, Block] = {}
    blocks = [stream_embedding(ctx)]
    for layer in ctx.model.layers:
        alike = replace(layer, index=0, attention=replace(attention_of(layer), kv_owner=None))
        if alike not in cache:
            cache[alike] = _layer_block(ctx, layer, every_row)
        blocks.append(cache[alike])
    ops = OperatorList()
    _head(ctx, ops, lambda s: ctx.split(s.logit_rows))
    blocks.append(Block("head", tuple(ops.operators)))
    if ctx.features.nextn and ctx.model.draft is not None:
        blocks += _draft_blocks(ctx, ctx.model.draft)
    return tuple(blocks)


def _layer_block(ctx: BuildContext, layer: LayerSpec, view: View, draft: bool = False) -> Block:
    operators = layer_operators(ctx, layer, view, _enter, draft)
    return Block(f"{KIND[attention_of(layer).ratio]} layer", tuple(operators), is_layer=True)


def _mix_in(ctx: BuildContext, ops: OperatorList, sublayer: str, rows: RowsOf) -> None:
    """Mix the last sublayer's output into the residual streams."""
    hidden, streams = ctx.model.hidden_size, ctx.model.hc_mult
    row_bytes = ((streams + 1) * hidden * ACTIVATION_BYTES, streams * hidden * ACTIVATION_BYTES)
    ops.elementwise(f"hc_{sublayer}_post", ("streams ffn_out shared_out attn_out", "streams"), rows, row_bytes)


def _enter(ctx: BuildContext, ops: OperatorList, sublayer: str, target: str, rows: RowsOf) -> None:
    """Mix in, then map the streams to a sublayer's input, normalise, quantise.

    Two kernels: the map needs the streams as mixed, so they are read again (V4.1 has its map from a sublayer earlier).
    """
    _mix_in(ctx, ops, sublayer, rows)
    hidden, streams = ctx.model.hidden_size, ctx.model.hc_mult
    row_bytes = (streams * hidden * ACTIVATION_BYTES, hidden * FP8_ACTIVATION_BYTES)
    parameters = hyper_connection_parameters(ctx.model)
    ops.elementwise(f"hc_{sublayer}_pre", ("streams", target), rows, row_bytes, parameters)


def _head(ctx: BuildContext, ops: OperatorList, rows: RowsOf) -> None:
    """The streams collapsed by a map of their own (m h x m), LM head, sampling."""
    _mix_in(ctx, ops, "head", rows)
    hidden, streams = ctx.model.hidden_size, ctx.model.hc_mult
    row_bytes = (streams * hidden * ACTIVATION_BYTES, hidden * ACTIVATION_BYTES)
    ops.elementwise("hc_head_pre", ("streams", "head_in"), rows, row_bytes, streams * streams * hidden)
    head_operators(ctx, ops, rows, ("head_in", "tokens"))


def _draft_blocks(ctx: BuildContext, draft: DraftSpec) -> list[Block]:
    def layer(view: View) -> Block:
        return _layer_block(ctx, draft.layers[0], view, draft=True)

    if draft.kind == "dspark":
        return dspark_blocks(ctx, draft, layer)
    return mtp_blocks(
        ctx,
        lambda ops, view: _draft_input(ctx, ops, view),
        layer,
        lambda ops, rows: _head(ctx, ops, rows),
    )


def _draft_input(ctx: BuildContext, ops: OperatorList, view: View) -> None:
    """The next token's embedding, projected once, added to the projection of every residual stream."""
    hidden, dense, rows = ctx.model.hidden_size, ctx.model.dense_format, ctx.rows(view)
    ops.gemm("project_token", ("tokens", "draft_in"), rows, hidden, hidden, dense)
    streams = ctx.model.hc_mult
    ops.gemm("project", ("streams draft_in", "streams"), lambda s: rows(s) * streams, hidden, hidden, dense)
