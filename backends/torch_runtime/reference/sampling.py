"""Sampling in plain torch: temperature, top-k and top-p, then a race of Gumbel noise.

The noise of a token is a function of (seed, position, token id) alone, so a row draws the same token in any batch, on
any device. Philox-4x32-10: Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11. Gumbel-max: the
argmax of log p + Gumbel noise is a draw from p.
"""

from __future__ import annotations

import torch
from torch import Tensor

from deepinfer.sampling.params import GREEDY_BELOW

_MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS = (0x9E3779B9, 0xBB67AE85)
_ROUNDS = 10
_WORD = 0xFFFFFFFF
_BELOW_ONE = 1.0 - 2.0**-24


def sample(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor, seed: Tensor, position: Tensor) -> Tensor:
    """One token id per row, int32 [m], of logits FP32 [m, V]; -inf excludes a token.

    temperature FP32 [m] (below 1e-5: the best token, the lowest id of equals), top_k int32 [m] (0: all), top_p FP32
    [m] (1: all), seed and position int64 [m]. A token stays if fewer than top_k tokens are better, and if those of
    the remaining tokens that are better hold less than top_p of their mass: tokens of equal logits stay or go together,
    and the best one always stays.
    """
    greedy = temperature < GREEDY_BELOW
    heat = torch.where(greedy, 1.0, temperature)
    kept = logits >= truncation_threshold(logits, heat, top_k, top_p)[:, None]
    raced = logits / heat[:, None] + gumbel(seed, position, logits.shape[1])
    raced = torch.where(kept, raced, -torch.inf)
    return torch.where(greedy[:, None], logits, raced).argmax(-1).to(torch.int32)


def truncation_threshold(logits: Tensor, temperature: Tensor, top_k: Tensor, top_p: Tensor) -> Tensor:
    """The lowest logit [m] that top-k, then top-p at this temperature, leaves in each row of logits [m, V]."""
    values = logits.sort(-1, descending=True).values
    last = torch.where(top_k > 0, top_k, values.shape[1]).clamp_max(values.shape[1]).long()[:, None] - 1
    eligible = values >= values.gather(1, last)
    mass = ((values - values[:, :1]).double() / temperature[:, None]).exp().masked_fill(~eligible, 0.0)
    better = mass.cumsum(-1) - mass
    within = (better < top_p[:, None] * mass.sum(-1, keepdim=True)) | (top_p >= 1.0)[:, None]
    kept = (within & eligible).sum(-1, keepdim=True)
    return values.gather(1, (kept - 1).clamp_min(0)).squeeze(1)


def gumbel(seed: Tensor, position: Tensor, vocabulary: int) -> Tensor:
    """Noise FP32 [m, vocabulary] of seeds and positions int64 [m]; token t takes word t % 4 of counter t // 4."""
    block = torch.arange(-(-vocabulary // 4), device=seed.device)[None, :]
    low, high = position[:, None] & _WORD, (position[:, None] >> 32) & _WORD
    key = (seed[:, None] & _WORD, (seed[:, None] >> 32) & _WORD)
    words = philox((block, low, high, torch.zeros_like(low)), key)
    bits = torch.stack(words, -1).flatten(1)[:, :vocabulary]
    return -_exponential(bits).log()


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[Tensor, Tensor]) -> tuple[Tensor, ...]:
    """Four random 32-bit words of a 128-bit counter and a 64-bit key; all int64 tensors that hold uint32."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(_ROUNDS):
        # A product of two 32-bit words wraps into the sign, but its 64 bits are right.
        first, second = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0, c1 = ((second >> 32) & _WORD) ^ c1 ^ k0, second & _WORD
        c2, c3 = ((first >> 32) & _WORD) ^ c3 ^ k1, first & _WORD
        k0, k1 = (k0 + _KEY_STEPS[0]) & _WORD, (k1 + _KEY_STEPS[1]) & _WORD
    return c0, c1, c2, c3


def _exponential(bits: Tensor) -> Tensor:
    """-log(1 - u) of u = (bits + 1/2) / 2^32, exact to a few ulp where u is small: those values win the race."""
    u = ((bits.float() + 0.5) * 2.0**-32).clamp_max(_BELOW_ONE)
    rest = 1.0 - u
    return torch.where(rest == 1.0, u, -rest.log() * (u / (1.0 - rest)))
