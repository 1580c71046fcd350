"""What a whole-workload simulation costs: CPU seconds of one core, with the real scheduler.

    python benchmarks/simulation_speed.py [TRACE]

V4.1-Flash on 64 GB200: Poisson arrivals on 8 x ep8, three times as many of them, and, given one, a whole trace at its
own times on one EP64 engine. Prints requests, output tokens and steps per CPU second, and how the time grows.
"""

from __future__ import annotations

import sys
import time

from deepinfer.engine.deployment import resolve
from deepinfer.layout.plan import LayoutSpec, Plan, Pool
from deepinfer.layout.settings import EngineSettings
from deepinfer.metrics.summary import summarize
from deepinfer.registry import load_backend
from deepinfer.scheduler.speculation import default_acceptance
from deepinfer.workload.generate import generate_requests
from deepinfer.workload.spec import FixedLength, PoissonArrivals, TraceArrivals, Workload
from deepinfer.workload.trace import trace_source

GPUS, NEXTN, SEQS, RATE = 64, 3, 64, 10.0
CHUNK_ROWS = {8: 4096, 64: 1024}  # by expert parallelism


def plan_of(ep: int, workload: Workload) -> Plan:
    """64 GPUs as engines of `ep` ranks with an attention replica each."""
    settings = EngineSettings(max_num_seqs=SEQS, max_tokens_per_step=SEQS * (1 + NEXTN) + CHUNK_ROWS[ep], nextn=NEXTN)
    pool = Pool(replicas=GPUS // ep, layout=LayoutSpec(dp=ep, ep=ep), settings=settings)
    return Plan(
        model="deepseek-v4.1-flash",
        hardware="gb200-nvl72",
        gpus=GPUS,
        pools=(pool,),
        workload=workload,
        acceptance=default_acceptance("deepseek-v4.1"),
    )


def measure(name: str, plan: Plan) -> float:
    """CPU seconds of generating, simulating and summing up all requests of a plan's workload, the router included."""
    start = time.process_time()
    deployments = resolve(plan)
    record = load_backend("sim").run(deployments, plan.workload, plan.acceptance, generate_requests(plan.workload))
    summary = summarize(record, plan.slo.ttft_s, plan.slo.tpot_s)
    seconds = time.process_time() - start
    tokens, steps = int(record.output_tokens.sum()), len(record.steps.end_s)
    print(
        f"{name:40s}  {seconds:6.2f} CPU s  {summary.requests_finished:6,d} requests  {tokens:10,d} output tokens  "
        f"{tokens / seconds:9,.0f} tokens/CPU s  {steps:8,d} steps  {steps / seconds:7,.0f} steps/CPU s",
        flush=True,
    )
    return seconds


def poisson(num_requests: int) -> Workload:
    """Requests of 4,000 prompt and 1,000 output tokens at 10/s."""
    arrivals = PoissonArrivals(rate=RATE)
    return Workload(
        isl=FixedLength(tokens=4000), osl=FixedLength(tokens=1000), arrivals=arrivals, num_requests=num_requests
    )


def main() -> None:
    """Print a line per workload."""
    measure("warm-up", plan_of(8, poisson(50)))
    few, many = (measure(f"{n:,} x 4,000/1,000 at 10/s, 8 x ep8", plan_of(8, poisson(n))) for n in (10_000, 30_000))
    print(f"three times the requests take {many / few:.2f} times as long")
    for path in sys.argv[1:]:
        workload = Workload(trace=trace_source(path), arrivals=TraceArrivals())
        measure("the whole trace at its own times, ep64", plan_of(64, workload))


if __name__ == "__main__":
    main()
