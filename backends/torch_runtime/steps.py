"""Puts a step on the device: row arrays from the host's decisions, columns of slots, and what comes back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from backends.torch_runtime.context import Gathering, RankContext, StepContext
from backends.torch_runtime.inputs import PromptRows, SlotStart, Track
from backends.torch_runtime.rows import RowArrays, bounded_view, concatenated, decode_rows, row_view
from backends.torch_runtime.state import LOOK_BACK


class StepBuilder:
    """Makes `StepContext`s of one rank; every copy to the device is asynchronous and in the order of the stream."""

    def __init__(self, rank: RankContext) -> None:
        self._rank, self._state = rank, rank.state
        self._window = rank.model.window
        self._ngram = rank.engram.hashing.max_ngram if rank.engram else 0

    def to_device(self, array: npt.NDArray[np.generic], dtype: torch.dtype = torch.int32) -> Tensor:
        """A host array on the device."""
        host = torch.from_numpy(np.ascontiguousarray(array)).to(dtype)
        if self._state.device.type == "cpu":
            return host
        return host.pin_memory().to(self._state.device, non_blocking=True)

    def place_blocks(self, rows: npt.NDArray[np.generic]) -> None:
        """Write (slot, place, block) [n, 3] into the block table."""
        if len(rows):
            slot, place, block = self.to_device(rows).unbind(1)
            self._state.block_table[slot.long(), place.long()] = block

    def start_slots(self, starts: Sequence[SlotStart]) -> None:
        """Set the columns of slots that were given to requests."""
        if not starts:
            return
        state = self._state
        params = [start.track.params for start in starts]
        whole = [
            (s.slot, s.valid, s.valid_bounded, s.floor, max(p.top_k, 0), s.track.seed)
            for s, p in zip(starts, params, strict=True)
        ]
        slot, valid, bounded, floor, top_k, seed = self.to_device(np.asarray(whole), torch.int64).unbind(1)
        state.valid[slot], state.valid_bounded[slot], state.floor[slot] = valid.int(), bounded.int(), floor.int()
        state.top_k[slot], state.seed[slot] = top_k.int(), seed
        real = self.to_device(np.asarray([(p.temperature, p.top_p) for p in params]), torch.float32)
        state.temperature[slot], state.top_p[slot] = real.unbind(1)

    def end_prompts(self, tracks: Sequence[Track]) -> None:
        """Set the tokens that come before the first new one of requests whose prompt ends in this step."""
        if tracks:
            recent = [([-1] * LOOK_BACK + t.tokens)[-LOOK_BACK:] for t in tracks]
            slot = self.to_device(np.asarray([t.slot for t in tracks]), torch.int64)
            self._state.recent[slot] = self.to_device(np.asarray(recent))

    def decode(self, slots: Tensor, max_context: int) -> StepContext:
        """A step that only decodes: all of it follows from `slots` int32 [n] and the state, so it can be captured."""
        rows = decode_rows(self._state, slots, self._state.shape.rows_per_request)
        return self._step(slots, rows, None, max_context)

    def mixed(self, slots: Tensor, prompts: PromptRows, max_context: int) -> StepContext:
        """A step with prompt rows."""
        return self._step(
            slots, decode_rows(self._state, slots, self._state.shape.rows_per_request), prompts, max_context
        )

    def _step(self, slots: Tensor, decoding: RowArrays, prompts: PromptRows | None, max_context: int) -> StepContext:
        rank, state = self._rank, self._state
        local, buffer, part = decoding, decoding, None
        if prompts is not None:
            local, buffer, part = self._rows(decoding, prompts.columns, prompts.parts)
        every = row_view(state, local, buffer, len(decoding), self._window, rank.rotary)
        step = StepContext(
            rank=rank,
            token_ids=self._tokens(slots, prompts, part),
            ngrams=self._ngrams(slots, prompts, part),
            every=every,
            kept=every,
            kept_of_every=None,
            logit_of_kept=None,
            decode_slots=slots,
            first_slots=slots[:0],
            first_pos=slots[:0],
            max_context=max_context,
        )
        if prompts is not None and part is not None:
            self._add_prompts(step, decoding, prompts)
        step.kept = bounded_view(state, step.kept, self._window)
        return step

    def _rows(
        self, decoding: RowArrays, columns: npt.NDArray[np.generic], parts: Sequence[npt.NDArray[np.generic]]
    ) -> tuple[RowArrays, RowArrays, Tensor]:
        """This rank's rows, the rows whose records it gets, and which of the prompt rows are its own."""
        slot, pos, first, last, base = self.to_device(columns).unbind(0)
        prompts = RowArrays(slot, pos, first, last, base + len(decoding))
        part = self.to_device(parts[self._rank.comm.replica.place], torch.int64)
        return concatenated([decoding, prompts.select(part)]), concatenated([decoding, prompts]), part

    def _add_prompts(self, step: StepContext, decoding: RowArrays, prompts: PromptRows) -> None:
        rank, place, own = self._rank, self._rank.comm.replica.place, len(decoding)
        mine = prompts.parts[place]
        step.gather_every = self._gathering(prompts.parts)
        if rank.layout.cp > 1:
            step.run_first = torch.cat((decoding.first, self.to_device(prompts.run_first[mine])))
        kept_mine = mine
        if len(prompts.kept) < len(prompts.tokens):
            numbers = np.full(len(prompts.tokens), -1)
            numbers[prompts.kept] = np.arange(len(prompts.kept))
            kept_parts = [numbers[p][numbers[p] >= 0] for p in prompts.parts]
            kept, buffer, _ = self._rows(decoding, prompts.kept_columns, kept_parts)
            step.kept = row_view(self._state, kept, buffer, own, self._window, rank.rotary)
            step.gather_kept = self._gathering(kept_parts)
            is_kept = numbers[mine] >= 0
            kept_mine = mine[is_kept]
            step.kept_of_every = self.to_device(
                np.concatenate((np.arange(own), own + np.flatnonzero(is_kept))), torch.int64
            )
        else:
            step.gather_kept = step.gather_every
        ends = np.flatnonzero(np.isin(kept_mine, prompts.last))
        step.logit_of_kept = self.to_device(np.concatenate((np.arange(own), own + ends)), torch.int64)
        wanted = prompts.columns[:, kept_mine[ends]]
        step.first_slots, step.first_pos = self.to_device(wanted[0]), self.to_device(wanted[1])

    def _gathering(self, parts: Sequence[npt.NDArray[np.generic]]) -> Gathering | None:
        if len(parts) == 1:
            return None
        order = np.argsort(np.concatenate(parts), kind="stable")
        return Gathering([len(part) for part in parts], self.to_device(order, torch.int64))

    def _tokens(self, slots: Tensor, prompts: PromptRows | None, part: Tensor | None) -> Tensor:
        decoding = self._state.tokens[slots.long()].flatten()
        if prompts is None or part is None:
            return decoding
        return torch.cat((decoding, self.to_device(prompts.tokens)[part]))

    def _ngrams(self, slots: Tensor, prompts: PromptRows | None, part: Tensor | None) -> Tensor | None:
        if not self._ngram:
            return None
        state = self._state
        history = torch.cat((state.recent[slots.long()], state.tokens[slots.long()]), 1)
        decoding = history.unfold(1, self._ngram, 1).flip(2)[:, -state.shape.rows_per_request :].flatten(0, 1)
        if prompts is None or part is None:
            return decoding
        return torch.cat((decoding, self.to_device(prompts.ngrams)[part]))


