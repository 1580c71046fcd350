"""Fit the cost profiles in `deepinfer/cost/profiles` to measured kernels.

    python tools/fit_profiles.py KERNELS_DIR [--write]

KERNELS_DIR holds a folder per accelerator with files `NAME.FRAMEWORK-VERSION.csv.gz`: timings of the database
that aiconfigurator 0.12.0 carries. The model being fitted is `CostModel` itself. Rows of each dataset are
shuffled with a fixed seed; every second one is fitted, the others give the errors in the table and in `source`.
"""

from __future__ import annotations

import argparse
import csv
import gzip
import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.cost import model
from deepinfer.cost.model import CostModel, CostProfile, OperatorParameters
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.hardware.spec import Accelerator, load_hardware

Array = NDArray[Any]
Table = dict[str, Array]
Profile = dict[str, dict[str, Any]]
Formula = Callable[[Table, str], "Rows"]  # a file's columns and its device, to the work of each row

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
    """A profile entry: free and fixed parameters, files by the start of their names, rows that no file has.

    Of messages with equal bytes the fastest is kept, as an engine picks the kernel by size. `max_rows` keeps a
    large file from outvoting the others.
    """

    key: str
    free: tuple[str, ...]
    sources: dict[str, Formula]
    what: str
    fixed: tuple[tuple[str, float], ...] = ()
    kind: str = "fitted"
    max_rows: int = 1500
    published: tuple[Rows, ...] = ()


@lru_cache(maxsize=4)
def read_table(path: Path) -> Table:
    """Columns of a csv.gz file; numeric ones as floats."""
    with gzip.open(path, "rt", newline="") as lines:
        header, *rows = csv.reader(lines)
    table: Table = {}
    for name, column in zip(header, zip(*rows, strict=True), strict=True):
        try:
            table[name] = np.array(column).astype(float)
        except ValueError:
            table[name] = np.array(column)
    return table


def where(table: Table, condition: Array) -> Table:
    """The rows of a table that satisfy a condition."""
    return {name: column[condition] for name, column in table.items()}


@lru_cache
def device(name: str) -> Accelerator:
    """An accelerator of the catalog; H100 is an H200 with 3.35 TB/s of HBM (NVIDIA H100 SXM datasheet)."""
    if name != "h100":
        return load_hardware(name)
    h200 = load_hardware("h200")
    hbm = h200.hbm_bytes_per_s.model_copy(update={"value": 3.35e12})
    return h200.model_copy(update={"hbm_bytes_per_s": hbm})


def gemm(dtype: str, weight: float, activation: float) -> Formula:
    """Dense products, n and k >= 512. Of the m around the edge of a tile only the tile itself is kept."""

    def formula(table: Table, name: str) -> Rows:
        large = (table["n"] >= 512) & (table["k"] >= 512) & (table["n"] * table["k"] <= 2**30)
        tile = (table["m"] == 1) | (table["m"] % 2 == 0)
        t = where(table, (table["gemm_dtype"] == dtype) & large & tile)
        m, n, k = t["m"], t["n"], t["k"]
        read = m * k * activation + n * k * weight
        return Rows(name, t["latency"] * 1e-3, 2 * m * n * k, read, m * n * 2, m)

    return formula


WEIGHT_BYTES = {"fp8_block": 1.0, "w4a8_mxfp4_mxfp8": 0.53125}
MOE_KERNELS = (
    *("deepepmoe", "deepgemm", "moe_torch_flow_cutlass"),
    "vllm_mxfp4moe_flashinfer_trtllm_mxfp4_mxfp8_trtllmmxfp4expertsmodular",
)


