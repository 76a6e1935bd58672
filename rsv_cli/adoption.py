"""Whether MLX takes over mapped memory without a copy: `python -m rsv_cli.adoption` tries, and prints JSON.

A process of its own, so that a crash in a native library is a finding too. With `--trial`, whole layers are loaded
that way and run.
"""

from __future__ import annotations

import gc
import hashlib
import importlib
import json
import mmap
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

_PAGES = 64
_SECONDS = 60  # a GPU may have to wake up


def probe(with_trial: bool = False) -> dict[str, Any]:
    """Run `attempt` in another process and tell what became of it; never raises.

    Parameters
    ----------
    with_trial : bool
        Run `trial` too.

    Returns
    -------
    dict
        "device": str or None; "zero_copy": bool; "detail": str; "attempts": name -> what happened; "trial": list
        of (what was checked, what is wrong or None), empty if it was not run.
    """
    finding: dict[str, Any] = {"device": None, "zero_copy": False, "detail": "", "attempts": {}, "trial": []}
    # -P: no module of the working folder, which may be a model's
    command = [sys.executable, "-P", "-m", "rsv_cli.adoption", *(["--trial"] if with_trial else [])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    try:
        done = subprocess.run(command, capture_output=True, env=environment, timeout=_SECONDS, stdin=subprocess.DEVNULL)
    except (OSError, subprocess.TimeoutExpired) as e:
        return {**finding, "detail": f"the attempt failed: {e}"}
    try:
        finding.update(json.loads(done.stdout))
    except ValueError:
        complaint = done.stderr.decode(errors="replace").strip().splitlines()
        finding["detail"] = f"the attempt ended with {done.returncode}: {complaint[-1] if complaint else 'no message'}"
    return finding


def attempt() -> dict[str, Any]:
    """Map a temporary file, read-only, and offer it to MLX in each way that there is."""
    try:
        import numpy as np

        from rsv_format import PAGE

        mx: Any = importlib.import_module("mlx.core")
    except ImportError as e:
        return {"detail": f"MLX cannot be imported: {e}"}
    finding: dict[str, Any] = {"device": _device(mx), "attempts": {}}
    with tempfile.TemporaryFile() as file:
        file.write(np.arange(_PAGES * PAGE // 4, dtype=np.uint32).tobytes())
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


def trial() -> Iterator[tuple[str, str | None]]:
    """Load layers of every width and kind of transform by adoption and use them: checks, and what failed.

    Where no layer can be adopted there is nothing else to check.
    """
    with tempfile.TemporaryDirectory(prefix="rsv-") as folder:
        path = Path(folder, "trial.rsv")
        names = _write_layers(path)
        before = hashlib.sha256(path.read_bytes()).digest()
        try:
            adopted, report = _grafted(path, names, "require")
        except Exception as e:  # whatever it is, it is the finding
            yield "layers are adopted", f"{type(e).__name__}: {e}"
            return
        yield "layers are adopted", None
        copied = report.copied_nbytes
        yield "nothing is copied", f"{copied} bytes were" if copied or not report.adopted_nbytes else None
        reference, _ = _grafted(path, names, "never")
        # again, since a buffer that was written to would show the second time
        wrong = [name for _ in range(3) for name in names if _output(adopted[name]) != _output(reference[name])]
        yield "products equal those of copied layers, byte for byte", f"not of {', '.join(wrong)}" if wrong else None
        changed = hashlib.sha256(path.read_bytes()).digest() != before
        yield "the file is as it was", "it was written to" if changed else None
        path.unlink()
        gc.collect()
        wrong = [name for name in names if _output(adopted[name]) != _output(reference[name])]
        yield "layers outlive the file", f"not {', '.join(wrong)}" if wrong else None


def _write_layers(path: Path) -> dict[str, tuple[int, int]]:
    """Layers of all widths, codebooks and transforms with biases; names and (out_features, in_features)."""
    import numpy as np

    import rsv_format

    generator = np.random.default_rng(0)
    shapes: dict[str, tuple[int, int]] = {}
    layers = []
    for bits in range(1, 9):
        for codebook in ("lloyd-max", "uniform"):
            for rotation in ("none", "hartley", "haar"):
                name, shape = f"{codebook}_{rotation}_{bits}".replace("-", "_"), (40 + bits, 96 + 32 * bits)
                shapes[name] = shape
                weight = generator.standard_normal(shape).astype(np.float32)
                bias = generator.standard_normal(shape[0]).astype(np.float32)
                layers.append(
                    rsv_format.quantize_matrix(
                        weight, name=name, bits=bits, codebook=codebook, rotation=rotation, bias=bias, bias_dtype="f32"
                    )
                )
    rsv_format.write(path, layers=layers)
    return shapes


def _grafted(path: Path, shapes: dict[str, tuple[int, int]], zero_copy: str) -> tuple[Any, Any]:
    """A module with these layers, and the report of loading them."""
    import rsv_mlx

    nn: Any = importlib.import_module("mlx.nn")
    model = nn.Module()
    for name, (rows, columns) in shapes.items():
        setattr(model, name, nn.Linear(columns, rows))
    return model, rsv_mlx.graft(model, path, zero_copy=zero_copy)


def _output(layer: Any) -> bytes:
    """A product, with the scales on the way as an operand that MLX might take over."""
    import numpy as np

    mx: Any = importlib.import_module("mlx.core")
    y = layer(mx.sin(mx.arange(2 * layer.input_dims).reshape(2, -1).astype(mx.float32))) * (layer.scales + 1)
    return np.array(y).tobytes()


def _device(mx: Any) -> str:
    device = str(mx.default_device())
    try:
        return f"{device} {mx.device_info()['device_name']}"
    except (AttributeError, KeyError, RuntimeError, TypeError):
        return device


if __name__ == "__main__":
    found = attempt()
    if "--trial" in sys.argv[1:] and "device" in found:
        found["trial"] = list(trial())
    sys.stdout.buffer.write(json.dumps(found).encode())  # bytes: PYTHONIOENCODING may be any
