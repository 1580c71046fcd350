"""Head, sampling and verification, and the draft module's own operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from backends.torch_runtime.context import Call
from backends.torch_runtime.formats import wide
from backends.torch_runtime.reference.elementwise import Streams
from backends.torch_runtime.rows import RowView, decode_rows
from backends.torch_runtime.state import LOOK_BACK

_BIAS = "markov_head.head"


def hc_head(
    call: Call, carry: Streams, ffn_out: Tensor | None, shared_out: Tensor | None, attn_out: Tensor | None
) -> tuple[Streams, Tensor]:
    """Close the last layer for the rows that give tokens: normalised hidden rows [n, h]."""
    del attn_out
    wanted, rank = call.step.logit_of_kept, call.rank
    last = carry
    if wanted is not None:
        last = Streams(*(column[wanted] for column in carry))
        ffn_out, shared_out = (None if y is None else y[wanted] for y in (ffn_out, shared_out))
    _, normed = call.kernels.hc_leave(last, ffn_out, shared_out, rank.weights.norm, rank.numerics.rms_norm_eps)
    return carry, normed


def lm_head(call: Call, hidden: Tensor) -> Tensor:
    """FP32 logits [n, vocab]."""
    return call.kernels.linear_fp32(hidden, call.rank.head)


def sample(call: Call, logits: Tensor) -> Tensor:
    """Sample a token for every row, keep the drafts that were sampled too, and move the requests on.

    A draft is kept when the target samples the same token: with the noise of a position fixed by (seed, position),
    output does not depend on what was drafted, and a draft is kept with the target's probability of it.
    """
    step, state = call.step, call.rank.state
    decoding, rows = step.decode_slots, state.shape.rows_per_request
    num_decode = len(decoding) * rows
    slot = torch.cat((decoding[:, None].expand(-1, rows).flatten(), step.first_slots)).long()
    position = torch.cat((step.every.local.pos[:num_decode], step.first_pos)) + 1
    sampled = call.kernels.sample(
        logits,
        state.temperature[slot],
        state.top_k[slot],
        state.top_p[slot],
        state.seed[slot],
        position.long(),
    )
    step.outputs["tokens"] = tokens = sampled[:num_decode].view(-1, rows)
    step.outputs["first"] = first = sampled[num_decode:]
    step.outputs["kept"] = kept = _verified(state.tokens[decoding.long()], tokens)
    if step.logprobs is not None:
        logprobs = logits.log_softmax(-1)
        step.outputs["taken"] = logprobs.gather(1, sampled.long()[:, None])[:, 0]
        step.outputs["best"], step.outputs["best_ids"] = logprobs.topk(min(step.logprobs, logprobs.shape[1]), -1)
    _advance(call, tokens, kept)
    _begin(call, first)
    return sampled


def _verified(drafted: Tensor, sampled: Tensor) -> Tensor:
    """Tokens kept int32 [n] of rows [n, 1 + nextn]: as long as what was drafted for a row's place was sampled there."""
    agrees = (sampled[:, :-1] == drafted[:, 1:]).int().cumprod(1)
    return 1 + agrees.sum(1, dtype=torch.int32)


def _advance(call: Call, sampled: Tensor, kept: Tensor) -> None:
    """Decoding requests: the last kept token becomes the newest."""
    state, slots = call.rank.state, call.step.decode_slots.long()
    history = torch.cat((state.recent[slots], state.tokens[slots]), 1)
    back = torch.arange(LOOK_BACK, device=slots.device)
    state.recent[slots] = history.gather(1, kept.long()[:, None] + back)
    state.tokens[slots, 0] = sampled.gather(1, kept.long()[:, None] - 1)[:, 0]
    state.cached[slots] += torch.where(slots == state.nobody, 0, kept)


def _begin(call: Call, first: Tensor) -> None:
    """Requests whose prompt has just ended: their first token. What came before it the host has set."""
    slots = call.step.first_slots.long()
    call.rank.state.tokens[slots, 0] = first
    call.rank.state.cached[slots] = call.step.first_pos + 1


def draft_features(call: Call, carry: Streams) -> Tensor:
    """What the draft module sees of the verified rows: the target layers' streams, projected and normalised."""
    del carry  # the target layers have left theirs
    w = call.rank.draft_weights(0)
    features = torch.cat(call.step.features, 1)
    projected = call.kernels.linear(features, w["main_proj"])
    return call.kernels.rms_norm(projected, w["main_norm"].data, call.rank.numerics.rms_norm_eps)


