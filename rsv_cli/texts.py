"""Text files that people name."""

from __future__ import annotations

from pathlib import Path


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises
    ------
    RsvError
        source_invalid. OSError is the session's.
    """
    from rsv_format import RsvError

    try:
        return path.read_text("utf-8")
    except UnicodeDecodeError as e:
        raise RsvError("source_invalid", str(path), f"is not UTF-8: {e.reason} at byte {e.start}") from e
