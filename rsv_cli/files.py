"""Output files: never in the place of something precious."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from rsv_format import RsvError
from rsv_format.layout import MAGIC


def check_output(out: Path, source: Path, *, writes_rsv: bool) -> None:
    """Refuse to replace the input, or a file of another kind than the one to be written.

    Raises
    ------
    RsvError
        bad_argument; io_error.
    """
    try:
        found = out.stat()
    except FileNotFoundError:
        return
    except OSError as e:
        raise RsvError("io_error", str(out), e.strerror or str(e)) from e
    if source.exists() and os.path.samefile(out, source):
        raise RsvError("bad_argument", "--output", f"{out} is the input itself")
    if not stat.S_ISREG(found.st_mode):
        raise RsvError("bad_argument", "--output", f"{out} is not a regular file")
    if found.st_size and is_rsv(out) is not writes_rsv:
        kind = "not an RSV file" if writes_rsv else "an RSV file"
        raise RsvError("bad_argument", "--output", f"{out} exists and is {kind}: remove it first if it may go")


def is_rsv(path: Path) -> bool:
    """Whether a file begins like an RSV file."""
    with path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC
