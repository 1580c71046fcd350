"""What the row-wise CUDA kernels and sampling cost at DeepSeek-V4.1-Flash's shapes on this GPU.

    python benchmarks/kernels_elementwise.py [--only NAME] [--rows 1,16,64,256,1024,4096]

Prints per kernel and number of rows: microseconds per call (median over replays of a CUDA graph of several calls, each
on inputs of its own, so that they come from memory where 64 copies exceed the L2 cache), the bytes that a call must
read and write once, and the share of the copy bandwidth that this run measured. A call of few rows is bound by its
launches, not by bytes; sampling with truncation reads a row several times, from L2.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.cuda import elementwise, sampling
from backends.torch_runtime.formats import KVStorage, record_bytes

HIDDEN, HEADS, HEAD_DIM, INDEX_DIM, ROPE_DIM, VOCABULARY = 5120, 64, 512, 128, 64, 129_280
EPS, HC_EPS, SINKHORN_ITERS = 1e-20, 1e-6, 20
ROTATED_BYTES = 400e6
MOST_COPIES = 64
REPLAYS = 20
Call = Callable[[], object]


@dataclass(frozen=True)
class Case:
    """A kernel on `rows` rows: `prepare` allocates inputs and returns a call on them; bytes are read and written."""

    name: str
    rows: int
    prepare: Callable[[], Call]
    num_bytes: float

    def seconds(self) -> float:
        """Median seconds of a call."""
        copies = max(2, min(MOST_COPIES, int(ROTATED_BYTES / self.num_bytes)))
        return device_seconds([self.prepare() for _ in range(copies)])


def device_seconds(calls: list[Call]) -> float:
    """Median seconds of one call over replays of a CUDA graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    stream.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    seconds = []
    for _ in range(REPLAYS):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        seconds.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(seconds)


