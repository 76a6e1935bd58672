"""What quantization costs: how far the predictions of SmolLM2-135M-Instruct move, over bits per weight.

Ours against MLX's affine quantization, mlx-lm's AWQ and llama.cpp's quantizers, from the same float32 weights,
through the same numpy forward pass: perplexity, Kullback-Leibler divergence from the source and how often the top
token is the same, on two texts, while calibration is done on two others (benchmarks/texts). Bits per weight count all
that linear layers need: for MLX's, 16-bit scales and biases; for llama.cpp's, the bytes of its blocks; for ours, all
of the file but tensors and attachments.
"""

from __future__ import annotations

import argparse
import contextlib
import fnmatch
import json
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from functools import cache, cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

import rsv_format
from benchmarks.common import affine_and_back, machine, smollm2, table
from rsv_format.decoder import Decoder, Fetch
from rsv_format.dtypes import NUMPY_DTYPE
from rsv_format.sources.gguf_names import gguf_name

Weights = Mapping[str, NDArray[np.float32]]

TEXTS = Path(__file__).parent / "texts"
WINDOW = 512  # tokens of context
CALIBRATION = ("workshop.txt", "paradise.txt")  # prose and verse: of texts of one kind, feedback learns less
AWQ_CALIBRATION = 512  # tokens: even so, it takes hours with the BLAS of MLX's Linux wheel; see the README
EMBEDDING = "model.embed_tokens.weight"
AFFINE = ((2, 64), (3, 64), (3, 32), (4, 64), (4, 32), (5, 64), (6, 64))  # bits and group size
BITS = (2, 3, 4, 5)
LLAMA_CPP = ("Q2_K", "IQ3_S", "Q3_K_M", "IQ4_XS", "Q4_K_M")
AUTO, MEASURED, FEEDBACK = "auto", "measured", "measured, feedback"
LOGITS_TOGETHER = 2**25
EMBEDDING_BITS = (6, 5, 4)

SERIES: tuple[tuple[str, str, dict[str, Any]], ...] = (  # method, start of the detail, style in the plot
    ("MLX affine", "group 64", {"color": "tab:orange", "marker": "s"}),
    ("mlx-lm AWQ", "", {"color": "tab:orange", "marker": "v", "linestyle": "none"}),
    ("llama.cpp", "", {"color": "tab:green", "marker": "D", "linestyle": "none"}),
    ("rsv lloyd-max", AUTO, {"color": "#9ecae1", "marker": "o"}),
    ("rsv trellis", AUTO, {"color": "#4292c6", "marker": "o"}),
    ("rsv trellis", FEEDBACK, {"color": "#08306b", "marker": "o"}),
)


def _fetched(weights: Weights) -> Fetch:
    return lambda name: [weights[name]] if name in weights else None


@dataclass(frozen=True)
class Row:
    """One way to quantize, and what it costs; no scores where it failed, `failure` says why."""

    method: str
    bits: int = 0
    detail: str = ""
    embedding_bits: int | None = None  # None: kept in float16
    bits_per_weight: float = 0.0
    megabytes: float = 0.0
    scores: dict[str, dict[str, float]] = field(default_factory=dict)  # by text, of rsv_format.Evaluation
    note: str = ""
    failure: str = ""

    @property
    def perplexity(self) -> float:
        """On the first text."""
        return next((score["file_perplexity"] for score in self.scores.values()), 0.0)

    @property
    def label(self) -> str:
        """What the table calls it."""
        return ", ".join(filter(None, (f"{self.method} {self.bits} bits" if self.bits else self.method, self.detail)))


