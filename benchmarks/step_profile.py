"""Where a decode step's time goes on a GPU: time of every operator beside what its bytes and FLOPs take at least.

    python benchmarks/step_profile.py --layers 12 --requests 64 --context 4096 [--nextn 0] [--prefill 4096]

Bytes and FLOPs are the graph's own, the bandwidth and the BF16 rate are measured first (a copy, a product). Weights are
made up, widths are V4.1-Flash's. Times are those of kernels, without gaps between them; the captured step is timed
whole beside them.
"""

from __future__ import annotations

import argparse
import bisect
from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import triton
from engine_speed import shortened
from torch import Tensor
from torch.profiler import ProfilerActivity, profile, record_function

from backends.cuda.backend import GPU
from backends.torch_runtime.assemble import rank_context
from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.context import StepContext
from backends.torch_runtime.engram import made_up_token_map
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.inputs import Track, prompt_rows
from backends.torch_runtime.steps import StepBuilder
from backends.torch_runtime.weights.dummy import dummy_weights
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import runner_backend
from deepinfer.engine.shape import ReplicaLoad, step_shape
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.shape import StepShape
from deepinfer.hardware.host import load_host
from deepinfer.hardware.spec import ClusterSpec
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.hf import parse_config
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import StopChecker
from deepinfer.scheduler.step import PrefillChunk

MARK = "op "
"""What the names of operators begin with among those of kernels."""


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("layers", 12), ("context", 4096), ("nextn", 0), ("prefill", 0), ("top", 24)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--requests", default="64", help="numbers, separated by commas")
    options = parser.parse_args()
    counts = [int(n) for n in options.requests.split(",")]
    engine = Bench(options.layers, options.nextn, max(counts), options.context, options.prefill)
    bandwidth, rate = ceilings()
    print(f"measured: copy {bandwidth / 1e12:.2f} TB/s read + written, BF16 product {rate / 1e12:.0f} TFLOP/s")
    for count in counts:
        shape = step_shape(ReplicaLoad(count, options.nextn, options.context), count, count, 1)
        whole = engine.captured_seconds(count, options.context)
        print(f"\n{count} requests, context {options.context}, nextn {options.nextn}: {whole * 1e3:.3f} ms captured")
        step = engine.decode_step(count, options.context)
        report(engine, step, shape, bandwidth, rate, options.top)
    if options.prefill:
        load = ReplicaLoad(0, options.nextn, 0.0, 1, options.prefill, 0.0, options.prefill, 1)
        shape = step_shape(load, options.prefill, options.prefill, 1)
        print(f"\nprefill of {options.prefill} tokens")
        report(engine, engine.prefill_step(options.prefill), shape, bandwidth, rate, options.top)