def draft_context_kv(call: Call, features: Tensor) -> Tensor:
    """Window keys of the verified rows in every draft layer's ring; then the rows of the draft blocks."""
    rank, kept, k = call.rank, call.step.kept, call.kernels
    cos, sin = kept.rotary[False]
    for i, layer in enumerate(rank.draft.layers):
        w = rank.draft_weights(i)
        latent = k.linear(features, rank.draft_wkv[i])
        norm, storage = w["attn.kv_norm"].data, rank.state.shape.storage
        records = k.norm_rope_encode(latent, norm, rank.numerics.rms_norm_eps, cos, sin, storage, "window")
        records = call.step.gathered(records, kept=True)
        k.scatter_records(records, rank.state.rings[layer.index].flatten(0, 1), kept.ring_place)
    _draft_rows(call)
    return features


def _draft_rows(call: Call) -> None:
    """The blocks to draft: of every request that decodes or has just begun to, from its newest token on."""
    step, state, block = call.step, call.rank.state, call.rank.draft.block_size
    slots = step.draft_slots = torch.cat((step.decode_slots, step.first_slots))
    rows = decode_rows(state, slots, block)
    valid = state.valid_bounded[rows.slot.long()]
    window = call.rank.model.window
    step.drafting = RowView(
        local=rows,
        buffer=rows,
        num_decode=len(rows),
        ring_lo=torch.minimum(torch.maximum(valid, rows.first - window), rows.first),
        ring_hi=rows.first,
        buf_lo=rows.base,
        buf_hi=rows.base + block,
        ring_place=torch.full_like(rows.pos, -1, dtype=torch.int64),
        rotary={False: tuple(table[rows.pos.long()] for table in call.rank.rotary[False])},  # type: ignore[dict-item]
    )


def draft_lm_head(call: Call, carry: Streams, ffn_out: Tensor, shared_out: Tensor) -> Tensor:
    """FP32 logits [n, nextn, vocab] of the positions to draw, before what the token before each says."""
    rank = call.rank
    norm = rank.draft_heads["norm"].data
    both = call.kernels.hc_leave(carry, ffn_out, shared_out, norm, rank.numerics.rms_norm_eps)
    hidden, normed = (rows.unflatten(0, (-1, rank.draft.block_size))[:, : rank.nextn] for rows in both)
    call.step.outputs["draft_hidden"] = hidden
    logits: Tensor = call.kernels.linear_fp32(normed.flatten(0, 1), rank.head).unflatten(0, (-1, rank.nextn))
    return logits


def draft_markov_embedding(call: Call, drafted: Any) -> Tensor:
    """Embeddings [n, rank] of the tokens before the position that is drawn."""
    del drafted  # in the state: the newest token, then what was drafted so far
    return call.rank.draft_heads["markov_head.embed"].data[_before(call).long()]


def draft_markov_bias(call: Call, markov: Tensor) -> Tensor:
    """What the token before says about the next one: FP32 [n, vocab]."""
    weights = call.rank.draft_heads
    hidden = call.step.outputs["draft_hidden"][:, call.position]
    both = torch.cat((wide(hidden), wide(markov).to(wide(hidden).dtype)), 1)
    # How likely the token of this position survives verification (uncalibrated, DSpark 1.2).
    confidence = torch.sigmoid(call.kernels.linear_fp32(both, weights["confidence_head.proj"]))[:, 0]
    call.step.outputs[f"confidence_{call.position}"] = confidence
    return call.kernels.linear_fp32(markov, weights[_BIAS])


def draft_markov_sample(call: Call, logits: Tensor, bias: Tensor) -> Tensor:
    """The likeliest token of this position: greedy drafts are verified without loss at any temperature."""
    drafted = (logits[:, call.position] + bias).argmax(-1).int()
    state, slots = call.rank.state, call.step.draft_slots
    assert slots is not None
    call.step.outputs["drafted"] = drafted
    state.tokens[slots.long(), call.position + 1] = drafted
    return drafted


def _before(call: Call) -> Tensor:
    slots = call.step.draft_slots
    assert slots is not None
    if call.position == 0:
        return call.rank.state.tokens[slots.long(), 0]
    return call.step.outputs["drafted"]


OPERATORS: dict[str, Callable[..., Any]] = {
    "hc_head": hc_head,
    "lm_head": lm_head,
    "sample": sample,
    "draft_features": draft_features,
    "draft_context_kv": draft_context_kv,
    "draft_lm_head": draft_lm_head,
    "draft_markov_embedding": draft_markov_embedding,
    "draft_markov_bias": draft_markov_bias,
    "draft_markov_sample": draft_markov_sample,
}
