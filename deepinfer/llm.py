"""The offline API: `LLM(model).generate(prompts, sampling_params)`, as users of vLLM and DeepInfer expect it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

from deepinfer.engine.arguments import EngineArguments, check_context, deploy
from deepinfer.engine.runner import (
    FinishReason,
    GenerationOutput,
    GenerationRequest,
    GenerationRun,
    Progress,
    Runner,
    load_tokenizer,
    runner_backend,
)
from deepinfer.errors import EngineLostError, UsageError, unknown_name
from deepinfer.model.folder import tokenizer_file
from deepinfer.model.hf import load_model
from deepinfer.sampling.params import SamplingParams, derived_seed
from deepinfer.sampling.prompts import ParsedPrompt, Prompts, check_token_ids, parse_prompts
from deepinfer.sampling.stop import StopChecker
from deepinfer.sampling.tokenizer import Detokenizer, Tokenizer, has_tokenizers

__all__ = ["LLM", "CompletionOutput", "Generation", "RequestMetrics", "RequestOutput", "SamplingParams"]


@dataclass(frozen=True)
class CompletionOutput:
    """What a request produced. `text` is None where the model has no tokenizer.

    `token_ids` include the token that ended it, `text` does not, nor a stop string. Reasons as in `GenerationOutput`.
    """

    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None = None
    logprobs: tuple[Mapping[int, float], ...] | None = None
    index: int = 0


@dataclass(frozen=True)
class RequestMetrics:
    """Seconds: from arrival to the first token, from the start of the run to the last one, and between tokens, mean."""

    ttft_s: float
    finished_s: float
    tpot_s: float


@dataclass(frozen=True)
class RequestOutput:
    """A prompt and what came of it; `prompt` is None where it was given as token ids.

    `metrics` is None for a request without output.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: tuple[int, ...]
    outputs: tuple[CompletionOutput, ...]
    metrics: RequestMetrics | None


class Generation(NamedTuple):
    """Outputs in the order of the prompts, and the run that they came from; None when the engine had nothing to do."""

    outputs: list[RequestOutput]
    run: GenerationRun | None


class _Prepared(NamedTuple):
    """A prompt as text, if it was given so, and as token ids, with its parameters."""

    text: str | None
    token_ids: tuple[int, ...]
    params: SamplingParams


