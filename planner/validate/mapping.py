"""What an entry measured, in the planner's words: model and formats, cluster, layout, graph. One road for all entries.

What cannot be expressed raises a `deepinfer.errors` class whose sentence is the entry's reason.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import lru_cache

from deepinfer.cost.model import CostModel, CostProfile
from deepinfer.engine.deployment import fit_to_hardware
from deepinfer.errors import UsageError
from deepinfer.hardware.host import HostProfile, load_host
from deepinfer.hardware.spec import Accelerator, ClusterSpec, load_hardware
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.model.hf import load_model
from deepinfer.model.spec import BF16, FP8_BLOCK_128, INT4, INT8, MXFP4, NVFP4, ModelSpec, WeightFormat
from planner.validate.engines import EngineProfile, load_engine
from planner.validate.targets import Target, TargetLayout

# Checkpoints of one architecture (their config.json files agree in all that a graph is made of).
_MODEL_ALIASES = {
    "deepseek-r1": "deepseek-v3",
    "deepseek-r1-0528": "deepseek-v3",
    "deepseek-v3-0324": "deepseek-v3",
    "deepseek-v3.1": "deepseek-v3",
    "deepseek-v3.2-exp": "deepseek-v3.2",
    "kimi-k2-instruct": "kimi-k2",
    "kimi-k2-thinking": "kimi-k2",
}
_HARDWARE_ALIASES = {"gb200": "gb200-nvl72", "gb300": "gb300-nvl72"}
# Models whose later release ships a drafter that makes a block in one pass (DSpark) instead of one token.
_BLOCK_DRAFTERS = {"deepseek-v4-flash": "deepseek-v4-flash-0731", "deepseek-v4-pro": "deepseek-v4-pro-dspark"}
_BLOCK_LENGTH = 5
RANDOM_TOKENS_SIGMA = 0.61
"""Spread of expert popularity on random ids: Gini 0.29 to 0.38, the middle (DODOCO, arXiv 2605.20982; 0.24 on text)."""
_DIES_PER_ACCELERATOR = {"ascend-910c": 2}
_FORMATS = {"fp8": FP8_BLOCK_128, "int8": INT8, "bf16": BF16, "nvfp4": NVFP4, "mxfp4": MXFP4, "int4": INT4}
# Names of one entry's KV format in the order they are tried; INT8 records are as long as FP8's.
_KV_NAMES = {
    "fp8": ("fp8", "fp8-v4", "mxfp8"),
    "int8": ("fp8", "fp8-v4", "mxfp8"),
    "bf16": ("bf16",),
    "fp4": ("fp4",),
    "nvfp4": ("fp4",),
}


@dataclass(frozen=True)
class Case:
    """One entry's engine: `layout` covers one pipeline stage, and `stages` of them hold the model's layers."""

    target: Target
    model: ModelSpec
    cluster: ClusterSpec
    layout: ParallelLayout
    stages: int
    engine: EngineProfile
    host: HostProfile | None
    costs: CostModel
    expert_load: ExpertLoad

    @property
    def replicas(self) -> int:
        """Attention replicas of a stage: the step's requests and prompts spread over them."""
        return self.layout.num_ranks // self.layout.replica_ranks

    @property
    def chunk_rows(self) -> float:
        """Most prompt rows of one replica's step in an aggregated server."""
        return self.engine.chunk_rows(self.cluster.accelerator, self.replicas, self.target.stated_chunk)


def map_case(target: Target, profile: CostProfile | None = None) -> Case:
    """The engine that an entry measured, priced by its hardware's cost profile or the one given.

    Raises UsageError or NoDataError with the reason where there is none.
    """
    dies = target.layout.ranks_per_gpu
    costs = _costs(target.hardware, dies)
    if profile is not None:
        costs = CostModel(costs.accelerator, profile)
    model = _model(target, costs.accelerator)
    layout = map_layout(target.layout, target.gpus, target.hardware)
    engine = load_engine(target.engine)
    return Case(
        target=target,
        model=model,
        cluster=ClusterSpec(costs.accelerator, target.gpus * dies),
        layout=layout,
        stages=target.layout.pp,
        engine=engine,
        host=load_host(engine.host) if engine.host else None,
        costs=costs,
        expert_load=_expert_load(target),
    )


def _expert_load(target: Target) -> ExpertLoad:
    """Forced balance as stated; kernels are timed on uniform routing; else text or random ids, EPLB with copies."""
    if target.expert_load == "balanced":
        return ExpertLoad(balanced=True)
    if target.kind == "kernel" and target.expert_load != "real":
        return ExpertLoad(sigma=0.0, drift=0.0, text_spread=0.0)
    eplb = target.layout.redundant_experts > 0
    if target.random_tokens:
        return ExpertLoad(sigma=RANDOM_TOKENS_SIGMA, text_spread=0.0, eplb=eplb)
    return TYPICAL_LOAD.model_copy(update={"eplb": eplb})


