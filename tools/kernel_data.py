"""Measured kernels as rows of seconds and work: what `fit_profiles.py` fits.

Each formula turns the records of one `NAME.FRAMEWORK-VERSION.csv.gz` file into the quantities of `Work` that the graph
builders give the same operator. Columns: README.md of the kernels folder.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from deepinfer.graph.shape import visible_entries

Array = NDArray[Any]
Formula = Callable[[Array, str], "Rows"]  # a file's records and its device, to the work of each record


@dataclass(frozen=True)
class Rows:
    """Measured rows of one dataset on one device: the seconds and the work of each, arrays of one shape."""

    device: str
    seconds: Array
    flops: Array | float = 0.0
    bytes_read: Array | float = 0.0
    bytes_written: Array | float = 0.0
    rows: Array | float = 1.0
    depth: Array | float = 0.0
    activations: Array | float = 0.0  # bytes
    peers: Array | float = 1.0
    scale_up: Array | float = 0.0
    scale_out: Array | float = 0.0

    def take(self, index: Array | slice) -> Rows:
        """The rows at `index`."""
        arrays = {n: np.broadcast_to(v, self.seconds.shape) for n, v in vars(self).items() if n != "device"}
        return Rows(self.device, **{name: value[index] for name, value in arrays.items()})


@lru_cache(maxsize=4)
def read_table(path: Path) -> Array:
    """Records of a csv.gz file, with the columns as fields."""
    return np.genfromtxt(path, delimiter=",", names=True, dtype=None, encoding="utf-8")


def gemm(dtype: str, size: tuple[float, float], t: Array, name: str) -> Rows:
    """Dense products, n and k >= 512. Of the m around the edge of a tile only the tile itself is kept."""
    t = t[(t["gemm_dtype"] == dtype) & (t["n"] >= 512) & (t["k"] >= 512) & ((t["m"] == 1) | (t["m"] % 2 == 0))]
    m, n, k = (t[column].astype(float) for column in "mnk")
    read = m * k * size[0] + n * k * size[1]
    return Rows(name, t["latency"] * 1e-3, 2 * m * n * k, read, m * n * 2, m, k, m * k * size[0])


WEIGHT_BYTES = {"fp8_block": 1.0, "w4a8_mxfp4_mxfp8": 0.53125, "nvfp4": 0.5625}
EXPERT_TILE = 128  # rows of a tile of DeepGEMM's grouped kernels
CUTLASS_ROWS = 32  # the most that are read
SHORT_PROMPT = 1024  # which longer ones are compared with
MANY_KEYS = 1e9  # of a row, beside which a short list's cost is nothing


def padded_rows(rows: Array) -> Array:
    """Rows that lose as much to half a tile as `rows`, equal in every expert, lose to the rest of their last tile.

    The graph's rows per expert are means of uneven numbers, which waste half a tile on average.
    """
    return EXPERT_TILE / 2 / np.maximum(np.ceil(rows / EXPERT_TILE) * EXPERT_TILE / rows - 1, 1e-6)


def grouped_gemm(dtypes: tuple[str, ...], max_ep: float, max_local: int, floor_ms: float, t: Array, name: str) -> Rows:
    """Balanced routed experts of one rank; `num_tokens` counts the tokens of the whole expert group.

    Gate and up products pass to the down product through other kernels, in BF16: the activations.

    Balanced rows touch min(E_local, expert rows) experts. Kernels not behind a dispatch walk all tokens of the group:
    read up to EP8. V3's routing picks groups first: where kernels route (all not behind a dispatch) its "balanced"
    rows land on some of the experts and ranks only, so these are left out. On Hopper, CUTLASS is read up to 32 rows an
    expert: from there it falls behind DeepGEMM, at 128 by a factor of two. `wideep_context_moe` holds 0.3-0.5 ms of
    launches: read from 1 ms.
    """
    local, ep = t["num_experts"] / t["moe_ep_size"], t["moe_ep_size"]
    known = np.isin(t["moe_dtype"], dtypes) & np.isin(t["distribution"], ("balanced", "uniform"))
    known &= (ep <= max_ep) & (t["latency"] > floor_ms) & (local <= max_local)
    known &= (t["num_experts"] != 256) | (t["hidden_size"] != 7168) | (t["kernel_source"] == "deepepmoe")
    few = t["num_tokens"] * t["topk"] / t["num_experts"] <= CUTLASS_ROWS
    slow = (t["kernel_source"] == "moe_torch_flow_cutlass") & (t["moe_dtype"] == "fp8_block")
    t = t[known & (few | ~slow)]
    hidden, width, ep = 1.0 * t["hidden_size"], t["inter_size"] / t["moe_tp_size"], t["moe_ep_size"]
    weights, rows = 3 * hidden * width, t["num_tokens"] * t["topk"] / ep
    touched = np.minimum(t["num_experts"] / ep, np.maximum(rows, 1.0))
    read = touched * weights * np.array([WEIGHT_BYTES[d] for d in t["moe_dtype"]]) + rows * hidden
    work = 2 * rows * weights, read, rows * hidden * 2, padded_rows(rows / touched)
    return Rows(name, t["latency"] * 1e-3, *work, activations=rows * 2 * width * 2)


def attention_decode(cache: tuple[str, float], t: Array, name: str) -> Rows:
    """Absorbed MLA, one row per sequence, 16 heads or more (TP 8 of 128), contexts from 256 tokens.

    Without 32 heads on Blackwell, where kernels reach three quarters of what they do with 16, 64 and 128.
    """
    dtype, entry_bytes = cache
    t = t[(t["step"] >= 255) & (t["kv_cache_dtype"] == dtype) & (t["num_heads"] >= 16)]
    t = t[(t["num_heads"] != 32) | (name in ("h100", "h200"))]
    heads, context = 1.0 * t["num_heads"], t["step"] + 1.0
    pairs = t["batch_size"] * context
    read, written = pairs * entry_bytes + t["batch_size"] * heads * 1152, t["batch_size"] * heads * 1024
    return Rows(name, t["latency"] * 1e-3, 2 * heads * (576 + 512) * pairs, read, written, heads, context)


def attention_prefill(cache: str, longest: float, t: Array, name: str) -> Rows:
    """MHA form of MLA, causal, prompts up to `longest`: heads of 192 (q, k) and 128 (v, out), BF16, each moved once.

    With an FP8 `cache` the products run in FP8, and what is read is quantised on the way.

    `rows` counts the keys that a query row sees, on average: short lists are slow, also where few rows see many keys.
    """
    t = t[(t["kv_cache_dtype"] == cache) & (t["num_heads"] >= 32) & (t["isl"] >= 64) & (t["isl"] <= longest)]
    heads, n, step = 1.0 * t["num_heads"] * t["batch_size"], 1.0 * t["isl"], t["step"]
    per_row = step + (n + 1) / 2
    flops, read = 2 * heads * 320 * n * per_row, heads * 2 * (n * 192 + (n + step) * 320)
    return Rows(name, t["latency"] * 1e-3, flops, read, n * heads * 256, per_row)


def attention_growth(products: str, t: Array, name: str) -> Rows:
    """What an attention module with an FP8 cache takes longer with prompts of 8,192 and more than with ones of 1,024.

    Of modules with as many rows in all, so that all else in them is the same and what attention costs per row cancels:
    its rows see more keys than any short list. `products` is the `mla_dtype` that names FP8 products in the file.
    """
    t = t[(t["kv_cache_dtype"] == "fp8") & (t["mla_dtype"] == products) & (t["num_heads"] >= 32)]
    rows, (_, gemm) = t["batch_size"] * t["isl"], np.unique(t["gemm_type"], return_inverse=True)
    alike = [tuple(key) for key in np.stack([gemm, t["num_heads"], rows], axis=1).tolist()]
    short = {key: s for key, s, isl in zip(alike, t["latency"], t["isl"], strict=True) if isl == SHORT_PROMPT}
    seconds = (t["latency"] - np.array([short.get(key, np.inf) for key in alike])) * 1e-3
    kept = (t["isl"] >= 8192) & (seconds > 1e-3)
    more_keys = (t["isl"] - SHORT_PROMPT) / 2
    return Rows(name, seconds[kept], (640.0 * t["num_heads"] * rows * more_keys)[kept], rows=MANY_KEYS)


def sparse_attention_decode(t: Array, name: str) -> Rows:
    """V4's kernel in ratio-128 layers: 128 window entries and one per 128 tokens before, 584 B each.

    Only 256 to 1,200 entries: the kernel pads shorter lists, and the models here select 640.
    """
    t = t[(t["isl"] == 1) & (t["step"] >= 16384) & (t["step"] <= 131072)]
    rows, heads = 1.0 * t["batch_size"], t["num_heads"]
    entries = rows * (128 + (t["step"] + 1.0) / 128)
    return Rows(name, t["latency"] * 1e-3, 4 * heads * 512 * entries, entries * 584, rows * heads * 1024, heads)


def sparse_attention_prefill(t: Array, name: str) -> Rows:
    """The same kernel from 512 query rows, lists of all lengths; `rows` counts the entries of a query row.

    Its fixed cost per query row is worth some hundred entries, hence `rows`. Neighbouring rows select much the same
    entries: 1/8 of the gathered bytes are assumed to come from HBM (PREFILL_GATHER_REUSE of the graph). Entries are
    counted as the graph counts them; the kernel pads them to 64 on Blackwell and to 128 on Hopper.
    """
    t = t[(t["isl"] >= 128) & (t["batch_size"] * t["isl"] >= 512)]
    rows, heads, step, isl = 1.0 * t["batch_size"] * t["isl"], t["num_heads"], 1.0 * t["step"], 1.0 * t["isl"]
    per_row = (visible_entries(step, isl, 1.0, 128.0) + visible_entries(step, isl, 128.0)) / isl
    flops, read = 4 * heads * 512 * rows * per_row, rows * per_row * 584 / 8
    return Rows(name, t["latency"] * 1e-3, flops, read, rows * heads * 1024, per_row)


def index_score(t: Array, name: str) -> Rows:
    """Index logits of V4 (one key per 4 tokens, 64 heads of 128, FP8 keys of 132 B), FP32 out."""
    rows, keys = 1.0 * t["batch_size"] * t["isl"], t["batch_size"] * (t["step"] + t["isl"]) / 4
    scored = rows * (t["step"] + t["isl"] / 2) / 4
    return Rows(name, t["latency"] * 1e-3, 2 * 64 * 128 * scored, keys * 132, scored * 4, 64.0, activations=rows * 8448)


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
    """DeepEP in one host (4 GPUs of a GB200 tray, else 8), low-latency or normal: FP8 out, BF16 back.

    Normal kernels are read with 20 and 24 SMs from 256 tokens: below, they were timed at more sizes than low-latency
    ones, and the fastest at these would be a kernel that nobody picks.
    """
    if "dispatch_sms" in (t.dtype.names or ()):
        t = t[(t["num_token"] >= 256) & (t["num_token"] <= 32768) & (t["dispatch_sms"] >= 20)]
    ep = 4.0 if name == "gb200-nvl72" else 8.0
    size = t["num_token"] * t["hidden_size"] * (33 / 32 if phase == "dispatch" else 2.0)
    seconds = np.sum([t[phase + column] for column in columns], axis=0) * 1e-6
    return Rows(name, seconds, peers=ep, scale_up=sent_bytes(size, ep, t["num_experts"], t["num_topk"]))


def one_sided(phase: str, t: Array, name: str) -> Rows:
    """TensorRT-LLM's one-sided NVLink kernels over 4 to 64 GPUs; dispatch in NVFP4, 0.5625 B a value."""
    t = t[(t["kernel_source"] == "NVLinkOneSided") & (t["op_name"] == f"alltoall_{phase}") & (t["moe_ep_size"] >= 4)]
    size = t["num_tokens"] * t["hidden_size"] * (0.5625 if phase == "dispatch" else 2.0)
    sent = sent_bytes(size, t["moe_ep_size"], t["num_experts"], t["topk"])
    return Rows(name, t["latency"] * 1e-3, peers=t["moe_ep_size"], scale_up=sent)


