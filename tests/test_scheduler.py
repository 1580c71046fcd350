"""The scheduler against schedules written by hand, and against a device that keeps its own books."""

from __future__ import annotations

import itertools
import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from deepinfer.errors import UsageError
from deepinfer.scheduler.policy import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.scheduler.step import StepOutput, StepPlan, StepResult

Kept = Callable[[int, int], int]
"""(request id, drafts) -> tokens that verification keeps."""


@dataclass
class Run:
    """One run of a request on the device, from admission to its end or to a preemption."""

    id: int
    start: int
    hit_blocks: int
    slot: int
    blocks: list[int]
    filled: int
    generated: int
    target: int = 0
    chunks: list[tuple[int, int, int]] = field(default_factory=list)
    pending: deque[int] = field(default_factory=deque)


@dataclass
class Device:
    """Carries out plans: knows true contexts, what every block holds, and who refers to which block.

    `memory[block]` maps offsets to what was written there; a prompt position of a hashed block is named by its hash,
    any other one by its request. Everything that a plan may not do is an assertion here.
    """

    config: SchedulerConfig
    requests: dict[int, Request]
    keep: Kept
    end_at: dict[int, int] = field(default_factory=dict)
    runs: dict[int, Run] = field(default_factory=dict)
    past: list[Run] = field(default_factory=list)
    memory: dict[int, dict[int, object]] = field(default_factory=dict)
    in_flight: dict[int, tuple[StepPlan, frozenset[int], frozenset[int]]] = field(default_factory=dict)
    done: dict[int, int] = field(default_factory=dict)
    results: dict[int, StepResult] = field(default_factory=dict)

    def submit(self, plan: StepPlan) -> None:
        for request_id in plan.preempted:
            self.past.append(self.runs.pop(request_id))
        self._tables(plan)
        for chunk in plan.prefill:
            self._prefill(plan, *chunk)
        kept = [
            self._decode(int(i), int(context), plan.decode.drafts)
            for i, context in zip(plan.decode.request_ids, plan.decode.contexts, strict=True)
        ]
        ids = [*plan.decode.request_ids.tolist(), *(c.request_id for c in plan.prefill if c.is_last)]
        stopped = frozenset(i for i in ids if self.runs[i].generated >= self.end_at.get(i, math.inf))
        self.results[plan.index] = StepResult(np.array(kept, dtype=np.int64), stopped)
        runs = [self.runs[i] for i in {*ids, *(c.request_id for c in plan.prefill)}]
        blocks = frozenset(b for run in runs for b in run.blocks)
        self.in_flight[plan.index] = (plan, blocks, frozenset(run.slot for run in runs) - {-1})

    def land(self, plan: StepPlan) -> StepResult:
        del self.in_flight[plan.index]
        for i, run in self.runs.items():
            if i in plan.decode.request_ids and run.pending:
                run.pending.popleft()
        return self.results.pop(plan.index)

    def finish(self, output: StepOutput) -> None:
        for i, tokens in zip(output.request_ids.tolist(), output.tokens.tolist(), strict=True):
            self.done[i] = self.done.get(i, 0) + tokens
        for i in output.finished:
            self.past.append(self.runs.pop(i))

    def _tables(self, plan: StepPlan) -> None:
        busy_blocks = frozenset(b for _, blocks, _ in self.in_flight.values() for b in blocks)
        busy_slots = frozenset(s for _, _, slots in self.in_flight.values() for s in slots)
        for table, following in itertools.zip_longest(plan.new_blocks, plan.new_blocks[1:]):
            i = table.request_id
            is_hit = table.first == 0 and following is not None and following.request_id == i
            if not is_hit:
                assert not busy_blocks & {*table.blocks}, "a block of a step in flight was handed out"
                held = {b for run in self.runs.values() for b in run.blocks}
                assert not held & {*table.blocks}, "a block of another request was handed out"
                self.memory.update({b: {} for b in table.blocks})
            if table.first == 0:
                assert i not in self.runs, "a running request was admitted again"
                assert table.slot not in busy_slots, "a slot of a step in flight was handed out"
                assert table.slot not in {r.slot for r in self.runs.values()} - {-1}, "a slot is shared"
                self.runs[i] = Run(i, -1, len(table.blocks) if is_hit else 0, table.slot, [], 0, self.done.get(i, 0))
            run = self.runs[i]
            assert table.first == len(run.blocks)
            assert table.slot == run.slot
            run.blocks += table.blocks
            if is_hit:
                self._check_hit(run)

    def _check_hit(self, run: Run) -> None:
        hashes = self.requests[run.id].block_hashes
        for block, block_hash in zip(run.blocks, hashes, strict=False):
            whole = {offset: (block_hash, offset) for offset in range(self.config.block_tokens)}
            assert self.memory[block] == whole, "a cached block does not hold what its hash says"

    def _prefill(self, plan: StepPlan, i: int, start: int, rows: int, kept_rows: int, is_last: bool) -> None:
        run, request = self.runs[i], self.requests[i]
        if run.start < 0:
            run.start = run.filled = start
            run.target = request.prompt_tokens + run.generated
            assert 0 <= start < run.target
            assert start <= run.hit_blocks * self.config.block_tokens, "a prompt position was never computed"
        assert start == run.filled, "a prompt has a hole"
        run.filled += rows
        assert is_last == (run.filled == run.target)
        if not is_last:
            assert rows % self.config.chunk_multiple == 0
        run.chunks.append((start, rows, kept_rows))
        for position in range(max(start, run.hit_blocks * self.config.block_tokens), run.filled):
            self._write(run, position)
        if is_last:
            run.generated += 1
            run.generated = min(run.generated, request.max_new_tokens)

    def _decode(self, i: int, context: int, drafts: int) -> int:
        run = self.runs[i]
        assert run.filled >= run.target > 0, "a request decodes before its prompt is computed"
        guess = run.filled + sum(drafts + 1 - kept for kept in run.pending)
        assert context == guess, "the host's context is not the committed one plus full steps in flight"
        assert context + drafts + 1 <= len(run.blocks) * self.config.block_tokens, "a row has no block"
        for position in range(run.filled, run.filled + drafts + 1):
            self._write(run, position)
        kept = self.keep(i, drafts)
        left = self.end_at.get(i, 10**9) - run.generated
        kept = max(1, min(kept, left))
        run.filled += kept
        run.generated += kept
        run.pending.append(kept)
        return kept

    def _write(self, run: Run, position: int) -> None:
        block, offset = divmod(position, self.config.block_tokens)
        hashes = self.requests[run.id].block_hashes
        name: object = (hashes[block], offset) if block < len(hashes) else (run.id, position, "own")
        self.memory[run.blocks[block]][offset] = name


