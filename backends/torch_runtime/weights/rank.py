"""What one rank holds of a model's weights, and how many bytes that is."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from backends.torch_runtime.formats import Weight, WeightStorage
from backends.torch_runtime.weights.schema import (
    Entry,
    all_layers,
    ends,
    layer_entries,
    prefix,
    stored,
    stored_bytes,
    supported,
)
from deepinfer.errors import UsageError
from deepinfer.model.spec import BF16, ModelSpec


@dataclass(frozen=True)
class RankPart:
    """A rank's share: contiguous equal parts of every layer's experts, and of the Engram tables' rows.

    Rows need not divide: all ranks but the last ones hold ceil(rows / engram_ranks). Raises UsageError for a rank
    outside its group.
    """

    ep_rank: int = 0
    ep: int = 1
    engram_rank: int = 0
    engram_ranks: int = 1

    def __post_init__(self) -> None:
        for name, rank, size in (("ep", self.ep_rank, self.ep), ("engram", self.engram_rank, self.engram_ranks)):
            if not 0 <= rank < size:
                raise UsageError(f"{name} rank {rank} is not one of {size}")

    def experts(self, num_experts: int) -> range:
        """Numbers of this rank's experts. Raises UsageError when they do not divide over the ranks."""
        if num_experts % self.ep:
            raise UsageError(f"{num_experts} experts do not divide evenly over ep {self.ep}")
        share = num_experts // self.ep
        return range(self.ep_rank * share, (self.ep_rank + 1) * share)

    def engram_rows(self, num_rows: int) -> range:
        """Numbers of this rank's rows of a table."""
        share = -(-num_rows // self.engram_ranks)
        return range(min(self.engram_rank * share, num_rows), min((self.engram_rank + 1) * share, num_rows))


WHOLE = RankPart()
"""The only rank."""


@dataclass(frozen=True, eq=False)
class ModelWeights:
    """A rank's weights. `layers[i]` are those of the layer with `LayerSpec.index` i: main layers, then draft layers.

    Keys of a layer are the released names below its prefix, without `.weight`; fused are "attn.wq_a_kv" (query latent
    over window key), "ffn.shared_experts.w13" and "ffn.experts.w13" (gate over up). Experts are stacked in front.
    """

    embed: Tensor
    norm: Tensor
    head: Tensor
    layers: tuple[Mapping[str, Weight], ...]

    @property
    def num_bytes(self) -> int:
        """Bytes of all weights."""
        weights = [
            *(Weight(t) for t in (self.embed, self.norm, self.head)),
            *(w for x in self.layers for w in x.values()),
        ]
        return sum(weight.num_bytes for weight in weights)


def local_shape(entry: Entry, part: RankPart) -> tuple[int, ...]:
    """Shape of the numbers that a rank holds of an entry."""
    if entry.placement == "expert":
        return (len(part.experts(entry.num_experts)), entry.rows, *entry.rest)
    rows = len(part.engram_rows(entry.rows)) if entry.placement == "engram" else entry.rows
    return (rows, *entry.rest)


def check_split(model: ModelSpec, part: RankPart) -> None:
    """Raise UsageError for an unsupported model, and for experts of any layer that do not divide."""
    for _, entry in model_entries(model):
        local_shape(entry, part)


def entry_dtype(entry: Entry, dtype: torch.dtype) -> torch.dtype:
    """The dtype of an entry's plain numbers when the runtime's is `dtype`."""
    return torch.float32 if entry.fp32 else dtype


def allocate(entry: Entry, part: RankPart, storage: WeightStorage, dtype: torch.dtype, device: torch.device) -> Weight:
    """An uninitialised weight for what a rank holds of an entry."""
    values, scale = stored(local_shape(entry, part), storage, entry_dtype(entry, dtype))
    return Weight(
        torch.empty(values[0], dtype=values[1], device=device),
        None if scale is None else torch.empty(scale[0], dtype=scale[1], device=device),
        storage,
    )


def of_expert(weight: Weight, place: int) -> Weight:
    """One expert of a stack, as a view."""
    return Weight(weight.data[place], None if weight.scale is None else weight.scale[place], weight.storage)


def assemble(
    model: ModelSpec, build: Callable[[Entry, str], Weight], arranged: Callable[[Weight], Weight]
) -> ModelWeights:
    """A rank's weights, each as `build` makes it of its entry and of what the entry's released names start with.

    Those of layers are `arranged` one by one: the memory of only one is taken twice.
    """
    embed, norm, head = (build(entry, "").data for entry in ends(model))
    layers = tuple(
        {entry.key: arranged(build(entry, prefix(model, layer))) for entry in layer_entries(model, layer)}
        for layer in all_layers(model)
    )
    return ModelWeights(embed, norm, head, layers)


def model_entries(model: ModelSpec) -> Iterator[tuple[str, Entry]]:
    """Every entry of a model, with what its released names start with. Raises UsageError for an unsupported model."""
    for entry in ends(supported(model)):
        yield "", entry
    for layer in all_layers(model):
        for entry in layer_entries(model, layer):
            yield prefix(model, layer), entry


def rank_bytes(
    model: ModelSpec,
    rank: RankPart = WHOLE,
    dtype: torch.dtype = torch.bfloat16,
    quantized: bool | None = None,
) -> dict[str, int]:
    """Bytes of a rank's weights by item of `deepinfer.model.parameters` ("norms": what is not counted there).

    `quantized` None: as the model's formats say. Nothing is read. Raises UsageError for an unsupported model and for
    experts that do not divide.
    """
    if quantized is None:
        quantized = model.dense_format != BF16
    total: Counter[str] = Counter()
    for _, entry in model_entries(model):
        storage = entry.storage if quantized else "plain"
        total[entry.item] += stored_bytes(local_shape(entry, rank), storage, entry_dtype(entry, dtype))
    return dict(total)
