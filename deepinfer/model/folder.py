"""What lies beside the `config.json` in a model's folder: its tokenizer, and the tokens that end a sequence."""

from __future__ import annotations

from pathlib import Path

from deepinfer.errors import UsageError
from deepinfer.files import file_exists, read_json


def model_folder(model: str) -> Path | None:
    """The folder of a model that was named by its path; None for a shipped card, which has no files beside it."""
    if not file_exists(model):
        return None
    path = Path(model)
    return path if path.is_dir() else path.parent


def tokenizer_file(model: str) -> Path | None:
    """The model's `tokenizer.json`, if it has one."""
    folder = model_folder(model)
    path = folder / "tokenizer.json" if folder else None
    return path if path is not None and path.is_file() else None


def eos_token_ids(model: str) -> tuple[int, ...]:
    """Tokens that end a sequence: `eos_token_id` of `generation_config.json`, else of `config.json`; () without.

    Raises UsageError for a file that is unreadable, or a field that is neither a number nor a list of them.
    """
    folder = model_folder(model)
    for name in ("generation_config.json", "config.json"):
        path = folder / name if folder else None
        if path is None or not path.is_file():
            continue
        config = read_json(path, "model config")
        text = config.get("text_config")
        found = config.get("eos_token_id", text.get("eos_token_id") if isinstance(text, dict) else None)
        if found is not None:
            listed = found if isinstance(found, list) else [found]
            if not all(isinstance(token, int) and not isinstance(token, bool) for token in listed):
                raise UsageError(f"{path}: eos_token_id must be a token id or a list of them, got {found!r}")
            return tuple(listed)
    return ()
