"""Sampling in Triton: the token that truncation leaves as the lowest, then a race of Gumbel noise.

`_threshold_kernel`, a program per row, finds the lowest logit that top-k and top-p leave. It halves an interval of
FP32 keys (integers that order as the numbers do) by passes over the row, which stay in L2, until few tokens are
inside; those move to scratch memory and the rest of the search runs on them. Rows that truncate nothing leave at once.
`_race_kernel` splits every row into parts of 4096 tokens and makes noise only where a part holds a token that stays;
`_winner_kernel` picks the best part. Rows do not see one another and parts do not depend on m. Semantics and the
generator: `backends.torch_runtime.reference.sampling`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from deepinfer.sampling.params import GREEDY_BELOW

PART = 4096
"""Tokens of a part of the race."""
BLOCK = 4096
"""Logits in registers per turn of a pass over the row."""
FEW = 2048
"""Tokens that the search goes through in one turn."""
_GREEDY_BELOW = tl.constexpr(GREEDY_BELOW)
STAGES = tl.constexpr(6)
"""Turns of a pass in flight: what hides the latency of L2 from a single program."""
LOWEST_KEY = tl.constexpr(-2147483647)
"""Below every number: all tokens are above."""


@triton.jit
def _key(x):
    """int32 that orders as FP32 numbers do; -0 becomes +0."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return tl.where(bits < 0, bits ^ 0x7FFFFFFF, bits)


@triton.jit
def _number(key):
    return tl.where(key < 0, key ^ 0x7FFFFFFF, key).to(tl.float32, bitcast=True)


@triton.jit
def _weight(x, best, temperature, BY_MASS: tl.constexpr):
    """What a token counts for in the search: its mass, or one."""
    return tl.exp((x - best) / temperature) if BY_MASS else tl.where(x == x, 1.0, 0.0)


@triton.jit
def _above(row, count, key, best, temperature, BY_MASS: tl.constexpr, BLOCK: tl.constexpr):
    """Weight and number of the tokens whose keys exceed `key`."""
    weight = tl.zeros((BLOCK,), tl.float32)
    number = tl.zeros((BLOCK,), tl.int32)
    for begin in tl.range(0, count, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < count, other=-float("inf"))
        over = (_key(x) > key) & (at < count)
        weight += tl.where(over, _weight(x, best, temperature, BY_MASS), 0.0)
        number += over.to(tl.int32)
    return tl.sum(weight), tl.sum(number)


@triton.jit
def _halfway(low, high, turn):
    """A key inside (low, high): halfway between the numbers, in every other turn between the keys.

    The first converges fast on logits, the second ends in 32 turns whatever they are.
    """
    by_key = ((low.to(tl.int64) + high.to(tl.int64)) >> 1).to(tl.int32)
    middle = 0.5 * _number(low) + 0.5 * _number(high)
    by_number = tl.minimum(tl.maximum(_key(middle), low + 1), high - 1)
    return tl.where((turn % 2 == 0) & (tl.abs(middle) < float("inf")), by_number, by_key)


@triton.jit
def _search(
    row,
    scratch,
    count,
    low,
    high,
    inside,
    target,
    best,
    temperature,
    BY_MASS: tl.constexpr,
    BLOCK: tl.constexpr,
    FEW: tl.constexpr,
):
    """The smallest key whose better tokens weigh less than target.

    Tokens above `low` weigh target or more, those above `high` less; `inside` of them lie in (low, high].
    """
    turn = 0
    base = 0.0
    over = 0
    under = inside
    while (high.to(tl.int64) - low > 1) & (inside > FEW):
        middle = _halfway(low, high, turn)
        weight, number = _above(row, count, middle, best, temperature, BY_MASS, BLOCK)
        if weight < target:
            high = middle
            base = weight
            over = number
        else:
            low = middle
            under = number
        inside = under - over
        turn += 1
    if high.to(tl.int64) - low > 1:
        _gather(row, scratch, count, low, high, BLOCK)
        tl.debug_barrier()
        at = tl.arange(0, FEW)
        x = tl.load(scratch + at, mask=at < inside, other=-float("inf"))
        weights = tl.where(at < inside, _weight(x, best, temperature, BY_MASS), 0.0)
        while high.to(tl.int64) - low > 1:
            middle = _halfway(low, high, turn)
            if base + tl.sum(tl.where(_key(x) > middle, weights, 0.0)) < target:
                high = middle
            else:
                low = middle
            turn += 1
    return high


