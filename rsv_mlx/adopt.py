"""Bytes of an open file to MLX arrays: adopted where they lie, or copied once.

Adopting takes MLX with Metal: the pages of the map around a blob become a buffer. The map is read-only, so no
operation may write its result over an input that it thinks nobody needs any more (donation): whoever holds the
parts holds the base as well. Copying reads a run of blobs into one array. Either way the parts of a blob are slices
and views, never conversions.
"""

from __future__ import annotations

import mmap
import time
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import lru_cache
from math import prod
from typing import Any, Protocol

import mlx.core as mx
import numpy as np

import rsv_format
from rsv_format import PAGE, RsvError
from rsv_mlx.stream import WordReader, require_room

_MAX_ELEMENTS = 2**31 - 1  # of an axis of an MLX array
_TOGETHER = 2**24  # bytes read at once: enough for several threads, and still what malloc keeps and reuses
ZERO_COPY = ("auto", "require", "never")

_MLX_DTYPES = {
    "bool": mx.bool_, "u8": mx.uint8, "i8": mx.int8, "u16": mx.uint16, "i16": mx.int16, "u32": mx.uint32,
    "i32": mx.int32, "u64": mx.uint64, "i64": mx.int64, "f16": mx.float16, "bf16": mx.bfloat16, "f32": mx.float32,
}  # fmt: skip


@dataclass
class LoadReport:
    """What loading did: bytes of layers and tensors by how they reached MLX, and seconds by step.

    Attributes
    ----------
    nbytes : int
        Of the file.
    layers, tensors : int
        How many were bound.
    adopted_nbytes, copied_nbytes, deferred_nbytes : int
        Bytes that MLX uses where they lie, has a copy of, or will have one of when they are first used: then
        they count as copied as well.
    dense_nbytes : int
        Weights that were made dense: as asked, because their module has no packed form, or because mlx-lm
        merges or converts them (`sanitize`).
    obstacle : str or None
        Why nothing was adopted.
    cast_nbytes : int
        Kept tensors that were cast to another dtype, bytes after.
    seconds : dict
        By step: "open", "model" (its classes and skeleton), "tensors", "layers", "tokenizer"; "read" is the part
        of "tensors" and "layers" in which bytes are copied from the file.
    """

    nbytes: int = 0
    layers: int = 0
    tensors: int = 0
    adopted_nbytes: int = 0
    copied_nbytes: int = 0
    deferred_nbytes: int = 0
    dense_nbytes: int = 0
    obstacle: str | None = None
    cast_nbytes: int = 0
    seconds: dict[str, float] = field(default_factory=dict)


Part = tuple[int, str, tuple[int, ...]]  # offset in the file, RSV dtype, shape
Run = tuple[int, int]  # start and end in the file


@dataclass(frozen=True)
class Loaded:
    """Arrays of one blob, and the array that they are views of where it must be kept alive."""

    arrays: list[mx.array]
    base: mx.array | None = None


class Held:
    """An array that only has to stay: copies of what holds it hold the same, and it is never pickled."""

    def __init__(self, array: mx.array | None = None) -> None:
        self.array = array

    def __deepcopy__(self, memo: object) -> Held:
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return Held, ()


class Loader(Protocol):
    """A way from the file to arrays."""

    adopts: bool

    def load(self, parts: list[Part]) -> Loaded:
        """The parts of one blob, in ascending order."""


def make_loader(file: rsv_format.File, zero_copy: str, lazy: bool, report: LoadReport) -> Loader:
    """The loader that was asked for; a lazy one reads no neighbours along.

    Raises
    ------
    RsvError
        bad_argument: another value, or adoption is required and not possible here.
    """
    if zero_copy not in ZERO_COPY:
        raise RsvError("bad_argument", "zero_copy", f"{zero_copy!r} is not one of {', '.join(ZERO_COPY)}")
    report.obstacle = "not asked for" if zero_copy == "never" else adoption_obstacle(file)
    if report.obstacle is None:
        return _Adopt(file, report)
    if zero_copy == "require":
        raise RsvError("bad_argument", "zero_copy", f"not possible here: {report.obstacle}")
    return _Read(file, report, 0 if lazy else _TOGETHER)


def adoption_obstacle(file: rsv_format.File | None = None) -> str | None:
    """Why MLX cannot adopt mapped bytes (of this file) here, or None if it can."""
    obstacle = _probe()
    if obstacle is None and file is not None:
        if not file.mapped:
            return "the file is not mapped"
        if np.frombuffer(file.read(0, PAGE), np.uint8).ctypes.data % mmap.PAGESIZE:
            return "the map does not start on a page"
    return obstacle


@lru_cache(maxsize=1)
def _probe() -> str | None:
    """Try it on two pages."""
    if not mx.metal.is_available():
        return "MLX has no Metal here"
    try:
        page = np.frombuffer(memoryview(mmap.mmap(-1, 2 * PAGE)).toreadonly(), np.uint32)
        adopted = mx.asarray(page, copy=False)
        mx.eval(adopted[:16].view(mx.float32))
    except Exception as e:  # whatever MLX, numpy or the system object to
        return f"mx.asarray(copy=False): {e}"
    return None


