"""Sparse attention in Triton: 64 query heads of a row against its window and its selected entries, keys being values.

Heads are the M side of BF16 matrix products with FP32 sums. Decoded records come as even and odd columns of two halves
(`backends.cuda.decoding`), so queries and sums are kept as four quarters too.

A row's keys are cut into tiles of `TILE` keys at fixed places. Each tile gets its own softmax and its own sums, which
are folded into the row's in the order of the tiles. With few rows every tile is a program of its own and a second
kernel folds, with the same instructions: a row's bits depend neither on the number of rows nor on the schedule.
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

from backends.cuda.decoding import UNDONE, check_records, decoded, is_native, operand, prefetch
from backends.torch_runtime.views import EntryView, WindowView

HEADS = 64
"""Heads of a program: the M of one warpgroup's product."""
MAX_WINDOW = 136
"""Keys of a row's window, draft rows included."""


@dataclass(frozen=True)
class Tiling:
    """How attention is cut. `split_below` rows and fewer spread their tiles over programs; no result depends on it."""

    tile: int = 128
    num_warps: int = 8
    split_below: int = 32
    merge_columns: int = 32


HOPPER = Tiling()
BLACKWELL = Tiling(tile=64)
"""Fewer spilled registers than with tiles of 128; not measured."""
LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _fold_factors(top, part_top):
    """The larger of two exponents, and the powers of two that bring running sums and a tile's sums to it."""
    new_top = tl.maximum(top, part_top)
    safe = tl.where(new_top == -float("inf"), 0.0, new_top)
    keep = (tl.maximum(top - safe, -127.0).to(tl.int32) + 127) << 23
    add = (tl.maximum(part_top - safe, -127.0).to(tl.int32) + 127) << 23
    return new_top, keep.to(tl.float32, bitcast=True), add.to(tl.float32, bitcast=True)


@triton.jit
def _folded(total, part, keep, NATIVE: tl.constexpr):
    """total x keep + part, rounded once. Volatile, or the compiler moves all such sums of a tile behind its products,
    whose results then fill the registers."""
    keep = tl.broadcast_to(keep, total.shape)
    if NATIVE:
        total = tl.inline_asm_elementwise(
            "fma.rn.f32 $0, $1, $2, $3;", "=f,f,f,f", [total, keep, part], dtype=tl.float32, is_pure=False, pack=1
        )
    else:
        total = tl.fma(total, keep, part)
    return total


@triton.jit
def _product(a, b, total, one, LOOPED: tl.constexpr):
    """total + a b. A loop of one turn hides from the compiler what the product is part of.

    Hopper: Triton lays a product that visibly feeds another out with all warps along M, and with 64 heads the second
    warpgroup would repeat the work of the first. Blackwell: Triton moves the tensor memory of a product out of the
    innermost loop around it; that of all products of a tile together is more than there is.
    """
    if LOOPED:
        for _ in range(one):
            total = tl.dot(a, b, total)
    else:
        total = tl.dot(a, b, total)
    return total


@triton.jit
def _attend(q, kv, live, scale, one, sums, weight, top, NATIVE: tl.constexpr, WGMMA: tl.constexpr):
    """Fold one tile of keys into sums (4 x [heads, DIM / 4]), weight [heads] (of exponentials) and top [heads]."""
    logits = tl.zeros((q[0].shape[0], kv[0].shape[0]), tl.float32)
    logits = _product(q[0], tl.trans(kv[0]), logits, one, WGMMA)
    logits = _product(q[1], tl.trans(kv[1]), logits, one, WGMMA)
    logits = _product(q[2], tl.trans(kv[2]), logits, one, WGMMA)
    logits = _product(q[3], tl.trans(kv[3]), logits, one, WGMMA)
    logits = tl.where(live[None, :], logits * scale, -float("inf"))
    # A whole exponent instead of the maximum itself: then all that folding multiplies by are powers of two, and it does
    # not matter whether this happens to the weights before the product or to the sums behind it.
    tile_top = tl.ceil(tl.max(logits, 1))
    p = tl.exp2(logits - tl.where(tile_top == -float("inf"), 0.0, tile_top)[:, None])
    top, keep, add = _fold_factors(top, tile_top)
    weight = _folded(weight, tl.sum(p, 1) * add, keep, NATIVE)
    p = operand(p * add[:, None], NATIVE)
    keep = keep[:, None]
    none = tl.zeros(sums[0].shape, tl.float32)
    sums0 = _folded(sums[0], _product(p, kv[0], none, one, not WGMMA), keep, NATIVE)
    sums1 = _folded(sums[1], _product(p, kv[1], none, one, not WGMMA), keep, NATIVE)
    sums2 = _folded(sums[2], _product(p, kv[2], none, one, not WGMMA), keep, NATIVE)
    sums3 = _folded(sums[3], _product(p, kv[3], none, one, not WGMMA), keep, NATIVE)
    return (sums0, sums1, sums2, sums3), weight, top