def grouped_gemm(max_ep: float, floor_ms: float) -> Formula:
    """Balanced routed experts of one rank; `num_tokens` counts the tokens of the whole expert group.

    Balanced rows touch as many experts as they can, min(E_local, expert rows). `moe` and `wideep_context_moe` are
    read up to EP8: beyond, their kernels walk all tokens of the group, as none does behind a dispatch; the
    latter from 1 ms, as 0.3-0.5 ms of it are launches. CUTLASS on Hopper is read up to 128 rows an expert, from
    where DeepGEMM is twice as fast.
    """

    def formula(table: Table, name: str) -> Rows:
        even = np.isin(table["distribution"], ("balanced", "uniform")) & (table["moe_tp_size"] == 1)
        known = np.isin(table["moe_dtype"], list(WEIGHT_BYTES)) & np.isin(table["kernel_source"], MOE_KERNELS)
        few = table["num_tokens"] * table["topk"] / table["num_experts"] <= 128
        fit = (table["moe_ep_size"] <= max_ep) & (table["latency"] > floor_ms)
        t = where(table, even & known & fit & (few | (table["kernel_source"] != "moe_torch_flow_cutlass")))
        weights, hidden, ep = 3 * t["hidden_size"] * t["inter_size"], t["hidden_size"], t["moe_ep_size"]
        rows = t["num_tokens"] * t["topk"] / ep
        touched = np.minimum(t["num_experts"] / ep, np.maximum(rows, 1.0))
        read = touched * weights * np.array([WEIGHT_BYTES[d] for d in t["moe_dtype"]]) + rows * hidden
        return Rows(name, t["latency"] * 1e-3, 2 * rows * weights, read, rows * hidden * 2, rows / touched)

    return formula


def attention_decode(table: Table, name: str) -> Rows:
    """Absorbed MLA over a BF16 cache: one row per sequence, 576 + 512 multiply-adds per head and pair.

    Batches with 16K tokens of context or more, as served; smaller ones meet a floor 5-10 us lower.
    """
    served = table["batch_size"] * (table["step"] + 1) >= 16384
    t = where(table, served & (table["kv_cache_dtype"] == "bfloat16") & (table["num_heads"] >= 64))
    heads, pairs = t["num_heads"], t["batch_size"] * (t["step"] + t["isl"])
    read, written = pairs * 1152 + t["batch_size"] * heads * 1152, t["batch_size"] * heads * 1024
    return Rows(name, t["latency"] * 1e-3, 2 * heads * 1088 * pairs, read, written, heads)


def attention_prefill(table: Table, name: str) -> Rows:
    """MHA form of MLA, causal: heads of 192 (q, k) and 128 (v, out), BF16, each read or written once."""
    t = where(table, (table["kv_cache_dtype"] == "bfloat16") & (table["num_heads"] >= 32) & (table["isl"] >= 64))
    heads, n, step = t["num_heads"], t["isl"], t["step"]
    flops = 2 * heads * 320 * t["batch_size"] * (n * (n + 1) / 2 + n * step)
    read = t["batch_size"] * heads * 2 * (n * 192 + (n + step) * 320)
    return Rows(name, t["latency"] * 1e-3, flops, read, t["batch_size"] * n * heads * 256, n)


def sparse_attention(prefill: bool) -> Formula:
    """V4's kernel in ratio-128 layers: 128 window entries and one per 128 tokens before, 584 B each.

    Only rows of 256 to 1,200 entries: the kernel pads shorter lists, and the models here select 640. In prefill
    neighbouring rows select much the same entries: 1/8 of the gathered bytes are assumed to come from HBM.
    """

    def formula(table: Table, name: str) -> Rows:
        many = (table["isl"] >= 128) & (table["batch_size"] * table["isl"] >= 512)
        usual = (table["step"] >= 16384) & (table["step"] <= 131072)
        t = where(table, usual & (many if prefill else table["isl"] == 1))
        rows, heads = t["batch_size"] * t["isl"], t["num_heads"]
        entries = rows * (128 + (t["step"] + t["isl"] / 2) / 128)
        read = entries * 584 / (8 if prefill else 1)
        return Rows(name, t["latency"] * 1e-3, 4 * heads * 512 * entries, read, rows * heads * 1024, heads)

    return formula


