"""The CUDA backend's table of kernels: Triton where it pays, cuBLAS for plain products."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backends.cuda import (
    attention,
    elementwise,
    experts,
    gemm,
    hyper_connections,
    indexer,
    records,
    routing,
    sampling,
    selection,
)
from backends.torch_runtime.formats import Weight
from backends.torch_runtime.kernels import KernelTable


def linear_fp32(x: Tensor, weight: Weight) -> Tensor:
    """The product with a plain weight, accumulated and kept in FP32."""
    data = weight.data
    if x.dtype == torch.float32 or data.dtype == torch.float32:
        return torch.nn.functional.linear(x.float(), data.float())
    if not x.shape[0]:
        return x.new_empty(0, data.shape[0], dtype=torch.float32)
    return torch.mm(x, data.to(x.dtype).T, out_dtype=torch.float32)


def kernel_table() -> KernelTable:
    """Every kernel that the CUDA backend has of its own."""
    return KernelTable(
        arranged=experts.arranged,
        linear=gemm.linear,
        linear_fp32=linear_fp32,
        linear_grouped=gemm.linear_grouped,
        route=routing.route,
        sort_pairs=routing.sort_pairs,
        grouped_experts=experts.grouped_experts,
        sum_pairs=experts.sum_pairs,
        swiglu=experts.swiglu,
        sparse_attention=attention.sparse_attention,
        index_scores=partial(indexer.index_scores, pad=False),  # selection looks at visible columns only
        select_topk=indexer.select_topk,
        candidate_blocks=indexer.candidate_blocks,
        entry_records=selection.entry_records,
        hc_enter=hyper_connections.hc_enter,
        hc_expand=hyper_connections.hc_expand,
        hc_leave=hyper_connections.hc_leave,
        rms_norm=elementwise.rms_norm,
        rope=records.rope,
        norm_rope_encode=records.norm_rope_encode,
        scatter_records=records.scatter_records,
        pool_pairs=elementwise.pool_pairs,
        engram_gate=elementwise.engram_gate,
        sample=sampling.sample,
    )