def map_layout(layout: TargetLayout, gpus: int, hardware: str) -> ParallelLayout:
    """The layout over ranks, which may be the dies of an accelerator.

    Raises UsageError where the two planes cannot be told from the degrees.
    """
    dies = layout.ranks_per_gpu
    if dies != 1 and dies != _DIES_PER_ACCELERATOR.get(hardware):
        raise UsageError(f"{dies} ranks per accelerator on {hardware}: an accelerator of the catalog is one rank")
    ranks = layout.tp * layout.dp * layout.cp
    if ranks * layout.pp != gpus * dies:
        raise UsageError(f"tp x dp x cp x pp does not cover {gpus} accelerators of {dies} ranks")
    if ranks % layout.ep:
        raise UsageError(f"ep {layout.ep} does not divide the {ranks} ranks of a stage")
    return ParallelLayout(
        dp=layout.dp,
        cp=layout.cp,
        tp=layout.tp,
        ep=layout.ep,
        etp=ranks // layout.ep,
        redundant_experts=layout.redundant_experts,
    )


def _hardware(name: str) -> Accelerator:
    try:
        return load_hardware(_HARDWARE_ALIASES.get(name, name))
    except UsageError:
        raise UsageError(f"hardware {name!r} is not in the catalog") from None


@lru_cache
def _costs(hardware: str, parts: int) -> CostModel:
    return CostModel(_hardware(hardware).part(parts))


def _model(target: Target, accelerator: Accelerator) -> ModelSpec:
    """The card's model in the formats that the entry names, else in those the accelerator serves it in."""
    name = target.model.lower()
    try:
        name = _MODEL_ALIASES.get(name, name)
        card = load_model(_BLOCK_DRAFTERS.get(name, name) if _drafts_blocks(target) else name)
    except UsageError:
        raise UsageError(f"model {target.model!r} has no card") from None
    model = fit_to_hardware(card, accelerator)
    if target.weights is not None:
        model = with_experts(model, card, target.weights)
    if target.kv is not None:
        model = _with_kv(model, target.kv)
    return _with_block(model, target.spec.nextn if target.spec else 0)


def _with_block(model: ModelSpec, nextn: int) -> ModelSpec:
    """The model with a block drafter that makes `nextn` tokens, where that is more than its own block."""
    draft = model.draft
    if draft is None or draft.kind != "dspark" or nextn <= draft.max_drafts:
        return model
    return replace(model, draft=replace(draft, max_drafts=nextn, block_size=nextn))


def _drafts_blocks(target: Target) -> bool:
    """Whether drafts came in blocks: said so, or as many a step as only a block drafter makes."""
    if target.op is not None:
        return target.op.name == "draft_step"
    if target.spec is None or not target.spec.nextn:
        return False
    said = "dspark" in f"{target.source} {target.notes}".lower()
    return said or target.spec.nextn >= _BLOCK_LENGTH


def with_experts(model: ModelSpec, card: ModelSpec, weights: str) -> ModelSpec:
    """The model with routed experts in format `weights`.

    FP4 of a checkpoint that has none of its own means NVIDIA's (nvidia/DeepSeek-R1-0528-FP4-v2, model card): experts,
    shared ones and dense layers in NVFP4, attention in BF16 (TensorRT-LLM tech blog 1, table "Precision Strategy") but
    for its output projection, which version 2 quantises too.
    """
    if weights == "fp4" and card.expert_format is MXFP4:
        return replace(model, expert_format=MXFP4)
    if weights in ("fp4", "nvfp4"):
        if card.expert_format is MXFP4:
            return replace(model, expert_format=NVFP4)
        return replace(model, expert_format=NVFP4, dense_format=BF16, ffn_format=NVFP4, output_format=NVFP4)
    return replace(model, expert_format=_format(weights))


def _format(name: str) -> WeightFormat:
    if name not in _FORMATS:
        raise UsageError(f"weight format {name!r} is not modelled")
    return _FORMATS[name]


def _with_kv(model: ModelSpec, name: str) -> ModelSpec:
    wanted = _KV_NAMES.get(name, ())
    if model.kv.name in wanted:
        return model
    known = {k.name for k in model.kv_formats}
    for candidate in wanted:
        if candidate in known:
            return model.with_kv(candidate)
    raise UsageError(f"KV format {name!r} of {model.name} is not modelled")
