"""A file as one page to look at: its facts as JSON, and the page that draws them (page/draw.mjs)."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterable, Sequence
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.difference import relative, squares
from rsv_format.errors import RsvError
from rsv_format.outputs import Output, write_all
from rsv_format.reader import File, Layer
from rsv_format.replaceable import Kind
from rsv_format.sources import Source
from rsv_format.summary import family, summarize, transform_words

PAGE = Kind("a report", lambda head: b"<!-- rsv report -->" in head)

_LOOKED_AT = 1000  # layers whose numbers are on the page, 600 bytes each
_SAMPLE = 2**18  # codes of a layer that are counted
_RUNS = 8  # of rows, evenly spaced, that they come from
_BINS = 32
_FOLDER = Path(__file__).with_name("page")

Progress = Callable[[int, int, str], None]


def write_report(
    path: str | os.PathLike[str],
    facts: dict[str, Any],
    *,
    inputs: Iterable[str | os.PathLike[str]] = (),
    force: bool = False,
) -> None:
    """Write a page that shows facts and needs nothing else: no network, no other file.

    Parameters
    ----------
    path : path
        Written whole or not at all; an earlier report is replaced.
    facts : dict
        What `describe` gave.
    inputs, force
        As `outputs.Output`.

    Raises
    ------
    RsvError
        bad_argument, io_error.
    """
    data = html(facts).encode()
    with Output(path, PAGE, inputs=inputs, force=force) as output:
        write_all(output.open(len(data)), data)


def html(facts: dict[str, Any]) -> str:
    """The page."""
    style, script = ((_FOLDER / name).read_text("utf-8") for name in ("style.css", "draw.mjs"))
    tree = json.dumps(facts, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")  # nothing ends the element
    policy = "default-src 'none'; style-src 'unsafe-inline'; script-src 'unsafe-inline'"
    return f"""<!doctype html>
