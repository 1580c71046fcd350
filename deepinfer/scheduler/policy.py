"""What a scheduler is told: limits and policies, as values."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from deepinfer.errors import UsageError
from deepinfer.scheduler.request import Request


def first_come_first_served(request: Request) -> tuple[float, int]:
    """Order by arrival, then id."""
    return (request.arrival_s, request.id)


@dataclass(frozen=True)
class SchedulerConfig:
    """Limits and policies, all values: nothing is looked up elsewhere.

    `window` tokens are replayed after a prefix hit (0: the cached KV is complete), `transfer_window` after a transfer
    from another pool (0: it brings the windows along, and the first token has been generated there). With `keep_tokens`
    only that many last rows of a prompt go through bounded layers (None: all). Chunks that do not end a prompt are
    multiples of `chunk_multiple`. `order` sorts requests, most urgent first: the last running one is preempted first.
    """

    max_num_seqs: int
    max_tokens_per_step: int
    num_blocks: int
    block_tokens: int
    num_slots: int = 0
    nextn: int = 0
    window: int = 0
    transfer_window: int = 0
    keep_tokens: int | None = None
    chunk_multiple: int = 1
    prefix_cache: bool = True
    order: Callable[[Request], tuple[float, int]] = first_come_first_served

    def __post_init__(self) -> None:
        if self.max_tokens_per_step < self.max_num_seqs * (1 + self.nextn) + self.chunk_multiple:
            raise UsageError(
                f"max_tokens_per_step {self.max_tokens_per_step} leaves no room for a prompt beside the "
                f"{self.max_num_seqs} x {1 + self.nextn} rows of a full decode step"
            )
