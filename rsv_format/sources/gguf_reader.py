"""Opening a GGUF file with the gguf package, and its metadata as checked Python values."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from rsv_format.errors import RsvError
from rsv_format.sources.base import library, reading

MAGIC = b"GGUF"

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
        value = self.require(key, int)
        if value <= 0:
            raise RsvError("source_invalid", f"{self.where}: {key}", f"{value} is not positive")
        return value

    def array(self, key: str, kind: type[T]) -> list[T] | None:
        value = self.values.get(key)
        if value is None:
            return None
        if not isinstance(value, list) or any(type(item) is not kind for item in value):
            raise RsvError("source_invalid", f"{self.where}: {key}", f"is not an array of {kind.__name__}")
        return value


def is_gguf(path: Path) -> bool:
    with reading(str(path)), path.open("rb") as file:
        return file.read(len(MAGIC)) == MAGIC


def open_gguf(path: Path) -> tuple[Any, Metadata]:
    """The gguf package's reader of a file, its tensors mapped and not read, and the metadata.

    Raises
    ------
    RsvError
        `io_error`, `source_invalid`, or `source_unsupported` for a big-endian or split file or without gguf.
    """
    where = str(path)
    gguf = library("gguf", where)

    class BoundedReader(gguf.GGUFReader):  # type: ignore[misc, name-defined]
        """The package's reader slices past the end in silence: a hostile array length would loop for ever."""

        def _get(self, offset: int, dtype: Any, count: int = 1, override_order: Any = None) -> Any:
            if int(offset) + int(count) * gguf.np.dtype(dtype).itemsize > len(self.data):
                raise ValueError("the file ends before its contents do")
            return super()._get(offset, dtype, count, override_order)

    with reading(where):
        reader = BoundedReader(path)
        if reader.byte_order != "I":
            raise RsvError("source_unsupported", where, "is a big-endian GGUF file")
        metadata = Metadata({key: field.contents() for key, field in reader.fields.items()}, where)
    if (metadata.get("split.count", int) or 1) > 1:
        raise RsvError("source_unsupported", where, "is split: join its parts with llama-gguf-split --merge")
    return reader, metadata
