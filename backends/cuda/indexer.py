"""Index scores in Triton; the selection that follows them is in `backends.cuda.selection`.

Keys are the M side of BF16 products, exactly: E2M1 numbers times powers of two are BF16 numbers. A program decodes a
tile of keys once for all consecutive rows of one request among `Scoring.share` rows; how many rows go into one product
changes no bit.
Semantics: `backends.torch_runtime.reference.attention`.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.cuda.decoding import check_records, is_native, operand, power_of_two, spread, unpack_e2m1
from backends.cuda.selection import candidate_blocks, select_topk

__all__ = ["Scoring", "candidate_blocks", "index_scores", "select_topk"]


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
    """Scores of every num_programs(1)-th tile of columns for a run of rows of one slot.

    CANDIDATE_BLOCK 0: the columns are all entries.
    """
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
