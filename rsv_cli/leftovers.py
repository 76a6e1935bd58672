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
            line.append(f"{size}{age} old, by a run that was killed: {_remedy(path)}", "dim")
            terminal.stderr().print(line, soft_wrap=True)


def _remedy(path: Path) -> str:
    if path.suffix == ".unfinished":
        return "rsv quantize --resume takes it up, --remove-leftovers removes it"
    return "it may be removed"


def remove_leftovers(output: Path, quiet: bool) -> None:
    """Those that were to become this output.

    Raises
    ------
    RsvError
        io_error.
    """
    from rsv_format.errors import RsvError
    from rsv_format.outputs import is_of, leftovers

    for path in leftovers(output):
        if is_of(path, output):
            try:
                path.unlink(missing_ok=True)
            except OSError as e:
                raise RsvError("io_error", str(path), e.strerror or str(e)) from e
            if not quiet:
                terminal.stderr().print(Text.assemble(("removed", "yellow"), f"  {terminal.plain(str(path))}"))


def tell_leftovers_beside(output: Path, quiet: bool) -> None:
    """Those in the folder of an output."""
    from rsv_format.outputs import leftovers

    if not quiet:
        tell_leftovers(leftovers(output))
