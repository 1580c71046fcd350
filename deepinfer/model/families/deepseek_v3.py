"""DeepSeek-V3 and R1, Kimi-K2 (the same architecture with other numbers), and V3.2 (V3 with an indexer)."""

from __future__ import annotations

from typing import Any

from pydantic import NonNegativeInt, PositiveInt

from deepinfer.model.families.config import Config, Quantization, formats
from deepinfer.model.spec import (
    DenseFFN,
    DraftSpec,
    Indexer,
    KVFormat,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoE,
)

# One MTP block, run again on its own output for every further draft; servers cap the length at 7.
MAX_MTP_DRAFTS = 7
_FAMILIES = {"kimi_k2": "kimi-k2"}


class _V3Config(Config):
    model_type: str = "deepseek_v3"
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
    n_group: PositiveInt = 1
    topk_group: PositiveInt = 1
    first_k_dense_replace: NonNegativeInt
    q_lora_rank: PositiveInt
    kv_lora_rank: PositiveInt
    qk_nope_head_dim: PositiveInt
    qk_rope_head_dim: PositiveInt
    v_head_dim: PositiveInt
    max_position_embeddings: PositiveInt
    quantization_config: Quantization | None = None


class _V32Config(_V3Config):
    index_n_heads: PositiveInt
    index_head_dim: PositiveInt
    index_topk: PositiveInt


def parse_v3(raw: dict[str, Any], name: str) -> ModelSpec:
    """The model of a V3 `config.json`. Raises pydantic.ValidationError for a wrong field."""
    config = _V3Config.model_validate(raw)
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    kv_formats = (KVFormat("bf16", 2 * latent), KVFormat("fp8", _fp8_record(config)))
    return _spec(config, name, _FAMILIES.get(config.model_type, "deepseek-v3"), None, kv_formats)


def parse_v32(raw: dict[str, Any], name: str) -> ModelSpec:
    """The model of a V3.2 `config.json`. Raises pydantic.ValidationError for a wrong field."""
    config = _V32Config.model_validate(raw)
    indexer = Indexer(config.index_n_heads, config.index_head_dim, config.index_topk)
    latent = config.kv_lora_rank + config.qk_rope_head_dim
    # Index keys have 8 bits and an FP32 scale beside either record (FlashMLA README; CANN's guide for 910C: INT8).
    index_bytes = config.index_head_dim + 4
    kv_formats = (
        KVFormat("fp8", _fp8_record(config), index_bytes=index_bytes),
        KVFormat("bf16", 2 * latent, index_bytes=index_bytes),
    )
    return _spec(config, name, "deepseek-v3.2", indexer, kv_formats)


def _fp8_record(config: _V3Config) -> int:
    """FlashMLA's FP8 record, bytes: 512 e4m3, 4 FP32 scales, RoPE part in BF16 (FlashMLA README)."""
    return config.kv_lora_rank + 16 + 2 * config.qk_rope_head_dim


def _spec(
    config: _V3Config, name: str, family: str, indexer: Indexer | None, kv_formats: tuple[KVFormat, ...]
) -> ModelSpec:
    attention = LatentAttention(
        num_heads=config.num_attention_heads,
        q_lora_rank=config.q_lora_rank,
        kv_lora_rank=config.kv_lora_rank,
        nope_dim=config.qk_nope_head_dim,
        rope_dim=config.qk_rope_head_dim,
        v_dim=config.v_head_dim,
        indexer=indexer,
    )
    moe = MoE(
        config.n_routed_experts,
        config.num_experts_per_tok,
        config.moe_intermediate_size,
        config.n_shared_experts,
        num_groups=config.n_group,
        topk_groups=config.topk_group,
    )
    dense = DenseFFN(config.intermediate_size)
    num_layers = config.num_hidden_layers
    layers = tuple(
        LayerSpec(i, attention, dense if i < config.first_k_dense_replace else moe) for i in range(num_layers)
    )
    draft = None
    if config.num_nextn_predict_layers:
        draft = DraftSpec("mtp", (LayerSpec(num_layers, attention, moe),), max_drafts=MAX_MTP_DRAFTS)
    dense_format, expert_format = formats(config.quantization_config)
    return ModelSpec(
        name=name,
        family=family,
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
