"""The routed experts in Triton: gate and up with SwiGLU, down, and the sum per row.

Two products over tiles of (expert, tokens): the host knows only how many pairs there can be, so a kernel says first
what each tile holds (`Tiles`), and programs beyond the last tile end at once. Semantics in
`backends.torch_runtime.reference.gemm`; the activation stays FP32 between SwiGLU and its rounding to FP8.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803, N806

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.cuda.activations import empty_activations, fp8_scale, ordered_place, round_activations, rounded_e4m3
from backends.cuda.tiles import (
    BLOCK_SCALED,
    SPAN,
    Tiling,
    fitted,
    loaded_rows,
    path_of,
    product,
    stored_words,
)
from backends.torch_runtime.formats import Weight
from backends.torch_runtime.reference.gemm import Pairs
from deepinfer.errors import UsageError

EXPERT_TILINGS = (
    (12, Tiling(tokens=16, weights=64, warps=4, stages=3, spans=2)),
    (32, Tiling(tokens=32, weights=128, warps=8, stages=3, spans=2, registers=128)),
    (64, Tiling(tokens=64, weights=128, warps=8, stages=4)),
    (None, Tiling(tokens=128, weights=128, warps=8, stages=4)),
)
"""Tiles by the most pairs per expert that they are for; the last for any number. Those that cap registers are not for
block-scaled MMA, whose accumulators lie elsewhere. Chosen on an H200 from those that `benchmarks/kernels_gemm.py
--sweep` tries (torch 2.11, Triton 3.6)."""


class Tiles(NamedTuple):
    """Tiles of pairs [t]: expert int32 (their number beyond the last), first pair int32; and of each pair [t, tokens]
    its row of the activations int32 (-1 beyond the expert's last) and its routing weight FP32.
    """

    expert: Tensor
    first: Tensor
    row: Tensor
    weight: Tensor


@triton.jit
def _silu_times(gate, up, limit):
    gate = tl.minimum(gate, limit)
    return gate / (1.0 + tl.exp(-gate)) * tl.minimum(tl.maximum(up, -limit), limit)


@triton.jit
def _find_tile(offsets, tile, count, TOKENS: tl.constexpr, EXPERTS: tl.constexpr):
    """Expert of a tile of tokens, its first pair and the expert's last + 1; `count`, something and 0 beyond."""
    lane = tl.arange(0, EXPERTS)
    begin = tl.load(offsets + lane, mask=lane < count, other=0)
    end = tl.load(offsets + lane + 1, mask=lane < count, other=0)
    tiles = (end - begin + TOKENS - 1) // TOKENS
    after = tl.cumsum(tiles, 0)
    expert = tl.sum(((after <= tile) & (lane < count)).to(tl.int32), 0)
    own = lane == expert
    first = tl.sum(tl.where(own, begin + (tile - after + tiles) * TOKENS, 0), 0)
    return expert, first, tl.sum(tl.where(own, end, 0), 0)


@triton.jit(do_not_specialize=["count", "topk"])
def _tiles_kernel(
    offsets, row, slot, weights, tile_expert, tile_first, tile_row, tile_weight, count, topk,
    TOKENS: tl.constexpr, EXPERTS: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    expert, first, end = _find_tile(offsets, tile, count, TOKENS, EXPERTS)
    lane = tl.arange(0, TOKENS)
    inside = first + lane < end
    token = tl.load(row + first + lane, mask=inside, other=-1)
    choice = tl.load(slot + first + lane, mask=inside, other=0)
    tl.store(tile_expert + tile, expert)
    tl.store(tile_first + tile, first)
    tl.store(tile_row + tile * TOKENS + lane, token)
    tl.store(tile_weight + tile * TOKENS + lane, tl.load(weights + token * topk + choice, mask=inside, other=0.0))


@triton.jit(do_not_specialize=["count"])
def _gate_up_kernel(
    x, x_scale, w, w_scale, out, out_scale, tile_expert, tile_first, tile_token, tile_weight, h, f, count, limit,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SPANS: tl.constexpr,
    PATH: tl.constexpr,
):  # fmt: skip
    HALF: tl.constexpr = WEIGHTS // 2
    tiles = tl.cdiv(f, HALF)
    program = tl.program_id(0)
    tile = program // tiles
    expert = tl.load(tile_expert + tile)
    if expert < count:
        lane = tl.arange(0, TOKENS)
        token = tl.load(tile_token + tile * TOKENS + lane)
        weight = tl.load(tile_weight + tile * TOKENS + lane)
        pair, inside = tl.load(tile_first + tile) + lane, token >= 0
        tile_row = loaded_rows(WEIGHTS, WARPS, PATH)
        local = program % tiles * HALF + tile_row % HALF
        w_row = (expert * 2 + tile_row // HALF).to(tl.int64) * f + local
        acc = product(
            x, x_scale, tl.maximum(token, 0).to(tl.int64), h, 0, inside, w, w_scale, w_row, local < f, h, 0, h // 128,
            TOKENS, WEIGHTS, WARPS, STAGES, SPANS, 1, True, PATH,
        )  # fmt: skip
        gate, up = tl.split(tl.permute(tl.reshape(acc, [2, HALF, TOKENS]), [1, 2, 0]))
        active = tl.reshape(_silu_times(gate, up, limit) * weight[None, :], [HALF // 32, 32, TOKENS])
        code, reciprocal = fp8_scale(tl.max(tl.abs(active), 1))
        rounded = rounded_e4m3(active * reciprocal[:, None, :])

        column = program % tiles * HALF + tl.arange(0, HALF)
        at = pair.to(tl.int64)[None, :] * f
        mask = (column < f)[:, None] & inside[None, :]
        if PATH == BLOCK_SCALED:
            group = program % tiles * (HALF // 32) + tl.arange(0, HALF // 32)[:, None]
            tl.store(out + at + column[:, None], tl.reshape(rounded, [HALF, TOKENS]).to(tl.float8e4nv), mask=mask)
            tl.store(out_scale + at // 32 + group, code.to(tl.uint8), mask=(group * 32 < f) & inside[None, :])
        else:
            value = rounded * (code << 23).to(tl.float32, bitcast=True)[:, None, :]
            place = column // 128 * 128 + ordered_place(column % 128, True)
            tl.store(out + at + place[:, None], tl.reshape(value, [HALF, TOKENS]).to(out.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["count"])
def _down_kernel(
    x, x_scale, w, w_scale, y, tile_expert, tile_first, tile_token, h, f, count,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SPANS: tl.constexpr,
    PATH: tl.constexpr,
):  # fmt: skip
    tiles = tl.cdiv(h, WEIGHTS)
    program = tl.program_id(0)
    tile = program // tiles
    expert = tl.load(tile_expert + tile)
    if expert < count:
        lane = tl.arange(0, TOKENS)
        pair = tl.load(tile_first + tile) + lane
        inside = tl.load(tile_token + tile * TOKENS + lane) >= 0
        local = program % tiles * WEIGHTS + loaded_rows(WEIGHTS, WARPS, PATH)
        acc = product(
            x, x_scale, pair.to(tl.int64), f, 0, inside,
            w, w_scale, expert.to(tl.int64) * h + local, local < h, f, 0, f // 128,
            TOKENS, WEIGHTS, WARPS, STAGES, SPANS, 1, True, PATH,
        )  # fmt: skip
        column = program % tiles * WEIGHTS + tl.arange(0, WEIGHTS)
        at = y + pair.to(tl.int64)[None, :] * h + column[:, None]
        tl.store(at, acc.to(y.dtype.element_ty), mask=(column < h)[:, None] & inside[None, :])


def grouped_experts(
    x: Tensor,
    weights: Tensor,
    pairs: Pairs,
    w13: Weight,
    w2: Weight,
    limit: float,
    *,
    tiling: Tiling | None = None,
) -> Tensor:
    """Each pair's expert applied to its row of x [m, h]: [p, h] in x.dtype; see the reference.

    Rows of unused pairs hold anything. Weights are those that `arranged` gives. The number of pairs chooses the
    tiles, unless `tiling` names them.
    """
    h, count, p = x.shape[-1], w2.shape[0], len(pairs.row)
    if not p:
        return torch.empty(p, h, dtype=x.dtype, device=x.device)
    tiling = tiling or tiling_for(p / count, path_of(x.device))
    tiles = tiles_of(pairs, weights, count, tiling.tokens)
    active = gate_up(round_activations(x, fp4=True), tiles, p, w13, limit, tiling)
    return down(active, tiles, w2, x.dtype, tiling)


def arranged(weight: Weight) -> Weight:
    """A weight as the kernels here read it on its device: MXFP4 in bands, but for block-scaled MMA; others as they are.

    Raises UsageError for experts that are not MXFP4 or whose width is no multiple of 128.
    """
    if weight.data.dim() > 2 and (weight.storage != "mxfp4" or weight.shape[-1] % SPAN):
        raise UsageError(
            f"the CUDA experts take MXFP4 weights with widths that are multiples of {SPAN}, "
            f"not {weight.storage} {weight.shape[-1]}"
        )
    if weight.storage != "mxfp4" or path_of(weight.data.device) == BLOCK_SCALED.value:
        return weight
    return weight.in_bands()


def tiles_of(pairs: Pairs, weights: Tensor, count: int, tokens: int) -> Tiles:
    """The pairs of `count` experts in tiles of so many: as many as any split of the pairs over the experts can need."""
    p, device = len(pairs.row), weights.device
    number = p // tokens + min(p, count)
    expert, first = (torch.empty(number, dtype=torch.int32, device=device) for _ in range(2))
    row = torch.empty(number, tokens, dtype=torch.int32, device=device)
    tiles = Tiles(expert, first, row, torch.empty(number, tokens, device=device))
    _tiles_kernel[(number,)](
        pairs.offsets,
        pairs.row,
        pairs.slot,
        weights,
        *tiles,
        count,
        weights.shape[-1],
        TOKENS=tokens,
        EXPERTS=triton.next_power_of_2(count),
        num_warps=1,
        enable_fp_fusion=True,
    )
    return tiles


def gate_up(
    x: tuple[Tensor, Tensor], tiles: Tiles, num_pairs: int, w13: Weight, limit: float, tiling: Tiling
) -> tuple[Tensor, Tensor]:
    """Rounded activations [m, h] to those of the pairs [p, f]: SwiGLU of the product with w13, weighted."""
    count, rows, h = w13.shape
    path, f = path_of(x[0].device), rows // 2
    tiling = fitted(tiling, path, h)
    active = empty_activations((num_pairs, f), x[0].device)
    _gate_up_kernel[(len(tiles.expert) * triton.cdiv(f, tiling.weights // 2),)](
        *x, *stored_words(w13, tiling.spans), *active, *tiles, h, f, count, limit, PATH=path, **tiling.options
    )
    return active


def down(active: tuple[Tensor, Tensor], tiles: Tiles, w2: Weight, dtype: torch.dtype, tiling: Tiling) -> Tensor:
    """Rounded activations of the pairs [p, f] times w2: [p, h]."""
    count, h, f = w2.shape
    path = path_of(active[0].device)
    tiling = fitted(tiling, path, f)
    y = torch.empty(len(active[0]), h, dtype=dtype, device=active[0].device)
    _down_kernel[(len(tiles.expert) * triton.cdiv(h, tiling.weights),)](
        *active, *stored_words(w2, tiling.spans), y, *tiles[:3], h, f, count, PATH=path, **tiling.options
    )
    return y


def tiling_for(pairs_per_expert: float, path: int) -> Tiling:
    """The tiles for a number of pairs per expert and a way of multiplying."""
    usable = (pair for pair in EXPERT_TILINGS if not (pair[1].registers and path == BLOCK_SCALED.value))
    return next(tiling for most, tiling in usable if most is None or pairs_per_expert <= most)


@triton.jit
def _sum_kernel(y, position, out, h, TOPK: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for choice in tl.static_range(TOPK):
        place = tl.load(position + row * TOPK + choice).to(tl.int64)
        width = tl.where(place >= 0, h, 0)
        total += tl.load(y + place * h + column, mask=column < width, other=0.0).to(tl.float32)
    tl.store(out + row * h + column, total.to(out.dtype.element_ty), mask=column < h)


def sum_pairs(y: Tensor, position: Tensor) -> Tensor:
    """What the pairs of each row [m, topk] add up to, in order of choice: [m, h]; see the reference."""
    (m, topk), h = position.shape, y.shape[-1]
    out = torch.empty(m, h, dtype=y.dtype, device=y.device)
    if m:
        _sum_kernel[(m, triton.cdiv(h, 1024))](y, position, out, h, TOPK=topk, BLOCK=1024, num_warps=4)
    return out


@triton.jit
def _swiglu_kernel(gate_up, out, f, limit, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    at = gate_up + row * 2 * f + column
    gate = tl.load(at, mask=column < f, other=0.0).to(tl.float32)
    up = tl.load(at + f, mask=column < f, other=0.0).to(tl.float32)
    tl.store(out + row * f + column, _silu_times(gate, up, limit).to(out.dtype.element_ty), mask=column < f)


def swiglu(gate_up: Tensor, limit: float) -> Tensor:
    """silu(gate) x up of [m, 2 f], gate first, both clamped: [m, f]; see the reference."""
    m, f = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(m, f, dtype=gate_up.dtype, device=gate_up.device)
    if m:
        _swiglu_kernel[(m, triton.cdiv(f, 1024))](gate_up.contiguous(), out, f, limit, BLOCK=1024, num_warps=4)
    return out
