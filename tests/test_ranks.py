"""Ranks in real processes: their collectives against what one process computes, and how they end."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor

from backends.torch_runtime.comm import FAMILIES, Communicator, peer_ranks, split_rows
from backends.torch_runtime.launch import Channel, RankError, RankGroup, RankPlace, joined_place
from deepinfer.errors import UsageError
from deepinfer.layout.parallel import ParallelLayout

DTYPES = (torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.int64, torch.uint8, torch.bool)

# --- groups ---------------------------------------------------------------------------------------------------------


def layouts(ranks: int) -> Iterator[ParallelLayout]:
    """Every layout of so many ranks that the class accepts."""
    degrees = [n for n in range(1, ranks + 1) if ranks % n == 0]
    for dp, cp, tp, ep, etp, dcp in itertools.product(degrees, repeat=6):
        if dp * cp * tp == ranks:
            with suppress(UsageError):
                yield ParallelLayout(dp, cp, tp, ep, etp, dcp=dcp)


def expected_groups(layout: ParallelLayout) -> dict[str, list[set[int]]]:
    """Each rank's groups from an array of ranks, its axes named (dp, cp, tp), and one named (copy, place)."""
    ranks = torch.arange(layout.num_ranks)
    mesh = ranks.view(layout.dp, layout.cp, layout.tp)
    blocks = {
        "replica": mesh.transpose(1, 2).reshape(-1, layout.cp).tolist(),
        "expert": ranks.view(-1, layout.ep * layout.etp).tolist(),
        "engine": [ranks.tolist()],
    }
    # Those that share a replica or experts wait for each other, and so on: connected components.
    joined = [set(block) for block in blocks["expert"] + mesh.reshape(layout.dp, -1).tolist()]
    for rank in range(layout.num_ranks):
        touching = [group for group in joined if rank in group]
        joined = [group for group in joined if rank not in group] + [set().union(*touching)]
    blocks["step"] = [sorted(group) for group in joined]
    return {
        family: [next(set(block) for block in blocks[family] if rank in block) for rank in range(layout.num_ranks)]
        for family in FAMILIES
    }


@pytest.mark.parametrize("ranks", [1, 2, 4, 6, 8, 12])
def test_groups_of_every_layout(ranks: int) -> None:
    for layout in layouts(ranks):
        expected = expected_groups(layout)
        for family, rank in itertools.product(FAMILIES, range(ranks)):
            peers = peer_ranks(layout, family, rank)
            assert peers == tuple(sorted(expected[family][rank])), (layout, family, rank)


