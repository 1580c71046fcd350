"""A part of a cluster stands for all of it: what it is made of, and what its figures are beside those of the whole."""

from __future__ import annotations

from typing import Any

import pytest

from deepinfer.engine import simulate
from deepinfer.engine.deployment import resolve
from deepinfer.engine.simulate import simulate_plan, smallest_part
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import Summary
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.spec import Arrivals, ClosedLoop, FixedLength, LognormalLength, PoissonArrivals, Workload


def plan_of(
    model: str,
    layouts: tuple[LayoutSpec, LayoutSpec],
    replicas: tuple[int, int],
    arrivals: Arrivals,
    num_requests: int,
    **changes: Any,
) -> Plan:
    """A plan of a prefill and a decode pool whose GPUs are all used; `changes` are settings of the decode pool."""
    taking = EngineSettings(**{"max_num_seqs": 256, "max_tokens_per_step": 1024} | changes)
    pools = (
        Pool(role="prefill", replicas=replicas[0], layout=layouts[0], settings=EngineSettings(max_num_seqs=64)),
        Pool(role="decode", replicas=replicas[1], layout=layouts[1], settings=taking),
    )
    workload = Workload(
        isl=LognormalLength(mean=1000, sigma=0.6),
        osl=LognormalLength(mean=40, sigma=0.5),
        arrivals=arrivals,
        num_requests=num_requests,
    )
    return Plan(
        model=model,
        hardware="h200" if model == "deepseek-v3" else "b200",
        gpus=sum(pool.replicas * pool.layout.resolve().num_ranks for pool in pools),
        pools=pools,
        workload=workload,
        acceptance=Acceptance(rates=(0.7,), source="test"),
    )


USERS = ClosedLoop(concurrency=96, ramp_s=1.0, warm_up_s=1.5)
EIGHT = LayoutSpec(dp=8, ep=8)


@pytest.mark.parametrize(
    ("layouts", "replicas", "parts", "run"),
    [
        ((EIGHT, EIGHT), (2, 3), 2, ((8, 1), (12, 2))),  # 12 replicas of two engines
        ((EIGHT, EIGHT), (2, 4), 2, ((8, 1), (16, 2))),  # what prefills is not divided below a step group
        ((EIGHT, LayoutSpec(dp=32, ep=8)), (4, 1), 4, ((8, 1), (8, 1))),  # an engine of four step groups
        ((LayoutSpec(dp=32, ep=8), LayoutSpec(dp=32, ep=32)), (1, 1), 4, ((8, 1), (8, 1))),
        ((LayoutSpec(cp=8, ep=8), EIGHT), (3, 3), 3, ((1, 1), (8, 1))),
        ((LayoutSpec(cp=8, ep=8), LayoutSpec(cp=8, ep=8)), (4, 16), 4, ((1, 1), (4, 4))),
        ((LayoutSpec(cp=8, ep=8), LayoutSpec(cp=8, ep=8)), (3, 4), 1, ((3, 3), (4, 4))),
    ],
)
def test_a_part_has_its_share_of_everything(
    layouts: tuple[LayoutSpec, LayoutSpec],
    replicas: tuple[int, int],
    parts: int,
    run: tuple[tuple[int, int], tuple[int, int]],
) -> None:
    """Users, GPUs and (attention replicas, step groups) of the most parts where 8 replicas of 256 requests decode."""
    plan = plan_of("deepseek-v3", layouts, replicas, USERS, 96)
    whole = resolve(plan)
    workload, part = smallest_part(plan.workload, whole)
    assert [(d.attention_replicas, d.step_groups) for d in part] == list(run)
    assert [d.attention_replicas * parts for d in part] == [d.attention_replicas for d in whole]
    assert [d.num_gpus * parts for d in part] == pytest.approx([d.num_gpus for d in whole])
    assert isinstance(workload.arrivals, ClosedLoop)
    assert workload.arrivals.concurrency * parts == 96
    assert workload.num_requests == 96 // parts


def both(plan: Plan, monkeypatch: pytest.MonkeyPatch) -> tuple[Summary, Summary]:
    """Figures of the part and of the whole."""
    part = simulate_plan(plan)
    monkeypatch.setattr(simulate, "_num_parts", lambda deployments, closed: 1)
    whole = simulate_plan(plan)
    assert part.num_gpus == whole.num_gpus / 2
    return part, whole


