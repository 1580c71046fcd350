"""The rows of one step on one rank: where each is in its request, and what it may see and must write.

Rows of decoding requests come first, those of prompts behind them. Arrays are int32 on the device, so that a decode
step depends on nothing the host knows but the slots that take part in it.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import NamedTuple

import torch
from torch import Tensor

from backends.torch_runtime.state import EngineState
from backends.torch_runtime.views import WindowView


class RowArrays(NamedTuple):
    """Per row: its slot and position; the `first` and `last` position of its request in this step, and the place of
    the first one's record in the buffer of the step's window keys (`base`).
    """

    slot: Tensor
    pos: Tensor
    first: Tensor
    last: Tensor
    base: Tensor

    def __len__(self) -> int:
        return self.slot.shape[0]

    def select(self, index: Tensor) -> RowArrays:
        """The rows at these places."""
        return RowArrays(*(column[index] for column in self))


def concatenated(parts: list[RowArrays]) -> RowArrays:
    """Rows one behind the other; bases stay as they are."""
    return parts[0] if len(parts) == 1 else RowArrays(*(torch.cat(columns) for columns in zip(*parts, strict=True)))


def decode_rows(state: EngineState, slots: Tensor, rows: int) -> RowArrays:
    """`rows` consecutive positions of each slot [n], from its first position without KV."""
    first = state.cached[slots.long()]
    offsets = torch.arange(rows, dtype=torch.int32, device=slots.device)

    def spread(column: Tensor) -> Tensor:
        return column[:, None].expand(-1, rows).flatten()

    base = torch.arange(len(slots), dtype=torch.int32, device=slots.device) * rows
    pos = (first[:, None] + offsets).flatten()
    return RowArrays(spread(slots), pos, spread(first), spread(first + (rows - 1)), spread(base))


@dataclass(frozen=True, eq=False)
class RowView:
    """The rows that a layer computes: `local` ones of this rank, and those whose records it gets (`buffer`).

    `window` (without ring and buffer records) says which window keys each local row sees, `ring_place` [buffer rows]
    where in a ring of all slots each record goes, -1 for nowhere. `rotary` are (cos, sin) [m, dim / 2] by kind.
    """

    local: RowArrays
    buffer: RowArrays
    num_decode: int
    ring_lo: Tensor
    ring_hi: Tensor
    buf_lo: Tensor
    buf_hi: Tensor
    ring_place: Tensor
    rotary: dict[bool, tuple[Tensor, Tensor]]
    _visible: dict[int, Tensor] = field(default_factory=dict)

    def __len__(self) -> int:
        return len(self.local)

    def visible(self, state: EngineState, ratio: int) -> Tensor:
        """Global entries that each row sees, int32 [m]: those whose last token is not behind it."""
        if ratio not in self._visible:
            rows = self.local
            self._visible[ratio] = torch.where(rows.slot == state.nobody, 0, (rows.pos + 1) // ratio).int()
        return self._visible[ratio]

    def window(self, ring: Tensor, records: Tensor, rows: slice) -> WindowView:
        """What a range of local rows sees of a ring and of this step's records."""
        return WindowView(
            ring,
            records,
            self.local.slot[rows],
            self.ring_lo[rows],
            self.ring_hi[rows],
            self.buf_lo[rows],
            self.buf_hi[rows],
        )


def row_view(
    state: EngineState,
    local: RowArrays,
    buffer: RowArrays,
    num_decode: int,
    window: int,
    rotary: dict[bool, tuple[Tensor, Tensor]],
) -> RowView:
    """Ranges of keys as positions say: the window before each row, as far as layers that see every row have it."""
    buf_hi = local.base + (local.pos - local.first) + 1
    ring_lo, buf_lo = _lowest_keys(local, buf_hi, state.valid, window)
    return RowView(
        local=local,
        buffer=buffer,
        num_decode=num_decode,
        ring_lo=ring_lo,
        ring_hi=local.first,
        buf_lo=buf_lo,
        buf_hi=buf_hi,
        ring_place=ring_places(state, buffer),
        rotary={kind: (cos[local.pos.long()], sin[local.pos.long()]) for kind, (cos, sin) in rotary.items()},
    )


def bounded_view(state: EngineState, view: RowView, window: int) -> RowView:
    """The same rows in bounded layers, which may have computed window keys from a later position on."""
    ring_lo, buf_lo = _lowest_keys(view.local, view.buf_hi, state.valid_bounded, window)
    return replace(view, ring_lo=ring_lo, buf_lo=buf_lo)


def _lowest_keys(rows: RowArrays, buf_hi: Tensor, valid: Tensor, window: int) -> tuple[Tensor, Tensor]:
    """Where each row's keys begin in the ring and in the buffer, for windows that exist from `valid` [slots] on."""
    low = torch.maximum(valid[rows.slot.long()], rows.pos - (window - 1))
    buf_lo = torch.minimum(rows.base + (low - rows.first).clamp_min(0), buf_hi)
    return torch.minimum(low, rows.first), buf_lo


def ring_places(state: EngineState, rows: RowArrays) -> Tensor:
    """Where each row's record goes in a flat ring [slots x length], -1 for rows that later ones would overwrite."""
    length = state.shape.ring_len
    stays = (rows.pos > rows.last - length) & (rows.slot != state.nobody)
    return torch.where(stays, rows.slot.long() * length + rows.pos % length, -1)


def entry_places(state: EngineState, rows: RowArrays, ratio: int) -> Tensor:
    """Where the global entry that a row completes goes in flat caches, -1 if it completes none or others share it."""
    per_block = state.shape.block_tokens // ratio
    entry = rows.pos // ratio
    writes = ((rows.pos + 1) % ratio == 0) & (rows.slot != state.nobody) & (rows.pos >= state.floor[rows.slot.long()])
    blocks = state.block_table[rows.slot.long(), (entry // per_block).clamp_max(state.shape.max_blocks - 1).long()]
    return torch.where(writes, blocks.long() * per_block + entry % per_block, -1)
