"""From the plans of a step group to the shape its graph is evaluated for: the same on every backend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.scheduler.step import StepPlan


class ReplicaLoad(NamedTuple):
    """One attention replica's part of a step, summarised: hashable, so that step times can be remembered by it.

    Its prompts are `num_chunks` chunks of `prompt_rows` rows in all, of which `kept_rows` go through bounded layers and
    `num_last` chunks end their prompt. `prompt_start` is the tokens before a chunk of mean length that sees as many
    (row, earlier token) pairs as the chunks do together.
    """

    num_decodes: int
    drafts: int
    mean_context: float
    num_chunks: int = 0
    prompt_rows: int = 0
    prompt_start: float = 0.0
    kept_rows: int = 0
    num_last: int = 0

    @property
    def num_rows(self) -> int:
        """Rows the replica computes."""
        return self.num_decodes * (self.drafts + 1) + self.prompt_rows

    @property
    def num_kept_rows(self) -> int:
        """Rows the replica computes in bounded layers."""
        return self.num_decodes * (self.drafts + 1) + self.kept_rows

    @property
    def num_cached(self) -> int:
        """Cached tokens of the decoding requests, a whole number."""
        return round(self.num_decodes * self.mean_context)

    @property
    def num_pairs(self) -> float:
        """(row, earlier token) pairs: what scoring every earlier token costs."""
        prompt = self.prompt_rows * (self.prompt_start + self.prompt_rows / max(self.num_chunks, 1) / 2)
        return self.num_cached * (self.drafts + 1) + prompt


def replica_load(plan: StepPlan) -> ReplicaLoad:
    """Summary of one replica's plan."""
    num_decodes = len(plan.decode)
    drafts = plan.decode.drafts if num_decodes else 0
    context = float(plan.decode.contexts.sum()) / num_decodes if num_decodes else 0.0
    chunks = plan.prefill
    if not chunks:
        return ReplicaLoad(num_decodes, drafts, context)
    rows = sum(c.rows for c in chunks)
    pairs = sum(c.rows * (c.start + c.rows / 2) for c in chunks)
    start = max(pairs / rows - rows / len(chunks) / 2, 0.0)
    kept, last = sum(c.kept_rows for c in chunks), sum(c.is_last for c in chunks)
    return ReplicaLoad(num_decodes, drafts, context, len(chunks), rows, start, kept, last)


def step_shape(load: ReplicaLoad, mean_rows: float, mean_kept_rows: float, graph_rows: int) -> StepShape:
    """The shape of a step as the replica `load` sees it, with its group's mean rows per replica.

    Steps that only decode replay a captured graph: their rows are padded to a multiple of `graph_rows`.
    """
    decode = None
    if load.num_decodes:
        count = float(load.num_decodes)
        if not load.num_chunks:
            count = padded_requests(load.num_decodes, load.drafts, graph_rows)
        decode = Sequences.decoding(count, float(load.drafts), load.mean_context)
    if not load.num_chunks:
        return StepShape(decode, (), mean_rows, mean_kept_rows)
    n = float(load.num_chunks)
    prompts = Sequences(n, load.prompt_rows / n, load.prompt_start, load.kept_rows / n, load.num_last / n)
    return StepShape(decode, (prompts,), mean_rows, mean_kept_rows)


def padded_requests(num_requests: int, drafts: int, graph_rows: int) -> float:
    """Requests' worth of rows that a captured graph computes for so many requests."""
    rows = num_requests * (drafts + 1)
    return math.ceil(rows / graph_rows) * graph_rows / (drafts + 1)


def heaviest(loads: Iterable[ReplicaLoad]) -> tuple[ReplicaLoad, ...]:
    """The replicas that can be a step's last to finish: most rows, most cached tokens to read, most pairs to score."""
    loads = list(loads)
    by_rows = max(loads, key=lambda x: (x.num_rows, x.num_cached))
    by_cached = max(loads, key=lambda x: (x.num_cached, x.num_rows))
    by_pairs = max(loads, key=lambda x: (x.num_pairs, x.num_rows))
    return tuple(dict.fromkeys((by_rows, by_cached, by_pairs)))