@triton.jit
def _normaliser(weight, top, sink, head, heads):
    """What the sums are multiplied by: 1 / (weight + exp(sink)), and 0 for a row without keys."""
    sink = tl.load(sink + head, mask=head < heads, other=0.0).to(tl.float32) * LOG2_E
    highest = tl.maximum(top, sink)
    highest = tl.where(highest == -float("inf"), 0.0, highest)
    share = tl.exp2(top - highest)
    total = weight * share + tl.exp2(sink - highest)
    return tl.where(weight > 0, share * UNDONE / tl.where(total > 0, total, 1.0), 0.0)


@triton.jit
def _loaded_q(at, mask, QUARTER: tl.constexpr, NATIVE: tl.constexpr):
    """Every second column from `at` [heads]: a plain load, which goes to shared memory; others stay in registers.

    Transposed, since Triton lays threads along the first axis where neither is contiguous.
    """
    q = tl.load(at[None, :] + 2 * tl.arange(0, QUARTER)[:, None], mask=mask[None, :], other=0.0)
    return tl.trans(operand(q, NATIVE))


@triton.jit
def _store_columns(at, even, odd, mask):
    """Even and odd columns as neighbours again."""
    both = tl.reshape(tl.join(even, odd), (even.shape[0], 2 * even.shape[1]))
    column = tl.arange(0, 2 * even.shape[1])[None, :]
    tl.store(at + column, both.to(at.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["one"])
def _attention_kernel(
    q,
    sink,
    scale,
    one,
    ring,
    buffer,
    window_slot,
    ring_lo,
    ring_hi,
    buf_lo,
    buf_hi,
    main,
    records,
    out,
    partial,
    statistics,
    heads,
    topk,
    DIM: tl.constexpr,
    RING_LEN: tl.constexpr,
    WINDOW_BYTES: tl.constexpr,
    MAIN_BYTES: tl.constexpr,
    FP4: tl.constexpr,
    ENTRIES: tl.constexpr,
    TOPK: tl.constexpr,
    TILE: tl.constexpr,
    WINDOW_TILES: tl.constexpr,
    SPLIT: tl.constexpr,
    NATIVE: tl.constexpr,
    WGMMA: tl.constexpr,
    HEADS: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    key = tl.arange(0, TILE)
    low = tl.load(ring_lo + row)
    num_ring = tl.maximum(tl.load(ring_hi + row) - low, 0)
    first = tl.load(buf_lo + row)
    num_window = num_ring + tl.maximum(tl.load(buf_hi + row) - first, 0)
    window_start = 0
    window_end = tl.minimum(tl.cdiv(num_window, TILE), WINDOW_TILES)
    entry_start = 0
    entry_end = 0
    chosen = records + row * topk
    if ENTRIES:
        at = tl.arange(0, TOPK)
        used = tl.load(chosen + at, mask=at < topk, other=-1) >= 0
        entry_end = tl.cdiv(tl.max(tl.where(used, at + 1, 0), 0), TILE)
    if SPLIT:
        tile = tl.program_id(2)
        window_start = tile
        window_end = tl.minimum(window_end, tile + 1)
        entry_start = tl.maximum(tile - WINDOW_TILES, 0)
        entry_end = tl.minimum(entry_end, tile - WINDOW_TILES + 1)

    quarter: tl.constexpr = DIM // 4
    lane = tl.arange(0, HEADS)
    head = tl.program_id(1) * HEADS + lane
    real = head < heads
    at = q + (row * heads + head) * DIM
    q0 = _loaded_q(at, real, quarter, NATIVE)
    q1 = _loaded_q(at + 1, real, quarter, NATIVE)
    q2 = _loaded_q(at + 2 * quarter, real, quarter, NATIVE)
    q3 = _loaded_q(at + (2 * quarter + 1), real, quarter, NATIVE)
    zeros = tl.zeros((HEADS, quarter), tl.float32)
    sums = (zeros, zeros, zeros, zeros)
    weight = tl.zeros((HEADS,), tl.float32)
    top = tl.full((HEADS,), -float("inf"), tl.float32)

    slot = tl.maximum(tl.load(window_slot + row), 0).to(tl.int64)
    for tile in tl.range(window_start, window_end, num_stages=1):
        place = tile * TILE + key
        in_ring = ring + (slot * RING_LEN + (low + place) % RING_LEN) * WINDOW_BYTES
        in_buffer = buffer + (first - num_ring + place).to(tl.int64) * WINDOW_BYTES
        kv = decoded(tl.where(place < num_ring, in_ring, in_buffer), place < num_window, DIM, False, NATIVE)
        sums, weight, top = _attend(
            (q0, q1, q2, q3), kv, place < num_window, scale, one, sums, weight, top, NATIVE, WGMMA
        )
    if ENTRIES:
        # Ahead of the tile at hand there are the next one's records, on their way to the L2 cache.
        place = entry_start * TILE + key
        record = tl.load(chosen + place, mask=place < topk, other=-1)
        for tile in tl.range(entry_start, entry_end, num_stages=1):
            live = record >= 0
            kv = decoded(main + tl.maximum(record, 0).to(tl.int64) * MAIN_BYTES, live, DIM, FP4, NATIVE)
            if not SPLIT:
                place = (tile + 1) * TILE + key
                record = tl.load(chosen + place, mask=place < topk, other=-1)
                if NATIVE:
                    prefetch(main + tl.maximum(record, 0).to(tl.int64) * MAIN_BYTES, MAIN_BYTES, 4 if FP4 else 8)
            sums, weight, top = _attend((q0, q1, q2, q3), kv, live, scale, one, sums, weight, top, NATIVE, WGMMA)

    if SPLIT:
        base = (row * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(2) + tl.program_id(2)
        tl.store(statistics + base * 2 * HEADS + lane, top)
        tl.store(statistics + base * 2 * HEADS + HEADS + lane, weight)
        if (window_end > window_start) | (entry_end > entry_start):
            shares = partial + (base * HEADS + lane[:, None]) * DIM + tl.arange(0, quarter)[None, :]
            tl.store(shares, sums[0])
            tl.store(shares + quarter, sums[1])
            tl.store(shares + 2 * quarter, sums[2])
            tl.store(shares + 3 * quarter, sums[3])
    else:
        factor = _normaliser(weight, top, sink, head, heads)[:, None]
        to = out + (row * heads + head[:, None]) * DIM
        _store_columns(to, sums[0] * factor, sums[1] * factor, real[:, None])
        _store_columns(to + DIM // 2, sums[2] * factor, sums[3] * factor, real[:, None])


@triton.jit
def _merge_kernel(
    partial,
    statistics,
    sink,
    out,
    heads,
    DIM: tl.constexpr,
    TILES: tl.constexpr,
    HEADS: tl.constexpr,
    COLUMNS: tl.constexpr,
    NATIVE: tl.constexpr,
):
    """Fold the tiles of a row for COLUMNS even and odd columns of one half."""
    row = tl.program_id(0).to(tl.int64)
    per_half: tl.constexpr = DIM // 4 // COLUMNS
    half = tl.program_id(2) // per_half
    near = tl.program_id(2) % per_half * COLUMNS
    lane = tl.arange(0, HEADS)
    even = tl.zeros((HEADS, COLUMNS), tl.float32)
    odd = tl.zeros((HEADS, COLUMNS), tl.float32)
    weight = tl.zeros((HEADS,), tl.float32)
    top = tl.full((HEADS,), -float("inf"), tl.float32)
    base = (row * tl.num_programs(1) + tl.program_id(1)) * TILES
    for tile in tl.static_range(TILES):
        part_top = tl.load(statistics + (base + tile) * 2 * HEADS + lane)
        part_weight = tl.load(statistics + (base + tile) * 2 * HEADS + HEADS + lane)
        written = (part_top > -float("inf"))[:, None]
        at = partial + ((base + tile) * HEADS + lane[:, None]) * DIM + half * (DIM // 2) + near
        at += tl.arange(0, COLUMNS)[None, :]
        part_even = tl.load(at, mask=written, other=0.0)
        part_odd = tl.load(at + DIM // 4, mask=written, other=0.0)
        top, keep, add = _fold_factors(top, part_top)
        weight = _folded(weight, part_weight * add, keep, NATIVE)
        even = _folded(even, part_even * add[:, None], keep[:, None], NATIVE)
        odd = _folded(odd, part_odd * add[:, None], keep[:, None], NATIVE)
    head = tl.program_id(1) * HEADS + lane
    factor = _normaliser(weight, top, sink, head, heads)[:, None]
    at = out + (row * heads + head[:, None]) * DIM + half * (DIM // 2) + 2 * near
    _store_columns(at, even * factor, odd * factor, (head < heads)[:, None])


def sparse_attention(
    q: Tensor, sink: Tensor, scale: float, window: WindowView, entries: EntryView | None, tiling: Tiling | None = None
) -> Tensor:
    """Attention of q [m, heads, dim] over each row's window keys and selected entries; keys are values too.

    `sink` FP32 [heads] is the logit of a key without value. Records are those of the storages fp4 and mxfp8; rows
    without any key give zeros. Raises UsageError for records of other widths.
    """
    m, heads, dim = q.shape
    check_records(window.ring, dim, "window")
    fp4 = entries is not None and check_records(entries.main, dim, "main") == "fp4"
    q, out = q.contiguous(), torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if m == 0:
        return out
    native = is_native(_attention_kernel)
    wgmma = native and torch.cuda.get_device_capability(q.device)[0] == 9
    tiling = tiling or (HOPPER if wgmma else BLACKWELL)
    topk = 0 if entries is None else entries.records.shape[1]
    window_tiles, entry_tiles = triton.cdiv(MAX_WINDOW, tiling.tile), triton.cdiv(topk, tiling.tile)
    tiles, groups = window_tiles + entry_tiles, triton.cdiv(heads, HEADS)
    split = m <= tiling.split_below
    shares = q.new_empty((m * groups * tiles if split else 0, HEADS, dim), dtype=torch.float32)
    statistics = q.new_empty((len(shares), 2, HEADS), dtype=torch.float32)
    _attention_kernel[(m, groups, tiles if split else 1)](
        q,
        sink,
        scale * LOG2_E.value * UNDONE.value,
        1,
        window.ring,
        window.buffer,
        window.slot,
        window.ring_lo,
        window.ring_hi,
        window.buf_lo,
        window.buf_hi,
        *_entry_arguments(entries, window),
        out,
        shares,
        statistics,
        heads,
        topk,
        DIM=dim,
        RING_LEN=window.ring.shape[1],
        WINDOW_BYTES=window.ring.shape[-1],
        MAIN_BYTES=0 if entries is None else entries.main.shape[-1],
        FP4=fp4,
        ENTRIES=entries is not None,
        TOPK=triton.next_power_of_2(max(topk, 1)),
        TILE=tiling.tile,
        WINDOW_TILES=window_tiles,
        SPLIT=split,
        NATIVE=native,
        WGMMA=wgmma,
        HEADS=HEADS,
        num_warps=tiling.num_warps,
    )
    if split:
        columns = min(tiling.merge_columns, dim // 4)
        _merge_kernel[(m, groups, dim // 2 // columns)](
            shares,
            statistics,
            sink,
            out,
            heads,
            DIM=dim,
            TILES=tiles,
            HEADS=HEADS,
            COLUMNS=columns,
            NATIVE=native,
            num_warps=4,
        )
    return out


def _entry_arguments(entries: EntryView | None, window: WindowView) -> tuple[Tensor, Tensor]:
    if entries is None:
        return window.ring, window.slot  # never read: the kernel is compiled without entries
    return entries.main, entries.records.contiguous()
