"""Queries, window and global KV, the indexer, sparse attention and its output projection."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from backends.torch_runtime.context import Call
from backends.torch_runtime.rows import RowArrays
from backends.torch_runtime.views import EntryView


class Latent(NamedTuple):
    """Global entries that the rows complete, `raw` and normalised [m, dim]; other rows' have no use."""

    raw: Tensor
    entries: Tensor


class GlobalRecords(NamedTuple):
    """Cache records of entries and of their index keys, one of each per row."""

    main: Tensor
    keys: Tensor


def compressor(call: Call, attn_in: Tensor) -> Latent:
    """Project every row to its part of a global entry, pool entries, normalise them."""
    w, eps, k = call.weights, call.rank.numerics.rms_norm_eps, call.kernels
    if call.attention.ratio == 1:
        pooled = k.linear(attn_in, w["attn.compressor.wkv"])
    else:
        value = k.linear_fp32(attn_in, w["attn.compressor.wkv"])
        gate = k.linear_fp32(attn_in, w["attn.compressor.wgate"])
        pooled = _pooled(call, torch.stack((value, gate), 1)).to(call.rank.dtype)
    return Latent(pooled, k.rms_norm(pooled, w["attn.compressor.norm"].data, eps))


def _pooled(call: Call, parts: Tensor) -> Tensor:
    """Entries of parts FP32 [m, 2, dim] (value, gate): each row with the ones before it, which may be in the tail."""
    state, rows, ratio = call.rank.state, call.step.every.local, call.attention.ratio
    tail = state.tails[call.spec.index]
    length = tail.shape[1]
    flat = tail.flatten(0, 1)
    here = torch.arange(len(rows), device=parts.device)
    window = []
    for back in range(ratio - 1, -1, -1):
        earlier = rows.pos - back
        inside = earlier >= _first_local(call, rows)
        place = torch.where(inside, 0, rows.slot * length + earlier.clamp_min(0) % length)
        window.append(torch.where(inside[:, None, None], parts[(here - back).clamp_min(0)], flat[place.long()]))
    stacked = torch.stack(window, 1)
    entries = call.kernels.pool_pairs(stacked[:, :, 0].contiguous(), stacked[:, :, 1].contiguous())
    _keep_tail(rows, parts, flat, length, state.nobody)
    return entries


def _first_local(call: Call, rows: RowArrays) -> Tensor:
    """First position of the run of neighbouring rows that each row is in: others of its request may be elsewhere."""
    first = call.step.run_first
    return rows.first if first is None else first


def _keep_tail(rows: RowArrays, parts: Tensor, flat: Tensor, length: int, nobody: int) -> None:
    """Remember the last rows of each request, for entries that are still open or will be again."""
    stays = (rows.pos > rows.last - length) & (rows.slot != nobody)
    place = torch.where(stays, rows.slot * length + rows.pos % length, nobody * length)
    flat[place.long()] = parts


def index_keys(call: Call, latent: Latent) -> Tensor:
    """Index keys of the entries, before their norm: [m, dim]."""
    return call.kernels.linear(latent.entries, call.weights["attn.indexer.wk"])


