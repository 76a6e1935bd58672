"""What a source is: named tensors that are read one at a time, a config and attachments.

A source is the input of the quantizer and no part of the file format, so SPEC.md is silent about it.
Opening a source reads headers only; the callables of a `SourceTensor` read one tensor each.
"""

from __future__ import annotations

import importlib
import json
import math
import os
import stat
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rsv_format.dtypes import NUMPY_DTYPE, to_bfloat16, to_float32
from rsv_format.errors import RsvError, is_out_of_memory
from rsv_format.panics import is_panic
from rsv_format.roles import Role, tensor_role

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]
Part = Callable[[int, int], "SourceTensor"]

_AT_ONCE = 2**20  # weights of a piece that are in float32 together
CONFIGS = ("config.json", "generation_config.json")
_LONGEST_REASON = 500  # characters of what a library says
_POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of what Git LFS leaves in a file's place


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source, not yet read.

    `dtype` is the RSV name of the dtype it is kept in, `read` returns that form (bfloat16 as uint16 bit
    patterns) and `float32` the same values as dense float32, both of shape `shape`.  Either raises RsvError
    `source_invalid` when the file does not hold what its header said.  `experts` are the tensors of which a stack
    is made, by their own names, where the checkpoint keeps them apart.  `rows` and `columns` give a part of the matrix
    that all axes but the last make one of, from start to stop, as a tensor (rows, columns) that is read alone, where
    that can be: `row_part` and `column_part` always do.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]
    float32: Callable[[], Floats]
    experts: tuple[SourceTensor, ...] = ()
    rows: Part | None = None
    columns: Part | None = None

    @property
    def matrix_shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return math.prod(self.shape[:-1]), self.shape[-1]

    def row_part(self, start: int, stop: int) -> SourceTensor:
        """Rows start to stop of the matrix, (stop - start, columns)."""
        if self.rows is not None:
            return self.rows(start, stop)
        return self._viewed((stop - start, self.shape[-1]), lambda matrix: matrix[start:stop])

    def column_part(self, start: int, stop: int) -> SourceTensor:
        """Columns start to stop of the matrix, (rows, stop - start)."""
        if self.columns is not None:
            return self.columns(start, stop)
        return self._viewed((self.matrix_shape[0], stop - start), lambda matrix: matrix[:, start:stop])

    def held(self) -> SourceTensor:
        """One of which parts are read without reading it whole each time: itself, or its values in memory."""
        if self.rows is not None or len(self.shape) < 2:
            return self
        kept: list[Floats] = []

        def float32() -> Floats:
            kept[:] = kept or [self.float32()]
            return kept[0]

        return replace(self, float32=float32)

    def pieces(self) -> Sequence[Floats]:
        """The values in float32, some rows at a time, always the same, each read when it is asked for.

        What is no matrix is one piece.
        """
        return _Pieces(self)

    def taken(self, rows: npt.NDArray[np.intp]) -> Floats:
        """Some rows of a matrix, by their numbers, float32 (rows, columns)."""
        tensor = self.held()
        kept = (tensor.row_part(row, row + 1).read() for row in rows.tolist())
        return to_float32(np.concatenate([*kept]), self.dtype)

    def _viewed(self, shape: tuple[int, int], view: Callable[[Array], Array]) -> SourceTensor:
        whole, read, float32 = self.matrix_shape, self.read, self.float32
        return SourceTensor(
            self.name,
            self.dtype,
            shape,
            lambda: np.ascontiguousarray(view(read().reshape(whole))),
            lambda: np.ascontiguousarray(view(float32().reshape(whole))),
        )


