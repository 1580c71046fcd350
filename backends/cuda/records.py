"""Rotary embedding and cache records in Triton: norm, rotation and encoding of a record in one program.

Columns are held as pairs (2i, 2i + 1) from load to store: the pair is what rotary embedding turns and what E2M1 packs
into a byte. Values are rounded to the input's dtype after the norm and after the rotation, as the reference does.
Semantics: `backends.torch_runtime.reference.elementwise`; number formats: `backends.torch_runtime.formats`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803

from __future__ import annotations

from typing import Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.torch_runtime.formats import KVStorage, record_bytes

HEADS = 16
"""Heads that a program of `rope` turns."""
WORDS = 1024


@triton.jit
def _rope_kernel(
    x, cos, sin, heads, row_stride, head_stride, pairs, SIGN: tl.constexpr, HEADS: tl.constexpr, PAIRS: tl.constexpr
):
    row = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * HEADS + tl.arange(0, HEADS)[:, None]
    column = tl.arange(0, 2 * PAIRS)[None, :]
    at = x + row * row_stride + head * head_stride + column
    mask = (head < heads) & (column < 2 * pairs)
    tail = tl.load(at, mask=mask, other=0.0).to(tl.float32)
    even, odd = tl.split(tl.reshape(tail, (HEADS, PAIRS, 2)))
    pair = tl.arange(0, PAIRS)
    c = tl.load(cos + row * pairs + pair, mask=pair < pairs, other=1.0)[None, :]
    s = SIGN * tl.load(sin + row * pairs + pair, mask=pair < pairs, other=0.0)[None, :]
    turned = tl.join(even * c - odd * s, even * s + odd * c)
    tl.store(at, tl.reshape(turned, (HEADS, 2 * PAIRS)).to(x.dtype.element_ty), mask=mask)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, inplace: bool = False) -> Tensor:
    """Rotate the trailing columns of x [m, (heads,) d], columns contiguous; see the reference."""
    out = x if inplace else x.clone()
    m, heads = len(x), x.shape[1] if x.dim() == 3 else 1
    pairs = cos.shape[-1]
    if m:
        _rope_kernel[(m, triton.cdiv(heads, HEADS))](
            out[..., out.shape[-1] - 2 * pairs :],
            cos,
            sin,
            heads,
            out.stride(0),
            out.stride(1) if x.dim() == 3 else 0,
            pairs,
            SIGN=-1.0 if inverse else 1.0,
            HEADS=HEADS,
            PAIRS=triton.next_power_of_2(pairs),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return out


@triton.jit
def _power_of_two_above(value):
    """UE8M0 code (int32) of the smallest power of two not below value, and that power's reciprocal."""
    bits = value.to(tl.int32, bitcast=True)
    code = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    return code, ((254 - code) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _e2m1(x):
    """Code of the nearest E2M1 value, ties to even: a tie is with or without the bound according to its lower side."""
    size = tl.abs(x)
    code = (size > 0.25).to(tl.int32) + (size >= 0.75).to(tl.int32) + (size > 1.25).to(tl.int32)
    code += (size >= 1.75).to(tl.int32) + (size > 2.5).to(tl.int32) + (size >= 3.5).to(tl.int32)
    code += (size > 5.0).to(tl.int32)
    return code | ((x.to(tl.int32, bitcast=True) >> 28) & 8)


@triton.jit
def _e4m3(x):
    return tl.clamp(x, -448.0, 448.0).to(tl.float8e4nv).to(tl.uint8, bitcast=True)


@triton.jit
def _largest(even, odd):
    return tl.maximum(tl.max(tl.abs(even), 1), tl.max(tl.abs(odd), 1))


@triton.jit
def _store_fp8(record, even, odd, D: tl.constexpr):
    even = tl.reshape(even, (D // 32, 16))
    odd = tl.reshape(odd, (D // 32, 16))
    code, inverse = _power_of_two_above(tl.maximum(_largest(even, odd), 1e-4) * (1.0 / 448.0))
    values = tl.join(_e4m3(even * inverse[:, None]), _e4m3(odd * inverse[:, None]))
    tl.store(record + tl.arange(0, D), tl.reshape(values, (D,)))
    tl.store(record + D + tl.arange(0, D // 32), code.to(tl.uint8))


@triton.jit
def _store_mxfp4(record, even, odd, D: tl.constexpr):
    even = tl.reshape(even, (D // 32, 16))
    odd = tl.reshape(odd, (D // 32, 16))
    # 6 * 2^-126, the smallest amax that has a scale.
    code, inverse = _power_of_two_above(tl.maximum(_largest(even, odd), 7.052966104933725e-38) * (1.0 / 6.0))
    packed = _e2m1(even * inverse[:, None]) | (_e2m1(odd * inverse[:, None]) << 4)
    tl.store(record + tl.arange(0, D // 2), tl.reshape(packed, (D // 2,)).to(tl.uint8))
    tl.store(record + D // 2 + tl.arange(0, D // 32), code.to(tl.uint8))


@triton.jit
def _store_nvfp4(record, even, odd, D: tl.constexpr):
    even = tl.reshape(even, (D // 16, 8))
    odd = tl.reshape(odd, (D // 16, 8))
    amax = tl.maximum(_largest(even, odd), 6.0 * 0.001953125)
    code = _e4m3(tl.div_rn(amax, tl.full(amax.shape, 6.0, tl.float32)))
    scale = code.to(tl.float8e4nv, bitcast=True).to(tl.float32)[:, None]
    # A correctly rounded quotient: an approximate one moves values off the ties of E2M1.
    packed = _e2m1(tl.div_rn(even, scale + even * 0)) | (_e2m1(tl.div_rn(odd, scale + odd * 0)) << 4)
    tl.store(record + tl.arange(0, D // 2), tl.reshape(packed, (D // 2,)).to(tl.uint8))
    tl.store(record + D // 2 + tl.arange(0, D // 16), code)


@triton.jit
def _record_kernel(
    x, weight, cos, sin, records, row_stride, eps, D: tl.constexpr, PAIRS: tl.constexpr, SIZE: tl.constexpr,
    FORMAT: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, D)
    value = tl.load(x + row * row_stride + column).to(tl.float32)
    norm = tl.rsqrt(tl.sum(value * value) / D + eps)
    value = (value * norm * tl.load(weight + column).to(tl.float32)).to(x.dtype.element_ty).to(tl.float32)
    even, odd = tl.split(tl.reshape(value, (D // 2, 2)))
    pair = tl.arange(0, D // 2) - (D // 2 - PAIRS)
    c = tl.load(cos + row * PAIRS + pair, mask=pair >= 0, other=1.0)
    s = tl.load(sin + row * PAIRS + pair, mask=pair >= 0, other=0.0)
    first = (even * c - odd * s).to(x.dtype.element_ty)
    second = (even * s + odd * c).to(x.dtype.element_ty)
    record = records + row * SIZE
    if FORMAT == "plain":
        tl.store(record + column, tl.reshape(tl.join(first, second), (D,)).to(records.dtype.element_ty))
    elif FORMAT == "fp8":
        _store_fp8(record, first.to(tl.float32), second.to(tl.float32), D)
    elif FORMAT == "mxfp4":
        _store_mxfp4(record, first.to(tl.float32), second.to(tl.float32), D)
    else:
        _store_nvfp4(record, first.to(tl.float32), second.to(tl.float32), D)


def norm_rope_encode(
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    storage: KVStorage,
    kind: Literal["window", "main", "index"],
) -> Tensor:
    """Cache records uint8 [m, record_bytes] of x [m, d], columns contiguous, d a power of two; see the reference."""
    m, d = x.shape
    records = torch.empty(m, record_bytes(storage, d, kind), dtype=torch.uint8, device=x.device)
    typed = records.view(_plain_dtype(storage)) if storage in ("bf16", "fp32") else records
    if m:
        _record_kernel[(m,)](
            x,
            weight,
            cos,
            sin,
            typed,
            x.stride(0),
            eps,
            D=d,
            PAIRS=cos.shape[-1],
            SIZE=typed.shape[1],
            FORMAT=_format(storage, kind),
            num_warps=1 if d <= 256 else 2,
            enable_fp_fusion=True,
        )
    return records


def _plain_dtype(storage: KVStorage) -> torch.dtype:
    return torch.bfloat16 if storage == "bf16" else torch.float32


def _format(storage: KVStorage, kind: Literal["window", "main", "index"]) -> str:
    if storage in ("bf16", "fp32"):
        return "plain"
    if kind == "index":
        return "mxfp4"
    return "fp8" if kind == "window" or storage == "mxfp8" else "nvfp4"


@triton.jit
def _scatter_kernel(records, cache, index, WORDS: tl.constexpr, BLOCK: tl.constexpr):
    row = tl.program_id(0).to(tl.int64)
    target = tl.load(index + row)
    if target >= 0:
        for begin in range(0, WORDS, BLOCK):
            word = begin + tl.arange(0, BLOCK)
            value = tl.load(records + row * WORDS + word, mask=word < WORDS)
            tl.store(cache + target * WORDS + word, value, mask=word < WORDS)


def scatter_records(records: Tensor, cache: Tensor, index: Tensor) -> None:
    """cache[index[i]] = records[i] where index[i] >= 0, both contiguous uint8 [.., rb]; see the reference."""
    if records.shape[1] % 4 == 0:
        records, cache = records.view(torch.int32), cache.view(torch.int32)
    words = records.shape[1]
    if len(index):
        _scatter_kernel[(len(index),)](
            records,
            cache,
            index,
            WORDS=words,
            BLOCK=min(WORDS, triton.next_power_of_2(words)),
            num_warps=1,
            enable_fp_fusion=True,
        )
