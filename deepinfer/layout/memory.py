"""What fits on one rank: weights, workspace, request state and KV blocks, itemised."""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache

from deepinfer.errors import InfeasibleError
from deepinfer.hardware.spec import Accelerator
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.settings import EngineSettings
from deepinfer.layout.sharding import check_sharding, kv_share, weight_share
from deepinfer.model.parameters import parameters
from deepinfer.model.spec import Attention, CompressedAttention, GroupedQueryAttention, ModelSpec, MoE
from deepinfer.numeric import Num
from deepinfer.units import format_bytes

STATE_SLOTS_RATIO = 1.2
"""State slots per running request (DeepInfer 0.1.0, `DEEPINFER_NUM_STATE_SLOTS_RATIO`)."""


@dataclass(frozen=True)
class MemoryBudget:
    """Bytes of one rank by item, in order, and the KV blocks that what is left holds.

    `usable_bytes` is the accelerator's memory times the configured utilisation: the rest is for the device
    context, captured graphs and communicators.
    """

    usable_bytes: float
    items: tuple[tuple[str, float], ...]
    block_bytes: float
    num_blocks: int
    num_slots: int

    @property
    def kv_bytes(self) -> float:
        """Bytes of the KV block pool."""
        return self.num_blocks * self.block_bytes

    def max_requests(self, tokens: float, block_tokens: int) -> int:
        """Most requests of so many tokens each that the block pool of one attention replica holds at once."""
        blocks = math.ceil(tokens / block_tokens) if self.block_bytes else 0
        return self.num_blocks // blocks if blocks else self.num_slots


def memory_budget(
    model: ModelSpec, layout: ParallelLayout, accelerator: Accelerator, settings: EngineSettings
) -> MemoryBudget:
    """What one rank holds, and how many KV blocks are left.

    Every cp rank of a replica keeps the replica's whole KV, and so does every tp rank, but for key and value heads
    that tp splits and the context that dcp shares. Raises UsageError when the model does not divide over the layout,
    and InfeasibleError when weights, workspace and state leave no room for the KV of a single block per request.
    """
    check_sharding(model, layout)
    usable = accelerator.hbm_bytes.value * settings.memory_utilization
    logit_rows = settings.max_num_seqs * (1 + settings.nextn)
    num_slots = math.ceil(STATE_SLOTS_RATIO * settings.max_num_seqs)
    items = (
        *weight_items(model, layout),
        ("workspace", float(workspace_bytes(model, layout, settings.max_tokens_per_step, logit_rows))),
        ("request state", num_slots * state_bytes_per_request(model, settings.nextn)),
    )
    block_bytes = kv_bytes_per_token(model, settings.nextn, layout.tp, layout.dcp) * settings.block_tokens
    left = usable - sum(size for _, size in items)
    num_blocks = int(left // block_bytes)
    if num_blocks < settings.max_num_seqs:
        need = usable - left + settings.max_num_seqs * block_bytes
        raise InfeasibleError(
            f"{model.name} on {accelerator.name} with {layout} needs {format_bytes(need)} per GPU for "
            f"{settings.max_num_seqs} requests, {format_bytes(need - usable)} more than the usable "
            f"{format_bytes(usable)}"
        )
    return MemoryBudget(usable, items, block_bytes, num_blocks, num_slots)


def kv_bytes_per_token(model: ModelSpec, nextn: int, tp: int = 1, dcp: int = 1) -> float:
    """Global KV of one token on one rank, bytes; with drafts also the draft module's."""
    whole = model.kv_bytes_per_token + (model.draft_kv_bytes_per_token if nextn else 0.0)
    return whole * kv_share(model.layers[0].attention, tp) / dcp


@lru_cache(maxsize=256)
def weight_items(model: ModelSpec, layout: ParallelLayout) -> tuple[tuple[str, float], ...]:
    """Weights of one rank: dense ones split over tp where engines do, experts over ep and etp, with redundant copies.

    Engram tables lie over all of the engine's ranks. Raises UsageError when experts do not divide evenly.
    """
    names = {"replicated": "dense weights", "expert": "expert weights", "engram": "Engram tables"}
    sizes: dict[str, float] = {}
    for group in parameters(model):
        name = "draft weights" if group.owner == "draft" else names[group.placement]
        sizes[name] = sizes.get(name, 0.0) + group.num_bytes * weight_share(model, layout, group)
    return tuple(sizes.items())


def state_bytes_per_request(model: ModelSpec, nextn: int) -> float:
    """Window rings and compressor tails of one request, bytes; 0 for models without windows.

    A ring holds the window and the positions that verification may roll back: nextn + 1 (DeepInfer 0.1.0,
    `cache_engine.py`). A compressor keeps FP32 values and gates of the tokens an open entry pools, and of as many
    drafts: 8 and 128 for V4's two kinds (vLLM's V4 cache groups). Index keys pooled on their own have a tail too.
    """
    if not model.window:
        return 0.0
    rings = model.window_bytes_per_request(model.window + nextn + 1, with_draft=nextn > 0)
    return rings + sum(_tail_bytes(layer.attention, nextn) for layer in model.layers)


def _tail_bytes(attention: Attention, nextn: int) -> float:
    """Tail of one layer's compressors, bytes."""
    if not isinstance(attention, CompressedAttention) or not attention.owns_kv or attention.ratio <= 1:
        return 0.0
    dim = attention.head_dim + (attention.index_dim if attention.index_compressor else 0)
    return 4.0 * attention.compressor_width * dim * (attention.pooled_tokens + nextn)


def workspace_bytes(model: ModelSpec, layout: ParallelLayout, rows: Num, logit_rows: Num) -> Num:
    """Activations alive at once in a step of `rows` rows per replica, bytes on one rank.

    Residual streams, queries and attention output, routed rows on arrival and between the two expert products
    (twice the balanced number, for skew), and FP32 logits of `logit_rows` rows.
    """
    hidden = model.hidden_size
    streams = max(model.hc_mult, 1) * hidden * 2.0 + 2.0 * hidden
    attention = _query_width(model) * 2.0 * 2.0 / layout.tp
    # Each of the etp slices of an expert has its rows; ranks of one tp group have a tp-th of them each.
    slices = layout.etp / layout.tp
    routed = max(
        (
            2.0 * layer.ffn.topk * slices * (hidden * 3.0 + layer.ffn.width / layout.etp * 6.0)
            for layer in model.layers
            if isinstance(layer.ffn, MoE)
        ),
        default=0.0,
    )
    return (rows * (streams + attention + routed) + logit_rows * (model.vocab_size * 4.0)) / layout.cp


def _query_width(model: ModelSpec) -> int:
    """Widest query of a row over the layers, elements."""
    widths = []
    for layer in model.layers:
        attention = layer.attention
        if isinstance(attention, CompressedAttention | GroupedQueryAttention):
            widths.append(attention.num_heads * attention.head_dim)
        else:
            widths.append(attention.num_heads * (attention.kv_lora_rank + attention.rope_dim))
    return max(widths)
