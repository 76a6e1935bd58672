"""Open a file: check it in trust order, then hand out lazy zero-copy views (SPEC sections 4, 8 and 9)."""

from __future__ import annotations

import contextlib
import mmap as _mmap
import os
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import ceil, prod
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rsv_format.dtypes import NUMPY_DTYPE, to_float32
from rsv_format.errors import RsvError
from rsv_format.header import (
    AttachmentEntry,
    HaarEntry,
    Header,
    LayerEntry,
    MatrixEntry,
    TensorEntry,
    parse_header,
)
from rsv_format.layout import LayerLayout, blobs_start, header_digest, layer_layout, parse_prologue
from rsv_format.limits import PROLOGUE_NBYTES, USUAL_ORDER
from rsv_format.packing import unpack_padded, window_indices
from rsv_format.rotation import Floats, Transform
from rsv_format.sets import check_id, check_members, joined_header, membership, sibling_names
from rsv_format.stored import Ahead, Joined, Memory, Source, Stored, is_pattern, matches, stored_bytes
from rsv_format.tables import html_table
from rsv_format.validate import Blob, check_references, walk

_T = TypeVar("_T")
_PIECE_NBYTES = 8 * 2**20  # of numbers that are read, or float32 rows that are made, some at a time


def open(source: Source, *, mmap: bool = True, max_order: int | None = None, alone: bool = False) -> File:
    """Open an RSV file, or a set of shards, and check it from framing to extent; payload is left to `verify`.

    Parameters
    ----------
    source : path, bytes-like or binary file object
        A path and a file object with a descriptor are mapped read-only. The path of a shard, whichever, stands for
        its set, and so does a pattern of all their paths, as "model-*.rsv". Of a URL (https://, s3://, hf://) only
        what is asked for is fetched; its server must give ranges.
    mmap : bool
        False reads each array when it is asked for, instead of mapping: for network file systems, and for files
        that may become shorter meanwhile, which is an error then and the end of the process where they are mapped.

    max_order : int
        Of a Haar factor that may be derived from its seed; several may take as long together as one of this order.
    alone : bool
        A shard by itself, not its set. What is no path has no siblings, and is taken alone.

    Returns
    -------
    File
        A context manager. Arrays taken from it stay valid after it is closed.

    Raises
    ------
    RsvError
        io_error, or any code of the framing, json, schema, reference, extent and set phases. SPEC section 9.
    """
    if isinstance(source, str | os.PathLike):
        path = os.fspath(source)
        if is_pattern(path):
            return _open_set(matches(path), mmap, max_order)
        if not alone:
            return _open_whole(path, mmap, max_order)
    return _open_one(source, mmap, max_order)


def _open_whole(path: str, mmap: bool, max_order: int | None) -> File:
    """A file, or the set of which it is a shard."""
    file = _open_one(path, mmap, max_order)
    member = membership(file.header)
    if member is None:
        return file
    file.close()
    return _open_set(sibling_names(path, member), mmap, max_order)


def _open_set(names: list[str], mmap: bool, max_order: int | None) -> File:
    """A set by the paths of its shards; a file that is no shard, if it is alone."""
    there: dict[str, File] = {}
    for name in names:
        try:
            there[name] = _open_one(name, mmap, max_order)
        except RsvError as e:
            if not isinstance(e.__cause__, FileNotFoundError):
                raise RsvError(e.code, f"{name}, {e.where}", e.detail) from e
    if not there:
        raise RsvError("missing_shard", names[0], "it is not there, nor is another shard")
    files = list(there.values())
    headers = [file.header for file in files]
    if len(files) == len(names) == 1 and membership(headers[0]) is None:
        return files[0]
    shards = [files[i] for i in check_members(list(there), headers)]
    whole = joined_header([shard.header for shard in shards])
    member = membership(shards[0].header)
    assert member is not None
    check_id(whole, member)
    return _joined(shards, whole, max_order)