class _Pieces(Sequence[Floats]):
    def __init__(self, tensor: SourceTensor) -> None:
        self._tensor, self._edges = tensor.held(), [0, 1]
        if len(tensor.shape) > 1:
            rows, width = tensor.matrix_shape
            self._edges = [*range(0, rows, max(1, _AT_ONCE // width)), rows]

    def __len__(self) -> int:
        return len(self._edges) - 1

    def __getitem__(self, i: Any) -> Any:
        start, stop = self._edges[i], self._edges[i + 1]
        return (self._tensor if len(self._tensor.shape) < 2 else self._tensor.row_part(start, stop)).float32()


class SourceFile:
    """A file that stays open while its source is: tensors that are read later are of the same file.

    The path may come to mean another one meanwhile, as when a download or git replaces it.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        with reading(str(path)):
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe would wait for its writer
            self.close = weakref.finalize(self, os.close, descriptor)
            found = os.fstat(descriptor)
            if not stat.S_ISREG(found.st_mode):
                raise RsvError("source_unsupported", str(path), "is no regular file")
            self._descriptor, self._opened, self.size = descriptor, _identity(found), found.st_size
            _refuse_pointer(os.pread(descriptor, len(_POINTER), 0), path)

    @property
    def identity(self) -> tuple[int, int]:
        """Bytes, and nanoseconds of its last change, when it was opened."""
        return self._opened[2], self._opened[3]

    def read(
        self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int, where: str, stride: int | None = None
    ) -> Array:
        """An array of the bytes from an offset on; `source_invalid` where the file ends before it does.

        With a stride, its rows begin so many bytes one after the other.
        """
        if not self.close.alive:
            raise RsvError("closed", where, "the source is closed")
        array: Array = np.empty(shape, dtype)
        rows = [array] if stride is None else array
        for i, row in enumerate(rows):
            self._fill(row, offset + i * (stride or 0), where)
        return array

    def _fill(self, array: Array, offset: int, where: str) -> None:
        missing = array.reshape(-1).view(np.uint8).data
        while missing:
            with reading(where):
                count = os.preadv(self._descriptor, [missing], offset)
            if count == 0:
                raise RsvError("source_invalid", where, f"the file ends {len(missing)} bytes too early")
            missing, offset = missing[count:], offset + count

    def check_unchanged(self) -> None:
        """Raise RsvError `io_error` unless the path means this file, of the size and time that it was opened with."""
        with reading(str(self.path)):
            changed = _identity(os.stat(self.path)) != self._opened
        if changed:
            raise RsvError("io_error", str(self.path), "was changed or replaced while it was read")


def _identity(found: os.stat_result) -> tuple[int, ...]:
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns


@dataclass
class Source:
    """An opened model: tensors by Hugging Face name, the config, and attachments (media type, bytes).

    `left_out` are the files beside the weights that a tokenizer may want and that cannot be attached; `revision` is
    the commit of what was downloaded.
    """

    kind: str
    path: str
    tensors: dict[str, SourceTensor]
    config: dict[str, Any] | None = None
    attachments: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()
    left_out: tuple[str, ...] = ()
    revision: str | None = None

    def __repr__(self) -> str:
        return f"<rsv_format.Source: {self.kind} {self.path}, {len(self.tensors)} tensors>"

    def is_linear(self, name: str) -> bool:
        """Whether a tensor is the weight of a linear layer, (out, in), or expert stack, (n, out, in)."""
        return self.role(name) in (Role.LINEAR, Role.STACK)

    def role(self, name: str) -> Role:
        """What a tensor is for."""
        tensor = self.tensors[name]
        return tensor_role(name, tensor.dtype, tensor.shape)

    def without_tokenizer(self) -> Source:
        """The same with no attachments but the config and the settings for generation."""
        kept = {name: self.attachments[name] for name in CONFIGS if name in self.attachments}
        return replace(self, attachments=kept, left_out=())

    def check_unchanged(self) -> None:
        """Raise RsvError `io_error` if a file is no longer the one that was opened."""
        for file in self.files:
            file.check_unchanged()

    def close(self) -> None:
        """Forget the tensors and close the files that they are read from."""
        self.tensors = {}
        for file in self.files:
            file.close()

    def __enter__(self) -> Source:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def dense_tensor(name: str, dtype: str, shape: tuple[int, ...], read: Callable[[], Array]) -> SourceTensor:
    """A tensor whose float32 form follows from its kept form."""
    return SourceTensor(name, dtype, shape, read, lambda: to_float32(read(), dtype))


def transposed(tensor: SourceTensor) -> SourceTensor:
    """A matrix, (out, in) of one that lies (in, out)."""

    has_parts = tensor.rows is not None or tensor.columns is not None

    def turned(array: Array) -> Array:
        return np.ascontiguousarray(array.T)

    return SourceTensor(
        tensor.name,
        tensor.dtype,
        tensor.shape[::-1],
        lambda: turned(tensor.read()),
        lambda: turned(tensor.float32()),
        rows=(lambda start, stop: transposed(tensor.column_part(start, stop))) if has_parts else None,
        columns=(lambda start, stop: transposed(tensor.row_part(start, stop))) if has_parts else None,
    )


def selected(tensor: SourceTensor, chosen: slice) -> SourceTensor:
    """Some rows of a matrix: those from a start to a stop, or every so many."""
    start, stop, step = chosen.indices(tensor.shape[0])
    first, count = start, len(range(start, stop, step))
    whole = tensor.row_part(first, stop)

    def rows(start: int, stop: int) -> SourceTensor:
        part = tensor.row_part(first + start * step, first + (stop - 1) * step + 1)
        return part if step == 1 else _every(part, step, stop - start)

    made = whole if step == 1 else _every(whole, step, count)
    return replace(made, rows=None if tensor.rows is None else rows)


def _every(tensor: SourceTensor, step: int, count: int) -> SourceTensor:
    return SourceTensor(
        tensor.name,
        tensor.dtype,
        (count, tensor.shape[1]),
        lambda: np.ascontiguousarray(tensor.read()[::step]),
        lambda: np.ascontiguousarray(tensor.float32()[::step]),
    )


def stacked(name: str, parts: Sequence[SourceTensor]) -> SourceTensor:
    """Equal tensors, one after the other on a new first axis; read into place, one of them in memory beside it."""
    dtype, shape = parts[0].dtype, (len(parts), *parts[0].shape)
    height = parts[0].matrix_shape[0] if len(shape) > 2 else 1

    def joined(shape: tuple[int, ...], parts: Sequence[SourceTensor]) -> SourceTensor:
        def filled(kind: npt.DTypeLike, arrays: Iterator[Array]) -> Array:
            whole, done = np.empty((math.prod(shape[:-1]), shape[-1]), kind), 0
            for array in arrays:
                rows = array.reshape(-1, shape[-1])
                whole[done : done + len(rows)] = rows
                done += len(rows)
            return whole.reshape(shape)

        return SourceTensor(
            name,
            dtype,
            shape,
            lambda: filled(NUMPY_DTYPE[dtype], (x.read() for x in parts)),
            lambda: filled(np.float32, (x.float32() for x in parts)),
        )

    def rows(start: int, stop: int) -> SourceTensor:
        within = [
            parts[i].row_part(max(start - i * height, 0), min(stop - i * height, height))
            for i in range(start // height, -(-stop // height))
        ]
        return within[0] if len(within) == 1 else joined((stop - start, shape[-1]), within)

    apart = len(shape) > 2 and all(x.rows is not None for x in parts)
    return replace(joined(shape, parts), rows=rows if apart else None)


def from_float32(values: Floats, dtype: str, where: str) -> Array:
    """Computed values in the form f32, f16 or bf16 that they are kept in, to nearest even.

    What is not finite, or overflows in that form, is `source_invalid`.
    """
    if not np.isfinite(values).all():
        raise RsvError("source_invalid", where, "a value is not finite once it is dequantized")
    with np.errstate(over="ignore"):
        kept = to_bfloat16(values) if dtype == "bf16" else values.astype(NUMPY_DTYPE[dtype])
        if not np.isfinite(to_float32(kept, dtype)).all():
            raise RsvError(
                "source_invalid", where, f"a value is beyond the range of {dtype}, in which it would be kept"
            )
    return kept


def library(name: str, where: str) -> Any:
    """Import the package or module that reads this kind of source, or say how to install it."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise RsvError.of_import(error, where, "pip install 'rsv-format[sources]'") from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Around a third-party reader: OSError becomes `io_error`, all else that it raises `source_invalid`."""
    try:
        yield
    except (RsvError, MemoryError):
        raise
    except OSError as error:
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        raise RsvError("io_error", where, error.strerror or str(error)) from error
    except BaseException as error:  # the readers promise no exception type for malformed input
        if not isinstance(error, Exception) and not is_panic(error):
            raise
        if is_out_of_memory(error):
            raise MemoryError(str(error)) from error
        said = " ".join(str(error).split())
        said = said if len(said) <= _LONGEST_REASON else f"{said[:_LONGEST_REASON]}..."
        raise RsvError("source_invalid", where, f"{type(error).__name__}: {said}") from error


def read_bytes(path: Path) -> bytes:
    """All of a small file; `source_invalid` for a pointer of Git LFS in its place."""
    file = SourceFile(path)
    data = file.read("u1", (file.size,), 0, str(path)).tobytes()
    file.close()
    return data


def _refuse_pointer(data: bytes, path: Path) -> None:
    if data.startswith(_POINTER):
        raise RsvError("source_invalid", str(path), "is a Git LFS pointer, not the file itself: run `git lfs pull`")


def read_json_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; `source_invalid` when it is anything else."""
    data = read_bytes(path)
    with reading(str(path)):
        value = json.loads(data)
    if not isinstance(value, dict):
        raise RsvError("source_invalid", str(path), "is not a JSON object")
    return value


def json_attachment(value: dict[str, Any]) -> tuple[str, bytes]:
    return "application/json", (json.dumps(value, indent=2) + "\n").encode()