<!-- rsv report -->
<html lang="en">
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{policy}">
<title>RSV report</title>
<style>
{style}</style>
<main><noscript>This page is drawn by a script within it.</noscript></main>
<script type="application/json" id="facts">{tree}</script>
<script type="module">
{script}
const facts = JSON.parse(document.getElementById("facts").textContent);
document.title = `${{facts.name}} – RSV report`;
drawPage(document.querySelector("main"), facts);
</script>
</html>
"""


def describe(
    file: File,
    name: str,
    *,
    source: Source | None = None,
    faults: Sequence[RsvError] = (),
    progress: Progress | None = None,
) -> dict[str, Any]:
    """The facts that a page shows.

    Parameters
    ----------
    file : File
    name : str
        The title.
    source : Source, optional
        What the file was made of: then the relative error of each layer is among the facts.
    faults : sequence of RsvError
        What `verify` found.
    progress : callable(done, total, name), optional
        Told the weights done so far and in all, and the layer at work.

    Raises
    ------
    RsvError
        missing_layer, shape_mismatch: the source is of another model; nonfinite_weight, nonfinite_value; io_error; what
        `Layer.dequantize` raises.
    """
    told = progress or (lambda done, total, name: None)
    summary = summarize(file)
    total, done, layers = summary.weights, 0, []
    looked_at = {int(i) for i in np.linspace(0, len(file.layers) - 1, min(_LOOKED_AT, len(file.layers)))}
    for i, layer in enumerate(file.layers.values()):
        told(done, total, layer.name)
        layers.append(_layer(layer, i in looked_at, source))
        done += layers[-1]["weights"]
    tensors = [
        {"name": x.name, "family": family(x.name), "dtype": x.dtype, "shape": list(x.shape), "nbytes": x.nbytes,
         "weights": prod(x.shape)}
        for x in file.tensors.values()
    ]  # fmt: skip
    facts: dict[str, Any] = {
        "name": name,
        "nbytes": summary.nbytes,
        "bits_per_weight": summary.bits_per_weight,
        "kinds": summary.by_kind,
        "codebooks": [
            {"bits": entry.bits, "window": entry.window, "centroids": _finite(file.codebook(i))}
            for i, entry in enumerate(file.header.codebooks)
        ],
        "layers": layers,
        "tensors": tensors,
        "attachments": [
            {"name": x.name, "media_type": x.media_type, "nbytes": x.nbytes} for x in file.attachments.values()
        ],
        "metadata": dict(file.metadata),
    }
    return facts | {"warnings": [*_faults(faults), *_warnings(file, layers)]}


def _layer(layer: Layer, look: bool, source: Source | None) -> dict[str, Any]:
    error = norm = None
    if source is not None:
        with np.errstate(over="ignore", invalid="ignore"):
            error, norm = squares(_weight(layer, source), layer.dequantize())
        if not np.isfinite(error):
            raise RsvError("nonfinite_value", layer.name, "the file's weight overflows float32")
    index = layer.transform_id
    return {
        "name": layer.name,
        "family": family(layer.name),
        "shape": [layer.out_features, layer.in_features] if layer.stack == 1 else
                 [layer.stack, layer.out_features, layer.in_features],
        "weights": layer.layout.rows * layer.in_features,
        "nbytes": layer.nbytes,
        "codebook": layer.codebook_id,
        "bias": layer.bias_dtype,
        "transform": transform_words(None if index is None else layer.file.header.transforms[index]),
        "error": None if error is None or norm is None else relative(error, norm),
        "squared_error": error,
        "squared_norm": norm,
        "numbers": _numbers(layer) if look else None,
    }  # fmt: skip


def _weight(layer: Layer, source: Source) -> NDArray[np.float32]:
    """What a layer was made of."""
    tensor = source.tensors.get(f"{layer.name}.weight")
    if tensor is None:
        raise RsvError("missing_layer", layer.name, "the source has no such weight")
    sides = (layer.out_features, layer.in_features)
    if tensor.shape not in ((layer.stack, *sides), *([sides] if layer.stack == 1 else [])):
        raise RsvError("shape_mismatch", layer.name, f"the source has {tensor.shape}")
    weight = tensor.float32()
    if not np.isfinite(weight).all():
        raise RsvError("nonfinite_weight", tensor.name, "the source's weight is not finite")
    return weight


def _numbers(layer: Layer) -> dict[str, Any]:
    """How often each code occurs in some rows; the spread of scales and of the diagonal."""
    counts = np.zeros(2**layer.bits, np.int64)
    rows = layer.layout.rows
    step = max(1, min(rows, _SAMPLE // layer.in_features) // _RUNS)
    for start in sorted({int(x) for x in np.linspace(0, rows - step, _RUNS)}):
        counts += np.bincount(layer.unpack_rows(slice(start, start + step)).reshape(-1), minlength=counts.size)
    transform = layer.transform
    values = None if transform is None else transform.values
    return {
        "counts": counts.tolist(),
        "scales": _spread(layer.scales),
        "importance": None if values is None else _spread(values),
    }


def _spread(values: NDArray[np.float32]) -> dict[str, Any]:
    """Of the magnitudes: smallest, median and largest, and how many lie in each of equal steps of their logarithm."""
    sizes = np.abs(values[np.isfinite(values) & (values != 0)]).astype(np.float64)
    zeros = int((values == 0).sum())
    if not sizes.size:
        return {"zeros": zeros, "min": 0, "median": 0, "max": 0, "bins": [0] * _BINS}
    logs = np.log(sizes)
    bins, _ = np.histogram(logs, _BINS, (logs.min(), logs.max()) if logs.min() < logs.max() else None)
    low, median, high = (float(x) for x in np.quantile(sizes, (0, 0.5, 1)))
    return {"zeros": zeros, "min": low, "median": median, "max": high, "bins": bins.tolist()}


def _finite(values: NDArray[np.float32]) -> list[float]:
    return [float(x) if np.isfinite(x) else 0.0 for x in values] if values.size <= 256 else []


def _faults(faults: Sequence[RsvError]) -> list[dict[str, str]]:
    shown = [{"level": "bad", "text": str(fault)} for fault in faults[:20]]
    return shown + [{"level": "bad", "text": f"and {len(faults) - 20} more faults"}] * (len(faults) > 20)


def _warnings(file: File, layers: list[dict[str, Any]]) -> list[dict[str, str]]:
    """What somebody who looks at a file may want to know."""
    told = []
    derived = sum(x.factor is not None and x.factor.kind == "haar" for x in file.header.transforms)
    if derived:
        told.append(f"rotations that are derived from seeds on each load, which is slow: {derived}")
    errors = [x["error"] for x in layers if x["error"] is not None]
    middle = float(np.median(errors)) if errors else 0.0
    worst = [x for x in layers if x["error"] is not None and x["error"] > 2 * middle > 0]
    if worst:
        names = ", ".join(f"{x['name']} ({x['error']:.1%})" for x in sorted(worst, key=lambda x: -x["error"])[:5])
        told.append(f"layers with more than twice the usual relative error, {middle:.1%}: {len(worst)}, {names}")
    idle = [x["name"] for x in layers if x["numbers"] and min(x["numbers"]["counts"]) == 0]
    if idle:
        told.append(f"layers that do not use all of their codes: {len(idle)}, {', '.join(idle[:5])}")
    zero = sum(x["numbers"]["scales"]["zeros"] for x in layers if x["numbers"])
    if zero:
        told.append(f"rows that are zero: {zero}")
    unseen = sum(x["numbers"] is None for x in layers)
    if unseen:
        told.append(f"layers whose codes were not looked at: {unseen}; {_LOOKED_AT} were")
    missing = [name for name in ("config.json", "tokenizer.json") if name not in file.attachments]
    if missing and layers:
        told.append(f"there is no {' and no '.join(missing)}: rsv_mlx.load needs them")
    return [{"level": "warn", "text": text} for text in told]
