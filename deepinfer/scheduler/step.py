"""The messages around a step: what the scheduler decides, what a backend answers, what users get."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.numeric import Ints


class PrefillChunk(NamedTuple):
    """`rows` prompt positions from `start` on; `kept_rows` of them go through bounded layers.

    `is_last` chunks end the prompt and yield its first token.
    """

    request_id: int
    start: int
    rows: int
    kept_rows: int
    is_last: bool


class BlockTable(NamedTuple):
    """KV blocks appended to a request's table, from table position `first` on, and its state slot (-1: none).

    `shared` blocks were found in the prefix cache: others read them, and nobody writes them again.
    """

    request_id: int
    first: int
    blocks: tuple[int, ...]
    slot: int
    shared: bool = False


@dataclass(frozen=True, slots=True, eq=False)
class DecodeBatch:
    """Requests that verify `drafts` tokens each beside their newest one: parallel arrays, one entry a request.

    `contexts` are the cached tokens before the step as the host knows them: with a step in flight it assumes that
    every draft of it is accepted, and the device corrects it.
    """

    request_ids: Ints
    contexts: Ints
    drafts: int

    def __len__(self) -> int:
        return len(self.request_ids)

    @property
    def num_rows(self) -> int:
        """Rows computed for the batch."""
        return len(self.request_ids) * (self.drafts + 1)


@dataclass(frozen=True, slots=True, eq=False)
class StepPlan:
    """One decision: the rows of one step of one attention replica, and the memory they write to."""

    index: int
    prefill: tuple[PrefillChunk, ...]
    decode: DecodeBatch
    new_blocks: tuple[BlockTable, ...] = ()
    preempted: tuple[int, ...] = ()

    @property
    def num_rows(self) -> int:
        """Rows the step computes."""
        return sum(c.rows for c in self.prefill) + self.decode.num_rows


@dataclass(frozen=True, slots=True, eq=False)
class StepResult:
    """What a step produced: tokens kept per entry of `StepPlan.decode` (1 to drafts + 1), and requests that stopped."""

    decode_tokens: Ints
    stopped: frozenset[int] = frozenset()


@dataclass(frozen=True, slots=True, eq=False)
class StepOutput:
    """What the users of a replica get from a committed step: new tokens per request, and who has finished."""

    request_ids: Ints
    tokens: Ints
    finished: tuple[int, ...]
