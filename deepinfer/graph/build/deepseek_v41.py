"""Execution graph of DeepSeek-V4.1: causal encoder-decoder, compressed shared KV, Engram, DSpark draft.

Shapes and formats: the model card; what prefill may skip: DeepInfer 0.1.0 (`v4_modules/attn.py`, `yoco.py`).
"""

from __future__ import annotations

from dataclasses import replace
from typing import Literal

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    PREFILL_GATHER_REUSE,
    BuildContext,
    OperatorList,
    RowsOf,
    decode_group,
    every_row,
    ffn_operators,
    gather_kv_operator,
    head_operators,
    layer_view,
    total,
)
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape, View, visible_entries
from deepinfer.model.parameters import hyper_connection_parameters
from deepinfer.model.spec import BF16, CompressedAttention, DraftSpec, Engram, LayerSpec
from deepinfer.numeric import Num, larger, smaller

SCORE_BYTES = 4.0  # index logits are FP32 between scoring and top-k


def build_blocks(ctx: BuildContext) -> tuple[Block, ...]:
    """Blocks of a V4.1 step in order: embedding, layers (alike ones share a block), head, draft."""
    cache: dict[LayerSpec, Block] = {}
    blocks = [_embedding(ctx)]
    for layer in ctx.model.layers:
        alike = _without_position(layer)
        if alike not in cache:
            cache[alike] = _layer_block(ctx, layer, layer_view(ctx, layer))
        blocks.append(cache[alike])
    blocks.append(_head(ctx))
    if ctx.features.nextn and ctx.model.draft is not None:
        blocks += _draft_blocks(ctx, ctx.model.draft)
    return tuple(blocks)


def _attention_of(layer: LayerSpec) -> CompressedAttention:
    assert isinstance(layer.attention, CompressedAttention)
    return layer.attention


def _without_position(layer: LayerSpec) -> LayerSpec:
    """The layer without what only names its place, so that layers with the same work compare equal."""
    engram = replace(layer.engram, num_rows=0) if layer.engram else None
    return replace(layer, index=0, engram=engram, attention=replace(_attention_of(layer), kv_owner=None))


def _layer_block(ctx: BuildContext, layer: LayerSpec, view: View) -> Block:
    """One layer as parts, each shared with the other layers that have the same one."""
    a, rows = _attention_of(layer), ctx.rows(view)
    operators: list[Operator] = []
    if layer.engram is not None:
        engram = layer.engram
        operators += ctx.part(("engram", view), lambda ops: _engram(ctx, ops, engram, rows))
    # The owner of global KV writes it for every row, also where the rest of the layer sees kept rows only.
    entered = every_row if a.owns_kv else view
    operators += ctx.part(("enter", entered), lambda ops: _enter(ctx, ops, "attention", "attn_in", ctx.rows(entered)))
    if a.owns_kv:
        operators += ctx.part(("compressor", a.ratio), lambda ops: _compressor(ctx, ops, a))
    operators += ctx.part(("queries", view), lambda ops: _queries(ctx, ops, a, view))
    if a.runs_indexer:
        operators += ctx.part(("indexer", a.ratio, a.index_limit, view), lambda ops: _indexer(ctx, ops, a, view))
    operators += ctx.part(("attention", a.ratio, view), lambda ops: _attention(ctx, ops, a, view))
    operators += ctx.part(("output", view), lambda ops: _output(ctx, ops, a, rows))
    operators += ctx.part(("ffn", layer.ffn, view), lambda ops: ffn_operators(ctx, ops, layer.ffn, view))
    half = "decoder" if layer.bounded else "encoder"
    return Block(f"{half} {a.role}" + (" engram" if layer.engram else ""), tuple(operators))


