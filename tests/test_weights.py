"""Weights of V4.1 checkpoints.

The schema is held against an audit of the released shards' headers (docs/models/deepseek-v4.1-flash.md and
docs/performance/deepseek_v4_1_shard_audit.md of lvyufeng/PocketLLM), to the byte; numbers against decoding by hand and
nemo-automodel's own dequantiser; what is read against the files as safetensors reads them.
"""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
safetensors_torch = pytest.importorskip("safetensors.torch")
pytest.importorskip("tokenizers")

from hypothesis import given, settings  # noqa: E402
from hypothesis import strategies as st  # noqa: E402

from backends.torch_runtime import tiny  # noqa: E402
from backends.torch_runtime.weights import (  # noqa: E402
    WHOLE,
    ModelWeights,
    RankPart,
    dummy_weights,
    from_released,
    load_weights,
    rank_bytes,
    released_tensors,
    save_checkpoint,
)
from backends.torch_runtime.weights.rank import model_entries  # noqa: E402
from backends.torch_runtime.weights.schema import all_layers, layer_entries, prefix, released  # noqa: E402
from deepinfer.errors import UsageError  # noqa: E402
from deepinfer.model.hf import load_model  # noqa: E402
from deepinfer.model.parameters import parameters  # noqa: E402
from deepinfer.model.spec import ModelSpec  # noqa: E402

Tensors = dict[str, "torch.Tensor"]
MODEL = tiny.tiny_model()


@cache
def flash() -> ModelSpec:
    return load_model("deepseek-v4.1-flash")


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    tiny.write_tiny_checkpoint(folder, seed=5)
    return folder


def read_all(folder: Path) -> Tensors:
    """Every tensor of a folder, by safetensors' own loader."""
    tensors: Tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        tensors |= safetensors_torch.load_file(path)
    return tensors


@pytest.fixture(scope="module")
def tensors(checkpoint: Path) -> Tensors:
    return read_all(checkpoint)


def assert_same(a: ModelWeights, b: ModelWeights) -> None:
    """Bit for bit."""

    def same(x: torch.Tensor | None, y: torch.Tensor | None) -> bool:
        if x is None or y is None:
            return x is y
        return x.dtype == y.dtype and torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))

    assert all(same(x, y) for x, y in zip((a.embed, a.norm, a.head), (b.embed, b.norm, b.head), strict=True))
    assert [layer.keys() for layer in a.layers] == [layer.keys() for layer in b.layers]
    for one, other in zip(a.layers, b.layers, strict=True):
        for key, weight in one.items():
            twin = other[key]
            assert weight.storage == twin.storage
            assert same(weight.data, twin.data), key
            assert same(weight.scale, twin.scale), key


# --- the released checkpoint ----------------------------------------------------------------------------------------


def vision_tensors(dim: int = 1024, width: int = 2816, hidden: int = 5120) -> tuple[int, int]:
    """Parameters of the vision tower, its aligner and the image delimiters: BF16 ones, and FP32 ones (bias_vl)."""
    tower = 3 * 14 * 14 * dim + dim + 32 * (4 * dim * dim + 4 * dim + 3 * dim * width + 2 * dim) + dim
    aligner = 9 * dim * hidden + hidden + hidden * hidden + hidden
    return tower + aligner + 3 * hidden, 40 * 384 + 3 * 128


def test_schema_is_the_released_checkpoint_to_the_byte() -> None:
    """96,085 tensors of 510,286,023,000 bytes and 763,205,315,794 parameters; 309 tensors are not for text."""
    tensors = [t for start, entry in model_entries(flash()) for t in released(entry, start, quantized=True)]
    names = {t.name for t in tensors}
    assert len(names) == len(tensors) == 96_085 - (32 * 8 + 3) - 4 - 3 - (40 + 3)
    bf16, fp32 = vision_tensors()
    assert sum(rank_bytes(flash()).values()) + 2 * bf16 + 4 * fp32 == 510_286_023_000
    counted = sum(torch.Size((e.rows, *e.rest)).numel() * max(1, e.num_experts) for _, e in model_entries(flash()))
    assert counted + bf16 + fp32 == 763_205_315_794