@triton.jit
def _gather(row, scratch, count, low, high, BLOCK: tl.constexpr):
    """Move the logits with keys in (low, high] to scratch, in their order."""
    filled = 0
    for begin in tl.range(0, count, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        x = tl.load(row + at, mask=at < count, other=-float("inf"))
        key = _key(x)
        inside = ((key > low) & (key <= high) & (at < count)).to(tl.int32)
        place = filled + tl.cumsum(inside, 0) - 1
        tl.store(scratch + place, x, mask=inside != 0)
        filled += tl.sum(inside)


@triton.jit
def _threshold(row, scratch, count, heat, k, p, BLOCK: tl.constexpr, FEW: tl.constexpr):
    highest = tl.full((BLOCK,), -float("inf"), tl.float32)
    for begin in tl.range(0, count, BLOCK, num_stages=STAGES):
        at = begin + tl.arange(0, BLOCK)
        highest = tl.maximum(highest, tl.load(row + at, mask=at < count, other=-float("inf")))
    best = tl.max(highest)
    top = _key(best)
    low = tl.full((), LOWEST_KEY, tl.int32)
    if best > -float("inf"):
        if (k > 0) & (k < count):
            low = _search(row, scratch, count, low, top, count, k.to(tl.float32), best, heat, False, BLOCK, FEW) - 1
        if p < 1.0:
            mass, number = _above(row, count, low, best, heat, True, BLOCK)
            target = tl.maximum(p, 1e-30) * mass
            low = _search(row, scratch, count, low, top, number, target, best, heat, True, BLOCK, FEW) - 1
    return tl.where(low == LOWEST_KEY, -float("inf"), _number(low + 1))


@triton.jit
def _threshold_kernel(
    logits, temperature, top_k, top_p, threshold, scratch, count, row_stride, BLOCK: tl.constexpr, FEW: tl.constexpr
):
    index = tl.program_id(0).to(tl.int64)
    heat = tl.load(temperature + index)
    k = tl.load(top_k + index)
    p = tl.load(top_p + index)
    result = -float("inf")
    if (heat >= _GREEDY_BELOW) & (((k > 0) & (k < count)) | (p < 1.0)):
        result = _threshold(logits + index * row_stride, scratch + index * FEW, count, heat, k, p, BLOCK, FEW)
    tl.store(threshold + index, result)


@triton.jit
def _philox(c0, c1, c2, c3, k0, k1):
    """Ten rounds of Philox-4x32 on uint32 tensors."""
    for _ in tl.static_range(10):
        high0, low0 = tl.umulhi(c0, 0xD2511F53), c0 * 0xD2511F53
        high2, low2 = tl.umulhi(c2, 0xCD9E8D57), c2 * 0xCD9E8D57
        c0, c1, c2, c3 = high2 ^ c1 ^ k0, low2, high0 ^ c3 ^ k1, low0
        k0 += 0x9E3779B9
        k1 += 0xBB67AE85
    return c0, c1, c2, c3


@triton.jit
def _gumbel(first, seed, position, PART: tl.constexpr):
    """Noise FP32 [PART] of the tokens from `first` on, which is a multiple of four."""
    zero = tl.zeros((PART // 4,), tl.uint32)
    counter = (first // 4 + tl.arange(0, PART // 4)).to(tl.uint32)
    low, high = zero + position.to(tl.uint32), zero + (position >> 32).to(tl.uint32)
    w0, w1, w2, w3 = _philox(counter, low, high, zero, zero + seed.to(tl.uint32), zero + (seed >> 32).to(tl.uint32))
    bits = tl.reshape(tl.join(tl.join(w0, w2), tl.join(w1, w3)), (PART,))
    # -log(1 - u) by way of rest = 1 - u as rounded: precise where u is small, as the winners are.
    u = tl.minimum((bits.to(tl.float32) + 0.5) * 2.3283064365386963e-10, 0.9999999403953552)
    rest = 1.0 - u
    exponential = tl.where(rest == 1.0, u, -tl.log(rest) * (u / tl.where(rest == 1.0, 1.0, 1.0 - rest)))
    return -tl.log(exponential)


@triton.jit
def _race_kernel(logits, temperature, threshold, seed, position, best, token, count, row_stride, PART: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    at = part * PART + tl.arange(0, PART)
    x = tl.load(logits + index * row_stride + at, mask=at < count, other=-float("inf"))
    heat = tl.load(temperature + index)
    lowest = tl.load(threshold + index)
    if (heat >= _GREEDY_BELOW) & (tl.max(x) >= lowest):
        noise = _gumbel(part * PART, tl.load(seed + index), tl.load(position + index), PART)
        x = tl.where((x >= lowest) & (at < count), x / heat + noise, -float("inf"))
    elif heat >= _GREEDY_BELOW:
        x = tl.full((PART,), -float("inf"), tl.float32)
    winner = tl.max(x)
    out = index * tl.num_programs(1) + part
    tl.store(best + out, winner)
    tl.store(token + out, tl.min(tl.where((x == winner) & (at < count), at, 2147483647)))


@triton.jit
def _winner_kernel(best, token, out, parts, count, PARTS: tl.constexpr):
    index = tl.program_id(0).to(tl.int64)
    at = tl.arange(0, PARTS)
    score = tl.load(best + index * parts + at, mask=at < parts, other=-float("inf"))
    candidate = tl.load(token + index * parts + at, mask=at < parts, other=2147483647)
    winner = tl.min(tl.where(score == tl.max(score), candidate, 2147483647))
    tl.store(
        out + index, tl.minimum(winner, count - 1)
    )  # a row of NaN has no winner, and must name a token all the same


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """One token id per row, int32 [m], of logits FP32 [m, V] whose rows may be strided; see the reference."""
    m, count = logits.shape
    device = logits.device
    out = torch.empty(m, dtype=torch.int32, device=device)
    parts = triton.cdiv(count, PART)
    threshold = torch.empty(m, device=device)
    scratch = torch.empty(m, FEW, device=device)
    best = torch.empty(m, parts, device=device)
    token = torch.empty(m, parts, dtype=torch.int32, device=device)
    if m:
        _threshold_kernel[(m,)](
            logits,
            temperature,
            top_k,
            top_p,
            threshold,
            scratch,
            count,
            logits.stride(0),
            BLOCK=BLOCK,
            FEW=FEW,
            num_warps=16,
            enable_fp_fusion=True,
        )
        _race_kernel[(m, parts)](
            logits,
            temperature,
            threshold,
            seed,
            position,
            best,
            token,
            count,
            logits.stride(0),
            PART=PART,
            num_warps=8,
            enable_fp_fusion=True,
        )
        _winner_kernel[(m,)](
            best, token, out, parts, count, PARTS=triton.next_power_of_2(parts), num_warps=1, enable_fp_fusion=True
        )
    return out
