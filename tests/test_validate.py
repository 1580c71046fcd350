"""`planner validate`: reading targets, what an entry means, limiting cases of predictions, statistics, the command."""

from __future__ import annotations

import itertools
import json
import random
import statistics
from pathlib import Path
from typing import Any

import pytest

from deepinfer.cost.model import CostModel, load_profile
from deepinfer.errors import UsageError
from deepinfer.hardware.host import load_host
from deepinfer.hardware.spec import load_hardware
from planner.validate.explain import explain
from planner.validate.mapping import map_case, map_layout
from planner.validate.outcome import Outcome, validate
from planner.validate.predict import Prediction, predict
from planner.validate.statistics import group_stats
from planner.validate.targets import Target, TargetLayout, load_targets
from tests.test_cli import run

LAYOUT = {
    "tp": 1, "dp": 8, "cp": 1, "pp": 1, "ep": 8, "redundant_experts": 0, "overlap": "none", "ranks_per_gpu": 1
}  # fmt: skip
# Conditions and values are invented; only their form is that of published entries.
DECODE: dict[str, Any] = {
    "id": "decode", "source": "invented for the tests", "tier": "A", "engine": "sglang", "kind": "decode",
    "model": "deepseek-v3", "hardware": "h200", "gpus": 8, "layout": LAYOUT, "weights": "fp8", "kv": "bf16",
    "requests_per_gpu": 64.0, "context_tokens": 3000.0, "prefill_tokens_per_gpu": None, "isl": 2048, "osl": 2048,
    "spec": {"nextn": 0, "accepted_len": 1.0}, "verify_tokens": None, "expert_load": "unknown", "op": None,
    "metric": "tpot_s", "value": 0.04, "notes": "",
}  # fmt: skip
PREFILL = {
    "id": "prefill", "kind": "prefill", "requests_per_gpu": None, "prefill_tokens_per_gpu": 16384.0, "isl": 4096,
    "osl": 1, "context_tokens": 4096.0, "metric": "tokens_per_s_per_gpu", "value": 5000.0,
}  # fmt: skip
KERNEL = {
    "id": "kernel", "engine": "kernel", "kind": "kernel", "spec": None, "isl": None, "osl": None,
    "requests_per_gpu": None, "context_tokens": None, "metric": "kernel_s", "value": 1e-4,
}  # fmt: skip


def target(**changes: Any) -> Target:
    """The decode entry with some fields changed; of `layout` only those given."""
    layout = LAYOUT | changes.pop("layout", {})
    return Target.model_validate(DECODE | {"layout": layout} | changes)


def kernel(name: str, params: dict[str, float], **changes: Any) -> Target:
    return target(**(KERNEL | {"op": {"name": name, "params": params}} | changes))


def value(**changes: Any) -> float:
    return predict(target(**changes)).value


def written(tmp_path: Path, *entries: dict[str, Any]) -> str:
    path = tmp_path / "targets.json"
    path.write_text(json.dumps(entries), encoding="utf-8")
    return str(path)


# --- what an entry means ----------------------------------------------------------------------------------------------


def test_neither_value_nor_source_nor_free_notes_touch_a_prediction() -> None:
    for entry in ({}, PREFILL, {"notes": "aggregated server: whatever"}):
        plain = predict(target(**entry))
        notes = str(entry.get("notes", "")) + "; mean TTFT 189 ms; 56 requests per GPU; read off a chart"
        other = predict(target(**(entry | {"id": "other", "value": 123.0, "source": "elsewhere", "notes": notes})))
        assert plain.value == other.value


def test_dies_of_an_accelerator_read_dense_weights_each() -> None:
    """Two dies with half of everything take as long for their half of the requests, but read all that is replicated."""
    dies = {"hardware": "ascend-910c", "gpus": 16, "weights": "int8", "kv": None}
    split = map_case(target(layout={"dp": 32, "ep": 32, "ranks_per_gpu": 2}, **dies))
    whole = map_case(target(layout={"dp": 16, "ep": 16}, **dies))
    assert split.cluster.num_gpus == 2 * whole.cluster.num_gpus
    halves, full = split.cluster.accelerator, whole.cluster.accelerator
    assert 2 * halves.hbm_bytes_per_s.value == full.hbm_bytes_per_s.value
    assert 2 * halves.peak_flops_per_s("bf16") == full.peak_flops_per_s("bf16")
    assert halves.scale_up_domain.value == 2 * full.scale_up_domain.value
    assert predict(split.target).value > predict(whole.target).value


