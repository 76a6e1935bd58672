"""What an output may replace: one rule for every command and call that writes a file."""

from __future__ import annotations

import contextlib
import os
import stat
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from rsv_format.errors import RsvError

StrPath = str | os.PathLike[str]

_HEAD_NBYTES = 4096  # enough to tell what a file is
_MODEL_SUFFIXES = frozenset((".safetensors", ".gguf", ".bin", ".pt", ".pth", ".ckpt", ".npz", ".h5", ".onnx"))
_FORCE = "--force (in Python, force=True) replaces it"


@dataclass(frozen=True)
class Kind:
    """What is written, and how an earlier one is known by the bytes that it begins with."""

    name: str  # with its article, as in "exists and is not an RSV file"
    is_one: Callable[[bytes], bool]


class Target:
    """A place for a file.

    Parameters
    ----------
    named : path
        A link is followed, and stays.
    kind : Kind, optional
        One of this kind may be replaced. Without it nothing may, and a link is not followed: so it is for names
        that come from a file and not from the user.
    force : bool
        Replace what is write-protected or of another kind, but never a model that is not RSV.

    Raises
    ------
    OSError
    RsvError
        bad_argument: as /dev/stdout in a pipe.
    """

    def __init__(self, named: StrPath, kind: Kind | None, force: bool) -> None:
        self.named, self._kind, self._force = os.fspath(named), kind, force
        parent, name = os.path.split(os.path.abspath(named))
        self.path = os.path.realpath(named) if kind else os.path.join(os.path.realpath(parent), name)
        if kind and os.path.exists(named) and not _same(os.stat(named), self.found()):
            raise self._refusal("is not a regular file with a name")

    def found(self) -> os.stat_result | None:
        """What is there; it is a link only if links are not followed."""
        try:
            return os.lstat(self.path)
        except FileNotFoundError:
            return None

    def replaced(self) -> os.stat_result | None:
        """The regular file that is there, if one is."""
        found = self.found()
        return found if found and stat.S_ISREG(found.st_mode) else None

    def refuse_inputs(self, inputs: Iterable[StrPath]) -> None:
        """Refuse, whatever `force` says, to replace files that are read, or lie in a folder that is read.

        Raises
        ------
        RsvError
            bad_argument
        """
        found = self.replaced()
        if found is None:
            return
        # a file of the kind that is written is not what was read from a folder
        whole_folders = not (self._kind and self._kind.is_one(_head(self.path)))
        for name in inputs:
            with contextlib.suppress(OSError):  # an input that is not there says so when it is opened
                if _same(os.stat(name), found):
                    raise self._refusal("is the input itself")
                if whole_folders and os.path.isdir(name):
                    with os.scandir(name) as entries:
                        if any(_same(entry.stat(), found) for entry in entries if entry.is_file()):
                            raise self._refusal("is a file of the input's")

    def refuse_precious(self) -> None:
        """Refuse to replace what is there, if that is not allowed.

        Raises
        ------
        OSError
        RsvError
            bad_argument
        """
        found = self.found()
        if found is None:
            return
        if stat.S_ISDIR(found.st_mode):
            raise self._refusal("is a folder")
        if stat.S_ISLNK(found.st_mode):
            if not self._force:
                raise self._refusal(f"exists, as a link: {_FORCE}")
            return
        if not stat.S_ISREG(found.st_mode):
            raise self._refusal("is not a regular file")
        if any(_is_stream(descriptor, found) for descriptor in (1, 2)):
            raise self._refusal("is where this process prints to")
        head = _head(self.path)
        own = self._kind is not None and self._kind.is_one(head)
        if not own and _is_model(self.path, head, found.st_size):
            raise self._refusal("exists and is a model that is not RSV: remove it first if it may go")
        if self._force:
            return
        if self._kind is None:
            raise self._refusal(f"exists: {_FORCE}")
        if not own and found.st_size:
            raise self._refusal(f"exists and is not {self._kind.name}: {_FORCE}")
        if not found.st_mode & 0o222 or not os.access(self.path, os.W_OK):  # root may write to all
            raise self._refusal(f"exists and is write-protected: {_FORCE}")

    def _refusal(self, why: str) -> RsvError:
        return RsvError("bad_argument", self.named, why)


def _head(path: str) -> bytes:
    with open(path, "rb") as file:
        return file.read(_HEAD_NBYTES)


def _same(a: os.stat_result, b: os.stat_result | None) -> bool:
    return b is not None and os.path.samestat(a, b)


def _is_model(path: str, head: bytes, nbytes: int) -> bool:
    """Whether a file holds weights, as far as its name and what it begins with tell."""
    if not head:
        return False
    if head.startswith(b"GGUF"):
        return b"imatrix" not in head
    if head.startswith(b"VQRS"):
        return True
    is_safetensors = head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= nbytes
    return is_safetensors or os.path.splitext(path)[1].lower() in _MODEL_SUFFIXES


def _is_stream(descriptor: int, found: os.stat_result) -> bool:
    with contextlib.suppress(OSError):  # it is closed
        return os.path.samestat(os.fstat(descriptor), found)
    return False