def copy_bytes_per_s() -> float:
    """Bytes read and written per second by a copy of 4 GiB."""
    source = torch.zeros(2**32, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    return 2 * source.numel() / device_seconds([lambda: target.copy_(source)])


def _normal(*shape: int, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def hyper_connections(m: int) -> Iterator[Case]:
    """A sublayer's entry with both parts of the output before it, the way out, and the update alone."""
    row = 2.0 * HIDDEN

    def state() -> tuple[elementwise.Streams, Tensor, Tensor]:
        coefficients = (torch.rand(m, *shape, device="cuda") for shape in ((4,), (4,), (4, 4)))
        return elementwise.Streams(_normal(m, 4, HIDDEN), *coefficients), _normal(m, HIDDEN), _normal(m, HIDDEN)

    def enter() -> Call:
        carry, y, y2 = state()
        fn, base, scale = (_normal(*shape, dtype=torch.float32) for shape in ((24, 4 * HIDDEN), (24,), (3,)))
        weight = _normal(HIDDEN)
        return lambda: elementwise.hc_enter(carry, y, y2, fn, base, scale, weight, EPS, HC_EPS, SINKHORN_ITERS)

    def leave() -> Call:
        (carry, y, y2), weight = state(), _normal(HIDDEN)
        return lambda: elementwise.hc_leave(carry, y, y2, weight, EPS)

    def expand() -> Call:
        carry, y, y2 = state()
        return lambda: elementwise.hc_expand(carry, y, y2)

    yield Case("hc_enter", m, enter, m * row * (4 + 2 + 4 + 1) + 24 * 4 * HIDDEN * 4)
    yield Case("hc_leave", m, leave, m * row * (4 + 2 + 2))
    yield Case("hc_expand", m, expand, m * row * (4 + 2 + 4))


def rows(m: int) -> Iterator[Case]:
    """Norms, rotation of the queries in place, and the Engram gate."""

    def norm(n: int) -> Callable[[], Call]:
        def prepare() -> Call:
            x, weight = _normal(m, n), _normal(n)
            return lambda: elementwise.rms_norm(x, weight, EPS)

        return prepare

    def rope() -> Call:
        x, (cos, sin) = _normal(m, HEADS, HEAD_DIM), _angles(m)
        return lambda: elementwise.rope(x, cos, sin, inplace=True)

    def engram() -> Call:
        x, kv, q_weight, k_weight = (_normal(*s) for s in ((m, 4, HIDDEN), (m, 5 * HIDDEN), (4, HIDDEN), (4, HIDDEN)))
        return lambda: elementwise.engram_gate(x, kv, q_weight, k_weight, EPS)

    for n in (1280, HIDDEN):
        yield Case(f"rms_norm {n}", m, norm(n), m * 2.0 * n * 2)
    yield Case("rope", m, rope, m * HEADS * ROPE_DIM * 2.0 * 2)
    yield Case("engram_gate", m, engram, m * 2.0 * HIDDEN * (4 + 5 + 4))


def records(m: int) -> Iterator[Case]:
    """Encoding of the three kinds of record, and their way into a cache."""

    def encode(storage: KVStorage, kind: str, dim: int) -> Callable[[], Call]:
        def prepare() -> Call:
            x, weight, (cos, sin) = _normal(m, dim), _normal(dim), _angles(m)
            return lambda: elementwise.norm_rope_encode(x, weight, EPS, cos, sin, storage, kind)  # type: ignore[arg-type]

        return prepare

    def scatter() -> Call:
        found = torch.randint(0, 256, (m, 528), dtype=torch.uint8, device="cuda")
        cache, places = (
            torch.zeros(4 * m, 528, dtype=torch.uint8, device="cuda"),
            torch.randperm(4 * m, device="cuda")[:m],
        )
        return lambda: elementwise.scatter_records(found, cache, places)

    for kind, dim in (("window", HEAD_DIM), ("main", HEAD_DIM), ("index", INDEX_DIM)):
        size = record_bytes("fp4", dim, kind)  # type: ignore[arg-type]
        yield Case(f"encode {kind}", m, encode("fp4", kind, dim), m * (2.0 * dim + 4 * ROPE_DIM + size))
    yield Case("scatter_records", m, scatter, m * 2.0 * 528)


def draws(m: int) -> Iterator[Case]:
    """Sampling: greedy, without truncation, and with either or both of its kinds."""

    def prepare(temperature: float, top_k: int, top_p: float) -> Callable[[], Call]:
        def one() -> Call:
            logits = _normal(m, VOCABULARY, dtype=torch.float32) * 2
            heat, p = (torch.full((m,), value, device="cuda") for value in (temperature, top_p))
            k = torch.full((m,), top_k, dtype=torch.int32, device="cuda")
            seed = torch.arange(m, device="cuda")
            return lambda: sampling.sample(logits, heat, k, p, seed, seed)

        return one

    kinds = {"greedy": (0.0, 0, 1.0), "plain": (1.0, 0, 1.0), "top-k 50": (1.0, 50, 1.0), "top-p 0.95": (1.0, 0, 0.95)}
    for name, settings in {**kinds, "both": (1.0, 50, 0.95)}.items():
        yield Case(f"sample {name}", m, prepare(*settings), 4.0 * m * VOCABULARY)


def _angles(m: int) -> tuple[Tensor, Tensor]:
    angle = torch.rand(m, ROPE_DIM // 2, device="cuda")
    return angle.cos(), angle.sin()


def main() -> None:
    parser = argparse.ArgumentParser(description="Cost of the row-wise CUDA kernels and of sampling.")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--rows", default="1,16,64,256,1024,4096", help="rows of a step, separated by commas")
    arguments = parser.parse_args()
    copy = copy_bytes_per_s()
    print(f"{torch.cuda.get_device_name()}, torch {torch.__version__}: copies at {copy / 1e12:.2f} TB/s")
    print(f"{'kernel':20} {'rows':>5} {'us':>9} {'MB':>9} {'of copy':>8}")
    for m in map(int, arguments.rows.split(",")):
        for group in (hyper_connections, rows, records, draws):
            # No engine draws more than a few hundred tokens a step on one rank.
            cases = group(m) if group is not draws or m <= 256 else ()
            for case in cases:
                if arguments.only in case.name:
                    seconds = case.seconds()
                    share = case.num_bytes / seconds / copy
                    print(
                        f"{case.name:20} {m:5} {seconds * 1e6:9.1f} {case.num_bytes / 1e6:9.2f} {share:8.1%}",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
