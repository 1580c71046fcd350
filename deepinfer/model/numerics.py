"""Constants of a model's arithmetic: what a graph's work does not depend on, and its tokens do."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deepinfer.numeric import Floats, Ints


@dataclass(frozen=True)
class Yarn:
    """YaRN scaling of rotary frequencies (Peng et al. 2023), without its attention factor."""

    factor: float
    original_context: int
    beta_fast: float
    beta_slow: float


@dataclass(frozen=True)
class Rotary:
    """Rotary position embedding over the trailing `dim` numbers of a head, pairs of neighbours rotated together."""

    dim: int
    theta: float
    yarn: Yarn | None = None

    def frequencies(self) -> Floats:
        """Radians per position of each of the dim / 2 pairs.

        YaRN divides by `factor` those that turn less than `beta_slow` times over the original context, keeps
        those that turn more than `beta_fast` times, and interpolates between by pair number.
        """
        pairs = np.arange(0, self.dim, 2) / self.dim
        plain = self.theta**-pairs
        if self.yarn is None:
            return plain
        low = math.floor(self._pair_turning(self.yarn.beta_fast))
        high = math.ceil(self._pair_turning(self.yarn.beta_slow))
        low, high = max(low, 0), min(high, self.dim - 1)
        ramp = np.clip((np.arange(self.dim // 2) - low) / max(high - low, 0.001), 0.0, 1.0)
        scaled: Floats = plain / self.yarn.factor * ramp + plain * (1.0 - ramp)
        return scaled

    def _pair_turning(self, turns: float) -> float:
        """The pair number that turns so many times over the original context."""
        assert self.yarn is not None
        return self.dim * math.log(self.yarn.original_context / (turns * 2 * math.pi)) / (2 * math.log(self.theta))


@dataclass(frozen=True)
class EngramHash:
    """How n-grams of token ids choose rows of the tables (V4.1's `inference/engram.py`, as nemo-automodel states it).

    Token ids are first mapped to `compressed_vocab` ids of normalised text. The hash of an n-gram is the XOR of
    its ids times odd multipliers of the layer, modulo a prime of (layer, n, head) just above `vocab_size`: no prime is
    used twice. Heads lie one behind the other in the layer's table.
    """

    layers: tuple[int, ...]
    num_rows: tuple[int, ...]
    vocab_size: int
    compressed_vocab: int
    max_ngram: int
    num_heads: int
    pad_token: int

    def multipliers(self) -> Ints:
        """Odd multipliers [layers, max_ngram], small enough that products with ids fit in int64."""
        bound = max(1, np.iinfo(np.int64).max // self.compressed_vocab // 2)
        rows = [np.random.default_rng(10007 * layer).integers(0, bound, self.max_ngram) for layer in self.layers]
        odd: Ints = np.asarray(rows, dtype=np.int64) * 2 + 1
        return odd

    def primes(self) -> Ints:
        """Moduli [layers, (max_ngram - 1) x num_heads], n-grams of two tokens first."""
        used: set[int] = set()
        rows = []
        for _ in self.layers:
            row: list[int] = []
            for _ in range(self.max_ngram - 1):
                last = self.vocab_size - 1
                for _ in range(self.num_heads):
                    last = _next_prime(last, used)
                    used.add(last)
                    row.append(last)
            rows.append(row)
        return np.asarray(rows, dtype=np.int64)


@dataclass(frozen=True)
class Numerics:
    """Constants of DeepSeek-V4.1's arithmetic, from its config.json.

    `rotary` is that of layers without global KV and of the draft, `rotary_global` that of the others. Blocks of
    `candidate_block` index keys compete for the `candidate_blocks` that later indexers look into; the
    `candidate_layer` chooses. `noise_token` fills the rows of a draft block behind its first.
    """

    rms_norm_eps: float
    hc_eps: float
    hc_iterations: int
    swiglu_limit: float
    route_scale: float
    rotary: Rotary
    rotary_global: Rotary
    candidate_layer: int
    candidate_blocks: int
    candidate_block: int
    noise_token: int
    engram: EngramHash | None = None


def _next_prime(after: int, used: set[int]) -> int:
    candidate = after + 1
    while candidate in used or not _is_prime(candidate):
        candidate += 1
    return candidate


def _is_prime(number: int) -> bool:
    if number < 4:
        return number > 1
    return number % 2 == 1 and all(number % d for d in range(3, math.isqrt(number) + 1, 2))