def _embedding(ctx: BuildContext) -> Block:
    row_bytes = ctx.model.hidden_size * ACTIVATION_BYTES
    rows = ctx.rows(every_row)
    ops = OperatorList()

    def work(shape: StepShape) -> Work:
        m = rows(shape)
        return Work(bytes_read=m * row_bytes, bytes_written=m * row_bytes * ctx.model.hc_mult, rows=m)

    ops.add("embedding", OpKind.GATHER, ("tokens", "streams"), work, rows)
    return Block("embedding", tuple(ops.operators))


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
    ops.add("engram_lookup", OpKind.GATHER, ("token_ids", "engram_rows"), lookup, rows, "comm")
    projected = (ctx.model.hc_mult + 1) * hidden
    width = memory.rows_per_token * memory.row_dim
    ops.gemm("engram_proj", ("engram_rows", "engram_out"), rows, width, projected, ctx.model.dense_format)
    ops.elementwise(
        "engram_gate",
        ("engram_out streams", "streams"),
        rows,
        (
            (projected + ctx.model.hc_mult * hidden) * ACTIVATION_BYTES,
            ctx.model.hc_mult * hidden * ACTIVATION_BYTES,
        ),
    )


def _compressor(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention) -> None:
    """Global KV and index keys of every row: projection, pooling over `ratio` tokens, quantised store."""
    dim, rows = attention.head_dim, ctx.rows(every_row)
    width = (2 if attention.ratio > 1 else 1) * dim  # a pooled entry needs a gate beside the value
    ops.gemm("compressor", ("attn_in", "latent"), rows, ctx.model.hidden_size, width, BF16)
    ops.gemm("index_keys", ("latent", "index_k"), lambda s: rows(s) / attention.ratio, dim, attention.index_dim, BF16)
    stored = (ctx.model.kv.main_bytes + ctx.model.kv.index_bytes) / attention.ratio
    read = (width + attention.index_dim) * ACTIVATION_BYTES
    ops.elementwise("store_global_kv", ("latent index_k", "global_kv"), rows, (read, stored))
    gather_kv_operator(ctx, ops, "gather_global_kv", every_row, stored, "global_kv")


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
    ops.gemm("q_b", ("q_latent", "q"), rows, q_rank, attention.num_heads * dim, dense)


def _attention(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, view: View) -> None:
    """Sparse attention over window and selected entries, one kernel for each phase."""
    if ctx.has("decode"):
        _sparse_attention(ctx, ops, attention, view, "decode")
    if ctx.has("prefill"):
        _sparse_attention(ctx, ops, attention, view, "prefill")


def _output(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, rows: RowsOf) -> None:
    """Grouped output projection, and the way into the feed-forward half."""
    dense, groups, rank = ctx.model.dense_format, attention.o_groups, attention.o_lora_rank
    group_dim = attention.num_heads * attention.head_dim // groups
    ops.gemm("o_a", ("attn_heads", "o_latent"), rows, group_dim, rank, dense, groups)
    ops.gemm("o_b", ("o_latent", "attn_out"), rows, groups * rank, ctx.model.hidden_size, dense)
    _enter(ctx, ops, "ffn", "ffn_in", rows)


