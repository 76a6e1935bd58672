"""Bytes of an open file to MLX's own memory, in one copy.

MLX reads a safetensors stream straight into the array that it becomes. So a run of the file poses as one: a header
that declares one array of words, and behind it the run. Threads read a piece each: from a cold file more than one
request is under way, from a warm one the cores share the first touch of new memory, which costs more than the copy.
"""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import mlx.core as mx
import numpy as np

import rsv_format

_PIECE = 2**20  # bytes that a thread reads at a time
_THREADS = 4  # also on fewer cores: most of them wait for the disk, if the file is cold
_AHEAD = 2**30  # bytes that the system is asked for before they are read: the disk works while modules are built
_AHEAD_STEP = 2**23
_SPARE = 2**28  # bytes of address space that MLX's threads and a model's first tokens want besides its weights


def require_room(nbytes: int) -> None:
    """Whether MLX can have so many bytes and some to work with; it does not ask, and without them it crashes or hangs.

    Raises
    ------
    MemoryError
    """
    try:
        np.empty(nbytes + _SPARE, np.uint8)  # reserved, not used
    except MemoryError:
        need = f"{nbytes / 1e6:.0f} MB and {_SPARE / 1e6:.0f} MB to work with"
        raise MemoryError(f"the process may not take {need}") from None


class WordReader:
    """Reads runs of a file as arrays, roughly in order if it is to read ahead; its threads end with it."""

    def __init__(self, file: rsv_format.File, ahead: bool = False) -> None:
        self._file = file
        self._pool = ThreadPoolExecutor(_THREADS)
        self._hints = ThreadPoolExecutor(1) if ahead else None
        self._asked = 0
        self._reach(_AHEAD)

    def read(self, start: int, end: int) -> mx.array:
        """The bytes from one offset to another, a whole number of words: uint32 (n,).

        Raises
        ------
        RsvError
            io_error, closed. MemoryError.
        """
        self._reach(end + _AHEAD)
        require_room(end - start)
        stream = _Stream(self._fill, start, end - start)
        words: mx.array = mx.load(stream, format="safetensors", stream=mx.cpu)["words"]  # type: ignore
        mx.eval(words)
        if stream.error is not None:
            raise stream.error
        return words

    def _reach(self, end: int) -> None:
        if self._hints is not None:
            for offset in range(self._asked, min(end, self._file.nbytes), _AHEAD_STEP):
                self._hints.submit(self._file.read_ahead, offset, _AHEAD_STEP)
                self._asked = offset + _AHEAD_STEP

    def _fill(self, offset: int, out: memoryview) -> None:
        steps = range(0, out.nbytes, _PIECE)
        pieces = [self._pool.submit(self._file.read_into, offset + i, out[i : i + _PIECE]) for i in steps]
        for piece in pieces:
            piece.result()


class _Stream:
    """A binary file object for mx.load: a safetensors header, then a run of the file."""

    closed = False

    def __init__(self, fill: Callable[[int, memoryview], None], start: int, nbytes: int) -> None:
        table = {"words": {"dtype": "U32", "shape": [nbytes // 4], "data_offsets": [0, nbytes]}}
        text = json.dumps(table).encode()
        self._head = len(text).to_bytes(8, "little") + text
        self._fill = fill
        self._start = start - len(self._head)
        self._end = len(self._head) + nbytes
        self._at = threading.local()  # MLX may read from a thread of its own
        self.error: BaseException | None = None  # kept: raised in MLX's thread it ends the process, or has it wait

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return getattr(self._at, "position", 0)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        self._at.position = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self.tell(), os.SEEK_END: self._end}[whence]
        return self.tell()

    def readinto(self, buffer: Any) -> int:
        out, position = memoryview(buffer).cast("B"), self.tell()
        if position < len(self._head):
            out[:] = self._head[position : position + len(out)]
        else:
            try:
                self._fill(self._start + position, out)
            except BaseException as e:  # of a file, or no memory, no room for a thread
                self.error = e
        self._at.position = position + len(out)
        return len(out)
