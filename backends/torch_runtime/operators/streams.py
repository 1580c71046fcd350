"""Embedding, Engram memory, and the residual streams between sublayers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backends.torch_runtime.context import Call
from backends.torch_runtime.formats import Weight, wide
from backends.torch_runtime.reference.elementwise import Streams


def embedding(call: Call, tokens: Tensor | None) -> Tensor:
    """Token rows, one copy per stream: [m, streams, h]."""
    del tokens  # the slot of sampled tokens; a step's own are prepared with its rows
    return _embedded(call, call.step.token_ids)


def _embedded(call: Call, token_ids: Tensor) -> Tensor:
    rows = call.rank.weights.embed[token_ids.long()].to(call.rank.dtype)
    return rows[:, None].expand(-1, call.rank.model.hc_mult, -1).contiguous()


def engram_lookup(call: Call, token_ids: Any) -> Tensor:
    """The table rows of each row's n-grams, [m, heads x dim]."""
    del token_ids
    rank, ngrams = call.rank, call.step.ngrams
    assert ngrams is not None
    table = call.weights["engram.embed"]
    assert call.spec.engram is not None
    ids, total = ngram_rows(call, ngrams), call.spec.engram.num_rows
    look_up = rank.comm.engram_rows_equal if call.step.equal_exchange else rank.comm.engram_rows
    values = look_up(ids, table.data, total)
    scales = None if table.scale is None else look_up(ids, table.scale, total)
    return Weight(values, scales, table.storage).dequantized(rank.dtype).flatten(1)


def ngram_rows(call: Call, ngrams: Tensor) -> Tensor:
    """Rows int64 [m, heads] of the layer's table for tokens [m, n], the newest first; -1 is no token."""
    tables = call.rank.engram
    assert tables is not None
    hashing, place = tables.hashing, tables.hashing.layers.index(call.spec.index)
    pad = tables.token_map[hashing.pad_token]
    ids = torch.where(ngrams >= 0, tables.token_map[ngrams.clamp_min(0).long()], pad)
    products = ids * tables.multipliers[place]
    rolling, found = products[:, 0], []
    for n in range(1, hashing.max_ngram):
        rolling = torch.bitwise_xor(rolling, products[:, n])
        heads = slice((n - 1) * hashing.num_heads, n * hashing.num_heads)
        found.append(rolling[:, None] % tables.primes[place, heads] + tables.offsets[place, heads])
    return torch.cat(found, 1)


def engram_proj(call: Call, rows: Tensor) -> Tensor:
    """Keys of every stream and the value they share, [m, (streams + 1) h]."""
    return call.kernels.linear(rows, call.weights["engram.wkv"])


def engram_gate(call: Call, kv: Tensor, carry: Any, ffn_out: Tensor | None, shared_out: Tensor | None) -> Any:
    """The streams after the layer before, with the memory added where it agrees with them."""
    x = call.kernels.hc_expand(carry, ffn_out, shared_out)
    w = call.weights
    gated = call.kernels.engram_gate(
        x, kv, w["engram.q_weight"].data, w["engram.k_weight"].data, call.rank.numerics.rms_norm_eps
    )
    if isinstance(carry, Streams):
        return carry._replace(x=gated)
    return gated


def hc_attention(
    call: Call, carry: Any, ffn_out: Tensor | None, shared_out: Tensor | None, attn_out: Tensor | None
) -> tuple[Streams, Tensor]:
    """Close the layer before and enter attention."""
    del attn_out  # closed when the layer before entered its experts
    if call.spec.engram is not None:
        ffn_out = shared_out = None  # closed before the memory was added
    if call.is_draft and call.spec.index == len(call.rank.model.layers):
        carry, ffn_out, shared_out = _embedded(call, _draft_block(call)), None, None
    streams, entered = _enter(call, "attn", carry, ffn_out, shared_out)
    draft = call.rank.model.draft
    if call.rank.nextn and draft is not None and call.spec.index in draft.target_layers and not call.is_draft:
        call.step.features.append(wide(call.narrowed(streams.x)).mean(1).to(streams.x.dtype))
    return streams, entered


def hc_ffn(
    call: Call, carry: Streams, ffn_out: Tensor | None, shared_out: Tensor | None, attn_out: Tensor
) -> tuple[Streams, Tensor]:
    """Close attention and enter the experts."""
    del ffn_out, shared_out  # closed when the layer was entered
    narrow = Streams(*(call.narrowed(column) for column in carry))
    return _enter(call, "ffn", narrow, attn_out, None)


def _enter(call: Call, sublayer: str, carry: Any, y: Tensor | None, y2: Tensor | None) -> tuple[Streams, Tensor]:
    w, numerics = call.weights, call.rank.numerics
    found: tuple[Streams, Tensor] = call.kernels.hc_enter(
        carry,
        y,
        y2,
        w[f"hc_{sublayer}_fn"].data,
        w[f"hc_{sublayer}_base"].data,
        w[f"hc_{sublayer}_scale"].data,
        w[f"{sublayer}_norm"].data,
        numerics.rms_norm_eps,
        numerics.hc_eps,
        numerics.hc_iterations,
    )
    return found


def _draft_block(call: Call) -> Tensor:
    """Tokens of the draft blocks: each request's newest, then noise."""
    slots = call.step.draft_slots
    assert slots is not None
    block = call.rank.draft.block_size
    noise = torch.full((len(slots), block - 1), call.rank.numerics.noise_token, dtype=torch.int32, device=slots.device)
    return torch.cat((call.rank.state.tokens[slots.long(), :1], noise), 1).flatten()


OPERATORS: dict[str, Callable[..., Any]] = {
    "embedding": embedding,
    "engram_lookup": engram_lookup,
    "engram_proj": engram_proj,
    "engram_gate": engram_gate,
    "hc_attention": hc_attention,
    "hc_ffn": hc_ffn,
}
