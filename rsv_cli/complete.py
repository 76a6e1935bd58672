"""Names for a shell that completes a command line."""

from __future__ import annotations

import typer


def names(context: typer.Context, incomplete: str) -> list[str]:
    """What is in the file of the command line; nothing if it cannot be read."""
    import rsv_format

    try:
        with rsv_format.open(context.params["file"], mmap=False) as file:
            found = [*file.layers, *file.tensors, *file.attachments]
    except (KeyError, TypeError, rsv_format.RsvError):
        return []
    return [name for name in found if name.startswith(incomplete) and name.isprintable()]


def attachments(context: typer.Context, incomplete: str) -> list[str]:
    """The attachments of that file."""
    import rsv_format

    try:
        with rsv_format.open(context.params["file"], mmap=False) as file:
            return [name for name in file.attachments if name.startswith(incomplete)]
    except (KeyError, TypeError, rsv_format.RsvError):
        return []
