"""Execution graph of DeepSeek-V4.1: causal encoder-decoder, compressed shared KV, Engram, DSpark draft.

Shapes and formats: the model card; what prefill may skip: DeepInfer 0.1.0 (`v4_modules/attn.py`, `yoco.py`).
"""

from __future__ import annotations

from dataclasses import replace
from functools import lru_cache

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    RowsOf,
    head_operators,
    layer_view,
)
from deepinfer.graph.build.compressed import attention_of, layer_operators, stream_embedding
from deepinfer.graph.build.draft import dspark_blocks
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.graph.shape import StepShape, View
from deepinfer.model.parameters import hyper_connection_parameters
from deepinfer.model.spec import Engram, LayerSpec
from deepinfer.numeric import Num


def build_blocks(ctx: BuildContext) -> tuple[Block, ...]:
    """Blocks of a V4.1 step in order: embedding, layers (alike ones share a block), head, draft."""
    cache: dict[LayerSpec, Block] = {}
    blocks = [stream_embedding(ctx)]
    for layer in ctx.model.layers:
        alike = _without_position(layer)
        if alike not in cache:
            cache[alike] = _layer_block(ctx, layer, layer_view(ctx, layer))
        blocks.append(cache[alike])
    blocks.append(_head(ctx))
    draft = ctx.model.draft
    if ctx.features.nextn and draft is not None:
        blocks += dspark_blocks(ctx, draft, lambda view: _layer_block(ctx, draft.layers[0], view, draft=True))
    return tuple(blocks)


@lru_cache(maxsize=1024)
def _without_position(layer: LayerSpec) -> LayerSpec:
    """The layer without what only names its place, so that layers with the same work compare equal."""
    engram = replace(layer.engram, num_rows=0) if layer.engram else None
    return replace(layer, index=0, engram=engram, attention=replace(attention_of(layer), kv_owner=None))


def _layer_block(ctx: BuildContext, layer: LayerSpec, view: View, draft: bool = False) -> Block:
    operators: list[Operator] = []
    if layer.engram is not None:
        engram = layer.engram
        operators += ctx.part(("engram", view), lambda ops: _engram(ctx, ops, engram, ctx.rows(view)))
    operators += layer_operators(ctx, layer, view, _enter, draft)
    half = "decoder" if layer.bounded else "encoder"
    name = f"{half} {attention_of(layer).role}" + (" engram" if layer.engram else "")
    return Block(name, tuple(operators), is_layer=True)


def _head(ctx: BuildContext) -> Block:
    ops = OperatorList()

    def rows(shape: StepShape) -> Num:
        return ctx.split(shape.logit_rows)

    _enter(ctx, ops, "head", "head_in", rows)
    head_operators(ctx, ops, rows, ("head_in", "tokens"))
    return Block("head", tuple(ops.operators))


def _enter(ctx: BuildContext, ops: OperatorList, sublayer: str, target: str, rows: RowsOf) -> None:
    """Mix the last sublayer into the residual streams, map them to the next one's input, normalise, quantise."""
    hidden, streams = ctx.model.hidden_size, ctx.model.hc_mult
    ops.elementwise(
        f"hc_{sublayer}",
        ("streams ffn_out shared_out attn_out", f"streams {target}"),
        rows,
        (
            (streams + 1) * hidden * ACTIVATION_BYTES,
            streams * hidden * ACTIVATION_BYTES + hidden * FP8_ACTIVATION_BYTES,
        ),
        hyper_connection_parameters(ctx.model),
    )


def _engram(ctx: BuildContext, ops: OperatorList, memory: Engram, rows: RowsOf) -> None:
    """Look up n-gram rows in tables sharded over the engine's ranks, project them, gate them into the streams."""
    hidden, ranks = ctx.model.hidden_size, ctx.layout.num_ranks
    per_row = float(memory.rows_per_token * memory.row_bytes)

    def lookup(shape: StepShape) -> Work:
        num_bytes = rows(shape) * per_row
        up, out = ctx.link_bytes(num_bytes, ranks)
        message = Message("all_to_all", up, out, ranks) if ranks > 1 else None
        return Work(bytes_read=num_bytes, bytes_written=num_bytes, message=message)

    # The n-gram ids are known before the step, so the look-up runs beside the layers before.
    ops.add("engram_lookup", OpKind.GATHER, ("token_ids", "engram_rows"), lookup, "comm")
    projected = (ctx.model.hc_mult + 1) * hidden
    width = memory.rows_per_token * memory.row_dim
    ops.gemm("engram_proj", ("engram_rows", "engram_out"), rows, width, projected, ctx.model.dense_format)
    ops.elementwise(
        "engram_gate",
        ("engram_out streams ffn_out shared_out", "streams"),
        rows,
        (
            (projected + ctx.model.hc_mult * hidden) * ACTIVATION_BYTES,
            ctx.model.hc_mult * hidden * ACTIVATION_BYTES,
        ),
    )
