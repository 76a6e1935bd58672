"""A file that appears whole or not at all, in the place of an old one."""

from __future__ import annotations

import contextlib
import os
import secrets
from collections.abc import Iterator
from pathlib import Path

from rsv_format.errors import RsvError


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[Path]:
    """A new path beside `path`: what was written there takes its place when the body ends well, and goes away when
    it does not. A link at `path` is replaced itself.

    Raises
    ------
    RsvError
        io_error.
    """
    temporary = path.with_name(f".{path.name[:100]}.{secrets.token_hex(4)}.tmp")
    try:
        yield temporary
        with temporary.open("rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    except BaseException as e:
        with contextlib.suppress(OSError):
            temporary.unlink()
        if isinstance(e, OSError):
            raise RsvError("io_error", str(path), e.strerror or str(e)) from e
        raise
