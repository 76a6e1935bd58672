"""What libraries in Rust print before they raise: to the process's standard error, past Python's."""

from __future__ import annotations

import contextlib
import os
import re
import tempfile
import threading
from collections.abc import Iterator

_STANDARD_ERROR = 2
_PANIC = re.compile(rb"\n?thread '[^\n]* panicked at .*?\nnote: [^\n]*\n", re.DOTALL)
_one = threading.RLock()  # of two threads one would keep the other's file
_owned = False  # whether the process is ours, and so its standard error


def is_panic(error: BaseException) -> bool:
    """Whether Rust's code has given up; such an exception is no Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def own_process() -> Iterator[None]:
    """While the body runs, the process is ours, as that of a command."""
    global _owned
    before, _owned = _owned, True
    try:
        yield
    finally:
        _owned = before


@contextlib.contextmanager
def quiet_panics() -> Iterator[None]:
    """While the body runs in a process of ours, standard error is held back; what a panic says is dropped, since the
    exception says as much. In others, where threads of any kind print and start processes, nothing is held back.

    What other threads print meanwhile comes after it; what processes that they start print goes nowhere.
    """
    if not _owned:
        yield
        return
    with _one:
        try:
            kept, own = tempfile.TemporaryFile(), os.dup(_STANDARD_ERROR)  # noqa: SIM115
        except OSError:  # it is closed, or there is no place
            yield
            return
        with kept, os.fdopen(own, "wb") as before:
            os.dup2(kept.fileno(), _STANDARD_ERROR)
            dropped = re.compile(b"(?!)")
            try:
                yield
            except BaseException as e:
                if is_panic(e):
                    dropped = _PANIC
                raise
            finally:
                os.dup2(own, _STANDARD_ERROR)
                kept.seek(0)
                with contextlib.suppress(OSError):
                    before.write(dropped.sub(b"", kept.read()))