@dataclass
class Story:
    """What a served scenario left behind."""

    plans: list[StepPlan]
    outputs: list[StepOutput]
    device: Device
    scheduler: Scheduler


def serve(
    config: SchedulerConfig,
    requests: list[Request],
    depth: int,
    keep: Kept,
    arrive_at: dict[int, int] | None = None,
    end_at: dict[int, int] | None = None,
) -> Story:
    """Drive the scheduler as the engine does, `depth` steps ahead, until every request is finished."""
    scheduler = Scheduler(config)
    device = Device(config, {r.id: r for r in requests}, keep, end_at or {})
    story = Story([], [], device, scheduler)
    flying: deque[StepPlan] = deque()
    for turn in itertools.count():
        assert turn < 2000, "the scheduler does not come to an end"
        for request in requests:
            if (arrive_at or {}).get(request.id, 0) == turn:
                assert scheduler.fits(request)
                scheduler.add(request)
        plan = scheduler.schedule()
        scheduler.check_integrity()
        if plan is not None:
            assert len(plan.prefill) + len(plan.decode) > 0, "an empty step"
            story.plans.append(plan)
            flying.append(plan)
            device.submit(plan)
        elif not flying and turn >= max((arrive_at or {0: 0}).values()) and not scheduler.num_waiting:
            return story
        if flying and (len(flying) > depth or plan is None):
            landed = flying.popleft()
            output = scheduler.commit(landed, device.land(landed))
            scheduler.check_integrity()
            story.outputs.append(output)
            device.finish(output)
    raise AssertionError


# By hand

BY_HAND = SchedulerConfig(max_num_seqs=2, max_tokens_per_step=8, num_blocks=16, block_tokens=4, num_slots=3)
LONG, SHORT = Request(0, 10, 3), Request(1, 5, 2)


