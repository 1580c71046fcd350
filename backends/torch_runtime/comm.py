"""The process groups of a layout and the collectives that a step needs, on any device.

Rows travel as bytes, so every dtype passes every transport. The device's own transport (gloo, NCCL, ...) carries them;
small host values go through gloo beside it, whatever the device.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, TypeVar, cast

import torch
import torch.distributed as dist
from torch import Tensor

from deepinfer.layout.parallel import ParallelLayout

Family = Literal["replica", "expert", "step", "engine"]
FAMILIES: tuple[Family, ...] = ("replica", "expert", "step", "engine")
T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Peers:
    """The ranks that a collective spans, in its order, and this rank's place; `group` is None for a rank alone."""

    ranks: tuple[int, ...]
    place: int
    group: dist.ProcessGroup | None

    @property
    def size(self) -> int:
        """How many ranks they are."""
        return len(self.ranks)


def peer_ranks(layout: ParallelLayout, family: Family, rank: int) -> tuple[int, ...]:
    """Ranks of a rank's group, ascending.

    `replica`: the cp ranks with the same (dp, tp), which divide the rows of one attention replica. `expert`: the
    ep x etp ranks that hold all the experts once. `step`: the ranks that step together. `engine`: all.
    """
    if family == "engine":
        return tuple(range(layout.num_ranks))
    mine = _group_key(layout, family, rank)
    return tuple(other for other in range(layout.num_ranks) if _group_key(layout, family, other) == mine)


