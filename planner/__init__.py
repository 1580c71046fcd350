"""Plans for large mixture-of-experts models. The names below are the library's; they load what they need when used.

from planner import search
result = search(gpus=64, isl=4000, osl=1000)
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from deepinfer.lazy import lazy_names

if TYPE_CHECKING:
    from deepinfer.layout.parallel import ParallelLayout
    from deepinfer.layout.plan import Plan, Slo, load_plan
    from deepinfer.metrics.summary import Summary
    from deepinfer.scheduler.speculation import Acceptance
    from planner.api import search, simulate
    from planner.curves import DecodeCurve, PrefillCurve, decode_curve, prefill_curve
    from planner.pipeline import SearchResult

__all__ = [
    "Acceptance",
    "DecodeCurve",
    "ParallelLayout",
    "Plan",
    "PrefillCurve",
    "SearchResult",
    "Slo",
    "Summary",
    "decode_curve",
    "load_plan",
    "prefill_curve",
    "search",
    "simulate",
]

_HOME = {
    "Acceptance": "deepinfer.scheduler.speculation",
    "DecodeCurve": "planner.curves",
    "ParallelLayout": "deepinfer.layout.parallel",
    "Plan": "deepinfer.layout.plan",
    "PrefillCurve": "planner.curves",
    "SearchResult": "planner.pipeline",
    "Slo": "deepinfer.layout.plan",
    "Summary": "deepinfer.metrics.summary",
    "decode_curve": "planner.curves",
    "load_plan": "deepinfer.layout.plan",
    "prefill_curve": "planner.curves",
    "search": "planner.api",
    "simulate": "planner.api",
}

__getattr__, __dir__ = lazy_names(__name__, _HOME)
