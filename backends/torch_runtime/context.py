"""What an operator's code may look at beside its input slots: the model, the rank's state, and the step's rows."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor

from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.formats import BLOCK, Weight
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.rows import RowView, entry_places
from backends.torch_runtime.state import EngineState, compressed
from backends.torch_runtime.weights.rank import ModelWeights
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.numerics import EngramHash, Numerics
from deepinfer.model.spec import CompressedAttention, DraftSpec, LayerSpec, ModelSpec, MoE


@dataclass(frozen=True, eq=False)
class EngramTables:
    """The hash of n-grams on a device: the map of token ids, and per layer multipliers, moduli and head offsets."""

    hashing: EngramHash
    token_map: Tensor
    multipliers: Tensor
    primes: Tensor
    offsets: Tensor

    @classmethod
    def of(cls, hashing: EngramHash, token_map: Tensor, device: torch.device) -> EngramTables:
        """The constants of `hashing` on a device; `token_map` int64 [vocab] gives compressed ids."""
        primes = torch.from_numpy(hashing.primes())
        offsets = primes.cumsum(1) - primes
        multipliers = torch.from_numpy(hashing.multipliers())
        return cls(hashing, *(t.to(device) for t in (token_map, multipliers, primes, offsets)))


@dataclass(frozen=True, eq=False)
class RankContext:
    """One rank of an engine: everything that stays the same from step to step.

    `rotary` are (cos, sin) tables [positions, dim / 2] for layers with global KV (True) and without.
    """

    model: ModelSpec
    layout: ParallelLayout
    nextn: int
    weights: ModelWeights
    state: EngineState
    kernels: KernelTable
    comm: Communicator
    rotary: dict[bool, tuple[Tensor, Tensor]]
    engram: EngramTables | None
    dtype: torch.dtype

    @property
    def numerics(self) -> Numerics:
        """Constants of the model's arithmetic."""
        assert self.model.numerics is not None
        return self.model.numerics

    @property
    def draft(self) -> DraftSpec:
        """The draft module of an engine that drafts."""
        assert self.model.draft is not None
        return self.model.draft

    @cached_property
    def head(self) -> Weight:
        """The LM head, which the draft module shares."""
        return Weight(self.weights.head)

    @property
    def draft_heads(self) -> Mapping[str, Weight]:
        """Weights of the last draft layer, among which are the draft module's norm and heads."""
        return self.draft_weights(len(self.draft.layers) - 1)

    def draft_weights(self, place: int) -> Mapping[str, Weight]:
        """Weights of a draft layer; the first one's include what projects features."""
        return self.weights.layers[len(self.model.layers) + place]

    @cached_property
    def draft_wkv(self) -> tuple[Weight, ...]:
        """Window key projections of the draft layers on their own, which read the target's features."""
        return tuple(_rows_from(self.draft_weights(i)["attn.wq_a_kv"], a) for i, a in enumerate(self._draft_latents))

    @property
    def _draft_latents(self) -> list[int]:
        return [compressed(layer).q_lora_rank for layer in self.draft.layers]

    def layer(self, index: int) -> LayerSpec:
        """A layer of the model or, behind those, of its draft module."""
        layers = self.model.layers
        return layers[index] if index < len(layers) else self.draft.layers[index - len(layers)]


@dataclass(frozen=True, eq=False)
class Gathering:
    """How prompt rows of a replica come together: how many each cp rank has, and their order behind one another."""

    sizes: list[int]
    order: Tensor