def spoken(plan: StepPlan) -> tuple[Any, ...]:
    """A plan as plain tuples: chunks, (request, context) pairs, new blocks."""
    decodes = tuple(zip(plan.decode.request_ids.tolist(), plan.decode.contexts.tolist(), strict=True))
    return (
        tuple((*chunk[:3], chunk.is_last) for chunk in plan.prefill),
        decodes,
        tuple((t.request_id, t.first, t.blocks) for t in plan.new_blocks),
    )


def heard(output: StepOutput) -> tuple[dict[int, int], tuple[int, ...]]:
    """An output as tokens by request, and who finished."""
    return dict(zip(output.request_ids.tolist(), output.tokens.tolist(), strict=True)), output.finished


# Request 0: 10 prompt tokens in 3 blocks; the first chunk fills the budget of 8. Request 1: 5 tokens in 2 blocks.
PROMPTS = [
    (((0, 0, 8, False),), (), ((0, 0, (0, 1, 2)),)),
    (((0, 8, 2, True), (1, 0, 5, True)), (), ((1, 0, (3, 4)),)),
]
NOTHING: tuple[dict[int, int], tuple[int, ...]] = ({}, ())


@pytest.mark.parametrize("depth", [0, 1])
def test_two_requests_by_hand_without_drafts(depth: int) -> None:
    """The host counts tokens, so running ahead wastes no row: the plans are the same, one commit later."""
    story = serve(BY_HAND, [LONG, SHORT], depth, lambda i, drafts: 1)
    assert [spoken(p) for p in story.plans] == [*PROMPTS, ((), ((0, 10), (1, 5)), ()), ((), ((0, 11),), ())]
    assert [heard(o) for o in story.outputs] == [NOTHING, ({0: 1, 1: 1}, ()), ({0: 1, 1: 1}, (1,)), ({0: 1}, (0,))]


def test_two_requests_by_hand_with_a_draft_synchronous() -> None:
    """All drafts kept: request 0's two remaining tokens come in one step; request 1 takes one of two."""
    story = serve(replace(BY_HAND, nextn=1), [LONG, SHORT], 0, lambda i, drafts: 2)
    assert [spoken(p) for p in story.plans] == [*PROMPTS, ((), ((0, 10), (1, 5)), ())]
    assert [heard(o) for o in story.outputs] == [NOTHING, ({0: 1, 1: 1}, ()), ({0: 2, 1: 1}, (0, 1))]


def test_two_requests_by_hand_with_a_draft_asynchronous() -> None:
    """Request 0 may need a second step, so the host decides it, at the optimistic context, before it knows better.

    That row is dropped, and the request's memory stays until it lands. Request 1 ends for certain and is not run.
    """
    config = replace(BY_HAND, nextn=1)
    scheduler = Scheduler(config)
    scheduler.add(LONG)
    scheduler.add(SHORT)
    none, both = np.zeros(0, dtype=np.int64), np.array([2, 2])
    first, second = scheduler.schedule(), scheduler.schedule()
    assert first is not None
    assert second is not None
    assert [spoken(first), spoken(second)] == PROMPTS
    scheduler.commit(first, StepResult(none))
    third = scheduler.schedule()
    assert third is not None
    assert spoken(third) == ((), ((0, 10), (1, 5)), ())
    assert heard(scheduler.commit(second, StepResult(none))) == ({0: 1, 1: 1}, ())
    wasted = scheduler.schedule()
    assert wasted is not None
    assert spoken(wasted) == ((), ((0, 12),), ((0, 3, (5,)),))
    assert heard(scheduler.commit(third, StepResult(both))) == ({0: 2, 1: 1}, (0, 1))
    scheduler.check_integrity()
    assert scheduler.pool.references == dict.fromkeys((0, 1, 2, 5), 1)
    assert scheduler.schedule() is None
    assert heard(scheduler.commit(wasted, StepResult(np.array([1])))) == NOTHING
    scheduler.check_integrity()
    assert scheduler.pool.num_free == config.num_blocks


@pytest.mark.parametrize("nextn", [0, 2])
def test_a_request_for_one_token_never_decodes(nextn: int) -> None:
    """Its token comes with the prompt, which the host knows while the prompt is still in flight."""
    story = serve(replace(BY_HAND, nextn=nextn, max_tokens_per_step=16), [Request(0, 5, 1)], 1, lambda i, drafts: 1)
    assert len(story.plans) == 1


