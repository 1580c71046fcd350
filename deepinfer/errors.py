"""The three families of errors a user can cause. Each message is one sentence for the person who typed."""

from __future__ import annotations

import difflib
from collections.abc import Iterable


class DeepinferError(Exception):
    """Base of all errors with a message for the user; command lines print it and exit with status 2."""


class UsageError(DeepinferError):
    """The question itself is wrong: an unknown name, a contradictory flag, a malformed file."""


class InfeasibleError(DeepinferError):
    """The question is sound and nothing satisfies it; the message says why and what would."""


class NoDataError(DeepinferError):
    """A number that the answer needs is not in any catalog or profile; nothing is guessed in its place."""


def unknown_name(kind: str, name: str, known: Iterable[str]) -> UsageError:
    """The error for a name that is not in a catalog, with the nearest known one."""
    names = sorted(known)
    started = [known_name for known_name in names if name and known_name.startswith(name.lower())]
    close = started or difflib.get_close_matches(name.lower(), names, n=1, cutoff=0.4)
    hint = f"did you mean {close[0]}? " if close else ""
    return UsageError(f"unknown {kind} {name!r}: {hint}known are {', '.join(names)}")
