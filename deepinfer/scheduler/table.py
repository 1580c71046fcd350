"""The decoding requests of a replica as columns: one array operation a step instead of one per request."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import ClassVar

import numpy as np

from deepinfer.scheduler.request import Request
from deepinfer.scheduler.step import Ints


@dataclass(slots=True, eq=False)
class Sequence:
    """One run of a request through the engine; a preempted request starts a new one.

    `target` tokens are prefilled: the prompt, and what had been generated before a preemption. `planned` and `computed`
    count prefilled tokens in steps decided and in steps committed. `row` is its place in the `DecodeTable`, -1 outside.
    `steps_in_flight` counts its prefill steps not committed; its decode steps are counted there until it stops.
    `transferred` tokens of it come from another pool; `keeps_blocks` once it has ended and another pool may read them.
    """

    request: Request
    target: int
    generated: int
    running: bool = True
    planned: int = 0
    computed: int = 0
    published: int = 0
    steps_in_flight: int = 0
    row: int = -1
    slot: int = -1
    transferred: int = 0
    keeps_blocks: bool = False
    blocks: list[int] = field(default_factory=list)


class DecodeTable:
    """Columns of the decoding sequences; rows move when one leaves, so look a row up through its sequence.

    `cached` counts tokens with KV in committed steps, `generated` committed output tokens, `limit` the most that may be
    generated, `capacity` the tokens its blocks hold, `in_flight` the decode steps not committed yet, and
    `first_in_flight` is 1 while the prompt's last chunk, which yields the first token, is not committed.
    """

    COLUMNS: ClassVar = ("request_id", "cached", "generated", "limit", "capacity", "in_flight", "first_in_flight")

    def __init__(self, max_rows: int) -> None:
        self._data = np.zeros((len(self.COLUMNS), max_rows), dtype=np.int64)
        self._index = {name: i for i, name in enumerate(self.COLUMNS)}
        self.sequences: list[Sequence] = []
        self.version = 0

    def __len__(self) -> int:
        return len(self.sequences)

    def column(self, name: str) -> Ints:
        """A view of one column over the rows in use."""
        view: Ints = self._data[self._index[name], : len(self.sequences)]
        return view

    def add(self, sequence: Sequence, capacity: int, first_in_flight: int = 1) -> None:
        """Enter a sequence whose last prefill chunk has been decided, or (`first_in_flight` 0) is committed."""
        row = sequence.row = len(self.sequences)
        self.sequences.append(sequence)
        request = sequence.request
        self._data[:, row] = (
            request.id, sequence.target, sequence.generated, request.max_new_tokens, capacity, 0, first_in_flight
        )  # fmt: skip
        self.version += 1

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; the last row moves into its place."""
        row, last = sequence.row, self.sequences[-1]
        self._data[:, row] = self._data[:, last.row]
        self.sequences[row] = last
        last.row = row
        self.sequences.pop()
        sequence.row = -1
        self.version += 1
