"""Whether readers dequantize alike: W_rot bit for bit, the rest within twice the bounds of SPEC section 7.4."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rsv_format

TINY = float(np.finfo(np.float32).tiny)
Floats = NDArray[np.float64]


def same_dequantized(path: Path, outputs: dict[str, Any]) -> str:
    """Where they differ, or nothing."""
    mine = outputs["Python"]["layers"]
    with rsv_format.open(path, mmap=False) as file:
        for name, output in outputs.items():
            if len(output["layers"]) != len(mine):
                return f"{name}: another number of layers"
            for got, want in zip(output["layers"], mine, strict=True):
                problem = _layer(file.layers[want["name"]], got, want)
                if problem:
                    return f"{name}, layer {want['name'][:40]!r}: {problem}"
    return ""


def _layer(layer: rsv_format.Layer, got: Any, want: Any) -> str:
    if got["name"] != want["name"] or got["w_rot"] != want["w_rot"]:
        return "w_rot"
    n, w_rot = layer.in_features, layer.dequantize_rotated().astype(np.float64)
    d = np.ones(n) if layer.transform is None or layer.transform.d is None else layer.transform.d.astype(np.float64)
    columns = np.arange(n) if n <= 640 else np.array(sorted({*range(0, n, -(-n // 256)), n - 1}))
    rows = range(len(w_rot)) if len(w_rot) <= 16 else sorted({0, len(w_rot) // 2, len(w_rot) - 1})
    x = ((7 * np.arange(n) + 3) % 17 - 8) / 8 * d
    bias = layer.bias_float32()
    for k, row in enumerate(rows):
        norm = float(np.linalg.norm(w_rot[row]))
        a, b = _floats(got["w"][k]), _floats(want["w"][k])
        if _defined(w_rot[row], a, b, np.array(norm)) and not np.linalg.norm((a - b) / d[columns]) <= 2e-5 * norm:
            return f"w, row {row}"
        y, z = _floats([got["y"][k]]), _floats([want["y"][k]])
        size = float(np.linalg.norm(x)) * norm
        bound = 2e-4 * size + 2e-6 * abs(float(bias[row]) if bias is not None else 0.0) + 2e-38
        bound_at_all = size == 0 or 2.0**-100 <= size <= 2.0**100  # RSV-725
        if bound_at_all and _defined(x.astype(np.float32)) and not abs(y - z)[0] <= bound:
            return f"y, row {row}"
    a, b = _floats(got["tx"]), _floats(want["tx"])
    if _defined(x.astype(np.float32), a, b) and not np.linalg.norm(a - b) <= 2e-5 * np.linalg.norm(x):
        return "tx"
    return ""


def _floats(digits: list[str]) -> Floats:
    return np.frombuffer(bytes.fromhex("".join(digits)), ">f4").astype(np.float64)


def _defined(*values: NDArray[Any]) -> bool:
    """RSV-723: finite, and zero or normal."""
    return all(bool(np.isfinite(v).all() and ((v == 0) | (abs(v) >= TINY)).all()) for v in values)
