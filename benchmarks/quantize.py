"""How fast a model is quantized, and in how much memory.

Peers: VeloxQuant-MLX's quantize_model, and mx.quantize (affine, group 64), on the layers of one block of
Qwen2.5-0.5B with random weights. Every peer runs in a process of its own, one after the other.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import threading
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.common import QWEN_BLOCK, in_fresh_process, machine, peak_nbytes, seconds, start_peak, table

BITS = 4
WEIGHTS = sum(rows * columns for _, rows, columns in QWEN_BLOCK)


def block() -> dict[str, np.ndarray[Any, np.dtype[np.float32]]]:
    """One block's weights."""
    rng = np.random.default_rng(0)
    return {name: rng.standard_normal((rows, columns), np.float32) for name, rows, columns in QWEN_BLOCK}


def ours(codebook: str, importance: str) -> dict[str, float]:
    """Every layer through quantize_matrix."""
    import rsv_format

    weights = block()
    h = {name: np.ones(w.shape[1]) if importance == "given" else None for name, w in weights.items()}

    def work() -> None:
        for name, weight in weights.items():
            rsv_format.quantize_matrix(weight, name=name, bits=BITS, codebook=codebook, importance=h[name])

    return {"seconds": seconds(work)}


def velox() -> dict[str, float]:
    """The peer's quantize_model on a module of the same layers."""
    import mlx.core as mx
    import mlx.nn as nn
    from veloxquant_mlx.weight import quantize_model

    model = nn.Module()
    for name, weight in block().items():
        linear = nn.Linear(1, 1, bias=False)
        linear.weight = mx.array(weight)
        setattr(model, name.replace(".", "_"), linear)
    mx.eval(model.parameters())
    return {"seconds": seconds(lambda: quantize_model(model, bits=BITS), repeat=1, warm=0)}


def affine() -> dict[str, float]:
    """mx.quantize."""
    import mlx.core as mx

    weights = [mx.array(w) for w in block().values()]
    mx.eval(weights)
    return {"seconds": seconds(lambda: mx.eval([mx.quantize(w, 64, BITS) for w in weights]))}


def memory(path: str, blocks: str) -> dict[str, float]:
    """Peak memory of `rsv_format.quantize` above the bare interpreter with everything imported."""
    import safetensors.numpy  # noqa: F401

    import rsv_format

    source, out = Path(path, "model.safetensors"), Path(path, "model.rsv")
    tiny = Path(path, "tiny.safetensors")
    safetensors.numpy.save_file({"a.weight": np.ones((8, 8), np.float32)}, str(tiny))
    rsv_format.quantize(tiny, Path(path, "tiny.rsv"))
    before = start_peak()
    report = rsv_format.quantize(source, out, bits=BITS)
    return {"peak": peak_nbytes() - before, "file": report.summary.nbytes}


def profile(source: str, memory: str) -> dict[str, Any]:
    """One model, file to file: time and processor time of its phases, where threads are met, peak memory."""
    import rsv_format

    met: Counter[str] = Counter()
    phases: dict[str, list[float]] = {}
    last = ["opening", time.perf_counter(), time.process_time()]
    ended = threading.Event()

    def told(done: int, total: int, name: str) -> None:
        now = [
            "importance" if name.startswith("importance: ") else "quantizing",
            time.perf_counter(),
            time.process_time(),
        ]
        spent = phases.setdefault(last[0], [0.0, 0.0])
        spent[0] += now[1] - last[1]
        spent[1] += now[2] - last[2]
        last[:] = now

    def look() -> None:
        own = threading.get_ident()
        while not ended.wait(0.01):
            for thread, frame in sys._current_frames().items():
                if thread != own and (place := _place(frame)):
                    met[place] += 1

    looking = threading.Thread(target=look)
    before = start_peak()
    looking.start()
    with tempfile.TemporaryDirectory(dir=Path(source).resolve().parent) as folder:
        report = rsv_format.quantize(source, Path(folder, "a.rsv"), bits=BITS, memory=int(memory), progress=told)
    ended.set()
    looking.join()
    return {
        "weights": report.summary.weights, "seconds": report.seconds, "processor_seconds": time.process_time(),
        "peak_nbytes": peak_nbytes() - before, "file_nbytes": report.summary.nbytes,
        "phases": phases,
        "met": dict(met.most_common(12)),
    }  # fmt: skip


def _place(frame: Any) -> str | None:
    """The function of this package that a thread is in, unless it waits for others."""
    while frame is not None:
        path, name = Path(frame.f_code.co_filename), frame.f_code.co_name
        if "rsv_format" in path.parts:
            return None if path.name == "threads.py" else f"{path.stem}.{name}"
        frame = frame.f_back
    return None


