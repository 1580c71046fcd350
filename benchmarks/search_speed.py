"""What a whole search costs, as its user sees it: one `planner search` in a process of its own.

    python benchmarks/search_speed.py [FLAGS OF PLANNER SEARCH, default: --gpus 64]

Prints seconds to the first line and to the end, CPU seconds and the peak memory of parent and workers together, and how
many points were screened and how many finalists simulated. Wall-clock times mean something on idle cores only.
"""

from __future__ import annotations

import json
import re
import resource
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

SAMPLES_PER_S = 20


class PeakMemory(threading.Thread):
    """Watches a process and its children (Linux): the most bytes of private and shared memory they hold at once."""

    def __init__(self, pid: int) -> None:
        super().__init__(daemon=True)
        self._pid, self.num_bytes = pid, 0

    def run(self) -> None:
        """Sample until the process has ended."""
        while (found := _family_bytes(self._pid)) > 0:
            self.num_bytes = max(self.num_bytes, found)
            time.sleep(1 / SAMPLES_PER_S)


def _family_bytes(pid: int) -> int:
    """Proportional set sizes of a process and its descendants, bytes; 0 when it is gone."""
    total = 0
    try:
        total += 1024 * int(re.findall(r"Pss:\s+(\d+)", Path(f"/proc/{pid}/smaps_rollup").read_text())[0])
        for task in Path(f"/proc/{pid}/task").iterdir():
            total += sum(_family_bytes(int(child)) for child in (task / "children").read_text().split())
    except (OSError, IndexError):
        return total
    return total


def main() -> None:
    """Run the search and print what it took."""
    flags = sys.argv[1:] or ["--gpus", "64"]
    with tempfile.TemporaryDirectory() as folder:
        start = time.perf_counter()
        command = [sys.executable, "-m", "planner", "search", *flags, "--out", folder]
        search = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        memory = PeakMemory(search.pid)
        memory.start()
        assert search.stdout is not None
        first_line = search.stdout.readline()
        first_s = time.perf_counter() - start
        rest = search.stdout.read()
        status = search.wait()
        seconds = time.perf_counter() - start
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        print(first_line + rest)
        if status:
            raise SystemExit(status)
        finalists = len(re.findall(r"^\| \d+ \|", _section(Path(folder, "report.md").read_text(), "Finalists"), re.M))
        plan = json.loads(Path(folder, "plan.json").read_text())
    print(
        f"planner search {' '.join(flags)}: {seconds:.1f} s, first line after {first_s:.1f} s, "
        f"{used.ru_utime + used.ru_stime:.1f} CPU s, peak {memory.num_bytes / 1e6:.0f} MB, "
        f"{finalists} finalists, {plan['prediction']['requests_measured']:,} requests measured of the chosen one"
    )


def _section(report: str, title: str) -> str:
    return report.partition(f"## {title}\n")[2].partition("\n## ")[0]


if __name__ == "__main__":
    main()
