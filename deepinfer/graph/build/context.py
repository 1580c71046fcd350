"""Decode context parallelism: tp ranks that would hold the same KV keep a part of it each, and attend for one another.

The ranks gather each other's queries, attend over their own part of the context, and merge partial outputs by their
log-sum-exps (Helix and vLLM's decode context parallelism). Prompts attend where they are: the context is gathered.
"""

from __future__ import annotations

from deepinfer.graph.build.common import ACTIVATION_BYTES, BuildContext, OperatorList, RowsOf, total
from deepinfer.graph.ops import OpKind
from deepinfer.graph.shape import StepShape, View
from deepinfer.numeric import Num

LSE_BYTES = 4.0  # an FP32 log-sum-exp beside each head's partial output


def gather_queries(ctx: BuildContext, ops: OperatorList, slot: str, rows: RowsOf, width: int) -> None:
    """Every rank gets the queries of its group; `width` numbers a row on each rank."""
    dcp = ctx.layout.dcp
    if dcp > 1:
        row_bytes = dcp * width * ACTIVATION_BYTES
        ops.collective(
            "gather_queries",
            OpKind.ALL_GATHER,
            (slot, slot),
            lambda s: ctx.ring_bytes(rows(s) * row_bytes, dcp),
            dcp,
            "all_gather",
        )


def merge_outputs(ctx: BuildContext, ops: OperatorList, slot: str, rows: RowsOf, heads: int, dim: int) -> None:
    """Partial outputs of all heads become whole ones of a rank's own `heads`: a reduce-scatter."""
    dcp = ctx.layout.dcp
    if dcp > 1:
        row_bytes = dcp * heads * (dim * ACTIVATION_BYTES + LSE_BYTES)
        ops.collective(
            "merge_outputs",
            OpKind.ALL_REDUCE,
            (slot, slot),
            lambda s: ctx.ring_bytes(rows(s) * row_bytes, dcp),
            dcp,
            "all_reduce",
        )


def gather_context(ctx: BuildContext, ops: OperatorList, view: View, entry_bytes: float) -> None:
    """The cached context of the prompts in this step, whole on every rank while a layer needs it."""
    dcp = ctx.layout.dcp

    def cached(shape: StepShape) -> Num:
        return total(view(shape).prefill, lambda s: s.context) * entry_bytes

    if dcp > 1:
        ops.collective(
            "gather_context",
            OpKind.ALL_GATHER,
            ("kv", "kv"),
            lambda s: ctx.ring_bytes(cached(s), dcp),
            dcp,
            "all_gather",
        )
