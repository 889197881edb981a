"""What a terminal shows while one waits: a bar while weights are read, a spinner while programs are compiled.

Both draw on stderr, leave nothing behind, and stay silent where there is no terminal.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TransferSpeedColumn,
)

ReportProgress = Callable[[int, int, str], None]


@contextmanager
def loading_bar(
    enabled: bool, description: str, console: Console | None = None
) -> Iterator[ReportProgress | None]:
    """Shows a bar of bytes within a `with` block.

    Args:
        enabled: False shows nothing.
        description: what is going on, such as "Loading the target".
        console: where to draw; stderr if None.

    Yields:
        What to call with the bytes done, the bytes to do in all, and the name of the tensor that was read;
        None where no bar is shown.
    """
    console = console or Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield None
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        DownloadColumn(binary_units=True),
        TransferSpeedColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[name]}", style="dim"),
    )
    with Progress(*columns, console=console, transient=True, redirect_stdout=False) as progress:
        task = progress.add_task(description, total=None, name="")

        def report(done: int, total: int, name: str) -> None:
            progress.update(task, completed=done, total=total, name=name)

        yield report


@contextmanager
def spinner(enabled: bool, description: str, console: Console | None = None) -> Iterator[None]:
    """Shows that something of unknown length is going on within a `with` block.

    Args:
        enabled: False shows nothing.
        description: what is going on, such as "Compiling".
        console: where to draw; stderr if None.
    """
    console = console or Console(stderr=True)
    if not (enabled and console.is_terminal):
        yield
        return
    with Progress(
        TextColumn("{task.description}"),
        BarColumn(),  # of unknown length: it pulses
        TimeElapsedColumn(),
        console=console,
        transient=True,
        redirect_stdout=False,
    ) as progress:
        progress.add_task(description, total=None)
        yield
