"""Walks an execution graph: operators in issue order, tensors in named slots, streams by the graph's edges."""

from __future__ import annotations

from collections import Counter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.torch_runtime.context import Call, RankContext, StepContext
from backends.torch_runtime.operators import OPERATORS, OperatorCode
from deepinfer.errors import UsageError
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.ops import Operator
from deepinfer.model.spec import LayerSpec


class _Issue(NamedTuple):
    """One operator of the unrolled graph: its code, its layer, how many like it came before outside layers, the last
    issues of other streams that it waits for, and whether an operator on another stream waits for it.
    """

    operator: Operator
    code: OperatorCode
    layer: LayerSpec | None
    repeat: int
    waits: tuple[int, ...]
    awaited: bool


class Executor:
    """Runs the steps of one rank.

    On a CUDA device operators of the graph's `comm` stream run on a stream of their own, joined by events where the
    graph has an edge between streams; elsewhere in issue order. Raises UsageError for a graph with operators that
    have no code: those of other model families, tensor parallelism, fused experts or two-batch overlap.
    """

    def __init__(self, rank: RankContext, graph: ExecutionGraph) -> None:
        self._rank = rank
        self._issues = _issues(rank, graph)
        device = rank.state.device
        self._side = torch.cuda.Stream(device) if device.type == "cuda" and rank.layout.num_ranks > 1 else None

    @torch.inference_mode()
    def run(self, step: StepContext) -> None:
        """Compute a step; what it produced is in `step.outputs`."""
        slots: dict[str, Any] = {}
        events: dict[int, torch.cuda.Event] = {}
        for position, issue in enumerate(self._issues):
            if self._side is None:
                _compute(step, issue, slots)
            else:
                self._compute_on_streams(step, position, issue, slots, events)
        if self._side is not None:
            torch.cuda.current_stream().wait_stream(self._side)

    def _compute_on_streams(
        self,
        step: StepContext,
        position: int,
        issue: _Issue,
        slots: dict[str, Any],
        events: dict[int, torch.cuda.Event],
    ) -> None:
        assert self._side is not None
        main = torch.cuda.current_stream()
        on_side = issue.operator.stream == "comm"
        stream = self._side if on_side else main
        if position == 0:
            self._side.wait_stream(main)
        with torch.cuda.stream(stream):
            for other in issue.waits:
                stream.wait_event(events[other])
            inputs = _compute(step, issue, slots)
            if on_side:
                _keep_for((*inputs, *(slots[name] for name in issue.operator.outputs)), stream, main)
            if issue.awaited:
                events[position] = torch.cuda.Event()
                events[position].record(stream)


def _compute(step: StepContext, issue: _Issue, slots: dict[str, Any]) -> list[Any]:
    """Run one operator; returns its inputs, some of which its outputs may have replaced in the slots."""
    call = Call(step, issue.layer, issue.repeat)
    inputs = [slots.get(name) for name in issue.operator.inputs]
    found = issue.code(call, *inputs)
    outputs = issue.operator.outputs
    if len(outputs) == 1:
        slots[outputs[0]] = found
    else:
        slots.update(zip(outputs, found, strict=True))
    return inputs


def _keep_for(values: tuple[Any, ...], side: torch.cuda.Stream, main: torch.cuda.Stream) -> None:
    """Tensors that cross streams stay allocated until both have passed; in a capture, until it ends."""
    for tensor in (t for value in values for t in _tensors(value)):
        tensor.record_stream(side)
        tensor.record_stream(main)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value] if value.is_cuda else []
    return [t for part in value for t in _tensors(part)] if isinstance(value, tuple) else []


def _issues(rank: RankContext, graph: ExecutionGraph) -> tuple[_Issue, ...]:
    unrolled = [(block, op) for block in graph.blocks for op in block.operators]
    missing = sorted({op.name for _, op in unrolled} - OPERATORS.keys())
    if missing:
        raise UsageError(f"{graph.name}: devices have no code for its operators {', '.join(missing)}")
    streams = [op.stream for _, op in unrolled]
    crossing = [
        tuple(after for after in step.after if streams[after] != streams[position])
        for position, step in enumerate(graph.steps)
    ]
    awaited = {after for waits in crossing for after in waits}
    issues, layer, repeats = [], -1, Counter[str]()
    position = 0
    for block in graph.blocks:
        layer += block.is_layer
        for op in block.operators:
            spec = rank.layer(layer) if block.is_layer else None
            issues.append(
                _Issue(op, OPERATORS[op.name], spec, repeats[op.name], crossing[position], position in awaited)
            )
            position += 1
            if not block.is_layer:
                repeats[op.name] += 1
    return tuple(issues)
