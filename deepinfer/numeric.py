"""Arrays by their type, and numbers that may be arrays: one pass of a formula evaluates thousands of shapes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Num = float | Floats
"""A number or an array of them; arrays broadcast."""


def larger(a: Num, b: Num) -> Num:
    """Elementwise maximum; plain floats stay plain floats, which are ten times as fast for single shapes."""
    return np.maximum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else max(a, b)


def smaller(a: Num, b: Num) -> Num:
    """Elementwise minimum; plain floats stay plain floats."""
    return np.minimum(a, b) if isinstance(a, np.ndarray) or isinstance(b, np.ndarray) else min(a, b)


def where_positive(condition: Num, value: Num) -> Num:
    """`value` where `condition` is positive, else 0."""
    if isinstance(condition, np.ndarray):
        return np.where(condition > 0, value, 0.0)
    return value if condition > 0 else 0.0 * value
