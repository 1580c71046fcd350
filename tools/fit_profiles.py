"""Fit the cost profiles in `deepinfer/cost/profiles` to measured kernels.

    python tools/fit_profiles.py KERNELS_DIR [--write]

KERNELS_DIR holds a folder per accelerator with files `NAME.FRAMEWORK-VERSION.csv.gz`: timings of the database
that aiconfigurator 0.12.0 carries. The model fitted is `CostModel` itself. Of a file's rows, sorted by time,
every second one is fitted; the others give the errors in the table and in `source`.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.cost import model
from deepinfer.cost.model import CostModel, CostProfile, OperatorParameters
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.hardware.spec import Accelerator, load_hardware

Array = NDArray[Any]
Profile = dict[str, dict[str, Any]]
Formula = Callable[[Array, str], "Rows"]  # a file's records and its device, to the work of each record

FAMILIES = {"hopper": ("h100", "h200"), "blackwell": ("b200", "gb200-nvl72")}
ABSURD = 4.0  # rows off by more than this factor either way after a first fit are dropped, and counted
HUBER = 0.15  # log error from which residuals count linearly
BOUNDS = {  # lowest, starting and highest value
    "startup_s": (5e-7, 8e-6, 1e-4),
    "compute_efficiency": (0.02, 0.6, 0.78),  # DeepGEMM README: at best 1,550 of 1,979 TFLOPS on H800
    "memory_efficiency": (0.02, 0.8, 0.95),
    "rows_half": (0.01, 10.0, 2000.0),
    "sharpness": (1.0, 2.0, 4.0),
    "scale_up_efficiency": (0.02, 0.5, 1.0),
    "scale_out_efficiency": (0.02, 0.8, 1.0),
}


@dataclass(frozen=True)
class Rows:
    """Measured rows of one dataset on one device: the seconds and the work of each, arrays of one shape."""

    device: str
    seconds: Array
    flops: Array | float = 0.0
    bytes_read: Array | float = 0.0
    bytes_written: Array | float = 0.0
    rows: Array | float = 1.0
    scale_up: Array | float = 0.0
    scale_out: Array | float = 0.0

    def take(self, index: Array | slice) -> Rows:
        """The rows at `index`."""
        arrays = {n: np.broadcast_to(v, self.seconds.shape) for n, v in vars(self).items() if n != "device"}
        return Rows(self.device, **{name: value[index] for name, value in arrays.items()})


@dataclass(frozen=True)
class Entry:
    """A profile entry: free and fixed parameters, files by the start of their names, rows without a file."""

    key: str
    free: tuple[str, ...]
    sources: Mapping[str, Formula]
    what: str
    fixed: tuple[tuple[str, float], ...] = ()
    kind: str = "fitted"
    max_rows: int = 1500  # per file, so that none outvotes the others
    published: tuple[Rows, ...] = ()


@lru_cache(maxsize=4)
def read_table(path: Path) -> Array:
    """Records of a csv.gz file, with the columns as fields."""
    return np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")


@lru_cache
def device(name: str) -> Accelerator:
    """An accelerator of the catalog; H100 is an H200 with 3.35 TB/s of HBM (NVIDIA H100 SXM datasheet)."""
    if name != "h100":
        return load_hardware(name)
    h200 = load_hardware("h200")
    hbm = h200.hbm_bytes_per_s.model_copy(update={"value": 3.35e12})
    return h200.model_copy(update={"hbm_bytes_per_s": hbm})


def gemm(dtype: str, size: tuple[float, float], t: Array, name: str) -> Rows:
    """Dense products, n and k >= 512. Of the m around the edge of a tile only the tile itself is kept."""
    t = t[
        (t["gemm_dtype"] == dtype) & (t["n"] >= 512) & (t["k"] >= 512) & ((t["m"] == 1) | (t["m"] % 2 == 0))
    ]
    m, n, k = (t[column].astype(float) for column in "mnk")
    return Rows(name, t["latency"] * 1e-3, 2 * m * n * k, m * k * size[0] + n * k * size[1], m * n * 2, m)


WEIGHT_BYTES = {"fp8_block": 1.0, "w4a8_mxfp4_mxfp8": 0.53125}
MXFP4 = "vllm_mxfp4moe_flashinfer_trtllm_mxfp4_mxfp8_trtllmmxfp4expertsmodular"
MOE_KERNELS = ("deepepmoe", "deepgemm", "moe_torch_flow_cutlass", MXFP4)


def grouped_gemm(max_ep: float, floor_ms: float, t: Array, name: str) -> Rows:
    """Balanced routed experts of one rank; `num_tokens` counts the tokens of the whole expert group.

    Balanced rows touch min(E_local, expert rows) experts. Kernels not behind a dispatch walk all tokens of
    the group: read up to EP8. `wideep_context_moe` holds 0.3-0.5 ms of launches: read from 1 ms. On Hopper,
    CUTLASS is read up to 128 rows an expert, from where DeepGEMM is twice as fast.
    """
    known = np.isin(t["moe_dtype"], list(WEIGHT_BYTES)) & np.isin(t["kernel_source"], MOE_KERNELS)
    few = t["num_tokens"] * t["topk"] / t["num_experts"] <= 128
    known &= np.isin(t["distribution"], ("balanced", "uniform")) & (t["moe_tp_size"] == 1)
    known &= (t["moe_ep_size"] <= max_ep) & (t["latency"] > floor_ms)
    t = t[known & (few | (t["kernel_source"] != "moe_torch_flow_cutlass"))]
    weights, hidden, ep = 3.0 * t["hidden_size"] * t["inter_size"], t["hidden_size"], t["moe_ep_size"]
    rows = t["num_tokens"] * t["topk"] / ep
    touched = np.minimum(t["num_experts"] / ep, np.maximum(rows, 1.0))
    read = touched * weights * np.array([WEIGHT_BYTES[d] for d in t["moe_dtype"]]) + rows * hidden
    return Rows(name, t["latency"] * 1e-3, 2 * rows * weights, read, rows * hidden * 2, rows / touched)


def attention_decode(t: Array, name: str) -> Rows:
    """Absorbed MLA, one row per sequence; 16K tokens of context in a batch or more."""
    served = t["batch_size"] * (t["step"] + 1) >= 16384
    t = t[served & (t["kv_cache_dtype"] == "bfloat16") & (t["num_heads"] >= 64)]
    heads, pairs = t["num_heads"], t["batch_size"] * (t["step"] + 1.0)
    read, written = pairs * 1152 + t["batch_size"] * heads * 1152, t["batch_size"] * heads * 1024
    return Rows(name, t["latency"] * 1e-3, 2 * heads * (576 + 512) * pairs, read, written, heads)


def attention_prefill(t: Array, name: str) -> Rows:
    """MHA form of MLA, causal: heads of 192 (q, k) and 128 (v, out), BF16, each read or written once."""
    t = t[(t["kv_cache_dtype"] == "bfloat16") & (t["num_heads"] >= 32) & (t["isl"] >= 64)]
    heads, n, step = 1.0 * t["num_heads"] * t["batch_size"], 1.0 * t["isl"], t["step"]
    flops, read = 2 * heads * 320 * (n * (n + 1) / 2 + n * step), heads * 2 * (n * 192 + (n + step) * 320)
    return Rows(name, t["latency"] * 1e-3, flops, read, n * heads * 256, n)


def sparse_attention(prefill: bool, t: Array, name: str) -> Rows:
    """V4's kernel in ratio-128 layers: 128 window entries and one per 128 tokens before, 584 B each.

    Only 256 to 1,200 entries: the kernel pads shorter lists, and the models here select 640. In prefill
    neighbouring rows select much the same entries: 1/8 of the gathered bytes are assumed to come from HBM.
    """
    wanted = (t["isl"] >= 128) & (t["batch_size"] * t["isl"] >= 512) if prefill else t["isl"] == 1
    t = t[wanted & (t["step"] >= 16384) & (t["step"] <= 131072)]
    rows, heads = 1.0 * t["batch_size"] * t["isl"], t["num_heads"]
    entries = rows * (128 + (t["step"] + t["isl"] / 2) / 128)
    read = entries * 584 / (8 if prefill else 1)
    return Rows(name, t["latency"] * 1e-3, 4 * heads * 512 * entries, read, rows * heads * 1024, heads)


def index_score(t: Array, name: str) -> Rows:
    """Index logits of V4 (one key per 4 tokens, 64 heads of 128, FP8 keys of 132 B), FP32 out."""
    rows, keys = 1.0 * t["batch_size"] * t["isl"], t["batch_size"] * (t["step"] + t["isl"]) / 4
    scored = rows * (t["step"] + t["isl"] / 2) / 4
    return Rows(name, t["latency"] * 1e-3, 2 * 64 * 128 * scored, keys * 132 + rows * 8448, scored * 4, 64.0)


def elementwise(t: Array, name: str) -> Rows:
    """mHC's write-back of a sub-layer (a timing holds two): reads 4 BF16 streams and the output, writes 4."""
    t = t[t["op_name"] == "post"]
    width = t["num_tokens"] * t["hidden_size"] * 2.0
    return Rows(name, t["latency"] * 1e-3 / t["num_sites"], 0.0, 5 * width, 4 * width)