def test_every_layer_has_the_released_number_of_tensors() -> None:
    counts = [sum(1 for e in layer_entries(flash(), x) for _ in released(e, "", True)) + 1 for x in flash().layers]
    expected = dict.fromkeys(range(40), 2334) | dict.fromkeys((24, 28, 32, 36), 2337)
    expected |= {1: 2340, 2: 2342, 8: 2342, 14: 2348, 20: 2341}
    assert counts == list(expected.values())


@pytest.mark.parametrize(
    ("name", "dtype", "shape"),
    [
        ("layers.2.attn.wq_a.weight", "float8_e4m3fn", (1280, 5120)),
        ("layers.2.attn.wq_a.scale", "float8_e8m0fnu", (40, 160)),
        ("layers.2.attn.wo_a.weight", "float8_e4m3fn", (8192, 4096)),
        ("layers.2.attn.wo_b.scale", "float8_e8m0fnu", (160, 256)),
        ("layers.2.attn.attn_sink", "float32", (64,)),
        ("layers.2.attn.compressor.wgate.weight", "bfloat16", (512, 5120)),
        ("layers.2.attn.indexer.wk.weight", "bfloat16", (128, 512)),
        ("layers.24.attn.indexer.wq_b.scale", "float8_e8m0fnu", (128, 40)),
        ("layers.2.ffn.gate.bias", "float32", (384,)),
        ("layers.2.ffn.experts.383.w1.weight", "int8", (2304, 2560)),
        ("layers.2.ffn.experts.0.w2.scale", "float8_e8m0fnu", (5120, 72)),
        ("layers.2.ffn.shared_experts.w1.scale", "float8_e8m0fnu", (72, 160)),
        ("layers.2.hc_attn_fn", "float32", (24, 20480)),
        ("layers.2.hc_ffn_scale", "float32", (3,)),
        ("layers.14.engram.embed.scale", "float8_e8m0fnu", (384_016_682, 8)),
        ("layers.1.engram.wkv.weight", "float8_e4m3fn", (25600, 6144)),
        ("layers.1.engram.q_weight", "bfloat16", (4, 5120)),
        ("mtp.0.main_proj.weight", "float8_e4m3fn", (5120, 15360)),
        ("mtp.2.markov_head.embed.weight", "bfloat16", (129_280, 256)),
        ("mtp.2.confidence_head.proj.weight", "bfloat16", (1, 5376)),
        ("mtp.1.ffn.experts.127.w3.weight", "int8", (2304, 2560)),
        ("head.weight", "bfloat16", (129_280, 5120)),
    ],
)
def test_released_shapes_and_types(name: str, dtype: str, shape: tuple[int, ...]) -> None:
    found = {t.name: t for start, entry in model_entries(flash()) for t in released(entry, start, quantized=True)}
    assert found[name].shape == shape
    assert dtype in found[name].dtypes


def test_bytes_by_item_are_those_of_the_planner() -> None:
    planned: dict[str, float] = {}
    for group in parameters(flash()):
        planned[group.item] = planned.get(group.item, 0.0) + group.num_bytes
    found = rank_bytes(flash())
    assert found.pop("norms") < 1e7
    assert found == {item: count for item, count in planned.items() if item != "vision"}


def test_bytes_of_all_ranks_are_those_of_the_whole() -> None:
    whole = rank_bytes(flash())
    ranks = [rank_bytes(flash(), RankPart(i, 8, i, 8)) for i in range(8)]
    assert all(sum(rank[item] for rank in ranks) == whole[item] for item in ("experts", "engram_table"))
    assert all(rank[item] == whole[item] for rank in ranks for item in whole.keys() - {"experts", "engram_table"})
    assert sum(rank_bytes(replace(flash(), draft=None)).values()) < sum(whole.values()) - 7e9