def print_profile(source: str, found: dict[str, Any]) -> None:
    """The tables of `profile`."""
    print(machine())
    rate = found["weights"] / found["processor_seconds"] / 1e6
    table(
        f"{source}: {found['weights'] / 1e9:.2f} G weights to {found['file_nbytes'] / 1e6:.0f} MB, peak memory "
        f"{found['peak_nbytes'] / 1e6:.0f} MB above imports, {rate:.0f} million weights per second of a core",
        ("phase", "seconds", "of processors"),
        [(name, f"{a:.1f}", f"{b:.1f}") for name, (a, b) in found["phases"].items()],
    )
    total = sum(found["met"].values())
    table(
        "Where threads are met", ("function", "share"), [(name, f"{n / total:.0%}") for name, n in found["met"].items()]
    )


def write_model(folder: Path, blocks: int) -> None:
    """A safetensors file of some blocks."""
    import safetensors.numpy

    weights = block()
    safetensors.numpy.save_file(
        {f"model.layers.{i}.{name}.weight": w for i in range(blocks) for name, w in weights.items()},
        str(folder / "model.safetensors"),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--profile", metavar="MODEL", help="where the time goes on a model (tools/synthetic_model.py)")
    parser.add_argument("--memory", nargs="+", type=int, default=[64_000_000], help="with --profile: bytes; several")
    parser.add_argument("--child", nargs="+", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        work, *rest = arguments.child
        works = {"ours": ours, "velox": velox, "affine": affine, "memory": memory, "profile": profile}
        print(json.dumps(works[work](*rest)))
        return

    def run(*what: str) -> dict[str, Any]:
        print("measuring", *what, "...", file=sys.stderr)
        return in_fresh_process("benchmarks.quantize", "--child", *what)

    if arguments.profile:
        profiles = {n: run("profile", arguments.profile, str(n)) for n in arguments.memory}
        if arguments.json:
            print(json.dumps(profiles))
            return
        for n, found in profiles.items():
            print_profile(f"{Path(arguments.profile).name}, --memory {n / 1e6:.0f}MB", found)
        return
    peer, floor = run("velox")["seconds"], run("affine")["seconds"]
    variants = [(codebook, importance) for codebook in ("lloyd-max", "uniform") for importance in ("none", "given")]
    times = {variant: run("ours", *variant)["seconds"] for variant in variants}
    largest = max(rows * columns for _, rows, columns in QWEN_BLOCK) * 4
    peaks = {}
    with tempfile.TemporaryDirectory() as folder:
        for blocks in (1, 4):
            write_model(Path(folder), blocks)
            peaks[blocks] = run("memory", folder, str(blocks))
    if arguments.json:
        print(json.dumps({
            "velox_seconds": peer, "affine_seconds": floor, "largest_layer_nbytes": largest,
            "ours_seconds": {"/".join(variant): s for variant, s in times.items()}, "peak_nbytes": peaks,
        }))  # fmt: skip
        return
    print(machine())
    table(
        f"Quantizing one block of the Qwen2.5-0.5B shape, {WEIGHTS / 1e6:.1f} million weights, {BITS} bits",
        ("what", "seconds", "million weights/s", "faster than VeloxQuant-MLX", "time / mx.quantize"),
        [
            ("VeloxQuant-MLX quantize_model", f"{peer:.2f}", f"{WEIGHTS / peer / 1e6:.2f}", "1", f"{peer / floor:.0f}"),
            ("mx.quantize, affine, group 64", f"{floor:.3f}", f"{WEIGHTS / floor / 1e6:.0f}", "", "1"),
            *(
                (
                    f"rsv {codebook}, importance {importance}",
                    f"{s:.3f}",
                    f"{WEIGHTS / s / 1e6:.0f}",
                    f"{peer / s:.0f}",
                    f"{s / floor:.2f}",
                )
                for (codebook, importance), s in times.items()
            ),
        ],
    )
    table(
        f"Peak memory of rsv_format.quantize, file to file; the largest layer is {largest / 1e6:.0f} MB in float32",
        ("blocks", "output MB", "peak above the interpreter MB", "in largest layers"),
        [
            (blocks, f"{p['file'] / 1e6:.0f}", f"{p['peak'] / 1e6:.0f}", f"{p['peak'] / largest:.1f}")
            for blocks, p in peaks.items()
        ],
    )


if __name__ == "__main__":
    main()