class Model:
    """SmolLM2, read and dequantized once, and the texts as its tokens."""

    def __init__(self, tokens: int) -> None:
        import tokenizers

        source = rsv_format.open_source(smollm2())
        source.tensors = {
            name: replace(tensor, read=cache(tensor.read), float32=cache(tensor.float32))
            for name, tensor in source.tensors.items()
        }
        assert source.config is not None
        self.source, self.config = source, source.config
        self.weights = {name: tensor.float32() for name, tensor in source.tensors.items()}
        self.layers = [name for name in self.weights if source.is_linear(name)]
        tokenizer = tokenizers.Tokenizer.from_str(source.attachments["tokenizer.json"][1].decode())
        texts = {"Alice": rsv_format.default_text(), "As You Like It": (TEXTS / "asyoulik.txt").read_text()}
        self.texts = {
            name: rsv_format.text_windows(tokenizer.encode(text).ids, None, tokens, WINDOW)
            for name, text in texts.items()
        }
        self.calibration_text = "\n".join((TEXTS / name).read_text() for name in CALIBRATION)
        self.calibration = tokenizer.encode(self.calibration_text).ids[: rsv_format.CALIBRATION_TOKENS]
        self.hidden = {name: self.run(self.weights, inputs) for name, (inputs, _) in self.texts.items()}

    def run(self, weights: Weights, inputs: NDArray[np.intp]) -> NDArray[np.float32]:
        """What the head sees of a text."""
        return Decoder(self.config, _fetched(weights), window=WINDOW).run(weights[EMBEDDING][inputs])

    def scores(self, weights: Weights) -> dict[str, dict[str, float]]:
        """How these weights predict each text, beside the source's."""
        found = {}
        for name, (inputs, targets) in self.texts.items():
            own, other = self.hidden[name], self.run(weights, inputs)
            step = LOGITS_TOGETHER // self.weights[EMBEDDING].shape[0]
            parts = (slice(start, start + step) for start in range(0, targets.size, step))
            logits = (
                (own[part] @ self.weights[EMBEDDING].T, other[part] @ weights[EMBEDDING].T, targets[part])
                for part in parts
            )
            score = asdict(rsv_format.evaluate_logits(logits, WINDOW))
            del score["spans"]
            found[name] = score
        return found

    @cached_property
    def measured_importance(self) -> dict[str, NDArray[np.float64]]:
        """Mean squared activations on the calibration text."""
        sums: dict[str, NDArray[np.float64]] = {}

        def observe(name: str, x: NDArray[np.float32]) -> None:
            sums[name] = sums.get(name, 0.0) + np.square(x, dtype=np.float64).sum(axis=0)

        decoder = Decoder(self.config, _fetched(self.weights), observe)
        for start in range(0, len(self.calibration), WINDOW):
            last = decoder.run(self.weights[EMBEDDING][self.calibration[start : start + WINDOW]])
            observe(EMBEDDING.removesuffix(".weight"), last)  # the head is tied to it
        return {name: total / len(self.calibration) for name, total in sums.items()}

    def sized(self, row: Row, widths: Mapping[str, float]) -> Row:
        """Fill in sizes: the bits per weight of the tensors that are quantized; the others are kept."""
        weights = sum(self.weights[name].size for name in widths)
        quantized = sum(self.weights[name].size * width for name, width in widths.items()) / 8
        kept = [
            tensor.float32().size * NUMPY_DTYPE[tensor.dtype].itemsize
            for name, tensor in self.source.tensors.items()
            if name not in widths
        ]
        megabytes = (quantized + sum(kept)) / 1e6
        return replace(row, bits_per_weight=8 * quantized / weights if weights else 0.0, megabytes=megabytes)


def affine(model: Model, bits: int, group: int, embedding_bits: int | None = None) -> tuple[Row, Weights]:
    """mx.quantize and back; the embedding with the same group size."""
    widths = dict.fromkeys(model.layers, bits)
    if embedding_bits is not None:
        widths[EMBEDDING] = embedding_bits
    weights = dict(model.weights)
    for name, width in widths.items():
        weights[name] = affine_and_back(weights[name], width, group)
    row = Row("MLX affine", bits, f"group {group}", embedding_bits)
    return model.sized(row, {name: width + 32 / group for name, width in widths.items()}), weights