def deepep_v1_rdma(phase: str) -> Rows:
    """DeepEP V1 README, low-latency on H800: 128 tokens of 7168, top-8 of 256, EP16 to EP256."""
    us = {"dispatch": (118, 155, 173, 192, 194), "combine": (195, 273, 314, 369, 360)}[phase]
    ep = np.array([16.0, 32.0, 64.0, 128.0, 256.0])
    sent = sent_bytes(128 * 7168 * (33 / 32 if phase == "dispatch" else 2.0), ep, 256.0, 8.0)
    up, out = sent * 7 / (ep - 1), sent * (ep - 8) / (ep - 1)
    return Rows("h800", np.array(us) * 1e-6, peers=ep, scale_up=up, scale_out=out)


def deepep_v2_nvlink(phase: str) -> Rows:
    """DeepEP V2 README on 8 B200 with 64 and 24 SMs: 8,192 tokens of 7168, top-8 of 256, FP8 out, BF16 back.

    Its GB/s count what a rank sends itself, and its benchmark (tests/elastic/test_ep.py) times a second kernel apart:
    one that copies what came, or reads and sums it. That one is added here, at 7.1 TB/s, elementwise's rate on B200.
    """
    gb_per_s = np.array({"dispatch": (726, 643), "combine": (740, 675)}[phase])
    size = 8192 * 7168 * (33 / 32 if phase == "dispatch" else 2.0)
    sent = sent_bytes(size, 8.0, 256.0, 8.0)
    copies = sent * 8 / 7
    second = (2 * copies if phase == "dispatch" else copies + size) / 7.1e12
    return Rows("b200", copies / (gb_per_s * 1e9) + second, peers=8.0, scale_up=np.full(2, sent))


