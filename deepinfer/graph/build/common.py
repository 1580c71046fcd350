"""Pieces that every model family's graph is built from: products, expert layers, collectives, the head."""

from __future__ import annotations

import math
from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Literal

from deepinfer.errors import UsageError
from deepinfer.graph.ops import Message, Operator, OpKind, Pattern, Stream, Work
from deepinfer.graph.shape import Sequences, StepShape, View
from deepinfer.hardware.spec import ClusterSpec
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.spec import BF16, FP32, DenseFFN, LayerSpec, ModelSpec, MoE, WeightFormat
from deepinfer.numeric import Num, larger, smaller

Phase = Literal["prefill", "decode", "mixed"]
Replay = Literal["off", "compact"]
RowsOf = Callable[[StepShape], Num]
"""Rows of one rank that an operator computes."""

ACTIVATION_BYTES = 2.0  # BF16 between operators
FP8_ACTIVATION_BYTES = 1.0 + 1.0 / 32  # E4M3 with one UE8M0 scale per 32 (model card, activation_scheme)
PREFILL_GATHER_REUSE = 8.0
"""Neighbouring prompt rows select overlapping entries: a gathered entry serves this many rows from L2.
An assumption shared with the fit of `sparse_attention_prefill` (tools/fit_profiles.py)."""


@dataclass(frozen=True)
class GraphFeatures:
    """What the graph contains: the `phase`, prompt `replay` mode, and the drafts verified per request (`nextn`)."""

    phase: Phase = "mixed"
    replay: Replay = "off"
    nextn: int = 0


