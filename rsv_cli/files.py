"""How a command reads a file."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rsv_cli import terminal

if TYPE_CHECKING:
    from rsv_format import File, Source


@contextlib.contextmanager
def opened_file(path: str, **options: Any) -> Iterator[File]:
    """An RSV file that is not touched through its map: if it shrinks meanwhile, the command fails and does not die."""
    import rsv_format

    with rsv_format.open(path, **options) as file:
        yield file.unmapped()


@contextlib.contextmanager
def opened_model(spec: str, *, max_order: int, quiet: bool) -> Iterator[Source]:
    """A source without its tokenizer; an RSV file too, which is verified, with its layers dense, and by its URL."""
    import rsv_format
    from rsv_format.dense import as_source
    from rsv_format.layout import MAGIC
    from rsv_format.remote import is_url
    from rsv_format.stored import is_pattern

    path = Path(spec)
    head = b""
    if path.is_file():
        with path.open("rb") as file:
            head = file.read(len(MAGIC))
    if head != MAGIC and not is_pattern(spec) and not is_url(spec):
        with rsv_format.open_source(spec, tokenizer=False) as source:
            yield source
        return
    with opened_file(spec, max_order=max_order) as opened:
        with terminal.progress("verifying", quiet=quiet, of_bytes=True) as told:
            rsv_format.verify(opened, progress=told)
        yield as_source(opened, spec)
        opened.check_unchanged()
