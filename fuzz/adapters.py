"""The readers of other languages as processes in batch mode (conformance/PROTOCOL.md)."""

from __future__ import annotations

import json
import subprocess
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
READERS = ROOT / "conformance" / "readers"
COMMANDS: dict[str, list[str]] = {
    "C": [str(READERS / "c" / "build" / "rsv-adapter"), "batch"],
    "JavaScript": ["node", str(READERS / "javascript" / "adapter.mjs"), "batch"],
}
LIMIT_S = 60.0

Answer = tuple[int | str, Any]  # exit code and output, or "crash" and what is known of it


class Adapter:
    """A process that answers lines; it is started again after its death."""

    def __init__(self, command: Sequence[str]) -> None:
        self._command = command
        self._process: subprocess.Popen[bytes] | None = None

    def send(self, operation: str, path: Path) -> None:
        if self._process is None:
            self._process = subprocess.Popen(self._command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
            assert self._process.stdout and json.loads(self._process.stdout.readline()) == {"batch": 1}
        assert self._process.stdin
        self._process.stdin.write(f"{operation}\t{path}\n".encode())
        self._process.stdin.flush()

    def receive(self) -> Answer:
        process = self._process
        assert process and process.stdout
        watch = threading.Timer(LIMIT_S, process.kill)
        watch.start()
        line = process.stdout.readline()
        watch.cancel()
        if line.endswith(b"\n"):
            answer = json.loads(line)
            return answer["exit"], answer["output"]
        self._process = None
        return "crash", f"exit code {process.wait()}"

    def close(self) -> None:
        if self._process:
            self._process.communicate()
            self._process = None
