"""Whether MLX takes over mapped memory without a copy: `python -m rsv_cli.adoption` tries, and prints JSON.

A process of its own, so that a crash in a native library is a finding too.
"""

from __future__ import annotations

import importlib
import json
import mmap
import subprocess
import sys
import tempfile
from collections.abc import Callable
from typing import Any

_PAGES = 64
_PAGE = 16384
_SECONDS = 60  # a GPU may have to wake up


def probe() -> dict[str, Any]:
    """Run `attempt` in another process and tell what became of it; never raises.

    Returns
    -------
    dict
        "device": str or None; "zero_copy": bool; "detail": str; "attempts": name -> what happened.
    """
    finding: dict[str, Any] = {"device": None, "zero_copy": False, "detail": "", "attempts": {}}
    command = [sys.executable, "-m", "rsv_cli.adoption"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as e:
        return {**finding, "detail": f"the attempt failed: {e}"}
    try:
        finding.update(json.loads(done.stdout))
    except ValueError:
        complaint = done.stderr.strip().splitlines()
        finding["detail"] = f"the attempt ended with {done.returncode}: {complaint[-1] if complaint else 'no message'}"
    return finding


def attempt() -> dict[str, Any]:
    """Map a temporary file, read-only, and offer it to MLX in each way that there is."""
    try:
        import numpy as np

        mx: Any = importlib.import_module("mlx.core")
    except ImportError as e:
        return {"detail": f"MLX cannot be imported: {e}"}
    finding: dict[str, Any] = {"device": _device(mx), "attempts": {}}
    with tempfile.TemporaryFile() as file:
        file.write(np.arange(_PAGES * _PAGE // 4, dtype=np.uint32).tobytes())
        file.flush()
        mapped = np.frombuffer(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ), np.uint32)
        ways: dict[str, Callable[[], Any]] = {
            "mx.asarray(copy=False)": lambda: mx.asarray(mapped, copy=False),
            "mx.from_dlpack(copy=False)": lambda: mx.from_dlpack(mapped, copy=False),
        }
        for name, way in ways.items():
            try:
                array = way()
                shared = np.asarray(memoryview(array)).ctypes.data == mapped.ctypes.data
                right = int(mx.max(array).item()) == mapped.size - 1
                outcome = ("shared" if shared else "copied") if right else "wrong values"
            except Exception as e:  # whatever it is, it is the finding
                outcome = f"{type(e).__name__}: {e}"
            finding["attempts"][name] = outcome
    finding["zero_copy"] = "shared" in finding["attempts"].values()
    finding["detail"] = (
        "MLX reads a mapped file where it lies" if finding["zero_copy"] else "MLX copies: loading costs memory"
    )
    return finding


def _device(mx: Any) -> str:
    device = str(mx.default_device())
    try:
        return f"{device} {mx.device_info()['device_name']}"
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return device


if __name__ == "__main__":
    print(json.dumps(attempt()))
