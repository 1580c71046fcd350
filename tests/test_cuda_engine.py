"""The engine on a GPU: Triton kernels against the reference, captured graphs against eager steps, two GPUs against one.

Run on a machine with GPUs of compute capability 9.0: `pytest -m gpu tests/test_cuda_engine.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

pytest.importorskip("triton")
from engine_speed import shortened
from tiny_engine import LIKELY, TinyEngine, recorded_decisions, simulated_decisions, tiny_deployment

from backends.cuda.backend import GPU
from backends.cuda.graphs import GraphLauncher
from backends.cuda.kernels import kernel_table
from backends.torch_runtime.assemble import rank_context
from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.engine import RankEngine
from backends.torch_runtime.engram import made_up_token_map
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.inputs import Track, place_blocks, prompt_rows, slot_starts
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.serving import EnginePayload, worker
from backends.torch_runtime.state import CacheShape
from backends.torch_runtime.steps import StepBuilder
from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.worker import Channel, RankPlace
from deepinfer.engine.arguments import EngineArguments, deploy
from deepinfer.engine.backend import engine_request
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import GenerationRequest, runner_backend
from deepinfer.hardware.spec import ClusterSpec, load_hardware
from deepinfer.model import hf
from deepinfer.model.hf import parse_config
from deepinfer.model.spec import ModelSpec
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import StopChecker
from deepinfer.scheduler.step import BlockTable, DecodeBatch, PrefillChunk, StepPlan
from deepinfer.workload.generate import RequestSpec
from deepinfer.workload.tokens import prompt_tokens

pytestmark = pytest.mark.gpu


def true_widths(num_experts: int = 32) -> dict[str, Any]:
    """V4.1-Flash with eight layers, of every role, few experts and a small n-gram table."""
    config = shortened(8, engram_rows=1 << 18)
    config["text_config"].update(n_routed_experts=num_experts, dspark_n_routed_experts=16)
    return config


def generate(
    folder: Path, prompts: Sequence[Sequence[int]], max_tokens: int, logprobs: int | None = None, **arguments: Any
) -> Any:
    """Tokens and log-probabilities of greedy requests on an engine with made-up weights."""
    options: dict[str, Any] = {"max_model_len": 2048, "max_num_seqs": 16, "max_tokens_per_step": 1024}
    engine = EngineArguments(model=str(folder), load_format="dummy", prefix_cache=False, **(options | arguments))
    backend, model = runner_backend("cuda"), hf.load_model(str(folder))
    source = engine.source(model)
    runner = backend.load(deploy(engine.plan(model, "h200"), backend, source.max_model_len), source)
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, seed=0, logprobs=logprobs)
    try:
        run = runner.generate([GenerationRequest(tuple(p), params) for p in prompts])
    finally:
        runner.close()
    return run.outputs


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("true-widths")
    (path / "config.json").write_text(json.dumps(true_widths()))
    return path


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    generator = np.random.default_rng(0)
    return [generator.integers(0, 129280, n).tolist() for n in (5, 300, 900, 1500)]


def test_triton_is_as_close_to_fp32_as_the_reference_in_bf16() -> None:
    """Logits of first tokens: BF16 moves them, and Triton's kernels no further than plain torch's.

    Where rounding sends a row to another expert its logits jump, so it takes many prompts to tell.
    """
    generator = np.random.default_rng(0)
    lengths = [5, 900, 1500, *generator.integers(130, 300, 24).tolist()]
    prompts = [generator.integers(0, 129280, n).tolist() for n in lengths]
    exact = first_logits(KernelTable(), torch.float32, prompts)
    plain = first_logits(KernelTable(), torch.bfloat16, prompts)
    triton = first_logits(kernel_table(), torch.bfloat16, prompts)
    scale = (exact - exact.mean(-1, keepdim=True)).norm(dim=-1)
    noise, error = (((found - exact).norm(dim=-1) / scale).cpu() for found in (plain, triton))
    print(f"relative error of BF16 torch {noise.mean():.3f} +- {noise.std():.3f}, of Triton {error.mean():.3f}")
    assert error.mean() < 1.2 * noise.mean()


def gpu_deployment(model: ModelSpec, num_blocks: int, **settings: Any) -> Deployment:
    """One engine on one GPU of this machine, in the settings that engines have but for those given."""
    usual = {"block_tokens": 128, "memory_utilization": 0.9, "nextn": 3, "kv_format": "fp4"}
    machine = runner_backend("cuda").accelerator(1)
    return tiny_deployment(model, num_blocks=num_blocks, machine=machine, **usual, **settings)


def first_logits(kernels: KernelTable, dtype: torch.dtype, prompts: list[list[int]]) -> torch.Tensor:
    """Log-probabilities [prompts, vocab] after prefill in one step."""
    model = parse_config(true_widths(), "true widths")
    deployment = gpu_deployment(model, 16 * len(prompts), max_num_seqs=len(prompts), max_tokens_per_step=8192)
    device = GPU.take(0)
    weights = dummy_weights(model, device=device, dtype=dtype, arranged=kernels.arranged)
    comm = Communicator(deployment.layout, 0, device)
    assert model.numerics is not None
    assert model.numerics.engram is not None
    tokens = made_up_token_map(model.numerics.engram, model.vocab_size)
    rank = rank_context(deployment, weights, comm, kernels, dtype, 4096, tokens)
    builder = StepBuilder(rank)
    tracks = {
        i: Track(SamplingParams(), 0, len(p), p, StopChecker(SamplingParams(), ())) for i, p in enumerate(prompts)
    }
    chunks = [PrefillChunk(i, 0, len(p), len(p), True) for i, p in enumerate(prompts)]
    tables = [BlockTable(i, 0, tuple(range(16 * i, 16 * i + 16)), i) for i in tracks]
    nothing = np.zeros(0, dtype=np.int64)
    plan = StepPlan(0, tuple(chunks), DecodeBatch(nothing, nothing, 3), tuple(tables))
    builder.place_blocks(place_blocks(plan, tracks, 128))
    builder.start_slots(slot_starts(chunks, tracks, None))
    builder.end_prompts(list(tracks.values()))
    step = builder.mixed(builder.to_device(nothing), prompt_rows(chunks, tracks, 1, 4), 2048)
    step.logprobs = model.vocab_size
    Executor(rank, deployment.graph()).run(step)
    best, ids = step.outputs["best"].float(), step.outputs["best_ids"].long()
    return torch.empty_like(best).scatter(1, ids, best)


class GpuEngine(TinyEngine):
    """One rank on a GPU: Triton kernels, captured steps; two tokens are likely, so that drafts are kept."""

    def __init__(self, deployment: Deployment) -> None:
        self.deployment, model = deployment, deployment.model
        device = GPU.take(0)
        kernels = kernel_table()
        weights = dummy_weights(model, device=device, dtype=torch.bfloat16, arranged=kernels.arranged)
        likely = weights.head[LIKELY[0]].clone() * 64
        weights.head.zero_()
        weights.head[LIKELY[0]], weights.head[LIKELY[1]] = likely, -likely
        assert model.numerics is not None
        assert model.numerics.engram is not None
        tokens = made_up_token_map(model.numerics.engram, model.vocab_size)
        comm = Communicator(deployment.layout, 0, device)
        shape = replace(CacheShape.of(deployment, 2048), num_blocks=deployment.budget.num_blocks)
        rank = rank_context(deployment, weights, comm, kernels, torch.bfloat16, 2048, tokens, shape=shape)
        builder = StepBuilder(rank)
        launcher = GraphLauncher(rank, Executor(rank, deployment.graph()), builder, deployment.settings.graph_rows)
        self.engine = RankEngine(rank, deployment, launcher, builder)


@pytest.mark.parametrize("num_blocks", [14, 64])
def test_decisions_on_a_gpu_are_those_of_the_simulator(num_blocks: int) -> None:
    """Chunks, batches, blocks and preemptions of the same requests and kept drafts, step by step."""
    model = parse_config(true_widths(), "true widths")
    deployment = gpu_deployment(model, num_blocks, max_num_seqs=4, max_tokens_per_step=384)
    rng = np.random.default_rng(num_blocks)
    lengths = zip(rng.integers(100, 700, 9).tolist(), rng.integers(1, 90, 9).tolist(), strict=True)
    requests = [
        RequestSpec(i, 0.0, prompt, output, tuple(range(7, 7 + prompt // 128)) * (i % 2), 128 * (i % 2))
        for i, (prompt, output) in enumerate(lengths)
    ]
    hashes = [engine_request(request, 128, 0.0).block_hashes for request in requests]
    each = [{"max_tokens": request.output_tokens, "temperature": request.id % 3 * 2.0} for request in requests]
    with recorded_decisions() as computed:
        served = GpuEngine(deployment).serve(list(prompt_tokens(requests, 129280, seed=1)), hashes=hashes, each=each)
    accelerator = replace(deployment, cluster=ClusterSpec(load_hardware("b200"), 1))
    simulated = simulated_decisions(accelerator, requests, computed.kept)
    assert simulated.kept == computed.kept
    assert simulated.plans == computed.plans
    assert [len(tokens) for tokens in served.tokens] == [request.output_tokens for request in requests]
    print(f"{len(computed.plans)} steps, {served.num_preemptions} preemptions, {served.mean_kept:.2f} kept")
    assert served.mean_kept > 1.1


def test_captured_steps_equal_eager_ones(folder: Path, prompts: list[list[int]]) -> None:
    """Asking for log-probabilities runs decode steps eagerly: the same kernels in the same order."""
    eager = generate(folder, prompts, 24, logprobs=0)
    captured = generate(folder, prompts, 24)
    assert [o.token_ids for o in captured] == [o.token_ids for o in eager]


def test_drafts_change_no_token_in_the_test_mode(folder: Path, prompts: list[list[int]]) -> None:
    plain = generate(folder, prompts, 16, dtype="float64")
    drafted = generate(folder, prompts, 16, dtype="float64", nextn=3)
    assert [o.token_ids for o in drafted] == [o.token_ids for o in plain]


@pytest.mark.parametrize(
    "layout",
    [
        {"expert_parallel_size": 2},
        {"expert_parallel_size": 2, "data_parallel_size": 2},
        {"expert_parallel_size": 2, "context_parallel_size": 2},
    ],
    ids=str,
)
@pytest.mark.parametrize("nextn", [0, 3])
def test_two_gpus_give_the_tokens_of_one(
    folder: Path, prompts: list[list[int]], layout: dict[str, int], nextn: int
) -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one = generate(folder, prompts, 16, dtype="float64", nextn=nextn)
    two = generate(folder, prompts, 16, dtype="float64", nextn=nextn, **layout)
    assert [o.token_ids for o in two] == [o.token_ids for o in one]


def nccl_worker(context: RankPlace, payload: EnginePayload, channel: Channel) -> None:
    """The worker of engines whose captured exchanges are NCCL's."""
    with patch("backends.cuda.exchange.OneSidedExchange.between", lambda _: None):
        worker(context, payload, channel)


@pytest.mark.parametrize("nextn", [0, 3])
def test_one_sided_exchanges_change_no_token(folder: Path, prompts: list[list[int]], nextn: int) -> None:
    """The same captured kernels on the same rows, whichever way they came."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    one_sided = generate(folder, prompts, 24, nextn=nextn, expert_parallel_size=2)
    with patch("backends.torch_runtime.runner._WORKER", "test_cuda_engine:nccl_worker"):
        nccl = generate(folder, prompts, 24, nextn=nextn, expert_parallel_size=2)
    assert [o.token_ids for o in one_sided] == [o.token_ids for o in nccl]


def test_two_gpus_replay_graphs(folder: Path, prompts: list[list[int]]) -> None:
    """Captured exchanges give about what eager ones do in BF16: those send other numbers of rows, and round so."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    eager = generate(folder, prompts, 16, logprobs=0, expert_parallel_size=2)
    captured = generate(folder, prompts, 16, expert_parallel_size=2)
    agree = [
        a == b for e, c in zip(eager, captured, strict=True) for a, b in zip(e.token_ids, c.token_ids, strict=True)
    ]
    assert np.mean(agree) > 0.5
