"""`rsv compare`: what quantization cost, layer by layer."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod, sqrt
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.files import opened_file, opened_model
from rsv_cli.options import USUAL_ORDER, Json, MaxOrder, Quiet, Revision, RsvFile, Source, at_revision
from rsv_cli.session import FAILED, session

if TYPE_CHECKING:
    from rsv_format import File, Layer
    from rsv_format.sources import Source as Model
    from rsv_format.sources import SourceTensor

_CHUNK = 2**17  # weights taken to float64 at a time: 1 MiB stays in the cache


@dataclass(frozen=True)
class _Error:
    """Sums of squares of one layer."""

    name: str
    weights: int
    error: float  # ||W - What||^2
    norm: float  # ||W||^2

    @property
    def relative(self) -> float | None:
        return _relative(self.error, self.norm)


@dataclass
class _Kept:
    """What became of the tensors that are not quantized."""

    equal: list[str] = field(default_factory=list)
    different: list[str] = field(default_factory=list)
    only_in_file: list[str] = field(default_factory=list)
    only_in_source: list[str] = field(default_factory=list)

    @property
    def sound(self) -> bool:
        return not (self.different or self.only_in_file or self.only_in_source)


def compare(
    source: Source,
    file: RsvFile,
    layers: Annotated[bool, typer.Option("--layers", help="List every layer, not families.")] = False,
    max_order: MaxOrder = USUAL_ORDER,
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Measure what quantization changed.

    For each layer and for all of them the relative error ‖W − Ŵ‖ / ‖W‖ (Frobenius), where W is the source's
    weight and Ŵ the file's, back in the original basis. Kept tensors and biases must be equal bit by bit: if one
    is not, or is missing on either side, it is named and the exit code is 1. The file is verified first. The source may
    be an RSV file too, of more bits perhaps.

    Example: [bold cyan]rsv compare ./Qwen2.5-0.5B qwen.rsv[/bold cyan]
    """
    source = at_revision(source, revision)
    with session(as_json):
        import rsv_format

        with (
            opened_file(file, max_order=max_order) as opened,
            opened_model(source, max_order=max_order, quiet=quiet) as model,
        ):
            with terminal.progress("verifying", quiet=quiet, of_bytes=True) as told:
                rsv_format.verify(opened, progress=told)
            with terminal.progress("comparing", quiet=quiet) as told:
                errors = _errors(model, opened, told)
            kept = _kept(model, opened)
            opened.check_unchanged()
        if as_json:
            terminal.write_json(_tree(source, file, errors, kept))
        else:
            _print(errors, kept, layers)
        if not kept.sound:
            raise typer.Exit(FAILED)


def _relative(error: float, norm: float) -> float | None:
    """None where a zero matrix did not stay one."""
    return sqrt(error / norm) if norm else None if error else 0.0


def _errors(model: Model, file: File, told: terminal.Progress) -> list[_Error]:
    from rsv_format import RsvError

    total = sum(layer.entry.rows * layer.in_features for layer in file.layers.values())
    done, errors = 0, []
    for layer in file.layers.values():
        told(done, total, layer.name)
        weight = model.tensors.get(f"{layer.name}.weight")
        if weight is None:
            raise RsvError("missing_layer", layer.name, "the source has no such weight")
        sides = (layer.out_features, layer.in_features)
        if weight.shape not in ((layer.stack, *sides), *([sides] if layer.stack == 1 else [])):
            expected = describe.shape(sides if layer.stack == 1 else (layer.stack, *sides))
            found = describe.shape(weight.shape)
            raise RsvError("shape_mismatch", layer.name, f"{expected}, but the source has {found}")
        errors.append(_error(layer, weight))
        done += errors[-1].weights
    return errors


