"""The ranks of an engine as processes of this host, and their supervision: one failure ends them all."""

from __future__ import annotations

import contextlib
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import time
from collections.abc import Iterator
from multiprocessing import connection as mp_connection
from multiprocessing import resource_tracker
from typing import Any, Literal, cast

import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]  # public, though torch's __all__ omits it

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

_SETTLE_S = 1.0
"""How long the other ranks may still report after one has failed: the first to be heard need not be the culprit."""
_POLL_S = 1.0
"""How often ranks are asked whether they live, should a process of theirs hold their end of the pipe open."""

_UNGUARDED = " while it started (a script that starts ranks needs `if __name__ == '__main__':`)"


class SpawnedRanks:
    """Local ranks, one process each.

    Spawned by multiprocessing rather than torch.distributed.elastic: its agent would see a death nearly as soon (it
    polls every 0.1 s), but has no way to pass calls and replies, and its loop and signal handlers take the main thread.
    """

    def __init__(self, worker: str, payload: Any, world_size: int, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._processes: list[multiprocessing.process.BaseProcess] = []
        self._pipes: list[mp_connection.Connection] = []
        self._lost: str | None = None
        # Served from here on a port of the system's choice: nobody can take it between choosing and using it.
        self._store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
        try:
            with _interrupts_held():
                for rank in range(world_size):
                    self._start(RankPlace(rank, world_size, rank, rank))
            self._living = set(range(world_size))
            self._send((worker, payload))
            self._collect("ready")
        except BaseException:
            self.kill()
            raise

    def _start(self, context: RankPlace) -> None:
        spawn = multiprocessing.get_context("spawn")
        ours, theirs = spawn.Pipe()
        arguments = (context, self._store.port, theirs)
        process = spawn.Process(target=_rank_main, args=arguments, name=f"rank {context.rank}", daemon=True)
        process.start()
        theirs.close()
        self._processes.append(process)
        self._pipes.append(ours)

    def call(self, message: Any, on_progress: OnProgress | None) -> list[Any]:
        if self._lost is not None:
            raise RankError(self._lost)
        self._send(message)
        return self._collect("reply", on_progress)

    def _send(self, message: Any) -> None:
        data = dumps(message)
        for pipe in self._pipes:
            with contextlib.suppress(OSError):  # a dead rank: collecting finds out how it died
                pipe.send_bytes(data)

    def _collect(self, kind: Literal["ready", "reply"], on_progress: OnProgress | None = None) -> list[Any]:
        sent: dict[int, list[Any]] = {rank: [] for rank in range(len(self._pipes))}
        results: dict[int, Any] = {}
        while len(results) < len(self._pipes):
            for rank, report in self._reports(_POLL_S):
                if report.kind == "failed":
                    raise self._failed(report, sent, starting=kind == "ready")
                if report.kind == kind:
                    results[rank] = report.value
                elif on_progress is not None:
                    on_progress(report.value)
                if kind == "reply":
                    sent[rank].append(report.value)
        return [results[rank] for rank in range(len(results))]

    def _reports(self, timeout_s: float) -> Iterator[tuple[int, Report]]:
        """What living ranks say within the time, their deaths included."""
        ranks = {self._pipes[rank]: rank for rank in sorted(self._living)}
        readable = mp_connection.wait(list(ranks), timeout_s)
        gone = [pipe for pipe, rank in ranks.items() if not self._processes[rank].is_alive()]
        for pipe in {*readable, *gone}:
            rank = ranks[cast("mp_connection.Connection", pipe)]
            report = self._read(rank)
            if report.kind == "failed":
                self._living.discard(rank)
            yield rank, report

    def _read(self, rank: int) -> Report:
        pipe = self._pipes[rank]
        try:
            if pipe.poll():
                return cast("Report", pickle.loads(pipe.recv_bytes()))
        except (EOFError, OSError):
            pass
        process = self._processes[rank]
        process.join(_SETTLE_S)
        return Report("failed", _death(rank, process.exitcode))

    def _failed(self, first: Report, sent: dict[int, list[Any]], starting: bool) -> RankError:
        """Hear the others for a moment, end them, and name the cause: a sudden death, else the earliest failure.

        Peers of a rank that died may report their broken connections before its death is seen; those of a rank that
        raised cannot, since it reports before it lets go of them.
        """
        failures = [first]
        until = time.monotonic() + min(_SETTLE_S, self._timeout_s / 4)
        while self._living and (left_s := until - time.monotonic()) > 0:
            for rank, report in self._reports(left_s):
                if report.kind == "failed":
                    failures.append(report)
                else:
                    sent[rank].append(report.value)
        self._end(self._timeout_s / 2)
        failures.sort(key=lambda report: (not report.value.sudden, report.at_s))
        cause: Failure = failures[0].value
        error = RankError(cause.sentence + (_UNGUARDED if starting and cause.sudden else ""), sent)
        for failure in (report.value for report in failures):
            error.add_note(f"{failure.sentence}\n{failure.trace}".rstrip())
        self._lost = f"the ranks have ended: {cause.sentence}"
        return error

    def _end(self, grace_s: float) -> None:
        for process in self._processes:
            process.terminate()
        self._join(grace_s)
        self.kill()

    def kill(self) -> None:
        for process in self._processes:
            process.kill()
        self._join(self._timeout_s / 4)
        self._lost = self._lost or "the ranks have ended: their call was interrupted"
        for pipe in self._pipes:
            pipe.close()
        self._processes.clear()
        self._pipes.clear()

    def close(self, timeout_s: float) -> None:
        self._lost = self._lost or "the ranks have ended: their group was closed"
        for pipe in self._pipes:
            pipe.close()
        self._join(timeout_s)
        self.kill()

    def _join(self, timeout_s: float) -> None:
        until = time.monotonic() + timeout_s
        for process in self._processes:
            process.join(max(0.0, until - time.monotonic()))


def _death(rank: int, code: int | None) -> Failure:
    if code is None:
        return Failure(f"rank {rank} closed its pipe and runs on")
    if code >= 0:
        return Failure(f"rank {rank} ended with status {code} unasked", sudden=True)
    name = next((known.name for known in signal.Signals if known == -code), f"signal {-code}")
    # Libraries abort a process that lost its peers; any other signal came from outside or from its own fault.
    return Failure(f"rank {rank} was killed by {name}", sudden=-code != signal.SIGABRT)


class PipeWire:
    """A rank's end of a pipe."""

    def __init__(self, pipe: mp_connection.Connection) -> None:
        self._pipe = pipe

    def receive(self) -> Any:
        try:
            return pickle.loads(self._pipe.recv_bytes())
        except ConnectionResetError as error:
            raise EOFError from error

    def send(self, report: Report) -> None:
        self._pipe.send_bytes(dumps(report))


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """Processes started meanwhile inherit that Ctrl-C waits: their caller ends them, whatever they are importing."""
    resource_tracker.ensure_running()  # its own start would let the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _rank_main(context: RankPlace, port: int, pipe: mp_connection.Connection) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    threading.Thread(target=_end_with_parent, daemon=True).start()
    torch.set_num_threads(min(torch.get_num_threads(), max(1, len(os.sched_getaffinity(0)) // context.world_size)))
    wire = PipeWire(pipe)
    try:
        worker, payload = wire.receive()
        store = TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=context.rank, world_size=context.world_size)
        wire.send(Report("ready"))
        find_worker(worker)(context, payload, Channel(wire))
        dist.destroy_process_group()
    except BaseException as error:
        with contextlib.suppress(OSError):  # then nobody is left to tell
            wire.send(Report("failed", failure_of(context.rank, error)))
        sys.stdout.flush()
        sys.stderr.flush()
        # At once: taking down a broken process group can wait for ranks that wait for this one.
        os._exit(1)


def _end_with_parent() -> None:
    """Die when the parent has. PR_SET_PDEATHSIG would act when the thread that started this process ends."""
    parent = multiprocessing.parent_process()
    assert parent is not None
    mp_connection.wait([parent.sentinel])
    os.kill(os.getpid(), signal.SIGKILL)
