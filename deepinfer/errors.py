"""The three families of errors a user can cause. Each message is one sentence for the person who typed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Mapping, Sequence


class DeepinferError(Exception):
    """Base of all errors with a message for the user; command lines print it and exit with status 2."""


class UsageError(DeepinferError):
    """The question itself is wrong: an unknown name, a contradictory flag, a malformed file."""


class InfeasibleError(DeepinferError):
    """The question is sound and nothing satisfies it; the message says why and what would."""


class NoDataError(DeepinferError):
    """A number that the answer needs is not in any catalog or profile; nothing is guessed in its place."""


class EngineLostError(DeepinferError):
    """An engine ended in the middle of a run: `cause` says how, in a sentence without its full stop.

    `finished` and `unfinished` are the tokens of every request, by its number: no request is lost with the engine.
    """

    def __init__(
        self, cause: str, finished: Mapping[int, tuple[int, ...]], unfinished: Mapping[int, tuple[int, ...]]
    ) -> None:
        listed = ", ".join(map(str, sorted(unfinished)[:10])) + (", ..." if len(unfinished) > 10 else "")
        total = len(finished) + len(unfinished)
        super().__init__(f"{cause}; {len(unfinished)} of {total} requests are unfinished: {listed}")
        self.cause, self.finished, self.unfinished = cause, dict(finished), dict(unfinished)

    def renumbered(self, numbers: Sequence[int]) -> EngineLostError:
        """The same for a caller whose request `numbers[i]` was given as number i."""
        finished, unfinished = (
            {numbers[i]: tokens for i, tokens in requests.items()} for requests in (self.finished, self.unfinished)
        )
        return EngineLostError(self.cause, finished, unfinished)


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not in a catalog, with the nearest known one."""
    names = sorted(known)
    started = [known_name for known_name in names if name and known_name.startswith(name.lower())]
    close = started or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    return UsageError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}")
