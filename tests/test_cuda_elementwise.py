"""The Triton kernels against the plain-torch reference: interpreted, compiled ahead of time, and on a device.

A machine without a device interprets the kernels on small shapes and compiles them for two architectures. Both happen
in processes of their own, side by side, which are this file run as a script: Triton decides at import whether to
interpret.
"""

from __future__ import annotations

import re
import sys

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")
import torch
from kernel_builds import ARCHITECTURES, SHARED_LIMIT, compiled, report, resource_usage, run_scripts

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
EPS = 1e-6


class Draws:
    """Normal tensors on a device, from one seed."""

    def __init__(self, device: str, seed: int = 0):
        self.device = device
        self.generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, dtype=torch.float32):
        return torch.randn(*shape, generator=self.generator).to(dtype).to(self.device)

    def integers(self, low: int, high: int, *shape: int, dtype=torch.int64):
        return torch.randint(low, high, shape, generator=self.generator, dtype=dtype).to(self.device)


def _close(got, want, dtype, ulps=2):
    """Within two units of the dtype's last place, of the row's largest number in the case of FP32 sums."""
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    step = 2.0**-7 if dtype == torch.bfloat16 and got.dtype == torch.bfloat16 else 2.0**-17
    torch.testing.assert_close(got.float(), want.float(), rtol=ulps * step, atol=ulps * step)


def check_hyper_connections(device, m, h, dtype):
    from backends.cuda import elementwise as cuda
    from backends.torch_runtime.reference import elementwise as ref

    draw = Draws(device)
    mixing = draw(24, 4 * h) / (4 * h) ** 0.5, draw(24), draw(3), draw(h)
    arguments = (*mixing, EPS, 1e-6, 20)
    embedded = draw(m, 1, h, dtype=dtype).expand(-1, 4, -1)
    y, y2 = draw(m, h, dtype=dtype), draw(m, h, dtype=dtype)
    carry, _ = ref.hc_enter(embedded, None, None, *arguments)
    row = m // 2
    one = type(carry)(*(t[row : row + 1] for t in carry))
    for state, alone, a, b in (
        (embedded, embedded[row : row + 1], None, None),
        (carry, one, y, y2),
        (carry, one, y, None),
        (carry, one, None, None),
    ):
        got, want = cuda.hc_enter(state, a, b, *arguments), ref.hc_enter(state, a, b, *arguments)
        for part, expected in zip((*got[0], got[1]), (*want[0], want[1]), strict=True):
            _close(part, expected, dtype, ulps=8 if part.dtype == torch.float32 else 2)
        for part, expected in zip(
            cuda.hc_leave(state, a, b, mixing[3], EPS), ref.hc_leave(state, a, b, mixing[3], EPS), strict=True
        ):
            _close(part, expected, dtype)
        _close(cuda.hc_expand(state, a, b), ref.hc_expand(state, a, b), dtype)
        rows = [None if t is None else t[row : row + 1] for t in (a, b)]
        single = cuda.hc_enter(alone, *rows, *arguments)
        for part, whole in zip((*single[0], single[1]), (*got[0], got[1]), strict=True):
            assert torch.equal(part[0], whole[row])


def check_rows(device, m, n, dtype):
    """Norm, rotation and the Engram gate."""
    from backends.cuda import elementwise as cuda
    from backends.torch_runtime.reference import elementwise as ref

    draw = Draws(device)
    strided, weight = draw(m, n + 24, dtype=dtype)[:, 8 : n + 8], draw(n, dtype=dtype)
    _close(cuda.rms_norm(strided, weight, EPS), ref.rms_norm(strided, weight, EPS), dtype)
    angle = draw(m, 8) * 10
    heads = draw(m, 18, 48, dtype=dtype)
    for x, inverse in ((heads, False), (heads, True), (heads[:, 0].contiguous(), False)):
        _close(cuda.rope(x, angle.cos(), angle.sin(), inverse), ref.rope(x, angle.cos(), angle.sin(), inverse), dtype)
    turned = heads.clone()
    assert cuda.rope(turned, angle.cos(), angle.sin(), inplace=True) is turned
    assert torch.equal(turned, cuda.rope(heads, angle.cos(), angle.sin()))
    x, kv = draw(m, 4, n, dtype=dtype), draw(m, 5 * n, dtype=dtype)
    weights = draw(4, n), draw(4, n)
    _close(cuda.engram_gate(x, kv, *weights, EPS), ref.engram_gate(x, kv, *weights, EPS), dtype, ulps=4)
    value, gate = draw(m, 2, n), draw(m, 2, n)
    _close(cuda.pool_pairs(value, gate), ref.pool_pairs(value, gate), torch.float32)


