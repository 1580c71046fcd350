"""The runtime and the simulator decide the same steps: chunks, batches, blocks and preemptions, one by one."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
from tiny_engine import (
    BLOCK_TOKENS,
    QUICK,
    VOCAB,
    Decisions,
    Served,
    TinyEngine,
    recorded_decisions,
    simulated_decisions,
    tiny_deployment,
    tiny_model,
    undecided_weights,
)

from deepinfer.engine.backend import engine_request
from deepinfer.hardware.spec import ClusterSpec, load_hardware
from deepinfer.workload.generate import RequestSpec
from deepinfer.workload.tokens import prompt_tokens

MODEL = tiny_model(**QUICK)
WEIGHTS = undecided_weights(MODEL)


def workload(count: int, seed: int) -> list[RequestSpec]:
    """Requests that all come at once; every second one shares the blocks of a prompt's beginning with others."""
    rng = np.random.default_rng(seed)
    lengths = zip(rng.integers(20, 75, count).tolist(), rng.integers(1, 25, count).tolist(), strict=True)
    return [
        RequestSpec(
            i, 0.0, prompt, output, tuple(range(7, 7 + prompt // BLOCK_TOKENS)) * (i % 2), BLOCK_TOKENS * (i % 2)
        )
        for i, (prompt, output) in enumerate(lengths)
    ]


def computed_decisions(engine: TinyEngine, requests: list[RequestSpec]) -> tuple[Decisions, Served]:
    """What the runtime decides while it computes tokens."""
    hashes = [engine_request(request, BLOCK_TOKENS, 0.0).block_hashes for request in requests]
    each = [{"max_tokens": r.output_tokens, "temperature": r.id % 3 * 2.0} for r in requests]
    with recorded_decisions() as found:
        served = engine.serve(list(prompt_tokens(requests, VOCAB, seed=1)), hashes=hashes, each=each)
    return found, served


@pytest.mark.parametrize(
    ("settings", "num_blocks"),
    [
        ({"async_scheduling": True}, 64),
        ({"async_scheduling": True}, 10),
        ({"async_scheduling": False}, 10),
        ({"async_scheduling": True, "replay": "compact", "keep_tokens": 20, "prefix_cache": False}, 10),
    ],
)
def test_every_decision_is_that_of_the_simulator(settings: dict[str, Any], num_blocks: int) -> None:
    requests = workload(9, seed=num_blocks)
    deployment = tiny_deployment(MODEL, num_blocks=num_blocks, nextn=3, max_tokens_per_step=41, **settings)
    computed, served = computed_decisions(TinyEngine(deployment, WEIGHTS), requests)
    # Times of the host's cores are not known, and decisions must not depend on times.
    accelerator = replace(deployment, cluster=ClusterSpec(load_hardware("b200"), 1))
    simulated = simulated_decisions(accelerator, requests, computed.kept)
    assert simulated.kept == computed.kept
    assert simulated.plans == computed.plans
    assert [len(tokens) for tokens in served.tokens] == [request.output_tokens for request in requests]
    assert (served.num_preemptions > 0) == (num_blocks == 10)
    assert (served.num_hit_tokens > 0) == deployment.settings.prefix_cache
    assert {kept for rounds in computed.kept.values() for kept in rounds} >= {1, 2, 3}
