"""Files at the edge: reading what a user names, and writing so that nothing half-written is left behind."""

from __future__ import annotations

import json
import os
import tempfile
import tomllib
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from deepinfer.errors import UsageError


def file_exists(path: str) -> bool:
    """Whether there is such a file or folder; a name no file can have is one that does not exist."""
    try:
        return Path(path).exists()
    except (OSError, ValueError):
        return False


def read_text(path: Path, what: str) -> str:
    """The text of a file. Raises UsageError, naming `what` it is, when it cannot be read or is not UTF-8."""
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise UsageError(f"cannot read {what} {path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise UsageError(f"{what} {path} is not UTF-8 text") from None
    except ValueError as error:
        raise UsageError(f"cannot read {what} {path!r}: {error}") from None


def read_json(path: Path, what: str) -> dict[str, Any]:
    """The JSON object in a file. Raises UsageError for anything else."""
    try:
        value = json.loads(read_text(path, what))
    except (json.JSONDecodeError, RecursionError) as error:
        raise UsageError(f"{what} {path} is not valid JSON: {error}") from None
    if not isinstance(value, dict):
        raise UsageError(f"{what} {path} holds no JSON object")
    return value


def read_toml(path: Path, what: str) -> dict[str, Any]:
    """The table in a TOML file. Raises UsageError when it is none."""
    try:
        return tomllib.loads(read_text(path, what))
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"{what} {path} is not valid TOML: {error}") from None


def first_fault(error: ValidationError) -> str:
    """The first thing a model of pydantic complains about, as "field: complaint"."""
    fault = error.errors()[0]
    where = ".".join(str(part) for part in fault["loc"])
    message = fault["msg"][0].lower() + fault["msg"][1:]
    return f"{where}: {message}" if where else message


def write_file(path: Path, content: bytes) -> None:
    """Write a file so that it is there whole or not at all. Raises UsageError when it cannot be written."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content)
        Path(temporary).chmod(0o644)
        Path(temporary).replace(path)
    except OSError as error:
        raise UsageError(f"cannot write {path}: {error.strerror}") from None
    finally:
        Path(temporary).unlink(missing_ok=True)
