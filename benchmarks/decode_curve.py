"""The shape of DeepInfer's published decode curve: V4.1-Flash on 64 SM100 GPUs, 3 drafts, tau 3.25 (linear, 75%).

    python benchmarks/decode_curve.py

Prints our closed-form step for 8 to 256 requests per attention replica, every GPU one replica of one EP64 engine, at a
context of 4,500 tokens, and what the slowest parts are.
"""

from __future__ import annotations

from deepinfer.cost.compose import critical_path, step_cost
from deepinfer.cost.model import CostModel
from deepinfer.graph.build import GraphFeatures, build_graph
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.hardware.spec import ClusterSpec, load_hardware
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.hf import load_model
from deepinfer.scheduler.speculation import Acceptance

NEXTN, CONTEXT, GPUS = 3, 4500.0, 64


def main() -> None:
    """Print the curve."""
    accelerator = load_hardware("gb200-nvl72")
    tau = Acceptance(convention="linear", rates=(0.75,), source="DeepInfer 0.1.0 README").tau(NEXTN)
    layout = ParallelLayout.from_flags(ep=GPUS)
    features = GraphFeatures("decode", "off", NEXTN)
    graph = build_graph(load_model("deepseek-v4.1-flash"), layout, ClusterSpec(accelerator, GPUS), features)
    costs = CostModel(accelerator)
    first = None
    print("requests  step ms  steps/s  full-acceptance tok/s/GPU  output tok/s/GPU  tok/s/user  of the first  slowest")
    for requests in (8, 16, 32, 64, 128, 256):
        shape = StepShape(Sequences.decoding(float(requests), float(NEXTN), CONTEXT))
        seconds = float(step_cost(graph, shape, costs).seconds)
        user = tau / seconds
        first = first or user
        items = critical_path(graph, shape, costs)
        top = ", ".join(f"{i.operator} {i.seconds / seconds:.0%}" for i in items[:4])
        print(
            f"{requests:8d}  {seconds * 1e3:7.2f}  {1 / seconds:7.1f}  {requests * (1 + NEXTN) / seconds:25,.0f}"
            f"  {requests * user:16,.0f}  {user:10.1f}  {user / first:12.2f}  {top}"
        )


if __name__ == "__main__":
    main()
