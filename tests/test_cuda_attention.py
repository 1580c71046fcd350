"""The attention and indexer kernels against plain FP64 computations: interpreted, compiled ahead of time, on a device.

A machine without a device interprets the kernels on small shapes and compiles them for two architectures. Both happen
in processes of their own, side by side, which are this file run as a script: Triton decides at import whether to
interpret.
"""

from __future__ import annotations

import math
import re
import sys
from dataclasses import replace

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch
from kernel_builds import ARCHITECTURES, SHARED_LIMIT, compiled, report, resource_usage, run_scripts

TENSOR_MEMORY_COLUMNS = 512
WINDOW = 128


class Draws:
    """Random tensors on a device, from one seed."""

    def __init__(self, device: str, seed: int = 0):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int):
        return torch.randn(*shape, generator=self.generator).to(self.device)

    def integers(self, low: int, high: int, *shape: int):
        return torch.randint(low, high, shape, generator=self.generator, dtype=torch.int32).to(self.device)

    def order(self, n: int):
        return torch.randperm(n, generator=self.generator).int().to(self.device)

    def records(self, *shape: int, dim: int, storage: str, kind: str):
        """Records whose magnitudes differ by up to 64 from one to the next and within one."""
        from backends.torch_runtime.formats import encode_record

        size = (self.integers(-3, 4, *shape, 1) + self.integers(-2, 3, *shape, dim)).float().exp2()
        return encode_record(self(*shape, dim) * size, storage, kind)


def relative_error(got, want) -> float:
    return float((got.double() - want).norm() / want.norm())


