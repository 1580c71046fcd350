"""Qwen3 mixture-of-experts models: grouped-query attention, routed experts without a shared one."""

from __future__ import annotations

from typing import Any

from pydantic import Field, NonNegativeInt, PositiveInt

from deepinfer.model.families.config import Config, Quantization, formats
from deepinfer.model.spec import DenseFFN, GroupedQueryAttention, KVFormat, LayerSpec, ModelSpec, MoE


class _Qwen3MoeConfig(Config):
    vocab_size: PositiveInt
    hidden_size: PositiveInt
    intermediate_size: PositiveInt
    moe_intermediate_size: PositiveInt
    num_hidden_layers: PositiveInt
    num_attention_heads: PositiveInt
    num_key_value_heads: PositiveInt
    head_dim: PositiveInt
    num_experts: PositiveInt
    num_experts_per_tok: PositiveInt
    decoder_sparse_step: PositiveInt = 1
    mlp_only_layers: list[NonNegativeInt] = Field(default_factory=list)
    max_position_embeddings: PositiveInt
    quantization_config: Quantization | None = None


def _ffn(config: _Qwen3MoeConfig, index: int) -> DenseFFN | MoE:
    """Experts in every `decoder_sparse_step`-th layer but `mlp_only_layers` (transformers, modeling_qwen3_moe)."""
    if index in config.mlp_only_layers or (index + 1) % config.decoder_sparse_step:
        return DenseFFN(config.intermediate_size)
    return MoE(config.num_experts, config.num_experts_per_tok, config.moe_intermediate_size, 0)


def parse_qwen3_moe(raw: dict[str, Any], name: str) -> ModelSpec:
    """The model of a Qwen3-MoE `config.json`. Raises pydantic.ValidationError for a wrong field."""
    config = _Qwen3MoeConfig.model_validate(raw)
    attention = GroupedQueryAttention(config.num_attention_heads, config.num_key_value_heads, config.head_dim)
    numbers = 2 * config.num_key_value_heads * config.head_dim  # keys and values
    kv_formats = (KVFormat("bf16", 2 * numbers), KVFormat("fp8", numbers))
    dense_format, expert_format = formats(config.quantization_config)
    return ModelSpec(
        name=name,
        family="qwen3-moe",
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        layers=tuple(LayerSpec(i, attention, _ffn(config, i)) for i in range(config.num_hidden_layers)),
        draft=None,
        dense_format=dense_format,
        expert_format=expert_format,
        kv_formats=kv_formats,
        kv=kv_formats[0],
    )
