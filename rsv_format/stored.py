"""The bytes of a file: in memory, mapped, or read by a descriptor."""

from __future__ import annotations

import builtins
import contextlib
import errno
import glob
import mmap as _mmap
import os
import stat
import weakref
from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate
from typing import IO

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.layout import declared_nbytes
from rsv_format.limits import PROLOGUE_NBYTES
from rsv_format.remote import Remote, is_url

Source = str | os.PathLike[str] | bytes | bytearray | memoryview | IO[bytes]
_MAX_EXTENTS = 10_000  # of data between holes that are looked at
_AHEAD_NBYTES = 2**20  # read at once where parts are small


class Memory:
    """Bytes in memory: given, read, or mapped from a file that `disk` reads."""

    def __init__(self, buffer: memoryview, disk: Disk | None = None) -> None:
        self.buffer = buffer.cast("B").toreadonly()
        self.nbytes = buffer.nbytes
        self.disk = disk

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some of the bytes, where they lie."""
        return self.buffer[offset : offset + nbytes]

    def read_into(self, offset: int, out: memoryview) -> None:
        """A copy of some of the bytes."""
        if self.disk is not None:
            self.disk.read_into(offset, out)
        else:
            np.copyto(np.frombuffer(out, np.uint8), np.frombuffer(self.view(offset, out.nbytes), np.uint8))


class Disk:
    """Bytes of a regular file, its first ones, by a descriptor of its own that is closed with the last owner."""

    def __init__(self, descriptor: int, nbytes: int) -> None:
        self.descriptor = os.dup(descriptor)
        weakref.finalize(self, os.close, self.descriptor)
        self.nbytes = nbytes
        self._opened = _identity(self.descriptor)

    @property
    def disk(self) -> Disk:
        """Itself."""
        return self

    def holes(self) -> int:
        """Bytes that were never written, of which the system knows: they take no room and read as zeros."""
        place = os.lseek(self.descriptor, 0, os.SEEK_CUR)
        total = at = 0
        try:
            for _ in range(_MAX_EXTENTS if hasattr(os, "SEEK_DATA") else 0):
                data = os.lseek(self.descriptor, at, os.SEEK_DATA)
                total += data - at
                at = os.lseek(self.descriptor, data, os.SEEK_HOLE)
                if at >= self.nbytes:
                    break
        except OSError as e:
            if e.errno == errno.ENXIO:  # no data until the end
                total += self.nbytes - at
        finally:
            os.lseek(self.descriptor, place, os.SEEK_SET)  # shared with whoever opened it
        return total

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some of the bytes, read into memory of their own."""
        out = np.empty(nbytes, np.uint8).data
        self.read_into(offset, out)
        return out.toreadonly()

    def read_into(self, offset: int, out: memoryview) -> None:
        """A copy of some of the bytes."""
        done = 0
        while done < out.nbytes:
            try:
                count = os.preadv(self.descriptor, [out[done:]], offset + done)
            except OSError as e:
                raise RsvError("io_error", f"byte {offset + done}", e.strerror or str(e)) from e
            if count == 0:
                raise RsvError("io_error", f"byte {offset + done}", "the file has become shorter since it was opened")
            done += count

    def advise(self, offset: int, nbytes: int) -> None:
        """Have the system read bytes that will be wanted soon, if it can be asked and has not got the first of them."""
        if not hasattr(os, "posix_fadvise"):
            return
        try:
            os.preadv(self.descriptor, [bytearray(1)], offset, os.RWF_NOWAIT)
        except (OSError, AttributeError):  # not in memory, or it cannot tell
            with contextlib.suppress(OSError):
                os.posix_fadvise(self.descriptor, offset, nbytes, os.POSIX_FADV_WILLNEED)

    def check_unchanged(self) -> None:
        """Whether length and time of change are those at the opening."""
        if _identity(self.descriptor) != self._opened:
            raise RsvError("io_error", "file", "it was changed while it was read")


def _identity(descriptor: int) -> tuple[int, int]:
    found = os.fstat(descriptor)
    return found.st_size, found.st_mtime_ns


