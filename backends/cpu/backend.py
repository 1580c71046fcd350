"""Runs engines on this host's cores and memory."""

from __future__ import annotations

import torch

from backends.torch_runtime.context import RankContext
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.launcher import EagerLauncher, StepLauncher
from backends.torch_runtime.runner import TorchRunner
from backends.torch_runtime.steps import StepBuilder
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import EngineSource, Runner
from deepinfer.hardware.local import host_memory
from deepinfer.hardware.spec import Accelerator


class Host:
    """This host as a device: FP32 activations, reference kernels, every step operator by operator."""

    dtype = torch.float32

    def take(self, index: int) -> torch.device:
        """All ranks share the host's cores."""
        del index
        return torch.device("cpu")

    def kernels(self, dtype: torch.dtype) -> KernelTable:
        """The reference."""
        del dtype
        return KernelTable()

    def launcher(
        self, rank: RankContext, executor: Executor, builder: StepBuilder, deployment: Deployment
    ) -> StepLauncher:
        """Operator by operator."""
        del deployment
        return EagerLauncher(rank, executor, builder)


HOST = Host()


class CpuBackend:
    """See `deepinfer.engine.runner.RunnerBackend`."""

    def is_available(self) -> bool:
        """There is always a host."""
        return True

    def accelerator(self, num_ranks: int) -> Accelerator:
        """A rank's share of the host's memory."""
        return host_memory(num_ranks)

    def load(self, deployment: Deployment, source: EngineSource) -> Runner:
        """Start the ranks of a deployment as processes of this host."""
        return TorchRunner(deployment, source, "backends.cpu.backend:HOST")
