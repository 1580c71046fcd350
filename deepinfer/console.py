"""What both command lines share: errors become one sentence on stderr and exit status 2."""

from __future__ import annotations

import os
import signal
import sys

import typer

from deepinfer.errors import DeepinferError

# The parser's own complaints (unknown option, not a number); typer exports only this subclass of them.
_ParserError: type[Exception] = typer.BadParameter.__mro__[1]


def run_app(app: typer.Typer) -> None:
    """Run a command line and leave with its exit status: 0, 2 for what the user got wrong, 130 after Ctrl-C."""
    signal.signal(signal.SIGINT, _interrupted)
    try:
        status = app(standalone_mode=False)
    except DeepinferError as error:
        _fail(str(error))
    except _ParserError as error:
        # Without a command the parser has printed its help and says nothing.
        _fail(getattr(error, "format_message", error.__str__)() or "no command given")
    sys.exit(status if isinstance(status, int) else 0)


def _fail(message: str) -> None:
    print(f"error: {message}", file=sys.stderr)
    sys.exit(2)


def _interrupted(number: int, frame: object) -> None:
    """Leave at once on Ctrl-C: worker processes must neither outlive a search nor delay its end."""
    print("interrupted", file=sys.stderr, flush=True)
    for child in _children():
        os.kill(child, signal.SIGKILL)
    os._exit(130)


def _children() -> list[int]:
    """Process ids of this process's children (Linux)."""
    with open(f"/proc/self/task/{os.getpid()}/children", encoding="ascii") as file:  # noqa: PTH123
        return [int(pid) for pid in file.read().split()]
