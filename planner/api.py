"""The planner as a library: a search and a simulation, each one call."""

from __future__ import annotations

import inspect
from dataclasses import fields
from typing import Any

from deepinfer.engine.simulate import simulate_plan
from deepinfer.errors import unknown_name
from deepinfer.layout.plan import Plan, load_plan
from deepinfer.metrics.summary import Summary
from planner.executor import LOCAL
from planner.pipeline import Progress, SearchResult, run_search
from planner.problem import Question, make_problem


def search(
    gpus: int | None = None, *, jobs: int = -1, executor: str = LOCAL, progress: Progress | None = None, **question: Any
) -> SearchResult:
    """The best plan for a workload on `gpus` accelerators, and what it was compared with.

    `question` are the fields of `planner.problem.Question`: model, hardware, isl, osl, trace, rate, slo, acceptance and
    so on. Finalists are simulated in `jobs` processes (-1: one per core) of the `executor`: "local", "ray" or "dask",
    the last two also with ":ADDRESS" of a cluster; the result does not depend on either. `progress` is called with how
    many of how many simulations are done.

    Raises UsageError for what cannot be asked, NoDataError for a number no catalog has, InfeasibleError when nothing
    fits or nothing keeps the limits; each says so in one sentence.
    """
    known = [f.name for f in fields(Question)]
    for name in question:
        if name not in known:
            raise unknown_name("keyword", name, known)
    return run_search(make_problem(Question(gpus, **question)), jobs, progress, executor)


def _signature() -> inspect.Signature:
    """The signature of `search` with every field of a question spelled out, for help() and completion."""
    own = list(inspect.signature(search).parameters.values())[:-1]
    asked = list(inspect.signature(Question).parameters.values())[1:]
    keywords = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in asked]
    return inspect.Signature([own[0], *keywords, *own[1:]], return_annotation=SearchResult)


search.__signature__ = _signature()  # type: ignore[attr-defined]


def simulate(plan: Plan | str) -> Summary:
    """Serve a plan's workload with it, on the simulator; `plan` may be a plan file's path.

    The same plan gives the same figures. Raises UsageError for a plan that does not fit together and InfeasibleError
    for one that cannot run.
    """
    return simulate_plan(load_plan(plan) if isinstance(plan, str) else plan)
