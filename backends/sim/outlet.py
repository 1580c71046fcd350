"""Where the tokens of a pool's step groups go, and where the KV of its requests comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Protocol

from deepinfer.metrics.record import EvenDelivery, RunRecord
from deepinfer.numeric import Floats, Ints

if TYPE_CHECKING:
    from backends.sim.group import StepGroup

Place = tuple["StepGroup", int]
"""An attention replica: its step group and its number there."""


class Outlet(Protocol):
    """What a step group tells of its requests; the first three as `RunRecord` has them."""

    def deliver(self, request_ids: Ints, tokens: Ints, now: float, others: EvenDelivery | None = None) -> None:
        """Requests have new tokens; `others` are told later."""
        ...

    def deliver_evenly(self, num_requests: int, tokens: Ints, times: Floats, before_s: float) -> None:
        """So many requests have tokens at each of `times`."""
        ...

    def note_later(self, request_ids: Ints, tokens: Ints, last_s: float) -> None:
        """What requests had in deliveries up to `last_s` that counted them among others."""
        ...

    def finish(self, request_id: int, now: float) -> None:
        """A request is complete here."""
        ...

    def fetch(self, place: Place, request_id: int) -> None:
        """An attention replica is ready to receive a request's KV."""
        ...


class ToUsers:
    """Outlet of a pool that decodes: tokens go to the users, whose times the record keeps."""

    def __init__(self, record: RunRecord, on_finish: Callable[[], None]) -> None:
        self._record, self._on_finish = record, on_finish
        self.deliver, self.deliver_evenly, self.note_later = record.deliver, record.deliver_evenly, record.note_later

    def finish(self, request_id: int, now: float) -> None:
        """Note that a request is complete."""
        self._record.finish_s[request_id] = now
        self._on_finish()

    def fetch(self, place: Place, request_id: int) -> None:
        """The KV of a request that the run begins amid is in place."""
        place[0].receive(place[1], request_id)
