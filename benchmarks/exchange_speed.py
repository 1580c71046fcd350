"""What the exchange of a captured decode step's rows costs: NCCL's all-to-all against the one-sided way.

    python benchmarks/exchange_speed.py [--gpus 2] [--rows 8,64,256] [--hidden 5120] [--topk 6]

Per number of rows that a rank sends to every rank: microseconds there (rows with their weights and experts) and back
(rows), medians over replays of a CUDA graph that makes the round trip 20 times.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from backends.cuda.exchange import OneSidedExchange
from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.launch import Channel, RankGroup, RankPlace
from deepinfer.errors import UsageError
from deepinfer.layout.parallel import ParallelLayout

REPEATS = 20


def seconds_per_call(call: Callable[[], object]) -> float:
    """Median over replays; the ranks start each together."""
    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(REPEATS):
            call()
    times = []
    for _ in range(12):
        torch.cuda.synchronize()
        dist.barrier()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        graph.replay()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end) / 1e3 / REPEATS)
    return statistics.median(times[2:])


def worker(place: RankPlace, payload: Any, channel: Channel) -> None:
    """Time messages of (rows, hidden, topk) in both ways."""
    n, device = place.world_size, torch.device("cuda", place.device_index)
    torch.cuda.set_device(device)
    comm = Communicator(ParallelLayout(dp=n, ep=n), place.rank, device)
    one_sided = OneSidedExchange.between(comm)
    if one_sided is None:
        raise UsageError("these GPUs do not reach each other's memory: NCCL carries their exchanges")
    for rows, hidden, topk in channel:
        x = torch.randn(n, rows, hidden, device=device).to(torch.bfloat16)
        columns: list[Tensor] = [x, torch.rand(n, rows, topk, device=device), torch.zeros(n, rows, topk, device=device)]
        times = []
        for way in (None, one_sided):
            comm.one_sided = way
            there = seconds_per_call(lambda columns=columns: comm.exchange_equal(columns))  # type: ignore[misc]
            both = seconds_per_call(
                lambda c=columns, x=x: (comm.exchange_equal(c), comm.exchange_equal([x], back=True))
            )  # type: ignore[misc]
            times.append((there, both - there))
        channel.reply(times)


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in (("gpus", 2), ("hidden", 5120), ("topk", 6)):
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--rows", default="8,64,256")
    options = parser.parse_args()
    print(f"{'rows':>6} {'NCCL there':>12} {'back':>8} {'one-sided there':>16} {'back':>8}   us")
    with RankGroup("exchange_speed:worker", None, options.gpus) as group:
        for rows in [int(value) for value in options.rows.split(",")]:
            (nccl, own), *_ = group.call((rows, options.hidden, options.topk))
            print(
                f"{rows:6} {nccl[0] * 1e6:12.1f} {nccl[1] * 1e6:8.1f} {own[0] * 1e6:16.1f} {own[1] * 1e6:8.1f}",
                flush=True,
            )


if __name__ == "__main__":
    main()
