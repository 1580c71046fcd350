"""Token ids for the prompts of a workload, which states lengths and shared prefixes only."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from deepinfer.numeric import Ints
from deepinfer.workload.generate import RequestSpec

_TOKEN_STREAM = 3
"""Spawn key beside those of lengths and arrivals in `generate.py`."""


def prompt_tokens(requests: Iterable[RequestSpec], vocab_size: int, seed: int) -> Iterator[tuple[int, ...]]:
    """A prompt of the right length for each request, uniform over the vocabulary. Same seed, same tokens.

    Equal block ids have equal tokens, so that prompts share exactly the prefixes that the workload says they share;
    what no block id names is the request's own. Uniform tokens load experts more evenly than text does.
    """
    vocabulary = tuple(range(vocab_size))  # one object per token, whoever uses it
    for spec in requests:
        named = min(len(spec.block_ids) * spec.block_tokens, spec.prompt_tokens)
        parts = [_draw(vocab_size, seed, (0, block), spec.block_tokens) for block in spec.block_ids]
        own = _draw(vocab_size, seed, (1, spec.id), spec.prompt_tokens - named)
        drawn = np.concatenate([*parts, own])[: spec.prompt_tokens] if parts else own
        yield tuple(map(vocabulary.__getitem__, drawn.tolist()))


def _draw(vocab_size: int, seed: int, key: tuple[int, int], count: int) -> Ints:
    stream = np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(_TOKEN_STREAM, *key))))
    return stream.integers(0, vocab_size, count)
