"""The shape of a step: what operators compute their work from. Every field may be a number or a NumPy array."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cached_property

from deepinfer.numeric import Num, larger, smaller


@dataclass(frozen=True)
class Sequences:
    """`count` alike sequences of one attention replica in one step.

    Each computes `rows` token positions after `context` tokens already cached. `kept_rows` of them go through the
    bounded layers (all, unless a prompt is prefilled in compact mode); the LM head sees `logit_rows` of them.
    """

    count: Num
    rows: Num
    context: Num
    kept_rows: Num
    logit_rows: Num

    @classmethod
    def decoding(cls, count: Num, drafts: Num, context: Num) -> Sequences:
        """Requests that verify `drafts` tokens beside the last one, after `context` cached tokens each."""
        rows = 1.0 + drafts
        return cls(count, rows, context, rows, rows)


@dataclass(frozen=True)
class StepShape:
    """One step of the busiest attention replica, and the load its expert group sees.

    `mean_rows` and `mean_kept_rows` are rows per attention replica averaged over the expert group: all replicas
    send their rows to the same experts. They default to this replica's own rows.
    """

    decode: Sequences | None = None
    prefill: tuple[Sequences, ...] = ()
    mean_rows: Num | None = None
    mean_kept_rows: Num | None = None

    @cached_property
    def sequences(self) -> tuple[Sequences, ...]:
        """All groups of sequences of the step."""
        return self.prefill if self.decode is None else (self.decode, *self.prefill)

    @cached_property
    def rows(self) -> Num:
        """Rows computed by the layers that see every row."""
        return sum((s.count * s.rows for s in self.sequences), 0.0)

    @cached_property
    def prompt_rows(self) -> Num:
        """Those of them that are prompts'."""
        return sum((s.count * s.rows for s in self.prefill), 0.0)

    @cached_property
    def kept_rows(self) -> Num:
        """Rows computed by the bounded layers."""
        return sum((s.count * s.kept_rows for s in self.sequences), 0.0)

    @cached_property
    def logit_rows(self) -> Num:
        """Rows seen by the LM head."""
        return sum((s.count * s.logit_rows for s in self.sequences), 0.0)

    @cached_property
    def expert_rows(self) -> Num:
        """Rows per replica that reach the experts."""
        return self.rows if self.mean_rows is None else self.mean_rows

    @cached_property
    def companions(self) -> Num:
        """Other rows of a row's own request in the step, on average."""
        return sum((s.count * s.rows * (s.rows - 1.0) for s in self.sequences), 0.0) / larger(self.rows, 1e-9)

    @cached_property
    def bounded(self) -> StepShape:
        """The step as bounded layers see it in compact mode: only the kept rows, which are each sequence's last."""
        mean = self.kept_rows if self.mean_kept_rows is None else self.mean_kept_rows
        return StepShape(
            decode=None if self.decode is None else _last_rows(self.decode),
            prefill=tuple(_last_rows(s) for s in self.prefill),
            mean_rows=mean,
        )

    @cached_property
    def half(self) -> StepShape:
        """One of two micro-batches: half of all sequences."""
        return StepShape(
            decode=None if self.decode is None else replace(self.decode, count=self.decode.count / 2),
            prefill=tuple(replace(s, count=s.count / 2) for s in self.prefill),
            mean_rows=None if self.mean_rows is None else self.mean_rows / 2,
            mean_kept_rows=None if self.mean_kept_rows is None else self.mean_kept_rows / 2,
        )

    def drafting(self, rows: Num) -> StepShape:
        """The step as a draft pass sees it: `rows` for each request that decodes or has just ended its prompt."""
        groups = [(s.count * s.logit_rows, s.context + s.rows) for s in self.prefill]
        if self.decode is not None:
            groups.append((self.decode.count, self.decode.context + self.decode.rows))
        count = sum((c for c, _ in groups), 0.0)
        context = sum((c * x for c, x in groups), 0.0) / larger(count, 1e-9)
        # Draft rows spread over the expert group as the verified rows do.
        mean = count * rows * self.expert_rows / larger(self.rows, 1e-9)
        return StepShape(Sequences(count, rows, context, rows, rows), mean_rows=mean)


View = Callable[[StepShape], StepShape]
"""How a layer sees a step: all of it, its kept rows, or its drafting requests."""


def _last_rows(sequences: Sequences) -> Sequences:
    skipped = sequences.rows - sequences.kept_rows
    return replace(sequences, rows=sequences.kept_rows, context=sequences.context + skipped)


def visible_entries(context: Num, rows: Num, ratio: float = 1.0, cap: float | None = None) -> Num:
    """Cache entries seen by `rows` consecutive positions after `context`, summed over the rows.

    Position t (from 0) sees t + 1 tokens, hence (t + 1) / ratio entries and at most `cap`. The floor that integer
    entries would need is left out: on average it is (ratio - 1) / (2 ratio) of an entry a row.
    """
    return _entries_up_to(context + rows, ratio, cap) - _entries_up_to(context, ratio, cap)


def _entries_up_to(length: Num, ratio: float, cap: float | None) -> Num:
    if cap is None:
        return length * (length + 1.0) / (2.0 * ratio)
    growing = smaller(length, cap * ratio)
    return growing * (growing + 1.0) / (2.0 * ratio) + cap * (length - growing)
