"""The one-sided exchange: its kernel interpreted and compiled without a device, and against NCCL on two GPUs.

`pytest -m gpu tests/test_cuda_exchange.py` on a machine with GPUs.
"""

from __future__ import annotations

import sys
from typing import Any

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch
from kernel_builds import compiled, report, resource_usage, run_scripts

from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.launch import Channel, RankGroup, RankPlace
from deepinfer.layout.parallel import ParallelLayout


def check_push() -> None:
    """Parts of three ranks, each at its place in everyone's memory and nowhere else."""
    from backends.cuda.exchange import push

    ranks, words, start = 3, 5000, 32
    memory = torch.full((ranks, start + ranks * words + 8), -1, dtype=torch.int32)
    addresses = torch.tensor([part.data_ptr() for part in memory])
    sent = torch.randint(0, 1 << 30, (ranks, ranks, words), dtype=torch.int32)
    for place in range(ranks):
        push(sent[place], addresses, start, place)
    parts = memory[:, start : start + ranks * words].view(ranks, ranks, words)
    assert torch.equal(parts, sent.transpose(0, 1))
    assert (memory[:, :start] == -1).all()
    assert (memory[:, start + ranks * words :] == -1).all()


def check_compiles(architecture: int) -> None:
    from backends.cuda.exchange import _push_kernel

    types = {"x": "*i32", "buffers": "*i64"}
    built = compiled(_push_kernel, architecture, types, {"BLOCK": 4096}, ("words", "start"), num_warps=8)
    assert "st.global.v4.b32" in built.asm["ptx"]
    assert "STACK:0" in resource_usage(built)


@pytest.fixture(scope="module")
def outcomes() -> Any:
    return run_scripts(__file__)


@pytest.mark.parametrize("task", ["interpret", "90", "100"])
def test_the_kernel_without_a_device(outcomes: Any, task: str) -> None:
    assert outcomes[task] == {"push": None}


def exchange_worker(context: RankPlace, capacity: int, channel: Channel) -> None:
    """Replays a graph of two exchanges there and back on new numbers, one after the other; are they NCCL's?

    Nothing but the exchanges themselves holds a rank back, and one of them dawdles now and then.
    """
    from backends.cuda.exchange import OneSidedExchange

    n, device = context.world_size, torch.device("cuda", context.device_index)
    torch.cuda.set_device(device)
    comm = Communicator(ParallelLayout(dp=n, ep=n), context.rank, device)
    comm.one_sided = exchange = OneSidedExchange.between(comm, capacity)
    torch.manual_seed(context.rank)
    for rows in channel:
        x = torch.zeros(n, rows, 640, dtype=torch.bfloat16, device=device)
        ids = torch.zeros(n, rows, 6, dtype=torch.int32, device=device)
        comm.all_to_all_equal(ids)

        def run(x: torch.Tensor = x, ids: torch.Tensor = ids) -> list[torch.Tensor]:
            found = []
            for _ in range(2):
                there = comm.exchange_equal([x, ids])
                (back,) = comm.exchange_equal([there[0] + 1], back=True)
                found += [there[0].clone(), there[1].clone(), back.clone()]
            return found

        run()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            found = run()
        sent = [(torch.randn_like(x), torch.randint_like(ids, 384)) for _ in range(50)]
        received = []
        for turn, (numbers, experts) in enumerate(sent):
            if turn % 7 == context.rank:
                torch.cuda._sleep(200_000)
            x.copy_(numbers)
            ids.copy_(experts)
            graph.replay()
            received.append([tensor.clone() for tensor in found])
        same = exchange is not None
        for (numbers, experts), got in zip(sent, received, strict=True):
            expected = [comm.all_to_all_equal(numbers), comm.all_to_all_equal(experts)]
            expected.append(comm.all_to_all_equal(expected[0] + 1))
            same = same and all(torch.equal(a, b) for a, b in zip(got, 2 * expected, strict=True))
        channel.reply(same)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("capacity", [32 << 20, 400_000])
def test_one_sided_exchanges_are_those_of_nccl(capacity: int) -> None:
    """Where all fit, and where those of 400 rows do not and NCCL carries them."""
    with RankGroup("test_cuda_exchange:exchange_worker", capacity, 2) as group:
        for rows in (1, 7, 64, 400):
            assert group.call(rows) == [True, True]


if __name__ == "__main__":
    task = sys.argv[1]
    report([("push", check_push if task == "interpret" else lambda: check_compiles(int(task)))])
