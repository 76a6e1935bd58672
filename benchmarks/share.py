"""How much memory several processes need that have the same model loaded, and how long until all have a first token.

So many processes start at once, load the model, take one token and wait. Memory is then read from outside: what each
has alone (private: pages that no other process maps), and what all have together, shared pages once (proportional).
Where MLX adopts mapped pages (Apple silicon), a file that is loaded again should cost no private memory but the
activations; where it copies, each process has its own. The same file read through rsv_format, all bytes touched, shows
what the layout itself allows. Peers: mlx-lm with an affine 4-bit folder of the same model, and VeloxQuant-MLX, which
quantizes too slowly for all of it, with a few blocks' layers, each called once.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from contextlib import ExitStack
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from benchmarks.common import ROOT, machine, smollm2, table
from benchmarks.load import write_affine, write_smollm2

IMPORTS = "imports"
MODES = {
    IMPORTS: "imports alone",
    "mapped": "rsv_format, every byte read from the map",
    "auto": "rsv_mlx.load_model, adopting where MLX can",
    "never": 'rsv_mlx.load_model(zero_copy="never")',
    "mlx_lm": "mlx_lm.utils.load_model, affine 4 bits",
    "peer": "VeloxQuant-MLX load_reservoir",
}
PEER_LAYERS = ((576, 576), (192, 576), (192, 576), (576, 576), (1536, 576), (1536, 576), (576, 1536))  # of a block
PEER_BLOCKS = 2  # of SmolLM2's 30


def hold(mode: str, path: str) -> None:
    """Load, take a token, say so, and wait to be told to end."""
    import mlx.core as mx
    import mlx_lm.utils
    import numpy as np

    import rsv_format
    import rsv_mlx

    mx.eval(mx.zeros(1))
    held: Any = None
    report = None
    if mode == "mapped":
        held = rsv_format.open(path)
        int(np.frombuffer(held.buffer, np.uint64).max())
    elif mode == "mlx_lm":
        held, _ = mlx_lm.utils.load_model(Path(path))
    elif mode == "peer":
        from veloxquant_mlx.weight import load_reservoir

        held = load_reservoir(path)
        mx.eval([layer(mx.ones((1, int(name.rpartition("_")[2])))) for name, layer in held.items()])
    elif mode != IMPORTS:
        held, report = rsv_mlx.load_model(path, zero_copy=mode, dtype="keep", return_report=True)
    if mode in ("auto", "never", "mlx_lm"):
        mx.eval(held(mx.array([[5]])))
    print(json.dumps({"adopted": report.adopted_nbytes if report else 0, "ready": time.time()}), flush=True)
    sys.stdin.read()
    del held


def write_peer(path: Path) -> None:
    """VeloxQuant-MLX's small file of some blocks' layers, named by their width."""
    import mlx.core as mx
    import mlx.nn as nn
    from veloxquant_mlx.weight import quantize_model, save_reservoir

    model = nn.Module()
    for i, (rows, columns) in enumerate(PEER_LAYERS * PEER_BLOCKS):
        setattr(model, f"layer{i}_{columns}", nn.Linear(columns, rows, bias=False))
    mx.eval(model.parameters())
    quantize_model(model, bits=4)
    save_reservoir(model, path)


def measure(mode: str, path: Path, processes: int) -> dict[str, float]:
    """Of so many processes at once: mean private bytes, proportional bytes of all, seconds until the last is ready."""
    import psutil

    command = [sys.executable, "-m", "benchmarks.share", "--hold", mode, str(path)]
    with ExitStack() as stack:
        started = time.time()
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
        "together": sum(getattr(m, "pss", m.uss) for m in memory),  # macOS tells no proportional size
        "seconds": max(each["ready"] for each in said) - started,
        "adopted": said[0]["adopted"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2, 4, 8], help="at once (default 1 2 4 8)")
    parser.add_argument("--no-peer", action="store_true", help="leave out VeloxQuant-MLX, which takes minutes")
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--hold", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.hold:
        hold(*arguments.hold)
        return
    import rsv_format

    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        own, affine, peer = folder / "smollm2.rsv", folder / "affine", folder / "peer.bin"
        rsv_format.quantize(smollm2(), own)
        write_smollm2(folder / "dense")
        write_affine(folder / "dense", affine, embedding=True)
        paths = {mode: own for mode in MODES} | {"mlx_lm": affine, "peer": peer}
        if arguments.no_peer or find_spec("veloxquant_mlx") is None:
            del paths["peer"]
        else:
            write_peer(peer)
        sizes = {mode: (path / "model.safetensors" if path.is_dir() else path).stat().st_size
                 for mode, path in paths.items()}  # fmt: skip
        results = {mode: {n: measure(mode, path, n) for n in arguments.processes} for mode, path in paths.items()}
    if arguments.json:
        print(json.dumps({"nbytes": sizes, "results": results}))
        return
    print(machine())
    bare = results.pop(IMPORTS)

    def above(mode: str, n: int, key: str) -> float:
        return results[mode][n][key] - bare[n][key]

    table(
        "Memory above imports alone, as a share of the file: of all together, and in brackets private to each",
        ("what", "file MB", "adopted MB", *(f"{n} process{'es' * (n > 1)}" for n in arguments.processes)),
        [
            (
                MODES[mode],
                f"{sizes[mode] / 1e6:.1f}",
                f"{results[mode][arguments.processes[0]]['adopted'] / 1e6:.0f}",
                *(
                    f"{above(mode, n, 'together') / sizes[mode]:.2f} ({above(mode, n, 'private') / sizes[mode]:.2f})"
                    for n in arguments.processes
                ),
            )
            for mode in results
        ],
    )
    table(
        "Seconds from their start until the last process has its first token, imports included",
        ("what", *(f"{n} process{'es' * (n > 1)}" for n in arguments.processes)),
        [
            (MODES[mode], *(f"{found[n]['seconds']:.2f}" for n in arguments.processes))
            for mode, found in {IMPORTS: bare, **results}.items()
        ],
    )


if __name__ == "__main__":
    main()
