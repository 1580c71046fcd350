"""The tile of a product with quantised weights, in Triton: what `linear` and the experts are made of.

Weights are the M side of the product and tokens the N side, so that few tokens waste little of the tensor cores.
Two ways, chosen by the device:

* `WIDEN` (Hopper): E4M3 and E2M1 values times a power of two are exact BF16 values, so weights are widened to BF16 in
  registers and multiplied by wgmma with FP32 accumulation: the exact product. Scales carry a factor 2^-64 that the
  end takes off again, so that widening is one multiplication of a pair: weights are exact for scales from 2^-50 to
  2^64, and products far beyond the range of a model.
* `BLOCK_SCALED` (Blackwell): `tl.dot_scaled`, the block-scaled MMA of tcgen05 on the stored values and scales.

A thread of a wgmma owns scattered columns of the weight operand. Which columns of the product stand there is free as
long as activations have the same order (`backends.cuda.activations`), so that a thread loads 16 bytes of a weight's row
and uses them where they are; rows are permuted likewise (`loaded_rows`).
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803, N806

from __future__ import annotations

import functools
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.torch_runtime.formats import Weight

SPAN = 128
"""Columns of a step of the product; widths must be multiples of it."""

WIDEN = tl.constexpr(0)
BLOCK_SCALED = tl.constexpr(1)
PORTABLE = tl.constexpr(2)
"""WIDEN in FP32 without PTX, for the interpreter, which knows no arithmetic in BF16."""

_HALVES = tl.constexpr(-0x7FFF8000)
"""The sign bits of two BF16 values in a word, 0x80008000."""
_E2M1_BITS = tl.constexpr(-0x7E3F7E40)
"""What an E2M1 value can have of two BF16 values in a word, 0x81C081C0."""
_RIGHT_BITS = tl.constexpr(0x09C009C0)
"""Of the third and the fourth value of a half in bands, the bits that stand too far left: see `_third_and_fourth`."""
_OFFSET = tl.constexpr(2.0**64)


@dataclass(frozen=True)
class Tiling:
    """Tokens and weight rows of a tile, warps of a program, steps in flight, columns of a step in units of 128.

    `registers` caps those of a thread, so that more programs share a multiprocessor; 0 leaves them to the compiler.
    """

    tokens: int
    weights: int
    warps: int
    stages: int
    spans: int = 1
    registers: int = 0

    @property
    def options(self) -> dict[str, int | bool | None]:
        """Launch arguments of a kernel that is built of these tiles."""
        return {
            "SPANS": self.spans,
            "TOKENS": self.tokens,
            "WEIGHTS": self.weights,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "num_warps": self.warps,
            "maxnreg": self.registers or None,
            "enable_fp_fusion": True,
        }


def fitted(tiling: Tiling, path: int, width: int) -> Tiling:
    """The tiling that a way of multiplying can use: block-scaled MMA takes 128 rows of weights, steps are whole."""
    if path == BLOCK_SCALED.value:
        return replace(tiling, weights=max(tiling.weights, 128), spans=1, registers=0)
    return tiling if width % (SPAN * tiling.spans) == 0 else replace(tiling, spans=1)


@functools.cache
def path_of(device: torch.device) -> int:
    """The way of multiplying on a device; the interpreter's on a CPU."""
    if device.type != "cuda":
        return int(PORTABLE.value)
    return int((BLOCK_SCALED if torch.cuda.get_device_capability(device)[0] == 10 else WIDEN).value)


def stored_words(weight: Weight, spans: int) -> tuple[Tensor, Tensor]:
    """A weight's values and scales as the product loads them: bytes for block-scaled MMA, else int32.

    Scales in bands have a word per row and 128 columns, others the scales of a step in a word (int64 for two spans).
    """
    assert weight.scale is not None
    data, scale = weight.data.view(torch.uint8), weight.scale.view(torch.uint8)
    if path_of(data.device) == BLOCK_SCALED.value:
        return data, scale
    assert weight.storage != "mxfp4", "MXFP4 weights are read in bands"
    in_words = spans == 1 or weight.storage == "mxfp4_bands"
    return data.view(torch.int32), scale.view(torch.int32 if in_words else torch.int64)


@triton.jit
def loaded_rows(WEIGHTS: tl.constexpr, WARPS: tl.constexpr, PATH: tl.constexpr):
    """Which row of a tile each loaded row is: the order in which a warp's rows of a wgmma are next to each other."""
    row = tl.arange(0, WEIGHTS)
    if PATH == BLOCK_SCALED:
        return row
    return row // (16 * WARPS) * (16 * WARPS) + row // 8 % WARPS * 16 + row // (8 * WARPS) % 2 * 8 + row % 8


