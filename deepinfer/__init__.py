"""Engine of large mixture-of-experts models: plans are simulated or run. The names below load what they need when used.

from deepinfer import LLM, SamplingParams
outputs = LLM("path/to/DeepSeek-V4.1-Flash", expert_parallel_size=8).generate("Hello", SamplingParams(max_tokens=32))
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from deepinfer.llm import LLM, RequestOutput
    from deepinfer.sampling.params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "deepinfer.llm",
    "RequestOutput": "deepinfer.llm",
    "SamplingParams": "deepinfer.sampling.params",
}


def __getattr__(name: str) -> Any:
    """A public name, loaded when first used: importing `deepinfer` loads nothing."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOME[name]), name)
