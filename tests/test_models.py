"""Model cards against published facts, and what a wrong `config.json` gets.

Published: the V4.1 model card and report abstract (552B, 16B and 8B active, 890 B of KV a token), audits of the
checkpoint's headers (763,205,315,794 parameters, 510.29 GB), DeepSeek's own cache engine (528, 288 and 68 B
records), the V3 report (671B, 37B active) and its record of 576 BF16 numbers a layer. V4-Flash: 284B, 13B active,
3,514 B a token; V4-Pro: 1.6T, 49B active, a tenth of V3.2's KV; V3.2: V3 and an indexer a layer, 48,068 B a token;
Kimi-K2 report: 1.04T, 32.6B active; Qwen3 report: 235B, 22B active.
"""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest

import deepinfer.model.hf as hf
from deepinfer.errors import UsageError
from deepinfer.model.hf import card_names, load_model, parse_config
from deepinfer.model.parameters import Parameters, parameters
from deepinfer.model.spec import CompressedAttention, LatentAttention, ModelSpec, MoE
from deepinfer.scheduler.speculation import default_acceptance

EXPERT = 35_389_440  # 3 x 5120 x 2304
TOUCHED = {"attention", "experts", "shared_experts", "router", "hyper_connections"}

# Layers, ratio, role, owner of the KV read, scanned entries (None: no limit): the table of roles, restated.
V41_ROLES: list[tuple[list[int], int, str, int | None, int | None]] = [
    ([0, 1], 0, "window-only", None, None),
    ([2], 2, "full", 2, None),
    ([3, 4, 5, 6, 7], 2, "reuse", 2, None),
    ([8], 2, "full", 8, None),
    ([9, 10, 11, 12, 13], 2, "reuse", 8, None),
    ([14], 2, "full", 14, None),
    ([15, 16, 17, 18, 19], 2, "reuse", 14, None),
    ([20], 1, "full", 20, None),
    ([24, 28, 32, 36], 1, "reindex", 20, 16_384),
    ([21, 22, 23, 25, 26, 27, 29, 30, 31, 33, 34, 35, 37, 38, 39], 1, "reuse", 20, None),
]


@lru_cache
def v41() -> ModelSpec:
    return load_model("deepseek-v4.1-flash")


@lru_cache
def v3() -> ModelSpec:
    return load_model("deepseek-v3")


def raw(name: str) -> dict[str, Any]:
    """The shipped card as the dictionary of its file."""
    path = Path(hf.__file__).parent / "cards" / f"{name}.json"
    return dict(json.loads(path.read_text(encoding="utf-8")))


def counted(spec: ModelSpec, wanted: Callable[[Parameters], bool]) -> int:
    return sum(p.count for p in parameters(spec) if wanted(p))


def item(spec: ModelSpec, name: str, layer: int | None = None) -> int:
    return counted(spec, lambda p: p.item == name and p.owner == "backbone" and layer in (None, p.layer))


def backbone(spec: ModelSpec) -> int:
    return counted(spec, lambda p: p.owner == "backbone" and p.placement != "engram")


# --- parameters -----------------------------------------------------------------------------------------------------


def test_v41_parameters_are_the_published_ones() -> None:
    assert backbone(v41()) == pytest.approx(551.8e9, rel=1e-3)
    assert item(v41(), "engram_table") == (384_006_168 + 384_016_682) * 256 == pytest.approx(196.6e9, rel=1e-3)
    assert counted(v41(), lambda p: p.owner == "draft") == pytest.approx(14.23e9, rel=1e-3)
    assert counted(v41(), lambda p: p.owner == "vision") == pytest.approx(0.49e9, rel=0.1)
    assert counted(v41(), lambda p: True) == pytest.approx(763_205_315_794, rel=1e-3)