# --- reading and writing --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("quantized", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_is_written_is_read_again(tmp_path: Path, quantized: bool, dtype: torch.dtype) -> None:
    weights = dummy_weights(MODEL, dtype=dtype, seed=3, quantized=quantized)
    save_checkpoint(tmp_path, MODEL, weights, tiny.tiny_config(), shard_bytes=300_000)
    loaded = load_weights(tmp_path, MODEL, dtype=dtype)
    assert_same(loaded, weights)
    assert loaded.num_bytes == sum(rank_bytes(MODEL, WHOLE, dtype, quantized).values())
    assert {p.name for p in tmp_path.iterdir()} - {p.name for p in tmp_path.glob("model-0*-of-0*.safetensors")} == {
        "config.json",
        "model.safetensors.index.json",
    }
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in read_all(tmp_path).values())


def test_one_file_without_an_index_reads_the_same(checkpoint: Path, tmp_path: Path) -> None:
    safetensors_torch.save_file(read_all(checkpoint), tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text((checkpoint / "config.json").read_text())
    assert_same(load_weights(tmp_path, MODEL), load_weights(checkpoint, MODEL))


def test_what_images_need_is_left_unread(tensors: Tensors) -> None:
    extra = {"vision.norm.weight": torch.ones(3), "aligner.w1.bias": torch.ones(3), "image_start": torch.ones(3)}
    extra |= {"layers.7.ffn.gate.bias_vl": torch.ones(8), "mtp.2.ffn.gate.bias_vl": torch.ones(4)}
    assert_same(from_released(tensors | extra, MODEL), from_released(tensors, MODEL))


def test_a_model_without_its_draft_leaves_it_unread(checkpoint: Path) -> None:
    whole, target = load_weights(checkpoint, MODEL), load_weights(checkpoint, replace(MODEL, draft=None))
    assert_same(target, replace(whole, layers=whole.layers[: len(MODEL.layers)]))


def expected_layer(tensors: Tensors, index: int, part: RankPart) -> dict[str, list[torch.Tensor | None]]:
    """Some weights of a layer, stacked by hand from the files."""
    main = len(MODEL.layers)
    start = f"layers.{index}." if index < main else f"mtp.{index - main}."
    count = (8 if index < main else 4) // part.ep
    mine = range(part.ep_rank * count, (part.ep_rank + 1) * count)

    def rows(kind: str, *names: str) -> torch.Tensor:
        return torch.cat([tensors[f"{start}{name}.{kind}"].view(torch.uint8) for name in names])

    def experts(kind: str, *names: str) -> torch.Tensor:
        return torch.stack([rows(kind, *(f"ffn.experts.{e}.{name}" for name in names)) for e in mine])

    layer = {
        "attn.wq_a_kv": [rows(kind, "attn.wq_a", "attn.wkv") for kind in ("weight", "scale")],
        "ffn.shared_experts.w13": [
            rows(kind, "ffn.shared_experts.w1", "ffn.shared_experts.w3") for kind in ("weight", "scale")
        ],
        "ffn.experts.w13": [experts(kind, "w1", "w3") for kind in ("weight", "scale")],
        "ffn.experts.w2": [experts(kind, "w2") for kind in ("weight", "scale")],
        "attn.wo_b": [rows(kind, "attn.wo_b") for kind in ("weight", "scale")],
    }
    if f"{start}engram.embed.weight" in tensors:
        table = tensors[f"{start}engram.embed.weight"]
        share = -(-len(table) // part.engram_ranks)
        mine_rows = slice(part.engram_rank * share, (part.engram_rank + 1) * share)
        layer["engram.embed"] = [
            tensors[f"{start}engram.embed.{kind}"][mine_rows].view(torch.uint8) for kind in ("weight", "scale")
        ]
    return layer


@st.composite
def rank_parts(draw: st.DrawFn) -> RankPart:
    ep = draw(st.sampled_from((1, 2, 4)))
    engram_ranks = draw(st.integers(1, 11))
    return RankPart(draw(st.integers(0, ep - 1)), ep, draw(st.integers(0, engram_ranks - 1)), engram_ranks)


@settings(max_examples=20)
@given(rank_parts())
def test_a_rank_reads_its_part_of_the_files(checkpoint: Path, tensors: Tensors, part: RankPart) -> None:
    loaded = load_weights(checkpoint, MODEL, part)
    for index, layer in enumerate(loaded.layers):
        for key, parts in expected_layer(tensors, index, part).items():
            assert torch.equal(layer[key].data.view(torch.uint8), parts[0]), (index, key)
            assert torch.equal(layer[key].scale, parts[1]), (index, key)
    assert torch.equal(loaded.head, tensors["head.weight"])
    assert loaded.num_bytes == sum(rank_bytes(MODEL, part).values())


def test_more_ranks_than_rows_leave_the_last_ones_none() -> None:
    rows = [RankPart(engram_rank=i, engram_ranks=7).engram_rows(8) for i in range(7)]
    assert [len(r) for r in rows] == [2, 2, 2, 2, 0, 0, 0]


def test_a_sharded_read_takes_no_memory_for_the_rest(tmp_path: Path) -> None:
    """A rank that holds 1/128 of a 132 MB table grows by far less than the table."""
    table = replace(MODEL.layers[1].engram, num_rows=4_000_000)
    layers = (MODEL.layers[0], replace(MODEL.layers[1], engram=table))
    model = replace(MODEL, layers=layers, draft=None)
    save_checkpoint(tmp_path, model, dummy_weights(model), tiny.tiny_config())
    code = (
        "import pickle, re, sys\n"
        "from pathlib import Path\n"
        "from backends.torch_runtime.weights import RankPart, load_weights\n"
        "model = pickle.loads(sys.stdin.buffer.read())\n"
        # Not ru_maxrss, which a process has from the one that started it.
        "peak = lambda: 1024 * int(re.search(r'VmHWM:\\s+(\\d+)', Path('/proc/self/status').read_text())[1])\n"
        "before = peak()\n"
        "weights = load_weights(Path(sys.argv[1]), model, RankPart(engram_rank=77, engram_ranks=128))\n"
        "print(peak() - before, weights.num_bytes)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path)],
        input=pickle.dumps(model),
        capture_output=True,
        check=True,
        cwd=Path(__file__).parent.parent,
    )
    grown, held = map(int, done.stdout.split())
    assert sum(p.stat().st_size for p in tmp_path.iterdir()) > 132e6
    assert held < 5e6
    assert grown < 40e6


# --- numbers --------------------------------------------------------------------------------------------------------


def e4m3(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 128 else 1.0, code >> 3 & 15, code & 7
    return sign * (mantissa * 2.0**-9 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def e2m1(code: int) -> float:
    sign, exponent, mantissa = -1.0 if code & 8 else 1.0, code >> 1 & 3, code & 1
    return sign * (mantissa * 0.5 if exponent == 0 else (1 + mantissa / 2) * 2.0 ** (exponent - 1))


def decoded(weight: torch.Tensor, scale: torch.Tensor, rowwise: bool) -> np.ndarray:
    """Numbers of a released weight from the definitions of E4M3, E2M1 and UE8M0, one by one."""
    codes = weight.view(torch.uint8).numpy()
    if weight.dtype == torch.int8:
        codes = np.stack((codes & 15, codes >> 4), -1).reshape(len(codes), -1)
        values = np.asarray([e2m1(code) for code in range(16)])[codes]
    else:
        values = np.asarray([e4m3(code) for code in range(256)])[codes]
    powers = 2.0 ** (scale.view(torch.uint8).numpy().astype(np.float64) - 127)
    rows, columns = np.indices(values.shape)
    return values * powers[rows if rowwise else rows // 32, columns // 32]


@pytest.mark.parametrize(
    ("key", "name"),
    [
        ("attn.wq_b", "attn.wq_b"),
        ("engram.embed", "engram.embed"),
        ("engram.wkv", "engram.wkv"),
        ("ffn.shared_experts.w2", "ffn.shared_experts.w2"),
    ],
)
def test_numbers_are_those_of_the_formats(checkpoint: Path, tensors: Tensors, key: str, name: str) -> None:
    numbers = load_weights(checkpoint, MODEL).layers[1][key].dequantized(torch.float64)
    weight, scale = tensors[f"layers.1.{name}.weight"], tensors[f"layers.1.{name}.scale"]
    np.testing.assert_array_equal(numbers.numpy(), decoded(weight, scale, rowwise=key == "engram.embed"))


def test_numbers_of_experts_are_those_of_the_formats(checkpoint: Path, tensors: Tensors) -> None:
    numbers = load_weights(checkpoint, MODEL, RankPart(1, 2)).layers[9]["ffn.experts.w13"].dequantized(torch.float64)
    parts = [f"mtp.1.ffn.experts.3.{w}" for w in ("w1", "w3")]
    by_hand = [decoded(tensors[f"{p}.weight"], tensors[f"{p}.scale"], rowwise=True) for p in parts]
    np.testing.assert_array_equal(numbers[1].numpy(), np.concatenate(by_hand))


def test_numbers_are_those_of_nemo_automodel(checkpoint: Path, tensors: Tensors) -> None:
    adapter = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.state_dict_adapter")
    weights = load_weights(checkpoint, MODEL)
    compared = 0
    for layer in all_layers(MODEL):
        for entry in layer_entries(MODEL, layer):
            whole = weights.layers[layer.index][entry.key].dequantized()
            for number in range(max(1, entry.num_experts)):
                start = 0
                for part in entry.parts:
                    name = prefix(MODEL, layer) + part.name.format(number)
                    rows = (whole[number] if entry.num_experts else whole)[start : start + part.rows]
                    start += part.rows
                    if f"{name}.scale" not in tensors:
                        continue
                    theirs = adapter.dequantize_checkpoint_weight(
                        tensors[f"{name}.weight"],
                        tensors[f"{name}.scale"],
                        dtype=torch.float32,
                        rowwise=entry.storage == "fp8_rows",
                    )
                    assert torch.equal(rows, theirs), name
                    compared += 1
    assert compared == sum(name.endswith(".scale") for name in tensors)


def plain(tensors: Tensors) -> Tensors:
    """The checkpoint without quantisation: what its numbers are, as FP32."""
    result = {}
    for name, tensor in tensors.items():
        scale = tensors.get(name.removesuffix(".weight") + ".scale")
        if name.endswith(".scale"):
            continue
        if scale is not None and name.endswith(".weight"):
            rowwise = tensor.dtype == torch.int8 or name.endswith("engram.embed.weight")
            tensor = torch.from_numpy(decoded(tensor, scale, rowwise)).float()
        result[name] = tensor
    return result


def test_plain_tensors_load_plain_or_quantised_to_the_same_numbers(tensors: Tensors) -> None:
    """Numbers that came out of a format go into it again without loss, whatever power of two is chosen for them."""
    numbers, original = plain(tensors), from_released(tensors, MODEL)
    unquantised, quantised = from_released(numbers, MODEL), from_released(numbers, MODEL, quantize=True)
    for layer, kept, again in zip(original.layers, unquantised.layers, quantised.layers, strict=True):
        for key, weight in layer.items():
            assert kept[key].storage == "plain"
            assert again[key].storage == weight.storage
            for other in (kept[key], again[key]):
                assert torch.equal(other.dequantized(), weight.dequantized()), key


def test_quantising_on_load_errs_by_half_a_step_at_most(tensors: Tensors) -> None:
    generator = torch.Generator().manual_seed(0)
    numbers = {n: torch.randn(t.shape, generator=generator) for n, t in plain(tensors).items()}
    for part in (WHOLE, RankPart(1, 4, 2, 3)):
        exact = from_released(numbers, MODEL, part)
        rounded = from_released(numbers, MODEL, part, quantize=True)
        for layer, other in zip(exact.layers, rounded.layers, strict=True):
            for key, weight in layer.items():
                error = (other[key].dequantized() - weight.data).abs()
                limit: Any = {"plain": 0.0}.get(other[key].storage, (weight.data.abs() + 1e-2) / 16)  # of E4M3: 2^-4
                if other[key].storage == "mxfp4":
                    # The widest step is 2 scales, and a scale less than a third of the block's largest value.
                    blocks = weight.data.abs().unflatten(-1, (-1, 32))
                    limit = (blocks.amax(-1, keepdim=True) / 3).expand_as(blocks).flatten(-2)
                assert (error <= limit).all(), key


# --- dummies --------------------------------------------------------------------------------------------------------


@cache
def dummies(quantized: bool) -> Tensors:
    weights = dummy_weights(MODEL, seed=9, quantized=quantized, dtype=torch.float32)
    return dict(released_tensors(MODEL, weights))


@settings(max_examples=10)
@given(rank_parts(), st.booleans())
def test_dummies_of_a_rank_are_a_part_of_the_whole(part: RankPart, quantized: bool) -> None:
    own = dummy_weights(MODEL, part, seed=9, quantized=quantized, dtype=torch.float32)
    assert_same(own, from_released(dummies(quantized), MODEL, part))


def test_dummies_of_long_tables_do_not_depend_on_the_split(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("backends.torch_runtime.weights.dummy.TABLE_ROWS", 96)
    whole = dummy_weights(MODEL, engram_rows=700).layers[2]["engram.embed"]
    assert len(whole.data) == 700
    parts = [dummy_weights(MODEL, RankPart(0, 1, i, 5), engram_rows=700).layers[2]["engram.embed"] for i in range(5)]
    assert torch.equal(torch.cat([p.data.view(torch.uint8) for p in parts]), whole.data.view(torch.uint8))
    assert torch.equal(torch.cat([p.scale for p in parts]), whole.scale)
    assert len({bytes(row) for row in whole.data.view(torch.uint8).numpy()}) == 700


def test_dummies_keep_products_at_the_size_of_their_inputs() -> None:
    weights = dummy_weights(MODEL, seed=1)
    for layer in weights.layers:
        for key in ("attn.wq_a_kv", "attn.wo_b", "ffn.experts.w13", "ffn.experts.w2", "ffn.shared_experts.w2"):
            numbers = layer[key].dequantized()
            assert numbers.isfinite().all()
            assert 0.6 < numbers.std() * numbers.shape[-1] ** 0.5 < 1.6, key
            assert layer[key].scale.unique().numel() == 2
    assert not torch.equal(weights.head, dummy_weights(MODEL, seed=2).head)
    assert not torch.equal(weights.layers[0]["ffn.experts.w2"].data[0], weights.layers[0]["ffn.experts.w2"].data[1])


# --- what goes wrong ------------------------------------------------------------------------------------------------


def without(*names: str) -> Callable[[Tensors], Tensors]:
    return lambda tensors: {name: tensor for name, tensor in tensors.items() if name not in names}


def with_tensor(name: str, tensor: torch.Tensor) -> Callable[[Tensors], Tensors]:
    return lambda tensors: tensors | {name: tensor}


def without_scales(tensors: Tensors) -> Tensors:
    return {name: tensor for name, tensor in tensors.items() if not name.endswith(".scale")}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (without("norm.weight"), "1 tensors of the model are missing: norm.weight"),
        (
            without("layers.3.attn.wq_b.scale", "mtp.1.ffn.experts.2.w3.weight"),
            "2 tensors of the model are missing: layers.3.attn.wq_b.scale, mtp.1.ffn.experts.2.w3.weight",
        ),
        (
            without(*(f"layers.0.ffn.experts.{i}.w1.weight" for i in range(8))),
            r"8 tensors .* missing: \S+0.w1.weight, \S+1.w1.weight, \S+2.w1.weight and 5 more$",
        ),
        (with_tensor("layers.8.attn_norm.weight", torch.ones(128)), "1 tensors are not of this model: layers.8.attn"),
        (with_tensor("mtp.3.ffn.gate.bias_vl", torch.ones(4)), "1 tensors are not of this model: mtp.3"),
        (with_tensor("layers.0.attn.wx.weight", torch.ones(4)), "1 tensors are not of this model: layers.0.attn.wx"),
        (
            with_tensor("head.weight", torch.ones(320, 64)),
            r"1 tensors have another shape: head.weight \(expected \[320, 128\], found \[320, 64\]\)",
        ),
        (
            with_tensor("layers.0.attn.wkv.scale", torch.ones(2, 3, dtype=torch.uint8)),
            r"another shape: layers.0.attn.wkv.scale \(expected \[2, 4\], found \[2, 3\]\)",
        ),
        (
            with_tensor("embed.weight", torch.ones(320, 128, dtype=torch.int32)),
            r"1 tensors have another data type: embed.weight \(expected bfloat16 or float16 or float32, found int32\)",
        ),
        (
            with_tensor("layers.0.ffn.experts.0.w1.weight", torch.ones(64, 64)),
            r"another data type: layers.0.ffn.experts.0.w1.weight \(expected int8 or uint8, found float32\)",
        ),
        (without_scales, r"another data type: .*\(expected bfloat16 or float16 or float32, found float8_e4m3fn\)"),
    ],
)
def test_tensors_that_do_not_fit_are_named(
    tensors: Tensors, change: Callable[[Tensors], Tensors], message: str
) -> None:
    with pytest.raises(UsageError, match=message):
        from_released(change(tensors), MODEL)


@pytest.fixture
def spoilt(checkpoint: Path, tmp_path: Path) -> Path:
    """A copy to spoil."""
    for path in checkpoint.iterdir():
        (tmp_path / path.name).write_bytes(path.read_bytes())
    return tmp_path


def spoil_config(folder: Path, **changes: Any) -> None:
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | changes))


def first_shard(folder: Path) -> Path:
    return min(folder.glob("*.safetensors"))


def truncate(folder: Path) -> None:
    path = first_shard(folder)
    path.write_bytes(path.read_bytes()[:-5])


def forget_shard(folder: Path) -> None:
    first_shard(folder).unlink()


def forget_all(folder: Path) -> None:
    for path in folder.glob("model*"):
        path.unlink()


def edit_index(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    change(index)
    path.write_text(json.dumps(index))


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        (truncate, "model-00001-of-.* is truncated or no safetensors file"),
        (lambda f: first_shard(f).write_bytes(b"<html>not found</html>"), "is truncated or no safetensors file"),
        (lambda f: first_shard(f).write_bytes(b""), "is truncated or no safetensors file"),
        (forget_shard, "cannot read weights .*model-00001-of-"),
        (forget_all, "holds no safetensors: neither model.safetensors.index.json nor model.safetensors"),
        (lambda f: spoil_config(f, architectures=["DeepseekV3ForCausalLM"]), "is of architecture .*DeepseekV3ForC"),
        (lambda f: (f / "config.json").unlink(), "cannot read model config"),
        (lambda f: edit_index(f, lambda i: i.pop("weight_map")), "has no weight_map"),
        (lambda f: edit_index(f, lambda i: i["weight_map"].update(x="../x.safetensors")), "has no weight_map"),
        (
            lambda f: edit_index(f, lambda i: i["weight_map"].update(x=first_shard(f).name)),
            "1 tensors of the index are not in its files: x",
        ),
        (
            lambda f: safetensors_torch.save_file({"embed.weight": torch.ones(2)}, max(f.glob("*.safetensors"))),
            "tensors are also in another file: embed.weight",
        ),
    ],
)
def test_files_that_do_not_fit_are_named(spoilt: Path, spoil: Callable[[Path], Any], message: str) -> None:
    spoil(spoilt)
    with pytest.raises(UsageError, match=message):
        load_weights(spoilt, MODEL)


def test_what_cannot_be_split_or_is_not_supported_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="8 experts do not divide evenly over ep 3"):
        rank_bytes(MODEL, RankPart(0, 3))
    with pytest.raises(UsageError, match="4 experts do not divide evenly over ep 8"):
        dummy_weights(MODEL, RankPart(0, 8))
    with pytest.raises(UsageError, match="ep rank 2 is not one of 2"):
        RankPart(2, 2)
    with pytest.raises(UsageError, match=r"loads weights of deepseek-v4\.1 and not of"):
        rank_bytes(load_model("deepseek-v3"))
    with pytest.raises(UsageError, match="dense weights in int8 and experts in mxfp4 are not supported"):
        rank_bytes(replace(MODEL, dense_format=replace(MODEL.dense_format, name="int8")))
    with pytest.raises(UsageError, match="there is no folder"):
        load_weights(tmp_path / "nowhere", MODEL)
    odd = replace(MODEL.layers[0], attention=replace(MODEL.layers[0].attention, q_lora_rank=80))
    with pytest.raises(UsageError, match=r"weight attn\.wq_a: 80 is not a multiple of 32"):
        rank_bytes(replace(MODEL, layers=(odd,), draft=None))
    share = dummy_weights(MODEL, RankPart(0, 2))
    with pytest.raises(UsageError, match=r"weight layers.0.ffn.experts.w13 is \[4, 128, 128\] and not the whole \[8, "):
        save_checkpoint(tmp_path, MODEL, share, tiny.tiny_config())
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write"):
        save_checkpoint(tmp_path / "file", MODEL, dummy_weights(MODEL), tiny.tiny_config())


