"""Quantises plain weights into the storage of a released checkpoint."""

from __future__ import annotations

import torch
from torch import Tensor

from backends.torch_runtime.formats import (
    BLOCK,
    E4M3_MAX,
    SMALLEST_FP8_AMAX,
    WeightStorage,
    e8m0,
    power_of_two_above,
    quantize_fp8,
    quantize_mxfp4,
)


def quantize_blocks(x: Tensor) -> tuple[Tensor, Tensor]:
    """[n, k] as E4M3 and a UE8M0 byte per 32 x 32 [ceil(n/32), ceil(k/32)]: the smallest power that avoids clipping."""
    n, k = x.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = power_of_two_above(blocks.abs().amax((1, 3)).clamp_min(SMALLEST_FP8_AMAX) * (1.0 / E4M3_MAX))
    values = (blocks / e8m0(scale)[:, None, :, None]).clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)
    return values.view(rows * BLOCK, columns * BLOCK)[:n, :k], scale


def to_storage(x: Tensor, storage: WeightStorage) -> tuple[Tensor, Tensor]:
    """Values and scales of a plain weight [n, k] in a quantised storage."""
    if storage == "fp8_block":
        return quantize_blocks(x)
    return quantize_fp8(x) if storage == "fp8_rows" else quantize_mxfp4(x)
