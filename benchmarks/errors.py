"""What quantization changes of a model's weights: relative errors of all-MiniLM-L6-v2, over bits per weight.

An error here is the norm of the difference over the norm of the weight, of all linear layers together: no input is
known, so no channel matters more than another (importance "none" for ours).
"""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

import rsv_format
from benchmarks.common import affine_and_back, machine, minilm, table

Weights = Mapping[str, NDArray[np.float32]]

BITS = (2, 3, 4, 5)
GROUP = 64
OURS = (("lloyd-max", None), ("trellis", 8), ("trellis", 12))  # codebook and window


def relative_error(weights: Weights, others: Weights) -> float:
    """Of all matrices together."""
    lost = sum(float(np.square(weights[name] - others[name], dtype=np.float64).sum()) for name in weights)
    whole = sum(float(np.square(weight, dtype=np.float64).sum()) for weight in weights.values())
    return float(np.sqrt(lost / whole))


def measured() -> Iterator[tuple[str, float, float]]:
    """Method, bits per weight and relative error."""
    with rsv_format.open_source(minilm()) as source, tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.rsv")
        for bits in BITS:
            weights: dict[str, NDArray[np.float32]] = {}
            for codebook, window in OURS:
                report = rsv_format.quantize(
                    source, path, bits=bits, codebook=codebook, window=window, importance="none", embedding_bits="keep"
                )
                with rsv_format.open(path) as file:
                    found = {f"{name}.weight": layer.dequantize() for name, layer in file.layers.items()}
                weights = weights or {name: source.tensors[name].float32() for name in found}
                name = f"rsv {codebook}, window {window}" if window else f"rsv {codebook}"
                yield f"{name}, {bits} bits", report.summary.bits_per_weight, relative_error(weights, found)
            back = {name: affine_and_back(weight, bits, GROUP) for name, weight in weights.items()}
            error = relative_error(weights, back)
            yield f"MLX affine {bits} bits, group {GROUP}", bits + 32 / GROUP, error


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    arguments = parser.parse_args()
    rows = [{"method": name, "bits_per_weight": rate, "relative_error": error} for name, rate, error in measured()]
    if arguments.json:
        print(json.dumps({"machine": machine(), "rows": rows}))
        return
    lines = [(row["method"], f"{row['bits_per_weight']:.2f}", f"{row['relative_error']:.1%}") for row in rows]
    table("all-MiniLM-L6-v2, linear layers", ("what", "bits per weight", "relative error"), lines)


if __name__ == "__main__":
    main()
