"""What a row of a step may read of the attention caches: the arguments of every sparse-attention kernel."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, eq=False)
class WindowView:
    """The sliding window of each of m rows.

    `ring` uint8 [num_slots, ring_len, record bytes] holds the record of position p of slot s at [s, p % ring_len];
    row i sees the positions [ring_lo[i], ring_hi[i]) of slot[i]. `buffer` uint8 [n, record bytes] holds records that
    are in no ring (yet); row i sees [buf_lo[i], buf_hi[i]) of them. At most 136 keys a row. All indices int32 [m].
    """

    ring: Tensor
    buffer: Tensor
    slot: Tensor
    ring_lo: Tensor
    ring_hi: Tensor
    buf_lo: Tensor
    buf_hi: Tensor


@dataclass(frozen=True, eq=False)
class EntryView:
    """The selected global entries of each of m rows.

    `main` uint8 [num_blocks, entries per block, record bytes]; `records` int32 [m, topk <= 512] says which of its
    num_blocks x entries per block records, -1 where there is none.
    """

    main: Tensor
    records: Tensor
