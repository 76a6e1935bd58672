"""`rsv export`: dense weights again. `rsv extract`: the attached files."""

from __future__ import annotations

import hashlib
import json
import os
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
from rsv_cli.options import Quiet, RsvFile
from rsv_cli.session import session

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rsv_format import Attachment, File

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
    read: Callable[[], NDArray[Any]]


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
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Turn a file back into dense weights.

    Every layer is dequantized and rotated back to its original basis, under the name that it had: the result
    loads wherever the source did, or in mlx-lm where experts were stacked. One layer at a time is in memory. The
    file is verified first. With [bold]rsv extract[/bold] into the same folder, config and tokenizer come along and
    make it a Hugging Face folder.

    Example: [bold cyan]rsv export qwen.rsv -o qwen/model.safetensors --dtype bfloat16[/bold cyan]
    """
    with session():
        import rsv_format
        from rsv_cli.files import check_output
        from rsv_format.replacing import replacing

        with rsv_format.open(file) as opened:
            check_output(output, file, writes_rsv=False)
            items = sorted(_items(opened, dtype), key=lambda item: (-_itemsize(item.dtype), item.name))
            with terminal.progress("verifying", quiet=quiet, of_bytes=True) as told:
                rsv_format.verify(opened, progress=told)
            with (
                terminal.progress("exporting", quiet=quiet, of_bytes=True) as told,
                replacing(output.resolve()) as new,
                new.open("xb") as out,
            ):
                out.write(_header(items))
                done, total = 0, sum(item.nbytes for item in items)
                for item in items:
                    told(done, total, item.name)
                    out.write(item.read().reshape(-1).data)
                    done += item.nbytes
        if not quiet:
            line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(str(output))}  {describe.size(total)}")
            line.append(f"  {len(items)} tensors", "dim")
            terminal.stdout().print(line, soft_wrap=True)


def extract(
    file: RsvFile,
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="DIR", help="Made if it is not there.", show_default=False)
    ],
    names: Annotated[
        list[str] | None, typer.Argument(metavar="NAME", help="Attachments; all of them if none is named.")
    ] = None,
    force: Annotated[bool, typer.Option("--force", "-f", help="Replace files that exist.")] = False,
    quiet: Quiet = False,
) -> None:
    """Take the attached files out: config.json, the tokenizer and what else the source had.

    Nothing is written if one of the files exists already, unless --force is given. Their digests are checked.

    Example: [bold cyan]rsv extract qwen.rsv tokenizer.json -o qwen[/bold cyan]
    """
    with session():
        import rsv_format
        from rsv_format import RsvError
        from rsv_format.replacing import replacing

        with rsv_format.open(file) as opened:
            chosen = [_attachment(opened, name) for name in dict.fromkeys(names or opened.attachments)]
            if not force:
                for item in chosen:
                    if os.path.lexists(output / item.name):
                        raise RsvError("bad_argument", str(output / item.name), "exists; --force replaces it")
            output.mkdir(parents=True, exist_ok=True)
            for item in chosen:
                with replacing(output / item.name) as new, new.open("xb") as out:
                    out.write(item.data)
                if not quiet:
                    line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(str(output / item.name))}")
                    line.append(f"  {describe.size(item.nbytes)}")
                    terminal.stdout().print(line, soft_wrap=True)


def _attachment(file: File, name: str) -> Attachment:
    from rsv_format import RsvError

    if name not in file.attachments:
        known = ", ".join(file.attachments) or "none"
        raise RsvError("missing_attachment", name, f"the file has {known}")
    item = file.attachments[name]
    if hashlib.sha256(item.data).hexdigest() != item.blob.sha256:
        raise RsvError("blob_digest_mismatch", f"attachment {name}", "the bytes are not those that were written")
    return item


def _items(file: File, dtype: Dtype | None) -> Iterator[_Item]:
    from rsv_format.dtypes import FLOAT_DTYPES

    forced = None if dtype is None else _DTYPES[dtype.value]
    for layer in file.layers.values():
        sides = (layer.out_features, layer.in_features)
        shape = sides if layer.stack == 1 else (layer.stack, *sides)
        yield _item(f"{layer.name}.weight", forced or "f32", shape, layer.dequantize)
        if layer.bias_dtype is not None:
            yield _kept(f"{layer.name}.bias", layer.bias_dtype, shape[:-1], forced, partial(getattr, layer, "bias"))
    for tensor in file.tensors.values():
        target = forced if tensor.dtype in FLOAT_DTYPES else None
        yield _kept(tensor.name, tensor.dtype, tensor.shape, target, partial(getattr, tensor, "array"))


def _kept(name: str, dtype: str, shape: tuple[int, ...], forced: str | None, read: Callable[[], Any]) -> _Item:
    from rsv_format.dtypes import to_float32

    if forced is None or forced == dtype:
        return _Item(name, dtype, shape, prod(shape) * _itemsize(dtype), read)
    return _item(name, forced, shape, lambda: to_float32(read(), dtype))


def _item(name: str, dtype: str, shape: tuple[int, ...], read: Callable[[], NDArray[Any]]) -> _Item:
    """A tensor that is float32 in memory."""
    return _Item(name, dtype, shape, prod(shape) * _itemsize(dtype), lambda: _from_float32(read(), dtype, name))


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

    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
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
