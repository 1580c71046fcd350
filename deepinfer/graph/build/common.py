"""Pieces that every model family's graph is built from: the context, products, collectives, the head."""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Literal

from deepinfer.graph.ops import Message, Operator, OpKind, Pattern, Stream, Work
from deepinfer.graph.shape import Sequences, StepShape, View
from deepinfer.hardware.spec import ClusterSpec, Precision
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.layout.sharding import check_sharding
from deepinfer.model.spec import BF16, FP32, LayerSpec, ModelSpec, WeightFormat
from deepinfer.numeric import Num, larger, smaller

Phase = Literal["prefill", "decode", "mixed"]
Replay = Literal["off", "compact"]
RowsOf = Callable[[StepShape], Num]
"""Rows of one rank that an operator computes."""

ACTIVATION_BYTES = 2.0  # BF16 between operators
LOGIT_BYTES = 4.0  # sampling works on FP32
FP8_ACTIVATION_BYTES = 1.0 + 1.0 / 32  # E4M3 with one UE8M0 scale per 32 (model card, activation_scheme)
PREFILL_GATHER_REUSE = 8.0
"""Neighbouring prompt rows select overlapping entries: a gathered entry serves this many rows from L2.
An assumption shared with the fit of `sparse_attention_prefill` (tools/fit_profiles.py)."""

SPARSE_HEADS = 64
"""Sparse kernels compute so many heads at least (FlashMLA README: h_q is 64 or 128); V4's decode has one of its own."""


@dataclass(frozen=True)
class GraphFeatures:
    """What the graph contains: the `phase`, prompt `replay` mode, and the drafts verified per request (`nextn`).

    `overlap` and `moe` are transformations of it (`deepinfer.graph.transform`); `expert_load` is how evenly its experts
    are used.
    """

    phase: Phase = "mixed"
    replay: Replay = "off"
    nextn: int = 0
    overlap: Literal["none", "two-batch"] = "none"
    moe: Literal["separate", "fused"] = "separate"
    expert_load: ExpertLoad = TYPICAL_LOAD


@dataclass(frozen=True)
class BuildContext:
    """Everything a builder may look at, and the parts of layers built so far."""

    model: ModelSpec
    layout: ParallelLayout
    cluster: ClusterSpec
    features: GraphFeatures
    _parts: dict[Hashable, tuple[Operator, ...]] = field(default_factory=dict, compare=False)

    def __post_init__(self) -> None:
        check_sharding(self.model, self.layout)

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
        return _busiest_share(rows, self.layout.cp)

    def routed_rows(self, view: View) -> RowsOf:
        """Rows of the busiest rank in expert layers: the tp ranks may divide theirs among themselves."""
        if not self.layout.scatters_rows:
            return self.rows(view)
        return lambda shape: _busiest_share(view(shape).rows, self.layout.cp * self.layout.tp)

    def heads(self, num_heads: int) -> int:
        """Heads (or groups of them) of one tp rank."""
        return num_heads // self.layout.tp

    def has(self, phase: Literal["prefill", "decode"]) -> bool:
        """Whether the graph contains the operators of a phase."""
        return self.features.phase in (phase, "mixed")

    def link_bytes(self, total: Num, group: int) -> tuple[Num, Num]:
        """Split bytes sent evenly over a contiguous group into (scale-up, scale-out); a rank's own share stays."""
        inside = min(group, self.cluster.domain)
        return total * ((inside - 1) / group), total * ((group - inside) / group)

    def ring_bytes(self, total: Num, group: int) -> tuple[Num, Num]:
        """(scale-up, scale-out) bytes of a rank in one pass of a collective over `total` bytes of a contiguous group.

        Domains work first within and then across: each rank carries its share of the domain's part over the network.
        """
        inside = min(group, self.cluster.domain)
        return total * ((inside - 1) / inside), total * ((group - inside) / (group * inside))