@dataclass(frozen=True)
class BuildContext:
    """Everything a builder may look at, and the parts of layers built so far."""

    model: ModelSpec
    layout: ParallelLayout
    cluster: ClusterSpec
    features: GraphFeatures
    _parts: dict[Hashable, tuple[Operator, ...]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        if self.layout.tp > 1 or self.layout.etp > 1:
            raise UsageError(f"layout {self.layout}: tp and etp above 1 are not modelled yet")

    def part(self, key: Hashable, build: Callable[[OperatorList], None]) -> tuple[Operator, ...]:
        """The operators that `build` makes, made once per key: alike parts of different layers have one cost."""
        if key not in self._parts:
            ops = OperatorList()
            build(ops)
            self._parts[key] = tuple(ops.operators)
        return self._parts[key]

    @property
    def cp(self) -> int:
        """Ranks that share the rows of one attention replica."""
        return self.layout.cp

    def rows(self, view: View) -> RowsOf:
        """Rows of the busiest rank under a view: a replica's rows are split over its cp ranks."""
        return lambda shape: self.split(view(shape).rows)

    def split(self, rows: Num) -> Num:
        """So many rows of a replica as the busiest of its cp ranks has them: with fewer rows than ranks, one."""
        return rows if self.layout.cp == 1 else larger(rows / self.layout.cp, smaller(rows, 1.0))

    def has(self, phase: Literal["prefill", "decode"]) -> bool:
        """Whether the graph contains the operators of a phase."""
        return self.features.phase in (phase, "mixed")

    def link_bytes(self, total: Num, group: int) -> tuple[Num, Num]:
        """Split bytes sent evenly over a contiguous group into (scale-up, scale-out); a rank's own share stays."""
        inside = min(group, self.cluster.domain)
        return total * ((inside - 1) / group), total * ((group - inside) / group)


def every_row(shape: StepShape) -> StepShape:
    """The view of a layer that computes all rows of a step."""
    return shape


def kept_rows(shape: StepShape) -> StepShape:
    """The view of a layer that computes only kept rows."""
    return shape.bounded


def layer_view(ctx: BuildContext, layer: LayerSpec) -> View:
    """How a layer of the model sees a step: bounded layers see only kept rows when prompts are compacted."""
    return kept_rows if layer.bounded and ctx.features.replay == "compact" else every_row


@dataclass
class OperatorList:
    """Collects the operators of one block in issue order."""

    prefix: str = ""
    operators: list[Operator] = field(default_factory=list)

    def add(
        self,
        name: str,
        kind: OpKind,
        flow: tuple[str, str],
        work: Callable[[StepShape], Work],
        key: Callable[[StepShape], object],
        stream: Stream = "compute",
    ) -> None:
        """Append an operator; `flow` is ("inputs separated by blanks", "outputs separated by blanks")."""
        inputs, outputs = (tuple(slots.split()) for slots in flow)
        self.operators.append(Operator(self.prefix + name, kind, inputs, outputs, work, key, stream))

    def gemm(
        self, name: str, flow: tuple[str, str], rows: RowsOf, k: int, n: int, fmt: WeightFormat, groups: int = 1
    ) -> None:
        """rows x k times k x n, `groups` times with weights of their own (block-diagonal when groups > 1)."""
        activation = ACTIVATION_BYTES if fmt.precision in ("bf16", "tf32") else FP8_ACTIVATION_BYTES

        def work(shape: StepShape) -> Work:
            m = rows(shape)
            launched = smaller(m, 1.0)  # no rows: the weights are not read either
            return Work(
                flops=2.0 * groups * k * n * m,
                precision=fmt.precision,
                bytes_read=groups * (k * m * activation + k * n * fmt.bytes_per_parameter * launched),
                bytes_written=groups * n * m * ACTIVATION_BYTES,
                rows=m,
            )

        self.add(name, OpKind.GEMM, flow, work, rows)

    def elementwise(
        self,
        name: str,
        flow: tuple[str, str],
        rows: RowsOf,
        row_bytes: tuple[float, float],
        tf32_parameters: int = 0,
    ) -> None:
        """A memory-bound operator: (read, written) bytes per row, and a small TF32 product with FP32 weights."""
        read, written = row_bytes

        def work(shape: StepShape) -> Work:
            m = rows(shape)
            weights = tf32_parameters * FP32.bytes_per_parameter * smaller(m, 1.0)
            return Work(2.0 * tf32_parameters * m, "tf32", read * m + weights, written * m, m)

        self.add(name, OpKind.ELEMENTWISE, flow, work, rows)

    def collective(
        self,
        name: str,
        kind: OpKind,
        flow: tuple[str, str],
        message: Callable[[StepShape], tuple[Num, Num]],
        key: Callable[[StepShape], object],
        peers: int,
        pattern: Pattern,
    ) -> None:
        """A collective on the communication stream; `message` gives (scale-up, scale-out) bytes of this rank."""

        def work(shape: StepShape) -> Work:
            up, out = message(shape)
            return Work(message=Message(pattern, up, out, peers))

        self.add(name, kind, flow, work, key, "comm")


def ffn_operators(ctx: BuildContext, ops: OperatorList, ffn: DenseFFN | MoE, view: View) -> None:
    """The feed-forward half of a layer, from slot `ffn_in` to slots `ffn_out` (and `shared_out`)."""
    hidden, dense = ctx.model.hidden_size, ctx.model.dense_format
    rows = ctx.rows(view)
    if isinstance(ffn, DenseFFN):
        ops.gemm("ffn_up", ("ffn_in", "ffn_mid"), rows, hidden, 2 * ffn.width, dense)
        ops.gemm("ffn_down", ("ffn_mid", "ffn_out"), rows, ffn.width, hidden, dense)
        return
    ops.gemm("router", ("ffn_in", "routing"), rows, hidden, ffn.num_experts, BF16)
    _exchange(ctx, ops, ffn, view, "dispatch")
    width = ffn.num_shared * ffn.width
    if width:
        # Issued between dispatch and the routed experts, so that it fills the time of the exchange.
        ops.gemm("shared_up", ("ffn_in", "shared_mid"), rows, hidden, 2 * width, dense)
        ops.gemm("shared_down", ("shared_mid", "shared_out"), rows, width, hidden, dense)
    ops.add(
        "experts",
        OpKind.GROUPED_GEMM,
        ("dispatched", "expert_out"),
        _expert_work(ctx, ffn, view),
        _expert_tokens(ctx, view),
    )
    _exchange(ctx, ops, ffn, view, "combine")


def _expert_tokens(ctx: BuildContext, view: View) -> RowsOf:
    """Tokens that a whole expert group sends to its experts."""
    cp, ep = ctx.cp, ctx.layout.ep
    return lambda shape: view(shape).expert_rows / cp * ep


def _expert_work(ctx: BuildContext, moe: MoE, view: View) -> Callable[[StepShape], Work]:
    """Gate, up, activation and down of the busiest rank's experts, one operator."""
    hidden, fmt, ep = ctx.model.hidden_size, ctx.model.expert_format, ctx.layout.ep
    local, tokens_of = moe.num_experts / ep, _expert_tokens(ctx, view)
    parameters = 3.0 * hidden * moe.width

    def work(shape: StepShape) -> Work:
        tokens = tokens_of(shape)
        expert_rows = tokens * moe.topk / ep * busiest_over_mean(tokens * moe.topk, ep)
        touched = local * (1.0 - (1.0 - moe.topk / moe.num_experts) ** tokens)
        return Work(
            flops=2.0 * parameters * expert_rows,
            precision=fmt.precision,
            bytes_read=touched * parameters * fmt.bytes_per_parameter + expert_rows * hidden * FP8_ACTIVATION_BYTES,
            bytes_written=expert_rows * hidden * ACTIVATION_BYTES,
            rows=expert_rows / larger(touched, 1e-9),
        )

    return work


def _exchange(ctx: BuildContext, ops: OperatorList, moe: MoE, view: View, name: Literal["dispatch", "combine"]) -> None:
    """Dispatch (FP8 rows to the ranks of their experts) or combine (BF16 results back)."""
    ep = ctx.layout.ep
    # Hash-routed layers know the experts from the token ids: only the results wait for the router's weights.
    chosen, weighed = ("ffn_in", "expert_out routing") if moe.hash_routed else ("ffn_in routing", "expert_out")
    flow = (chosen, "dispatched") if name == "dispatch" else (weighed, "ffn_out")
    if ep == 1:
        # All experts are local: the permutation is part of the grouped product.
        ops.elementwise(name, flow, ctx.rows(view), (0.0, 0.0))
        return
    copies, tokens_of = distinct_ranks(moe, ep), _expert_tokens(ctx, view)
    per_copy = ctx.model.hidden_size * (FP8_ACTIVATION_BYTES if name == "dispatch" else ACTIVATION_BYTES)

    def message(shape: StepShape) -> tuple[Num, Num]:
        # The collective ends with the busiest rank, which receives more than it sends.
        tokens = tokens_of(shape)
        total = tokens / ep * copies * per_copy * busiest_over_mean(tokens * moe.topk, ep)
        return ctx.link_bytes(total, ep)

    ops.collective(name, OpKind(name), flow, message, tokens_of, ep, "all_to_all")


def distinct_ranks(moe: MoE, ep: int) -> float:
    """Ranks that a token's top-k experts lie on, on average, with experts spread evenly and routing uniform."""
    local = moe.num_experts // ep
    missed = math.comb(moe.num_experts - local, moe.topk) / math.comb(moe.num_experts, moe.topk)
    return ep * (1.0 - missed)


def busiest_over_mean(choices: Num, ep: int) -> Num:
    """Load of the busiest of `ep` ranks over the mean when `choices` expert choices fall uniformly.

    Sampling noise only: a normal approximation of the largest of ep binomial counts, with Blom's quantile for the
    expected maximum. Skew of expert popularity comes on top of it.
    """
    if ep == 1:
        return 1.0
    largest = NormalDist().inv_cdf((ep - 0.375) / (ep + 0.25))
    mean = larger(choices / ep, 1e-9)
    # Never more than all choices on one rank.
    return smaller(1.0 + largest * ((1.0 - 1.0 / ep) / mean) ** 0.5, float(ep))


def gather_kv_operator(
    ctx: BuildContext, ops: OperatorList, name: str, view: View, entry_bytes: float, slot: str
) -> None:
    """All-gather of the new rows' KV over the cp ranks of a replica: every rank keeps the whole cache."""
    cp = ctx.cp
    if cp > 1:
        ops.collective(
            name,
            OpKind.ALL_GATHER,
            (slot, slot),
            lambda s: ctx.link_bytes(view(s).rows * entry_bytes, cp),
            lambda s: view(s).rows,
            cp,
            "all_gather",
        )


def head_operators(ctx: BuildContext, ops: OperatorList, rows: RowsOf, flow: tuple[str, str]) -> None:
    """LM head and sampling for `rows`, from a hidden slot to a token slot."""
    vocab, hidden = ctx.model.vocab_size, ctx.model.hidden_size
    source, target = flow
    ops.gemm("lm_head", (source, "logits"), rows, hidden, vocab, BF16)

    def work(shape: StepShape) -> Work:
        m = rows(shape)
        return Work(precision="bf16", bytes_read=m * vocab * 4.0, bytes_written=m * 8.0, rows=m)

    ops.add("sample", OpKind.SAMPLE, ("logits", target), work, rows)


def total(sequences: tuple[Sequences, ...], per_sequence: Callable[[Sequences], Num]) -> Num:
    """Sum of `per_sequence` over groups of sequences, each times its count."""
    return sum((s.count * per_sequence(s) for s in sequences), 0.0)


def decode_group(shape: StepShape) -> tuple[Sequences, ...]:
    """The decoding sequences as a tuple of none or one group."""
    return () if shape.decode is None else (shape.decode,)
