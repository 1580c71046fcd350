"""From a workload to its requests: every draw is seeded, and lengths and arrivals have separate streams."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from deepinfer.errors import UsageError
from deepinfer.numeric import Floats, Ints
from deepinfer.workload.spec import (
    MAX_TOKENS,
    Arrivals,
    ClosedLoop,
    FixedLength,
    Lengths,
    PoissonArrivals,
    TraceSource,
    Workload,
)
from deepinfer.workload.trace import Trace, read_trace, rescale

_PROMPT_STREAM, _OUTPUT_STREAM, _ARRIVAL_STREAM = range(3)


@dataclass(frozen=True, slots=True)
class RequestSpec:
    """One request as a user sends it: when, how long, and which prefix it shares with others.

    `arrival_s` in seconds from the start, 0.0 in a closed loop, where admission decides. `block_ids` name
    the prompt's blocks of `block_tokens` tokens: an equal id means an equal block after an equal prefix. A
    prompt that shares nothing has no ids and `block_tokens` 0.
    """

    id: int
    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    block_ids: tuple[int, ...] = ()
    block_tokens: int = 0


def generate_requests(workload: Workload) -> list[RequestSpec]:
    """The workload's requests, ids 0, 1, ... in order of arrival. Same workload, same result.

    Prompt lengths, output lengths and arrivals each have a stream of their own (Philox, spawned from the
    seed), so a new rate changes no length: it stretches the same Poisson gaps. More requests extend the same
    sequence. The first Poisson arrival comes after one gap. Trace times are rescaled over the whole trace
    before the first `num_requests` are taken.
    Raises UsageError for a trace file that `read_trace` refuses, that changed since the plan was made, or
    that has fewer requests than asked for, and for a rate that `rescale` refuses.
    """
    if workload.trace is not None:
        return _from_trace(workload, _verified(workload.trace))
    assert workload.isl is not None
    assert workload.osl is not None
    assert workload.num_requests is not None
    num_requests = workload.num_requests
    arrivals_s = _arrivals(workload.arrivals, num_requests, workload.seed)
    prompts = _draw_lengths(workload.isl, num_requests, _stream(workload.seed, _PROMPT_STREAM))
    outputs = _draw_lengths(workload.osl, num_requests, _stream(workload.seed, _OUTPUT_STREAM))
    columns = zip(arrivals_s.tolist(), prompts.tolist(), outputs.tolist(), strict=True)
    return [RequestSpec(id, *row) for id, row in enumerate(columns)]


def request_hashes(spec: RequestSpec, block_size: int) -> tuple[int, ...]:
    """One integer per full block of `block_size` prompt tokens; equal ones mean an equal prefix up to there.

    An engine block takes the name of the id in which it ends, and its number among the blocks that end there;
    the id vouches for all tokens before it. Two prompts that share their first k ids thus share exactly the
    engine blocks that lie inside those ids. With `block_tokens` a multiple of `block_size` this is
    `id * (block_tokens // block_size) + sub`. Otherwise an engine block may straddle ids, and is shared only
    if all of the ids that it touches are: a hit may be missed and none is invented.
    Integers are comparable only at the same `block_size` and `block_tokens`. A prompt without ids gets ().
    Raises UsageError when `block_size` is below 1.
    """
    if block_size < 1:
        raise UsageError(f"block size {block_size} is below 1 token")
    if not spec.block_ids:
        return ()
    per_id = -(-spec.block_tokens // block_size)
    num_blocks = min(spec.prompt_tokens, len(spec.block_ids) * spec.block_tokens) // block_size
    if spec.block_tokens % block_size == 0:
        inside = range(per_id)
        return tuple([number * per_id + i for number in spec.block_ids for i in inside][:num_blocks])
    hashes = []
    for block in range(num_blocks):
        last = ((block + 1) * block_size - 1) // spec.block_tokens
        first_block_ending_there = last * spec.block_tokens // block_size
        hashes.append(spec.block_ids[last] * per_id + block - first_block_ending_there)
    return tuple(hashes)


def _stream(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(seed, spawn_key=(index,))))


def _draw_lengths(lengths: Lengths, num_requests: int, stream: np.random.Generator) -> Ints:
    if isinstance(lengths, FixedLength):
        return np.full(num_requests, lengths.tokens, dtype=np.int64)
    maximum = MAX_TOKENS if lengths.maximum is None else lengths.maximum
    mu = np.log(lengths.mean) - lengths.sigma**2 / 2
    drawn = np.rint(stream.lognormal(mu, lengths.sigma, num_requests))
    return np.clip(drawn, lengths.minimum, maximum).astype(np.int64)


def _arrivals(arrivals: Arrivals, num_requests: int, seed: int, trace: Trace | None = None) -> Floats:
    if isinstance(arrivals, ClosedLoop):
        return np.zeros(num_requests)
    if isinstance(arrivals, PoissonArrivals):
        return _poisson(arrivals.rate, num_requests, _stream(seed, _ARRIVAL_STREAM))
    assert trace is not None
    arrivals_s = trace.arrivals_s if arrivals.rate is None else rescale(trace.arrivals_s, arrivals.rate)
    return arrivals_s[:num_requests]


def _poisson(rate: float, num_requests: int, stream: np.random.Generator) -> Floats:
    with np.errstate(over="ignore"):
        arrivals_s: Floats = np.cumsum(stream.standard_exponential(num_requests)) / rate
    if not np.isfinite(arrivals_s[-1]):
        raise UsageError(f"rate {rate!r} requests/s is too small: the last arrival is not a finite time")
    return arrivals_s


def _verified(source: TraceSource) -> Trace:
    trace = read_trace(source.path)
    if trace.sha256 != source.sha256:
        raise UsageError(
            f"trace file {source.path} changed since the plan was made: "
            f"its sha256 is {trace.sha256[:12]}..., the plan says {source.sha256[:12]}..."
        )
    if trace.format != source.format:
        raise UsageError(f"trace file {source.path} is of format {trace.format}, the plan says {source.format}")
    return trace


def _from_trace(workload: Workload, trace: Trace) -> list[RequestSpec]:
    available = len(trace.arrivals_s)
    num_requests = workload.num_requests or available
    if num_requests > available:
        assert workload.trace is not None
        raise UsageError(f"trace file {workload.trace.path} has {available} requests, fewer than {num_requests}")
    arrivals_s = _arrivals(workload.arrivals, num_requests, workload.seed, trace)
    columns = zip(
        arrivals_s.tolist(),
        trace.prompt_tokens[:num_requests].tolist(),
        trace.output_tokens[:num_requests].tolist(),
        trace.block_ids[:num_requests],
        strict=True,
    )
    return [RequestSpec(id, *row, trace.block_tokens) for id, row in enumerate(columns)]
