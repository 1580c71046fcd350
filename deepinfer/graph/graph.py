"""The execution graph: operators in issue order, with dependencies through named slots.

Built once per (model, layout, phase, features); it does not depend on the batch size. Layers that are alike share
one block, so that an operator's work is computed once for all of them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import NamedTuple

from deepinfer.graph.ops import Operator


@dataclass(frozen=True, eq=False)
class Block:
    """Operators of one layer (or of the head, the draft, ...) in issue order; compared by identity.

    Those with `is_layer` stand for the model's layers in order, the draft module's behind the others.
    """

    name: str
    operators: tuple[Operator, ...]
    is_layer: bool = False


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
        return _unrolled(self._wiring)

    @cached_property
    def runs(self) -> tuple[Run, ...]:
        """The unrolled graph with operators that only ever follow one another on a stream taken together.

        It has the same makespan as `steps` and, for models of this kind, less than half as many members.
        """
        return _runs(self._wiring)

    @cached_property
    def _wiring(self) -> _Wiring:
        index = {operator: i for i, operator in enumerate(self.operators)}
        blocks = {block: i for i, block in enumerate(dict.fromkeys(self.blocks))}
        wires = tuple(
            tuple(_Wire(index[op], op.stream, op.inputs, op.outputs) for op in block.operators) for block in blocks
        )
        return _Wiring(wires, tuple(blocks[block] for block in self.blocks))


class _Wire(NamedTuple):
    """An operator by its number, as far as the order of execution depends on it."""

    operator: int
    stream: str
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]


class _Wiring(NamedTuple):
    """A graph without its work: many layouts of a model have the same, which is unrolled once."""

    blocks: tuple[tuple[_Wire, ...], ...]
    order: tuple[int, ...]

    @property
    def streams(self) -> list[str]:
        """Stream of each operator in issue order."""
        return [wire.stream for i in self.order for wire in self.blocks[i]]


@lru_cache(maxsize=128)
def _unrolled(wiring: _Wiring) -> tuple[Step, ...]:
    writer: dict[str, tuple[str, int]] = {}
    last_on_stream: dict[str, int] = {}
    steps: list[Step] = []
    for position, wire in enumerate(wire for i in wiring.order for wire in wiring.blocks[i]):
        latest: dict[str, int] = {s: p for s, p in last_on_stream.items() if s == wire.stream}
        for stream, written in (writer[name] for name in wire.inputs if name in writer):
            latest[stream] = max(latest.get(stream, -1), written)
        steps.append(Step(wire.operator, tuple(sorted(latest.values()))))
        writer.update(dict.fromkeys(wire.outputs, (wire.stream, position)))
        last_on_stream[wire.stream] = position
    return tuple(steps)


@lru_cache(maxsize=128)
def _runs(wiring: _Wiring) -> tuple[Run, ...]:
    steps, streams = _unrolled(wiring), wiring.streams
    awaited = {p for i, step in enumerate(steps) for p in step.after if streams[p] != streams[i]}
    run_of: list[int] = []
    found: list[tuple[list[int], tuple[int, ...]]] = []
    last: dict[str, int] = {}
    for position, (operator, after) in enumerate(steps):
        previous = last.get(streams[position])
        if previous is not None and after == (previous,) and previous not in awaited:
            run_of.append(run_of[previous])
            found[run_of[previous]][0].append(operator)
        else:
            run_of.append(len(found))
            found.append(([operator], tuple(sorted({run_of[p] for p in after}))))
        last[streams[position]] = position
    return tuple(Run(tuple(operators), after) for operators, after in found)
