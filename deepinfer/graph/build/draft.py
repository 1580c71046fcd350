"""Draft passes: MTP (one block, run again for every further draft) and DSpark (one parallel pass over a block)."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.graph.build.common import BuildContext, OperatorList, RowsOf, head_operators
from deepinfer.graph.graph import Block
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import StepShape, View
from deepinfer.model.spec import BF16, CompressedAttention, DraftSpec
from deepinfer.numeric import smaller


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
        blocks.append(Block("draft layer", layer(view).operators))
        ops = OperatorList("draft_")
        head(ops, ctx.rows(lambda s: s.drafting(1.0)))
        blocks.append(Block("draft head", tuple(ops.operators)))
    return blocks


def dspark_blocks(ctx: BuildContext, draft: DraftSpec, layer: Callable[[View], Block]) -> list[Block]:
    """DSpark: features of the committed rows, one parallel pass over the block, sequential Markov head."""
    attention = draft.layers[0].attention
    assert isinstance(attention, CompressedAttention)
    hidden, rank, vocab = ctx.model.hidden_size, draft.markov_rank, ctx.model.vocab_size

    def view(shape: StepShape) -> StepShape:
        return shape.drafting(float(draft.block_size))

    ops = OperatorList("draft_")
    features = len(draft.target_layers) * hidden
    committed = ctx.rows(lambda s: s.bounded if ctx.features.replay == "compact" else s)
    ops.gemm("features", ("streams", "draft_features"), committed, features, hidden, ctx.model.dense_format)
    kv_dim = attention.head_dim * len(draft.layers)
    ops.gemm("context_kv", ("draft_features", "window_kv"), committed, hidden, kv_dim, ctx.model.dense_format)
    blocks = [Block("draft input", tuple(ops.operators))]
    blocks += [Block("draft layer", layer(view).operators)] * len(draft.layers)

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
