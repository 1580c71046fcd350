"""The feed-forward half of a layer: dense or shared products, the exchange of rows, and the routed experts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from deepinfer.graph.build.common import (
    ACTIVATION_BYTES,
    FP8_ACTIVATION_BYTES,
    BuildContext,
    OperatorList,
    RowsOf,
    all_reduce_operator,
)
from deepinfer.graph.ops import LOW_LATENCY_ROWS, OpKind, Work
from deepinfer.graph.shape import StepShape, View
from deepinfer.layout.placement import busiest_over_mean, expert_slots, placement_skew, text_variance
from deepinfer.model.spec import BF16, DenseFFN, MoE
from deepinfer.numeric import Num, larger, smaller


@dataclass(frozen=True)
class _Routing:
    """How the rows of an expert group meet a layer's experts."""

    moe: MoE
    slots: int
    tokens: RowsOf
    busiest: RowsOf

    def load(self, shape: StepShape) -> tuple[Num, Num]:
        """Tokens of the group, and the load of the busiest place over the mean."""
        return self.tokens(shape), self.busiest(shape)


def ffn_operators(ctx: BuildContext, ops: OperatorList, ffn: DenseFFN | MoE, view: View, draft: bool = False) -> None:
    """The feed-forward half of a layer, from slot `ffn_in` to slots `ffn_out` (and `shared_out`)."""
    if isinstance(ffn, DenseFFN):
        _gated(ctx, ops, "ffn", ("ffn_in", "ffn_mid", "ffn_out"), ctx.rows(view), ffn.width // ctx.layout.tp)
        all_reduce_operator(ctx, ops, "reduce_ffn", ("ffn_out", "ffn_out"), ctx.rows(view))
        return
    rows, tp = ctx.routed_rows(view), ctx.layout.tp
    routing = _routing(ctx, ffn, view, draft)
    ops.gemm("router", ("ffn_in", "routing"), rows, ctx.model.hidden_size, ffn.num_experts, BF16)
    _exchange(ctx, ops, routing, rows, "dispatch")
    width = ffn.num_shared * ffn.width
    if width:
        # Issued between dispatch and the routed experts, so that it fills the time of the exchange.
        cut = 1 if ctx.layout.scatters_rows else tp
        _gated(ctx, ops, "shared", ("ffn_in", "shared_mid", "shared_out"), rows, width // cut)
    flow = ("dispatched", "expert_out")
    ops.add("experts", OpKind.GROUPED_GEMM, flow, _expert_work(ctx, routing))
    _exchange(ctx, ops, routing, rows, "combine")
    sums = ("ffn_out shared_out", "ffn_out shared_out")
    if ctx.layout.scatters_rows:
        _gather_rows(ctx, ops, sums, ctx.rows(view))
    else:
        all_reduce_operator(ctx, ops, "reduce_ffn", sums, ctx.rows(view))


def _gated(
    ctx: BuildContext, ops: OperatorList, name: str, slots: tuple[str, str, str], rows: RowsOf, width: int
) -> None:
    """Gate and up, then down, of this rank's `width`."""
    source, middle, target = slots
    hidden, fmt = ctx.model.hidden_size, ctx.model.ffn_format or ctx.model.dense_format
    ops.gemm(f"{name}_up", (source, middle), rows, hidden, 2 * width, fmt)
    ops.gemm(f"{name}_down", (middle, target), rows, width, hidden, fmt)


def _gather_rows(ctx: BuildContext, ops: OperatorList, flow: tuple[str, str], rows: RowsOf) -> None:
    """All-gather of the rows that the tp ranks had divided among themselves."""
    tp, row_bytes = ctx.layout.tp, ctx.model.hidden_size * ACTIVATION_BYTES
    ops.collective(
        "gather_ffn",
        OpKind.ALL_GATHER,
        flow,
        lambda s: ctx.ring_bytes(rows(s) * row_bytes, tp),
        tp,
        "all_gather",
    )


def _routing(ctx: BuildContext, moe: MoE, view: View, draft: bool) -> _Routing:
    layout, load = ctx.layout, ctx.features.expert_load
    # Each rank sends its part of a replica's rows, which its tp ranks hold alike.
    replicas, ep = layout.expert_group / (layout.cp * layout.tp), layout.ep
    slots = expert_slots(moe, layout, draft)
    placed = load.model_copy(update={"eplb": False}) if draft else load
    skew, varies = placement_skew(moe.num_experts, moe.topk, slots, ep, placed), text_variance(slots, ep, load)

    def tokens(shape: StepShape) -> Num:
        return view(shape).expert_rows * replicas

    def busiest(shape: StepShape) -> Num:
        if load.balanced:
            return 1.0
        count = tokens(shape)
        alike = varies * smaller(view(shape).companions / larger(count, 1e-9), 1.0) if varies else 0.0
        return busiest_over_mean(count * moe.topk, ep, skew, alike)

    return _Routing(moe, slots, tokens, busiest)


def _expert_work(ctx: BuildContext, routing: _Routing) -> Callable[[StepShape], Work]:
    """Gate, up, activation and down of the busiest rank's experts, one operator."""
    hidden, fmt, layout, moe = ctx.model.hidden_size, ctx.model.expert_format, ctx.layout, routing.moe
    local, balanced = routing.slots / layout.ep, ctx.features.expert_load.balanced
    parameters = 3.0 * hidden * moe.width / layout.etp

    def work(shape: StepShape) -> Work:
        tokens, busiest = routing.load(shape)
        expert_rows = tokens * moe.topk / layout.ep * busiest
        if balanced:
            touched = smaller(expert_rows, local)
        else:
            # A token chooses one of the busiest rank's experts as much more often as that rank is busier.
            chosen = smaller(moe.topk / routing.slots * busiest, 1.0)
            touched = local * (1.0 - (1.0 - chosen) ** tokens)
        return Work(
            flops=2.0 * parameters * expert_rows,
            precision=fmt.precision,
            bytes_read=touched * parameters * fmt.bytes_per_parameter + expert_rows * hidden * FP8_ACTIVATION_BYTES,
            bytes_written=expert_rows * hidden * ACTIVATION_BYTES,
            rows=expert_rows / larger(touched, 1e-9),
            depth=hidden + moe.width / layout.etp,
            activation_bytes=expert_rows * 2.0 * moe.width / layout.etp * ACTIVATION_BYTES,
        )

    return work


def _exchange(
    ctx: BuildContext, ops: OperatorList, routing: _Routing, rows: RowsOf, name: Literal["dispatch", "combine"]
) -> None:
    """Dispatch (FP8 rows to the ranks of their experts) or combine (BF16 results back)."""
    # Hash-routed layers know the experts from the token ids: only the results wait for the router's weights.
    hashed = routing.moe.hash_routed
    chosen, weighed = ("ffn_in", "expert_out routing") if hashed else ("ffn_in routing", "expert_out")
    flow = (chosen, "dispatched") if name == "dispatch" else (weighed, "ffn_out")
    if not ctx.layout.exchanges_rows:
        # The rows are here already: the permutation is part of the grouped product.
        ops.elementwise(name, flow, rows, (0.0, 0.0))
        return
    group = ctx.layout.expert_group
    per_copy = ctx.model.hidden_size * (FP8_ACTIVATION_BYTES if name == "dispatch" else ACTIVATION_BYTES)
    copies = _copies(ctx, routing.moe)

    def message(shape: StepShape) -> tuple[Num, Num]:
        # The collective ends with the busiest rank, which receives more than it sends.
        tokens, busiest = routing.load(shape)
        sent = tokens / group
        up, out = copies(sent)
        return sent * up * per_copy * busiest, sent * out * per_copy * busiest

    ops.collective(name, OpKind(name), flow, message, group, "all_to_all")


def _copies(ctx: BuildContext, moe: MoE) -> Callable[[Num], tuple[Num, Num]]:
    """Copies of a row that cross scale-up and scale-out links, by the rows that a rank sends.

    Low-latency kernels send one straight to each rank. Where the group spans domains, larger exchanges send one to
    each domain, which forwards it over its own links (DeepEP's normal kernels): less traffic, but never sooner than
    what low-latency kernels take at their limit of `LOW_LATENCY_ROWS`.
    """
    layout = ctx.layout
    group, inside = layout.expert_group, min(layout.expert_group, ctx.cluster.domain)
    ranks = distinct_ranks(moe, layout.ep) * layout.etp
    near, far = ctx.link_bytes(ranks, group)
    if group % inside or group == inside:
        return lambda sent: (near, far)
    domains = group // inside
    forwarded = ranks * (inside - 1) / inside
    once = distinct_domains(moe, domains) * (domains - 1) / domains

    def copies(sent: Num) -> tuple[Num, Num]:
        direct = smaller(LOW_LATENCY_ROWS / larger(sent, 1e-9), 1.0)
        return near * direct + forwarded * (1.0 - direct), smaller(far, larger(far * direct, once))

    return copies


def distinct_ranks(moe: MoE, ep: int) -> float:
    """Places that a token's top-k experts lie on, on average, with experts spread evenly and routing uniform."""
    local = moe.num_experts / ep
    return ep * (1.0 - _missed(moe.num_experts, local, moe.topk))


def distinct_domains(moe: MoE, domains: int) -> float:
    """The same for scale-up domains, where node-limited routing keeps the experts in some groups of neighbours.

    Groups that do not divide evenly over the domains, or domains over the groups, limit nothing.
    """
    groups, kept, experts = moe.num_groups, moe.topk_groups, moe.num_experts
    eligible, here = experts * kept / groups, experts / domains
    if groups % domains == 0:
        per_domain = groups // domains
        # Of the kept groups, j lie in the domain: as drawing j of its groups without replacement.
        missed = sum(
            math.comb(per_domain, j)
            * math.comb(groups - per_domain, kept - j)
            / math.comb(groups, kept)
            * _missed(eligible, j * experts / groups, moe.topk)
            for j in range(min(per_domain, kept) + 1)
        )
    elif domains % groups == 0:
        missed = 1.0 - kept / groups * (1.0 - _missed(eligible, here, moe.topk))
    else:
        missed = _missed(experts, here, moe.topk)
    return domains * (1.0 - missed)


def _missed(experts: float, here: float, topk: int) -> float:
    """Probability that none of `topk` different experts is one of those `here`."""
    probability = 1.0
    for i in range(topk):
        probability *= max(experts - here - i, 0.0) / (experts - i)
    return probability
