"""How one request is sampled and when it ends; the names and defaults are those of vLLM's `SamplingParams`."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from deepinfer.errors import UsageError

GREEDY_BELOW = 1e-5
"""Temperatures below this take the most likely token (DeepInfer 0.1.0)."""
MAX_LOGPROBS = 1000
"""Most log-probabilities per token (DeepInfer 0.1.0, `top_logprobs`)."""
_MAX_INT64 = 2**63 - 1
_MAX_INT32 = 2**31 - 1


@dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request. Raises UsageError, one sentence, for a value out of its range.

    The distribution is tempered, cut to the `top_k` likeliest tokens (-1 or 0: all), then to the fewest that hold
    `top_p` of what is left. A request ends after `max_tokens` tokens or before, when it produces an end-of-sequence
    token (not with `ignore_eos`), one of `stop_token_ids`, or text that contains one of `stop`. Its first
    `min_tokens` tokens never end it, nor does text that begins in them. Text is cut before the stop string, token ids
    are not. Equal `seed`s sample equally whatever else is in the batch; None takes one from the engine's seed and the
    request's number. `logprobs` asks for so many log-probabilities per token, beside that of the token taken.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    max_tokens: int = 16
    min_tokens: int = 0
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_real("temperature", self.temperature)
        if self.temperature < 0:
            raise UsageError(f"temperature must be at least 0, got {self.temperature:g}")
        _check_real("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise UsageError(f"top_p must lie above 0 and not above 1, got {self.top_p:g}")
        _check_whole("top_k", self.top_k, -1, _MAX_INT32)
        _check_whole("max_tokens", self.max_tokens, 1)
        _check_whole("min_tokens", self.min_tokens, 0)
        if self.min_tokens > self.max_tokens:
            raise UsageError(f"min_tokens {self.min_tokens} exceeds max_tokens {self.max_tokens}")
        if self.seed is not None:
            _check_whole("seed", self.seed, 0, _MAX_INT64)
        if self.logprobs is not None:
            _check_whole("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        # Whatever sequences came in, frozen parameters hold tuples: hashable, and nobody else's.
        object.__setattr__(self, "stop", _stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _stop_ids(self.stop_token_ids))

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is taken, without chance."""
        return self.temperature < GREEDY_BELOW

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty without any."""
        return _stop_strings(self.stop)

    @property
    def stop_ids(self) -> tuple[int, ...]:
        """`stop_token_ids` as a tuple, empty without any."""
        return tuple(self.stop_token_ids or ())


def derived_seed(seed: int, number: int) -> int:
    """The seed of request number so-and-so of an engine: below 2^63, and unlike those of its neighbours."""
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def _check_real(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        raise UsageError(f"{name} must be a finite number, got {value!r}")


def _check_whole(name: str, value: object, low: int, high: int | None = None) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise UsageError(f"{name} must be a whole number, got {value!r}")
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise UsageError(f"{name} must be {bounds}, got {value}")


def _stop_strings(stop: str | Sequence[str] | None) -> tuple[str, ...]:
    if stop is not None and not isinstance(stop, Iterable):
        raise UsageError(f"stop must be a string or a list of them, got {stop!r}")
    strings = (stop,) if isinstance(stop, str) else tuple(stop or ())
    for string in strings:
        if not isinstance(string, str) or not string:
            raise UsageError(f"stop must be strings that are not empty, got {string!r}")
    return strings


def _stop_ids(ids: Sequence[int] | None) -> tuple[int, ...]:
    if ids is not None and not isinstance(ids, Iterable):
        raise UsageError(f"stop_token_ids must be a list of token ids, got {ids!r}")
    listed = tuple(ids or ())
    for token in listed:
        _check_whole("stop_token_ids", token, 0)
    return listed