def store_global_kv(call: Call, latent: Latent, index_k: Tensor) -> GlobalRecords | None:
    """Rotate entries and keys to the first position they stand for, and store them as records."""
    rank, ratio, rows, w = call.rank, call.attention.ratio, call.step.every, call.weights
    cos, sin = (table[(rows.local.pos // ratio * ratio).long()] for table in rank.rotary[True])
    storage, eps, encode = rank.state.shape.storage, rank.numerics.rms_norm_eps, call.kernels.norm_rope_encode
    records = GlobalRecords(
        encode(latent.raw, w["attn.compressor.norm"].data, eps, cos, sin, storage, "main"),
        encode(index_k, w["attn.indexer.k_norm"].data, eps, cos, sin, storage, "index"),
    )
    if rank.layout.cp > 1:
        return records
    _write_global(call, records)
    return None


def gather_global_kv(call: Call, records: GlobalRecords) -> None:
    """Prompts' records of all ranks of the replica, stored on each."""
    _write_global(call, GlobalRecords(*(call.step.gathered(column, kept=False) for column in records)))


def _write_global(call: Call, records: GlobalRecords) -> None:
    state, index, k = call.rank.state, call.spec.index, call.kernels
    places = call.step.every_entry_places(call.attention.ratio)
    k.scatter_records(records.main, state.main[index].flatten(0, 1), places)
    k.scatter_records(records.keys, state.keys[index].flatten(0, 1), places)


def q_a_kv(call: Call, attn_in: Tensor) -> tuple[Tensor, Tensor]:
    """Latent queries [m, rank] and window keys [m, dim], before their norms."""
    both = call.kernels.linear(call.narrowed(attn_in), call.weights["attn.wq_a_kv"])
    rank = call.attention.q_lora_rank
    return both[:, :rank], both[:, rank:]


def norm_rope_store(call: Call, q_latent: Tensor, window_latent: Tensor) -> tuple[Tensor, Tensor]:
    """Normalised latent queries, and records of the rows' window keys.

    Records go to the ring once attention has read what they overwrite there.
    """
    w, eps, k = call.weights, call.rank.numerics.rms_norm_eps, call.kernels
    cos, sin = call.rotary
    storage = call.rank.state.shape.storage
    records = k.norm_rope_encode(window_latent, w["attn.kv_norm"].data, eps, cos, sin, storage, "window")
    return k.rms_norm(q_latent, w["attn.q_norm"].data, eps), records


def gather_window_kv(call: Call, records: Tensor) -> Tensor:
    """Prompts' window records of all ranks of the replica, behind those of this rank's decoding requests."""
    return records if call.is_draft else call.step.gathered(records, kept=call.spec.bounded)


def q_b(call: Call, q_latent: Tensor) -> Tensor:
    """Queries of every head, rotated: [m, heads, dim]."""
    q = call.kernels.linear(q_latent, call.weights["attn.wq_b"]).unflatten(1, (call.attention.num_heads, -1))
    return call.kernels.rope(q, *call.rotary, inplace=True)


def index_q(call: Call, q_latent: Tensor) -> Tensor:
    """Index queries, rotated: [m, heads, dim]."""
    q = call.kernels.linear(q_latent, call.weights["attn.indexer.wq_b"]).unflatten(1, (call.attention.index_heads, -1))
    return call.kernels.rope(q, *call.rotary, inplace=True)


def index_weights(call: Call, attn_in: Tensor) -> Tensor:
    """How much each index head counts, FP32 [m, heads], with the scales of heads and of their dimension."""
    scale = (call.attention.index_heads * call.attention.index_dim) ** -0.5
    weights: Tensor = call.kernels.linear_fp32(call.narrowed(attn_in), call.weights["attn.indexer.weights_proj"])
    return weights.mul_(scale)


def index_score(call: Call, q: Tensor, weights: Tensor, global_kv: Any) -> Tensor:
    """Scores of the entries that each row sees or, in layers that look into candidates, of those."""
    del global_kv  # in the caches
    state, a, view = call.rank.state, call.attention, call.view
    assert a.kv_owner is not None
    candidates = call.step.selected.get("candidates") if a.index_limit is not None else None
    return call.kernels.index_scores(
        q,
        weights,
        state.keys[a.kv_owner],
        state.block_table,
        view.local.slot,
        view.visible(state, a.ratio),
        max(call.step.max_context // a.ratio, 1),
        candidates,
        call.rank.numerics.candidate_block,
    )


def topk(call: Call, scores: Tensor) -> Tensor:
    """Records int32 [m, topk] that each row attends to; the candidate layer also chooses its blocks."""
    a, numerics, step, k, state = call.attention, call.rank.numerics, call.step, call.kernels, call.rank.state
    assert a.topk is not None
    assert a.kv_owner is not None
    visible = call.view.visible(state, a.ratio)
    candidates = step.selected.get("candidates") if a.index_limit is not None else None
    if call.spec.index == numerics.candidate_layer:
        blocks = min(numerics.candidate_blocks, -(-scores.shape[1] // numerics.candidate_block))
        step.selected["candidates"] = k.candidate_blocks(scores, visible, blocks, numerics.candidate_block)
    entries = k.select_topk(scores, visible, a.topk, candidates, numerics.candidate_block)
    # Caches of the same ratio are paged alike: other layers find the same records in theirs.
    return k.entry_records(entries, state.block_table, call.view.local.slot, state.main[a.kv_owner].shape[1])


def attention_decode(call: Call, q: Tensor, window_kv: Tensor, global_kv: Any, selected: Tensor | None) -> Tensor:
    """Attention of decoding rows (draft rows among them), in the place of all rows' output; heads rotated back."""
    del global_kv
    view, out = call.view, torch.empty_like(q)
    rows = slice(0, view.num_decode)
    if view.num_decode:
        out[rows] = _rotated_back(call, _attend(call, q, window_kv, selected, rows), rows)
    if view.num_decode == len(view):
        _keep_window(call, window_kv)
    return out


def attention_prefill(
    call: Call, q: Tensor, window_kv: Tensor, global_kv: Any, selected: Tensor | None, out: Tensor | None = None
) -> Tensor:
    """Attention of prompt rows, into the output of the decoding ones where the graph has these."""
    del global_kv
    view = call.view
    if out is None or not view.num_decode:
        out = torch.empty_like(q)
    if view.num_decode < len(view):
        rows = slice(view.num_decode, len(view))
        out[rows] = _attend(call, q, window_kv, selected, rows)
        _keep_window(call, window_kv)
    return out


def rotate_heads(call: Call, heads: Tensor) -> Tensor:
    """Rotate back the heads of prompt rows."""
    rows = slice(call.view.num_decode, len(call.view))
    if call.view.num_decode < len(call.view):
        heads[rows] = _rotated_back(call, heads[rows], rows)
    return heads


def _attend(call: Call, q: Tensor, window_kv: Tensor, selected: Tensor | None, rows: slice) -> Tensor:
    a, state, view = call.attention, call.rank.state, call.view
    window = view.window(state.rings[call.spec.index], window_kv, rows)
    entries = None
    if a.ratio:
        assert a.kv_owner is not None
        assert selected is not None
        entries = EntryView(state.main[a.kv_owner], selected[rows])
    return call.kernels.sparse_attention(
        q[rows], call.weights["attn.attn_sink"].data, a.head_dim**-0.5, window, entries
    )


def _rotated_back(call: Call, heads: Tensor, rows: slice) -> Tensor:
    cos, sin = call.rotary
    return call.kernels.rope(heads, cos[rows], sin[rows], inverse=True, inplace=True)


def _keep_window(call: Call, records: Tensor) -> None:
    if not call.is_draft:
        ring = call.rank.state.rings[call.spec.index].flatten(0, 1)
        call.kernels.scatter_records(records, ring, call.view.ring_place)


def o_a(call: Call, heads: Tensor) -> Tensor:
    """Each group of heads projected on its own: [m, groups x rank]."""
    groups = heads.flatten(1).unflatten(1, (call.attention.o_groups, -1))
    return call.kernels.linear_grouped(groups, call.weights["attn.wo_a"]).flatten(1)


def o_b(call: Call, latent: Tensor) -> Tensor:
    """The attention's output [m, h]."""
    return call.kernels.linear(latent, call.weights["attn.wo_b"])


OPERATORS: dict[str, Callable[..., Any]] = {
    "compressor": compressor,
    "index_keys": index_keys,
    "store_global_kv": store_global_kv,
    "gather_global_kv": gather_global_kv,
    "q_a_kv": q_a_kv,
    "norm_rope_store": norm_rope_store,
    "gather_window_kv": gather_window_kv,
    "q_b": q_b,
    "index_q": index_q,
    "index_weights": index_weights,
    "index_score": index_score,
    "topk": topk,
    "attention_decode": attention_decode,
    "attention_prefill": attention_prefill,
    "rotate_heads": rotate_heads,
    "o_a": o_a,
    "o_b": o_b,
}
