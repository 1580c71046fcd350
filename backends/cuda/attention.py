"""Sparse attention in Triton: 64 query heads of a row against its window and its selected entries, keys being values.

Heads are the M side of BF16 matrix products with FP32 sums. Records are decoded in registers, exactly: a code's bits
are a BF16 number that is a power of two too small, and one multiplication by the scale corrects it. A byte of packed
E2M1 holds an even and an odd column, so keys, queries and sums are kept as even and odd halves and no column moves.

A row's keys are cut into tiles of `TILE` keys at fixed places. Each tile gets its own softmax and its own sums, which
are folded into the row's in the order of the tiles. With few rows every tile is a program of its own and a second
kernel folds, with the same instructions: a row's bits depend neither on the number of rows nor on the schedule.
Semantics: `backends.torch_runtime.reference.attention`.
"""

# ruff: noqa: N803
# mypy: allow-untyped-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.torch_runtime.formats import KVStorage, record_bytes
from backends.torch_runtime.views import EntryView, WindowView
from deepinfer.errors import UsageError

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


TILING = Tiling()

# Records are decoded to 2^-8 of their value, so that the largest scale times 2^126 is still a BF16 number.
LOG2_E = tl.constexpr(1.4426950408889634)
UNDONE = tl.constexpr(256.0)
_E2M1_SCALE = tl.constexpr(2.0**118)
_E4M3_EXPONENT = tl.constexpr(120 - 8)

# Four bytes are two pairs of bytes, each pair at the upper ends of two halves of a word: {0, b0, 0, b1}. There the high
# nibble's sign is in place and its three other bits belong six lower; shifted by four, so it is with the low nibble.
_E2M1_TO_BF16 = tl.constexpr("""
{
    .reg .b32 a, b, s, t;
    prmt.b32 a, $4, 0, 0x1404;
    prmt.b32 b, $4, 0, 0x3424;
    and.b32 s, a, 0x80008000;
    shr.u32 t, a, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $2, s, $5;
    and.b32 s, b, 0x80008000;
    shr.u32 t, b, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $3, s, $6;
    shl.b32 a, a, 4;
    shl.b32 b, b, 4;
    and.b32 s, a, 0x80008000;
    shr.u32 t, a, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $0, s, $5;
    and.b32 s, b, 0x80008000;
    shr.u32 t, b, 6;
    and.b32 t, t, 0x01C001C0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $1, s, $6;
}
""")

# Two pairs of E4M3 bytes: the odd columns' signs are in place, their seven other bits belong four lower.
_E4M3_TO_BF16 = tl.constexpr("""
{
    .reg .b32 a, s, t;
    and.b32 s, $2, 0x80008000;
    shr.u32 t, $2, 4;
    and.b32 t, t, 0x07F007F0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $1, s, $3;
    shl.b32 a, $2, 8;
    and.b32 s, a, 0x80008000;
    shr.u32 t, a, 4;
    and.b32 t, t, 0x07F007F0;
    or.b32 s, s, t;
    mul.rn.bf16x2 $0, s, $3;
}
""")


@triton.jit
def spread(scale, REPEAT: tl.constexpr):
    """[n, s] as [n, s x REPEAT]: each scale beside the values that share it."""
    wide = tl.broadcast_to(scale[:, :, None], (scale.shape[0], scale.shape[1], REPEAT))
    return tl.reshape(wide, (scale.shape[0], scale.shape[1] * REPEAT))


@triton.jit
def operand(x, NATIVE: tl.constexpr):
    """x rounded to BF16; interpreted, whose products know no BF16, the same numbers in FP32."""
    x = x.to(tl.bfloat16)
    return x if NATIVE else x.to(tl.float32)


