"""Which tensors a DeepSeek-V4.1 checkpoint holds, under which names, and which weights the runtime makes of them.

Names, shapes and data types are those of the released shards (header audits of deepseek-ai/DeepSeek-V4.1-Flash: 96,085
tensors of 510,286,023,000 bytes). A matrix `x` is released as `x.weight`, with `x.scale` when it is quantised; a few
vectors are released bare. All plain tensors take the runtime's dtype, except those that stay FP32: mHC maps, attention
sinks and the router's selection bias.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

import torch

from backends.torch_runtime.formats import BLOCK, WeightStorage
from deepinfer.errors import UsageError
from deepinfer.model.spec import CompressedAttention, DraftSpec, Engram, LayerSpec, ModelSpec, MoE

FAMILY = "deepseek-v4.1"
SKIPPED_PREFIXES = ("vision.", "aligner.", "image_")
"""Tensors of the vision tower: text needs none of them."""
SKIPPED_SUFFIX = "ffn.gate.bias_vl"
"""The selection bias of image tokens."""

Placement = Literal["replicated", "expert", "engram"]


@dataclass(frozen=True)
class Part:
    """A released tensor: its name without `.weight` and its rows."""

    name: str
    rows: int


@dataclass(frozen=True)
class Entry:
    """One weight of the runtime: released `parts` of the same trailing shape `rest`, one below the other.

    `storage` is that of a quantised checkpoint. Routed experts have one such stack each, and `{}` for their number in
    the names of their parts. `item` names the group of parameters in `deepinfer.model.parameters` that counts it;
    "norms" are counted nowhere.
    """

    key: str
    item: str
    parts: tuple[Part, ...]
    rest: tuple[int, ...] = ()
    storage: WeightStorage = "plain"
    placement: Placement = "replicated"
    num_experts: int = 0
    fp32: bool = False
    bare: bool = False

    def __post_init__(self) -> None:
        rows_align = self.storage == "fp8_block" and len(self.parts) > 1
        columns_align = self.storage in ("fp8_rows", "mxfp4")
        for name, size in [(p.name, p.rows) for p in self.parts if rows_align] + [
            (self.key, size) for size in self.rest if columns_align
        ]:
            if size % BLOCK:
                raise UsageError(f"weight {name}: {size} is not a multiple of {BLOCK}, whose values share a scale")

    @property
    def rows(self) -> int:
        """Rows of all parts."""
        return sum(part.rows for part in self.parts)


@dataclass(frozen=True)
class Released:
    """A tensor of a checkpoint: its name, shape, and the data types (torch's names) that it may have."""

    name: str
    shape: tuple[int, ...]
    dtypes: tuple[str, ...]


PLAIN_DTYPES = ("bfloat16", "float16", "float32")
_DTYPES: dict[torch.dtype, tuple[str, ...]] = {
    torch.float8_e4m3fn: ("float8_e4m3fn",),
    torch.uint8: ("int8", "uint8"),
}
_SCALE_DTYPES = ("float8_e8m0fnu", "uint8")

Stored = tuple[tuple[int, ...], torch.dtype]


def stored(shape: tuple[int, ...], storage: WeightStorage, dtype: torch.dtype) -> tuple[Stored, Stored | None]:
    """Shape and dtype of the values and of the scales that keep a weight `shape` [..., n, k] (see `formats.Weight`)."""
    if storage == "plain":
        return (shape, dtype), None
    *rest, n, k = shape
    columns = -(-k // BLOCK)
    if storage == "fp8_block":
        return (shape, torch.float8_e4m3fn), ((*rest, -(-n // BLOCK), columns), torch.uint8)
    if storage == "fp8_rows":
        return (shape, torch.float8_e4m3fn), ((*rest, n, columns), torch.uint8)
    return ((*rest, n, k // 2), torch.uint8), ((*rest, n, columns), torch.uint8)


def stored_bytes(shape: tuple[int, ...], storage: WeightStorage, dtype: torch.dtype) -> int:
    """Bytes of a stored weight, scales included."""
    return sum(torch.Size(s).numel() * t.itemsize for s, t in filter(None, stored(shape, storage, dtype)))


def supported(model: ModelSpec) -> ModelSpec:
    """The model itself. Raises UsageError when the runtime has no weights for its family or formats."""
    if model.family != FAMILY:
        raise UsageError(f"model {model.name}: the runtime loads weights of {FAMILY} and not of {model.family}")
    formats = (model.dense_format.name, model.expert_format.name)
    if formats not in (("fp8 32x32 ue8m0", "mxfp4"), ("bf16", "bf16")):
        raise UsageError(
            f"model {model.name}: dense weights in {formats[0]} and experts in {formats[1]} are not supported; "
            "supported are fp8 32x32 ue8m0 with mxfp4, and bf16"
        )
    return model


def all_layers(model: ModelSpec) -> tuple[LayerSpec, ...]:
    """Main layers, then draft layers."""
    return model.layers + (model.draft.layers if model.draft else ())


def prefix(model: ModelSpec, layer: LayerSpec) -> str:
    """What the released names of a layer start with."""
    main = len(model.layers)
    return f"layers.{layer.index}." if layer.index < main else f"mtp.{layer.index - main}."


def ends(model: ModelSpec) -> tuple[Entry, Entry, Entry]:
    """Embedding, final norm and LM head."""
    vocab, hidden = model.vocab_size, model.hidden_size
    return (
        _matrix("embed", "embedding", vocab, hidden),
        _vector("norm", hidden),
        _matrix("head", "lm_head", vocab, hidden),
    )


def layer_entries(model: ModelSpec, layer: LayerSpec) -> tuple[Entry, ...]:
    """The weights of a layer; `key` is the runtime's name of each."""
    attention, moe = layer.attention, layer.ffn
    if not isinstance(attention, CompressedAttention) or not isinstance(moe, MoE):
        raise UsageError(f"model {model.name}: layer {layer.index} is no layer of {FAMILY}")
    hidden = model.hidden_size
    entries = [*_attention(attention, hidden), *_experts(moe, hidden), *_hyper_connections(model)]
    if layer.engram is not None:
        entries += _engram(layer.engram, hidden, model.hc_mult)
    if model.draft is not None and layer.index >= len(model.layers):
        entries += _draft(model, model.draft, layer.index - len(model.layers))
    return tuple(entries)


def released(entry: Entry, start: str, quantized: bool) -> Iterator[Released]:
    """The tensors of a checkpoint that an entry is made of; `start` is what their names start with."""
    numbers = range(entry.num_experts) if entry.num_experts else range(1)
    storage = entry.storage if quantized else "plain"
    for number in numbers:
        for part in entry.parts:
            values, scale = stored((part.rows, *entry.rest), storage, torch.float32)
            name = start + part.name.format(number)
            yield Released(name if entry.bare else name + ".weight", values[0], _DTYPES.get(values[1], PLAIN_DTYPES))
            if scale is not None:
                yield Released(name + ".scale", scale[0], _SCALE_DTYPES)


def _matrix(key: str, item: str, rows: int, columns: int, storage: WeightStorage = "plain") -> Entry:
    return Entry(key, item, (Part(key, rows),), (columns,), storage)


def _vector(key: str, size: int, fp32: bool = False, bare: bool = False) -> Entry:
    return Entry(key, "norms", (Part(key, size),), fp32=fp32, bare=bare)


def _attention(a: CompressedAttention, hidden: int) -> Iterator[Entry]:
    q_dim, o_dim = a.num_heads * a.head_dim, a.o_groups * a.o_lora_rank
    # Both read the layer's input: one product makes the latent query and the window key.
    both = (Part("attn.wq_a", a.q_lora_rank), Part("attn.wkv", a.head_dim))
    yield Entry("attn.wq_a_kv", "attention", both, (hidden,), "fp8_block")
    yield _matrix("attn.wq_b", "attention", q_dim, a.q_lora_rank, "fp8_block")
    yield _matrix("attn.wo_a", "attention", o_dim, q_dim // a.o_groups, "fp8_block")
    yield _matrix("attn.wo_b", "attention", hidden, o_dim, "fp8_block")
    yield _vector("attn_norm", hidden)
    yield _vector("attn.q_norm", a.q_lora_rank)
    yield _vector("attn.kv_norm", a.head_dim)
    yield _vector("attn.attn_sink", a.num_heads, fp32=True, bare=True)
    if a.owns_kv:
        yield _matrix("attn.compressor.wkv", "compressor", a.head_dim, hidden)
        if a.ratio > 1:
            yield _matrix("attn.compressor.wgate", "compressor", a.head_dim, hidden)
        yield _vector("attn.compressor.norm", a.head_dim)
    if a.runs_indexer:
        yield _matrix("attn.indexer.wq_b", "index_queries", a.index_heads * a.index_dim, a.q_lora_rank, "fp8_block")
        yield _matrix("attn.indexer.weights_proj", "index_weights", a.index_heads, hidden)
        if a.owns_kv:
            yield _matrix("attn.indexer.wk", "index_keys", a.index_dim, a.head_dim)
            yield _vector("attn.indexer.k_norm", a.index_dim)


def _experts(moe: MoE, hidden: int) -> Iterator[Entry]:
    width, shared = moe.width, moe.num_shared * moe.width
    yield _vector("ffn_norm", hidden)
    yield _matrix("ffn.gate", "router", moe.num_experts, hidden)
    yield _vector("ffn.gate.bias", moe.num_experts, fp32=True, bare=True)
    gate_up = (Part("ffn.experts.{}.w1", width), Part("ffn.experts.{}.w3", width))
    down = (Part("ffn.experts.{}.w2", hidden),)
    yield Entry("ffn.experts.w13", "experts", gate_up, (hidden,), "mxfp4", "expert", moe.num_experts)
    yield Entry("ffn.experts.w2", "experts", down, (width,), "mxfp4", "expert", moe.num_experts)
    if shared:
        both = (Part("ffn.shared_experts.w1", shared), Part("ffn.shared_experts.w3", shared))
        yield Entry("ffn.shared_experts.w13", "shared_experts", both, (hidden,), "fp8_block")
        yield _matrix("ffn.shared_experts.w2", "shared_experts", hidden, shared, "fp8_block")


def _hyper_connections(model: ModelSpec) -> Iterator[Entry]:
    streams = model.hc_mult
    width = streams * (2 + streams)
    for site in ("hc_attn", "hc_ffn"):
        maps = (Part(f"{site}_fn", width),)
        yield Entry(f"{site}_fn", "hyper_connections", maps, (streams * model.hidden_size,), fp32=True, bare=True)
        yield _vector(f"{site}_base", width, fp32=True, bare=True)
        yield _vector(f"{site}_scale", 3, fp32=True, bare=True)


def _engram(engram: Engram, hidden: int, streams: int) -> Iterator[Entry]:
    table = (Part("engram.embed", engram.num_rows),)
    yield Entry("engram.embed", "engram_table", table, (engram.row_dim,), "fp8_rows", "engram")
    gathered = engram.rows_per_token * engram.row_dim
    yield _matrix("engram.wkv", "engram_projection", (streams + 1) * hidden, gathered, "fp8_block")
    for key in ("engram.q_weight", "engram.k_weight"):
        yield Entry(key, "norms", (Part(key, streams),), (hidden,), bare=True)


def _draft(model: ModelSpec, draft: DraftSpec, stage: int) -> Iterator[Entry]:
    """What only the first and only the last draft layer have."""
    hidden, rank = model.hidden_size, draft.markov_rank
    if stage == 0:
        yield _matrix("main_proj", "draft_projection", hidden, len(draft.target_layers) * hidden, "fp8_block")
        yield _vector("main_norm", hidden)
    if stage == len(draft.layers) - 1:
        yield _vector("norm", hidden)
        yield _matrix("markov_head.embed", "markov_head", model.vocab_size, rank)
        yield _matrix("markov_head.head", "markov_head", model.vocab_size, rank)
        yield _matrix("confidence_head.proj", "confidence_head", 1, hidden + rank)
