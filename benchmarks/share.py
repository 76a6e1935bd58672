"""How much memory several processes need that have the same file loaded: private to each, and shared.

Each process loads the file, takes one token and waits; private memory (pages that no other process maps) and shared
memory are read from outside. Where MLX adopts mapped pages (Apple silicon), a file that is loaded again should cost
no private memory but the activations; where it copies, each process has its own. The same file read through
rsv_format, all pages touched, shows what the layout itself allows.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, machine, smollm2, table

MODES = {
    "imports": "imports alone",
    "mapped": "rsv_format, every byte read from the map",
    "auto": "rsv_mlx.load_model, adopting where MLX can",
    "never": 'rsv_mlx.load_model(zero_copy="never")',
}


def hold(mode: str, path: str) -> None:
    """Load, take a token, say so, and wait to be told to end."""
    import mlx.core as mx
    import mlx_lm.utils  # noqa: F401
    import numpy as np

    import rsv_format
    import rsv_mlx

    mx.eval(mx.zeros(1))
    held: Any = None
    report = None
    if mode == "mapped":
        held = rsv_format.open(path)
        int(np.frombuffer(held.buffer, np.uint64).max())
    elif mode != "imports":
        held, report = rsv_mlx.load_model(path, zero_copy=mode, dtype="keep", return_report=True)
        mx.eval(held(mx.array([[5]])))
    print(json.dumps({"adopted": report.adopted_nbytes if report else 0}), flush=True)
    sys.stdin.read()
    del held


def measure(mode: str, path: Path, processes: int) -> dict[str, Any]:
    """Mean private and shared bytes of so many processes at once."""
    import psutil

    command = [sys.executable, "-m", "benchmarks.share", "--hold", mode, str(path)]
    with ExitStack() as stack:
        children = [
            stack.enter_context(
                subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=ROOT)
            )
            for _ in range(processes)
        ]
        lines = [child.stdout.readline() for child in children if child.stdout]
        if not all(lines):
            sys.exit(f"{MODES[mode]}: a process ended before it had loaded the file")
        said = [json.loads(line) for line in lines]
        memory = [psutil.Process(child.pid).memory_full_info() for child in children]
        for child in children:
            child.communicate("")
    return {
        "private": sum(m.uss for m in memory) / processes,
        "shared": sum(m.rss - m.uss for m in memory) / processes,
        "adopted": said[0]["adopted"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("file", nargs="?", type=Path, help="an RSV file of a model; SmolLM2 is quantized if not given")
    parser.add_argument("--processes", type=int, default=4, help="at once (default %(default)s)")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        hold(*arguments.hold)
        return
    with tempfile.TemporaryDirectory() as folder:
        path = arguments.file
        if path is None:
            import rsv_format

            path = Path(folder, "smollm2.rsv")
            rsv_format.quantize(smollm2(), path)
        nbytes = path.stat().st_size
        results = {mode: measure(mode, path.resolve(), arguments.processes) for mode in MODES}
    if arguments.json:
        print(json.dumps({"nbytes": nbytes, "processes": arguments.processes, "results": results}))
        return
    print(machine())
    bare = results.pop("imports")
    table(
        f"{arguments.processes} processes with one file of {nbytes / 1e6:.0f} MB, each, above imports alone "
        f"({bare['private'] / 1e6:.0f} MB private)",
        ("what", "adopted MB", "private MB", "private / file", "shared MB"),
        [
            (
                MODES[mode],
                f"{r['adopted'] / 1e6:.0f}",
                f"{(r['private'] - bare['private']) / 1e6:.0f}",
                f"{(r['private'] - bare['private']) / nbytes:.2f}",
                f"{(r['shared'] - bare['shared']) / 1e6:.0f}",
            )
            for mode, r in results.items()
        ],
    )


if __name__ == "__main__":
    main()
