"""The closed form of a step: from operator costs to the step's time, its critical path and its source."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np

from deepinfer.cost.model import CostModel, Source
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.ops import Operator
from deepinfer.graph.shape import Num, StepShape


@dataclass(frozen=True)
class StepCost:
    """Time of one step (a number, or an array over shapes) and the weakest source among its operators."""

    seconds: Num
    source: Source


@dataclass(frozen=True)
class PathItem:
    """Seconds that one operator name contributes to the critical path of a step, and how often it runs there."""

    operator: str
    stream: str
    seconds: float
    count: int


def operator_seconds(
    graph: ExecutionGraph, shape: StepShape, costs: CostModel
) -> tuple[dict[Operator, Num], Source]:
    """Seconds of every distinct operator, and the weakest source of those that do any work."""
    seconds: dict[Operator, Num] = {}
    weakest = Source.MEASURED
    for block in graph.distinct_blocks:
        for operator in block.operators:
            cost = costs.cost(operator, operator.work(shape))
            seconds[operator] = cost.seconds
            if np.any(cost.seconds):
                weakest = min(weakest, cost.source)
    return seconds, weakest


def step_cost(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> StepCost:
    """The makespan of a step: longest path over data dependencies and in-order streams.

    Exact for streams that execute in issue order; `backends.sim` reproduces it event by event.
    """
    seconds, source = operator_seconds(graph, shape, costs)
    return StepCost(_finish_times(graph, seconds)[1], source)


def critical_path(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> list[PathItem]:
    """The operators that a step's time is made of, longest first; their seconds add up to the makespan.

    `shape` must be one step, not an array of them.
    """
    seconds, _ = operator_seconds(graph, shape, costs)
    ends, _ = _finish_times(graph, seconds)
    totals: dict[tuple[str, str], tuple[float, int]] = {}
    position: int | None = int(np.argmax(ends)) if ends else None
    while position is not None:
        step = graph.steps[position]
        key = (step.operator.name, step.operator.stream)
        spent, count = totals.get(key, (0.0, 0))
        totals[key] = (spent + float(seconds[step.operator]), count + 1)
        position = max(step.after, key=lambda i: ends[i], default=None)
    items = [PathItem(name, stream, spent, count) for (name, stream), (spent, count) in totals.items()]
    return sorted((i for i in items if i.seconds > 0), key=lambda i: -i.seconds)


def _finish_times(graph: ExecutionGraph, seconds: dict[Operator, Num]) -> tuple[list[Num], Num]:
    """When each step of the unrolled graph ends, and when the last one does."""
    larger = np.maximum if any(isinstance(s, np.ndarray) for s in seconds.values()) else max
    ends: list[Num] = []
    for step in graph.steps:
        start: Num = 0.0
        for i in step.after:
            start = larger(start, ends[i])
        ends.append(start + seconds[step.operator])
    return ends, functools.reduce(larger, ends, 0.0)
