"""A closed loop that begins amid its requests: each of them is taken over, as if from another engine."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from backends.sim.verifier import Verifier
from deepinfer.engine.backend import engine_request
from deepinfer.metrics.record import RunRecord
from deepinfer.scheduler.request import Request
from deepinfer.workload.spec import SteadyStart
from deepinfer.workload.steady import Life


class Amid:
    """Requests that were under way before a run began: what they come with, and the window of a run that begins so.

    Their earlier drafts are verified, not assumed: a request has had whole rounds, in which it kept no more tokens than
    its `Life` says. Only how long those took is not simulated.
    """

    def __init__(self, lives: Sequence[Life], steady: SteadyStart, verifier: Verifier, record: RunRecord) -> None:
        self._steady, self._record = steady, record
        self._ids = np.asarray([life.spec.id for life in lives], dtype=np.int64)
        later_tokens = np.asarray([life.generated - 1 for life in lives], dtype=np.int64)
        self._rounds, kept = verifier.pass_tokens(self._ids, later_tokens)
        self._generated = dict(zip(self._ids.tolist(), (kept + 1).tolist(), strict=True))

    def join(self, life: Life, block_tokens: int, now: float) -> Request:
        """A request as the scheduler gets it now: with its tokens, and the KV of all but the newest of them."""
        spec, generated = life.spec, self._generated[life.spec.id]
        self._record.take_over(spec.id, generated, now)
        request = engine_request(spec, block_tokens, now - life.age_s)
        return replace(request, transferred_tokens=spec.prompt_tokens + generated - 1, generated_tokens=generated)

    def measure(self, now: float) -> None:
        """Set the record's window, now that the run is over, and date by it the first tokens of before the run."""
        self._record.window_of_deliveries(self._steady.settle_s, now)
        self._record.date_back(self._ids, self._rounds)
