"""The scheduler of one attention replica: pure decisions, no clock, no tensors.

`schedule()` decides a step from what is known now, assuming that every step still in flight keeps all its drafts;
`commit()` takes in what a step really produced. With asynchronous scheduling a step is decided before the one
ahead of it is committed, so a request may run one step past its end: that row is dropped, and memory that a step in
flight refers to is released only after it.
"""

from __future__ import annotations

import bisect
from dataclasses import dataclass, field

import numpy as np

from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.policy import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.step import BlockTable, DecodeBatch, Ints, PrefillChunk, StepOutput, StepPlan, StepResult
from deepinfer.scheduler.table import DecodeTable, Sequence

FOREVER = 1 << 30
"""More steps than any run has."""


@dataclass(slots=True)
class _Draft:
    """A step being decided."""

    budget: int
    chunks: list[PrefillChunk] = field(default_factory=list)
    sequences: list[Sequence] = field(default_factory=list)
    tables: list[BlockTable] = field(default_factory=list)
    preempted: list[int] = field(default_factory=list)


@dataclass(slots=True)
class _InFlight:
    """Who takes part in a decided step. `rows` are table rows, valid while the table has this `version`."""

    prefill: list[Sequence]
    decode: list[Sequence]
    rows: Ints | slice
    version: int


