"""What quantization costs: perplexity of SmolLM2-135M-Instruct over bits per weight.

Ours against MLX's affine quantization on the same float32 weights and the same numpy forward pass. Perplexity is
taken on one text, importance measured on another (benchmarks/texts). Bits per weight count everything that a
linear layer needs: for MLX's, 16-bit scales and biases; for ours, all of the file but tensors and attachments.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rsv_format
from benchmarks.common import machine, smollm2, table
from rsv_format.decoder import Decoder

Weights = Mapping[str, NDArray[np.float32]]

TEXTS = Path(__file__).parent / "texts"
WINDOW = 512  # tokens of context
CALIBRATION = 2048  # tokens
BITS = (2, 3, 4, 5, 6)
IMPORTANCES = ("none", "gains", "auto", "measured")


class Model:
    """SmolLM2 in float32, and the texts as its tokens."""

    def __init__(self, tokens: int) -> None:
        import tokenizers

        self.source = rsv_format.open_source(smollm2())
        assert self.source.config is not None
        self.config = self.source.config
        self.weights = {name: tensor.float32() for name, tensor in self.source.tensors.items()}
        tokenizer = tokenizers.Tokenizer.from_str(self.source.attachments["tokenizer.json"][1].decode())
        self.text = tokenizer.encode((TEXTS / "alice.txt").read_text()).ids[: tokens + 1]
        self.calibration = tokenizer.encode((TEXTS / "workshop.txt").read_text()).ids[:CALIBRATION]
        self.layers = [name for name in self.weights if self.source.is_linear(name)]

    def perplexity(self, weights: Weights) -> float:
        """exp of the mean loss per token, windows of WINDOW tokens."""
        decoder = Decoder(self.config, weights.get)
        head = weights["model.embed_tokens.weight"].T
        loss, count = 0.0, 0
        for start in range(0, len(self.text) - 1, WINDOW):
            ids = np.array(self.text[start : start + WINDOW + 1])
            logits = decoder.run(weights["model.embed_tokens.weight"][ids[:-1]]) @ head
            logits -= logits.max(axis=-1, keepdims=True)
            log_sum = np.log(np.exp(logits).sum(axis=-1, dtype=np.float64))
            loss += float((log_sum - logits[np.arange(ids.size - 1), ids[1:]]).sum())
            count += ids.size - 1
        return float(np.exp(loss / count))

    def measured_importance(self) -> dict[str, NDArray[np.float64]]:
        """Mean squared activations on the calibration text."""
        sums: dict[str, NDArray[np.float64]] = {}

        def observe(name: str, x: NDArray[np.float32]) -> None:
            sums[name] = sums.get(name, 0.0) + np.square(x, dtype=np.float64).sum(axis=0)

        decoder = Decoder(self.config, self.weights.get, observe)
        for start in range(0, len(self.calibration), WINDOW):
            decoder.run(self.weights["model.embed_tokens.weight"][self.calibration[start : start + WINDOW]])
        return {name: total / len(self.calibration) for name, total in sums.items()}


def affine(model: Model, bits: int, group: int) -> tuple[Weights, float]:
    """mx.quantize and back."""
    import mlx.core as mx

    weights = dict(model.weights)
    for name in model.layers:
        packed = mx.quantize(mx.array(weights[name]), group, bits)
        weights[name] = np.array(mx.dequantize(*packed, group, bits))
    return weights, bits + 32 / group


def ours(model: Model, **options: Any) -> tuple[Weights, float]:
    """Through a file and back."""
    weights = dict(model.weights)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.rsv")
        report = rsv_format.quantize(model.source, path, **options)
        with rsv_format.open(path) as file:
            weights.update({f"{name}.weight": layer.dequantize() for name, layer in file.layers.items()})
    return weights, report.summary.bits_per_weight


def variants(model: Model, quick: bool) -> Iterator[tuple[str, tuple[Weights, float]]]:
    """Everything that is measured, in the order of the table."""
    yield "source (5.0 and 8.5 bits in the GGUF file), float32", (model.weights, 32.0)
    for bits, group in ((4, 64), (4, 32), (3, 64), (3, 32)):
        if not quick or bits == 4:
            yield f"MLX affine {bits} bits, group {group}", affine(model, bits, group)
    measured = model.measured_importance()
    for bits in (4,) if quick else BITS:
        for codebook in ("lloyd-max", "uniform"):
            for importance in IMPORTANCES:
                chosen = measured if importance == "measured" else importance
                label = f"rsv {codebook} {bits} bits, importance {importance}"
                yield label, ours(model, bits=bits, codebook=codebook, importance=chosen)


def plot(rows: list[dict[str, Any]], path: Path) -> None:
    """The curve, for people who would rather look."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 5))
    series = {"MLX affine": "MLX affine"} | {
        f"rsv {codebook}, importance {importance}": f"rsv {codebook} ."
        for codebook in ("lloyd-max", "uniform")
        for importance in ("none", "auto", "measured")
    }
    for label in series:
        words = label.split(", importance ")
        points = sorted(
            (row["bits_per_weight"], row["perplexity"])
            for row in rows
            if row["what"].startswith(words[0]) and row["what"].endswith(words[-1] if len(words) > 1 else "")
        )
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", label=label)
    axes.axhline(rows[0]["perplexity"], color="black", linestyle=":", label="source")
    axes.set(xlabel="bits per weight", ylabel="perplexity", yscale="log", title="SmolLM2-135M-Instruct")
    axes.legend(fontsize=8)
    figure.savefig(path, dpi=120, bbox_inches="tight")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of a table")
    parser.add_argument("--quick", action="store_true", help="4 bits only")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text (default %(default)s)")
    parser.add_argument("--plot", type=Path, help="draw the curve into this PNG file (needs matplotlib)")
    arguments = parser.parse_args()
    model = Model(arguments.tokens)
    rows = []
    for label, (weights, bits_per_weight) in variants(model, arguments.quick):
        row = {"what": label, "bits_per_weight": bits_per_weight, "perplexity": model.perplexity(weights)}
        rows.append(row)
        print(f"{row['perplexity']:8.2f}  {bits_per_weight:6.3f}  {label}", file=sys.stderr)
    if arguments.plot:
        plot(rows, arguments.plot)
    if arguments.json:
        print(json.dumps({"tokens": len(model.text) - 1, "rows": rows}))
        return
    print(machine())
    reference = next(row["perplexity"] for row in rows if row["what"] == "MLX affine 4 bits, group 64")
    table(
        f"Perplexity on {len(model.text) - 1} tokens",
        ("what", "bits per weight", "perplexity", "over MLX affine 4 bits, group 64"),
        [
            (
                row["what"],
                f"{row['bits_per_weight']:.3f}",
                f"{row['perplexity']:.2f}",
                f"{row['perplexity'] / reference:.3f}",
            )
            for row in rows
        ],
    )


if __name__ == "__main__":
    main()
