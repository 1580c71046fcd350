"""A function of several quantities, tabulated where it is asked for and interpolated between the points of a grid."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]


class Axis(NamedTuple):
    """Grid points along one quantity: 0, `floor`, then `per_octave` per doubling; blocks of `cells` are one pass.

    `bounded` axes have the points 0 and `floor` only.
    """

    floor: float
    per_octave: int
    cells: int
    bounded: bool = False

    def node(self, index: int) -> float:
        """The grid point of a number from 0 on."""
        return self.floor * 2.0 ** ((index - 1) / self.per_octave) if index else 0.0

    def cell(self, value: float) -> int:
        """The number of the last grid point that is not beyond the value."""
        if value < self.floor or self.bounded:
            return 0
        return 1 + int(self.per_octave * math.log2(value / self.floor) + 1e-9)


class StepGrid:
    """Multilinear interpolation of `evaluate`, which takes open grids (one array per axis, as of `np.ix_`).

    Exact at grid points and wherever the function is affine, or a product of affine functions, of the quantities.
    """

    def __init__(self, axes: Sequence[Axis], evaluate: Callable[..., Floats]) -> None:
        self._axes, self._evaluate = tuple(axes), evaluate
        self._blocks: dict[tuple[int, ...], Floats] = {}
        self._cells: dict[tuple[int, ...], list[float]] = {}

    def __call__(self, *values: float) -> float:
        """The function at one point."""
        cell = tuple(axis.cell(value) for axis, value in zip(self._axes, values, strict=True))
        corners = self._cells.get(cell)
        if corners is None:
            corners = self._cells[cell] = self._corners(cell)
        for axis, value, index in zip(self._axes, values, cell, strict=True):
            half = len(corners) // 2
            low = axis.node(index)
            if value == low:
                corners = corners[:half]
                continue
            share = (value - low) / (axis.node(index + 1) - low)
            corners = [a + share * (b - a) for a, b in zip(corners[:half], corners[half:], strict=True)]
        return corners[0]

    def along(self, axis: int, low: float, high: float) -> Floats:
        """Grid points of an axis between which all of [low, high] lies."""
        a = self._axes[axis]
        return np.asarray([a.node(i) for i in range(a.cell(low), a.cell(high) + 2)])

    def _corners(self, cell: tuple[int, ...]) -> list[float]:
        key = tuple(index // axis.cells for axis, index in zip(self._axes, cell, strict=True))
        block = self._blocks.get(key)
        if block is None:
            block = self._blocks[key] = self._tabulate(key)
        at = [index % axis.cells for axis, index in zip(self._axes, cell, strict=True)]
        return [float(block[corner]) for corner in itertools.product(*((i, i + 1) for i in at))]

    def _tabulate(self, key: tuple[int, ...]) -> Floats:
        points = [
            np.asarray([axis.node(block * axis.cells + i) for i in range(axis.cells + 1)])
            for axis, block in zip(self._axes, key, strict=True)
        ]
        shape = tuple(len(p) for p in points)
        return np.broadcast_to(self._evaluate(*np.ix_(*points)), shape)
