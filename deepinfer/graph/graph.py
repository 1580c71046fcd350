"""The execution graph: operators in issue order, with dependencies through named slots.

Built once per (model, layout, phase, features); it does not depend on the batch size. Layers that are alike share
one block, so that an operator's work is computed once for all of them.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

from deepinfer.graph.ops import Operator


@dataclass(frozen=True)
class Block:
    """Operators of one layer (or of the head, the draft, ...) in issue order."""

    name: str
    operators: tuple[Operator, ...]


@dataclass(frozen=True)
class Step:
    """One issued operator of the unrolled graph: which operator, in which block instance, after which others.

    `after` are positions in the unrolled order: the last writer of each input, and the previous operator on the
    same stream (streams execute in issue order).
    """

    position: int
    block: str
    operator: Operator
    after: tuple[int, ...]


@dataclass(frozen=True)
class ExecutionGraph:
    """Blocks in execution order; the same `Block` object may appear many times.

    An operator starts when its stream is free and the last writers of its inputs have finished.
    """

    name: str
    blocks: tuple[Block, ...]

    @cached_property
    def distinct_blocks(self) -> tuple[Block, ...]:
        """Every block once, in order of first appearance."""
        return tuple(dict.fromkeys(self.blocks))

    @cached_property
    def steps(self) -> tuple[Step, ...]:
        """The unrolled graph in issue order, dependencies resolved."""
        return tuple(self._unroll())

    def _unroll(self) -> Iterator[Step]:
        writer: dict[str, int] = {}
        last_on_stream: dict[str, int] = {}
        position = 0
        for block in self.blocks:
            for operator in block.operators:
                after = {writer[name] for name in operator.inputs if name in writer}
                if operator.stream in last_on_stream:
                    after.add(last_on_stream[operator.stream])
                yield Step(position, block.name, operator, tuple(sorted(after)))
                for name in operator.outputs:
                    writer[name] = position
                last_on_stream[operator.stream] = position
                position += 1
