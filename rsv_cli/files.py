"""How a command reads a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rsv_format import File


@contextlib.contextmanager
def opened_file(path: Path, **options: Any) -> Iterator[File]:
    """An RSV file that is not touched through its map: if it shrinks meanwhile, the command fails and does not die."""
    import rsv_format

    with rsv_format.open(path, **options) as file:
        yield file.unmapped()
