"""The rules of the house as tests: what importing the packages loads, and that the checks themselves can fail."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
HEAVY = ("torch", "triton", "simpy", "matplotlib", "joblib")
PROBE = "import sys, {module}; print(sorted(n for n in {names!r} if n in sys.modules))"


def loaded_by(module: str, names: tuple[str, ...] = HEAVY) -> str:
    """Which of `names` a fresh interpreter has loaded after importing a module."""
    code = PROBE.format(module=module, names=names)
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


@pytest.mark.parametrize(
    "module",
    ["deepinfer.cli", "deepinfer.cost.compose, deepinfer.graph.build, deepinfer.model.hf", "deepinfer.engine.simulate"],
)
def test_deepinfer_loads_no_simulator_no_device_library_and_no_plotting(module: str) -> None:
    assert loaded_by(module) == "[]"


def test_planner_search_path_loads_no_torch_and_no_backend() -> None:
    assert loaded_by("planner.pipeline, planner.refine, planner.cli", (*HEAVY, "backends")) == "[]"


def test_help_loads_neither_numpy_nor_pydantic() -> None:
    assert loaded_by("planner.cli, deepinfer.cli", ("numpy", "pydantic", "rich")) == "[]"


def test_the_simulator_loads_no_device_library() -> None:
    assert loaded_by("backends.sim", ("torch", "triton", "matplotlib", "planner")) == "[]"


def test_the_probe_can_fail() -> None:
    assert loaded_by("simpy") == "['simpy']"


def test_importing_runs_nothing_and_reads_no_environment() -> None:
    code = "import os, deepinfer, planner, backends; print('environ' in open(deepinfer.__file__).read())"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "False\n"
    sources = [p for package in ("deepinfer", "planner", "backends") for p in (ROOT / package).rglob("*.py")]
    # torchrun tells ranks who they are by environment variables: one place reads them, when ranks are started. Another
    # sets the one by which torch's symmetric memory is told to do without multicast: there is no argument for it.
    edges = {ROOT / "backends" / "torch_runtime" / "launch.py", ROOT / "backends" / "cuda" / "exchange.py"}
    touching = {p for p in sources if re.search(r"os\.environ|os\.getenv", p.read_text(encoding="utf-8"))}
    assert touching == edges


def test_ci_runs_the_readme_test_command() -> None:
    readme = (ROOT / "README.md").read_text(encoding="utf-8")
    assert readme.count("pip install -e '.[test]'") == 1
    assert "grep -m1 -F \"pip install -e '.[test]'\" README.md" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert "pip install deepinfer" not in readme
