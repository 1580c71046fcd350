"""A plan made concrete: for each pool the model, cluster, layout, memory, graph and scheduler settings it means."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from deepinfer.errors import UsageError
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.build.common import Phase, Replay
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.hardware.host import HostProfile, load_host
from deepinfer.hardware.spec import Accelerator, ClusterSpec, load_hardware
from deepinfer.layout.memory import MemoryBudget, memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.placement import TYPICAL_LOAD, ExpertLoad
from deepinfer.layout.plan import Plan, Pool, PoolRole, RouterName
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.hf import load_model
from deepinfer.model.spec import ModelSpec
from deepinfer.scheduler.policy import SchedulerConfig


class Sample(NamedTuple):
    """Part of a pool's attention replicas: so many step groups with so many each."""

    step_groups: int
    replicas_per_group: int


@dataclass(frozen=True)
class Deployment:
    """`replicas` engines, alike: everything a backend needs to run them, resolved once.

    `num_gpus` is the pool's part of the cluster: its ranks, and its share of accelerators left idle. With a `sample`
    only its attention replicas are run, and stand for the others.
    """

    model: ModelSpec
    cluster: ClusterSpec
    layout: ParallelLayout
    settings: EngineSettings
    replicas: int
    num_gpus: float
    budget: MemoryBudget
    host: HostProfile
    role: PoolRole = "mixed"
    sample: Sample | None = None
    router: RouterName = "least_loaded"
    expert_load: ExpertLoad = TYPICAL_LOAD

    @property
    def step_groups(self) -> int:
        """Groups of ranks that step together, over all engines, of those that are run."""
        if self.sample is not None:
            return self.sample.step_groups
        return self.replicas * self.layout.num_ranks // self.layout.step_group

    @property
    def replicas_per_group(self) -> int:
        """Attention replicas in one step group, of those that are run."""
        if self.sample is not None:
            return self.sample.replicas_per_group
        return self.layout.step_group // self.layout.replica_ranks

    @property
    def attention_replicas(self) -> int:
        """Attention replicas over all engines, of those that are run."""
        return self.step_groups * self.replicas_per_group

    @property
    def features(self) -> GraphFeatures:
        """What the graph of this engine's steps contains."""
        phase: Phase = "prefill" if self.role == "prefill" else "mixed"  # a decode pool replays windows
        chosen = self.settings
        replay: Replay = "compact" if chosen.replay == "compact" else "off"  # "mask" computes every row
        return GraphFeatures(phase, replay, chosen.nextn, chosen.overlap, chosen.moe, expert_load=self.expert_load)

    def graph(self) -> ExecutionGraph:
        """The execution graph of this engine's steps."""
        return build_graph(self.model, self.layout, self.cluster, self.features)

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
            transfer_window=self.model.window if self.model.supports_compact_replay else 0,
            keep_tokens=settings.keep_tokens if settings.replay == "compact" else None,
            chunk_multiple=self.layout.cp,
            prefix_cache=settings.prefix_cache,
        )


def fit_to_hardware(model: ModelSpec, accelerator: Accelerator, kv_format: str | None = None) -> ModelSpec:
    """The model in the formats that the accelerator has kernels for; `kv_format` overrides the choice of the KV's."""
    wanted = kv_format or accelerator.kv_format.get(model.family)
    converted = model.with_weights(accelerator.weight_format)
    return converted.with_kv(wanted) if wanted else converted


def resolve(plan: Plan, machine: Accelerator | None = None) -> tuple[Deployment, ...]:
    """The deployments of a plan's pools, in their order.

    With a `machine` all pools are laid out on that, and on its links, instead of what the plan names.
    Raises UsageError for what does not fit together and InfeasibleError for what does not fit in memory.
    """
    model, host = load_model(plan.model), load_host(plan.host)
    ranks = [pool.replicas * pool.layout.resolve().num_ranks for pool in plan.pools]
    set_aside = [pool.gpus or used for pool, used in zip(plan.pools, ranks, strict=True)]
    for pool, used, gpus in zip(plan.pools, ranks, set_aside, strict=True):
        if used > gpus:
            raise UsageError(f"the {pool.role} pool uses {used} GPUs and has {gpus}")
    if sum(set_aside) > plan.gpus:
        raise UsageError(f"the plan's pools use {sum(set_aside)} GPUs, its cluster has {plan.gpus}")
    deployments = []
    kinds = [machine or load_hardware(pool.hardware or plan.hardware) for pool in plan.pools]
    if plan.network is not None and machine is None:
        kinds = [plan.network.under(accelerator) for accelerator in kinds]
    for pool, gpus, accelerator in zip(plan.pools, set_aside, kinds, strict=True):
        fitted = fit_to_hardware(model, accelerator, pool.settings.kv_format)
        # Accelerators of a kind that no pool uses are shared out: figures are per accelerator paid for.
        share = gpus + (plan.gpus - sum(set_aside)) * gpus / sum(set_aside)
        # Pools set aside of one kind are one cluster: whether they share a scale-up domain depends on both.
        alike = sum(n for n, kind in zip(set_aside, kinds, strict=True) if kind == accelerator)
        cluster = ClusterSpec(accelerator, alike if pool.gpus else plan.gpus)
        deployments.append(_deployment(plan, pool, fitted, cluster, host, share))
    if len({d.model.kv.name for d in deployments}) > 1:
        formats = " and ".join(f"{d.model.kv.name} on {d.cluster.accelerator.name}" for d in deployments)
        raise UsageError(f"pools must keep KV in one format, got {formats}; set kv_format")
    return tuple(deployments)


def by_role(deployments: Sequence[Deployment]) -> tuple[Deployment | None, Deployment]:
    """Of a plan's deployments the one that only prefills, None in a plan without, and the one that decodes."""
    prefill = next((d for d in deployments if d.role == "prefill"), None)
    return prefill, next(d for d in deployments if d.role != "prefill")


def _deployment(
    plan: Plan, pool: Pool, model: ModelSpec, cluster: ClusterSpec, host: HostProfile, gpus: float
) -> Deployment:
    layout, settings = pool.layout.resolve(), pool.settings
    budget = memory_budget(model, layout, cluster.accelerator, settings)
    return Deployment(
        model=model,
        cluster=cluster,
        layout=layout,
        settings=settings,
        replicas=pool.replicas,
        num_gpus=gpus,
        budget=budget,
        host=host,
        role=pool.role,
        router=plan.router,
        expert_load=plan.expert_load,
    )
