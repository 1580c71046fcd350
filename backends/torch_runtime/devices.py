"""Kinds of devices that ranks run on: what differs between the backends on torch."""

from __future__ import annotations

import importlib
from typing import Protocol, cast

import torch

from backends.torch_runtime.context import RankContext
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.kernels import KernelTable
from backends.torch_runtime.launcher import StepLauncher
from backends.torch_runtime.steps import StepBuilder
from deepinfer.engine.deployment import Deployment


class DeviceKind(Protocol):
    """One kind of device; `dtype` is what activations are by default."""

    dtype: torch.dtype

    def take(self, index: int) -> torch.device:
        """The device of the rank that is the `index`-th on its host, made current."""
        ...

    def kernels(self, dtype: torch.dtype) -> KernelTable:
        """The best kernels for activations of a dtype."""
        ...

    def launcher(
        self, rank: RankContext, executor: Executor, builder: StepBuilder, deployment: Deployment
    ) -> StepLauncher:
        """How steps are started."""
        ...


def device_kind(name: str) -> DeviceKind:
    """The kind that "module:attribute" names: ranks are started with the name, and import no other kind."""
    module, _, attribute = name.partition(":")
    return cast("DeviceKind", getattr(importlib.import_module(module), attribute))
