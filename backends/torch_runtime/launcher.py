"""Launches steps on a device: operator by operator, or decode steps as captured graphs."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch

from backends.torch_runtime.context import RankContext
from backends.torch_runtime.executor import Executor
from backends.torch_runtime.inputs import PromptRows
from backends.torch_runtime.steps import Outputs, StepBuilder
from deepinfer.numeric import Ints


class StepLauncher(Protocol):
    """Starts a step and returns at once, as far as the device allows."""

    def launch(self, slots: Ints, prompts: PromptRows | None, max_context: int, logprobs: int | None) -> Outputs:
        """Decode the requests in `slots`, and compute prompt rows. All ranks of a step group call it together.

        `logprobs`: how many log-probabilities of every row are wanted beside that of its token, if any.
        """
        ...


class EagerLauncher:
    """Runs every step operator by operator."""

    def __init__(self, rank: RankContext, executor: Executor, builder: StepBuilder) -> None:
        self._rank, self._executor, self._builder = rank, executor, builder

    def launch(self, slots: Ints, prompts: PromptRows | None, max_context: int, logprobs: int | None) -> Outputs:
        """See `StepLauncher`."""
        begin = _event_now(self._rank)
        on_device = self._builder.to_device(np.asarray(slots))
        step = (
            self._builder.decode(on_device, max_context)
            if prompts is None
            else self._builder.mixed(on_device, prompts, max_context)
        )
        step.logprobs = logprobs
        self._executor.run(step)
        return Outputs(step.outputs, begin)


def _event_now(rank: RankContext) -> torch.cuda.Event | None:
    if rank.state.device.type != "cuda":
        return None
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event