def attention_arguments(draw, m, heads, dim, storage, per_block, topk):
    """Rows of every kind: full and short windows in ring, buffer and both, few and all entries, no key at all."""
    from backends.cuda.selection import entry_records
    from backends.torch_runtime.views import EntryView, WindowView

    slots, ring_len, context = 5, WINDOW + 6, topk * 2
    ring = draw.records(slots, ring_len, dim=dim, storage=storage, kind="window")
    buffer = draw.records(2 * WINDOW, dim=dim, storage=storage, kind="window")
    table = draw.order(slots * (context // per_block)).view(slots, -1)
    main = draw.records(table.numel(), per_block, dim=dim, storage=storage, kind="main")
    low, slot = draw.integers(0, 4 * WINDOW, m), draw.integers(0, slots, m)
    high, first = low + draw.integers(0, WINDOW + 1, m), draw.integers(0, WINDOW, m)
    last = first + torch.minimum(draw.integers(0, WINDOW + 1, m), WINDOW + 8 - (high - low))
    selected = torch.stack([draw.order(context)[:topk] for _ in range(m)])
    selected[draw(m, topk) < 2 * draw(m, 1)] = -1
    if m > 2:
        high[1], last[1], selected[1] = low[1], first[1], -1
    view = WindowView(ring, buffer, slot, low, high, first, last)
    records = entry_records(selected, table, slot, per_block)
    assert torch.equal(records, records_by_definition(selected, table, slot, per_block))
    return draw(m, heads, dim), draw(heads) * 3, view, EntryView(main, records)


def records_by_definition(selected, table, slot, per_block):
    rows = zip(selected.tolist(), slot.tolist(), strict=True)
    found = [
        [int(table[s, e // per_block]) * per_block + e % per_block if e >= 0 else -1 for e in es] for es, s in rows
    ]
    return torch.tensor(found, dtype=torch.int32, device=selected.device)


def attention_by_rows(q, sink, scale, window, entries, storage):
    """FP64, row by row and key by key of the views' definitions."""
    from backends.torch_runtime.formats import decode_record

    rows = []
    for i, row in enumerate(q.double()):
        slot = int(window.slot[i])
        ring = [window.ring[slot, p % window.ring.shape[1]] for p in range(window.ring_lo[i], window.ring_hi[i])]
        near = [*ring, *window.buffer[int(window.buf_lo[i]) : int(window.buf_hi[i])]]
        keys = [decode_record(record, row.shape[-1], storage, "window") for record in near]
        if entries is not None:
            for place in (int(r) for r in entries.records[i] if r >= 0):
                record = entries.main[place // entries.main.shape[1], place % entries.main.shape[1]]
                keys.append(decode_record(record, row.shape[-1], storage, "main"))
        if not keys:
            rows.append(torch.zeros_like(row))
            continue
        kv = torch.stack(keys).double()
        logits = torch.cat((row @ kv.T * scale, sink.double()[:, None]), 1)
        rows.append(logits.softmax(1)[:, :-1] @ kv)
    return torch.stack(rows)


def check_attention(device, m, heads, dim, storage, tile, dtype, per_block=16, topk=48, limit=4e-3):
    from backends.cuda.attention import HOPPER, sparse_attention

    draw = Draws(device)
    q, sink, window, entries = attention_arguments(draw, m, heads, dim, storage, per_block, topk)
    q, scale = q.to(dtype), dim**-0.5
    rows_at_once, split = (replace(HOPPER, tile=tile, split_below=n) for n in (0, m))
    for view in (entries, None):
        got = sparse_attention(q, sink, scale, window, view, rows_at_once)
        want = attention_by_rows(q, sink, scale, window, view, storage)
        assert got.dtype == dtype
        assert relative_error(got, want) < limit, relative_error(got, want)
        assert not got[1].any()
        # The schedule changes no bit, nor do other rows.
        assert torch.equal(got, sparse_attention(q, sink, scale, window, view, split))
        one = [
            None if v is None else type(v)(*(t[2:3] if t.ndim and len(t) == m else t for t in vars(v).values()))
            for v in (window, view)
        ]
        assert torch.equal(got[2:3], sparse_attention(q[2:3], sink, scale, *one, split))


def index_arguments(draw, m, heads, per_request, per_block, context, num_candidates):
    slots = -(-m // per_request)
    table = draw.order(slots * context // per_block).view(slots, -1)
    keys = draw.records(table.numel(), per_block, dim=128, storage="fp4", kind="index")
    slot = (torch.arange(m) // per_request).int().to(draw.device)
    visible = draw.integers(0, context + 1, m)
    visible[-1] = 0
    candidates = torch.stack([draw.order(context // 8)[:num_candidates] for _ in range(m)])
    candidates[draw(m, num_candidates) > 1.5] = -1
    return draw(m, heads, 128), draw(m, heads), keys, table, slot, visible, candidates


def scores_by_definition(q, weights, keys, table, slot, visible, columns):
    """FP64; `columns` int [m, n]: the entry of every column, -1 for none."""
    from backends.torch_runtime.formats import decode_record, encode_record

    q = decode_record(encode_record(q, "fp4", "index"), 128, "fp4", "index").double()
    out = torch.full(columns.shape, -math.inf, dtype=torch.float64, device=q.device)
    for i in range(len(q)):
        seen = (columns[i] >= 0) & (columns[i] < visible[i])
        entry = columns[i][seen].long()
        record = keys[table[int(slot[i])].long()[entry // keys.shape[1]], entry % keys.shape[1]]
        products = q[i] @ decode_record(record, 128, "fp4", "index").double().T
        out[i, seen] = weights[i].double() @ products.clamp_min(0)
    return out


def check_scores(device, m, heads, per_request, scorings, per_block=16, context=64, num_candidates=5, limit=1e-5):
    from backends.cuda.indexer import index_scores

    draw = Draws(device)
    q, weights, keys, table, slot, visible, chosen = index_arguments(
        draw, m, heads, per_request, per_block, context, num_candidates
    )
    places = torch.arange(context, device=device).expand(m, -1)
    inside = torch.where(chosen[..., None] < 0, -1, chosen[..., None] * 8 + torch.arange(8, device=device)).flatten(1)
    for candidates, columns in ((None, places), (chosen, inside)):
        want = scores_by_definition(q, weights, keys, table, slot, visible, columns)
        finite = want.isfinite()
        results = []
        for scoring in scorings:
            got = index_scores(q, weights, keys, table, slot, visible, context, candidates, scoring=scoring)
            assert torch.equal(got.isfinite(), finite)
            assert (got[~finite] == -math.inf).all()
            assert relative_error(got[finite], want[finite]) < limit
            results.append(got)
        assert all(torch.equal(got, results[0]) for got in results)
        alone = [t[3:4] for t in (slot, visible)]
        one = index_scores(
            q[3:4], weights[3:4], keys, table, *alone, context, None if candidates is None else candidates[3:4]
        )
        assert torch.equal(one[0], results[0][3])
        half = context // 2
        lazy = index_scores(q, weights, keys, table, slot, visible, context, candidates, pad=False, unscored=half)
        looked_at = finite & (visible > half)[:, None]
        assert torch.equal(lazy[looked_at], results[0][looked_at])


def selected_by_sorting(scores, k):
    """The k best finite (score, lower index) pairs of every row, as sorted lists."""
    found = []
    for row in scores.tolist():
        columns = [c for c, score in enumerate(row) if score > -math.inf]
        found.append(sorted(sorted(columns, key=lambda c, row=row: (-row[c], c))[:k]))
    return found


def check_selection(device, n, k, num_blocks):
    from backends.cuda.selection import candidate_blocks, select_topk

    draw = Draws(device, n)
    # Few distinct scores: ties everywhere, zeros of both signs among them.
    scores = (draw(6, n) * 8).round() / 2
    scores[scores == 0] *= -1
    visible = torch.tensor([n, n // 2, 3, 0, n - 1, k + 1], device=device).clamp_max(n).int()
    hidden = torch.arange(n, device=device) >= visible[:, None]
    wanted = scores.masked_fill(hidden, -math.inf)
    # What lies behind the visible entries must not matter.
    scores[hidden] = math.nan
    got = select_topk(scores, visible, k)
    assert got.dtype == torch.int32
    assert [sorted(e for e in row if e >= 0) for row in got.tolist()] == selected_by_sorting(wanted, k)
    padded = torch.nn.functional.pad(wanted, (0, -n % 8), value=-math.inf).unflatten(1, (-1, 8)).amax(-1)
    newest = torch.arange(padded.shape[1], device=device) == ((visible - 1) // 8)[:, None]
    padded[newest & (visible > 0)[:, None]] = math.inf
    blocks = candidate_blocks(scores, visible, num_blocks)
    assert [sorted(b for b in row if b >= 0) for row in blocks.tolist()] == selected_by_sorting(padded, num_blocks)
    for rows, width in ((got, k), (blocks, num_blocks)):
        assert rows.shape == (6, width)
        assert all(row == sorted(e for e in row if e >= 0) + [-1] * row.count(-1) for row in rows.tolist())


def check_selection_of_candidates(device, k, num_candidates):
    from backends.cuda.selection import select_topk

    draw = Draws(device)
    chosen = torch.stack([draw.order(4 * num_candidates)[:num_candidates] for _ in range(4)])
    chosen[draw(4, num_candidates) > 1.5] = -1
    entries = torch.where(chosen[..., None] < 0, -1, chosen[..., None] * 8 + torch.arange(8, device=device)).flatten(1)
    visible = draw.integers(1, 32 * num_candidates, 4)
    scores = (draw(*entries.shape) * 4).round().masked_fill((entries < 0) | (entries >= visible[:, None]), -math.inf)
    got = select_topk(scores, visible, k, chosen)
    for row, columns, entry in zip(got.tolist(), selected_by_sorting(scores, k), entries.tolist(), strict=True):
        assert sorted(e for e in row if e >= 0) == sorted(entry[c] for c in columns)


def interpreted_checks():
    from backends.cuda import selection
    from backends.cuda.indexer import Scoring

    selection.SEGMENT = 64
    for storage in ("fp4", "mxfp8"):
        # BF16 numbers are cut off here, not rounded.
        yield (
            f"attention-{storage}",
            lambda storage=storage: check_attention("cpu", 3, 5, 128, storage, 64, torch.float32, topk=32, limit=1e-2),
        )
    scorings = [Scoring(tile=16, share=4, rows=2, programs=8), Scoring(tile=32, share=2, rows=1, programs=8)]
    yield "scores", lambda: check_scores("cpu", 9, 4, 4, scorings)
    for n in (50, 300, 700):
        yield f"selection-{n}", lambda n=n: check_selection("cpu", n, 16, 20)
    yield "selection-candidates", lambda: check_selection_of_candidates("cpu", 30, 20)


INTERPRETED = [
    "attention-fp4",
    "attention-mxfp8",
    "scores",
    *(f"selection-{n}" for n in (50, 300, 700)),
    "selection-candidates",
]


P8, P32, HALF, FULL = "*u8", "*i32", "*bf16", "*fp32"
ATTENTION = {
    **dict.fromkeys(("q", "out"), HALF),
    **dict.fromkeys(("sink", "partial", "statistics"), FULL),
    **dict.fromkeys(("ring", "buffer", "main"), P8),
    **dict.fromkeys(("window_slot", "ring_lo", "ring_hi", "buf_lo", "buf_hi"), P32),
    "records": P32,
    "scale": "fp32",
}
SCORES = {"q": HALF, "weights": FULL, "keys": P8, "scores": FULL} | dict.fromkeys(
    ("block_table", "slots", "visible", "candidates"), P32
)
SELECTION = dict.fromkeys(("candidates", "visible", "keys", "entries", "out_keys", "out_entries"), P32)


def compiled_kernels(architecture: int):
    """Name, kernel, types of arguments, constants, warps, bytes of stack allowed, matrix instruction: as launched."""
    from backends.cuda import attention, indexer, selection

    wgmma = architecture == 90
    matrix = r"wgmma\.mma_async" if wgmma else r"tcgen05\.mma"
    tiling, scoring = attention.HOPPER if wgmma else attention.BLACKWELL, indexer.SCORING
    window = -(-attention.MAX_WINDOW // tiling.tile)
    common = {"DIM": 512, "RING_LEN": 134, "WINDOW_BYTES": 528, "TOPK": 512, "TILE": tiling.tile}
    common |= {"WINDOW_TILES": window, "NATIVE": True, "WGMMA": wgmma, "HEADS": 64}
    for storage, split in (("fp4", False), ("mxfp8", True))[: 2 if wgmma else 1]:
        own = {"FP4": storage == "fp4", "MAIN_BYTES": 288 if storage == "fp4" else 528, "ENTRIES": True, "SPLIT": split}
        # The sums of a row fill half of the registers; what else a tile needs at once does not quite fit.
        stack = 400 if wgmma else 768
        kernel = attention._attention_kernel
        yield f"attention-{storage}", kernel, ATTENTION, common | own, tiling.num_warps, stack, matrix
    merge = {"DIM": 512, "TILES": window + -(-512 // tiling.tile), "HEADS": 64, "COLUMNS": tiling.merge_columns}
    types = {"partial": FULL, "statistics": FULL, "sink": FULL, "out": HALF}
    yield "merge", attention._merge_kernel, types, merge | {"NATIVE": True}, 4, 0, None
    yield "round", indexer._round_q_kernel, {"q": HALF, "out": HALF}, ROUND, 4, 0, None
    score = {"HEADS": 32, "DIM": 128, "RECORD": 68, "PER_BLOCK": 128, "PAD": True, "TILE": scoring.tile, "NATIVE": True}
    for name, block, rows in (("entries", 0, scoring.rows), ("candidates", 8, 1)):
        own = {"CANDIDATE_BLOCK": block, "SHARE": scoring.share, "ROWS": rows}
        stack = 0 if wgmma else 512
        yield f"scores-{name}", indexer._score_kernel, SCORES, score | own, scoring.num_warps, stack, matrix
    for name, k, block in (("selection", 512, 1), ("blocks", 2048, 8)):
        own = {"K": k, "PADDED_K": k, "SEGMENT": selection.SEGMENT, "CANDIDATE_BLOCK": 0, "BLOCK": block, "FIRST": True}
        yield name, selection._select_kernel, SELECTION | {"scores": FULL}, own | {"LAST": True}, 16, 64, None


ROUND = {"BLOCKS": 128, "PADDED": 128, "NATIVE": True}
COMPILED = [
    (architecture, name)
    for architecture in ARCHITECTURES
    for name in (
        *("attention-fp4", "attention-mxfp8", "merge", "round"),
        *("scores-entries", "scores-candidates", "selection", "blocks"),
    )
    if (architecture, name) != (100, "attention-mxfp8")
]


def check_compiles(architecture, kernel, types, constants, warps, stack, matrix):
    """The matrix instruction that is meant, shared and tensor memory that exist, few spills."""
    built = compiled(kernel, architecture, types, constants, num_warps=warps, enable_fp_fusion=True)
    assert built.metadata.shared <= SHARED_LIMIT
    # Beyond its columns Triton compiles a kernel to a trap, without a word.
    assert (getattr(built.metadata, "tmem_size", 0) or 0) <= TENSOR_MEMORY_COLUMNS
    assert "trap;" not in built.asm["ptx"]
    assert matrix is None or re.search(matrix, built.asm["ptx"])
    assert "mma.sync" not in built.asm["ptx"]
    usage = resource_usage(built)
    used = [int(size) for size in re.findall(r"STACK:(\d+)", usage)]
    assert used, usage
    assert max(used) <= stack, used


def compile_checks(architecture):
    for name, *kernel in compiled_kernels(architecture):
        yield name, lambda kernel=kernel: check_compiles(architecture, *kernel)


@pytest.fixture(scope="module")
def outcomes():
    return run_scripts(__file__)


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_kernels_agree_with_plain_computations(outcomes, case):
    assert outcomes["interpret"][case] is None, outcomes["interpret"][case]


@pytest.mark.parametrize(("architecture", "case"), COMPILED)
def test_kernels_compile_to_what_is_meant(outcomes, architecture, case):
    found = outcomes[str(architecture)]
    assert {(architecture, name) for name in found} == {pair for pair in COMPILED if pair[0] == architecture}
    assert found[case] is None, found[case]


def test_records_of_other_storages_are_refused():
    from backends.cuda.decoding import check_records
    from deepinfer.errors import UsageError

    assert check_records(torch.zeros(1, 1, 288, dtype=torch.uint8), 512, "main") == "fp4"
    assert check_records(torch.zeros(1, 1, 528, dtype=torch.uint8), 512, "main") == "mxfp8"
    with pytest.raises(UsageError, match=r"1024 x torch\.uint8 for 512 numbers.*288 or 528 bytes"):
        check_records(torch.zeros(1, 1, 1024, dtype=torch.uint8), 512, "main")


on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("storage", ["fp4", "mxfp8"])
@pytest.mark.parametrize("m", [3, 70])
def test_attention_on_a_device(m, storage):
    check_attention("cuda", m, 64, 512, storage, 128, torch.bfloat16, per_block=128, topk=512)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("per_request", [1, 6, 50])
def test_scores_on_a_device(per_request):
    from backends.cuda.indexer import SCORING

    scorings = [SCORING, *(replace(SCORING, rows=rows) for rows in (1, 2))]
    check_scores("cuda", 50, 32, per_request, scorings, per_block=64, context=8192, num_candidates=700)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("n", [600, 5000, 70_000, 300_000])
def test_selection_on_a_device(n):
    check_selection("cuda", n, 512, 2048)
    check_selection_of_candidates("cuda", 512, min(n // 40, 2048))


if __name__ == "__main__":
    task = sys.argv[1]
    report(interpreted_checks() if task == "interpret" else compile_checks(int(task)))
