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
import numpy.typing as npt

from deepinfer.numeric import Ints
from deepinfer.scheduler.blocks import BlockPool
from deepinfer.scheduler.policy import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.step import BlockTable, DecodeBatch, PrefillChunk, StepOutput, StepPlan, StepResult
from deepinfer.scheduler.table import DecodeTable, Sequence

Bools = npt.NDArray[np.bool_]

_NONE: Ints = np.zeros(0, dtype=np.int64)

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
    """Who takes part in a decided step. `rows` are table rows, valid while the table has this `version`; `handles`
    are good for longer.
    """

    prefill: list[Sequence]
    handles: Ints
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
        return len(self._prefilling) + len(self._decoding.sequences) + len(self._receiving)

    @property
    def unreported_preemptions(self) -> tuple[int, ...]:
        """Requests preempted by decisions that made no step: the next plan reports them. Steps in flight are older."""
        return tuple(self._unreported)

    @property
    def num_kept(self) -> int:
        """Finished requests whose blocks another pool has still to read."""
        return len(self._kept)

    def cached_tokens(self, request: Request) -> int:
        """Tokens of a prompt that the prefix cache holds now."""
        return len(self.pool.match(request.block_hashes)) * self.config.block_tokens if self.config.prefix_cache else 0

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
        generated = request.generated_tokens
        if request.transferred_tokens and not self.config.transfer_window:
            generated = max(generated, 1)
        # The KV of the newest token is computed by the step that it goes into.
        sequence = Sequence(request, request.prompt_tokens + max(generated - 1, 0), generated)
        sequence.transferred = request.transferred_tokens
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
        if self.config.transfer_window and not sequence.generated:
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
        ids, tokens, ended = self._commit_decodes(plan, step, result)
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
        contexts = table.cached + table.in_flight * rows
        return DecodeBatch(table.request_id.copy(), contexts, self.config.nextn)

    def room(self) -> Ints:
        """Tokens that each request of `decoding()` may still generate."""
        room: Ints = self._decoding.limit - self._decoding.generated
        return room

    def advance(self, kept: Ints) -> None:
        """Take in several repetitions of the last decision at once: the tokens each request of `decoding()` kept.

        As many steps are in flight after them as before. Nobody may have ended (`room`), nor memory run out
        (`steady_steps`).
        """
        table, rows = self._decoding, self.config.nextn + 1
        table.cached[:] += kept
        table.generated[:] += kept
        # Blocks as the last repetition needed them when it was decided.
        needed = table.cached + np.maximum(table.in_flight, 1) * rows
        short = (needed > table.capacity).nonzero()[0]
        for row, tokens in zip(short.tolist(), needed[short].tolist(), strict=True):
            blocks = table.sequences[row].blocks
            blocks += self.pool.allocate(self._blocks_for(tokens) - len(blocks))
            table.capacity[row] = len(blocks) * self.config.block_tokens

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
            assert sequence.row == row == table.rows_of(table.handle)[row], "a table row has lost its sequence"
            assert table.owner(sequence.handle) is sequence, "a handle has changed hands"
            assert len(sequence.blocks) * config.block_tokens == table.capacity[row], "wrong capacity"
            flights = sum(int((step.handles == sequence.handle).sum()) for step in self._in_flight.values())
            assert flights == table.in_flight[row], "decode steps in flight miscounted"
        assert (table.generated < table.limit).all(), "a request ran past its end"
        assert (table.cached <= table.capacity).all(), "KV without a block"
        slots = [s.slot for s in (*alive, *self._draining, *self._kept.values()) if s.slot >= 0]
        assert sorted(slots + self._free_slots) == list(range(config.num_slots)), "state slots were lost or shared"

    def _order(self, sequence: Sequence) -> tuple[float, int]:
        return self.config.order(sequence.request)

    def _blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.config.block_tokens)

    def _plan_decodes(self, draft: _Draft) -> tuple[DecodeBatch, _InFlight]:
        """All decoding requests that can still produce tokens; those short of blocks get some or wait."""
        table, drafts = self._decoding, self.config.nextn
        if not len(table):
            return DecodeBatch(_NONE, _NONE, drafts), _InFlight([], _NONE, slice(0, 0), table.version)
        rows = drafts + 1
        contexts, runs = table.cached + table.in_flight * rows, self._may_continue()
        short = runs & (contexts + rows > table.capacity)
        if np.count_nonzero(short):
            stalled = self._grow(short, contexts + rows, draft)
            contexts, runs = table.cached + table.in_flight * rows, self._may_continue()
            runs[[sequence.row for sequence in stalled if sequence.row >= 0]] = False
        selected: Ints | slice = slice(0, len(table))
        if np.count_nonzero(runs) < len(table):
            selected = runs.nonzero()[0]
            contexts = contexts[selected]
        table.in_flight[selected] += 1
        batch = DecodeBatch(table.request_id[selected].copy(), contexts, drafts)
        draft.budget -= batch.num_rows
        return batch, _InFlight([], table.handle[selected].copy(), selected, table.version)

    def _may_continue(self) -> Bools:
        """Rows to run: every step in flight yields a token at least, and what is certain to end is not run again."""
        table = self._decoding
        runs: Bools = table.generated + table.in_flight + table.first_in_flight < table.limit
        return runs

    def _grow(self, short: Bools, needed: Ints, draft: _Draft) -> set[Sequence]:
        """Give the marked rows blocks for `needed` tokens each; returns who must wait."""
        table, block_tokens = self._decoding, self.config.block_tokens
        marked = short.nonzero()[0]
        counts = -(-needed[marked] // block_tokens) - table.capacity[marked] // block_tokens
        total = int(counts.sum())
        if self.pool.num_free < total:
            return self._ration([table.sequences[i] for i in marked], draft)
        blocks, start = self.pool.allocate(total), 0
        for row, count in zip(marked.tolist(), counts.tolist(), strict=True):
            sequence, end = table.sequences[row], start + count
            own = blocks[start:end]
            draft.tables.append(BlockTable(sequence.request.id, len(sequence.blocks), tuple(own), sequence.slot))
            sequence.blocks += own
            start = end
        table.capacity[marked] += counts * block_tokens
        return set()

    def _ration(self, short: list[Sequence], draft: _Draft) -> set[Sequence]:
        """Give blocks to the most urgent first, preempting from the other end; returns who must wait."""
        table, rows = self._decoding, self.config.nextn + 1
        stalled: set[Sequence] = set()
        for sequence in sorted(short, key=self._order):
            if sequence.row < 0:
                continue  # preempted for a more urgent one
            context = int(table.cached[sequence.row] + table.in_flight[sequence.row] * rows)
            count = self._blocks_for(context + rows) - len(sequence.blocks)
            while self._num_free_soon(count) < count and sequence.row >= 0:
                victim = max((*self._prefilling, *table.sequences), key=self._order)
                if victim is sequence and table.in_flight[sequence.row]:
                    break  # its step in flight may keep less than assumed: wait for that first
                self._preempt(victim, draft)
            if sequence.row < 0:
                continue
            if self.pool.num_free < count:
                stalled.add(sequence)  # until the step in flight lands
                continue
            self._append_blocks(sequence, count, draft)
            table.capacity[sequence.row] = len(sequence.blocks) * self.config.block_tokens
        return stalled

    def _append_blocks(self, sequence: Sequence, count: int, draft: _Draft) -> None:
        blocks = self.pool.allocate(count)
        draft.tables.append(BlockTable(sequence.request.id, len(sequence.blocks), tuple(blocks), sequence.slot))
        sequence.blocks += blocks

    def _num_free_soon(self, enough: int) -> int:
        """Free blocks; if those are not enough, also what only sequences stopped with a step in flight hold."""
        free = self.pool.num_free
        return free if free >= enough else free + sum(self.pool.num_sole(s.blocks) for s in self._draining)

    def _preempt(self, sequence: Sequence, draft: _Draft) -> None:
        """Stop a running sequence; its request waits again, to recompute prompt and generated tokens."""
        if sequence.row >= 0:
            sequence.generated = int(self._decoding.generated[sequence.row])
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
            draft.tables.append(BlockTable(sequence.request.id, 0, tuple(hit), sequence.slot, shared=True))
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

    def _commit_decodes(self, plan: StepPlan, step: _InFlight, result: StepResult) -> tuple[Ints, Ints, list[Sequence]]:
        """Add the kept tokens to the table; returns request ids, new tokens, and sequences at their limit."""
        if not len(plan.decode):
            return _NONE, _NONE, []
        table, rows = self._decoding, step.rows
        ids, kept = plan.decode.request_ids, np.asarray(result.decode_tokens, dtype=np.int64)
        if step.version != table.version:
            rows = table.rows_of(step.handles)
            present = rows >= 0
            if np.count_nonzero(present) < len(rows):
                for handle in step.handles[~present].tolist():
                    self._drain(table.owner(handle))
                rows, kept, ids = rows[present], kept[present], ids[present]
        generated, limit = table.generated[rows], table.limit[rows]
        new = np.minimum(kept, limit - generated)
        table.generated[rows] = generated = generated + new
        table.cached[rows] += kept
        table.in_flight[rows] -= 1
        full = generated >= limit
        ended: list[Sequence] = []
        if np.count_nonzero(full):
            ended = [table.sequences[i] for i in np.arange(len(table))[rows][full].tolist()]
        return ids, new, ended

    def _commit_chunk(self, chunk: PrefillChunk, sequence: Sequence) -> bool:
        """Take in a prefill chunk; True if it gave its request a token."""
        if not sequence.running:
            self._drain(sequence)
            return False
        sequence.steps_in_flight -= 1
        sequence.computed = chunk.start + chunk.rows
        self._publish(sequence)
        if chunk.is_last:
            self._decoding.first_in_flight[sequence.row] = 0
            self._decoding.generated[sequence.row] += 1
            sequence.generated += 1
        return chunk.is_last

    def _stop(self, sequence: Sequence) -> None:
        """End a sequence; its memory goes back once no step in flight refers to it."""
        sequence.running = False
        if sequence.row >= 0:
            sequence.steps_in_flight += int(self._decoding.in_flight[sequence.row])
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
        self._decoding.forget(sequence)
        if sequence.keeps_blocks:
            sequence.keeps_blocks = False
            self._kept[sequence.request.id] = sequence
            return
        self.pool.release(sequence.blocks)
        if self._waiting:
            self._steady_version = -1  # one of them may fit now
        sequence.blocks = []
        if sequence.slot >= 0:
            self._free_slots.append(sequence.slot)
            sequence.slot = -1

    def _publish(self, sequence: Sequence) -> None:
        """Make the prompt's full blocks findable, as far as they are computed."""
        if not self.config.prefix_cache:
            return
        hashes, first = sequence.request.block_hashes, sequence.published
        end = min(len(hashes), sequence.computed // self.config.block_tokens)
        if first < end:
            self.pool.publish(sequence.blocks[first:end], hashes[first:end])
            sequence.published = end
