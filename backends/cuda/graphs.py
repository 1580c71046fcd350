"""Decode steps as captured CUDA graphs: one per number of requests and range of contexts, captured when needed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from backends.cuda.exchange import OneSidedExchange
from backends.torch_runtime.context import RankContext, StepContext
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.inputs import PromptRows
from backends.torch_runtime.launcher import EagerLauncher
from backends.torch_runtime.steps import Outputs, StepBuilder
from deepinfer.engine.shape import padded_requests
from deepinfer.numeric import Ints

_SHORTEST_CONTEXT = 4096
_NOT_CAPTURED = 1 << 20
"""What a rank says in place of a number of requests when its step has to run operator by operator."""


@dataclass(frozen=True, eq=False)
class _Captured:
    graph: torch.cuda.CUDAGraph
    slots: Tensor
    outputs: dict[str, Tensor]


class GraphLauncher:
    """Replays steps that only decode, and runs others operator by operator.

    Rows are padded to a multiple of `graph_rows`, then to whole requests, and contexts to a power of two: index scores
    of entries that do not exist are not computed, but they have a place. Ranks that step together agree on both before
    each step, so that their exchanges match. Token ids stay on the device from one step to the next.
    """

    def __init__(self, rank: RankContext, executor: Executor, builder: StepBuilder, graph_rows: int) -> None:
        self._rank, self._executor, self._builder = rank, executor, builder
        self._graph_rows = graph_rows
        self._eager = EagerLauncher(rank, executor, builder)
        self._pool = torch.cuda.graph_pool_handle()
        rank.comm.one_sided = OneSidedExchange.between(rank.comm)
        self._captured: dict[tuple[int, int], _Captured] = {}

    def launch(self, slots: Ints, prompts: PromptRows | None, max_context: int, logprobs: int | None) -> Outputs:
        """See `StepLauncher`."""
        eager = prompts is not None or logprobs is not None
        mine = _NOT_CAPTURED if eager else self._padded(len(slots))
        wanted, context = self._rank.comm.agree_max_each(mine, _padded_context(max_context))
        if wanted == _NOT_CAPTURED:
            return self._eager.launch(slots, prompts, max_context, logprobs)
        captured = self._captured.get((wanted, context)) or self._capture(wanted, context)
        padded = np.full(wanted, self._rank.state.nobody, dtype=np.int64)
        padded[: len(slots)] = slots
        captured.slots.copy_(self._builder.to_device(padded), non_blocking=True)
        begin = torch.cuda.Event(enable_timing=True)
        begin.record()
        captured.graph.replay()
        return Outputs(captured.outputs, begin)

    def _padded(self, requests: int) -> int:
        drafts = self._rank.state.shape.rows_per_request - 1
        return max(math.ceil(padded_requests(requests, drafts, self._graph_rows)), 1)

    def _capture(self, requests: int, context: int) -> _Captured:
        """Compile and warm up on rows of nobody, which change nothing, then record the same launches."""
        slots = torch.full((requests,), self._rank.state.nobody, dtype=torch.int32, device=self._rank.state.device)
        self._run(slots, context)
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool, capture_error_mode="thread_local"):
            step = self._run(slots, context)
        captured = self._captured[requests, context] = _Captured(graph, slots, step.outputs)
        return captured

    @torch.inference_mode()
    def _run(self, slots: Tensor, context: int) -> StepContext:
        step = self._builder.decode(slots, context)
        step.equal_exchange = True
        self._executor.run(step)
        return step


def _padded_context(tokens: int) -> int:
    return max(_SHORTEST_CONTEXT, 1 << (tokens - 1).bit_length())
