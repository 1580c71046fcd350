"""How long a step takes: the graph's closed form, tabulated over what sums up a step."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Hashable, Sequence

import numpy as np

from backends.sim.stepgrid import Axis, StepGrid
from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.shape import ReplicaLoad, heaviest, padded_requests, replica_load
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.numeric import Floats, Ints
from deepinfer.scheduler.step import StepPlan

REQUESTS = Axis(floor=1.0, per_octave=2, cells=2)
CONTEXT = Axis(floor=128.0, per_octave=2, cells=4)
CHUNKS = Axis(floor=1.0, per_octave=1, cells=1)
ENDING = Axis(floor=1.0, per_octave=1, cells=1, bounded=True)
PROMPT_ROWS = Axis(floor=1.0, per_octave=2, cells=2)
KEPT_ROWS = Axis(floor=1.0, per_octave=2, cells=1)
MEAN_ROWS = Axis(floor=2.0**-12, per_octave=2, cells=4)
"""Grids over a replica's decoding requests, contexts, prompt chunks and the share of them that end their prompts,
prompt rows, rows that a chunk keeps, and a group's mean rows. Most caps of the models' attention are powers of two:
there the grids have points.
"""

FEW = 1e-6
"""A share of ending chunks that is not 0 and adds no rows."""


def most_loaded(counts: Ints, cached: Ints) -> tuple[Ints, Ints]:
    """Of replicas that only decode (the last axis): the one with most requests, and the one with most cached tokens.

    The one with more of the other of equals, so that the choice is that of `heaviest`.
    """
    return (counts * _LARGE + cached).argmax(axis=-1), (cached * _LARGE + counts).argmax(axis=-1)


_LARGE = 1 << 31
"""More requests or cached tokens than a replica has."""


def shared_timer(deployment: Deployment) -> StepTimer:
    """A timer for a deployment, with what was tabulated in this process for others that have the same steps.

    Finalists of one layout differ in requests and chunks alone. Tables hold points of a fixed grid: what is in them
    does not depend on who asked first.
    """
    what = (deployment.model, deployment.layout, repr(deployment.cluster), deployment.features)
    key = (*what, deployment.settings.graph_rows, deployment.replicas_per_group == 1)
    timer = _TIMERS.pop(key, None) or StepTimer(deployment, CostModel(deployment.cluster.accelerator))
    _TIMERS[key] = timer
    if len(_TIMERS) > _MOST_TIMERS:
        _TIMERS.popitem(last=False)
    return timer


_MOST_TIMERS = 6
_TIMERS: OrderedDict[Hashable, StepTimer] = OrderedDict()  # the one used last at the end


class StepTimer:
    """Seconds of a step group's step from the plans of its replicas."""

    def __init__(self, deployment: Deployment, costs: CostModel) -> None:
        self._graph, self._costs = deployment.graph(), costs
        self._drafts, self._graph_rows = deployment.settings.nextn, deployment.settings.graph_rows
        self._compact = deployment.settings.replay == "compact"
        self._alone = deployment.replicas_per_group == 1
        self._decode = StepGrid((REQUESTS, CONTEXT, MEAN_ROWS), self._decode_seconds)
        means = () if self._alone else (MEAN_ROWS, MEAN_ROWS)[: 1 + self._compact]
        prompt = (CHUNKS, ENDING, PROMPT_ROWS, CONTEXT, *(KEPT_ROWS,) * self._compact, *means)
        self._prompt = StepGrid(prompt, lambda *x: self._prompt_seconds(None, *x))
        self._ending = StepGrid(prompt, lambda *x: self._prompt_seconds(None, x[0], np.maximum(x[1], FEW), *x[2:]))
        self._mixed = StepGrid((*prompt, REQUESTS, CONTEXT), lambda *x: self._prompt_seconds(x[-2:], *x[:-2]))
        self.num_kernels = len(self._graph.steps)

    def seconds(
        self, plans: Sequence[StepPlan], others: Sequence[ReplicaLoad], other_rows: int, num_replicas: int
    ) -> float:
        """The step's time: replicas meet in every expert layer, so the heaviest one sets the pace.

        `others` are the replicas beside those of `plans` that could be the heaviest; all of them that have no plan here
        decode `other_rows` rows together.
        """
        loads = [replica_load(plan) for plan in plans]
        rows = (sum(load.num_rows for load in loads) + other_rows) / num_replicas
        kept = (sum(load.num_kept_rows for load in loads) + other_rows) / num_replicas
        return max(self.one(load, rows, kept) for load in heaviest((*loads, *others)))

    def decode_seconds(self, counts: Ints, cached: Ints, num_replicas: int) -> Floats:
        """Seconds of successive steps that only decode.

        `counts` ([replicas]) requests decode in the replicas that have any, with `cached` tokens ([steps, replicas]).
        """
        rows = float(counts.sum()) * (self._drafts + 1) / num_replicas
        by_rows, by_cached = most_loaded(counts, cached)
        seconds = self._decoding(by_rows, counts, cached, rows)
        if not np.array_equal(by_rows, by_cached):
            seconds = np.maximum(seconds, self._decoding(by_cached, counts, cached, rows))
        return seconds

    def _decoding(self, replicas: Ints, counts: Ints, cached: Ints, mean_rows: float) -> Floats:
        """Seconds of successive steps as these replicas ([steps]) see them."""
        sizes = counts[replicas]
        contexts = cached[np.arange(len(cached)), replicas] / sizes
        seconds = np.zeros(len(cached))
        for count in set(sizes.tolist()):
            steps = sizes == count
            inside = contexts[steps]
            padded = padded_requests(count, self._drafts, self._graph_rows)
            nodes = self._decode.along(1, float(inside.min()), float(inside.max()))
            seconds[steps] = np.interp(
                inside, nodes, [self._decode(padded, node, mean_rows) for node in nodes.tolist()]
            )
        return seconds

    def one(self, load: ReplicaLoad, mean_rows: float, mean_kept_rows: float) -> float:
        """A step's time as the replica `load` sees it, with its group's mean rows per replica."""
        if not load.num_chunks:
            padded = padded_requests(load.num_decodes, self._drafts, self._graph_rows)
            return self._decode(padded, load.mean_context, mean_rows)
        chunks = float(load.num_chunks)
        point = [chunks, load.num_last / chunks, float(load.prompt_rows), load.prompt_start]
        if self._compact:
            point.append(load.kept_rows / chunks)
        if not self._alone:
            point += (mean_rows, mean_kept_rows)[: 1 + self._compact]
        if not load.num_decodes:
            # LM head and drafts are launched as soon as one prompt ends.
            return self._ending(*point) if load.num_last else self._prompt(*point)
        return self._mixed(*point, float(load.num_decodes), load.mean_context)

    def _decode_seconds(self, requests: Floats, context: Floats, mean_rows: Floats) -> Floats:
        decode = Sequences.decoding(requests, float(self._drafts), context)
        return self._closed_form(StepShape(decode, (), mean_rows, mean_rows))

    def _prompt_seconds(self, decoding: tuple[Floats, ...] | None, *quantities: Floats) -> Floats:
        chunks, ending, rows, start, *others = quantities
        kept = np.minimum(others.pop(0), rows / chunks) if self._compact else rows / chunks
        prompts = Sequences(chunks, rows / chunks, start, kept, ending)
        decode = None if decoding is None else Sequences.decoding(decoding[0], float(self._drafts), decoding[1])
        return self._closed_form(StepShape(decode, (prompts,), *others))

    def _closed_form(self, shape: StepShape) -> Floats:
        return np.asarray(step_cost(self._graph, shape, self._costs).seconds)
