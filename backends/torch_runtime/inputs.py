"""From decisions to rows: what the host prepares of a step before the device computes it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from backends.torch_runtime.state import LOOK_BACK
from deepinfer.numeric import Ints
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import Stop, StopChecker
from deepinfer.scheduler.step import PrefillChunk, StepPlan


@dataclass(slots=True, eq=False)
class Track:
    """What the host of a rank knows of a request: its tokens, and where on the device it is.

    `tokens` are those of the prompt and, behind them, what was delivered. `shared_tokens` of them have KV that others
    share. `void_before` is the first ticket whose results count: earlier ones were of a run that was preempted.
    """

    params: SamplingParams
    seed: int
    prompt_tokens: int
    tokens: list[int]
    checker: StopChecker
    slot: int = -1
    shared_tokens: int = 0
    started: bool = False
    void_before: int = 0
    finished: bool = False
    stop: Stop | None = None
    logprobs: list[dict[int, float]] = field(default_factory=list)

    @property
    def generated(self) -> list[int]:
        """Tokens delivered so far."""
        return self.tokens[self.prompt_tokens :]


@dataclass(frozen=True)
class SlotStart:
    """A slot given to a request: where its windows begin, and what its blocks and samples depend on."""

    slot: int
    valid: int
    valid_bounded: int
    floor: int
    track: Track


@dataclass(frozen=True, eq=False)
class PromptRows:
    """Prompt rows of a replica in one step, chunk by chunk.

    `columns` int32 [5, n] are slot, pos, first, last, base (in a buffer of prompt rows only), `kept_columns` [5, k] the
    same of the kept rows, `kept` their places. `parts` are the rows of each cp rank, `run_first` [n] the first position
    of the piece that a row is in. `tokens` [n], `ngrams` [n, n-gram]; `last` are places of rows that end prompts.
    """

    columns: Ints
    kept_columns: Ints
    kept: Ints
    parts: tuple[Ints, ...]
    run_first: Ints
    tokens: Ints
    ngrams: Ints
    last: Ints


def place_blocks(plan: StepPlan, tracks: Mapping[int, Track], block_tokens: int) -> Ints:
    """(slot, place in its table, block) of every block that the step's requests were given, [n, 3].

    A table that begins at 0 begins a new run of its request.
    """
    rows: list[tuple[int, int, int]] = []
    for table in plan.new_blocks:
        track = tracks[table.request_id]
        if table.first == 0:
            track.slot, track.started = table.slot, False
            track.shared_tokens = len(table.blocks) * block_tokens if table.shared else 0
        rows += [(table.slot, table.first + i, block) for i, block in enumerate(table.blocks)]
    return np.asarray(rows, dtype=np.int64).reshape(-1, 3)


def slot_starts(
    chunks: Sequence[PrefillChunk], tracks: Mapping[int, Track], keep_tokens: int | None
) -> list[SlotStart]:
    """The runs that begin with these chunks. Window keys exist from a run's first row on; those of bounded layers, with
    `keep_tokens`, from so many rows before the prompt's end on.
    """
    starts = []
    for chunk in chunks:
        track = tracks[chunk.request_id]
        if track.started:
            continue
        track.started = True
        bounded = chunk.start if keep_tokens is None else max(chunk.start, len(track.tokens) - keep_tokens)
        starts.append(SlotStart(track.slot, chunk.start, bounded, track.shared_tokens, track))
    return starts


def prompt_rows(chunks: Sequence[PrefillChunk], tracks: Mapping[int, Track], cp: int, ngram: int) -> PromptRows:
    """Rows of a replica's chunks, divided over its cp ranks."""
    columns, kept_columns, kept, run_first, tokens, ngrams, last = [], [], [], [], [], [], []
    parts: list[list[Ints]] = [[] for _ in range(cp)]
    base = kept_base = 0
    for chunk in chunks:
        track = tracks[chunk.request_id]
        end = chunk.start + chunk.rows
        pos = np.arange(chunk.start, end, dtype=np.int64)
        columns.append(_columns(track.slot, pos, base))
        kept_pos = pos[chunk.rows - chunk.kept_rows :]
        kept_columns.append(_columns(track.slot, kept_pos, kept_base))
        kept.append(base + chunk.rows - chunk.kept_rows + np.arange(chunk.kept_rows))
        first = pos.copy()
        for rank, (low, high) in pieces(chunk.start, end, track.slot % cp, cp):
            parts[rank].append(base + np.arange(low - chunk.start, high - chunk.start))
            first[low - chunk.start : high - chunk.start] = low
        run_first.append(first)
        # -1 stands before the first token.
        known = np.asarray([-1] * LOOK_BACK + track.tokens[max(chunk.start - LOOK_BACK, 0) : end], dtype=np.int64)
        window = np.lib.stride_tricks.sliding_window_view(known, ngram)[-chunk.rows :, ::-1]
        tokens.append(window[:, 0])
        ngrams.append(window)
        if chunk.is_last:
            last.append(base + chunk.rows - 1)
        base, kept_base = base + chunk.rows, kept_base + chunk.kept_rows

    def joined(arrays: list[Ints], axis: int = 0) -> Ints:
        return np.concatenate(arrays, axis) if arrays else np.zeros(0, dtype=np.int64)

    return PromptRows(
        joined(columns, 1).reshape(5, -1),
        joined(kept_columns, 1).reshape(5, -1),
        joined(kept),
        tuple(np.sort(joined(part)) for part in parts),
        joined(run_first),
        joined(tokens),
        joined(ngrams).reshape(-1, ngram),
        np.asarray(last, dtype=np.int64),
    )


def pieces(start: int, end: int, owner: int, cp: int) -> list[tuple[int, tuple[int, int]]]:
    """(rank, positions) that divide a chunk over cp ranks: 2 cp pieces, of which each rank has one from either end.

    So all ranks see about as many keys, and the request's `owner`, which decodes it, has its first and last rows.
    Pieces begin at even positions, so that no pair of tokens is cut; a chunk of few rows is the owner's alone.
    """
    if cp == 1 or end - start < 4 * cp:
        return [(owner, (start, end))]
    bounds = [start, *(start + (end - start) * i // (2 * cp) // 2 * 2 for i in range(1, 2 * cp)), end]
    bounds = [bounds[0], *(b + (b % 2) for b in bounds[1:-1]), bounds[-1]]
    ranks = [min(i, 2 * cp - 1 - i) for i in range(2 * cp)]
    return [((owner + ranks[i]) % cp, (bounds[i], bounds[i + 1])) for i in range(2 * cp)]


def _columns(slot: int, pos: Ints, base: int) -> Ints:
    n = len(pos)
    first, last = (int(pos[0]), int(pos[-1])) if n else (0, 0)
    return np.stack((np.full(n, slot), pos, np.full(n, first), np.full(n, last), np.full(n, base)))