class HostResult(NamedTuple):
    """What a step of this rank produced, on the host: tokens [n, 1 + nextn] and kept counts of decoding requests, the
    first tokens of requests whose prompt ended; if wanted, log-probabilities of the tokens of all their rows [m], and
    the best ones [m, n] with their token ids.
    """

    tokens: npt.NDArray[np.int32]
    kept: npt.NDArray[np.int32]
    first: npt.NDArray[np.int32]
    taken: npt.NDArray[np.float32] | None
    best: npt.NDArray[np.float32] | None
    best_ids: npt.NDArray[np.int64] | None


class Outputs:
    """The outputs of a step on their way to the host. `begin` was recorded on the device before the step."""

    def __init__(self, outputs: Mapping[str, Tensor], begin: torch.cuda.Event | None = None) -> None:
        names = [name for name in HostResult._fields if name in outputs]
        self._host = {name: _on_its_way(outputs[name]) for name in names}
        self.begin, self.end = begin, None
        if outputs["tokens"].is_cuda:
            self.end = torch.cuda.Event(enable_timing=True)
            self.end.record()

    def wait(self) -> HostResult:
        """Wait for the step to end."""
        if self.end is not None:
            self.end.synchronize()
        found: dict[str, Any] = dict.fromkeys(HostResult._fields)
        found.update((name, tensor.numpy()) for name, tensor in self._host.items())
        return HostResult(**found)

    @property
    def device_s(self) -> float | None:
        """Seconds of the step on the device, once it has ended; None where that is not measured."""
        if self.begin is None or self.end is None:
            return None
        return float(self.begin.elapsed_time(self.end)) / 1e3


def _on_its_way(x: Tensor) -> Tensor:
    if not x.is_cuda:
        return x
    # Pinned, or the copy would wait for the device.
    return torch.empty(x.shape, dtype=x.dtype, pin_memory=True).copy_(x, non_blocking=True)
