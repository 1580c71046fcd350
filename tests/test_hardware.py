"""The catalog's numbers have unit, source, date and kind and are sane; a user's own file is read the same way."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import BaseModel

import deepinfer.hardware.spec as spec
from deepinfer.cost.model import load_profile
from deepinfer.engine.deployment import fit_to_hardware
from deepinfer.errors import UsageError
from deepinfer.hardware.host import HostProfile, load_host
from deepinfer.hardware.spec import ClusterSpec, Quantity, hardware_names, load_hardware
from deepinfer.model.hf import card_names, load_model
from deepinfer.model.parameters import parameters

CATALOG = Path(spec.__file__).parent / "catalog"
# What a server accelerator of 2020-2030 can have; a slipped prefix or unit falls outside.
SANE = {
    "FLOP/s": (2e13, 1e17),
    "exp/s": (1e12, 1e14),
    "B/s": (1e10, 5e13),
    "B": (2e10, 2e12),
    "s": (1e-7, 1e-2),
    "W": (200, 10_000),
    "USD/h": (0.2, 50),
    "SM": (20, 400),
    "GPU": (1, 10_000),
}
UNITS = {
    r"flops_per_s\.\w+": "FLOP/s",
    r"exp_per_s": "exp/s",
    r".*bytes_per_s": "B/s",
    r"hbm_bytes": "B",
    r".*latency_s": "s",
    r"power_w": "W",
    r"price_usd_per_hour": "USD/h",
    r"num_sms": "SM",
    r"scale_up_domain|gpus_per_host": "GPU",
}


def quantities(node: object, path: str = "") -> Iterator[tuple[str, Quantity]]:
    """Every number of a model with its dotted field name."""
    if isinstance(node, Quantity):
        yield path, node
        return
    children = dict(node) if isinstance(node, BaseModel | dict) else {}
    for name, child in children.items():
        yield from quantities(child, f"{path}.{name}".lstrip("."))


@pytest.mark.parametrize("name", hardware_names())
def test_every_number_of_the_catalog_is_sourced_and_sane(name: str) -> None:
    found = dict(quantities(load_hardware(name)))
    bare = [
        k
        for k, v in flat(tomllib.loads((CATALOG / f"{name}.toml").read_text(encoding="utf-8")))
        if isinstance(v, int | float) and not k.endswith(".value")
    ]
    assert bare == []  # no number without its source
    assert len(found) >= 12
    for field, quantity in found.items():
        (unit,) = {u for pattern, u in UNITS.items() if re.fullmatch(pattern, field)}
        assert quantity.unit == unit, field
        low, high = SANE[unit]
        assert low <= quantity.value <= high, field
        assert len(quantity.source) >= 8, field
        assert "2020" <= quantity.date[:4] <= "2030", field
        assert quantity.kind in ("datasheet", "measured", "published", "derived", "roadmap")


def flat(node: object, path: str = "") -> Iterator[tuple[str, object]]:
    if not isinstance(node, dict):
        yield path, node
        return
    for name, child in node.items():
        yield from flat(child, f"{path}.{name}".lstrip("."))


@pytest.mark.parametrize("name", hardware_names())
def test_the_parts_of_an_accelerator_fit_together(name: str) -> None:
    part = load_hardware(name)
    assert part.name == name
    assert part.family == load_profile(part.family).family
    # Every generation of the catalog doubles its dense rate with 8-bit operands, NVIDIA's also from TF32 to BF16.
    tf32, bf16, fp8 = (part.peak_flops_per_s(p) for p in ("tf32", "bf16", "fp8"))
    assert fp8 / bf16 == pytest.approx(2, rel=0.05)
    assert bf16 / tf32 == pytest.approx(2, rel=0.05) if part.family != "ascend" else bf16 > 2 * tf32
    assert part.hbm_bytes_per_s.value > part.scale_up.bytes_per_s.value > part.scale_out.bytes_per_s.value
    assert part.scale_up_domain.value % part.gpus_per_host.value == 0
    models = {load_model(card).family: load_model(card) for card in card_names()}
    for family, kv in part.kv_format.items():
        assert models[family].with_kv(kv).kv.name == kv
    for model in models.values():
        assert model.with_weights(part.weight_format).expert_format.bytes_per_parameter <= 2


def test_numbers_that_everybody_knows() -> None:
    """141 GB and 4.8 TB/s; H800's NVLink is cut to 400 GB/s both ways; 72 GPUs of NVL72 reach each other."""
    assert load_hardware("h200").hbm_bytes.value == 141e9
    assert load_hardware("H200").hbm_bytes_per_s.value == 4.8e12
    assert load_hardware("h800").scale_up.bytes_per_s.value == 200e9
    assert ClusterSpec(load_hardware("gb200-nvl72"), 288).domain == 72
    assert ClusterSpec(load_hardware("gb200-nvl72"), 16).domain == 16
    assert ClusterSpec(load_hardware("b200"), 16).domain == 8
    assert ClusterSpec(load_hardware("ascend-910c"), 1024).domain == 384
    assert load_hardware("h100").hbm_bytes_per_s.value == 3.35e12
    # Blackwell Ultra: FP4 at 1.5 times Blackwell's rate, everything else alike.
    ultra, plain = (load_hardware(name) for name in ("gb300-nvl72", "gb200-nvl72"))
    assert ultra.peak_flops_per_s("fp4") == 1.5 * plain.peak_flops_per_s("fp4")
    assert ultra.peak_flops_per_s("fp8") == plain.peak_flops_per_s("fp8")