def collective(op: str, passes: int, t: Array, name: str) -> Rows:
    """NCCL, or the engines' own all-reduce inside a graph, over 2, 4 and 8 GPUs.

    `message_size` counts 2-byte elements of the whole result. The message of an all-gather is what one rank
    receives from the others, (n-1)/n of the result; an all-reduce moves as much twice.
    """
    kept = ~np.char.endswith(t["kernel_source"], "eager")
    if "op_name" in (t.dtype.names or ()):
        kept &= (t["op_name"] == op) & (t["nccl_dtype"] == "half")
    t = t[kept]
    sent = passes * 2 * t["message_size"] * (1 - 1 / t["num_gpus"])
    return Rows(name, t["latency"] * 1e-3, peers=t["num_gpus"], scale_up=sent)


def fastest(parts: list[Rows]) -> Rows:
    """The best time of each work, as an engine picks the kernel by size."""
    columns = [[np.broadcast_to(v, p.seconds.shape) for n, v in vars(p).items() if n != "device"] for p in parts]
    seconds, *work = (np.concatenate(column) for column in zip(*columns, strict=True))
    order = np.argsort(seconds, kind="stable")
    _, first = np.unique(np.stack(work)[:, order], axis=1, return_index=True)
    return Rows(parts[0].device, seconds[order][first], *(column[order][first] for column in work))


