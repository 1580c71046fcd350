"""From the plans of a step group to the shape its graph is evaluated for: the same on every backend."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import NamedTuple

from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.scheduler.step import StepPlan


class ReplicaLoad(NamedTuple):
    """One attention replica's part of a step, summarised: hashable, so that step times can be remembered by it.

    `chunks` are (rows, start, kept rows, last) of its prefill chunks.
    """

    num_decodes: int
    drafts: int
    mean_context: float
    chunks: tuple[tuple[int, int, int, bool], ...]

    @property
    def num_rows(self) -> int:
        """Rows the replica computes."""
        return self.num_decodes * (self.drafts + 1) + sum(c[0] for c in self.chunks)

    @property
    def num_kept_rows(self) -> int:
        """Rows the replica computes in bounded layers."""
        return self.num_decodes * (self.drafts + 1) + sum(c[2] for c in self.chunks)

    @property
    def num_pairs(self) -> float:
        """Pairs of a row and a token before it, as attention without windows or compression scores them."""
        decode = self.num_decodes * (self.drafts + 1) * self.mean_context
        return decode + sum(rows * (start + rows / 2) for rows, start, _, _ in self.chunks)


def replica_load(plan: StepPlan) -> ReplicaLoad:
    """Summary of one replica's plan."""
    num_decodes = len(plan.decode)
    return ReplicaLoad(
        num_decodes=num_decodes,
        drafts=plan.decode.drafts if num_decodes else 0,
        mean_context=float(plan.decode.contexts.sum()) / num_decodes if num_decodes else 0.0,
        chunks=tuple((c.rows, c.start, c.kept_rows, c.is_last) for c in plan.prefill),
    )


def step_shape(load: ReplicaLoad, mean_rows: float, mean_kept_rows: float, graph_rows: int) -> StepShape:
    """The shape of a step as the replica `load` sees it, with its group's mean rows per replica.

    Steps that only decode replay a captured graph: their rows are padded to a multiple of `graph_rows`.
    """
    decode = None
    if load.num_decodes:
        count = float(load.num_decodes)
        if not load.chunks:
            count = padded_requests(load.num_decodes, load.drafts, graph_rows)
        decode = Sequences.decoding(count, float(load.drafts), load.mean_context)
    prefill = tuple(
        Sequences(1.0, float(rows), float(start), float(kept), float(last)) for rows, start, kept, last in load.chunks
    )
    return StepShape(decode, prefill, mean_rows, mean_kept_rows)


def padded_requests(num_requests: int, drafts: int, graph_rows: int) -> float:
    """Requests' worth of rows that a captured graph computes for so many requests."""
    rows = num_requests * (drafts + 1)
    return math.ceil(rows / graph_rows) * graph_rows / (drafts + 1)


def heaviest(loads: Iterable[ReplicaLoad]) -> tuple[ReplicaLoad, ...]:
    """The replicas that can be a step's last to finish: most rows, most cached tokens to read, most pairs to score."""
    loads = list(loads)
    by_rows = max(loads, key=lambda x: (x.num_rows, x.num_decodes * x.mean_context))
    by_context = max(loads, key=lambda x: (x.num_decodes * x.mean_context, x.num_rows))
    by_pairs = max(loads, key=lambda x: x.num_pairs)
    return tuple(dict.fromkeys((by_rows, by_context, by_pairs)))
