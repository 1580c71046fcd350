"""Products with stored weights in Triton, and the names of `backends.torch_runtime.reference.gemm`, its semantics.

A row's result does not depend on the other rows while their number stays in one range of `LINEAR_TILINGS`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.cuda.activations import round_activations
from backends.cuda.experts import grouped_experts, sum_pairs, swiglu
from backends.cuda.routing import route, sort_pairs
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
from backends.torch_runtime.formats import BLOCK, Weight
from backends.torch_runtime.reference import gemm as reference
from backends.torch_runtime.reference.gemm import Pairs

__all__ = [
    "Pairs",
    "grouped_experts",
    "linear",
    "linear_grouped",
    "route",
    "sort_pairs",
    "sum_pairs",
    "swiglu",
]


@dataclass(frozen=True)
class LinearTiling:
    """The tiles for up to `rows` rows, and how many programs the columns of a weight are split for at most.

    `crowded` are those for a weight of more tiles than that, of which two fit on a multiprocessor of Hopper.
    """

    rows: int | None
    tiling: Tiling
    programs: int = 0
    crowded: Tiling | None = None

    def chosen(self, rows: int, path: int, width: int) -> Tiling:
        """The tiles for a weight of a number of rows and a width, and a way of multiplying."""
        usual = fitted(self.tiling, path, width)
        if self.crowded and path != BLOCK_SCALED.value and triton.cdiv(rows, usual.weights) > self.programs:
            return fitted(self.crowded, path, width)
        return usual


LINEAR_TILINGS = (
    LinearTiling(16, Tiling(tokens=16, weights=64, warps=4, stages=4), programs=396),
    LinearTiling(
        64,
        Tiling(tokens=64, weights=128, warps=8, stages=4),
        programs=132,
        crowded=Tiling(tokens=64, weights=128, warps=8, stages=3, registers=128),
    ),
    LinearTiling(256, Tiling(tokens=128, weights=128, warps=8, stages=3), programs=132),
    LinearTiling(None, Tiling(tokens=256, weights=128, warps=8, stages=3)),
)
"""By number of rows, with the same split for all the rows of a range. Chosen on an H200 from those that
`benchmarks/kernels_gemm.py --sweep` tries (torch 2.11, Triton 3.6)."""
NEIGHBOURS = 8
"""Tiles of tokens that share a tile of weights while it is in the L2 cache."""
LEAST_STEPS = 3
"""Steps of a split below which its start and its sum cost more than they save."""


def tiling_for(rows: int) -> LinearTiling:
    """The tiles for a number of rows."""
    return next(tiling for tiling in LINEAR_TILINGS if tiling.rows is None or rows <= tiling.rows)


@triton.jit(do_not_specialize=["m", "groups"])
def _linear_kernel(
    x, x_scale, w, w_scale, y, partial, counters, m, n, width, groups,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SPANS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, FP4: tl.constexpr, PATH: tl.constexpr, NEIGHBOURS: tl.constexpr, SPLITS: tl.constexpr,
):  # fmt: skip
    token_tiles, tiles = tl.cdiv(m, TOKENS), tl.cdiv(n, WEIGHTS)
    split, program = tl.program_id(0) % SPLITS, tl.program_id(0) // SPLITS
    band = program // (NEIGHBOURS * tiles * groups) * NEIGHBOURS
    height = tl.minimum(token_tiles - band, NEIGHBOURS)
    place = program % (NEIGHBOURS * tiles * groups)
    token = (band + place % height) * TOKENS + tl.arange(0, TOKENS)
    group, tile = place // height // tiles, place // height % tiles
    local = tile * WEIGHTS + loaded_rows(WEIGHTS, WARPS, PATH)
    steps = width // (128 * SPANS)
    acc = product(
        x, x_scale, token.to(tl.int64), groups * width, group * width, token < m,
        w, w_scale, (group * n + local).to(tl.int64), local < n, width,
        split * steps // SPLITS * SPANS, (split + 1) * steps // SPLITS * SPANS,
        TOKENS, WEIGHTS, WARPS, STAGES, SPANS, SCALE_ROWS, FP4, PATH,
    )  # fmt: skip
    row = tl.arange(0, WEIGHTS)
    if SPLITS > 1:
        share = partial + program.to(tl.int64) * (SPLITS * WEIGHTS * TOKENS)
        share += row[:, None] + tl.arange(0, TOKENS)[None, :] * WEIGHTS
        tl.store(share + split * (WEIGHTS * TOKENS), acc)
        tl.debug_barrier()
        last = tl.atomic_add(counters + program, 1, sem="acq_rel") == SPLITS - 1
        if last:
            acc = tl.zeros([WEIGHTS, TOKENS], tl.float32)
            for part in range(SPLITS):
                acc += tl.load(share + part * (WEIGHTS * TOKENS), cache_modifier=".cg")
    else:
        last = True
    if last:
        row += tile * WEIGHTS
        at = y + token.to(tl.int64)[None, :] * (groups * n) + (group * n + row)[:, None]
        tl.store(at, acc.to(y.dtype.element_ty), mask=(row < n)[:, None] & (token < m)[None, :])


def linear(x: Tensor, weight: Weight) -> Tensor:
    """x [m, k] times weight [n, k] transposed: [m, n] in x.dtype; see the reference.

    Plain weights go to cuBLAS; quantised ones of a width that is no multiple of 128 take the reference's way.
    """
    if weight.storage == "plain":
        return torch.nn.functional.linear(x, weight.data.to(x.dtype))
    if x.shape[-1] % SPAN:
        return reference.linear(x, weight)
    return product_of(x[:, None], weight)[:, 0]


def linear_grouped(x: Tensor, weight: Weight) -> Tensor:
    """x [m, g, k] times the g row blocks of a weight [g x n, k]: [m, g, n] in x.dtype; see the reference."""
    if weight.storage == "plain":
        return torch.einsum("mgk,gnk->mgn", x, weight.data.unflatten(0, (x.shape[1], -1)).to(x.dtype))
    if x.shape[-1] % SPAN:
        return reference.linear_grouped(x, weight)
    return product_of(x, weight)


def product_of(x: Tensor, weight: Weight, usual: LinearTiling | None = None) -> Tensor:
    """x [m, g, k] times the g row blocks of a quantised weight, k a multiple of 128, in the tiles given or usual.

    Where the columns are split, the last program of a tile to finish adds the parts in their order.
    """
    m, groups, width = x.shape
    n = weight.shape[0] // groups
    y = torch.empty(m, groups, n, dtype=x.dtype, device=x.device)
    if not m:
        return y
    path, fp4 = path_of(x.device), weight.storage in ("mxfp4", "mxfp4_bands")
    usual = usual or tiling_for(m)
    tiling = usual.chosen(weight.shape[0], path, width)
    tiles = triton.cdiv(n, tiling.weights) * groups
    splits = max(1, min(usual.programs // tiles, width // (SPAN * tiling.spans * LEAST_STEPS)))
    tiles *= triton.cdiv(m, tiling.tokens)
    counters = torch.empty(tiles, dtype=torch.int32, device=x.device) if splits > 1 else None
    partial = torch.empty(tiles if splits > 1 else 0, splits, tiling.tokens * tiling.weights, device=x.device)
    values, scale = round_activations(x, fp4, counters)
    _linear_kernel[(tiles * splits,)](
        values,
        scale,
        *stored_words(weight, tiling.spans),
        y,
        partial,
        counters if counters is not None else scale,
        m,
        n,
        width,
        groups,
        SCALE_ROWS=BLOCK if weight.storage == "fp8_block" else 1,
        FP4=fp4,
        PATH=path,
        NEIGHBOURS=NEIGHBOURS,
        SPLITS=splits,
        **tiling.options,
    )
    return y
