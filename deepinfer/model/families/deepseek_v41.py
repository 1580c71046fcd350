"""DeepSeek-V4.1: causal encoder-decoder with shared compressed KV, Engram tables, DSpark draft, vision tower."""

from __future__ import annotations

from dataclasses import replace
from typing import Annotated, Any, Literal

from pydantic import Field, PositiveInt

from deepinfer.errors import UsageError
from deepinfer.model.families.compressed import CompressedConfig
from deepinfer.model.families.config import Config, Quantization, formats
from deepinfer.model.numerics import EngramHash, Numerics, Rotary, Yarn
from deepinfer.model.spec import (
    CompressedAttention,
    DraftSpec,
    Engram,
    KVFormat,
    LayerSpec,
    ModelSpec,
    Role,
    VisionTower,
)


class _RopeScaling(Config):
    rope_type: Literal["yarn"] = "yarn"
    factor: float
    original_max_position_embeddings: PositiveInt
    beta_fast: float = 32.0
    beta_slow: float = 1.0


class _V41Text(CompressedConfig):
    kv_source_layer_ids: list[int]
    index_source_layer_ids: list[int]
    candidate_source_layer_id: int
    candidate_topk_blocks: PositiveInt
    candidate_block_size: PositiveInt
    engram_layer_ids: list[int] = Field(default_factory=list)
    engram_num_embeddings: list[int] = Field(default_factory=list)
    engram_max_ngram_size: int = 4
    engram_n_heads: int = 8
    engram_head_dim: int = 256
    engram_vocab_size: PositiveInt = 16_000_000
    engram_compressed_vocab_size: PositiveInt = 99_092
    engram_pad_id: int = 2
    dspark_n_routed_experts: int = 128
    dspark_num_experts_per_tok: int = 3
    dspark_noise_token_id: int = 128_799
    # Constants of the arithmetic, with the release's values as defaults.
    rms_norm_eps: float = 1e-20
    hc_eps: float = 1e-6
    hc_sinkhorn_iters: PositiveInt = 20
    swiglu_limit: float = 10.0
    routed_scaling_factor: float = 1.5
    gate_temp: Annotated[float, Field(ge=1.0, le=1.0)] = 1.0
    norm_topk_prob: Literal[True] = True
    scoring_func: Literal["sqrtsoftplus"] = "sqrtsoftplus"
    rope_theta: float = 10_000.0
    compress_rope_theta: float = 160_000.0
    rope_scaling: _RopeScaling | None = None


class _Vision(Config):
    num_hidden_layers: PositiveInt
    hidden_size: PositiveInt
    num_attention_heads: PositiveInt
    intermediate_size: PositiveInt
    patch_size: PositiveInt
    # Defaults of the released configuration class: 3x3 patches to a token, at most 1024 tokens an image.
    downsample_ratio: PositiveInt = 3
    max_image_tokens: PositiveInt = 1024


class _V41Config(Config):
    text_config: _V41Text
    vision_config: _Vision | None = None
    quantization_config: Quantization | None = None


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
    attention = config.attention(role, ratio, config.index_topk if ratio else 0, owner)
    candidates = config.candidate_topk_blocks * config.candidate_block_size
    return replace(attention, index_limit=candidates if limited else None)


def _v41_layers(config: _V41Text) -> tuple[LayerSpec, ...]:
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
            ffn=config.experts(),
            engram=engrams.get(i),
            bounded=i >= first_bounded,
        )
        for i in range(config.num_hidden_layers)
    )


def _v41_draft(config: _V41Text) -> DraftSpec | None:
    if not config.num_nextn_predict_layers:
        return None
    moe = replace(config.experts(), num_experts=config.dspark_n_routed_experts, topk=config.dspark_num_experts_per_tok)
    first = config.num_hidden_layers
    layers = tuple(
        LayerSpec(first + i, _v41_attention(config, first + i, Role.WINDOW), moe, bounded=True)
        for i in range(config.num_nextn_predict_layers)
    )
    return config.dspark(layers)


def _numerics(config: _V41Text) -> Numerics:
    scaling, dim = config.rope_scaling, config.qk_rope_head_dim
    yarn = None
    if scaling is not None:
        yarn = Yarn(scaling.factor, scaling.original_max_position_embeddings, scaling.beta_fast, scaling.beta_slow)
    engram = None
    if config.engram_layer_ids:
        engram = EngramHash(
            layers=tuple(config.engram_layer_ids),
            num_rows=tuple(config.engram_num_embeddings),
            vocab_size=config.engram_vocab_size,
            compressed_vocab=config.engram_compressed_vocab_size,
            max_ngram=config.engram_max_ngram_size,
            num_heads=config.engram_n_heads,
            pad_token=config.engram_pad_id,
        )
    return Numerics(
        rms_norm_eps=config.rms_norm_eps,
        hc_eps=config.hc_eps,
        hc_iterations=config.hc_sinkhorn_iters,
        swiglu_limit=config.swiglu_limit,
        route_scale=config.routed_scaling_factor,
        rotary=Rotary(dim, config.rope_theta),
        rotary_global=Rotary(dim, config.compress_rope_theta, yarn),
        candidate_layer=config.candidate_source_layer_id,
        candidate_blocks=config.candidate_topk_blocks,
        candidate_block=config.candidate_block_size,
        noise_token=config.dspark_noise_token_id,
        engram=engram,
    )


def _vision(vision: _Vision | None, hidden_size: int) -> VisionTower | None:
    if vision is None:
        return None
    return VisionTower(
        num_layers=vision.num_hidden_layers,
        hidden_size=vision.hidden_size,
        num_heads=vision.num_attention_heads,
        width=vision.intermediate_size,
        patch_size=vision.patch_size,
        unshuffle=vision.downsample_ratio,
        max_tokens=vision.max_image_tokens,
        output_size=hidden_size,
    )


def parse_v41(raw: dict[str, Any], name: str) -> ModelSpec:
    """The model of a V4.1 `config.json`. Raises UsageError or pydantic.ValidationError for a wrong field."""
    config = _V41Config.model_validate(raw)
    text = config.text_config
    text.check_ratios(name)
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
    dense_format, expert_format = formats(config.quantization_config)
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
        vision=_vision(config.vision_config, text.hidden_size),
        numerics=_numerics(text),
    )
