"""What a user says of an engine, with DeepInfer's defaults, and the plan that it means: one road with `run PLAN`."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, get_args

from pydantic import ValidationError

from deepinfer.engine.deployment import Deployment, resolve
from deepinfer.engine.runner import DType, EngineSource, LoadFormat, RunnerBackend
from deepinfer.errors import InfeasibleError, UsageError
from deepinfer.files import first_fault
from deepinfer.hardware.local import HOST_FAMILY
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.folder import model_folder
from deepinfer.model.spec import ModelSpec
from deepinfer.scheduler.speculation import default_acceptance
from deepinfer.workload.spec import ClosedLoop, FixedLength, Workload

DEFAULT_MODEL_LEN = 4096
"""Longest request, prompt and output, of an engine that was not told (DeepInfer 0.1.0, offline)."""
DEFAULT_PROMPT_ROWS = 4096
"""Prompt rows of a step of an engine that was not told (DeepInfer 0.1.0, whose steps have prompts or decode)."""


@dataclass(frozen=True)
class EngineArguments:
    """One engine, in DeepInfer's words. Raises UsageError, one sentence, for what it does not accept.

    `model` is the folder of a checkpoint, or with `load_format` "dummy" (weights of true shapes, made up) also a card.
    The engine has `data_parallel_size` x `context_parallel_size` ranks, in groups of `expert_parallel_size` that hold
    all experts; 0 data parallel ranks mean max(1, ep / cp). Per attention replica, `max_num_seqs` requests run at once
    and a step has `max_tokens_per_step` rows; without it 4096 for prompts beside those of `max_num_seqs` decoding
    requests: prompts are computed in chunks, and need not fit a step. `nextn` drafts are verified per request and step.
    `kv_format` is one of the model's, by default its own.
    """

    model: str
    load_format: LoadFormat = "auto"
    dtype: DType = "auto"
    seed: int = 0
    data_parallel_size: int = 0
    context_parallel_size: int = 1
    expert_parallel_size: int = 1
    max_model_len: int | None = None
    max_num_seqs: int = 256
    max_tokens_per_step: int | None = None
    nextn: int = 0
    replay: Literal["off", "mask", "compact"] = "off"
    prefix_cache: bool = True
    async_scheduling: bool = True
    memory_utilization: float = 0.90
    kv_format: str | None = None

    def __post_init__(self) -> None:
        _check_choice("load_format", self.load_format, get_args(LoadFormat))
        _check_choice("dtype", self.dtype, get_args(DType))
        _check_choice("replay", self.replay, ("off", "mask", "compact"))
        for name, low in (("data_parallel_size", 0), ("context_parallel_size", 1), ("expert_parallel_size", 1)):
            _check_at_least(name, getattr(self, name), low)
        for name in ("max_model_len", "max_num_seqs", "max_tokens_per_step"):
            if getattr(self, name) is not None:
                _check_at_least(name, getattr(self, name), 1)
        for name in ("nextn", "seed"):
            _check_at_least(name, getattr(self, name), 0)

    def layout(self) -> ParallelLayout:
        """The ranks of the engine. Raises UsageError when the degrees do not fit together."""
        return ParallelLayout.from_flags(
            ep=self.expert_parallel_size, cp=self.context_parallel_size, dp=self.data_parallel_size
        )

    def context_limit(self, model: ModelSpec) -> int:
        """Tokens of the longest request, prompt and output. Raises UsageError when the model is not made for them."""
        if self.max_model_len is None:
            return min(DEFAULT_MODEL_LEN, model.max_context)
        if self.max_model_len > model.max_context:
            raise UsageError(f"max_model_len {self.max_model_len} exceeds the {model.max_context} of {model.name}")
        return self.max_model_len

    def source(self, model: ModelSpec) -> EngineSource:
        """What to load. Raises UsageError where there are no weights to."""
        return engine_source(self.model, self.load_format, self.dtype, self.seed, self.context_limit(model))

    def settings(self, model: ModelSpec) -> EngineSettings:
        """Settings of the engine. Raises UsageError for what the model cannot do."""
        self._check_model(model)
        rows = DEFAULT_PROMPT_ROWS + self.max_num_seqs * (1 + self.nextn)
        try:
            return EngineSettings(
                max_num_seqs=self.max_num_seqs,
                max_tokens_per_step=self.max_tokens_per_step or rows,
                nextn=self.nextn,
                replay=self.replay,
                prefix_cache=self.prefix_cache,
                async_scheduling=self.async_scheduling,
                memory_utilization=self.memory_utilization,
                kv_format=self.kv_format or model.kv.name,
            )
        except ValidationError as error:
            raise UsageError(first_fault(error)) from None

    def plan(self, model: ModelSpec, hardware: str) -> Plan:
        """The plan of this engine alone; its workload is the most that the engine admits, half of it prompts."""
        layout, settings, tokens = self.layout(), self.settings(model), self.context_limit(model)
        users = layout.num_ranks // layout.replica_ranks * settings.max_num_seqs
        prompt = FixedLength(tokens=max(tokens // 2, 1))
        output = FixedLength(tokens=max(tokens - prompt.tokens, 1))
        arrivals = ClosedLoop(concurrency=users)
        return Plan(
            model=self.model,
            hardware=hardware,
            gpus=layout.num_ranks,
            pools=(Pool(replicas=1, layout=LayoutSpec.of(layout), settings=settings),),
            workload=Workload(isl=prompt, osl=output, arrivals=arrivals, num_requests=users, seed=self.seed),
            acceptance=default_acceptance(model.family, model.draft.kind if model.draft else None),
        )

    def _check_model(self, model: ModelSpec) -> None:
        drafts = model.draft.max_drafts if model.draft else 0
        if self.nextn > drafts:
            made = f"drafts at most {drafts} tokens" if drafts else "has no draft module"
            raise UsageError(f"nextn {self.nextn} is too many: {model.name} {made}")
        if self.replay != "off" and not model.supports_compact_replay:
            raise UsageError(f"replay {self.replay} needs layers that a prompt may skip, and {model.name} has none")


def engine_source(model: str, load_format: LoadFormat, dtype: DType, seed: int, max_model_len: int) -> EngineSource:
    """What to load. Raises UsageError for a card that is to be loaded, because it has no weights."""
    if load_format == "auto" and model_folder(model) is None:
        raise UsageError(
            f"{model} is a model card without weights: give the folder of a checkpoint, or the load format dummy"
        )
    return EngineSource(model, load_format, dtype, seed, max_model_len)


def deploy(plan: Plan, backend: RunnerBackend, max_model_len: int) -> Deployment:
    """The deployment of a plan with one engine on the machine at hand.

    Where ranks live in host memory they take no more KV blocks than their requests can use, and leave the rest of it
    to others. Raises UsageError and InfeasibleError like `resolve`.
    """
    machine = backend.accelerator(plan.serving.layout.resolve().num_ranks)
    (deployment,) = resolve(plan, machine)
    deployment.scheduler_config()  # refuses what it cannot schedule now, not when ranks have started
    if machine.family != HOST_FAMILY:
        return deployment
    settings, budget = deployment.settings, deployment.budget
    per_request = -(-(max_model_len + settings.nextn + 1) // settings.block_tokens)
    enough = min(budget.num_blocks, settings.max_num_seqs * per_request)
    return replace(deployment, budget=replace(budget, num_blocks=enough))


def check_context(deployment: Deployment, max_model_len: int) -> None:
    """Raises InfeasibleError when the KV of one request of `max_model_len` tokens exceeds the pool."""
    block = deployment.settings.block_tokens
    room = deployment.budget.num_blocks * block - deployment.settings.nextn - 1
    if max_model_len > room:
        raise InfeasibleError(
            f"a request of max_model_len {max_model_len} tokens does not fit the KV pool of "
            f"{deployment.budget.num_blocks} blocks of {block} tokens: lower max_model_len to {room} or max_num_seqs"
        )


def _check_choice(name: str, value: object, known: tuple[str, ...]) -> None:
    if value not in known:
        raise UsageError(f"{name} must be {' or '.join(known)}, got {value!r}")


def _check_at_least(name: str, value: object, low: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or value < low:
        raise UsageError(f"{name} must be a whole number of at least {low}, got {value!r}")