def _busiest_share(rows: Num, ranks: int) -> Num:
    return rows if ranks == 1 else larger(rows / ranks, smaller(rows, 1.0))


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
        stream: Stream = "compute",
    ) -> None:
        """Append an operator; `flow` is ("inputs separated by blanks", "outputs separated by blanks")."""
        inputs, outputs = (tuple(slots.split()) for slots in flow)
        self.operators.append(Operator(self.prefix + name, kind, inputs, outputs, work, stream))

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
                depth=k,
                activation_bytes=groups * k * m * activation,
            )

        self.add(name, OpKind.GEMM, flow, work)

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

        self.add(name, OpKind.ELEMENTWISE, flow, work)

    def collective(
        self,
        name: str,
        kind: OpKind,
        flow: tuple[str, str],
        message: Callable[[StepShape], tuple[Num, Num]],
        peers: int,
        pattern: Pattern,
    ) -> None:
        """A collective on the communication stream; `message` gives (scale-up, scale-out) bytes of this rank."""

        def work(shape: StepShape) -> Work:
            up, out = message(shape)
            return Work(message=Message(pattern, up, out, peers))

        self.add(name, kind, flow, work, "comm")


def all_reduce_operator(
    ctx: BuildContext, ops: OperatorList, name: str, flow: tuple[str, str], rows: RowsOf, passes: int = 2
) -> None:
    """Sum of the tp ranks' partial results of `rows` hidden rows; none without tensor parallelism.

    An all-reduce moves its bytes twice; with one of its `passes` it is a reduce-scatter.
    """
    tp, row_bytes = ctx.layout.tp, ctx.model.hidden_size * ACTIVATION_BYTES
    if tp > 1:
        ops.collective(
            name,
            OpKind.ALL_REDUCE,
            flow,
            lambda s: ctx.ring_bytes(passes * rows(s) * row_bytes, tp),
            tp,
            "all_reduce",
        )


def gather_kv_operator(
    ctx: BuildContext, ops: OperatorList, name: str, view: View, entry_bytes: float, slot: str
) -> None:
    """All-gather of the prompts' KV over the cp ranks of a replica, which divide their rows among themselves.

    A decoding request is one rank's: the others have no use for its rows' KV.
    """
    cp = ctx.cp
    if cp > 1:
        ops.collective(
            name,
            OpKind.ALL_GATHER,
            (slot, slot),
            lambda s: ctx.link_bytes(view(s).prompt_rows * entry_bytes, cp),
            cp,
            "all_gather",
        )


def head_operators(ctx: BuildContext, ops: OperatorList, rows: RowsOf, flow: tuple[str, str]) -> None:
    """LM head and sampling for `rows`, from a hidden slot to a token slot."""
    source, target = flow
    logits_operators(ctx, ops, rows, source, "logits")

    def work(shape: StepShape) -> Work:
        m = rows(shape)
        read = m * ctx.model.vocab_size * LOGIT_BYTES
        return Work(precision="bf16", bytes_read=read, bytes_written=m * 8.0, rows=m)

    ops.add("sample", OpKind.SAMPLE, ("logits", target), work)


def logits_operators(ctx: BuildContext, ops: OperatorList, rows: RowsOf, source: str, target: str) -> None:
    """LM head for `rows`, its vocabulary split over tp, and the gathering of its parts."""
    vocab, hidden, tp = ctx.model.vocab_size, ctx.model.hidden_size, ctx.layout.tp
    ops.gemm("lm_head", (source, target), rows, hidden, -(-vocab // tp), BF16)
    if tp > 1:
        ops.collective(
            "gather_logits",
            OpKind.ALL_GATHER,
            (target, target),
            lambda s: ctx.ring_bytes(rows(s) * vocab * ACTIVATION_BYTES, tp),
            tp,
            "all_gather",
        )


def total(sequences: tuple[Sequences, ...], per_sequence: Callable[[Sequences], Num]) -> Num:
    """Sum of `per_sequence` over groups of sequences, each times its count."""
    return sum((s.count * per_sequence(s) for s in sequences), 0.0)


def cache_precision(bytes_per_number: float) -> Precision:
    """Queries meet what is cached in its precision: FP4 with scales, 8 bits with or without scales, or BF16."""
    if bytes_per_number < 1.0:
        return "fp4"
    return "fp8" if bytes_per_number < 2.0 else "bf16"


def decode_group(shape: StepShape) -> tuple[Sequences, ...]:
    """The decoding sequences as a tuple of none or one group."""
    return () if shape.decode is None else (shape.decode,)