def test_910c_serves_8_bit_models_as_int8() -> None:
    """No FP8 units: the INT8 rate, twice BF16's; V4's FP4 experts are stored as INT8, one byte each."""
    part = load_hardware("ascend-910c")
    assert "fp8" not in part.flops_per_s
    assert part.peak_flops_per_s("fp8") == part.peak_flops_per_s("fp4") == 1.504e15
    spec = fit_to_hardware(load_model("deepseek-v4-flash"), part)
    experts = [p for p in parameters(spec) if p.item == "experts" and p.owner == "backbone"]
    assert sum(p.num_bytes for p in experts) == 43 * 256 * 25_165_824
    assert spec.kv.name == "bf16"
    unchanged = fit_to_hardware(load_model("deepseek-v4-flash"), load_hardware("b200"))
    assert unchanged == load_model("deepseek-v4-flash")
    assert fit_to_hardware(load_model("deepseek-v3"), load_hardware("b200"), "fp8").kv.name == "fp8"


def test_two_dies_have_together_what_their_accelerator_has() -> None:
    whole = load_hardware("ascend-910c")
    die = whole.part(2)
    assert whole.part(1) is whole
    # CloudMatrix384 paper: 24 AI cores, 64 GB, 1.6 TB/s, 196 GB/s of unified bus and 200 Gb/s of RDMA a die; 768 dies.
    assert (die.num_sms.value, die.hbm_bytes.value, die.hbm_bytes_per_s.value) == (24, 64e9, 1.6e12)
    assert (die.scale_up.bytes_per_s.value, die.scale_out.bytes_per_s.value) == (196e9, 25e9)
    assert die.scale_up_domain.value == 768
    assert 2 * die.peak_flops_per_s("fp8") == whole.peak_flops_per_s("fp8")


def test_an_unknown_weight_format_of_a_users_file_is_named() -> None:
    part = load_hardware("ascend-910c").model_copy(update={"weight_format": {"mxfp4": "int3"}})
    with pytest.raises(UsageError, match=r"'int3': known are int8"):
        fit_to_hardware(load_model("deepseek-v4-flash"), part)


def test_host_numbers_are_sourced_and_sane() -> None:
    host = load_host()
    found = dict(quantities(host))
    assert set(found) == set(HostProfile.model_fields) - {"name"}
    assert all(q.unit == "s" and 1e-9 <= q.value <= 1e-2 for q in found.values())
    assert host.submit_seconds(100, 500, captured=False) > host.submit_seconds(100, 500, captured=True) > 0
    with pytest.raises(UsageError, match="did you mean deepinfer"):
        load_host("deepinfre")