def index_score(t: Table, name: str) -> Rows:
    """Index logits of V4 (one key per 4 tokens, 64 heads of 128, FP8 keys of 132 B), FP32 out."""
    rows, keys = t["batch_size"] * t["isl"], t["batch_size"] * (t["step"] + t["isl"]) / 4
    scored = rows * (t["step"] + t["isl"] / 2) / 4
    read = keys * 132 + rows * 64 * 132
    return Rows(name, t["latency"] * 1e-3, 2 * 64 * 128 * scored, read, scored * 4, 64.0)


def elementwise(table: Table, name: str) -> Rows:
    """mHC's write-back of a sub-layer (a timing holds two): reads 4 BF16 streams and the output, writes 4."""
    t = where(table, table["op_name"] == "post")
    width = t["num_tokens"] * t["hidden_size"] * 2
    return Rows(name, t["latency"] * 1e-3 / t["num_sites"], 0.0, 5 * width, 4 * width)


def copies(ep: Array | float, num_experts: Array | float, topk: Array | float) -> Array:
    """Distinct ranks, other than the sender, among the top-k experts of a token: ep ranks, E/ep experts each."""
    missed: Array | float = 1.0
    for i in range(int(np.max(topk))):
        miss = (num_experts - num_experts / ep - i) / (num_experts - i)
        missed = missed * np.where(i < topk, miss, 1.0)
    return np.asarray((ep - 1) * (1 - missed))


def deepep(phase: str, kernel: str) -> Formula:
    """DeepEP on 8 GPUs. Bytes are counted once per distinct other rank: FP8 with scales, BF16 in combine."""

    def formula(table: Table, name: str) -> Rows:
        t = where(table, (table["num_token"] <= 32768) & (name != "gb200-nvl72"))
        slow = {"normal": (f"{phase}_transmit_us", f"{phase}_notify_us"), "ll": (f"{phase}_avg_t_us",)}[kernel]
        size = t["num_token"] * t["hidden_size"] * (33 / 32 if phase == "dispatch" else 2.0)
        sent = size * copies(8.0, t["num_experts"], t["num_topk"])
        return Rows(name, np.sum([t[column] for column in slow], axis=0) * 1e-6, scale_up=sent)

    return formula


def one_sided(phase: str) -> Formula:
    """TensorRT-LLM's one-sided NVLink kernels over 4 to 64 GPUs; dispatch in NVFP4, 0.5625 B a value."""

    def formula(table: Table, name: str) -> Rows:
        t = where(table, (table["kernel_source"] == "NVLinkOneSided") & (table["op_name"] == f"alltoall_{phase}"))
        size = t["num_tokens"] * t["hidden_size"] * (0.5625 if phase == "dispatch" else 2.0)
        sent = size * copies(t["moe_ep_size"], t["num_experts"], t["topk"])
        return Rows(name, t["latency"] * 1e-3, scale_up=sent)

    return formula


def rdma(phase: str) -> Rows:
    """DeepEP V1 README, low-latency kernels on H800: 128 tokens of 7168, top-8 of 256, EP16 to EP256. Weight 20."""
    us = {"dispatch": (118, 155, 173, 192, 194), "combine": (195, 273, 314, 369, 360)}[phase]
    ep = np.tile([16.0, 32.0, 64.0, 128.0, 256.0], 20)
    sent = 128 * 7168 * (33 / 32 if phase == "dispatch" else 2.0) * copies(ep, 256.0, 8.0)
    up = sent * 7 / (ep - 1)
    return Rows("h800", np.tile(us, 20) * 1e-6, scale_up=up, scale_out=sent - up)