def test_a_stop_ends_a_request_early() -> None:
    """By its third token, in an engine one step ahead: one dropped row; and by its first one, from the prompt."""
    requests = [Request(0, 4, 50), Request(1, 4, 50)]
    story = serve(BY_HAND, requests, 1, lambda i, drafts: 1, end_at={0: 3, 1: 1})
    assert story.device.done == {0: 3, 1: 1}
    assert [o.finished for o in story.outputs] == [(1,), (), (0,), ()]
    assert [p.decode.request_ids.tolist() for p in story.plans] == [[], [0, 1], [0], [0]]


def test_a_preempted_request_recomputes_and_loses_nothing() -> None:
    """Four blocks of 4: both prompts take two; the third block of the first takes the other request's memory.

    Request 1 had 1 + 1 tokens when it was stopped: it comes back with a prompt of 7 + 2.
    """
    config = replace(BY_HAND, num_blocks=4, max_tokens_per_step=16)
    requests = [Request(0, 7, 6), Request(1, 7, 4)]
    story = serve(config, requests, 0, lambda i, drafts: 1)
    assert [p.preempted for p in story.plans if p.preempted] == [(1,)]
    assert story.scheduler.num_preemptions == 1
    again = [spoken(p)[0] for p in story.plans if any(c.request_id == 1 for c in p.prefill)]
    assert again == [((0, 0, 7, True), (1, 0, 7, True)), ((1, 0, 9, True),)]
    assert story.device.done == {0: 6, 1: 4}


# Any scenario


@dataclass(frozen=True)
class Scenario:
    config: SchedulerConfig
    requests: tuple[Request, ...]
    arrive_at: dict[int, int]
    end_at: dict[int, int]
    depth: int
    seed: int

    def serve(self) -> Story:
        rng = random.Random(self.seed)
        requests = [*self.requests]
        return serve(self.config, requests, self.depth, lambda i, d: rng.randint(1, d + 1), self.arrive_at, self.end_at)