def sent_bytes(size: Any, ep: Any, num_experts: Any, topk: Any) -> Array:
    """Bytes a rank sends: `size` once per distinct other rank of each token's top-k, E/ep experts a rank."""
    missed: Any = 1.0
    for i in range(8):
        missed = missed * np.where(i < topk, (num_experts - num_experts / ep - i) / (num_experts - i), 1.0)
    return np.asarray(size * (ep - 1) * (1 - missed))


def deepep(phase: str, columns: tuple[str, ...], t: Array, name: str) -> Rows:
    """DeepEP on 8 GPUs, low-latency or normal (up to 24 SMs): FP8 out, BF16 back."""
    t = t[(t["num_token"] <= 32768) & (name != "gb200-nvl72")]
    size = t["num_token"] * t["hidden_size"] * (33 / 32 if phase == "dispatch" else 2.0)
    seconds = np.sum([t[phase + column] for column in columns], axis=0) * 1e-6
    return Rows(name, seconds, scale_up=sent_bytes(size, 8.0, t["num_experts"], t["num_topk"]))


def one_sided(phase: str, t: Array, name: str) -> Rows:
    """TensorRT-LLM's one-sided NVLink kernels over 2 to 64 GPUs; dispatch in NVFP4, 0.5625 B a value."""
    t = t[(t["kernel_source"] == "NVLinkOneSided") & (t["op_name"] == f"alltoall_{phase}")]
    size = t["num_tokens"] * t["hidden_size"] * (0.5625 if phase == "dispatch" else 2.0)
    sent = sent_bytes(size, t["moe_ep_size"], t["num_experts"], t["topk"])
    return Rows(name, t["latency"] * 1e-3, scale_up=sent)