def awq(model: Model, bits: int = 4, group: int = 64) -> tuple[Row, Weights | None]:
    """mlx-lm's AWQ and back; the embedding, which it quantizes too, is put back."""
    detail = f"group {group}, {AWQ_CALIBRATION} tokens"
    row = model.sized(Row("mlx-lm AWQ", bits, detail), dict.fromkeys(model.layers, bits + 32 / group))
    try:
        import mlx.core as mx
        from mlx.nn.layers.normalization import RMSNorm
        from mlx.nn.layers.quantized import QuantizedLinear
        from mlx_lm.models import llama
        from mlx_lm.quant.awq import AWQ_MODEL_CONFIGS, awq_quantize

        peer = llama.Model(llama.ModelArgs.from_dict(model.config))
        peer.load_weights([(name, mx.array(values)) for name, values in model.weights.items()])
        tokens = mx.array(model.calibration[:AWQ_CALIBRATION]).reshape(-1, WINDOW)
        with contextlib.redirect_stdout(sys.stderr):
            awq_quantize(peer, tokens, AWQ_MODEL_CONFIGS["llama"], group, bits, embed_bits=8)
    except Exception as error:  # the table says why
        return replace(row, failure=f"{type(error).__name__}: {error}"), None
    weights = dict(model.weights)
    for name, module in peer.named_modules():
        if isinstance(module, QuantizedLinear):
            dense = mx.dequantize(module.weight, module.scales, module.biases, module.group_size, module.bits)
            weights[f"{name}.weight"] = np.array(dense)
        elif isinstance(module, RMSNorm):
            weights[f"{name}.weight"] = np.array(module.weight)
    return row, weights


def llama_cpp(model: Model, file_type: str) -> tuple[Row, Weights | None]:
    """llama.cpp's quantizer with the importance of the calibration text, and back; the embedding is put back."""
    row = Row("llama.cpp", detail=file_type)
    try:
        from benchmarks import llama_cpp as peer

        with tempfile.TemporaryDirectory() as folder:
            dense, path = Path(folder, "dense.gguf"), Path(folder, "quantized.gguf")
            peer.dense_copy(smollm2(), dense)
            found = peer.quantize(dense, path, file_type, model.measured_importance)
            with rsv_format.open_source(path) as source:
                weights = {name: source.tensors[name].float32() for name in model.weights}
    except Exception as error:  # the table says why
        return replace(row, failure=f"{type(error).__name__}: {error}"), None
    widths = {name: 8 * found.nbytes[gguf_name(name, "llama")] / model.weights[name].size for name in model.layers}
    row = replace(row, note=found.described())
    return model.sized(row, widths), weights | {EMBEDDING: model.weights[EMBEDDING]}


def ours(model: Model, row: Row) -> tuple[Row, Weights]:
    """Through a file and back."""
    kind, *more = row.detail.split(", window ")
    feedback = kind == FEEDBACK
    importance: Any = model.measured_importance if kind == MEASURED else AUTO if feedback else kind
    weights = dict(model.weights)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.rsv")
        report = rsv_format.quantize(
            model.source,
            path,
            bits=row.bits,
            codebook=row.method.removeprefix("rsv "),
            window=int(more[0]) if more else None,
            importance=importance,
            calibration=model.calibration_text if feedback else None,
            embedding_bits=row.embedding_bits or "keep",
        )
        with rsv_format.open(path) as file:
            weights.update({f"{name}.weight": layer.dequantize() for name, layer in file.layers.items()})
    size = report.summary
    megabytes = (size.nbytes - size.by_kind["attachments"]) / 1e6
    return replace(row, bits_per_weight=size.bits_per_weight, megabytes=megabytes), weights


Variant = tuple[Row, Callable[[], tuple[Row, Weights | None]]]


def variants(model: Model, quick: bool) -> Iterator[Variant]:
    """Everything that is measured, in the order of the tables, and what makes it."""
    yield Row("source"), lambda: (model.sized(Row("source"), {}), model.weights)
    for bits, group in AFFINE:
        if not quick or bits == 4:
            yield Row("MLX affine", bits, f"group {group}"), partial(affine, model, bits, group)
    if not quick:
        yield Row("mlx-lm AWQ", 4), partial(awq, model)
        yield Row("MLX affine", 4, "group 64", 4), partial(affine, model, 4, 64, embedding_bits=4)
    for file_type in LLAMA_CPP:
        yield Row("llama.cpp", detail=file_type), partial(llama_cpp, model, file_type)
    each = (4,) if quick else BITS
    rows = [Row("rsv trellis", bits, detail) for bits in each for detail in (AUTO, FEEDBACK)]
    rows += [Row("rsv lloyd-max", bits, AUTO) for bits in each]
    rows += [Row(f"rsv {codebook}", 4, MEASURED) for codebook in ("trellis", "lloyd-max")]
    if not quick:
        rows += [Row("rsv lloyd-max", 4, detail) for detail in (FEEDBACK, "none", "gains")]
        rows += [Row("rsv uniform", 4, AUTO)]
        rows += [Row("rsv trellis", bits, f"{FEEDBACK}, window 12") for bits in (2, 3, 4)]
        rows += [Row("rsv trellis", 4, detail, bits) for detail in (AUTO, FEEDBACK) for bits in EMBEDDING_BITS]
    for row in rows:
        yield row, partial(ours, model, row)


