"""The `cuda` backend: Triton kernels, CUDA graphs, NCCL. It runs on Hopper; Blackwell's code is compiled only."""

from __future__ import annotations

from typing import Any


def __getattr__(name: str) -> Any:
    # Kernels can be used, compiled and tested without the backend, which needs all of them.
    if name == "CudaBackend":
        from backends.cuda.backend import CudaBackend

        return CudaBackend
    raise AttributeError(name)