# --- a user's own file ----------------------------------------------------------------------------------------------


def write(folder: Path, text: str | bytes) -> str:
    path = folder / "mine.toml"
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return str(path)


def shipped() -> str:
    return (CATALOG / "h200.toml").read_text(encoding="utf-8")


def test_a_users_copy_is_read_like_the_shipped_file(tmp_path: Path) -> None:
    assert load_hardware(write(tmp_path, shipped())) == load_hardware("h200")
    whole = shipped().replace("value = 132.0", "value = 132")  # an integer is a number too
    assert load_hardware(write(tmp_path, whole)) == load_hardware("h200")
    without = re.sub(r"(?m)^(power_w|price_usd_per_hour) = .*$", "", shipped())
    assert load_hardware(write(tmp_path, without)).power_w is None


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        (r"(?m)^hbm_bytes = .*$", "", r"hbm_bytes: field required"),
        (r"(?m)^family = .*$", "", r"family: field required"),
        (r"(?s)\[scale_out\].*?(?=\n#)", "", r"scale_out: field required"),
        (r"value = 1\.41e11", "value = nan", r"hbm_bytes\.value"),
        (r"value = 1\.41e11", "value = inf", r"hbm_bytes\.value"),
        (r"value = 1\.41e11", "value = -1.41e11", r"hbm_bytes\.value"),
        (r"value = 1\.41e11", "value = 0.0", r"hbm_bytes\.value"),
        (r"value = 1\.41e11", 'value = "141 GB"', r"hbm_bytes\.value"),
        (r"value = 1\.41e11", "value = true", r"hbm_bytes\.value"),
        (r"value = 1\.41e11, ", "", r"hbm_bytes\.value: field required"),
        (r'unit = "SM", ', "", r"num_sms\.unit: field required"),
        (r'source = "NVIDIA H200 datasheet"', 'source = ""', r"\.source"),
        (r'kind = "datasheet"', 'kind = "guess"', r"\.kind"),
        (r'date = "2026-04"', 'date = "April"', r"\.date"),
        (r"(?m)^fp8 = ", "fp6 = ", r"flops_per_s\.fp6"),
        (r"(?m)^name = ", "colour = 'red'\nname = ", r"colour"),
        (r"latency_s = ", "delay_s = ", r"scale_out\.delay_s"),
        (r"(?m)^hbm_bytes = .*$", "hbm_bytes = 1.41e11", r"hbm_bytes"),
    ],
)
def test_a_wrong_field_is_named(old: str, new: str, named: str, tmp_path: Path) -> None:
    text, count = re.subn(old, new, shipped())
    assert count
    with pytest.raises(UsageError, match=rf"mine\.toml: {named}|mine\.toml: .*{named}"):
        load_hardware(write(tmp_path, text))


@pytest.mark.parametrize("data", [b"name = ", b"\xff\xfe", b"[a\n", b"a = 1\na = 2"])
def test_a_file_that_is_no_toml(data: bytes, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"mine\.toml is not (valid TOML|UTF-8 text)"):
        load_hardware(write(tmp_path, data))


def test_paths_that_hold_no_file(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot read hardware file"):
        load_hardware(str(tmp_path))
    with pytest.raises(UsageError, match="unknown hardware"):
        load_hardware(str(tmp_path / "none.toml"))


@pytest.mark.parametrize(
    ("typed", "meant"), [("h20", "h200"), ("H900", "h[128]00"), ("gb200", "gb200-nvl72"), ("b20", "b200")]
)
def test_an_unknown_name_suggests_the_nearest(typed: str, meant: str) -> None:
    with pytest.raises(
        UsageError, match=f"'{typed}': did you mean {meant}\\?.*known are {', '.join(hardware_names())}"
    ):
        load_hardware(typed)
