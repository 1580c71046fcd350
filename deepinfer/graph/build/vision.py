"""Execution graph of a vision tower: images to embeddings of the model, on one rank, apart from the model's own steps.

Shapes: the model card's `vision_config`; full attention over an image's patches, gated FFN, 3x3 unshuffle and
projection: the released architecture. Weights and activations are BF16, as the checkpoint keeps the tower.
"""

from __future__ import annotations

from deepinfer.graph.build.common import ACTIVATION_BYTES, OperatorList, total
from deepinfer.graph.graph import Block, ExecutionGraph
from deepinfer.graph.ops import OpKind, Work
from deepinfer.graph.shape import Sequences, StepShape
from deepinfer.model.spec import BF16, VisionTower
from deepinfer.numeric import Num, larger


def image_shape(tower: VisionTower, images: Num, tokens: Num) -> StepShape:
    """A step that encodes so many alike images of `tokens` tokens each: an image is a sequence, a patch a row."""
    patches = tokens * tower.patches_per_token
    return StepShape(None, (Sequences(images, patches, 0.0, patches, 0.0),))


def build_vision_graph(tower: VisionTower) -> ExecutionGraph:
    """The graph of encoding a batch of images: patch embedding, layers (all alike), projector."""
    layers = (_layer(tower),) * tower.num_layers
    return ExecutionGraph("vision tower", (_patch_embedding(tower), *layers, _projector(tower)))


def _patches(shape: StepShape) -> Num:
    return shape.rows


def _patch_embedding(tower: VisionTower) -> Block:
    ops = OperatorList()
    ops.gemm("patch_embedding", ("pixels", "mlp_out"), _patches, tower.patch_values, tower.hidden_size, BF16)
    return Block("patch embedding", tuple(ops.operators))


def _layer(tower: VisionTower) -> Block:
    hidden, width = tower.hidden_size, tower.width
    norm = (2 * hidden * ACTIVATION_BYTES, 2 * hidden * ACTIVATION_BYTES)  # the residual stream comes along
    ops = OperatorList()
    ops.elementwise("attn_norm", ("mlp_out attn_out", "attn_in"), _patches, norm)
    ops.gemm("qkv", ("attn_in", "qkv"), _patches, hidden, 3 * hidden, BF16)
    ops.elementwise("rope", ("qkv", "qkv"), _patches, norm)  # of queries and keys
    _attention(tower, ops)
    ops.gemm("o", ("attn_heads", "attn_out"), _patches, hidden, hidden, BF16)
    ops.elementwise("mlp_norm", ("attn_out mlp_out", "mlp_in"), _patches, norm)
    ops.gemm("mlp_up", ("mlp_in", "mlp_mid"), _patches, hidden, 2 * width, BF16)
    ops.gemm("mlp_down", ("mlp_mid", "mlp_out"), _patches, width, hidden, BF16)
    return Block("vision layer", tuple(ops.operators))


def _attention(tower: VisionTower, ops: OperatorList) -> None:
    """Every patch attends to every patch of its image: twice the pairs of a causal prompt of that length."""
    row_bytes = tower.hidden_size * ACTIVATION_BYTES

    def work(shape: StepShape) -> Work:
        patches = _patches(shape)
        pairs = total(shape.prefill, lambda s: s.rows * s.rows)
        return Work(
            flops=4.0 * tower.hidden_size * pairs,
            precision=BF16.precision,
            bytes_read=3.0 * patches * row_bytes,
            bytes_written=patches * row_bytes,
            rows=pairs / larger(patches, 1e-9),
        )

    ops.add("attention", OpKind.ATTENTION_PREFILL, ("qkv", "attn_heads"), work)


def _projector(tower: VisionTower) -> Block:
    """Neighbouring patches side by side are one row, which is projected to the model's hidden size."""
    hidden, side_by_side = tower.hidden_size, tower.patches_per_token
    ops = OperatorList()
    norm = (2 * hidden * ACTIVATION_BYTES, hidden * ACTIVATION_BYTES)
    ops.elementwise("final_norm", ("mlp_out attn_out", "patches"), _patches, norm)
    ops.gemm(
        "projector",
        ("patches", "image_tokens"),
        lambda shape: _patches(shape) / side_by_side,
        side_by_side * hidden,
        tower.output_size,
        BF16,
    )
    return Block("projector", tuple(ops.operators))
