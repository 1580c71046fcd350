"""One-sided exchange of equal parts between a host's GPUs: each rank writes into the others' memory, then all meet.

There is a step's dispatch, back its combine. 64 rows of V4.1 (5,120 BF16 numbers, 6 experts) take 8.8 us there and 6.0
back between two H200, and 46 and 28 with NCCL (`benchmarks/exchange_speed.py`, torch 2.11, Triton 3.6, 2026-11-30).
Memory is torch's symmetric memory, without NVLink multicast.
"""

# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="import-untyped"
# ruff: noqa: N803

from __future__ import annotations

import ctypes
import os
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from backends.torch_runtime.comm import Communicator, Peers

CAPACITY = 32 << 20
"""Bytes that a rank can receive at once; there is room for two such messages."""
_NATIVE_ATOMICS = 3
"""CU_DEVICE_P2P_ATTRIBUTE_NATIVE_ATOMIC_SUPPORTED of the CUDA driver's API."""
_ALIGNMENT = 128
_WORDS = 4096


@triton.jit(do_not_specialize=["place"])
def _push_kernel(x, buffers, start, words, place, BLOCK: tl.constexpr):
    """Part i of x, `words` int32, to `start` + `place` parts into the i-th buffer."""
    peer = tl.program_id(1)
    buffer = tl.multiple_of(tl.load(buffers + peer).to(tl.pointer_type(tl.int32)), 16)
    buffer += start + tl.cast(place, tl.int64) * words
    word = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    value = tl.load(x + peer.to(tl.int64) * words + word, mask=word < words)
    tl.store(buffer + word, value, mask=word < words)


def push(x: Tensor, buffers: Tensor, start: int, place: int) -> None:
    """x int32 [ranks, words], contiguous: x[i] to the memory at address buffers[i] (int64), in words from `start`."""
    ranks, words = x.shape
    _push_kernel[(triton.cdiv(words, _WORDS), ranks)](
        x, buffers, start, words, place, BLOCK=_WORDS, num_warps=8, enable_fp_fusion=True
    )


class OneSidedExchange:
    """Exchanges of a group of ranks, in turns: a message `there`, then one `back`, each with a half of the memory.

    So a rank that writes a message there has met all others since they read the last one from that half, and what an
    exchange returns stays until the next in its direction. Everything runs on the current stream and can be captured.
    Sets TORCH_SYMM_MEM_DISABLE_MULTICAST in this process, unless it is set: torch would prepare multicast, which
    nothing here uses.
    """

    def __init__(self, peers: Peers, device: torch.device, capacity: int = CAPACITY) -> None:
        os.environ.setdefault("TORCH_SYMM_MEM_DISABLE_MULTICAST", "1")
        import torch.distributed._symmetric_memory as symmetric

        assert peers.group is not None
        self._peers, self._capacity = peers, capacity
        self._memory = symmetric.empty(2 * capacity, dtype=torch.uint8, device=device)
        self._handle: Any = symmetric.rendezvous(self._memory, peers.group)
        self._buffers = torch.tensor(self._handle.buffer_ptrs, dtype=torch.int64, device=device)

    @classmethod
    def between(cls, comm: Communicator, capacity: int = CAPACITY) -> OneSidedExchange | None:
        """The exchange of the expert group, if its GPUs reach each other's memory.

        All ranks that step together call it. A rank's GPU is the one of its number: engines run on one host.
        """
        own, others = comm.rank, [rank for rank in comm.expert.ranks if rank != comm.rank]
        possible = all(_reaches(own, other) for other in others)
        if comm.agree_max(int(not possible)) or not others:
            return None
        return cls(comm.expert, comm.device, capacity)

    def __call__(self, columns: Sequence[Tensor], back: bool) -> list[Tensor] | None:
        """Each column [ranks, rows, ...] as `Communicator.all_to_all_equal` exchanges it; None if they are too large.

        Columns whose parts [rows, ...] have a number of bytes that 4 does not divide are not taken either.
        """
        starts, end = [], 0
        for column in columns:
            starts.append(end)
            end += -(-column.nbytes // _ALIGNMENT) * _ALIGNMENT
        if end > self._capacity or any(c.nbytes // len(c) % 4 for c in columns):
            return None
        half = self._capacity if back else 0
        received = []
        for column, start in zip(columns, starts, strict=True):
            if column.numel():
                words = column.contiguous().view(torch.uint8).view(len(column), -1).view(torch.int32)
                push(words, self._buffers, (half + start) // 4, self._peers.place)
            mine = self._memory[half + start : half + start + column.nbytes]
            received.append(mine.view(column.dtype).view(column.shape))
        self._handle.barrier(channel=0)
        return received


def _reaches(source: int, target: int) -> bool:
    """Whether a GPU can write into another's memory, and count there: torch's barrier does."""
    if not torch.cuda.can_device_access_peer(source, target):
        return False
    counts = ctypes.c_int()
    status = ctypes.CDLL("libcuda.so.1").cuDeviceGetP2PAttribute(ctypes.byref(counts), _NATIVE_ATOMICS, source, target)
    return status == 0 and counts.value == 1
