"""Generating text as a user does it, on a runner that answers from a script: arguments, prompts, stops, figures."""

from __future__ import annotations

import json
import math
import runpy
import signal
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sampling import EOS, save_byte_tokenizer

import deepinfer.cli
from deepinfer.engine import runner as seam
from deepinfer.engine.arguments import EngineArguments
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import (
    AT_ONCE,
    EngineSource,
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    GenerationRun,
    Pacing,
    Progress,
    stop_checkers,
)
from deepinfer.engine.serve import generation_requests, measurement_window, one_engine
from deepinfer.engine.simulate import simulate_plan
from deepinfer.errors import DeepinferError, InfeasibleError, UsageError
from deepinfer.hardware.local import host_memory, local_accelerator
from deepinfer.hardware.spec import Accelerator
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.llm import LLM, SamplingParams
from deepinfer.metrics.record import RunRecord, SubmittedStep
from deepinfer.metrics.summary import summarize
from deepinfer.registry import load_backend
from deepinfer.sampling.stop import StopChecker
from deepinfer.sampling.tokenizer import Tokenizer
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.generate import RequestSpec, generate_requests
from deepinfer.workload.spec import Arrivals, ClosedLoop, FixedLength, LognormalLength, PoissonArrivals, Workload
from deepinfer.workload.tokens import prompt_tokens

CARD = "deepseek-v4.1-flash"
STEP_S = 0.5


class ScriptedRunner:
    """Answers every request with the tokens of `script`, a step each half second; all requests run at once.

    The step that computes prompts yields the first token of all; every later one `width` tokens, as if so many less one
    of `nextn` drafts were kept.
    """

    def __init__(self, deployment: Deployment, source: EngineSource, script: Sequence[int], width: int) -> None:
        self.deployment, self.source, self.script, self.width = deployment, source, tuple(script), width
        self.eos_token_ids = (EOS,)
        self.speaks = True
        self.closed = False
        self.calls: list[tuple[list[GenerationRequest], Pacing]] = []

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[Progress], None] | None = None,
        pacing: Pacing = AT_ONCE,
    ) -> GenerationRun:
        self.calls.append((list(requests), pacing))
        record = RunRecord(len(requests), self.deployment.num_gpus, self.deployment.step_groups)
        record.arrival_s[:] = 0.0
        checkers = stop_checkers(self.source, self.eos_token_ids)
        alive = [ScriptedRequest(i, r, checkers(r.params)) for i, r in enumerate(requests)]
        everybody = list(alive)
        while alive:
            self._step(alive, record)
            alive = [request for request in alive if request.output is None]
            if progress is not None:
                tokens = sum(len(request.tokens) for request in everybody)
                progress(Progress(len(everybody) - len(alive), len(everybody), tokens, record.window_end_s))
        outputs = tuple(request.output for request in everybody if request.output is not None)
        return GenerationRun(outputs, record, record.window_end_s)

    def _step(self, alive: Sequence[ScriptedRequest], record: RunRecord) -> None:
        first = record.window_end_s == 0.0
        record.window_end_s = now = record.window_end_s + STEP_S
        counts = [request.take(self.script, 1 if first else self.width, now) for request in alive]
        for request in alive:
            if request.output is not None:
                record.finish_s[request.number] = now
        if first:
            step = SubmittedStep(STEP_S, now, 0, 0, sum(len(r.given.prompt_token_ids) for r in alive), 0)
        else:
            rows = len(alive) * (1 + self.deployment.settings.nextn)
            step = SubmittedStep(STEP_S, now, len(alive), rows, 0, 0)
        record.steps.append(now, step, 0 if first else sum(counts))
        record.deliver(np.array([request.number for request in alive]), np.array(counts), now)

    def close(self) -> None:
        self.closed = True


