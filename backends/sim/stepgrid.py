"""A function of several quantities, tabulated where it is asked for and interpolated between the points of a grid."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from deepinfer.numeric import Floats


class Axis(NamedTuple):
    """Grid points along one quantity: 0, `floor`, then `per_octave` per doubling; blocks of `cells` are one pass.

    `bounded` axes have the points 0 and `floor` only.
    """

    floor: float
    per_octave: int
    cells: int
    bounded: bool = False

    def nodes(self) -> list[float]:
        """The grid points, up to more than anything counts."""
        octaves = 0 if self.bounded else _OCTAVES
        return [0.0, *(self.floor * 2.0 ** (i / self.per_octave) for i in range(octaves * self.per_octave + 1))]


_OCTAVES = 48


class StepGrid:
    """Multilinear interpolation of `evaluate`, which takes open grids (one array per axis, as of `np.ix_`).

    Exact at grid points and wherever the function is affine, or a product of affine functions, of the quantities.
    """

    def __init__(self, axes: Sequence[Axis], evaluate: Callable[..., Floats]) -> None:
        self._axes, self._evaluate = tuple(axes), evaluate
        self._nodes = [(nodes := axis.nodes(), len(nodes) - 1) for axis in axes]
        self._blocks: dict[tuple[int, ...], Floats] = {}
        self._cells: dict[tuple[int, ...], Floats] = {}

    def __call__(self, *values: float) -> float:
        """The function at one point."""
        cell, shares = [], []
        for (nodes, last), value in zip(self._nodes, values, strict=True):
            index = bisect_right(nodes, value, 0, last) - 1
            low = nodes[index]
            cell.append(index)
            shares.append((value - low) / (nodes[index + 1] - low))
        key = tuple(cell)
        corners = self._cells.get(key)
        if corners is None:
            corners = self._cells[key] = self._corners(key)
        return _interpolated(corners, shares)

    def along(self, axis: int, low: float, high: float) -> Floats:
        """Grid points of an axis between which all of [low, high] lies."""
        nodes, last = self._nodes[axis]
        return np.asarray(nodes[bisect_right(nodes, low, 0, last) - 1 : bisect_right(nodes, high, 0, last) + 1])

    def _corners(self, cell: tuple[int, ...]) -> Floats:
        key = tuple(index // axis.cells for axis, index in zip(self._axes, cell, strict=True))
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = self._tabulate(key)
        at = [index % axis.cells for axis, index in zip(self._axes, cell, strict=True)]
        return block[tuple(slice(i, i + 2) for i in at)].ravel()

    def _tabulate(self, key: tuple[int, ...]) -> Floats:
        points = [
            np.asarray(nodes[block * axis.cells : (block + 1) * axis.cells + 1])
            for axis, (nodes, _), block in zip(self._axes, self._nodes, key, strict=True)
        ]
        shape = tuple(len(p) for p in points)
        return np.broadcast_to(self._evaluate(*np.ix_(*points)), shape)


def _interpolated(corners: Floats, shares: Sequence[float]) -> float:
    """The value inside a cell, axis by axis: as arrays while those are long, then as numbers."""
    half = len(corners)
    for number, share in enumerate(shares):
        if half <= _SHORT:
            return _interpolated_few(corners.tolist(), shares[number:])
        half //= 2
        if share == 0.0:
            corners = corners[:half]
        elif share == 1.0:
            corners = corners[half:]
        else:
            low = corners[:half]
            corners = low + share * (corners[half:] - low)
    return float(corners[0])


def _interpolated_few(corners: list[float], shares: Sequence[float]) -> float:
    for share in shares:
        half = len(corners) // 2
        corners = [a + share * (b - a) for a, b in zip(corners[:half], corners[half:], strict=True)]
    return corners[0]


_SHORT = 32
"""Corners up to which a list is faster."""