def _group_key(layout: ParallelLayout, family: Family, rank: int) -> tuple[int, ...]:
    if family == "replica":
        dp, _, tp = layout.coordinates(rank)
        return dp, tp
    if family == "expert":
        return (layout.expert_coordinates(rank)[0],)
    return (rank // layout.step_group,)


def split_rows(total: int, ranks: int, rank: int) -> range:
    """Rows of a table that a rank holds: contiguous, ceil(total / ranks) each, what is left or nothing at the end."""
    each = -(-total // ranks)
    return range(min(rank * each, total), min((rank + 1) * each, total))


class OneSided(Protocol):
    """A device's own way of exchanging equal parts within the expert group, for messages that it takes."""

    def __call__(self, columns: Sequence[Tensor], back: bool) -> list[Tensor] | None:
        """See `Communicator.exchange_equal`; None for messages that are not for it, on all ranks."""
        ...


class Communicator:
    """Groups and collectives of one rank of an engine.

    Made by all ranks at once, in a torch.distributed world of exactly the layout's ranks; an engine of one rank needs
    none. All ranks of a group call its collectives in the same order. The first use of a group connects it: use it once
    before capturing a CUDA graph. With `lockstep` all ranks of the engine step together, not only those that share
    experts or a replica: tables spread over the engine answer every rank in every step. `one_sided` is None until a
    backend sets it.
    """

    def __init__(self, layout: ParallelLayout, rank: int, device: torch.device, lockstep: bool = False) -> None:
        self.layout = layout
        self.rank = rank
        self.device = device
        groups = _Groups(layout, rank)
        transport = dist.get_default_backend_for_device(device)
        self.replica = groups.make("replica", transport)
        self.expert = groups.make("expert", transport)
        self.engine = groups.make("engine", transport)
        self.one_sided: OneSided | None = None
        # Apart from the rows' groups, which a step in flight may be using while the host agrees on the next.
        self.step = groups.make("engine" if lockstep else "step", "gloo", purpose="host")
        self._engine_hosts = groups.make("engine", "gloo", purpose="host")

    def agree_max(self, value: int) -> int:
        """The largest `value` among the ranks that step together (int64)."""
        return self.agree_max_each(value)[0]

    def agree_max_each(self, *values: int) -> tuple[int, ...]:
        """The largest of each of the `values` among them (int64)."""
        if self.step.group is None:
            return values
        agreed = torch.tensor(values, dtype=torch.int64)
        dist.all_reduce(agreed, dist.ReduceOp.MAX, group=self.step.group)
        return tuple(agreed.tolist())

    def broadcast_object(self, value: T | None, source: int = 0) -> T:
        """The `value` of the engine's rank `source`, pickled; what the other ranks pass is ignored."""
        box = [value]
        if self._engine_hosts.group is not None:
            dist.broadcast_object_list(box, src=source, group=self._engine_hosts.group)
        return cast("T", box[0])

    def all_gather_rows(self, x: Tensor, sizes: list[int]) -> Tensor:
        """Rows x [m, ...] of the replica's ranks one after the other [sum(sizes), ...]; sizes[i] is the m of its i-th.

        Raises ValueError when `sizes` does not describe this rank's x.
        """
        peers = self.replica
        if len(sizes) != peers.size or sizes[peers.place] != len(x):
            raise ValueError(f"{len(x)} rows at place {peers.place} of {peers.size} are not what sizes {sizes} say")
        if peers.group is None:
            return x
        # Every transport gathers equal parts only; the longest sets the length of all.
        longest = max(sizes)
        mine = _row_bytes(x)
        if len(x) < longest:
            mine = torch.cat((mine, mine.new_zeros(longest - len(x), mine.shape[1])))
        parts = mine.new_empty(peers.size, longest, mine.shape[1])
        # Torch 2.13 renamed it; older versions know the second name only.
        all_gather = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
        all_gather(parts.flatten(0, 1), mine, group=peers.group)
        equal = min(sizes) == longest
        rows = parts.flatten(0, 1) if equal else torch.cat([part[:m] for part, m in zip(parts, sizes, strict=True)])
        return _rows_like(rows, x)

    def all_to_all_rows(self, x: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
        """Rows x [sum(send_counts), ...] to the ranks of the expert group; returns what came [sum(recv_counts), ...].

        Both in the order of the group's ranks: send_counts[i] rows go to its i-th rank, recv_counts[i] come from it.
        Raises ValueError when `send_counts` does not describe x.
        """
        return _all_to_all(self.expert, x, send_counts, recv_counts)

    def all_to_all_equal(self, x: Tensor) -> Tensor:
        """x [ranks, capacity, ...]: x[i] goes to the expert group's i-th rank; the result's [i] came from it.

        Shapes do not depend on data and nothing waits for the host: a CUDA graph can hold it. Raises ValueError when x
        has not one part per rank.
        """
        if len(x) != self.expert.size:
            raise ValueError(f"{len(x)} parts for {self.expert.size} ranks")
        if self.expert.group is None:
            return x
        mine = _row_bytes(x)
        received = torch.empty_like(mine)
        dist.all_to_all_single(received, mine, group=self.expert.group)
        return _rows_like(received, x)

    def exchange_equal(self, columns: Sequence[Tensor], back: bool = False) -> list[Tensor]:
        """`all_to_all_equal` of several columns of the same rows; there, then `back`, in turns.

        What it returns may be overwritten by the next exchange in the same direction.
        """
        found = None if self.one_sided is None else self.one_sided(columns, back)
        return [self.all_to_all_equal(column) for column in columns] if found is None else found

    def engram_rows(self, ids: Tensor, table: Tensor, total_rows: int | None = None) -> Tensor:
        """Rows [m, k, ...] of a table that is split over the engine, for ids [m, k] int64 (any number of each rank).

        `table` is this rank's `split_rows` of the `total_rows`; None asks the ranks for the sum. It may lie on the host
        while ids and result are on the device. Repeated ids travel once. Raises ValueError for ids outside the table
        and for a table that is not this rank's part.
        """
        peers = self.engine
        total = self._total_rows(len(table)) if total_rows is None else total_rows
        held = split_rows(total, peers.size, peers.place)
        if len(table) != len(held):
            raise ValueError(f"rank {self.rank} holds {len(table)} of {total} rows and not its {len(held)}")
        if peers.group is None:
            return _look_up(table, ids)
        # Sorted ids are in the order of the ranks that hold them.
        wanted, place = torch.unique(ids, return_inverse=True)
        starts = [split_rows(total, peers.size, rank).start for rank in range(peers.size)]
        bounds = torch.searchsorted(wanted, torch.tensor([*starts, total], device=ids.device))
        send_counts: list[int] = bounds.diff().tolist()
        if sum(send_counts) != len(wanted):
            raise ValueError(f"row ids must be in [0, {total}), got {int(wanted[0])} to {int(wanted[-1])}")
        recv_counts = self._exchange_counts(send_counts)
        asked = _all_to_all(peers, wanted, send_counts, recv_counts) - held.start
        rows = _all_to_all(peers, _look_up(table, asked), recv_counts, send_counts)
        return _look_up(rows, place)

    def engram_rows_equal(self, ids: Tensor, table: Tensor, total_rows: int) -> Tensor:
        """The same where all ranks ask for as many rows: every rank looks at everyone's ids and answers those it holds.

        Moves more than is needed, but shapes do not depend on data and nothing waits for the host: a CUDA graph can
        hold it. Ids must lie within the table.
        """
        peers = self.engine
        if peers.group is None:
            return _look_up(table, ids)
        held = split_rows(total_rows, peers.size, peers.place)
        asked = ids.new_empty(peers.size, ids.numel())
        dist.all_gather_into_tensor(asked.view(-1), ids.flatten(), group=peers.group)
        mine = (asked >= held.start) & (asked < held.stop)
        rows = _row_bytes(_look_up(table, torch.where(mine, asked - held.start, 0)).flatten(0, 1))
        answers = (rows * mine.flatten()[:, None]).view(peers.size, ids.numel(), -1)
        received = torch.empty_like(answers)
        dist.all_to_all_single(received, answers, group=peers.group)
        # Only its holder answers with anything but zeros.
        found = received.sum(0, dtype=torch.uint8)
        return found.view(table.dtype).view(*ids.shape, *table.shape[1:])

    def _total_rows(self, local_rows: int) -> int:
        if self._engine_hosts.group is None:
            return local_rows
        total = torch.tensor([local_rows], dtype=torch.int64)
        dist.all_reduce(total, group=self._engine_hosts.group)
        return int(total.item())

    def _exchange_counts(self, counts: list[int]) -> list[int]:
        """What every rank of the engine sends here, from what each knows it sends."""
        theirs = torch.empty(len(counts), dtype=torch.int64)
        dist.all_to_all_single(theirs, torch.tensor(counts), group=self._engine_hosts.group)
        return cast("list[int]", theirs.tolist())


class _Groups:
    """Makes all groups of a layout on all ranks and in one order, as torch.distributed wants; equal ones are shared."""

    def __init__(self, layout: ParallelLayout, rank: int) -> None:
        self._layout = layout
        self._rank = rank
        self._made: dict[tuple[tuple[int, ...], str], dist.ProcessGroup | None] = {}
        world = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        if layout.num_ranks > 1 and world != (layout.num_ranks, rank):
            raise ValueError(
                f"rank {rank} of a layout of {layout.num_ranks} is rank {world[1]} of a world of {world[0]}"
            )

    def make(self, family: Family, backend: str, purpose: str = "rows") -> Peers:
        everyone = range(self._layout.num_ranks)
        for ranks in sorted({peer_ranks(self._layout, family, rank) for rank in everyone}):
            if len(ranks) > 1 and (ranks, purpose) not in self._made:
                self._made[ranks, purpose] = dist.new_group(list(ranks), backend=backend)
        mine = peer_ranks(self._layout, family, self._rank)
        return Peers(mine, mine.index(self._rank), self._made.get((mine, purpose)))


def _all_to_all(peers: Peers, x: Tensor, send_counts: list[int], recv_counts: list[int]) -> Tensor:
    if len(send_counts) != peers.size or len(recv_counts) != peers.size or sum(send_counts) != len(x):
        raise ValueError(f"{len(x)} rows, sent as {send_counts} and received as {recv_counts}, by {peers.size} ranks")
    if peers.group is None:
        return x
    mine = _row_bytes(x)
    received = mine.new_empty(sum(recv_counts), mine.shape[1])
    dist.all_to_all_single(received, mine, recv_counts, send_counts, group=peers.group)
    return _rows_like(received, x)


def _row_bytes(x: Tensor) -> Tensor:
    """x [m, ...] as bytes [m, b], without a copy when it is contiguous."""
    return x.reshape(len(x), math.prod(x.shape[1:])).contiguous().view(torch.uint8)


def _rows_like(data: Tensor, x: Tensor) -> Tensor:
    """Bytes [n, b] as rows [n, ...] of x's shape and dtype."""
    return data.view(x.dtype).view(len(data), *x.shape[1:])


def _look_up(table: Tensor, ids: Tensor) -> Tensor:
    """table[ids] on the device of `ids`; by bytes, since not every dtype can be indexed."""
    found = _row_bytes(table).index_select(0, ids.flatten().to(table.device)).to(ids.device)
    return found.view(table.dtype).view(*ids.shape, *table.shape[1:])