def test_v41_active_parameters_are_the_published_ones() -> None:
    """Sublayers of a token: attention, its experts, the shared one, router, mHC; decode also sees the LM head."""
    groups = [p for p in parameters(v41()) if p.owner == "backbone"]
    decode = sum(p.active for p in groups if p.item in TOUCHED | {"lm_head"})
    prefill = sum(p.active for p in groups if p.item in TOUCHED and (p.layer or 0) < 20)
    assert decode == pytest.approx(15.75e9, rel=1e-3)
    assert prefill == pytest.approx(7.55e9, rel=1e-3)
    assert all(sum(p.active for p in groups if p.item in TOUCHED and p.layer == i) == 377_290_752 for i in range(40))


@pytest.mark.parametrize(
    ("name", "layer", "count"),
    [
        ("attention", 0, 126_615_552),
        ("attention", 39, 126_615_552),
        ("experts", 7, 384 * EXPERT),
        ("shared_experts", 7, EXPERT),
        ("router", 7, 5120 * 384),
        ("hyper_connections", 7, 983_040),
        ("compressor", 14, 2 * 5120 * 512),
        ("compressor", 20, 5120 * 512),
        ("compressor", 21, 0),
        ("index_queries", 24, 1280 * 4096),
        ("index_queries", 25, 0),
        ("embedding", None, 661_913_600),
        ("lm_head", None, 661_913_600),
        ("engram_projection", None, 2 * 6144 * 25_600),
    ],
)
def test_v41_parameters_of_one_item(name: str, layer: int | None, count: int) -> None:
    assert item(v41(), name, layer) == count


def test_v41_indexers_and_compressors_add_up() -> None:
    compressors = item(v41(), "compressor")
    indexers = item(v41(), "index_queries") + item(v41(), "index_weights") + item(v41(), "index_keys")
    assert compressors == pytest.approx(18.4e6, rel=3e-3)
    assert indexers == pytest.approx(43.5e6, rel=3e-3)


def test_v41_checkpoint_bytes_are_the_published_ones() -> None:
    groups = parameters(v41())
    experts = [p for p in groups if p.item == "experts" and p.owner == "backbone"]
    assert sum(p.num_bytes for p in groups) == pytest.approx(510.29e9, rel=1e-3)
    assert sum(p.num_bytes for p in experts) == pytest.approx(288.8e9, rel=1e-3)
    assert sum(p.num_bytes for p in groups if p.placement == "engram") == pytest.approx(203e9, rel=2e-3)
    assert experts[0].num_bytes / 384 == pytest.approx(18.80e6, rel=1e-3)
    active = sum(p.num_bytes * p.active / p.count for p in experts)
    assert active == pytest.approx(4.51e9, rel=1e-3)


def test_v3_parameters_are_the_published_ones() -> None:
    groups = [p for p in parameters(v3()) if p.owner == "backbone"]
    assert sum(p.count for p in groups) == pytest.approx(671.0e9, rel=1e-3)
    assert sum(p.active for p in groups) == pytest.approx(36.6e9, rel=1e-3)
    # DeepSeek-V3 repository: 14B of the 685B on the Hub are the MTP module, two copies of 0.93B (embedding and head)
    # among them, which servers share with the main model.
    draft = counted(v3(), lambda p: p.owner == "draft")
    assert draft + 2 * 129_280 * 7168 == pytest.approx(14e9, rel=0.05)


def active(spec: ModelSpec) -> int:
    return sum(p.active for p in parameters(spec) if p.owner == "backbone")


@pytest.mark.parametrize(
    ("model", "total", "touched", "rounding"),
    [
        ("deepseek-v4-flash", 284.33e9, 13.27e9, 1e-3),
        ("deepseek-v4-pro", 1.6e12, 49e9, 0.02),
        ("deepseek-v3.2", 671.0e9 + 0.85e9, 36.6e9 + 0.85e9, 1e-3),
        ("qwen3-235b-a22b", 235e9, 22e9, 0.02),
        # The report's 1.04T and 32.6B count more than the 1,026B that the shapes add up to (an embedding in the 32.6B).
        ("kimi-k2", 1.04e12, 32.6e9, 0.03),
    ],
)
def test_parameters_are_the_published_ones(model: str, total: float, touched: float, rounding: float) -> None:
    spec = load_model(model)
    assert backbone(spec) == pytest.approx(total, rel=rounding)
    assert active(spec) == pytest.approx(touched, rel=rounding)