def measure(tokens: int, quick: bool, only: Sequence[str], kept: Path | None) -> dict[str, Any]:
    """All rows whose labels fit a pattern, and how they came about; progress goes to stderr.

    Rows are written to `kept` one by one, and those that are there are not measured again.
    """
    started = time.perf_counter()
    model = Model(tokens)
    result: dict[str, Any] = {
        "machine": machine(),
        "tokens": {name: int(targets.size) for name, (_, targets) in model.texts.items()},
        "calibration_tokens": len(model.calibration),
        "rows": [],
    }
    known = json.loads(kept.read_text()) if kept is not None and kept.exists() else result
    if {**known, "rows": [], "machine": ""} != {**result, "machine": ""}:
        raise SystemExit(f"{kept} has rows of other texts")
    found = {(row["method"], row["bits"], row["detail"], row["embedding_bits"]): row for row in known["rows"]}
    for planned, made in variants(model, quick):
        key = (planned.method, planned.bits, planned.detail, planned.embedding_bits)
        if key not in found and any(fnmatch.fnmatchcase(planned.label, pattern) for pattern in only):
            row, weights = made()
            if weights is not None:
                row = replace(row, scores=model.scores(weights))
            found[key] = asdict(row)
            embedding = "" if row.embedding_bits is None else f", embedding {row.embedding_bits} bits"
            numbers = (f"{x['file_perplexity']:8.2f} {x['mean_divergence']:8.4f}" for x in row.scores.values())
            print(
                f"{'  '.join(numbers)}  {row.bits_per_weight:6.3f}  {row.megabytes:5.1f} MB  "
                f"{row.label}{embedding} {row.note} {row.failure}",
                file=sys.stderr,
                flush=True,
            )
        if key in found:
            result["rows"].append(found[key])
        if kept is not None:
            kept.write_text(json.dumps({**result, "rows": list(found.values())}))
    print(f"{(time.perf_counter() - started) / 60:.0f} minutes", file=sys.stderr)
    return result


def find(rows: Sequence[Row], method: str, detail: str = "", bits: int = 0) -> list[Row]:
    """Measured rows with the embedding kept, by rate; all details and bits where none are given."""
    found = (row for row in rows if row.method == method and row.scores and row.embedding_bits is None)
    chosen = (row for row in found if row.detail.startswith(detail) and bits in (0, row.bits))
    return sorted(chosen, key=lambda row: row.bits_per_weight)


def render(result: Mapping[str, Any]) -> None:
    """Print the tables in Markdown."""
    rows = [Row(**row) for row in result["rows"]]
    print(result["machine"])
    for text, tokens in result["tokens"].items():
        render_rates(f"{tokens} tokens of {text}, calibrated on {result['calibration_tokens']} of others", text, rows)
    render_aim(rows)
    if any(row.embedding_bits for row in rows):
        render_files(rows)


def render_rates(title: str, text: str, rows: Sequence[Row]) -> None:
    """What each rate costs, the embedding kept."""
    lines = []
    for row in rows:
        score = row.scores.get(text)
        if row.embedding_bits is not None:
            continue
        if score is None:
            lines.append((row.label, f"{row.bits_per_weight:.3f}", row.failure, "", "", ""))
            continue
        lines.append((
            f"{row.label} ({row.note})" if row.note else row.label,
            f"{row.bits_per_weight:.3f}" if row.bits_per_weight else "", f"{score['mean_divergence']:.4f}",
            f"{score['divergence_99']:.3f}", f"{score['same_top']:.1%}", f"{score['file_perplexity']:.2f}",
        ))  # fmt: skip
    head = ("what", "bits per weight", "mean divergence", "99th percentile", "same top token", "perplexity")
    table(f"On {title}", head, lines)


