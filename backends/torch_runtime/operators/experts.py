"""Router, exchange of rows, shared and routed experts."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.torch_runtime.context import Call
from backends.torch_runtime.reference.gemm import Pairs


class Routing(NamedTuple):
    """Experts int32 [m, topk] of each row and their weights FP32."""

    ids: Tensor
    weights: Tensor


class Dispatched(NamedTuple):
    """Rows at their experts: x [r, h] with weights [r, topk], grouped as pairs; what `combine` undoes."""

    x: Tensor
    weights: Tensor
    pairs: Pairs
    plan: Exchange | None


class Exchange(NamedTuple):
    """How rows went to the ranks of the expert group: `source` [sent] local rows in order of rank, -1 for padding, and
    `slot` [m, ranks], where in what was sent a row's copy for a rank is, -1 for none. `equal`: as many to every rank.
    """

    source: Tensor
    slot: Tensor
    sent: list[int]
    received: list[int]
    equal: bool


def router(call: Call, ffn_in: Tensor) -> Routing:
    """Choices and weights of every row."""
    gate, bias = call.weights["ffn.gate"], call.weights["ffn.gate.bias"]
    logits = call.kernels.linear_fp32(ffn_in, gate)
    ids, weights = call.kernels.route(logits, bias.data, call.moe.topk, call.rank.numerics.route_scale)
    if call.step.equal_exchange:
        # Rows that only fill a captured graph have no experts.
        ids = ids.masked_fill_((call.view.local.slot == call.rank.state.nobody)[:, None], -1)
    return Routing(ids, weights)


def dispatch(call: Call, ffn_in: Tensor, routing: Routing) -> Dispatched:
    """Send each row to the ranks that hold its experts, once to each."""
    comm, local = call.rank.comm, call.moe.num_experts // call.rank.layout.ep
    if call.rank.layout.ep == 1:
        return Dispatched(ffn_in, routing.weights, call.kernels.sort_pairs(routing.ids, 0, local), None)
    plan = _exchange(call, routing.ids // local)
    place = plan.source.clamp_min(0)
    ids = torch.where(plan.source[:, None] >= 0, routing.ids[place], -1)
    x, weights, ids = _send(call, (ffn_in[place], routing.weights[place], ids), plan)
    first = comm.expert.place * local
    return Dispatched(x, weights, call.kernels.sort_pairs(ids, first, local), plan)


def experts(call: Call, dispatched: Dispatched) -> Tensor:
    """This rank's experts applied to the rows that came for them: [pairs, h]."""
    return call.kernels.grouped_experts(
        dispatched.x,
        dispatched.weights,
        dispatched.pairs,
        call.weights["ffn.experts.w13"],
        call.weights["ffn.experts.w2"],
        call.rank.numerics.swiglu_limit,
    )


def combine(call: Call, results: tuple[Dispatched, Tensor]) -> Tensor:
    """Sum each row's experts, wherever they are: [m, h]."""
    dispatched, y = results
    summed = call.kernels.sum_pairs(y, dispatched.pairs.position)
    plan = dispatched.plan
    if plan is None:
        return summed
    comm = call.rank.comm
    if plan.equal:
        (back,) = comm.exchange_equal([summed.unflatten(0, (comm.expert.size, -1))], back=True)
        back = back.flatten(0, 1)
    else:
        back = comm.all_to_all_rows(summed, plan.received, plan.sent)
    return call.kernels.sum_pairs(back, plan.slot)


def _send(call: Call, columns: Sequence[Tensor], plan: Exchange) -> list[Tensor]:
    comm = call.rank.comm
    if plan.equal:
        parts = [x.unflatten(0, (comm.expert.size, -1)) for x in columns]
        return [x.flatten(0, 1) for x in comm.exchange_equal(parts)]
    return [comm.all_to_all_rows(x, plan.sent, plan.received) for x in columns]


def _exchange(call: Call, owner: Tensor) -> Exchange:
    """Which copies go where, for the ranks [m, topk] of each row's experts (negative: none)."""
    comm, m = call.rank.comm, owner.shape[0]
    ranks = torch.arange(comm.expert.size, device=owner.device)
    wanted = (owner[:, :, None] == ranks).any(1)
    if call.step.equal_exchange:
        # A place for every row at every rank, so that nothing depends on the choices.
        rows = torch.arange(m, device=owner.device)
        source = torch.where(wanted.T, rows, -1).flatten()
        slot = torch.where(wanted, ranks * m + rows[:, None], -1)
        return Exchange(source, slot.int(), [m] * comm.expert.size, [m] * comm.expert.size, True)
    sent = wanted.sum(0)
    received = comm.all_to_all_rows(sent[:, None], [1] * comm.expert.size, [1] * comm.expert.size)[:, 0]
    by_rank = wanted.T.flatten()
    source = by_rank.nonzero()[:, 0] % max(m, 1)
    order = (by_rank.cumsum(0) - 1).view(comm.expert.size, m).T
    slot = torch.where(wanted, order, -1).contiguous()
    return Exchange(source, slot.int(), sent.tolist(), received.tolist(), False)


def shared_up(call: Call, ffn_in: Tensor) -> Tensor:
    """Gate and up of the shared expert, then their activation: [m, width]."""
    both = call.kernels.linear(ffn_in, call.weights["ffn.shared_experts.w13"])
    return call.kernels.swiglu(both, call.rank.numerics.swiglu_limit)


def shared_down(call: Call, middle: Tensor) -> Tensor:
    """The shared expert's output [m, h]."""
    return call.kernels.linear(middle, call.weights["ffn.shared_experts.w2"])


def _experts_slot(call: Call, dispatched: Dispatched) -> tuple[Dispatched, Tensor]:
    # Combining needs to know where rows came from: the slot carries that along.
    return dispatched, experts(call, dispatched)


OPERATORS: dict[str, Callable[..., Any]] = {
    "router": router,
    "dispatch": dispatch,
    "shared_up": shared_up,
    "shared_down": shared_down,
    "experts": _experts_slot,
    "combine": combine,
}

__all__ = ["OPERATORS", "Dispatched", "Exchange", "Routing"]