@pytest.mark.parametrize(("total", "ranks"), [(0, 3), (1, 4), (7, 4), (9, 8), (16, 4), (384_006_168, 64)])
def test_tables_are_split_without_gap_or_overlap(total: int, ranks: int) -> None:
    parts = [split_rows(total, ranks, rank) for rank in range(ranks)]
    assert [part.start for part in parts] == [0, *(part.stop for part in parts[:-1])]
    assert parts[-1].stop == total
    assert max(map(len, parts)) == -(-total // ranks)


# --- collectives ----------------------------------------------------------------------------------------------------


@dataclass
class Case:
    """What all ranks of a layout bring, from a seed: each rank takes its part, the test computes with the whole."""

    layout: ParallelLayout
    seed: int

    def __post_init__(self) -> None:
        n, chance = self.layout.num_ranks, random.Random(self.seed)
        self.values = [chance.randrange(-(2**40), 2**40) for _ in range(n)]
        self.source = chance.randrange(n)
        dtype, width = chance.choice(DTYPES), chance.choice([(), (3,), (2, 5)])
        bits = torch.Generator().manual_seed(self.seed)

        def rows(*shape: int) -> Tensor:
            numbers = torch.randint(0, 2 if dtype == torch.bool else 100, (*shape, *width), generator=bits)
            return numbers.to(dtype)

        self.rows = [rows(chance.choice([0, 0, 1, 2, 5])) for _ in range(n)]
        self.expert = [sorted(group) for group in expected_groups(self.layout)["expert"]]
        size = len(self.expert[0])
        self.parcels = [[rows(chance.choice([0, 0, 1, 3])) for _ in range(size)] for _ in range(n)]
        self.equal = [rows(size, self.seed % 3) for _ in range(n)]
        self.table = rows(chance.choice([0, 1, n - 1, n + 1, 41]))
        limit = len(self.table)
        self.ids = [
            torch.randint(0, max(limit, 1), (chance.choice([0, 1, 4]) if limit else 0, 3), generator=bits)
            for _ in range(n)
        ]

    def on_rank(self, comm: Communicator) -> list[Any]:
        rank, device = comm.rank, comm.device
        held = split_rows(len(self.table), self.layout.num_ranks, rank)
        ids, table = self.ids[rank].to(device), self.table[held.start : held.stop].to(device)
        place = self.expert[rank].index(rank)
        outcome = [
            comm.agree_max(self.values[rank]),
            comm.broadcast_object({"from": rank}, self.source),
            comm.all_gather_rows(self.rows[rank].to(device), [len(self.rows[peer]) for peer in comm.replica.ranks]),
            comm.all_to_all_rows(
                torch.cat(self.parcels[rank]).to(device),
                [len(parcel) for parcel in self.parcels[rank]],
                [len(self.parcels[peer][place]) for peer in self.expert[rank]],
            ),
            comm.all_to_all_equal(self.equal[rank].to(device)),
            comm.engram_rows(ids, table, len(self.table)) if self.seed % 2 else comm.engram_rows(ids, table.cpu()),
        ]
        return [x.cpu() if isinstance(x, Tensor) else x for x in outcome]

    def expected(self, rank: int) -> list[Any]:
        groups = {family: sorted(groups[rank]) for family, groups in expected_groups(self.layout).items()}
        place = groups["expert"].index(rank)
        ids = self.ids[rank]
        found = torch.stack([self.table[i] for i in ids.flatten()]) if ids.numel() else self.table[:0]
        return [
            max(self.values[peer] for peer in groups["step"]),
            {"from": self.source},
            torch.cat([self.rows[peer] for peer in groups["replica"]]),
            torch.cat([self.parcels[peer][place] for peer in groups["expert"]]),
            torch.stack([self.equal[peer][place] for peer in groups["expert"]]),
            found.reshape(*ids.shape, *self.table.shape[1:]),
        ]


def collectives_worker(context: RankPlace, device_type: str, channel: Channel) -> None:
    device = torch.device(device_type, context.device_index)
    if device_type == "cuda":
        torch.cuda.set_device(device)
    for layout, seeds in channel:
        comm = Communicator(layout, context.rank, device)
        channel.reply([Case(layout, seed).on_rank(comm) for seed in seeds])


def same(a: Any, b: Any) -> bool:
    if not isinstance(b, Tensor):
        return bool(a == b)
    return (a.dtype, a.shape) == (b.dtype, b.shape) and bool(torch.equal(a.float(), b.float()))


def different_layouts(ranks: int) -> list[ParallelLayout]:
    """One layout of each grouping: the collectives see nothing else of it."""
    kept: dict[object, ParallelLayout] = {}
    for layout in layouts(ranks):
        kept.setdefault(str(expected_groups(layout)), layout)
    return list(kept.values())


@pytest.mark.parametrize("ranks", [1, 2, 4, pytest.param(8, marks=pytest.mark.slow)])
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_collectives_compute_what_one_process_does(device: str, ranks: int) -> None:
    if device == "cuda" and torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    with RankGroup("test_ranks:collectives_worker", device, ranks) as group:
        for number, layout in enumerate(different_layouts(ranks)):
            seeds = range(100 * number, 100 * number + 16 // ranks)
            for rank, outcomes in enumerate(group.call((layout, seeds))):
                for seed, outcome in zip(seeds, outcomes, strict=True):
                    expected = Case(layout, seed).expected(rank)
                    wrong = [i for i, (a, b) in enumerate(zip(outcome, expected, strict=True)) if not same(a, b)]
                    assert not wrong, (layout, rank, seed, wrong)
    assert not dist.is_initialized()


def graph_worker(context: RankPlace, payload: Any, channel: Channel) -> None:
    """Replay a CUDA graph of the collectives of static shape with the numbers of each message."""
    n, device = context.world_size, torch.device("cuda", context.device_index)
    torch.cuda.set_device(device)
    comm = Communicator(ParallelLayout(cp=n, ep=n), context.rank, device)
    parts, rows = torch.zeros(n, 16, 64, device=device), torch.zeros(context.rank + 1, 8, device=device)
    sizes = list(range(1, n + 1))
    comm.all_to_all_equal(parts), comm.all_gather_rows(rows, sizes)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        exchanged, gathered = comm.all_to_all_equal(parts), comm.all_gather_rows(rows, sizes)
    for message in channel:
        parts.fill_(10.0 * context.rank + message)
        rows.fill_(context.rank + message)
        graph.replay()
        channel.reply((exchanged[:, 0, 0].tolist(), gathered[:, 0].tolist()))


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs 2 CUDA devices")
def test_a_cuda_graph_holds_the_static_collectives() -> None:
    n = torch.cuda.device_count()
    with RankGroup("test_ranks:graph_worker", None, n) as group:
        for message in (1, 2):
            exchanged = [10.0 * rank + message for rank in range(n)]
            gathered = [rank + message for rank in range(n) for _ in range(rank + 1)]
            assert group.call(message) == [(exchanged, gathered)] * n


# --- ranks that answer, fail and end --------------------------------------------------------------------------------


def acting_worker(context: RankPlace, payload: Any, channel: Channel) -> None:
    """Carry out messages of the form (action, argument)."""
    actions: dict[str, Callable[[], None]] = {
        "raise": raise_two_lines,
        "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
        "exit": lambda: os._exit(7),
    }
    channel.progress("ready")
    for action, argument in channel:
        if action == "count":
            for i in range(argument):
                channel.progress((context.rank, i))
        elif action == "sleep":
            channel.progress("asleep")
            time.sleep(argument)
        elif action in actions:
            fail_on(context, argument, channel, actions[action])
        channel.reply((context.rank, payload, argument))


def raise_two_lines() -> None:
    raise ValueError("row 3 is wrong\nand more on another line")


def fail_on(context: RankPlace, rank: int, channel: Channel, how: Callable[[], None]) -> None:
    """Let one rank fail while the others wait for it in a collective, the last one deaf to SIGTERM."""
    channel.progress(f"partial {os.getpid()}")
    if context.rank == rank:
        time.sleep(0.3)
        how()
    elif context.rank == context.world_size - 1:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        time.sleep(1000)
    dist.all_reduce(torch.zeros(1))


def lives(pid: int) -> bool:
    """Whether a process runs; one that only waits to be reaped does not."""
    try:
        return Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ended_within(seconds: float, pids: list[int]) -> bool:
    until = time.monotonic() + seconds
    while (living := any(map(lives, pids))) and time.monotonic() < until:
        time.sleep(0.05)
    return not living


@pytest.mark.parametrize("ranks", [1, 2])
def test_ranks_answer_report_and_close(ranks: int) -> None:
    seen: list[Any] = []
    group = RankGroup("test_ranks:acting_worker", {"size": 3}, ranks)
    large = torch.arange(4_000_000).to(torch.bfloat16)
    for rank, reply in enumerate(group.call(("echo", large))):
        assert reply[:2] == (rank, {"size": 3})
        assert same(reply[2], large)
    assert len(group.call(("count", 3), on_progress=seen.append)) == ranks
    assert sorted(seen) == [(rank, i) for rank in range(ranks) for i in range(3)]

    group.close()
    group.close()
    with pytest.raises(RankError, match="closed"):
        group.call(("echo", None))


@pytest.mark.parametrize(
    ("action", "ranks", "sentence"),
    [
        ("raise", 2, "rank 1 failed: ValueError: row 3 is wrong"),
        ("kill", 3, "rank 1 was killed by SIGKILL"),
        ("exit", 2, "rank 1 ended with status 7 unasked"),
    ],
)
def test_a_rank_that_fails_takes_the_others_along(action: str, ranks: int, sentence: str) -> None:
    with RankGroup("test_ranks:acting_worker", None, ranks, timeout_s=8.0) as group:
        started = time.monotonic()
        with pytest.raises(RankError) as caught:
            group.call((action, 1))
        assert time.monotonic() - started < 8.0
        assert str(caught.value) == sentence
        partial = [text for sent in caught.value.replies.values() for text in sent if text != "ready"]
        assert len(partial) == ranks
        assert ended_within(0.0, [int(text.split()[1]) for text in partial])
        with pytest.raises(RankError, match=f"have ended: {sentence}"):
            group.call(("echo", None))


def test_a_failure_of_the_only_rank_keeps_its_cause() -> None:
    with RankGroup("test_ranks:acting_worker", None, 1) as group:
        with pytest.raises(RankError, match=r"^rank 0 failed: ValueError: row 3 is wrong$") as caught:
            group.call(("raise", 0))
        assert isinstance(caught.value.__cause__, ValueError)


def rude_worker(context: RankPlace, replies: int | None, channel: Channel) -> None:
    """Reply so many times to each message; None leaves without reading any."""
    for message in channel if replies is not None else ():
        for _ in range(replies or 0):
            channel.reply(message)


@pytest.mark.parametrize(
    ("worker", "replies", "complaint"),
    [
        ("rude_worker", 0, "before it replied"),
        ("rude_worker", 2, "replied twice"),
        ("rude_worker", None, "rank 0 ended unasked"),
        ("missing", 1, "no attribute 'missing'"),
    ],
)
def test_workers_that_break_the_rules(worker: str, replies: int | None, complaint: str) -> None:
    def talk() -> None:
        with RankGroup(f"test_ranks:{worker}", replies, 1) as group:
            group.call("first")
            group.call("second")

    with pytest.raises(RankError, match=complaint):
        talk()


OWNER = """
import sys
from backends.torch_runtime.launch import RankGroup
try:
    with RankGroup("test_ranks:acting_worker", None, 2) as group:
        pids = [process.pid for process in group._crew._processes]
        group.call(("sleep", 1000), on_progress=lambda _: print(*pids, flush=True))
except KeyboardInterrupt:
    sys.exit(130)
"""


def python(*arguments: str) -> subprocess.Popen[str]:
    root = Path(__file__).parents[1]
    environment = {**os.environ, "PYTHONPATH": f"{root}:{root / 'tests'}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    pipe = subprocess.PIPE
    # Where the tests themselves were started in the background, interrupts are ignored, and children inherit that.
    return subprocess.Popen(
        command,
        env=environment,
        stdout=pipe,
        stderr=pipe,
        text=True,
        start_new_session=True,
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


@pytest.mark.parametrize(("number", "whom", "status"), [(signal.SIGINT, os.killpg, 130), (signal.SIGKILL, os.kill, -9)])
def test_ranks_end_with_their_owner(number: signal.Signals, whom: Callable[[int, int], None], status: int) -> None:
    with python("-c", OWNER) as owner:
        assert owner.stdout is not None
        assert owner.stderr is not None
        owner.stdout.readline()
        pids = [int(pid) for pid in owner.stdout.readline().split()]
        assert len(pids) == 2
        assert all(map(lives, pids))
        whom(owner.pid, number)
        try:
            assert owner.wait(15.0) == status
        finally:
            owner.kill()  # or leaving this block would wait for it
        assert ended_within(5.0, pids)
        assert owner.stderr.read() == ""


JOINED = """
import os
from backends.torch_runtime.launch import RankGroup
with RankGroup("test_ranks:acting_worker", "p", 2) as group:
    seen = []
    echoed = group.call(("echo", 5))
    group.call(("count", 2), on_progress=seen.append)
    print(f"{os.environ['RANK']} {echoed} {seen}\\n", end="", flush=True)
"""


def test_processes_of_torchrun_join(tmp_path: Path) -> None:
    script = tmp_path / "joined.py"
    script.write_text(JOINED, encoding="utf-8")
    with python("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)) as run:
        output, errors = run.communicate(timeout=120.0)
    assert run.returncode == 0, errors
    assert sorted(output.splitlines()) == [
        "0 [(0, 'p', 5), (1, 'p', 5)] [(0, 0), (0, 1)]",
        "1 [(0, 'p', 5), (1, 'p', 5)] []",
    ]


def test_what_torchrun_says_is_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    told = {"RANK": "3", "WORLD_SIZE": "8", "LOCAL_RANK": "1"}
    assert joined_place(told) == RankPlace(3, 8, 1, 1)
    assert joined_place({"RANK": "3"}) is None
    with pytest.raises(UsageError, match="RANK=x"):
        joined_place({**told, "RANK": "x"})
    with pytest.raises(UsageError, match="module:callable"):
        RankGroup("worker", None, 1)
    with pytest.raises(UsageError, match="at least 1 rank"):
        RankGroup("a:b", None, 0)
    for name, value in told.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(UsageError, match="torchrun started 8 ranks and the engine has 2"):
        RankGroup("a:b", None, 2)
