"""The execution graph: operators in issue order, with dependencies through named slots.

Built once per (model, layout, phase, features); it does not depend on the batch size. Layers that are alike share
one block, so that an operator's work is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from deepinfer.graph.ops import Operator


@dataclass(frozen=True, eq=False)
class Block:
    """Operators of one layer (or of the head, the draft, ...) in issue order; compared by identity."""

    name: str
    operators: tuple[Operator, ...]


class Step(NamedTuple):
    """One issued operator of the unrolled graph: which of `ExecutionGraph.operators`, and after which steps.

    `after` are positions in the unrolled order, at most one per stream: of the previous operator on the same stream and
    the last writers of the inputs, the latest on each stream. Streams execute in issue order, so earlier ones are over.
    """

    operator: int
    after: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class ExecutionGraph:
    """Blocks in execution order; the same `Block` object may appear many times.

    An operator starts when its stream is free and the last writers of its inputs have finished.
    """

    name: str
    blocks: tuple[Block, ...]

    @cached_property
    def operators(self) -> tuple[Operator, ...]:
        """Every operator once: one that appears in many blocks, or in one that repeats, has one cost for all."""
        return tuple(dict.fromkeys(op for block in dict.fromkeys(self.blocks) for op in block.operators))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The unrolled graph in issue order, dependencies resolved."""
        return tuple(self._unroll())

    @cached_property
    def last_steps(self) -> tuple[int, ...]:
        """Positions of the last step on each stream: the step is over when they are."""
        streams = [operator.stream for block in self.blocks for operator in block.operators]
        return tuple({stream: position for position, stream in enumerate(streams)}.values())

    def _unroll(self) -> Iterator[Step]:
        index = {operator: i for i, operator in enumerate(self.operators)}
        writer: dict[str, tuple[str, int]] = {}
        last_on_stream: dict[str, int] = {}
        operators = (operator for block in self.blocks for operator in block.operators)
        for position, operator in enumerate(operators):
            latest: dict[str, int] = {s: p for s, p in last_on_stream.items() if s == operator.stream}
            for stream, written in (writer[name] for name in operator.inputs if name in writer):
                latest[stream] = max(latest.get(stream, -1), written)
            yield Step(index[operator], tuple(sorted(latest.values())))
            writer.update(dict.fromkeys(operator.outputs, (operator.stream, position)))
            last_on_stream[operator.stream] = position
