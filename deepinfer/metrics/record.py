"""What a run leaves behind: per request times and counts, per engine steps and rows. Filled by every backend."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field


@dataclass(slots=True)
class RequestRecord:
    """Times of one request, seconds on the run's clock; -1.0 for what has not happened."""

    id: int
    prompt_tokens: int
    arrival_s: float
    first_token_s: float = -1.0
    last_token_s: float = -1.0
    finish_s: float = -1.0
    output_tokens: int = 0


@dataclass(slots=True)
class RunRecord:
    """Events of one run. Counters cover the whole run; `window` is where rates and percentiles are taken.

    `intervals` are pairs (seconds between two deliveries to a request, tokens delivered at the second): inter-token
    latencies are their seconds for the first token and 0 for the others of the same step. `step_groups` engines
    decide steps independently of each other.
    """

    num_gpus: int
    step_groups: int
    window_start_s: float = 0.0
    window_end_s: float = 0.0
    requests: dict[int, RequestRecord] = field(default_factory=dict)
    interval_s: array[float] = field(default_factory=lambda: array("d"))
    interval_tokens: array[int] = field(default_factory=lambda: array("l"))
    delivery_s: array[float] = field(default_factory=lambda: array("d"))
    delivery_tokens: array[int] = field(default_factory=lambda: array("l"))
    step_end_s: array[float] = field(default_factory=lambda: array("d"))
    step_decodes: array[int] = field(default_factory=lambda: array("l"))
    step_decode_rows: array[int] = field(default_factory=lambda: array("l"))
    step_prefill_rows: array[int] = field(default_factory=lambda: array("l"))
    device_busy_s: float = 0.0
    num_preemptions: int = 0
    num_hit_tokens: int = 0
    num_prompt_tokens: int = 0
    refused: list[int] = field(default_factory=list)

    def deliver(self, request_id: int, num_tokens: int, now: float) -> None:
        """Note that a request got tokens at `now`."""
        request = self.requests[request_id]
        if request.first_token_s < 0:
            request.first_token_s = now
        else:
            self.interval_s.append(now - request.last_token_s)
            self.interval_tokens.append(num_tokens)
        request.last_token_s = now
        request.output_tokens += num_tokens
