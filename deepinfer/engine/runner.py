"""The seam to backends that produce tokens: what they are given, what they give back, and how one is chosen.

A runner serves requests on ranks of its own, wherever these are. In each worker that commits steps it asks a
`StopChecker` per request, from `stop_checkers`, after every step, and tells the scheduler who has stopped.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal, Protocol, cast

from deepinfer.engine.deployment import Deployment
from deepinfer.errors import UsageError
from deepinfer.hardware.spec import Accelerator
from deepinfer.metrics.record import RunRecord
from deepinfer.model.folder import tokenizer_file
from deepinfer.registry import backend_names, load_backend
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import StopChecker
from deepinfer.sampling.tokenizer import Detokenizer, Tokenizer

LoadFormat = Literal["auto", "dummy"]
DType = Literal["auto", "bfloat16", "float32", "float64"]
FinishReason = Literal["stop", "length", "ignored", "aborted"]


@dataclass(frozen=True)
class GenerationRequest:
    """A prompt, at least one token long, and what to do with it; it may be let in `arrival_s` after the start.

    Prompt and `params.max_tokens` together are within the engine's `max_model_len`, and `params.seed` is a number.
    """

    prompt_token_ids: tuple[int, ...]
    params: SamplingParams
    arrival_s: float = 0.0


@dataclass(frozen=True)
class GenerationOutput:
    """What became of the request at place `request_id` of those given; times are seconds after the start.

    `token_ids` include the token that ended it. "stop": an end-of-sequence token, a stop token or a stop string;
    "length": its `max_tokens`; "ignored": it does not fit the engine; "aborted": the run ended first, and these are
    the tokens it had. `stop_reason` is the stop token or string, None for end of sequence and length, and a sentence
    for what was ignored or aborted. Per token, `logprobs` has the likeliest tokens and the one taken. `ttft_s` runs
    from arrival to the first token; both times are 0 for a request without tokens.
    """

    request_id: int
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    logprobs: tuple[Mapping[int, float], ...] | None
    ttft_s: float
    finished_s: float
    stop_reason: str | int | None = None


@dataclass(frozen=True)
class GenerationRun:
    """Outputs in the order of the requests, and what happened when.

    Ids of the `record` are places of requests; its window is the whole run, from 0 to `wall_s`.
    """

    outputs: tuple[GenerationOutput, ...]
    record: RunRecord
    wall_s: float


@dataclass(frozen=True)
class Progress:
    """How far a run has come: requests finished of `total`, and tokens delivered so far."""

    finished: int
    total: int
    output_tokens: int
    elapsed_s: float


@dataclass(frozen=True)
class Pacing:
    """Beside arrival times: at most `concurrency` requests are in the engine, and each that finishes lets the next in.

    What is not finished `stop_s` after the start is aborted. None: no such limit.
    """

    concurrency: int | None = None
    stop_s: float | None = None


AT_ONCE = Pacing()


@dataclass(frozen=True)
class EngineSource:
    """What an engine computes with: the weights in the folder `model`, or "dummy" ones of a card's true shapes.

    `dtype` is that of activations; "float64" is a test mode: reference kernels with sums in FP64, whose tokens are the
    same on every layout. No request is longer than `max_model_len`, prompt and output together.
    """

    model: str
    load_format: LoadFormat
    dtype: DType
    seed: int
    max_model_len: int


class Runner(Protocol):
    """A loaded engine. One call at a time."""

    @property
    def speaks(self) -> bool:
        """Whether this process should print and write: of several that serve together (torchrun), one does."""
        ...

    @property
    def eos_token_ids(self) -> Collection[int]:
        """Tokens that end a sequence."""
        ...

    def generate(
        self,
        requests: Sequence[GenerationRequest],
        progress: Callable[[Progress], None] | None = None,
        pacing: Pacing = AT_ONCE,
    ) -> GenerationRun:
        """Serve requests to their ends. `progress` is called from this thread, at the runner's own pace.

        The prefix cache lasts from one call to the next, unless `pacing` cut one off. Raises EngineLostError, with what
        requests had produced, when the engine ends before they do.
        """
        ...

    def close(self) -> None:
        """End its processes and free its memory; closing twice does nothing."""
        ...


class RunnerBackend(Protocol):
    """A backend that produces tokens."""

    def is_available(self) -> bool:
        """Whether this machine has a device for it."""
        ...

    def accelerator(self, num_ranks: int) -> Accelerator:
        """The device of one of so many ranks; its memory is what the ranks of an engine may fill.

        Raises UsageError when there are fewer devices.
        """
        ...

    def load(self, deployment: Deployment, source: EngineSource) -> Runner:
        """Start the ranks of a deployment and load their weights.

        Raises UsageError for weights that cannot be read or do not belong to the model.
        """
        ...


def runner_backend(name: str) -> RunnerBackend:
    """The installed backend called `name`; "auto" is cuda where there is a GPU.

    Raises UsageError for one that is unknown, produces no tokens, needs a package that is not installed, or, of "auto",
    has no device.
    """
    if name == "auto":
        if "cuda" in backend_names():
            found = runner_backend("cuda")
            if found.is_available():
                return found
        raise UsageError('no GPU was found on this machine; to compute on its CPU, use backend="cpu" (--backend cpu)')
    try:
        backend: object = load_backend(name)
    except ModuleNotFoundError as error:
        raise UsageError(f"backend {name} needs the package {error.name}, which is not installed") from None
    if not hasattr(backend, "load"):
        raise UsageError(f"backend {name} produces no tokens, only times; use cpu or cuda")
    return cast("RunnerBackend", backend)


def stop_checkers(source: EngineSource, eos_token_ids: Collection[int]) -> Callable[[SamplingParams], StopChecker]:
    """Makes the checker of one request after another; for a worker, from what it was started with.

    The tokenizer is read when the first request with stop strings comes. Making a checker then raises UsageError when
    there is none.
    """

    @cache
    def tokenizer() -> Tokenizer:
        return load_tokenizer(source.model)

    def checker(params: SamplingParams) -> StopChecker:
        return StopChecker(params, eos_token_ids, Detokenizer(tokenizer()) if params.stop_strings else None)

    return checker


def load_tokenizer(model: str) -> Tokenizer:
    """The tokenizer in a model's folder. Raises UsageError when there is none."""
    path = tokenizer_file(model)
    if path is None:
        raise UsageError(f"model {model} has no tokenizer.json: give prompts as token ids, and no stop strings")
    return Tokenizer(path)
