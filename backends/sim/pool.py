"""A pool in simulation: its step groups, the replicas that a router chooses from, and where its tokens go."""

from __future__ import annotations

import simpy

from backends.sim.group import StepGroup
from backends.sim.outlet import Outlet, Place
from backends.sim.steptime import shared_timer
from backends.sim.verifier import Verifier
from deepinfer.engine.deployment import Deployment
from deepinfer.engine.router import make_router
from deepinfer.metrics.record import StepColumns
from deepinfer.scheduler.request import Request


class SimReplica:
    """An attention replica as a router sees it: what it has been sent counts as waiting."""

    def __init__(self, group: StepGroup, number: int) -> None:
        self.group, self.number = group, number
        self._scheduler = group.schedulers[number]

    @property
    def num_waiting(self) -> int:
        """Requests sent to it and not admitted."""
        return self._scheduler.num_waiting + self.group.num_queued(self.number)

    @property
    def num_running(self) -> int:
        """Requests admitted and not finished."""
        return self._scheduler.num_running

    def cached_tokens(self, request: Request) -> int:
        """Tokens of the request's prompt that it has cached."""
        return self._scheduler.cached_tokens(request)


class SimPool:
    """The engines of one deployment behind a router."""

    def __init__(
        self, env: simpy.Environment, deployment: Deployment, verifier: Verifier, steps: StepColumns, outlet: Outlet
    ) -> None:
        self.deployment = deployment
        timer = shared_timer(deployment)
        self.groups = [
            StepGroup(env, deployment, timer, verifier, steps, outlet) for _ in range(deployment.step_groups)
        ]
        # Neighbours belong to different engines: requests that come together are computed side by side.
        self._replicas = [SimReplica(g, i) for i in range(deployment.replicas_per_group) for g in self.groups]
        self._choose = make_router(deployment.router)

    def fits(self, request: Request) -> bool:
        """Whether a replica of the pool, all of which are alike, could ever run the request."""
        return self.groups[0].schedulers[0].fits(request)

    def send(self, request: Request) -> Place:
        """Give a request that fits to the replica that the router chooses."""
        chosen = self._replicas[self._choose(request, self._replicas)]
        chosen.group.send(chosen.number, request)
        return chosen.group, chosen.number

    def close(self) -> None:
        """Nothing will follow."""
        for group in self.groups:
            group.close()
