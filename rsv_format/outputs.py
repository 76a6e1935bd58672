"""How files come into place: whole or not at all.

Every file that this package, rsv_mlx and the command line write goes through here. Where the system has files without
a name (O_TMPFILE, on Linux), what is not finished has none, and ends with its process however that ends. Elsewhere it
has a hidden name beside its path, and a lock that tells whether its writer lives.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import signal
import stat
import threading
from collections.abc import Callable, Iterable, Iterator
from functools import partial
from io import FileIO
from pathlib import Path
from types import FrameType, TracebackType
from typing import Any

from rsv_format.errors import RsvError
from rsv_format.locks import is_abandoned, lock, try_lock
from rsv_format.replaceable import Kind, StrPath, Target

_TEMPORARY = re.compile(r"\..+\.(?:[0-9a-f]{12}\.tmp|unfinished)", re.DOTALL)
_STOPPING = ("SIGINT", "SIGTERM", "SIGHUP")

_unfinished: set[Output] = set()
_commits = 0  # that have happened in this process


class Output:
    """A file on its way to a path; until it is committed the path stays as it is.

    A context manager: its exit commits, or discards after an exception; an OSError becomes io_error.

    Parameters
    ----------
    path, kind, force
        As `Target`.
    inputs : paths
        What is read to make it, and never replaced: files, and folders with the files in them.
    taken_up : bool, optional
        Not None gives it a name while it is not finished, `unfinished_path`, by which another run can find it after a
        SIGKILL. True takes up what is there by that name, and leaves it whatever ends this one; False, where another's
        is there, goes without the name. After `open` it says whether there was something to take up.

    Raises
    ------
    RsvError
        bad_argument: what is there may not be replaced; io_error.
    """

    def __init__(
        self,
        path: StrPath,
        kind: Kind | None = None,
        *,
        inputs: Iterable[StrPath] = (),
        force: bool = False,
        taken_up: bool | None = None,
    ) -> None:
        self.taken_up, self._kept = taken_up, bool(taken_up)
        self.unfinished: str | None = None  # the name by which another run can find it
        self._named = os.fspath(path)
        self._temporaries: list[str] = []  # names that `discard` removes
        self._file: FileIO | None = None
        self._folder = -1
        with self._reported():
            self._target = Target(path, kind, force)
            self._target.refuse_inputs(inputs)
            self._target.refuse_precious()

    @property
    def path(self) -> str:
        """Where it will be."""
        return self._target.path

    def open(self, nbytes: int = 0, beside: int = 0) -> FileIO:
        """The file to write to, unbuffered and of this length, zeros so far; io_error if there is no room for it and
        for as many bytes `beside` it."""
        with self._discarded_on_error(), self._reported():
            _unfinished.add(self)
            parent = os.path.dirname(self.path)
            self._folder = os.open(parent, os.O_RDONLY | os.O_CLOEXEC)
            self._file = FileIO(self._new(parent), "r+")
            lock(self._file.fileno())
            found = os.fstat(self._file.fileno())
            _check_room(self._file.fileno(), nbytes + beside - (512 * found.st_blocks if self.taken_up else 0))
            if found.st_size < nbytes or not self.taken_up:
                self._file.truncate(nbytes)
        return self._file

    @property
    def temporary_path(self) -> str:
        """What opens the file once more, for libraries that want a path."""
        assert self._file is not None
        return self._temporaries[0] if self._temporaries else _unnamed(self._file.fileno())

    @property
    def descriptor(self) -> int:
        """The open file's."""
        assert self._file is not None
        return self._file.fileno()

    def commit(self) -> None:
        """Flush to the disk and take the path's place, in one step."""
        commit(self)

    def discard(self) -> None:
        """Forget what was written, if it is not to be taken up."""
        if self._kept and self.unfinished in self._temporaries:
            self._temporaries.remove(self.unfinished)
        while self._temporaries:
            with contextlib.suppress(OSError):
                os.unlink(self._temporaries[-1])
            self._temporaries.pop()
        if self._file is not None:
            with contextlib.suppress(OSError):
                self._file.close()
        self._file = None
        if self._folder >= 0:
            os.close(self._folder)
        self._folder = -1
        _unfinished.discard(self)

    def forget(self) -> None:
        """Discard, even what was to be taken up: it is of no use any more."""
        self._kept = False
        self.discard()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if e is None:
                self.commit()
        finally:
            self.discard()
        if isinstance(e, OSError):
            raise RsvError("io_error", self._named, e.strerror or str(e)) from e

    @contextlib.contextmanager
    def _reported(self) -> Iterator[None]:
        """OSError becomes io_error."""
        try:
            yield
        except OSError as e:
            raise RsvError("io_error", self._named, e.strerror or str(e)) from e

    @contextlib.contextmanager
    def _discarded_on_error(self) -> Iterator[None]:
        try:
            yield
        except BaseException:
            self.discard()
            raise

    def _new(self, parent: str) -> int:
        """A descriptor of a new file that has no name, or a temporary one."""
        old = self._target.replaced()
        mode = stat.S_IMODE(old.st_mode) & 0o777 if old else 0o666
        flags = os.O_RDWR | os.O_CLOEXEC
        if self.taken_up is not None and (descriptor := self._findable(flags, mode)) is not None:
            return descriptor
        if hasattr(os, "O_TMPFILE") and os.path.exists(_unnamed(self._folder)):
            with contextlib.suppress(OSError):  # not every file system has it; whatever else is wrong shows below
                return os.open(parent, flags | os.O_TMPFILE, mode)
        name = _temporary_name(self.path)
        self._temporaries.append(name)
        return os.open(name, flags | os.O_CREAT | os.O_EXCL, mode)

    def _findable(self, flags: int, mode: int) -> int | None:
        """A descriptor of the file that another run can find; None if it is another's and not to be taken up."""
        name = unfinished_path(self.path)
        try:
            descriptor = os.open(name, flags | os.O_CREAT | os.O_EXCL, mode)
            self.taken_up = False
        except FileExistsError:
            if not self.taken_up:
                return None
            descriptor = os.open(name, flags | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found = os.fstat(descriptor)
                if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
                    raise RsvError("bad_argument", name, "is not a file of yours")
                if not try_lock(descriptor):
                    raise RsvError("bad_argument", name, "another run is at work on it")
            except BaseException:
                os.close(descriptor)
                raise
        self.unfinished = name
        self._temporaries.append(name)
        return descriptor

    def _sync(self) -> None:
        """All that was written is on the disk, with the owner and permissions of what it replaces."""
        assert self._file is not None, "nothing was opened"
        with self._reported():
            os.fsync(self._file.fileno())
            self._target.refuse_precious()  # time has passed
            old = self._target.replaced()
            if old:
                _inherit(self._file.fileno(), old)

    def _publish(self) -> None:
        """Take the path's place."""
        assert self._file is not None
        with self._reported():
            if not self._temporaries:
                name = _temporary_name(self.path)
                # a descriptor of a folder, though not needed, makes it linkat, which follows the link
                os.link(_unnamed(self._file.fileno()), name, src_dir_fd=self._folder, follow_symlinks=True)
                self._temporaries.append(name)
            os.replace(self._temporaries[0], self.path)
        del self._temporaries[0]
        with contextlib.suppress(OSError):  # not every system syncs a folder; the rename itself has happened
            os.fsync(self._folder)


class Shared(Output):
    """What another process has begun, and puts into place: parts of it are written here.

    Parameters
    ----------
    unfinished : path
        Its `Output.unfinished`.
    """

    def __init__(self, unfinished: StrPath) -> None:
        super().__init__(unfinished, None, force=True)

    def open(self, nbytes: int = 0, beside: int = 0) -> FileIO:
        """The file to write to, unbuffered; io_error."""
        with self._reported():
            self._file = FileIO(os.open(self.path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW), "r+")
        return self._file

    def commit(self) -> None:
        """That is for the other process to do."""
        raise NotImplementedError


def commit(*outputs: Output) -> None:
    """Put files into place: all of them or, if one cannot be, none.

    Raises
    ------
    RsvError
        bad_argument, io_error.
    """
    global _commits
    undo: list[Callable[[], None]] = []
    seconds: list[str] = []
    try:
        for output in outputs:
            output._sync()
        with _uninterrupted():
            try:
                for output in outputs:
                    is_new = output._target.found() is None
                    if not is_new and len(outputs) > 1 and (second := _second_name(output.path)):
                        seconds.append(second)
                        undo.append(partial(os.replace, second, output.path))
                    output._publish()
                    if is_new:
                        undo.append(partial(os.unlink, output.path))
                _commits += 1
            except BaseException:
                for step in reversed(undo):
                    with contextlib.suppress(OSError):
                        step()
                raise
            finally:
                for second in seconds:
                    with contextlib.suppress(OSError):  # where it has been put back
                        os.unlink(second)
    finally:
        for output in outputs:
            output.discard()


def commits() -> int:
    """How often `commit` has put files into place in this process: a signal that comes later stops no work."""
    return _commits


def check(
    path: StrPath, kind: Kind | None = None, *, inputs: Iterable[StrPath] = (), force: bool = False, nbytes: int = 0
) -> None:
    """Refuse before the work what `Output` would refuse after it: the path, its folder, too little room.

    Parameters
    ----------
    path, kind, inputs, force
        As `Output`.
    nbytes : int
        How long the file will be, at least.

    Raises
    ------
    RsvError
        bad_argument, io_error.
    """
    output = Output(path, kind, inputs=inputs, force=force)
    output.open(nbytes)
    output.discard()


def write_all(file: FileIO, data: bytes | memoryview) -> None:
    """Write bytes to an unbuffered file, which may take some at a time."""
    rest = memoryview(data)
    while rest.nbytes:
        rest = rest[file.write(rest) :]


@contextlib.contextmanager
def folder(path: StrPath) -> Iterator[Path]:
    """A folder, made if it is not there; what was made goes away again if the body fails.

    Raises
    ------
    RsvError
        io_error.
    """
    made: list[Path] = []
    try:
        try:
            for part in [*reversed(Path(path).parents), Path(path)]:
                if not part.is_dir():
                    part.mkdir()
                    made.append(part)
        except OSError as e:
            raise RsvError("io_error", os.fspath(path), e.strerror or str(e)) from e
        yield Path(path)
    except BaseException:
        for part in reversed(made):
            with contextlib.suppress(OSError):  # somebody else has put something there
                part.rmdir()
        raise


def leftovers(path: StrPath) -> list[Path]:
    """Temporary files, in the folder of a path, whose writers have not lived to remove them."""
    with contextlib.suppress(OSError):
        entries = Path(os.path.realpath(path)).parent.iterdir()
        return sorted(x for x in entries if _TEMPORARY.fullmatch(x.name) and x.is_file() and is_abandoned(x))
    return []


def unfinished_path(path: StrPath) -> str:
    """Where what is not finished lies while it is made, if another run is to find it."""
    parent, name = os.path.split(os.path.realpath(path))
    return os.path.join(parent, f".{_short(name)}.unfinished")


def is_of(leftover: Path, path: StrPath) -> bool:
    """Whether what was left behind was to come to this path, or to that of a shard of what was to be there."""
    stem, suffix = os.path.splitext(_short(os.path.basename(os.path.realpath(path))))
    own = rf"{re.escape(stem)}(?:-\d{{5}}-of-\d{{5}})?{re.escape(suffix)}"
    return re.fullmatch(rf"\.{own}\.(?:[0-9a-f]{{12}}\.tmp|unfinished)", leftover.name) is not None


def discard_all() -> None:
    """Discard every output that is not committed, for a process that ends at once."""
    for output in list(_unfinished):
        output.discard()


def _temporary_name(path: str) -> str:
    parent, name = os.path.split(path)
    return os.path.join(parent, f".{_short(name)}.{secrets.token_hex(6)}.tmp")


def _short(name: str) -> str:
    return os.fsencode(name)[:100].decode("utf-8", "ignore")  # of the 255 bytes that a name may have


def _second_name(path: str) -> str | None:
    """A temporary hard link to what is at a path, if anything is, and if the file system has such."""
    name = _temporary_name(path)
    with contextlib.suppress(OSError):
        os.link(path, name, follow_symlinks=False)
        return name
    return None


def _unnamed(descriptor: int) -> str:
    return f"/proc/self/fd/{descriptor}"


def _inherit(descriptor: int, old: os.stat_result) -> None:
    """Take over owner and permissions; no other group may read what it could not read before."""
    mode, new = stat.S_IMODE(old.st_mode) & 0o777, os.fstat(descriptor)
    if (new.st_uid, new.st_gid) != (old.st_uid, old.st_gid):
        try:
            os.fchown(descriptor, old.st_uid, old.st_gid)
        except OSError:
            mode &= 0o707 | (mode & 0o007) << 3
    with contextlib.suppress(OSError):  # not every file system knows permissions
        os.fchmod(descriptor, mode)


def _check_room(descriptor: int, nbytes: int) -> None:
    found = os.fstatvfs(descriptor)
    free = found.f_bavail * found.f_frsize
    if free < nbytes and found.f_blocks:  # some file systems say nothing of themselves
        raise OSError(None, f"{nbytes / 1e6:.1f} MB are needed, and {free / 1e6:.1f} MB are free there")


@contextlib.contextmanager
def _uninterrupted() -> Iterator[None]:
    """While the body runs, which is a moment, the signals that would raise in it wait."""
    before: dict[int, Any] = {}
    came: list[int] = []

    def wait(number: int, frame: FrameType | None) -> None:
        came.append(number)

    try:
        if threading.current_thread() is threading.main_thread():
            for number in (getattr(signal, name) for name in _STOPPING if hasattr(signal, name)):
                if callable(signal.getsignal(number)):
                    before[number] = signal.getsignal(number)
                    signal.signal(number, wait)
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
        if came:
            signal.raise_signal(came[0])
