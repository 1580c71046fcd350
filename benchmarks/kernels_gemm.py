"""What the CUDA products, the routed experts and their helpers cost at DeepSeek-V4.1-Flash's shapes on this GPU.

    python benchmarks/kernels_gemm.py [--sweep] [--check] [--only NAME] [--rows 1,8,64,256,4096]

Prints per kernel and number of rows: microseconds (median over replays of a CUDA graph that calls the kernel on
several copies of the weights, so that none of them waits in the L2 cache), bytes and FLOP counted (each input and
output once; intermediates not), and the shares of the copy bandwidth and of the BF16 rate that this run measured.
`--sweep` does that for many tilings and says how far their results are from the first's; `--check` compares the usual
tilings with the reference.
"""

from __future__ import annotations

import argparse
import multiprocessing
import statistics
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import astuple, dataclass

import torch
from torch import Tensor

from backends.cuda import experts, gemm
from backends.cuda.activations import round_activations
from backends.cuda.gemm import LinearTiling
from backends.cuda.tiles import Tiling, path_of
from backends.torch_runtime.formats import Weight
from backends.torch_runtime.reference import gemm as reference

HIDDEN, WIDTH, EXPERTS, TOPK, LOCAL, LIMIT = 5120, 2304, 384, 6, 48, 10.0
LINEARS = {
    "q_a+kv": (1, 1792, 5120),
    "q_b": (1, 32768, 1280),
    "o_a": (8, 1024, 4096),
    "o_b": (1, 5120, 8192),
    "shared gate+up": (1, 4608, 5120),
    "shared down": (1, 5120, 2304),
}
"""Groups, rows per group and width of the FP8 weights."""
ROTATED_BYTES = 400e6
Values = tuple[int, ...]
LINEAR_SWEEP: dict[int, list[Values]] = {
    16: [
        (396, 16, 64, 4, 4),
        (132, 16, 64, 4, 4),
        (264, 16, 64, 4, 4),
        (528, 16, 64, 4, 4),
        (264, 16, 64, 4, 3, 2),
        (396, 16, 64, 4, 3, 2),
        (264, 16, 128, 4, 4),
        (264, 16, 128, 4, 3, 2),
    ],
    64: [
        (264, 64, 64, 4, 4),
        (396, 64, 64, 4, 4),
        (132, 64, 128, 4, 4),
        (264, 64, 128, 4, 4),
        (132, 64, 128, 8, 4),
        (264, 64, 128, 8, 4),
        (264, 64, 64, 4, 3, 2),
        (132, 64, 128, 8, 3, 1, 128),
    ],
    256: [(132, 128, 128, 8, 3), (0, 128, 128, 8, 3), (264, 128, 128, 8, 3), (132, 256, 128, 8, 3)],
    4096: [(0, 256, 128, 8, 3)],
}
"""Programs, tokens, weights, warps, stages, spans and registers by the most rows that they are for."""
EXPERT_SWEEP: dict[int, list[Values]] = {
    64: [
        (16, 128, 4, 4),
        (16, 128, 4, 3, 2),
        (16, 128, 4, 4, 2),
        (16, 64, 4, 3, 2),
        (16, 64, 4, 4, 2),
        (16, 128, 8, 3, 2),
        (16, 128, 8, 4, 2),
        (16, 128, 8, 3, 2, 80),
    ],
    256: [
        (64, 128, 8, 4),
        (64, 128, 8, 4, 1, 128),
        (32, 128, 8, 3, 2, 128),
        (64, 128, 8, 3, 2),
        (64, 128, 4, 3, 2),
        (64, 64, 4, 3, 2),
        (32, 128, 4, 3, 2),
        (32, 128, 8, 3, 2),
        (32, 64, 4, 3, 2),
    ],
    4096: [(256, 128, 8, 3), (128, 128, 8, 4), (128, 128, 8, 2, 2)],
}
"""Tokens, weights, warps, stages, spans and registers by the most rows that they are for."""


@dataclass(frozen=True)
class Case:
    """A kernel at one size: `calls` do the same on different copies of what is read."""

    name: str
    rows: int
    calls: list[Callable[[], Tensor]]
    num_bytes: float
    flop: float


def device_seconds(calls: list[Callable[[], Tensor]], budget_s: float = 0.05) -> float:
    """Median seconds of one call over replays of a graph of all of them."""
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for call in calls[:2]:
            call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        for call in calls:
            call()
    times: list[float] = []
    started = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - started < budget_s and len(times) < 50):
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / len(calls))
    return statistics.median(times)


