"""Hyper-connections in Triton: one pass over the residual streams, then one over the collapsed rows.

The first kernel reads the streams once: it closes the sublayer before, writes the new streams and the collapsed row,
and leaves each tile's share of the 24 dot products. Tiles are 32 rows by 128 columns of the four streams, so a tile
of FN's 1.97 MB (h = 5120) is read once per 32 rows and even one row occupies 40 programs. The second kernel, a program
per row, adds the shares in a fixed order, makes the coefficients and normalises. Tiles do not depend on m, nor does a
row on its neighbours. Semantics: `backends.torch_runtime.reference.elementwise`.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.torch_runtime.reference.elementwise import NUM_STREAMS, Streams

ROWS = 32
CHUNK = 128
"""Columns of every stream that a program of the first kernel covers."""
TILE = 16
"""Columns of every stream in registers at a time: a sector of BF16; with 32, fewer programs fit a multiprocessor."""
SHARES = 32
"""FP32 numbers a tile leaves per row: 24 dot products, the squares of streams and of the collapsed row, padding."""


@triton.jit
def _dot_bf16(a, w, total):
    # Three BF16 numbers hold the 24 bits of an FP32 one, and products of BF16 are exact in FP32.
    high = w.to(tl.bfloat16)
    rest = w - high.to(tl.float32)
    middle = rest.to(tl.bfloat16)
    low = (rest - middle.to(tl.float32)).to(tl.bfloat16)
    total = tl.dot(a, low, total)
    total = tl.dot(a, middle, total)
    return tl.dot(a, high, total)


@triton.jit
def _dot(a, w, total):
    return _dot_bf16(a, w, total) if a.dtype == tl.bfloat16 else tl.dot(a, w, total, input_precision="tf32x3")


@triton.jit
def _mixed(x0, x1, x2, x3, y, post, comb, rows, live, j: tl.constexpr):
    """Stream j after the sublayer, FP32 [ROWS, TILE]."""
    at = comb + rows * 16 + j
    out = tl.load(post + rows * 4 + j, mask=live, other=0.0)[:, None] * y
    out += tl.load(at, mask=live, other=0.0)[:, None] * x0
    out += tl.load(at + 4, mask=live, other=0.0)[:, None] * x1
    out += tl.load(at + 8, mask=live, other=0.0)[:, None] * x2
    out += tl.load(at + 12, mask=live, other=0.0)[:, None] * x3
    return out


@triton.jit
def _streams_kernel(
    x,
    pre,
    post,
    comb,
    y,
    y2,
    fn,
    new_x,
    collapsed,
    shares,
    m,
    h,
    row_stride,
    stream_stride,
    CARRIED: tl.constexpr,
    UPDATE: tl.constexpr,
    HAS_Y2: tl.constexpr,
    STORE: tl.constexpr,
    MIX: tl.constexpr,
    COLLAPSE: tl.constexpr,
    ROWS: tl.constexpr,
    CHUNK: tl.constexpr,
    TILE: tl.constexpr,
    SHARES: tl.constexpr,
):
    chunk = tl.program_id(0)
    rows = (tl.program_id(1) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    live = rows < m
    share = tl.arange(0, SHARES)
    dots = tl.zeros((ROWS, SHARES), tl.float32)
    square = tl.zeros((ROWS,), tl.float32)
    collapsed_square = tl.zeros((ROWS,), tl.float32)
    for begin in range(0, CHUNK, TILE):
        columns = chunk * CHUNK + begin + tl.arange(0, TILE)
        mask = live[:, None] & (columns < h)[None, :]
        source = x + rows[:, None] * row_stride + columns[None, :]
        x0 = tl.load(source, mask=mask, other=0.0).to(tl.float32)
        x1 = tl.load(source + stream_stride, mask=mask, other=0.0).to(tl.float32)
        x2 = tl.load(source + 2 * stream_stride, mask=mask, other=0.0).to(tl.float32)
        x3 = tl.load(source + 3 * stream_stride, mask=mask, other=0.0).to(tl.float32)
        at = rows[:, None] * h + columns[None, :]
        if UPDATE:
            added = tl.load(y + at, mask=mask, other=0.0).to(tl.float32)
            if HAS_Y2:
                added += tl.load(y2 + at, mask=mask, other=0.0).to(tl.float32)
        else:
            added = x0
        row = tl.zeros((ROWS, TILE), tl.float32)
        for j in tl.static_range(4):
            stream = _mixed(x0, x1, x2, x3, added, post, comb, rows, live, j) if UPDATE else (x0, x1, x2, x3)[j]
            stored = stream.to(x.dtype.element_ty)
            stream = stored.to(tl.float32)
            if STORE:
                tl.store(new_x + rows[:, None] * 4 * h + j * h + columns[None, :], stored, mask=mask)
            if COLLAPSE:
                if CARRIED:
                    row += tl.load(pre + rows * 4 + j, mask=live, other=0.0)[:, None] * stream
                elif j == 0:
                    row += stream
            if MIX:
                square += tl.sum(stream * stream, 1)
                weight = tl.load(
                    fn + share[:, None] * 4 * h + j * h + columns[None, :],
                    mask=(share < 24)[:, None] & (columns < h)[None, :],
                    other=0.0,
                )
                dots = _dot(stored, tl.trans(weight), dots)
        if COLLAPSE:
            stored_row = row.to(x.dtype.element_ty)
            tl.store(collapsed + at, stored_row, mask=mask)
            row = stored_row.to(tl.float32)
            collapsed_square += tl.sum(row * row, 1)
    if COLLAPSE:
        dots = tl.where((share == 24)[None, :], square[:, None], dots)
        dots = tl.where((share == 25)[None, :], collapsed_square[:, None], dots)
        at = (rows[:, None] * tl.num_programs(0) + chunk) * SHARES + share[None, :]
        tl.store(shares + at, dots, mask=live[:, None])


@triton.jit
def _coefficients(sums, square, fn_base, fn_scale, pre, post, comb, row, h, eps, hc_eps, iters):
    """sums [8, 4]: row 0 is pre, row 1 post, rows 2 to 5 comb; the Sinkhorn rounds run on all eight, in registers."""
    part = tl.arange(0, 8)[:, None]
    stream = tl.arange(0, 4)[None, :]
    used = (part < 6) & (stream < 4)
    base = tl.load(fn_base + part * 4 + stream, mask=used, other=0.0)
    factor = tl.load(fn_scale + tl.minimum(part, 2) + stream * 0)
    mix = tl.where(used, sums * tl.rsqrt(square / (4 * h) + eps) * factor + base, 0.0)
    gate = tl.sigmoid(mix)
    tl.store(pre + row * 4 + stream + part * 0, gate + hc_eps, mask=part == 0)
    tl.store(post + row * 4 + stream + part * 0, 2 * gate, mask=part == 1)
    is_comb = (part >= 2) & (part < 6)
    power = tl.exp(mix - tl.max(mix, 1)[:, None])
    weights = tl.where(is_comb, power / tl.sum(power, 1)[:, None] + hc_eps, 0.0)
    weights = weights / (tl.sum(weights, 0)[None, :] + hc_eps)
    for _ in range(iters - 1):
        weights = weights / (tl.sum(weights, 1)[:, None] + hc_eps)
        weights = weights / (tl.sum(weights, 0)[None, :] + hc_eps)
    tl.store(comb + row * 16 + (part - 2) * 4 + stream, weights, mask=is_comb)


@triton.jit
def _finish_kernel(
    shares,
    collapsed,
    base,
    scale,
    norm_weight,
    pre,
    post,
    comb,
    out,
    h,
    chunks,
    eps,
    hc_eps,
    iters,
    MIX: tl.constexpr,
    CHUNKS: tl.constexpr,
    BLOCK: tl.constexpr,
    SHARES: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK)
    inside = columns < h
    value = tl.load(collapsed + row * h + columns, mask=inside, other=0.0).to(tl.float32)
    weight = tl.load(norm_weight + columns, mask=inside, other=0.0).to(tl.float32)
    chunk = tl.arange(0, CHUNKS)[:, None]
    share = tl.arange(0, SHARES)[None, :]
    tiles = tl.load(shares + (row * chunks + chunk) * SHARES + share, mask=(chunk < chunks) & (share < 26), other=0.0)
    sums = tl.sum(tiles, 0)
    slot = tl.arange(0, SHARES)
    norm = tl.rsqrt(tl.sum(tl.where(slot == 25, sums, 0.0)) / h + eps)
    tl.store(out + row * h + columns, (value * norm * weight).to(out.dtype.element_ty), mask=inside)
    if MIX:
        square = tl.sum(tl.where(slot == 24, sums, 0.0))
        sums = tl.reshape(sums, (8, 4))
        _coefficients(sums, square, base, scale, pre, post, comb, row, h, eps, hc_eps, iters)


def hc_enter(
    carry: Streams | Tensor,
    y: Tensor | None,
    y2: Tensor | None,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Streams, Tensor]:
    """Close the sublayer before, compute this one's coefficients and its input [m, h]; see the reference.

    y and y2 must be contiguous; a bare carry may repeat one row with stride 0.
    """
    x, collapsed, shares = _walk(carry, y, y2, fn, collapse=True)
    m = len(x)
    pre, post = (torch.empty(m, NUM_STREAMS, device=x.device) for _ in range(2))
    comb = torch.empty(m, NUM_STREAMS, NUM_STREAMS, device=x.device)
    streams = Streams(x, pre, post, comb)
    return streams, _finish(collapsed, shares, norm_weight, eps, base, scale, streams, hc_eps, iters)


def hc_leave(
    carry: Streams | Tensor, y: Tensor | None, y2: Tensor | None, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Close the last sublayer: the collapsed streams [m, h], and the same normalised."""
    _, collapsed, shares = _walk(carry, y, y2, None, collapse=True)
    return collapsed, _finish(collapsed, shares, norm_weight, eps)


