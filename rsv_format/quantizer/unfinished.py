"""What a run that is interrupted leaves, and how another takes it up: the unfinished file with a journal behind it.

The file has its final length, and finished blobs are at their places. Behind its end are lines of JSON: what it is made
of and how, what was measured, and the digest of each finished blob, which tells whether all of it came to the disk. The
place of the prologue says where they begin. A file that is finished has none of this.
"""

from __future__ import annotations

import base64
import hashlib
import json
import os
import secrets
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.outputs import Output, unfinished_path
from rsv_format.quantizer.options import Floats, QuantizeOptions
from rsv_format.sources import Source
from rsv_format.version import VERSION

Facts = Mapping[str, str]
Key = tuple[str, str]  # kind and name of a blob

_HEAD = struct.Struct("<8sQ16s")  # magic, where the journal begins, which run began it
_MAGIC = b"RSVunfin"
_LONGEST = 2**30  # bytes of a journal


@dataclass(frozen=True)
class Measured:
    """What is found out before the first layer."""

    importance: Mapping[str, Floats]
    layer_bits: Mapping[str, int]


@dataclass
class Journal:
    """The journal of an output.

    Parameters
    ----------
    facts : mapping
        See `facts_of`.
    measured : Measured, optional
        None until it is known.
    blobs : mapping
        The digests of those that are finished, as an earlier run has noted.
    """

    facts: Facts
    measured: Measured | None = None
    blobs: dict[Key, str] = field(default_factory=dict)
    run: bytes = field(default_factory=lambda: secrets.token_bytes(16))
    _descriptor: int | None = None
    _end: int = 0

    @classmethod
    def of(cls, out: str | os.PathLike[str], facts: Facts, resume: bool) -> Journal:
        """That of an earlier run, if it is to be taken up and there is one, else a new one.

        Raises
        ------
        RsvError
            bad_argument: it was made with other options or of another source; io_error.
        """
        path = unfinished_path(out)
        if not resume:
            return cls(facts)
        found = cls.begun(path)
        if found is None:
            return cls(facts)
        for name in sorted(facts.keys() | found.facts.keys()):
            before, now = (x.get(name, "nothing") for x in (found.facts, facts))
            if before != now:
                detail = f"was begun otherwise, {name}: {before}, not {now}: --remove-leftovers if it may go"
                raise RsvError("bad_argument", path, detail)
        return found

    @classmethod
    def begun(cls, path: str) -> Journal | None:
        """That of an unfinished file; None if there is none, or nothing of use in it.

        Raises
        ------
        RsvError
            io_error.
        """
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC)
            try:
                return _read(descriptor)
            finally:
                os.close(descriptor)
        except FileNotFoundError:
            return None
        except OSError as e:
            raise RsvError("io_error", path, e.strerror or str(e)) from e

    def begin(self, output: Output, nbytes: int) -> None:
        """Note in the file of an output, of so many bytes, what is known; or go on with what is there."""
        if output.unfinished is None:
            return  # it has no name by which another run could find it
        self._descriptor = output.descriptor
        if output.taken_up:
            there = _read(self._descriptor)
            if there is not None and there.run == self.run:
                self._end = there._end
                return
            self.blobs.clear()
            os.ftruncate(self._descriptor, 0)  # what is there may lie where this file has zeros
            os.ftruncate(self._descriptor, nbytes)
        assert self.measured is not None
        self._end = nbytes
        self._append({"facts": dict(self.facts)})
        self._append({"measured": _packed(self.measured)})
        os.pwrite(self._descriptor, _HEAD.pack(_MAGIC, nbytes, self.run), 0)

    def note(self, kind: str, name: str, sha256: str) -> None:
        """A blob is finished."""
        if self._descriptor is not None:
            self._append({"blob": [kind, name], "sha256": sha256})

    def _append(self, record: Mapping[str, Any]) -> None:
        assert self._descriptor is not None
        line = memoryview(json.dumps(record).encode() + b"\n")
        while line:
            count = os.pwrite(self._descriptor, line, self._end)
            line, self._end = line[count:], self._end + count