def collective(op: str, passes: int) -> Formula:
    """NCCL, or the engines' own all-reduce inside a graph, over 4 and 8 GPUs.

    `message_size` counts 2-byte elements of the whole result. The message of an all-gather is what one rank
    receives from the others, (n-1)/n of the result; an all-reduce moves as much twice.
    """

    def formula(table: Table, name: str) -> Rows:
        nccl = (table["op_name"] == op) & (table["nccl_dtype"] == "half") if "op_name" in table else True
        t = where(table, nccl & ~np.char.endswith(table["kernel_source"], "eager") & (table["num_gpus"] >= 4))
        sent = passes * 2 * t["message_size"] * (1 - 1 / t["num_gpus"])
        return Rows(name, t["latency"] * 1e-3, scale_up=sent)

    return formula


def fastest(parts: list[Rows]) -> Rows:
    """The best time of each number of bytes sent over scale-up links."""
    sent, seconds = np.concatenate([p.scale_up for p in parts]), np.concatenate([p.seconds for p in parts])
    sizes, index = np.unique(sent, return_inverse=True)
    best = np.full(sizes.shape, np.inf)
    np.minimum.at(best, index, seconds)
    return Rows(parts[0].device, best, scale_up=sizes)


def predict(parts: list[Rows], key: str, values: dict[str, float]) -> Array:
    """Seconds of the cost model for all rows, concatenated."""
    name, _, precision = key.partition(".")
    parameters = OperatorParameters.model_validate({**values, "kind": "fitted", "source": "being fitted"})
    profile = CostProfile(family="fit", description="", operators={name: parameters})
    operator = Operator(name, OpKind(name), (), (), lambda _: Work())
    seconds = []
    for p in parts:
        message = Message("all_to_all", p.scale_up, p.scale_out, 1)
        work = Work(p.flops, precision or "bf16", p.bytes_read, p.bytes_written, p.rows, message)  # type: ignore[arg-type]
        cost = CostModel(device(p.device), profile).cost(operator, work)
        seconds.append(np.broadcast_to(cost.seconds, p.seconds.shape))
    return np.concatenate(seconds)


def huber(residuals: Array) -> float:
    """Sum of Huber's loss."""
    size = np.abs(residuals)
    return float(np.sum(np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER))))


def minimise(residuals: Callable[[Array], Array], x: Array, steps: int = 80) -> Array:
    """Levenberg-Marquardt with Huber's weights on residuals beyond `HUBER`."""
    damping, r = 1e-2, residuals(x)
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + 1e-4 * e) - r) / 1e-4 for e in np.eye(x.size)], axis=1)
        weight = HUBER / np.maximum(np.abs(r), HUBER)
        normal = jacobian.T @ (weight[:, None] * jacobian)
        damped = normal + damping * np.diag(np.diag(normal) + 1e-6)
        trial = np.clip(x - np.linalg.solve(damped, jacobian.T @ (weight * r)), -8.0, 8.0)
        moved = residuals(trial)
        if huber(moved) < huber(r):
            x, r, damping = trial, moved, max(damping / 3, 1e-6)
        else:
            damping *= 4
    return x


def fit_rows(entry: Entry, parts: list[Rows]) -> dict[str, float]:
    """Parameters, 3 digits, that fit the logarithms of the times; each moves between its `BOUNDS` logarithmically."""
    measured = np.log(np.concatenate([p.seconds for p in parts]))
    low, start, high = np.array([BOUNDS[name] for name in entry.free]).T

    def values(x: Array) -> dict[str, float]:
        free = low * (high / low) ** (1 / (1 + np.exp(-x)))
        return {**dict(zip(entry.free, free.tolist(), strict=True)), **dict(entry.fixed)}

    share = np.log(start / low) / np.log(high / low)
    x = minimise(
        lambda x: np.log(predict(parts, entry.key, values(x))) - measured, np.log(share / (1 - share))
    )
    return {name: float(f"{value:.3g}") for name, value in values(x).items()}