# --- the tiny model -------------------------------------------------------------------------------------------------


@given(st.text())
def test_the_tiny_tokenizer_keeps_every_text(text: str) -> None:
    tokenizer = tiny.tiny_tokenizer()
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids, skip_special_tokens=False) == text
    assert len(ids) == len(text.encode())
    assert tokenizer.get_vocab_size() == MODEL.vocab_size


def test_the_tiny_model_has_every_role() -> None:
    roles = [layer.attention.role.value for layer in MODEL.layers]
    assert roles == ["window-only"] * 2 + ["full", "reuse", "full", "reuse", "reindex", "reuse"]
    assert [layer.index for layer in MODEL.layers if layer.engram] == [1, 2]
    assert MODEL.draft is not None
    assert len(MODEL.draft.layers) == 3


@pytest.mark.filterwarnings("ignore:`rope_scaling` is deprecated")
def test_the_tiny_tables_and_tokens_are_those_that_nemo_automodel_hashes() -> None:
    engram = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.engram")
    config = pytest.importorskip("nemo_automodel.components.models.deepseek_v41.config")
    transformers = pytest.importorskip("transformers")
    tokenizer = transformers.PreTrainedTokenizerFast(tokenizer_object=tiny.tiny_tokenizer())
    text = config.DeepseekV41TextConfig(**tiny.tiny_config()["text_config"])
    hashing = engram.DeepseekV41NgramHash(text, tokenizer)
    assert hashing.primes.sum(1).tolist() == [MODEL.layers[i].engram.num_rows for i in (1, 2)]
