"""Where released tensors come from: safetensors files in a folder, or tensors in memory."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from deepinfer.errors import UsageError
from deepinfer.files import read_json

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
# Data types of the safetensors format that have another name in torch.
_TORCH_NAMES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
    "F8_E8M0": "float8_e8m0fnu",
    "I8": "int8",
    "U8": "uint8",
}


class Source(Protocol):
    """Named tensors whose shapes are known before they are read."""

    @property
    def where(self) -> str:
        """What messages call the source."""

    def names(self) -> Collection[str]:
        """Names of all tensors."""

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and torch's name of the data type."""

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, on the CPU or wherever the tensor is; valid until the source closes."""


@dataclass(frozen=True, eq=False)
class TensorSource:
    """Tensors in memory, by released name."""

    tensors: Mapping[str, Tensor]
    where: str = "tensors"

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self.tensors.keys()

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and torch's name of the data type."""
        tensor = self.tensors[name]
        return tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor."""
        return self.tensors[name].detach()[start:stop]


class FolderSource:
    """The safetensors of a folder, mapped into memory: only the rows that are asked for are read.

    A context manager: files are open inside. Raises UsageError when there are none, when one is truncated, corrupt or
    absent, and when index and files contradict each other.
    """

    def __init__(self, folder: Path) -> None:
        self.where = str(folder)
        self._folder = folder
        self._files: dict[str, Any] = {}
        self._stack = ExitStack()

    def __enter__(self) -> FolderSource:
        try:
            listed = self._listed()
            for file in dict.fromkeys(listed.values()) or [SINGLE]:
                self._open(self._folder / file)
            absent = sorted(listed.keys() - self._files.keys())
            refuse(self.where, "tensors of the index are not in its files", absent)
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(self, *_: object) -> None:
        self._files.clear()
        self._stack.close()

    def names(self) -> Collection[str]:
        """Names of all tensors."""
        return self._files.keys()

    def describe(self, name: str) -> tuple[tuple[int, ...], str]:
        """Shape and torch's name of the data type."""
        view = self._files[name].get_slice(name)
        return tuple(view.get_shape()), _TORCH_NAMES.get(view.get_dtype(), view.get_dtype())

    def rows(self, name: str, start: int, stop: int) -> Tensor:
        """Rows [start, stop) of a tensor, on the CPU."""
        rows: Tensor = self._files[name].get_slice(name)[start:stop]
        return rows

    def _listed(self) -> dict[str, str]:
        """The file of every tensor by the index; empty for a single file."""
        index = self._folder / INDEX
        if not index.is_file():
            if not (self._folder / SINGLE).is_file():
                raise UsageError(f"folder {self._folder} holds no safetensors: neither {INDEX} nor {SINGLE}")
            return {}
        listed = read_json(index, "index of weights").get("weight_map")
        if not isinstance(listed, dict) or not listed or not all(_is_file_name(file) for file in listed.values()):
            raise UsageError(f"index of weights {index} has no weight_map of tensors to files in its folder")
        return listed

    def _open(self, path: Path) -> None:
        try:
            file = self._stack.enter_context(safe_open(path, "pt"))
            names = list(file.keys())
        except SafetensorError as error:
            raise UsageError(f"{path} is truncated or no safetensors file: {error}") from None
        except OSError as error:
            raise UsageError(f"cannot read weights {path}: {error.strerror or error}") from None
        refuse(str(path), "tensors are also in another file", sorted(self._files.keys() & set(names)))
        self._files.update(dict.fromkeys(names, file))


def _is_file_name(value: object) -> bool:
    return isinstance(value, str) and bool(value) and Path(value).name == value


def refuse(where: str, what: str, faults: Sequence[str], shown: int = 3) -> None:
    """Raise UsageError if there are faults: one sentence with their number and the first few of them."""
    if not faults:
        return
    more = f" and {len(faults) - shown} more" if len(faults) > shown else ""
    raise UsageError(f"{where}: {len(faults)} {what}: {', '.join(faults[:shown])}{more}")


def row_bytes(shape: tuple[int, ...], dtype: torch.dtype) -> int:
    """Bytes of one row of a tensor."""
    return max(1, torch.Size(shape[1:]).numel() * dtype.itemsize)