def fit_entry(entry: Entry, parts: list[Rows]) -> tuple[dict[str, float], Array, int, int]:
    """Parameters, signed relative errors of the held-out rows, rows fitted, rows dropped as absurd."""
    parts = [p.take(np.random.default_rng(0).permutation(p.seconds.size)[: entry.max_rows]) for p in parts]
    first = fit_rows(entry, [p.take(slice(0, None, 2)) for p in parts])
    halves = []
    for half in (0, 1):
        cut = [p.take(slice(half, None, 2)) for p in parts]
        off = [np.abs(np.log(predict([p], entry.key, first) / p.seconds)) for p in cut]
        halves.append([p.take(o < np.log(ABSURD)) for p, o in zip(cut, off, strict=True)])
    fitted = fit_rows(entry, halves[0])
    errors = predict(halves[1], entry.key, fitted) / np.concatenate([p.seconds for p in halves[1]]) - 1
    num_fitted = sum(p.seconds.size for p in halves[0])
    return fitted, errors, num_fitted, sum(p.seconds.size for p in parts) - num_fitted - errors.size


ROOFLINE = ("startup_s", "compute_efficiency", "memory_efficiency", "sharpness")
COMPUTE, MEMORY, LINK = ROOFLINE[:2], ("startup_s", "memory_efficiency"), ("startup_s", "scale_up_efficiency")
HBM = ("memory_efficiency", 0.9)  # FlashMLA README: 3,000 of 3,350 GB/s on H800
# FlashMLA README, FP8 sparse decode of 128 heads and top-2048: 410 TFLOPS on H800, 350 on B200.
SPARSE = {"hopper": ("compute_efficiency", 0.415), "blackwell": ("compute_efficiency", 0.156)}


def entries(family: str) -> list[Entry]:
    """What is fitted for a family. SGLang's prefill rows on Hopper have the FLOPs of the absorbed form: left out."""
    hopper = family == "hopper"
    fp8, bf16 = {"gemm.": gemm("fp8_block", 1 + 1 / 1024, 1.0)}, {"gemm.": gemm("bfloat16", 2.0, 2.0)}
    moe = {"wideep_generation_moe.": grouped_gemm(256, 0), "wideep_context_moe.sglang-0.5.10": grouped_gemm(8, 1)}
    moe |= {"moe.trtllm-1.3.0rc20": grouped_gemm(8, 0), "moe.vllm-0.24.0": grouped_gemm(8, 0)}
    decode, index = {"generation_mla.trtllm": attention_decode}, {"dsv4_paged_mqa_logits_module.sglang": index_score}
    prefill = {"context_mla.trtllm" if hopper else "context_mla.": attention_prefill}
    few, many = ({"dsv4_hca_attn_module.": sparse_attention(prefill)} for prefill in (False, True))
    gather, reduce = collective("all_gather", 1), collective("all_reduce", 2)
    short = "256-1,200 entries a row; 0.9 of HBM from FlashMLA's README"
    start = f"start-up only, {short}, compute rate from its sparse decode of 128 heads and top-2048"
    keys = "FP8 keys; 0.9 of HBM from FlashMLA's README, as the keys timed here fit L2"
    exchanges = []
    for phase in ("dispatch", "combine"):
        files = {"wideep_deepep_ll.": deepep(phase, "ll"), "wideep_deepep_normal.": deepep(phase, "normal")}
        files["trtllm_alltoall."] = one_sided(phase)
        wire = "bytes once per distinct rank, fastest kernel of each size, up to 24 SMs"
        wire += "; scale-out from the DeepEP V1 README, EP16-EP256 on H800" if hopper else ""
        free, readme = ((*LINK, "scale_out_efficiency"), (rdma(phase),)) if hopper else (LINK, ())
        exchanges.append(Entry(phase, free, files, wire, published=readme))
    return [
        Entry("gemm.fp8", ROOFLINE, fp8, "fp8_block, DeepGEMM, n and k >= 512"),
        Entry("gemm.bf16", ROOFLINE, bf16, "bfloat16, n and k >= 512"),
        Entry("grouped_gemm.fp8", (*ROOFLINE, "rows_half"), moe, "balanced, FP8 and MXFP4", max_rows=240),
        Entry("attention_decode.bf16", ROOFLINE, decode, "BF16 cache, >= 64 heads, >= 16K tokens of context"),
        Entry("attention_prefill.bf16", (*ROOFLINE, "rows_half"), prefill, "BF16 cache, >= 32 heads"),
        Entry("sparse_attention_decode.bf16", COMPUTE[:1], few, start, (SPARSE[family], HBM), "published"),
        Entry("sparse_attention_prefill.bf16", COMPUTE, many, f">= 512 rows, {short}", (HBM,)),
        Entry("index_score.fp8", COMPUTE, index, keys, (HBM, ("sharpness", 1.0))),
        Entry("elementwise", MEMORY, {"mhc_module.": elementwise}, "post, per sub-layer"),
        *exchanges,
        Entry("all_gather", LINK, {"nccl.nccl": gather}, "4 and 8 GPUs"),
        Entry("all_reduce", LINK, {"nccl.nccl": reduce, "custom_allreduce.": reduce}, "4 and 8 GPUs, fastest"),
    ]


