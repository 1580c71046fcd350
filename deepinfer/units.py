"""Formatting of SI values for people. Inside the code everything is in seconds, bytes, FLOP and tokens."""

from __future__ import annotations

import math

_DECIMAL = ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k"), (1.0, ""))


def format_si(value: float, unit: str, digits: int = 3) -> str:
    """`format_si(1.86e11, "B")` is "186 GB"; decimal prefixes, `digits` significant digits."""
    if not math.isfinite(value):
        return f"{value} {unit}".strip()
    scale, prefix = next(((s, p) for s, p in _DECIMAL if abs(value) >= s), (1.0, ""))
    number = f"{value / scale:.{digits}g}"
    if "e" in number:
        number = f"{value / scale:.0f}"
    return f"{number} {prefix}{unit}".strip()


def format_bytes(num_bytes: float) -> str:
    """Bytes with a decimal prefix: "186 GB"."""
    return format_si(num_bytes, "B")


def format_seconds(seconds: float) -> str:
    """Seconds in the unit a reader expects: "12.3 ms", "1.42 s", "85 µs"."""
    if not math.isfinite(seconds):
        return "∞"
    magnitude = abs(seconds)
    if magnitude >= 1 or magnitude == 0:
        return f"{seconds:.3g} s"
    if magnitude >= 1e-3:
        return f"{seconds * 1e3:.3g} ms"
    return f"{seconds * 1e6:.3g} µs"
