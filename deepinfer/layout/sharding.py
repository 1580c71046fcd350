"""How tensor parallelism cuts weights and KV: what is split over the tp ranks, and what each of them holds whole."""

from __future__ import annotations

from functools import lru_cache

from deepinfer.errors import UsageError
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import expert_slots
from deepinfer.model.parameters import Parameters
from deepinfer.model.spec import (
    Attention,
    CompressedAttention,
    GroupedQueryAttention,
    LatentAttention,
    LayerSpec,
    ModelSpec,
    MoE,
)

_SPLIT_BY_VOCABULARY_OR_WIDTH = ("embedding", "lm_head", "ffn", "attention_output")


def local_kv_heads(attention: GroupedQueryAttention, tp: int) -> int:
    """Key and value heads of one tp rank: split while there are enough, then each on several ranks."""
    return max(1, attention.num_kv_heads // tp)


def kv_share(attention: Attention, tp: int) -> float:
    """Share of a token's KV that one tp rank keeps: latents and compressed records have one head, and no split."""
    if isinstance(attention, GroupedQueryAttention):
        return local_kv_heads(attention, tp) / attention.num_kv_heads
    return 1.0


@lru_cache(maxsize=4096)
def check_sharding(model: ModelSpec, layout: ParallelLayout) -> None:
    """Raises UsageError when heads, widths or experts of a model do not divide over a layout."""
    tp, group = layout.tp, layout.expert_group
    if group % tp and tp % group:
        raise UsageError(f"layout {layout}: of ep x etp = {group} and tp = {tp} one must divide the other")
    layers = [*model.layers, *(model.draft.layers if model.draft else ())]
    for attention in dict.fromkeys(layer.attention for layer in layers):
        _check_heads(model, layout, attention)
    for layer in layers[: len(model.layers)]:
        if isinstance(layer.ffn, MoE):
            expert_slots(layer.ffn, layout)
    for ffn in dict.fromkeys(layer.ffn for layer in layers):
        cut = layout.etp if isinstance(ffn, MoE) else tp
        if ffn.width % cut or ffn.width % tp:
            raise UsageError(f"layout {layout}: width {ffn.width} of {model.name} does not divide over tp or etp")


def _check_heads(model: ModelSpec, layout: ParallelLayout, attention: Attention) -> None:
    counts = [attention.num_heads]
    if isinstance(attention, CompressedAttention):
        counts.append(attention.o_groups)
    if isinstance(attention, GroupedQueryAttention) and layout.tp % attention.num_kv_heads:
        counts.append(attention.num_kv_heads)
    _check_context(model, layout, attention)
    for count in counts:
        if count % layout.tp:
            raise UsageError(f"layout {layout}: {count} heads or groups of {model.name} do not divide over tp")


def _check_context(model: ModelSpec, layout: ParallelLayout, attention: Attention) -> None:
    """Only ranks with the same KV can share it, and only attention to all of the context is modelled so."""
    if layout.dcp == 1:
        return
    if isinstance(attention, CompressedAttention) or (isinstance(attention, LatentAttention) and attention.indexer):
        raise UsageError(f"layout {layout}: dcp is not modelled for the sparse attention of {model.name}")
    alike = layout.tp if isinstance(attention, LatentAttention) else max(1, layout.tp // attention.num_kv_heads)
    if layout.dcp > alike:
        raise UsageError(f"layout {layout}: at most {alike} tp ranks of {model.name} hold the same KV for dcp to share")


def weight_share(model: ModelSpec, layout: ParallelLayout, group: Parameters) -> float:
    """Share of a group of parameters that one rank holds."""
    if group.placement == "engram":
        return 1.0 / layout.num_ranks
    layer = _layer(model, group)
    if group.placement == "expert":
        assert layer is not None
        assert isinstance(layer.ffn, MoE)
        slots = expert_slots(layer.ffn, layout, draft=group.owner == "draft")
        return slots / layer.ffn.num_experts / layout.expert_group
    if group.item in _SPLIT_BY_VOCABULARY_OR_WIDTH:
        return 1.0 / layout.tp
    if group.item == "shared_experts":
        # Ranks that divide the rows among themselves need all of the shared expert.
        return 1.0 if layout.scatters_rows else 1.0 / layout.tp
    if group.item == "attention" and layer is not None:
        whole = _unsplit_parameters(model, layer.attention, layout.tp) / group.count
        return whole + (1.0 - whole) / layout.tp
    return 1.0


def _layer(model: ModelSpec, group: Parameters) -> LayerSpec | None:
    layers = model.draft.layers if group.owner == "draft" and model.draft else model.layers
    return next((layer for layer in layers if layer.index == group.layer), None)


def _unsplit_parameters(model: ModelSpec, attention: Attention, tp: int) -> float:
    """Parameters of one attention layer's projections that every tp rank holds whole, or holds a copy of."""
    hidden = model.hidden_size
    if isinstance(attention, GroupedQueryAttention):
        # With more ranks than key and value heads, what a rank holds beyond 1/tp of their projections.
        pair = 2 * hidden * attention.head_dim
        beyond = local_kv_heads(attention, tp) - attention.num_kv_heads / tp
        return pair * beyond / (1.0 - 1.0 / tp) if tp > 1 else 0.0
    if isinstance(attention, CompressedAttention):
        return float(hidden * (attention.q_lora_rank + attention.head_dim))
    return float(hidden * (attention.q_lora_rank + attention.kv_lora_rank + attention.rope_dim))
