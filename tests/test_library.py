"""The planner as a library: against the simulator, against limiting cases, and wherever its simulations run."""

from __future__ import annotations

import importlib.util
import inspect
import socket
import subprocess
import sys
from dataclasses import fields
from types import ModuleType
from typing import Any

import numpy as np
import pytest

import planner
from deepinfer.errors import UsageError
from deepinfer.hardware.spec import Accelerator, Quantity, load_hardware
from deepinfer.layout.plan import LayoutSpec, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.workload.spec import ClosedLoop, FixedLength, Workload
from planner import Acceptance, ParallelLayout, Plan, SearchResult, decode_curve, prefill_curve, search, simulate
from planner.problem import Question

LINEAR = Acceptance(convention="linear", rates=(0.75,), source="DeepInfer 0.1.0 README")
EP8 = ParallelLayout(dp=8, ep=8)


def test_importing_the_library_loads_nothing() -> None:
    names = ("numpy", "pydantic", "planner.api")
    code = f"import sys, planner; dir(planner); print([n for n in {names} if n in sys.modules])"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


def test_public_names_are_there_and_stay_what_they_are() -> None:
    """A submodule of the same name would take a function's place as soon as something imports it."""
    for name in planner.__all__:
        assert not inspect.ismodule(getattr(planner, name))
        assert importlib.util.find_spec(f"planner.{name}") is None
    with pytest.raises(AttributeError, match="no attribute 'serach'"):
        planner.serach  # noqa: B018


def test_search_takes_every_field_of_a_question() -> None:
    assert {f.name for f in fields(Question)} <= set(inspect.signature(search).parameters)
    with pytest.raises(UsageError, match="unknown keyword 'hardwear': did you mean hardware"):
        search(8, hardwear="b200")


def plan_of(
    users: int, isl: int, osl: int, nextn: int, seqs: int, chunk: int, waves: int = 1, layout: ParallelLayout = EP8
) -> Plan:
    settings = EngineSettings(max_num_seqs=seqs, max_tokens_per_step=seqs * (1 + nextn) + chunk, nextn=nextn)
    workload = Workload(
        isl=FixedLength(tokens=isl), osl=FixedLength(tokens=osl), arrivals=ClosedLoop(concurrency=users),
        num_requests=waves * users,
    )  # fmt: skip
    return Plan(
        model="deepseek-v3", hardware="h200", gpus=8, workload=workload,
        acceptance=Acceptance(rates=(0.8,), source="test"),
        pools=(Pool(replicas=1, layout=LayoutSpec.of(layout), settings=settings),),
    )  # fmt: skip


