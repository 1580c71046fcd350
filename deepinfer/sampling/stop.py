"""When a request ends before its length: the same object decides in the engine and cuts the text for the user."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from deepinfer.sampling.params import SamplingParams
from deepinfer.sampling.tokenizer import Detokenizer


@dataclass(frozen=True, slots=True)
class Stop:
    """A request ends after `num_tokens` of the tokens just given.

    `cause` is the stop string or stop token id, None for the end of the sequence.
    """

    num_tokens: int
    cause: str | int | None


class StopChecker:
    """Takes in the tokens of one request in order, and says which one ends it.

    Length is not its business. Without a detokenizer it has no text, and no stop strings.
    """

    def __init__(
        self, params: SamplingParams, eos_token_ids: Collection[int], detokenizer: Detokenizer | None = None
    ) -> None:
        self._ends: dict[int, int | None] = {} if params.ignore_eos else dict.fromkeys(eos_token_ids)
        self._ends.update((token, token) for token in params.stop_ids)
        self._strings = params.stop_strings if detokenizer else ()
        self._longest = max((len(string) for string in self._strings), default=0)
        self._min_tokens = params.min_tokens
        self._num_tokens = 0
        self._detokenizer = detokenizer
        self._searched_from = 0
        self._held = True
        self.text = ""

    def accept(self, token_ids: Sequence[int]) -> Stop | None:
        """Take in what a step kept, one token or several; the first of them that ends the request, if any does.

        Nothing may be given after that.
        """
        for number, token in enumerate(token_ids, 1):
            self._num_tokens += 1
            may_end = self._num_tokens > self._min_tokens
            if may_end and token in self._ends:
                return Stop(number, self._ends[token])  # its own text is no part of the answer
            if self._detokenizer is None:
                continue
            self.text += self._detokenizer.push(token)
            if not may_end:
                self._searched_from = len(self.text) + self._detokenizer.holds_back
            elif (string := self._cut()) is not None:
                self._held = False
                return Stop(number, string)
        return None

    def final_text(self) -> str:
        """The text when no token will follow: cut before the stop string, or with what was held back."""
        if self._detokenizer is not None and self._held:
            self.text += self._detokenizer.flush()
            self._held = False
        return self.text

    def _cut(self) -> str | None:
        """Cut the text before the stop string that begins first, if there is one; returns it."""
        if not self._strings:
            return None
        places = [(at, s) for s in self._strings if (at := self.text.find(s, self._searched_from)) >= 0]
        if not places:
            # A string may begin in what is there and end in what comes.
            self._searched_from = max(self._searched_from, len(self.text) - self._longest + 1)
            return None
        at, string = min(places, key=lambda place: place[0])
        self.text = self.text[:at]
        return string
