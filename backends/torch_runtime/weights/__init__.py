"""Weights of a DeepSeek-V4.1 checkpoint: what they are called and shaped, read from disk, made up, and written."""

from backends.torch_runtime.weights.dummy import dummy_weights
from backends.torch_runtime.weights.load import from_released, load_weights
from backends.torch_runtime.weights.rank import WHOLE, ModelWeights, RankPart, rank_bytes
from backends.torch_runtime.weights.save import released_tensors, save_checkpoint

__all__ = [
    "WHOLE",
    "ModelWeights",
    "RankPart",
    "dummy_weights",
    "from_released",
    "load_weights",
    "rank_bytes",
    "released_tensors",
    "save_checkpoint",
]
