"""Sparse attention over window and selected entries, and the indexer that selects them, in plain torch."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor

from backends.torch_runtime.formats import (
    KVStorage,
    decode_record,
    e8m0,
    quantize_mxfp4,
    record_bytes,
    unpack_e2m1,
    wide,
)
from backends.torch_runtime.views import EntryView, WindowView

ROWS_AT_ONCE = 64
"""Rows whose keys are gathered at once: bounds the memory, changes no number."""

_STORAGES: tuple[KVStorage, ...] = ("fp4", "mxfp8", "bf16", "fp32")


def sparse_attention(q: Tensor, sink: Tensor, scale: float, window: WindowView, entries: EntryView | None) -> Tensor:
    """Attention of q [m, heads, dim] over each row's window keys and selected entries; keys are values too.

    `sink` FP32 [heads] is the logit of a key without value. Rows without any key give zeros.
    """
    parts = [
        _attend(q[rows], sink, scale, _window_keys(window, rows, q), _entry_keys(entries, rows, q))
        for rows in (slice(i, i + ROWS_AT_ONCE) for i in range(0, len(q), ROWS_AT_ONCE))
    ]
    return torch.cat(parts) if parts else torch.empty_like(q)


def index_scores(
    q: Tensor,
    weights: Tensor,
    keys: Tensor,
    block_table: Tensor,
    slot: Tensor,
    visible: Tensor,
    max_entries: int,
    candidates: Tensor | None = None,
    candidate_block: int = 8,
) -> Tensor:
    """FP32 scores [m, max_entries] of cached index keys for q [m, heads, dim]: sum over heads of weight x relu(q k).

    q is rounded to E2M1 like the keys, where these are. Entries not before `visible` [m] score -inf. With `candidates`
    [m, n], blocks of neighbouring entries (-1: none), column c x block + j is entry candidates[c] x block + j.
    """
    m, _, dim = q.shape
    storage = storage_of(keys.shape[-1], dim, "index")
    if storage in ("fp4", "mxfp8"):
        values, scales = quantize_mxfp4(q)
        rounded = unpack_e2m1(values).unflatten(-1, (scales.shape[-1], -1)) * e8m0(scales)[..., None]
        q = rounded.flatten(-2).to(weights.dtype)
    if candidates is None:
        entry = torch.arange(max_entries, device=q.device).expand(m, -1)
    else:
        inside = torch.arange(candidate_block, device=q.device)
        entry = torch.where(candidates[..., None] < 0, -1, candidates[..., None] * candidate_block + inside).flatten(1)
    valid = (entry >= 0) & (entry < visible[:, None])
    out = []
    for rows in (slice(i, i + ROWS_AT_ONCE) for i in range(0, m, ROWS_AT_ONCE)):
        seen = valid[rows]
        found = decode_record(_paged(keys, block_table, slot[rows], entry[rows], seen), dim, storage, "index")
        scores = torch.einsum("mhd,med->mhe", wide(q[rows]), found.to(weights.dtype)).relu()
        total = torch.einsum("mhe,mh->me", scores, weights[rows])
        out.append(total.masked_fill(~seen, -torch.inf))
    return torch.cat(out) if out else q.new_zeros(0, entry.shape[1], dtype=torch.float32)


def select_topk(
    scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None = None, candidate_block: int = 8
) -> Tensor:
    """Entries int32 [m, k] with the best finite scores, -1 where there are fewer; ties go to the lower column."""
    width = min(k, scores.shape[1])
    order = scores.sort(dim=-1, descending=True, stable=True)
    column, best = order.indices[:, :width], order.values[:, :width]
    if candidates is not None:
        block = candidates.long().gather(1, column // candidate_block)
        column = block * candidate_block + column % candidate_block
    chosen = torch.where(best > -torch.inf, column, -1).int()
    return torch.nn.functional.pad(chosen, (0, k - width), value=-1)


def candidate_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block: int = 8) -> Tensor:
    """Blocks of `block` entries with the best maximum, int32 [m, num_blocks], -1 where fewer are reachable.

    The block with the newest visible entry is always among them: it is only partly filled.
    """
    padded = torch.nn.functional.pad(scores, (0, -scores.shape[1] % block), value=-torch.inf)
    best = padded.unflatten(1, (-1, block)).amax(-1)
    newest = torch.where(visible > 0, (visible - 1) // block, -1)
    best = best.masked_fill(torch.arange(best.shape[1], device=best.device) == newest[:, None], torch.inf)
    return select_topk(best, visible, num_blocks)


def entry_records(entries: Tensor, block_table: Tensor, slot: Tensor, per_block: int) -> Tensor:
    """Where entries int32 [m, k] of each row's slot lie: indices int32 into blocks x per_block records, -1 for none.

    Entry e of slot s lies at [block_table[s, e // per_block], e % per_block]; `block_table` int32 [slots, max_blocks].
    """
    valid = entries >= 0
    return torch.where(valid, _places(block_table, slot, entries, valid, per_block), -1).int()


def storage_of(width: int, dim: int, kind: Literal["window", "main", "index"]) -> KVStorage:
    """The storage whose records of `dim` numbers have `width` bytes."""
    return next(s for s in _STORAGES if record_bytes(s, dim, kind) == width)


def _attend(q: Tensor, sink: Tensor, scale: float, *sources: tuple[Tensor, Tensor] | None) -> Tensor:
    """`sources` are (keys FP32 [m, n, dim], valid [m, n])."""
    keys = torch.cat([s[0] for s in sources if s is not None], 1)
    valid = torch.cat([s[1] for s in sources if s is not None], 1)
    queries = wide(q)
    keys = keys.to(queries.dtype)
    logits = torch.einsum("mhd,mnd->mhn", queries, keys) * scale
    logits = logits.masked_fill(~valid[:, None], -torch.inf)
    with_sink = torch.cat((logits, sink.to(logits.dtype).view(1, -1, 1).expand(len(q), -1, 1)), -1)
    weights = with_sink.softmax(-1)[..., :-1]
    return torch.einsum("mhn,mnd->mhd", weights, keys).to(q.dtype)


def _window_keys(window: WindowView, rows: slice, q: Tensor) -> tuple[Tensor, Tensor]:
    """Keys of the ring, then of the step's own buffer; ranges are padded to the longest."""
    dim, length = q.shape[-1], window.ring.shape[1]
    storage = storage_of(window.ring.shape[-1], dim, "window")
    low, high = window.ring_lo[rows], window.ring_hi[rows]
    positions = low[:, None] + torch.arange(length, device=q.device)
    in_ring = positions < high[:, None]
    slot = window.slot[rows].long()
    ring = window.ring.flatten(0, 1)[torch.where(in_ring, slot[:, None] * length + positions % length, 0).long()]
    first, last = window.buf_lo[rows], window.buf_hi[rows]
    longest = max(int((last - first).max()), 1) if len(first) and len(window.buffer) else 0
    places = first[:, None] + torch.arange(longest, device=q.device)
    in_buffer = places < last[:, None]
    buffer = window.buffer[torch.where(in_buffer, places, 0).long()]
    keys = decode_record(torch.cat((ring, buffer), 1), dim, storage, "window")
    valid = torch.cat((in_ring, in_buffer), 1)
    return torch.where(valid[..., None], keys, 0.0), valid


def _entry_keys(entries: EntryView | None, rows: slice, q: Tensor) -> tuple[Tensor, Tensor] | None:
    if entries is None:
        return None
    dim, chosen = q.shape[-1], entries.records[rows]
    valid = chosen >= 0
    records = entries.main.flatten(0, 1)[chosen.clamp_min(0).long()]
    keys = decode_record(records, dim, storage_of(entries.main.shape[-1], dim, "main"), "main")
    return torch.where(valid[..., None], keys, 0.0), valid


def _paged(cache: Tensor, block_table: Tensor, slot: Tensor, entry: Tensor, valid: Tensor) -> Tensor:
    """Records [m, n, bytes] of entries [m, n] of each row's slot, by its block table."""
    return cache.flatten(0, 1)[_places(block_table, slot, entry, valid, cache.shape[1])]


def _places(block_table: Tensor, slot: Tensor, entry: Tensor, valid: Tensor, per_block: int) -> Tensor:
    """Records of entries [m, n], int64; that of entry 0 where not valid."""
    entry = torch.where(valid, entry, 0).long()
    block = block_table[slot.long()].long().gather(1, entry // per_block)
    return block * per_block + entry % per_block
