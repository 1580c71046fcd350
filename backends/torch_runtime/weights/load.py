"""Reads a rank's weights from a checkpoint, or makes them of tensors with the released names."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from backends.torch_runtime.formats import BLOCK, Weight, WeightStorage
from backends.torch_runtime.kernels import as_stored
from backends.torch_runtime.weights.quantize import to_storage
from backends.torch_runtime.weights.rank import (
    WHOLE,
    ModelWeights,
    RankPart,
    allocate,
    assemble,
    check_split,
    model_entries,
    of_expert,
)
from backends.torch_runtime.weights.schema import (
    SKIPPED_PREFIXES,
    SKIPPED_SUFFIX,
    Entry,
    released,
)
from backends.torch_runtime.weights.source import FolderSource, Source, TensorSource, refuse, row_bytes
from deepinfer.errors import UsageError
from deepinfer.files import read_json
from deepinfer.model.spec import ModelSpec

ARCHITECTURE = "DeepseekV41ForCausalLM"
_CHUNK_BYTES = 64 << 20
"""Rows are copied in pieces of about this size, which bounds what a read needs beside the weights themselves."""


def load_weights(
    folder: Path,
    model: ModelSpec,
    rank: RankPart = WHOLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.bfloat16,
    quantize: bool = False,
    arranged: Callable[[Weight], Weight] = as_stored,
) -> ModelWeights:
    """A rank's weights of the checkpoint in a folder; plain tensors as `dtype`, or FP32 where the schema says so.

    `arranged` is the kernel table's. Only what the rank holds is read. A checkpoint without scales loads plain, or
    quantised as released with `quantize`. A model without a draft leaves the draft's tensors unread. Raises UsageError
    for a folder without safetensors, another architecture, a truncated file, missing, unknown, misshapen or mistyped
    tensors, and experts that do not divide.
    """
    _check_architecture(folder)
    with FolderSource(folder) as source:
        return _read(source, model, rank, torch.device(device), dtype, quantize, arranged)


def from_released(
    tensors: Mapping[str, Tensor],
    model: ModelSpec,
    rank: RankPart = WHOLE,
    device: torch.device | str = "cpu",
    dtype: torch.dtype = torch.float32,
    quantize: bool = False,
) -> ModelWeights:
    """The same of tensors in memory by their released names; nothing of the result shares their memory."""
    return _read(TensorSource(tensors), model, rank, torch.device(device), dtype, quantize, as_stored)


def _check_architecture(folder: Path) -> None:
    path = folder / "config.json"
    if not folder.is_dir():
        raise UsageError(f"there is no folder {folder} to read weights from")
    listed = read_json(path, "model config").get("architectures")
    if listed != [ARCHITECTURE]:
        raise UsageError(f"{path} is of architecture {listed!r}; the runtime loads weights of {ARCHITECTURE}")


def _read(
    source: Source,
    model: ModelSpec,
    rank: RankPart,
    device: torch.device,
    dtype: torch.dtype,
    quantize: bool,
    arranged: Callable[[Weight], Weight],
) -> ModelWeights:
    check_split(model, rank)
    is_quantized = check(source, model)

    def build(entry: Entry, start: str) -> Weight:
        storage = entry.storage if is_quantized or quantize else "plain"
        weight = allocate(entry, rank, storage, dtype, device)
        for piece in _pieces(entry, start, rank):
            _fill(weight, piece, entry, source, is_quantized)
        return weight

    return assemble(model, build, arranged)


@dataclass(frozen=True)
class _Piece:
    """Rows of a released tensor and the place of the first: expert (of a stack), row."""

    name: str
    rows: range
    expert: int | None
    row: int


def _pieces(entry: Entry, start: str, rank: RankPart) -> Iterator[_Piece]:
    if entry.placement == "engram":
        yield _Piece(start + entry.parts[0].name, rank.engram_rows(entry.rows), None, 0)
        return
    experts = rank.experts(entry.num_experts) if entry.placement == "expert" else range(1)
    for place, number in enumerate(experts):
        row = 0
        for part in entry.parts:
            expert = place if entry.placement == "expert" else None
            yield _Piece(start + part.name.format(number), range(part.rows), expert, row)
            row += part.rows


def _fill(weight: Weight, piece: _Piece, entry: Entry, source: Source, is_quantized: bool) -> None:
    """Copy a piece into its place, quantising it on the way where the source is plain and the weight is not."""
    whole = weight if piece.expert is None else of_expert(weight, piece.expert)
    name = piece.name if entry.bare else piece.name + ".weight"
    values = whole.data[piece.row :]
    if whole.scale is None:
        _copy(source, name, piece.rows, values)
        return
    block = BLOCK if weight.storage == "fp8_block" else 1
    scales = whole.scale[piece.row // block :]
    if is_quantized:
        _copy(source, name, piece.rows, values)
        scale_rows = range(piece.rows.start // block, -(-piece.rows.stop // block))
        _copy(source, piece.name + ".scale", scale_rows, scales)
    else:
        _copy(source, name, piece.rows, values, _quantizing(weight.storage, values, scales))


Put = Callable[[int, Tensor], None]


def _copy(source: Source, name: str, rows: range, target: Tensor, put: Put | None = None) -> None:
    """Copy rows of a tensor to the first rows of the target, or hand them to `put`, some at a time."""
    step = max(BLOCK, _CHUNK_BYTES // row_bytes(tuple(target.shape), torch.float32) // BLOCK * BLOCK)
    for done in range(0, len(rows), step):
        chunk = source.rows(name, rows.start + done, min(rows.start + done + step, rows.stop))
        if put is not None:
            put(done, chunk.to(target.device))
            continue
        # Packed values and exponents are bytes whatever the file calls them.
        same = chunk.view(torch.uint8) if target.dtype == torch.uint8 else chunk
        target[done : done + len(chunk)].copy_(same)


def _quantizing(storage: WeightStorage, values: Tensor, scales: Tensor) -> Put:
    block = BLOCK if storage == "fp8_block" else 1

    def put(done: int, chunk: Tensor) -> None:
        data, scale = to_storage(chunk, storage)
        values[done : done + len(data)].copy_(data)
        scales[done // block : done // block + len(scale)].copy_(scale)

    return put


def check(source: Source, model: ModelSpec) -> bool:
    """Whether a source is quantised. Raises UsageError unless it holds a model's tensors and no others."""
    names = {name for name in source.names() if not _is_skipped(name, model)}
    is_quantized = any(name.endswith(".scale") for name in names)
    expected = {t.name: t for start, entry in model_entries(model) for t in released(entry, start, is_quantized)}
    refuse(source.where, "tensors of the model are missing", [name for name in expected if name not in names])
    refuse(source.where, "tensors are not of this model", sorted(names - expected.keys()))
    found = [(tensor, *source.describe(tensor.name)) for tensor in expected.values()]
    types = [
        f"{tensor.name} (expected {' or '.join(tensor.dtypes)}, found {dtype})"
        for tensor, _, dtype in found
        if dtype not in tensor.dtypes
    ]
    refuse(source.where, "tensors have another data type", types)
    shapes = [
        f"{tensor.name} (expected {list(tensor.shape)}, found {list(shape)})"
        for tensor, shape, _ in found
        if shape != tensor.shape
    ]
    refuse(source.where, "tensors have another shape", shapes)
    return is_quantized


def _is_skipped(name: str, model: ModelSpec) -> bool:
    if name.startswith(SKIPPED_PREFIXES) or (model.draft is None and name.startswith("mtp.")):
        return True
    bias = re.fullmatch(rf"(layers|mtp)\.(0|[1-9]\d*)\.{re.escape(SKIPPED_SUFFIX)}", name)
    drafts = len(model.draft.layers) if model.draft else 0
    return bias is not None and int(bias[2]) < (len(model.layers) if bias[1] == "layers" else drafts)
