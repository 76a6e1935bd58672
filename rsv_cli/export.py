"""`rsv export`: dense weights again. `rsv extract`: the attached files."""

from __future__ import annotations

import contextlib
import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from enum import StrEnum
from functools import partial
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.complete import attachments
from rsv_cli.files import opened_file
from rsv_cli.leftovers import tell_leftovers_beside
from rsv_cli.options import USUAL_ORDER, Force, Json, MaxOrder, Quiet, RsvFile
from rsv_cli.session import session

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from rsv_format import Attachment, File, Layer
    from rsv_format.replaceable import Kind

    _Pieces = Callable[[], Iterator[NDArray[Any]]]

_GENERATOR = "rsv export"
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}


class Dtype(StrEnum):
    """Element types of dense weights."""

    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


@dataclass(frozen=True)
class _Item:
    """A tensor to be written, made when its turn comes."""

    name: str
    dtype: str  # RSV's name
    shape: tuple[int, ...]
    nbytes: int
    pieces: _Pieces  # its elements in order, some at a time


def export(
    file: RsvFile,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT.safetensors", help="Written whole or not at all.",
                     show_default=False),
    ],
    dtype: Annotated[
        Dtype | None,
        typer.Option("--dtype", help="Of everything that is floating. Without it: float32 for quantized layers, "
                     "all else as it was kept.", show_default=False),
    ] = None,
    force: Force = False,
    max_order: MaxOrder = USUAL_ORDER,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Turn a file back into dense weights.

    Every layer is dequantized and rotated back to its original basis, under the name that it had: the result
    loads wherever the source did, or in mlx-lm where experts were stacked. Some rows at a time are in memory. The
    file is verified first. With [bold]rsv extract[/bold] into the same folder, config and tokenizer come along and
    make it a Hugging Face folder.

    Example: [bold cyan]rsv export qwen.rsv -o qwen/model.safetensors --dtype bfloat16[/bold cyan]
    """
    with session(as_json):
        import numpy as np

        import rsv_format
        from rsv_format.outputs import Output, check, write_all

        tell_leftovers_beside(output, quiet)
        with opened_file(file, max_order=max_order) as opened:
            inputs = opened.paths
            items = sorted(_items(opened, dtype), key=lambda item: (-_itemsize(item.dtype), item.name))
            header = _header(items)
            total = sum(item.nbytes for item in items)
            check(output, _exported(), inputs=inputs, force=force, nbytes=len(header) + total)
            with terminal.progress("verifying", quiet=quiet, of_bytes=True) as told:
                rsv_format.verify(opened, progress=told)
            with (
                terminal.progress("exporting", quiet=quiet, of_bytes=True) as told,
                Output(output, _exported(), inputs=inputs, force=force) as whole,
            ):
                out = whole.open(len(header) + total)
                write_all(out, header)
                done = 0
                for item in items:
                    for piece in item.pieces():
                        told(done, total, item.name)
                        data = np.ascontiguousarray(piece).reshape(-1).view(np.uint8).data
                        write_all(out, data)
                        done += data.nbytes
                opened.check_unchanged()
        if as_json:
            terminal.write_json({"path": str(output), "nbytes": len(header) + total, "tensors": len(items)})
        elif not quiet:
            line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(str(output))}  {describe.size(total)}")
            line.append(f"  {len(items)} tensors", "dim")
            terminal.stdout().print(line, soft_wrap=True)


def extract(
    file: RsvFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Made if it is not there.", show_default=False)
    ],
    names: Annotated[
        list[str] | None,
        typer.Argument(metavar="NAME", help="Attachments; all of them if none is named.", autocompletion=attachments),
    ] = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take the attached files out: config.json, the tokenizer and what else the source had.

    All of them are written, or none: so if one of the files exists already, unless --force is given. Their digests
    are checked.

    Example: [bold cyan]rsv extract qwen.rsv tokenizer.json -o qwen[/bold cyan]
    """
    with session(as_json):
        from rsv_format import RsvError, outputs

        tell_leftovers_beside(output / "any", quiet)
        with opened_file(file) as opened, contextlib.ExitStack() as stack:
            inputs = opened.paths
            chosen = [_attachment(opened, name) for name in dict.fromkeys(names or opened.attachments)]
            if not chosen:
                raise RsvError("missing_attachment", file, "nothing is attached")
            stack.enter_context(outputs.folder(output))
            files = [outputs.Output(output / item.name, inputs=inputs, force=force) for item in chosen]
            for item in chosen[:1]:
                room = sum(item.nbytes for item in chosen)
                outputs.check(output / item.name, inputs=inputs, force=force, nbytes=room)
            for whole, item in zip(files, chosen, strict=True):
                stack.callback(whole.discard)
                out, digest = whole.open(item.nbytes), hashlib.sha256()
                for piece in opened.pieces(item.offset, "u8", item.nbytes):
                    outputs.write_all(out, piece.data)
                    digest.update(piece.data)
                if digest.hexdigest() != item.blob.sha256:
                    detail = "the bytes are not those that were written"
                    raise RsvError("blob_digest_mismatch", f"attachment {item.name}", detail)
            opened.check_unchanged()
            outputs.commit(*files)
        if as_json:
            terminal.write_json([{"path": str(output / item.name), "nbytes": item.nbytes} for item in chosen])
        for item in () if quiet or as_json else chosen:
            line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(str(output / item.name))}")
            line.append(f"  {describe.size(item.nbytes)}")
            terminal.stdout().print(line, soft_wrap=True)


