"""What users give as prompts, as vLLM takes it: text or token ids, one or many, plain or in a dictionary."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

from deepinfer.errors import UsageError

Prompt: TypeAlias = "str | Sequence[int] | Mapping[str, Any]"
"""Text, token ids, or {"prompt": text} or {"prompt_token_ids": ids}."""
Prompts: TypeAlias = "Prompt | Sequence[Prompt]"


@dataclass(frozen=True)
class ParsedPrompt:
    """A prompt as text or as token ids: exactly one of them, and never empty."""

    text: str | None = None
    token_ids: tuple[int, ...] | None = None


def parse_prompts(prompts: Prompts) -> list[ParsedPrompt]:
    """Prompts in their order; a list of whole numbers is one prompt. Raises UsageError for anything else."""
    if isinstance(prompts, str | Mapping):
        return [_parse(prompts, 0)]
    if not isinstance(prompts, Iterable):
        raise UsageError(f"prompts must be text or token ids, got {type(prompts).__name__}")
    listed = list(prompts)
    if listed and _is_whole(listed[0]):
        return [_parse(listed, 0)]
    return [_parse(prompt, number) for number, prompt in enumerate(listed)]


def check_token_ids(token_ids: Sequence[int], vocab_size: int, number: int) -> None:
    """Raises UsageError for a prompt with a token that the model does not have."""
    worst = max(token_ids) if max(token_ids) >= vocab_size else min(token_ids)
    if not 0 <= worst < vocab_size:
        raise UsageError(f"prompt {number}: token id {worst} is outside the model's vocabulary of {vocab_size} tokens")


def _parse(prompt: Any, number: int) -> ParsedPrompt:
    if isinstance(prompt, Mapping):
        if len(prompt) != 1 or not prompt.keys() <= {"prompt", "prompt_token_ids"}:
            raise UsageError(
                f"prompt {number}: a dictionary must have either 'prompt' or 'prompt_token_ids', "
                f"got {', '.join(map(repr, prompt)) or 'nothing'}"
            )
        ((name, prompt),) = prompt.items()
        if isinstance(prompt, str) != (name == "prompt"):
            raise UsageError(f"prompt {number}: {name!r} must be {'text' if name == 'prompt' else 'token ids'}")
    if isinstance(prompt, str):
        if not prompt:
            raise UsageError(f"prompt {number} is empty")
        return ParsedPrompt(text=prompt)
    if not isinstance(prompt, Iterable) or isinstance(prompt, bytes):
        raise UsageError(f"prompt {number} must be text or token ids, got {type(prompt).__name__}")
    tokens = list(prompt)
    if not tokens:
        raise UsageError(f"prompt {number} is empty")
    wrong = next((token for token in tokens if not _is_whole(token)), None)
    if wrong is not None:
        raise UsageError(f"prompt {number}: token ids must be whole numbers, got {wrong!r}")
    return ParsedPrompt(token_ids=tuple(map(operator.index, tokens)))


def _is_whole(value: object) -> bool:
    """Whether it is an integer of Python or NumPy."""
    return hasattr(value, "__index__") and not isinstance(value, bool)
