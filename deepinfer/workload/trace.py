"""Public request traces: Mooncake's JSON lines and Azure's CSV, told apart by content.

Mooncake: kvcache-ai/Mooncake, FAST25-release/traces: `timestamp` in ms, `input_length`, `output_length`, and
`hash_ids`, one per started block of 512 prompt tokens; an equal id means an equal block and prefix.
Azure: Azure/AzurePublicDataset, AzureLLMInferenceTrace: TIMESTAMP, ContextTokens, GeneratedTokens; no ids.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from deepinfer.errors import UsageError
from deepinfer.numeric import Floats, Ints
from deepinfer.workload.spec import MAX_TOKENS, TraceFormat, TraceSource

MOONCAKE_BLOCK_TOKENS = 512
"""Prompt tokens per hash id (Mooncake, FAST25 release, description of the traces)."""

_AZURE_HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens"
_AZURE_TIME = re.compile(
    r"((?:19|20)[0-9]{2}-[0-9]{2}-[0-9]{2}[ T](?:[01][0-9]|2[0-3]):[0-9]{2}:[0-9]{2}(?:\.[0-9]{1,9})?)"
    r"(?:Z|\+00:00)?"
)
_AZURE_ROW = re.compile(_AZURE_TIME.pattern + r",([1-9][0-9]{0,8}),([1-9][0-9]{0,8})")
_ACCEPTED = (
    "a Mooncake trace (JSON lines with timestamp, input_length, output_length, hash_ids) "
    f"nor an Azure trace (CSV with the header {_AZURE_HEADER})"
)
_LATEST_MS = 2**53

_Row = TypeVar("_Row")
_MooncakeRow = tuple[float, int, int, tuple[int, ...]]
_AzureRow = tuple[str, int, int]


@dataclass(frozen=True, slots=True, eq=False)
class Trace:
    """The requests of a trace file in order of arrival; arrays are read-only and of one length, [requests].

    `arrivals_s` in seconds (float64), the first is 0; lengths in tokens (int64, at least 1). `block_ids[r]`
    names the prompt's blocks of `block_tokens` tokens, the last one perhaps partly filled; a format without
    ids has () and 0.
    """

    format: TraceFormat
    sha256: str
    arrivals_s: Floats
    prompt_tokens: Ints
    output_tokens: Ints
    block_ids: tuple[tuple[int, ...], ...]
    block_tokens: int


def read_trace(path: str | Path) -> Trace:
    """The trace in a file, Mooncake or Azure by its first line. Rows out of order are sorted by time, stably.

    A length of 0 is refused: none of the published traces that we read has one. Blank lines and JSON fields
    beyond the four are ignored. An Azure file cut inside its very last number cannot be told from a whole
    one, as the published ones end without a newline; `sha256` tells them apart.
    Raises UsageError, naming file and line, for a file that is missing, a directory, empty, not UTF-8, of
    neither format, or with a malformed row.
    """
    data = _read_bytes(path)
    lines = [line.removesuffix("\r") for line in _decode(data, path).split("\n")]
    sha256 = hashlib.sha256(data).hexdigest()
    first = lines[0].strip()
    if first.startswith("{"):
        return _mooncake(sha256, _rows(lines, _mooncake_row, path, skip=0))
    if first == _AZURE_HEADER:
        return _azure(sha256, _rows(lines, _azure_row, path, skip=1))
    raise UsageError(f"trace file {path}, line 1: {_short(first)} begins neither {_ACCEPTED}")


def trace_source(path: str | Path, trace: Trace | None = None) -> TraceSource:
    """What a plan records about a trace file, which is read unless given. Raises UsageError as `read_trace` does."""
    trace = read_trace(path) if trace is None else trace
    return TraceSource(path=str(path), format=trace.format, sha256=trace.sha256)


def rescale(arrivals_s: Floats, rate: float) -> Floats:
    """Arrivals ([requests], seconds, ascending) stretched about the first so that the mean gap is 1 / rate.

    `rate` in requests/s. A single arrival has no gap and stays. Raises UsageError for a rate that is not
    positive and finite, for arrivals that are all at one time, and when the last time is not a finite float.
    """
    if not (math.isfinite(rate) and rate > 0):
        raise UsageError(f"rate {rate!r} is not a positive number of requests/s")
    if len(arrivals_s) < 2:
        return arrivals_s
    first, span_s = arrivals_s[0], arrivals_s[-1] - arrivals_s[0]
    if span_s <= 0:
        raise UsageError(f"cannot rescale to {rate:g} requests/s: all {len(arrivals_s)} requests arrive at once")
    new_span_s = (len(arrivals_s) - 1) / rate
    if not math.isfinite(new_span_s):
        raise UsageError(f"rate {rate!r} requests/s is too small: the last arrival is not a finite time")
    scaled: Floats = first + (arrivals_s - first) / span_s * new_span_s
    return scaled


def _read_bytes(path: str | Path) -> bytes:
    try:
        data = Path(path).read_bytes()
    except FileNotFoundError:
        raise UsageError(f"trace file {path} does not exist") from None
    except IsADirectoryError:
        raise UsageError(f"trace file {path} is a directory, not a file") from None
    except (OSError, ValueError) as error:
        reason = getattr(error, "strerror", None) or error
        raise UsageError(f"cannot read trace file {path}: {reason}") from None
    if not data.strip():
        raise UsageError(f"trace file {path} is empty")
    return data


def _decode(data: bytes, path: str | Path) -> str:
    try:
        return data.decode("utf-8").removeprefix("\ufeff")
    except UnicodeDecodeError as error:
        line = data.count(b"\n", 0, error.start) + 1
        byte = f"byte {data[error.start]:#04x}"
        raise UsageError(f"trace file {path}, line {line}: not UTF-8 text ({byte})") from None


def _rows(lines: Sequence[str], parse: Callable[[str], _Row], path: str | Path, skip: int) -> list[_Row]:
    rows = []
    for number, line in enumerate(lines[skip:], start=skip + 1):
        if not line or line.isspace():
            continue
        try:
            rows.append(parse(line))
        except ValueError as error:
            raise UsageError(f"trace file {path}, line {number}: {error}") from None
    if not rows:
        raise UsageError(f"trace file {path} has a header and no requests")
    return rows


def _mooncake_row(line: str) -> _MooncakeRow:
    try:
        row = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{_short(line)} is not a whole JSON object ({error})") from None
    if not isinstance(row, dict):
        raise ValueError(f"{_short(line)} is not a JSON object")
    prompt_tokens, output_tokens = _tokens(row, "input_length"), _tokens(row, "output_length")
    return _milliseconds(row), prompt_tokens, output_tokens, _hash_ids(row, prompt_tokens)


def _field(row: dict[str, Any], name: str) -> Any:
    if name not in row:
        raise ValueError(f"field {name} is missing")
    return row[name]


def _tokens(row: dict[str, Any], name: str) -> int:
    value = _field(row, name)
    if type(value) is not int or not 1 <= value <= MAX_TOKENS:
        raise ValueError(_not_tokens(name, value))
    return value


def _milliseconds(row: dict[str, Any]) -> float:
    value = _field(row, "timestamp")
    if type(value) not in (int, float) or not 0 <= value <= _LATEST_MS:
        raise ValueError(f"timestamp {_short(value)} is not a number of milliseconds from 0 on")
    return float(value)


def _hash_ids(row: dict[str, Any], prompt_tokens: int) -> tuple[int, ...]:
    ids = _field(row, "hash_ids")
    if not isinstance(ids, list) or not set(map(type, ids)) <= {int}:
        raise ValueError(f"hash_ids {_short(ids)} is not a list of integers")
    expected = -(-prompt_tokens // MOONCAKE_BLOCK_TOKENS)
    if len(ids) != expected:
        raise ValueError(
            f"{len(ids)} hash_ids for input_length {prompt_tokens}, where blocks of "
            f"{MOONCAKE_BLOCK_TOKENS} tokens need {expected}"
        )
    return tuple(ids)


def _azure_row(line: str) -> _AzureRow:
    match = _AZURE_ROW.fullmatch(line)
    if match is None:
        raise ValueError(_azure_fault(line))
    time, prompt_tokens, output_tokens = match.groups()
    try:
        datetime.fromisoformat(time[:19])
    except ValueError as error:
        raise ValueError(f"TIMESTAMP {_short(time)} does not exist ({error})") from None
    return time, int(prompt_tokens), int(output_tokens)


def _azure_fault(line: str) -> str:
    fields = line.split(",")
    if len(fields) != 3:
        return f"{_short(line)} has {len(fields)} of the 3 fields {_AZURE_HEADER}"
    if not _AZURE_TIME.fullmatch(fields[0]):
        return f"TIMESTAMP {_short(fields[0])} is not a UTC time like 2023-11-16 18:15:46.6805900"
    name, text = next(
        (name, text)
        for name, text in zip(("ContextTokens", "GeneratedTokens"), fields[1:], strict=True)
        if not re.fullmatch(r"[1-9][0-9]{0,8}", text)
    )
    return _not_tokens(name, text)


def _not_tokens(name: str, value: object) -> str:
    return f"{name} {_short(value)} is not a whole number of tokens from 1 to {MAX_TOKENS}"


def _short(value: object) -> str:
    """A value for a message: its beginning, quoted; `repr` of a huge integer alone would raise."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):
        return "(too large to print)"
    return text if len(text) <= 60 else f"{text[:57]}..."