class Scheduler:
    """Continuous batching with chunked prefill, paged KV, prefix cache, preemption by recomputation and drafts."""

    def __init__(self, config: SchedulerConfig) -> None:
        self.config = config
        self.pool = BlockPool(config.num_blocks)
        self._free_slots = list(range(config.num_slots - 1, -1, -1))
        self._waiting: list[Sequence] = []
        self._prefilling: list[Sequence] = []
        self._decoding = DecodeTable(config.max_num_seqs)
        self._draining: list[Sequence] = []
        self._receiving: dict[int, Sequence] = {}
        self._kept: dict[int, Sequence] = {}
        self._to_fetch: list[int] = []
        self._in_flight: dict[int, _InFlight] = {}
        self._next_index = 0
        self._steady_version = -1
        self._unreported: list[int] = []  # preempted by a decision that had no step to carry the news
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
        return len(self._prefilling) + len(self._decoding) + len(self._receiving)

    @property
    def num_kept(self) -> int:
        """Finished requests whose blocks another pool has still to read."""
        return len(self._kept)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a prompt that the prefix cache holds now."""
        return len(self.pool.match(request.block_hashes)) * self.config.block_tokens if self.config.prefix_cache else 0

    def fits(self, request: Request) -> bool:
        """Whether the request could ever run: its whole KV fits the pool."""
        tokens = request.prompt_tokens + request.max_new_tokens + self.config.nextn + 1
        return self._blocks_for(tokens) <= self.config.num_blocks

    def add(self, request: Request) -> None:
        """Queue a request that `fits`."""
        sequence = Sequence(request, request.prompt_tokens, 0)
        sequence.transferred = request.transferred_tokens
        if request.transferred_tokens and not self.config.transfer_window:
            sequence.generated = 1
        bisect.insort(self._waiting, sequence, key=self._order)
        self._steady_version = -1

    def to_fetch(self) -> tuple[int, ...]:
        """Requests admitted since the last call whose KV is to be read from another pool now: their memory is ready."""
        fetch, self._to_fetch = tuple(self._to_fetch), []
        return fetch

    def received(self, request_id: int) -> None:
        """The KV of a request of `to_fetch` has arrived. Windows that are not transferred are replayed first."""
        sequence = self._receiving.pop(request_id)
        self._steady_version = -1
        if self.config.transfer_window:
            self._prefilling.append(sequence)
        else:
            self._decoding.add(sequence, len(sequence.blocks) * self.config.block_tokens, first_in_flight=0)

    def release(self, request_id: int) -> None:
        """Another pool has read the KV of a request that ended here with `keeps_blocks`."""
        self._release(self._kept.pop(request_id))

    def schedule(self) -> StepPlan | None:
        """Decide the next step; None when there is nothing to compute."""
        if not (self._waiting or self._prefilling or len(self._decoding)):
            return None
        draft = _Draft(self.config.max_tokens_per_step)
        batch, in_flight = self._plan_decodes(draft)
        self._plan_prefills(draft)
        self._unreported += draft.preempted
        everyone = not draft.chunks and not draft.preempted and isinstance(in_flight.rows, slice)
        self._steady_version = self._decoding.version if everyone else -1
        if not draft.chunks and not len(batch):
            return None
        plan = StepPlan(self._next_index, tuple(draft.chunks), batch, tuple(draft.tables), tuple(self._unreported))
        self._unreported = []
        in_flight.prefill = draft.sequences
        self._in_flight[plan.index] = in_flight
        self._next_index += 1
        return plan

    def commit(self, plan: StepPlan, result: StepResult) -> StepOutput:
        """Take in a step's result, oldest step first; returns the new tokens and the finished requests."""
        step = self._in_flight.pop(plan.index)
        ids, tokens, ended = self._commit_decodes(step, result)
        first = [s for chunk, s in zip(plan.prefill, step.prefill, strict=True) if self._commit_chunk(chunk, s)]
        if first:
            ids = np.concatenate((ids, [s.request.id for s in first]))
            tokens = np.concatenate((tokens, np.ones(len(first), dtype=np.int64)))
            ended += [s for s in first if s.generated >= s.request.max_new_tokens]
        if result.stopped:
            alive = [*self._decoding.sequences, *self._prefilling]
            ended += [s for s in alive if s.request.id in result.stopped and s not in ended]
        for sequence in ended:
            sequence.keeps_blocks = sequence.request.keeps_blocks
            self._stop(sequence)
        return StepOutput(ids, tokens, tuple(s.request.id for s in ended))

    def steady_steps(self) -> int:
        """For how many more steps the next decisions can only be the last one again, unless a request ends or arrives.

        That was to decode every admitted request, and to admit none. Its memory must last whatever drafts are kept.
        """
        table, rows = self._decoding, self.config.nextn + 1
        if not len(table):
            return 0 if self._waiting or self._prefilling or self._in_flight else FOREVER
        if self._steady_version != table.version:
            return 0
        spare_blocks = self.pool.num_free // len(table) - 1
        return max(spare_blocks * self.config.block_tokens // rows - len(self._in_flight) - 1, 0)

    def decoding(self) -> DecodeBatch:
        """The batch that the next decision decodes if it is the last one again."""
        table, rows = self._decoding, self.config.nextn + 1
        contexts = table.column("cached") + table.column("in_flight") * rows
        return DecodeBatch(table.column("request_id").copy(), contexts, self.config.nextn)

    def room(self) -> Ints:
        """Tokens that each request of `decoding()` may still generate."""
        return self._decoding.column("limit") - self._decoding.column("generated")

    def advance(self, kept: Ints) -> None:
        """Take in several repetitions of the last decision at once: the tokens each request of `decoding()` kept.

        As many steps are in flight after them as before. Nobody may have ended (`room`), nor memory run out
        (`steady_steps`).
        """
        table, rows = self._decoding, self.config.nextn + 1
        table.column("cached")[:] += kept
        table.column("generated")[:] += kept
        # Blocks as the last repetition needed them when it was decided.
        needed = table.column("cached") + np.maximum(table.column("in_flight"), 1) * rows
        for row in np.flatnonzero(needed > table.column("capacity")):
            sequence = table.sequences[row]
            sequence.blocks += self.pool.allocate(self._blocks_for(int(needed[row])) - len(sequence.blocks))
            table.column("capacity")[row] = len(sequence.blocks) * self.config.block_tokens

    def check_integrity(self) -> None:
        """Assert the invariants between steps; tests call it after every step."""
        self.pool.check_integrity()
        config, table = self.config, self._decoding
        alive = [*self._prefilling, *self._receiving.values(), *table.sequences]
        assert len(alive) <= config.max_num_seqs, "too many requests run"
        users: dict[int, int] = {}
        for sequence in (*alive, *self._draining, *self._kept.values()):
            for block in sequence.blocks:
                users[block] = users.get(block, 0) + 1
        assert users == self.pool.references, "block references do not match the tables"
        assert not any(s.blocks for s in self._waiting), "a waiting request holds blocks"
        for row, sequence in enumerate(table.sequences):
            assert sequence.row == row, "a table row has lost its sequence"
            assert len(sequence.blocks) * config.block_tokens == table.column("capacity")[row], "wrong capacity"
            flights = sum(sequence in step.decode for step in self._in_flight.values())
            assert flights == table.column("in_flight")[row], "decode steps in flight miscounted"
        assert (table.column("generated") < table.column("limit")).all(), "a request ran past its end"
        assert (table.column("cached") <= table.column("capacity")).all(), "KV without a block"
        slots = [s.slot for s in (*alive, *self._draining, *self._kept.values()) if s.slot >= 0]
        assert sorted(slots + self._free_slots) == list(range(config.num_slots)), "state slots were lost or shared"

    def _order(self, sequence: Sequence) -> tuple[float, int]:
        return self.config.order(sequence.request)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _plan_decodes(self, draft: _Draft) -> tuple[DecodeBatch, _InFlight]:
        """All decoding requests that can still produce tokens; those short of blocks get some or wait."""
        table, drafts = self._decoding, self.config.nextn
        rows = drafts + 1
        contexts = table.column("cached") + table.column("in_flight") * rows
        short = self._may_continue() & (contexts + rows > table.column("capacity"))
        stalled: set[Sequence] = set()
        if short.any():
            stalled = self._grow(short, draft)
            contexts = table.column("cached") + table.column("in_flight") * rows
        runs = self._may_continue()
        for sequence in stalled:
            if sequence.row >= 0:
                runs[sequence.row] = False
        selected: Ints | slice = slice(0, len(table)) if runs.all() else np.flatnonzero(runs)
        table.column("in_flight")[selected] += 1
        batch = DecodeBatch(table.column("request_id")[selected].copy(), contexts[selected], drafts)
        draft.budget -= batch.num_rows
        sequences = list(table.sequences) if isinstance(selected, slice) else [table.sequences[i] for i in selected]
        return batch, _InFlight([], sequences, selected, table.version)

    def _may_continue(self) -> np.ndarray[tuple[int], np.dtype[np.bool_]]:
        """Rows to run: every step in flight yields a token at least, and what is certain to end is not run again."""
        table = self._decoding
        certain = table.column("generated") + table.column("in_flight") + table.column("first_in_flight")
        runs: np.ndarray[tuple[int], np.dtype[np.bool_]] = certain < table.column("limit")
        return runs

    def _grow(self, short: np.ndarray[tuple[int], np.dtype[np.bool_]], draft: _Draft) -> set[Sequence]:
        """Give blocks to the marked rows, most urgent first, preempting from the other end; returns who must wait."""
        table, rows = self._decoding, self.config.nextn + 1
        stalled: set[Sequence] = set()
        for sequence in sorted((table.sequences[i] for i in np.flatnonzero(short)), key=self._order):
            if sequence.row < 0:
                continue  # preempted for a more urgent one
            context = int(table.column("cached")[sequence.row] + table.column("in_flight")[sequence.row] * rows)
            count = self._blocks_for(context + rows) - len(sequence.blocks)
            while self.pool.num_free + self._num_draining_blocks() < count and sequence.row >= 0:
                victim = max((*self._prefilling, *table.sequences), key=self._order)
                if victim is sequence and table.column("in_flight")[sequence.row]:
                    break  # its step in flight may keep less than assumed: wait for that first
                self._preempt(victim, draft)
            if sequence.row < 0:
                continue
            if self.pool.num_free < count:
                stalled.add(sequence)  # until the step in flight lands
                continue
            self._append_blocks(sequence, count, draft)
            table.column("capacity")[sequence.row] = len(sequence.blocks) * self.config.block_tokens
        return stalled

    def _append_blocks(self, sequence: Sequence, count: int, draft: _Draft) -> None:
        blocks = self.pool.allocate(count)
        draft.tables.append(BlockTable(sequence.request.id, len(sequence.blocks), tuple(blocks), sequence.slot))
        sequence.blocks += blocks

    def _num_draining_blocks(self) -> int:
        """Blocks that only sequences stopped with a step in flight hold: free once it lands."""
        return sum(self.pool.num_sole(s.blocks) for s in self._draining)

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Stop a running sequence; its request waits again, to recompute prompt and generated tokens."""
        if sequence.row >= 0:
            sequence.generated = int(self._decoding.column("generated")[sequence.row])
        self._stop(sequence)
        again = Sequence(sequence.request, sequence.request.prompt_tokens + sequence.generated, sequence.generated)
        bisect.insort(self._waiting, again, key=self._order)
        draft.preempted.append(sequence.request.id)
        self.num_preemptions += 1

    def _plan_prefills(self, draft: _Draft) -> None:
        for sequence in list(self._prefilling):
            if draft.budget <= 0:
                return
            self._plan_chunk(sequence, draft)
        while self._waiting and draft.budget >= self.config.chunk_multiple and not draft.preempted:
            sequence = self._waiting[0]
            if not self._admit(sequence, draft):
                return
            if not sequence.transferred:
                self._plan_chunk(sequence, draft)

    def _admit(self, sequence: Sequence, draft: _Draft) -> bool:
        """Start a waiting sequence if a place, a slot and blocks for its prompt and first step are free."""
        config = self.config
        if self.num_running >= config.max_num_seqs or (config.num_slots and not self._free_slots):
            return False
        hit, start = self._transferred_prefix(sequence) if sequence.transferred else self._prefix_hit(sequence)
        needed = self._blocks_for(sequence.target + config.nextn + 1) - len(hit)
        if self.pool.num_free - self.pool.num_unused(hit) < needed:
            return False
        self.pool.acquire(hit)
        sequence.blocks = list(hit)
        sequence.slot = self._free_slots.pop() if config.num_slots else -1
        if hit:
            draft.tables.append(BlockTable(sequence.request.id, 0, tuple(hit), sequence.slot))
        self._append_blocks(sequence, needed, draft)
        sequence.planned = sequence.computed = start
        sequence.published = len(hit)
        self._waiting.pop(0)
        if sequence.transferred:
            self._receiving[sequence.request.id] = sequence
            self._to_fetch.append(sequence.request.id)
        else:
            self.num_hit_tokens += len(hit) * config.block_tokens
            self.num_prompt_tokens += sequence.target
            self._prefilling.append(sequence)
        return True

    def _transferred_prefix(self, sequence: Sequence) -> tuple[list[int], int]:
        """No blocks of this pool's cache, and the position from which rows are computed."""
        start = sequence.transferred
        if self.config.transfer_window:
            start = min(start - self.config.transfer_window, sequence.target - (self.config.keep_tokens or 0))
        return [], max(start, 0)

    def _prefix_hit(self, sequence: Sequence) -> tuple[list[int], int]:
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

    def _plan_chunk(self, sequence: Sequence, draft: _Draft) -> None:
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
        draft.budget -= rows
        draft.chunks.append(PrefillChunk(sequence.request.id, start, rows, kept, is_last))
        draft.sequences.append(sequence)
        if is_last:
            self._prefilling.remove(sequence)
            self._decoding.add(sequence, len(sequence.blocks) * config.block_tokens)

    def _commit_decodes(self, step: _InFlight, result: StepResult) -> tuple[Ints, Ints, list[Sequence]]:
        """Add the kept tokens to the table; returns request ids, new tokens, and sequences at their limit."""
        table, kept = self._decoding, np.asarray(result.decode_tokens, dtype=np.int64)
        rows = step.rows
        if step.version != table.version:
            places = np.asarray([s.row for s in step.decode], dtype=np.int64)
            for index in np.flatnonzero(places < 0):
                self._drain(step.decode[index])
            present = places >= 0
            rows, kept = places[present], kept[present]
        generated = table.column("generated")
        new = np.minimum(kept, table.column("limit")[rows] - generated[rows])
        generated[rows] += new
        table.column("cached")[rows] += kept
        table.column("in_flight")[rows] -= 1
        full = np.flatnonzero(generated[rows] >= table.column("limit")[rows])
        ended: list[Sequence] = []
        if len(full):
            indices = full if isinstance(rows, slice) else rows[full]
            ended = [table.sequences[i] for i in indices]
        return table.column("request_id")[rows].copy(), new, ended

    def _commit_chunk(self, chunk: PrefillChunk, sequence: Sequence) -> bool:
        """Take in a prefill chunk; True if it gave its request a token."""
        if not sequence.running:
            self._drain(sequence)
            return False
        sequence.steps_in_flight -= 1
        sequence.computed = chunk.start + chunk.rows
        self._publish(sequence)
        if chunk.is_last:
            self._decoding.column("first_in_flight")[sequence.row] = 0
            self._decoding.column("generated")[sequence.row] += 1
            sequence.generated += 1
        return chunk.is_last

    def _stop(self, sequence: Sequence) -> None:
        """End a sequence; its memory goes back once no step in flight refers to it."""
        sequence.running = False
        if sequence.row >= 0:
            sequence.steps_in_flight += int(self._decoding.column("in_flight")[sequence.row])
            self._decoding.remove(sequence)
        else:
            self._prefilling.remove(sequence)
        if sequence.steps_in_flight:
            self._draining.append(sequence)
        else:
            self._release(sequence)

    def _drain(self, sequence: Sequence) -> None:
        """A step of a stopped sequence has landed."""
        sequence.steps_in_flight -= 1
        if sequence.steps_in_flight == 0:
            self._draining.remove(sequence)
            self._release(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.keeps_blocks:
            sequence.keeps_blocks = False
            self._kept[sequence.request.id] = sequence
            return
        self.pool.release(sequence.blocks)
        self._steady_version = -1  # a waiting request may fit now
        sequence.blocks = []
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def _publish(self, sequence: Sequence) -> None:
        """Make the prompt's full blocks findable, as far as they are computed."""
        if not self.config.prefix_cache:
            return
        hashes = sequence.request.block_hashes
        while sequence.published < min(len(hashes), sequence.computed // self.config.block_tokens):
            self.pool.publish(sequence.blocks[sequence.published], hashes[sequence.published])
            sequence.published += 1
