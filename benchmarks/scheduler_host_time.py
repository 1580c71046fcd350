"""Measures what the scheduler costs its host: seconds of schedule() and commit() against decoding requests.

    python benchmarks/scheduler_host_time.py

The intercept and slopes it prints are the `schedule_*` and `deliver_*` numbers of `deepinfer/hardware/hosts/*.toml`.
"""

from __future__ import annotations

import platform
import time

import numpy as np

from deepinfer.scheduler.policy import SchedulerConfig
from deepinfer.scheduler.request import Request
from deepinfer.scheduler.scheduler import Scheduler
from deepinfer.scheduler.step import StepResult

STEPS, REPEATS = 300, 5


def median_seconds(num_requests: int) -> tuple[float, float]:
    """Median seconds of schedule() and of commit() over steps that decode `num_requests` requests with 3 drafts."""
    config = SchedulerConfig(
        max_num_seqs=num_requests,
        max_tokens_per_step=num_requests * 4 + 4096,
        num_blocks=10**6,
        block_tokens=128,
        nextn=3,
    )
    scheduler = Scheduler(config)
    for number in range(num_requests):
        scheduler.add(Request(number, 64, 10**6))
    kept = np.full(num_requests, 3, dtype=np.int64)
    decide, take_in = [], []
    for _ in range(STEPS):
        start = time.perf_counter()
        plan = scheduler.schedule()
        middle = time.perf_counter()
        assert plan is not None
        scheduler.commit(plan, StepResult(kept[: len(plan.decode)]))
        end = time.perf_counter()
        if len(plan.decode) == num_requests:
            decide.append(middle - start)
            take_in.append(end - middle)
    return float(np.median(decide)), float(np.median(take_in))


def main() -> None:
    """Print the table and the fitted lines."""
    sizes = [1, 8, 32, 64, 128, 256, 512]
    rows = [np.median([median_seconds(n) for _ in range(REPEATS)], axis=0) for n in sizes]
    print(f"{platform.processor() or platform.machine()}, Python {platform.python_version()}, numpy {np.__version__}")
    for n, (decide, take_in) in zip(sizes, rows, strict=True):
        print(f"{n:4d} requests: schedule {decide * 1e6:7.1f} us, commit {take_in * 1e6:7.1f} us")
    for name, column in (("schedule", 0), ("commit", 1)):
        slope, intercept = np.polyfit(sizes, [row[column] for row in rows], 1)
        print(f"{name}: {intercept * 1e6:.1f} us + {slope * 1e9:.1f} ns per request")


if __name__ == "__main__":
    main()
