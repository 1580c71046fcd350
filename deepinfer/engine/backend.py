"""The seam to backends: what a backend is, and how a plan is run on one."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from deepinfer.engine.deployment import Deployment
from deepinfer.metrics.record import RunRecord
from deepinfer.metrics.timeline import Span
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.speculation import Acceptance
from deepinfer.workload.generate import RequestSpec, request_hashes
from deepinfer.workload.spec import Workload


class Backend(Protocol):
    """Runs deployments. Found by name through `deepinfer.registry`."""

    def run(
        self,
        deployments: Sequence[Deployment],
        workload: Workload,
        acceptance: Acceptance,
        requests: Sequence[RequestSpec],
    ) -> RunRecord:
        """Serve the requests as the workload's arrivals say and return what happened.

        One mixed pool, or one that prefills and one that decodes what the first hands over.
        `acceptance` is what a simulated draft module does; hardware has its own. Deterministic on `sim`.
        """
        ...

    def timeline(self, deployment: Deployment, num_requests: int, context: float) -> list[Span]:
        """Operators of one decode step, as spans on stream and link tracks."""
        ...


def engine_request(spec: RequestSpec, block_tokens: int, arrival_s: float) -> Request:
    """A workload's request as the scheduler wants it: prompt blocks as hashes."""
    return Request(
        id=spec.id,
        prompt_tokens=spec.prompt_tokens,
        max_new_tokens=spec.output_tokens,
        block_hashes=request_hashes(spec, block_tokens),
        arrival_s=arrival_s,
    )
