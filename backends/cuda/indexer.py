"""The indexer in Triton: scores of index keys, the k best entries, and the blocks that later layers choose from.

Scoring takes keys as the M side of BF16 products, exactly: E2M1 numbers times powers of two are BF16 numbers. A program
decodes a tile of keys once for all consecutive rows of one request among `Scoring.share` rows.

Selection is exact. The k-th largest score of a segment held in registers is found bit by bit on integers of the same
order, and what is above it is compacted in the order of entries; rows longer than a segment repeat this on the
survivors. No sum of floating-point numbers and no atomic: the result is one set in one order.
Semantics: `backends.torch_runtime.reference.attention`.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.cuda.attention import check_records, is_native, operand, power_of_two, spread, unpack_e2m1

SEGMENT = 8192
"""Scores that one program of the selection holds."""


@dataclass(frozen=True)
class Scoring:
    """How scoring is cut: keys of a tile, rows that may share it, rows of a product, programs aimed at."""

    tile: int = 128
    share: int = 16
    rows: int = 4
    programs: int = 2048
    num_warps: int = 4


SCORING = Scoring()

# Keys are decoded to 2^-32 of their value: 2^126, which corrects a code's bits, times the largest scale is no BF16.
_KEY_EXPONENT = tl.constexpr(126 - 32)
_UNDONE = tl.constexpr(2.0**32)


@triton.jit
def _rounded_e2m1(x):
    """The nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 with x's sign, ties to the even code; |x| <= 6."""
    size = tl.abs(x)
    step = tl.where(size < 2.0, 0.5, tl.where(size < 4.0, 1.0, 2.0))
    # Adding 1.5 x 2^23 leaves no bits below one: the sum is rounded to an integer, ties to even.
    whole = (size / step + 12582912.0) - 12582912.0
    return tl.where(x < 0, -whole, whole) * step


@triton.jit
def _round_q_kernel(q, out, BLOCKS: tl.constexpr, PADDED: tl.constexpr, NATIVE: tl.constexpr):
    """A row of q, BLOCKS x 32 numbers, rounded through MXFP4: first all even columns, then all odd ones."""
    row = tl.program_id(0).to(tl.int64)
    block = tl.arange(0, PADDED)[:, None]
    x = tl.load(q + row * BLOCKS * 32 + block * 32 + tl.arange(0, 32)[None, :], mask=block < BLOCKS, other=0.0)
    x = x.to(tl.float32)
    bits = (tl.maximum(tl.max(tl.abs(x), 1), 6.0 * 2.0**-126) * (1.0 / 6.0)).to(tl.int32, bitcast=True)
    exponent = (bits >> 23) + ((bits & 0x7FFFFF) != 0).to(tl.int32)
    scale = power_of_two(exponent).to(tl.float32)[:, None]
    rounded = _rounded_e2m1(x * power_of_two(254 - exponent).to(tl.float32)[:, None]) * scale
    even, odd = tl.split(tl.reshape(rounded, (PADDED, 16, 2)))
    at = out + row * BLOCKS * 32 + block * 16 + tl.arange(0, 16)[None, :]
    tl.store(at, operand(even, NATIVE), mask=block < BLOCKS)
    tl.store(at + BLOCKS * 16, operand(odd, NATIVE), mask=block < BLOCKS)


