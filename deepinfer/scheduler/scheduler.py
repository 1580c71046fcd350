"""The scheduler of one attention replica: pure decisions, no clock, no tensors.

`schedule()` decides a step from what is known now, assuming that every step still in flight keeps all its drafts;
`commit()` takes in what a step really produced. With asynchronous scheduling a step is decided before the one
ahead of it is committed, so a request may run one step past its end: that row is dropped, and memory that a step in
flight refers to is released only after it.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field

from deepinfer.errors import UsageError
from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.step import BlockTable, DecodeRows, PrefillChunk, StepOutput, StepPlan, StepResult


def first_come_first_served(request: Request) -> tuple[float, int]:
    """Order by arrival, then id."""
    return (request.arrival_s, request.id)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies, all values: nothing is looked up elsewhere.

    `window` tokens are replayed after a prefix hit (0: the cached KV is complete). With `keep_tokens` only that many
    last rows of a prompt go through bounded layers (None: all). Chunks that do not end a prompt are multiples of
    `chunk_multiple`. `order` sorts requests, most urgent first: the last running one is preempted first.
    """

    max_num_seqs: int
    max_tokens_per_step: int
    num_blocks: int
    block_tokens: int
    num_slots: int = 0
    nextn: int = 0
    window: int = 0
    keep_tokens: int | None = None
    chunk_multiple: int = 1
    prefix_cache: bool = True
    order: Callable[[Request], tuple[float, int]] = first_come_first_served

    def __post_init__(self) -> None:
        if self.max_tokens_per_step < self.max_num_seqs * (1 + self.nextn):
            raise UsageError(
                f"max_tokens_per_step {self.max_tokens_per_step} is below the {self.max_num_seqs} x "
                f"{1 + self.nextn} rows of a full decode step"
            )


@dataclass(slots=True, eq=False)
class _Sequence:
    """One run of a request through the engine; a preempted request starts a new one.

    `target` tokens are prefilled (prompt, and what it had generated before a preemption); `cached` tokens have their
    KV computed by committed steps, `planned` by those in flight too, as far as prefill goes.
    """

    request: Request
    target: int
    generated: int
    running: bool = True
    planned: int = 0
    cached: int = 0
    published: int = 0
    decode_rows_in_flight: int = 0
    tokens_in_flight: int = 0
    steps_in_flight: int = 0
    slot: int = -1
    blocks: list[int] = field(default_factory=list)


