"""The row-wise kernels in Triton, with the names of `backends.torch_runtime.reference.elementwise`, their semantics.

One program per row (per row and stream for the Engram gate), the row in registers: a row's result cannot depend on
the others. Inputs are contiguous along their last axis.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.cuda.hyper_connections import hc_enter, hc_expand, hc_leave
from backends.cuda.records import norm_rope_encode, rope, scatter_records
from backends.torch_runtime.reference.elementwise import Streams

__all__ = [
    "Streams",
    "engram_gate",
    "hc_enter",
    "hc_expand",
    "hc_leave",
    "norm_rope_encode",
    "pool_pairs",
    "rms_norm",
    "rope",
    "scatter_records",
]


@triton.jit
def _rms_norm_kernel(x, weight, out, n, row_stride, eps, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < n
    value = tl.load(x + row * row_stride + column, mask=inside, other=0.0).to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value) / n + eps)
    value = value * norm * tl.load(weight + column, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * n + column, value.to(out.dtype.element_ty), mask=inside)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [m, n] over the root of its mean square, times weight [n] before the cast to x.dtype; rows may be strided."""
    m, n = x.shape
    out = torch.empty(m, n, dtype=x.dtype, device=x.device)
    if m:
        block = triton.next_power_of_2(n)
        _rms_norm_kernel[(m,)](
            x, weight, out, n, x.stride(0), eps, BLOCK=block, num_warps=_warps(block), enable_fp_fusion=True
        )
    return out


@triton.jit
def _pool_kernel(value, gate, out, d, R: tl.constexpr, BLOCK: tl.constexpr):
    group = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    inside = column < d
    at = group * R * d + column
    best = tl.load(gate + at, mask=inside, other=0.0)
    for r in tl.static_range(1, R):
        best = tl.maximum(best, tl.load(gate + at + r * d, mask=inside, other=0.0))
    total = tl.zeros((BLOCK,), tl.float32)
    mean = tl.zeros((BLOCK,), tl.float32)
    for r in tl.static_range(R):
        weight = tl.exp(tl.load(gate + at + r * d, mask=inside, other=0.0) - best)
        total += weight
        mean += weight * tl.load(value + at + r * d, mask=inside, other=0.0)
    tl.store(out + group * d + column, mean / total, mask=inside)


def pool_pairs(value: Tensor, gate: Tensor) -> Tensor:
    """[g, d]: contiguous value FP32 [g, r, d] averaged over r with the weights softmax(gate) of each column."""
    groups, r, d = value.shape
    out = torch.empty(groups, d, device=value.device)
    if groups:
        block = triton.next_power_of_2(d)
        _pool_kernel[(groups,)](value, gate, out, d, R=r, BLOCK=block, num_warps=_warps(block), enable_fp_fusion=True)
    return out


@triton.jit
def _engram_kernel(
    x, kv, q_weight, k_weight, out, h, row_stride, stream_stride, kv_stride, eps, root, BLOCK: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    stream = tl.program_id(1)
    column = tl.arange(0, BLOCK)
    inside = column < h
    hidden = tl.load(x + row * row_stride + stream * stream_stride + column, mask=inside, other=0.0).to(tl.float32)
    key = tl.load(kv + row * kv_stride + stream * h + column, mask=inside, other=0.0).to(tl.float32)
    product = hidden * tl.load(q_weight + stream * h + column, mask=inside, other=0.0).to(tl.float32)
    product *= tl.load(k_weight + stream * h + column, mask=inside, other=0.0).to(tl.float32)
    norms = tl.rsqrt(tl.sum(hidden * hidden) / h + eps) * tl.rsqrt(tl.sum(key * key) / h + eps)
    dot = tl.sum(product * key) * norms * root
    size = tl.sqrt(tl.maximum(tl.abs(dot), 1e-6))
    gate = tl.sigmoid(tl.where(dot < 0, -size, size))
    value = tl.load(kv + row * kv_stride + 4 * h + column, mask=inside, other=0.0).to(tl.float32)
    at = out + (row * 4 + stream) * h + column
    tl.store(at, (hidden + gate * value).to(out.dtype.element_ty), mask=inside)


def engram_gate(x: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Add the memory's value to every stream of x [m, 4, h] as far as its key (kv [m, 5h]) agrees."""
    m, streams, h = x.shape
    out = torch.empty(m, streams, h, dtype=x.dtype, device=x.device)
    if m:
        block = triton.next_power_of_2(h)
        _engram_kernel[(m, streams)](
            x,
            kv,
            q_weight,
            k_weight,
            out,
            h,
            x.stride(0),
            x.stride(1),
            kv.stride(0),
            eps,
            h**-0.5,
            BLOCK=block,
            num_warps=_warps(block),
            enable_fp_fusion=True,
        )
    return out


def _warps(block: int) -> int:
    """Warps for a row of `block` numbers in registers: 32 numbers a lane at most."""
    return max(1, min(8, block // 512))