def hc_expand(carry: Streams | Tensor, y: Tensor | None, y2: Tensor | None) -> Tensor:
    """Streams [m, 4, h] after the sublayer, for an operator between sublayers."""
    if not isinstance(carry, Streams) or y is None:
        return carry.x if isinstance(carry, Streams) else carry
    return _walk(carry, y, y2, None, collapse=False)[0]


def _walk(
    carry: Streams | Tensor, y: Tensor | None, y2: Tensor | None, fn: Tensor | None, collapse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """New streams (not written by hc_leave), the collapsed rows, and each chunk's shares FP32 [m, chunks, 32]."""
    carried = isinstance(carry, Streams)
    x = carry.x if isinstance(carry, Streams) else carry
    pre, post, comb = carry[1:] if isinstance(carry, Streams) else (x, x, x)
    m, _, h = x.shape
    update = carried and y is not None
    store = update and (fn is not None or not collapse)
    new_x = torch.empty(m, NUM_STREAMS, h, dtype=x.dtype, device=x.device) if store else x
    chunks = triton.cdiv(h, CHUNK)
    collapsed = torch.empty(m if collapse else 0, h, dtype=x.dtype, device=x.device)
    shares = torch.empty(m if collapse else 0, chunks, SHARES, device=x.device)
    if m:
        _streams_kernel[(chunks, triton.cdiv(m, ROWS))](
            x,
            pre,
            post,
            comb,
            x if y is None else y,
            x if y2 is None else y2,
            x if fn is None else fn,
            new_x,
            collapsed,
            shares,
            m,
            h,
            x.stride(0),
            x.stride(1),
            CARRIED=carried,
            UPDATE=update,
            HAS_Y2=y2 is not None,
            STORE=store,
            MIX=fn is not None,
            COLLAPSE=collapse,
            ROWS=ROWS,
            CHUNK=CHUNK,
            TILE=TILE,
            SHARES=SHARES,
            num_warps=4,
            enable_fp_fusion=True,
            num_stages=2,
        )
    return new_x, collapsed, shares


def _finish(
    collapsed: Tensor,
    shares: Tensor,
    norm_weight: Tensor,
    eps: float,
    base: Tensor | None = None,
    scale: Tensor | None = None,
    streams: Streams | None = None,
    hc_eps: float = 0.0,
    iters: int = 1,
) -> Tensor:
    out = torch.empty_like(collapsed)
    m, h = collapsed.shape
    pre, post, comb = (shares, shares, shares) if streams is None else streams[1:]
    if m:
        _finish_kernel[(m,)](
            shares,
            collapsed,
            shares if base is None else base,
            shares if scale is None else scale,
            norm_weight,
            pre,
            post,
            comb,
            out,
            h,
            shares.shape[1],
            eps,
            hc_eps,
            iters,
            MIX=streams is not None,
            CHUNKS=triton.next_power_of_2(shares.shape[1]),
            BLOCK=triton.next_power_of_2(h),
            SHARES=SHARES,
            num_warps=8,
            enable_fp_fusion=True,
        )
    return out
