"""The engine on a GPU: Triton kernels against the reference, captured graphs against eager steps, two GPUs against one.

Run on a machine with GPUs of compute capability 9.0: `pytest -m gpu tests/test_cuda_engine.py`.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch

from deepinfer.engine.arguments import EngineArguments, deploy
from deepinfer.engine.runner import GenerationRequest, runner_backend
from deepinfer.model import hf
from deepinfer.sampling.params import SamplingParams

pytestmark = pytest.mark.gpu

CARD = Path(hf.__file__).parent / "cards" / "deepseek-v4.1-flash.json"


def true_widths(num_experts: int = 32) -> dict[str, Any]:
    """V4.1-Flash with eight layers, of every role, and few experts."""
    config: dict[str, Any] = json.loads(CARD.read_text())
    config["text_config"].update(
        num_hidden_layers=8,
        compress_ratios=[0, 0, 2, 2, 1, 1, 1, 1, 0, 0, 0],
        kv_source_layer_ids=[2, 4],
        index_source_layer_ids=[2, 4, 6],
        candidate_source_layer_id=4,
        engram_layer_ids=[1],
        engram_num_embeddings=config["text_config"]["engram_num_embeddings"][:1],
        dspark_target_layer_ids=[5, 6, 7],
        n_routed_experts=num_experts,
        dspark_n_routed_experts=16,
    )
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


def test_triton_agrees_with_the_reference(folder: Path, prompts: list[list[int]]) -> None:
    """BF16 kernels beside the FP32 reference: the first token's likeliest candidates, and how likely they are."""
    reference = generate(folder, prompts, 1, logprobs=1000, dtype="float32")
    triton = generate(folder, prompts, 1, logprobs=1000)
    for expected, found in zip(reference, triton, strict=True):
        wanted, got = expected.logprobs[0], found.logprobs[0]
        common = sorted(wanted.keys() & got.keys())
        assert len(common) > 500
        errors = np.asarray([got[t] - wanted[t] for t in common])
        spread = np.std([wanted[t] for t in common])
        print(len(common), np.abs(errors).max(), errors.std() / spread, expected.token_ids, found.token_ids)
        assert errors.std() < 0.5 * spread


def test_captured_steps_equal_eager_ones(folder: Path, prompts: list[list[int]]) -> None:
    """Asking for log-probabilities runs decode steps eagerly: the same kernels in the same order."""
    eager = generate(folder, prompts, 24, logprobs=0)
    captured = generate(folder, prompts, 24)
    assert [o.token_ids for o in captured] == [o.token_ids for o in eager]


def test_drafts_change_no_token_in_the_test_mode(folder: Path, prompts: list[list[int]]) -> None:
    plain = generate(folder, prompts, 16, dtype="float32")
    drafted = generate(folder, prompts, 16, dtype="float32", nextn=3)
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
    one = generate(folder, prompts, 16, dtype="float32", nextn=nextn)
    two = generate(folder, prompts, 16, dtype="float32", nextn=nextn, **layout)
    assert [o.token_ids for o in two] == [o.token_ids for o in one]


def test_two_gpus_replay_graphs(folder: Path, prompts: list[list[int]]) -> None:
    """Captured exchanges over NCCL, BF16: they run and give what eager steps of the same layout give."""
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two GPUs")
    eager = generate(folder, prompts, 16, logprobs=0, expert_parallel_size=2)
    captured = generate(folder, prompts, 16, expert_parallel_size=2)
    agree = [a == b for e, c in zip(eager, captured, strict=True) for a, b in zip(e.token_ids, c.token_ids, strict=True)]
    assert np.mean(agree) > 0.5


