"""Where a predicted step's time goes: its operators, and which term of the cost formula makes each of them long."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from deepinfer.cost.model import CostModel
from deepinfer.graph.ops import Operator, Work
from planner.validate.mapping import map_case
from planner.validate.outcome import Outcome
from planner.validate.predict import TimedStep


@dataclass(frozen=True)
class ExplainedItem:
    """Operators of one name: how often they run in the step, their seconds in all, and their largest term."""

    operator: str
    stream: str
    times: int
    seconds: float
    bound: str
    source: str


@dataclass(frozen=True)
class Explanation:
    """One kind of step behind a prediction; `items` add up to more than the step where streams overlap."""

    weight: float
    step: TimedStep
    items: tuple[ExplainedItem, ...]


def explain(outcome: Outcome) -> list[Explanation]:
    """The steps behind a prediction, each with its operators, longest first; empty where there is none."""
    if outcome.prediction is None:
        return []
    costs = map_case(outcome.target).costs
    return [Explanation(weight, step, _items(step, costs)) for weight, step in outcome.prediction.steps]


def _items(step: TimedStep, costs: CostModel) -> tuple[ExplainedItem, ...]:
    times = Counter(s.operator for s in step.graph.steps)
    found: dict[tuple[str, str], ExplainedItem] = {}
    for index, operator in enumerate(step.graph.operators):
        work = operator.work(step.shape)
        cost = costs.cost(operator, work)
        seconds = float(cost.seconds) * times[index]
        if not seconds:
            continue
        key = (operator.name, operator.stream)
        other = found.get(key)
        bound, source = dominant_term(operator, work, costs), cost.source.name.lower()
        if other is not None:
            # Operators of one name in unlike layers: the longer one says what binds them.
            bound, source = (bound, source) if seconds > other.seconds else (other.bound, other.source)
            seconds, times[index] = seconds + other.seconds, times[index] + other.times
        found[key] = ExplainedItem(operator.name, operator.stream, times[index], seconds, bound, source)
    return tuple(sorted(found.values(), key=lambda i: -i.seconds))


def dominant_term(operator: Operator, work: Work, costs: CostModel) -> str:
    """The part of `work` that takes longest on its own beyond the start-up, or the start-up itself."""
    parts = {
        "compute": replace(work, bytes_read=0.0, bytes_written=0.0, message=None),
        "memory": replace(work, flops=0.0, message=None),
        "communication": replace(work, flops=0.0, bytes_read=0.0, bytes_written=0.0),
    }
    # Next to no work costs the start-up.
    startup = float(costs.cost(operator, Work(flops=1.0, precision=work.precision, rows=work.rows)).seconds)
    seconds = {name: float(costs.cost(operator, part).seconds) - startup for name, part in parts.items()}
    seconds["start-up"] = startup
    return max(seconds, key=lambda name: seconds[name])
