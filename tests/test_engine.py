"""The engine loop, driven by a list of answers: no clock, no device, only the order of its wishes."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from deepinfer.engine.core import Activity, Agree, Answer, Arrivals, Arrived, Collect, Deliver, Submit, Wish, run_engine
from deepinfer.scheduler.policy import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.step import StepResult

CONFIG = SchedulerConfig(max_num_seqs=2, max_tokens_per_step=16, num_blocks=16, block_tokens=4)
NOBODY = Arrived((), closed=False)


class Driver:
    """Answers `Arrivals` from a list, submits by counting, and lets every decode row yield one token.

    `peers` are what the other processes say at each `Agree`, in order; after the list they are drained.
    """

    def __init__(self, schedulers: Sequence[Scheduler], asynchronous: bool, arrivals: list[Arrived]) -> None:
        self.core = run_engine(schedulers, asynchronous)
        self.arrivals = arrivals
        self.peers: list[Activity] = []
        self.wishes: list[Wish] = []
        self.submitted: list[Submit] = []

    def run(self) -> None:
        """Until the core ends by itself."""
        answer: Answer = None
        while True:
            try:
                wish = self.core.send(answer)
            except StopIteration:
                return
            assert len(self.wishes) < 500, "the engine does not come to an end"
            self.wishes.append(wish)
            answer = self._answer(wish)

    def _answer(self, wish: Wish) -> Answer:
        match wish:
            case Arrivals():
                return self.arrivals.pop(0)
            case Agree(activity):
                return max(activity, self.peers.pop(0) if self.peers else Activity.DRAINED)
            case Submit():
                self.submitted.append(wish)
                return len(self.submitted) - 1
            case Collect(ticket):
                plans = self.submitted[ticket].plans
                return tuple(
                    None if plan is None else StepResult(np.ones(len(plan.decode), dtype=np.int64)) for plan in plans
                )
            case Deliver():
                return None

    def device_wishes(self) -> str:
        """S0 C0 ...: steps submitted and collected, in order."""
        words, submits = [], 0
        for wish in self.wishes:
            if isinstance(wish, Submit):
                words.append(f"S{submits}")
                submits += 1
            elif isinstance(wish, Collect):
                words.append(f"C{wish.ticket}")
        return " ".join(words)


def driver(asynchronous: bool, *arrivals: Arrived, replicas: int = 1) -> Driver:
    return Driver([Scheduler(CONFIG) for _ in range(replicas)], asynchronous, list(arrivals))


def arrived(*requests: Request, replica: int = 0, closed: bool = False) -> Arrived:
    return Arrived(tuple((replica, request) for request in requests), closed)


@pytest.mark.parametrize(
    ("asynchronous", "order"),
    [(False, "S0 C0 S1 C1 S2 C2 S3 C3"), (True, "S0 S1 C0 S2 C1 S3 C2 C3")],
)
def test_a_step_is_submitted_before_the_one_ahead_is_collected_iff_asynchronous(asynchronous: bool, order: str) -> None:
    """A prompt in one chunk, then three decode steps."""
    engine = driver(asynchronous, arrived(Request(0, 8, 4), closed=True))
    engine.run()
    assert engine.device_wishes() == order


@pytest.mark.parametrize("asynchronous", [False, True])
def test_every_step_is_agreed_before_and_delivered_after(asynchronous: bool) -> None:
    """Agree comes right before each Submit, Deliver right after each Collect; every token is delivered once."""
    engine = driver(asynchronous, arrived(Request(0, 20, 3), Request(1, 3, 2), closed=True))
    engine.run()
    for wish, following in zip(engine.wishes, engine.wishes[1:], strict=False):
        assert isinstance(wish, Agree) or not isinstance(following, Submit)
        assert isinstance(wish, Collect) == isinstance(following, Deliver)
    outputs = [o for wish in engine.wishes if isinstance(wish, Deliver) for o in wish.outputs if o is not None]
    tokens = {0: 0, 1: 0}
    for output in outputs:
        for i, count in zip(output.request_ids.tolist(), output.tokens.tolist(), strict=True):
            tokens[i] += count
    assert tokens == {0: 3, 1: 2}


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_peer_with_a_step_takes_us_along(asynchronous: bool) -> None:
    """We have nothing to run, but experts are shared: an empty step is submitted, collected and delivered."""
    engine = driver(asynchronous, NOBODY, arrived(Request(0, 4, 1)), arrived(closed=True))
    engine.peers = [Activity.STEPPING]
    engine.run()
    assert engine.wishes[:3] == [Arrivals(block=True), Agree(Activity.WAITING), Submit((None,))]
    assert [wish.plans[0] is None for wish in engine.submitted] == [True, False]
    deliveries = [wish for wish in engine.wishes if isinstance(wish, Deliver)]
    assert deliveries[0] == Deliver((None,))
    assert engine.device_wishes() == ("S0 S1 C0 C1" if asynchronous else "S0 C0 S1 C1")


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_replica_without_requests_takes_part_in_its_neighbours_steps(asynchronous: bool) -> None:
    engine = driver(asynchronous, arrived(Request(0, 4, 2), replica=1, closed=True), replicas=2)
    engine.run()
    assert [[plan is None for plan in wish.plans] for wish in engine.submitted] == [[True, False], [True, False]]
    assert all(wish.outputs[0] is None for wish in engine.wishes if isinstance(wish, Deliver))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_waits_only_when_idle(asynchronous: bool) -> None:
    """Arrivals block before the first request and after the last one; never while a request is in the engine."""
    turns = [NOBODY] * 4
    engine = driver(asynchronous, arrived(Request(0, 8, 3)), *turns, arrived(closed=True))
    engine.run()
    blocks = [wish.block for wish in engine.wishes if isinstance(wish, Arrivals)]
    steps = len(engine.submitted)
    assert blocks[0] is True
    busy = blocks[1 : 1 + steps + (0 if not asynchronous else 1) - 1]
    assert busy
    assert not any(busy)
    assert blocks[-1] is True


@pytest.mark.parametrize("asynchronous", [False, True])
def test_it_ends_exactly_when_closed_and_drained(asynchronous: bool) -> None:
    """After the last delivery it only agrees to end, and asks for no arrivals after the word that none will come."""
    engine = driver(asynchronous, arrived(Request(0, 8, 2)), arrived(Request(1, 8, 3), closed=True))
    engine.run()
    assert isinstance(engine.wishes[-2], Deliver)
    assert engine.wishes[-1] == Agree(Activity.DRAINED)
    assert sum(isinstance(wish, Arrivals) for wish in engine.wishes) == 2
    finished = [
        i for wish in engine.wishes if isinstance(wish, Deliver) for o in wish.outputs if o is not None
        for i in o.finished
    ]  # fmt: skip
    assert finished == [0, 1]


def test_closed_before_anything_came_ends_at_once_after_one_agreement() -> None:
    engine = driver(True, arrived(closed=True))
    engine.run()
    assert engine.wishes == [Arrivals(block=True), Agree(Activity.DRAINED)]


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_drained_process_stays_until_its_peers_are_drained(asynchronous: bool) -> None:
    """Experts are shared: whoever still steps needs everybody."""
    engine = driver(asynchronous, arrived(closed=True))
    engine.peers = [Activity.STEPPING, Activity.WAITING, Activity.STEPPING]
    engine.run()
    assert len(engine.submitted) == 2
    assert engine.device_wishes() == "S0 C0 S1 C1"
