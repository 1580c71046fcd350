"""The encode pool: accelerators that turn images into embeddings beside a plan, as a cost; it is not simulated."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from deepinfer.cost.compose import step_cost
from deepinfer.cost.model import CostModel
from deepinfer.graph.build.vision import build_vision_graph, image_shape
from deepinfer.hardware.spec import Accelerator
from deepinfer.layout.plan import EncodePool, Plan
from deepinfer.model.spec import VisionTower
from deepinfer.units import format_seconds
from planner.economics import economics
from planner.problem import Problem
from planner.steady import UTILIZATION

BATCHES = (1, 2, 4, 8)
"""Images of a step that are considered."""
NEAR = 1.05
"""Seconds per image over those of the largest batch, up to which a smaller batch is taken, as requests wait less."""


@dataclass(frozen=True)
class EncodeFigures:
    """What encoding adds to a plan: its own share of cost and energy (None: not in the catalog), and TTFT with it.

    TTFT is at the percentile of the plan's limits: the simulated one and the time that a request's images take.
    """

    gpus: int
    usd_per_million_output_tokens: float | None
    joules_per_output_token: float | None
    encode_s: float
    ttft_with_images_s: float


def image_seconds(tower: VisionTower, image_tokens: int, accelerator: Accelerator) -> tuple[int, float]:
    """Images of a batch, and seconds of one image in it, on one accelerator."""
    batches = np.asarray(BATCHES, dtype=float)
    shape = image_shape(tower, batches, float(image_tokens))
    seconds = step_cost(build_vision_graph(tower), shape, CostModel(accelerator)).seconds / batches
    chosen = int(np.argmax(seconds <= NEAR * seconds[-1]))
    return BATCHES[chosen], float(seconds[chosen])


def with_encode(problem: Problem, plan: Plan) -> Plan:
    """A simulated plan with the encode pool that its requests need; as it was without images or a prediction."""
    tower = problem.model.vision
    if not problem.images or tower is None or plan.prediction is None:
        return plan
    batch, seconds = image_seconds(tower, problem.image_tokens, problem.cluster.accelerator)
    simulated = plan.prediction.output_tokens_per_s_per_gpu * plan.gpus / problem.load.osl
    images_per_s = (problem.load.rate or simulated) * problem.images
    pool = EncodePool(
        gpus=max(math.ceil(images_per_s * seconds / UTILIZATION), 1),
        images_per_request=problem.images,
        image_tokens=problem.image_tokens,
        images_per_batch=batch,
        seconds_per_image=seconds,
    )
    return plan.model_copy(update={"encode": pool})


def encode_figures(plan: Plan) -> EncodeFigures | None:
    """What the encode pool of a plan adds; None for a plan without one, or without a prediction."""
    if plan.encode is None or plan.prediction is None:
        return None
    total, alone = economics(plan), economics(plan.model_copy(update={"encode": None}))
    encode_s = plan.encode.seconds_per_request
    return EncodeFigures(
        gpus=plan.encode.gpus,
        usd_per_million_output_tokens=_added(total.usd_per_million_output_tokens, alone.usd_per_million_output_tokens),
        joules_per_output_token=_added(total.joules_per_output_token, alone.joules_per_output_token),
        encode_s=encode_s,
        ttft_with_images_s=plan.prediction.ttft_s.at(plan.slo.percentile) + encode_s,
    )


def _added(total: float | None, alone: float | None) -> float | None:
    return None if total is None or alone is None else total - alone


def encode_line(plan: Plan) -> str:
    """The encode pool in one sentence; empty without one."""
    pool, found = plan.encode, encode_figures(plan)
    if pool is None or found is None:
        return ""
    parts = [f"{pool.gpus} GPU{'s' if pool.gpus > 1 else ''} beside the {plan.gpus}"]
    if found.usd_per_million_output_tokens is not None:
        parts.append(f"{found.usd_per_million_output_tokens:.2g} USD per million output tokens")
    if found.joules_per_output_token is not None:
        parts.append(f"{found.joules_per_output_token:.2g} J per output token")
    limit = plan.slo.ttft_s
    beyond = f", above the limit of {format_seconds(limit)}" if found.ttft_with_images_s > limit else ""
    return (
        f"{', '.join(parts)} for {pool.images_per_request:g} images a request of {pool.image_tokens} tokens, "
        f"{format_seconds(pool.seconds_per_image)} each in batches of {pool.images_per_batch}; TTFT with images "
        f"p{plan.slo.percentile} {format_seconds(found.ttft_with_images_s)}{beyond} (simulated without images, and "
        f"{format_seconds(found.encode_s)} of encoding on one GPU)"
    )


def encode_assumptions(plan: Plan) -> list[str]:
    """What the encode pool's figures rest on."""
    if plan.encode is None:
        return []
    return [
        "Images are encoded on GPUs of their own: a closed form, not simulated, so neither the queue before them nor "
        "sending embeddings is in TTFT, and limits are checked without them. Attention kernels were fitted on heads "
        "of 192; smaller heads take more exponentials per FLOP, so encoding may take longer."
    ]
