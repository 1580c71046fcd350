"""Transformations of execution graphs: two-batch overlap, and expert layers in one fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator
from dataclasses import replace
from itertools import zip_longest

from deepinfer.errors import UsageError
from deepinfer.graph.graph import Block, ExecutionGraph
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.graph.shape import StepShape

LEFT_BY_EXCHANGE = 112 / 132
"""Share of a Hopper's SMs that DeepEP V1's normal kernels, by default on 20, leave to what runs beside them."""


def two_batch_overlap(graph: ExecutionGraph) -> ExecutionGraph:
    """The step as two micro-batches of half its sequences each, whose communication hides behind each other's compute.

    Operators are issued in turns that end with what goes over a link (SGLang's and DeepSeek's prefill order): while
    rows of one half travel, the other half computes. Each half reads all the weights that it needs, so small batches
    lose; and products have `LEFT_BY_EXCHANGE` of the cores. A prompt may be split; that its second half reads the first
    one's cache again is left out.
    """
    blocks: dict[Block, Block] = {}
    for block in graph.blocks:
        if block not in blocks:
            halves = [list(_turns(_half_operators(block, half))) for half in ("a", "b")]
            alternating = [op for turns in zip_longest(*halves, fillvalue=[]) for turn in turns for op in turn]
            blocks[block] = Block(block.name, tuple(alternating))
    return ExecutionGraph(f"{graph.name}, two batches", tuple(blocks[block] for block in graph.blocks))


def _half_operators(block: Block, half: str) -> Iterator[Operator]:
    for op in block.operators:
        inputs, outputs = (tuple(f"{slot}/{half}" for slot in slots) for slots in (op.inputs, op.outputs))
        yield Operator(op.name, op.kind, inputs, outputs, _half_work(op.work), _half_key(op.key), op.stream)


def _half_work(of: Callable[[StepShape], Work]) -> Callable[[StepShape], Work]:
    def work(shape: StepShape) -> Work:
        done = of(shape.half)
        return replace(done, flops=done.flops / LEFT_BY_EXCHANGE)

    return work


def _half_key(of: Callable[[StepShape], Hashable]) -> Callable[[StepShape], Hashable]:
    return lambda shape: of(shape.half)


def _turns(operators: Iterator[Operator]) -> Iterator[list[Operator]]:
    """Cut behind each operator that does not compute."""
    turn: list[Operator] = []
    for operator in operators:
        turn.append(operator)
        if operator.stream != "compute":
            yield turn
            turn = []
    if turn:
        yield turn


def fuse_moe(graph: ExecutionGraph) -> ExecutionGraph:
    """Dispatch, routed experts and combine as one kernel that sends rows while it multiplies others (MegaMoE).

    Raises UsageError when no expert layer of the graph exchanges rows.
    """
    blocks = {block: _fuse_block(block) for block in dict.fromkeys(graph.blocks)}
    if all(fused is block for block, fused in blocks.items()):
        raise UsageError(f"{graph.name}: rows are not exchanged between ranks, there is nothing to fuse")
    return ExecutionGraph(f"{graph.name}, fused experts", tuple(blocks[block] for block in graph.blocks))


def _fuse_block(block: Block) -> Block:
    parts = {op.kind: op for op in block.operators if op.kind in (OpKind.DISPATCH, OpKind.COMBINE)}
    if len(parts) < 2:
        return block
    dispatch, combine = parts[OpKind.DISPATCH], parts[OpKind.COMBINE]
    operators: list[Operator] = []
    for op in block.operators:
        if op.kind is OpKind.GROUPED_GEMM:
            operators.append(_fused(dispatch, op, combine))
        elif op is not dispatch and op is not combine:
            operators.append(op)
    return Block(block.name, tuple(operators))


def _fused(dispatch: Operator, experts: Operator, combine: Operator) -> Operator:
    internal = {*dispatch.outputs, *experts.outputs}
    inputs = dict.fromkeys((*dispatch.inputs, *(s for s in combine.inputs if s not in internal)))

    def work(shape: StepShape) -> Work:
        done = experts.work(shape)
        there, back = dispatch.work(shape).message, combine.work(shape).message
        assert there is not None
        assert back is not None
        message = Message(
            "all_to_all",
            there.scale_up_bytes + back.scale_up_bytes,
            there.scale_out_bytes + back.scale_out_bytes,
            there.peers,
        )
        return Work(done.flops, done.precision, done.bytes_read, done.bytes_written, done.rows, message)

    return Operator("fused_experts", OpKind.FUSED_MOE, tuple(inputs), combine.outputs, work, experts.key)