def _mooncake(sha256: str, rows: list[_MooncakeRow]) -> Trace:
    times, prompts, outputs, ids = zip(*rows, strict=True)
    ticks = np.array(times, dtype=np.float64)
    return _sorted_trace("mooncake", sha256, (ticks - ticks.min()) / 1e3, prompts, outputs, ids, MOONCAKE_BLOCK_TOKENS)


def _azure(sha256: str, rows: list[_AzureRow]) -> Trace:
    times, prompts, outputs = zip(*rows, strict=True)
    ticks = np.array(times, dtype="datetime64[ns]").astype(np.int64)
    return _sorted_trace("azure", sha256, (ticks - ticks.min()) / 1e9, prompts, outputs, ((),) * len(rows), 0)


def _sorted_trace(
    format: TraceFormat,
    sha256: str,
    arrivals_s: Floats,
    prompts: Sequence[int],
    outputs: Sequence[int],
    ids: Sequence[tuple[int, ...]],
    block_tokens: int,
) -> Trace:
    order = np.argsort(arrivals_s, kind="stable")
    arrays = (
        arrivals_s[order],
        np.array(prompts, dtype=np.int64)[order],
        np.array(outputs, dtype=np.int64)[order],
    )
    for array in arrays:
        array.setflags(write=False)
    return Trace(format, sha256, *arrays, tuple(ids[r] for r in order), block_tokens)
