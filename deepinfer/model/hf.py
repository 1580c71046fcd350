"""Reads a model card: a shipped name, or the path of a Hugging Face `config.json` (or of its folder)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, NonNegativeInt, PositiveInt, ValidationError

from deepinfer.errors import UsageError, unknown_name
from deepinfer.files import file_exists, first_fault, read_json
from deepinfer.model.spec import (
    BF16,
    FP8_BLOCK_32,
    FP8_BLOCK_128,
    MXFP4,
    CompressedAttention,
    DenseFFN,
    DraftSpec,
    Engram,
    KVFormat,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoE,
    Role,
    WeightFormat,
)

_CARDS = Path(__file__).parent / "cards"


class _Config(BaseModel):
    """Hugging Face configurations carry many fields the engine has no use for: those are ignored."""

    model_config = ConfigDict(extra="ignore", frozen=True)


class _Quantization(_Config):
    quant_method: str
    expert_dtype: str | None = None
    weight_block_size: tuple[int, int] | None = None


class _V3Config(_Config):
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_nextn_predict_layers: NonNegativeInt = 0
    num_attention_heads: PositiveInt
    n_shared_experts: NonNegativeInt
    n_routed_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    first_k_dense_replace: NonNegativeInt
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    quantization_config: _Quantization | None = None


class _V41Text(_Config):
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    head_dim: PositiveInt
    q_lora_rank: PositiveInt
    qk_rope_head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    sliding_window: PositiveInt
    compress_ratios: list[NonNegativeInt]
    kv_source_layer_ids: list[int]
    index_source_layer_ids: list[int]
    candidate_source_layer_id: int
    candidate_topk_blocks: PositiveInt
    candidate_block_size: PositiveInt
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt
    o_groups: PositiveInt
    o_lora_rank: PositiveInt
    moe_intermediate_size: PositiveInt
    n_routed_experts: PositiveInt
    n_shared_experts: NonNegativeInt
    num_experts_per_tok: PositiveInt
    hc_mult: PositiveInt
    engram_layer_ids: list[int] = Field(default_factory=list)
    engram_num_embeddings: list[int] = Field(default_factory=list)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    num_nextn_predict_layers: NonNegativeInt = 0
    dspark_block_size: int = 5
    dspark_target_layer_ids: list[int] = Field(default_factory=list)
    dspark_markov_rank: int = 256
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3


class _Vision(_Config):
    num_hidden_layers: int
    hidden_size: int
    intermediate_size: int
    patch_size: int


class _V41Config(_Config):
    text_config: _V41Text
    vision_config: _Vision | None = None
    quantization_config: _Quantization | None = None


def card_names() -> list[str]:
    """Names of the shipped model cards."""
    return sorted(path.stem for path in _CARDS.glob("*.json"))


def load_model(name_or_path: str) -> ModelSpec:
    """The model of a shipped card, or of the `config.json` at a path (a file or the folder that holds it).

    Raises UsageError for an unknown name, an unreadable or malformed file, or an architecture not supported.
    """
    path = Path(name_or_path)
    key = name_or_path.lower().removeprefix("deepseek-ai/")
    if key in card_names():
        path, name = _CARDS / f"{key}.json", key
    elif file_exists(name_or_path):
        path = path / "config.json" if path.is_dir() else path
        name = path.parent.name if path.name == "config.json" else path.stem
    else:
        raise unknown_name("model", name_or_path, card_names())
    return parse_config(read_json(path, "model config"), name)


def parse_config(config: dict[str, Any], name: str) -> ModelSpec:
    """A `ModelSpec` from the dictionary of a `config.json`. Raises UsageError, naming the offending field."""
    listed = config.get("architectures")
    architecture = str(listed[0] if isinstance(listed, list) and listed else config.get("model_type", "none"))
    parser = _PARSERS.get(architecture)
    if parser is None:
        raise UsageError(
            f"model {name}: architecture {architecture!r} is not supported; supported are "
            + ", ".join(sorted(_PARSERS))
        )
    try:
        return parser(config, name)
    except ValidationError as error:
        raise UsageError(f"model {name}: config.json field {first_fault(error)}") from None


def _formats(quantization: _Quantization | None) -> tuple[WeightFormat, WeightFormat]:
    """Formats of dense and of routed-expert weights."""
    if quantization is None:
        return BF16, BF16
    dense = FP8_BLOCK_32 if quantization.weight_block_size == (32, 32) else FP8_BLOCK_128
    return dense, MXFP4 if quantization.expert_dtype == "fp4" else dense


def _parse_v3(raw: dict[str, Any], name: str) -> ModelSpec:
    config = _V3Config.model_validate(raw)
    attention = LatentAttention(
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
    )
    moe = MoE(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.n_shared_experts,
    )
    dense = DenseFFN(config.intermediate_size)
    num_layers = config.num_hidden_layers
    layers = tuple(
        LayerSpec(i, attention, dense if i < config.first_k_dense_replace else moe) for i in range(num_layers)
    )
    draft = None
    if config.num_nextn_predict_layers:
        # One MTP block, run again on its own output for every further draft; servers cap the length at 7.
        draft = DraftSpec("mtp", (LayerSpec(num_layers, attention, moe),), max_drafts=7)
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    kv_formats = (
        KVFormat("bf16", 2 * latent),
        # FlashMLA's FP8 record: 512 e4m3, 4 FP32 scales, RoPE part in BF16 (FlashMLA README).
        KVFormat("fp8", config.kv_lora_rank + 16 + 2 * config.qk_rope_head_dim),
    )
    dense_format, expert_format = _formats(config.quantization_config)
    return ModelSpec(
        name=name,
        family="deepseek-v3",
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        layers=layers,
        draft=draft,
        dense_format=dense_format,
        expert_format=expert_format,
        kv_formats=kv_formats,
        kv=kv_formats[0],
    )


def _role(config: _V41Text, index: int) -> Role:
    if config.compress_ratios[index] == 0:
        return Role.WINDOW
    if index in config.kv_source_layer_ids:
        return Role.FULL
    return Role.REINDEX if index in config.index_source_layer_ids else Role.REUSE


def _v41_attention(config: _V41Text, index: int, role: Role) -> CompressedAttention:
    ratio = 0 if role is Role.WINDOW else config.compress_ratios[index]
    owner = max((i for i in config.kv_source_layer_ids if i <= index), default=None) if ratio else None
    if ratio and (owner is None or config.compress_ratios[owner] != ratio):
        raise UsageError(f"config.json field kv_source_layer_ids: no source of layer {index}'s ratio {ratio} up to it")
    # Later index sources score only inside the candidate blocks that the candidate source picked.
    limited = role is Role.REINDEX and 0 <= config.candidate_source_layer_id < index
    return CompressedAttention(
        num_heads=config.num_attention_heads,
        head_dim=config.head_dim,
        rope_dim=config.qk_rope_head_dim,
        q_lora_rank=config.q_lora_rank,
        o_groups=config.o_groups,
        o_lora_rank=config.o_lora_rank,
        window=config.sliding_window,
        role=role,
        ratio=ratio,
        topk=config.index_topk if ratio else 0,
        kv_owner=owner,
        index_heads=config.index_n_heads,
        index_dim=config.index_head_dim,
        index_limit=config.candidate_topk_blocks * config.candidate_block_size if limited else None,
    )


def _v41_layers(config: _V41Text) -> tuple[LayerSpec, ...]:
    moe = MoE(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.n_shared_experts,
    )
    head_dim = config.engram_head_dim
    rows_per_token = (config.engram_max_ngram_size - 1) * config.engram_n_heads
    engrams = {
        layer: Engram(num_rows, head_dim, rows_per_token, head_dim + head_dim // 32)
        for layer, num_rows in zip(config.engram_layer_ids, config.engram_num_embeddings, strict=True)
    }
    # The decoder half starts at the first ratio-1 layer (DeepInfer 0.1.0: `n_prefill_layer`).
    first_bounded = next((i for i, r in enumerate(config.compress_ratios) if r == 1), config.num_hidden_layers)
    return tuple(
        LayerSpec(
            index=i,
            attention=_v41_attention(config, i, _role(config, i)),
            ffn=moe,
            engram=engrams.get(i),
            bounded=i >= first_bounded,
        )
        for i in range(config.num_hidden_layers)
    )


def _v41_draft(config: _V41Text) -> DraftSpec | None:
    if not config.num_nextn_predict_layers:
        return None
    moe = MoE(
        config.dspark_n_routed_experts,
        config.dspark_num_experts_per_tok,
        config.moe_intermediate_size,
        config.n_shared_experts,
    )
    first = config.num_hidden_layers
    layers = tuple(
        LayerSpec(first + i, _v41_attention(config, first + i, Role.WINDOW), moe, bounded=True)
        for i in range(config.num_nextn_predict_layers)
    )
    return DraftSpec(
        kind="dspark",
        layers=layers,
        max_drafts=config.dspark_block_size,
        block_size=config.dspark_block_size,
        target_layers=tuple(config.dspark_target_layer_ids),
        markov_rank=config.dspark_markov_rank,
    )


def _vision_parameters(vision: _Vision | None, hidden_size: int) -> int:
    """Parameters of the ViT: attention and gated FFN per block, patch embedding, 3x3-unshuffle projector."""
    if vision is None:
        return 0
    width = vision.hidden_size
    block = 4 * width * width + 3 * width * vision.intermediate_size
    patches = 3 * vision.patch_size**2 * width
    return vision.num_hidden_layers * block + patches + 9 * width * hidden_size


def _parse_v41(raw: dict[str, Any], name: str) -> ModelSpec:
    config = _V41Config.model_validate(raw)
    text = config.text_config
    if len(text.compress_ratios) < text.num_hidden_layers:
        raise UsageError(
            f"model {name}: compress_ratios has {len(text.compress_ratios)} entries for {text.num_hidden_layers} layers"
        )
    if len(text.engram_layer_ids) != len(text.engram_num_embeddings):
        raise UsageError(f"model {name}: engram_layer_ids and engram_num_embeddings must have the same length")
    dim, index_dim, rope_dim = text.head_dim, text.index_head_dim, text.qk_rope_head_dim
    window = dim + dim // 32
    kv_formats = (
        # SM100 and Ascend records: main E2M1 + E4M3 per 16, window E4M3 + UE8M0 per 32, index E2M1 + UE8M0 per 32.
        KVFormat("fp4", dim // 2 + dim // 16, window, index_dim // 2 + index_dim // 32),
        KVFormat("mxfp8", window, window, index_dim // 2 + index_dim // 32),
        # V4's record (FP8 nope, BF16 RoPE, 7 scales, pad) with FP8 index keys: what SM90 kernels read.
        KVFormat("fp8-v4", dim + rope_dim + 8, dim + rope_dim + 8, index_dim + 4),
        KVFormat("bf16", 2 * dim, 2 * dim, 2 * index_dim),
    )
    dense_format, expert_format = _formats(config.quantization_config)
    return ModelSpec(
        name=name,
        family="deepseek-v4.1",
        hidden_size=text.hidden_size,
        vocab_size=text.vocab_size,
        max_context=text.max_position_embeddings,
        layers=_v41_layers(text),
        draft=_v41_draft(text),
        dense_format=dense_format,
        expert_format=expert_format,
        kv_formats=kv_formats,
        kv=kv_formats[0],
        hc_mult=text.hc_mult,
        vision_parameters=_vision_parameters(config.vision_config, text.hidden_size),
    )


_PARSERS: dict[str, Callable[[dict[str, Any], str], ModelSpec]] = {
    "DeepseekV3ForCausalLM": _parse_v3,
    "DeepseekV41ForCausalLM": _parse_v41,
}
