"""Fit the cost profiles in `deepinfer/cost/profiles` to measured kernels.

    python tools/fit_profiles.py KERNELS_DIR [--write | --leave-out ACCELERATOR]

KERNELS_DIR holds a folder per accelerator with files `NAME.FRAMEWORK-VERSION.csv.gz`: timings of the database
that aiconfigurator 0.12.0 carries, read by `kernel_data.py`. The model fitted is `CostModel` itself. Of a file's rows,
sorted by time, every second one is fitted; the others give the errors in the table and in `source`. Published points
without a file are all fitted and give errors of their own. With --leave-out an accelerator's rows are all held out and
its family's other members are fitted: how well a part is priced that nobody has measured.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from kernel_data import (
    Array,
    Formula,
    Rows,
    attention_decode,
    attention_growth,
    attention_prefill,
    collective,
    deepep,
    deepep_v1_rdma,
    deepep_v2_nvlink,
    elementwise,
    fused_moe,
    fused_moe_published,
    gemm,
    grouped_gemm,
    index_score,
    measured_rows,
    one_sided,
    sparse_attention_decode,
    sparse_attention_prefill,
)

from deepinfer.cost import model
from deepinfer.cost.model import CostModel, CostProfile, OperatorParameters
from deepinfer.graph.ops import Message, Operator, OpKind, Work
from deepinfer.hardware.spec import Accelerator, load_hardware

Profile = dict[str, dict[str, Any]]

FAMILIES = {"hopper": ("h100", "h200"), "blackwell": ("b200", "gb200-nvl72", "b300")}
ABSURD = 4.0  # rows off by more than this factor either way after a first fit are dropped, and counted
HUBER = 0.15  # log error from which residuals count linearly
WEIGHT = 20.0  # of a published point in a fit: there are 2 to 5 of them beside some 100 measured rows
BOUNDS = {  # lowest, starting and highest value
    "startup_s": (5e-7, 8e-6, 1e-4),
    "compute_efficiency": (0.02, 0.6, 0.78),  # DeepGEMM README: at best 1,550 of 1,979 TFLOPS on H800
    "memory_efficiency": (0.02, 0.8, 0.95),
    "rows_half": (0.01, 10.0, 2000.0),
    "sharpness": (1.0, 2.0, 8.0),
    "exp_share": (0.01, 0.5, 5.0),
    "depth_s": (1e-12, 3e-10, 1e-8),
    "read_passes": (0.01, 2.0, 20.0),
    "write_passes": (0.01, 2.0, 50.0),
    "bulk_startup_s": (1e-7, 1e-5, 1e-3),
    "bulk_efficiency": (0.02, 0.7, 1.0),
    "per_peer_s": (1e-9, 3e-7, 1e-5),
    "scale_up_efficiency": (0.02, 0.5, 1.0),
    "scale_out_efficiency": (0.02, 0.8, 1.0),
    "message_sharpness": (1.0, 3.0, 8.0),
}


@dataclass(frozen=True)
class Entry:
    """A profile entry: free and fixed parameters, files by the start of their names, points without a file."""

    key: str
    free: tuple[str, ...]
    sources: Mapping[str, Formula]
    what: str
    fixed: tuple[tuple[str, float], ...] = ()
    kind: str = "fitted"
    max_rows: int = 1500  # per file, so that none outvotes the others
    fastest: bool = False  # of a device's kernels for the same work, as an engine picks them
    published: Rows | None = None  # fitted, each with WEIGHT, and never held out
    published_what: str = ""


@lru_cache
def device(name: str) -> Accelerator:
    """An accelerator of the catalog."""
    return load_hardware(name)


def predict(parts: list[Rows], key: str, values: dict[str, float]) -> Array:
    """Seconds of the cost model for all rows, concatenated."""
    name, _, precision = key.partition(".")
    any_of: Any = precision or "bf16"  # without one there are no FLOPs
    parameters = OperatorParameters.model_validate({**values, "kind": "fitted", "source": "being fitted"})
    profile = CostProfile(family="fit", description="", operators={name: parameters})
    operator = Operator(name, OpKind(name), (), (), lambda _: Work())
    seconds = []
    for p in parts:
        peers: Any = p.peers
        message = Message("all_to_all", p.scale_up, p.scale_out, peers)
        work = Work(p.flops, any_of, p.bytes_read, p.bytes_written, p.rows, message, p.depth, p.activations)
        cost = CostModel(device(p.device), profile).cost(operator, work)
        seconds.append(np.broadcast_to(cost.seconds, p.seconds.shape))
    return np.concatenate(seconds)


def minimise(residuals: Callable[[Array], Array], x: Array, counts: Array, steps: int = 80) -> Array:
    """Levenberg-Marquardt with Huber's weights on residuals beyond `HUBER`; `counts` says how much each row counts."""

    def loss(r: Array) -> float:
        size = np.abs(r)
        return float(counts @ np.where(size < HUBER, 0.5 * size**2, HUBER * (size - 0.5 * HUBER)))

    damping, r = 1e-2, residuals(x)
    for _ in range(steps):
        jacobian = np.stack([(residuals(x + 1e-4 * e) - r) / 1e-4 for e in np.eye(x.size)], axis=1)
        weight = counts * HUBER / np.maximum(np.abs(r), HUBER)
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
    counts = np.ones(sum(p.seconds.size for p in parts))
    if entry.published is not None:
        parts = [*parts, entry.published]
        counts = np.append(counts, np.full(entry.published.seconds.shape, WEIGHT))
    measured = np.log(np.concatenate([p.seconds for p in parts]))
    low, start, high = np.array([BOUNDS[name] for name in entry.free]).T

    def values(x: Array) -> dict[str, float]:
        free = low * (high / low) ** (1 / (1 + np.exp(-x)))
        return {**dict(zip(entry.free, free.tolist(), strict=True)), **dict(entry.fixed)}

    share = np.log(start / low) / np.log(high / low)
    x = np.log(share / (1 - share))
    x = minimise(lambda x: np.log(predict(parts, entry.key, values(x))) - measured, x, counts)
    fixed = dict(entry.fixed)
    return {name: fixed.get(name) or float(f"{value:.3g}") for name, value in values(x).items()}


