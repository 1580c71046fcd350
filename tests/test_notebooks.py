"""The notebooks run from top to bottom, and what they are committed with is what they print."""

from __future__ import annotations

import ast
import contextlib
import io
import json
from pathlib import Path
from typing import Any

import matplotlib as mpl
import pytest

FOLDER = Path(__file__).parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
MAX_BYTES = 300_000


def code_cells(path: Path) -> list[dict[str, Any]]:
    cells = json.loads(path.read_text(encoding="utf-8"))["cells"]
    return [cell for cell in cells if cell["cell_type"] == "code"]


def printed(cell: dict[str, Any]) -> str:
    """What a cell printed when the notebook was last saved."""
    return "".join("".join(o["text"]) for o in cell["outputs"] if o.get("name") == "stdout")


def test_there_are_notebooks() -> None:
    assert len(NOTEBOOKS) >= 2


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_and_prints_what_it_shows(path: Path) -> None:
    """No Jupyter needed: cells are plain Python. `jupyter nbconvert --execute --inplace` saves new outputs."""
    mpl.use("Agg")
    import matplotlib.pyplot as plt

    namespace: dict[str, Any] = {"__name__": "__main__"}
    with mpl.rc_context():
        for number, cell in enumerate(code_cells(path), start=1):
            out = io.StringIO()
            with contextlib.redirect_stdout(out):
                exec(compile("".join(cell["source"]), f"{path.name}, cell {number}", "exec"), namespace)
            figures = len(plt.get_fignums())
            plt.close("all")
            assert out.getvalue() == printed(cell), f"{path.name}, cell {number}: saved outputs are out of date"
            saved = sum("image/png" in output.get("data", {}) for output in cell["outputs"])
            assert saved == figures, f"{path.name}, cell {number}: {figures} figures drawn, {saved} saved"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_small_public_and_executed_in_order(path: Path) -> None:
    assert path.stat().st_size < MAX_BYTES
    cells = code_cells(path)
    assert not [
        o for cell in cells for o in cell["outputs"] if o.get("name") == "stderr" or o["output_type"] == "error"
    ]
    assert [cell["execution_count"] for cell in cells] == list(range(1, len(cells) + 1))
    for node in ast.walk(ast.parse("\n".join("".join(cell["source"]) for cell in cells))):
        if isinstance(node, ast.ImportFrom | ast.Import):
            modules = [node.module or ""] if isinstance(node, ast.ImportFrom) else [alias.name for alias in node.names]
            assert set(modules) <= {"planner", "numpy", "matplotlib.pyplot"}
