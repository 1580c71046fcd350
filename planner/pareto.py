"""The Pareto front of a screening, as rows to read or to make a table of."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from planner.columns import pareto
from planner.screen import Candidate, Points, Screening


@dataclass(frozen=True)
class ParetoPoint:
    """A screened plan that no other beats in both speed per user and output per GPU; figures are screened means.

    `engines` is its replicas and layout, `prompt_rows_per_gpu` the prompt rows of a step of the pool that prefills.
    """

    engines: str
    requests_per_gpu: float
    prompt_rows_per_gpu: float
    nextn: int
    tokens_per_s_per_user: float
    output_tokens_per_s_per_gpu: float
    mean_ttft_s: float


def pareto_points(screening: Screening, most: int = 16) -> tuple[ParetoPoint, ...]:
    """The front by increasing speed, at most so many points of it."""
    points = screening.points
    front = pareto(1.0 / points.tpot_s, points.output_per_gpu)
    chosen = front[np.unique(np.linspace(0, len(front) - 1, min(most, len(front))).astype(int))]
    return tuple(_row(points, screening.candidates[points.candidate[i]], int(i)) for i in chosen)


def _row(points: Points, candidate: Candidate, index: int) -> ParetoPoint:
    return ParetoPoint(
        engines=str(candidate),
        requests_per_gpu=float(points.max_num_seqs[index] / candidate.kind.layout.replica_ranks),
        prompt_rows_per_gpu=_prompt_rows(points, candidate, index),
        nextn=int(points.nextn[index]),
        tokens_per_s_per_user=float(1.0 / points.tpot_s[index]),
        output_tokens_per_s_per_gpu=float(points.output_per_gpu[index]),
        mean_ttft_s=float(points.ttft_s[index]),
    )


def _prompt_rows(points: Points, candidate: Candidate, index: int) -> float:
    if candidate.prefill is not None:
        return float(points.prefill_rows[index] / candidate.prefill.layout.replica_ranks)
    return float(points.chunk_rows[index] / candidate.kind.layout.replica_ranks)
