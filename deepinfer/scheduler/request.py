"""What the scheduler knows of a request: token counts and block hashes, never tokens or tensors."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Request:
    """A request as it arrives: `block_hashes` identify the full KV blocks of its prompt (empty: a unique prompt).

    It ends after `max_new_tokens` tokens, or earlier when a step's result says so. `arrival_s` is only carried
    along: the scheduler has no clock.

    Between pools: with `keeps_blocks` its memory outlives it until `Scheduler.release`, for another pool to read. The
    KV of `transferred_tokens` of its prompt is read from such a pool: it is admitted, waits for `Scheduler.received`,
    replays windows if they are not transferred, and decodes. A request that has been decoding elsewhere comes with
    `generated_tokens` of its `max_new_tokens`, and with the KV of all but the newest of them, windows included.
    """

    id: int
    prompt_tokens: int
    max_new_tokens: int
    block_hashes: tuple[int, ...] = ()
    arrival_s: float = 0.0
    keeps_blocks: bool = False
    transferred_tokens: int = 0
    generated_tokens: int = 0
