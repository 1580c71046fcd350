"""Starts the ranks of an engine, talks to them, and ends them together: when one dies, none is left waiting.

A worker is a callable that every rank runs, `worker(context, payload, channel)`:

    def worker(context: RankPlace, payload: Settings, channel: Channel) -> None:
        model = load(payload, context)
        for message in channel:
            channel.reply(model.step(message))

The process that owns the engine calls it:

    with RankGroup("package.module:worker", payload, world_size=8) as group:
        replies = group.call(message)
"""

from __future__ import annotations

import os
import pickle
import queue
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Literal, Protocol

import torch.distributed as dist

from backends.torch_runtime.spawned import SpawnedRanks
from backends.torch_runtime.worker import (
    Channel,
    Failure,
    OnProgress,
    RankError,
    RankPlace,
    Report,
    dumps,
    failure_of,
    find_worker,
)
from deepinfer.errors import UsageError

__all__ = ["Channel", "RankError", "RankGroup", "RankPlace", "joined_place"]


class RankGroup:
    """The ranks of one engine, as seen by whoever calls them; one call at a time.

    `worker` is "module:callable", see this module; `payload` is its second argument and can be pickled.

    Started alone, a group of one rank is a thread of this process (breakpoints work); a larger one spawns its ranks on
    this host, joined in a gloo world (`comm.Communicator` adds the groups of the device). Started under torchrun, this
    process is the `rank` (else 0) of the world that torchrun made, and every process makes the same calls.

    A rank that raises or dies takes the others along within `timeout_s`; ranks end when the process that owns them
    does, however it ends. Raises UsageError for a malformed worker or size, RankError for a rank that did not start.
    """

    def __init__(self, worker: str, payload: Any, world_size: int, timeout_s: float = 30.0) -> None:
        if world_size < 1:
            raise UsageError(f"an engine has at least 1 rank, got {world_size}")
        if not all(worker.partition(":")):
            raise UsageError(f"a worker is named module:callable, got {worker!r}")
        joined = joined_place(os.environ)
        if joined is not None and joined.world_size != world_size:
            raise UsageError(f"torchrun started {joined.world_size} ranks and the engine has {world_size}")
        self._timeout_s = timeout_s
        self.rank = 0 if joined is None else joined.rank
        self._gathering = _join_torchrun_world() if joined is not None and world_size > 1 else None
        self._crew: _Crew
        if joined is None and world_size > 1:
            self._crew = SpawnedRanks(worker, payload, world_size, timeout_s)
        else:
            self._crew = _ThisRank(worker, payload, joined or RankPlace(0, 1, 0, 0))

    def call(self, message: Any, on_progress: OnProgress | None = None) -> list[Any]:
        """Send `message` to every rank and return their replies, by rank, under torchrun on each of them.

        `on_progress` sees what ranks report meanwhile; under torchrun, what rank 0 does, there. Raises RankError when a
        rank raises, dies, or has before. Whatever else leaves this call early, Ctrl-C for one, ends all ranks at once.
        """
        try:
            replies = self._crew.call(message, on_progress)
            return replies if self._gathering is None else self._gathering.gather(replies[0])
        except RankError:
            raise
        except BaseException:
            self._crew.kill()
            raise

    def close(self) -> None:
        """Let the workers' loops end and wait; what takes longer than `timeout_s` is killed. Any number of times."""
        self._crew.close(self._timeout_s)
        if self._gathering is not None:
            self._gathering.close()
            self._gathering = None

    def __enter__(self) -> RankGroup:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        if kind is not None and not issubclass(kind, Exception):
            self._crew.kill()
        else:
            self.close()


class _Crew(Protocol):
    def call(self, message: Any, on_progress: OnProgress | None) -> list[Any]: ...

    def kill(self) -> None: ...

    def close(self, timeout_s: float) -> None: ...