def assert_alike(part: Summary, whole: Summary) -> None:
    assert part.steps_per_s == pytest.approx(whole.steps_per_s, rel=0.05)
    assert part.tpot_s.mean == pytest.approx(whole.tpot_s.mean, rel=0.05)
    assert part.tpot_s.p90 == pytest.approx(whole.tpot_s.p90, rel=0.05)
    assert part.ttft_s.mean == pytest.approx(whole.ttft_s.mean, rel=0.12)
    assert part.ttft_s.p90 == pytest.approx(whole.ttft_s.p90, rel=0.12)


@pytest.mark.parametrize(
    ("model", "layouts", "replicas"),
    [
        ("deepseek-v3", (EIGHT, LayoutSpec(dp=16, ep=16)), (2, 1)),  # half of a step group decodes
        ("deepseek-v4.1-flash", (LayoutSpec(dp=2, cp=4, ep=8), EIGHT), (2, 2)),
    ],
)
def test_half_of_the_users_on_half_of_the_replicas(
    model: str, layouts: tuple[LayoutSpec, LayoutSpec], replicas: tuple[int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Output, steps and TPOT within 5%, time to the first token within 12%: half of the users draw other lengths.

    With a hundred users instead of some hundreds the prompts that V4.1 prefills together spread their replays over two
    engines instead of one, which moves output by 5 to 8%.
    """
    many = USERS.model_copy(update={"concurrency": 768})
    part, whole = both(plan_of(model, layouts, replicas, many, 4800, nextn=1), monkeypatch)
    assert part.output_tokens_per_s_per_gpu == pytest.approx(whole.output_tokens_per_s_per_gpu, rel=0.05)
    assert_alike(part, whole)


def test_half_of_poisson_arrivals_on_half_of_the_replicas(monkeypatch: pytest.MonkeyPatch) -> None:
    """Alike; output is what has arrived, give or take 3 standard deviations of a Poisson count."""
    monkeypatch.setattr(simulate, "MAX_ROUTED_REQUESTS", 100)
    plan = plan_of("deepseek-v3", (EIGHT, EIGHT), (2, 2), PoissonArrivals(rate=40.0), 600, nextn=1)
    part, whole = both(plan, monkeypatch)
    noise = 3 * part.requests_arrived**-0.5
    assert part.output_tokens_per_s_per_gpu == pytest.approx(whole.output_tokens_per_s_per_gpu, rel=noise)
    assert_alike(part, whole)


def test_some_replicas_of_a_mixed_engine_stand_for_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """8 of 32 replicas, 1,024 of 4,096 places: output within 2%, TPOT 1%, time to the first token 6%.

    They miss the others' bad luck: what a step waits for is the largest of fewer replicas.
    """
    settings = EngineSettings(max_num_seqs=128, max_tokens_per_step=2048, nextn=2)
    plan = Plan(
        model="deepseek-v4.1-flash",
        hardware="gb200-nvl72",
        gpus=32,
        pools=(Pool(replicas=1, layout=LayoutSpec(dp=32, ep=32), settings=settings),),
        workload=Workload(
            isl=FixedLength(tokens=1000),
            osl=FixedLength(tokens=200),
            arrivals=ClosedLoop(concurrency=4096, ramp_s=5.0, warm_up_s=1.0, measure_s=5.5),
            num_requests=60_000,
        ),
        acceptance=Acceptance(rates=(0.7,), source="test"),
    )
    (deployment,) = smallest_part(plan.workload, resolve(plan))[1]
    assert (deployment.replicas_per_group, deployment.num_gpus) == (8, 8.0)
    part = simulate_plan(plan)
    monkeypatch.setattr(simulate, "_num_parts", lambda deployments, closed: 1)
    whole = simulate_plan(plan)
    assert part.output_tokens_per_s_per_gpu == pytest.approx(whole.output_tokens_per_s_per_gpu, rel=0.02)
    assert part.tpot_s.mean == pytest.approx(whole.tpot_s.mean, rel=0.01)
    assert part.tpot_s.p90 == pytest.approx(whole.tpot_s.p90, rel=0.01)
    assert part.ttft_s.mean == pytest.approx(whole.ttft_s.mean, rel=0.06)
