"""The indexer of DeepSeek sparse attention: scores of cached index keys for every row, and the top-k of them."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.graph.build.common import BuildContext, OperatorList, cache_precision, decode_group, total
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape, View, visible_entries
from deepinfer.model.spec import BF16
from deepinfer.numeric import Num

SCORE_BYTES = 4.0  # index logits are FP32 between scoring and top-k


@dataclass(frozen=True)
class IndexScan:
    """What an indexer scans: slot `keys` has a key per `ratio` tokens, of which it looks at `limit` (None: all)."""

    num_heads: int
    dim: int
    topk: int
    q_lora_rank: int
    keys: str
    ratio: int = 1
    limit: int | None = None


def indexer_operators(ctx: BuildContext, ops: OperatorList, scan: IndexScan, view: View) -> None:
    """Index queries and their weights, scores and top-k of every row, from slots `q_latent` and `attn_in`."""
    heads, dim, rows = scan.num_heads, scan.dim, ctx.rows(view)
    ops.gemm("index_q", ("q_latent", "index_q"), rows, scan.q_lora_rank, heads * dim, ctx.model.dense_format)
    ops.gemm("index_weights", ("attn_in", "index_w"), rows, ctx.model.hidden_size, heads, BF16)
    precision = cache_precision(ctx.model.kv.index_bytes / dim)

    def sequences(shape: StepShape) -> object:
        return view(shape).sequences

    def scored(shape: StepShape) -> Num:
        def of(s: Sequences) -> Num:
            return visible_entries(s.context, s.rows, scan.ratio, scan.limit)

        return total(view(shape).sequences, of) / ctx.cp

    def keys_read(shape: StepShape) -> Num:
        # All rows of a sequence share one pass over its keys: those that its last row sees. The ranks of a replica
        # share its decoding requests, but each of them has rows of every prompt.
        def of(s: Sequences) -> Num:
            return visible_entries(s.context + s.rows - 1.0, 1.0, scan.ratio, scan.limit)

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
            activation_bytes=rows(shape) * heads * (dim + SCORE_BYTES),
        )

    def topk(shape: StepShape) -> Work:
        return Work(bytes_read=scored(shape) * SCORE_BYTES, bytes_written=rows(shape) * scan.topk * 4.0)

    ops.add("index_score", OpKind.INDEX_SCORE, (f"index_q index_w {scan.keys}", "scores"), score)
    ops.add("topk", OpKind.TOPK, ("scores", "selected"), topk)
