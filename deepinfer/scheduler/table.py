"""The decoding requests of a replica as columns: one array operation a step instead of one per request."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from deepinfer.numeric import Ints
from deepinfer.scheduler.request import Request


@dataclass(slots=True, eq=False)
class Sequence:
    """One run of a request through the engine; a preempted request starts a new one.

    `target` tokens are prefilled: the prompt, and what had been generated before a preemption. `planned` and `computed`
    count prefilled tokens in steps decided and in steps committed. `row` is its place in the `DecodeTable`, -1 outside,
    and `handle` its name there. `steps_in_flight` counts its prefill steps not committed; its decode steps are counted
    there until it stops. `transferred` tokens of it come from another pool; `keeps_blocks` once it has ended and
    another pool may read them.
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
    handle: int = -1
    slot: int = -1
    transferred: int = 0
    keeps_blocks: bool = False
    blocks: list[int] = field(default_factory=list)


class DecodeTable:
    """Columns of the decoding sequences; rows move when one leaves, so look a row up through its sequence or handle.

    `cached` counts tokens with KV in committed steps, `generated` committed output tokens, `limit` the most that may be
    generated, `capacity` the tokens its blocks hold, `in_flight` the decode steps not committed yet, and
    `first_in_flight` is 1 while the prompt's last chunk, which yields the first token, is not committed. Each is a view
    of the rows in use, replaced when a sequence enters or leaves. A sequence's `handle` stays its own until `forget`.
    """

    def __init__(self, max_rows: int) -> None:
        self._data = np.zeros((8, max_rows), dtype=np.int64)
        self.sequences: list[Sequence] = []
        self.version = 0
        self._rows: Ints = np.full(2 * max_rows, -1, dtype=np.int64)  # by handle
        self._owners: list[Sequence | None] = []
        self._free_handles: list[int] = []
        self._view()

    def __len__(self) -> int:
        return len(self.sequences)

    def add(self, sequence: Sequence, capacity: int, first_in_flight: int = 1) -> None:
        """Enter a sequence whose last prefill chunk has been decided, or (`first_in_flight` 0) is committed."""
        row = sequence.row = len(self.sequences)
        handle = sequence.handle = self._new_handle(sequence)
        self.sequences.append(sequence)
        self._rows[handle] = row
        request = sequence.request
        self._data[:, row] = (
            request.id,
            sequence.target,
            sequence.generated,
            request.max_new_tokens,
            capacity,
            0,
            first_in_flight,
            handle,
        )
        self._view()

    def remove(self, sequence: Sequence) -> None:
        """Take a sequence out; the last row moves into its place."""
        row, last = sequence.row, self.sequences[-1]
        self._data[:, row] = self._data[:, last.row]
        self._rows[last.handle] = row
        self._rows[sequence.handle] = -1
        self.sequences[row] = last
        last.row = row
        self.sequences.pop()
        sequence.row = -1
        self._view()

    def rows_of(self, handles: Ints) -> Ints:
        """The rows of these handles now, -1 for those whose sequence has left."""
        rows: Ints = self._rows[handles]
        return rows

    def owner(self, handle: int) -> Sequence:
        """The sequence of a handle, in the table or gone."""
        found = self._owners[handle]
        assert found is not None, "a handle was used after it was forgotten"
        return found

    def forget(self, sequence: Sequence) -> None:
        """Free the handle of a sequence that has left, once no step in flight uses it."""
        if sequence.handle >= 0:
            self._owners[sequence.handle] = None
            self._free_handles.append(sequence.handle)
            sequence.handle = -1

    def _new_handle(self, sequence: Sequence) -> int:
        if self._free_handles:
            handle = self._free_handles.pop()
            self._owners[handle] = sequence
            return handle
        if len(self._owners) == len(self._rows):
            self._rows = np.concatenate((self._rows, np.full_like(self._rows, -1)))
        self._owners.append(sequence)
        return len(self._owners) - 1

    def _view(self) -> None:
        self.version += 1
        columns = self._data[:, : len(self.sequences)]
        self.request_id, self.cached, self.generated, self.limit = columns[:4]
        self.capacity, self.in_flight, self.first_in_flight, self.handle = columns[4:]
