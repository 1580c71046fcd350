"""The messages around a step: what the scheduler decides, what a backend answers, what users get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


class PrefillChunk(NamedTuple):
    """`rows` prompt positions from `start` on; `kept_rows` of them go through bounded layers.

    `is_last` chunks end the prompt and yield its first token.
    """

    request_id: int
    start: int
    rows: int
    kept_rows: int
    is_last: bool


class DecodeRows(NamedTuple):
    """The newest token of a request and `drafts` tokens to verify, after at most `context` cached tokens.

    `context` is what the host knows: with a step in flight it assumes that every draft of it is accepted, and the
    device corrects it.
    """

    request_id: int
    context: int
    drafts: int


class BlockTable(NamedTuple):
    """KV blocks appended to a request's table, from table position `first` on, and its state slot (-1: none)."""

    request_id: int
    first: int
    blocks: tuple[int, ...]
    slot: int


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One decision: the rows of one step of one attention replica, and the memory they write to."""

    index: int
    prefill: tuple[PrefillChunk, ...]
    decode: tuple[DecodeRows, ...]
    new_blocks: tuple[BlockTable, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows the step computes."""
        return sum(c.rows for c in self.prefill) + sum(d.drafts + 1 for d in self.decode)


@dataclass(frozen=True, slots=True)
class StepResult:
    """What a step produced: tokens per `StepPlan.decode` entry (1 to drafts + 1), and requests that met a stop."""

    decode_tokens: tuple[int, ...]
    stopped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What the users of a replica get from a committed step: (request, new tokens) pairs, and finished requests."""

    tokens: tuple[tuple[int, int], ...]
    finished: tuple[int, ...]
