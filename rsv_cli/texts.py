"""Text that people name or pipe in."""

from __future__ import annotations

from pathlib import Path
from typing import IO

LONGEST = 2**28  # bytes; calibration and prompts want thousands
_PIECE = 2**20  # bytes that are read at a time: what is asked for is allocated


def read_text(path: Path) -> str:
    """The text of a UTF-8 file.

    Raises
    ------
    RsvError
        source_invalid, over_limit. OSError is the session's.
    """
    with path.open("rb") as file:
        return decoded(read_bytes(file, str(path)), "source_invalid", str(path))


def read_bytes(file: IO[bytes], where: str) -> bytes:
    """What a file or a pipe gives, which may never end.

    Raises
    ------
    RsvError
        over_limit
    """
    from rsv_format import RsvError

    data = bytearray()
    while piece := file.read(_PIECE):
        data += piece
        if len(data) > LONGEST:
            raise RsvError("over_limit", where, f"a text of more than {LONGEST} bytes: give a part of it")
    return bytes(data)


def read_line(file: IO[bytes], where: str) -> str:
    """The next line of UTF-8, with its end; nothing at the end.

    Raises
    ------
    RsvError
        over_limit, bad_argument.
    """
    from rsv_format import RsvError

    data = file.readline(LONGEST + 1)
    if len(data) > LONGEST:
        raise RsvError("over_limit", where, f"a line of more than {LONGEST} bytes")
    return decoded(data, "bad_argument", where)


def decoded(data: bytes, code: str, where: str) -> str:
    """UTF-8, in any locale."""
    from rsv_format import RsvError

    try:
        return data.decode("utf-8")
    except UnicodeDecodeError as e:
        raise RsvError(code, where, f"is not UTF-8: {e.reason} at byte {e.start}") from e