@triton.jit
def _third_and_fourth(word, PATH: tl.constexpr):
    """The third value of each half of a word in bands where BF16 has its bits, and the fourth 4 bits below.

    Of 16 bits for four values only two can stand where a shift brings them; these two are put together of two shifts.
    """
    left, right = word << 2, word >> 3
    if PATH == PORTABLE:
        return (right & _RIGHT_BITS) | (left & ~_RIGHT_BITS)
    # In PTX, or the compiler would distribute the masks that follow over the two terms.
    return tl.inline_asm_elementwise(
        "lop3.b32 $0, $1, $2, 0x09C009C0, 0xe4;", "=r,r,r", [right, left], dtype=tl.int32, is_pure=True, pack=1
    )


@triton.jit
def _e4m3_pair(word, LOW: tl.constexpr):
    """The lower or upper byte of each half of a word as BF16, too small by the difference of the exponents' biases."""
    return (word << 8 if LOW else word) & _HALVES | (word << 4 if LOW else word >> 4) & 0x07F007F0


@triton.jit
def _scaled_pair(pair, scale, PATH: tl.constexpr):
    """Two BF16 values of a word times the scale, BF16 in both halves of a word: [..., 2]."""
    if PATH == PORTABLE:
        factor = (scale << 16).to(tl.float32, bitcast=True)
        low = (pair << 16).to(tl.float32, bitcast=True) * factor
        high = (pair & -65536).to(tl.float32, bitcast=True) * factor
    else:
        pair = tl.inline_asm_elementwise(
            "{ .reg .b32 zero; mov.b32 zero, 0x80008000; fma.rn.bf16x2 $0, $1, $2, zero; }",
            "=r,r,r",
            [pair, scale],
            dtype=tl.int32,
            is_pure=True,
            pack=1,
        )
        low = pair.to(tl.int16).to(tl.bfloat16, bitcast=True)
        high = (pair >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    return tl.join(low, high)


@triton.jit
def _factor_pair(scales, group, FP4: tl.constexpr, PATH: tl.constexpr):
    """One of the four scales of a word as BF16, in both halves of a word: with the bias that the values lack.

    The interpreter's has it in one half.
    """
    BIAS: tl.constexpr = 62 if FP4 else 56
    if PATH == PORTABLE:
        return (((scales >> 8 * group) & 255) + BIAS) << 7
    exponents = tl.inline_asm_elementwise(
        "{ .reg .b32 t; prmt.b32 t, $1, 0, $2; shr.u32 $0, t, 1; }",
        "=r,r,r",
        [scales, 0x0404 + 0x1010 * group],
        dtype=tl.int32,
        is_pure=True,
        pack=1,
    )
    return exponents + BIAS * 0x00800080


@triton.jit
def _widened(word, scale, WARPS: tl.constexpr, FP4: tl.constexpr, PATH: tl.constexpr):
    """Loaded words [weights, 16, halves] and scale words [weights] of 128 columns as BF16 [weights, 128], in order.

    A thread's four words are 32 values of E2M1, one scale's, or 16 of E4M3, half a scale's.
    """
    N: tl.constexpr = word.shape[0]
    H: tl.constexpr = word.shape[2]
    GROUPS: tl.constexpr = N // (16 * WARPS)
    quarter = tl.arange(0, 4)[None, :, None, None]
    group = quarter if FP4 else quarter // 2 + 2 * tl.arange(0, H)[None, None, None, :]
    factor = _factor_pair(scale[:, None, None, None], group, FP4, PATH)
    factor, word = tl.broadcast(factor, tl.reshape(word, [N, 4, 4, H]))
    if FP4:
        other = _third_and_fourth(word, PATH)
        first = _scaled_pair(word & _E2M1_BITS, factor, PATH)
        second = _scaled_pair(word << 3 & _E2M1_BITS, factor, PATH)
        third = _scaled_pair(other & _E2M1_BITS, factor, PATH)
        fourth = _scaled_pair(other << 4 & _E2M1_BITS, factor, PATH)
        pieces = tl.join(tl.join(first, third), tl.join(second, fourth))
    else:
        first = _scaled_pair(_e4m3_pair(word, True), factor, PATH)
        second = _scaled_pair(_e4m3_pair(word, False), factor, PATH)
        pieces = tl.join(first, second)
    PIECES: tl.constexpr = 4 if FP4 else 2
    # group, half of 16 rows, warp, row of 8, quarter, word, half, value of the pair, piece
    pieces = tl.reshape(pieces, [GROUPS, 2, WARPS, 8, 4, 4, H, 2, PIECES])
    return tl.reshape(tl.permute(pieces, [0, 2, 1, 3, 6, 5, 8, 4, 7]), [N, 128])


@triton.jit
def _widening_product(
    acc, x_at, x_inside, w, w_scale, w_row, w_inside, width, begin, end,
    WARPS: tl.constexpr, STAGES: tl.constexpr, SPANS: tl.constexpr, SCALE_ROWS: tl.constexpr,
    FP4: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    N: tl.constexpr = acc.shape[0]
    WORDS: tl.constexpr = 16 if FP4 else 32
    SPAN_WORDS: tl.constexpr = 8 * WORDS if FP4 else WORDS
    if FP4:
        place = w_row // 8 * (width // 128 * 8) + w_row % 8
        w_at = w + place[:, None] * WORDS + begin * SPAN_WORDS + tl.arange(0, 16)[None, :]
        scale_at = w_scale + place + begin * 8
    else:
        w_at = w + w_row[:, None] * (width // 128 * WORDS) + begin * WORDS + tl.arange(0, 16)[None, :]
        scale_at = w_scale + w_row // SCALE_ROWS * (width // (128 * SPANS)) + begin // SPANS
    x_at += begin * 128
    for _ in tl.range(begin, end, SPANS, num_stages=STAGES):
        if not FP4:
            scales = tl.load(scale_at, mask=w_inside, other=0)
        for span in tl.static_range(SPANS):
            word = tl.load(w_at + span * SPAN_WORDS, mask=w_inside[:, None], other=0)
            if FP4:
                word = tl.reshape(word, [N, 16, 1])
                scale = tl.load(scale_at + span * 8, mask=w_inside, other=0)
            else:
                word = tl.join(word, tl.load(w_at + span * WORDS + 16, mask=w_inside[:, None], other=0))
                scale = (scales >> 32 * span).to(tl.int32)
            tokens = tl.load(x_at + span * 128, mask=x_inside[:, None], other=0.0)
            acc = tl.dot(_widened(word, scale, WARPS, FP4, PATH), tl.trans(tokens), acc, input_precision="ieee")
        w_at += SPANS * SPAN_WORDS
        scale_at += SPANS * 8 if FP4 else 1
        x_at += SPANS * 128
    return acc * _OFFSET


@triton.jit
def _block_scaled_product(
    acc, x_at, x_scale_at, x_inside, w, w_scale, w_row, w_inside, width, begin, end,
    STAGES: tl.constexpr, SCALE_ROWS: tl.constexpr, FP4: tl.constexpr,
):  # fmt: skip
    BYTES: tl.constexpr = 64 if FP4 else 128
    FORMAT: tl.constexpr = "e2m1" if FP4 else "e4m3"
    w_at = w + w_row[:, None] * (width // 128 * BYTES) + begin * BYTES + tl.arange(0, BYTES)[None, :]
    scale_at = w_scale + (w_row // SCALE_ROWS)[:, None] * (width // 32) + begin * 4 + tl.arange(0, 4)[None, :]
    x_at += begin * 128
    x_scale_at += begin * 4
    for _ in tl.range(begin, end, num_stages=STAGES):
        values = tl.load(w_at, mask=w_inside[:, None], other=0)
        scale = tl.load(scale_at, mask=w_inside[:, None], other=0)
        tokens = tl.load(x_at, mask=x_inside[:, None], other=0.0)
        token_scale = tl.load(x_scale_at, mask=x_inside[:, None], other=0)
        acc = tl.dot_scaled(values, scale, FORMAT, tl.trans(tokens), token_scale, "e4m3", acc)
        w_at += BYTES
        scale_at += 4
        x_at += 128
        x_scale_at += 4
    return acc


@triton.jit
def product(
    x, x_scale, x_row, x_columns, x_column, x_inside, w, w_scale, w_row, w_inside, width, begin, end,
    TOKENS: tl.constexpr, WEIGHTS: tl.constexpr, WARPS: tl.constexpr, STAGES: tl.constexpr, SPANS: tl.constexpr,
    SCALE_ROWS: tl.constexpr, FP4: tl.constexpr, PATH: tl.constexpr,
):  # fmt: skip
    """Rows w_row of a weight [n, width] times rows x_row of activations: FP32 [weights, tokens].

    FP4 weights lie in bands, but for block-scaled MMA. The sum runs over 128s [begin, end) of columns, SPANS at a time.
    Activations are columns [x_column, x_column + width) of a matrix of x_columns; w_row is in `loaded_rows` order;
    SCALE_ROWS rows of the weight share a row of scales. Rows outside count as zero.
    """
    acc = tl.zeros([WEIGHTS, TOKENS], tl.float32)
    x_at = x + x_row[:, None] * x_columns + x_column + tl.arange(0, 128)[None, :]
    if PATH == BLOCK_SCALED:
        x_scale_at = x_scale + x_row[:, None] * (x_columns // 32) + x_column // 32 + tl.arange(0, 4)[None, :]
        acc = _block_scaled_product(
            acc, x_at, x_scale_at, x_inside, w, w_scale, w_row, w_inside, width, begin, end, STAGES, SCALE_ROWS, FP4
        )
    else:
        acc = _widening_product(
            acc, x_at, x_inside, w, w_scale, w_row, w_inside, width, begin, end,
            WARPS, STAGES, SPANS, SCALE_ROWS, FP4, PATH,
        )  # fmt: skip
    return acc
