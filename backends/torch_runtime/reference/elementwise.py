"""Hyper-connections, norms, rotary embedding, cache records and the Engram gate in plain torch.

Activations keep the dtype of the input (FP32 or BF16); sums, norms and coefficients are FP32. `m` rows, `h` hidden
size, four residual streams. Formulas: the single-pass hyper-connections of DeepSeek-V4.1, as the implementations of
it in nemo-automodel 0.7.0 and mlx-lm 0.32.2 state them.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from backends.torch_runtime import formats
from backends.torch_runtime.formats import KVStorage, wide

NUM_STREAMS = 4
_SMALLEST_AGREEMENT = 1e-6


class Streams(NamedTuple):
    """Residual streams x [m, 4, h] and the FP32 coefficients of the sublayer that was entered last.

    `pre` [m, 4] collapses the streams for the next sublayer, `post` [m, 4] spreads this sublayer's output over them,
    `comb` [m, 4 (from), 4 (to)] mixes them.
    """

    x: Tensor
    pre: Tensor
    post: Tensor
    comb: Tensor


def hc_enter(
    carry: Streams | Tensor,
    y: Tensor | None,
    y2: Tensor | None,
    fn: Tensor,
    base: Tensor,
    scale: Tensor,
    norm_weight: Tensor,
    eps: float,
    hc_eps: float,
    iters: int,
) -> tuple[Streams, Tensor]:
    """Close the sublayer before, compute this one's coefficients and its normalised input [m, h].

    `y` [m, h] is the output of the sublayer before and `y2` an optional second part of it; without `y`, carry holds
    final streams. A bare `carry` [m, 4, h] enters the first sublayer: its input is stream 0. fn FP32 [24, 4h], base
    FP32 [24], scale FP32 [3]: rows are 4 pre, 4 post, 16 comb. The input is collapsed with the coefficients of the
    sublayer before, not with those computed here.
    """
    x = hc_expand(carry, y, y2)
    pre, post, comb = _coefficients(x, fn, base, scale, eps, hc_eps, iters)
    return Streams(x, pre, post, comb), rms_norm(_collapse(x, _previous_pre(carry)), norm_weight, eps)


def hc_leave(
    carry: Streams | Tensor, y: Tensor | None, y2: Tensor | None, norm_weight: Tensor, eps: float
) -> tuple[Tensor, Tensor]:
    """Close the last sublayer: the collapsed streams [m, h], and the same normalised."""
    collapsed = _collapse(hc_expand(carry, y, y2), _previous_pre(carry))
    return collapsed, rms_norm(collapsed, norm_weight, eps)


def hc_expand(carry: Streams | Tensor, y: Tensor | None, y2: Tensor | None) -> Tensor:
    """Streams [m, 4, h] after the sublayer: x[j] = post[j] * (y + y2) + sum_i comb[i, j] * x[i]; as they are if no y.

    What an operator between sublayers (Engram) reads; `hc_enter` and `hc_leave` do it themselves.
    """
    if not isinstance(carry, Streams):
        return carry
    if y is None:
        return carry.x
    total = wide(y) if y2 is None else wide(y) + wide(y2)
    mixed = torch.einsum("mij,mih->mjh", carry.comb, wide(carry.x))
    return (carry.post[..., None] * total[:, None] + mixed).to(carry.x.dtype)


def _previous_pre(carry: Streams | Tensor) -> Tensor:
    if isinstance(carry, Streams):
        return carry.pre
    pre = torch.zeros(carry.shape[:2], device=carry.device, dtype=wide(carry[:0]).dtype)
    pre[:, 0] = 1.0
    return pre


def _collapse(x: Tensor, pre: Tensor) -> Tensor:
    return (pre[..., None] * wide(x)).sum(1).to(x.dtype)


def _coefficients(
    x: Tensor, fn: Tensor, base: Tensor, scale: Tensor, eps: float, hc_eps: float, iters: int
) -> tuple[Tensor, Tensor, Tensor]:
    flat = wide(x.flatten(1))
    n = NUM_STREAMS
    part_scale = scale.repeat_interleave(torch.tensor([n, n, n * n], device=scale.device), output_size=n * (n + 2))
    mix = (flat @ fn.T.to(flat.dtype)) * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps) * part_scale + base
    pre = torch.sigmoid(mix[:, :n]) + hc_eps
    post = 2 * torch.sigmoid(mix[:, n : 2 * n])
    comb = mix[:, 2 * n :].reshape(-1, n, n).softmax(-1) + hc_eps
    comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    for _ in range(iters - 1):
        comb = comb / (comb.sum(-1, keepdim=True) + hc_eps)
        comb = comb / (comb.sum(-2, keepdim=True) + hc_eps)
    return pre, post, comb


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """x [..., n] over the root of its mean square, times weight [n] before the cast to x.dtype."""
    value = wide(x)
    return (value * torch.rsqrt(value.square().mean(-1, keepdim=True) + eps) * weight.float()).to(x.dtype)


def rope(x: Tensor, cos: Tensor, sin: Tensor, inverse: bool = False, inplace: bool = False) -> Tensor:
    """Rotate the trailing columns of x [m, (heads,) d] in interleaved pairs (2i, 2i + 1).

    cos and sin FP32 [m, rope_dim / 2] say how many columns turn and by how much; `inverse` turns back. `inplace`
    writes into x and returns it.
    """
    rope_dim = 2 * cos.shape[-1]
    if x.dim() == 3:
        cos, sin = cos[:, None], sin[:, None]
    if inverse:
        sin = -sin
    tail = wide(x[..., -rope_dim:])
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), -1).flatten(-2)
    out = x if inplace else x.clone()
    out[..., -rope_dim:] = turned.to(x.dtype)
    return out


def norm_rope_encode(
    x: Tensor,
    weight: Tensor,
    eps: float,
    cos: Tensor,
    sin: Tensor,
    storage: KVStorage,
    kind: Literal["window", "main", "index"],
) -> Tensor:
    """Cache records uint8 [m, record_bytes] of x [m, d]: rms_norm, rope, formats.encode_record."""
    return formats.encode_record(rope(rms_norm(x, weight, eps), cos, sin), storage, kind)


def scatter_records(records: Tensor, cache: Tensor, index: Tensor) -> None:
    """cache[index[i]] = records[i] for records uint8 [m, rb] and cache uint8 [n, rb]; rows of index -1 are skipped.

    The other indices (int64 [m]) must differ.
    """
    kept = index >= 0
    cache[index[kept]] = records[kept]


def pool_pairs(value: Tensor, gate: Tensor) -> Tensor:
    """[g, d]: value FP32 [g, r, d] averaged over r with the weights softmax(gate FP32 [g, r, d]) of each column."""
    return (value * gate.softmax(1)).sum(1)


def engram_gate(x: Tensor, kv: Tensor, q_weight: Tensor, k_weight: Tensor, eps: float) -> Tensor:
    """Add the memory's value to every stream of x [m, 4, h] as far as its key agrees with the stream.

    kv [m, 5h] holds four keys and one value; q_weight and k_weight [4, h] are the two norms' weights. With
    dot = q . k / sqrt(h) of the normalised stream and key, the gate is sigmoid(sign(dot) * sqrt(max(|dot|, 1e-6))).
    """
    streams, h = x.shape[1:]
    hidden = wide(x)
    key = wide(kv[:, : streams * h]).reshape(-1, streams, h)
    value = wide(kv[:, streams * h :])
    norms = torch.rsqrt(hidden.square().mean(-1) + eps) * torch.rsqrt(key.square().mean(-1) + eps)
    dot = (hidden * q_weight.float() * k_weight.float() * key).sum(-1) * norms * h**-0.5
    gate = torch.sigmoid(torch.copysign(dot.abs().clamp_min(_SMALLEST_AGREEMENT).sqrt(), dot))
    return (hidden + gate[..., None] * value[:, None]).to(x.dtype)
