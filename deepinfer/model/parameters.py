"""Counts a model's parameters, itemised: how many, in which format, held where, and touched by which token."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from deepinfer.model.spec import (
    BF16,
    FP32,
    Attention,
    CompressedAttention,
    DraftSpec,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoE,
    WeightFormat,
)

Placement = Literal["replicated", "expert", "engram"]


@dataclass(frozen=True)
class Parameters:
    """A group of parameters: `active` of the `count` take part in the products of one token."""

    item: str
    count: int
    active: int
    format: WeightFormat
    placement: Placement
    owner: Literal["backbone", "draft", "vision"] = "backbone"
    layer: int | None = None

    @property
    def num_bytes(self) -> float:
        """Bytes in storage, scales included."""
        return self.count * self.format.bytes_per_parameter


def parameters(spec: ModelSpec) -> list[Parameters]:
    """Every parameter group of a model, draft module and vision tower included; norms and biases are not counted."""
    embedding = spec.vocab_size * spec.hidden_size
    groups = [
        Parameters("embedding", embedding, 0, BF16, "replicated"),
        Parameters("lm_head", embedding, embedding, BF16, "replicated"),
    ]
    for layer in spec.layers:
        groups += _layer(spec, layer, "backbone")
    if spec.draft is not None:
        groups += _draft(spec, spec.draft)
    if spec.vision_parameters:
        groups.append(Parameters("vision", spec.vision_parameters, 0, BF16, "replicated", "vision"))
    return groups


def _layer(spec: ModelSpec, layer: LayerSpec, owner: Literal["backbone", "draft"]) -> Iterator[Parameters]:
    hidden, dense = spec.hidden_size, spec.dense_format
    ffn = spec.ffn_format or dense

    def group(
        item: str,
        count: int,
        fmt: WeightFormat,
        active: int | None = None,
        placement: Placement = "replicated",
    ) -> Parameters:
        used = count if active is None else active
        return Parameters(item, count, used, fmt, placement, owner, layer.index)

    for item, count, fmt in _attention(spec, layer.attention):
        yield group(item, count, fmt)
    if isinstance(layer.ffn, MoE):
        moe = layer.ffn
        expert = 3 * hidden * moe.width
        yield group("experts", moe.num_experts * expert, spec.expert_format, moe.topk * expert, "expert")
        yield group("shared_experts", moe.num_shared * expert, ffn)
        yield group("router", hidden * moe.num_experts, BF16)
    else:
        yield group("ffn", 3 * hidden * layer.ffn.width, ffn)
    if spec.hc_mult:
        yield group("hyper_connections", 2 * hyper_connection_parameters(spec), FP32)
    if layer.engram is not None:
        memory = layer.engram
        row = WeightFormat("fp8 rows", "fp8", memory.row_bytes / memory.row_dim)
        yield group("engram_table", memory.num_rows * memory.row_dim, row, 0, "engram")
        # Keys for each of the streams and one value: hc_mult + 1 projections of the gathered rows.
        width = memory.rows_per_token * memory.row_dim
        yield group("engram_projection", width * (spec.hc_mult + 1) * hidden, dense)


def _attention(spec: ModelSpec, attention: Attention) -> Iterator[tuple[str, int, WeightFormat]]:
    """Items of one attention layer: name, count, format."""
    hidden, dense = spec.hidden_size, spec.dense_format
    if isinstance(attention, GroupedQueryAttention):
        yield "attention", grouped_query_parameters(attention, hidden), dense
        return
    if isinstance(attention, LatentAttention):
        output = attention.num_heads * attention.v_dim * hidden
        yield "attention", latent_attention_parameters(attention, hidden) - output, dense
        yield "attention_output", output, spec.output_format or dense
        if attention.indexer is not None:
            heads, dim = attention.indexer.num_heads, attention.indexer.dim
            yield "index_keys", hidden * dim, BF16
            yield "index_queries", attention.q_lora_rank * heads * dim, dense
            yield "index_weights", hidden * heads, BF16
        return
    yield "attention", compressed_attention_parameters(attention, hidden), dense
    if attention.owns_kv:
        yield "compressor", attention.compressor_width * hidden * attention.head_dim, BF16
        if attention.runs_indexer:
            pooled = attention.compressor_width * hidden if attention.index_compressor else attention.head_dim
            yield "index_keys", pooled * attention.index_dim, BF16
    if attention.runs_indexer:
        yield "index_queries", attention.q_lora_rank * attention.index_heads * attention.index_dim, dense
        yield "index_weights", hidden * attention.index_heads, BF16


def _draft(spec: ModelSpec, draft: DraftSpec) -> Iterator[Parameters]:
    hidden = spec.hidden_size
    for layer in draft.layers:
        yield from _layer(spec, layer, "draft")
    if draft.kind == "mtp":
        count = 2 * hidden * hidden
        yield Parameters("draft_projection", count, count, spec.dense_format, "replicated", "draft")
        # The MTP block ships copies of embedding and LM head; servers share the backbone's, so none is counted.
        return
    features = len(draft.target_layers) * hidden * hidden
    markov = 2 * spec.vocab_size * draft.markov_rank
    confidence = hidden + draft.markov_rank
    yield Parameters("draft_projection", features, features, spec.dense_format, "replicated", "draft")
    yield Parameters("markov_head", markov, markov // 2, BF16, "replicated", "draft")
    yield Parameters("confidence_head", confidence, confidence, BF16, "replicated", "draft")


def latent_attention_parameters(attention: LatentAttention, hidden: int) -> int:
    """Projections of one MLA layer: q_a, q_b, kv_a, kv_b, o."""
    heads = attention.num_heads
    return (
        hidden * attention.q_lora_rank
        + attention.q_lora_rank * heads * (attention.nope_dim + attention.rope_dim)
        + hidden * (attention.kv_lora_rank + attention.rope_dim)
        + attention.kv_lora_rank * heads * (attention.nope_dim + attention.v_dim)
        + heads * attention.v_dim * hidden
    )


def grouped_query_parameters(attention: GroupedQueryAttention, hidden: int) -> int:
    """Projections of one layer: q, k, v, o."""
    return 2 * hidden * attention.head_dim * (attention.num_heads + attention.num_kv_heads)


def compressed_attention_parameters(attention: CompressedAttention, hidden: int) -> int:
    """Projections of one V4 or V4.1 layer: q_a, q_b, window KV, grouped o_a, o_b."""
    q_dim = attention.num_heads * attention.head_dim
    return (
        hidden * attention.q_lora_rank
        + attention.q_lora_rank * q_dim
        + hidden * attention.head_dim
        + q_dim * attention.o_lora_rank
        + attention.o_groups * attention.o_lora_rank * hidden
    )


def hyper_connection_parameters(spec: ModelSpec) -> int:
    """One site's map from the streams to pre, post and combine coefficients: (m h) x (2 m + m^2)."""
    m = spec.hc_mult
    return m * spec.hidden_size * (2 * m + m * m)
