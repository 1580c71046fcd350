"""The torch runtime on one rank: however steps are cut, batched, drafted or interrupted, a request gets its tokens."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import chain
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
import torch
from tiny_engine import (
    BLOCK_TOKENS,
    LIKELY,
    QUICK,
    VOCAB,
    Served,
    TinyEngine,
    config_with,
    random_prompt,
    tiny_deployment,
    tiny_model,
    undecided_weights,
)

from backends.torch_runtime.engine import Inbox
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.inputs import Track
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.runner import TorchRunner
from backends.torch_runtime.serving import block_hashes
from backends.torch_runtime.tiny import tiny_tokenizer
from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.save import save_checkpoint
from deepinfer.engine.runner import EngineSource, GenerationRequest, GenerationRun, Pacing
from deepinfer.model.hf import load_model
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import StopChecker
from deepinfer.scheduler.request import Request

MODEL = tiny_model(**QUICK)
PLAIN = dummy_weights(MODEL, dtype=torch.float32, quantized=False)
UNDECIDED = undecided_weights(MODEL)
PROMPTS = [random_prompt(seed, length) for seed, length in enumerate((3, 37, 75, 20, 50, 11))]
TEMPERATURES: list[dict[str, Any]] = [{"temperature": t} for t in (0.0, 0.7, 0.0, 1.0, 8.0, 4.0)]


def engine(weights: Any = UNDECIDED, storage: Any = "fp32", **settings: Any) -> TinyEngine:
    return TinyEngine(tiny_deployment(MODEL, **{"prefix_cache": False, **settings}), weights, storage)


def assert_same(found: Served, expected: Served, within: float = 1e-3) -> None:
    """The same tokens, and log-probabilities (logits of `UNDECIDED` are about 100) of the same tokens."""
    assert found.tokens == expected.tokens
    for mine, other in zip(chain(*found.logprobs), chain(*expected.logprobs), strict=True):
        common = mine.keys() & other.keys()
        assert len(common) > 0
        assert max(abs(mine[token] - other[token]) for token in common) < within
    for tokens, logprobs in zip(found.tokens, found.logprobs, strict=True):
        assert len(logprobs) in (0, len(tokens))
        assert all(token in one for token, one in zip(tokens, logprobs, strict=False))


@pytest.fixture(scope="module")
def expected() -> Served:
    """What each request generates alone, token by token, decided and computed in turn."""
    alone = engine(async_scheduling=False, max_tokens_per_step=128, max_num_seqs=1)
    return alone.serve(PROMPTS, max_tokens=18, each=TEMPERATURES, logprobs=3)


# --- how steps are cut ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("weights", "storage"), [(PLAIN, "fp32"), (None, "fp4")])
def test_prefill_in_chunks_equals_decoding_the_same_tokens(weights: Any, storage: Any) -> None:
    """`None`: weights in the formats of a release, which round what they multiply; a last bit may tip a rounding."""
    prompt, weights = PROMPTS[0], weights or dummy_weights(MODEL, dtype=torch.float32)
    decoded = engine(weights, storage, max_num_seqs=1).serve([prompt], max_tokens=50, logprobs=VOCAB)
    places = [0, 1, 2, 13, 28, 29, 49]
    prompts = [prompt + decoded.tokens[0][:place] for place in places]
    expected = decoded.distributions(0)[places]
    for rows in (128, 5) if weights is PLAIN else (23,):
        prefilled = engine(weights, storage, max_tokens_per_step=rows).serve(prompts, max_tokens=1, logprobs=VOCAB)
        found = np.concatenate([prefilled.distributions(i) for i in range(len(places))])
        worst = np.abs(found - expected).max(1)
        assert np.median(worst) < 1e-5
        assert worst.max() < (1e-4 if weights is PLAIN else 0.5)
        assert [tokens[0] for tokens in prefilled.tokens] == [decoded.tokens[0][place] for place in places]


@pytest.mark.parametrize("nextn", [0, 1, 2, 3, 4, 5])
def test_drafts_batches_and_asynchronous_steps_change_no_token(expected: Served, nextn: int) -> None:
    """A draft is kept exactly when it is what would have been sampled; half of them are, here."""
    batched = engine(nextn=nextn, max_tokens_per_step=48, async_scheduling=nextn != 2, max_num_seqs=4)
    served = batched.serve(PROMPTS, max_tokens=18, each=TEMPERATURES, logprobs=3)
    assert_same(served, expected)
    assert 1.3 < served.mean_kept <= nextn + 1 if nextn else served.mean_kept == 1.0


def test_drafts_that_are_never_right_change_no_token() -> None:
    served = [
        engine(PLAIN, nextn=nextn, max_tokens_per_step=48).serve(PROMPTS[:4], max_tokens=12, logprobs=VOCAB)
        for nextn in (0, 5)
    ]
    assert served[1].mean_kept < 1.2
    assert_same(served[1], served[0], within=1e-4)


def test_many_short_requests_through_few_slots_equal_each_alone() -> None:
    """Rings, tails, block tables and drafts of a slot's owners before leave no trace."""
    rng = np.random.default_rng(5)
    prompts = [random_prompt(100 + i, int(rng.integers(1, 40))) for i in range(12)]
    each = [{"max_tokens": int(rng.integers(1, 12)), "temperature": float(rng.integers(0, 2))} for _ in prompts]
    alone = engine(max_num_seqs=1, max_tokens_per_step=64).serve(prompts, each=each, logprobs=1)
    crowded = engine(max_num_seqs=3, max_tokens_per_step=24, nextn=4, num_blocks=12)
    assert_same(crowded.serve(prompts, each=each, logprobs=1), alone)
    assert_same(crowded.serve(prompts, each=each, logprobs=1), alone)  # on what the first run left behind


