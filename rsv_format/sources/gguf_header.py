"""The header of a GGUF file, from bytes to values: key-value pairs, and where each tensor lies.

The gguf package's reader maps the file, so that one that shrinks meanwhile kills the process, refuses text that is
not UTF-8, and takes seconds for a vocabulary. Text is decoded with `surrogateescape` here: no byte is lost.
"""

from __future__ import annotations

import math
import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.sources.base import SourceFile

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "?", 10: "<u8", 11: "<i8", 12: "<f8"}
_STRING, _ARRAY = 8, 9
_DEEPEST = 4  # arrays in arrays; llama.cpp has none
_MOST_AXES = 4  # of a tensor, GGML_MAX_DIMS
_AT_ONCE = 1 << 20  # bytes read ahead


@dataclass(frozen=True)
class TensorInfo:
    """A tensor as the header has it: the fastest axis last, the offset from the start of the data."""

    name: str
    shape: tuple[int, ...]
    type_id: int
    offset: int


@dataclass(frozen=True)
class Header:
    """What stands before the data; `values` holds bool, int, float, str, arrays of numbers and lists."""

    values: dict[str, Any]
    tensors: list[TensorInfo]
    data_offset: int
    alignment: int


def parse_header(file: SourceFile) -> Header:
    """Read and check the header of a GGUF file.

    Raises
    ------
    RsvError
        `io_error`; `source_invalid` where it is malformed or cut short; `source_unsupported` for another version
        or byte order.
    """
    where = str(file.path)
    cursor = _Cursor(file)
    magic = cursor.take(4) if file.size >= 4 else b""
    if magic != MAGIC:
        raise RsvError("source_invalid", where, f"is no GGUF file: it begins with {magic!r}, not {MAGIC!r}")
    version = cursor.integer("<I")
    if version & 0xFFFF == 0:
        raise RsvError("source_unsupported", where, "is a big-endian GGUF file")
    if version not in _VERSIONS:
        detail = f"is a GGUF file of version {version}; {' and '.join(map(str, _VERSIONS))} can be read"
        raise RsvError("source_unsupported", where, detail)
    tensor_count, pair_count = cursor.integer("<Q"), cursor.integer("<Q")
    values: dict[str, Any] = {}
    for _ in range(pair_count):
        key = cursor.name()
        if key in values:
            raise RsvError("source_invalid", f"{where}: {key}", "is there twice")
        cursor.where = f"{where}: {key}"
        values[key] = cursor.value(cursor.integer("<I"))
        cursor.where = where
    tensors = [cursor.tensor() for _ in range(tensor_count)]
    alignment = values.get("general.alignment", 32)
    if type(alignment) is not int or alignment <= 0 or alignment & (alignment - 1):
        raise RsvError("source_invalid", f"{where}: general.alignment", f"{alignment!r:.80} is not a power of two")
    return Header(values, tensors, -(-cursor.position // alignment) * alignment, alignment)


class _Cursor:
    """Where a file is read; no more is taken from it than it has left."""

    def __init__(self, file: SourceFile) -> None:
        self.file, self.where = file, str(file.path)
        self.position = 0
        self._start, self._bytes = 0, b""

    def take(self, count: int) -> bytes:
        if count > self.file.size - self.position:
            raise RsvError("source_invalid", self.where, "the file ends before its header does")
        at = self.position - self._start
        if at + count > len(self._bytes):
            ahead = min(max(count, _AT_ONCE), self.file.size - self.position)
            self._bytes = self.file.read(np.uint8, (ahead,), self.position, self.where).tobytes()
            self._start, at = self.position, 0
        self.position += count
        return self._bytes[at : at + count]

    def integer(self, form: str) -> int:
        value: int = struct.unpack(form, self.take(struct.calcsize(form)))[0]
        return value

    def string(self) -> str:
        return self.take(self.integer("<Q")).decode("utf-8", "surrogateescape")

    def name(self) -> str:
        return self.take(self.integer("<Q")).decode("utf-8", "backslashreplace")

    def value(self, kind: int, depth: int = 0) -> Any:
        if kind in _SCALARS:
            return self._numbers(kind, 1)[0].item()
        if kind == _STRING:
            return self.string()
        if kind != _ARRAY:
            raise RsvError("source_invalid", self.where, f"its value is of type {kind}, which does not exist")
        if depth == _DEEPEST:
            raise RsvError("source_invalid", self.where, f"its arrays are nested more than {_DEEPEST} deep")
        kind, count = self.integer("<I"), self.integer("<Q")
        if kind in _SCALARS:
            return self._numbers(kind, count)
        return [self.value(kind, depth + 1) for _ in range(count)]

    def _numbers(self, kind: int, count: int) -> np.ndarray[Any, Any]:
        dtype = np.dtype(_SCALARS[kind])
        return np.frombuffer(self.take(count * dtype.itemsize), dtype)

    def tensor(self) -> TensorInfo:
        name = self.name()
        axes = self.integer("<I")
        if axes > _MOST_AXES:
            raise RsvError("source_invalid", f"{self.where}: {name}", f"has {axes} axes, more than {_MOST_AXES}")
        shape = tuple(self.integer("<Q") for _ in range(axes))[::-1]
        if not shape or not math.prod(shape):
            raise RsvError("source_invalid", f"{self.where}: {name}", f"has the shape {shape}, without elements")
        return TensorInfo(name, shape, self.integer("<I"), self.integer("<Q"))
