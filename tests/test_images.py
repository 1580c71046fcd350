"""Images: the vision tower's graph against counts by hand and its weights, and what a pool that encodes them costs."""

from __future__ import annotations

import math
import re
from functools import lru_cache
from typing import Any

import numpy as np
import pytest

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.errors import UsageError
from deepinfer.graph.build.vision import build_vision_graph, image_shape
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import StepShape, visible_entries
from deepinfer.hardware.spec import hardware_names, load_hardware
from deepinfer.layout.plan import EncodePool, Plan, load_plan
from deepinfer.model.hf import load_model
from deepinfer.model.spec import VisionTower
from planner.economics import economics
from planner.encode import BATCHES, encode_figures, encode_line, image_seconds, with_encode
from planner.pipeline import make_screen
from planner.problem import Problem, Question, make_problem, problem_of
from planner.refine import make_plan, run_finalist
from planner.steady import UTILIZATION

V41 = "deepseek-v4.1-flash"
SMALL = VisionTower(
    num_layers=2, hidden_size=6, num_heads=3, width=5, patch_size=2, unshuffle=2, max_tokens=4, output_size=7
)


def tower() -> VisionTower:
    found = load_model(V41).vision
    assert found is not None
    return found


def works(of: VisionTower, shape: StepShape) -> list[tuple[OpKind, Work]]:
    """Kind and work of every operator as often as it runs."""
    return [(op.kind, op.work(shape)) for block in build_vision_graph(of).blocks for op in block.operators]


def flops(of: VisionTower, images: float, tokens: float) -> float:
    return sum(float(work.flops) for _, work in works(of, image_shape(of, images, tokens)))


def encoded(of: VisionTower, patches: np.ndarray) -> tuple[int, np.ndarray]:
    """Multiply-adds of encoding one image with real matrices, each product counted as it is made, and the result."""
    count, rng = 0, np.random.default_rng(0)

    def times(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        nonlocal count
        count += a.shape[0] * a.shape[1] * b.shape[1]
        return a @ b

    def weights(k: int, n: int) -> np.ndarray:
        return rng.normal(size=(k, n)) / math.sqrt(k)

    d, each = of.hidden_size, of.hidden_size // of.num_heads
    x = times(patches, weights(patches.shape[1], d))
    for _ in range(of.num_layers):
        q, k, v = np.split(times(x, weights(d, 3 * d)), 3, axis=1)
        heads = []
        for h in range(of.num_heads):
            part = slice(h * each, (h + 1) * each)
            seen = np.exp(times(q[:, part], k[:, part].T))  # no mask: every patch sees every patch
            heads.append(times(seen / seen.sum(axis=1, keepdims=True), v[:, part]))
        x = x + times(np.concatenate(heads, axis=1), weights(d, d))
        gate, up = np.split(times(x, weights(d, 2 * of.width)), 2, axis=1)
        x = x + times(np.tanh(gate) * up, weights(of.width, d))
    rows = x.reshape(-1, of.unshuffle**2 * d)
    result = times(rows, weights(rows.shape[1], of.output_size))
    return count, result


@pytest.mark.parametrize("tokens", [1, 3, 4])
def test_flops_are_those_of_encoding_with_real_matrices(tokens: int) -> None:
    patches = np.random.default_rng(1).normal(size=(tokens * SMALL.unshuffle**2, 3 * SMALL.patch_size**2))
    multiplied, result = encoded(SMALL, patches)
    assert result.shape == (tokens, SMALL.output_size)
    assert flops(SMALL, 1.0, float(tokens)) == 2 * multiplied


def test_a_full_image_of_v41_by_hand() -> None:
    """9,216 patches of 14 x 14 x 3: 32 layers of 4 x 1024^2 + 3 x 1024 x 2816, and every pair of patches."""
    n = 9216
    layers = 32 * (2 * n * (4 * 1024**2 + 3 * 1024 * 2816) + 4 * 1024 * n**2)
    ends = 2 * n * 588 * 1024 + 2 * 1024 * (9 * 1024) * 5120
    assert tower().max_tokens * tower().patches_per_token == n
    assert flops(tower(), 1.0, 1024.0) == layers + ends


def test_products_read_the_towers_parameters_once_a_batch() -> None:
    """Bytes that do not grow with the images, as the intercept of two batches: all weights, in BF16."""
    one, two = (
        sum(float(w.bytes_read) for kind, w in works(tower(), image_shape(tower(), n, 256.0)) if kind is OpKind.GEMM)
        for n in (1.0, 2.0)
    )
    assert 2 * one - two == 2 * load_model(V41).vision_parameters == 2 * 458_829_824


def test_images_of_a_batch_do_not_see_each_other() -> None:
    """Attention of two images is twice that of one; one of twice the patches has four times; a causal one half."""

    def attention(images: float, tokens: float) -> float:
        shape = image_shape(tower(), images, tokens)
        return sum(float(w.flops) for kind, w in works(tower(), shape) if kind is OpKind.ATTENTION_PREFILL)

    assert attention(2.0, 100.0) == 2 * attention(1.0, 100.0) == attention(1.0, 200.0) / 2
    causal = 32 * 4 * 1024 * float(visible_entries(0.0, 9216.0))
    assert attention(1.0, 1024.0) == pytest.approx(2 * causal, rel=1e-3)


@pytest.mark.parametrize("hardware", hardware_names())
def test_seconds_of_an_image_respect_the_peak_and_the_batch(hardware: str) -> None:
    """Never above peak, arrays as numbers, and a batch within 5% of the largest one that the next smaller misses."""
    accelerator, graph = load_hardware(hardware), build_vision_graph(tower())

    def alone(batch: int, tokens: int) -> float:
        shape = image_shape(tower(), float(batch), float(tokens))
        return float(step_cost(graph, shape, CostModel(accelerator)).seconds) / batch

    for tokens in (169, 1024):
        batch, seconds = image_seconds(tower(), tokens, accelerator)
        assert seconds > flops(tower(), 1.0, float(tokens)) / accelerator.peak_flops_per_s("bf16")
        assert seconds == pytest.approx(alone(batch, tokens), rel=1e-5)
        assert seconds <= 1.05 * alone(BATCHES[-1], tokens) * (1 + 1e-5)
        assert batch == 1 or alone(batch // 2, tokens) > 1.05 * alone(BATCHES[-1], tokens)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"model": "deepseek-v3", "images": 1.0}, "model deepseek-v3 has no vision tower"),
        ({"images": -1.0}, "--images must be a number of images, 0 or more"),
        ({"images": math.nan}, "--images must be a number of images, 0 or more"),
        ({"images": 1.0, "image_tokens": 1025}, "makes 1 to 1024 tokens of an image, not 1025"),
        ({"images": 1.0, "image_tokens": 0}, "makes 1 to 1024 tokens of an image, not 0"),
        ({"images": 4.0, "isl": 4000}, "exceed a prompt of 4000"),
        ({"image_tokens": 100}, "give both"),
    ],
)
def test_images_that_cannot_be_asked_are_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=re.escape(said)) as raised:
        make_problem(Question(**({"gpus": 8} | changes)))
    assert "\n" not in str(raised.value)


