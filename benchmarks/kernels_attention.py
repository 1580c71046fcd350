"""What attention, index scores and selection cost at DeepSeek-V4.1-Flash's shapes on this GPU.

    python benchmarks/kernels_attention.py [NAME ...]

Every line: microseconds a call (median of CUDA graph replays over several input sets, so that what one call leaves in
the L2 cache serves the next as little as it would between two layers), bytes and operations a call cannot do without,
and the shares of the measured copy bandwidth and BF16 rate that they amount to.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.cuda.attention import sparse_attention
from backends.cuda.indexer import index_scores
from backends.cuda.selection import candidate_blocks, entry_records, select_topk
from backends.torch_runtime.formats import KVStorage, record_bytes
from backends.torch_runtime.views import EntryView, WindowView

DEVICE = "cuda"
HEADS, DIM, TOPK, WINDOW = 64, 512, 512, 128
INDEX_HEADS, INDEX_DIM, PER_BLOCK, CANDIDATES = 32, 128, 128, 2048
SETS = 8
"""Input sets that the calls of a graph go through."""


@dataclass(frozen=True)
class Case:
    """One kernel at one size: a call per input set, and the least work of one call."""

    name: str
    size: str
    calls: list[Callable[[], object]]
    num_bytes: float
    flop: float


def seconds_per_call(calls: list[Callable[[], object]], replays: int = 15) -> float:
    """Median over replays of a CUDA graph that makes every call once."""
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    with torch.cuda.stream(stream):
        for call in calls:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times = []
    for _ in range(replays + 3):
        start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        start.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) * 1e-3 / len(calls))
    return statistics.median(times[3:])


def copy_bandwidth() -> float:
    """Bytes a second, read and written, of a kernel that copies 2 GiB."""
    source = torch.randn(1 << 29, device=DEVICE)
    target = torch.empty_like(source)
    return 8 * source.numel() / seconds_per_call([lambda: torch.neg(source, out=target)])


def bf16_rate() -> float:
    """FLOP a second of an 8192 x 8192 x 8192 product in BF16."""
    a, b = (torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16) for _ in range(2))
    return 2 * 8192**3 / seconds_per_call([lambda: a @ b])


def random_records(*shape: int, storage: KVStorage, dim: int, kind: str) -> Tensor:
    """Records of random codes with scales near one: bytes, not encoded numbers, so that large caches are quick."""
    width = record_bytes(storage, dim, kind)  # type: ignore[arg-type]
    records = torch.randint(0, 255, (*shape, width), dtype=torch.uint8, device=DEVICE)
    values = dim if kind == "window" or (kind == "main" and storage == "mxfp8") else dim // 2
    # No NaN among E4M3 values, and scales near one: UE8M0 127, E4M3 0x38.
    records[..., :values] &= 0x77
    records[..., values:] = 0x38 if kind == "main" and storage == "fp4" else 127
    return records


def slots_of(m: int, per_request: int) -> Tensor:
    """Slots of m rows, `per_request` neighbours each."""
    return (torch.arange(m, device=DEVICE) // per_request).int()


def block_tables(requests: int, context: int) -> Tensor:
    """A shuffled block table of every request's context."""
    blocks = -(-context // PER_BLOCK)
    return torch.randperm(requests * blocks, device=DEVICE).view(requests, blocks).int()


def attention_case(m: int, storage: KVStorage, context: int = 32768, entries: bool = True) -> Case:
    """Decode rows of as many requests (at most 64), or prefill rows of 64."""
    requests = min(m, 64)
    slot = slots_of(m, -(-m // requests))
    ring = random_records(requests, 134, storage=storage, dim=DIM, kind="window")
    table = block_tables(requests, context)
    main = random_records(table.numel(), PER_BLOCK, storage=storage, dim=DIM, kind="main")
    high = torch.full((m,), context, dtype=torch.int32, device=DEVICE)
    none = torch.zeros_like(high)
    window = WindowView(ring, ring[0, :1], slot, high - WINDOW, high, none, none)
    sink = torch.randn(HEADS, device=DEVICE)
    calls: list[Callable[[], object]] = []
    for _ in range(SETS if m <= 256 else 2):
        q = torch.randn(m, HEADS, DIM, device=DEVICE, dtype=torch.bfloat16)
        selected = torch.randint(0, context, (m, TOPK), dtype=torch.int32, device=DEVICE)
        view = EntryView(main, entry_records(selected, table, slot, PER_BLOCK)) if entries else None
        calls.append(lambda q=q, view=view: sparse_attention(q, sink, DIM**-0.5, window, view))  # type: ignore[misc]
    chosen = TOPK if entries else 0
    per_row = WINDOW * ring.shape[-1] + chosen * (main.shape[-1] + 4) + 2 * 2 * HEADS * DIM
    size = f"{m} rows {storage if entries else 'window'}"
    return Case("sparse_attention", size, calls, m * per_row, 4.0 * m * HEADS * DIM * (WINDOW + chosen))


def scoring_case(m: int, per_request: int, context: int, causal: bool = False, candidates: int = 0) -> Case:
    """Rows of m / per_request requests over all entries of their context, or over `candidates` blocks of eight."""
    requests = m // per_request
    slot, table = slots_of(m, per_request), block_tables(requests, context)
    visible = torch.full((m,), context, dtype=torch.int32, device=DEVICE)
    if causal:
        visible -= torch.arange(m - 1, -1, -1, dtype=torch.int32, device=DEVICE)
    columns = candidates * 8 or context
    calls: list[Callable[[], object]] = []
    for _ in range(SETS if requests * context * 68 < 1 << 28 else 2):
        keys = random_records(table.numel(), PER_BLOCK, storage="fp4", dim=INDEX_DIM, kind="index")
        q = torch.randn(m, INDEX_HEADS, INDEX_DIM, device=DEVICE, dtype=torch.bfloat16)
        weights = torch.rand(m, INDEX_HEADS, device=DEVICE)
        chosen = None
        if candidates:
            chosen = torch.rand(m, context // 8, device=DEVICE).topk(candidates).indices.sort().values.int()

        def call(
            q: Tensor = q, weights: Tensor = weights, keys: Tensor = keys, chosen: Tensor | None = chosen
        ) -> Tensor:
            return index_scores(q, weights, keys, table, slot, visible, context, chosen, pad=False)

        calls.append(call)
    read = m * columns if candidates else requests * context
    seen = float(visible.clamp_max(columns).sum())
    moved = 68 * read + 4 * seen + m * INDEX_HEADS * (2 * INDEX_DIM + 4)
    name = "index_scores " + ("candidates" if candidates else "entries")
    return Case(name, f"{m} rows {requests} x {context}", calls, moved, 2 * seen * INDEX_HEADS * INDEX_DIM)


def selection_case(m: int, context: int, blocks: int = 0) -> Case:
    """The best 512 entries, or the best blocks of eight, of random scores."""
    visible = torch.full((m,), context, dtype=torch.int32, device=DEVICE)
    calls: list[Callable[[], object]] = []
    for _ in range(SETS if m * context * 4 < 1 << 28 else 2):
        scores = torch.randn(m, context, device=DEVICE)
        if blocks:
            calls.append(lambda scores=scores: candidate_blocks(scores, visible, blocks))  # type: ignore[misc]
        else:
            calls.append(lambda scores=scores: select_topk(scores, visible, TOPK))  # type: ignore[misc]
    name = "candidate_blocks" if blocks else "select_topk"
    return Case(name, f"{m} x {context}", calls, 4.0 * m * (context + (blocks or TOPK)), 0.0)


def cases() -> Iterator[Case]:
    """All sizes, one at a time: each holds its tensors only while it runs."""
    for m in (1, 8, 64, 256, 4096):
        yield attention_case(m, "fp4")
    yield attention_case(64, "mxfp8")
    yield attention_case(256, "mxfp8")
    yield attention_case(64, "fp4", entries=False)
    for m, per_request, context in ((1, 1, 4096), (1, 1, 131072), (8, 8, 131072), (64, 1, 32768), (64, 8, 131072)):
        yield scoring_case(m, per_request, context)
    yield scoring_case(256, 1, 16384)
    yield scoring_case(4096, 4096, 16384, causal=True)
    yield scoring_case(8, 1, 131072, candidates=CANDIDATES)
    yield scoring_case(64, 1, 32768, candidates=CANDIDATES)
    for m, context in ((1, 4096), (1, 131072), (8, 131072), (64, 32768), (256, 16384), (4096, 16384)):
        yield selection_case(m, context)
    for m, context in ((8, 131072), (64, 32768)):
        yield selection_case(m, context, CANDIDATES)


def main(names: list[str]) -> None:
    """Print a line per kernel and size."""
    bandwidth, rate = copy_bandwidth(), bf16_rate()
    print(f"{torch.cuda.get_device_name()}: copy {bandwidth / 1e12:.2f} TB/s, BF16 {rate / 1e12:.0f} TFLOP/s")
    print(f"{'kernel':24} {'size':24} {'us':>9} {'MB':>9} {'GFLOP':>9} {'of copy':>8} {'of BF16':>8}")
    for case in cases():
        if names and not any(name in case.name for name in names):
            continue
        seconds = seconds_per_call(case.calls)
        share, busy = case.num_bytes / seconds / bandwidth, case.flop / seconds / rate
        print(
            f"{case.name:24} {case.size:24} {seconds * 1e6:9.1f} {case.num_bytes / 1e6:9.2f} "
            f"{case.flop / 1e9:9.2f} {share:8.0%} {busy:8.0%}",
            flush=True,
        )


if __name__ == "__main__":
    main(sys.argv[1:])
