"""Output files: what a killed run has left beside them."""

from __future__ import annotations

import contextlib
from pathlib import Path

from rich.text import Text

from rsv_cli import describe, terminal


def tell_leftovers(output: Path, quiet: bool) -> None:
    """Name temporary files in the folder of an output that nobody writes any more."""
    from rsv_format.outputs import leftovers

    for path in [] if quiet else leftovers(output):
        line = Text.assemble(("left behind", "yellow"), f"  {terminal.plain(str(path))}  ")
        with contextlib.suppress(OSError):  # it has gone just now
            line.append(f"{describe.size(path.stat().st_size)}, by a run that was killed: it may be removed", "dim")
            terminal.stderr().print(line, soft_wrap=True)
