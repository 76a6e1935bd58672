"""`rsv cat`: one thing out of a file, on standard output or into a file."""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import IO, TYPE_CHECKING, Annotated, Any

import typer

from rsv_cli import terminal
from rsv_cli.complete import names
from rsv_cli.files import opened_file
from rsv_cli.options import USUAL_ORDER, Force, MaxOrder, RsvFile
from rsv_cli.session import session

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from rsv_format import File, Layer
    from rsv_format.reader import Attachment

_NPY = b"\x93NUMPY"


def cat(
    file: RsvFile,
    name: Annotated[
        str,
        typer.Argument(metavar="NAME", help="Of a layer, its .weight or .bias, a tensor or an attachment.",
                       show_default=False, autocompletion=names),
    ],
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="Written whole or not at all; otherwise standard output.",
                     show_default=False),
    ] = None,
    max_order: MaxOrder = USUAL_ORDER,
    force: Force = False,
) -> None:  # fmt: skip
    """Take one thing out: a layer dense or a tensor as .npy, an attachment as it is.

    A layer is dequantized and rotated back, float32. A tensor keeps its element type, but for bfloat16, which NumPy
    lacks: it becomes float32, exactly. Digests and values of what is taken are checked first.

    Example: [bold cyan]rsv cat model.rsv model.norm.weight -o norm.npy[/bold cyan]
    """
    with session():
        from rsv_format import RsvError
        from rsv_format.outputs import Output, check, write_all
        from rsv_format.replaceable import Kind

        if output is None:
            _refuse_input(file)
        with opened_file(file, max_order=max_order) as opened:
            found = _found(opened, name)
            if len(found) != 1:
                few = (
                    "is a tensor and an attachment, which rsv extract takes" if found else "rsv ls lists what is there"
                )
                raise RsvError("bad_argument", name, few)
            inputs = opened.paths
            is_array = name not in opened.attachments
            kind = Kind("a NumPy array", lambda head: is_array and head.startswith(_NPY))
            if output is not None:
                check(output, kind, inputs=inputs, force=force)
            item = found[0]()
            opened.check_unchanged()
        if output is not None:
            with Output(output, kind, inputs=inputs, force=force) as whole:
                if isinstance(item, memoryview):
                    write_all(whole.open(item.nbytes), item)
                else:
                    start = _header(item)
                    out = whole.open(len(start) + item.nbytes)
                    write_all(out, start)
                    write_all(out, _bytes(item))
        elif not sys.stdout.isatty():
            _write(sys.stdout.buffer, item)
        elif isinstance(item, memoryview) and _is_text(item):
            terminal.write_text(str(item, "utf-8"))
        else:
            raise RsvError("bad_argument", name, "is not text, and standard output is a terminal: give -o, or a pipe")


def _refuse_input(file: str) -> None:
    """As cat(1) does: what is appended to its own input."""
    from rsv_format import RsvError

    is_input = False
    with contextlib.suppress(OSError, ValueError):  # it is closed, or a stream of the tests
        is_input = os.path.isfile(file) and os.path.samestat(os.fstat(sys.stdout.fileno()), os.stat(file))
    if is_input:
        raise RsvError("bad_argument", file, "is where this process prints to")


def _found(file: File, name: str) -> list[Callable[[], NDArray[Any] | memoryview]]:
    """What has a name, not yet read."""
    from rsv_format.verify import verify_blobs

    def layer(base: str, part: str) -> NDArray[Any]:
        item = file.layers[base]
        verify_blobs(file, item.blobs)
        return _dense(item) if part == "weight" else _array(item.bias, item.bias_dtype)

    def tensor() -> NDArray[Any]:
        item = file.tensors[name]
        verify_blobs(file, [item.blob])
        return _array(item.array, item.dtype)

    def attachment() -> memoryview:
        item: Attachment = file.attachments[name]
        verify_blobs(file, [item.blob])
        return item.data

    found: list[Callable[[], NDArray[Any] | memoryview]] = []
    base, _, part = name.rpartition(".")
    if name in file.layers:
        found.append(lambda: layer(name, "weight"))
    elif base in file.layers and (part == "weight" or (part == "bias" and file.layers[base].bias_dtype)):
        found.append(lambda: layer(base, part))
    if name in file.tensors:
        found.append(tensor)
    if name in file.attachments:
        found.append(attachment)
    return found


def _dense(layer: Layer) -> NDArray[Any]:
    import numpy as np

    from rsv_format import RsvError

    with np.errstate(over="ignore", invalid="ignore"):
        weight = layer.dequantize()
    if not np.isfinite(weight).all():
        raise RsvError("nonfinite_value", layer.name, "its weight overflows float32")
    return weight


def _array(array: Any, dtype: str | None) -> NDArray[Any]:
    """An array of an element type that NumPy has."""
    from rsv_format.dtypes import to_float32

    if dtype == "bf16":
        return to_float32(array, dtype)
    return array.astype(bool) if dtype == "bool" else array  # type: ignore[no-any-return]


def _header(array: NDArray[Any]) -> bytes:
    """What a .npy file begins with."""
    import numpy as np

    start = BytesIO()
    np.lib.format.write_array_header_1_0(start, np.lib.format.header_data_from_array_1_0(np.ascontiguousarray(array)))
    return start.getvalue()


def _bytes(array: NDArray[Any]) -> memoryview:
    import numpy as np

    return np.ascontiguousarray(array).reshape(-1).view(np.uint8).data


def _write(out: IO[bytes], item: NDArray[Any] | memoryview) -> None:
    if not isinstance(item, memoryview):
        out.write(_header(item))
        item = _bytes(item)
    out.write(item)
    out.flush()


def _is_text(data: memoryview) -> bool:
    try:
        str(data, "utf-8")
    except UnicodeDecodeError:
        return False
    return True
