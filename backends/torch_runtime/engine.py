"""The engine loop on a device: carries out what the core wishes for, on one rank."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch.distributed as dist

from backends.torch_runtime.context import RankContext
from backends.torch_runtime.inputs import Track, place_blocks, prompt_rows, slot_starts
from backends.torch_runtime.launcher import StepLauncher
from backends.torch_runtime.steps import HostResult, Outputs, StepBuilder
from deepinfer.engine.core import (
    Activity,
    Agree,
    Answer,
    Arrivals,
    Arrived,
    Collect,
    Deliver,
    Fetch,
    Submit,
    Wish,
    run_engine,
)
from deepinfer.engine.deployment import Deployment
from deepinfer.metrics.record import SubmittedStep
from deepinfer.numeric import Ints
from deepinfer.scheduler.policy import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.step import StepOutput, StepPlan, StepResult

_IDLE_S = 0.0005
"""How long a rank that has peers sleeps between two looks for requests."""


class Delivery(NamedTuple):
    """What the users of one replica got at a time: requests, and how many tokens each."""

    at_s: float
    request_ids: Ints
    tokens: Ints
    finished: tuple[int, ...]


class CollectedStep(NamedTuple):
    """A step as it was collected: when, what it computed, and the tokens it kept."""

    at_s: float
    step: SubmittedStep
    kept: int


class RunCounts(NamedTuple):
    """Preemptions of a run, prompt tokens that it found in the prefix cache, and prompt tokens in all."""

    num_preemptions: int
    num_hit_tokens: int
    num_prompt_tokens: int


class _Ticket(NamedTuple):
    plan: StepPlan | None
    outputs: Outputs
    decode_ids: list[int]
    first_ids: list[int]
    started_s: float


class _Kept(NamedTuple):
    """Tokens that a step kept for a request, and the log-probabilities of each, if the request asks for some."""

    tokens: list[int]
    logprobs: list[dict[int, float]]

    def first(self, count: int) -> _Kept:
        return _Kept(self.tokens[:count], self.logprobs[:count])


class Inbox:
    """Requests of one replica and when they are let in: by arrival times, and so many at once at most.

    A request counts as let in when it arrived, or when there was room for it: not when the engine looked for it.
    """

    def __init__(self, requests: Sequence[tuple[float, Request]], concurrency: int | None) -> None:
        self._waiting = deque(sorted(requests, key=lambda r: (r[0], r[1].id)))
        self._concurrency = concurrency
        self._inside = 0
        self._room_since_s = 0.0
        self.let_in_s: dict[int, float] = {}

    def take(self, now: float) -> list[Request]:
        """Requests that may enter now."""
        taken = []
        while self._waiting and self._waiting[0][0] <= now and self._has_room:
            arrival_s, request = self._waiting.popleft()
            self.let_in_s[request.id] = max(arrival_s, self._room_since_s)
            self._inside += 1
            taken.append(request)
        return taken

    def leave(self, count: int, now: float) -> None:
        """Requests have finished."""
        if count and not self._has_room:
            self._room_since_s = now
        self._inside -= count

    @property
    def is_closed(self) -> bool:
        """Whether nobody will follow."""
        return not self._waiting

    @property
    def next_arrival_s(self) -> float | None:
        """When the next one may enter; None if that is for others to say."""
        return self._waiting[0][0] if self._waiting and self._has_room else None

    @property
    def _has_room(self) -> bool:
        return self._concurrency is None or self._inside < self._concurrency


class RankEngine:
    """Serves the requests of one replica on one rank; the ranks of a replica do the same, each its part.

    The prefix cache lasts from one run to the next, unless a run was cut off.
    """

    def __init__(self, rank: RankContext, deployment: Deployment, launcher: StepLauncher, builder: StepBuilder) -> None:
        self._rank, self._deployment = rank, deployment
        self._launcher, self._builder = launcher, builder
        # The cache may hold fewer blocks than memory would: those that the longest requests can use.
        self._scheduler_config: SchedulerConfig = replace(
            deployment.scheduler_config(), num_blocks=rank.state.shape.num_blocks
        )
        self.scheduler = Scheduler(self._scheduler_config)
        self._keep = deployment.settings.keep_tokens if deployment.settings.replay != "off" else None
        self._ngram = rank.engram.hashing.max_ngram if rank.engram else 1
        self._rows = rank.state.shape.rows_per_request

    def serve(
        self,
        tracks: dict[int, Track],
        inbox: Inbox,
        stop_s: float | None = None,
        on_delivery: Callable[[Delivery], None] | None = None,
    ) -> tuple[list[Delivery], list[CollectedStep], RunCounts]:
        """Run until every request of the step group has ended, or `stop_s` seconds have passed.

        Requests that have not ended then are left as they are. `tracks` are by request id; `on_delivery` is called
        after every committed step.
        """
        self._tracks, self._inbox, self._on_delivery = tracks, inbox, on_delivery
        self._stop_s, self._is_over = stop_s, False
        self._agreed_s = 0.0
        self._tickets: dict[int, _Ticket] = {}
        self._next_ticket = 0
        self._batches: dict[int, _Kept] = {}
        self.deliveries: list[Delivery] = []
        self.steps: list[CollectedStep] = []
        self._busy_until_s = 0.0
        before = _counts(self.scheduler)
        self._start = time.perf_counter()
        core = run_engine([self.scheduler], self._deployment.settings.async_scheduling)
        wish: Wish = next(core)
        while not self._is_over:
            try:
                wish = core.send(self._fulfil(wish))
            except StopIteration:
                break
        for ticket in self._tickets.values():  # of a run that was cut off
            ticket.outputs.wait()
        counts = RunCounts(*(after - was for after, was in zip(_counts(self.scheduler), before, strict=True)))
        if self._is_over:
            self.scheduler = Scheduler(self._scheduler_config)
        return self.deliveries, self.steps, counts

    @property
    def _now(self) -> float:
        return time.perf_counter() - self._start

    @property
    def _is_alone(self) -> bool:
        return self._rank.comm.step.size == 1

    def _fulfil(self, wish: Wish) -> Answer:
        match wish:
            case Arrivals(block):
                return self._arrivals(block)
            case Agree(activity):
                return self._agree(activity)
            case Submit(plans):
                return self._submit(plans[0])
            case Collect(ticket):
                return (self._collect(ticket),)
            case Deliver(outputs):
                self._deliver(outputs[0])
                return None
            case Fetch():
                raise NotImplementedError("one mixed pool fetches nothing")
            case _:
                raise AssertionError(f"{wish} was not offered")

    def _arrivals(self, block: bool) -> Arrived:
        if block and not self._inbox.is_closed:
            wait = (self._inbox.next_arrival_s or 0.0) - self._now
            if self._stop_s is not None:
                wait = min(wait, self._stop_s - self._now)
            time.sleep(max(wait if self._is_alone else min(wait, _IDLE_S), 0.0))
        taken = self._inbox.take(self._now if self._is_alone else self._agreed_s)
        return Arrived(tuple((0, request) for request in taken), self._inbox.is_closed)

    def _agree(self, activity: Activity) -> Activity:
        """What the step group does next, and what time it is there: a replica's ranks must let in the same requests."""
        most, agreed_us = self._rank.comm.agree_max_each(int(activity), int(self._now * 1e6))
        self._agreed_s = agreed_us / 1e6
        self._is_over = self._stop_s is not None and self._agreed_s > self._stop_s
        return Activity(most)

    def _submit(self, plan: StepPlan | None) -> int:
        number = self._next_ticket
        self._next_ticket += 1
        started = self._now
        slots, prompts, max_context = np.zeros(0, dtype=np.int64), None, self._rows
        decode_ids: list[int] = []
        first: list[Track] = []
        first_ids: list[int] = []
        logprobs: int | None = None
        if plan is not None:
            cp, place = self._rank.layout.cp, self._rank.comm.replica.place
            for request_id in plan.preempted:
                self._tracks[request_id].void_before = number
            self._builder.place_blocks(place_blocks(plan, self._tracks, self._rank.state.shape.block_tokens))
            self._builder.start_slots(slot_starts(plan.prefill, self._tracks, self._keep))
            decode_ids = [i for i in plan.decode.request_ids.tolist() if self._tracks[i].slot % cp == place]
            slots = np.asarray([self._tracks[i].slot for i in decode_ids], dtype=np.int64)
            if len(plan.decode):
                max_context = int(plan.decode.contexts.max()) + self._rows
            if plan.prefill:
                prompts = prompt_rows(plan.prefill, self._tracks, cp, self._ngram)
                max_context = max(max_context, *(c.start + c.rows for c in plan.prefill))
                first_ids = [c.request_id for c in plan.prefill if c.is_last and self._owner(c.request_id) == place]
                first = [self._tracks[i] for i in first_ids]
            asked = [self._tracks[i].params.logprobs for i in (*decode_ids, *first_ids)]
            logprobs = max((number for number in asked if number is not None), default=None)
        self._builder.end_prompts(first)
        outputs = self._launcher.launch(slots, prompts, max_context, logprobs)
        self._tickets[number] = _Ticket(plan, outputs, decode_ids, first_ids, started)
        return number

    def _owner(self, request_id: int) -> int:
        return self._tracks[request_id].slot % self._rank.layout.cp

    def _collect(self, number: int) -> StepResult | None:
        ticket = self._tickets.pop(number)
        result = ticket.outputs.wait()
        ended = self._now
        found = self._found(ticket, result)
        if ticket.plan is None:
            self._note(ticket, ended, 0)
            return None
        stopped: list[int] = []
        self._batches = {i: self._accepted(number, i, kept, stopped) for i, kept in found.items()}
        counts = [max(len(self._batches[i].tokens), 1) for i in ticket.plan.decode.request_ids.tolist()]
        self._note(ticket, ended, sum(counts))
        return StepResult(np.asarray(counts, dtype=np.int64), frozenset(stopped))

    def _found(self, ticket: _Ticket, result: HostResult) -> dict[int, _Kept]:
        """What was kept by request, of this rank's requests and of those that its replica's other ranks have."""
        own: dict[int, _Kept] = {}
        for place, (request_id, kept) in enumerate(zip(ticket.decode_ids, result.kept, strict=False)):
            own[request_id] = self._kept(request_id, result, result.tokens[place, :kept], place * self._rows)
        first = result.tokens.shape[0] * self._rows
        for place, request_id in enumerate(ticket.first_ids):
            own[request_id] = self._kept(request_id, result, result.first[place : place + 1], first + place)
        if self._rank.layout.cp == 1:
            return own
        everyone: list[Any] = [None] * self._rank.comm.step.size
        dist.all_gather_object(everyone, own, group=self._rank.comm.step.group)
        mates = [self._rank.comm.step.ranks.index(rank) for rank in self._rank.comm.replica.ranks]
        return {request_id: tokens for mate in mates for request_id, tokens in everyone[mate].items()}

    def _kept(self, request_id: int, result: HostResult, tokens: npt.NDArray[np.int32], row: int) -> _Kept:
        """Tokens of rows from `row` on, each with its log-probability and as many others as the request asks for."""
        number = self._tracks[request_id].params.logprobs
        listed = tokens.tolist()
        if number is None or result.taken is None or result.best is None or result.best_ids is None:
            return _Kept(listed, [])
        rows = slice(row, row + len(listed))
        taken, best, ids = (
            x[rows].tolist() for x in (result.taken, result.best[:, :number], result.best_ids[:, :number])
        )
        likely = [dict(zip(of_row, values, strict=True)) for of_row, values in zip(ids, best, strict=True)]
        return _Kept(listed, [of_row | {t: value} for of_row, t, value in zip(likely, listed, taken, strict=True)])

    def _accepted(self, number: int, request_id: int, kept: _Kept, stopped: list[int]) -> _Kept:
        """What is kept up to the token that ends the request, if one does; nothing of a run preempted since."""
        track = self._tracks[request_id]
        preempted = number < track.void_before or request_id in self.scheduler.unreported_preemptions
        if track.finished or preempted:
            return kept.first(0)
        kept = kept.first(track.params.max_tokens - len(track.generated))
        stop = track.checker.accept(kept.tokens)
        if stop is None:
            return kept
        track.stop = stop
        stopped.append(request_id)
        return kept.first(stop.num_tokens)

    def _deliver(self, output: StepOutput | None) -> None:
        if output is None:
            return
        now = self._now
        for request_id, count in zip(output.request_ids.tolist(), output.tokens.tolist(), strict=True):
            kept = self._batches[request_id].first(count)
            self._tracks[request_id].tokens += kept.tokens
            self._tracks[request_id].logprobs += kept.logprobs
        for request_id in output.finished:
            self._tracks[request_id].finished = True
        self._inbox.leave(len(output.finished), now)
        delivery = Delivery(now, output.request_ids, output.tokens, output.finished)
        self.deliveries.append(delivery)
        if self._on_delivery is not None:
            self._on_delivery(delivery)

    def _note(self, ticket: _Ticket, ended_s: float, kept: int) -> None:
        """A step begins on the device when it was submitted, or when the one before it ended."""
        seconds = ended_s - max(ticket.started_s, self._busy_until_s)
        self._busy_until_s = ended_s
        if ticket.outputs.device_s is not None:
            seconds = ticket.outputs.device_s
        plan = ticket.plan
        decodes = len(plan.decode) if plan is not None else 0
        rows = sum(chunk.rows for chunk in plan.prefill) if plan is not None else 0
        context = int(plan.decode.contexts.sum()) if plan is not None and decodes else 0
        step = SubmittedStep(seconds, ended_s, decodes, decodes * self._rows, rows, context)
        self.steps.append(CollectedStep(ended_s, step, kept))


def _counts(scheduler: Scheduler) -> RunCounts:
    return RunCounts(scheduler.num_preemptions, scheduler.num_hit_tokens, scheduler.num_prompt_tokens)
