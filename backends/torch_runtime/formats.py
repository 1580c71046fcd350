"""Number formats of weights, activations and cache records, in plain torch: the reference for every kernel.

Scales: UE8M0 is a power of two, stored as its exponent + 127 in a byte: 2^ceil(log2(amax / max)). E4M3 scales are
rounded to nearest. E2M1 has the magnitudes 0, 0.5, 1, 1.5, 2, 3, 4, 6; two values share a byte, the even column in the
low nibble. Sources: the V4.1 reference's quantisation points, as huggingface/transformers `modular_deepseek_v41.py`
and mlx-lm 0.32.2 state them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

E4M3_MAX = 448.0
E2M1_MAX = 6.0
BLOCK = 32
"""Values that share a UE8M0 scale."""
MAIN_BLOCK = 16
"""Values of a main KV entry that share an E4M3 scale."""
SMALLEST_FP8_AMAX = 1e-4
"""Blocks of smaller values are scaled as if they reached it."""

_SMALLEST_FP4_AMAX = E2M1_MAX * 2.0**-126
_SMALLEST_E4M3_SCALE = 2.0**-9
_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_MIDPOINTS = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0)

BAND_ROWS = 8
BAND_COLUMNS = 128
"""Rows and columns of a weight that lie together in `mxfp4_bands`."""

_NIBBLES = ((3, 0), (7, 4), (11, 8), (15, 12))
_IN_BANDS = ((15, 6), (12, 3), (13, 9), (14, 0))
"""Of four E2M1 values in 16 bits, each one's sign bit and the lowest of its three other bits."""

WeightStorage = Literal["plain", "fp8_block", "fp8_rows", "mxfp4", "mxfp4_bands"]
KVStorage = Literal["fp4", "mxfp8", "bf16", "fp32"]