# TensorRT-LLM V3.2 and V4 blogs, B200: bytes of FP32 scores read by a top-k, and seconds.
TOP_K = ((64 * 9295 * 4, 14.3e-6), (148 * 196608 * 4, 112e-6))


def add_unmeasured(family: str, profile: Profile, hopper: Profile) -> None:
    """Entries that no file measures: top-k through two published times, others from the nearest entry."""

    def borrow(key: str, why: str, **changes: float) -> dict[str, Any]:
        return {**profile[key], **changes, "kind": "published", "source": f"no data of its own: {key}'s, {why}"}

    (few, fast), (many, slow) = TOP_K
    startup = fast - few * (slow - fast) / (many - few)
    share = (many - few) / (slow - fast) / device("b200").hbm_bytes_per_s.value
    why = "line through two times of TensorRT-LLM's V3.2 and V4 blogs on B200: 64 x 9,295 in 14.3 us, "
    why += "148 x 196,608 in 112 us" + ("; no Hopper data, same efficiency" if family == "hopper" else "")
    profile["topk"] = {"startup_s": float(f"{startup:.3g}"), "memory_efficiency": float(f"{share:.3g}")}
    profile["topk"] |= {"kind": "published", "source": why}
    profile["sample"] = borrow("topk", "which also makes selecting passes over rows of FP32 numbers")
    profile["gather"] = borrow("elementwise", "as copies of rows; short scattered rows will do worse")
    profile["gemm.tf32"] = borrow("gemm.bf16", "against the TF32 peak")
    profile["grouped_gemm.bf16"] = borrow("grouped_gemm.fp8", "against the BF16 peak")
    profile["index_score.fp4"] = borrow("index_score.fp8", "as Hopper multiplies FP4 keys at the FP8 rate")
    if family == "blackwell":
        halved = float(f"{profile['index_score.fp8']['compute_efficiency'] / 2:.3g}")
        same = "the same rate, half as much of the FP4 peak"
        profile["index_score.fp4"] = borrow("index_score.fp8", same, compute_efficiency=halved)
        for key in ("dispatch", "combine"):
            profile[key]["scale_out_efficiency"] = hopper[key]["scale_out_efficiency"]
            profile[key]["source"] += "; scale-out efficiency is Hopper's"


def collect_rows(root: Path, family: str, entry: Entry) -> tuple[list[Rows], list[str]]:
    """The rows of an entry on all devices of a family, and the names of the files that hold them."""
    parts, names = list(entry.published), []
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
            f"aiconfigurator 0.12.0: {', '.join(names)} ({entry.what}); {num_fitted} rows, {num_absurd} more dropped "
            f"(off by over {ABSURD:g}x); median absolute error {median:.1f} % on {errors.size} held-out rows"
        )
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