def rdma(phase: str) -> Rows:
    """DeepEP V1 README, low-latency on H800: 128 tokens of 7168, top-8 of 256, EP16 to EP256. Weight 20."""
    us = {"dispatch": (118, 155, 173, 192, 194), "combine": (195, 273, 314, 369, 360)}[phase]
    ep = np.tile([16.0, 32.0, 64.0, 128.0, 256.0], 20)
    sent = sent_bytes(128 * 7168 * (33 / 32 if phase == "dispatch" else 2.0), ep, 256.0, 8.0)
    up, out = sent * 7 / (ep - 1), sent * (ep - 8) / (ep - 1)
    return Rows("h800", np.tile(us, 20) * 1e-6, scale_up=up, scale_out=out)


def collective(op: str, passes: int, t: Array, name: str) -> Rows:
    """NCCL, or the engines' own all-reduce inside a graph, over 4 and 8 GPUs.

    `message_size` counts 2-byte elements of the whole result. The message of an all-gather is what one rank
    receives from the others, (n-1)/n of the result; an all-reduce moves as much twice.
    """
    kept = (t["num_gpus"] >= 4) & ~np.char.endswith(t["kernel_source"], "eager")
    if "op_name" in (t.dtype.names or ()):
        kept &= (t["op_name"] == op) & (t["nccl_dtype"] == "half")
    t = t[kept]
    return Rows(name, t["latency"] * 1e-3, scale_up=passes * 2 * t["message_size"] * (1 - 1 / t["num_gpus"]))


def fastest(parts: list[Rows]) -> Rows:
    """The best time of each number of bytes sent, as an engine picks the kernel by size."""
    sent, seconds = np.concatenate([p.scale_up for p in parts]), np.concatenate([p.seconds for p in parts])
    sizes, index = np.unique(sent, return_inverse=True)
    best = np.full(sizes.shape, np.inf)
    np.minimum.at(best, index, seconds)
    return Rows(parts[0].device, best, scale_up=sizes)