@triton.jit
def unpack_e2m1(packed, scale, NATIVE: tl.constexpr):
    """Even and odd columns, BF16, of packed E2M1 times 2^-126 times `scale` (BF16, of packed's shape)."""
    if NATIVE:
        even, odd = tl.inline_asm_elementwise(
            _E2M1_TO_BF16,
            "=&r,=&r,=&r,=&r,r,r,r",
            [packed, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=4,
        )
    else:
        code = packed.to(tl.int32)
        factor = scale.to(tl.float32)
        even = operand((((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * factor, False)
        code = code >> 4
        odd = operand((((code & 8) << 28) | ((code & 7) << 22)).to(tl.float32, bitcast=True) * factor, False)
    return even, odd


@triton.jit
def unpack_e4m3(pairs, scale, NATIVE: tl.constexpr):
    """Even and odd columns, BF16, of pairs of E4M3 bytes (uint16) times 2^-120 times `scale` (BF16)."""
    if NATIVE:
        even, odd = tl.inline_asm_elementwise(
            _E4M3_TO_BF16,
            "=&r,=&r,r,r",
            [pairs, scale],
            dtype=(tl.bfloat16, tl.bfloat16),
            is_pure=True,
            pack=2,
        )
    else:
        code = pairs.to(tl.int32)
        factor = scale.to(tl.float32)
        even = operand((((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * factor, False)
        code = code >> 8
        odd = operand((((code & 128) << 24) | ((code & 127) << 20)).to(tl.float32, bitcast=True) * factor, False)
    return even, odd


@triton.jit
def power_of_two(exponent):
    """BF16 2^(exponent - 127), held inside its range."""
    return (tl.minimum(tl.maximum(exponent, 0), 254) << 23).to(tl.float32, bitcast=True).to(tl.bfloat16)


@triton.jit
def _decode(record, live, PART: tl.constexpr, DIM: tl.constexpr, FP4: tl.constexpr, NATIVE: tl.constexpr):
    """Even and odd columns, BF16 [n, DIM / 4], of half PART of the records at n addresses; zeros where not live."""
    at = record[:, None] + PART * (DIM // 4)
    mask = live[:, None]
    near = tl.arange(0, DIM // 4)[None, :]
    if FP4:
        packed = tl.load(at + near, mask=mask, other=0)
        at = record[:, None] + (DIM // 2 + PART * (DIM // 32))
        scale = tl.load(at + tl.arange(0, DIM // 32)[None, :], mask=mask, other=0).to(tl.float8e4nv, bitcast=True)
        even, odd = unpack_e2m1(packed, spread((scale.to(tl.float32) * _E2M1_SCALE).to(tl.bfloat16), 8), NATIVE)
    else:
        at = record.to(tl.pointer_type(tl.uint16))[:, None] + PART * (DIM // 4)
        pairs = tl.load(at + near, mask=mask, other=0)
        at = record[:, None] + (DIM + PART * (DIM // 64))
        scale = tl.load(at + tl.arange(0, DIM // 64)[None, :], mask=mask, other=0)
        even, odd = unpack_e4m3(pairs, spread(power_of_two(scale.to(tl.int32) + _E4M3_EXPONENT), 16), NATIVE)
    return even, odd


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
def _attend(
    q,
    record,
    live,
    scale,
    one,
    sums,
    weight,
    top,
    DIM: tl.constexpr,
    FP4: tl.constexpr,
    NATIVE: tl.constexpr,
    WGMMA: tl.constexpr,
):
    """Fold one tile of keys into sums (4 x [heads, DIM / 4]), weight [heads] (of exponentials) and top [heads]."""
    even0, odd0 = _decode(record, live, 0, DIM, FP4, NATIVE)
    even1, odd1 = _decode(record, live, 1, DIM, FP4, NATIVE)
    logits = tl.zeros((q[0].shape[0], even0.shape[0]), tl.float32)
    logits = _product(q[0], tl.trans(even0), logits, one, WGMMA)
    logits = _product(q[1], tl.trans(odd0), logits, one, WGMMA)
    logits = _product(q[2], tl.trans(even1), logits, one, WGMMA)
    logits = _product(q[3], tl.trans(odd1), logits, one, WGMMA)
    logits = tl.where(live[None, :], logits * scale, -float("inf"))
    # A whole exponent instead of the maximum itself: then all that folding multiplies by are powers of two, and it does
    # not matter whether this happens to the weights before the product or to the sums behind it.
    tile_top = tl.ceil(tl.max(logits, 1))
    p = tl.exp2(logits - tl.where(tile_top == -float("inf"), 0.0, tile_top)[:, None])
    top, keep, add = _fold_factors(top, tile_top)
    weight = _folded(weight, tl.sum(p, 1) * add, keep, NATIVE)
    p = operand(p * add[:, None], NATIVE)
    keep = keep[:, None]
    none = tl.zeros((p.shape[0], DIM // 4), tl.float32)
    sums0 = _folded(sums[0], _product(p, even0, none, one, not WGMMA), keep, NATIVE)
    sums1 = _folded(sums[1], _product(p, odd0, none, one, not WGMMA), keep, NATIVE)
    sums2 = _folded(sums[2], _product(p, even1, none, one, not WGMMA), keep, NATIVE)
    sums3 = _folded(sums[3], _product(p, odd1, none, one, not WGMMA), keep, NATIVE)
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
    """Every second column from `at` [heads]. A plain load, which goes to shared memory: other operands stay in registers.

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


@triton.jit
def _prefetch(record, RECORD: tl.constexpr, LINES: tl.constexpr):
    """Ask the L2 cache for records at n addresses."""
    line = tl.minimum(tl.arange(0, LINES) * 128, RECORD - 1)[None, :]
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.b32 $0, 0;",
        "=r,l",
        [record.to(tl.int64)[:, None] + line],
        dtype=tl.int32,
        is_pure=False,
        pack=1,
    )


@triton.jit
def _entry_records(place, chosen, table, topk, PER_BLOCK: tl.constexpr):
    """Which records of the main cache the selected entries are, int32; -1 at places without one."""
    entry = tl.load(chosen + place, mask=place < topk, other=-1)
    block = tl.load(table + tl.maximum(entry, 0) // PER_BLOCK, mask=entry >= 0, other=0)
    return tl.where(entry >= 0, block * PER_BLOCK + entry % PER_BLOCK, -1)


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
    block_table,
    entry_slot,
    selected,
    out,
    partial,
    statistics,
    heads,
    max_blocks,
    topk,
    DIM: tl.constexpr,
    RING_LEN: tl.constexpr,
    PER_BLOCK: tl.constexpr,
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
    chosen = selected + row * topk
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
        address = tl.where(place < num_ring, in_ring, in_buffer)
        sums, weight, top = _attend(
            (q0, q1, q2, q3), address, place < num_window, scale, one, sums, weight, top, DIM, False, NATIVE, WGMMA
        )
    if ENTRIES:
        table = block_table + tl.maximum(tl.load(entry_slot + row), 0).to(tl.int64) * max_blocks
        record = _entry_records(entry_start * TILE + key, chosen, table, topk, PER_BLOCK)
        for tile in tl.range(entry_start, entry_end, num_stages=1):
            address = main + tl.maximum(record, 0).to(tl.int64) * MAIN_BYTES
            live = record >= 0
            if not SPLIT:
                # The next tile's addresses hang on two loads, its records on a third.
                record = _entry_records((tile + 1) * TILE + key, chosen, table, topk, PER_BLOCK)
                if NATIVE:
                    _prefetch(main + tl.maximum(record, 0).to(tl.int64) * MAIN_BYTES, MAIN_BYTES, 4 if FP4 else 8)
            sums, weight, top = _attend(
                (q0, q1, q2, q3), address, live, scale, one, sums, weight, top, DIM, FP4, NATIVE, WGMMA
            )

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
    q: Tensor, sink: Tensor, scale: float, window: WindowView, entries: EntryView | None, tiling: Tiling = TILING
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
    topk = 0 if entries is None else entries.selected.shape[1]
    window_tiles, entry_tiles = triton.cdiv(MAX_WINDOW, tiling.tile), triton.cdiv(topk, tiling.tile)
    tiles, groups = window_tiles + entry_tiles, triton.cdiv(heads, HEADS)
    split = m <= tiling.split_below
    shares = q.new_empty((m * groups * tiles if split else 0, HEADS, dim), dtype=torch.float32)
    statistics = q.new_empty((len(shares), 2, HEADS), dtype=torch.float32)
    native = is_native(_attention_kernel)
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
        0 if entries is None else entries.block_table.shape[1],
        topk,
        DIM=dim,
        RING_LEN=window.ring.shape[1],
        PER_BLOCK=1 if entries is None else entries.main.shape[1],
        WINDOW_BYTES=window.ring.shape[-1],
        MAIN_BYTES=0 if entries is None else entries.main.shape[-1],
        FP4=fp4,
        ENTRIES=entries is not None,
        TOPK=triton.next_power_of_2(max(topk, 1)),
        TILE=tiling.tile,
        WINDOW_TILES=window_tiles,
        SPLIT=split,
        NATIVE=native,
        WGMMA=native and torch.cuda.get_device_capability(q.device)[0] == 9,
        HEADS=HEADS,
        num_warps=tiling.num_warps,
    )
    if split:
        columns = min(tiling.merge_columns, dim // 4)
        grid = (m, groups, dim // 2 // columns)
        _merge_kernel[grid](
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


def is_native(kernel: Any) -> bool:
    """Whether a kernel is compiled for a device, or interpreted, where there is no inline assembly."""
    return isinstance(kernel, triton.JITFunction)


def check_records(cache: Tensor, dim: int, kind: Literal["window", "main", "index"]) -> KVStorage:
    """The storage of a cache [..., record bytes]; UsageError if it is not one that the kernels decode."""
    storages: tuple[KVStorage, ...] = ("fp4", "mxfp8")
    widths = {record_bytes(storage, dim, kind): storage for storage in reversed(storages)}
    if cache.dtype != torch.uint8 or cache.shape[-1] not in widths:
        raise UsageError(
            f"the CUDA kernels cannot read {kind} records of {cache.shape[-1]} x {cache.dtype} for {dim} numbers: "
            f"store the KV cache as fp4 or mxfp8 (records of {' or '.join(map(str, sorted(widths)))} bytes)"
        )
    return widths[cache.shape[-1]]


def _entry_arguments(entries: EntryView | None, window: WindowView) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if entries is None:
        # Never read: the kernel is compiled without entries.
        return window.ring, window.slot, window.slot, window.slot
    return entries.main, entries.block_table, entries.slot, entries.selected.contiguous()
