"""Builds execution graphs: `build_graph(model, layout, cluster, features)`; one module per model family."""

from __future__ import annotations

from deepinfer.errors import UsageError
from deepinfer.graph.build import deepseek_v3, deepseek_v4, deepseek_v32, deepseek_v41, qwen3_moe
from deepinfer.graph.build.common import BuildContext, GraphFeatures
from deepinfer.graph.graph import ExecutionGraph
from deepinfer.graph.transform import fuse_moe, two_batch_overlap
from deepinfer.hardware.spec import ClusterSpec
from deepinfer.layout.parallel import ParallelLayout
from deepinfer.model.spec import ModelSpec

__all__ = ["GraphFeatures", "build_graph", "drafts_in_graph"]

_BUILDERS = {
    "deepseek-v3": deepseek_v3.build_blocks,
    "deepseek-v3.2": deepseek_v32.build_blocks,
    "deepseek-v4": deepseek_v4.build_blocks,
    "deepseek-v4.1": deepseek_v41.build_blocks,
    "kimi-k2": deepseek_v3.build_blocks,
    "qwen3-moe": qwen3_moe.build_blocks,
}


def drafts_in_graph(model: ModelSpec, nextn: int) -> int:
    """Of which draft lengths a graph can be asked: those with the same value, by the graph of the longest of them.

    A parallel draft module (DSpark) computes a whole block for any length, and draws as many positions of it as the
    shape of a step verifies.
    """
    parallel = model.draft is not None and model.draft.kind == "dspark"
    return min(nextn, 1) if parallel else nextn


def build_graph(
    model: ModelSpec, layout: ParallelLayout, cluster: ClusterSpec, features: GraphFeatures
) -> ExecutionGraph:
    """The graph of one step on one rank of an engine.

    Raises UsageError for a feature the model has not: compact replay without bounded layers, more drafts than the
    draft module gives, a layout that the model does not divide over, fused experts where no rows are
    exchanged or weights have more than 4 bits.
    """
    if features.replay == "compact" and not model.supports_compact_replay:
        raise UsageError(f"model {model.name} has no bounded layers: replay mode compact does not apply")
    most = model.draft.max_drafts if model.draft else 0
    if not 0 <= features.nextn <= most:
        raise UsageError(f"model {model.name} drafts 0 to {most} tokens, not {features.nextn}")
    fmt = model.expert_format
    if features.moe == "fused" and fmt.bytes_per_parameter >= 1.0:
        raise UsageError(f"model {model.name} has {fmt.name} experts: the fused kernel multiplies 4-bit weights only")
    ctx = BuildContext(model, layout, cluster, features)
    blocks = _BUILDERS[model.family](ctx)
    graph = ExecutionGraph(f"{model.name} {layout} {features.phase} nextn {features.nextn}", blocks)
    if features.moe == "fused":
        graph = fuse_moe(graph)
    return two_batch_overlap(graph, layout.replica_ranks) if features.overlap == "two-batch" else graph