def _exported() -> Kind:
    """What `export` writes, and writes over."""
    from rsv_format.replaceable import Kind

    return Kind("an export of this program", lambda head: f'"generator":"{_GENERATOR}"'.encode() in head)


def _attachment(file: File, name: str) -> Attachment:
    from rsv_format import RsvError

    if name not in file.attachments:
        known = ", ".join(file.attachments) or "none"
        raise RsvError("missing_attachment", name, f"the file has {known}")
    return file.attachments[name]


def _items(file: File, dtype: Dtype | None) -> Iterator[_Item]:
    from rsv_format.dtypes import FLOAT_DTYPES

    forced = None if dtype is None else _DTYPES[dtype.value]
    for layer in file.layers.values():
        sides = (layer.out_features, layer.in_features)
        shape = sides if layer.stack == 1 else (layer.stack, *sides)
        yield _item(f"{layer.name}.weight", forced or "f32", shape, partial(_rows, layer))
        if layer.bias_dtype is not None:
            read = partial(file.pieces, layer.parts[-1][1], layer.bias_dtype, layer.layout.rows)
            yield _kept(f"{layer.name}.bias", layer.bias_dtype, shape[:-1], forced, read)
    for tensor in file.tensors.values():
        target = forced if tensor.dtype in FLOAT_DTYPES else None
        read = partial(file.pieces, tensor.offset, tensor.dtype, prod(tensor.shape))
        yield _kept(tensor.name, tensor.dtype, tensor.shape, target, read)


def _rows(layer: Layer) -> Iterator[NDArray[np.float32]]:
    return (w for _, w in layer.dequantized_rows())


def _kept(name: str, dtype: str, shape: tuple[int, ...], forced: str | None, read: _Pieces) -> _Item:
    from rsv_format.dtypes import to_float32

    if forced is None or forced == dtype:
        return _Item(name, dtype, shape, prod(shape) * _itemsize(dtype), read)
    return _item(name, forced, shape, lambda: (to_float32(piece, dtype) for piece in read()))


def _item(name: str, dtype: str, shape: tuple[int, ...], read: _Pieces) -> _Item:
    """A tensor that is float32 in memory."""
    nbytes = prod(shape) * _itemsize(dtype)
    return _Item(name, dtype, shape, nbytes, lambda: (_from_float32(piece, dtype, name) for piece in read()))


def _from_float32(values: NDArray[Any], dtype: str, name: str) -> NDArray[Any]:
    import numpy as np

    from rsv_format import RsvError
    from rsv_format.dtypes import to_bfloat16, to_float32

    if dtype == "f32":
        return values
    with np.errstate(over="ignore"):
        narrow = to_bfloat16(values) if dtype == "bf16" else values.astype("<f2")
    if not np.isfinite(to_float32(narrow, dtype)).all() and np.isfinite(values).all():
        raise RsvError("content_invalid", name, f"a value is beyond the range of {dtype}: choose another --dtype")
    return narrow


def _itemsize(dtype: str) -> int:
    from rsv_format.layout import DTYPE_NBYTES

    return DTYPE_NBYTES[dtype]


def _header(items: list[_Item]) -> bytes:
    """The safetensors header. The library wants all tensors in memory at once, so it is not used to write."""
    from rsv_format import RsvError

    entries: dict[str, Any] = {"__metadata__": {"format": "pt", "generator": _GENERATOR}}
    offset = 0
    for item in items:
        if item.name in entries:
            raise RsvError("content_invalid", item.name, "safetensors reserves the name")
        span = [offset, offset + item.nbytes]
        entries[item.name] = {"dtype": item.dtype.upper(), "shape": item.shape, "data_offsets": span}
        offset += item.nbytes
    text = json.dumps(entries, ensure_ascii=False, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