@pytest.mark.parametrize(
    ("name", "layer", "count"),
    [
        ("attention", 0, 106_954_752),
        ("attention", 3, 106_954_752),
        ("experts", 2, 256 * 25_165_824),
        ("shared_experts", 2, 25_165_824),
        ("router", 2, 4096 * 256),
        ("hyper_connections", 2, 786_432),
        ("compressor", 1, 0),
        ("compressor", 2, 2 * 4096 * 1024),  # values and gates, each of two entries: CSA overlaps
        ("compressor", 3, 2 * 4096 * 512),
        ("index_keys", 2, 2 * 4096 * 256),
        ("index_queries", 2, 1024 * 64 * 128),
        ("index_weights", 2, 4096 * 64),
        ("index_keys", 3, 0),
        ("index_queries", 3, 0),
        ("embedding", None, 529_530_880),
    ],
)
def test_v4_flash_parameters_of_one_item(name: str, layer: int | None, count: int) -> None:
    """Shapes of transformers 5.24.0, modeling_deepseek_v4."""
    assert item(load_model("deepseek-v4-flash"), name, layer) == count


def test_v4_flash_bytes_of_experts_are_the_published_ones() -> None:
    experts = [p for p in parameters(load_model("deepseek-v4-flash")) if p.item == "experts" and p.owner == "backbone"]
    assert sum(p.num_bytes for p in experts) == pytest.approx(147.2e9, rel=1e-3)
    assert sum(p.num_bytes * p.active / p.count for p in experts) == pytest.approx(3.45e9, rel=1e-3)


def test_v32_indexers_are_the_published_ones() -> None:
    names = ("index_keys", "index_queries", "index_weights")
    assert sum(item(load_model("deepseek-v3.2"), name) for name in names) == pytest.approx(0.85e9, rel=0.01)


# --- KV cache and layer roles ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("model", "kv", "published"),
    [
        ("deepseek-v4.1-flash", "fp4", 890),
        ("deepseek-v4.1-flash", "mxfp8", 1490),
        ("deepseek-v4.1-flash", "bf16", 3200),
        ("deepseek-v4.1-flash", "fp8-v4", 1790),  # 2.5 x (584 + 132): V4's record with FP8 index keys
        ("deepseek-v4-flash", "fp8", 3514.25),
        ("deepseek-v4-flash", "fp8-v4", 3850.25),  # FP8 index keys
        ("deepseek-v3.2", "fp8", 48_068),
        ("kimi-k2", "bf16", 70_272),  # V3's layers and latent
        ("qwen3-235b-a22b", "bf16", 94 * 2 * 4 * 128 * 2),
        ("deepseek-v3", "bf16", 70_272),
        ("deepseek-v3", "fp8", 40_016),
    ],
)
def test_kv_bytes_per_token(model: str, kv: str, published: float) -> None:
    assert load_model(model).with_kv(kv).kv_bytes_per_token == published


def test_window_rings_of_a_request() -> None:
    assert v41().window_bytes_per_request() == 2_703_360
    assert v41().window_bytes_per_request(with_draft=True) == 43 * 67_584
    assert v3().window_bytes_per_request() == 0


def test_v4_kv_is_a_small_share_of_v32s() -> None:
    """Published: V4-Flash 7% (13.7 times less), V4-Pro 10%."""
    v32, flash, pro = (load_model(f"deepseek-{x}").kv_bytes_per_token for x in ("v3.2", "v4-flash", "v4-pro"))
    assert v32 / flash == pytest.approx(13.7, rel=5e-3)
    assert pro / v32 == pytest.approx(0.10, abs=0.006)


def test_v4_window_rings_of_a_request() -> None:
    assert load_model("deepseek-v4-flash").window_bytes_per_request() == 43 * 128 * 584


