"""Operators: what a step is made of, and the work each one does for a given shape."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from typing import Literal

from deepinfer.graph.shape import StepShape
from deepinfer.hardware.spec import Precision
from deepinfer.numeric import Num

Stream = Literal["compute", "comm", "copy", "host"]
Pattern = Literal["all_to_all", "all_gather", "all_reduce"]


LOW_LATENCY_ROWS = 256.0
"""Rows of a rank up to which an exchange runs on low-latency kernels, which send every copy straight to its rank: what
DeepEP V1's README recommends them for."""


class OpKind(StrEnum):
    """Kinds of operators: a backend has one kernel, and a cost profile one set of parameters, for each."""

    GEMM = "gemm"
    GROUPED_GEMM = "grouped_gemm"
    ATTENTION_DECODE = "attention_decode"
    ATTENTION_PREFILL = "attention_prefill"
    SPARSE_ATTENTION_DECODE = "sparse_attention_decode"
    SPARSE_ATTENTION_PREFILL = "sparse_attention_prefill"
    INDEX_SCORE = "index_score"
    TOPK = "topk"
    ELEMENTWISE = "elementwise"
    GATHER = "gather"
    SAMPLE = "sample"
    DISPATCH = "dispatch"
    COMBINE = "combine"
    ALL_GATHER = "all_gather"
    ALL_REDUCE = "all_reduce"
    FUSED_MOE = "fused_moe"


@dataclass(frozen=True, slots=True)
class Message:
    """What one rank sends in a collective, bytes by link class, to `peers` ranks."""

    pattern: Pattern
    scale_up_bytes: Num
    scale_out_bytes: Num
    peers: int


@dataclass(frozen=True, slots=True)
class Work:
    """What one operator does on one rank in one step.

    `rows` is how many rows meet each weight matrix (per expert for grouped products): what a tensor core's
    efficiency depends on. `depth` is how many steps one tile of the work walks in series: the k of a product (of both
    products for routed experts), the context of an attention row. `activation_bytes` are activations that further
    kernels of the operator handle: those to quantise, queries of an index, what passes between the products of experts.
    Work without FLOPs, bytes and message costs nothing: the operator is not launched.
    """

    flops: Num = 0.0
    precision: Precision = "bf16"
    bytes_read: Num = 0.0
    bytes_written: Num = 0.0
    rows: Num = 1.0
    message: Message | None = None
    depth: Num = 0.0
    activation_bytes: Num = 0.0


@dataclass(frozen=True, eq=False)
class Operator:
    """One operator of an execution graph: reads `inputs`, writes `outputs` (named slots), runs on `stream`.

    Operators are compared by identity.
    """

    name: str
    kind: OpKind
    inputs: tuple[str, ...]
    outputs: tuple[str, ...]
    work: Callable[[StepShape], Work]
    stream: Stream = "compute"
