"""A progress bar on stderr for runs that produce tokens, where stderr is a terminal."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bar

from deepinfer.engine.runner import Progress


@contextmanager
def progress_bar(label: str) -> Iterator[Callable[[Progress], None]]:
    """A bar of finished requests with output tokens/s so far; gone when the block ends."""
    console = Console(stderr=True)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[rate]:,.1f} output tokens/s"),
        TimeElapsedColumn(),
        TimeRemainingColumn(),
    )
    with Bar(*columns, console=console, transient=True, disable=not console.is_terminal) as bar:
        task = bar.add_task(label, total=None, rate=0.0)

        def show(now: Progress) -> None:
            rate = now.output_tokens / now.elapsed_s if now.elapsed_s > 0 else 0.0
            bar.update(task, completed=now.finished, total=now.total, rate=rate)

        yield show
