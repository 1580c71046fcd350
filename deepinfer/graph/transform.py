"""Transformations of execution graphs: two-batch overlap, and expert layers in one fused kernel."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest

from deepinfer.errors import UsageError
from deepinfer.graph.graph import Block, ExecutionGraph
from deepinfer.graph.ops import LOW_LATENCY_ROWS, Message, Operator, OpKind, Work
from deepinfer.graph.shape import StepShape
from deepinfer.numeric import larger, smaller

TAKEN_BY_EXCHANGE = 24 / 132
"""Share of a Hopper's SMs that DeepEP V1's normal kernels ran on for the rates of its README (tests/test_internode.py),
which exchanges are priced to; low-latency ones take none in flight."""

SLOWED_EXCHANGE = 1.4
"""How many times as long such an exchange takes beside the other half's products and passes over memory: with it the
gain in V3's prefill on EP32 of H100 is 29 to 30 % with even load, 22 to 25 % with real load; SGLang's large-scale EP
blog has 27 to 35 %."""


def two_batch_overlap(graph: ExecutionGraph, replica_ranks: int = 1) -> ExecutionGraph:
    """The step as two micro-batches of half its sequences each, whose communication hides behind each other's compute.

    Operators are issued in turns that end with what goes over a link (SGLang's and DeepSeek's prefill order): while
    rows of one half travel, the other half computes. Each half reads all the weights that it needs, so small batches
    lose; large exchanges of the `replica_ranks` that share a replica's rows take cores from products, and are slowed by
    them. A prompt may be split; that its second half reads the first one's cache again is left out.
    """
    blocks: dict[Block, Block] = {}
    for block in graph.blocks:
        if block not in blocks:
            # Both halves have the same work: one function of the shape, which is evaluated once.
            works = [_half_work(op.work, replica_ranks) for op in block.operators]
            halves = [list(_turns(_half_operators(block, half, works))) for half in ("a", "b")]
            alternating = [op for turns in zip_longest(*halves, fillvalue=[]) for turn in turns for op in turn]
            blocks[block] = Block(block.name, tuple(alternating), block.is_layer)
    return ExecutionGraph(f"{graph.name}, two batches", tuple(blocks[block] for block in graph.blocks))


def _half_operators(block: Block, half: str, works: Sequence[Callable[[StepShape], Work]]) -> Iterator[Operator]:
    for op, work in zip(block.operators, works, strict=True):
        inputs, outputs = (tuple(f"{slot}/{half}" for slot in slots) for slots in (op.inputs, op.outputs))
        yield Operator(op.name, op.kind, inputs, outputs, work, op.stream)


def _half_work(of: Callable[[StepShape], Work], replica_ranks: int) -> Callable[[StepShape], Work]:
    def work(shape: StepShape) -> Work:
        done = of(shape.half)
        low_latency = smaller(LOW_LATENCY_ROWS * replica_ranks / larger(shape.half.rows, 1e-9), 1.0)
        large = 1.0 - low_latency
        message = done.message
        if message is not None and message.pattern == "all_to_all":
            slowed = 1.0 + (SLOWED_EXCHANGE - 1.0) * large
            up, out = message.scale_up_bytes * slowed, message.scale_out_bytes * slowed
            message = replace(message, scale_up_bytes=up, scale_out_bytes=out)
        return replace(done, flops=done.flops / (1.0 - TAKEN_BY_EXCHANGE * large), message=message)

    return work


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
    return Block(block.name, tuple(operators), block.is_layer)


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

    return Operator("fused_experts", OpKind.FUSED_MOE, tuple(inputs), combine.outputs, work)
