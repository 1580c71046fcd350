"""Cache records in Triton: from their bytes to BF16 matrix operands, exactly.

The bits of an E2M1 or E4M3 code, put in place, are a BF16 number that is a power of two too small; one multiplication
by the scale corrects it. A byte of packed E2M1 holds an even and an odd column: these become operands of their own, and
no column moves. Formats: `backends.torch_runtime.formats`.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.torch_runtime.formats import KVStorage, record_bytes
from deepinfer.errors import UsageError

# Records are decoded to 2^-8 of their value, so that the largest scale times 2^126 is still a BF16 number.
UNDONE = tl.constexpr(256.0)
"""What decoded window and main records lack."""
_E2M1_SCALE = tl.constexpr(2.0**118)
_E4M3_EXPONENT = tl.constexpr(120 - 8)

# Four bytes are two pairs of bytes, each pair at the upper ends of two halves of a word: {0, b0, 0, b1}. There the high
# nibble's sign is in place and its three other bits belong six lower; shifted by four, so it is with the low nibble.
_E2M1_TO_BF16 = tl.constexpr("""
{
    .reg .b32 a, b, s, t;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    and.b32 s, a, 0x80008000;
    shr.u32 t, a, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $2, s, $5;
    and.b32 s, b, 0x80008000;
    shr.u32 t, b, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $3, s, $6;
    shl.b32 a, a, 4;
    shl.b32 b, b, 4;
    and.b32 s, a, 0x80008000;
    shr.u32 t, a, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $0, s, $5;
    and.b32 s, b, 0x80008000;
    shr.u32 t, b, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $1, s, $6;
}
""")

# Two pairs of E4M3 bytes: the odd columns' signs are in place, their seven other bits belong four lower.
_E4M3_TO_BF16 = tl.constexpr("""
{
    .reg .b32 a, s, t;
    and.b32 s, $2, 0x80008000;
    shr.u32 t, $2, 4;
    and.b32 t, t, 0x07F007F0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $1, s, $3;
    shl.b32 a, $2, 8;
    and.b32 s, a, 0x80008000;
    shr.u32 t, a, 4;
    and.b32 t, t, 0x07F007F0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $0, s, $3;
}
""")


@triton.jit
def spread(scale, REPEAT: tl.constexpr):
    """[n, s] as [n, s x REPEAT]: each scale beside the values that share it."""
    wide = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], REPEAT))
    return tl.reshape(wide, (scale.shape[0], scale.shape[1] * REPEAT))


@triton.jit
def operand(x, NATIVE: tl.constexpr):
    """x rounded to BF16; interpreted, whose products know no BF16, the same numbers in FP32."""
    x = x.to(tl.bfloat16)
    return x if NATIVE else x.to(tl.float32)


@triton.jit
def unpack_e2m1(packed, scale, NATIVE: tl.constexpr):
    """Even and odd columns, BF16, of packed E2M1 times 2^-126 times `scale` (BF16, of packed's shape)."""
    if NATIVE:
        even, odd = tl.inline_asm_elementwise(
            _E2M1_TO_BF16,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        code = packed.to(tl.int32)
        factor = scale.to(tl.float32)
        even = operand((((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * factor, False)
        code = code >> 4
        odd = operand((((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * factor, False)
    return even, odd


@triton.jit
def unpack_e4m3(pairs, scale, NATIVE: tl.constexpr):
    """Even and odd columns, BF16, of pairs of E4M3 bytes (uint16) times 2^-120 times `scale` (BF16)."""
    if NATIVE:
        even, odd = tl.inline_asm_elementwise(
            _E4M3_TO_BF16,
            "=&r,=&r,r,r",
            [pairs, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        code = pairs.to(tl.int32)
        factor = scale.to(tl.float32)
        even = operand((((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * factor, False)
        code = code >> 8
        odd = operand((((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * factor, False)
    return even, odd


@triton.jit
def power_of_two(exponent):
    """BF16 2^(exponent - 127), held inside its range."""
    return (tl.minimum(tl.maximum(exponent, 0), 254) << 23).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _parts(COUNT: tl.constexpr, NATIVE: tl.constexpr):
    """0 to COUNT - 1, of which the compiler does not know that they follow one another.

    If it did, it would load several words of scales into one thread, and send them through shared memory to those that
    need them. As it is, the thread that loads 16 codes or pairs of codes loads their scales.
    """
    part = tl.arange(0, COUNT)
    if NATIVE:
        part = tl.inline_asm_elementwise("mov.b32 $0, $1;", "=r,r", [part], dtype=tl.int32, is_pure=True, pack=1)
    return part[None, :]


@triton.jit
def _codes(record, live, PART: tl.constexpr, DIM: tl.constexpr, FP4: tl.constexpr, NATIVE: tl.constexpr):
    """Codes [n, DIM / 4] and words of scales [n, DIM / 64] of half PART of the records at n addresses.

    A code is a byte and a word two scales, or a pair of bytes and one scale. Zeros where not live.
    """
    mask = live[:, None]
    near = tl.arange(0, DIM // 4)[None, :]
    part = _parts(DIM // 64, NATIVE)
    if FP4:
        codes = tl.load(record[:, None] + PART * (DIM // 4) + near, mask=mask, other=0)
        scales = (record + (DIM // 2 + PART * (DIM // 32))).to(tl.pointer_type(tl.uint16))
    else:
        pairs = record.to(tl.pointer_type(tl.uint16))[:, None] + PART * (DIM // 4)
        codes = tl.load(pairs + near, mask=mask, other=0)
        scales = record + (DIM + PART * (DIM // 64))
    return codes, tl.load(scales[:, None] + part, mask=mask, other=0)


@triton.jit
def _unpacked(codes, scale, FP4: tl.constexpr, NATIVE: tl.constexpr):
    """Even and odd columns of half a record, BF16 [n, DIM / 4], 2^-8 of their value."""
    if FP4:
        code = (scale.to(tl.int32)[:, :, None] >> 8 * tl.arange(0, 2)[None, None, :]) & 255
        factor = (code.to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float32) * _E2M1_SCALE).to(tl.bfloat16)
        factor = tl.reshape(factor, (scale.shape[0], 2 * scale.shape[1]))
        even, odd = unpack_e2m1(codes, spread(factor, 8), NATIVE)
    else:
        even, odd = unpack_e4m3(codes, spread(power_of_two(scale.to(tl.int32) + _E4M3_EXPONENT), 16), NATIVE)
    return even, odd


@triton.jit
def decoded(record, live, DIM: tl.constexpr, FP4: tl.constexpr, NATIVE: tl.constexpr):
    """Four quarters of the records at n addresses: even and odd columns of the first half, then of the second."""
    # One half after the other: both at once would fill the registers.
    codes0, scale0 = _codes(record, live, 0, DIM, FP4, NATIVE)
    even0, odd0 = _unpacked(codes0, scale0, FP4, NATIVE)
    codes1, scale1 = _codes(record, live, 1, DIM, FP4, NATIVE)
    even1, odd1 = _unpacked(codes1, scale1, FP4, NATIVE)
    return even0, odd0, even1, odd1


@triton.jit
def prefetch(record, RECORD: tl.constexpr, LINES: tl.constexpr):
    """Ask the L2 cache for records at n addresses."""
    line = tl.minimum(tl.arange(0, LINES) * 128, RECORD - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [record.to(tl.int64)[:, None] + line],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


def is_native(kernel: Any) -> bool:
    """Whether a kernel is compiled for a device, or interpreted, where there is no inline assembly."""
    return isinstance(kernel, triton.JITFunction)


def check_records(cache: Tensor, dim: int, kind: Literal["window", "main", "index"]) -> KVStorage:
    """The storage of a cache [..., record bytes]; UsageError if it is not one that the kernels decode."""
    storages: tuple[KVStorage, ...] = ("fp4", "mxfp8")
    widths = {record_bytes(storage, dim, kind): storage for storage in reversed(storages)}
    if cache.dtype != torch.uint8 or cache.shape[-1] not in widths:
        raise UsageError(
            f"the CUDA kernels cannot read {kind} records of {cache.shape[-1]} x {cache.dtype} for {dim} numbers: "
            f"store the KV cache as fp4 or mxfp8 (records of {' or '.join(map(str, sorted(widths)))} bytes)"
        )
    return widths[cache.shape[-1]]