@pytest.mark.parametrize(
    ("model", "windows", "sparse", "dense"), [("deepseek-v4-flash", 2, 21, 20), ("deepseek-v4-pro", 0, 30, 31)]
)
def test_v4_layers_own_their_kv(model: str, windows: int, sparse: int, dense: int) -> None:
    found = {"window": 0, "CSA": 0, "HCA": 0}
    for layer in load_model(model).layers:
        attention, ffn = layer.attention, layer.ffn
        assert isinstance(attention, CompressedAttention)
        assert isinstance(ffn, MoE)
        assert ffn.hash_routed == (layer.index < 3)
        if not attention.ratio:
            found["window"] += 1
            assert not attention.owns_kv
            continue
        assert attention.kv_owner == layer.index
        found["CSA" if attention.runs_indexer else "HCA"] += 1
        assert (attention.ratio, attention.pooled_tokens) == ((4, 8) if attention.runs_indexer else (128, 128))
    assert found == {"window": windows, "CSA": sparse, "HCA": dense}


def test_v4_draft_module_is_mtp_or_dspark_by_its_config() -> None:
    preview = load_model("deepseek-v4-flash").draft
    assert preview is not None
    assert (preview.kind, len(preview.layers)) == ("mtp", 1)
    assert isinstance(preview.layers[0].attention, CompressedAttention)
    assert preview.layers[0].attention.ratio == 0
    # 6.6B: one block and its two projections.
    assert counted(load_model("deepseek-v4-flash"), lambda p: p.owner == "draft") == pytest.approx(6.6e9, rel=5e-3)
    # V4-Flash-0731: three blocks, five drafts, taps at the last three layers.
    config = raw("deepseek-v4-flash") | {
        "num_nextn_predict_layers": 3, "dspark_block_size": 5, "dspark_target_layer_ids": [40, 41, 42]
    }  # fmt: skip
    draft = parse_config(config, "0731").draft
    assert draft is not None
    assert (draft.kind, len(draft.layers), draft.max_drafts, draft.markov_rank) == ("dspark", 3, 5, 256)
    assert draft.target_layers == (40, 41, 42)


def test_v32_has_an_indexer_in_every_layer() -> None:
    spec = load_model("deepseek-v3.2")
    for layer in spec.layers:
        assert isinstance(layer.attention, LatentAttention)
        indexer = layer.attention.indexer
        assert indexer is not None
        assert (indexer.num_heads, indexer.dim, indexer.topk) == (64, 128, 2048)
    assert spec.draft_kv_bytes_per_token == 656 + 132


@pytest.mark.parametrize(
    ("family", "draft", "lengths"),
    [
        ("deepseek-v4", "mtp", {1: 1.79, 2: 2.27, 3: 2.49, 4: 2.54, 5: 2.55}),
        ("deepseek-v4", "dspark", {7: 2.91}),
        ("kimi-k2", None, {1: 1.83, 8: 3.77}),
        ("deepseek-v4.1", "dspark", {5: 3.51}),
        ("qwen3-moe", None, {1: 1.0, 5: 1.0}),
    ],
)
def test_default_acceptance_gives_the_published_lengths(
    family: str, draft: str | None, lengths: dict[int, float]
) -> None:
    acceptance = default_acceptance(family, draft)
    for nextn, published in lengths.items():
        assert acceptance.tau(nextn) == pytest.approx(published, abs=0.01)


def test_v41_layer_roles_are_those_of_the_table() -> None:
    expected = {i: row for layers, *row in V41_ROLES for i in layers}
    assert sorted(expected) == list(range(40))
    for layer in v41().layers:
        ratio, role, owner, limit = expected[layer.index]
        attention = layer.attention
        assert isinstance(attention, CompressedAttention)
        found = (attention.ratio, str(attention.role), attention.kv_owner, attention.index_limit)
        assert found == (ratio, role, owner, limit), layer.index
        assert attention.owns_kv == (layer.index in (2, 8, 14, 20))
        assert attention.runs_indexer == (layer.index in (2, 8, 14, 20, 24, 28, 32, 36))
        assert attention.topk == (512 if ratio else 0)
        assert attention.window == 128
        assert (layer.engram is not None) == (layer.index in (1, 14))
        assert layer.bounded == (layer.index >= 20)