@pytest.mark.parametrize(
    ("degrees", "gpus", "expected"),
    [
        ({"dp": 32, "ep": 32, "ranks_per_gpu": 2}, 16, (32, 1, 1, 32, 1)),
        ({"tp": 4, "dp": 8, "ep": 32, "ranks_per_gpu": 2}, 16, (8, 1, 4, 32, 1)),
        ({"tp": 4, "dp": 8, "ep": 8, "ranks_per_gpu": 2}, 16, (8, 1, 4, 8, 4)),
        ({"cp": 8, "dp": 2, "ep": 16, "ranks_per_gpu": 2}, 8, (2, 8, 1, 16, 1)),
    ],
)
def test_expert_groups_are_sliced_over_the_ranks_that_ep_leaves(
    degrees: dict[str, int], gpus: int, expected: tuple[int, ...]
) -> None:
    found = map_layout(TargetLayout.model_validate(LAYOUT | degrees), gpus, "ascend-910c")
    assert (found.dp, found.cp, found.tp, found.ep, found.etp) == expected
    assert found.num_ranks == 2 * gpus


def test_formats_named_by_an_entry_are_those_of_its_model() -> None:
    fp4 = map_case(target(hardware="b200", weights="fp4", kv="fp8")).model
    # NVFP4: half a byte and one byte of scale per 16; attention but for its output is BF16 in such checkpoints.
    assert fp4.expert_format.bytes_per_parameter == 0.5625
    assert fp4.dense_format.name == "bf16"
    assert fp4.ffn_format == fp4.output_format == fp4.expert_format
    assert fp4.kv.name == "fp8"
    own = map_case(target(hardware="b200", model="deepseek-v4-flash", weights="fp4", kv=None)).model
    assert own.expert_format.bytes_per_parameter == 0.5 + 1 / 32
    assert own.dense_format.name.startswith("fp8")
    assert map_case(target(model="deepseek-r1")).model.name == "deepseek-v3"


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"hardware": "a100"}, "hardware 'a100' is not in the catalog"),
        ({"model": "gpt-oss"}, "model 'gpt-oss' has no card"),
        ({"layout": {"dp": 4}}, "does not cover 8 accelerators"),
        ({"layout": {"ranks_per_gpu": 2, "dp": 16}}, "2 ranks per accelerator on h200"),
        ({"layout": {"ep": 3}}, "ep 3 does not divide"),
        ({"layout": {"overlap": "five-batch"}}, "overlap 'five-batch' is not modelled"),
        ({"weights": "fp6"}, "weight format 'fp6' is not modelled"),
        ({"kv": "fp5"}, "KV format 'fp5'"),
        ({"metric": "joules"}, "metric 'joules' is not modelled"),
        ({"requests_per_gpu": None}, "requests_per_gpu is not stated"),
        ({"context_tokens": None, "isl": None, "osl": None}, "neither the context nor the lengths"),
        ({"kind": "step"}, "verify_tokens is not stated"),
    ],
)
def test_what_cannot_be_expressed_has_a_reason(changes: dict[str, Any], reason: str) -> None:
    (outcome,) = validate([target(**changes)])
    assert outcome.prediction is None
    assert outcome.error is None
    assert outcome.reason is not None
    assert reason in outcome.reason


def test_an_unknown_kernel_has_a_reason() -> None:
    (outcome,) = validate([kernel("fft", {"n": 1024})])
    assert outcome.reason is not None
    assert "kernel 'fft' is not modelled" in outcome.reason
    (outcome,) = validate([kernel("attention_decode", {"batch": 4})])
    assert outcome.reason == "kernel attention_decode: parameter 'kv_len' is not stated"
    (outcome,) = validate([kernel("attention_decode", {"batch": 0, "kv_len": 4096})])
    assert outcome.reason == "kernel attention_decode: parameter 'batch' must be positive, got 0"


# --- predictions ------------------------------------------------------------------------------------------------------


def test_rates_and_times_of_one_entry_agree() -> None:
    assert value(metric="tokens_per_s_per_gpu") == pytest.approx(64.0 / value())
    tokens = value(**PREFILL)
    assert 16384.0 / tokens == pytest.approx(value(**(PREFILL | {"metric": "ttft_s"})))


def test_tokens_kept_divide_the_time_of_a_step() -> None:
    spec = {"nextn": 3, "accepted_len": 1.0}
    assert value(spec=spec) == pytest.approx(2.5 * value(spec=spec | {"accepted_len": 2.5}))
    assert value(spec=spec) > value()