@pytest.mark.parametrize(("asynchronous", "num_blocks"), [(True, 7), (True, 9), (False, 7)])
def test_preempted_requests_get_the_same_tokens(expected: Served, asynchronous: bool, num_blocks: int) -> None:
    crowded = engine(nextn=3, max_tokens_per_step=48, num_blocks=num_blocks, async_scheduling=asynchronous)
    served = crowded.serve(PROMPTS, max_tokens=18, each=TEMPERATURES, logprobs=3)
    assert served.num_preemptions >= 2
    assert_same(served, expected)


# --- what is not computed again -------------------------------------------------------------------------------------


def test_shared_blocks_are_found_read_and_not_written() -> None:
    """The window before a hit is replayed without what lay before it: nearly the cold run, the same in any chunks."""
    prefix = random_prompt(1, 4 * BLOCK_TOKENS)
    prompts = [prefix + random_prompt(2, 13), prefix + random_prompt(3, 30)]
    cold = engine(PLAIN).serve(prompts, max_tokens=2, logprobs=VOCAB)
    warm = [_hit(prompts, rows) for rows in (64, 7)]
    assert_same(warm[0], warm[1], within=1e-4)
    assert np.abs(warm[0].distributions(0) - cold.distributions(0)).max() < 1e-4
    first, hit = (served.distributions(1)[0] for served in (cold, warm[0]))
    assert 1e-6 < divergence(first, hit) < 0.01 < 0.5 < divergence(first, cold.distributions(0)[0])


def test_the_prefix_cache_lasts_from_run_to_run() -> None:
    """Nearly the tokens of the first time, from what it left; a run that is cut off leaves an empty cache."""
    prompts = [random_prompt(1, 4 * BLOCK_TOKENS + 9), random_prompt(2, 3 * BLOCK_TOKENS + 1)]
    hashes = [block_hashes(prompt, BLOCK_TOKENS) for prompt in prompts]
    lasting = engine(PLAIN, prefix_cache=True)
    runs = [lasting.serve(prompts, max_tokens=2, hashes=hashes, logprobs=VOCAB) for _ in range(3)]
    assert [run.num_hit_tokens for run in runs] == [0, 7 * BLOCK_TOKENS, 7 * BLOCK_TOKENS]
    assert_same(runs[1], runs[2], within=1e-5)
    first, second = (run.distributions(i)[0] for run, i in ((runs[0], 0), (runs[0], 1)))
    for i, cold in enumerate((first, second)):
        assert divergence(runs[1].distributions(i)[0], cold) < 0.5 * divergence(first, second)
    params = SamplingParams(max_tokens=99, ignore_eos=True)
    tracks = {i: Track(params, i, len(p), list(p), StopChecker(params, ())) for i, p in enumerate(prompts)}
    inbox = Inbox([(0.0, Request(i, len(p), 99, hashes[i])) for i, p in enumerate(prompts)], None)
    lasting.engine.serve(tracks, inbox, stop_s=1.0, on_delivery=lambda _: time.sleep(1.0))
    assert any(track.generated for track in tracks.values())
    assert not any(track.finished for track in tracks.values())
    again = lasting.serve(prompts, max_tokens=2, hashes=hashes, logprobs=VOCAB)
    assert again.num_hit_tokens == 0
    assert_same(again, runs[0], within=1e-5)


