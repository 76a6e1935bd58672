"""How long the command line takes to start, held to limits: `python -m benchmarks.commands` fails above them.

Each run is a fresh process, with everything in the page cache and compiled. Of some runs the fastest counts, and of it
the processor time: what else the machine does then is not in it. The limits are for a machine that imports numpy in a
tenth of a second; for a slower one they are as many times longer.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import rsv_format
from benchmarks.common import ROOT, machine, smollm2, table

ROUNDS = 15
LIMITS = {"import rsv_format": 0.15, "rsv --help": 0.3, "rsv info": 0.3}  # seconds
USUAL = "import numpy", 0.1  # what tells how slow the machine is, and its seconds for these limits


def fastest(command: Sequence[str], cache: str) -> tuple[float, float]:
    """Processor and wall time of a command, the least of each."""
    environment = {**os.environ, "PYTHONPYCACHEPREFIX": cache}
    environment.pop("PYTHONDONTWRITEBYTECODE", None)
    processor, wall = [], []
    for _ in range(ROUNDS + 1):  # the first one compiles
        before, started = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL, cwd=ROOT, env=environment)
        wall.append(time.perf_counter() - started)
        after = resource.getrusage(resource.RUSAGE_CHILDREN)
        processor.append(after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime)
    return min(processor[1:]), min(wall[1:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "model.rsv"
        rsv_format.quantize(smollm2(), path, importance="none", bits=2)  # its header is that of any other bits
        python = sys.executable
        commands = {
            "python -c pass": [python, "-c", "pass"],
            "import numpy": [python, "-c", "import numpy"],
            "import rsv_format": [python, "-c", "import rsv_format"],
            "rsv --help": [python, "-m", "rsv_cli", "--help"],
            "rsv info": [python, "-m", "rsv_cli", "info", str(path)],
        }
        times = {name: fastest(command, f"{folder}/cache") for name, command in commands.items()}
    slower = max(1.0, times[USUAL[0]][0] / USUAL[1])
    limits = {name: limit * slower for name, limit in LIMITS.items()}
    if arguments.json:
        print(
            json.dumps({name: {"processor": p, "wall": w, "limit": limits.get(name)} for name, (p, w) in times.items()})
        )
    else:
        print(machine())
        rows = [
            (name, f"{p:.2f}", f"{w:.2f}", f"{limits[name]:.2f}" if name in limits else "")
            for name, (p, w) in times.items()
        ]
        table("Starting, seconds: the least of each", ("what", "processor", "wall", "limit"), rows)
    late = [name for name, limit in limits.items() if times[name][0] > limit]
    if late:
        sys.exit(f"above the limit: {', '.join(late)}")


if __name__ == "__main__":
    main()