def facts_of(source: Source, options: QuantizeOptions, given: Mapping[str, Floats] | None) -> Facts:
    """By what a run can be known again: options, files by size and time, what is attached, the program.

    Parameters
    ----------
    given : mapping, optional
        The importance that was given.
    """
    facts = {"version": VERSION, "source": source.kind}
    for option in fields(options):
        facts[option.name] = str(getattr(options, option.name))
    if given is not None:
        digest = hashlib.sha256()
        for name in sorted(given):
            digest.update(f"{name}\0{np.shape(given[name])}".encode())
            digest.update(np.ascontiguousarray(given[name], np.float64).tobytes())
        facts["importance"] = digest.hexdigest()
    if isinstance(options.calibration, str):
        facts["calibration"] = hashlib.sha256(options.calibration.encode("utf-8", "surrogatepass")).hexdigest()
    elif options.calibration is not None:
        facts["calibration"] = f"not a text, number {secrets.token_hex(8)}"  # nothing tells that it is the same again
    if not source.files:
        facts["source"] += f", not in files, number {secrets.token_hex(8)}"
    for file in source.files:
        size, time = file.identity
        facts[f"file {file.path.name!r}"] = f"{size} bytes of {time / 1e9:.9f}"
    for name, (_, data) in source.attachments.items():
        facts[f"attached {name!r}"] = hashlib.sha256(data).hexdigest()
    shapes = json.dumps([(x.name, x.dtype, x.shape) for x in source.tensors.values()])
    return facts | {"tensors": hashlib.sha256(shapes.encode("utf-8", "surrogatepass")).hexdigest()}


def _read(descriptor: int) -> Journal | None:
    """What is behind the end of an unfinished file; None where nothing of use is."""
    head = os.pread(descriptor, _HEAD.size, 0)
    if len(head) < _HEAD.size:
        return None
    magic, start, run = _HEAD.unpack(head)
    size = os.fstat(descriptor).st_size
    if magic != _MAGIC or not 0 < size - start <= _LONGEST:
        return None
    data = b"".join(_pieces(descriptor, start, size))
    records, end = [], start
    for line in data.splitlines(keepends=True):
        try:
            record = json.loads(line) if line.endswith(b"\n") else None
        except ValueError:
            record = None
        if not isinstance(record, dict):
            break  # the last one, half written
        records.append(record)
        end += len(line)
    try:
        first, second, *rest = records
        blobs = {(kind, name): str(record["sha256"]) for record in rest for kind, name in [record["blob"]]}
        return Journal(first["facts"], _unpacked(second["measured"]), blobs, run, None, end)
    except (ValueError, KeyError, TypeError):
        return None


def _pieces(descriptor: int, start: int, stop: int) -> Iterator[bytes]:
    while start < stop and (data := os.pread(descriptor, min(stop - start, 2**24), start)):
        yield data
        start += len(data)


def _packed(measured: Measured) -> Mapping[str, Any]:
    arrays: dict[int, list[Any]] = {}  # layers with one input have one array
    for name, h in measured.importance.items():
        arrays.setdefault(id(h), [_text(h), []])[1].append(name)
    return {"importance": list(arrays.values()), "bits": dict(measured.layer_bits)}


def _unpacked(record: Mapping[str, Any]) -> Measured:
    importance = {name: _array(text) for text, names in record["importance"] for name in names}
    return Measured(importance, {str(name): int(bits) for name, bits in record["bits"].items()})


def _text(h: Floats) -> str:
    return base64.b64encode(np.ascontiguousarray(h, "<f8").tobytes()).decode()


def _array(text: str) -> NDArray[np.float64]:
    return np.frombuffer(base64.b64decode(text), "<f8")
