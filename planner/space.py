"""The search space: which layouts and settings are tried, and why some are not."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Literal

from deepinfer.errors import UsageError
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import PoolRole
from deepinfer.model.spec import ModelSpec, MoE

Replay = Literal["off", "compact"]

# Steps of at most a quarter: a coarser grid costs that much output when one point just breaks a limit.
REQUESTS_PER_GPU = (
    *(1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96, 112, 128),
    *(160, 192, 224, 256, 320, 384, 448, 512, 640, 768, 896, 1024),
)
CHUNK_ROWS_PER_GPU = (256, 512, 768, 1024, 1536, 2048, 3072, 4096, 6144, 8192)
PREFILL_ROWS_PER_GPU = (1024, 2048, 4096, 8192, 16384)
"""Rows of a step in a pool that only prefills."""
DECODE_CHUNK_ROWS_PER_GPU = (256, 1024)
"""Rows for windows to replay in a pool that only decodes."""
CONTEXT_DEGREES = (1, 2, 4, 8)
MAX_NEXTN = 7


@dataclass
class Refusals:
    """Points that were not considered, counted by reason, each with an example."""

    counts: Counter[str] = field(default_factory=Counter)
    examples: dict[str, str] = field(default_factory=dict)

    def add(self, reason: str, example: str, count: int = 1) -> None:
        """Count refused points under a reason."""
        if count:
            self.counts[reason] += count
            self.examples.setdefault(reason, example)

    @property
    def total(self) -> int:
        """Refused points."""
        return sum(self.counts.values())


@dataclass(frozen=True)
class EngineKind:
    """One kind of engine: what its graph and its memory depend on, beside the settings in which points differ."""

    role: PoolRole
    layout: ParallelLayout
    replay: Replay

    def __str__(self) -> str:
        return str(self.layout) if self.role == "mixed" else f"{self.role} {self.layout}"


@dataclass(frozen=True)
class SearchSpace:
    """The dimensions of a search for one model on `gpus` accelerators of one kind.

    `replay` is not one of them: what bounded layers may skip of a prompt is a choice of accuracy, the user's.
    """

    model: ModelSpec
    gpus: int
    replay: Replay = "off"
    requests_per_gpu: tuple[int, ...] = REQUESTS_PER_GPU
    chunk_rows_per_gpu: tuple[int, ...] = CHUNK_ROWS_PER_GPU

    def nextn(self, refusals: Refusals) -> list[int]:
        """Draft lengths; those that the model's draft module cannot give are refused."""
        most = self.model.draft.max_drafts if self.model.draft else 0
        points = len(self.requests_per_gpu) * len(self.chunk_rows_per_gpu)
        for nextn in range(most + 1, MAX_NEXTN + 1):
            refusals.add(f"the draft module gives at most {most} drafts", f"nextn {nextn}", points)
        return list(range(min(most, MAX_NEXTN) + 1))

    def kinds(self, role: PoolRole, refusals: Refusals) -> Iterator[EngineKind]:
        """Kinds of engines for a pool.

        One that only decodes has no use for cp: its ranks would each read the whole KV of a replica.
        """
        for layout in self.layouts(refusals):
            if role != "decode" or layout.cp == 1:
                yield EngineKind(role, layout, self.replay)

    def layouts(self, refusals: Refusals) -> Iterator[ParallelLayout]:
        """One engine per step group: several engines side by side are replicas, not another layout.

        An engine whose groups would hold several copies of the experts is the same as smaller engines, so `ep` and
        `cp` determine the layout; one of them divides the other.
        """
        experts = max((x.ffn.num_experts for x in self.model.layers if isinstance(x.ffn, MoE)), default=1)
        points = len(self.requests_per_gpu) * len(self.chunk_rows_per_gpu)
        for ep in _degrees(min(self.gpus, experts), self.gpus):
            if experts % ep:
                refusals.add(f"{experts} experts do not divide evenly over ep", f"ep {ep}", points)
                continue
            for cp in CONTEXT_DEGREES:
                if max(ep, cp) > self.gpus:
                    continue
                try:
                    yield ParallelLayout.from_flags(ep=ep, cp=cp, dp=max(ep, cp) // cp)
                except UsageError:
                    refusals.add("of ep and cp one must divide the other", f"ep {ep} cp {cp}", points)


def _degrees(most: int, gpus: int) -> list[int]:
    """Expert-parallel degrees worth trying: divisors of the GPU count, and powers of two, up to `most`."""
    return [d for d in range(1, most + 1) if gpus % d == 0 or d & (d - 1) == 0]
