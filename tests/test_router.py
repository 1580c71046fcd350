"""Routers as functions of what replicas hold, and what they do for a trace whose prompts share prefixes."""

from __future__ import annotations

import json
import random
from dataclasses import dataclass
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from backends.sim import SimBackend
from deepinfer.engine.deployment import resolve
from deepinfer.engine.router import SPREAD_REQUESTS, make_router
from deepinfer.layout.plan import LayoutSpec, Plan, Pool, RouterName
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.record import RunRecord
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import TraceArrivals, Workload
from deepinfer.workload.trace import trace_source


@dataclass(frozen=True)
class Replica:
    """What a router sees of a replica, and no more."""

    num_waiting: int
    num_running: int
    cached: int = 0

    def cached_tokens(self, request: Request) -> int:
        return min(self.cached, request.prompt_tokens)


PROMPT = Request(0, 1000, 1, block_hashes=tuple(range(7)))
UNIQUE = Request(0, 1000, 1)

counts = st.integers(0, 60)
replicas = st.lists(st.builds(Replica, counts, counts, st.sampled_from([0, 300, 500, 501, 700, 900])), min_size=1)
close = st.lists(st.builds(Replica, st.integers(0, 15), st.integers(0, 17), st.integers(0, 1000)), min_size=1)


@given(pool=replicas, num_requests=st.integers(1, 50))
def test_round_robin_is_fair_and_each_pool_has_its_own_turn(pool: list[Replica], num_requests: int) -> None:
    routers = [make_router("round_robin") for _ in range(2)]
    chosen = [[router(UNIQUE, pool) for _ in range(num_requests)] for router in routers]
    assert chosen[0] == chosen[1]
    times = [chosen[0].count(i) for i in range(len(pool))]
    assert sum(times) == num_requests
    assert max(times) - min(times) <= 1


@given(pool=replicas, request=st.sampled_from([PROMPT, UNIQUE]))
def test_least_loaded_by_brute_force(pool: list[Replica], request: Request) -> None:
    """Nobody has a smaller sum of running and four times waiting requests, and nobody before it an equal one."""
    chosen = make_router("least_loaded")(request, pool)
    own = pool[chosen]
    for i, other in enumerate(pool):
        difference = 4 * (other.num_waiting - own.num_waiting) + other.num_running - own.num_running
        assert difference > 0 or (difference == 0 and i >= chosen)


@given(
    pool=st.lists(st.builds(Replica, st.integers(0, 1), st.integers(0, 4)), min_size=1), num_requests=st.integers(1, 40)
)
def test_equals_take_turns(pool: list[Replica], num_requests: int) -> None:
    """While nothing changes, the replicas of the least load get one request each before any gets another."""
    router = make_router("least_loaded")
    chosen = [router(UNIQUE, pool) for _ in range(num_requests)]
    loads = [4 * r.num_waiting + r.num_running for r in pool]
    times = [chosen.count(i) for i in range(len(pool)) if loads[i] == min(loads)]
    assert sum(times) == num_requests
    assert max(times) - min(times) <= 1


@given(pool=close)
def test_cache_aware_follows_the_prefix_while_replicas_are_balanced(pool: list[Replica]) -> None:
    """Counts differ by 32 at most: who has most of the prompt gets it, if that is more than half."""
    chosen = make_router("cache_aware")(PROMPT, pool)
    most = max(r.cached for r in pool)
    if most > 500:
        assert pool[chosen].cached == most
        equals = [4 * r.num_waiting + r.num_running for r in pool if r.cached == most]
        assert 4 * pool[chosen].num_waiting + pool[chosen].num_running == min(equals)
    else:
        assert chosen == make_router("least_loaded")(PROMPT, pool)
    assert make_router("cache_aware")(UNIQUE, pool) == make_router("least_loaded")(UNIQUE, pool)


@given(pool=replicas, running=st.integers(SPREAD_REQUESTS + 1, 200))
def test_cache_aware_follows_load_when_replicas_are_not_balanced(pool: list[Replica], running: int) -> None:
    pool = [*pool, Replica(0, 0), Replica(0, running, cached=1000)]
    assert make_router("cache_aware")(PROMPT, pool) == make_router("least_loaded")(PROMPT, pool)


# A trace whose prompts share prefixes


@pytest.fixture(scope="module")
def talks(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, int]:
    """Thirty conversations of five turns of 1,024 tokens, mixed; and the tokens a single endless cache would hit."""
    rng = random.Random(1)
    turns = sorted((turn + rng.random(), talk) for turn in range(5) for talk in range(30))
    lines, seen, hits = [], dict.fromkeys(range(30), 0), 0
    for i, (_, talk) in enumerate(turns):
        hits += 1024 * seen[talk]
        seen[talk] += 1
        ids = [100 * talk + block for block in range(2 * seen[talk])]
        tokens = 512 * len(ids) + 100
        lines.append({"timestamp": 40 * i, "input_length": tokens, "output_length": 4, "hash_ids": [*ids, 10_000 + i]})
    path = tmp_path_factory.mktemp("talks") / "trace.jsonl"
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path, hits


def serve(trace: Path, router: RouterName, pools: int) -> RunRecord:
    """Eight attention replicas of V3 prefill; with two pools eight more decode."""
    workload = Workload(trace=trace_source(str(trace)), arrivals=TraceArrivals())
    settings = EngineSettings(max_num_seqs=16, max_tokens_per_step=2048)
    layout = LayoutSpec(dp=8, ep=8)
    mixed = Pool(replicas=1, layout=layout, settings=settings)
    both = [mixed.model_copy(update={"role": role}) for role in ("prefill", "decode")]
    plan = Plan(
        model="deepseek-v3",
        hardware="h200",
        gpus=8 * pools,
        pools=(mixed,) if pools == 1 else tuple(both),
        workload=workload,
        acceptance=Acceptance(rates=(0.7,), source="test"),
        router=router,
    )
    return SimBackend(check_integrity=True).run(
        resolve(plan), plan.workload, plan.acceptance, generate_requests(workload)
    )


@pytest.mark.parametrize("pools", [1, 2])
def test_a_cache_aware_router_finds_more_of_the_prefixes(talks: tuple[Path, int], pools: int) -> None:
    """Least loaded and round robin send a conversation's next turn anywhere: of 8 replicas few have its beginning."""
    trace, endless = talks
    hits = {name: serve(trace, name, pools).num_hit_tokens for name in ("round_robin", "least_loaded", "cache_aware")}
    assert hits["least_loaded"] < 0.7 * endless
    assert hits["round_robin"] < 0.7 * endless
    assert max(hits["least_loaded"], hits["round_robin"]) < hits["cache_aware"] <= endless
    assert hits["cache_aware"] > 0.8 * endless
