"""Makes a rank's context from what a deployment means and what its weights are."""

from __future__ import annotations

import torch

from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.context import EngramTables, RankContext, rope_table
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.state import CacheShape, EngineState, kv_storage
from backends.torch_runtime.weights.rank import ModelWeights
from deepinfer.engine.deployment import Deployment
from deepinfer.errors import UsageError


def rank_context(
    deployment: Deployment,
    weights: ModelWeights,
    comm: Communicator,
    kernels: KernelTable,
    dtype: torch.dtype,
    max_model_len: int,
    token_map: torch.Tensor | None = None,
    shape: CacheShape | None = None,
) -> RankContext:
    """Everything one rank computes with; allocates its caches.

    `token_map` int64 [vocab] gives the compressed ids of tokens that n-grams are made of, for models with Engram.
    Raises UsageError for what the runtime cannot run.
    """
    check_runnable(deployment)
    model, device = deployment.model, comm.device
    shape = shape or CacheShape.of(deployment, max_model_len)
    assert model.numerics is not None
    engram = None
    if model.numerics.engram is not None:
        if token_map is None:
            raise UsageError(f"model {model.name} looks n-grams up by normalised tokens, which need its tokenizer")
        engram = EngramTables.of(model.numerics.engram, token_map, device)
    return RankContext(
        model=model,
        layout=deployment.layout,
        nextn=deployment.settings.nextn,
        weights=weights,
        state=EngineState(model, shape, device, torch.float64 if dtype == torch.float64 else torch.float32),
        kernels=kernels,
        comm=comm,
        rotary=rope_table(model, shape.max_blocks * shape.block_tokens + 2 * shape.rows_per_request, device),
        engram=engram,
        dtype=dtype,
    )


def check_runnable(deployment: Deployment) -> None:
    """Raises UsageError, one sentence, for a deployment that can be planned and not run."""
    model, layout, settings = deployment.model, deployment.layout, deployment.settings
    if model.numerics is not None:
        kv_storage(model)
    refused = {
        f"model family {model.family} has no kernels here; deepseek-v4.1 has": model.numerics is None,
        f"tp {layout.tp} is planned, not run: attention runs with dp and cp": layout.tp > 1,
        f"etp {layout.etp} is planned, not run: experts run with ep": layout.etp > 1,
        "redundant experts are planned, not run": layout.redundant_experts > 0,
        f"overlap {settings.overlap} is planned, not run": settings.overlap != "none",
        "fused expert exchange is planned, not run": settings.moe == "fused" and layout.ep > 1,
        f"a {deployment.role} pool is planned, not run: only mixed ones are": deployment.role != "mixed",
        f"{deployment.replicas} engines are planned, one at a time is run": deployment.replicas > 1,
    }
    for sentence, applies in refused.items():
        if applies:
            raise UsageError(sentence)
