"""From a prefill pool to a decode pool in simulation: requests move on, and their KV follows over the links."""

from __future__ import annotations

from collections.abc import Callable, Generator
from typing import Any

import numpy as np
import simpy

from backends.sim.outlet import Place, ToUsers
from backends.sim.pool import SimPool
from deepinfer.engine.transfer import KVTransfer
from deepinfer.metrics.record import EvenDelivery, RunRecord, TransferRecord
from deepinfer.numeric import Floats, Ints
from deepinfer.scheduler.request import Request


class HandOver:
    """Outlet of a prefill pool: each prompt it completes goes to the decode pool, which then reads its KV.

    A transfer uses as many links of either replica as the one with fewer ranks has, alone while it lasts: a replica of
    more ranks carries several at once in each direction. Requests of one token end here.
    """

    def __init__(
        self,
        env: simpy.Environment,
        transfer: KVTransfer,
        record: RunRecord,
        on_finish: Callable[[], None],
        on_empty: Callable[[], None],
    ) -> None:
        self._env, self._transfer, self._record = env, transfer, record
        self._on_finish, self._on_empty = on_finish, on_empty
        self._requests: dict[int, tuple[Request, Place]] = {}
        self._links: dict[Place, simpy.Resource] = {}
        self._log = record.transfers = TransferRecord()
        self.decode: SimPool | None = None
        self.replays_windows = False

    def enter(self, request: Request, place: Place) -> None:
        """Note where a request (as the decode pool will get it) is prefilled."""
        self._requests[request.id] = (request, place)

    def holds(self, request_id: int) -> bool:
        """Whether the prefill pool has computed a request, or will."""
        return request_id in self._requests

    @property
    def num_open(self) -> int:
        """Requests whose KV the decode pool has not read."""
        return len(self._requests)

    def deliver(self, request_ids: Ints, tokens: Ints, now: float, others: EvenDelivery | None = None) -> None:
        """A prompt's token reaches its user with the decode pool's answer, except when it is the only one."""

    def deliver_evenly(self, num_requests: int, tokens: Ints, times: Floats, before_s: float) -> None:
        """A pool without decoding requests has no stretches."""
        raise AssertionError("a prefill pool does not decode")

    def note_later(self, request_ids: Ints, tokens: Ints, last_s: float) -> None:
        """As `deliver_evenly`."""
        raise AssertionError("a prefill pool does not decode")

    def finish(self, request_id: int, now: float) -> None:
        """A prompt is complete: its request moves on."""
        request, (group, replica) = self._requests[request_id]
        if request.max_new_tokens > 1:
            assert self.decode is not None
            self.decode.send(request)
            return
        self._record.deliver(np.asarray([request_id]), np.ones(1, dtype=np.int64), now)
        self._record.finish_s[request_id] = now
        group.release(replica, request_id)
        self._on_finish()
        self._leave(request_id)

    def fetch(self, place: Place, request_id: int) -> None:
        """A pool that prefills receives no KV."""
        raise AssertionError(f"request {request_id} was sent back to the prefill pool")

    def read(self, place: Place, request_id: int) -> None:
        """Start reading a request's KV into a replica of the decode pool."""
        self._env.process(self._read(place, request_id))

    def _read(self, place: Place, request_id: int) -> Generator[simpy.Event, Any, None]:
        request, source = self._requests[request_id]
        start_s, tokens = self._env.now, request.transferred_tokens
        out_of = self._links_of(source, self._transfer.senders)
        into_it = self._links_of(place, self._transfer.receivers)
        with out_of.request() as out, into_it.request() as into:
            yield out & into
            yield self._env.timeout(self._transfer.seconds(tokens))
        self._log.append(self._env.now, self._env.now - start_s, self._transfer.num_bytes(tokens))
        source[0].release(source[1], request_id)
        place[0].receive(place[1], request_id)
        if not self.replays_windows:  # then the prefill pool has generated the first token
            self._record.deliver(np.asarray([request_id]), np.ones(1, dtype=np.int64), self._env.now)
        self._leave(request_id)

    def _links_of(self, place: Place, ranks: int) -> simpy.Resource:
        if place not in self._links:
            self._links[place] = simpy.Resource(self._env, capacity=ranks // self._transfer.streams)
        return self._links[place]

    def _leave(self, request_id: int) -> None:
        del self._requests[request_id]
        if not self._requests:
            self._on_empty()


class FromHandOver(ToUsers):
    """Outlet of a decode pool: tokens go to the users, KV comes from the pool that prefilled it."""

    def __init__(self, record: RunRecord, on_finish: Callable[[], None], hand_over: HandOver) -> None:
        super().__init__(record, on_finish)
        self._hand_over = hand_over

    def fetch(self, place: Place, request_id: int) -> None:
        """Read the KV of a request that has been admitted, if the other pool has it."""
        if self._hand_over.holds(request_id):
            self._hand_over.read(place, request_id)
        else:
            super().fetch(place, request_id)
