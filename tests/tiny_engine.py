"""A tiny V4.1 engine on the CPU, and its released tensors: what tests of the runtime share."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from backends.torch_runtime.assemble import rank_context
from backends.torch_runtime.comm import Communicator
from backends.torch_runtime.engine import CollectedStep, Inbox, RankEngine
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.formats import KVStorage
from backends.torch_runtime.inputs import Track
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.launcher import EagerLauncher
from backends.torch_runtime.state import CacheShape
from backends.torch_runtime.steps import StepBuilder
from backends.torch_runtime.tiny import tiny_config
from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.rank import ModelWeights
from deepinfer.engine.backend import engine_request
from deepinfer.engine.deployment import Deployment
from deepinfer.hardware.host import load_host
from deepinfer.hardware.local import host_memory
from deepinfer.hardware.spec import ClusterSpec
from deepinfer.layout.memory import memory_budget
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.layout.settings import EngineSettings
from deepinfer.model.hf import parse_config
from deepinfer.model.spec import ModelSpec
from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.stop import StopChecker
from deepinfer.scheduler.request import Request

MAX_MODEL_LEN = 512
BLOCK_TOKENS = 16

__all__ = ["engine_request"]


def config_with(**changed: Any) -> dict[str, Any]:
    """The tiny model's config.json with other text fields."""
    config = tiny_config()
    config["text_config"].update(changed)
    return config


def tiny_deployment(
    model: ModelSpec, layout: ParallelLayout | None = None, num_blocks: int = 256, **settings: Any
) -> Deployment:
    """One engine on this host, with few blocks of few tokens."""
    layout = layout or ParallelLayout()
    machine = host_memory(layout.num_ranks)
    defaults = {"max_num_seqs": 4, "max_tokens_per_step": 64, "block_tokens": BLOCK_TOKENS, "memory_utilization": 0.02}
    chosen = EngineSettings(**{**defaults, **settings})
    budget = replace(memory_budget(model, layout, machine, chosen), num_blocks=num_blocks)
    cluster = ClusterSpec(machine, layout.num_ranks)
    return Deployment(model, cluster, layout, chosen, 1, float(layout.num_ranks), budget, load_host("deepinfer"))


@dataclass
class Served:
    """What a run of the tiny engine left: tokens, log-probabilities of all tokens per step, steps, prefix hits."""

    tokens: list[list[int]]
    logprobs: list[list[dict[int, float]]]
    steps: list[CollectedStep]
    num_hit_tokens: int
    num_preemptions: int


class TinyEngine:
    """One rank; weights are plain FP32 and the KV is kept in `storage`."""

    def __init__(
        self,
        deployment: Deployment,
        weights: ModelWeights | None = None,
        storage: KVStorage = "fp32",
        rank: int = 0,
        dtype: torch.dtype = torch.float32,
    ) -> None:
        model = deployment.model
        self.deployment = deployment
        weights = weights or dummy_weights(model, dtype=dtype, quantized=False)
        shape = replace(CacheShape.of(deployment, MAX_MODEL_LEN), storage=storage)
        comm = Communicator(deployment.layout, rank, torch.device("cpu"))
        self.context = rank_context(
            deployment, weights, comm, KernelTable(), dtype, MAX_MODEL_LEN, token_map(model), shape=shape
        )
        builder = StepBuilder(self.context)
        launcher = EagerLauncher(self.context, Executor(self.context, deployment.graph()), builder)
        self.engine = RankEngine(self.context, deployment, launcher, builder)

    def serve(
        self,
        prompts: Sequence[Sequence[int]],
        max_tokens: int = 8,
        hashes: Sequence[tuple[int, ...]] | None = None,
        concurrency: int | None = None,
        numbers: Sequence[int] | None = None,
        **params: Any,
    ) -> Served:
        """Generate from prompts of token ids; greedy unless told otherwise."""
        sampling = SamplingParams(**{"temperature": 0.0, "ignore_eos": True, "max_tokens": max_tokens, **params})
        ids = list(numbers or range(len(prompts)))
        tracks = {
            i: Track(sampling, i, len(p), list(p), StopChecker(sampling, ())) for i, p in zip(ids, prompts, strict=True)
        }
        requests = [
            (0.0, Request(i, len(p), max_tokens, hashes[n] if hashes else ()))
            for n, (i, p) in enumerate(zip(ids, prompts, strict=True))
        ]
        _, steps, scheduler = self.engine.serve(tracks, Inbox(requests, concurrency))
        return Served(
            [tracks[i].generated for i in ids],
            [tracks[i].logprobs for i in ids],
            steps,
            scheduler.num_hit_tokens,
            scheduler.num_preemptions,
        )


def token_map(model: ModelSpec) -> torch.Tensor | None:
    """Some map of tokens to compressed ids, many to one."""
    assert model.numerics is not None
    hashing = model.numerics.engram
    return torch.arange(model.vocab_size) % hashing.compressed_vocab if hashing else None


def tiny_model(**changed: Any) -> ModelSpec:
    """The tiny model with other text fields."""
    return parse_config(config_with(**changed), "tiny")
