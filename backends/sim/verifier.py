"""What stands for the device's verification of drafts."""

from __future__ import annotations

import numpy as np

from deepinfer.engine.core import Plans
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.scheduler.step import Ints, StepResult


class Verifier:
    """Stands for the device's verification: tokens kept per request, drawn by request and round."""

    def __init__(self, acceptance: Acceptance, seed: int, nextn: int, num_requests: int) -> None:
        self._acceptance, self._seed, self._nextn = acceptance, seed, nextn
        self._rounds = np.zeros(num_requests, dtype=np.int64)

    def results(self, plans: Plans) -> tuple[StepResult | None, ...]:
        """What the replicas' plans of one step produce."""
        ids = [plan.decode.request_ids for plan in plans if plan is not None]
        if not ids:
            return tuple(None for _ in plans)
        everyone = np.concatenate(ids)
        kept = self.peek(everyone, 1)[0]
        self.pass_rounds(everyone, 1)
        parts = iter(np.split(kept, np.cumsum([len(x) for x in ids])[:-1]))
        return tuple(None if plan is None else StepResult(next(parts)) for plan in plans)

    def peek(self, request_ids: Ints, num_rounds: int) -> Ints:
        """Tokens kept in each of the next rounds: a row per round, a column per request."""
        rounds = self._rounds[request_ids] + np.arange(num_rounds, dtype=np.int64)[:, None]
        return self._acceptance.draw(self._seed, request_ids, rounds, self._nextn)

    def pass_rounds(self, request_ids: Ints, num_rounds: int) -> None:
        """Leave rounds behind."""
        self._rounds[request_ids] += num_rounds