def check_records(device, m, d, dtype):
    from backends.cuda import elementwise as cuda
    from backends.torch_runtime import formats
    from backends.torch_runtime.reference import elementwise as ref

    draw = Draws(device)
    x, weight, angle = draw(m, d + 32, dtype=dtype)[:, :d], draw(d, dtype=dtype), draw(m, 16)
    x[0, :64] = 0.0
    for storage in ("fp4", "mxfp8", "bf16", "fp32"):
        for kind in ("window", "main", "index"):
            arguments = (x, weight, EPS, angle.cos(), angle.sin(), storage, kind)
            got, want = cuda.norm_rope_encode(*arguments), ref.norm_rope_encode(*arguments)
            # FP32 sums differ in their last bit, which rounds few numbers the other way.
            numbers = [formats.decode_record(record, d, storage, kind) for record in (got, want)]
            differ = (numbers[0] - numbers[1]).abs() > 1e-5
            assert differ.float().mean() <= 0.005, (storage, kind, differ.float().mean())
            assert got.shape == want.shape
            places = torch.randperm(2 * m, generator=draw.generator)[:m].to(device)
            places[::3] = -1
            caches = [torch.zeros(2 * m, got.shape[1], dtype=torch.uint8, device=device) for _ in range(2)]
            cuda.scatter_records(got, caches[0], places)
            ref.scatter_records(got, caches[1], places)
            assert torch.equal(*caches)


