"""Standard output for results, standard error for everything else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

Progress = Callable[[int, int, str], None]
_PIPED_WIDTH = 132  # columns of a table that no terminal limits


class _Console(Console):
    def on_broken_pipe(self) -> None:
        raise BrokenPipeError


def stdout() -> Console:
    """For results."""
    return _console(sys.stdout)


def stderr() -> Console:
    """For errors, progress and remarks."""
    return _console(sys.stderr)


def _console(file: Any) -> Console:
    with contextlib.suppress(AttributeError):  # a stream of the tests
        file.reconfigure(errors="replace")  # a bar or a name beyond the terminal's encoding is no reason to fail
    width = None if file.isatty() or "COLUMNS" in os.environ else _PIPED_WIDTH
    return _Console(file=file, width=width, highlight=False, soft_wrap=False)


def write_json(tree: Any) -> None:
    """The one thing on standard output of a command with --json."""
    sys.stdout.write(json.dumps(tree, indent=2, allow_nan=False) + "\n")


def plain(text: str) -> str:
    """Text of a file made safe for a terminal: control characters and their like are escaped."""
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


@contextlib.contextmanager
def progress(label: str, *, quiet: bool = False, of_bytes: bool = False) -> Iterator[Progress]:
    """A bar on standard error while the body runs, where there is a terminal to see it.

    Yields
    ------
    callable(done, total, name)
    """
    if quiet or not sys.stderr.isatty():
        yield lambda done, total, name: None
        return
    from rich.progress import BarColumn, DownloadColumn, TaskProgressColumn, TextColumn, TimeRemainingColumn
    from rich.progress import Progress as Bars
    from rich.table import Column

    name_column = TextColumn("{task.fields[name]}", markup=False, style="dim", table_column=Column(no_wrap=True))
    amount = [DownloadColumn()] if of_bytes else []
    with Bars(
        TextColumn("{task.description}"), BarColumn(32), TaskProgressColumn(), *amount, TimeRemainingColumn(),
        name_column, console=stderr(), transient=True,
    ) as bars:  # fmt: skip
        task = bars.add_task(label, total=None, name="")

        def told(done: int, total: int, name: str) -> None:
            bars.update(task, completed=done, total=total, name=plain(name))

        yield told
