"""What both command lines share: one place where errors become a sentence and exit status 2."""

from __future__ import annotations

import os
import signal
import sys
from typing import TYPE_CHECKING

from deepinfer.errors import DeepinferError

if TYPE_CHECKING:
    import typer


def run_app(app: typer.Typer) -> None:
    """Run a command line: user errors are one sentence on stderr and status 2; Ctrl-C ends at once with 130."""
    try:
        app()
    except DeepinferError as error:
        print(f"error: {error}", file=sys.stderr)
        sys.exit(2)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.stderr.flush()
        # Worker processes of a search must not outlive it, nor may waiting for them delay the end.
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        if os.getpgrp() == os.getpid():
            os.killpg(os.getpgrp(), signal.SIGTERM)
        os._exit(130)
