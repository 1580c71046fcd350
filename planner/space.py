"""The search space: which layouts and settings are tried, and why some are not."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Literal

from deepinfer.cost.model import load_profile
from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, drafts_in_graph
from deepinfer.graph.build.common import Phase
from deepinfer.graph.ops import OpKind
from deepinfer.hardware.spec import ClusterSpec
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import ExpertLoad
from deepinfer.layout.plan import PoolRole
from deepinfer.layout.sharding import check_sharding
from deepinfer.model.spec import ModelSpec, MoE

Replay = Literal["off", "compact"]
Overlap = Literal["none", "two-batch"]
MoEKernel = Literal["separate", "fused"]

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
COARSE_NEXTN = (0, 1, 3)
COARSE_CHUNK_ROWS = (512, 2048, 8192)
CONTEXT_DEGREES = (1, 2, 4, 8)
TENSOR_DEGREES = (2, 4, 8)
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
    overlap: Overlap = "none"
    moe: MoEKernel = "separate"
    kv_format: str | None = None

    def features(self, nextn: int, expert_load: ExpertLoad) -> GraphFeatures:
        """What the graph of its steps contains."""
        phase: Phase = "prefill" if self.role == "prefill" else "mixed"
        return GraphFeatures(phase, self.replay, nextn, self.overlap, self.moe, expert_load)

    def __str__(self) -> str:
        extras = [self.overlap] * (self.overlap != "none") + [f"{self.moe} experts"] * (self.moe != "separate")
        extras += [f"{self.kv_format} KV"] if self.kv_format else []
        return " ".join([*([self.role] if self.role != "mixed" else []), str(self.layout), *extras])


@dataclass(frozen=True)
class SearchSpace:
    """The dimensions of a search for one model on accelerators of one kind.

    `replay` is not one of them: what bounded layers may skip of a prompt is a choice of accuracy, the user's.
    """

    model: ModelSpec
    cluster: ClusterSpec
    replay: Replay = "off"
    requests_per_gpu: tuple[int, ...] = REQUESTS_PER_GPU
    chunk_rows_per_gpu: tuple[int, ...] = CHUNK_ROWS_PER_GPU

    @property
    def gpus(self) -> int:
        """Accelerators of the cluster."""
        return self.cluster.num_gpus

    def coarse(self) -> SearchSpace:
        """The same with fewer requests and chunks, to find the layouts that are worth a closer look."""
        return replace(self, requests_per_gpu=self.requests_per_gpu[::2], chunk_rows_per_gpu=COARSE_CHUNK_ROWS)

    def coarse_nextn(self, nextns: list[int]) -> list[int]:
        """Draft lengths for the first look: those that share the graph of one draft, else few."""
        drafting = [n for n in nextns if n and drafts_in_graph(self.model, n) == drafts_in_graph(self.model, 1)]
        return drafting if len(drafting) > 1 else [nextn for nextn in nextns if nextn in COARSE_NEXTN]

    def nextn(self, refusals: Refusals) -> list[int]:
        """Draft lengths; those that the model's draft module cannot give are refused."""
        most = self.model.draft.max_drafts if self.model.draft else 0
        for nextn in range(most + 1, MAX_NEXTN + 1):
            refusals.add(f"the draft module gives at most {most} drafts", f"nextn {nextn}")
        return list(range(min(most, MAX_NEXTN) + 1))

    def kinds(self, role: PoolRole, refusals: Refusals) -> Iterator[EngineKind]:
        """Kinds of engines for a pool, experts in one fused kernel where there is one.

        One that only decodes has no use for cp: its ranks would each read the whole KV of a replica.
        """
        for layout in self.layouts(refusals):
            if role != "decode" or layout.cp == 1:
                yield EngineKind(role, layout, self.replay, moe="fused" if self.can_fuse(layout) else "separate")

    def variants(self, kind: EngineKind) -> Iterator[EngineKind]:
        """What else an engine of this kind could do, one change at a time."""
        for kv_format in self.kv_formats():
            yield replace(kind, kv_format=kv_format)
        if kind.layout.exchanges_rows:
            yield replace(kind, overlap="two-batch", moe="separate")
            if kind.moe == "fused":
                yield replace(kind, moe="separate")
        if kind.layout.ep > 1:
            more = kind.layout.redundant_experts + kind.layout.ep
            yield replace(kind, layout=replace(kind.layout, redundant_experts=more))
        if kind.layout.tp > 1:
            shared = replace(kind.layout, dcp=kind.layout.tp)
            with contextlib.suppress(UsageError):
                check_sharding(self.model, shared)
                yield replace(kind, layout=shared)

    def kv_formats(self) -> list[str]:
        """KV formats smaller than what checkpoint and kernels ask for, in which the model can be served."""
        if self.model.family in self.cluster.accelerator.kv_format:
            return []
        own, names = self.model.kv_bytes_per_token, (f.name for f in self.model.kv_formats)
        return [name for name in names if self.model.with_kv(name).kv_bytes_per_token < own]

    def can_fuse(self, layout: ParallelLayout) -> bool:
        """Whether dispatch, experts and combine can be one kernel: MegaMoE multiplies FP8 rows with FP4 experts."""
        available = _has_fused_kernel(self.cluster.accelerator.family)
        inside = layout.expert_group <= self.cluster.domain
        return available and inside and layout.exchanges_rows and self.model.expert_format.name == "mxfp4"

    def layouts(self, refusals: Refusals) -> Iterator[ParallelLayout]:
        """One engine per step group: several engines side by side are replicas, not another layout.

        Attention is replicated (dp), or its rows (cp) or heads (tp) are shared out; experts are placed (ep), and sliced
        (etp) at most as heads are. Where experts do not divide over ep, as many redundant ones as it takes.
        """
        experts = max((x.ffn.num_experts for x in self.model.layers if isinstance(x.ffn, MoE)), default=1)
        for ep in _degrees(min(self.gpus, experts), self.gpus):
            for cp, tp, etp in _shares():
                group = max(ep * etp, cp * tp)
                if group > self.gpus:
                    continue
                try:
                    layout = ParallelLayout(
                        dp=max(group // (cp * tp), 1), cp=cp, tp=tp, ep=ep, etp=etp, redundant_experts=-experts % ep
                    )
                    check_sharding(self.model, layout)
                except UsageError as error:
                    refusals.add(str(error).partition(": ")[2], f"ep{ep} cp{cp} tp{tp} etp{etp}")
                    continue
                if tp * etp > 1 and max(tp, etp) > self.cluster.domain:
                    refusals.add("tp or etp would cross the scale-up domain", str(layout))
                    continue
                yield layout


@lru_cache(maxsize=16)
def _has_fused_kernel(family: str) -> bool:
    return any(name.startswith(OpKind.FUSED_MOE) for name in load_profile(family).operators)


def _shares() -> Iterator[tuple[int, int, int]]:
    """(cp, tp, etp) worth trying: rows or heads shared out, and with heads also the experts' widths."""
    for cp in CONTEXT_DEGREES:
        yield cp, 1, 1
    for tp in TENSOR_DEGREES:
        yield 1, tp, 1
        yield 1, tp, tp


def _degrees(most: int, gpus: int) -> list[int]:
    """Expert-parallel degrees worth trying: divisors of the GPU count, and powers of two, up to `most`."""
    return [d for d in range(1, most + 1) if gpus % d == 0 or d & (d - 1) == 0]
