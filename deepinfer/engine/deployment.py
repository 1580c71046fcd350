"""A plan made concrete: for each pool the model, cluster, layout, memory, graph and scheduler settings it means."""

from __future__ import annotations

from dataclasses import dataclass

from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.hardware.host import HostProfile, load_host
from deepinfer.hardware.spec import Accelerator, ClusterSpec, load_hardware
from deepinfer.layout.memory import MemoryBudget, memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.layout.plan import Plan
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.hf import load_model
from deepinfer.model.spec import ModelSpec
from deepinfer.scheduler.policy import SchedulerConfig


@dataclass(frozen=True)
class Deployment:
    """`replicas` engines, alike: everything a backend needs to run them, resolved once.

    `gpus_per_replica` is an engine's part of the cluster: its ranks, and its share of accelerators left idle.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: ParallelLayout
    settings: EngineSettings
    replicas: int
    gpus_per_replica: float
    budget: MemoryBudget
    host: HostProfile
    expert_load: ExpertLoad = TYPICAL_LOAD

    @property
    def step_groups(self) -> int:
        """Groups of ranks that step together, over all engines."""
        return self.replicas * self.layout.num_ranks // self.layout.step_group

    @property
    def replicas_per_group(self) -> int:
        """Attention replicas in one step group."""
        return self.layout.step_group // self.layout.replica_ranks

    def graph(self) -> ExecutionGraph:
        """The execution graph of this engine's steps."""
        chosen = self.settings
        features = GraphFeatures(
            "mixed", chosen.replay, chosen.nextn, chosen.overlap, chosen.moe, expert_load=self.expert_load
        )
        return build_graph(self.model, self.layout, self.cluster, features)

    def scheduler_config(self) -> SchedulerConfig:
        """What each attention replica's scheduler is told."""
        settings = self.settings
        return SchedulerConfig(
            max_num_seqs=settings.max_num_seqs,
            max_tokens_per_step=settings.max_tokens_per_step,
            num_blocks=self.budget.num_blocks,
            block_tokens=settings.block_tokens,
            num_slots=self.budget.num_slots if self.model.window else 0,
            nextn=settings.nextn,
            window=self.model.window,
            keep_tokens=settings.keep_tokens if settings.replay == "compact" else None,
            chunk_multiple=self.layout.cp,
            prefix_cache=settings.prefix_cache,
        )


def fit_to_hardware(model: ModelSpec, accelerator: Accelerator, kv_format: str | None = None) -> ModelSpec:
    """The model in the formats that the accelerator has kernels for; `kv_format` overrides the choice of the KV's."""
    wanted = kv_format or accelerator.kv_format.get(model.family)
    converted = model.with_weights(accelerator.weight_format)
    return converted.with_kv(wanted) if wanted else converted


def resolve(plan: Plan) -> tuple[Deployment, ...]:
    """The deployments of a plan's pools.

    Raises UsageError for what does not fit together and InfeasibleError for what does not fit in memory.
    """
    model, accelerator, host = load_model(plan.model), load_hardware(plan.hardware), load_host(plan.host)
    cluster = ClusterSpec(accelerator, plan.gpus)
    used = sum(pool.replicas * pool.layout.resolve().num_ranks for pool in plan.pools)
    if used > plan.gpus:
        raise UsageError(f"the plan's pools use {used} GPUs, its cluster has {plan.gpus}")
    deployments = []
    for pool in plan.pools:
        if pool.role != "mixed":
            raise UsageError(f"pool role {pool.role!r} is not supported yet: only mixed pools run")
        layout, settings = pool.layout.resolve(), pool.settings
        fitted = fit_to_hardware(model, accelerator, settings.kv_format)
        budget = memory_budget(fitted, layout, accelerator, settings)
        share = plan.gpus * layout.num_ranks / used
        deployments.append(Deployment(fitted, cluster, layout, settings, pool.replicas, share, budget, host))
    return tuple(deployments)
