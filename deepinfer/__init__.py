"""Engine of large mixture-of-experts models: plans are simulated or run. The names below load what they need when used.

from deepinfer import LLM, SamplingParams
outputs = LLM("path/to/DeepSeek-V4.1-Flash", expert_parallel_size=8).generate("Hello", SamplingParams(max_tokens=32))
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.lazy import lazy_names

if TYPE_CHECKING:
    from deepinfer.llm import LLM, RequestOutput
    from deepinfer.sampling.params import SamplingParams

__all__ = ["LLM", "RequestOutput", "SamplingParams"]

_HOME = {
    "LLM": "deepinfer.llm",
    "RequestOutput": "deepinfer.llm",
    "SamplingParams": "deepinfer.sampling.params",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
