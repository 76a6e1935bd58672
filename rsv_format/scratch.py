"""Temporary folders, which others know: by their name, and by a lock as long as their process lives."""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import shutil
from pathlib import Path

from rsv_format.locks import is_abandoned, lock

_NAME = re.compile(r"rsv-[0-9a-z_]{8,12}")  # tempfile's names too


class Folder:
    """A folder that is made when that is asked for, and removed with all that is in it."""

    def __init__(self, parent: str) -> None:
        self.path = os.path.join(parent, f"rsv-{secrets.token_hex(6)}")
        self._descriptor = -1

    def make(self) -> None:
        """Make it, for nobody else to look into; OSError."""
        os.mkdir(self.path, 0o700)
        with contextlib.suppress(OSError):  # what is not locked is only named too early
            self._descriptor = os.open(self.path, os.O_RDONLY | os.O_CLOEXEC)
            lock(self._descriptor)

    def remove(self) -> None:
        """Remove it, as far as that is possible."""
        shutil.rmtree(self.path, ignore_errors=True)
        if self._descriptor >= 0:
            os.close(self._descriptor)
        self._descriptor = -1


def abandoned(parent: str) -> list[Path]:
    """The user's own temporary folders there whose processes have not lived to remove them."""
    with contextlib.suppress(OSError):
        return sorted(
            Path(entry.path)
            for entry in os.scandir(parent)
            if _NAME.fullmatch(entry.name)
            and entry.is_dir(follow_symlinks=False)
            and entry.stat(follow_symlinks=False).st_uid == os.geteuid()
            and is_abandoned(entry.path)
        )
    return []
