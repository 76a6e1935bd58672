"""Which of mlx-lm's architectures run from an RSV file, and whether their experts stay packed.

    python -m benchmarks.architectures [NAME ...]

A tiny random model of each, in mlx-lm's layout of the weights and in the published one where mlx-lm converts experts,
is quantized to 8 bits, loaded, and run beside mlx-lm's own of the same folder and of the file's weights made dense.
"""

from __future__ import annotations

import multiprocessing
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.common import table

TIGHT = 2e-3  # relative difference of logits of the same weights
CLOSE = 0.3  # of 8 bits; where a router's choice flips it is large, as with MLX's own 8 bits

_PATIENCE = 300  # seconds for one model


@dataclass
class Row:
    """What became of an architecture in one layout of its weights."""

    name: str
    layout: str
    verdict: str = "right"  # or why not
    share: float = 0.0  # of the weights, quantized
    experts: int = 0  # modules that hold experts
    packed_in_file: int = 0
    packed_in_memory: int = 0
    error: float = 0.0  # of the logits, against the dense model's
    same_weights: float = 0.0  # against mlx-lm's of the file's weights


def examine(name: str, layout: str, folder: Path, told: Callable[[Row], None] = lambda row: None) -> Row:
    """Take an architecture through it all.

    Parameters
    ----------
    name : str
        Of `tiny_models.ARCHITECTURES`.
    layout : "mlx" or "published"
        mlx-lm's own, or that of `tiny_models.PUBLISHED`.
    folder : path
        Files are written into it.
    told : callable, optional
        Given a row that is right if the process ends before the next one.
    """
    import mlx.core as mx
    from mlx_lm.utils import load_model

    import rsv_format
    import rsv_mlx
    from benchmarks.tiny_models import PUBLISHED, write_checkpoint
    from rsv_format import RsvError
    from rsv_mlx.switch import is_switch

    row = Row(name, layout)
    told(Row(name, layout, "not tried: mlx-lm's own ends the process"))
    tokens = mx.array([[3, 14, 15, 92, 65, 35, 89, 79, 32, 38, 46, 26]])

    def logits(model: Any) -> mx.array:
        found = model(tokens)
        found = found[0] if isinstance(found, tuple) else getattr(found, "logits", found)
        return found.astype(mx.float32)

    def difference(a: mx.array, b: mx.array) -> float:
        return float((mx.linalg.norm(a - b) / mx.linalg.norm(b)).item())

    try:
        write_checkpoint(name, folder / "source", PUBLISHED[name] if layout == "published" else None)
        reference = load_model(folder / "source")[0]
        wanted = logits(reference)
        mx.eval(wanted)
    except Exception as e:  # foreign code, which may raise anything
        row.verdict = f"not tried: mlx-lm's own fails, {type(e).__name__}: {str(e).splitlines()[0]}"
        return row
    told(Row(name, layout, "WRONG: ends the process"))
    switches = {path for path, module in reference.named_modules() if is_switch(module)}
    row.experts = len(switches)
    try:
        rsv_format.quantize(folder / "source", folder / "model.rsv", bits=8)
        model = rsv_mlx.load_model(folder / "model.rsv")
    except RsvError as e:
        row.verdict = f"refused: {e}"
        return row
    try:
        found = logits(model)
        mx.eval(found)
    except Exception as e:  # of mlx-lm's code with our layers
        row.verdict = f"WRONG: {type(e).__name__}: {e}"
        return row
    row.packed_in_memory = sum(isinstance(x, rsv_mlx.QuantizedSwitchLinear) for _, x in model.named_modules())
    with rsv_format.open(folder / "model.rsv") as file:
        row.share = rsv_format.summarize(file).share
        row.packed_in_file = sum(layer.stack > 1 for layer in file.layers.values())
        (folder / "dense").mkdir()
        (folder / "dense" / "config.json").write_bytes(file.attachments["config.json"].data)
        dense = {f"{x.name}.weight": mx.array(x.dequantize()) for x in file.layers.values()}
        dense |= {f"{x.name}.bias": mx.array(x.bias).reshape(x.out_features if x.stack == 1 else (x.stack, -1))
                  for x in file.layers.values() if x.bias is not None}  # fmt: skip
        dense |= {x.name: mx.array(x.array) for x in file.tensors.values()}
        mx.save_safetensors(str(folder / "dense" / "model.safetensors"), dense, metadata={"format": "pt"})
    row.error = difference(found, wanted)
    row.same_weights = difference(found, logits(load_model(folder / "dense")[0]))
    if not row.same_weights < TIGHT or not row.error < CLOSE:
        row.verdict = f"WRONG: {row.error:.1e}, with the same weights {row.same_weights:.1e}"
    return row


def main() -> None:
    """Print the table; exit with 1 if a model is wrong."""
    import mlx_lm  # noqa: F401  # once, for all that are forked

    from benchmarks.tiny_models import ARCHITECTURES, PUBLISHED

    rows: dict[str, list[Row]] = {}
    for name in sys.argv[1:] or sorted(ARCHITECTURES, key=str.lower):
        for layout in ("mlx", "published") if name in PUBLISHED else ("mlx",):
            rows.setdefault(name, []).append(_apart(name, layout))
            print(f"{name} {layout}: {rows[name][-1].verdict}", file=sys.stderr, flush=True)
    head = ("architecture", "mlx-lm's layout", "published", "quantized", "stacks", "in the file", "in memory")
    table(f"{len(rows)} architectures", head, [_cells(found) for found in rows.values()])
    sys.exit(any(row.verdict.startswith("WRONG") for found in rows.values() for row in found))


def _cells(rows: list[Row]) -> tuple[object, ...]:
    """A line of the table: one or two layouts of an architecture, the least that was packed."""
    packed = [min(row.packed_in_file for row in rows), min(row.packed_in_memory for row in rows)]
    experts, share = rows[0].experts, min(row.share for row in rows)
    return (
        rows[0].name,
        rows[0].verdict,
        rows[1].verdict if rows[1:] else "",
        f"{100 * share:.1f} %" if share else "",
        *((experts, *packed) if experts else ("", "", "")),
    )


def _apart(name: str, layout: str) -> Row:
    """`examine` in a process of its own, which a fault of foreign code may end."""

    def work() -> None:
        with tempfile.TemporaryDirectory() as folder:
            sender.send(examine(name, layout, Path(folder), sender.send))

    receiver, sender = multiprocessing.Pipe(duplex=False)
    process = multiprocessing.get_context("fork").Process(target=work)
    process.start()
    process.join(_PATIENCE)
    process.kill()
    row = Row(name, layout, "WRONG: does not start")
    while receiver.poll():
        row = receiver.recv()
    return row


if __name__ == "__main__":
    main()
