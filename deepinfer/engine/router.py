"""Which attention replica of a pool a request goes to: policies as pure functions of what the replicas hold."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from deepinfer.layout.plan import RouterName
from deepinfer.scheduler.request import Request

WAITING_WEIGHT = 4
"""A waiting request weighs as much as four running ones (vLLM's data-parallel balancer)."""
SPREAD_REQUESTS, SPREAD_RATIO, HIT_SHARE = 32, 1.0001, 0.5
"""When a cache-aware router follows load instead of the cache: defaults of sglang-router's `balance_abs_threshold`,
`balance_rel_threshold` and `cache_threshold`."""


class ReplicaState(Protocol):
    """What a router sees of an attention replica."""

    @property
    def num_waiting(self) -> int:
        """Requests sent to it and not admitted."""
        ...

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""
        ...

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that it has cached."""
        ...


Router = Callable[[Request, Sequence[ReplicaState]], int]
"""Index of the replica that gets a request; called once for each, in order of arrival."""


def make_router(name: RouterName) -> Router:
    """A router of one pool; each pool needs its own."""
    match name:
        case "round_robin":
            return _round_robin()
        case "least_loaded":
            return _least_loaded()
        case "cache_aware":
            return _cache_aware()


def load(replica: ReplicaState) -> int:
    """Load of a replica as vLLM's balancer counts it: 4 x waiting + running."""
    return WAITING_WEIGHT * replica.num_waiting + replica.num_running


def _least_loaded() -> Router:
    """The replica with the least load; equals take turns, as with nginx's `least_conn`.

    Always the first of equals would give one engine all the work while others have none.
    """
    start = 0

    def choose(request: Request, replicas: Sequence[ReplicaState]) -> int:
        nonlocal start
        del request
        count = len(replicas)
        chosen = min(range(count), key=lambda i: (load(replicas[i]), (i - start) % count))
        start = chosen + 1
        return chosen

    return choose


def _cache_aware() -> Router:
    """The replica that has most of the prompt cached, if that is half of it and the replicas are balanced.

    Otherwise the least loaded one. Unlike sglang-router, which estimates it from what it sent, this one knows what is
    cached (as with KV events).
    """
    least_loaded = _least_loaded()

    def choose(request: Request, replicas: Sequence[ReplicaState]) -> int:
        counts = [replica.num_waiting + replica.num_running for replica in replicas]
        spread = max(counts) - min(counts) > SPREAD_REQUESTS and max(counts) > SPREAD_RATIO * min(counts)
        if request.block_hashes and not spread:
            hits = [replica.cached_tokens(request) for replica in replicas]
            if max(hits) > HIT_SHARE * request.prompt_tokens:
                best = [i for i, hit in enumerate(hits) if hit == max(hits)]
                return min(best, key=lambda i: load(replicas[i]))
        return least_loaded(request, replicas)

    return choose


def _round_robin() -> Router:
    turns = 0

    def choose(request: Request, replicas: Sequence[ReplicaState]) -> int:
        nonlocal turns
        del request
        turns += 1
        return (turns - 1) % len(replicas)

    return choose