@dataclass(frozen=True)
class Fit:
    """Parameters, signed relative errors of the held-out rows, numbers of rows fitted and dropped as absurd."""

    values: dict[str, float]
    errors: Array
    num_fitted: int
    num_absurd: int


def fit_entry(entry: Entry, parts: list[Rows], left_out: str | None) -> Fit:
    """Fit every second row of the parts, or all rows of the parts of other devices than `left_out`."""
    parts = [p.take(np.argsort(p.seconds)[:: 1 + p.seconds.size // entry.max_rows]) for p in parts]
    if left_out is None:
        halves = [[p.take(slice(half, None, 2)) for p in parts] for half in (0, 1)]
    else:
        halves = [[p for p in parts if (p.device == left_out) is held] for held in (False, True)]
    first = fit_rows(entry, halves[0])
    kept = []
    for half in halves:
        off = [np.abs(np.log(predict([p], entry.key, first) / p.seconds)) for p in half]
        kept.append([p.take(o < np.log(ABSURD)) for p, o in zip(half, off, strict=True)])
    fitted = fit_rows(entry, kept[0])
    errors = predict(kept[1], entry.key, fitted) / np.concatenate([p.seconds for p in kept[1]]) - 1
    num_fitted = sum(p.seconds.size for p in kept[0])
    total = sum(p.seconds.size for half in halves for p in half)
    return Fit(fitted, errors, num_fitted, total - num_fitted - errors.size)


ROOFLINE = ("startup_s", "compute_efficiency", "memory_efficiency", "sharpness")
COMPUTE, MEMORY = ROOFLINE[:2], ("startup_s", "memory_efficiency")
PRODUCT, AROUND = (*ROOFLINE, "depth_s", "write_passes"), (*ROOFLINE, "write_passes")
LINK = ("startup_s", "scale_up_efficiency", "bulk_startup_s", "bulk_efficiency", "per_peer_s")
HBM = ("memory_efficiency", 0.9)  # FlashMLA README: 3,000 of 3,350 GB/s on H800
# FlashMLA README, FP8 sparse decode of 128 heads and top-2048: 410 TFLOPS on H800, 350 on B200.
SPARSE = {"hopper": ("compute_efficiency", 0.415), "blackwell": ("compute_efficiency", 0.156)}
FLASHMLA_HBM = "0.9 of HBM from FlashMLA's README"
START = f"start-up only, 256-1,200 entries a row; {FLASHMLA_HBM}, "
START += "compute rate from its sparse decode of 128 heads and top-2048, while V4-class models have 64 heads"
# Uneven numbers of rows waste half a tile of 128 in each expert; equal ones are read with what they waste.
TILE = ("rows_half", 64.0)
# Half a wave of tiles 128 x 128 at the rate that is reached, 0.69 of 1,979 TFLOPS on 132 SMs: uneven numbers of tiles
# end in the middle of one. The measured ones are powers of two, which fill waves of 132 to 97 %.
WAVE = ("depth_s", 1.6e-9)
NVLINK = ("scale_up_efficiency", 0.6)  # of the fused expert kernel, whose link never binds in the data
PEER = ("per_peer_s", 1e-6)  # about what a further rank costs in all-gathers and all-reduces
HIDDEN = ("message_sharpness", 4.0)  # as sharp as the roofline's knee by default
FP8, FP4 = ("fp8_block",), ("nvfp4",)
CONTEXT = "wideep_context_moe.sglang-0.5.10"
MOE: dict[str, Formula] = {"wideep_generation_moe.": partial(grouped_gemm, FP8, 256, 96, 0)}
MOE |= {CONTEXT: partial(grouped_gemm, FP8, 8, 96, 1)}
MOE_FP4: dict[str, Formula] = {"moe.": partial(grouped_gemm, FP4, 8, 384, 0)}

# FP8 products over long prompts, as in the modules of engines; timed alone the same kernels are up to a third slower.
GROWTH: dict[str, Formula] = {
    "mla_context_module.trtllm": partial(attention_growth, "bfloat16"),
    "mla_context_module.vllm": partial(attention_growth, "fp8"),
}
GROWN = "up to 4,096 tokens alone, from 8,192 on what whole modules take longer than with 1,024"

V1_RDMA = "DeepEP V1 README: low-latency, EP16-EP256 on H800, the only data for scale-out"
V2_NVLINK = "DeepEP V2 README: EP8 on B200, 8K tokens, 64 and 24 SMs; a rank's copies to itself taken off, "
V2_NVLINK += "the HBM time of its second kernel added"


def exchange(phase: str, hopper: bool) -> Entry:
    """Dispatch or combine: the fastest kernel of each size.

    On Blackwell DeepEP V1's normal kernels are left out: V2's reach more than twice their bandwidth.
    """
    files: dict[str, Formula] = {"wideep_deepep_ll.": partial(deepep, phase, ("_avg_t_us",))}
    what = "bytes once per distinct rank, fastest kernel of each size"
    if hopper:
        files["wideep_deepep_normal."] = partial(deepep, phase, ("_transmit_us", "_notify_us"))
        free, points, source = (*LINK[:-1], "scale_out_efficiency"), deepep_v1_rdma(phase), V1_RDMA
    else:
        files["trtllm_alltoall."] = partial(one_sided, phase)
        free, points, source = LINK, deepep_v2_nvlink(phase), V2_NVLINK
    return Entry(phase, free, files, what, fastest=True, published=points, published_what=source)


def products(hopper: bool) -> list[Entry]:
    """Dense products and routed experts."""
    fp8, bf16 = partial(gemm, "fp8_block", (1.0, 1 + 1 / 1024)), partial(gemm, "bfloat16", (2.0, 2.0))
    quantised = (*PRODUCT, "read_passes")
    found = [
        Entry("gemm.fp8", quantised, {"gemm.": fp8}, "fp8_block, DeepGEMM, n and k >= 512, quantising included"),
        Entry("gemm.bf16", PRODUCT, {"gemm.": bf16}, "bfloat16, n and k >= 512"),
    ]
    balanced = "balanced, up to 96 local experts, FP8 weights, rows as padded to tiles of 128"
    if hopper:
        # The activation between the products, apart from them; on Blackwell the data fit as well by what is written.
        return [
            *found,
            Entry("grouped_gemm.fp8", (*ROOFLINE, "read_passes"), MOE, balanced, (TILE, WAVE), max_rows=60),
        ]
    nvfp4 = partial(gemm, "nvfp4", (0.5625, 0.5625))
    return [
        *found,
        Entry("gemm.fp4", quantised, {"gemm.": nvfp4}, "nvfp4, n and k >= 512, quantising included"),
        Entry("grouped_gemm.fp8", AROUND, MOE, balanced, (TILE,), max_rows=60),
        Entry(
            "fused_moe.fp8",
            ROOFLINE[:3],
            {"dsv4_megamoe_module.": fused_moe},
            "balanced, 1 to 32,768 tokens a rank, EP4 to EP32; share of NVLink as of combine's kernels",
            (NVLINK, HIDDEN, PEER),
            published=fused_moe_published(),
            published_what="DeepGEMM PR 316: V4-Flash and V4-Pro, EP8 on B200",
        ),
        Entry(
            "grouped_gemm.fp4",
            (*AROUND, "read_passes"),
            MOE_FP4,
            "balanced, NVFP4 weights, whole and sliced experts, rows as padded to tiles of 128",
            (TILE,),
            max_rows=300,
            fastest=True,
        ),
    ]


def attentions(hopper: bool) -> list[Entry]:
    """Attention and index scores. SGLang's prefill on Hopper is left out: its times are those of the absorbed form."""
    fixed = (SPARSE["hopper" if hopper else "blackwell"], HBM)
    prefill = "context_mla.trtllm" if hopper else "context_mla."
    scores, sparse = "dsv4_paged_mqa_logits_module.sglang", "dsv4_hca_attn_module."
    softmax = () if hopper else ("exp_share",)
    keys, lists = (() if hopper else (("flops_per_exp", n),) for n in (640.0, 2048.0))  # products of a query and a key
    decode = {"bf16": ("bfloat16", 1152.0), "fp8": ("fp8", 576.0)}
    context = ">= 16 heads, >= 256 tokens, fastest kernel"
    return [
        *(
            Entry(
                f"attention_decode.{p}",
                PRODUCT,
                {"generation_mla.": partial(attention_decode, c)},
                context,
                fastest=True,
            )
            for p, c in decode.items()
        ),
        *(
            Entry(
                f"attention_prefill.{p}",
                (*ROOFLINE, "rows_half", *softmax),
                {prefill: partial(attention_prefill, c, longest), **modules},
                f"{p.upper()} cache, >= 32 heads, >= 64 tokens, rows = keys of one{said}",
                keys,
            )
            for p, c, longest, modules, said in (
                ("bf16", "bfloat16", math.inf, {}, ""),
                ("fp8", "fp8", *((math.inf, {}, "") if hopper else (4096.0, GROWTH, f"; {GROWN}"))),
            )
        ),
        Entry(
            "sparse_attention_decode.bf16", COMPUTE[:1], {sparse: sparse_attention_decode}, START, fixed, "published"
        ),
        Entry(
            "sparse_attention_prefill.bf16",
            (*COMPUTE, "rows_half", *softmax),
            {sparse: sparse_attention_prefill},
            f">= 512 query rows, rows = entries of one; {FLASHMLA_HBM}",
            (HBM, *lists),
        ),
        Entry(
            "index_score.fp8",
            (*COMPUTE, "sharpness", "read_passes"),
            {scores: index_score},
            f"FP8 keys, which fit L2 here; {FLASHMLA_HBM}",
            (HBM,),
        ),
    ]


def entries(family: str) -> list[Entry]:
    """What is fitted."""
    hopper = family == "hopper"
    gather, reduce = partial(collective, "all_gather", 1), partial(collective, "all_reduce", 2)
    nccl, groups = "nccl.nccl", "2, 4 and 8 GPUs"
    return [
        *products(hopper),
        *attentions(hopper),
        Entry("elementwise", MEMORY, {"mhc_module.": elementwise}, "post, per sub-layer"),
        exchange("dispatch", hopper),
        exchange("combine", hopper),
        Entry("all_gather", LINK, {nccl: gather}, groups, fastest=True),
        Entry("all_reduce", LINK, {nccl: reduce, "custom_": reduce}, f"{groups}, fastest", fastest=True),
    ]


EVIDENCE = ("fitted", "rows_fitted", "log_error_sigma")  # of a fit, not lent with its values
# Entries that nothing measured or published is behind, from the nearest one, and why.
BORROWED = {
    "sample": ("topk", "which also makes selecting passes over rows of FP32 numbers"),
    "gather": ("elementwise", "as copies of rows; short scattered rows will do worse"),
    "gemm.tf32": ("gemm.bf16", "against the TF32 peak"),
    "grouped_gemm.bf16": ("grouped_gemm.fp8", "against the BF16 peak"),
    "fused_moe.fp4": ("fused_moe.fp8", "against the FP4 peak"),
    "index_score.fp4": ("index_score.fp8", "at the rate of FP8 keys"),
    "index_score.bf16": ("index_score.fp8", "against the BF16 peak"),
}
# The line through two times of a top-k over FP32 scores: 2.4 MB in 14.3 us, 116 MB in 112 us, at 7.7 TB/s.
TOP_K_SOURCE = "TensorRT-LLM's V3.2 and V4 blogs, B200: 64 x 9,295 in 14.3 us, 148 x 196,608 in 112 us"
TOP_K = {"startup_s": 1.23e-5, "memory_efficiency": 0.152}


def add_unmeasured(family: str, profile: Profile) -> None:
    """Entries that no file measures: top-k from published times on B200, the others from `BORROWED`.

    What no number for that operator and family is behind is of kind `roofline`, the weakest.
    """
    foreign = family != "blackwell"
    source = "no data of its own: start-up and share of bandwidth of Blackwell's topk; " if foreign else ""
    profile["topk"] = {**TOP_K, "kind": "roofline" if foreign else "published", "source": source + TOP_K_SOURCE}
    for key, (near, why) in BORROWED.items():
        if near not in profile:
            continue
        source = f"no data of its own: borrowed from {near}, {why}"
        values = {name: value for name, value in profile[near].items() if name not in EVIDENCE}
        profile[key] = {**values, "kind": "roofline", "source": source}
    profile["index_score.fp4"]["peak"] = "fp8"
    if foreign:
        profile["sample"]["source"] += "; these are Blackwell's start-up and share of bandwidth"


def complete_blackwell(profile: Profile, hopper: Profile) -> None:
    """Scale-out efficiencies from Hopper."""
    for key in ("dispatch", "combine"):
        profile[key] = {"scale_out_efficiency": hopper[key]["scale_out_efficiency"], **profile[key]}
        profile[key]["source"] += f"; scale-out efficiency not of Blackwell: borrowed from {key} of Hopper, DeepEP V1"


def fit_family(root: Path, family: str, left_out: str | None = None) -> Profile:
    """All fitted entries of a family, with their sources; prints one line of the table for each."""
    profile: Profile = {}
    for entry in entries(family):
        parts, names = measured_rows(root, FAMILIES[family], entry.sources, entry.fastest)
        if left_out is not None and {p.device == left_out for p in parts} != {True, False}:
            continue
        fit = fit_entry(entry, parts, left_out)
        median, p90 = 100 * np.quantile(np.abs(fit.errors), (0.5, 0.9))
        low, high = np.quantile(np.log1p(fit.errors), (0.16, 0.84))
        source = f"aiconfigurator 0.12.0: {', '.join(names)} ({entry.what}); {fit.num_fitted} rows, {fit.num_absurd} "
        source += f"off by over {ABSURD:g}x dropped; median |error| {median:.1f} % on {fit.errors.size} held-out rows"
        if entry.published is not None:
            off = 100 * np.abs(predict([entry.published], entry.key, fit.values) / entry.published.seconds - 1)
            source += f"; {off.size} published points, fitted (weight {WEIGHT:g}), off by {np.median(off):.0f} % "
            source += f"in the median ({entry.published_what})"
        published = 0 if entry.published is None else entry.published.seconds.size
        evidence = {"fitted": entry.free, "rows_fitted": fit.num_fitted + published}
        evidence["log_error_sigma"] = float(f"{(high - low) / 2:.2g}")
        profile[entry.key] = {**fit.values, **evidence, "kind": entry.kind, "source": source}
        numbers = " ".join(f"{name}={value:g}" for name, value in fit.values.items())
        print(f"{family:10}{entry.key:30}{fit.num_fitted:6}{fit.errors.size:6}{fit.num_absurd:5}", end="")
        print(f"{median:7.1f}{p90:7.1f}{100 * np.median(fit.errors):7.1f}  {numbers}")
    return profile


def to_toml(family: str, profile: Profile) -> str:
    """The profile file; numbers and ASCII strings are written alike in JSON and TOML."""
    devices = "H800, H100 and H200" if family == "hopper" else "B200, GB200 NVL72 and B300; GB300 is taken alike"
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
    parser.add_argument("--leave-out", choices=sorted(sum(FAMILIES.values(), ())), help="hold out an accelerator")
    arguments = parser.parse_args()
    print(f"{'family':10}{'entry':30}{'fit':>6}{'held':>6}{'drop':>5}{'med %':>7}{'p90 %':>7}{'sign %':>7}")
    if arguments.leave_out:
        family = next(f for f, members in FAMILIES.items() if arguments.leave_out in members)
        fit_family(arguments.kernels, family, arguments.leave_out)
        return
    profiles: dict[str, Profile] = {}
    for family in FAMILIES:
        profiles[family] = fit_family(arguments.kernels, family)
        add_unmeasured(family, profiles[family])
        if family == "blackwell":
            complete_blackwell(profiles[family], profiles["hopper"])
        CostProfile.model_validate({"family": family, "description": "check", "operators": profiles[family]})
        if arguments.write:
            path = Path(model.__file__).parent / "profiles" / f"{family}.toml"
            path.write_text(to_toml(family, profiles[family]), encoding="utf-8")


if __name__ == "__main__":
    main()
