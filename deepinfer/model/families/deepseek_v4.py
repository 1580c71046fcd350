"""DeepSeek-V4: every layer owns its KV: CSA (ratio 4, own indexer), HCA (ratio 128, dense), or a window alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from pydantic import NonNegativeInt

from deepinfer.errors import UsageError
from deepinfer.model.families.compressed import CompressedConfig
from deepinfer.model.families.config import Quantization, formats
from deepinfer.model.families.deepseek_v3 import MAX_MTP_DRAFTS
from deepinfer.model.spec import CompressedAttention, DraftSpec, KVFormat, LayerSpec, ModelSpec, MoE, Role

CSA_RATIO, HCA_RATIO = 4, 128


class _V4Config(CompressedConfig):
    num_hash_layers: NonNegativeInt = 0
    expert_dtype: str | None = None
    quantization_config: Quantization | None = None


def _attention(config: _V4Config, index: int) -> CompressedAttention:
    ratio = config.compress_ratios[index] if index < len(config.compress_ratios) else 0
    if ratio not in (0, CSA_RATIO, HCA_RATIO):
        raise UsageError(
            f"config.json field compress_ratios: layer {index} has ratio {ratio}, known are 0, {CSA_RATIO}, {HCA_RATIO}"
        )
    sparse = ratio == CSA_RATIO
    role, topk = Role.FULL if ratio else Role.WINDOW, config.index_topk if sparse else None if ratio else 0
    attention = config.attention(role, ratio, topk, kv_owner=index if ratio else None)
    return replace(attention, overlap=sparse, index_compressor=sparse)


def _moe(config: _V4Config, index: int) -> MoE:
    return replace(config.experts(), hash_routed=index < config.num_hash_layers)


def _draft(config: _V4Config) -> DraftSpec | None:
    if not config.num_nextn_predict_layers:
        return None
    # Only checkpoints with a DSpark module name its target layers; the others draft with one MTP block.
    first = config.num_hidden_layers
    count = config.num_nextn_predict_layers if config.dspark_target_layer_ids else 1
    layers = tuple(LayerSpec(i, _attention(config, i), _moe(config, i)) for i in range(first, first + count))
    if not config.dspark_target_layer_ids:
        return DraftSpec("mtp", layers, max_drafts=MAX_MTP_DRAFTS)
    return config.dspark(layers)


def _kv_formats(config: _V4Config) -> tuple[KVFormat, ...]:
    """V4's record is FP8 nope, BF16 RoPE, 7 scales and a pad; index keys are FP4, or 8 bits and an FP32 scale."""
    dim, index_dim = config.head_dim, config.index_head_dim
    record = dim + config.qk_rope_head_dim + 8
    return (
        KVFormat("fp8", record, record, index_dim // 2 + index_dim // 32),
        KVFormat("fp8-v4", record, record, index_dim + 4),
        # BF16 KV with INT8 index keys: what CANN serves V4 with on parts without FP8 (cann-recipes-infer, V4 guide).
        KVFormat("bf16", 2 * dim, 2 * dim, index_dim + 4),
    )


def parse_v4(raw: dict[str, Any], name: str) -> ModelSpec:
    """The model of a V4 `config.json`. Raises UsageError or pydantic.ValidationError for a wrong field."""
    config = _V4Config.model_validate(raw)
    num_layers = config.num_hidden_layers
    config.check_ratios(name)
    kv_formats = _kv_formats(config)
    dense_format, expert_format = formats(config.quantization_config, config.expert_dtype)
    return ModelSpec(
        name=name,
        family="deepseek-v4",
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        max_context=config.max_position_embeddings,
        layers=tuple(LayerSpec(i, _attention(config, i), _moe(config, i)) for i in range(num_layers)),
        draft=_draft(config),
        dense_format=dense_format,
        expert_format=expert_format,
        kv_formats=kv_formats,
        kv=kv_formats[0],
        hc_mult=config.hc_mult,
    )