def _indexer(ctx: BuildContext, ops: OperatorList, attention: CompressedAttention, view: View) -> None:
    """Scores of index keys for every row, and the top-k of them."""
    heads, dim, rows = attention.index_heads, attention.index_dim, ctx.rows(view)
    ops.gemm("index_q", ("q_latent", "index_q"), rows, attention.q_lora_rank, heads * dim, ctx.model.dense_format)
    ops.gemm("index_weights", ("attn_in", "index_w"), rows, ctx.model.hidden_size, heads, BF16)
    # Keys stored in FP4 meet FP4 queries; the FP8 record of older kernels meets FP8 queries.
    precision: Literal["fp4", "fp8"] = "fp4" if ctx.model.kv.index_bytes < dim else "fp8"

    def sequences(shape: StepShape) -> object:
        return view(shape).sequences

    def scored(shape: StepShape) -> Num:
        def of(s: Sequences) -> Num:
            return visible_entries(s.context, s.rows, attention.ratio, attention.index_limit)

        return total(view(shape).sequences, of) / ctx.cp

    def keys_read(shape: StepShape) -> Num:
        # All rows of a sequence share one pass over its keys: those that its last row sees. The ranks of a replica
        # share its decoding requests, but each of them has rows of every prompt.
        def of(s: Sequences) -> Num:
            return visible_entries(s.context + s.rows - 1.0, 1.0, attention.ratio, attention.index_limit)

        seen = view(shape)
        return total(decode_group(seen), of) / ctx.cp + total(seen.prefill, of)

    def score(shape: StepShape) -> Work:
        entries = scored(shape)
        return Work(
            flops=2.0 * heads * dim * entries,
            precision=precision,
            bytes_read=keys_read(shape) * ctx.model.kv.index_bytes,
            bytes_written=entries * SCORE_BYTES,
            rows=float(heads),
        )

    def topk(shape: StepShape) -> Work:
        return Work(bytes_read=scored(shape) * SCORE_BYTES, bytes_written=rows(shape) * attention.topk * 4.0)

    ops.add("index_score", OpKind.INDEX_SCORE, ("index_q index_w global_kv", "scores"), score, sequences)
    ops.add("topk", OpKind.TOPK, ("scores", "selected"), topk, sequences)


def _sparse_attention(
    ctx: BuildContext,
    ops: OperatorList,
    attention: CompressedAttention,
    view: View,
    phase: Literal["decode", "prefill"],
) -> None:
    """Attention over the window and the selected entries; every row gathers its own."""
    kv, q_dim = ctx.model.kv, attention.num_heads * attention.head_dim
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
            rows=(window + selected) / larger(m, 1e-9) if phase == "prefill" else float(attention.num_heads),
        )

    kind = OpKind.SPARSE_ATTENTION_DECODE if phase == "decode" else OpKind.SPARSE_ATTENTION_PREFILL
    ops.add(f"attention_{phase}", kind, ("q window_kv global_kv selected", "attn_heads"), work, of_phase)


def _draft_blocks(ctx: BuildContext, draft: DraftSpec) -> list[Block]:
    """DSpark: features of the committed rows, one parallel pass over the block, sequential Markov head."""
    hidden, rank, vocab = ctx.model.hidden_size, draft.markov_rank, ctx.model.vocab_size

    def view(shape: StepShape) -> StepShape:
        return shape.drafting(float(draft.block_size))

    ops = OperatorList("draft_")
    features = len(draft.target_layers) * hidden
    committed = ctx.rows(lambda s: s.bounded if ctx.features.replay == "compact" else s)
    ops.gemm("features", ("streams", "draft_features"), committed, features, hidden, ctx.model.dense_format)
    kv_dim = _attention_of(draft.layers[0]).head_dim * len(draft.layers)
    ops.gemm("context_kv", ("draft_features", "window_kv"), committed, hidden, kv_dim, ctx.model.dense_format)
    blocks = [Block("draft input", tuple(ops.operators))]
    layer = _layer_block(ctx, draft.layers[0], view)
    blocks += [Block("draft layer", layer.operators)] * len(draft.layers)

    ops = OperatorList("draft_")
    head_operators(ctx, ops, ctx.rows(view), ("ffn_out", "draft_logits"))

    def markov(shape: StepShape) -> Work:
        count = view(shape).rows / ctx.cp / draft.block_size
        launched = smaller(count, 1.0)
        table = rank * vocab * BF16.bytes_per_parameter
        return Work(
            flops=2.0 * rank * vocab * count,
            bytes_read=table * launched + count * vocab * 4.0,
            bytes_written=count * 8.0,
            rows=count,
        )

    for position in range(draft.block_size):
        ops.add(
            f"markov_{position}", OpKind.GEMM, ("draft_logits draft_tokens", "draft_tokens"), markov, ctx.rows(view)
        )
    blocks.append(Block("draft head", tuple(ops.operators)))
    return blocks