def predict(parts: list[Rows], key: str, values: dict[str, float]) -> Array:
    """Seconds of the cost model for all rows, concatenated."""
    name, _, precision = key.partition(".")
    any_of: Any = precision or "bf16"  # without one there are no FLOPs
    parameters = OperatorParameters.model_validate({**values, "kind": "fitted", "source": "being fitted"})
    profile = CostProfile(family="fit", description="", operators={name: parameters})
    operator = Operator(name, OpKind(name), (), (), lambda _: Work())
    seconds = []
    for p in parts:
        message = Message("all_to_all", p.scale_up, p.scale_out, 1)
        work = Work(p.flops, any_of, p.bytes_read, p.bytes_written, p.rows, message)
        cost = CostModel(device(p.device), profile).cost(operator, work)
        seconds.append(np.broadcast_to(cost.seconds, p.seconds.shape))
    return np.concatenate(seconds)


def minimise(residuals: Callable[[Array], Array], x: Array, steps: int = 80) -> Array:
    """Levenberg-Marquardt with Huber's weights on residuals beyond `HUBER`."""

    def loss(r: Array) -> float:
        size = np.abs(r)
        return float(np.sum(np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))))

    damping, r = 1e-2, residuals(x)
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + 1e-4 * e) - r) / 1e-4 for e in np.eye(x.size)], axis=1)
        weight = HUBER / np.maximum(np.abs(r), HUBER)
        normal = jacobian.T @ (weight[:, None] * jacobian)
        damped = normal + damping * np.diag(np.diag(normal) + 1e-6)
        trial = np.clip(x - np.linalg.solve(damped, jacobian.T @ (weight * r)), -8.0, 8.0)
        moved = residuals(trial)
        if loss(moved) < loss(r):
            x, r, damping = trial, moved, max(damping / 3, 1e-6)
        else:
            damping *= 4
    return x


def fit_rows(entry: Entry, parts: list[Rows]) -> dict[str, float]:
    """Parameters, 3 digits, that fit the logarithms of the times, each moving between its `BOUNDS`."""
    measured = np.log(np.concatenate([p.seconds for p in parts]))
    low, start, high = np.array([BOUNDS[name] for name in entry.free]).T

    def values(x: Array) -> dict[str, float]:
        free = low * (high / low) ** (1 / (1 + np.exp(-x)))
        return {**dict(zip(entry.free, free.tolist(), strict=True)), **dict(entry.fixed)}

    share = np.log(start / low) / np.log(high / low)
    x = np.log(share / (1 - share))
    x = minimise(lambda x: np.log(predict(parts, entry.key, values(x))) - measured, x)
    return {name: float(f"{value:.3g}") for name, value in values(x).items()}


