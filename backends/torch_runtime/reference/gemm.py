"""Products of activations with stored weights, routing, and the routed experts, in plain torch."""

from __future__ import annotations

import itertools
from typing import NamedTuple

import torch
from torch import Tensor

from backends.torch_runtime.formats import Weight, rounded_fp8, wide


class Pairs(NamedTuple):
    """(row, expert) pairs of a range of experts, grouped by expert and by row within one.

    `row` and `slot` [p] are each pair's row and which of the row's choices it is, `offsets` [experts + 1] where each
    expert's pairs begin, `position` [m, topk] where a row's pair is, -1 outside the range. p = m x topk; entries from
    offsets[-1] on are unused and have row -1.
    """

    row: Tensor
    slot: Tensor
    offsets: Tensor
    position: Tensor


def linear(x: Tensor, weight: Weight) -> Tensor:
    """[m, k] times [n, k] transposed. Quantised weights meet activations rounded to FP8; FP32 accumulation."""
    if weight.storage == "plain":
        return linear_fp32(x, weight).to(x.dtype)
    rounded = wide(rounded_fp8(x))
    return torch.nn.functional.linear(rounded, weight.dequantized(rounded.dtype)).to(x.dtype)


def linear_fp32(x: Tensor, weight: Weight) -> Tensor:
    """The same product, kept in FP32: routers, logits, index weights."""
    activations = wide(x)
    return torch.nn.functional.linear(activations, weight.data.to(activations.dtype))


def linear_grouped(x: Tensor, weight: Weight) -> Tensor:
    """[m, g, k] times the g row blocks of a weight [g x n, k]: [m, g, n]."""
    activations = wide(x if weight.storage == "plain" else rounded_fp8(x))
    values = weight.dequantized(activations.dtype).unflatten(0, (x.shape[1], -1))
    return torch.einsum("mgk,gnk->mgn", activations, values).to(x.dtype)


def route(logits: Tensor, bias: Tensor, topk: int, scale: float) -> tuple[Tensor, Tensor]:
    """Experts int32 [m, topk] and weights FP32 [m, topk] in order of choice, of router logits FP32 [m, experts].

    score = sqrt(softplus(logit)); the bias joins in the choice only; ties go to the lower expert.
    """
    scores = torch.nn.functional.softplus(logits).sqrt()
    ids = (scores + bias).sort(dim=-1, descending=True, stable=True).indices[:, :topk]
    chosen = scores.gather(-1, ids)
    weights = chosen / (chosen.sum(-1, keepdim=True) + 1e-20) * scale
    return ids.int(), weights


def sort_pairs(ids: Tensor, first: int, count: int) -> Pairs:
    """The pairs of experts [first, first + count) among choices int32 [m, topk]; -1 is no choice."""
    rows, topk = ids.shape
    flat = ids.flatten().long() - first
    key = torch.where((flat >= 0) & (flat < count), flat, count)
    order = key.argsort(stable=True)
    offsets = torch.searchsorted(key[order], torch.arange(count + 1, device=ids.device)).int()
    used = torch.arange(rows * topk, device=ids.device) < offsets[-1]
    row = torch.where(used, order // topk, -1).int()
    slot = torch.where(used, order % topk, -1).int()
    position = torch.empty_like(order)
    position[order] = torch.where(used, torch.arange(rows * topk, device=ids.device), -1)
    return Pairs(row, slot, offsets, position.view(rows, topk).int())


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(gate) x up of [m, 2 f], gate first, both clamped: FP32 inside."""
    gate, up = wide(gate_up).chunk(2, -1)
    return (torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)).to(gate_up.dtype)


def grouped_experts(x: Tensor, weights: Tensor, pairs: Pairs, w13: Weight, w2: Weight, limit: float) -> Tensor:
    """Each pair's expert applied to its row of x [m, h]: [p, h], zeros where a pair is unused.

    The routing weight multiplies the activation before the down projection's input is rounded (V4.1's reference).
    """
    out = x.new_zeros(len(pairs.row), x.shape[-1])
    bounds = pairs.offsets.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(bounds)):
        if start == end:
            continue
        row, slot = pairs.row[start:end].long(), pairs.slot[start:end].long()
        gate_up = linear(x[row], _expert(w13, expert))
        gate, up = wide(gate_up).chunk(2, -1)
        active = torch.nn.functional.silu(gate.clamp_max(limit)) * up.clamp(-limit, limit)
        out[start:end] = linear((active * weights[row, slot][:, None]).to(x.dtype), _expert(w2, expert))
    return out


def sum_pairs(y: Tensor, position: Tensor) -> Tensor:
    """What the pairs of each row [m, topk] add up to, in order of choice: [m, h]."""
    total = torch.zeros(len(position), y.shape[-1], device=y.device, dtype=wide(y[:0]).dtype)
    for choice in range(position.shape[1]):
        place = position[:, choice].long()
        total += torch.where((place >= 0)[:, None], wide(y[place.clamp_min(0)]), 0.0)
    return total.to(y.dtype)


def _expert(weight: Weight, expert: int) -> Weight:
    return Weight(weight.data[expert], None if weight.scale is None else weight.scale[expert], weight.storage)
