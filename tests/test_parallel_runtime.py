"""Engines of several ranks in processes of this host: one rank's tokens on every layout; how a lost rank is told."""

from __future__ import annotations

import json
import multiprocessing
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest

pytest.importorskip("torch")
from tiny_engine import QUICK, config_with, random_prompt, tiny_model, undecided_weights

from backends.torch_runtime.tiny import tiny_tokenizer
from backends.torch_runtime.weights.save import save_checkpoint
from deepinfer.engine.arguments import EngineArguments, deploy
from deepinfer.engine.runner import AT_ONCE, GenerationRequest, GenerationRun, Pacing, Runner, runner_backend
from deepinfer.errors import EngineLostError
from deepinfer.llm import LLM, SamplingParams
from deepinfer.model.hf import load_model

EXPERTS: dict[str, Any] = {**QUICK, "n_routed_experts": 8, "dspark_n_routed_experts": 8}
LENGTHS = (230, 3, 61, 20, 95)
"""Of prompts: with a chunk wholly before the rows that compact replay keeps, of a chunk and less, and an odd number."""
CHUNKED: dict[str, Any] = {"nextn": 3, "max_tokens_per_step": 64}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint whose weights are not quantised and find two tokens likely: half of all drafts are kept."""
    found, config = tmp_path_factory.mktemp("tiny"), config_with(**EXPERTS)
    del config["quantization_config"]
    (found / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    model = tiny_model(**EXPERTS)
    save_checkpoint(found, model, undecided_weights(model), config, 1 << 30)
    return found


def arguments(layout: tuple[int, int, int], **settings: Any) -> dict[str, Any]:
    """Of an engine with degrees (ep, dp, cp)."""
    ep, dp, cp = layout
    degrees = {"expert_parallel_size": ep, "data_parallel_size": dp, "context_parallel_size": cp}
    common = {"dtype": "float32", "kv_format": "bf16", "max_model_len": 256, "max_num_seqs": 4}
    return {**degrees, **common, **settings}


@contextmanager
def open_runner(folder: Path, layout: tuple[int, int, int], **settings: Any) -> Iterator[Runner]:
    engine = EngineArguments(str(folder), **arguments(layout, **settings))
    backend, model = runner_backend("cpu"), load_model(str(folder))
    deployment = deploy(engine.plan(model, "host"), backend, 256)
    with patch("backends.torch_runtime.runner._WORKER", "tiny_engine:exact_worker"):
        runner = backend.load(deployment, engine.source(model))
    try:
        yield runner
    finally:
        runner.close()


def requests(
    lengths: Sequence[int] = LENGTHS, max_tokens: int = 8, gap_s: float = 0.0, first: int = 0
) -> list[GenerationRequest]:
    """Greedy and sampled ones in turn, their prompts by number from `first` on."""
    return [
        GenerationRequest(
            tuple(random_prompt(first + i, length)),
            SamplingParams(temperature=i % 2 * 4.0, ignore_eos=True, max_tokens=max_tokens, seed=i, logprobs=2),
            i * gap_s,
        )
        for i, length in enumerate(lengths)
    ]


def runs(runner: Runner, count: int = 4) -> list[GenerationRun]:
    """Many requests, one alone, some that come one by one, and two that share a block and wait for each other."""
    block = random_prompt(99, 128)
    sharing = [replace(r, prompt_token_ids=(*block, *r.prompt_token_ids)) for r in requests((60, 41), max_tokens=3)]
    # No prompt twice: what a run leaves in the prefix cache, others find, on some layouts.
    cases = [
        (requests(), AT_ONCE),
        (requests((150,), max_tokens=4, first=20), AT_ONCE),
        (requests((40, 9, 33), max_tokens=4, gap_s=0.05, first=30), AT_ONCE),
        (sharing, Pacing(concurrency=1)),
    ]
    return [runner.generate(case, pacing=pacing) for case, pacing in cases[:count]]


def assert_same(found: Sequence[GenerationRun], expected: Sequence[GenerationRun]) -> None:
    for mine, other in zip(found, expected, strict=True):
        assert [o.token_ids for o in mine.outputs] == [o.token_ids for o in other.outputs]
        assert mine.record.num_hit_tokens == other.record.num_hit_tokens
        for output, one in zip(mine.outputs, other.outputs, strict=True):
            assert output.finish_reason == "length"
            for logprobs, reference in zip(output.logprobs or (), one.logprobs or (), strict=True):
                common = logprobs.keys() & reference.keys()
                assert max(abs(logprobs[token] - reference[token]) for token in common) < 5e-3


@pytest.fixture(scope="module")
def expected(folder: Path) -> dict[str, list[GenerationRun]]:
    """What one rank answers, by replay."""
    found = {}
    for replay in ("off", "compact"):
        with open_runner(folder, (1, 1, 1), replay=replay, **CHUNKED) as runner:
            found[replay] = runs(runner)
        assert [run.record.num_hit_tokens for run in found[replay]] == [0, 0, 0, 128]
    return found


@pytest.mark.parametrize(
    ("layout", "settings"),
    [
        ((2, 2, 1), CHUNKED),
        ((2, 1, 2), {**CHUNKED, "replay": "compact"}),
        ((4, 2, 2), CHUNKED),
        pytest.param((1, 1, 2), {**CHUNKED, "async_scheduling": False}, marks=pytest.mark.slow),
        pytest.param((1, 2, 1), {"nextn": 0}, marks=pytest.mark.slow),
        pytest.param((4, 4, 1), CHUNKED, marks=pytest.mark.slow),
        pytest.param((2, 1, 4), {**CHUNKED, "replay": "compact"}, marks=pytest.mark.slow),
        pytest.param((4, 1, 4), {**CHUNKED, "max_tokens_per_step": 31}, marks=pytest.mark.slow),
        pytest.param((2, 4, 1), CHUNKED, marks=pytest.mark.slow),
        pytest.param((2, 4, 2), CHUNKED, marks=pytest.mark.slow),
        pytest.param((8, 8, 1), CHUNKED, marks=pytest.mark.slow),
        pytest.param((2, 8, 1), CHUNKED, marks=pytest.mark.slow),
        pytest.param((2, 1, 8), CHUNKED, marks=pytest.mark.slow),
        pytest.param((8, 2, 4), {**CHUNKED, "replay": "compact"}, marks=pytest.mark.slow),
    ],
)
def test_a_layout_gives_the_tokens_of_one_rank(
    folder: Path, expected: dict[str, list[GenerationRun]], layout: tuple[int, int, int], settings: dict[str, Any]
) -> None:
    """Degrees (ep, dp, cp): replicas with unequal batches or none, prompts divided over cp ranks."""
    with open_runner(folder, layout, **settings) as runner:
        count = {2: 4, 4: 1, 8: 2}[layout[1] * layout[2]]  # more ranks than cores take long
        assert_same(runs(runner, count), expected[settings.get("replay", "off")][:count])


def tokens_of(llm: LLM, prompts: list[list[int]]) -> list[tuple[int, ...]]:
    outputs = llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=4))
    return [output.outputs[0].token_ids for output in outputs]


def test_a_killed_rank_is_named_with_the_requests_it_leaves_unfinished(folder: Path) -> None:
    victims: list[Any] = []

    def kill_rank_1(progress: Any) -> None:
        # By then the other replica, which steps along, has reported tokens too.
        if progress.output_tokens > 60 and not victims:
            victims.extend(p for p in multiprocessing.active_children() if p.name == "rank 1")
            os.kill(victims[0].pid, signal.SIGKILL)

    with LLM(folder, backend="cpu", **arguments((1, 1, 1))) as llm:
        expected = tokens_of(llm, [random_prompt(i, 10) for i in range(3)])
    with LLM(folder, backend="cpu", **arguments((2, 2, 1))) as llm:
        prompts = [random_prompt(i, 10) for i in range(6)]
        assert tokens_of(llm, prompts[:3]) == expected
        params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=200)
        start_s = time.monotonic()
        with pytest.raises(
            EngineLostError, match=r"rank 1 was killed by SIGKILL; 6 of 6 requests are unfinished: 0, 1"
        ) as lost:
            llm.generate(prompts, params, kill_rank_1)
        assert time.monotonic() - start_s < 30
        assert lost.value.unfinished.keys() == set(range(6))
        assert all(len(tokens) < 200 for tokens in lost.value.unfinished.values())
        assert any(lost.value.unfinished[i] for i in (0, 2, 4))
        assert any(lost.value.unfinished[i] for i in (1, 3, 5)), "the dead rank's reports are lost"
        with pytest.raises(EngineLostError, match="the ranks have ended: rank 1"):
            llm.generate(prompts, params)


JOINED = """
import json, os, sys
from deepinfer import LLM, SamplingParams

if __name__ == "__main__":
    folder, prompts, options = json.loads(sys.argv[1])
    with LLM(folder, backend="cpu", **options) as llm:
        outputs = llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6))
        tokens = [list(output.outputs[0].token_ids) for output in outputs]
        print(json.dumps([int(os.environ["RANK"]), llm.speaks, tokens]) + "\\n", end="", flush=True)
"""


def test_under_torchrun_every_rank_has_all_outputs_and_one_speaks(folder: Path, tmp_path: Path) -> None:
    prompts = [random_prompt(i, 12) for i in range(3)]
    script, options = tmp_path / "joined.py", arguments((2, 2, 1))
    script.write_text(JOINED, encoding="utf-8")
    launch = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(script)]
    done = subprocess.run(
        [*launch, json.dumps([str(folder), prompts, options])], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    found = sorted(json.loads(line) for line in done.stdout.splitlines())
    with LLM(folder, backend="cpu", **arguments((1, 1, 1))) as llm:
        alone = llm.generate(prompts, SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=6))
    expected = [list(output.outputs[0].token_ids) for output in alone]
    assert found == [[0, True, expected], [1, False, expected]]