class ScriptedRequest:
    """A request and the tokens that it has."""

    def __init__(self, number: int, given: GenerationRequest, checker: StopChecker) -> None:
        self.number, self.given, self._checker = number, given, checker
        self.tokens: list[int] = []
        self.output: GenerationOutput | None = None

    def take(self, script: Sequence[int], count: int, now: float) -> int:
        """Take its next tokens of the script, and end where it ends; returns how many these were."""
        at, params = len(self.tokens), self.given.params
        new = [script[k % len(script)] for k in range(at, min(at + count, params.max_tokens))]
        stop = self._checker.accept(new)
        self.tokens += new[: stop.num_tokens] if stop else new
        if stop or len(self.tokens) == params.max_tokens:
            logprobs = None if params.logprobs is None else tuple({token: -0.25} for token in self.tokens)
            reason: FinishReason = "stop" if stop else "length"
            cause = stop.cause if stop else None
            self.output = GenerationOutput(self.number, tuple(self.tokens), reason, logprobs, STEP_S, now, cause)
        return len(self.tokens) - at


class ScriptedBackend:
    """A backend of scripted runners on host memory, which remembers them."""

    script: Sequence[int] = tuple(range(10, 200))
    width = 1
    available = True
    runners: list[ScriptedRunner]

    def is_available(self) -> bool:
        return self.available

    def accelerator(self, num_ranks: int) -> Accelerator:
        return local_accelerator("cpu", "a large host", "cpu", 2e12, "made up for a test", num_ranks)

    def load(self, deployment: Deployment, source: EngineSource) -> ScriptedRunner:
        self.runners.append(ScriptedRunner(deployment, source, self.script, self.width))
        return self.runners[-1]


@pytest.fixture
def backend(monkeypatch: pytest.MonkeyPatch) -> ScriptedBackend:
    """The one behind the names cpu and cuda; sim stays what it is."""
    scripted = ScriptedBackend()
    scripted.runners = []
    monkeypatch.setattr(seam, "load_backend", lambda name: load_backend(name) if name == "sim" else scripted)
    monkeypatch.setattr(seam, "backend_names", lambda: ["cpu", "cuda", "sim"])
    return scripted


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model's folder: the card's configuration, and a tokenizer whose tokens are three specials and the bytes."""
    path = tmp_path_factory.mktemp("model")
    card = Path(deepinfer.cli.__file__).parent / "model" / "cards" / f"{CARD}.json"
    (path / "config.json").write_text(card.read_text(encoding="utf-8"), encoding="utf-8")
    save_byte_tokenizer(path / "tokenizer.json")
    return path


def open_llm(model: str | Path = CARD, **engine: Any) -> LLM:
    settings: dict[str, Any] = {"load_format": "dummy", "max_num_seqs": 4, "max_model_len": 256}
    return LLM(model, backend="cpu", **(settings | engine))


def run(*arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of the `deepinfer` command in this process."""
    argv, handler = sys.argv, signal.getsignal(signal.SIGINT)
    sys.argv = ["deepinfer", *arguments]
    try:
        with pytest.raises(SystemExit) as end:
            deepinfer.cli.main()
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, handler)
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


# --- where a request ends ---------------------------------------------------------------------------------------------


