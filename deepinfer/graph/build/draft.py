"""Draft passes: MTP (one block, run again for every further draft) and DSpark (one parallel pass over a block)."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    LOGIT_BYTES,
    BuildContext,
    OperatorList,
    RowsOf,
    logits_operators,
)
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import Operator, OpKind, Work
from deepinfer.graph.shape import StepShape, View
from deepinfer.model.spec import BF16, CompressedAttention, DraftSpec
from deepinfer.numeric import Num, smaller, where_positive


def mtp_blocks(
    ctx: BuildContext,
    project: Callable[[OperatorList, View], None],
    layer: Callable[[View], Block],
    head: Callable[[OperatorList, RowsOf], None],
) -> list[Block]:
    """MTP: the first pass also caches the verified rows; each further pass runs one row a request."""
    blocks: list[Block] = []
    for position in range(ctx.features.nextn):
        width = 1.0 + ctx.features.nextn if position == 0 else 1.0

        def view(shape: StepShape, width: float = width) -> StepShape:
            return shape.drafting(width)

        ops = OperatorList("draft_")
        project(ops, view)
        blocks.append(Block("draft input", tuple(ops.operators)))
        blocks.append(Block("draft layer", layer(view).operators, is_layer=True))
        ops = OperatorList("draft_")
        head(ops, ctx.rows(lambda s: s.drafting(1.0)))
        blocks.append(Block("draft head", tuple(ops.operators)))
    return blocks


def dspark_blocks(ctx: BuildContext, draft: DraftSpec, layer: Callable[[View], Block]) -> list[Block]:
    """DSpark: features of the committed rows, one parallel pass over the block, sequential Markov head."""
    attention = draft.layers[0].attention
    assert isinstance(attention, CompressedAttention)
    hidden = ctx.model.hidden_size

    def view(shape: StepShape) -> StepShape:
        return shape.drafting(float(draft.block_size))

    ops = OperatorList("draft_")
    features = len(draft.target_layers) * hidden
    committed = ctx.rows(lambda s: s.bounded if ctx.features.replay == "compact" else s)
    ops.gemm("features", ("streams", "draft_features"), committed, features, hidden, ctx.model.dense_format)
    kv_dim = attention.head_dim * len(draft.layers)
    ops.gemm("context_kv", ("draft_features", "window_kv"), committed, hidden, kv_dim, ctx.model.dense_format)
    blocks = [Block("draft input", tuple(ops.operators))]
    blocks += [Block("draft layer", layer(view).operators, is_layer=True)] * len(draft.layers)

    nextn = ctx.features.nextn

    def drawn(shape: StepShape) -> Num:
        # The pass computes the whole block; tokens are drawn for the positions that will be verified.
        return float(nextn) if shape.decode is None else smaller(shape.decode.rows - 1.0, float(nextn))

    ops = OperatorList("draft_")
    rows = ctx.rows(lambda s: s.drafting(drawn(s)))
    logits_operators(ctx, ops, rows, "streams ffn_out shared_out", "draft_logits")
    blocks.append(Block("draft head", tuple(ops.operators)))
    for position in range(nextn):

        def count(shape: StepShape, position: int = position) -> Num:
            # A graph of more drafts than a shape verifies costs what one of as many does: a search asks it for all.
            return where_positive(drawn(shape) - position, ctx.split(shape.drafting(1.0).rows))

        blocks.append(Block("draft position", _markov_position(ctx, draft.markov_rank, count)))
    return blocks


def _markov_position(ctx: BuildContext, rank: int, count: RowsOf) -> tuple[Operator, ...]:
    """One token of every request after the other: the last token's embedding, its bias on the logits, sampling.

    The corrected logits are written: they are the distribution that verification compares with (DSpark paper, 1.1).
    """
    vocab, ops = ctx.model.vocab_size, OperatorList("draft_")
    row_bytes = rank * ACTIVATION_BYTES

    def embedding(shape: StepShape) -> Work:
        return Work(bytes_read=count(shape) * row_bytes, bytes_written=count(shape) * row_bytes)

    def sample(shape: StepShape) -> Work:
        m = count(shape)
        read, kept = vocab * (LOGIT_BYTES + ACTIVATION_BYTES), vocab * LOGIT_BYTES
        return Work(bytes_read=m * read, bytes_written=m * kept, rows=m)

    ops.add("markov_embedding", OpKind.GATHER, ("draft_tokens", "markov"), embedding)
    ops.gemm("markov_bias", ("markov", "bias"), count, rank, vocab, BF16)
    ops.add("markov_sample", OpKind.SAMPLE, ("draft_logits bias", "draft_tokens"), sample)
    return tuple(ops.operators)
