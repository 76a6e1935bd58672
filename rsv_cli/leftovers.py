"""What runs that were killed have left: named to whoever may remove it."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable
from pathlib import Path

from rich.text import Text

from rsv_cli import describe, terminal


def tell_leftovers(found: Iterable[Path]) -> None:
    """Name temporary files and folders that nobody writes to any more."""
    for path in found:
        line = Text.assemble(("left behind", "yellow"), f"  {terminal.plain(str(path))}  ")
        with contextlib.suppress(OSError):  # it has gone just now
            status = path.stat()
            size = "" if path.is_dir() else f"{describe.size(status.st_size)}, "
            age = describe.age(time.time() - status.st_mtime)
            line.append(f"{size}{age} old, by a run that was killed: it may be removed", "dim")
            terminal.stderr().print(line, soft_wrap=True)


def tell_leftovers_beside(output: Path, quiet: bool) -> None:
    """Those in the folder of an output."""
    from rsv_format.outputs import leftovers

    if not quiet:
        tell_leftovers(leftovers(output))
