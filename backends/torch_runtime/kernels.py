"""The table of kernels: what a backend must be able to compute, as functions on tensors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from backends.torch_runtime.formats import Weight
from backends.torch_runtime.reference import attention, elementwise, gemm, sampling

Kernel = Callable[..., Tensor]


def as_stored(weight: Weight) -> Weight:
    """The weight itself."""
    return weight


@dataclass(frozen=True)
class KernelTable:
    """One function per kernel; each is described where its reference is (`backends.torch_runtime.reference`).

    The default of each is that reference, in plain torch on any device. A backend replaces those that it has better
    ones for: the same arguments, the same result up to rounding. `arranged` makes of each weight of a layer, once it is
    read, what the kernels take.
    """

    arranged: Callable[[Weight], Weight] = as_stored
    linear: Kernel = gemm.linear
    linear_fp32: Kernel = gemm.linear_fp32
    linear_grouped: Kernel = gemm.linear_grouped
    route: Callable[..., tuple[Tensor, Tensor]] = gemm.route
    sort_pairs: Callable[..., gemm.Pairs] = gemm.sort_pairs
    grouped_experts: Kernel = gemm.grouped_experts
    sum_pairs: Kernel = gemm.sum_pairs
    swiglu: Kernel = gemm.swiglu
    sparse_attention: Kernel = attention.sparse_attention
    index_scores: Kernel = attention.index_scores
    select_topk: Kernel = attention.select_topk
    candidate_blocks: Kernel = attention.candidate_blocks
    entry_records: Kernel = attention.entry_records
    hc_enter: Callable[..., tuple[Any, Tensor]] = elementwise.hc_enter
    hc_expand: Kernel = elementwise.hc_expand
    hc_leave: Callable[..., tuple[Tensor, Tensor]] = elementwise.hc_leave
    rms_norm: Kernel = elementwise.rms_norm
    rope: Kernel = elementwise.rope
    norm_rope_encode: Kernel = elementwise.norm_rope_encode
    scatter_records: Callable[..., None] = elementwise.scatter_records
    pool_pairs: Kernel = elementwise.pool_pairs
    engram_gate: Kernel = elementwise.engram_gate
    sample: Kernel = sampling.sample
