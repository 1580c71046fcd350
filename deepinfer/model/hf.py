"""Reads a model card: a shipped name, or the path of a Hugging Face `config.json` (or of its folder)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepinfer.errors import UsageError, unknown_name
from deepinfer.files import file_exists, first_fault, read_json
from deepinfer.model.families.deepseek_v3 import parse_v3, parse_v32
from deepinfer.model.families.deepseek_v4 import parse_v4
from deepinfer.model.families.deepseek_v41 import parse_v41
from deepinfer.model.families.qwen3_moe import parse_qwen3_moe
from deepinfer.model.spec import ModelSpec

_CARDS = Path(__file__).parent / "cards"
_PARSERS: dict[str, Callable[[dict[str, Any], str], ModelSpec]] = {
    "DeepseekV3ForCausalLM": parse_v3,
    "DeepseekV32ForCausalLM": parse_v32,
    "DeepseekV4ForCausalLM": parse_v4,
    "DeepseekV41ForCausalLM": parse_v41,
    "Qwen3MoeForCausalLM": parse_qwen3_moe,
}
_ORGANISATIONS = ("deepseek-ai/", "moonshotai/", "qwen/")


def card_names() -> list[str]:
    """Names of the shipped model cards."""
    return sorted(path.stem for path in _CARDS.glob("*.json"))


def load_model(name_or_path: str) -> ModelSpec:
    """The model of a shipped card, or of the `config.json` at a path (a file or the folder that holds it).

    Raises UsageError for an unknown name, an unreadable or malformed file, or an architecture not supported.
    """
    path = Path(name_or_path)
    key = name_or_path.lower()
    for organisation in _ORGANISATIONS:
        key = key.removeprefix(organisation)
    if key in card_names():
        path, name = _CARDS / f"{key}.json", key
    elif file_exists(name_or_path):
        path = path / "config.json" if path.is_dir() else path
        name = path.parent.name if path.name == "config.json" else path.stem
    else:
        raise unknown_name("model", name_or_path, card_names())
    return parse_config(read_json(path, "model config"), name)


def parse_config(config: dict[str, Any], name: str) -> ModelSpec:
    """A `ModelSpec` from the dictionary of a `config.json`. Raises UsageError, naming the offending field."""
    listed = config.get("architectures")
    architecture = str(listed[0] if isinstance(listed, list) and listed else config.get("model_type", "none"))
    parser = _PARSERS.get(architecture)
    if parser is None:
        raise UsageError(
            f"model {name}: architecture {architecture!r} is not supported; supported are "
            + ", ".join(sorted(_PARSERS))
        )
    try:
        return parser(config, name)
    except ValidationError as error:
        raise UsageError(f"model {name}: config.json field {first_fault(error)}") from None
