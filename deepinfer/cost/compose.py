"""The closed form of a step: from operator costs to the step's time, its critical path and its source."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache, reduce

import numpy as np

from deepinfer.cost.model import Cost, CostModel, Source
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import StepShape
from deepinfer.numeric import Num


@dataclass(frozen=True)
class StepCost:
    """Time of one step (a number, or an array over shapes) and the weakest source among its operators."""

    seconds: Num
    source: Source


@dataclass(frozen=True)
class PathItem:
    """Seconds that the operators of one name contribute to the critical path of a step."""

    operator: str
    stream: str
    seconds: float


def operator_seconds(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> tuple[list[Num], Source]:
    """Seconds of each of `graph.operators`, and the weakest source of those that do any work."""
    known: dict[tuple[OpKind, Callable[[StepShape], Work]], Cost] = {}  # operators may share their work
    found: list[Cost] = []
    for operator in graph.operators:
        key = (operator.kind, operator.work)
        if key not in known:
            known[key] = costs.cost(operator, operator.work(shape))
        found.append(known[key])
    working = [c.source for c in found if (c.seconds.any() if isinstance(c.seconds, np.ndarray) else c.seconds)]
    return [c.seconds for c in found], min(working, default=Source.MEASURED)


def step_cost(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> StepCost:
    """The makespan of a step: longest path over data dependencies and in-order streams.

    Exact for streams that execute in issue order; `backends.sim` reproduces it event by event.
    """
    seconds, source = operator_seconds(graph, shape, costs)
    return StepCost(makespan(graph, seconds), source)


def makespan(graph: ExecutionGraph, seconds: Sequence[Num]) -> Num:
    """When the last operator ends, given the seconds of each of `graph.operators`."""
    latest = _maximum(seconds)
    lengths: dict[tuple[int, ...], Num] = {}
    ends: list[Num] = []
    last: set[int] = set()  # runs that no other waits for
    for position, (operators, after) in enumerate(graph.runs):
        length = lengths.get(operators)
        if length is None:
            length = lengths[operators] = _total(operators, seconds)
        ends.append(_latest(latest, [ends[i] for i in after]) + length)
        last.difference_update(after)
        last.add(position)
    return _latest(latest, [ends[i] for i in last])


def _latest(latest: Callable[[Num, Num], Num], ends: Sequence[Num]) -> Num:
    return reduce(latest, ends) if ends else 0.0


def _total(operators: tuple[int, ...], seconds: Sequence[Num]) -> Num:
    """Sum over operators, of which most occur many times; arrays that broadcast are added up shape by shape first."""
    totals: dict[tuple[int, ...], Num] = {}
    for operator, times in _times(operators):
        product = seconds[operator] * times
        shape = product.shape if isinstance(product, np.ndarray) else ()
        totals[shape] = totals[shape] + product if shape in totals else product
    return sum((totals[shape] for shape in sorted(totals, key=math.prod)), 0.0)


@lru_cache(maxsize=4096)
def _times(operators: tuple[int, ...]) -> tuple[tuple[int, float], ...]:
    return tuple((operator, float(times)) for operator, times in Counter(operators).items())


def critical_path(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> list[PathItem]:
    """The operators that a step's time is made of, longest first; their seconds add up to the makespan.

    `shape` must be one step, not an array of them.
    """
    totals: dict[tuple[str, str], float] = {}
    for operator, seconds in zip(graph.operators, path_seconds(graph, shape, costs), strict=True):
        key = (operator.name, operator.stream)
        totals[key] = totals.get(key, 0.0) + seconds
    items = [PathItem(name, stream, spent) for (name, stream), spent in totals.items()]
    return sorted((i for i in items if i.seconds > 0), key=lambda i: -i.seconds)


def path_seconds(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> list[float]:
    """Seconds that each of `graph.operators` contributes to the critical path of one step; they add up to it."""
    seconds, _ = operator_seconds(graph, shape, costs)
    ends = [float(end) for end in finish_times(graph, seconds)]
    spent = [0.0] * len(graph.operators)
    position = max(range(len(ends)), key=lambda i: ends[i], default=None)
    while position is not None:
        step = graph.steps[position]
        spent[step.operator] += float(seconds[step.operator])
        position = max(step.after, key=lambda i: ends[i], default=None)
    return spent


def finish_times(graph: ExecutionGraph, seconds: Sequence[Num]) -> list[Num]:
    """When each of `graph.steps` ends, given the seconds of each of `graph.operators`."""
    latest = _maximum(seconds)
    ends: list[Num] = []
    for index, after in graph.steps:
        start: Num = 0.0
        if after:
            start = ends[after[0]]
            for i in after[1:]:
                start = latest(start, ends[i])
        ends.append(start + seconds[index])
    return ends


def _maximum(seconds: Sequence[Num]) -> Callable[[Num, Num], Num]:
    """For numbers the builtin, which is several times as fast as NumPy's."""
    return np.maximum if any(isinstance(s, np.ndarray) for s in seconds) else max
