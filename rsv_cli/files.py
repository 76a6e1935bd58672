"""Files of a command: how it reads one, and what a killed run has left."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.text import Text

from rsv_cli import describe, terminal

if TYPE_CHECKING:
    from rsv_format import File


@contextlib.contextmanager
def opened_file(path: Path, **options: Any) -> Iterator[File]:
    """An RSV file that is not touched through its map: if it shrinks meanwhile, the command fails and does not die."""
    import rsv_format

    with rsv_format.open(path, **options) as file:
        yield file.unmapped()


def tell_leftovers(output: Path, quiet: bool) -> None:
    """Name temporary files in the folder of an output that nobody writes any more."""
    from rsv_format.outputs import leftovers

    for path in [] if quiet else leftovers(output):
        line = Text.assemble(("left behind", "yellow"), f"  {terminal.plain(str(path))}  ")
        with contextlib.suppress(OSError):  # it has gone just now
            line.append(f"{describe.size(path.stat().st_size)}, by a run that was killed: it may be removed", "dim")
            terminal.stderr().print(line, soft_wrap=True)
