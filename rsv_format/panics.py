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


def is_panic(error: BaseException) -> bool:
    """Whether Rust's code has given up; such an exception is no Exception."""
    return type(error).__name__ == "PanicException"


@contextlib.contextmanager
def quiet_panics() -> Iterator[None]:
    """While the body runs, standard error is held back; what a panic says is dropped, since the exception says as much.

    What other threads print meanwhile comes after it; what processes that they start print goes nowhere.
    """
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