@dataclass(eq=False)
class StepContext:
    """One step: its rows as layers see them, and what operators leave for later ones outside the graph's slots.

    `token_ids` int32 [m] and `ngrams` [m, n] are each local row's token, and it with those before it (-1: none).
    `decode_slots` and `first_slots` are slots of this rank's decoding requests and of those whose prompt ends here,
    with their last row at `first_pos`; `logit_of_kept` are the rows that give tokens (None: all). `kept_of_every` are
    the rows of bounded layers (None: all). `run_first` is where each row's run of neighbours on this rank begins, if
    that is not where its request's rows do. No row of the step is at `max_context` or behind it. With `equal_exchange`
    all ranks of the expert group have as many rows, and nothing is asked of the host. `logprobs` is how many
    log-probabilities of every row are wanted beside that of its token, if any.
    """

    rank: RankContext
    token_ids: Tensor
    ngrams: Tensor | None
    every: RowView
    kept: RowView
    kept_of_every: Tensor | None
    logit_of_kept: Tensor | None
    decode_slots: Tensor
    first_slots: Tensor
    first_pos: Tensor
    max_context: int
    run_first: Tensor | None = None
    gather_every: Gathering | None = None
    gather_kept: Gathering | None = None
    equal_exchange: bool = False
    logprobs: int | None = None
    drafting: RowView | None = None
    draft_slots: Tensor | None = None
    features: list[Tensor] = field(default_factory=list)
    selected: dict[str, Tensor] = field(default_factory=dict)
    outputs: dict[str, Tensor] = field(default_factory=dict)
    _places: dict[int, Tensor] = field(default_factory=dict)

    def gathered(self, x: Tensor, kept: bool) -> Tensor:
        """Rows of this rank's decoding requests, then prompt rows of the whole replica, given this rank's rows."""
        gathering = self.gather_kept if kept else self.gather_every
        if gathering is None:
            return x
        own = (self.kept if kept else self.every).num_decode
        prompts = self.rank.comm.all_gather_rows(x[own:].contiguous(), gathering.sizes)[gathering.order]
        return torch.cat((x[:own], prompts))

    def every_entry_places(self, ratio: int) -> Tensor:
        """`entry_places` of the rows whose records this rank gets; the same in all layers of a ratio."""
        if ratio not in self._places:
            self._places[ratio] = entry_places(self.rank.state, self.every.buffer, ratio)
        return self._places[ratio]


@dataclass(frozen=True, eq=False)
class Call:
    """One operator of a layer in a step (`layer` None: outside of layers)."""

    step: StepContext
    layer: LayerSpec | None
    position: int = 0

    @property
    def rank(self) -> RankContext:
        """The rank that computes."""
        return self.step.rank

    @property
    def kernels(self) -> KernelTable:
        """The backend's kernels."""
        return self.step.rank.kernels

    @property
    def spec(self) -> LayerSpec:
        """The layer, of an operator in one."""
        assert self.layer is not None
        return self.layer

    @property
    def attention(self) -> CompressedAttention:
        """The layer's attention."""
        return compressed(self.spec)

    @property
    def moe(self) -> MoE:
        """The layer's experts."""
        assert isinstance(self.spec.ffn, MoE)
        return self.spec.ffn

    @property
    def weights(self) -> Mapping[str, Weight]:
        """The layer's weights."""
        return self.rank.weights.layers[self.spec.index]

    @property
    def is_draft(self) -> bool:
        """Whether the layer belongs to the draft module."""
        return self.spec.index >= len(self.rank.model.layers)

    @property
    def view(self) -> RowView:
        """The rows that the layer computes."""
        if self.is_draft:
            assert self.step.drafting is not None
            return self.step.drafting
        return self.step.kept if self.spec.bounded else self.step.every

    @property
    def rotary(self) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the layer's rows: layers with global KV turn with other frequencies."""
        return self.view.rotary[self.attention.ratio > 0]

    def narrowed(self, x: Tensor) -> Tensor:
        """`x` of the rows that this layer computes, given it of those or of every row."""
        index = self.step.kept_of_every
        if index is None or self.is_draft or not self.spec.bounded or x.shape[0] == len(self.step.kept):
            return x
        return x[index]


def rope_table(rank_model: ModelSpec, positions: int, device: torch.device) -> dict[bool, tuple[Tensor, Tensor]]:
    """(cos, sin) FP32 [positions, dim / 2] for layers with global KV (True) and without; angles in FP64."""
    numerics = rank_model.numerics
    assert numerics is not None
    tables = {}
    for kind, rotary in ((True, numerics.rotary_global), (False, numerics.rotary)):
        angles = torch.arange(positions, dtype=torch.float64)[:, None] * torch.from_numpy(rotary.frequencies())
        tables[kind] = (angles.cos().float().to(device), angles.sin().float().to(device))
    return tables


def _rows_from(weight: Weight, first: int) -> Weight:
    if weight.scale is None:
        return Weight(weight.data[first:], None, weight.storage)
    return Weight(weight.data[first:], weight.scale[first // BLOCK :], weight.storage)
