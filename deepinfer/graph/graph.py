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


class Run(NamedTuple):
    """Operators (indices into `ExecutionGraph.operators`) issued one behind the other, after the ends of other runs."""

    operators: tuple[int, ...]
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
    def runs(self) -> tuple[Run, ...]:
        """The unrolled graph with operators that only ever follow one another on a stream taken together.

        It has the same makespan as `steps` and, for models of this kind, less than half as many members.
        """
        streams = [operator.stream for block in self.blocks for operator in block.operators]
        awaited = {p for i, step in enumerate(self.steps) for p in step.after if streams[p] != streams[i]}
        run_of: list[int] = []
        found: list[tuple[list[int], tuple[int, ...]]] = []
        last: dict[str, int] = {}
        for position, (operator, after) in enumerate(self.steps):
            previous = last.get(streams[position])
            if previous is not None and after == (previous,) and previous not in awaited:
                run_of.append(run_of[previous])
                found[run_of[previous]][0].append(operator)
            else:
                run_of.append(len(found))
                found.append(([operator], tuple(sorted({run_of[p] for p in after}))))
            last[streams[position]] = position
        return tuple(Run(tuple(operators), after) for operators, after in found)

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
