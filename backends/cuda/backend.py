"""Runs engines on the NVIDIA GPUs of this host."""

from __future__ import annotations

import torch

from backends.cuda.graphs import GraphLauncher
from backends.cuda.kernels import kernel_table
from backends.torch_runtime.context import RankContext
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.launcher import EagerLauncher, StepLauncher
from backends.torch_runtime.runner import TorchRunner
from backends.torch_runtime.steps import StepBuilder
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import EngineSource, Runner
from deepinfer.errors import UsageError
from deepinfer.hardware.local import local_accelerator
from deepinfer.hardware.spec import Accelerator

OLDEST_CAPABILITY = (9, 0)
"""Hopper: kernels convert E4M3 in hardware and multiply with wgmma."""


class Gpu:
    """A CUDA device: BF16 activations, Triton kernels, captured decode steps.

    Wider activations are test modes: reference kernels, operator by operator. FP64 ones give the same tokens on every
    layout and for every batch: no sum comes out otherwise after it is rounded.
    """

    dtype = torch.bfloat16

    def take(self, index: int) -> torch.device:
        """The GPU of a rank, made current."""
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        # Products of FP32 numbers (mHC's coefficients, scores) are FP32, not TF32.
        torch.backends.cuda.matmul.allow_tf32 = False
        return device

    def kernels(self, dtype: torch.dtype) -> KernelTable:
        """Triton where it pays; the reference in test modes."""
        return kernel_table() if dtype == torch.bfloat16 else KernelTable()

    def launcher(
        self, rank: RankContext, executor: Executor, builder: StepBuilder, deployment: Deployment
    ) -> StepLauncher:
        """Captured graphs for steps that only decode."""
        if rank.dtype != torch.bfloat16:
            return EagerLauncher(rank, executor, builder)
        return GraphLauncher(rank, executor, builder, deployment.settings.graph_rows)


GPU = Gpu()


class CudaBackend:
    """See `deepinfer.engine.runner.RunnerBackend`."""

    def is_available(self) -> bool:
        """Whether this machine has a GPU."""
        return torch.cuda.is_available()

    def accelerator(self, num_ranks: int) -> Accelerator:
        """One of this machine's GPUs. Raises UsageError when there are too few, or one is too old."""
        if not torch.cuda.is_available():
            raise UsageError("no GPU was found on this machine; the backend cpu computes without one")
        count = torch.cuda.device_count()
        if count < num_ranks:
            raise UsageError(f"the engine has {num_ranks} ranks, and this machine has {count} GPUs")
        properties = [torch.cuda.get_device_properties(i) for i in range(num_ranks)]
        for index, found in enumerate(properties):
            if (found.major, found.minor) < OLDEST_CAPABILITY:
                raise UsageError(
                    f"GPU {index}, {found.name}, has compute capability {found.major}.{found.minor}: the kernels need "
                    f"{OLDEST_CAPABILITY[0]}.{OLDEST_CAPABILITY[1]} or more"
                )
        memory = min(found.total_memory for found in properties)
        name = properties[0].name
        return local_accelerator("cuda", name, "cuda", float(memory), f"total memory of {name}", num_ranks)

    def load(self, deployment: Deployment, source: EngineSource) -> Runner:
        """Start the ranks of a deployment, one process per GPU."""
        return TorchRunner(deployment, source, "backends.cuda.backend:GPU")