def render_aim(rows: Sequence[Row]) -> None:
    """Hold our rows against MLX's affine ones with one bit more, and scales and biases besides."""
    lines = []
    for row in (row for row in rows if row.method.startswith("rsv") and row.embedding_bits is None and row.scores):
        for peer in find(rows, "MLX affine", "group 64", row.bits + 1):
            ratios = [row.scores[text]["mean_divergence"] / peer.scores[text]["mean_divergence"] for text in row.scores]
            sizes = (f"{row.bits_per_weight:.3f}", f"{peer.bits_per_weight:.1f}")
            lines.append((row.label, *sizes, *(f"{ratio:.2f}" for ratio in ratios)))
    if lines:
        texts = next(iter(row.scores for row in rows if row.scores))
        head = ("what", "bits per weight", "MLX's", *(f"divergence / MLX's, {text}" for text in texts))
        table("Against MLX's affine quantization with one bit more, group 64", head, lines)


def render_files(rows: Sequence[Row]) -> None:
    """Whole files of 4 bits, the embedding kept and quantized."""
    kept = find(rows, "MLX affine", "group 64", 4)
    kept += [row for detail in (AUTO, FEEDBACK) for row in find(rows, "rsv trellis", detail, 4) if row.detail == detail]
    table(
        "Whole files, less config and tokenizer",
        ("what", "embedding", "MB", "mean divergence", "perplexity"),
        [
            (
                row.label,
                f"{row.embedding_bits} bits" if row.embedding_bits else "float16",
                f"{row.megabytes:.1f}",
                f"{next(iter(row.scores.values()))['mean_divergence']:.4f}",
                f"{row.perplexity:.2f}",
            )
            for first in kept
            for row in (first, *(row for row in rows if row.embedding_bits and row.label == first.label))
        ],
    )


def plot(result: Mapping[str, Any], path: Path) -> None:
    """The divergence over the rate, one panel a text."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    rows = [Row(**row) for row in result["rows"]]
    texts = result["tokens"]
    figure, panels = plt.subplots(1, len(texts), figsize=(10, 4.6), sharey=True, layout="constrained")
    for axes, (text, tokens) in zip(panels, texts.items(), strict=True):
        for method, detail, style in SERIES:
            points = [
                (row.bits_per_weight, row.scores[text]["mean_divergence"])
                for row in find(rows, method, detail)
                if "window" not in row.detail
            ]
            if points:
                axes.plot(*zip(*points, strict=True), label=f"{method} {detail}".strip(), **style)
        axes.set(xlabel="bits per weight", yscale="log", title=f"{tokens} tokens of {text}", xlim=(1.8, 6.8))
        axes.grid(alpha=0.25, which="both")
    panels[0].set_ylabel("mean KL divergence from the source")
    panels[-1].legend(fontsize=8, framealpha=1)
    figure.suptitle("SmolLM2-135M-Instruct, embedding kept")
    figure.savefig(path, dpi=100, pil_kwargs={"optimize": True})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--keep", type=Path, help="a JSON file: rows are kept in it, and not measured again")
    parser.add_argument("--only", nargs="+", default=["*"], help="rows whose labels fit a pattern, such as '*4 bits*'")
    parser.add_argument("--quick", action="store_true", help="4 bits only, no AWQ, no whole files")
    parser.add_argument("--tokens", type=int, default=4096, help="tokens of text (default %(default)s)")
    parser.add_argument("--plot", type=Path, help="draw the curves into this PNG file (needs matplotlib)")
    arguments = parser.parse_args()
    result = measure(arguments.tokens, arguments.quick, arguments.only, arguments.keep)
    if arguments.json:
        print(json.dumps(result))
    else:
        render(result)
    if arguments.plot:
        plot(result, arguments.plot)


if __name__ == "__main__":
    main()
