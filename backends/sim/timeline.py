"""One step, operator by operator: SimPy processes on stream and link resources."""

from __future__ import annotations

from collections.abc import Generator, Sequence

import simpy

from deepinfer.cost.compose import operator_seconds
from deepinfer.cost.model import CostModel
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.ops import Operator
from deepinfer.graph.shape import StepShape
from deepinfer.metrics.timeline import Span


def simulate_step(graph: ExecutionGraph, shape: StepShape, costs: CostModel) -> list[Span]:
    """Spans of every operator that does work in one step; the last one's end is the step's makespan.

    Operators queue on their stream in issue order and hold it while they wait for their inputs, as kernels behind a
    device event do.
    """
    seconds, _ = operator_seconds(graph, shape, costs)
    return run_graph(graph, [float(s) for s in seconds])


def run_graph(graph: ExecutionGraph, seconds: Sequence[float]) -> list[Span]:
    """Run the graph once, given the seconds of each of `graph.operators`."""
    env = simpy.Environment()
    seconds_of = dict(zip(graph.operators, seconds, strict=True))
    streams: dict[str, simpy.Resource] = {}
    written: dict[str, simpy.Event] = {}
    spans: list[Span] = []
    for block in graph.blocks:
        for operator in block.operators:
            stream = streams.setdefault(operator.stream, simpy.Resource(env, capacity=1))
            needs = [written[slot] for slot in operator.inputs if slot in written]
            done = env.event()
            env.process(_operator(env, operator, block.name, stream, needs, done, seconds_of[operator], spans))
            written.update(dict.fromkeys(operator.outputs, done))
    env.run()
    return spans


def _operator(
    env: simpy.Environment,
    operator: Operator,
    block: str,
    stream: simpy.Resource,
    needs: list[simpy.Event],
    done: simpy.Event,
    seconds: float,
    spans: list[Span],
) -> Generator[simpy.Event, object, None]:
    with stream.request() as turn:
        yield turn
        yield env.all_of(needs)
        start = env.now
        yield env.timeout(seconds)
        if seconds > 0:
            spans.append(Span(operator.stream, operator.name, start, seconds, block))
    done.succeed()
