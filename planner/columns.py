"""Points of a search as parallel arrays: subsets, several as one, and those that no other beats."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields
from typing import Any, Self

import numpy as np
import numpy.typing as npt

from deepinfer.numeric import Floats, Ints


@dataclass(frozen=True)
class Columns:
    """A base for dataclasses whose fields are arrays of equal length, `Ints` or `Floats` by their annotation."""

    def __len__(self) -> int:
        return len(getattr(self, fields(self)[0].name))

    def take(self, index: Ints | npt.NDArray[np.bool_]) -> Self:
        """A subset of the points."""
        return type(self)(*(getattr(self, f.name)[index] for f in fields(self)))

    @classmethod
    def concatenate(cls, parts: Iterable[Self]) -> Self:
        """Several as one; none make no points."""
        empty: list[Any] = [np.zeros(0, dtype=np.int64 if f.type == "Ints" else np.float64) for f in fields(cls)]
        whole = [cls(*empty), *parts]
        return cls(*(np.concatenate([getattr(p, f.name) for p in whole]) for f in fields(cls)))


def pareto(x: Floats, y: Floats) -> Ints:
    """Indices of points that no other beats in both coordinates (larger is better), by increasing x."""
    order = np.lexsort((-y, -x))
    best = np.maximum.accumulate(y[order])
    first = np.concatenate(([True], y[order][1:] > best[:-1]))
    return order[first][::-1]