def _sampling_arguments(draw, m, vocabulary):
    logits = draw(m, vocabulary) * 3
    logits[1] = logits[1].bfloat16().float()
    logits[2] = 0.0
    logits[3, ::2] = -torch.inf
    logits[4] = -torch.inf
    logits[4, vocabulary // 3] = 1.0
    temperature = draw(m).abs() + 0.1
    temperature[::7] = 0.0
    top_k, top_p = draw.integers(0, 40, m, dtype=torch.int32), draw(m).abs().clamp_max(1.0)
    top_k[::3] = 0
    top_p[::4] = 1.0
    return logits, temperature, top_k, top_p, draw.integers(-(2**62), 2**62, m), draw.integers(0, 2**40, m)


def check_sampling(device, m, vocabulary):
    from backends.cuda import sampling as cuda
    from backends.torch_runtime.reference import sampling as ref

    arguments = _sampling_arguments(Draws(device), m, vocabulary)
    tokens = cuda.sample(*arguments)
    # Logarithms differ in their last bit: a race so close is one in thousands.
    assert (tokens != ref.sample(*arguments)).sum() <= m // 500
    row = m - 2
    assert torch.equal(cuda.sample(*(a[row : row + 1] for a in arguments)), tokens[row : row + 1])


def interpreted_checks():
    from backends.cuda import hyper_connections, sampling

    hyper_connections.CHUNK = 32
    sampling.BLOCK, sampling.FEW, sampling.PART = 128, 32, 128
    for name, dtype in DTYPES.items():
        yield f"hyper_connections-{name}", lambda dtype=dtype: check_hyper_connections("cpu", 34, 56, dtype)
        yield f"rows-{name}", lambda dtype=dtype: check_rows("cpu", 3, 80, dtype)
        yield f"records-{name}", lambda dtype=dtype: check_records("cpu", 3, 128, dtype)
    yield "sampling", lambda: check_sampling("cpu", 9, 500)


INTERPRETED = [
    *(f"{check}-{name}" for name in DTYPES for check in ("hyper_connections", "rows", "records")),
    "sampling",
]


def round_as_torch_does():
    """The interpreter cuts BF16 and E4M3 off and multiplies BF16 as integers; give it roundings to nearest even."""
    import triton.language as tl
    from triton.runtime import interpreter

    types = {tl.float32: torch.float32, tl.bfloat16: torch.bfloat16, tl.float8e4nv: torch.float8_e4m3fn}
    codes = {4: torch.int32, 2: torch.int16, 1: torch.uint8}
    original, dot = interpreter._convert_float, interpreter.InterpreterBuilder.create_dot

    def convert(data, source, target, rounding):
        if source not in types or target not in types:
            return original(data, source, target, rounding)
        bits = torch.from_numpy(data.copy().view(f"i{data.itemsize}" if data.itemsize > 1 else "u1"))
        out = bits.view(types[source]).to(types[target])
        return out.view(codes[out.element_size()]).numpy().view(f"u{out.element_size()}")

    def create_dot(self, a, b, total, *rest):
        def widened(x):
            if x.dtype.scalar != tl.bfloat16:
                return x
            data = convert(x.data, tl.bfloat16, tl.float32, None).view("f4").reshape(x.data.shape)
            return interpreter.TensorHandle(data, tl.float32)

        return dot(self, widened(a), widened(b), total, *rest)

    interpreter._convert_float, interpreter.InterpreterBuilder.create_dot = convert, create_dot


def compiled_kernels():
    """Name, kernel, types of arguments in order (constants as values), warps: as the engine launches them at h 5120."""
    from backends.cuda import elementwise, hyper_connections, records, sampling

    pointer = {"b": "*bf16", "f": "*fp32", "i": "*i32", "l": "*i64", "u": "*u8", "n": "i32", "e": "fp32"}

    def row(name, kernel, types, *constants, warps):
        return name, kernel, [pointer[t] for t in types], constants, warps

    yield row("streams", hyper_connections._streams_kernel, "bfffbbfbbfnnnn", *[True] * 6, 32, 128, 16, 32, warps=4)
    yield row("finish", hyper_connections._finish_kernel, "fbfffffffnneen", True, 64, 8192, 32, warps=8)
    yield row("rms_norm", elementwise._rms_norm_kernel, "bbbnne", 8192, warps=8)
    yield row("pool", elementwise._pool_kernel, "fffn", 2, 512, warps=1)
    yield row("engram", elementwise._engram_kernel, "bbbbbnnnnee", 8192, warps=8)
    yield row("rope", records._rope_kernel, "bffnnnn", 1.0, 16, 32, warps=4)
    for name, dim, size in (("fp8", 512, 528), ("nvfp4", 512, 288), ("mxfp4", 128, 68)):
        yield row(name, records._record_kernel, "bbffune", dim, 32, size, name, warps=1 if dim == 128 else 2)
    yield row("scatter", records._scatter_kernel, "iil", 132, 256, warps=1)
    yield row("threshold", sampling._threshold_kernel, "ffifffnn", sampling.BLOCK, sampling.FEW, warps=16)
    yield row("race", sampling._race_kernel, "fffllfinn", sampling.PART, warps=8)
    yield row("winner", sampling._winner_kernel, "fiinn", 32, warps=1)


COMPILED = [
    "streams",
    "finish",
    "rms_norm",
    "pool",
    "engram",
    "rope",
    "fp8",
    "nvfp4",
    "mxfp4",
    "scatter",
    "threshold",
    "race",
    "winner",
]


def check_compiles(kernel, types, constants, warps, architecture):
    """No spills (no stack), shared memory within an SM's."""
    names = kernel.arg_names
    typed = dict(zip(names[: len(types)], types, strict=True))
    values = dict(zip(names[len(types) :], constants, strict=True))
    even = {"h", "n", "d", "count", *(name for name in names if name.endswith("stride"))}
    options = {"num_warps": warps, "num_stages": 2, "enable_fp_fusion": True}
    built = compiled(kernel, architecture, typed, values, even, **options)
    assert built.metadata.shared <= SHARED_LIMIT
    usage = resource_usage(built)
    assert re.findall(r"STACK:(\d+)", usage) == ["0"], usage


def compile_checks(architecture):
    for name, *kernel in compiled_kernels():
        yield name, lambda kernel=kernel: check_compiles(*kernel, architecture)


@pytest.fixture(scope="module")
def outcomes():
    return run_scripts(__file__)


@pytest.mark.parametrize("case", INTERPRETED)
def test_interpreted_kernels_agree_with_the_reference(outcomes, case):
    assert outcomes["interpret"][case] is None, outcomes["interpret"][case]


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("case", COMPILED)
def test_kernels_compile_without_spills(outcomes, case, architecture):
    found = outcomes[str(architecture)]
    assert sorted(found) == sorted(COMPILED)
    assert found[case] is None, found[case]


on_device = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("m", [1, 7, 64, 1000, 4096])
def test_kernels_agree_on_a_device(m):
    check_hyper_connections("cuda", m, 5120, torch.bfloat16)
    check_rows("cuda", m, 5120, torch.bfloat16)
    for d in (128, 512):
        check_records("cuda", m, d, torch.bfloat16)


@pytest.mark.gpu
@on_device
@pytest.mark.parametrize("m", [8, 64, 600])
def test_sampling_agrees_on_a_device(m):
    check_sampling("cuda", m, 129_280)


if __name__ == "__main__":
    task = sys.argv[1]
    if task == "interpret":
        round_as_torch_does()
    report(interpreted_checks() if task == "interpret" else compile_checks(int(task)))