def test_stop_string_over_tokens_ends_the_request_in_the_engine(backend: ScriptedBackend, folder: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    backend.script, backend.width = tokenizer.encode("one, two, thréé, four"), 4
    with open_llm(folder, nextn=3) as llm:
        (output,) = llm.generate("count", SamplingParams(max_tokens=30, stop=["éé, f", "zzz"]))
    (completion,) = output.outputs
    assert completion.text == "one, two, thr"
    assert (completion.finish_reason, completion.stop_reason) == ("stop", "éé, f")
    assert completion.token_ids == tokenizer.encode("one, two, thréé, f")


def test_tokens_that_end_a_request(backend: ScriptedBackend, folder: Path) -> None:
    tokenizer = Tokenizer(folder / "tokenizer.json")
    a, b = tokenizer.encode("ab")
    backend.script = (a, b, EOS, a, 2, b)
    cases = [
        (SamplingParams(max_tokens=6), (3, "ab", "stop", None)),
        (SamplingParams(max_tokens=6, ignore_eos=True), (6, "abab", "length", None)),
        (SamplingParams(max_tokens=6, min_tokens=3), (6, "abab", "length", None)),
        (SamplingParams(max_tokens=6, stop_token_ids=[b]), (2, "a", "stop", b)),
        (SamplingParams(max_tokens=6, stop_token_ids=[b], min_tokens=2), (3, "ab", "stop", None)),
        (SamplingParams(max_tokens=2), (2, "ab", "length", None)),
    ]
    with open_llm(folder) as llm:
        outputs = llm.generate(["x"] * len(cases), [params for params, _ in cases])
    got = [(len(c.token_ids), c.text, c.finish_reason, c.stop_reason) for o in outputs for c in o.outputs]
    assert got == [expected for _, expected in cases]


# --- prompts --------------------------------------------------------------------------------------------------------


def test_prompts_of_every_kind_mean_the_same(backend: ScriptedBackend, folder: Path) -> None:
    ids = list(Tokenizer(folder / "tokenizer.json").encode("hé"))
    text: list[Any] = ["hé", {"prompt": "hé"}]
    tokens: list[Any] = [ids, tuple(ids), np.array(ids), {"prompt_token_ids": ids}]
    with open_llm(folder) as llm:
        for single in (*text, *tokens):
            (output,) = llm.generate(single)
            assert output.prompt_token_ids == tuple(ids)
            assert output.prompt == ("hé" if any(single is t for t in text) else None)
        several = llm.generate([*text, *tokens])
        assert [o.prompt_token_ids for o in several] == [tuple(ids)] * 6
        assert [o.request_id for o in several] == list(range(6))
        assert llm.generate([]) == []


BAD_PROMPTS: list[tuple[Any, str]] = [
    ("", "prompt 0 is empty"),
    ([[]], "prompt 0 is empty"),
    (["a", ""], "prompt 1 is empty"),
    ([[1], [2, "x"]], "prompt 1: token ids must be whole numbers, got 'x'"),
    ([1.5], "prompt 0 must be text or token ids, got float"),
    (7, "prompts must be text or token ids, got int"),
    ([[5, 129280]], "prompt 0: token id 129280 is outside the model's vocabulary of 129280 tokens"),
    ([-1, 5], "token id -1 is outside"),
    ({"text": "a"}, "either 'prompt' or 'prompt_token_ids'"),
    ({"prompt": [1]}, "'prompt' must be text"),
    ({"prompt_token_ids": "a"}, "'prompt_token_ids' must be token ids"),
]


@pytest.mark.parametrize(("prompts", "says"), BAD_PROMPTS, ids=[str(p) for p, _ in BAD_PROMPTS])
def test_a_bad_prompt_is_one_sentence_before_the_engine_sees_any(
    prompts: Any, says: str, backend: ScriptedBackend, folder: Path
) -> None:
    with open_llm(folder) as llm, pytest.raises(UsageError) as error:
        llm.generate(prompts)
    assert says in str(error.value)
    assert backend.runners[-1].calls == []


def test_token_ids_work_without_a_tokenizer_and_text_says_what_is_missing(backend: ScriptedBackend) -> None:
    with open_llm() as llm:
        (output,) = llm.generate([5, 6, 7], SamplingParams(max_tokens=3))
        assert (output.outputs[0].token_ids, output.outputs[0].text) == ((10, 11, 12), None)
        for prompts, params in (("text", None), ([5], SamplingParams(stop="x"))):
            with pytest.raises(UsageError, match=r"has no tokenizer\.json: give prompts as token ids"):
                llm.generate(prompts, params)
        with pytest.raises(UsageError, match="2 entries for 1 prompts"):
            llm.generate([5], [SamplingParams(), SamplingParams()])
    with pytest.raises(UsageError, match="closed"):
        llm.generate([5])
    assert backend.runners[-1].closed


def test_what_does_not_fit_the_context_is_ignored_and_what_outgrows_it_ends(backend: ScriptedBackend) -> None:
    with open_llm(max_model_len=8) as llm:
        outputs, run_ = llm.run([[5] * n for n in (3, 8, 7, 9, 1)], SamplingParams(max_tokens=4, min_tokens=2))
    reasons = [o.outputs[0].finish_reason for o in outputs]
    assert reasons == ["length", "ignored", "length", "ignored", "length"]
    assert [len(o.outputs[0].token_ids) for o in outputs] == [4, 0, 1, 0, 4]
    assert "prompt of 9 tokens leaves no room for output in max_model_len 8" in str(outputs[3].outputs[0].stop_reason)
    assert run_ is not None
    assert len(run_.outputs) == 3
    assert [o.metrics is None for o in outputs] == [False, True, False, True, False]


def test_every_request_has_a_seed_of_its_own_and_the_same_in_the_next_engine(backend: ScriptedBackend) -> None:
    def seeds(seed: int) -> list[int | None]:
        with open_llm(seed=seed) as llm:
            for prompts in ([[5], [6]], [[7]]):
                llm.generate(prompts, [SamplingParams(), *[SamplingParams(seed=9)] * (len(prompts) - 1)])
        return [r.params.seed for call, _ in backend.runners[-1].calls for r in call]

    first, second, third = seeds(0)
    assert second == 9
    assert first != third
    assert seeds(0) == [first, second, third]
    assert seeds(1)[0] != first


# --- layouts --------------------------------------------------------------------------------------------------------


def test_dp_ep_and_cp_mean_what_they_mean_in_deepinfer() -> None:
    """ranks = dp x cp, dp 0 is max(1, ep // cp), ep divides the ranks; here also one of ep and cp divides the other."""
    counted = 0
    for ep in range(1, 17):
        for cp in range(1, 17):
            for dp in range(17):
                groups = dp if dp > 0 else (ep // cp if ep >= cp else 1)
                ranks = sum(cp for _ in range(groups))
                accepted = ranks in range(0, ranks + 1, ep) and (ep % cp == 0 or cp % ep == 0)
                arguments = EngineArguments(
                    CARD, data_parallel_size=dp, context_parallel_size=cp, expert_parallel_size=ep
                )
                if not accepted:
                    with pytest.raises(UsageError):
                        arguments.layout()
                    continue
                layout = arguments.layout()
                assert (layout.num_ranks, layout.dp, layout.cp, layout.ep) == (ranks, groups, cp, ep)
                # Experts lie on contiguous ranks, cp fastest: every rank is in one group, and groups are alike.
                assert [layout.expert_coordinates(r)[0] for r in range(ranks)] == [r // ep for r in range(ranks)]
                assert [layout.coordinates(r)[:2] for r in range(ranks)] == [divmod(r, cp) for r in range(ranks)]
                counted += 1
    assert counted > 500


@pytest.mark.parametrize(("ep", "dp", "cp", "ranks", "copies"), [(8, 0, 1, 8, 1), (2, 8, 1, 8, 4), (2, 0, 8, 8, 4)])
def test_the_three_layouts_of_the_readme(
    ep: int, dp: int, cp: int, ranks: int, copies: int, backend: ScriptedBackend
) -> None:
    with open_llm(expert_parallel_size=ep, data_parallel_size=dp, context_parallel_size=cp) as llm:
        assert (llm.deployment.layout.num_ranks, llm.deployment.layout.copies) == (ranks, copies)
        assert llm.plan.gpus == ranks
        assert Plan.model_validate_json(llm.plan.to_json()) == llm.plan


def test_defaults_and_the_deployment_are_those_of_plans(backend: ScriptedBackend) -> None:
    with open_llm(max_model_len=None, max_num_seqs=2000, nextn=5, replay="compact") as llm:
        settings = llm.deployment.settings
        assert llm.max_model_len == 4096
        assert settings.max_tokens_per_step == 4096 + 2000 * 6
        assert llm.deployment.model.kv.name == "fp4"
        assert llm.deployment.scheduler_config().keep_tokens == 140
        # In host memory: blocks for 2,000 requests of 4,096 tokens, 5 drafts and one more, and none beside them.
        assert llm.deployment.budget.num_blocks == 2000 * math.ceil(4102 / 128)
        assert backend.runners[-1].source == EngineSource(CARD, "dummy", "auto", 0, 4096)


def test_host_memory_is_shared_and_has_no_rates() -> None:
    import os

    total = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    part = host_memory(4)
    assert 4 * part.hbm_bytes.value == pytest.approx(total, rel=0.02)
    assert math.isnan(part.hbm_bytes_per_s.value)
    with pytest.raises(DeepinferError, match=r"flops_per_s\.bf16"):
        part.peak_flops_per_s("bf16")


BAD_ENGINES: list[tuple[dict[str, Any], str]] = [
    ({"expert_parallel_size": 3, "data_parallel_size": 2}, "ep x etp = 3 does not divide the 2 ranks"),
    ({"expert_parallel_size": 0}, "expert_parallel_size must be a whole number of at least 1"),
    ({"tensor_parallel_size": 2}, "unknown argument of LLM 'tensor_parallel_size': did you mean"),
    ({"context_parallel_size": 0}, "context_parallel_size must be a whole number of at least 1"),
    ({"data_parallel_size": -1}, "data_parallel_size must be a whole number of at least 0"),
    ({"max_model_len": 2**21}, "max_model_len 2097152 exceeds the 1048576"),
    ({"nextn": 6}, "nextn 6 is too many: deepseek-v4.1-flash drafts at most 5 tokens"),
    ({"load_format": "magic"}, "load_format must be auto or dummy"),
    ({"load_format": "auto"}, "is a model card without weights"),
    ({"model": "deepseek-v4.1-flsh"}, "did you mean deepseek-v4.1-flash?"),
    ({"model": "qwen3-235b-a22b", "nextn": 1}, "has no draft module"),
    ({"model": "qwen3-235b-a22b", "replay": "compact"}, "replay compact needs layers that a prompt may skip"),
    ({"memory_utilization": 1.5}, "memory_utilization"),
    ({"memory_utilization": 0.001}, "more than the usable"),
    ({"kv_format": "fp5"}, "unknown KV format 'fp5'"),
    ({"max_num_seqs": 64, "max_tokens_per_step": 64}, "leaves no room for a prompt beside the 64 x 1 rows"),
    ({"backend": "sim"}, "backend sim produces no tokens"),
]


@pytest.mark.parametrize(("engine", "says"), BAD_ENGINES, ids=[str(e) for e, _ in BAD_ENGINES])
def test_a_bad_engine_is_one_sentence(engine: dict[str, Any], says: str, backend: ScriptedBackend) -> None:
    settings: dict[str, Any] = {"model": CARD, "backend": "cpu", "load_format": "dummy", "max_num_seqs": 4}
    with pytest.raises((UsageError, InfeasibleError)) as error:
        LLM(**(settings | engine))
    assert says in str(error.value)
    assert "\n" not in str(error.value)
    assert backend.runners == []


def test_a_context_that_the_kv_pool_cannot_hold_is_refused_with_the_one_it_can(backend: ScriptedBackend) -> None:
    with open_llm() as llm:
        used = sum(size for _, size in llm.deployment.budget.items)
        block = llm.deployment.budget.block_bytes
    tight = (used + 10.5 * block) / 2e12
    with pytest.raises(InfeasibleError, match="KV pool of 10 blocks of 128 tokens: lower max_model_len to 1279"):
        open_llm(max_model_len=1280, memory_utilization=tight)
    with open_llm(max_model_len=1279, memory_utilization=tight) as llm:
        assert llm.deployment.budget.num_blocks == 10


def test_auto_is_the_gpu_or_a_sentence(backend: ScriptedBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    assert seam.runner_backend("auto") is backend
    backend.available = False
    with pytest.raises(UsageError, match=r'no GPU was found.*use backend="cpu"'):
        seam.runner_backend("auto")

    def without_torch(name: str) -> Any:
        raise ModuleNotFoundError("No module named 'torch'", name="torch")

    monkeypatch.setattr(seam, "load_backend", without_torch)
    with pytest.raises(UsageError, match="backend cuda needs the package torch, which is not installed"):
        seam.runner_backend("cuda")


# --- workloads as requests ------------------------------------------------------------------------------------------


def test_prompts_share_exactly_the_blocks_that_the_workload_names() -> None:
    specs = [
        RequestSpec(0, 0.0, 30, 1, (4, 5), 12),
        RequestSpec(1, 0.0, 30, 1, (4, 6), 12),
        RequestSpec(2, 0.0, 20, 1, (4, 5), 12),
        RequestSpec(3, 0.0, 30, 1),
    ]
    a, b, c, d = prompt_tokens(specs, 1000, seed=7)
    assert [len(p) for p in (a, b, c, d)] == [30, 30, 20, 30]
    assert a[:12] == b[:12] == c[:12]
    assert a[:20] == c
    for other in (b[12:24], d[12:24]):
        assert sum(x == y for x, y in zip(a[12:24], other, strict=True)) <= 2
    assert a[24:] != b[24:]
    assert list(prompt_tokens(specs[3:], 1000, seed=7)) == [d]  # whatever else is drawn
    assert list(prompt_tokens(specs[3:], 1000, seed=8)) != [d]
    (long,) = prompt_tokens([RequestSpec(0, 0.0, 100_000, 1)], 10, seed=0)
    assert np.bincount(long, minlength=10) == pytest.approx(10_000, rel=0.1)


def plan_of(arrivals: Arrivals, replicas: int = 1, count: int = 6, role: str = "mixed") -> Plan:
    pool = Pool(replicas=replicas, layout=LayoutSpec(dp=8, ep=8), settings=EngineSettings(max_num_seqs=16, nextn=3))
    lengths = LognormalLength(mean=40, sigma=0.5)
    return Plan(
        model=CARD,
        hardware="gb200-nvl72",
        gpus=8 * replicas,
        pools=(pool,),
        workload=Workload(isl=lengths, osl=FixedLength(tokens=9), arrivals=arrivals, num_requests=count, seed=3),
        acceptance=Acceptance(rates=(0.7,), source="made up for a test"),
    )


def test_one_engine_gets_its_share() -> None:
    closed = one_engine(plan_of(ClosedLoop(concurrency=64), replicas=4, count=400))
    assert closed.workload.arrivals == ClosedLoop(concurrency=16)
    assert (closed.gpus, closed.serving.replicas, closed.workload.num_requests) == (8, 1, 100)
    opened = one_engine(plan_of(PoissonArrivals(rate=12.0), replicas=4, count=400), "elsewhere")
    assert opened.workload.arrivals == PoissonArrivals(rate=3.0)
    assert opened.model == "elsewhere"
    pools = (
        closed.serving.model_copy(update={"role": "prefill"}),
        closed.serving.model_copy(update={"role": "decode"}),
    )
    with pytest.raises(UsageError, match="run serves plans of one mixed pool"):
        one_engine(closed.model_copy(update={"pools": pools}))


def test_requests_have_the_lengths_and_times_of_the_workload() -> None:
    loop = ClosedLoop(concurrency=4, ramp_s=2.0)
    workload = plan_of(loop).workload
    specs = generate_requests(workload)
    requests = generation_requests(specs, loop, 129280, workload.seed)
    assert [len(r.prompt_token_ids) for r in requests] == [s.prompt_tokens for s in specs]
    assert all(r.params.max_tokens == 9 and r.params.ignore_eos for r in requests)
    assert [r.arrival_s for r in requests] == [0.0, 0.5, 1.0, 1.5, 2.0, 2.0]
    poisson = generate_requests(plan_of(PoissonArrivals(rate=2.0)).workload)
    times = [r.arrival_s for r in generation_requests(poisson, PoissonArrivals(rate=2.0), 129280, 3)]
    assert times == [s.arrival_s for s in poisson]


def test_the_measured_window_is_that_of_the_simulator() -> None:
    record = RunRecord(4, 1.0, 1)
    record.window_end_s = 50.0
    record.arrival_s[:] = [1.0, 2.0, 21.0, 11.0]
    assert measurement_window(PoissonArrivals(rate=1.0), record) == (5.0, 21.0)
    loop = ClosedLoop(concurrency=2, ramp_s=1.0, warm_up_s=2.0, measure_s=10.0)
    assert measurement_window(loop, record) == (3.0, 13.0)
    assert measurement_window(loop.model_copy(update={"measure_s": None}), record) == (3.0, 21.0)
    assert measurement_window(loop.model_copy(update={"measure_s": 40.0}), record) == (3.0, 21.0)
    record.arrival_s[2] = -1.0  # not all were sent
    assert measurement_window(loop.model_copy(update={"measure_s": 40.0}), record) == (3.0, 43.0)


# --- figures and command lines --------------------------------------------------------------------------------------


def test_the_figures_of_a_run_by_hand(backend: ScriptedBackend) -> None:
    """Two requests of 9 tokens, 4 kept a step of 1 + 3 rows: 1, 4 and 4 tokens in 3 steps of half a second."""
    backend.width = 4
    with open_llm(expert_parallel_size=2, nextn=3) as llm:
        outputs, run_ = llm.run([[5] * 6, [6] * 2], SamplingParams(max_tokens=9))
    assert run_ is not None
    summary = summarize(run_.record, math.inf, math.inf)
    assert summary.steps_per_s == pytest.approx(3 / 1.5)
    assert summary.output_tokens_per_s_per_gpu == pytest.approx(18 / 1.5 / 2)
    assert summary.full_acceptance_tokens_per_s_per_gpu == pytest.approx(2 * 2 * 4 / 1.5 / 2)
    assert summary.tau == pytest.approx(4.0)
    assert summary.input_tokens_per_s_per_gpu == pytest.approx(8 / 1.5 / 2)
    assert (summary.ttft_s.p50, summary.tpot_s.p50) == pytest.approx((0.5, 1.0 / 8))
    metrics = outputs[0].metrics
    assert metrics is not None
    assert (metrics.ttft_s, metrics.finished_s, metrics.tpot_s) == pytest.approx((0.5, 1.5, 1.0 / 8))


def test_generate_prints_texts_and_three_throughputs(
    backend: ScriptedBackend, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    backend.script = Tokenizer(folder / "tokenizer.json").encode("ja nein vielleicht")
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("second\n\nthird\n", encoding="utf-8")
    arguments = ["generate", "--model", str(folder), "--backend", "cpu", "--load-format", "dummy", "--prompt", "first"]
    arguments += ["--prompt-file", str(prompts), "--prompt-ids", "70 71", "--stop", "viel", "--max-tokens", "20"]
    status, out, err = run(*arguments, capsys=capsys)
    assert (status, err) == (0, "")
    for words in ("'first'", "'second'", "'third'", "[70, 71]", "'ja nein '", "(stop)"):
        assert words in out
    for name in ("output tokens/s per GPU", "full-acceptance tokens/s per GPU", "steps/s of one engine", "tokens kept"):
        assert name in out
    status, out, _ = run(*arguments, "--logprobs", "1", "--json", capsys=capsys)
    assert status == 0
    printed = json.loads(out)
    assert [o["prompt"] for o in printed["outputs"]] == ["first", "second", "third", None]
    assert {o["text"] for o in printed["outputs"]} == {"ja nein "}
    first = printed["outputs"][0]
    assert (first["finish_reason"], first["stop_reason"]) == ("stop", "viel")
    assert first["logprobs"] == [{str(token): -0.25} for token in first["token_ids"]]
    assert printed["summary"]["steps_per_s"] == pytest.approx(2.0)
    assert printed["wall_s"] == STEP_S * len("ja nein viel")


BAD_COMMANDS: list[tuple[tuple[str, ...], str]] = [
    (("--model", CARD, "--prompt", "a"), "without weights"),
    (("--model", CARD, "--load-format", "dummy", "--prompt", "a"), "no tokenizer.json"),
    (("--model", CARD, "--load-format", "dummy"), "no prompt"),
    (("--model", CARD, "--load-format", "dummy", "--prompt-ids", "1 x"), "--prompt-ids must be whole numbers"),
    (("--model", CARD, "--load-format", "dummy", "--prompt-file", "/no/such"), "cannot read prompt file"),
    (("--model", CARD, "--load-format", "dummy", "--prompt-ids", "1", "--temperature", "-1"), "temperature must be"),
    (("--model", CARD, "--load-format", "dummy", "--prompt-ids", "1", "--ep", "3", "--dp", "2"), "does not divide"),
    (("--model", CARD, "--load-format", "dummy", "--prompt-ids", "1", "--backend", "sim"), "produces no tokens"),
    (("--prompt", "a"), "--model"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_COMMANDS, ids=[" ".join(a)[-40:] for a, _ in BAD_COMMANDS])
def test_a_bad_command_is_one_sentence_and_status_2(
    arguments: tuple[str, ...], says: str, backend: ScriptedBackend, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run("generate", *arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


def test_run_puts_the_prediction_beside_what_it_measured(
    backend: ScriptedBackend, folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = plan_of(ClosedLoop(concurrency=6, ramp_s=0.0, measure_s=1.0), replicas=2, count=12)
    plan = plan.model_copy(update={"prediction": simulate_plan(plan)})
    path, output = tmp_path / "plan.json", tmp_path / "run.json"
    path.write_text(plan.to_json(), encoding="utf-8")
    arguments = ["run", str(path), "--backend", "cpu", "--load-format", "dummy", "--output", str(output)]
    arguments += ["--model", str(folder)]
    status, out, err = run(*arguments, "--requests", "5", capsys=capsys)
    assert (status, err) == (0, "")
    for words in ("output tokens/s per GPU", "TTFT p50 / p90 / p99", "measured on cpu, predicted for gb200-nvl72"):
        assert words in out
    for words in ("made-up weights", "one of 2 engines"):
        assert words in out
    assert "measured with the model" not in out  # the folder's is the plan's
    written = json.loads(output.read_text(encoding="utf-8"))
    ((calls, pacing_),) = backend.runners[-1].calls
    assert pacing_ == Pacing(concurrency=3)
    assert len(calls) == 5
    # Five requests of 9 tokens in 9 steps of half a second, on the 8 GPUs of one engine.
    assert written["measured"]["output_tokens_per_s_per_gpu"] == pytest.approx(45 / 4.5 / 8)
    assert written["measured"]["tau"] == 1.0
    rows = {row["name"]: row for row in written["comparison"]}
    assert plan.prediction is not None
    predicted = plan.prediction.output_tokens_per_s_per_gpu
    assert rows["output_tokens_per_s_per_gpu"]["error"] == pytest.approx(predicted / (45 / 4.5 / 8) - 1)
    assert rows["ttft_s.p90"]["predicted"] == plan.prediction.ttft_s.p90
    status, _, err = run(*arguments, capsys=capsys)
    assert backend.runners[-1].calls[0][1] == Pacing(concurrency=3, stop_s=1.0)
    assert status == 2  # the scripted engine is too slow for the plan's window
    assert "no request finished in the measurement window" in err
    assert backend.runners[-1].closed


def test_run_without_a_prediction_says_so(
    backend: ScriptedBackend, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "plan.json"
    path.write_text(plan_of(PoissonArrivals(rate=5.0)).to_json(), encoding="utf-8")
    arguments = ("run", str(path), "--backend", "cpu", "--requests", "3")
    status, _, err = run(*arguments, capsys=capsys)
    assert status == 2
    assert "without weights" in err
    status, out, _ = run(*arguments, "--load-format", "dummy", capsys=capsys)
    assert status == 0
    assert "no prediction" in out


@pytest.mark.parametrize(
    ("flags", "layout"), [("--ep 8", "ep8 dp8"), ("--ep 2 --dp 8", "ep2 dp8"), ("--ep 2 --cp 8", "ep2 dp1 cp8")]
)
def test_the_example_runs(
    flags: str,
    layout: str,
    backend: ScriptedBackend,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    example = Path(__file__).parent.parent / "examples" / "offline_inference.py"
    arguments = ["--model", CARD, "--load-format", "dummy", "--backend", "cpu", "--max-tokens", "3", *flags.split()]
    monkeypatch.setattr(sys, "argv", [str(example), *arguments])
    runpy.run_path(str(example), run_name="__main__")
    out = capsys.readouterr().out
    assert f"{CARD} on cpu: {layout}\n" in out
    assert out.count("(10, 11, 12)  (length)") == 3
    assert "full-acceptance tokens/s per GPU" in out