@triton.jit
def _key_tile(
    tile,
    candidates,
    table,
    keys,
    columns,
    limit,
    DIM: tl.constexpr,
    RECORD: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr,
    TILE: tl.constexpr,
):
    """Codes and scales of a tile's index records, and the entries its columns stand for (-1: not before `limit`)."""
    column = tile * TILE + tl.arange(0, TILE)
    entry = column
    if CANDIDATE_BLOCK > 0:
        block = tl.load(candidates + column // CANDIDATE_BLOCK, mask=column < columns, other=-1)
        entry = tl.where(block < 0, -1, block * CANDIDATE_BLOCK + column % CANDIDATE_BLOCK)
    entry = tl.where((entry < limit) & (column < columns), entry, -1)
    live = entry >= 0
    place = tl.maximum(entry, 0)
    block = tl.load(table + place // PER_BLOCK, mask=live, other=0).to(tl.int64)
    record = keys + (block * PER_BLOCK + place % PER_BLOCK) * RECORD
    packed = tl.load(record[:, None] + tl.arange(0, DIM // 2)[None, :], mask=live[:, None], other=0)
    scale = tl.load(record[:, None] + (DIM // 2 + tl.arange(0, DIM // 32)[None, :]), mask=live[:, None], other=0)
    return packed, scale, entry


@triton.jit
def _score_rows(
    even,
    odd,
    entry,
    column,
    q,
    weights,
    visible,
    scores,
    columns,
    first,
    end,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Scores of a decoded tile of keys for the rows [first, end), ROWS of them in a product."""
    for row in tl.range(first, end, ROWS, num_stages=2):
        lane = tl.arange(0, ROWS * HEADS)
        owner = (row + lane // HEADS).to(tl.int64)
        mask = owner < end
        head = q + owner * (HEADS * DIM) + lane % HEADS * (DIM // 2)
        part = head[:, None] + tl.arange(0, DIM // 2)[None, :]
        q_even = tl.load(part, mask=mask[:, None], other=0.0)
        q_odd = tl.load(part + HEADS * (DIM // 2), mask=mask[:, None], other=0.0)
        total = tl.dot(even, tl.trans(q_even))
        total = tl.dot(odd, tl.trans(q_odd), total)
        weight = tl.load(weights + owner * HEADS + lane % HEADS, mask=mask, other=0.0) * _UNDONE
        total = tl.maximum(total, 0.0) * weight[None, :]
        score = tl.sum(tl.reshape(total, (even.shape[0], ROWS, HEADS)), 2)
        of = row + tl.arange(0, ROWS)
        seen = tl.load(visible + of, mask=of < end, other=0)
        score = tl.where((entry >= 0)[:, None] & (entry[:, None] < seen[None, :]), score, -float("inf"))
        to = scores + of.to(tl.int64)[None, :] * columns + column[:, None]
        tl.store(to, score, mask=(of < end)[None, :] & (column < columns)[:, None])


@triton.jit
def _run_of_rows(slots, row, slot, m, SHARE: tl.constexpr):
    """Whether a row is the first of its slot among SHARE aligned rows, and where the run of these ends."""
    near = row // SHARE * SHARE + tl.arange(0, SHARE)
    near_slot = tl.load(slots + near, mask=near < m, other=-2)
    other = tl.where((near > row) & (near_slot != slot), near, (row // SHARE + 1) * SHARE)
    leads = (row % SHARE == 0) | (tl.load(slots + tl.maximum(row - 1, 0)) != slot)
    return leads, tl.minimum(tl.min(other, 0), m)


@triton.jit(do_not_specialize=["m", "unscored"])
def _score_kernel(
    q,
    weights,
    keys,
    block_table,
    slots,
    visible,
    candidates,
    scores,
    m,
    columns,
    max_blocks,
    unscored,
    HEADS: tl.constexpr,
    DIM: tl.constexpr,
    RECORD: tl.constexpr,
    PER_BLOCK: tl.constexpr,
    CANDIDATE_BLOCK: tl.constexpr,
    PAD: tl.constexpr,
    TILE: tl.constexpr,
    SHARE: tl.constexpr,
    ROWS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Scores of every num_programs(1)-th tile of columns for a run of rows of one slot. CANDIDATE_BLOCK 0: all entries."""
    row = tl.program_id(0)
    program = tl.program_id(1)
    count = tl.num_programs(1)
    slot = tl.load(slots + row)
    leads = row >= 0
    end = row + 1
    chosen = candidates
    if CANDIDATE_BLOCK > 0:
        chosen = candidates + row.to(tl.int64) * (columns // CANDIDATE_BLOCK)
    else:
        leads, end = _run_of_rows(slots, row, slot, m, SHARE)
    run = row + tl.arange(0, SHARE)
    limit = tl.max(tl.load(visible + run, mask=run < end, other=0), 0)
    limit = tl.where(limit <= unscored, 0, limit)
    reach = tl.minimum(limit, columns)
    if CANDIDATE_BLOCK > 0:
        reach = tl.where(limit > 0, columns, 0)
    tiles = tl.cdiv(reach, TILE)
    if leads & (program < tiles):
        table = block_table + tl.maximum(slot, 0).to(tl.int64) * max_blocks
        packed, scale, entry = _key_tile(
            program, chosen, table, keys, columns, limit, DIM, RECORD, PER_BLOCK, CANDIDATE_BLOCK, TILE
        )
        for tile in tl.range(program, tiles, count, num_stages=1):
            exponent = scale.to(tl.int32) + _KEY_EXPONENT
            even, odd = unpack_e2m1(packed, spread(power_of_two(exponent), 16), NATIVE)
            column = tile * TILE + tl.arange(0, TILE)
            here = entry
            # The next tile's loads are under way while this one is scored.
            packed, scale, entry = _key_tile(
                tile + count, chosen, table, keys, columns, limit, DIM, RECORD, PER_BLOCK, CANDIDATE_BLOCK, TILE
            )
            if ROWS == 1:
                _score_rows(even, odd, here, column, q, weights, visible, scores, columns, row, end, HEADS, DIM, 1)
            elif end - row > 1:
                _score_rows(even, odd, here, column, q, weights, visible, scores, columns, row, end, HEADS, DIM, ROWS)
            else:
                _score_rows(even, odd, here, column, q, weights, visible, scores, columns, row, end, HEADS, DIM, 1)
    if PAD:
        last = tl.where(leads, end, row)
        start = tiles + (program + count - tiles % count) % count
        for tile in tl.range(start, tl.cdiv(columns, TILE), count, num_stages=1):
            column = tile * TILE + tl.arange(0, TILE)
            for of in tl.range(row, last, num_stages=1):
                none = tl.full((TILE,), -float("inf"), tl.float32)
                tl.store(scores + (row.to(tl.int64) + (of - row)) * columns + column, none, mask=column < columns)


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
    pad: bool = True,
    unscored: int = 0,
    scoring: Scoring = SCORING,
) -> Tensor:
    """FP32 scores [m, max_entries] of cached index keys for q [m, heads, dim]: sum over heads of weight x relu(q k).

    q is rounded to E2M1. Entries not before `visible` [m] score -inf. With `candidates` [m, n], blocks of neighbouring
    entries (-1: none), column c x block + j is entry candidates[c] x block + j.

    For callers that only look at visible entries: without `pad` columns that nobody sees are left unwritten, and rows
    with no more than `unscored` visible entries are too. `select_topk(k=unscored)` and `candidate_blocks` ignore both.
    """
    m, heads, dim = q.shape
    check_records(keys, dim, "index")
    columns = max_entries if candidates is None else candidates.shape[1] * candidate_block
    scores = torch.empty((m, columns), dtype=torch.float32, device=q.device)
    if scores.numel() == 0:
        return scores
    native = is_native(_score_kernel)
    rounded = torch.empty((m, 2, heads, dim // 2), dtype=torch.bfloat16 if native else torch.float32, device=q.device)
    blocks = heads * dim // 32
    padded = triton.next_power_of_2(blocks)
    _round_q_kernel[(m,)](q.contiguous(), rounded, BLOCKS=blocks, PADDED=padded, NATIVE=native, num_warps=4)
    tiles = triton.cdiv(columns, scoring.tile)
    _score_kernel[(m, min(tiles, max(triton.cdiv(scoring.programs, m), 4)))](
        rounded,
        weights.contiguous(),
        keys,
        block_table,
        slot,
        visible,
        slot if candidates is None else candidates.contiguous(),
        scores,
        m,
        columns,
        block_table.shape[1],
        unscored,
        HEADS=heads,
        DIM=dim,
        RECORD=keys.shape[-1],
        PER_BLOCK=keys.shape[1],
        CANDIDATE_BLOCK=0 if candidates is None else candidate_block,
        PAD=pad,
        TILE=scoring.tile,
        SHARE=scoring.share,
        ROWS=scoring.rows if candidates is None else 1,
        NATIVE=native,
        num_warps=scoring.num_warps,
    )
    return scores


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