def measured_rows(
    root: Path, devices: Sequence[str], sources: Mapping[str, Formula], pick_fastest: bool
) -> tuple[list[Rows], list[str]]:
    """Rows of all files whose names begin with a key of `sources`, and these files' names.

    One item a file, or with `pick_fastest` one a device.
    """
    parts: list[Rows] = []
    names: list[str] = []
    for name in devices:
        found = []
        for stem, formula in sources.items():
            for path in sorted((root / name).glob(f"{stem}*.csv.gz")):
                rows = formula(read_table(path), name)
                if rows.seconds.size:
                    found.append(rows.take(rows.seconds > 0))
                    names.append(f"{name}/{path.name.removesuffix('.csv.gz')}")
        parts += [fastest(found)] if pick_fastest else found
    return parts, names


def fused_moe(t: Array, name: str) -> Rows:
    """DeepGEMM's MegaMoE: dispatch, both products and combine in one kernel, MXFP4 weights, balanced routing.

    `num_tokens` counts the tokens of one rank. The message is all that a rank sends: FP8 rows out, BF16 results back.
    """
    t = t[t["distribution"] == "balanced"]
    tokens, hidden, ep, topk = 1.0 * t["num_tokens"], 1.0 * t["hidden_size"], 1.0 * t["moe_ep_size"], t["topk"]
    rows, weights = tokens * topk, 3.0 * hidden * t["inter_size"]
    touched = np.minimum(t["num_experts"] / ep, rows)
    read = touched * weights * (0.5 + 1 / 32) + rows * hidden * 33 / 32
    sent = sent_bytes(tokens * hidden * (33 / 32 + 2), ep, t["num_experts"], topk)
    work = 2 * rows * weights, read, rows * hidden * 2, rows / touched
    return Rows(name, t["latency"] * 1e-3, *work, peers=ep, scale_up=sent)


def fused_moe_published() -> Rows:
    """DeepGEMM PR 316, MegaMoE over 8 B200: V4-Flash and V4-Pro at 1, 512, 8,192 and 32,768 tokens a rank."""
    tokens = np.tile([1.0, 512.0, 8192.0, 32768.0], 2)
    hidden, width, experts = (np.repeat(pair, 4) for pair in ((4096.0, 7168.0), (2048.0, 3072.0), (256.0, 384.0)))
    us = np.array([56.5, 146.5, 1283.0, 4856.0, 108.1, 369.6, 2819.0, 10655.0])
    rows, weights = tokens * 6, 3.0 * hidden * width
    touched = np.minimum(experts / 8, rows)
    read = touched * weights * (0.5 + 1 / 32) + rows * hidden * 33 / 32
    sent = sent_bytes(tokens * hidden * (33 / 32 + 2), 8.0, experts, 6.0)
    work = 2 * rows * weights, read, rows * hidden * 2, rows / touched
    return Rows("b200", us * 1e-6, *work, peers=8.0, scale_up=sent)
