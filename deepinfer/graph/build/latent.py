"""Parts of multi-head latent attention: projections, and the absorbed form (DeepSeek-V2 paper, 2.1)."""

from __future__ import annotations

from collections.abc import Callable

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    RowsOf,
    gather_kv_operator,
)
from deepinfer.graph.shape import View
from deepinfer.model.spec import BF16, LatentAttention


def query_operators(ctx: BuildContext, ops: OperatorList, attention: LatentAttention, view: View) -> None:
    """Queries and the cached record of every row, its index key included: slots `q_latent`, `q` and `kv`."""
    dense, rows, hidden = ctx.model.dense_format, ctx.rows(view), ctx.model.hidden_size
    latent, q_rank = attention.kv_lora_rank + attention.rope_dim, attention.q_lora_rank
    entry_bytes, index_dim = ctx.model.kv.main_bytes, 0
    ops.gemm("q_a_kv_a", ("attn_in", "q_latent latent"), rows, hidden, q_rank + latent, dense)
    if attention.indexer is not None:
        entry_bytes, index_dim = entry_bytes + ctx.model.kv.index_bytes, attention.indexer.dim
        ops.gemm("index_keys", ("attn_in", "index_k"), rows, hidden, index_dim, BF16)
    ops.elementwise(
        "norm_rope_store",
        ("q_latent latent index_k", "q_latent kv"),
        rows,
        (
            (q_rank + latent + index_dim) * ACTIVATION_BYTES,
            q_rank * FP8_ACTIVATION_BYTES + entry_bytes,
        ),
    )
    gather_kv_operator(ctx, ops, "gather_kv", view, entry_bytes, "kv")
    q_head = attention.nope_dim + attention.rope_dim
    ops.gemm("q_b", ("q_latent", "q"), rows, q_rank, ctx.heads(attention.num_heads) * q_head, dense)


def absorbed_operators(
    ctx: BuildContext, ops: OperatorList, attention: LatentAttention, rows: RowsOf, core: Callable[[], None]
) -> None:
    """Queries into latent space, `core` from slot `q_absorbed` to `attn_latent`, values back to heads."""
    heads, rank = ctx.heads(attention.num_heads), attention.kv_lora_rank
    ops.gemm("absorb_q", ("q", "q_absorbed"), rows, attention.nope_dim, rank, BF16, groups=heads)
    core()
    ops.gemm("absorb_v", ("attn_latent", "attn_heads"), rows, rank, attention.v_dim, BF16, groups=heads)


def output_operator(ctx: BuildContext, ops: OperatorList, attention: LatentAttention, view: View) -> None:
    """Output projection of every row; with tensor parallelism a part of the sum."""
    width = ctx.heads(attention.num_heads) * attention.v_dim
    fmt = ctx.model.output_format or ctx.model.dense_format
    ops.gemm("o", ("attn_heads", "attn_out"), ctx.rows(view), width, ctx.model.hidden_size, fmt)
