"""A worker's side of an engine: which rank it is, the messages it answers, and how its failure is told."""

from __future__ import annotations

import importlib
import io
import pickle
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from deepinfer.errors import DeepinferError

OnProgress = Callable[[Any], None]


class RankError(DeepinferError):
    """A rank raised or died; the sentence names it and its error or signal, a note has its traceback.

    `replies[rank]` is what that rank had sent for this call when it ended: progress values, then its reply.
    """

    def __init__(self, sentence: str, replies: Mapping[int, list[Any]] | None = None) -> None:
        super().__init__(sentence)
        self.replies: dict[int, list[Any]] = dict(replies or {})


@dataclass(frozen=True)
class RankPlace:
    """Which rank a worker is. `device_index` is the accelerator of its host that it should take."""

    rank: int
    world_size: int
    local_rank: int
    device_index: int


@dataclass(frozen=True)
class Failure:
    """How a rank ended. `sudden`: it had no time to report, and not because a library gave up on lost peers."""

    sentence: str
    trace: str = ""
    sudden: bool = False


@dataclass(frozen=True)
class Report:
    """What a rank tells its group: that it is ready, how far it is, its answer, or its failure."""

    kind: Literal["ready", "progress", "reply", "failed"]
    value: Any = None
    at_s: float = field(default_factory=time.monotonic)  # one clock for all processes of a host


class Wire(Protocol):
    """A rank's end of the way to whoever calls. Raises EOFError or OSError once that side is gone."""

    def receive(self) -> Any: ...

    def send(self, report: Report) -> None: ...


class Channel:
    """A worker's side of `RankGroup.call`: iterate over the messages and reply once to each, until the group closes."""

    def __init__(self, wire: Wire) -> None:
        self._wire = wire
        self._owes_reply = False

    def __iter__(self) -> Iterator[Any]:
        while True:
            if self._owes_reply:
                raise RuntimeError("the worker asked for another message before it replied to the last")
            try:
                message = self._wire.receive()
            except EOFError:
                return
            self._owes_reply = True
            yield message

    def reply(self, result: Any) -> None:
        """Answer the current message. Raises RuntimeError when it was answered before."""
        if not self._owes_reply:
            raise RuntimeError("the worker replied twice to one message")
        self._owes_reply = False
        self._wire.send(Report("reply", result))

    def progress(self, value: Any) -> None:
        """Report something before the reply: it goes to the caller's `on_progress` and is kept for errors."""
        self._wire.send(Report("progress", value))


def failure_of(rank: int, error: BaseException) -> Failure:
    """One sentence: an error for the user speaks for itself, any other is named."""
    lines = str(error).strip().splitlines()
    message = lines[0] if lines else ""
    named = message if isinstance(error, DeepinferError) else f"{type(error).__name__}: {message}".rstrip(": ")
    return Failure(f"rank {rank} failed: {named}", "".join(traceback.format_exception(error)))


def find_worker(worker: str) -> Callable[[RankPlace, Any, Channel], None]:
    """The callable that "module:callable" names."""
    module, _, name = worker.partition(":")
    return cast("Callable[[RankPlace, Any, Channel], None]", getattr(importlib.import_module(module), name))


def dumps(value: Any) -> bytes:
    """Pickled for another process; tensors of any dtype and device arrive as copies on the host.

    Multiprocessing would pass them as handles that die with their sender, and torch's own pickles know no float8.
    """
    data = io.BytesIO()
    _Pickler(data, pickle.HIGHEST_PROTOCOL).dump(value)
    return data.getvalue()


class _Pickler(pickle.Pickler):
    def reducer_override(self, value: object) -> Any:
        if type(value) is not Tensor:
            return NotImplemented
        host = value.detach().cpu().contiguous()
        return _tensor, (host.reshape(-1).view(torch.uint8).numpy(), host.dtype, host.shape)


def _tensor(data: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    return torch.from_numpy(data).view(dtype).view(shape)