def test_v41_draft_module_is_dspark() -> None:
    draft = v41().draft
    assert draft is not None
    assert (draft.kind, draft.block_size, draft.max_drafts, draft.markov_rank) == ("dspark", 5, 5, 256)
    assert draft.target_layers == (37, 38, 39)
    for layer in draft.layers:
        assert isinstance(layer.attention, CompressedAttention)
        assert (layer.attention.ratio, layer.ffn) == (0, MoE(128, 3, 2304, 1))
    assert len(draft.layers) == 3


# --- a user's own config.json ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", card_names())
def test_a_card_loads_alike_by_name_file_and_folder(name: str, tmp_path: Path) -> None:
    folder = tmp_path / name
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(raw(name)), encoding="utf-8")
    loose = tmp_path / f"{name}.json"
    loose.write_text(json.dumps(raw(name)), encoding="utf-8")
    shipped = load_model(name)
    assert load_model(str(folder)) == shipped
    assert load_model(str(folder / "config.json")) == shipped
    assert load_model(str(loose)) == shipped
    organisation = {"k": "moonshotai", "q": "Qwen"}.get(name[0], "deepseek-ai")
    assert load_model(f"{organisation}/{name.title()}") == shipped


def test_fewer_layers_leave_out_exactly_their_parameters() -> None:
    config = raw("deepseek-v4.1-flash")
    config["text_config"]["num_hidden_layers"] = 24
    config["text_config"]["n_routed_experts"] = 256
    spec = parse_config(config, "small")
    assert len(spec.layers) == 24
    assert spec.kv_bytes_per_token == 890
    assert spec.window_bytes_per_request() == 24 * 67_584
    sixteen_layers = 16 * (377_290_752 + 378 * EXPERT)
    four_reindexers = 4 * (1280 * 4096 + 5120 * 32)
    fewer_experts = 24 * 128 * (EXPERT + 5120)
    assert backbone(v41()) - backbone(spec) == sixteen_layers + four_reindexers + fewer_experts


def test_another_compression_ratio_changes_the_kv() -> None:
    config = raw("deepseek-v4.1-flash")
    config["text_config"]["compress_ratios"] = [0, 0] + [4] * 18 + [1] * 20
    assert parse_config(config, "quarter").kv_bytes_per_token == (3 / 4 + 1) * (288 + 68)


def test_without_quantization_weights_are_bf16() -> None:
    config = raw("deepseek-v3")
    del config["quantization_config"]
    spec = parse_config(config, "bf16")
    assert sum(p.num_bytes for p in parameters(spec) if p.owner == "backbone") == pytest.approx(2 * 671.0e9, rel=1e-3)


def test_an_unknown_name_suggests_the_nearest() -> None:
    with pytest.raises(UsageError, match=r"deepseek-v4\.1-flsh.*did you mean deepseek-v4\.1-flash"):
        load_model("deepseek-v4.1-flsh")
    with pytest.raises(UsageError, match="known are deepseek-v3, "):
        load_model("no-such-model-at-all")


