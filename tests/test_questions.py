"""What is asked of a search: loads, objectives, clusters and pools, and one sentence for what cannot be asked."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from deepinfer.engine.deployment import resolve
from deepinfer.errors import DeepinferError
from deepinfer.hardware.spec import load_hardware
from planner.economics import economics
from planner.pipeline import make_screen
from planner.problem import Question, make_problem, parse_load, problem_of
from planner.refine import make_plan, run_finalist
from planner.steady import UTILIZATION

EXAMPLE = str(Path(__file__).parent.parent / "examples" / "cluster-10000.toml")


@pytest.mark.parametrize(
    ("text", "requests_per_s"),
    [
        ("100req/s", 100.0),
        ("6000 requests/min", 100.0),
        ("155e12tok/day", 155e12 / 86400 / 5000),
        ("5000tokens/s", 1.0),
        ("3.6e3req/h", 1.0),
    ],
)
def test_loads_in_other_words(text: str, requests_per_s: float) -> None:
    assert parse_load(text, 5000.0) == pytest.approx(requests_per_s)


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"gpus": None}, "--gpus is required"),
        ({"load": "fast"}, "is not a load"),
        ({"load": "-3req/s"}, "is not a load"),
        ({"load": "0tok/s"}, "is not a load"),
        ({"load": "5req/s", "rate": 5.0}, "say the same thing"),
        ({"objective": "gpus"}, "needs a load to serve"),
        ({"objective": "energy", "hardware": "ascend-950pr"}, "has no power_w"),
        ({"objective": "cost", "hardware": "ascend-910c"}, "has no price_usd_per_hour"),
        ({"prefill_gpus": 4}, "go together"),
        ({"prefill_hardware": "h200", "prefill_gpus": 0}, "--prefill-gpus must be at least 1"),
        ({"prefill_hardware": "h200", "prefill_gpus": 8, "pools": "mixed"}, "contradicts --pools mixed"),
        ({"model": "deepseek-v3", "replay": "compact"}, "has no bounded layers"),
        ({"cluster": EXAMPLE}, "cannot be combined with --gpus"),
        ({"gpus": None, "cluster": "/nowhere.toml"}, "does not exist"),
    ],
)
def test_what_cannot_be_asked_is_one_sentence(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(DeepinferError, match=re.escape(said)) as raised:
        make_problem(Question(**({"gpus": 8} | changes)))
    assert "\n" not in str(raised.value)


def test_a_cluster_file_has_its_own_network() -> None:
    problem = make_problem(Question(cluster=EXAMPLE))
    assert problem.num_gpus == 10008
    assert problem.cluster.accelerator.scale_out.bytes_per_s.value == 5e10  # 100 GB/s, oversubscribed twice
    assert problem.cluster.accelerator.scale_up == load_hardware("gb200-nvl72").scale_up


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ('name = "x"\ndescription = "y"\npart = []\n', "at least 1 item"),
        ('name = "x"\ndescription = "y"\n[[part]]\nhardware = "h200"\ngpus = 8\nrole = "prefill"\n', "parts must be"),
        ('name = "x"\ndescription = "y"\n[[part]]\nhardware = "h200"\ngpus = 0\n', "greater than or equal to 1"),
    ],
)
def test_a_bad_cluster_file_is_one_sentence(text: str, said: str, tmp_path: Path) -> None:
    path = tmp_path / "cluster.toml"
    path.write_text(text)
    with pytest.raises(DeepinferError, match=said):
        make_problem(Question(cluster=str(path)))


def test_a_plan_tells_its_question_again() -> None:
    """On its own network, with accelerators of another kind for prefill, at a rate."""
    asked = make_problem(
        Question(gpus=8, model="deepseek-v3", hardware="b200", prefill_hardware="b300", prefill_gpus=8, rate=2.0)
    )
    screening = make_screen(asked).run()
    plan = make_plan(asked, screening, int(np.argmax(screening.points.output_per_gpu)))
    again = problem_of(plan)
    assert again.num_gpus == plan.gpus == 16
    assert (again.cluster, again.prefill_cluster) == (asked.cluster, asked.prefill_cluster)
    assert (again.load, again.slo) == (asked.load, asked.slo)
    assert [d.cluster.accelerator.name for d in resolve(plan)] == ["b300", "b200"]


def test_the_fewest_accelerators_serve_the_load() -> None:
    """Sized plans carry the load at their utilisation, and one engine less would not."""
    asked = make_problem(Question(gpus=16, hardware="b200", isl=1000, osl=200, load="300req/s", objective="gpus"))
    found = make_screen(asked).run()
    points = found.points
    gpus = np.asarray([found.candidates[c].gpus for c in points.candidate])
    assert points.output_per_gpu == pytest.approx(300 * 200 / gpus)
    capacity = points.capacity_rps * UTILIZATION
    assert (capacity >= 300 * (1 - 1e-9)).all()
    mixed = points.prefill_rows == 0
    engines = np.asarray([found.candidates[c].replicas for c in points.candidate])
    small = mixed & (engines < 16)  # larger ones are rounded up to alike parts
    assert (capacity * (engines - 1) / engines)[small].max() < 300 * (1 + 1e-9)


def test_cost_and_energy_by_hand() -> None:
    """8 B200 for prefill beside 8 H200: dollars and watts of both, over the output of both."""
    asked = make_problem(
        Question(gpus=8, model="deepseek-v3", hardware="h200", prefill_hardware="b200", prefill_gpus=8, isl=500, osl=50)
    )
    screening = make_screen(asked).run()
    points = screening.points
    light = np.flatnonzero(points.users < 200)
    plan = run_finalist(0, make_plan(asked, screening, int(light[np.argmax(points.output_per_gpu[light])]))).plan
    assert plan.prediction is not None
    output = plan.prediction.output_tokens_per_s_per_gpu * 16
    found = economics(plan)
    assert found.usd_per_million_output_tokens == pytest.approx(8 * (1.6 + 2.9) / 3600 / output * 1e6)
    assert found.joules_per_output_token == pytest.approx(8 * (1730 + 2170) / output)
