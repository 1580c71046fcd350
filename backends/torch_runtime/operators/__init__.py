"""What each operator of DeepSeek-V4.1's graph does with its slots, in terms of the backend's kernels."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from backends.torch_runtime.operators import attention, experts, streams, tokens

OperatorCode = Callable[..., Any]
"""Takes a `Call` and the operator's input slots in order; returns its output slots, in a tuple if several."""

OPERATORS: dict[str, OperatorCode] = {
    **streams.OPERATORS,
    **attention.OPERATORS,
    **experts.OPERATORS,
    **tokens.OPERATORS,
}
"""By operator name. An operator that does nothing on devices, because its kernel is part of another's, returns its
input slots.
"""