class Bench:
    """One rank with made-up weights, whose requests all have the same context."""

    def __init__(self, layers: int, nextn: int, requests: int, context: int, prefill: int) -> None:
        model = parse_config(shortened(layers), "shortened")
        machine = runner_backend("cuda").accelerator(1)
        blocks = -(-max(context + 64, prefill + 64) // 128)
        settings = EngineSettings(
            max_num_seqs=requests, max_tokens_per_step=max(8192, 8 * requests), nextn=nextn, kv_format="fp4"
        )
        layout = ParallelLayout()
        budget = replace(memory_budget(model, layout, machine, settings), num_blocks=requests * (blocks + 1))
        cluster = ClusterSpec(machine, 1)
        deployment = Deployment(model, cluster, layout, settings, 1, 1.0, budget, load_host("deepinfer"))
        device = GPU.take(0)
        kernels = GPU.kernels(torch.bfloat16)
        weights = dummy_weights(model, device=device, arranged=kernels.arranged)
        assert model.numerics is not None
        assert model.numerics.engram is not None
        tokens = made_up_token_map(model.numerics.engram, model.vocab_size)
        limit = blocks * 128
        comm = Communicator(layout, 0, device)
        self.rank = rank_context(deployment, weights, comm, kernels, torch.bfloat16, limit, tokens)
        self.graph: ExecutionGraph = deployment.graph()
        self.builder = StepBuilder(self.rank)
        self.executor = Executor(self.rank, self.graph)
        state, generator = self.rank.state, torch.Generator(device=device).manual_seed(0)
        table = torch.arange(requests * blocks, device=device, dtype=torch.int32).view(requests, blocks)
        state.block_table[:requests, :blocks] = table
        # Random bytes are valid E2M1 and, without the sign's all-ones neighbour, E4M3.
        for cache in (*state.rings.values(), *state.main.values(), *state.keys.values()):
            cache.random_(0, 120, generator=generator)

    def _reset(self, count: int, context: int) -> Tensor:
        state = self.rank.state
        state.cached[:count] = context
        state.tokens.random_(0, self.rank.model.vocab_size)
        return torch.arange(count, dtype=torch.int32, device=state.device)

    def decode_step(self, count: int, context: int) -> StepContext:
        """A step that decodes `count` requests."""
        step = self.builder.decode(self._reset(count, context), _bound(context))
        step.equal_exchange = True
        return step

    def prefill_step(self, rows: int) -> StepContext:
        """A step with one prompt."""
        prompt = np.random.default_rng(0).integers(0, self.rank.model.vocab_size, rows).tolist()
        track = Track(SamplingParams(), 0, rows, prompt, StopChecker(SamplingParams(), ()), slot=0)
        prompts = prompt_rows([PrefillChunk(0, 0, rows, rows, True)], {0: track}, 1, 4)
        nobody = np.zeros(0, dtype=np.int64)
        return self.builder.mixed(self.builder.to_device(nobody), prompts, rows)

    @torch.inference_mode()
    def captured_seconds(self, count: int, context: int) -> float:
        """Median seconds of a captured step."""
        slots = self._reset(count, context)

        def run() -> None:
            step = self.builder.decode(slots, _bound(context))
            step.equal_exchange = True
            self.executor.run(step)

        run()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            run()
        seconds = []
        for _ in range(12):
            self._reset(count, context)
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            graph.replay()
            end.record()
            torch.cuda.synchronize()
            seconds.append(begin.elapsed_time(end) / 1e3)
        return float(np.median(seconds[2:]))


def _bound(context: int) -> int:
    return max(4096, 1 << (context + 63).bit_length())


def ceilings() -> tuple[float, float]:
    """Bytes/s of a large copy, read and written, and FLOP/s of a large BF16 product on random data."""
    source = torch.randint(0, 255, (1 << 31,), dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    copy_ms = triton.testing.do_bench(lambda: target.copy_(source), return_mode="median")
    a, b = (torch.randn(8192, 8192, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    product_ms = triton.testing.do_bench(lambda: a @ b, return_mode="median")
    return 2 * source.numel() / copy_ms * 1e3, 2 * 8192**3 / product_ms * 1e3


def report(bench: Bench, step: StepContext, shape: StepShape, bandwidth: float, rate: float, top: int) -> None:
    """Operators by device time, with the share of their roofline; then single kernels by time."""
    issues = bench.executor._issues
    bench.executor._issues = tuple(issue._replace(code=_named(issue.operator.name, issue.code)) for issue in issues)
    bench.executor.run(step)
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as found:
        bench.executor.run(step)
        torch.cuda.synchronize()
    bench.executor._issues = issues
    least: Counter[str] = Counter()
    count: Counter[str] = Counter()
    for place in bench.graph.steps:
        operator = bench.graph.operators[place.operator]
        work = operator.work(shape)
        moved = float(work.bytes_read) + float(work.bytes_written)
        least[operator.name] += max(moved / bandwidth, float(work.flops) / rate)
        count[operator.name] += 1
    on_device = [
        (event.name, event.time_range.start, event.time_range.end)
        for event in found.events()
        if event.device_type != torch.autograd.DeviceType.CPU
    ]
    seconds = seconds_by_operator(on_device)
    total = sum(seconds.values())
    print(f"operators: {total * 1e3:.3f} ms of kernels; at least {sum(least.values()) * 1e3:.3f} ms by bytes and FLOPs")
    print(f"{'operator':24}{'count':>6}{'ms':>9}{'least ms':>10}{'share':>7}")
    for name, time in seconds.most_common(top):
        print(f"{name:24}{count[name]:6}{time * 1e3:9.3f}{least[name] * 1e3:10.3f}{least[name] / time:7.0%}")
    kernels: dict[str, list[float]] = {}
    for name, start, end in on_device:
        if not name.startswith(MARK):
            kernels.setdefault(name, []).append((end - start) / 1e3)
    for name, milliseconds in sorted(kernels.items(), key=lambda item: -sum(item[1]))[:top]:
        print(f"  {sum(milliseconds):8.3f} ms {len(milliseconds):5} x {name[:90]}")


def seconds_by_operator(events: Sequence[tuple[str, float, float]]) -> Counter[str]:
    """Seconds of kernels within each operator, of a device's (name, start us, end us): spans of marks hold kernels.

    The spans themselves are longer: a step that is not captured leaves the device idle between its kernels.
    """
    spans = sorted((start, end, name.removeprefix(MARK)) for name, start, end in events if name.startswith(MARK))
    starts = [start for start, _, _ in spans]
    seconds: Counter[str] = Counter()
    for name, start, end in events:
        place = bisect.bisect_right(starts, start) - 1
        if not name.startswith(MARK) and place >= 0 and start < spans[place][1]:
            seconds[spans[place][2]] += (end - start) * 1e-6
    return seconds


def _named(name: str, code: Any) -> Any:
    def run(*arguments: Any) -> Any:
        with record_function(MARK + name):
            return code(*arguments)

    return run


if __name__ == "__main__":
    main()