def _hit(prompts: Sequence[Sequence[int]], rows: int) -> Served:
    """Serve two prompts that share four blocks, one after the other; assert what happens to the blocks."""
    warm = engine(PLAIN, prefix_cache=True, max_tokens_per_step=rows, nextn=1, max_num_seqs=2)
    state = warm.context.state
    caches = [*state.main.values(), *state.keys.values()]
    before: list[torch.Tensor] = []

    def note(delivery: Any) -> None:
        if 0 in delivery.finished:
            before.extend(cache.clone() for cache in caches)

    hashes = [block_hashes(prompt, BLOCK_TOKENS) for prompt in prompts]
    served = warm.serve(prompts, max_tokens=2, hashes=hashes, concurrency=1, on_delivery=note, logprobs=VOCAB)
    assert served.num_hit_tokens == 4 * BLOCK_TOKENS
    blocks = state.block_table[[warm.tracks[1].slot], : len(prompts[1]) // BLOCK_TOKENS][0]
    for cache, earlier in zip(caches, before, strict=True):
        changed = (cache != earlier).flatten(1).any(1)[blocks]
        assert changed.tolist() == [False] * 4 + [True] * (len(blocks) - 4)
    return served


def divergence(p: np.ndarray, q: np.ndarray) -> float:
    """Kullback-Leibler, of log-probabilities."""
    return float((np.exp(p) * (p - q)).sum())


@pytest.mark.parametrize("keep_tokens", [20, 33])
def test_compact_replay_equals_its_mask(keep_tokens: int) -> None:
    """Bounded layers compute only a prompt's last rows, or all of them and look no further back: the same follows."""

    def served(replay: str, rows: int, nextn: int = 0) -> Served:
        cut = engine(PLAIN, replay=replay, keep_tokens=keep_tokens, max_tokens_per_step=rows, nextn=nextn)
        return cut.serve(PROMPTS, max_tokens=3, logprobs=VOCAB)

    mask, off = served("mask", 48), served("off", 128)
    for rows, nextn in ((48, 0), (23, 3)):
        assert_same(served("compact", rows, nextn), mask, within=1e-4)
    assert_same(served("mask", 128, 5), mask, within=1e-4)
    differs = [np.abs(off.distributions(i)[0] - mask.distributions(i)[0]).max() > 1e-4 for i in range(len(PROMPTS))]
    assert differs == [len(prompt) > keep_tokens for prompt in PROMPTS]


# --- how requests end -----------------------------------------------------------------------------------------------


def test_stops_and_lengths_cut_accepted_drafts(expected: Served) -> None:
    """Wherever a stop token falls among those that a step kept, the output ends with it."""
    seen = expected.tokens[0]
    cases = [{"max_tokens": n} for n in range(1, 10)]
    cases += [{"stop_token_ids": [LIKELY[0]], "min_tokens": n} for n in range(7)]
    ends = [case.get("max_tokens", 0) or 1 + seen.index(LIKELY[0], case["min_tokens"]) for case in cases]
    for nextn, asynchronous in ((3, True), (5, True), (5, False)):
        cut = engine(nextn=nextn, max_tokens_per_step=64, async_scheduling=asynchronous)
        served = cut.serve(
            [PROMPTS[0]] * len(cases), max_tokens=32, each=[{**case, "temperature": 0.0} for case in cases]
        )
        assert served.tokens == [seen[:end] for end in ends]
        assert [cut.tracks[i].stop is not None for i in range(len(cases))] == ["min_tokens" in case for case in cases]
    ended = cut.serve([PROMPTS[0]], max_tokens=32, eos=(LIKELY[0],))
    assert ended.tokens == [seen[: 1 + seen.index(LIKELY[0])]]
    assert cut.tracks[0].stop.cause is None


def test_logprobs_are_of_the_best_tokens_and_the_one_taken() -> None:
    common: dict[str, Any] = {"max_tokens": 6, "temperature": 5.0}
    everything = engine(PLAIN).serve(PROMPTS[:3], each=[common] * 3, logprobs=VOCAB)
    some = engine(PLAIN, nextn=2).serve(PROMPTS[:3], each=[{**common, "logprobs": n} for n in (None, 0, 2)])
    assert some.tokens == everything.tokens
    assert some.logprobs[0] == []
    for request, number in ((1, 0), (2, 2)):
        for place, token in enumerate(some.tokens[request]):
            of_all = everything.distributions(request)[place]
            assert np.exp(of_all).sum() == pytest.approx(1.0, abs=1e-5)
            assert some.logprobs[request][place].keys() == {token, *np.argsort(-of_all)[:number].tolist()}
            for taken, value in some.logprobs[request][place].items():
                assert value == pytest.approx(of_all[taken], abs=1e-4)


# --- a runner -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TorchRunner]:
    """One rank, in a thread of this process, with memory for 12 blocks."""
    folder, config = tmp_path_factory.mktemp("tiny"), config_with(**QUICK)
    (folder / "tokenizer.json").write_text(tiny_tokenizer().to_str())
    del config["quantization_config"]
    save_checkpoint(folder, MODEL, PLAIN, config, 1 << 30)
    deployment = tiny_deployment(load_model(str(folder)), num_blocks=12, nextn=3, prefix_cache=False)
    source = EngineSource(str(folder), "auto", "float32", 0, 256)
    found = TorchRunner(deployment, source, "backends.cpu.backend:HOST")
    yield found
    found.close()


def generation_requests(lengths: Sequence[int], max_tokens: int = 6, **arrivals: Sequence[float]) -> list[Any]:
    params = SamplingParams(temperature=0.0, ignore_eos=True, max_tokens=max_tokens, seed=0)
    starts = arrivals.get("arrival_s", [0.0] * len(lengths))
    return [
        GenerationRequest(tuple(random_prompt(i, n)), params, start)
        for i, (n, start) in enumerate(zip(lengths, starts, strict=True))
    ]


def inside(run: GenerationRun) -> int:
    """Most requests that were in the engine at once."""
    let_in, left = run.record.arrival_s, run.record.finish_s
    return max(int(((let_in <= start) & (left > start)).sum()) for start in let_in)


def test_paced_requests_and_those_that_do_not_fit(runner: TorchRunner) -> None:
    lengths = [20, 200, 7, 40, 11, 30]
    at_once = runner.generate(generation_requests(lengths))
    ends = [output.finish_reason for output in at_once.outputs]
    assert ends == ["length", "ignored", "length", "length", "length", "length"]
    assert at_once.outputs[1].token_ids == ()
    assert "exceed the KV memory of 192" in str(at_once.outputs[1].stop_reason)
    assert at_once.record.refused == [1]
    fitting = [0, 2, 3, 4, 5]
    paced = runner.generate(generation_requests(lengths), pacing=Pacing(concurrency=2))
    assert [o.token_ids for o in paced.outputs] == [o.token_ids for o in at_once.outputs]
    assert inside(at_once) == 5
    assert inside(paced) == 2
    starts = [0.0, 0.0, 0.3, 0.1, 0.2, 0.6]
    late = runner.generate(generation_requests(lengths, arrival_s=starts))
    assert [o.token_ids for o in late.outputs] == [o.token_ids for o in at_once.outputs]
    assert late.record.arrival_s[fitting].tolist() == [starts[i] for i in fitting]
    assert (late.record.first_token_s[fitting] > late.record.arrival_s[fitting]).all()


def test_what_has_not_ended_in_time_is_aborted(runner: TorchRunner) -> None:
    requests = generation_requests([20, 30, 25, 7] * 4, max_tokens=14)
    whole = runner.generate(requests[:4])
    cut = runner.generate(requests, pacing=Pacing(stop_s=whole.wall_s / 2))
    assert cut.wall_s < whole.wall_s
    assert {o.finish_reason for o in cut.outputs} == {"aborted"}
    assert all(o.stop_reason == "the run ended first" for o in cut.outputs)
    for output, complete in zip(cut.outputs, whole.outputs, strict=False):
        assert output.token_ids == complete.token_ids[: len(output.token_ids)]
    assert 0 < sum(len(output.token_ids) for output in cut.outputs) < 4 * 14
    again = runner.generate(generation_requests([20], max_tokens=3))
    assert again.outputs[0].token_ids == whole.outputs[0].token_ids[:3]


def test_rows_that_fill_a_captured_step_change_nothing_and_have_no_experts() -> None:
    """A decode step of two requests among rows of nobody, as a graph is captured, beside the step of the two alone."""
    outputs = []
    for padding in (0, 3):
        found = engine()
        found.serve(PROMPTS[:2], max_tokens=2)
        rank, builder = found.context, found.builder
        slots = torch.tensor([0, 1, *[rank.state.nobody] * padding], dtype=torch.int32)
        step = builder.decode(slots, 256)
        step.equal_exchange = padding > 0
        counted: list[int] = []

        def counting(ids: torch.Tensor, *rest: Any, counted: list[int] = counted) -> Any:
            counted.append(int((ids >= 0).sum()))
            return KernelTable().sort_pairs(ids, *rest)

        step.rank = replace(rank, kernels=replace(rank.kernels, sort_pairs=counting))
        Executor(step.rank, found.deployment.graph()).run(step)
        outputs.append((step.outputs["tokens"][:2], step.outputs["kept"][:2], counted, int(rank.state.cached[-1])))
    (tokens, kept, pairs, _), (padded_tokens, padded_kept, padded_pairs, nobody_cached) = outputs
    assert torch.equal(tokens, padded_tokens)
    assert torch.equal(kept, padded_kept)
    assert pairs == padded_pairs
    assert nobody_cached == 0