class Scheduler:
    """Continuous batching with chunked prefill, paged KV, prefix cache, preemption by recomputation and drafts."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._free_slots = list(range(config.num_slots - 1, -1, -1))
        self._waiting: list[_Sequence] = []
        self._running: list[_Sequence] = []
        self._draining: list[_Sequence] = []
        self._in_flight: dict[int, tuple[list[_Sequence], list[_Sequence]]] = {}
        self._next_index = 0
        self.num_preemptions = 0
        self.num_hit_tokens = 0
        self.num_prompt_tokens = 0

    @property
    def num_waiting(self) -> int:
        """Requests not yet admitted."""
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""
        return len(self._running)

    @property
    def num_in_flight(self) -> int:
        """Steps decided and not committed."""
        return len(self._in_flight)

    def fits(self, request: Request) -> bool:
        """Whether the request could ever run: its whole KV fits the pool."""
        tokens = request.prompt_tokens + request.max_new_tokens + self.config.nextn + 1
        return self._blocks_for(tokens) <= self.config.num_blocks

    def add(self, request: Request) -> None:
        """Queue a request that `fits`."""
        bisect.insort(self._waiting, _Sequence(request, request.prompt_tokens, 0), key=self._order)

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute."""
        draft = _Draft(self.config.max_tokens_per_step)
        self._schedule_decodes(draft)
        self._schedule_prefills(draft)
        if not draft.chunks and not draft.decodes:
            return None
        plan = StepPlan(
            self._next_index,
            tuple(draft.chunks),
            tuple(draft.decodes),
            tuple(draft.tables),
            tuple(draft.preempted),
        )
        self._in_flight[plan.index] = (draft.chunk_sequences, draft.decode_sequences)
        self._next_index += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in a step's result, oldest step first; returns the new tokens and the finished requests."""
        chunk_sequences, decode_sequences = self._in_flight.pop(plan.index)
        tokens: list[tuple[int, int]] = []
        finished: list[int] = []
        for chunk, sequence in zip(plan.prefill, chunk_sequences, strict=True):
            self._land(sequence)
            if sequence.running:
                sequence.cached = chunk.start + chunk.rows
                self._publish(sequence)
                if chunk.is_last:
                    sequence.tokens_in_flight -= 1
                    self._deliver(sequence, 1, result, tokens, finished)
        for rows, sequence, kept in zip(plan.decode, decode_sequences, result.decode_tokens, strict=True):
            self._land(sequence)
            if sequence.running:
                sequence.decode_rows_in_flight -= rows.drafts + 1
                sequence.tokens_in_flight -= 1
                sequence.cached += kept
                self._deliver(sequence, kept, result, tokens, finished)
        if finished:
            self._running = [s for s in self._running if s.running]
        return StepOutput(tuple(tokens), tuple(finished))

    def check_integrity(self) -> None:
        """Assert the invariants between steps; tests call it after every step."""
        self.pool.check_integrity()
        config = self.config
        assert len(self._running) <= config.max_num_seqs, "too many requests run"
        flying = [s for pair in self._in_flight.values() for part in pair for s in part]
        holders = {id(s): s for s in (*self._running, *flying)}
        users: dict[int, int] = {}
        for sequence in holders.values():
            for block in sequence.blocks:
                users[block] = users.get(block, 0) + 1
        assert users == self.pool._references, "block references do not match the tables"
        for sequence in self._running:
            assert sequence.running, "a finished request is still listed"
            assert sequence.steps_in_flight == sum(s is sequence for s in flying), "steps in flight miscounted"
            assert sequence.generated < sequence.request.max_new_tokens, "a request ran past its end"
            assert len(sequence.blocks) * config.block_tokens >= sequence.cached, "KV without a block"
        for sequence in self._waiting:
            assert not sequence.blocks, "a waiting request holds blocks"
        slots = [s.slot for s in holders.values() if s.slot >= 0]
        assert len(set(slots)) == len(slots), "a state slot has two owners"
        assert sorted(slots + self._free_slots) == list(range(config.num_slots)), "state slots were lost"

    def _order(self, sequence: _Sequence) -> tuple[float, int]:
        return self.config.order(sequence.request)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _schedule_decodes(self, draft: _Draft) -> None:
        drafts = self.config.nextn
        rows = drafts + 1
        block_tokens = self.config.block_tokens
        position = 0
        # Preempting shortens the list from its end while it is walked.
        while position < len(self._running):
            sequence = self._running[position]
            position += 1
            if sequence.planned < sequence.target:
                continue
            if sequence.generated + sequence.tokens_in_flight >= sequence.request.max_new_tokens:
                continue  # what is in flight ends it for certain
            if draft.budget < rows:
                break
            # The prompt's last chunk may still be in flight: its KV is there before this step runs.
            context = max(sequence.cached, sequence.target) + sequence.decode_rows_in_flight
            if context + rows > len(sequence.blocks) * block_tokens and not self._grow(sequence, context + rows, draft):
                continue
            sequence.decode_rows_in_flight += rows
            sequence.tokens_in_flight += 1
            sequence.steps_in_flight += 1
            draft.budget -= rows
            draft.decodes.append(DecodeRows(sequence.request.id, context, drafts))
            draft.decode_sequences.append(sequence)

    def _grow(self, sequence: _Sequence, tokens: int, draft: _Draft) -> bool:
        """Give a sequence blocks for so many tokens, preempting from the end of the order.

        False if it has to wait: for blocks that a step in flight still refers to, or because it was preempted itself.
        """
        count = self._blocks_for(tokens) - len(sequence.blocks)
        while self.pool.num_free + self._num_draining_blocks() < count:
            victim = self._running[-1]
            self._preempt(victim, draft)
            if victim is sequence:
                return False
        if self.pool.num_free < count:
            return False
        blocks = self.pool.allocate(count)
        draft.tables.append(BlockTable(sequence.request.id, len(sequence.blocks), tuple(blocks), sequence.slot))
        sequence.blocks += blocks
        return True

    def _num_draining_blocks(self) -> int:
        """Blocks that only sequences stopped with a step in flight hold: free once it lands."""
        return sum(self.pool.num_sole(s.blocks) for s in self._draining)

    def _preempt(self, sequence: _Sequence, draft: _Draft) -> None:
        """Stop a running sequence; its request waits again, to recompute prompt and generated tokens."""
        self._running.remove(sequence)
        self._stop(sequence)
        # The newest token has no KV yet: recomputation prefills all tokens but produces only the next one.
        again = _Sequence(sequence.request, sequence.request.prompt_tokens + sequence.generated, sequence.generated)
        bisect.insort(self._waiting, again, key=self._order)
        draft.preempted.append(sequence.request.id)
        self.num_preemptions += 1

    def _schedule_prefills(self, draft: _Draft) -> None:
        for sequence in self._running:
            if draft.budget <= 0:
                return
            if sequence.planned < sequence.target:
                self._plan_chunk(sequence, draft)
        while self._waiting and draft.budget > 0 and not draft.preempted:
            if not self._admit(self._waiting[0], draft):
                return
            self._plan_chunk(self._running[-1], draft)

    def _admit(self, sequence: _Sequence, draft: _Draft) -> bool:
        """Start a waiting sequence if a place, a slot and blocks for its prompt and first step are free."""
        config = self.config
        if len(self._running) >= config.max_num_seqs or (config.num_slots and not self._free_slots):
            return False
        hit, start = self._prefix_hit(sequence)
        needed = self._blocks_for(sequence.target + config.nextn + 1) - len(hit)
        if self.pool.num_free - self.pool.num_unused(hit) < needed:
            return False
        self.pool.acquire(hit)
        sequence.blocks = hit + self.pool.allocate(needed)
        sequence.slot = self._free_slots.pop() if config.num_slots else -1
        sequence.planned = sequence.cached = start
        sequence.published = len(hit)
        self.num_hit_tokens += len(hit) * config.block_tokens
        self.num_prompt_tokens += sequence.target
        self._waiting.pop(0)
        self._running.append(sequence)
        draft.tables.append(BlockTable(sequence.request.id, 0, tuple(sequence.blocks), sequence.slot))
        return True

    def _prefix_hit(self, sequence: _Sequence) -> tuple[list[int], int]:
        """Cached blocks to reuse, and the position from which rows are computed.

        The last prompt token is always computed. Where layers keep windows, those are not in the cache: the window
        before the hit's end is replayed, and as much of the prompt as bounded layers must see; a hit no longer than
        that is a miss.
        """
        config = self.config
        if not config.prefix_cache or not sequence.request.block_hashes:
            return [], 0
        usable = (sequence.target - 1) // config.block_tokens
        hit = self.pool.match(sequence.request.block_hashes[:usable])
        start = len(hit) * config.block_tokens
        if config.window:
            start = min(start - config.window, sequence.target - (config.keep_tokens or 0))
        return (hit, start) if start > 0 else ([], 0)

    def _plan_chunk(self, sequence: _Sequence, draft: _Draft) -> None:
        config = self.config
        left = sequence.target - sequence.planned
        rows = min(left, draft.budget)
        if rows < left:
            rows -= rows % config.chunk_multiple
            if rows == 0:
                return
        start, end = sequence.planned, sequence.planned + rows
        is_last = end == sequence.target
        kept = rows
        if config.keep_tokens is not None:
            # A chunk wholly before the kept range still runs one placeholder row (DeepInfer 0.1.0).
            kept = max(1, end - max(start, sequence.target - config.keep_tokens))
        sequence.planned = end
        sequence.steps_in_flight += 1
        sequence.tokens_in_flight += is_last
        draft.budget -= rows
        draft.chunks.append(PrefillChunk(sequence.request.id, start, rows, kept, is_last))
        draft.chunk_sequences.append(sequence)

    def _land(self, sequence: _Sequence) -> None:
        sequence.steps_in_flight -= 1
        if not sequence.running and sequence.steps_in_flight == 0:
            self._draining.remove(sequence)
            self._release(sequence)

    def _deliver(
        self,
        sequence: _Sequence,
        kept: int,
        result: StepResult,
        tokens: list[tuple[int, int]],
        finished: list[int],
    ) -> None:
        request = sequence.request
        new = min(kept, request.max_new_tokens - sequence.generated)
        sequence.generated += new
        tokens.append((request.id, new))
        if sequence.generated >= request.max_new_tokens or request.id in result.stopped:
            finished.append(request.id)
            self._stop(sequence)

    def _stop(self, sequence: _Sequence) -> None:
        """End a sequence; its memory goes back once no step in flight refers to it."""
        sequence.running = False
        if sequence.steps_in_flight:
            self._draining.append(sequence)
        else:
            self._release(sequence)

    def _release(self, sequence: _Sequence) -> None:
        self.pool.release(sequence.blocks)
        sequence.blocks = []
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def _publish(self, sequence: _Sequence) -> None:
        """Make the prompt's full blocks findable, as far as they are computed."""
        if not self.config.prefix_cache:
            return
        hashes = sequence.request.block_hashes
        while sequence.published < min(len(hashes), sequence.cached // self.config.block_tokens):
            self.pool.publish(sequence.blocks[sequence.published], hashes[sequence.published])
            sequence.published += 1


@dataclass(slots=True)
class _Draft:
    """A step being decided."""

    budget: int
    chunks: list[PrefillChunk] = field(default_factory=list)
    decodes: list[DecodeRows] = field(default_factory=list)
    chunk_sequences: list[_Sequence] = field(default_factory=list)
    decode_sequences: list[_Sequence] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)
