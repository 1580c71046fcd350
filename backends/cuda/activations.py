"""Activations rounded to FP8, in Triton, as the products with quantised weights read them (`backends.cuda.tiles`).

Block-scaled MMA reads E4M3 values and UE8M0 scales. Elsewhere the two are multiplied, which BF16 holds exactly, and
stored in the activation order of the weight's format: column k of each 128 goes to the place that `ordered_place`
tells.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803, N806

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.cuda.tiles import BLOCK_SCALED, PORTABLE, SPAN, path_of
from backends.torch_runtime.formats import BLOCK, E4M3_MAX, SMALLEST_FP8_AMAX

_E4M3_MAX = tl.constexpr(E4M3_MAX)
_SMALLEST_AMAX = tl.constexpr(SMALLEST_FP8_AMAX)


@triton.jit
def fp8_scale(amax):
    """UE8M0 code of 2^ceil(log2(amax / 448)) and that power's reciprocal, as `formats.quantize_fp8` has them."""
    bits = (tl.maximum(amax, _SMALLEST_AMAX) * (1.0 / _E4M3_MAX)).to(tl.int32, bitcast=True)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return code, ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def rounded_e4m3(value):
    """FP32 rounded to the nearest E4M3 value, ties to even, saturating; still FP32.

    Adding and subtracting 1.5 x 2^23 units in the last place of E4M3 leaves the rounding to the adder.
    """
    value = tl.minimum(tl.maximum(value, -_E4M3_MAX), _E4M3_MAX)
    exponent = tl.maximum(value.to(tl.int32, bitcast=True) >> 23 & 255, 127 - 6)
    magic = (exponent + 20 << 23 | 0x400000).to(tl.float32, bitcast=True)
    return (value + magic) - magic


@triton.jit
def ordered_place(column, FP4: tl.constexpr):
    """Where a column of 128 stands in the activation order of a weight format; the inverse of `_in_order`."""
    if FP4:
        place = column // 8 % 4 * 32 + column % 4 * 8 + column // 32 * 2 + column // 4 % 2
    else:
        place = column // 64 * 64 + column // 4 % 4 * 16 + column % 2 * 8 + column // 16 % 4 * 2 + column // 2 % 2
    return place


@triton.jit
def _in_order(value, FP4: tl.constexpr):
    """Columns of value [b, 128] in activation order."""
    B: tl.constexpr = value.shape[0]
    if FP4:
        value = tl.permute(tl.reshape(value, [B, 4, 4, 2, 4]), [0, 2, 4, 1, 3])
    else:
        value = tl.permute(tl.reshape(value, [B, 2, 4, 4, 2, 2]), [0, 1, 3, 5, 2, 4])
    return tl.reshape(value, [B, 128])


@triton.jit(do_not_specialize=["spans", "num_counters"])
def _round_kernel(
    x, out, out_scale, counters, spans, num_counters, PATH: tl.constexpr, FP4: tl.constexpr, SPANS: tl.constexpr
):
    for start in range(tl.program_id(0) * 256, num_counters, tl.num_programs(0) * 256):
        lane = start + tl.arange(0, 256)
        tl.store(counters + lane, 0, mask=lane < num_counters)
    span = tl.program_id(0).to(tl.int64) * SPANS + tl.arange(0, SPANS)
    at = span[:, None] * 128 + tl.arange(0, 128)[None, :]
    inside = (span < spans)[:, None]
    value = tl.reshape(tl.load(x + at, mask=inside, other=0.0).to(tl.float32), [SPANS, 4, 32])
    code, reciprocal = fp8_scale(tl.max(tl.abs(value), 2))
    rounded = rounded_e4m3(value * reciprocal[:, :, None])
    if PATH == BLOCK_SCALED:
        tl.store(out + at, tl.reshape(rounded, [SPANS, 128]).to(tl.float8e4nv), mask=inside)
        tl.store(out_scale + span[:, None] * 4 + tl.arange(0, 4)[None, :], code.to(tl.uint8), mask=inside)
    else:
        value = tl.reshape(rounded * (code << 23).to(tl.float32, bitcast=True)[:, :, None], [SPANS, 128])
        tl.store(out + at, _in_order(value.to(out.dtype.element_ty), FP4), mask=inside)


def empty_activations(shape: tuple[int, ...], device: torch.device) -> tuple[Tensor, Tensor]:
    """Room for rounded activations [..., k]: BF16 in activation order, or E4M3 with UE8M0 bytes [..., k/32].

    Where scales are part of the values, the second tensor is a placeholder of one byte.
    """
    path = path_of(device)
    if path == BLOCK_SCALED.value:
        scale = torch.empty(*shape[:-1], shape[-1] // BLOCK, dtype=torch.uint8, device=device)
        return torch.empty(shape, dtype=torch.float8_e4m3fn, device=device), scale
    dtype = torch.float32 if path == PORTABLE.value else torch.bfloat16
    return torch.empty(shape, dtype=dtype, device=device), torch.empty(1, dtype=torch.uint8, device=device)


def round_activations(x: Tensor, fp4: bool, counters: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """`formats.quantize_fp8` of x [..., k] as the product with E2M1 (or E4M3) weights reads it; k a multiple of 128.

    Sets int32 counters to zero on the way: the product that follows needs them so, and it saves a launch.
    """
    out, scale = empty_activations(tuple(x.shape), x.device)
    spans = x.numel() // SPAN
    if spans:
        grid = (triton.cdiv(spans, 8),)
        path = path_of(x.device)
        _round_kernel[grid](
            x.contiguous(),
            out,
            scale,
            scale if counters is None else counters,
            spans,
            0 if counters is None else counters.numel(),
            PATH=path,
            FP4=fp4,
            SPANS=8,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out, scale