class _ThisRank:
    """One rank, run by a thread of this process; messages and replies pass by reference."""

    def __init__(self, worker: str, payload: Any, context: RankPlace) -> None:
        self._context = context
        self._wire = _QueueWire()
        self._error: BaseException | None = None
        self._lost: str | None = None
        self._thread = threading.Thread(target=self._run, args=(worker, payload), name="rank", daemon=True)
        self._thread.start()
        self._collect("ready", None)

    def _run(self, worker: str, payload: Any) -> None:
        try:
            work = find_worker(worker)
            self._wire.send(Report("ready"))
            work(self._context, payload, Channel(self._wire))
            failure = Failure(f"rank {self._context.rank} ended unasked")
        except BaseException as error:
            self._error = error
            failure = failure_of(self._context.rank, error)
        self._wire.reports.put(Report("failed", failure))

    def call(self, message: Any, on_progress: OnProgress | None) -> list[Any]:
        if self._lost is not None:
            raise RankError(self._lost)
        self._wire.messages.put(message)
        return [self._collect("reply", on_progress)]

    def _collect(self, kind: Literal["ready", "reply"], on_progress: OnProgress | None) -> Any:
        sent: list[Any] = []
        while True:
            report = self._wire.reports.get()
            if report.kind == "failed":
                self._lost = f"the ranks have ended: {report.value.sentence}"
                raise RankError(report.value.sentence, {self._context.rank: sent}) from self._error
            if report.kind == kind:
                return report.value
            sent.append(report.value)
            if self._context.rank == 0 and on_progress is not None:
                on_progress(report.value)

    def kill(self) -> None:
        """A thread cannot be killed: it ends at its next message or report, and with the process."""
        self._lost = self._lost or "the ranks have ended: their call was interrupted"
        self._wire.close()

    def close(self, timeout_s: float) -> None:
        self._lost = self._lost or "the ranks have ended: their group was closed"
        self._wire.close()
        self._thread.join(timeout_s)


class _QueueWire:
    _CLOSED = object()

    def __init__(self) -> None:
        self.messages: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self.reports: queue.SimpleQueue[Report] = queue.SimpleQueue()
        self._closed = False

    def receive(self) -> Any:
        message = self.messages.get()
        if message is self._CLOSED:
            raise EOFError
        return message

    def send(self, report: Report) -> None:
        if self._closed:
            raise BrokenPipeError("the group of this rank was closed")
        self.reports.put(report)

    def close(self) -> None:
        self._closed = True
        self.messages.put(self._CLOSED)


def joined_place(environment: Mapping[str, str]) -> RankPlace | None:
    """The rank that torchrun's variables make of this process; None when they are not all there."""
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK")
    if not all(name in environment for name in names):
        return None
    try:
        rank, world_size, local_rank = (int(environment[name]) for name in names)
    except ValueError:
        given = ", ".join(f"{name}={environment[name]}" for name in names)
        raise UsageError(f"torchrun's variables are whole numbers, got {given}") from None
    return RankPlace(rank, world_size, local_rank, local_rank)


def _join_torchrun_world() -> _Gathering:
    ours = not dist.is_initialized()
    if ours:
        dist.init_process_group("gloo")
    # Its own group: replies must not meet collectives of the worker, which run in another thread.
    return _Gathering(dist.new_group(backend="gloo"), ours)


@dataclass(frozen=True)
class _Gathering:
    """Brings the replies of torchrun's processes to all of them; torchrun itself ends them when one fails."""

    group: dist.ProcessGroup | None
    made_world: bool

    def gather(self, reply: Any) -> list[Any]:
        rank = dist.get_rank()
        pickled: list[bytes] = [b""] * dist.get_world_size()
        try:
            dist.all_gather_object(pickled, dumps(reply), group=self.group)
        except RuntimeError as error:
            raise RankError(f"rank {rank} lost the other ranks while it gathered replies", {rank: [reply]}) from error
        return [pickle.loads(data) for data in pickled]

    def close(self) -> None:
        if self.made_world and dist.is_initialized():
            dist.destroy_process_group()
