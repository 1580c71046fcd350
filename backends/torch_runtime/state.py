"""What one rank keeps on its device between steps: caches by layer, and columns by request slot."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.torch_runtime.formats import KVStorage, record_bytes
from deepinfer.engine.deployment import Deployment
from deepinfer.errors import UsageError
from deepinfer.model.spec import CompressedAttention, LayerSpec, ModelSpec

LOOK_BACK = 3
"""Tokens before the newest that n-grams look back to, at most."""

_STORAGES: dict[str, KVStorage] = {"fp4": "fp4", "mxfp8": "mxfp8", "bf16": "bf16"}
"""KV formats of models that the runtime stores as they say; FP32 is for tests."""


@dataclass(frozen=True)
class CacheShape:
    """Sizes of a rank's caches: request slots, positions of a window ring, KV blocks, and the longest request's."""

    num_slots: int
    ring_len: int
    num_blocks: int
    block_tokens: int
    max_blocks: int
    rows_per_request: int
    storage: KVStorage

    @classmethod
    def of(cls, deployment: Deployment, max_model_len: int) -> CacheShape:
        """The caches of a deployment whose requests have at most `max_model_len` tokens."""
        settings, model = deployment.settings, deployment.model
        rows = settings.nextn + 1
        per_request = -(-(max_model_len + 2 * rows) // settings.block_tokens)
        return cls(
            num_slots=deployment.budget.num_slots,
            ring_len=model.window + rows,
            num_blocks=min(deployment.budget.num_blocks, settings.max_num_seqs * (per_request + 1)),
            block_tokens=settings.block_tokens,
            max_blocks=per_request,
            rows_per_request=rows,
            storage=kv_storage(model),
        )


class EngineState:
    """Tensors of one rank. The last slot and the last block belong to nobody: padding rows use them.

    Columns by slot: `cached` tokens with KV; `tokens` [slots, 1 + nextn], the newest token and its drafts; `recent`,
    the tokens before the newest; `valid` and `valid_bounded`, the first position whose window keys exist in layers
    that see every row and in bounded ones; `floor`, tokens whose global KV others share and nobody writes; sampling
    parameters. `block_table` lists a slot's blocks.
    """

    def __init__(
        self, model: ModelSpec, shape: CacheShape, device: torch.device, tail_dtype: torch.dtype = torch.float32
    ) -> None:
        self.shape, self.device, self._tail_dtype = shape, device, tail_dtype
        slots = shape.num_slots + 1
        self.rings: dict[int, Tensor] = {}
        self.main: dict[int, Tensor] = {}
        self.keys: dict[int, Tensor] = {}
        self.tails: dict[int, Tensor] = {}
        for layer in (*model.layers, *(model.draft.layers if model.draft and shape.rows_per_request > 1 else ())):
            self._allocate(layer, slots)

        def column(dtype: torch.dtype, *width: int) -> Tensor:
            return torch.zeros(slots, *width, dtype=dtype, device=device)

        self.cached = column(torch.int32)
        self.tokens = column(torch.int32, shape.rows_per_request)
        self.recent = column(torch.int32, LOOK_BACK)
        self.valid = column(torch.int32)
        self.valid_bounded = column(torch.int32)
        self.floor = column(torch.int32)
        self.block_table = torch.full((slots, shape.max_blocks), shape.num_blocks, dtype=torch.int32, device=device)
        self.temperature = column(torch.float32)
        self.top_p = column(torch.float32)
        self.top_k = column(torch.int32)
        self.seed = column(torch.int64)

    @property
    def nobody(self) -> int:
        """The slot of padding rows."""
        return self.shape.num_slots

    def _allocate(self, layer: LayerSpec, slots: int) -> None:
        attention, shape = compressed(layer), self.shape

        def records(count: int, length: int, width: int) -> Tensor:
            return torch.zeros(count, length, width, dtype=torch.uint8, device=self.device)

        window_bytes = record_bytes(shape.storage, attention.head_dim, "window")
        self.rings[layer.index] = records(slots, shape.ring_len, window_bytes)
        if not attention.owns_kv:
            return
        entries = shape.block_tokens // attention.ratio
        main_bytes = record_bytes(shape.storage, attention.head_dim, "main")
        index_bytes = record_bytes(shape.storage, attention.index_dim, "index")
        self.main[layer.index] = records(shape.num_blocks + 1, entries, main_bytes)
        self.keys[layer.index] = records(shape.num_blocks + 1, entries, index_bytes)
        if attention.ratio > 1:
            # What an open entry pools: values and gates of its tokens and of a step that may be rolled back.
            length = attention.ratio - 1 + shape.rows_per_request
            tail = (slots, length, 2, attention.head_dim)
            self.tails[layer.index] = torch.zeros(tail, device=self.device, dtype=self._tail_dtype)


def compressed(layer: LayerSpec) -> CompressedAttention:
    """The layer's attention, which must be compressed."""
    assert isinstance(layer.attention, CompressedAttention)
    return layer.attention


def kv_storage(model: ModelSpec) -> KVStorage:
    """How the runtime stores a model's KV. Raises UsageError for a format that only other engines' kernels read."""
    if model.kv.name not in _STORAGES:
        raise UsageError(
            f"KV format {model.kv.name!r} can be planned; deepinfer itself keeps fp4, mxfp8 or bf16: set kv_format"
        )
    return _STORAGES[model.kv.name]