def _error(layer: Layer, weight: SourceTensor) -> _Error:
    import numpy as np

    from rsv_format import RsvError

    source = weight.held()
    error = norm = 0.0
    step = max(1, _CHUNK // layer.in_features)
    for rows, found in layer.dequantized_rows():
        wanted = source.row_part(rows.start, rows.stop).float32()
        for start in range(0, len(wanted), step):
            w = wanted[start : start + step].astype(np.float64)
            difference = w - found[start : start + step]
            norm += float(np.vdot(w, w))
            error += float(np.vdot(difference, difference))
    if not np.isfinite(norm):
        raise RsvError("nonfinite_weight", weight.name, "the source's weight is not finite")
    if not np.isfinite(error):
        raise RsvError("nonfinite_value", layer.name, "the file's weight overflows float32")
    return _Error(layer.name, layer.layout.rows * layer.in_features, error, norm)


def _kept(model: Model, file: File) -> _Kept:
    have: dict[str, tuple[str, tuple[int, ...], int]] = {
        tensor.name: (tensor.dtype, tensor.shape, tensor.offset) for tensor in file.tensors.values()
    }  # and no array: one at a time is in memory
    for layer in file.layers.values():
        if layer.bias_dtype is not None:
            have[f"{layer.name}.bias"] = layer.bias_dtype, (layer.layout.rows,), layer.parts[-1][1]
    kept = _Kept()
    for name, (dtype, shape, offset) in have.items():
        tensor = model.tensors.get(name)
        if tensor is None:
            kept.only_in_file.append(name)
        elif tensor.dtype == dtype and _same_shape(tensor, shape) and _same_bytes(tensor, file, offset):
            kept.equal.append(name)
        else:
            kept.different.append(name)
    weights = {f"{name}.weight" for name in file.layers}
    kept.only_in_source = [name for name in model.tensors if name not in have and name not in weights]
    return kept


def _same_shape(tensor: SourceTensor, shape: tuple[int, ...]) -> bool:
    """The bias of a stack is flat in the file."""
    return tensor.shape == shape or shape == (prod(tensor.shape),)


def _same_bytes(tensor: SourceTensor, file: File, offset: int) -> bool:
    import numpy as np

    for part in _parts(tensor):
        wanted, start = np.ascontiguousarray(part.read()).reshape(-1).view(np.uint8), 0
        for piece in file.pieces(offset, "u8", wanted.size):
            if not np.array_equal(piece, wanted[start : start + piece.size]):
                return False
            start += piece.size
        offset += wanted.size
    return True


def _parts(tensor: SourceTensor) -> Iterator[SourceTensor]:
    """Rows of a tensor that are read alone, where that can be."""
    if tensor.rows is None or len(tensor.shape) < 2:
        yield tensor
        return
    height, width = tensor.matrix_shape
    step = max(1, _CHUNK // max(1, width))
    for start in range(0, height, step):
        yield tensor.row_part(start, min(start + step, height))


def _overall(errors: list[_Error]) -> float | None:
    return _relative(sum(e.error for e in errors), sum(e.norm for e in errors))


def _tree(source: str, path: str, errors: list[_Error], kept: _Kept) -> dict[str, Any]:
    return {
        "source": source,
        "path": path,
        "relative_error": _overall(errors),
        "weights": sum(e.weights for e in errors),
        "layers": [{"name": e.name, "weights": e.weights, "relative_error": e.relative} for e in errors],
        "tensors": {
            "equal": kept.equal,
            "different": kept.different,
            "only_in_file": kept.only_in_file,
            "only_in_source": kept.only_in_source,
        },
    }


def _print(errors: list[_Error], kept: _Kept, every: bool) -> None:
    from rich.bar import Bar

    from rsv_format.summary import family

    groups: dict[str, list[_Error]] = {}
    for e in errors:
        groups.setdefault(e.name if every else family(e.name), []).append(e)
    scale = max((e.relative or 0.0 for e in errors), default=0.0) or 1.0
    table = describe.table("Relative error", "name", ">", ">weights", ">error", ">worst", "")
    for name, members in groups.items():
        overall = _overall(members)
        worst = max(members, key=lambda e: float("inf") if e.relative is None else e.relative)
        table.add_row(
            Text(terminal.plain(name)),
            f"×{len(members)}" if len(members) > 1 else "",
            describe.count(sum(e.weights for e in members)),
            _percent(overall),
            _percent(worst.relative) if len(members) > 1 else "",
            Bar(scale, 0, scale if overall is None else overall, width=24, color="cyan"),
        )
    table.add_section()
    overall = _overall(errors)
    table.add_row("all layers", "", describe.count(sum(e.weights for e in errors)), _percent(overall), "", "",
                  style="bold")  # fmt: skip
    console = terminal.stdout()
    console.print(table)
    console.print()
    if kept.sound:
        console.print(Text.assemble(("equal", "bold green"), f"  all {len(kept.equal)} kept tensors and biases"))
        return
    for label, names in (
        ("different", kept.different),
        ("only in the file", kept.only_in_file),
        ("only in the source", kept.only_in_source),
    ):
        for name in names:
            console.print(Text.assemble((label, "bold red"), f"  {terminal.plain(name)}"), soft_wrap=True)
    console.print(Text(f"{len(kept.equal)} kept tensors and biases are equal"))


def _percent(relative: float | None) -> str:
    return "∞" if relative is None else f"{100 * relative:.2f} %"