def ceilings() -> tuple[float, float]:
    """Bytes per second, read and written, of a large copy by a kernel; FLOP per second of a large BF16 product."""
    source = torch.randn(2**30, device="cuda")
    target = torch.empty_like(source)
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    rate = 2 * 8192**3 / device_seconds([lambda: a @ b])
    return 8 * source.numel() / device_seconds([lambda: torch.neg(source, out=target)]), rate


def fp8_weight(n: int, k: int) -> Weight:
    """Random E4M3 values with random scales of 32 x 32 blocks."""
    data = torch.randn(n, k, device="cuda").to(torch.float8_e4m3fn)
    return Weight(data, _scales(n // 32, k // 32), "fp8_block")


def fp4_weight(*shape: int) -> Weight:
    """Random E2M1 values with random scales of rows and 32 columns."""
    *rows, k = shape
    data = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device="cuda")
    return Weight(data, _scales(*rows, k // 32), "mxfp4")


def _scales(*shape: int) -> Tensor:
    return torch.randint(117, 124, shape, dtype=torch.uint8, device="cuda")


def random_ids(rows: int, count: int) -> Tensor:
    """TOPK different experts of `count` per row."""
    return torch.rand(rows, count, device="cuda").topk(TOPK, -1).indices.int()


class Linear:
    """One of the FP8 products at a number of rows."""

    def __init__(self, name: str, rows: int, rotated_bytes: float = ROTATED_BYTES) -> None:
        self.name, self.rows = name, rows
        groups, n, k = LINEARS[name]
        first = fp8_weight(groups * n, k)
        copies = max(1, int(rotated_bytes / first.num_bytes))
        self.weights = [first, *(Weight(first.data.clone(), first.scale, first.storage) for _ in range(copies - 1))]
        self.x = torch.randn(rows, groups, k, dtype=torch.bfloat16, device="cuda")
        self.num_bytes = first.num_bytes + 2.0 * rows * groups * (n + k)
        self.flop = 2.0 * rows * groups * n * k

    def case(self, tiling: LinearTiling | None = None) -> Case:
        """The product, its rounding of activations included."""
        calls = [lambda w=w: gemm.product_of(self.x, w, tiling) for w in self.weights]
        return Case(self.name, self.rows, calls, self.num_bytes, self.flop)


class Experts:
    """Weights of `count` experts, shared by the cases that use them."""

    def __init__(self, count: int) -> None:
        self.count = count
        self.w13, self.w2 = (
            experts.arranged(fp4_weight(count, n, k)) for n, k in ((2 * WIDTH, HIDDEN), (HIDDEN, WIDTH))
        )

    def case(self, rows: int) -> Case:
        """The routed experts of rows that all choose among these, in their usual tiles."""
        x, weights, pairs, used = self._inputs(rows)
        read = (self.w13.num_bytes + self.w2.num_bytes) * used
        return Case(
            f"experts {self.count}",
            rows,
            [lambda: gemm.grouped_experts(x, weights, pairs, self.w13, self.w2, LIMIT)],
            read + 2.0 * rows * HIDDEN * (1 + TOPK),
            6.0 * rows * TOPK * HIDDEN * WIDTH,
        )

    def halves(self, rows: int, tilings: list[Tiling]) -> Iterator[tuple[Tiling, Case]]:
        """Gate and up, then down, in each of the tilings."""
        x, weights, pairs, used = self._inputs(rows)
        rounded, p = round_activations(x, fp4=True), rows * TOPK
        read = self.w13.num_bytes * used + 2.0 * rows * (HIDDEN + TOPK * WIDTH)
        flop = 2.0 * rows * TOPK * HIDDEN * WIDTH
        for t in tilings:
            tiles = experts.tiles_of(pairs, weights, self.count, t.tokens)
            call = [lambda t=t, tiles=tiles: experts.gate_up(rounded, tiles, p, self.w13, LIMIT, t)[0]]
            yield t, Case("experts gate+up", rows, call, read, 2 * flop)
        first = experts.tiles_of(pairs, weights, self.count, tilings[0].tokens)
        active = experts.gate_up(rounded, first, p, self.w13, LIMIT, tilings[0])
        read = self.w2.num_bytes * used + 2.0 * rows * TOPK * (HIDDEN + WIDTH)
        for t in tilings:
            tiles = experts.tiles_of(pairs, weights, self.count, t.tokens)
            call = [lambda t=t, tiles=tiles: experts.down(active, tiles, self.w2, x.dtype, t)]
            yield t, Case("experts down", rows, call, read, flop)

    def _inputs(self, rows: int) -> tuple[Tensor, Tensor, gemm.Pairs, float]:
        """Activations, routing weights, pairs, and the share of experts that have pairs."""
        pairs = gemm.sort_pairs(random_ids(rows, self.count), 0, self.count)
        used = float((pairs.offsets[1:] > pairs.offsets[:-1]).float().mean())
        x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
        return x, torch.rand(rows, TOPK, device="cuda"), pairs, used


def small_cases(rows: int) -> Iterator[Case]:
    """What surrounds the products: memory-bound or a few microseconds."""
    x = torch.randn(rows, HIDDEN, dtype=torch.bfloat16, device="cuda")
    logits, bias = torch.randn(rows, EXPERTS, device="cuda"), torch.randn(EXPERTS, device="cuda")
    ids = random_ids(rows, EXPERTS)
    pairs = gemm.sort_pairs(ids, 0, EXPERTS)
    y = torch.randn(rows * TOPK, HIDDEN, dtype=torch.bfloat16, device="cuda")
    gate_up = torch.randn(rows, 2 * WIDTH, dtype=torch.bfloat16, device="cuda")
    yield Case("round to FP8", rows, [lambda: round_activations(x, fp4=False)[0]] * 4, 4.0 * x.numel(), 0)
    routed = 4.0 * rows * (EXPERTS + 2 * TOPK)
    yield Case("route", rows, [lambda: gemm.route(logits, bias, TOPK, 1.5)[0]] * 4, routed, 0)
    yield Case("sort_pairs", rows, [lambda: gemm.sort_pairs(ids, 0, EXPERTS).row] * 4, 16.0 * rows * TOPK, 0)
    moved = 2.0 * HIDDEN * rows * (TOPK + 1)
    yield Case("sum_pairs", rows, [lambda: gemm.sum_pairs(y, pairs.position)] * 4, moved, 0)
    yield Case("swiglu", rows, [lambda: gemm.swiglu(gate_up, LIMIT)] * 4, 6.0 * rows * WIDTH, 0)


def difference(got: Tensor, expected: Tensor) -> float:
    """Norm of the difference over the norm of the expected; NaN where one is not finite."""
    return float((got.double() - expected.double()).norm() / expected.double().norm())


def check(rows: int, local: Experts) -> None:
    """Print how far FP32 results are from the reference's, and whether rows keep their bits among fewer rows."""
    few = rows - rows // 4
    for name, (groups, n, k) in LINEARS.items():
        weight, x = fp8_weight(groups * n, k), torch.randn(rows, groups, k, device="cuda")
        y = gemm.product_of(x, weight)
        error = difference(y, reference.linear_grouped(x, weight))
        same = torch.equal(gemm.product_of(x[:few], weight, gemm.tiling_for(rows)), y[:few])
        print(f"check {name:15} {rows:5} error {error:.1e}, same bits among fewer rows: {same}")
    x, weights = torch.randn(rows, HIDDEN, device="cuda"), torch.rand(rows, TOPK, device="cuda")
    ids = random_ids(rows, LOCAL)

    def routed(m: int) -> tuple[gemm.Pairs, Tensor]:
        pairs = gemm.sort_pairs(ids[:m], 0, LOCAL)
        tiling = experts.tiling_for(rows * TOPK / LOCAL, path_of(x.device))
        return pairs, gemm.grouped_experts(x[:m], weights[:m], pairs, local.w13, local.w2, LIMIT, tiling=tiling)

    pairs, y = routed(rows)
    expected = reference.sort_pairs(ids, 0, LOCAL)
    error = difference(y, reference.grouped_experts(x, weights, expected, local.w13, local.w2, LIMIT))
    total = gemm.sum_pairs(y, pairs.position)
    fewer, part = routed(few)
    same = torch.equal(gemm.sum_pairs(part, fewer.position), total[:few])
    sorted_alike = all(torch.equal(a, b) for a, b in zip(pairs, expected, strict=True))
    print(f"check experts {rows:11} error {error:.1e}, same bits among fewer rows: {same}, pairs equal: {sorted_alike}")


def compile_candidate(kind: str, values: Values) -> str:
    """Compile one tiling of the sweep in a process of its own; what it said when it failed."""
    try:
        if kind == "linear":
            for name in LINEARS:
                Linear(name, 8, 0).case(LinearTiling(None, Tiling(*values[1:]), values[0])).calls[0]()
        else:
            for _, case in Experts(TOPK).halves(8, [Tiling(*values)]):
                case.calls[0]()
        torch.cuda.synchronize()
    except Exception as error:
        return f"{kind} {values}: {type(error).__name__} {str(error)[:80]}"
    return ""


def compile_sweep() -> None:
    """Fill the compiler's cache from many processes."""
    jobs = [("experts", t) for ts in reversed(EXPERT_SWEEP.values()) for t in ts]
    jobs += [("linear", t) for ts in reversed(LINEAR_SWEEP.values()) for t in ts]
    with ProcessPoolExecutor(15, multiprocessing.get_context("spawn")) as pool:
        for message in pool.map(compile_candidate, *zip(*jobs, strict=True)):
            if message:
                print("does not run:", message)


def candidates(sweep: dict[int, list[Values]], rows: int) -> list[Values]:
    """Tilings that a sweep tries at a number of rows."""
    return sweep[min((most for most in sweep if most >= rows), default=max(sweep))]


def show(case: Case, ceiling: tuple[float, float], note: str = "") -> None:
    """Time a case and print its line."""
    copy, rate = ceiling
    try:
        seconds = device_seconds(case.calls)
    except Exception as error:
        print(f"{case.name:15} {case.rows:5} {note}: {type(error).__name__} {str(error)[:60]}")
        return
    counted = f"{case.num_bytes / 1e6:7.1f} MB {case.flop / 1e9:7.1f} GFLOP"
    shares = f"{case.num_bytes / seconds / copy:4.0%} HBM {case.flop / seconds / rate:4.0%} BF16"
    print(f"{case.name:15} {case.rows:5} {seconds * 1e6:8.1f} us {counted} {shares} {note}", flush=True)


def sweep(rows: int, only: str, local: Experts, ceiling: tuple[float, float]) -> None:
    """Show every tiling of the products at a number of rows."""
    for name in (name for name in LINEARS if only in name):
        inputs, first = Linear(name, rows), None
        for values in candidates(LINEAR_SWEEP, rows):
            case = inputs.case(LinearTiling(None, Tiling(*values[1:]), values[0]))
            y = case.calls[0]()
            first = y if first is None else first
            show(case, ceiling, f"{values} {difference(y, first):.0e}")
    if only in "experts":
        firsts: dict[str, Tensor] = {}
        for tiling, case in local.halves(rows, [Tiling(*values) for values in candidates(EXPERT_SWEEP, rows)]):
            y = case.calls[0]()
            t = astuple(tiling)
            show(case, ceiling, f"{t} {difference(y, firsts.setdefault(case.name, y)):.0e}")


def usual(rows: int, only: str, local: Experts, ceiling: tuple[float, float]) -> None:
    """Show every kernel in its usual tiles at a number of rows."""
    for name in (name for name in LINEARS if only in name):
        show(Linear(name, rows).case(), ceiling)
    if only in "experts":
        show(local.case(rows), ceiling)
    for case in small_cases(rows):
        if only in case.name:
            show(case, ceiling)


def main() -> None:
    """Measure what the flags ask for."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--sweep", action="store_true", help="try many tilings")
    parser.add_argument("--check", action="store_true", help="compare with the reference first")
    parser.add_argument("--only", default="", help="kernels whose name contains this")
    parser.add_argument("--rows", default="1,8,64,256,4096", help="numbers of rows")
    flags = parser.parse_args()
    if flags.sweep:
        compile_sweep()
    ceiling = ceilings()
    device, (copy, rate) = torch.cuda.get_device_name(), ceiling
    print(f"{device}, torch {torch.__version__}: copy {copy / 1e12:.2f} TB/s, BF16 {rate / 1e12:.0f} TFLOP/s")
    local = Experts(LOCAL)
    for rows in [int(value) for value in flags.rows.split(",")]:
        if flags.check:
            check(rows, local)
        (sweep if flags.sweep else usual)(rows, flags.only, local, ceiling)
    if flags.only in "experts" and not flags.sweep:
        show(Experts(EXPERTS).case(64), ceiling)


if __name__ == "__main__":
    main()