def test_a_verify_step_is_a_decode_step_without_its_draft_pass() -> None:
    plain = value(kind="step", verify_tokens=512.0, metric="step_s")
    gap = load_host().step_gap_s.value  # between steps: one forward has none
    assert plain == pytest.approx(value() - gap)
    wide = value(kind="step", verify_tokens=4 * 512.0, metric="step_s")
    with_draft = value(spec={"nextn": 3, "accepted_len": 1.0})
    assert plain < wide < with_draft


def test_an_aggregated_server_tends_to_decode_only_as_outputs_grow() -> None:
    aggregated = {"notes": "aggregated server: prefill interferes with decode"}
    for engine in ("sglang", "trtllm"):
        slowed = []
        for osl in (512, 65536, 2_000_000):
            lengths: dict[str, Any] = {"engine": engine, "context_tokens": None, "isl": 2048, "osl": osl}
            slowed.append(value(**lengths, **aggregated) / value(**lengths))
        assert slowed[0] > slowed[1] > slowed[2] == pytest.approx(1.0, abs=1e-3)
        assert slowed[0] > 1.2


def test_a_prompt_that_passes_in_chunks_takes_as_many_forwards() -> None:
    whole = PREFILL | {"metric": "ttft_s", "gpus": 1, "layout": {"dp": 1, "ep": 1}, "weights": "fp4"}
    whole |= {"hardware": "b200", "isl": 32768, "context_tokens": 32768.0, "prefill_tokens_per_gpu": 32768.0}
    chunks = value(**(whole | {"prefill_tokens_per_gpu": 8192.0}))
    # The same products and as many (row, earlier token) pairs; each chunk expands the keys before it again.
    assert value(**whole) < chunks < 1.6 * value(**whole)


def test_an_unstated_forward_is_a_range_around_the_prediction() -> None:
    found = predict(target(**(PREFILL | {"prefill_tokens_per_gpu": None})))
    assert found.low <= found.value <= found.high
    assert found.low < found.high


def test_large_expert_products_run_at_the_profile_s_share_of_the_peak() -> None:
    k, n, rows = 7168, 4096, 65536
    params = {"local_experts": 8, "mean_rows_per_expert": rows, "k": k, "n": n}
    h800 = load_hardware("h800")
    efficiency = load_profile("hopper").parameters(*_grouped()).compute_efficiency
    expected = 2 * k * n * rows * 8 / (h800.peak_flops_per_s("fp8") * efficiency)
    assert predict(kernel("expert_gemm_up", params, hardware="h800")).value == pytest.approx(expected, rel=0.03)


def _grouped() -> Any:
    from deepinfer.graph.ops import OpKind

    return OpKind.GROUPED_GEMM, "fp8"


def test_dispatch_sends_what_the_payload_says() -> None:
    """EP 2 within a host: of a token's top-2 over 4 experts, ranks hold 2 each; the other one is hit 5 times in 6."""
    params = {"tokens_per_rank": 1e6, "ranks": 2, "experts": 4, "top_k": 2, "hidden": 4096, "payload_bits": 16}
    wide = predict(kernel("ep_dispatch", params, gpus=2, layout={"dp": 2, "ep": 2})).value
    narrow = predict(kernel("ep_dispatch", params | {"payload_bits": 4}, gpus=2, layout={"dp": 2, "ep": 2})).value
    at_least = 1e6 * (5 / 6) * 4096 * 2.0 / load_hardware("h200").scale_up.bytes_per_s.value
    assert at_least < wide < 2.5 * at_least  # DeepEP V2 reaches 80% of NVLink, its low-latency kernels half
    assert wide / narrow == pytest.approx(4.0, rel=0.02)


@pytest.mark.parametrize(
    ("name", "params", "published_s", "within"),
    [
        ("attention_decode", {"batch": 64, "kv_len": 4096}, 155e-6, 0.15),
        ("attention_prefill", {"query_tokens": 4096}, 1105e-6, 0.25),
        ("gemm", {"m": 128, "k": 7168, "n": 1536}, 11.7e-6, 0.3),
        ("gemm", {"m": 4096, "k": 16384, "n": 7168}, 649e-6, 0.3),
        ("sparse_attention_decode", {"batch": 64, "kv_len": 32768}, 96e-6, 0.25),
    ],
)
def test_published_kernels_of_h800(name: str, params: dict[str, float], published_s: float, within: float) -> None:
    """Alibaba InferSim's bench_data: latent and sparse attention of one layer, dense FP8 products."""
    model, kv = ("deepseek-v3.2", "fp8") if name.startswith("sparse") else ("deepseek-v3", "bf16")
    entry = kernel(name, params, hardware="h800", model=model, kv=kv, gpus=1, layout={"dp": 1, "ep": 1})
    assert predict(entry).value == pytest.approx(published_s, rel=within)