@pytest.mark.parametrize(
    "data",
    [b"", b"{", b"[1, 2]", b'"text"', b"null", b'{"architectures": ["DeepseekV3ForCausalLM"', b"\xff\xfe{}", b"\x80"],
)
def test_a_file_that_holds_no_json_object(data: bytes, tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    path.write_bytes(data)
    with pytest.raises(UsageError, match=r"config\.json"):
        load_model(str(path))


def test_a_folder_without_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"cannot read model config .*config\.json"):
        load_model(str(tmp_path))


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"architectures": ["LlamaForCausalLM"]}, "LlamaForCausalLM.*DeepseekV41ForCausalLM"),
        ({"architectures": None, "model_type": "gpt2"}, "gpt2.*not supported"),
        ({"architectures": "DeepseekV3ForCausalLM"}, "not supported"),
        ({"architectures": {"a": 1}}, "not supported"),
        ({"architectures": 7}, "not supported"),
        ({"hidden_size": None}, "hidden_size"),
        ({"hidden_size": "wide"}, "hidden_size"),
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": 6.5}, "num_hidden_layers"),
        ({"num_hidden_layers": [61]}, "num_hidden_layers"),
        ({"n_routed_experts": -1}, "n_routed_experts"),
        ({"n_shared_experts": -1}, "n_shared_experts"),
        ({"num_nextn_predict_layers": -1}, "num_nextn_predict_layers"),
        ({"num_experts_per_tok": 257}, "num_experts_per_tok"),
        ({"quantization_config": {"weight_block_size": [128]}}, "quantization_config"),
    ],
)
def test_a_wrong_field_is_named(change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_config(raw("deepseek-v3") | change, "mine")


@pytest.mark.parametrize(
    "field", ["hidden_size", "kv_lora_rank", "num_experts_per_tok", "first_k_dense_replace", "max_position_embeddings"]
)
def test_a_missing_v3_field_is_named(field: str) -> None:
    config = raw("deepseek-v3")
    del config[field]
    with pytest.raises(UsageError, match=f"mine.*{field}.*required"):
        parse_config(config, "mine")


def test_missing_v41_fields_are_named_with_their_path() -> None:
    config = raw("deepseek-v4.1-flash")
    del config["text_config"]["index_topk"]
    with pytest.raises(UsageError, match=r"text_config\.index_topk"):
        parse_config(config, "mine")
    del config["text_config"]
    with pytest.raises(UsageError, match="text_config"):
        parse_config(config, "mine")


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"compress_ratios": [0, 0, 2]}, "compress_ratios has 3 entries for 40 layers"),
        ({"compress_ratios": [0, 0] + [-2] * 18 + [1] * 20}, "compress_ratios"),
        ({"compress_ratios": [0, 0] + ["two"] * 38}, "compress_ratios"),
        ({"kv_source_layer_ids": []}, "kv_source_layer_ids"),
        ({"kv_source_layer_ids": [8, 14, 20]}, "kv_source_layer_ids"),  # nobody wrote what layer 2 reads
        ({"kv_source_layer_ids": [2, 8, 14]}, "kv_source_layer_ids"),  # ratio-1 layers would read ratio-2 entries
        ({"engram_layer_ids": [1]}, "engram"),
        ({"engram_num_embeddings": [384_006_168]}, "engram"),
        ({"num_experts_per_tok": 385}, "num_experts_per_tok"),
    ],
)
def test_an_inconsistent_v41_config_is_refused(change: dict[str, Any], named: str) -> None:
    config = copy.deepcopy(raw("deepseek-v4.1-flash"))
    config["text_config"] |= change
    with pytest.raises(UsageError, match=named):
        parse_config(config, "mine")


@pytest.mark.parametrize(
    ("model", "change", "named"),
    [
        ("deepseek-v4-flash", {"compress_ratios": [0, 0, 4]}, "compress_ratios has 3 entries for 43 layers"),
        ("deepseek-v4-flash", {"compress_ratios": [0, 0] + [8] * 42}, "layer 2 has ratio 8, known are 0, 4, 128"),
        ("deepseek-v4-flash", {"index_topk": None}, "index_topk"),
        ("deepseek-v3.2", {"index_n_heads": 0}, "index_n_heads"),
        ("kimi-k2", {"num_experts_per_tok": 385}, "num_experts_per_tok"),
        ("qwen3-235b-a22b", {"num_key_value_heads": "four"}, "num_key_value_heads"),
    ],
)
def test_a_wrong_config_of_a_later_family_is_named(model: str, change: dict[str, Any], named: str) -> None:
    with pytest.raises(UsageError, match=named):
        parse_config(raw(model) | change, "mine")


def test_qwen3_layers_without_experts_are_dense() -> None:
    config = raw("qwen3-235b-a22b") | {"mlp_only_layers": [0, 5]}
    spec = parse_config(config, "mine")
    assert [x.index for x in spec.layers if not isinstance(x.ffn, MoE)] == [0, 5]
    assert item(spec, "ffn", 5) == 3 * 4096 * 12_288


def test_an_unknown_kv_format_lists_the_known_ones() -> None:
    with pytest.raises(UsageError, match=r"'int4'.*deepseek-v3.*bf16, fp8"):
        v3().with_kv("int4")
