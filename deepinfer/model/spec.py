"""What a model is, as the engine needs to know it: `ModelSpec` and its parts.

All of it is read from the model's Hugging Face `config.json` (see `deepinfer.model.hf`); nothing here is tuned.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Literal

from deepinfer.errors import UsageError
from deepinfer.model.numerics import Numerics


@dataclass(frozen=True)
class WeightFormat:
    """A storage format of weights: `bytes_per_parameter` includes the scales; products run at `precision`.

    "fp8" stands for every 8-bit product: parts without FP8 run them as INT8.
    """

    name: str
    precision: Literal["fp4", "fp8", "bf16", "tf32"]
    bytes_per_parameter: float


BF16 = WeightFormat("bf16", "bf16", 2.0)
FP32 = WeightFormat("fp32", "tf32", 4.0)
FP8_BLOCK_32 = WeightFormat("fp8 32x32 ue8m0", "fp8", 1.0 + 1.0 / (32 * 32))
FP8_BLOCK_128 = WeightFormat("fp8 128x128 fp32", "fp8", 1.0 + 4.0 / (128 * 128))
# FP4 weights meet FP8 activations, so their products run at the FP8 rate (model card, quantization_config).
MXFP4 = WeightFormat("mxfp4", "fp8", 0.5 + 1.0 / 32)
# E2M1 with one E4M3 scale per 16, in NVIDIA's checkpoints; activations are quantised alike.
NVFP4 = WeightFormat("nvfp4", "fp4", 0.5 + 1.0 / 16)
# One byte a weight and a scale per output channel, which is nothing beside thousands of weights.
INT8 = WeightFormat("int8", "fp8", 1.0)
# Groups of 32 with a BF16 scale; activations stay BF16 (Kimi-K2-Thinking's config, compressed-tensors W4A16).
INT4 = WeightFormat("int4", "bf16", 0.5 + 2.0 / 32)
_CONVERTIBLE = {INT8.name: INT8}


class Role(StrEnum):
    """What a layer does about the global KV (V4.1 report; config `compress_ratios`, `*_source_layer_ids`).

    V4's layers are FULL, each with KV of its own, or WINDOW.
    """

    WINDOW = "window-only"
    FULL = "full"
    REUSE = "reuse"
    REINDEX = "reindex"


@dataclass(frozen=True)
class Indexer:
    """DeepSeek sparse attention: `num_heads` index queries of `dim` score every cached token; `topk` are attended."""

    num_heads: int
    dim: int
    topk: int


@dataclass(frozen=True)
class GroupedQueryAttention:
    """Attention whose `num_heads` queries share `num_kv_heads` keys and values of `head_dim`."""

    num_heads: int
    num_kv_heads: int
    head_dim: int


@dataclass(frozen=True)
class LatentAttention:
    """Multi-head latent attention of DeepSeek-V3: one latent of `kv_lora_rank + rope_dim` per token and layer.

    With an `indexer` (V3.2) a row attends to the tokens that it selects, without one to all.
    """

    num_heads: int
    q_lora_rank: int
    kv_lora_rank: int
    nope_dim: int
    rope_dim: int
    v_dim: int
    indexer: Indexer | None = None


@dataclass(frozen=True)
class CompressedAttention:
    """Shared-KV attention of DeepSeek-V4 and V4.1: a sliding window plus the top-k of a compressed global KV.

    `ratio` tokens form one global entry (0: no global branch). `kv_owner` is the layer whose global KV and index
    keys are read; `index_limit` caps the entries its indexer scans (None: all visible ones). `topk` None: a row
    attends to every visible entry and there is no indexer (V4's HCA). With `overlap` an entry pools 2 x `ratio`
    tokens and each token is projected twice (V4's CSA); with `index_compressor` index keys are pooled from the layer's
    input like the entries, instead of projected from them.
    """

    num_heads: int
    head_dim: int
    rope_dim: int
    q_lora_rank: int
    o_groups: int
    o_lora_rank: int
    window: int
    role: Role
    ratio: int
    topk: int | None
    kv_owner: int | None
    index_heads: int
    index_dim: int
    index_limit: int | None
    overlap: bool = False
    index_compressor: bool = False

    @property
    def owns_kv(self) -> bool:
        """Whether this layer writes global KV and index keys."""
        return self.role is Role.FULL

    @property
    def runs_indexer(self) -> bool:
        """Whether this layer scores index keys itself."""
        return self.role in (Role.FULL, Role.REINDEX) and self.topk is not None

    @property
    def pooled_tokens(self) -> int:
        """Tokens that one global entry is pooled from."""
        return self.ratio * (2 if self.overlap else 1)

    @property
    def compressor_width(self) -> int:
        """Numbers that the compressor makes of a token, per dimension of an entry.

        A pooled entry needs a gate beside the value, an overlapping one both twice; ratio 1 is a plain projection.
        """
        if self.ratio <= 1:
            return 1
        return 4 if self.overlap else 2


Attention = GroupedQueryAttention | LatentAttention | CompressedAttention


@dataclass(frozen=True)
class DenseFFN:
    """A gated feed-forward layer of `width`."""

    width: int


@dataclass(frozen=True)
class MoE:
    """Routed experts of `width`, `topk` per token, beside `num_shared` experts that see every token.

    A `hash_routed` layer looks its experts up by token id; the router only weighs them. A token's experts lie in
    `topk_groups` of `num_groups` equal groups of neighbours (V3's node-limited routing); 1 of 1 is no limit.
    """

    num_experts: int
    topk: int
    width: int
    num_shared: int
    hash_routed: bool = False
    num_groups: int = 1
    topk_groups: int = 1

    def __post_init__(self) -> None:
        if self.topk > self.num_experts:
            raise UsageError(f"num_experts_per_tok {self.topk} is more than the {self.num_experts} routed experts")


@dataclass(frozen=True)
class Engram:
    """An n-gram memory read before a layer: `rows_per_token` rows of `row_dim` from a table of `num_rows`."""

    num_rows: int
    row_dim: int
    rows_per_token: int
    row_bytes: int


@dataclass(frozen=True)
class LayerSpec:
    """One transformer layer. `bounded` layers need only a prompt's last rows under compact replay."""

    index: int
    attention: Attention
    ffn: DenseFFN | MoE
    engram: Engram | None = None
    bounded: bool = False


@dataclass(frozen=True)
class DraftSpec:
    """The draft module. `kind` "dspark": one parallel pass over `block_size` rows; "mtp": one pass per draft."""

    kind: Literal["dspark", "mtp"]
    layers: tuple[LayerSpec, ...]
    max_drafts: int
    block_size: int = 1
    target_layers: tuple[int, ...] = ()
    markov_rank: int = 0


@dataclass(frozen=True)
class VisionTower:
    """A vision transformer over square patches of `patch_size` pixels and three colours, and its projector.

    Every patch of an image attends to all others. `unshuffle` x `unshuffle` patches become one token of `output_size`,
    the model's hidden size; an image has at most `max_tokens`. Norms and biases are not counted.
    """

    num_layers: int
    hidden_size: int
    num_heads: int
    width: int
    patch_size: int
    unshuffle: int
    max_tokens: int
    output_size: int

    @property
    def patch_values(self) -> int:
        """Numbers of one patch: its pixels in three colours."""
        return 3 * self.patch_size**2

    @property
    def patches_per_token(self) -> int:
        """Patches that one token of the model is made of."""
        return self.unshuffle**2

    @property
    def parameters(self) -> int:
        """Attention and gated FFN of every layer, patch embedding, projector."""
        layer = 4 * self.hidden_size**2 + 3 * self.hidden_size * self.width
        ends = self.patch_values + self.patches_per_token * self.output_size
        return self.num_layers * layer + ends * self.hidden_size


@dataclass(frozen=True)
class KVFormat:
    """Bytes of one cache entry: global (`main`), sliding window, index key; 0 where a model has none."""

    name: str
    main_bytes: int
    window_bytes: int = 0
    index_bytes: int = 0


@dataclass(frozen=True)
class ModelSpec:
    """The facts of a model that layouts, graphs and costs are computed from.

    All that is not routed has `dense_format`, unless a checkpoint keeps shared experts and dense layers (`ffn_format`)
    or its attention output projections (`output_format`) in another one. Only families with `numerics` can be run on
    devices; all can be planned.
    """

    name: str
    family: str
    hidden_size: int
    vocab_size: int
    max_context: int
    layers: tuple[LayerSpec, ...]
    draft: DraftSpec | None
    dense_format: WeightFormat
    expert_format: WeightFormat
    kv_formats: tuple[KVFormat, ...]
    kv: KVFormat
    hc_mult: int = 0
    vision: VisionTower | None = None
    ffn_format: WeightFormat | None = None
    output_format: WeightFormat | None = None
    numerics: Numerics | None = None

    @property
    def vision_parameters(self) -> int:
        """Parameters of the vision tower; 0 for models without one."""
        return self.vision.parameters if self.vision else 0

    @property
    def window(self) -> int:
        """Tokens of sliding window that every layer keeps per request; 0 for models without one."""
        return max((a.window for a in self._compressed()), default=0)

    @property
    def supports_compact_replay(self) -> bool:
        """Whether a prompt's first rows may skip the bounded layers."""
        return any(layer.bounded for layer in self.layers)

    @property
    def kv_bytes_per_token(self) -> float:
        """Global KV of one token over all layers, bytes: what grows with the context."""
        return sum(self._kv_bytes(layer.attention) for layer in self.layers)

    @property
    def draft_kv_bytes_per_token(self) -> float:
        """Global KV that the draft module keeps of one token, bytes: V3's MTP block attends to the whole context."""
        return sum(self._kv_bytes(layer.attention) for layer in self.draft.layers) if self.draft else 0.0

    def window_bytes_per_request(self, num_slots: int | None = None, with_draft: bool = False) -> int:
        """Window rings of one request, bytes; `num_slots` per ring (default: the window itself)."""
        num_rings = sum(1 for _ in self._compressed())
        if with_draft and self.draft is not None:
            num_rings += sum(isinstance(x.attention, CompressedAttention) for x in self.draft.layers)
        return num_rings * (self.window if num_slots is None else num_slots) * self.kv.window_bytes

    def with_kv(self, name: str) -> ModelSpec:
        """The same model with another KV format. Raises UsageError for a format the model has not."""
        for candidate in self.kv_formats:
            if candidate.name == name:
                return replace(self, kv=candidate)
        known = ", ".join(k.name for k in self.kv_formats)
        raise UsageError(f"unknown KV format {name!r} for {self.name}: known are {known}")

    def with_weights(self, converted: Mapping[str, str]) -> ModelSpec:
        """The same model with weight formats replaced by name. Raises UsageError for a format that is not known."""

        def convert(fmt: WeightFormat) -> WeightFormat:
            name = converted.get(fmt.name)
            if name is None:
                return fmt
            if name not in _CONVERTIBLE:
                raise UsageError(f"unknown weight format {name!r}: known are {', '.join(_CONVERTIBLE)}")
            return _CONVERTIBLE[name]

        return replace(
            self,
            dense_format=convert(self.dense_format),
            expert_format=convert(self.expert_format),
            ffn_format=self.ffn_format and convert(self.ffn_format),
            output_format=self.output_format and convert(self.output_format),
        )

    def _kv_bytes(self, attention: Attention) -> float:
        if not isinstance(attention, CompressedAttention):
            indexed = isinstance(attention, LatentAttention) and attention.indexer is not None
            return float(self.kv.main_bytes + (self.kv.index_bytes if indexed else 0))
        if not attention.owns_kv:
            return 0.0
        return (self.kv.main_bytes + (self.kv.index_bytes if attention.runs_indexer else 0)) / attention.ratio

    def _compressed(self) -> list[CompressedAttention]:
        return [x.attention for x in self.layers if isinstance(x.attention, CompressedAttention)]
