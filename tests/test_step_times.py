"""Tabulated step times against the closed form that they are tables of."""

from __future__ import annotations

import math
import random

import numpy as np
import pytest

from backends.sim.stepgrid import Axis, StepGrid
from backends.sim.steptime import StepTimer, most_loaded
from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.engine.shape import ReplicaLoad, heaviest, step_shape
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.spec import FixedLength, PoissonArrivals, Workload

WIDE, NARROW = LayoutSpec(dp=8, ep=8), LayoutSpec(cp=8, ep=8)


def deploy(model: str, hardware: str, layout: LayoutSpec, **changes: object) -> Deployment:
    settings = EngineSettings(max_num_seqs=128, max_tokens_per_step=8192, **changes)  # type: ignore[arg-type]
    workload = Workload(
        isl=FixedLength(tokens=9), osl=FixedLength(tokens=9), arrivals=PoissonArrivals(rate=1), num_requests=1
    )
    (deployment,) = resolve(
        Plan(
            model=model,
            hardware=hardware,
            gpus=8,
            pools=(Pool(replicas=1, layout=layout, settings=settings),),
            workload=workload,
            acceptance=Acceptance(rates=(0.7,), source="test"),
        )
    )
    return deployment


def random_load(rng: random.Random, nextn: int, compact: bool) -> ReplicaLoad:
    """Up to 1,024 requests and 16 prompts of up to 4,096 rows each, after up to 100,000 tokens."""

    def up_to(most: int) -> int:
        return round(math.exp(rng.uniform(0, math.log(most))))

    decodes = rng.choice([0, up_to(1024)])
    chunks = rng.choice([0, 1, 1, up_to(16)]) if decodes else rng.choice([1, 1, up_to(16)])
    rows = sum(up_to(4096) for _ in range(chunks))
    last = rng.randint(0, chunks)
    kept = min(rows, 140 * last + chunks - last) if compact else rows
    start = float(rng.choice([0, up_to(100_000)])) if chunks else 0.0
    context = float(up_to(100_000)) if decodes else 0.0
    return ReplicaLoad(decodes, nextn if decodes else 0, context, chunks, rows, start, kept, last)


@pytest.mark.parametrize("nextn", [0, 3])
@pytest.mark.parametrize(
    ("model", "hardware", "layout", "replay"),
    [
        ("deepseek-v4.1-flash", "b200", WIDE, "off"),
        ("deepseek-v4.1-flash", "b200", WIDE, "compact"),
        ("deepseek-v4.1-flash", "b200", NARROW, "compact"),
        ("deepseek-v4-flash", "b200", WIDE, "off"),
        ("deepseek-v3", "h200", NARROW, "off"),
        ("deepseek-v3.2", "h200", WIDE, "off"),
    ],
)
def test_a_replica_alone_takes_what_the_closed_form_says(
    model: str, hardware: str, layout: LayoutSpec, replay: str, nextn: int
) -> None:
    """Within 4% for any step, 2% for 19 of 20, and without a bias."""
    deployment = deploy(model, hardware, layout, replay=replay, nextn=nextn)
    costs, graph = CostModel(deployment.cluster.accelerator), deployment.graph()
    timer, rng, errors = StepTimer(deployment, costs), random.Random(0), []
    for _ in range(100):
        load = random_load(rng, nextn, replay == "compact")
        rows, kept = float(load.num_rows), float(load.num_kept_rows)
        share = rng.uniform(1 / 8, 1.5) if layout == WIDE else 1.0
        rows, kept = rows * share, kept * share
        found = timer.one(load, rows, kept)
        exact = float(step_cost(graph, step_shape(load, rows, kept, 8), costs).seconds)
        errors.append(found / exact - 1)
    assert np.max(np.abs(errors)) < 0.04
    assert np.percentile(np.abs(errors), 95) < 0.02
    assert abs(np.mean(errors)) < 0.004


def test_a_grid_is_exact_for_products_of_affine_functions() -> None:
    """Whatever the cell, zero and points beyond the first floor included."""

    def function(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        return (2 + 3 * a) * (1 + b) * (5 - 0.5 * c)

    axes = (Axis(1.0, 2, 2), Axis(128.0, 1, 3), Axis(1.0, 1, 1, bounded=True))
    grid, rng = StepGrid(axes, function), random.Random(3)
    points = [(0.0, 0.0, 0.0), (1.0, 128.0, 1.0), (2.0, 256.0, 0.5)]
    points += [(rng.uniform(0, 99), rng.uniform(0, 1e5), rng.random()) for _ in range(200)]
    for point in points:
        assert grid(*point) == pytest.approx(float(function(*map(np.asarray, point))), rel=1e-9)


def test_a_grid_is_evaluated_block_by_block() -> None:
    """All cells of a block come from one pass over it."""
    passes = []

    def function(a: np.ndarray) -> np.ndarray:  # type: ignore[type-arg]
        passes.append(a)
        return a

    grid = StepGrid((Axis(1.0, 1, 4),), function)
    for value in (0.5, 1.5, 3.0, 7.9):
        grid(value)
    assert [p.tolist() for p in passes] == [[0.0, 1.0, 2.0, 4.0, 8.0]]


def test_decoding_replicas_are_compared_as_any_others_are() -> None:
    """Two ways to find the heaviest: by arrays, and one by one, equals included."""
    rng = random.Random(5)
    for _ in range(300):
        counts = [rng.randint(1, 4) for _ in range(5)]
        cached = [count * rng.randint(1, 4) for count in counts]
        by_rows, by_cached = most_loaded(np.array(counts), np.array(cached))
        loads = [ReplicaLoad(n, 1, c / n) for n, c in zip(counts, cached, strict=True)]
        assert {loads[int(by_rows)], loads[int(by_cached)]} == set(heaviest(loads))
