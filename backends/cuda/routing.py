"""Router choices and their order by expert, in Triton; semantics in `backends.torch_runtime.reference.gemm`."""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.torch_runtime.reference.gemm import Pairs


@triton.jit
def _softplus(x):
    """log(1 + exp(x)) to FP32 precision, also where it is tiny: log1p(u) = 2 atanh(u / (2 + u)), u = exp(-|x|) <= 1."""
    u = tl.exp(-tl.abs(x))
    s = u / (2.0 + u)
    z = s * s
    series = 1.0 / 17.0
    for odd in tl.static_range(15, 0, -2):
        series = series * z + 1.0 / odd
    return tl.maximum(x, 0.0) + 2.0 * s * series


@triton.jit
def _route_kernel(
    logits, bias, ids, weights, experts, scale, TOPK: tl.constexpr, CHOICES: tl.constexpr, EXPERTS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    expert = tl.arange(0, EXPERTS)
    inside = expert < experts
    score = tl.sqrt_rn(_softplus(tl.load(logits + row * experts + expert, mask=inside, other=0.0)))
    key = tl.where(inside, score + tl.load(bias + expert, mask=inside, other=0.0), float("-inf"))
    choice = tl.arange(0, CHOICES)
    chosen = tl.zeros([CHOICES], tl.int32)
    value = tl.zeros([CHOICES], tl.float32)
    for i in tl.static_range(TOPK):
        best = tl.min(tl.where(key == tl.max(key, 0), expert, EXPERTS), 0)
        chosen = tl.where(choice == i, best, chosen)
        value = tl.where(choice == i, tl.sum(tl.where(expert == best, score, 0.0), 0), value)
        key = tl.where(expert == best, float("-inf"), key)
    at = row * TOPK + choice
    tl.store(ids + at, chosen, mask=choice < TOPK)
    tl.store(weights + at, value / (tl.sum(value, 0) + 1e-20) * scale, mask=choice < TOPK)


def route(logits: Tensor, bias: Tensor, topk: int, scale: float) -> tuple[Tensor, Tensor]:
    """Experts int32 [m, topk] and weights FP32 [m, topk] of logits FP32 [m, experts]; see the reference."""
    m, experts = logits.shape
    ids = torch.empty(m, topk, dtype=torch.int32, device=logits.device)
    weights = torch.empty(m, topk, dtype=torch.float32, device=logits.device)
    if m:
        _route_kernel[(m,)](
            logits.contiguous(),
            bias,
            ids,
            weights,
            experts,
            scale,
            TOPK=topk,
            CHOICES=triton.next_power_of_2(topk),
            EXPERTS=triton.next_power_of_2(experts),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return ids, weights


@triton.jit(do_not_specialize=["first", "count", "pairs"])
def _sort_kernel(ids, row, slot, offsets, position, first, count, pairs, topk, BLOCK: tl.constexpr):
    """Program e < count ranks the pairs of one expert behind those of the experts before; the last fills what is left.

    Every program reads all the ids twice: they are few, and no program waits for another.
    """
    own = tl.program_id(0)
    lane = tl.arange(0, BLOCK)
    before = 0
    for start in range(0, pairs, BLOCK):
        expert = tl.load(ids + start + lane, mask=start + lane < pairs, other=-1) - first
        before += tl.sum(((expert >= 0) & (expert < own) & (start + lane < pairs)).to(tl.int32), 0)
    tl.store(offsets + own, before)
    if own == count:
        for start in range(0, pairs, BLOCK):
            pair = start + lane
            expert = tl.load(ids + pair, mask=pair < pairs, other=-1) - first
            tl.store(position + pair, -1, mask=(pair < pairs) & ((expert < 0) | (expert >= count)))
            tl.store(row + pair, -1, mask=(pair < pairs) & (pair >= before))
            tl.store(slot + pair, -1, mask=(pair < pairs) & (pair >= before))
    else:
        for start in range(0, pairs, BLOCK):
            pair = start + lane
            expert = tl.load(ids + pair, mask=pair < pairs, other=-1) - first
            mine = (expert == own) & (pair < pairs)
            place = before + tl.cumsum(mine.to(tl.int32), 0) - 1
            tl.store(position + pair, place, mask=mine)
            tl.store(row + place, pair // topk, mask=mine)
            tl.store(slot + place, pair % topk, mask=mine)
            before += tl.sum(mine.to(tl.int32), 0)


def sort_pairs(ids: Tensor, first: int, count: int) -> Pairs:
    """The pairs of experts [first, first + count) among choices int32 [m, topk]; see the reference."""
    m, topk = ids.shape
    row, slot = torch.empty(2, m * topk, dtype=torch.int32, device=ids.device)
    offsets = torch.empty(count + 1, dtype=torch.int32, device=ids.device)
    position = torch.empty(m, topk, dtype=torch.int32, device=ids.device)
    block = min(1024, max(128, triton.next_power_of_2(m * topk)))
    _sort_kernel[(count + 1,)](
        ids.contiguous(), row, slot, offsets, position, first, count, m * topk, topk, BLOCK=block, num_warps=4
    )
    return Pairs(row, slot, offsets, position)