class Ahead:
    """Bytes of a file that is read from its beginning to its end: small parts that lie together are read at once."""

    def __init__(self, disk: Disk | Joined | Remote) -> None:
        self.disk, self.nbytes = disk, disk.nbytes
        self._start, self._read = 0, memoryview(b"")

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some of the bytes, read into memory that is not written to again."""
        if nbytes > _AHEAD_NBYTES // 4:
            return self.disk.view(offset, nbytes)
        if not self._start <= offset <= offset + nbytes <= self._start + self._read.nbytes:
            self._start, self._read = offset, self.disk.view(offset, min(_AHEAD_NBYTES, self.nbytes - offset))
        return self._read[offset - self._start : offset - self._start + nbytes]

    def read_into(self, offset: int, out: memoryview) -> None:
        """A copy of some of the bytes."""
        self.disk.read_into(offset, out)


class Joined:
    """The bytes of several files, one after the other."""

    def __init__(self, parts: Sequence[Stored]) -> None:
        self.parts = parts
        self._ends = list(accumulate(part.nbytes for part in parts))
        self.nbytes: int = self._ends[-1]

    @property
    def disk(self) -> Joined | None:
        """The same, read by descriptors, if all of them can be."""
        disks = [part.disk for part in self.parts if part.disk is not None]
        return Joined(disks) if len(disks) == len(self.parts) else None

    def view(self, offset: int, nbytes: int) -> memoryview:
        """Some of the bytes: where they lie, if that is in one file."""
        found = list(self._spans(offset, nbytes))
        if len(found) == 1:
            part, start, length = found[0]
            return part.view(start, length)
        out = np.empty(nbytes, np.uint8).data
        self.read_into(offset, out)
        return out.toreadonly()

    def read_into(self, offset: int, out: memoryview) -> None:
        """A copy of some of the bytes."""
        done = 0
        for part, start, length in self._spans(offset, out.nbytes):
            part.read_into(start, out[done : done + length])
            done += length

    def advise(self, offset: int, nbytes: int) -> None:
        """As `Disk.advise`, of each file."""
        for part, start, length in self._spans(offset, min(nbytes, self.nbytes - offset)):
            if part.disk is not None:
                part.disk.advise(start, length)

    def holes(self) -> int:
        """Bytes that were never written."""
        return sum(part.disk.holes() for part in self.parts if part.disk is not None)

    def check_unchanged(self) -> None:
        """Whether all of them are as they were at the opening."""
        for part in self.parts:
            if part.disk is not None:
                part.disk.check_unchanged()

    def _spans(self, offset: int, nbytes: int) -> Iterator[tuple[Stored, int, int]]:
        """Parts with what of them some of the bytes are: where it starts, and how long it is."""
        stop, i = offset + nbytes, bisect_right(self._ends, offset)
        while offset < stop:
            start = self._ends[i] - self.parts[i].nbytes
            length = min(stop, self._ends[i]) - offset
            yield self.parts[i], offset - start, length
            offset, i = offset + length, i + 1


Stored = Memory | Disk | Ahead | Joined | Remote


def is_pattern(path: str) -> bool:
    """Whether a path stands for those that are like it, and is none itself."""
    return "*" in os.path.basename(path) and not is_url(path) and not os.path.lexists(path)


def matches(pattern: str) -> list[str]:
    """The paths that are like a pattern, whose folder is meant as it is written.

    Raises
    ------
    RsvError
        io_error: there are none.
    """
    folder, name = os.path.split(pattern)
    found = sorted(glob.glob(os.path.join(glob.escape(folder), name)))
    if not found:
        raise RsvError("io_error", pattern, "no file is named so")
    return found


def stored_bytes(source: Source | Memory | Disk | Remote, mmap: bool) -> Memory | Disk | Remote:
    """The whole file, checked in nothing."""
    if isinstance(source, Memory | Disk | Remote):
        return source
    if isinstance(source, bytes | bytearray | memoryview):
        return Memory(memoryview(source))
    if isinstance(source, str) and is_url(source):
        return Remote(source)
    try:
        if isinstance(source, str | os.PathLike):
            with builtins.open(source, "rb") as file:
                return _stored_in(file, mmap)
        return _stored_in(source, mmap)
    except OSError as e:
        name = os.fspath(source) if isinstance(source, str | os.PathLike) else "file object"
        detail = "is a folder, which rsv quantize takes" if isinstance(e, IsADirectoryError) else e.strerror or str(e)
        raise RsvError("io_error", str(name), detail) from e


def _stored_in(file: IO[bytes], mmap: bool) -> Memory | Disk | Remote:
    disk = None
    with contextlib.suppress(OSError, AttributeError, ValueError):  # no descriptor, no regular file, an empty one
        found = os.fstat(file.fileno())
        if stat.S_ISREG(found.st_mode) and file.readable() and hasattr(os, "preadv"):
            disk = Disk(file.fileno(), found.st_size)
        if mmap:
            return Memory(memoryview(_mmap.mmap(file.fileno(), 0, access=_mmap.ACCESS_READ)), disk)
    if disk is not None:
        return disk
    content = bytearray()
    copy_stream(file, content.extend)
    return Memory(memoryview(content))


def copy_stream(file: IO[bytes], write: Callable[[bytes], object]) -> None:
    """What a pipe or a device gives: its first bytes say how much is wanted, one more byte shows that there is more."""
    start = b""
    while len(start) < PROLOGUE_NBYTES and (part := file.read(PROLOGUE_NBYTES - len(start))):
        start += part
    write(start)
    nbytes = declared_nbytes(start)
    rest = 0 if nbytes is None else nbytes + 1 - len(start)
    while rest > 0 and (part := file.read(min(rest, _AHEAD_NBYTES))):
        write(part)
        rest -= len(part)