def asked(**changes: Any) -> Problem:
    return make_problem(Question(**({"gpus": 8, "hardware": "b200", "isl": 2000, "osl": 100} | changes)))


@lru_cache
def simulated() -> Plan:
    """A lightly loaded plan of the question without images, and its prediction."""
    problem = asked()
    screening = make_screen(problem).run()
    light = np.flatnonzero(screening.points.users < 200)
    best = int(light[np.argmax(screening.points.output_per_gpu[light])])
    return run_finalist(0, make_plan(problem, screening, best)).plan


def test_without_images_there_is_no_pool() -> None:
    assert with_encode(asked(), simulated()) == simulated()
    assert (encode_figures(simulated()), encode_line(simulated())) == (None, "")


@pytest.mark.parametrize("images", [0.25, 1.0, 1.75])
def test_the_pool_is_the_smallest_that_keeps_up_with_the_output(images: float) -> None:
    plan = with_encode(asked(images=images), simulated())
    assert plan.prediction is not None
    assert plan.encode is not None
    requests_per_s = plan.prediction.output_tokens_per_s_per_gpu * 8 / 100
    busy = requests_per_s * images * plan.encode.seconds_per_image / UTILIZATION
    assert plan.encode.gpus - 1 < busy <= plan.encode.gpus
    rated = with_encode(asked(images=images, rate=1000.0), simulated()).encode
    assert rated is not None
    assert rated.gpus - 1 < 1000.0 * images * rated.seconds_per_image / UTILIZATION <= rated.gpus


def test_what_the_pool_costs_by_hand() -> None:
    """Dollars and watts of its GPUs over the whole output; predictions and the GPUs of the plan stay as they were."""
    alone, plan = simulated(), with_encode(asked(images=1.5), simulated())
    found, pool, figures = encode_figures(plan), plan.encode, plan.prediction
    assert found is not None
    assert pool is not None
    assert figures is not None
    assert (plan.gpus, figures) == (alone.gpus, alone.prediction)
    output = figures.output_tokens_per_s_per_gpu * 8
    assert found.usd_per_million_output_tokens == pytest.approx(pool.gpus * 2.9 / 3600 / output * 1e6)
    assert found.joules_per_output_token == pytest.approx(pool.gpus * 2170 / output)
    total = economics(plan)
    assert total.usd_per_hour == pytest.approx((8 + pool.gpus) * 2.9)
    assert total.watts == pytest.approx((8 + pool.gpus) * 2170)
    assert found.ttft_with_images_s == figures.ttft_s.p90 + pool.seconds_per_request
    assert f"{pool.gpus} GPU" in encode_line(plan)
    assert "above the limit" not in encode_line(plan)
    tight = plan.model_copy(update={"slo": plan.slo.model_copy(update={"ttft_s": figures.ttft_s.p90})})
    assert "above the limit" in encode_line(tight)


@pytest.mark.parametrize(("images", "batch", "seconds"), [(0.1, 4, 0.4), (4.0, 4, 0.4), (4.5, 4, 0.8), (2.5, 1, 0.3)])
def test_a_request_waits_for_whole_batches(images: float, batch: int, seconds: float) -> None:
    pool = EncodePool(gpus=1, images_per_request=images, image_tokens=64, images_per_batch=batch, seconds_per_image=0.1)
    assert pool.seconds_per_request == pytest.approx(seconds)


def test_a_plan_file_keeps_its_pool_and_tells_its_question(tmp_path: Any) -> None:
    plan = with_encode(asked(images=1.5, image_tokens=300), simulated())
    path = tmp_path / "plan.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    assert load_plan(str(path)) == plan
    again = problem_of(plan)
    assert (again.images, again.image_tokens) == (1.5, 300)
    path.write_text(plan.to_json().replace('"images_per_batch"', '"images_a_batch"'), encoding="utf-8")
    with pytest.raises(UsageError, match="encode"):
        load_plan(str(path))
