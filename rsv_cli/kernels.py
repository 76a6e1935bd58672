"""Whether the Metal kernels say what MLX's generic operations do on this device, and how long each takes."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterator
from typing import Any

from rsv_cli.session import mlx_module

_ROWS, _IN_FEATURES, _EXPERTS = 4864, 896, 4  # of a layer that is up to it
_WINDOWS = (8, 12, 16)  # besides that of scalar codes
_CASES = ((1, 1), (8, 1), (64, 1), (1, 6))  # rows of activations, pairs of them and an expert
_REPEAT = 7
TOLERANCE = 1e-4
_NATIVE = (2, 3, 4, 5, 6, 8)  # bits of mx.quantized_matmul


def trial(rows: int = _ROWS, in_features: int = _IN_FEATURES, repeat: int = _REPEAT) -> Iterator[dict[str, Any]]:
    """Compare and time every kernel, one after the other.

    Yields
    ------
    dict
        "bits", "window", "rows" of activations, "experts"; "error": the largest difference over the largest product, or
        None with a "problem"; "seconds", "generic", "affine": of the kernel, of generic operations, and of
        mx.quantized_matmul with as many bits, None where there is none.
    """
    np, mx = mlx_module("numpy"), mlx_module("mlx.core")
    kernels, books = mlx_module("rsv_mlx.kernels"), mlx_module("rsv_mlx.codebook")
    rng = np.random.default_rng(0)
    for bits in range(1, 9):
        words = -(-in_features // 32) * bits
        for window in sorted({bits, *(window for window in _WINDOWS if window > bits)}):
            codebook = books.Codebook(rng.standard_normal(2**window).astype(np.float32), bits)
            for n, pairs in _CASES:
                stack = _EXPERTS if pairs > 1 else 1
                x = mx.array(rng.standard_normal((pairs, n, in_features)).astype(np.float32))
                codes = mx.array(rng.integers(0, 2**32, (stack, rows, words), np.uint32))
                which = mx.array(rng.integers(0, stack, pairs).astype(np.uint32))
                found: dict[str, Any] = {"bits": bits, "window": window, "rows": n, "experts": stack, "affine": None}

                def generic(book: Any = codebook, x: Any = x, codes: Any = codes, which: Any = which) -> Any:
                    with kernels.generic_only():
                        return book.gather_matmul(x, codes, which) if len(which) > 1 else book.matmul(x[0], codes[0])

                def own(book: Any = codebook, x: Any = x, codes: Any = codes, which: Any = which) -> Any:
                    return kernels.by_kernel(x, codes, which, mx.array(book.centroids), book.bits, book.window)

                try:
                    wanted, ours = generic(), own()
                    scale = float(mx.abs(wanted).max())
                    found["error"] = float(mx.abs(ours.reshape(wanted.shape) - wanted).max()) / scale
                    found["seconds"], found["generic"] = (_seconds(mx, work, repeat) for work in (own, generic))
                    if bits in _NATIVE and pairs == 1 and in_features % 64 == 0:
                        packed = mx.quantize(mx.random.normal((rows, in_features)), 64, bits)

                        def affine(x: Any = x, packed: Any = packed, bits: int = bits) -> Any:
                            return mx.quantized_matmul(x[0], *packed, group_size=64, bits=bits)

                        found["affine"] = _seconds(mx, affine, repeat)
                except (RuntimeError, ValueError) as e:
                    found |= {"error": None, "problem": str(e).splitlines()[0] if str(e) else type(e).__name__}
                yield found


def is_right(found: dict[str, Any]) -> bool:
    """Whether a kernel said what it should."""
    return found["error"] is not None and found["error"] <= TOLERANCE  # and is a number


def _seconds(mx: Any, work: Callable[[], Any], repeat: int) -> float:
    times = []
    for _ in range(repeat):
        started = time.perf_counter()
        mx.eval(work())
        times.append(time.perf_counter() - started)
    return statistics.median(times)
