"""Text to token ids and back, with the `tokenizers` package; an engine that is given token ids never loads it."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from deepinfer.errors import UsageError

if TYPE_CHECKING:
    import tokenizers

_INCOMPLETE = "\N{REPLACEMENT CHARACTER}"


def has_tokenizers() -> bool:
    """Whether the `tokenizers` package is installed."""
    return importlib.util.find_spec("tokenizers") is not None


class Tokenizer:
    """The tokenizer of a `tokenizer.json`. Raises UsageError when the package is missing or the file is none."""

    def __init__(self, path: Path) -> None:
        try:
            import tokenizers
        except ModuleNotFoundError:
            raise UsageError(
                "prompts and stop strings as text need the package tokenizers, which is not installed: "
                "install it, or give token ids"
            ) from None
        try:
            self._tokenizer: tokenizers.Tokenizer = tokenizers.Tokenizer.from_file(str(path))
        except Exception as error:  # the package raises bare Exception
            raise UsageError(f"cannot read tokenizer {path}: {error}") from None

    def encode(self, text: str) -> tuple[int, ...]:
        """Token ids of a text, with the special tokens that the tokenizer puts around it."""
        return tuple(self._tokenizer.encode(text).ids)

    def decode(self, token_ids: Sequence[int]) -> str:
        """The text of token ids, special tokens left out."""
        return self._tokenizer.decode(list(token_ids), skip_special_tokens=True)


class Detokenizer:
    """The text of one request, token by token: the pieces joined are the text of all tokens.

    A character may lie over several tokens, and a token's text may depend on the one before: each piece is the
    difference that the newest token makes to the text of a few before it, without a character that may be incomplete.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._tokens: list[int] = []  # the last ones whose text is known to be whole, and those after them
        self._num_whole = 0
        self._given = 0  # characters of their text that are in a piece
        self.holds_back = False

    def push(self, token: int) -> str:
        """Text that is certain with one more token; often that of the token.

        `holds_back` says whether a character has begun that is not in it.
        """
        self._tokens.append(token)
        text = self._tokenizer.decode(self._tokens)
        certain = text.rstrip(_INCOMPLETE)
        self.holds_back = len(certain) < len(text)
        piece = certain[self._given :]
        if piece and not self.holds_back:
            del self._tokens[: self._num_whole]
            self._num_whole = len(self._tokens)
            self._given = len(self._tokenizer.decode(self._tokens))
        else:
            self._given += len(piece)
        return piece

    def flush(self) -> str:
        """What was held back, when no token will follow."""
        return self._tokenizer.decode(self._tokens)[self._given :]
