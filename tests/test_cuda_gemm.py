"""Products, routing and experts in Triton against FP64 formulas: interpreted, compiled ahead of time, on a device.

The interpreter runs in a process of its own, which is this file run as a script: Triton decides at import whether to
interpret.
"""

from __future__ import annotations

import re
import subprocess
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch
import triton
from kernel_builds import SHARED_LIMIT, compiled, environment, resource_usage
from torch import Tensor

from backends.cuda import experts, gemm
from backends.cuda.activations import ordered_place, round_activations
from backends.cuda.tiles import BLOCK_SCALED, PORTABLE, SPAN, WIDEN, Tiling, fitted
from backends.torch_runtime.formats import Weight, rounded_fp8
from deepinfer.errors import UsageError

FP32_ERROR = 3e-5
"""The tensor cores cut FP32 sums off instead of rounding them, 512 times over the widest product."""
SPILLED = 16
"""Bytes of a thread's stack: four registers."""
LIMIT = 10.0
gpu = pytest.mark.gpu
needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def fp8_weight(n: int, k: int, device: str) -> Weight:
    values = torch.randn(n, k, device=device)
    values[0, :8] = torch.tensor([0.0, -0.0, 448.0, -448.0, 2.0**-9, -(2.0**-9), 2.0**-6, 1.875])
    scale = torch.randint(110, 130, (-(-n // 32), k // 32), dtype=torch.uint8, device=device)
    return Weight(values.to(torch.float8_e4m3fn), scale, "fp8_block")


def fp4_weight(*shape: int, device: str) -> Weight:
    *rows, k = shape
    data = torch.randint(0, 256, (*rows, k // 2), dtype=torch.uint8, device=device)
    return Weight(data, torch.randint(112, 124, (*rows, k // 32), dtype=torch.uint8, device=device), "mxfp4")


def activations(*shape: int, device: str, dtype: torch.dtype) -> Tensor:
    """Numbers of many magnitudes, and blocks of zeros."""
    x = torch.randn(shape, device=device) * torch.exp2(torch.randint(-12, 8, (*shape[:-1], 1), device=device))
    x[0, ..., :32] = 0.0
    return x.to(dtype)


def error(got: Tensor, expected: Tensor) -> float:
    """Largest over the rows of the norm of the difference over the row's norm."""
    difference = (got.double() - expected).norm(dim=-1) / expected.norm(dim=-1).clamp_min(1e-30)
    return float(difference.max())


def tolerance(dtype: torch.dtype) -> float:
    return FP32_ERROR if dtype == torch.float32 else 2.0**-8


def check_linear(device: str, m: int, groups: int, n: int, k: int, dtype: torch.dtype = torch.float32) -> None:
    """All of a range's rows, fewer of them with the same bits, and every storage."""
    x, weight = activations(m, groups, k, device=device, dtype=dtype), fp8_weight(groups * n, k, device)
    y = gemm.linear_grouped(x, weight)
    rounded = rounded_fp8(x).double()
    values = weight.dequantized(torch.float64).unflatten(0, (groups, n))
    assert error(y, torch.einsum("mgk,gnk->mgn", rounded, values)) < tolerance(dtype)
    few = m - m // 4
    assert torch.equal(gemm.product_of(x[:few], weight, gemm.tiling_for(m)), y[:few])
    one = x[:, 0].contiguous()
    for other in (fp4_weight(n, k, device=device), Weight(weight.data[:n], fp4_weight(n, k, device=device).scale)):
        stored = Weight(other.data, other.scale, "mxfp4" if other.storage == "mxfp4" else "fp8_rows")
        expected = rounded_fp8(one).double() @ stored.dequantized(torch.float64).T
        assert error(gemm.linear(one, experts.arranged(stored)), expected) < tolerance(dtype)


def check_split(device: str) -> None:
    """Splits of every kind add up, where steps do not divide evenly too."""
    x, weight = activations(18, 2, 1408, device=device, dtype=torch.float32), fp8_weight(2 * 96, 1408, device)
    expected = torch.einsum(
        "mgk,gnk->mgn", rounded_fp8(x).double(), weight.dequantized(torch.float64).unflatten(0, (2, 96))
    )
    for spans, programs in ((1, 12), (1, 8), (2, 12)):
        tiling = gemm.LinearTiling(None, Tiling(16, 64, 4, 2, spans), programs)
        assert error(gemm.product_of(x, weight, tiling), expected) < FP32_ERROR


def check_routing(device: str, m: int, num_experts: int, topk: int) -> None:
    logits, bias = torch.randn(m, num_experts) * 8, torch.randn(num_experts) * 0.1
    logits[0], logits[1, : num_experts // 2], bias[: num_experts // 2] = 1.5, -60.0, 0.25
    ids, weights = gemm.route(logits.to(device), bias.to(device), topk, 1.5)
    score = torch.log1p(logits.double().exp()).sqrt()
    key = (score.float() + bias).double()
    for row in range(m):
        order = sorted(range(num_experts), key=lambda e, row=row: (-float(key[row, e]), e))
        chosen = ids[row].tolist()
        assert torch.allclose(key[row, chosen], key[row, order[:topk]], atol=1e-5)
        assert row > 0 or chosen == order[:topk]
        expected = score[row, chosen] / (score[row, chosen].sum() + 1e-20) * 1.5
        assert torch.allclose(weights[row].double().cpu(), expected, rtol=1e-5)


def check_pairs(device: str, m: int, topk: int, first: int, count: int) -> None:
    ids = torch.randint(-1, first + count + 2, (m, topk), dtype=torch.int32)
    pairs = gemm.sort_pairs(ids.to(device), first, count)
    chosen = [(int(ids[r, s]) - first, r, s) for r in range(m) for s in range(topk)]
    order = sorted(pair for pair in chosen if 0 <= pair[0] < count)
    unused = [-1] * (m * topk - len(order))
    assert pairs.row.tolist() == [r for _, r, _ in order] + unused
    assert pairs.slot.tolist() == [s for _, _, s in order] + unused
    assert pairs.offsets.tolist() == [sum(e < expert for e, _, _ in order) for expert in range(count + 1)]
    place = {(r, s): i for i, (_, r, s) in enumerate(order)}
    assert pairs.position.tolist() == [[place.get((r, s), -1) for s in range(topk)] for r in range(m)]


def silu_times(gate_up: Tensor) -> Tensor:
    gate, up = gate_up.double().chunk(2, -1)
    gate = gate.clamp_max(LIMIT)
    return gate / (1 + torch.exp(-gate)) * up.clamp(-LIMIT, LIMIT)


def check_experts(
    device: str, m: int, h: int, f: int, count: int, topk: int, dtype: torch.dtype, tiling: Tiling | None = None
) -> None:
    x, weights = torch.randn(m, h, device=device).to(dtype), torch.rand(m, topk, device=device)
    ids = torch.rand(m, count + 2, device=device).topk(topk, -1).indices.int() - 1
    w13, w2 = fp4_weight(count, 2 * f, h, device=device), fp4_weight(count, h, f, device=device)
    pairs, stacks = gemm.sort_pairs(ids, 0, count), (experts.arranged(w13), experts.arranged(w2))
    total = gemm.sum_pairs(gemm.grouped_experts(x, weights, pairs, *stacks, LIMIT, tiling=tiling), pairs.position)
    expected = torch.zeros(m, h, dtype=torch.float64, device=device)
    for e in range(count):
        row, slot = (ids == e).nonzero(as_tuple=True)
        up, down = (Weight(w.data[e], w.scale[e], w.storage).dequantized(torch.float64) for w in (w13, w2))
        active = silu_times(rounded_fp8(x[row]).double() @ up.T) * weights[row, slot, None]
        expected.index_add_(0, row, rounded_fp8(active.float()).double() @ down.T)
    # A sum in FP32 can round to the other neighbour in FP8 than the sum in FP64.
    assert float((total.double() - expected).norm() / expected.norm()) < max(tolerance(dtype), 2e-4)


def check_swiglu(device: str, m: int, f: int) -> None:
    gate_up = torch.randn(m, 2 * f, device=device) * 8
    assert error(gemm.swiglu(gate_up, LIMIT), silu_times(gate_up)) < FP32_ERROR


def check_orders() -> None:
    """Activations are stored where the product looks for them, each exactly once."""
    for fp4 in (False, True):
        x = torch.arange(SPAN).float()[None, :] / 8 + 1.0
        stored = round_activations(x, fp4)[0][0]
        place = [ordered_place.fn(k, fp4) for k in range(SPAN)]
        assert sorted(place) == list(range(SPAN))
        assert torch.equal(stored[place], rounded_fp8(x)[0])


def interpreted() -> None:
    """Everything on small shapes."""
    torch.manual_seed(0)
    check_orders()
    check_linear("cpu", 3, 1, 96, 256)
    check_linear("cpu", 20, 3, 64, 128)
    check_split("cpu")
    check_routing("cpu", 5, 24, 6)
    for first, count in ((0, 5), (3, 4)):
        check_pairs("cpu", 50, 3, first, count)
    check_experts("cpu", 9, 256, 128, 3, 2, torch.float32)
    check_experts("cpu", 40, 128, 128, 3, 2, torch.float32, Tiling(16, 128, 4, 2))
    check_swiglu("cpu", 3, 300)


def test_interpreted() -> None:
    command = [sys.executable, "-W", "ignore", __file__]
    ran = subprocess.run(command, env=environment(interpret=True), capture_output=True, text=True)
    assert ran.returncode == 0, ran.stderr[-3000:]


def test_bands_hold_the_same_numbers() -> None:
    weight = fp4_weight(3, 16, 256, device="cpu")
    bands = weight.in_bands()
    assert bands.data.shape == (3, 2, 2, 8, 64)
    assert bands.shape == weight.shape == (3, 16, 256)
    assert torch.equal(bands.dequantized(), weight.dequantized())


def test_weights_that_the_experts_cannot_take_are_refused() -> None:
    with pytest.raises(UsageError, match="multiples of 128, not mxfp4 96"):
        experts.arranged(fp4_weight(1, 64, 96, device="cpu"))
    with pytest.raises(UsageError, match="not plain 128"):
        experts.arranged(Weight(torch.zeros(1, 64, 128)))


def test_capped_registers_are_for_hopper() -> None:
    for pairs in (1, 12, 13, 32, 33, 64, 65, 4096):
        assert experts.tiling_for(pairs, BLOCK_SCALED.value).registers == 0
    assert experts.tiling_for(32, WIDEN.value).registers
    assert not experts.tiling_for(33, WIDEN.value).registers
    usual = gemm.tiling_for(64)
    assert usual.chosen(132 * 128, WIDEN.value, 1280) == usual.tiling
    assert usual.chosen(132 * 128 + 1, WIDEN.value, 1280) == usual.crowded
    assert usual.chosen(32768, BLOCK_SCALED.value, 1280) == usual.tiling


def built_for(
    kernel: triton.JITFunction, path: int, tiling: Tiling, **constants: int | bool | None
) -> triton.compiler.CompiledKernel:
    """A product's kernel for sm_90 or sm_100."""
    block_scaled = path == BLOCK_SCALED.value
    value = "*fp8e4nv" if block_scaled else "*bf16"
    in_bands = kernel is not gemm._linear_kernel
    word, scale = ("*u8", "*u8") if block_scaled else ("*i32", "*i32" if in_bands or tiling.spans == 1 else "*i64")
    types = {"x": value, "x_scale": "*u8", "w": word, "w_scale": scale, "y": "*bf16", "out": value, "out_scale": "*u8"}
    types |= dict.fromkeys(("tile_expert", "tile_first", "tile_token", "counters"), "*i32")
    types |= {"tile_weight": "*fp32", "partial": "*fp32", "limit": "fp32"}
    options = dict(tiling.options)
    launch = {name: options.pop(name) for name in ("num_warps", "maxnreg", "enable_fp_fusion")}
    constants |= {**options, "PATH": path}
    return compiled(kernel, 100 if block_scaled else 90, types, constants, ("n", "width", "h", "f"), **launch)


LINEAR = {"SCALE_ROWS": 32, "FP4": False, "NEIGHBOURS": gemm.NEIGHBOURS}
CROWDED = gemm.tiling_for(64).chosen(32768, WIDEN.value, 1280)
KERNELS = {
    "linear small": (gemm._linear_kernel, gemm.LINEAR_TILINGS[0].tiling, {**LINEAR, "SPLITS": 4}),
    "linear large": (gemm._linear_kernel, gemm.LINEAR_TILINGS[-1].tiling, {**LINEAR, "SPLITS": 1}),
    "gate and up": (experts._gate_up_kernel, experts.EXPERT_TILINGS[0][1], {}),
    "down, few": (experts._down_kernel, experts.EXPERT_TILINGS[0][1], {}),
    "linear crowded": (gemm._linear_kernel, CROWDED, {**LINEAR, "SPLITS": 1}),
    "gate and up, capped": (experts._gate_up_kernel, experts.EXPERT_TILINGS[1][1], {}),
    "down, capped": (experts._down_kernel, experts.EXPERT_TILINGS[1][1], {}),
    "down": (experts._down_kernel, experts.EXPERT_TILINGS[-1][1], {}),
}


@pytest.mark.parametrize("path", [WIDEN.value, BLOCK_SCALED.value], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize("name", KERNELS)
def test_compiled_ahead_of_time(name: str, path: int) -> None:
    kernel, tiling, constants = KERNELS[name]
    built = built_for(kernel, path, fitted(tiling, path, 2 * SPAN), **constants)
    ptx = built.asm["ptx"]
    if path == BLOCK_SCALED.value:
        assert re.search(r"tcgen05\.mma\.\S*kind::mxf8f6f4\.block_scale", ptx)
    else:
        assert "wgmma.mma_async.sync.aligned" in ptx
        # Weights go from their load to the tensor cores in registers: the only BF16 in shared memory are tokens.
        assert not re.search(r"wgmma.mma_async\S+ \{[^}]*\}, %rd\d+, %rd\d+", ptx)
    assert built.metadata.shared <= SHARED_LIMIT
    used = {name: int(value) for name, value in re.findall(r"(REG|STACK|LOCAL):(\d+)", resource_usage(built))}
    assert used["REG"] <= (tiling.registers or 255)
    # A cap may send what waits for the end of the loop to memory, not what the loop uses.
    assert used["STACK"] <= (SPILLED if tiling.registers else 0)
    assert used["LOCAL"] == 0


def test_the_interpreter_alone_takes_the_portable_way() -> None:
    from backends.cuda.tiles import path_of

    assert path_of(torch.device("cpu")) == PORTABLE.value


@gpu
@needs_cuda
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("m", [1, 8, 64, 256, 600])
def test_linear_on_a_device(m: int, dtype: torch.dtype) -> None:
    for groups, n, k in ((1, 1792, 5120), (1, 32768, 1280), (8, 1024, 4096), (1, 5120, 8192), (1, 5120, 2304)):
        check_linear("cuda", m, groups, n, k, dtype)


@gpu
@needs_cuda
@pytest.mark.parametrize("m", [1, 64, 256, 2048])
def test_experts_on_a_device(m: int) -> None:
    check_experts("cuda", m, 5120, 2304, 48, 6, torch.bfloat16)


@gpu
@needs_cuda
def test_routing_on_a_device() -> None:
    check_routing("cuda", 65, 384, 6)
    check_pairs("cuda", 700, 6, 0, 384)
    check_pairs("cuda", 64, 6, 48, 48)
    check_swiglu("cuda", 64, 2304)
    check_split("cuda")


if __name__ == "__main__":
    interpreted()
