"""What stands for the device's verification of drafts."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from deepinfer.numeric import Ints
from deepinfer.scheduler.speculation import Acceptance, Draws, request_keys
from deepinfer.scheduler.step import StepPlan, StepResult

_ROUNDS_AT_ONCE = 256


class Verifier:
    """Stands for the device's verification: tokens kept per request, drawn by request and round."""

    def __init__(self, acceptance: Acceptance, seed: int, nextn: int, num_requests: int) -> None:
        self._draws = Draws(acceptance, seed, nextn)
        self._keys = request_keys(seed, np.arange(num_requests, dtype=np.int64))
        self._rounds = np.zeros(num_requests, dtype=np.int64)

    def results(self, plans: Sequence[StepPlan | None]) -> tuple[StepResult | None, ...]:
        """What the replicas' plans of one step produce."""
        ids = [plan.decode.request_ids for plan in plans if plan is not None]
        if not any(map(len, ids)):
            return tuple(None if plan is None else StepResult(plan.decode.request_ids) for plan in plans)
        everyone = ids[0] if len(ids) == 1 else np.concatenate(ids)
        rounds = self._rounds[everyone]
        self._rounds[everyone] = rounds + 1
        kept = self._draws(self._keys[everyone], rounds)
        if len(ids) == 1:
            return tuple(None if plan is None else StepResult(kept) for plan in plans)
        ends = list(itertools.accumulate(len(x) for x in ids))
        parts = iter([kept[start:end] for start, end in zip([0, *ends], ends, strict=False)])
        return tuple(None if plan is None else StepResult(next(parts)) for plan in plans)

    def pass_tokens(self, request_ids: Ints, tokens: Ints) -> tuple[Ints, Ints]:
        """Leave behind the rounds in which requests keep no more than so many tokens; these rounds and tokens."""
        rounds, kept = np.zeros_like(tokens), np.zeros_like(tokens)
        columns = np.arange(len(request_ids))
        passed = np.full_like(tokens, _ROUNDS_AT_ONCE)
        while (passed == _ROUNDS_AT_ONCE).any():
            sums = kept + self.peek(request_ids, _ROUNDS_AT_ONCE).cumsum(axis=0)
            passed = np.count_nonzero(sums <= tokens, axis=0)  # sums grow, so these come first
            kept = np.where(passed > 0, sums[passed - 1, columns], kept)
            rounds += passed
            self.pass_rounds(request_ids, passed)
        return rounds, kept

    def peek(self, request_ids: Ints, num_rounds: int) -> Ints:
        """Tokens kept in each of the next rounds: a row per round, a column per request."""
        rounds = self._rounds[request_ids] + np.arange(num_rounds, dtype=np.int64)[:, None]
        return self._draws(self._keys[request_ids], rounds)

    def pass_rounds(self, request_ids: Ints, num_rounds: int | Ints) -> None:
        """Leave rounds behind."""
        self._rounds[request_ids] += num_rounds
