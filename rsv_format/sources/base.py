"""What a source is: named tensors that are read one at a time, a config and attachments.

A source is the input of the quantizer and no part of the file format, so SPEC.md is silent about it.
Opening a source reads headers only; the callables of a `SourceTensor` read one tensor each.
"""

from __future__ import annotations

import importlib
import json
import os
import stat
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import TracebackType
from typing import Any

import numpy as np
import numpy.typing as npt

from rsv_format.dtypes import NUMPY_DTYPE, to_bfloat16, to_float32
from rsv_format.errors import RsvError
from rsv_format.roles import Role, tensor_role

Array = npt.NDArray[Any]
Floats = npt.NDArray[np.float32]

_CONFIGS = ("config.json", "generation_config.json")
_POINTER = b"version https://git-lfs.github.com/spec/"  # the first bytes of what Git LFS leaves in a file's place


@dataclass(frozen=True)
class SourceTensor:
    """One tensor of a source, not yet read.

    `dtype` is the RSV name of the dtype it is kept in, `read` returns that form (bfloat16 as uint16 bit
    patterns) and `float32` the same values as dense float32, both of shape `shape`.  Either raises RsvError
    `source_invalid` when the file does not hold what its header said.  `experts` are the tensors of which a stack
    is made, by their own names, where the checkpoint keeps them apart.  `rows` gives entries start to stop of the
    first axis as a tensor that is read alone, where that can be.
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    read: Callable[[], Array]
    float32: Callable[[], Floats]
    experts: tuple[SourceTensor, ...] = ()
    rows: Callable[[int, int], SourceTensor] | None = None


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

    def read(self, dtype: npt.DTypeLike, shape: tuple[int, ...], offset: int, where: str) -> Array:
        """An array of the bytes from an offset on; `source_invalid` where the file ends before it does."""
        if not self.close.alive:
            raise RsvError("closed", where, "the source is closed")
        array: Array = np.empty(shape, dtype)
        missing = array.reshape(-1).view(np.uint8).data
        while missing:
            with reading(where):
                count = os.preadv(self._descriptor, [missing], offset)
            if count == 0:
                raise RsvError("source_invalid", where, f"the file ends {len(missing)} bytes too early")
            missing, offset = missing[count:], offset + count
        return array

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

    `left_out` are the files beside the weights that a tokenizer may want and that cannot be attached.
    """

    kind: str
    path: str
    tensors: dict[str, SourceTensor]
    config: dict[str, Any] | None = None
    attachments: dict[str, tuple[str, bytes]] = field(default_factory=dict)
    files: tuple[SourceFile, ...] = ()
    left_out: tuple[str, ...] = ()

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
        kept = {name: self.attachments[name] for name in _CONFIGS if name in self.attachments}
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
        detail = f"{error}"  # it is there: what it lacks is something else, as memory
        if isinstance(error, ModuleNotFoundError):
            missing = error.name or name
            detail = f"{missing} is not installed: pip install 'rsv-format[sources]'"
        raise RsvError("missing_dependency", where, detail) from error


@contextmanager
def reading(where: str) -> Iterator[None]:
    """Around a third-party reader: OSError becomes `io_error`, all else that it raises `source_invalid`."""
    try:
        yield
    except RsvError:
        raise
    except OSError as error:
        raise RsvError("io_error", where, error.strerror or str(error)) from error
    except Exception as error:  # the readers promise no exception type for malformed input
        raise RsvError("source_invalid", where, f"{type(error).__name__}: {error}") from error


def read_bytes(path: Path) -> bytes:
    """All of a small file; `source_invalid` for a pointer of Git LFS in its place."""
    with reading(str(path)):
        data = path.read_bytes()
    _refuse_pointer(data, path)
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