class _Read:
    """One copy into MLX's memory: blobs that follow each other are read together, and each is a slice of what was
    read. That is as fast as memory allows, and no mapped page counts as used."""

    adopts = False

    def __init__(self, file: rsv_format.File, report: LoadReport, together: int = _TOGETHER) -> None:
        self.file, self.report = file, report
        self._reader = WordReader(file, ahead=together > 0)
        self._runs = runs(file.layers.values(), together) | runs(file.tensors.values(), together)
        self._run: Run = (0, 0)  # the last one that was read
        self._words = mx.zeros(0)

    def load(self, parts: list[Part]) -> Loaded:
        run = self._runs.get(parts[0][0])
        if run is None or not _viewable(parts, run[1] - run[0]):
            arrays = [self._copied(part) for part in parts]
        else:
            if self._run != run:
                self._words = mx.zeros(0)  # lets go before the next is read
                started = time.perf_counter()
                self._run, self._words = run, self._reader.read(*run)
                self.report.seconds["read"] = self.report.seconds.get("read", 0.0) + time.perf_counter() - started
            arrays = [slice_part(self._words, run[0], part) for part in parts]
        self.report.copied_nbytes += sum(array.nbytes for array in arrays)
        return Loaded(arrays)

    def _copied(self, part: Part) -> mx.array:
        offset, dtype, shape = part
        require_room(_nbytes(dtype, shape))
        array = mx.array(self.file.view(offset, dtype, shape))
        return array.view(_MLX_DTYPES[dtype]) if dtype in ("bf16", "bool") else array


class _Adopt:
    """Windows of whole pages around blobs, given to MLX as they are."""

    adopts = True

    def __init__(self, file: rsv_format.File, report: LoadReport) -> None:
        self.file, self.report = file, report
        self._read = _Read(file, report, 0)

    def load(self, parts: list[Part]) -> Loaded:
        start, end = window(parts)
        if not _viewable(parts, end - start):
            return self._read.load(parts)
        base = mx.asarray(np.frombuffer(self.file.read(start, end - start), np.uint32), copy=False)
        arrays = [slice_part(base, start, part) for part in parts]
        self.report.adopted_nbytes += sum(array.nbytes for array in arrays)
        return Loaded(arrays, base)


def runs(items: Iterable[rsv_format.Layer] | Iterable[rsv_format.Tensor], together: int) -> dict[int, Run]:
    """Offset of each item that is not empty -> start and end of the run of the file to read it with: its neighbours,
    up to so many bytes together, or itself if it is larger. Ends are whole words."""
    found: list[tuple[int, int, list[int]]] = []
    for item in items:
        if item.nbytes == 0:
            continue
        end = -(-(item.offset + item.nbytes) // 4) * 4
        if found and end - found[-1][0] <= together:
            start, _, members = found.pop()
        else:
            start, members = item.offset, []
        members.append(item.offset)
        found.append((start, end, members))
    return {offset: (start, end) for start, end, members in found for offset in members}


def window(parts: list[Part]) -> tuple[int, int]:
    """Offset and end of the whole pages around the parts."""
    offset, dtype, shape = parts[-1]
    nbytes = _nbytes(dtype, shape)
    start, end = parts[0][0] // PAGE * PAGE, -(-(offset + nbytes) // PAGE) * PAGE
    return start, end


def slice_part(base: mx.array, start: int, part: Part) -> mx.array:
    """A part of a window of words that starts at this offset of the file: sliced and viewed, not converted."""
    offset, dtype, shape = part
    nbytes = _nbytes(dtype, shape)
    if nbytes == 0:
        return mx.zeros(shape, _MLX_DTYPES[dtype])
    first = (offset - start) // 4
    flat = base[first : first + -(-nbytes // 4)].view(_MLX_DTYPES[dtype])
    count = prod(shape)
    return (flat if flat.size == count else flat[:count]).reshape(shape)


def parts_of(item: rsv_format.Layer | rsv_format.Tensor) -> list[Part]:
    """The arrays of a layer (codes, scales, bias) or of a tensor, as they lie in the file."""
    if isinstance(item, rsv_format.Tensor):
        return [(item.offset, item.dtype, item.shape)]
    at = item.layout
    parts: list[Part] = [
        (item.offset, "u32", (at.rows, at.row_words)),
        (item.offset + at.scales_offset, "f32", (at.rows,)),
    ]
    if item.bias_dtype is not None:
        parts.append((item.offset + at.bias_offset, item.bias_dtype, (at.rows,)))
    return parts


def _viewable(parts: list[Part], nbytes: int) -> bool:
    """Whether parts of so many bytes can be views of one array of words."""
    return nbytes // 4 <= _MAX_ELEMENTS and all(dtype != "f64" for _, dtype, _ in parts)


def _nbytes(dtype: str, shape: tuple[int, ...]) -> int:
    size = 8 if dtype == "f64" else _MLX_DTYPES[dtype].size
    return size * prod(shape)