def test_a_stated_chunk_aligns_prompts_over_replicas() -> None:
    """SGLang's recipes: prompts of all replicas in the same steps slow decoding less often."""
    lengths: dict[str, Any] = {"isl": 8192, "osl": 1024, "context_tokens": 8704.0, "requests_per_gpu": 20.0}
    notes = "aggregated server: prefill interferes with decode"
    apart = value(**lengths, notes=notes)
    aligned = value(**lengths, notes=f"{notes}; chunked_prefill 65536")
    assert value(**lengths) < aligned < apart


def test_fused_experts_and_block_drafters_are_conditions() -> None:
    notes = "aggregated server: a2a megamoe"
    (outcome,) = validate([target(hardware="b200", model="deepseek-v4-flash", weights="fp4", kv=None, notes=notes)])
    assert outcome.prediction is not None
    operators = {o.name for _, step in outcome.prediction.steps for o in step.graph.operators}
    assert "fused_experts" in operators
    assert "dispatch" not in operators
    spec = {"nextn": 7, "accepted_len": 3.0}
    model = map_case(target(model="deepseek-v4-pro", spec=spec)).model
    assert model.draft is not None
    assert (model.draft.kind, model.draft.block_size, model.draft.markov_rank) == ("dspark", 7, 512)
    chained = map_case(target(model="deepseek-v4-pro", spec=spec | {"nextn": 3})).model
    assert chained.draft is not None
    assert chained.draft.kind == "mtp"


def test_attention_over_a_long_cache_reads_it_once() -> None:
    params = {"batch": 64, "kv_len": 131072, "heads": 16, "kv_lora_rank": 512, "rope_dim": 64, "query_tokens": 1}
    seconds = predict(kernel("attention_decode", params, kv="bf16", gpus=1, layout={"dp": 1, "ep": 1})).value
    h200 = load_hardware("h200")
    parameters = load_profile("hopper").operators["attention_decode.bf16"]
    read = 64 * 131072 * 576 * 2.0
    assert seconds == pytest.approx(read / (h200.hbm_bytes_per_s.value * parameters.memory_efficiency), rel=0.06)


def test_an_explanation_adds_up_and_names_the_dominant_term() -> None:
    (found,) = explain(validate([target()])[0])
    items = {i.operator: i for i in found.items}
    assert sum(i.seconds for i in found.items) >= found.step.device_s
    assert items["combine"].stream == "comm"
    assert items["lm_head"].bound == "memory"  # 64 rows meet 0.9 GB of weights
    assert items["attention_decode"].times == 61
    (long,) = explain(validate([target(**PREFILL)])[0])
    assert {i.operator: i.bound for i in long.items}["attention_prefill"] == "compute"
    assert isinstance(map_case(target()).costs, CostModel)


# --- statistics -------------------------------------------------------------------------------------------------------


def outcomes_of(pairs: list[tuple[float, float]], **changes: Any) -> list[Outcome]:
    """Outcomes of one curve with given (measured, predicted) values."""
    found = []
    for number, (measured, predicted) in enumerate(pairs):
        entry = target(id=f"{number}", value=measured, requests_per_gpu=number + 1.0, **changes)
        found.append(Outcome(entry, Prediction(predicted, predicted, predicted, ()), None))
    return found


def test_medians_and_kendall_against_their_definitions() -> None:
    rng = random.Random(3)
    pairs = [(rng.uniform(1, 9), rng.uniform(1, 9)) for _ in range(21)]
    stats = group_stats(outcomes_of(pairs))[0]
    errors = [predicted / measured - 1 for measured, predicted in pairs]
    assert stats.median == pytest.approx(statistics.median(errors))
    assert stats.median_absolute == pytest.approx(statistics.median(map(abs, errors)))
    assert stats.p90_absolute == pytest.approx(sorted(map(abs, errors))[18])  # 0.9 x 20 of 21
    agree = [(a[0] < b[0]) == (a[1] < b[1]) for a, b in itertools.combinations(pairs, 2)]
    assert (stats.pairs, stats.inside) == (210, None)
    assert stats.kendall == pytest.approx((2 * sum(agree) - 210) / 210)


def test_kendall_is_one_in_order_and_counts_points_of_one_curve_only() -> None:
    rising = [(float(i), i * 2.0) for i in range(1, 6)]
    falling = [(float(i), 9.0 - i) for i in range(1, 6)]
    assert group_stats(outcomes_of(rising))[0].kendall == 1.0
    assert group_stats(outcomes_of(falling))[0].kendall == -1.0
    both = group_stats(outcomes_of(rising) + outcomes_of(falling, engine="trtllm"))[0]
    assert (both.pairs, both.kendall) == (20, 0.0)
    assert group_stats(outcomes_of(rising[:1]))[0].kendall is None


