"""Exact selection in Triton: the k best entries of a row, and the blocks of entries that later layers choose from.

The k-th largest score of a segment held in registers is found bit by bit on integers of the same order, and what is
above it is compacted in the order of entries; rows longer than a segment repeat this on the survivors. No sum of
floating-point numbers and no atomic: the result is one set in one order.
Semantics: `backends.torch_runtime.reference.attention`.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

SEGMENT = 8192
"""Scores that one program of the selection holds."""


@triton.jit
def _ordered(score):
    """uint32 in the order of finite FP32 numbers and above 0; the two zeros are one."""
    bits = tl.where(score == 0.0, 0.0, score).to(tl.uint32, bitcast=True)
    return tl.where((bits >> 31) != 0, ~bits, bits | 0x80000000)


@triton.jit
def _first_keys(
    scores, candidates, column, columns, seen, K: tl.constexpr, CANDIDATE_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):
    """Ordered integers of a row's columns (0: not eligible) and what the columns stand for."""
    entry = column
    if CANDIDATE_BLOCK > 0:
        at = candidates + column // CANDIDATE_BLOCK
        block = tl.load(at, mask=column < columns, other=-1)
        entry = tl.where(block < 0, -1, block * CANDIDATE_BLOCK + column % CANDIDATE_BLOCK)
        score = tl.load(scores + column, mask=(entry >= 0) & (entry < seen) & (column < columns), other=-float("inf"))
        eligible = score > -float("inf")
    elif BLOCK > 1:
        eligible = column * BLOCK < seen
        score = tl.full(column.shape, -float("inf"), tl.float32)
        read = tl.minimum(tl.where(seen > K * BLOCK, seen, 0), columns)
        for i in tl.static_range(BLOCK):
            place = column * BLOCK + i
            score = tl.maximum(score, tl.load(scores + place, mask=place < read, other=-float("inf")))
    else:
        # A row that sees no more than k entries takes them all, whatever their scores.
        eligible = column < seen
        score = tl.load(scores + column, mask=column < tl.where(seen > K, seen, 0), other=0.0)
        eligible = eligible & (score > -float("inf"))
    key = tl.where(eligible, _ordered(score), 0)
    if BLOCK > 1:
        key = tl.where(eligible & (column == (seen - 1) // BLOCK), 0xFFFFFFFF, key)
    return key.to(tl.uint32), entry


@triton.jit
def _select_kernel(
    scores,
    candidates,
    visible,
    keys,
    entries,
    out_keys,
    out_entries,
    columns,
    K: tl.constexpr,
    PADDED_K: tl.constexpr,
    SEGMENT: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr,
    BLOCK: tl.constexpr,
    FIRST: tl.constexpr,
    LAST: tl.constexpr,
):
    """The K best of one segment of a row, in the order of the columns; `columns` is the row's width in this round."""
    row = tl.program_id(0).to(tl.int64)
    start = tl.program_id(1) * SEGMENT
    column = start + tl.arange(0, SEGMENT)
    base = (row * tl.num_programs(1) + tl.program_id(1)) * K
    place = tl.arange(0, PADDED_K)
    seen = tl.load(visible + row)
    reach = columns
    if FIRST and CANDIDATE_BLOCK == 0:
        seen = tl.minimum(seen, columns)
        reach = tl.cdiv(seen, BLOCK)
    count = 0
    if start < reach:
        if FIRST:
            wide = candidates
            if CANDIDATE_BLOCK > 0:
                wide = candidates + row * (columns // CANDIDATE_BLOCK)
            key, entry = _first_keys(scores + row * columns, wide, column, columns, seen, K, CANDIDATE_BLOCK, BLOCK)
        else:
            key = tl.load(keys + row * columns + column, mask=column < columns, other=0).to(tl.uint32, bitcast=True)
            entry = tl.load(entries + row * columns + column, mask=column < columns, other=-1)
        steps = tl.where(tl.sum((key > 0).to(tl.int32), 0) > K, 32, 0)
        threshold = tl.zeros((1,), tl.uint32)
        bit = tl.full((1,), 0x80000000, tl.uint32)
        for _ in range(steps):
            trial = threshold | bit
            enough = tl.sum((key >= trial).to(tl.int32), 0) >= K
            threshold = tl.where(enough, trial, threshold)
            bit = bit >> 1
        above = key > threshold
        equal = (key == threshold) & (key > 0)
        free = K - tl.sum(above.to(tl.int32), 0)
        own = above.to(tl.int32) | (equal.to(tl.int32) << 16)
        before = tl.cumsum(own, 0) - own
        equal_before = before >> 16
        chosen = above | (equal & (equal_before < free))
        to = (before & 0xFFFF) + tl.minimum(equal_before, free)
        tl.store(out_entries + base + to, entry, mask=chosen)
        if not LAST:
            tl.store(out_keys + base + to, key.to(tl.int32, bitcast=True), mask=chosen)
        count = tl.sum(chosen.to(tl.int32), 0)
    rest = (place >= count) & (place < K)
    tl.store(out_entries + base + place, tl.full((PADDED_K,), -1, tl.int32), mask=rest)
    if not LAST:
        tl.store(out_keys + base + place, tl.zeros((PADDED_K,), tl.int32), mask=rest)


def select_topk(
    scores: Tensor, visible: Tensor, k: int, candidates: Tensor | None = None, candidate_block: int = 8
) -> Tensor:
    """Entries int32 [m, k] with the best finite scores, in the order of columns, -1 behind them; ties: lower column.

    Columns not before `visible` are never read, nor any of a row that sees no more than k entries.
    """
    block = 0 if candidates is None else candidate_block
    return _select(scores, visible, k, scores.shape[1], candidates, block, 1)


def candidate_blocks(scores: Tensor, visible: Tensor, num_blocks: int, block: int = 8) -> Tensor:
    """Blocks of `block` entries with the best maximum, int32 [m, num_blocks] in ascending order, -1 behind them.

    The block with the newest visible entry is always among them: it is only partly filled.
    """
    return _select(scores, visible, num_blocks, triton.cdiv(scores.shape[1], block), None, 0, block)


def _select(
    scores: Tensor, visible: Tensor, k: int, choices: int, candidates: Tensor | None, candidate_block: int, block: int
) -> Tensor:
    m = len(scores)
    keys = entries = scores.new_empty(0, dtype=torch.int32)
    first, last, columns = True, False, scores.shape[1]
    while not last:
        segment = max(min(triton.next_power_of_2(choices), max(SEGMENT, 2 * triton.next_power_of_2(k))), 16)
        segments = triton.cdiv(choices, segment)
        last = segments <= 1
        out_keys = scores.new_empty((0 if last else m, segments * k), dtype=torch.int32)
        out_entries = scores.new_empty((m, max(segments, 1) * k), dtype=torch.int32)
        if m > 0:
            _select_kernel[(m, max(segments, 1))](
                scores,
                scores if candidates is None else candidates.contiguous(),
                visible,
                keys,
                entries,
                out_keys,
                out_entries,
                columns,
                K=k,
                PADDED_K=triton.next_power_of_2(k),
                SEGMENT=segment,
                CANDIDATE_BLOCK=candidate_block,
                BLOCK=block,
                FIRST=first,
                LAST=last,
                num_warps=max(4, min(16, segment // 512)),
            )
        first, keys, entries, choices, columns = False, out_keys, out_entries, segments * k, segments * k
    return entries


@triton.jit
def _records_kernel(
    entries, block_table, slots, records, k, max_blocks, PER_BLOCK: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    row = tl.program_id(0).to(tl.int64)
    place = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    table = block_table + tl.maximum(tl.load(slots + row), 0).to(tl.int64) * max_blocks
    entry = tl.load(entries + row * k + place, mask=place < k, other=-1)
    block = tl.load(table + tl.maximum(entry, 0) // PER_BLOCK, mask=entry >= 0, other=0)
    record = tl.where(entry >= 0, block * PER_BLOCK + entry % PER_BLOCK, -1)
    tl.store(records + row * k + place, record, mask=place < k)


def entry_records(entries: Tensor, block_table: Tensor, slot: Tensor, per_block: int) -> Tensor:
    """Where entries int32 [m, k] of each row's slot lie: indices int32 into blocks x per_block records, -1 for none.

    Entry e of slot s lies at [block_table[s, e // per_block], e % per_block].
    """
    m, k = entries.shape
    records = torch.empty_like(entries)
    if records.numel():
        block = min(512, triton.next_power_of_2(k))
        _records_kernel[(m, triton.cdiv(k, block))](
            entries,
            block_table,
            slot,
            records,
            k,
            block_table.shape[1],
            PER_BLOCK=per_block,
            BLOCK=block,
            num_warps=4,
            enable_fp_fusion=True,
        )
    return records