@st.composite
def scenarios(draw: st.DrawFn) -> Scenario:
    """Pools barely larger than the longest request, prompts that share the beginning of three chains of blocks."""
    block_tokens, nextn = draw(st.integers(1, 6)), draw(st.integers(0, 5))
    num_seqs, multiple = draw(st.integers(1, 4)), draw(st.sampled_from((1, 2, 4)))
    windowed = draw(st.booleans())
    requests = []
    for i in range(draw(st.integers(1, 7))):
        prompt = draw(st.integers(1, 30))
        chain = draw(st.one_of(st.none(), st.integers(0, 2)))
        shared = 0 if chain is None else draw(st.integers(0, prompt // block_tokens))
        hashes = tuple(100 * (chain or 0) + b for b in range(shared))
        if chain is not None:
            hashes += tuple(1000 * (i + 1) + b for b in range(shared, prompt // block_tokens))
        requests.append(Request(i, prompt, draw(st.integers(1, 12)), hashes, arrival_s=float(i // 2)))
    longest = max(r.prompt_tokens + r.max_new_tokens + nextn + 1 for r in requests)
    config = SchedulerConfig(
        max_num_seqs=num_seqs,
        max_tokens_per_step=num_seqs * (nextn + 1) + multiple + draw(st.integers(0, 20)),
        num_blocks=-(-longest // block_tokens) + draw(st.integers(0, 8)),
        block_tokens=block_tokens,
        num_slots=num_seqs + draw(st.integers(0, 1)) if windowed else 0,
        nextn=nextn,
        window=draw(st.integers(1, 8)) if windowed else 0,
        keep_tokens=draw(st.one_of(st.none(), st.integers(1, 10))) if windowed else None,
        chunk_multiple=multiple,
        prefix_cache=draw(st.sampled_from((True, True, True, False))),
    )
    return Scenario(
        config,
        tuple(requests),
        {r.id: draw(st.integers(0, 25)) for r in requests},
        {r.id: draw(st.integers(1, 12)) for r in requests if draw(st.booleans())},
        draw(st.integers(0, 1)),
        draw(st.integers(0, 2**16)),
    )


thorough = settings(max_examples=250, deadline=None)


@thorough
@given(scenarios())
def test_every_request_gets_its_tokens_and_all_memory_comes_back(scenario: Scenario) -> None:
    """Memory in flight, block contents, contexts and prompt coverage are asserted by `Device` on the way."""
    story = scenario.serve()
    expected = {r.id: min(r.max_new_tokens, scenario.end_at.get(r.id, 10**9)) for r in scenario.requests}
    assert story.device.done == expected
    finished = [i for output in story.outputs for i in output.finished]
    assert sorted(finished) == sorted(expected)
    scheduler = story.scheduler
    assert scheduler.pool.num_free == scenario.config.num_blocks
    assert scheduler.num_running == scheduler.num_waiting == 0
    assert len(scheduler._free_slots) == scenario.config.num_slots


@thorough
@given(scenarios())
def test_no_step_exceeds_its_limits(scenario: Scenario) -> None:
    config = scenario.config
    for plan in scenario.serve().plans:
        assert plan.num_rows <= config.max_tokens_per_step
        assert len({*plan.decode.request_ids.tolist(), *(c.request_id for c in plan.prefill)}) <= config.max_num_seqs


@settings(max_examples=60, deadline=None)
@given(scenarios())
def test_same_inputs_give_the_same_plans(scenario: Scenario) -> None:
    first, second = ([(spoken(p), p.preempted) for p in scenario.serve().plans] for _ in range(2))
    assert first == second


@thorough
@given(scenarios())
def test_a_request_alone_is_never_preempted(scenario: Scenario) -> None:
    """What `fits` has the pool to itself: a step in flight that may keep less than assumed is no reason to restart."""
    config = scenario.config
    request = replace(scenario.requests[0], max_new_tokens=12)
    blocks = -(-(request.prompt_tokens + 12 + config.nextn + 1) // config.block_tokens)
    alone = replace(scenario, config=replace(config, num_blocks=blocks), requests=(request,), arrive_at={})
    assert alone.serve().scheduler.num_preemptions == 0


@thorough
@given(scenarios())
def test_kept_rows_are_the_last_ones_and_a_placeholder_per_earlier_chunk(scenario: Scenario) -> None:
    """Counted position by position, over every run of every request, preempted ones included."""
    keep = scenario.config.keep_tokens
    for run in scenario.serve().device.past:
        for start, rows, kept_rows in run.chunks:
            inside = sum(keep is None or p >= run.target - keep for p in range(start, start + rows))
            assert kept_rows == max(1, inside)


# Prefix hits


@pytest.mark.parametrize(("window", "keep_tokens"), [(0, None), *itertools.product((3, 6, 8), (None, 2, 9, 17))])
@pytest.mark.parametrize("shared_blocks", range(6))
def test_bounded_replay_after_a_hit(window: int, keep_tokens: int | None, shared_blocks: int) -> None:
    """A prompt of 21 tokens shares so many blocks of 4 with an earlier one: rows restart before the hit's end."""
    config = replace(BY_HAND, max_tokens_per_step=64, window=window, keep_tokens=keep_tokens)
    scheduler = Scheduler(config)
    plan: StepPlan | None = None
    for request in (
        Request(0, 21, 1, tuple(range(5))),
        Request(1, 21, 1, (*range(shared_blocks), *range(50, 55 - shared_blocks))),
    ):
        scheduler.add(request)
        plan = scheduler.schedule()
        assert plan is not None
        scheduler.commit(plan, StepResult(np.zeros(0, dtype=np.int64)))
    hit = 4 * shared_blocks
    start = hit if window == 0 else min(hit - window, 21 - (keep_tokens or 0))
    if start <= 0:
        start = hit = 0
    assert plan is not None
    (chunk,) = plan.prefill
    assert (chunk.start, chunk.rows) == (start, 21 - start)
    fresh = plan.new_blocks[-1]
    assert 4 * fresh.first == hit, "blocks below the hit were allocated, or some above it were not"
    assert len(plan.new_blocks) == (2 if hit else 1)
    assert scheduler.num_hit_tokens == hit


@pytest.mark.parametrize("depth", [0, 1])
def test_only_whole_blocks_of_landed_steps_are_shared(depth: int) -> None:
    """Request 0's chunks end at 6 and 9. Request 1 comes when the first has landed: it may reuse one block of 4.

    With a step in flight the second chunk, which completes the second block, has not landed by then.
    """
    requests = [Request(i, 9, 1, (1, 2)) for i in range(2)]
    config = replace(BY_HAND, max_tokens_per_step=6)
    story = serve(config, requests, depth, lambda i, drafts: 1, arrive_at={0: 0, 1: 1 + depth})
    assert next(c.start for plan in story.plans for c in plan.prefill if c.request_id == 1) == 4


def test_a_whole_prompt_in_the_cache_still_computes_its_last_token() -> None:
    story = serve(
        replace(BY_HAND, max_tokens_per_step=64),
        [Request(i, 8, 1, (1, 2)) for i in range(2)],
        0,
        lambda i, drafts: 1,
        arrive_at={0: 0, 1: 5},
    )
    assert [c.start for plan in story.plans for c in plan.prefill] == [0, 4]


def test_a_budget_without_room_for_prompts_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves no room for a prompt"):
        replace(BY_HAND, max_num_seqs=2, nextn=3, max_tokens_per_step=8)


# Acceptance

CONDITIONAL = Acceptance(rates=(0.9, 0.6, 0.75), source="test")
LINEAR = Acceptance(convention="linear", rates=(0.75,), source="test")


def outcomes(acceptance: Acceptance, nextn: int) -> Iterator[tuple[int, float]]:
    """(drafts accepted, probability) of every elementary outcome, by the words of the two conventions."""
    if acceptance.convention == "linear":  # mean 1 + nextn x rate: all drafts or none
        yield nextn, acceptance.rates[0]
        yield 0, 1 - acceptance.rates[0]
        return
    for verdicts in itertools.product((True, False), repeat=nextn):
        probability = 1.0
        for i, verdict in enumerate(verdicts):
            rate = acceptance.rates[min(i, len(acceptance.rates) - 1)]
            probability *= rate if verdict else 1 - rate
        yield (verdicts.index(False) if False in verdicts else nextn), probability


@pytest.mark.parametrize("acceptance", [CONDITIONAL, LINEAR], ids=lambda a: a.convention)
@pytest.mark.parametrize("nextn", [0, 1, 3, 5])
def test_survival_counts_outcomes(acceptance: Acceptance, nextn: int) -> None:
    by_hand = [sum(p for n, p in outcomes(acceptance, nextn) if n >= k) for k in range(1, nextn + 1)]
    assert acceptance.survival(nextn) == pytest.approx(by_hand, rel=1e-12)


@pytest.mark.parametrize("acceptance", [CONDITIONAL, LINEAR], ids=lambda a: a.convention)
@pytest.mark.parametrize("nextn", [0, 1, 3, 5])
def test_draws_have_mean_tau(acceptance: Acceptance, nextn: int) -> None:
    """Within 4 standard errors over 200 requests x 500 positions; the variance comes from the enumeration."""
    ids, positions = (x.ravel() for x in np.meshgrid(np.arange(200), np.arange(500), indexing="ij"))
    kept = acceptance.draw(11, ids, positions, nextn)
    mean = sum(p * (1 + n) for n, p in outcomes(acceptance, nextn))
    variance = sum(p * (1 + n - mean) ** 2 for n, p in outcomes(acceptance, nextn))
    assert acceptance.tau(nextn) == pytest.approx(mean, rel=1e-12)
    assert abs(kept.mean() - mean) <= 4 * math.sqrt(variance / len(kept))


def test_the_linear_convention_has_one_rate() -> None:
    """With several, no distribution of accepted prefixes has them: the second draft cannot outlive the first."""
    with pytest.raises(ValidationError, match="one rate for all drafts, got 2"):
        Acceptance(convention="linear", rates=(0.5, 0.9), source="test")


def test_draws_do_not_depend_on_the_batch() -> None:
    """Shuffled, alone, and in halves: each request's draw at a position stays what it is; another seed changes it."""
    ids = np.repeat(np.arange(40), 50)
    positions = np.tile(np.arange(50), 40)
    kept = CONDITIONAL.draw(5, ids, positions, 4)
    order = np.random.default_rng(0).permutation(len(ids))
    assert (CONDITIONAL.draw(5, ids[order], positions[order], 4) == kept[order]).all()
    alone = [CONDITIONAL.draw(5, ids[i : i + 1], positions[i : i + 1], 4)[0] for i in range(len(ids))]
    assert alone == kept.tolist()
    assert (CONDITIONAL.draw(6, ids, positions, 4) != kept).any()
