"""Made-up weights of true shapes, generated on the device in the storage of a released checkpoint.

Numbers are normal with variance 1/k, so that products of activations of size 1 have size 1 too; E2M1 ones are random
bits at exponents that give about this variance. Every tensor, expert and run of `TABLE_ROWS` rows of an Engram table
has a seed of its own: a rank's numbers are a part of the whole model's, however it is split. Devices differ.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from backends.torch_runtime.formats import E4M3_MAX, Weight
from backends.torch_runtime.kernels import as_stored
from backends.torch_runtime.weights.rank import (
    WHOLE,
    ModelWeights,
    RankPart,
    allocate,
    assemble,
    check_split,
    of_expert,
)
from backends.torch_runtime.weights.schema import Entry
from deepinfer.model.spec import ModelSpec

TABLE_ROWS = 1 << 16
"""Rows of an Engram table that one seed makes."""

_CHUNK = 1 << 24
"""Numbers that exist in FP32 at a time."""
_E2M1_STD = math.sqrt((0.5**2 + 1.0**2 + 1.5**2 + 2.0**2 + 3.0**2 + 4.0**2 + 6.0**2) / 8)
# A block's exponent is the base or one more, each with probability 1/2: the mean square of the factor is (1 + 4) / 2.
_EXPONENT_RMS = math.sqrt(2.5)
_GAINS = ("norm", "q_weight", "k_weight", "_scale")
_UNIT = ("embed", "attn.attn_sink", "engram.embed", "markov_head.embed")
_SMALL = ("ffn.gate.bias", "hc_attn_base", "hc_ffn_base")


def dummy_weights(
    model: ModelSpec,
    rank: RankPart = WHOLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    seed: int = 0,
    quantized: bool = True,
    engram_rows: int | None = None,
    arranged: Callable[[Weight], Weight] = as_stored,
) -> ModelWeights:
    """A rank's random weights: the same for the same `seed`, device type, dtype and `quantized`.

    `engram_rows` caps the rows of each whole Engram table; `arranged` is the kernel table's. Raises UsageError for an
    unsupported model and for experts that do not divide.
    """
    check_split(model, rank)
    place = torch.device(device)

    def build(entry: Entry, start: str) -> Weight:
        if entry.placement == "engram" and engram_rows is not None:
            (table,) = entry.parts
            entry = replace(entry, parts=(replace(table, rows=min(engram_rows, table.rows)),))
        weight = allocate(entry, rank, entry.storage if quantized else "plain", dtype, place)
        _generate(weight, entry, rank, f"{seed}:{start}{entry.key}")
        return weight

    return assemble(model, build, arranged)


def _generate(weight: Weight, entry: Entry, rank: RankPart, name: str) -> None:
    mean, std = _moments(entry)
    generator = torch.Generator(device=weight.data.device)
    if entry.placement == "expert":
        for place, number in enumerate(rank.experts(entry.num_experts)):
            _seed(generator, name, number)
            _draw(of_expert(weight, place), mean, std, generator)
    elif entry.placement == "engram":
        _generate_table(weight, rank.engram_rows(entry.rows), std, generator, name)
    else:
        _seed(generator, name, 0)
        _draw(weight, mean, std, generator)


def _generate_table(weight: Weight, rows: range, std: float, generator: torch.Generator, name: str) -> None:
    """Rows of a table, from whole runs of which a rank's first and last may be used in part."""
    for run in range(rows.start // TABLE_ROWS, -(-rows.stop // TABLE_ROWS)):
        first = run * TABLE_ROWS
        used = slice(max(rows.start, first) - first, min(rows.stop, first + TABLE_ROWS) - first)
        drawn = Weight(
            weight.data.new_empty((TABLE_ROWS, *weight.data.shape[1:])),
            None if weight.scale is None else weight.scale.new_empty((TABLE_ROWS, *weight.scale.shape[1:])),
            weight.storage,
        )
        _seed(generator, name, run)
        _draw(drawn, 0.0, std, generator)
        target = slice(first + used.start - rows.start, first + used.stop - rows.start)
        weight.data[target] = drawn.data[used]
        if weight.scale is not None and drawn.scale is not None:
            weight.scale[target] = drawn.scale[used]


def _moments(entry: Entry) -> tuple[float, float]:
    """Mean and standard deviation of an entry's numbers."""
    if entry.key.endswith(_GAINS):
        return 1.0, 0.1
    if entry.key in _UNIT:
        return 0.0, 1.0
    if entry.key in _SMALL:
        return 0.0, 0.1
    return 0.0, entry.rest[-1] ** -0.5


def _seed(generator: torch.Generator, name: str, number: int) -> None:
    digest = hashlib.blake2b(f"{name}:{number}".encode(), digest_size=8).digest()
    generator.manual_seed(int.from_bytes(digest, "little") >> 1)


def _draw(weight: Weight, mean: float, std: float, generator: torch.Generator) -> None:
    if weight.scale is None:
        _draw_normal(weight.data, mean, std, generator)
    elif weight.storage == "mxfp4":
        _draw_bits(weight.data, generator)
        # The power of two nearest to the exponent that gives `std`: off by at most a factor of sqrt(2).
        _draw_exponents(weight.scale, round(math.log2(std / (_E2M1_STD * _EXPONENT_RMS))), generator)
    else:
        # Between 32 and 64, so that E4M3's range ends beyond seven standard deviations.
        base = math.floor(math.log2(std / _EXPONENT_RMS)) - 5
        _draw_normal(weight.data, 0.0, std / _EXPONENT_RMS * 2.0**-base, generator)
        _draw_exponents(weight.scale, base, generator)


def _draw_normal(target: Tensor, mean: float, std: float, generator: torch.Generator) -> None:
    """Fill a contiguous tensor through FP32 chunks; E4M3 has no infinity, so its values are clipped."""
    flat = target.view(-1)
    for start in range(0, flat.numel(), _CHUNK):
        part = flat[start : start + _CHUNK]
        drawn = torch.randn(part.shape, generator=generator, device=part.device).mul_(std).add_(mean)
        part.copy_(drawn.clamp_(-E4M3_MAX, E4M3_MAX) if part.dtype == torch.float8_e4m3fn else drawn)


def _draw_bits(target: Tensor, generator: torch.Generator) -> None:
    """Fill a contiguous byte tensor, whose size is a multiple of 8, with random bits."""
    target.view(-1).view(torch.int64).random_(-(2**63), None, generator=generator)


def _draw_exponents(target: Tensor, base: int, generator: torch.Generator) -> None:
    target.random_(base + 127, base + 129, generator=generator)