def _joined(shards: list[File], whole: Header, max_order: int | None) -> File:
    """Shards as one file, whose bytes are theirs one after the other."""
    found: dict[tuple[Any, ...], Blob] = {}
    start = 0
    for shard in shards:
        for blob in shard.blobs:
            found.setdefault(content_key(blob), replace(blob, offset=start + blob.offset))
        start += shard.nbytes
    placed, _ = walk(whole, 0)
    blobs = [replace(blob, offset=found[content_key(blob)].offset) for blob in placed]
    stored = Joined([shard._stored for shard in shards])
    return File(stored, whole, blobs, 0, max_order, tuple(shards))


def content_key(blob: Blob) -> tuple[Any, ...]:
    """Layers, tensors and attachments have names; the entries of tables are what they hold."""
    is_table = blob.kind in ("codebook", "diagonal", "factor")
    return (blob.kind, blob.sha256, blob.nbytes) if is_table else (blob.kind, blob.name)


def _open_one(source: Source, mmap: bool, max_order: int | None) -> File:
    """A file by itself."""
    stored = stored_bytes(source, mmap)
    read = stored.disk or stored  # no map is touched before the lengths are known to be right
    start = bytes(read.view(0, min(PROLOGUE_NBYTES, stored.nbytes)))
    prologue = parse_prologue(start, stored.nbytes)
    end = PROLOGUE_NBYTES + prologue.header_nbytes
    text = bytes(read.view(PROLOGUE_NBYTES, prologue.header_nbytes))
    if header_digest(start, text) != prologue.header_sha256:
        raise RsvError("header_digest_mismatch", "header_sha256", "prologue and header are not what was written")
    if any(read.view(end, blobs_start(prologue.header_nbytes) - end)):
        raise RsvError("header_padding_nonzero", f"byte {end}", "the padding after the header must be zero")
    header = parse_header(text)
    check_references(header)
    blobs, file_nbytes = walk(header, prologue.header_nbytes)
    if file_nbytes != prologue.file_nbytes:
        raise RsvError(
            "file_extent", "file_nbytes", f"the header describes {file_nbytes} bytes, not {prologue.file_nbytes}"
        )
    path = os.fspath(source) if isinstance(source, str | os.PathLike) else None
    return File(stored, header, blobs, prologue.header_nbytes, max_order, path=path)


class _Lazy(Mapping[str, _T], Generic[_T]):
    """A name -> item mapping whose items are built when asked for."""

    def __init__(self, positions: dict[str, int], build: Callable[[int], _T]) -> None:
        self._positions = positions
        self._build = build
        self._built: dict[str, _T] = {}

    def __getitem__(self, name: str) -> _T:
        if name not in self._built:
            self._built[name] = self._build(self._positions[name])
        return self._built[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._positions)

    def __len__(self) -> int:
        return len(self._positions)

    def __contains__(self, name: object) -> bool:
        return name in self._positions