def test_a_condition_that_is_a_range_widens_the_band() -> None:
    """An unstated forward: the band's ends are those of the range, further out by the same factors."""
    (stated,) = validate([target(**PREFILL)])
    (unstated,) = validate([target(**(PREFILL | {"prefill_tokens_per_gpu": None}))])
    assert stated.band is not None
    assert unstated.band is not None
    assert unstated.prediction is not None
    assert unstated.ends is not None
    assert unstated.ends[1] / unstated.prediction.high == pytest.approx(stated.band.high, rel=0.02)
    assert unstated.ends[1] / unstated.ends[0] > stated.band.high / stated.band.low


def test_groups_count_what_has_no_prediction() -> None:
    outcomes = validate([target(), target(id="x", hardware="a100")])
    (hardware,) = [g for g in group_stats(outcomes) if g.name == "a100"]
    assert (hardware.num, hardware.expressible, hardware.median) == (1, 0, None)
    everything = group_stats(outcomes)[0]
    assert (everything.num, everything.expressible) == (2, 1)


# --- the command ------------------------------------------------------------------------------------------------------


def test_the_command_prints_groups_worst_entries_and_reasons(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = written(tmp_path, DECODE, DECODE | PREFILL, DECODE | {"id": "other", "hardware": "a100"})
    status, out, _ = run("planner", "validate", path, "--plot", str(tmp_path / "v.png"), capsys=capsys)
    assert status == 0
    for text in ("median", "Kendall", "worst entries", "decode", "hardware 'a100' is not in the catalog"):
        assert text in out
    assert max(len(line) for line in out.splitlines()) <= 80 or str(tmp_path) in out
    assert (tmp_path / "v.png").read_bytes()[:8] == b"\x89PNG\r\n\x1a\n"


def test_json_holds_every_entry_and_group(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, DECODE, DECODE | {"id": "other", "hardware": "a100"})
    status, out, _ = run("planner", "validate", path, "--json", capsys=capsys)
    assert status == 0
    found = json.loads(out)
    first, other = found["entries"]
    assert first["error"] == pytest.approx(first["predicted"] / 0.04 - 1)
    assert (first["id"], first["measured"], first["reason"]) == ("decode", 0.04, None)
    assert first["low"] < first["predicted"] < first["high"]
    assert (other["predicted"], other["error"], other["low"], other["high"]) == (None, None, None, None)
    assert "a100" in other["reason"]
    assert found["groups"][0]["num"] == 2


def test_explain_shows_the_operators_of_a_step(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = written(tmp_path, DECODE, DECODE | {"id": "other", "hardware": "a100"})
    status, out, _ = run("planner", "validate", path, "--explain", "decode", capsys=capsys)
    assert status == 0
    for text in ("experts", "memory", "fitted", "host and idling", "80% band -"):
        assert text in out
    status, out, _ = run("planner", "validate", path, "--explain", "other", capsys=capsys)
    assert (status, "not predicted" in out) == (0, True)


@pytest.mark.parametrize(
    ("entries", "arguments", "message"),
    [
        ([DECODE | {"gpus": "eight"}], (), "entry 'decode': gpus"),
        ([{k: v for k, v in DECODE.items() if k != "layout"}], (), "entry 'decode': layout: field required"),
        ([DECODE | {"extra": 1}], (), "entry 'decode': extra"),
        ([DECODE | {"value": -1.0}], (), "entry 'decode': value"),
        ([DECODE, DECODE], (), "id 'decode' appears twice"),
        ([7], (), "entry 1"),
        ([DECODE], ("--explain", "dekode"), "no entry 'dekode' among its 1, the nearest is 'decode'"),
        ([DECODE], ("--explain", "decode", "--json"), "cannot be combined"),
        ([DECODE], ("--plot", "/dev/null/v.png"), "cannot write"),
    ],
)
def test_bad_input_is_one_sentence(
    entries: list[Any], arguments: tuple[str, ...], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    status, out, err = run("planner", "validate", written(tmp_path, *entries), *arguments, capsys=capsys)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1


@pytest.mark.parametrize(("text", "message"), [("{}", "no JSON list"), ("[", "not valid JSON"), (None, "cannot read")])
def test_a_file_that_holds_no_entries_is_refused(text: str | None, message: str, tmp_path: Path) -> None:
    path = tmp_path / "targets.json"
    if text is not None:
        path.write_text(text, encoding="utf-8")
    with pytest.raises(UsageError, match=message):
        load_targets(str(path))