class LLM:
    """An engine of one model on this machine, for as long as it is open; a context manager closes it.

    `backend` "auto" is cuda where there is a GPU; "cpu" computes on the host. `engine` are the fields of
    `EngineArguments`: layout in DeepInfer's words (`expert_parallel_size=8` alone means 8 ranks), `load_format`,
    `max_model_len`, `max_num_seqs`, `nextn` and so on. `plan` is the engine as a plan, `deployment` that plan on this
    machine. Raises UsageError for what does not fit together and InfeasibleError for what does not fit in memory.
    """

    def __init__(self, model: str | Path, *, backend: str = "auto", **engine: Any) -> None:
        self._runner: Runner | None = None
        known = {field.name for field in fields(EngineArguments)} - {"model"}
        for name in engine.keys() - known:
            raise unknown_name("argument of LLM", name, known)
        arguments = EngineArguments(str(model), **engine)
        self._spec = load_model(arguments.model)
        source = arguments.source(self._spec)
        self.max_model_len = source.max_model_len
        self._model, self._seed, self._num_served = arguments.model, arguments.seed, 0
        chosen = runner_backend(backend)
        name = chosen.accelerator(arguments.layout().num_ranks).name
        self.plan = arguments.plan(self._spec, name)
        self.deployment = deploy(self.plan, chosen, self.max_model_len)
        check_context(self.deployment, self.max_model_len)
        self._runner = chosen.load(self.deployment, source)

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """End the engine; closing twice does nothing."""
        if self._runner is not None:
            self._runner.close()
            self._runner = None

    def generate(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> list[RequestOutput]:
        """What the model says to each prompt, in their order.

        A prompt is text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}; several are a list.
        `sampling_params` are those of all prompts, or one for each. A prompt that leaves no place for a token within
        `max_model_len` is finished as "ignored" with the reason; longer outputs than that end as "length". With
        `prefix_cache` prompts find what earlier calls left, and windows before a hit are replayed within their bound:
        a prompt met before may continue with other tokens. Raises UsageError for an empty prompt, a token that the
        model does not have, and text without a tokenizer.
        """
        return self.run(prompts, sampling_params, progress).outputs

    def run(
        self,
        prompts: Prompts,
        sampling_params: SamplingParams | Sequence[SamplingParams] | None = None,
        progress: Callable[[Progress], None] | None = None,
    ) -> Generation:
        """Like `generate`, with the record of the run beside its outputs."""
        if self._runner is None:
            raise UsageError("this LLM is closed")
        _ = self._detokenizes  # an engine must not find a broken tokenizer after it has started
        parsed = parse_prompts(prompts)
        params = _one_for_each(sampling_params, len(parsed))
        prepared = [self._prepare(p, s, i) for i, (p, s) in enumerate(zip(parsed, params, strict=True))]
        fitting = [i for i, request in enumerate(prepared) if len(request.token_ids) < self.max_model_len]
        requests = [self._request(prepared[i], self._num_served + i) for i in fitting]
        self._num_served += len(prepared)
        try:
            run = self._runner.generate(requests, progress) if requests else None
        except EngineLostError as error:
            raise error.renumbered(fitting) from error
        served = dict(zip(fitting, run.outputs, strict=True)) if run else {}
        return Generation([self._output(i, request, served.get(i)) for i, request in enumerate(prepared)], run)

    @property
    def speaks(self) -> bool:
        """Whether this process should print: under torchrun, rank 0 does."""
        return self._runner is None or self._runner.speaks

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises UsageError when it has none."""
        return self._tokenizer

    @cached_property
    def _detokenizes(self) -> bool:
        """Whether outputs get a text: token ids alone need neither a tokenizer nor its package."""
        return tokenizer_file(self._model) is not None and has_tokenizers() and self.tokenizer is not None

    @cached_property
    def _tokenizer(self) -> Tokenizer:
        return load_tokenizer(self._model)

    def _prepare(self, prompt: ParsedPrompt, params: SamplingParams, number: int) -> _Prepared:
        token_ids = prompt.token_ids
        if token_ids is None:
            token_ids = self.tokenizer.encode(prompt.text or "")
            if not token_ids:
                raise UsageError(f"prompt {number} has no tokens: the tokenizer leaves nothing of {prompt.text!r}")
        check_token_ids(token_ids, self._spec.vocab_size, number)
        if params.stop_strings:
            _ = self.tokenizer
        return _Prepared(prompt.text, token_ids, params)

    def _request(self, prepared: _Prepared, number: int) -> GenerationRequest:
        params = prepared.params
        most = min(params.max_tokens, self.max_model_len - len(prepared.token_ids))
        seed = derived_seed(self._seed, number) if params.seed is None else params.seed
        within = replace(params, max_tokens=most, min_tokens=min(params.min_tokens, most), seed=seed)
        return GenerationRequest(prepared.token_ids, within)

    def _output(self, number: int, request: _Prepared, output: GenerationOutput | None) -> RequestOutput:
        if output is None:
            limit = self.max_model_len
            why = f"a prompt of {len(request.token_ids)} tokens leaves no room for output in max_model_len {limit}"
            ignored = CompletionOutput("", (), "ignored", why)
            return RequestOutput(number, request.text, request.token_ids, (ignored,), None)
        later = len(output.token_ids) - 1
        tpot_s = (output.finished_s - output.ttft_s) / later if later > 0 else 0.0
        completion = CompletionOutput(
            text=self._text(request.params, output.token_ids),
            token_ids=output.token_ids,
            finish_reason=output.finish_reason,
            stop_reason=output.stop_reason,
            logprobs=output.logprobs,
        )
        metrics = RequestMetrics(output.ttft_s, output.finished_s, tpot_s) if output.token_ids else None
        return RequestOutput(number, request.text, request.token_ids, (completion,), metrics)

    def _text(self, params: SamplingParams, token_ids: tuple[int, ...]) -> str | None:
        """The text that the engine's own checker saw, cut where it stopped."""
        if self._runner is None or not self._detokenizes:
            return None
        checker = StopChecker(params, self._runner.eos_token_ids, Detokenizer(self.tokenizer))
        checker.accept(token_ids)
        return checker.final_text()


def _one_for_each(given: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
    if given is None or isinstance(given, SamplingParams):
        return [given or SamplingParams()] * count
    listed = list(given)
    if len(listed) != count:
        raise UsageError(f"sampling_params has {len(listed)} entries for {count} prompts: give one, or one for each")
    for params in listed:
        if not isinstance(params, SamplingParams):
            raise UsageError(f"sampling_params must be SamplingParams, got {type(params).__name__}")
    return listed