@dataclass(frozen=True, eq=False)
class Weight:
    """A stored weight [..., n, k] and its scales.

    `plain`: floating point, no scale. `fp8_block`: E4M3 with a UE8M0 byte per 32 x 32 [ceil(n/32), ceil(k/32)].
    `fp8_rows`: E4M3 with a byte per row and 32 columns [n, k/32]. `mxfp4`: packed E2M1 bytes [..., n, k/2] with a
    byte per row and 32 columns [..., n, k/32]. `mxfp4_bands`: the same in bands of 8 rows that are cut every 128
    columns [..., n/8, k/128, 8, 64], and so their scales [..., n/8, k/128, 8, 4], with the bits of four values in 16
    where `_IN_BANDS` says: a warp's loads are whole lines, and widening to BF16 takes fewer instructions.
    """

    data: Tensor
    scale: Tensor | None = None
    storage: WeightStorage = "plain"

    @property
    def shape(self) -> tuple[int, ...]:
        """[..., n, k], counted in numbers."""
        shape = tuple(self.data.shape)
        if self.storage == "mxfp4_bands":
            return (*shape[:-4], shape[-4] * BAND_ROWS, shape[-3] * BAND_COLUMNS)
        return (*shape[:-1], 2 * shape[-1]) if self.storage == "mxfp4" else shape

    def in_bands(self) -> Weight:
        """A weight `mxfp4`, n a multiple of 8 and k of 128, as `mxfp4_bands`: a copy."""
        assert self.storage == "mxfp4"
        assert self.scale is not None
        columns = self.shape[-1] // BAND_COLUMNS
        cut = [p.unflatten(-1, (columns, -1)).unflatten(-3, (-1, BAND_ROWS)) for p in (self.data, self.scale)]
        data, scale = (p.transpose(-3, -2).clone(memory_format=torch.contiguous_format) for p in cut)
        for rows in data.view(-1, BAND_ROWS * BAND_COLUMNS // 2).split(1 << 17):  # not to copy it all once more
            rows.copy_(_moved_bits(rows, _NIBBLES, _IN_BANDS))
        return Weight(data, scale, "mxfp4_bands")

    def dequantized(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """The weight as numbers [..., n, k]."""
        if self.scale is None:
            return self.data.to(dtype)
        if self.storage == "mxfp4_bands":
            data, scale = (part.transpose(-3, -2).flatten(-4, -3).flatten(-2) for part in (self.data, self.scale))
            return Weight(_moved_bits(data, _IN_BANDS, _NIBBLES), scale, "mxfp4").dequantized(dtype)
        if self.storage == "fp8_block":
            n, k = self.data.shape[-2:]
            scale = e8m0(self.scale).repeat_interleave(BLOCK, -2)[..., :n, :].repeat_interleave(BLOCK, -1)[..., :k]
            return (self.data.float() * scale).to(dtype)
        values = unpack_e2m1(self.data) if self.storage == "mxfp4" else self.data.float()
        return _times_blocks(values, e8m0(self.scale)).to(dtype)

    @property
    def num_bytes(self) -> int:
        """Bytes of values and scales."""
        scale = 0 if self.scale is None else self.scale.numel() * self.scale.element_size()
        return self.data.numel() * self.data.element_size() + scale


def _moved_bits(packed: Tensor, source: tuple[tuple[int, int], ...], target: tuple[tuple[int, int], ...]) -> Tensor:
    """Packed E2M1 bytes [..., 2 n], contiguous, with the bits of every four values moved from one order to another."""
    half = packed.view(torch.int16).int()
    moved = torch.zeros_like(half)
    for (sign, rest), (to_sign, to_rest) in zip(source, target, strict=True):
        moved |= (half >> sign & 1) << to_sign | (half >> rest & 7) << to_rest
    return moved.to(torch.int16).view(torch.uint8)


def e8m0(code: Tensor) -> Tensor:
    """FP32 powers of two from their stored bytes."""
    bits = code.to(torch.int32) << 23
    return torch.where(bits == 0, 1 << 22, bits).view(torch.float32)  # 2^-127 is a subnormal number


def power_of_two_above(value: Tensor) -> Tensor:
    """Bytes of the smallest powers of two not below positive FP32 values, by their bits: no rounding of logarithms."""
    bits = value.float().contiguous().view(torch.int32)
    return ((bits >> 23) + ((bits & 0x7FFFFF) != 0).int()).to(torch.uint8)


def quantize_fp8(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] as E4M3 and UE8M0 bytes [..., n/32]; n must be a multiple of 32."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = power_of_two_above(blocks.abs().amax(-1).clamp_min(SMALLEST_FP8_AMAX) * (1.0 / E4M3_MAX))
    values = (blocks / e8m0(scale)[..., None]).clamp(-E4M3_MAX, E4M3_MAX)
    return values.flatten(-2).to(torch.float8_e4m3fn), scale


def quantize_mxfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] as packed E2M1 [..., n/2] and UE8M0 bytes [..., n/32]."""
    blocks = x.float().unflatten(-1, (-1, BLOCK))
    scale = power_of_two_above(blocks.abs().amax(-1).clamp_min(_SMALLEST_FP4_AMAX) * (1.0 / E2M1_MAX))
    return pack_e2m1((blocks / e8m0(scale)[..., None]).flatten(-2)), scale


def quantize_nvfp4(x: Tensor) -> tuple[Tensor, Tensor]:
    """[..., n] as packed E2M1 [..., n/2] and E4M3 scales [..., n/16]."""
    blocks = x.float().unflatten(-1, (-1, MAIN_BLOCK))
    amax = blocks.abs().amax(-1).clamp_min(E2M1_MAX * _SMALLEST_E4M3_SCALE)
    scale = (amax / E2M1_MAX).clamp_max(E4M3_MAX).to(torch.float8_e4m3fn)
    return pack_e2m1((blocks / scale.float()[..., None]).flatten(-2)), scale


def pack_e2m1(x: Tensor) -> Tensor:
    """Round to the nearest E2M1 value, ties to even, and pack pairs of columns into bytes."""
    magnitude = x.abs().clamp_max(E2M1_MAX)
    midpoints = torch.tensor(_MIDPOINTS, device=x.device)
    code = torch.bucketize(magnitude, midpoints)
    tie = magnitude == midpoints[code.clamp_max(len(_MIDPOINTS) - 1)]
    code = code + (tie & (code % 2 == 1)).long()
    code = code | (torch.signbit(x).long() << 3)
    return (code[..., 0::2] | (code[..., 1::2] << 4)).to(torch.uint8)


def unpack_e2m1(packed: Tensor) -> Tensor:
    """FP32 values [..., n] of packed bytes [..., n/2]."""
    table = torch.tensor([*_E2M1, *(-v for v in _E2M1)], device=packed.device)
    byte = packed.view(torch.uint8).long()
    return table[torch.stack((byte & 15, byte >> 4), -1).flatten(-2)]


def record_bytes(storage: KVStorage, dim: int, kind: Literal["window", "main", "index"]) -> int:
    """Bytes of one cache record of `dim` numbers.

    Windows are E4M3 in both quantised storages, index keys E2M1; main entries are E2M1 (fp4) or E4M3 (mxfp8).
    """
    if storage == "bf16":
        return 2 * dim
    if storage == "fp32":
        return 4 * dim
    if kind == "index":
        return dim // 2 + dim // BLOCK
    if kind == "window" or storage == "mxfp8":
        return dim + dim // BLOCK
    return dim // 2 + dim // MAIN_BLOCK


def encode_record(x: Tensor, storage: KVStorage, kind: Literal["window", "main", "index"]) -> Tensor:
    """[..., dim] as cache records, uint8 [..., record_bytes]: the values, then their scales."""
    if storage in ("bf16", "fp32"):
        return x.to(torch.bfloat16 if storage == "bf16" else torch.float32).contiguous().view(torch.uint8)
    if kind == "index":
        parts = quantize_mxfp4(x)
    elif kind == "window" or storage == "mxfp8":
        parts = quantize_fp8(x)
    else:
        parts = quantize_nvfp4(x)
    return torch.cat([part.view(torch.uint8) for part in parts], -1)


def decode_record(record: Tensor, dim: int, storage: KVStorage, kind: Literal["window", "main", "index"]) -> Tensor:
    """FP32 numbers [..., dim] of cache records."""
    if storage in ("bf16", "fp32"):
        return record.contiguous().view(torch.bfloat16 if storage == "bf16" else torch.float32).float()
    if kind == "index":
        return _times_blocks(unpack_e2m1(record[..., : dim // 2]), e8m0(record[..., dim // 2 :]))
    if kind == "window" or storage == "mxfp8":
        values = record[..., :dim].contiguous().view(torch.float8_e4m3fn).float()
        return _times_blocks(values, e8m0(record[..., dim:]))
    scale = record[..., dim // 2 :].contiguous().view(torch.float8_e4m3fn).float()
    return _times_blocks(unpack_e2m1(record[..., : dim // 2]), scale)


def wide(x: Tensor) -> Tensor:
    """Activations as sums are made of them: FP32, or FP64 where they are FP64 already (the test mode)."""
    return x if x.dtype == torch.float64 else x.float()


def rounded_fp8(x: Tensor) -> Tensor:
    """What is left of activations [..., n] after a trip through `quantize_fp8`; other widths pass unchanged."""
    if x.shape[-1] % BLOCK:
        return x
    values, scale = quantize_fp8(x)
    return _times_blocks(values.float(), e8m0(scale)).to(x.dtype)


def _times_blocks(values: Tensor, scale: Tensor) -> Tensor:
    blocks: Tensor = values.unflatten(-1, (scale.shape[-1], -1)) * scale[..., None]
    return blocks.flatten(-2)
