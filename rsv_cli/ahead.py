"""The process that encodes prompts, begun before anything else: it imports while we do."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def encoder_process() -> Iterator[subprocess.Popen[bytes] | None]:
    """As `rsv_mlx.prompt.begun`, which it would take too long to import; None if it cannot be had. It ends with the
    body."""
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "rsv_mlx.prompt"],
            env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
    except OSError:  # it will be tried again, and told, when it is needed
        yield None
        return
    with process:  # which closes its pipes and waits for it
        try:
            yield process
        finally:
            process.kill()
