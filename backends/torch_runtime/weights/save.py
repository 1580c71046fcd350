"""Writes whole weights as a checkpoint with the released names."""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from backends.torch_runtime.formats import BLOCK, Weight
from backends.torch_runtime.weights.rank import WHOLE, ModelWeights, local_shape
from backends.torch_runtime.weights.schema import Entry, all_layers, ends, layer_entries, prefix, supported
from backends.torch_runtime.weights.source import INDEX
from deepinfer.errors import UsageError
from deepinfer.files import write_file
from deepinfer.model.spec import ModelSpec

SHARD_BYTES = 5 << 30


def released_tensors(model: ModelSpec, weights: ModelWeights) -> Iterator[tuple[str, Tensor]]:
    """Whole weights as released: fused ones apart, packed values as int8, scales as E8M0. Views where it can be.

    Raises UsageError when a weight is of another shape than the whole model's: a rank's share is no checkpoint.
    """
    for entry, tensor in zip(ends(supported(model)), (weights.embed, weights.norm, weights.head), strict=True):
        yield from _apart(entry, "", Weight(tensor))
    for layer in all_layers(model):
        for entry in layer_entries(model, layer):
            yield from _apart(entry, prefix(model, layer), weights.layers[layer.index][entry.key])


def save_checkpoint(
    folder: Path, model: ModelSpec, weights: ModelWeights, config: dict[str, Any], shard_bytes: int = SHARD_BYTES
) -> None:
    """Write shards of about `shard_bytes`, their index, and last `config.json`.

    Each file is there whole or not at all. Raises UsageError when one cannot be written or the weights are not whole.
    """
    shards: list[dict[str, Tensor]] = [{}]
    filled = 0
    for name, tensor in released_tensors(model, weights):
        if filled and filled + tensor.nbytes > shard_bytes:
            shards.append({})
            filled = 0
        shards[-1][name] = tensor
        filled += tensor.nbytes
    files = [f"model-{i:05d}-of-{len(shards):05d}.safetensors" for i in range(1, len(shards) + 1)]
    for file, shard in zip(files, shards, strict=True):
        _write_shard(folder / file, shard)
    index = {
        "metadata": {"total_size": sum(t.nbytes for shard in shards for t in shard.values())},
        "weight_map": {name: file for file, shard in zip(files, shards, strict=True) for name in shard},
    }
    write_file(folder / INDEX, json.dumps(index, indent=1).encode())
    write_file(folder / "config.json", json.dumps(config, indent=2).encode())


def _apart(entry: Entry, start: str, weight: Weight) -> Iterator[tuple[str, Tensor]]:
    packed = weight.storage == "mxfp4"
    found, whole = list(weight.data.shape), list(local_shape(entry, WHOLE))
    if packed:
        found[-1] *= 2
    if found != whole:
        raise UsageError(f"weight {start}{entry.key} is {found} and not the whole {whole}")
    for number in range(max(1, entry.num_experts)):
        expert = (number,) if entry.num_experts else ()
        row = 0
        for part in entry.parts:
            name = start + part.name.format(number)
            values = weight.data[expert][row : row + part.rows]
            yield name if entry.bare else name + ".weight", values.view(torch.int8) if packed else values
            if weight.scale is not None:
                block = BLOCK if weight.storage == "fp8_block" else 1
                scales = weight.scale[expert][row // block : -(-(row + part.rows) // block)]
                yield name + ".scale", scales.view(torch.float8_e8m0fnu)
            row += part.rows


def _write_shard(path: Path, tensors: dict[str, Tensor]) -> None:
    # Parts of one fused weight share its memory, which the format refuses: every tensor is copied, a shard at a time.
    copies = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in tensors.items()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        os.close(handle)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    try:
        save_file(copies, temporary, {"format": "pt"})
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except (OSError, SafetensorError) as error:
        raise UsageError(f"cannot write {path}: {error}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)
