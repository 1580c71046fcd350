"""The CUDA backend's table of kernels: Triton where it pays, cuBLAS for plain products."""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from backends.cuda import attention, elementwise, experts, gemm, hyper_connections, indexer, records, routing, sampling
from backends.torch_runtime.formats import Weight
from backends.torch_runtime.kernels import KernelTable


def linear(x: Tensor, weight: Weight) -> Tensor:
    """[m, k] times [n, k] transposed: stored weights in Triton, plain ones in cuBLAS."""
    if weight.storage != "plain":
        return gemm.linear(x, weight)
    return torch.nn.functional.linear(x, weight.data.to(x.dtype))


def linear_fp32(x: Tensor, weight: Weight) -> Tensor:
    """The product with a plain weight, accumulated and kept in FP32."""
    data = weight.data
    if x.dtype == torch.float32 or data.dtype == torch.float32:
        return torch.nn.functional.linear(x.float(), data.float())
    if not x.shape[0]:
        return x.new_empty(0, data.shape[0], dtype=torch.float32)
    return torch.mm(x, data.to(x.dtype).T, out_dtype=torch.float32)


def linear_grouped(x: Tensor, weight: Weight) -> Tensor:
    """[m, g, k] times the g row blocks of a weight [g x n, k]: [m, g, n]."""
    if weight.storage != "plain":
        return gemm.linear_grouped(x, weight)
    return torch.einsum("mgk,gnk->mgn", x, weight.data.unflatten(0, (x.shape[1], -1)).to(x.dtype))


def kernel_table() -> KernelTable:
    """Every kernel that the CUDA backend has of its own."""
    return KernelTable(
        linear=linear,
        linear_fp32=linear_fp32,
        linear_grouped=linear_grouped,
        route=routing.route,
        sort_pairs=routing.sort_pairs,
        grouped_experts=experts.grouped_experts,
        sum_pairs=experts.sum_pairs,
        swiglu=experts.swiglu,
        sparse_attention=attention.sparse_attention,
        index_scores=partial(indexer.index_scores, pad=False),  # selection looks at visible columns only
        select_topk=indexer.select_topk,
        candidate_blocks=indexer.candidate_blocks,
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
