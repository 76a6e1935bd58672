"""Locks that end with their process: whether whoever made a temporary file or folder still lives."""

from __future__ import annotations

import contextlib
import os


def lock(descriptor: int) -> None:
    """Lock a file or folder until it is closed, where the system and the file system have locks."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)


def try_lock(descriptor: int) -> bool:
    """As `lock`; False if somebody else has locked it."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
    return True


def is_abandoned(path: str | os.PathLike[str]) -> bool:
    """Whether a file or folder that was locked is so no longer; False where that cannot be told."""
    with contextlib.suppress(ImportError, OSError):
        import fcntl

        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
        finally:
            os.close(descriptor)
        return True
    return False
