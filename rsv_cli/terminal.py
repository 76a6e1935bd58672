"""Standard output for results, standard error for everything else."""

from __future__ import annotations

import contextlib
import json
import os
import sys
import time
from collections.abc import Callable, Iterator
from typing import Any

from rich.console import Console

Progress = Callable[[int, int, str], None]
PHASES = ("importance", "bits")  # of quantizing, before it begins
_USUAL_WIDTH = 80  # of a terminal that does not tell
is_verbose = False  # --verbose: a line for each step in the place of bars
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
    return _Console(file=file, width=_width(file), highlight=False, soft_wrap=False)


def _width(file: Any) -> int:
    """Columns: what the environment says, if it is a number above 0; else the terminal's."""
    wanted = os.environ.get("COLUMNS", "")
    if wanted.isdecimal() and int(wanted):
        return int(wanted)
    with contextlib.suppress(OSError, ValueError, AttributeError):  # no terminal, or a stream of the tests
        return os.get_terminal_size(file.fileno()).columns or _USUAL_WIDTH
    return _PIPED_WIDTH


def write_json(tree: Any) -> None:
    """The one thing on standard output of a command with --json."""
    sys.stdout.write(json.dumps(tree, indent=2, allow_nan=False) + "\n")


def short(text: str, longest: int) -> str:
    """The beginning of a text, and how long it is, if it is longer."""
    return text if len(text) <= longest else f"{text[:longest]}... ({len(text)} characters)"


def plain(text: str) -> str:
    """Text of a file made safe for a terminal: control characters and their like are escaped."""
    if text.isprintable():
        return text
    return "".join(c if c.isprintable() else c.encode("unicode_escape", "replace").decode() for c in text)


def write_text(text: str) -> None:
    """Text of a model on standard output, at once: as it is in a pipe or file, on a terminal without its commands."""
    stream = sys.stdout
    with contextlib.suppress(AttributeError):  # a stream of the tests
        stream.reconfigure(errors="replace")  # type: ignore[union-attr]
    if stream.isatty():
        text = "".join(c if c in "\n\t" else plain(c) for c in text)
    stream.write(text)
    stream.flush()


def _steps(label: str) -> Progress:
    """A line on standard error for each step, when it begins."""
    began, last = time.perf_counter(), [""]

    def told(done: int, total: int, name: str) -> None:
        if name and name != last[0]:
            last[0] = name
            share = f"{done / total:4.0%}" if total else ""
            print(
                f"{time.perf_counter() - began:8.2f} s {share:>5}  {label}  {plain(name)}", file=sys.stderr, flush=True
            )

    return told


@contextlib.contextmanager
def waiting(what: str, *, quiet: bool = False) -> Iterator[None]:
    """A sign of life on standard error while the body runs, where there is a terminal to see it."""
    if is_verbose and not quiet:
        print(f"              {what}", file=sys.stderr, flush=True)
    if quiet or is_verbose or not sys.stderr.isatty():
        yield
        return
    with stderr().status(what):
        yield


@contextlib.contextmanager
def progress(label: str, *, quiet: bool = False, of_bytes: bool = False) -> Iterator[Progress]:
    """A bar on standard error while the body runs, where there is a terminal to see it.

    Yields
    ------
    callable(done, total, name)
    """
    if is_verbose and not quiet:
        yield _steps(label)
        return
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
        tasks = {
            label: bars.add_task(label, total=None, name="")
        }  # one bar a phase: a name may begin with its phase's, as "importance: layer"

        def told(done: int, total: int, name: str) -> None:
            phase, _, rest = name.rpartition(": ")
            phase = phase if phase in PHASES else label
            if phase not in tasks:
                for earlier in tasks.values():
                    bars.remove_task(earlier)
                tasks.clear()
                tasks[phase] = bars.add_task(phase, total=None, name="")
            bars.update(tasks[phase], completed=done, total=total, name=plain(rest if phase != label else name))

        yield told
