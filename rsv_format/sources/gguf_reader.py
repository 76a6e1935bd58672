"""The GGUF files of a model, opened together: metadata as checked Python values, and tensors to read."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from rsv_format.errors import RsvError
from rsv_format.sources.base import Array, Floats, SourceFile, library, reading
from rsv_format.sources.gguf_header import MAGIC, Header, TensorInfo, parse_header

FLOAT_TYPES = {"F32": ("f32", "<f4"), "F16": ("f16", "<f2"), "BF16": ("bf16", "<u2")}
_GONE = {4: "Q4_2", 5: "Q4_3", 31: "Q4_0_4_4", 32: "Q4_0_4_8", 33: "Q4_0_8_8", 36: "IQ4_NL_4_4", 37: "IQ4_NL_4_8",
         38: "IQ4_NL_8_8"}  # fmt: skip
_PART = re.compile(r"(?P<stem>.+)-(?P<number>[0-9]{5})-of-(?P<count>[0-9]{5})(?P<suffix>\.gguf)", re.IGNORECASE)
_BF16_EXPONENT = 0x7F80
_AT_ONCE = 1 << 22  # weights dequantized in one piece

T = TypeVar("T", bool, int, float, str)


@dataclass(frozen=True)
class Metadata:
    """The key-value pairs of a GGUF file; a value of another type than asked for is `source_invalid`."""

    values: dict[str, Any]
    where: str

    def get(self, key: str, kind: type[T]) -> T | None:
        value = self.values.get(key)
        if value is None:
            return None
        if kind is float and type(value) is int:
            value = float(value)
        if type(value) is not kind or (isinstance(value, float) and not math.isfinite(value)):
            raise RsvError("source_invalid", f"{self.where}: {key}", f"{value!r:.80} is not a finite {kind.__name__}")
        return value

    def require(self, key: str, kind: type[T]) -> T:
        value = self.get(key, kind)
        if value is None:
            raise RsvError("source_invalid", f"{self.where}: {key}", "is missing")
        return value

    def positive(self, key: str) -> int:
        return _positive(self.require(key, int), f"{self.where}: {key}")

    def per_block(self, key: str) -> int | None:
        """A positive number that may be given for each block, as long as all have the same."""
        numbers = self.array(key, int) if isinstance(self.values.get(key), np.ndarray | list) else None
        if numbers is None:
            number = self.get(key, int)
        elif len(set(numbers)) == 1:
            number = numbers[0]
        else:
            raise RsvError("source_unsupported", f"{self.where}: {key}", "varies from block to block")
        return None if number is None else _positive(number, f"{self.where}: {key}")

    def array(self, key: str, kind: type[T]) -> list[T] | None:
        value = self.values.get(key)
        if value is None:
            return None
        items: list[Any] | None = value if isinstance(value, list) else None
        if isinstance(value, np.ndarray):
            items = value.astype(np.float64).tolist() if kind is float and value.dtype.kind in "iu" else value.tolist()
        if items is None or any(type(item) is not kind for item in items):
            raise RsvError("source_invalid", f"{self.where}: {key}", f"is not an array of {kind.__name__}")
        return items


def _positive(value: int, where: str) -> int:
    if value <= 0:
        raise RsvError("source_invalid", where, f"{value} is not positive")
    return value


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file: `kind` is the gguf package's type, a row (the last axis) has `row_nbytes`.

    Reading one that is not finite throughout raises RsvError `nonfinite_weight`.
    """

    name: str
    shape: tuple[int, ...]
    kind: Any
    row_nbytes: int
    file: SourceFile
    offset: int
    whole: StoredTensor | None = None  # of which these are rows

    def rows(self, start: int, stop: int) -> StoredTensor:
        """Rows start to stop, all axes but the last being one."""
        shape, offset = (stop - start, self.shape[-1]), self.offset + start * self.row_nbytes
        return replace(self, shape=shape, offset=offset, whole=self.whole or self)

    @property
    def place(self) -> str:
        return f"{self.file.path}: {self.name}"

    def stored(self) -> Array:
        """The values of a float tensor as they are stored, bfloat16 as bit patterns; all must be finite."""
        dtype, stored = FLOAT_TYPES[self.kind.name]
        values = self.file.read(np.dtype(stored), self.shape, self.offset, self.place)
        self._check(values & _BF16_EXPONENT != _BF16_EXPONENT if dtype == "bf16" else np.isfinite(values))
        return values

    def dequantized(self) -> Floats:
        """The values of a quantized tensor; a block's scale may make one overflow, which is refused."""
        values: Floats = np.empty((math.prod(self.shape[:-1]), self.shape[-1]), np.float32)
        step = max(1, _AT_ONCE // self.shape[-1])
        for start in range(0, len(values), step):
            rows = min(step, len(values) - start)
            data = self.file.read(np.uint8, (rows, self.row_nbytes), self.offset + start * self.row_nbytes, self.place)
            values[start : start + rows] = dequantize(data, self.kind, self.place)
        self._check(np.isfinite(values).reshape(self.shape))
        return values.reshape(self.shape)

    def _check(self, finite: npt.NDArray[np.bool_]) -> None:
        if not finite.all():
            whole, width = self.whole or self, self.shape[-1]
            first = (self.offset - whole.offset) // self.row_nbytes * width
            index = tuple(int(i) for i in np.unravel_index(first + int(np.argmin(finite)), whole.shape))
            raise RsvError("nonfinite_weight", self.place, f"the value at {index} of {whole.shape} is not finite")


def dequantize(data: Array, kind: Any, place: str) -> Floats:
    """Rows of blocks, (rows, bytes), to float32; `source_unsupported` for a type that holds no weights."""
    quants = library("gguf.quants", place)
    with reading(place), np.errstate(all="ignore"):
        try:
            values: Floats = quants.dequantize(data, kind)
        except NotImplementedError as error:
            raise RsvError("source_unsupported", place, f"{kind.name} tensors cannot be dequantized") from error
    return values


@dataclass(frozen=True)
class Opened:
    """The files of a model: the metadata of the first, the tensors of all."""

    metadata: Metadata
    tensors: dict[str, StoredTensor]
    files: tuple[SourceFile, ...]


def open_gguf(path: Path) -> Opened:
    """Read the headers of a GGUF file and, if it is a part of a model that was split, of the other parts.

    Raises
    ------
    RsvError
        `io_error`; `source_invalid` where a file is malformed, cut short or missing; `source_unsupported` for a
        version, byte order or tensor type that is not known; `missing_dependency` without gguf.
    """
    library("gguf", str(path))
    first = SourceFile(path)
    header = parse_header(first)
    count = Metadata(header.values, str(path)).get("split.count", int) or 1
    if count <= 1:
        return Opened(Metadata(header.values, str(path)), _tensors([(first, header)]), (first,))
    paths = _parts(path)
    if len(paths) != count:
        detail = f"is a part of a model in {count} files, but its name does not end in -0000N-of-{count:05}.gguf"
        raise RsvError("source_invalid", str(path), detail)
    if missing := [part.name for part in paths if not part.exists()]:
        detail = f"is a part of a model in {count} files, of which {', '.join(missing)} is not beside it"
        raise RsvError("source_invalid", str(path), detail)
    opened = [(file := SourceFile(part), parse_header(file)) for part in paths]
    for i, (file, part) in enumerate(opened):
        found = Metadata(part.values, str(file.path))
        if (found.get("split.no", int), found.get("split.count", int)) != (i, count):
            detail = f"does not say of itself that it is part {i + 1} of {count}"
            raise RsvError("source_invalid", str(file.path), detail)
    metadata = Metadata(opened[0][1].values, str(paths[0]))
    tensors = _tensors(opened)
    if (total := metadata.get("split.tensors.count", int)) not in (None, len(tensors)):
        detail = f"its parts hold {len(tensors)} tensors, not {total}"
        raise RsvError("source_invalid", f"{metadata.where}: split.tensors.count", detail)
    return Opened(metadata, tensors, tuple(file for file, _ in opened))


def is_gguf(path: Path) -> bool:
    """Whether a file begins as GGUF files do, whatever its name."""
    with reading(str(path)):
        if not path.is_file():
            return False
        with path.open("rb") as file:
            return file.read(len(MAGIC)) == MAGIC


def gguf_models(folder: Path) -> list[str]:
    """The names of the GGUF files in a folder, of a model that was split the first."""
    with reading(str(folder)):
        found = sorted(path for path in folder.iterdir() if path.suffix.lower() == ".gguf")
    return list(dict.fromkeys(_parts(path)[0].name for path in found))


def _parts(path: Path) -> list[Path]:
    """The files that belong to one, by its name: itself, or all parts of a model that was split."""
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    stem, count, suffix = match["stem"], match["count"], match["suffix"]
    return [path.with_name(f"{stem}-{i:05}-of-{count}{suffix}") for i in range(1, int(count) + 1)]


def _tensors(files: list[tuple[SourceFile, Header]]) -> dict[str, StoredTensor]:
    tensors: dict[str, StoredTensor] = {}
    for file, header in files:
        for info in header.tensors:
            tensor = _located(info, header, file)
            if tensor.name in tensors:
                raise RsvError("source_invalid", tensor.place, "is there twice")
            tensors[tensor.name] = tensor
    return tensors


def _located(info: TensorInfo, header: Header, file: SourceFile) -> StoredTensor:
    """Where a tensor's bytes are; all of them are in the file."""
    constants, place = library("gguf.constants", str(file.path)), f"{file.path}: {info.name}"
    try:
        kind = constants.GGMLQuantizationType(info.type_id)
    except ValueError as error:
        gone = f", {_GONE[info.type_id]}, which llama.cpp has given up" if info.type_id in _GONE else ""
        detail = f"is of tensor type {info.type_id}{gone or ', which is not known'}"
        raise RsvError("source_unsupported", place, detail) from error
    block, nbytes = constants.GGML_QUANT_SIZES[kind]
    if info.shape[-1] % block:
        raise RsvError("source_invalid", place, f"its rows of {info.shape[-1]} are no whole {kind.name} blocks")
    row_nbytes, offset = info.shape[-1] // block * nbytes, header.data_offset + info.offset
    if info.offset % header.alignment:
        raise RsvError("source_invalid", place, f"lies at {info.offset}, no multiple of {header.alignment}")
    if (end := offset + math.prod(info.shape[:-1]) * row_nbytes) > file.size:
        raise RsvError("source_invalid", place, f"ends at byte {end}, the file at {file.size}: it is cut short")
    return StoredTensor(info.name, info.shape, kind, row_nbytes, file, offset)
