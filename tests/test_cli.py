"""The command lines as a user types them: what works end to end, and what bad input gets."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

import deepinfer.cli
import planner.cli

SMALL = ("--gpus", "4", "--images", "0.5")
MODULES = {"planner": planner.cli, "deepinfer": deepinfer.cli}


def run(command: str, *arguments: str, capsys: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of a command line run in this process."""
    argv, handler = sys.argv, signal.getsignal(signal.SIGINT)
    sys.argv = [command, *arguments]
    try:
        with pytest.raises(SystemExit) as end:
            MODULES[command].main()
    finally:
        sys.argv = argv
        signal.signal(signal.SIGINT, handler)
    captured = capsys.readouterr()
    return int(end.value.code or 0), captured.out, captured.err


@pytest.fixture(scope="module")
def searched(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one small search: four GPUs, one process, an image in every other request."""
    out = tmp_path_factory.mktemp("search") / "out"
    command = [sys.executable, "-m", "planner", "search", *SMALL, "--jobs", "1", "--out", str(out)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    for words in ("plan:", "encode: 1 GPU beside the 4", "prompts and images included"):
        assert words in done.stdout
    return out


def test_search_writes_a_plan_a_report_and_plots(searched: Path) -> None:
    assert sorted(p.name for p in searched.iterdir()) == ["pareto.png", "plan.json", "report.md", "step_breakdown.png"]
    report = (searched / "report.md").read_text(encoding="utf-8")
    for heading in ("## The plan", "## Why this one", "## Finalists", "## Points not considered", "## Assumptions"):
        assert heading in report
    for words in ("Encode pool: 1 GPU beside the 4", "Images are encoded on GPUs of their own"):
        assert words in report
    for name in ("pareto.png", "step_breakdown.png"):
        assert (searched / name).read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_simulate_reproduces_the_prediction_exactly(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("deepinfer", "simulate", str(searched / "plan.json"), "--json", capsys=capsys)
    assert status == 0
    assert json.loads(out) == json.loads((searched / "plan.json").read_text(encoding="utf-8"))["prediction"]


def test_the_same_search_writes_the_same_bytes(
    searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, _ = run("planner", "search", *SMALL, "--jobs", "2", "--out", str(tmp_path), "--json", capsys=capsys)
    assert status == 0
    for path in searched.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name
    printed = json.loads(out)
    assert printed["plan"] == json.loads((tmp_path / "plan.json").read_text(encoding="utf-8"))
    assert printed["screened"] > 1000
    assert printed["encode"]["gpus"] == printed["plan"]["encode"]["gpus"] == 1


def test_show_prints_memory_prediction_and_step(searched: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, out, _ = run("planner", "show", str(searched / "plan.json"), capsys=capsys)
    assert status == 0
    for words in (
        "expert weights",
        "output tokens/s per GPU",
        "full-acceptance",
        "TTFT p50 / p90 / p99",
        "mean step",
        "TTFT with images p90",
    ):
        assert words in out


def test_timeline_is_a_chrome_trace(searched: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "step.json"
    status, _, _ = run("deepinfer", "simulate", str(searched / "plan.json"), "--timeline", str(path), capsys=capsys)
    assert status == 0
    events = json.loads(path.read_text(encoding="utf-8"))["traceEvents"]
    assert {"compute", "comm"} <= {e["args"]["name"] for e in events if e["ph"] == "M"}
    assert sum(e["ph"] == "X" for e in events) > 400


def mooncake(path: Path, count: int = 60) -> Path:
    """A small trace whose prompts share their first block."""
    rows = (
        {"timestamp": 200 * i, "input_length": 1200, "output_length": 40 + i, "hash_ids": [1, 10 + i, 100 + i]}
        for i in range(count)
    )
    path.write_text("\n".join(json.dumps(row) for row in rows) + "\n", encoding="utf-8")
    return path


def test_a_trace_is_searched_and_simulated(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = str(mooncake(tmp_path / "trace.jsonl"))
    out_folder = str(tmp_path / "out")
    arguments = ("--gpus", "4", "--trace", trace, "--rate", "5", "--jobs", "1", "--out", out_folder)
    status, out, err = run("planner", "search", *arguments, capsys=capsys)
    assert status == 0, err
    plan = json.loads((tmp_path / "out" / "plan.json").read_text(encoding="utf-8"))
    assert plan["prediction"]["prefix_hit_ratio"] > 0.2  # one block of three is everyone's
    assert plan["prediction"]["requests_arrived"] == 48  # the first fifth of the time fills the system
    assert plan["prediction"]["requests_finished"] == 60
    status, out, _ = run("deepinfer", "simulate", str(tmp_path / "out" / "plan.json"), "--trace", trace, capsys=capsys)
    assert status == 0
    assert "rescaled to 5 requests/s" in out


BAD_SEARCHES = [
    (("--gpus", "64", "--model", "deepseek-v4.1-flsh"), "did you mean deepseek-v4.1-flash?"),
    (("--gpus", "64", "--hardware", "gb200"), "did you mean gb200-nvl72?"),
    (("--gpus", "0"), "--gpus must be at least 1"),
    (("--gpus", "many"), "valid integer"),
    ((), "gpus"),
    (("--gpus", "2"), "93.7 GB more than the usable 167 GB; the smallest count that fits is 4"),
    (("--gpus", "64", "--nonsense"), "--nonsense"),
    (("--gpus", "64", "--trace", "x", "--isl", "3"), "cannot be combined"),
    (("--gpus", "64", "--trace", "/no/such/file"), "does not exist"),
    (("--gpus", "64", "--rate", "nan"), "--rate must be a positive number"),
    (("--gpus", "64", "--rate", "-1"), "--rate must be a positive number"),
    (("--gpus", "64", "--rate", "100000"), "the most is about"),
    (("--gpus", "64", "--ttft", "0"), "--ttft"),
    (("--gpus", "64", "--tpot", "inf"), "--tpot"),
    (("--gpus", "64", "--isl", "0"), "--isl must be at least 1"),
    (("--gpus", "64", "--isl", "2000000"), "exceed the 1048576"),
    (("--gpus", "64", "--images", "1", "--model", "kimi-k2"), "has no vision tower"),
    (("--gpus", "64", "--acceptance", "1.5"), "--acceptance must lie between 0 and 1"),
    (("--gpus", "64", "--objective", "energy", "--hardware", "ascend-950pr"), "--objective energy needs"),
    (("--gpus", "64", "--objective", "gpus"), "--objective gpus needs"),
    (("--gpus", "64", "--objective", "speed"), "speed"),
    (("--gpus", "64", "--out", "/proc/nowhere/x"), "cannot write"),
    (("--gpus", "64", "--model", "a\0b"), "unknown model"),
    (("--gpus", "64", "--hardware", "h" * 300), "unknown hardware"),
]


@pytest.mark.parametrize(("arguments", "says"), BAD_SEARCHES, ids=[" ".join(a)[:40] for a, _ in BAD_SEARCHES])
def test_a_bad_search_is_one_sentence_and_status_2(
    arguments: tuple[str, ...], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run("planner", "search", *arguments, capsys=capsys)
    assert status == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    assert says in err


BAD_TRACES = [
    (b"", "empty"),
    (b"\xff\xfe\x00", "UTF-8"),
    (b'{"timestamp": 0, "input_length": 5, "output_length": 3, "hash_ids": [1]}\n{"timestamp"', "line 2"),
    (b"TIMESTAMP,ContextTokens,GeneratedTokens\n", ""),
    (b'{"timestamp": 0, "input_length": -5, "output_length": 3, "hash_ids": []}\n', "input_length"),
]


@pytest.mark.parametrize(("content", "says"), BAD_TRACES)
def test_a_bad_trace_is_one_sentence(
    content: bytes, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.jsonl"
    trace.write_bytes(content)
    status, _, err = run("planner", "search", "--gpus", "8", "--trace", str(trace), capsys=capsys)
    assert status == 2
    assert err.count("\n") == 1
    assert says in err


@pytest.mark.parametrize("command", [("planner", "show"), ("deepinfer", "simulate")])
@pytest.mark.parametrize(
    ("content", "says"),
    [("", "not valid JSON"), ('{"version": 99}', "version 99"), ('{"version": 1}', "model"), ("[]", "no JSON object")],
)
def test_a_bad_plan_is_one_sentence(
    command: tuple[str, str], content: str, says: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = tmp_path / "plan.json"
    plan.write_text(content, encoding="utf-8")
    status, _, err = run(*command, str(plan), capsys=capsys)
    assert status == 2
    assert err.count("\n") == 1
    assert says in err


def test_a_refused_search_leaves_nothing_behind(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    status, _, _ = run("planner", "search", "--gpus", "2", "--out", str(out), capsys=capsys)
    assert status == 2
    assert not out.exists()


def is_running(pid: str) -> bool:
    """Whether a process is there and more than an entry waiting to be reaped."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def test_ctrl_c_ends_within_a_second_and_leaves_no_process() -> None:
    command = [sys.executable, "-m", "planner", "search", "--gpus", "64", "--jobs", "2"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, start_new_session=True)
    deadline = time.monotonic() + 60
    children = Path(f"/proc/{process.pid}/task/{process.pid}/children")
    while time.monotonic() < deadline and len(children.read_text().split()) < 2:
        time.sleep(0.1)  # until its workers are there
    time.sleep(1.0)
    workers = children.read_text().split()
    start = time.monotonic()
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=10)
    assert time.monotonic() - start < 1.5  # a second, and what a busy machine adds
    assert process.returncode == 130
    assert b"Traceback" not in err
    while any(is_running(pid) for pid in workers):  # killed, they may need a moment to be gone
        assert time.monotonic() - start < 3
        time.sleep(0.05)