def fit_entry(entry: Entry, parts: list[Rows]) -> tuple[dict[str, float], Array, int, int]:
    """Parameters, signed relative errors of the held-out rows, rows fitted, rows dropped as absurd."""
    parts = [p.take(np.argsort(p.seconds)[:: 1 + p.seconds.size // entry.max_rows]) for p in parts]
    first = fit_rows(entry, [p.take(slice(0, None, 2)) for p in parts] + list(entry.published))
    halves = []
    for half in (0, 1):
        cut = [p.take(slice(half, None, 2)) for p in parts]
        off = [np.abs(np.log(predict([p], entry.key, first) / p.seconds)) for p in cut]
        halves.append([p.take(o < np.log(ABSURD)) for p, o in zip(cut, off, strict=True)])
    fitted = fit_rows(entry, halves[0] + list(entry.published))
    errors = predict(halves[1], entry.key, fitted) / np.concatenate([p.seconds for p in halves[1]]) - 1
    num_fitted = sum(p.seconds.size for p in halves[0])
    return fitted, errors, num_fitted, sum(p.seconds.size for p in parts) - num_fitted - errors.size


ROOFLINE = ("startup_s", "compute_efficiency", "memory_efficiency", "sharpness")
ROWS, COMPUTE, MEMORY = (*ROOFLINE, "rows_half"), ROOFLINE[:2], ("startup_s", "memory_efficiency")
LINK = ("startup_s", "scale_up_efficiency", "scale_out_efficiency")
HBM = ("memory_efficiency", 0.9)  # FlashMLA README: 3,000 of 3,350 GB/s on H800
# FlashMLA README, FP8 sparse decode of 128 heads and top-2048: 410 TFLOPS on H800, 350 on B200.
SPARSE = {"hopper": ("compute_efficiency", 0.415), "blackwell": ("compute_efficiency", 0.156)}
SHORT = "256-1,200 entries a row; 0.9 of HBM from FlashMLA's README"
START = f"start-up only, {SHORT}, compute rate from its sparse decode of 128 heads and top-2048"
NEAR, CONTEXT = partial(grouped_gemm, 8, 0), "wideep_context_moe.sglang-0.5.10"
MOE = {"wideep_generation_moe.": partial(grouped_gemm, 256, 0), CONTEXT: partial(grouped_gemm, 8, 1)}
MOE |= {"moe.trtllm-1.3.0rc20": NEAR, "moe.vllm-0.24.0": NEAR}


def exchange(phase: str, hopper: bool) -> Entry:
    """Dispatch or combine: the fastest kernel of each size."""
    files: dict[str, Formula] = {"wideep_deepep_ll.": partial(deepep, phase, ("_avg_t_us",))}
    files["wideep_deepep_normal."] = partial(deepep, phase, ("_transmit_us", "_notify_us"))
    files["trtllm_alltoall."] = partial(one_sided, phase)
    what = "bytes once per distinct rank, fastest kernel of each size, up to 24 SMs"
    what += "; scale-out from five times of the DeepEP V1 README, EP16-EP256 on H800" if hopper else ""
    return Entry(phase, LINK if hopper else LINK[:2], files, what, published=(rdma(phase),) if hopper else ())


def entries(family: str) -> list[Entry]:
    """What is fitted. SGLang's prefill on Hopper is left out: its times are those of the absorbed form."""
    hopper, fixed = family == "hopper", (SPARSE[family], HBM)
    fp8, bf16 = partial(gemm, "fp8_block", (1.0, 1 + 1 / 1024)), partial(gemm, "bfloat16", (2.0, 2.0))
    few, many = partial(sparse_attention, False), partial(sparse_attention, True)
    gather, reduce = partial(collective, "all_gather", 1), partial(collective, "all_reduce", 2)
    prefill = {"context_mla.trtllm" if hopper else "context_mla.": attention_prefill}
    scores, sparse, nccl = "dsv4_paged_mqa_logits_module.sglang", "dsv4_hca_attn_module.", "nccl.nccl"
    decode, keys = "generation_mla.trtllm", "FP8 keys, which fit L2 here; 0.9 of HBM from FlashMLA's README"
    return [
        Entry("gemm.fp8", ROOFLINE, {"gemm.": fp8}, "fp8_block, DeepGEMM, n and k >= 512"),
        Entry("gemm.bf16", ROOFLINE, {"gemm.": bf16}, "bfloat16, n and k >= 512"),
        Entry("grouped_gemm.fp8", ROWS, MOE, "balanced, FP8 and MXFP4 weights", max_rows=240),
        Entry("attention_decode.bf16", ROOFLINE, {decode: attention_decode}, ">= 64 heads, >= 16K tokens"),
        Entry("attention_prefill.bf16", ROWS, prefill, "BF16 cache, >= 32 heads, >= 64 tokens"),
        Entry("sparse_attention_decode.bf16", COMPUTE[:1], {sparse: few}, START, fixed, "published"),
        Entry("sparse_attention_prefill.bf16", COMPUTE, {sparse: many}, f">= 512 rows, {SHORT}", (HBM,)),
        Entry("index_score.fp8", COMPUTE, {scores: index_score}, keys, (HBM, ("sharpness", 1.0))),
        Entry("elementwise", MEMORY, {"mhc_module.": elementwise}, "post, per sub-layer"),
        exchange("dispatch", hopper),
        exchange("combine", hopper),
        Entry("all_gather", LINK[:2], {nccl: gather}, "4 and 8 GPUs"),
        Entry("all_reduce", LINK[:2], {nccl: reduce, "custom_": reduce}, "4 and 8 GPUs, fastest"),
    ]


# Entries without data, from the nearest one with data, and why.
BORROWED = {
    "sample": ("topk", "which also makes selecting passes over rows of FP32 numbers"),
    "gather": ("elementwise", "as copies of rows; short scattered rows will do worse"),
    "gemm.tf32": ("gemm.bf16", "against the TF32 peak"),
    "grouped_gemm.bf16": ("grouped_gemm.fp8", "against the BF16 peak"),
    "index_score.fp4": ("index_score.fp8", "at the rate of FP8 keys"),
}
# The line through two times of a top-k over FP32 scores: 2.4 MB in 14.3 us, 116 MB in 112 us, at 7.7 TB/s.
TOP_K_SOURCE = "TensorRT-LLM's V3.2 and V4 blogs, B200: 64 x 9,295 in 14.3 us, 148 x 196,608 in 112 us"
TOP_K = {"startup_s": 1.23e-5, "memory_efficiency": 0.152, "kind": "published", "source": TOP_K_SOURCE}


def add_unmeasured(family: str, profile: Profile, hopper: Profile) -> None:
    """Entries that no file measures: top-k from published times, the others from `BORROWED`."""
    profile["topk"] = TOP_K
    for key, (near, why) in BORROWED.items():
        source = f"no data of its own: numbers of {near}, {why}"
        profile[key] = {**profile[near], "kind": "published", "source": source}
    if family == "blackwell":
        score = profile["index_score.fp4"]  # FP8's rate is half as much of the FP4 peak
        score["compute_efficiency"] = float(f"{score['compute_efficiency'] / 2:.3g}")
        for key in ("dispatch", "combine"):
            profile[key] = {"scale_out_efficiency": hopper[key]["scale_out_efficiency"], **profile[key]}
            profile[key]["source"] += "; scale-out efficiency is Hopper's"


def collect_rows(root: Path, family: str, entry: Entry) -> tuple[list[Rows], list[str]]:
    """The rows of an entry on all devices of a family, and the names of the files that hold them."""
    parts: list[Rows] = []
    names: list[str] = []
    for name in FAMILIES[family]:
        found = []
        for stem, formula in entry.sources.items():
            for path in sorted((root / name).glob(f"{stem}*.csv.gz")):
                rows = formula(read_table(path), name)
                if rows.seconds.size:
                    found.append(rows.take(rows.seconds > 0))
                    names.append(f"{name}/{path.name.removesuffix('.csv.gz')}")
        parts += [fastest(found)] if "scale_up_efficiency" in entry.free else found
    return parts, names


def fit_family(root: Path, family: str) -> Profile:
    """All fitted entries of a family, with their sources; prints one line of the table for each."""
    profile: Profile = {}
    for entry in entries(family):
        parts, names = collect_rows(root, family, entry)
        fitted, errors, num_fitted, num_absurd = fit_entry(entry, parts)
        median, p90 = 100 * np.quantile(np.abs(errors), (0.5, 0.9))
        source = (
            f"aiconfigurator 0.12.0: {', '.join(names)} ({entry.what}); {num_fitted} rows, {num_absurd} off "
        )
        source += f"by over {ABSURD:g}x dropped; median |error| {median:.1f} % on {errors.size} held-out rows"
        profile[entry.key] = {**fitted, "kind": entry.kind, "source": source}
        numbers = " ".join(f"{name}={value:g}" for name, value in fitted.items())
        print(f"{family:10}{entry.key:30}{num_fitted:6}{errors.size:6}{num_absurd:5}", end="")
        print(f"{median:7.1f}{p90:7.1f}{100 * np.median(errors):7.1f}  {numbers}")
    return profile


def to_toml(family: str, profile: Profile) -> str:
    """The profile file; numbers and ASCII strings are written alike in JSON and TOML."""
    devices = "H800, H100 and H200" if family == "hopper" else "B200 and GB200 NVL72"
    lines = [f'family = "{family}"', f'description = "{devices}; written by tools/fit_profiles.py"']
    for key in sorted(profile):
        fields = [f"{name} = {json.dumps(value)}" for name, value in profile[key].items()]
        lines += ["", f'[operators."{key}"]', *fields]
    return "\n".join(lines) + "\n"


def main() -> None:
    """Fit both families, print the errors, and write the profiles with --write."""
    parser = argparse.ArgumentParser(description="Fit the cost profiles to measured kernels.")
    parser.add_argument("kernels", type=Path, help="folder of measured kernels, one folder per accelerator")
    parser.add_argument("--write", action="store_true", help="rewrite deepinfer/cost/profiles/*.toml")
    arguments = parser.parse_args()
    print(f"{'family':10}{'entry':30}{'fit':>6}{'held':>6}{'drop':>5}{'med %':>7}{'p90 %':>7}{'sign %':>7}")
    profiles: dict[str, Profile] = {}
    for family in FAMILIES:
        profiles[family] = fit_family(arguments.kernels, family)
        add_unmeasured(family, profiles[family], profiles["hopper"])
        CostProfile.model_validate({"family": family, "description": "check", "operators": profiles[family]})
        if arguments.write:
            path = Path(model.__file__).parent / "profiles" / f"{family}.toml"
            path.write_text(to_toml(family, profiles[family]), encoding="utf-8")


if __name__ == "__main__":
    main()