def test_decode_is_what_the_simulated_engine_does() -> None:
    """The same cost formula under the real scheduler and SimPy: prompts of one token, so that steps only decode."""
    for users, nextn in ((8, 0), (64, 0), (256, 1)):
        plan = plan_of(users, isl=1, osl=400, nextn=nextn, seqs=users // 8, chunk=512, waves=4)
        curve = decode_curve(
            "deepseek-v3", "h200", layout=EP8, requests_per_gpu=[users / 8], context=200, nextn=nextn, acceptance=0.8
        )
        found = simulate(plan)
        assert found.steps_per_s == pytest.approx(curve.steps_per_s[0], rel=0.01)
        assert found.tokens_per_s_per_user == pytest.approx(curve.tokens_per_s_per_user[0], rel=0.06)


def test_a_lone_prompt_takes_what_the_simulated_engine_takes() -> None:
    """One user of an engine that is one replica; prompts in whole chunks."""
    layout = ParallelLayout(tp=8, ep=8)
    for isl, chunk in ((500, 4096), (4096, 4096), (12_288, 4096)):
        plan = plan_of(1, isl=isl, osl=2, nextn=0, seqs=1, chunk=chunk - 1, layout=layout)
        curve = prefill_curve(
            "deepseek-v3", "h200", layout=layout, prompt_tokens=[isl], chunk_rows_per_gpu=chunk / layout.replica_ranks
        )
        assert simulate(plan).ttft_s.p50 == pytest.approx(curve.latency_s[0], rel=0.02)


def test_three_throughputs_of_one_step() -> None:
    curve = decode_curve(
        layout=ParallelLayout(dp=4, cp=2, ep=8), requests_per_gpu=[8, 64], context=4500, nextn=3, acceptance=LINEAR
    )
    assert curve.tau == 3.25  # DeepInfer's README: nextn 3, 75%
    per_replica = curve.requests_per_gpu * 2
    full = curve.steps_per_s * per_replica * (1 + 3) / 2  # avg_SPS x requests x (1 + nextn) / cp, its benchmark script
    assert curve.full_acceptance_tokens_per_s_per_gpu == pytest.approx(full)
    assert curve.output_tokens_per_s_per_gpu / full == pytest.approx(3.25 / 4)
    assert curve.tokens_per_s_per_user * curve.requests_per_gpu == pytest.approx(curve.output_tokens_per_s_per_gpu)
    conditional = decode_curve(layout=EP8, requests_per_gpu=[8], context=4500, nextn=3, acceptance=0.75)
    assert conditional.tau == pytest.approx(1 + 0.75 + 0.75**2 + 0.75**3)


def times(quantity: Quantity, factor: float) -> Quantity:
    return quantity.model_copy(update={"value": quantity.value * factor})


def without(accelerator: Accelerator, name: str) -> Accelerator:
    """An accelerator with a million times of one rate."""
    value: Any = getattr(accelerator, name)
    more = {k: times(v, 1e6) for k, v in value.items()} if isinstance(value, dict) else times(value, 1e6)
    return accelerator.model_copy(update={name: more})


def test_shares_add_up_and_name_what_removing_a_resource_saves() -> None:
    """Euler's theorem for homogeneous functions, and limiting cases: a resource in abundance has no share."""
    b200 = load_hardware("b200")
    fast = without(without(without(b200, "hbm_bytes_per_s"), "flops_per_s"), "exp_per_s")
    requests = [1, 32, 512]
    ask = {"layout": EP8, "requests_per_gpu": requests, "context": 4000, "nextn": 3, "acceptance": LINEAR}
    now, then = decode_curve(hardware=b200, **ask), decode_curve(hardware=fast, **ask)
    assert sum(now.shares.values()) == pytest.approx(np.ones(3), abs=0.01)
    assert then.shares["HBM"] + then.shares["compute"] == pytest.approx(np.zeros(3), abs=1e-3)
    # Each path gets shorter by at most what its own resources take: another one may then be the longest.
    saved = 1 - then.step_s / now.step_s
    assert np.all(saved <= now.shares["HBM"] + now.shares["compute"] + 0.02)
    assert saved == pytest.approx(now.shares["HBM"] + now.shares["compute"], abs=0.15)
    assert now.bound_by[0] in ("start-up", "HBM")
    assert now.bound_by[-1] == "compute"


def test_prompts_in_chunks_add_up_and_a_cached_prefix_is_not_computed() -> None:
    ask: dict[str, Any] = {"hardware": "b200", "layout": EP8, "replay": "off"}
    whole = prefill_curve(prompt_tokens=[8192], chunk_rows_per_gpu=4096, **ask)
    first = prefill_curve(prompt_tokens=[4096], **ask)
    second = prefill_curve(prompt_tokens=[4096], cached_tokens=4096, **ask)
    rates = [1 / curve.input_tokens_per_s_per_gpu[0] for curve in (whole, first, second)]
    assert rates[0] == pytest.approx((rates[1] + rates[2]) / 2, rel=0.01)
    assert first.latency_s[0] < second.latency_s[0] < whole.latency_s[0]


def test_what_does_not_fit_is_marked() -> None:
    curve = decode_curve("deepseek-v3", "h200", layout=EP8, requests_per_gpu=[1, 100_000], context=4000)
    assert curve.fits.tolist() == [True, False]


@pytest.mark.parametrize("bad", [[], [0], [-1.0], [float("nan")]])
def test_bad_numbers_are_one_sentence(bad: list[float]) -> None:
    with pytest.raises(UsageError, match="requests_per_gpu must be positive numbers"):
        decode_curve(layout=EP8, requests_per_gpu=bad, context=4000)


@pytest.fixture(scope="module")
def local() -> SearchResult:
    return small_search("local")


def small_search(executor: str) -> SearchResult:
    return search(4, hardware="b200", isl=1000, osl=50, pools="mixed", jobs=1, executor=executor)


def test_a_result_reads_and_draws(local: SearchResult) -> None:
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    speeds = [point.tokens_per_s_per_user for point in local.pareto()]
    outputs = [point.output_tokens_per_s_per_gpu for point in local.pareto()]
    assert speeds == sorted(speeds)
    assert outputs == sorted(outputs, reverse=True)
    assert len(local.table(3).splitlines()) == 3 + 3
    assert local.breakdown()[0].seconds == max(item.seconds for item in local.breakdown())
    for draw in (local.plot_pareto, local.plot_breakdown):
        _, ax = plt.subplots()
        assert draw(ax) is ax
        assert draw() is not ax
    plt.close("all")
    assert simulate(local.plan) == local.plan.prediction


@pytest.mark.parametrize(("executor", "sentence"), [
    ("slurm", r"unknown executor 'slurm': known are local, ray\[:ADDRESS\], dask\[:ADDRESS\]"),
    ("local:host", "unknown executor 'local:host'"),
])  # fmt: skip
def test_an_unknown_executor_is_one_sentence(executor: str, sentence: str) -> None:
    with pytest.raises(UsageError, match=sentence):
        small_search(executor)


@pytest.mark.parametrize(("executor", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch, executor: str, package: str) -> None:
    monkeypatch.setitem(sys.modules, package, None)  # as if not installed
    with pytest.raises(UsageError, match=rf"--executor {executor} needs the {executor} extra"):
        small_search(executor)


def test_an_address_where_nobody_answers_is_one_sentence(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "distributed", ModuleType("distributed"))
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]  # bound, but nobody listens
        with pytest.raises(UsageError, match=f"no dask cluster answers at tcp://127.0.0.1:{port}: .*refused"):
            small_search(f"dask:tcp://127.0.0.1:{port}")


@pytest.mark.slow
@pytest.mark.filterwarnings("default")  # what clusters' libraries warn about is not ours
@pytest.mark.parametrize(("executor", "package"), [("ray", "ray"), ("dask", "distributed")])
def test_a_cluster_finds_the_same_bytes(local: SearchResult, executor: str, package: str) -> None:
    pytest.importorskip(package)
    elsewhere = small_search(executor)
    assert [f.plan.to_json() for f in elsewhere.finalists] == [f.plan.to_json() for f in local.finalists]