class File:
    """An open file, or a set of them (`shards`) as one. Use it as a context manager, or call `close`."""

    def __init__(
        self,
        stored: Stored,
        header: Header,
        blobs: list[Blob],
        header_nbytes: int,
        max_order: int | None = None,
        shards: tuple[File, ...] = (),
        path: str | None = None,
    ) -> None:
        self._open: Stored | None = stored
        self.shards = shards
        self._path = path
        self.header = header
        self.nbytes = stored.nbytes
        self.blobs = blobs
        self.header_nbytes = header_nbytes
        self.max_order = USUAL_ORDER if max_order is None else max_order
        self._transforms: dict[int, Transform] = {}

    @property
    def paths(self) -> list[str]:
        """Of the file, or of all its shards; URLs, too. None of what was opened without."""
        own = [] if self._path is None else [self._path]
        return [path for shard in self.shards for path in shard.paths] or own

    @property
    def buffer(self) -> memoryview:
        """All bytes of the file, read-only: where they lie, or read for this if the file is not mapped.

        Raises
        ------
        RsvError
            closed, io_error.
        """
        return self.read(0, self.nbytes)

    @property
    def mapped(self) -> bool:
        """Whether the bytes are those of a mapped file, or of mapped shards."""
        if self.shards:
            return all(shard.mapped for shard in self.shards)
        return isinstance(self._stored, Memory) and isinstance(self._stored.buffer.obj, _mmap.mmap)

    def unmapped(self) -> File:
        """The same file, read by its descriptor and not through its map: if it becomes shorter, that is an error."""
        return self._read_by(lambda stored: stored.disk or stored)

    def in_order(self) -> File:
        """The same file, unmapped, for one thread that reads it from its beginning to its end."""
        return self._read_by(lambda stored: stored if stored.disk is None else Ahead(stored.disk))

    def _read_by(self, way: Callable[[Stored], Stored]) -> File:
        """The same file, its bytes read another way."""
        shards = tuple(shard._read_by(way) for shard in self.shards)
        stored = Joined([shard._stored for shard in shards]) if shards else way(self._stored)
        return File(stored, self.header, self.blobs, self.header_nbytes, self.max_order, shards, self._path)

    def holes(self) -> int:
        """Bytes that were never written, as in a download that was begun: the system tells of them, they are zeros."""
        disk = self._stored.disk
        return 0 if disk is None else disk.holes()

    def check_holes(self, max_holes: int) -> None:
        """Refuse what takes long to read, and is small.

        Raises
        ------
        RsvError
            over_limit
        """
        holes = self.holes()
        if holes > max_holes:
            detail = f"{holes} of its {self.nbytes} bytes were never written; max_holes is {max_holes}"
            raise RsvError("over_limit", "file", f"{detail}, and can be raised")

    @property
    def _stored(self) -> Stored:
        if self._open is None:
            raise RsvError("closed", "file", "it was closed before this was read")
        return self._open

    def read(self, offset: int, nbytes: int) -> memoryview:
        """Some bytes of the file, read-only.

        Raises
        ------
        RsvError
            closed, io_error.
        """
        return self._stored.view(offset, nbytes)

    def check_unchanged(self) -> None:
        """Raise RsvError `io_error` if a file on disk was written to since it was opened."""
        if self._stored.disk is not None:
            self._stored.disk.check_unchanged()

    @property
    def metadata(self) -> Mapping[str, str]:
        """What the writer noted, string to string."""
        return self.header.metadata

    @cached_property
    def layers(self) -> Mapping[str, Layer]:
        """Layers by name, in the order of the file."""
        names = {entry.name: i for i, entry in enumerate(self.header.layers)}
        return _Lazy(names, lambda i: Layer(self, self.header.layers[i], self._blob("layer", i)))

    @cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """Unquantized tensors by name."""
        names = {entry.name: i for i, entry in enumerate(self.header.tensors)}
        return _Lazy(names, lambda i: Tensor(self, self.header.tensors[i], self._blob("tensor", i)))

    @cached_property
    def attachments(self) -> Mapping[str, Attachment]:
        """Attached files by name."""
        names = {entry.name: i for i, entry in enumerate(self.header.attachments)}
        return _Lazy(names, lambda i: Attachment(self, self.header.attachments[i], self._blob("attachment", i)))

    def codebook(self, index: int) -> NDArray[np.float32]:
        """Centroids of a codebook of the table, float32 (2**window,)."""
        return self.view(self._blob("codebook", index).offset, "f32", (2 ** self.header.codebooks[index].window,))

    def transform(self, index: int) -> Transform:
        """A transform of the table; the same object each time, so that what it derives is derived once.

        Raises
        ------
        RsvError
            over_limit: to derive the file's Haar factors takes longer than `max_order` allows.
        """
        if index not in self._transforms:
            factor = self.header.transforms[index].factor
            if isinstance(factor, HaarEntry):
                self.check_order(self._derived, f"transforms/{index}")
            self._transforms[index] = self._transform(index)
        return self._transforms[index]

    def check_order(self, cubes: float, where: str) -> None:
        """Refuse work on factors, in cubes of orders, that takes longer than one of order `max_order`.

        Raises
        ------
        RsvError
            over_limit
        """
        if cubes > self.max_order**3:
            detail = f"the file's factors take as long as one of order {ceil(cubes ** (1 / 3))}"
            raise RsvError("over_limit", where, f"{detail}; max_order is {self.max_order}, and can be raised")

    @cached_property
    def _derived(self) -> int:
        """Sum of the cubes of the orders of the Haar factors, equal ones once."""
        orders = {
            (entry.dim // entry.hadamard, entry.factor.seed)
            for entry in self.header.transforms
            if isinstance(entry.factor, HaarEntry)
        }
        return sum(m**3 for m, _ in orders)

    @property
    def factors_work(self) -> float:
        """What `verify` does on factors, in cubes of orders: an identity to hold one against is 3/8 of deriving it."""
        stored = (entry for entry in self.header.transforms if isinstance(entry.factor, MatrixEntry))
        return self._derived + sum(0.375 * (entry.dim // entry.hadamard) ** 3 for entry in stored)

    def view(self, offset: int, dtype: str, shape: tuple[int, ...]) -> NDArray[Any]:
        """A read-only array of bytes of the file: where they lie, if the file is mapped."""
        nbytes = prod(shape) * NUMPY_DTYPE[dtype].itemsize
        return np.frombuffer(self.read(offset, nbytes), NUMPY_DTYPE[dtype]).reshape(shape)

    def pieces(self, offset: int, dtype: str, count: int) -> Iterator[NDArray[Any]]:
        """Numbers that lie together, some at a time: (n,) arrays that have `count` together."""
        step = _PIECE_NBYTES // NUMPY_DTYPE[dtype].itemsize
        for start in range(0, count, step):
            yield self.view(offset + start * NUMPY_DTYPE[dtype].itemsize, dtype, (min(step, count - start),))

    def read_ahead(self, offset: int, nbytes: int) -> None:
        """Have the system read bytes that will be wanted soon, if it can be asked and has not got the first of them.
        A hint: nothing is said of bytes that are not there, or once the file is closed."""
        disk = self._open.disk if self._open else None
        if disk is not None:
            disk.advise(offset, nbytes)

    def read_into(self, offset: int, out: memoryview) -> None:
        """Copy bytes of the file to writable memory; several threads may.

        A mapped file is read, not touched through its map: no page of the map counts as used memory, and a file
        that has become shorter meanwhile is an error instead of a signal.

        Raises
        ------
        RsvError
            closed, io_error.
        """
        self._stored.read_into(offset, out)

    def close(self) -> None:
        """Let go of the file; arrays taken from it keep their bytes."""
        stored, self._open = self._open, None
        self._transforms.clear()
        for shard in self.shards:
            shard.close()
        if isinstance(stored, Memory):
            with contextlib.suppress(BufferError):
                stored.buffer.release()

    def __enter__(self) -> File:
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        self.close()

    def __repr__(self) -> str:
        shards = f", {len(self.shards)} shards" if self.shards else ""
        content = f"{len(self.layers)} layers, {len(self.tensors)} tensors"
        return f"<rsv_format.File: {content}, {self.nbytes} bytes{shards}>"

    def _repr_html_(self) -> str:
        """As a notebook shows it: its layers, or its tensors if it has none."""
        title = f"RSV file of {self.nbytes:,} bytes: {len(self.layers)} layers, {len(self.tensors)} tensors"
        layers = ((x.name, x._shape, x._bits, x.bias_dtype or "", f"{x.nbytes:,}") for x in self.layers.values())
        tensors = ((x.name, x.shape, x.dtype, f"{x.nbytes:,}") for x in self.tensors.values())
        if self.layers:
            return html_table(title, ("layer", "shape", "bits", "bias", "bytes"), layers, len(self.layers))
        return html_table(title, ("tensor", "shape", "dtype", "bytes"), tensors, len(self.tensors))

    @cached_property
    def _by_entry(self) -> dict[tuple[str, int], Blob]:
        return {(blob.kind, blob.index): blob for blob in self.blobs}

    def _blob(self, kind: str, index: int) -> Blob:
        return self._by_entry[kind, index]

    def _transform(self, index: int) -> Transform:
        entry = self.header.transforms[index]
        signs = values = stored = None
        if entry.diagonal is not None:
            offset = self._blob("diagonal", index).offset
            if entry.diagonal.kind == "signs":
                signs = self.view(offset, "u8", (-(-entry.dim // 8),))
            else:
                values = self.view(offset, "f32", (entry.dim,))
        if entry.factor is not None and entry.factor.sha256 is not None:
            m = entry.dim // entry.hadamard
            shape = (m, m) if entry.factor.kind == "matrix" else (m,)
            stored = self.view(self._blob("factor", index).offset, "f32", shape)
        kind, seed = (entry.factor.kind, entry.factor.seed) if entry.factor else (None, None)
        return Transform(entry.dim, entry.hadamard, signs, values, kind, seed, stored)


@dataclass(frozen=True, eq=False, repr=False)
class Layer:
    """One quantized linear layer (or `stack` of them), read where it lies.

    W_rot[i, j] = scales[i] * codebook[index[i, j]];  W = W_rot @ T;  y = transform(x) @ W_rot.T + bias.
    """

    file: File
    entry: LayerEntry
    blob: Blob

    def __repr__(self) -> str:
        bias = f", {self.bias_dtype} bias" if self.bias_dtype else ""
        return f"<rsv_format.Layer {self.name}: {self._shape}, {self._bits} bits{bias}, {self.nbytes} bytes>"

    @property
    def _shape(self) -> str:
        sides = (self.out_features, self.in_features)
        return " x ".join(map(str, sides if self.stack == 1 else (self.stack, *sides)))

    @property
    def _bits(self) -> str:
        return str(self.bits) if self.window == self.bits else f"{self.bits} of a window of {self.window}"

    @property
    def name(self) -> str:
        """The module's path, as "model.layers.0.mlp.up_proj"."""
        return self.entry.name

    @property
    def in_features(self) -> int:
        """Width of the input."""
        return self.entry.in_features

    @property
    def out_features(self) -> int:
        """Width of the output."""
        return self.entry.out_features

    @property
    def stack(self) -> int:
        """How many equal matrices, 1 for a plain layer."""
        return self.entry.stack

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.file.header.codebooks[self.entry.codebook].bits

    @property
    def window(self) -> int:
        """Bits of an index, which selects a centroid."""
        return self.file.header.codebooks[self.entry.codebook].window

    @property
    def bias_dtype(self) -> str | None:
        """ "f32", "f16", "bf16" or None."""
        return self.entry.bias

    @property
    def offset(self) -> int:
        """Of the blob in the file, bytes."""
        return self.blob.offset

    @property
    def nbytes(self) -> int:
        """Of the blob."""
        return self.blob.nbytes

    @cached_property
    def layout(self) -> LayerLayout:
        """Where the parts of the blob lie."""
        return layer_layout(self.in_features, self.entry.rows, self.bits, self.bias_dtype)

    @property
    def blobs(self) -> list[Blob]:
        """All that its weights are made of: its own blob, and those of its codebook and transform."""
        tables = {("codebook", self.codebook_id), ("diagonal", self.transform_id), ("factor", self.transform_id)}
        return [blob for blob in self.file.blobs if (blob.kind, blob.index) in tables] + [self.blob]

    @property
    def parts(self) -> list[tuple[str, int, int]]:
        """(kind, offset in the file, nbytes) of codes, scales and bias."""
        at, parts = self.layout, [("codes", self.offset, self.layout.codes_nbytes)]
        parts.append(("scales", self.offset + at.scales_offset, at.scales_nbytes))
        if self.bias_dtype:
            parts.append(("bias", self.offset + at.bias_offset, at.bias_nbytes))
        return parts

    @property
    def codes(self) -> NDArray[np.uint32]:
        """Packed codes, uint32 (stack * out_features, row_words)."""
        return self.packed_rows(slice(0, self.layout.rows))

    def packed_rows(self, rows: slice) -> NDArray[np.uint32]:
        """Packed codes of some rows, by their start and stop."""
        words = self.layout.row_words
        return self.file.view(self.offset + 4 * words * rows.start, "u32", (rows.stop - rows.start, words))

    @property
    def scales(self) -> NDArray[np.float32]:
        """float32 (stack * out_features,)."""
        return self.file.view(self.offset + self.layout.scales_offset, "f32", (self.layout.rows,))

    @property
    def bias(self) -> NDArray[Any] | None:
        """(stack * out_features,) in `bias_dtype`; bfloat16 as its uint16 bits."""
        if self.bias_dtype is None:
            return None
        return self.file.view(self.offset + self.layout.bias_offset, self.bias_dtype, (self.layout.rows,))

    def bias_float32(self) -> NDArray[np.float32] | None:
        """The bias as float32, exactly."""
        bias = self.bias
        return None if bias is None or self.bias_dtype is None else to_float32(bias, self.bias_dtype)

    @property
    def codebook_id(self) -> int:
        """Position in the table of codebooks: layers with the same one share it."""
        return self.entry.codebook

    @property
    def codebook(self) -> NDArray[np.float32]:
        """Centroids, float32 (2**window,)."""
        return self.file.codebook(self.entry.codebook)

    @property
    def transform_id(self) -> int | None:
        """Position in the table of transforms: layers with the same one transform their input alike."""
        return self.entry.transform

    @property
    def transform(self) -> Transform | None:
        """The map applied to the input axis; None is the identity."""
        return None if self.entry.transform is None else self.file.transform(self.entry.transform)

    def unpack(self) -> NDArray[np.uint8]:
        """The codes, uint8 (stack * out_features, in_features)."""
        return self.unpack_rows(slice(0, self.layout.rows))

    def unpack_rows(self, rows: slice) -> NDArray[np.uint8]:
        """The codes of some rows, by their start and stop, uint8 (rows, in_features)."""
        return unpack_padded(self.packed_rows(rows), self.bits)[:, : self.in_features]

    def indices(self) -> NDArray[np.uint8 | np.uint16]:
        """What selects the centroids, (stack * out_features, in_features): uint8, or uint16 for windows above 8."""
        return window_indices(self.unpack(), self.bits, self.window)

    def dequantize_rotated(self) -> NDArray[np.float32]:
        """W_rot, float32 (stack * out_features, in_features), bit-exact (SPEC section 8)."""
        out = np.empty((self.layout.rows, self.in_features), np.float32)
        for rows, w_rot in self._rotated():
            out[rows] = w_rot
        return out

    def dequantize(self) -> NDArray[np.float32]:
        """Dense W in the original basis: float32 (out_features, in_features), with a leading axis if stacked."""
        out = np.empty((self.layout.rows, self.in_features), np.float32)
        for rows, w in self.dequantized_rows():
            out[rows] = w
        return out if self.stack == 1 else out.reshape(self.stack, self.out_features, self.in_features)

    def dequantized_rows(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """Dense W some rows at a time: which of stack * out_features, and float32 (rows, in_features)."""
        transform = self.transform
        for rows, w_rot in self._rotated():
            yield rows, w_rot if transform is None else transform.apply_inverse(w_rot)

    def matmul(self, x: Floats) -> NDArray[np.float32]:
        """x @ W.T + bias without W: the activation is transformed, a few rows of W_rot live at a time.

        Parameters
        ----------
        x : floating (..., in_features)

        Returns
        -------
        float32 (..., out_features), with a leading axis of `stack` if stacked.

        Raises
        ------
        RsvError
            bad_argument: the last axis is not in_features long. SPEC section 8.
        """
        if x.ndim == 0 or x.shape[-1] != self.in_features:
            raise RsvError("bad_argument", self.name, f"x is {x.shape}, its last axis must be {self.in_features}")
        flat = x.astype(np.float32, copy=False).reshape(-1, self.in_features)
        transform = self.transform
        flat = flat if transform is None else transform.apply(flat)
        y = np.empty((flat.shape[0], self.layout.rows), np.float32)
        for rows, w_rot in self._rotated():
            y[:, rows] = flat @ w_rot.T
        bias = self.bias_float32()
        if bias is not None:
            y += bias
        if self.stack == 1:
            return y.reshape(*x.shape[:-1], self.out_features)
        experts = y.reshape(-1, self.stack, self.out_features).swapaxes(0, 1)
        return experts.reshape(self.stack, *x.shape[:-1], self.out_features)

    def _rotated(self) -> Iterator[tuple[slice, NDArray[np.float32]]]:
        """W_rot by chunks of rows."""
        codebook, first = self.codebook, self.offset + self.layout.scales_offset
        step = max(1, _PIECE_NBYTES // (4 * self.in_features))
        for start in range(0, self.layout.rows, step):
            rows = slice(start, min(start + step, self.layout.rows))
            scales = self.file.view(first + 4 * start, "f32", (rows.stop - start,))
            yield rows, codebook[window_indices(self.unpack_rows(rows), self.bits, self.window)] * scales[:, None]


@dataclass(frozen=True, eq=False, repr=False)
class Tensor:
    """An array kept as it was."""

    file: File
    entry: TensorEntry
    blob: Blob

    def __repr__(self) -> str:
        return f"<rsv_format.Tensor {self.name}: {self.dtype} {self.shape}, {self.nbytes} bytes>"

    @property
    def name(self) -> str:
        """The parameter's path, as "model.norm.weight"."""
        return self.entry.name

    @property
    def dtype(self) -> str:
        """RSV's name of the element type, as "bf16"."""
        return self.entry.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """Axes, outermost first."""
        return self.entry.shape

    @property
    def offset(self) -> int:
        """Of the blob in the file, bytes."""
        return self.blob.offset

    @property
    def nbytes(self) -> int:
        """Of the blob."""
        return self.blob.nbytes

    @property
    def array(self) -> NDArray[Any]:
        """A zero-copy view; bf16 as its uint16 bits, bool as uint8."""
        return self.file.view(self.offset, self.dtype, self.shape)

    def float32(self) -> NDArray[np.float32]:
        """The values as float32."""
        return to_float32(self.array, self.dtype)


@dataclass(frozen=True, eq=False, repr=False)
class Attachment:
    """A file carried along: config.json, tokenizer.json."""

    file: File
    entry: AttachmentEntry
    blob: Blob

    def __repr__(self) -> str:
        return f"<rsv_format.Attachment {self.name}: {self.media_type}, {self.nbytes} bytes>"

    @property
    def name(self) -> str:
        """A plain file name."""
        return self.entry.name

    @property
    def media_type(self) -> str:
        """As "application/json"."""
        return self.entry.media_type

    @property
    def offset(self) -> int:
        """Of the blob in the file, bytes."""
        return self.blob.offset

    @property
    def nbytes(self) -> int:
        """Of the blob."""
        return self.blob.nbytes

    @property
    def data(self) -> memoryview:
        """The bytes, read-only."""
        return self.file.read(self.offset, self.nbytes)

    def text(self) -> str:
        """The bytes as UTF-8.

        Raises
        ------
        RsvError
            invalid_utf8
        """
        try:
            return str(self.data, "utf-8")
        except UnicodeDecodeError as e:
            raise RsvError("invalid_utf8", f"attachment {self.name}", e.reason) from None
