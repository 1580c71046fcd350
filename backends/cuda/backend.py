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
from backends.torch_runtime.state import kv_storage
from backends.torch_runtime.steps import StepBuilder
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.runner import EngineSource, Runner
from deepinfer.errors import UsageError
from deepinfer.hardware.local import local_accelerator
from deepinfer.hardware.spec import Accelerator

SUPPORTED = {9: "Hopper", 10: "Blackwell"}
"""Major compute capabilities whose tiles were chosen: wgmma, and block-scaled tcgen05 (compiled, not yet run)."""
MOST_WINDOW_KEYS = 192
"""Window keys that a row of attention may see, the rows of a draft block included."""


class Gpu:
    """A CUDA device: BF16 activations, Triton kernels, captured decode steps.

    Wider activations are test modes: reference kernels, operator by operator. With FP64 ones no sum was
    seen to come out otherwise once it is rounded, whatever the layout and the batch.
    """

    dtype = torch.bfloat16

    def take(self, index: int) -> torch.device:
        """The GPU of a rank, made current."""
        device = torch.device("cuda", index)
        torch.cuda.set_device(device)
        # Products of FP32 numbers (mHC's coefficients, scores) are FP32, not TF32, and sums of BF16 ones are FP32.
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
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
            if found.major not in SUPPORTED:
                known = " and ".join(f"{major}.x ({name})" for major, name in SUPPORTED.items())
                raise UsageError(
                    f"GPU {index}, {found.name}, has compute capability {found.major}.{found.minor}: the kernels are "
                    f"made for {known}"
                )
        memory = min(found.total_memory for found in properties)
        name = properties[0].name
        return local_accelerator("cuda", name, "cuda", float(memory), f"total memory of {name}", num_ranks)

    def load(self, deployment: Deployment, source: EngineSource) -> Runner:
        """Start the ranks of a deployment, one process per GPU.

        Raises UsageError for a KV format or a window that the kernels do not take.
        """
        model = deployment.model
        if source.dtype in ("auto", "bfloat16") and kv_storage(model) not in ("fp4", "mxfp8"):
            raise UsageError(f"KV format {model.kv.name!r} has no Triton kernels: set kv_format to fp4 or mxfp8")
        block = model.draft.block_size if model.draft and deployment.settings.nextn else 0
        if model.window + block > MOST_WINDOW_KEYS:
            raise UsageError(
                f"{model.name} has a window of {model.window} keys and {block} draft rows; the kernels take "
                f"{MOST_WINDOW_KEYS} together"
            )
        return TorchRunner(deployment, source, "backends.cuda.backend:GPU")
