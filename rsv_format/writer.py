"""Write a file: room reserved, blobs streamed, digests filled in last, atomic rename (SPEC section 11)."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from io import FileIO
from types import TracebackType
from typing import Any, Generic, TypeVar

import numpy as np
from numpy.typing import NDArray

from rsv_format.canonical import arrange
from rsv_format.dtypes import NUMPY_DTYPE, to_float32
from rsv_format.errors import RsvError
from rsv_format.header import (
    NO_DIGEST,
    AttachmentEntry,
    CodebookEntry,
    Diagonal,
    Factor,
    HaarEntry,
    HartleyEntry,
    Header,
    LayerEntry,
    MatrixEntry,
    SignsEntry,
    TensorEntry,
    TransformEntry,
    ValuesEntry,
    build_header,
    parse_header,
    parse_json,
    replace,
)
from rsv_format.layout import MAGIC, build_prologue, layer_layout
from rsv_format.limits import MAX_HEADER_NBYTES, PROLOGUE_NBYTES, WRITER_SHARE
from rsv_format.outputs import Output, write_all
from rsv_format.payload import codebook_faults, codes_faults, diagonal_faults, factor_faults, floats_faults
from rsv_format.replaceable import Kind
from rsv_format.rotation import Transform
from rsv_format.sets import membership
from rsv_format.validate import Blob, check_references, walk

RSV_FILE = Kind("an RSV file", lambda head: head.startswith(MAGIC))
_T = TypeVar("_T")
_AT_ONCE = 2**24  # bytes that are read again together


@dataclass(frozen=True, repr=False)
class LayerData:
    """A quantized layer in memory.

    Parameters
    ----------
    name : str
    in_features : int
    bits : int
        Of a code.
    codes : uint32 (stack * out_features, ceil(in_features / 32) * bits)
        Packed, see `pack`.
    scales : float32 (stack * out_features,)
    codebook : float32 (2**window,)
    transform : Transform, optional
        None is the identity.
    bias : (stack * out_features,), optional
        In `bias_dtype`, bfloat16 as uint16 bits.
    bias_dtype : str, optional
        "f32", "f16" or "bf16".
    stack : int
    """

    name: str
    in_features: int
    bits: int
    codes: NDArray[np.uint32]
    scales: NDArray[np.float32]
    codebook: NDArray[np.float32]
    transform: Transform | None = None
    bias: NDArray[Any] | None = None
    bias_dtype: str | None = None
    stack: int = 1

    def __repr__(self) -> str:
        shape = f"{self.scales.size} x {self.in_features}" + f" in {self.stack}" * (self.stack > 1)
        return f"<rsv_format.LayerData {self.name}: {shape}, {self.bits} bits>"

    @property
    def window(self) -> int:
        """Bits of an index, which selects a centroid."""
        return int(self.codebook.size).bit_length() - 1


@dataclass(frozen=True, repr=False)
class TensorData:
    """An array to keep as it is: bf16 as uint16 bits, bool as uint8."""

    dtype: str
    array: NDArray[Any]

    def __repr__(self) -> str:
        return f"<rsv_format.TensorData: {self.dtype} {self.array.shape}>"


@dataclass(frozen=True, repr=False)
class AttachmentData:
    """A file to carry along."""

    media_type: str
    data: bytes

    def __repr__(self) -> str:
        return f"<rsv_format.AttachmentData: {self.media_type}, {len(self.data)} bytes>"


def write(
    path: str | os.PathLike[str],
    *,
    layers: Iterable[LayerData] = (),
    tensors: Mapping[str, TensorData] | None = None,
    attachments: Mapping[str, AttachmentData] | None = None,
    metadata: Mapping[str, str] | None = None,
    extensions: Mapping[str, Any] | None = None,
    inputs: Iterable[str | os.PathLike[str]] = (),
    force: bool = False,
) -> None:
    """Write content that is at hand, canonically: equal content gives equal bytes.

    Equal codebooks and equal transforms are stored once, whether or not they are the same objects. `inputs` and
    `force` are `Writer`'s.

    Raises
    ------
    RsvError
        bad_argument: what is at the path may not be replaced; content_invalid: an array does not fit its layer;
        io_error; or a code of the schema and reference phases, or foreign_shard: no reader would take the file. SPEC
        section 11.
    """
    layers, tensors, attachments = list(layers), dict(tensors or {}), dict(attachments or {})
    codebooks, transforms = _Table[LayerData](), _Table[Transform]()
    entries = []
    for layer in sorted(layers, key=lambda layer: layer.name):
        codebook = codebooks.add((layer.bits, layer.codebook.astype("<f4").tobytes()), layer)
        transform = None
        if layer.transform is not None:
            transform = transforms.add(_transform_key(layer.transform), layer.transform)
        rows = layer.scales.size
        if layer.stack < 1 or rows % layer.stack:
            raise RsvError("content_invalid", layer.name, f"{rows} scales are not {layer.stack} equal matrices")
        entries.append(
            LayerEntry(
                layer.name,
                layer.in_features,
                rows // layer.stack,
                layer.stack,
                codebook,
                transform,
                layer.bias_dtype,
                NO_DIGEST,
            )
        )
    header = Header(
        tuple(CodebookEntry(user.bits, user.window, NO_DIGEST) for user in codebooks.items),
        tuple(transform_entry(t) for t in transforms.items),
        tuple(entries),
        tuple(TensorEntry(name, x.dtype, x.array.shape, NO_DIGEST) for name, x in tensors.items()),
        tuple(AttachmentEntry(name, a.media_type, len(a.data), NO_DIGEST) for name, a in attachments.items()),
        dict(metadata or {}),
        (),
        dict(extensions or {}),
    )
    with Writer(path, header, inputs=inputs, force=force) as writer:
        for i, user in enumerate(codebooks.items):
            writer.codebook(i, user.codebook)
        for i, t in enumerate(transforms.items):
            writer.transform(i, t)
        for layer in layers:
            writer.layer(layer)
        for name, tensor in tensors.items():
            writer.tensor(name, tensor.array)
        for name, attachment in attachments.items():
            writer.attachment(name, attachment.data)


def transform_entry(t: Transform) -> TransformEntry:
    """What the header says of a transform."""
    return TransformEntry(t.dim, t.hadamard, diagonal_entry(t.diagonal), factor_entry(t.factor, t.seed))


def diagonal_entry(kind: str | None) -> Diagonal | None:
    """What the header says of a diagonal."""
    return None if kind is None else SignsEntry(NO_DIGEST) if kind == "signs" else ValuesEntry(NO_DIGEST)


def factor_entry(kind: str | None, seed: int | None) -> Factor | None:
    """What the header says of a factor.

    Raises
    ------
    RsvError
        content_invalid: another kind, or a Haar factor without a seed, or one of another kind with one.
    """
    match kind, seed:
        case None, None:
            return None
        case "hartley", None:
            return HartleyEntry()
        case "matrix", None:
            return MatrixEntry(NO_DIGEST)
        case "haar", int():
            return HaarEntry(seed, NO_DIGEST)
    raise RsvError("content_invalid", "transform", f"there is no factor {str(kind)[:40]!r} with seed {seed}")


def _undigested(header: Header) -> Header:
    """The header with stand-ins for all digests."""

    def blank(entries: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(replace(entry, sha256=NO_DIGEST) for entry in entries)

    def bare(t: TransformEntry) -> TransformEntry:
        diagonal = t.diagonal and replace(t.diagonal, sha256=NO_DIGEST)
        factor = replace(t.factor, sha256=NO_DIGEST) if isinstance(t.factor, MatrixEntry | HaarEntry) else t.factor
        return replace(t, diagonal=diagonal, factor=factor)

    return replace(
        header,
        codebooks=blank(header.codebooks),
        transforms=tuple(bare(t) for t in header.transforms),
        layers=blank(header.layers),
        tensors=blank(header.tensors),
        attachments=blank(header.attachments),
    )


def _checked(header: Header) -> Header:
    """The header as a reader would take it, without digests."""
    header = replace(header, metadata={key: _unicode(value) for key, value in header.metadata.items()})
    try:
        text = build_header(_undigested(header))
    except (AttributeError, TypeError, ValueError, RecursionError) as e:  # lone surrogates, objects that JSON lacks
        raise RsvError("content_invalid", "header", str(e)[:200]) from None
    header = parse_header(text)
    check_references(header)
    membership(header)
    return header


def _unicode(text: str) -> str:
    """The text with U+FFFD for half of a surrogate pair, as file names that are not UTF-8 have them in Python."""
    return text.encode("utf-16", "surrogatepass").decode("utf-16", "replace") if isinstance(text, str) else text


class Writer:
    """Streams one file into place; leaves the old file, or none, if it is not brought to its end.

    A context manager: its exit commits, or discards after an exception.

    Parameters
    ----------
    path : path
        Replaced at the end, in one step; it may be the RSV file that the content is read from.
    header : Header
        With digests of any value, its entries in any order; the tables are addressed by the position that
        they have in it. Equal codebooks and transforms must have been merged by the caller. Half of a surrogate
        pair in a value of the metadata becomes U+FFFD.
    inputs : paths
        What the content comes from, and never replaced: files, and folders with the files in them.
    force : bool
        Replace a file that is not RSV, or write-protected; but never a model in another format.
    output : Output, optional
        Where to write instead: the path's, made by the caller.
    finished : callable(kind, name, sha256), optional
        Told of each blob that is written.

    Raises
    ------
    RsvError
        bad_argument: what is at the path may not be replaced; io_error, content_invalid, or a code of the schema
        and reference phases. SPEC section 11.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        header: Header,
        *,
        inputs: Iterable[str | os.PathLike[str]] = (),
        force: bool = False,
        output: Output | None = None,
        finished: Callable[[str, str, str], None] | None = None,
    ) -> None:
        self._output = Output(path, RSV_FILE, inputs=inputs, force=force) if output is None else output
        self._finished = finished
        self._file: FileIO | None = None
        given = _checked(header)
        header = arrange(given)
        text = build_header(header)
        if len(text) > MAX_HEADER_NBYTES:
            raise RsvError("header_too_large", "header", f"{len(text)} bytes, the limit is {MAX_HEADER_NBYTES}")
        parse_json(text)  # what it may hold depends on its length, which the positions in tables have changed
        self._header_nbytes = len(text)
        self._header = header
        blobs, self._file_nbytes = walk(header, len(text))
        self._blobs = {(blob.kind, blob.name): blob for blob in blobs}
        layers = {layer.name: layer for layer in header.layers}
        # positions in the caller's tables -> positions in the file
        self._codebooks = {layer.codebook: layers[layer.name].codebook for layer in given.layers}
        self._transforms = {layer.transform: layers[layer.name].transform for layer in given.layers}
        self._digests: dict[tuple[str, str], str] = {}
        self._layers = layers
        self._tensors = {tensor.name: tensor for tensor in header.tensors}

    @property
    def nbytes(self) -> int:
        """How long the file will be."""
        return self._file_nbytes

    def adopt(self, kind: str, name: str, sha256: str) -> bool:
        """Whether a blob of this digest is in the file already, so that it need not be written."""
        blob = self._blobs.get((kind, name))
        if blob is None or self._file is None:
            return False
        digest = hashlib.sha256()
        try:
            for start in range(blob.offset, blob.offset + blob.nbytes, _AT_ONCE):
                digest.update(os.pread(self._file.fileno(), min(_AT_ONCE, blob.offset + blob.nbytes - start), start))
        except OSError as e:
            raise RsvError("io_error", self._output.path, e.strerror or str(e)) from e
        if digest.hexdigest() != sha256:
            return False
        self._digests[kind, name] = sha256
        return True

    def accept(self, kind: str, name: str, sha256: str) -> None:
        """Take the word of another process that it has written a blob of this digest into the file."""
        self._entry(self._blobs, (kind, name))
        self._note((kind, name), sha256)

    def has_codebook(self, index: int) -> bool:
        """Whether it is written, or adopted."""
        return ("codebook", f"codebooks/{self._entry(self._codebooks, index)}") in self._digests

    def has_layer(self, name: str) -> bool:
        """Whether it is written, or adopted."""
        return ("layer", name) in self._digests

    def has_tensor(self, name: str) -> bool:
        """Whether it is written, or adopted."""
        return ("tensor", name) in self._digests

    def has_transform(self, index: int) -> bool:
        """Whether all that is stored of it is written, or adopted."""
        name = f"transforms/{self._entry(self._transforms, index)}"
        return {key for key in self._blobs if key[1] == name} <= self._digests.keys()

    def codebook(self, index: int, centroids: NDArray[np.float32]) -> None:
        """Write the centroids of the codebook at this position of the header that was given."""
        position = self._entry(self._codebooks, index)
        name = f"codebooks/{position}"
        entry = self._header.codebooks[position]
        _fits(name, "codebook", centroids, "f32", (2**entry.window,))
        _refuse(codebook_faults(centroids, entry.bits, name))
        self._put(("codebook", name), [(0, _bytes(centroids, "f32"))])

    def transform(self, index: int, transform: Transform) -> None:
        """Write what is stored of a transform."""
        name = f"transforms/{self._entry(self._transforms, index)}"
        self._check_transform(index, transform)
        if transform.signs is not None:
            self._put(("diagonal", name), [(0, _bytes(transform.signs, "u8"))])
        elif transform.values is not None:
            self._put(("diagonal", name), [(0, _bytes(transform.values, "f32"))])
        if transform.stored is not None:
            self._put(("factor", name), [(0, _bytes(transform.stored, "f32"))])

    def layer(self, data: LayerData) -> None:
        """Write codes, scales and bias of a layer."""
        self.layer_pieces(data.name, [(data.codes, data.scales)], data.bias)

    def layer_pieces(
        self,
        name: str,
        pieces: Iterable[tuple[NDArray[np.uint32], NDArray[np.float32]]],
        bias: NDArray[Any] | None = None,
    ) -> None:
        """Write a layer of which some rows at a time are at hand: their codes and scales, in the rows' order."""
        entry = self._entry(self._layers, name)
        bits = self._header.codebooks[entry.codebook].bits
        at = layer_layout(entry.in_features, entry.rows, bits, entry.bias)
        if entry.bias is None and bias is not None:
            raise RsvError("content_invalid", name, "a bias that the header does not name (bias_dtype is missing)")
        if entry.bias is not None:
            if bias is None:
                raise RsvError("content_invalid", name, "its bias is missing")
            _fits(name, "bias", bias, entry.bias, (at.rows,))
            _refuse(floats_faults(to_float32(bias, entry.bias), f"{name} bias"))

        def parts() -> Iterator[tuple[int, memoryview]]:
            scales, done = np.empty(at.rows, "<f4"), 0
            for codes, some_scales in pieces:
                stop = done + codes.shape[0]
                if stop > at.rows:
                    raise RsvError("content_invalid", name, f"there are codes of more than {at.rows} rows")
                _fits(name, "codes", codes, "u32", (stop - done, at.row_words))
                _fits(name, "scales", some_scales, "f32", (stop - done,))
                _refuse(codes_faults(codes, bits, entry.in_features, name))
                yield done * at.row_words * 4, _bytes(codes, "u32")
                scales[done:stop] = some_scales
                done = stop
            if done != at.rows:
                raise RsvError("content_invalid", name, f"there are codes of {done} rows, the header says {at.rows}")
            _refuse(floats_faults(scales, f"{name} scales"))
            yield at.scales_offset, _bytes(scales, "f32")
            if bias is not None and entry.bias is not None:
                yield at.bias_offset, _bytes(bias, entry.bias)

        self._put(("layer", name), parts())

    def tensor(self, name: str, array: NDArray[Any]) -> None:
        """Write a tensor's elements; of bool, 1 for whatever is not 0."""
        entry = self._entry(self._tensors, name)
        _fits(name, "tensor", array, entry.dtype, entry.shape)
        self.tensor_pieces(name, [array])

    def tensor_pieces(self, name: str, pieces: Iterable[NDArray[Any]]) -> None:
        """Write a tensor of which some elements at a time are at hand, in their order, in arrays of any shape."""
        entry = self._entry(self._tensors, name)

        def parts() -> Iterator[tuple[int, memoryview]]:
            done = 0
            for array in pieces:
                _fits(name, "tensor", array, entry.dtype, array.shape)
                if entry.dtype == "bool" and array.max(initial=0) > 1:
                    array = (array != 0).view(np.uint8)
                data = _bytes(array, entry.dtype)
                yield done, data
                done += data.nbytes

        self._put(("tensor", name), parts())

    def attachment(self, name: str, data: bytes | memoryview) -> None:
        """Write an attached file."""
        self._put(("attachment", name), [(0, memoryview(data))])

    def described(self) -> Header:
        """The header with all digests.

        Raises
        ------
        RsvError
            content_invalid: something that the header names was not written.
        """
        missing = [f"{kind} {name}" for kind, name in self._blobs.keys() - self._digests.keys()]
        if missing:
            raise RsvError("content_invalid", min(missing), f"{len(missing)} blobs were never written")
        return self._with_digests()

    def finish(self) -> FileIO:
        """Fill in the digests: the file is complete, and can be read, though its path does not know of it yet.

        Raises
        ------
        RsvError
            As `described`; io_error.
        """
        text = build_header(self.described())
        assert len(text) == self._header_nbytes
        self._write(0, build_prologue(text, self._file_nbytes))
        self._write(PROLOGUE_NBYTES, text)
        assert self._file is not None
        self._file.truncate(self._file_nbytes)  # where a journal lay behind it
        return self._file

    def commit(self) -> None:
        """Finish, flush to the disk, take the path's place.

        Raises
        ------
        RsvError
            As `finish`; bad_argument if a file that may not be replaced has come to the path meanwhile.
        """
        self.finish()
        self._file = None
        self._output.commit()

    def discard(self) -> None:
        """Give up: forget what was written so far, the path's old file stays."""
        self._file = None
        self._output.discard()

    def forget(self) -> None:
        """Give up for good, as what was written has come elsewhere: nothing is left, not even to be taken up."""
        self._file = None
        self._output.forget()

    def __enter__(self) -> Writer:
        self._file = self._output.open(self._file_nbytes)
        return self

    def __exit__(self, kind: type[BaseException] | None, e: BaseException | None, tb: TracebackType | None) -> None:
        try:
            if e is None and self._file is not None:
                self.commit()
        finally:
            self.discard()

    def _check_transform(self, index: int, transform: Transform) -> None:
        """It is what the header says, and would verify."""
        position = self._transforms[index]
        assert position is not None
        entry, name = self._header.transforms[position], f"transforms/{position}"
        given = transform_entry(transform)
        if given != entry:
            raise RsvError("content_invalid", name, f"it is {given}, the header says {entry}")
        if transform.signs is not None:
            _fits(name, "signs", transform.signs, "u8", (-(-entry.dim // 8),))
        if transform.values is not None:
            _fits(name, "values", transform.values, "f32", (entry.dim,))
        if transform.stored is not None:
            m = transform.m
            _fits(name, "factor", transform.stored, "f32", (m, m) if transform.factor == "matrix" else (m,))
        _refuse(diagonal_faults(transform, name))
        _refuse(factor_faults(transform, name, share=WRITER_SHARE))

    def _with_digests(self) -> Header:
        def digest(kind: str, name: str) -> str:
            return self._digests[kind, name]

        header = self._header
        transforms = []
        for i, t in enumerate(header.transforms):
            name, diagonal, factor = f"transforms/{i}", t.diagonal, t.factor
            if diagonal is not None:
                diagonal = replace(diagonal, sha256=digest("diagonal", name))
            if isinstance(factor, MatrixEntry | HaarEntry):
                factor = replace(factor, sha256=digest("factor", name))
            transforms.append(replace(t, diagonal=diagonal, factor=factor))
        return replace(
            header,
            codebooks=tuple(
                replace(c, sha256=digest("codebook", f"codebooks/{i}")) for i, c in enumerate(header.codebooks)
            ),
            transforms=tuple(transforms),
            layers=tuple(replace(x, sha256=digest("layer", x.name)) for x in header.layers),
            tensors=tuple(replace(x, sha256=digest("tensor", x.name)) for x in header.tensors),
            attachments=tuple(replace(x, sha256=digest("attachment", x.name)) for x in header.attachments),
        )

    def _entry(self, entries: Mapping[Any, Any], name: Any) -> Any:
        if name not in entries:
            raise RsvError("content_invalid", str(name), "the header does not name it")
        return entries[name]

    def _put(self, key: tuple[str, str], parts: Iterable[tuple[int, memoryview]]) -> None:
        """Write the parts of a blob, the gaps between them being zero, and note its digest."""
        blob: Blob = self._entry(self._blobs, key)
        digest, end = hashlib.sha256(), 0
        for offset, data in parts:
            digest.update(bytes(offset - end))
            digest.update(data)
            if offset + data.nbytes > blob.nbytes:
                raise RsvError("content_invalid", key[1], f"more than the {blob.nbytes} bytes that the header says")
            self._write(blob.offset + offset, data)
            end = offset + data.nbytes
        if end != blob.nbytes:
            raise RsvError("content_invalid", key[1], f"{end} bytes, the header says {blob.nbytes}")
        self._note(key, digest.hexdigest())

    def _note(self, key: tuple[str, str], sha256: str) -> None:
        self._digests[key] = sha256
        if self._finished is not None:
            self._finished(*key, sha256)

    def _write(self, offset: int, data: bytes | memoryview) -> None:
        if self._file is None:
            raise RsvError("closed", self._output.path, "a Writer is a context manager: enter it first")
        try:
            self._file.seek(offset)
            write_all(self._file, data)
        except OSError as e:
            raise RsvError("io_error", self._output.path, e.strerror or str(e)) from e


@dataclass
class _Table(Generic[_T]):
    """Items by content, each once."""

    items: list[_T] = field(default_factory=list)
    _positions: dict[Any, int] = field(default_factory=dict)

    def add(self, key: Any, item: _T) -> int:
        if key not in self._positions:
            self._positions[key] = len(self.items)
            self.items.append(item)
        return self._positions[key]


def _transform_key(t: Transform) -> tuple[Any, ...]:
    contents = (None if a is None else a.tobytes() for a in (t.signs, t.values, t.stored))
    return (t.dim, t.hadamard, t.factor, t.seed, *contents)


def _fits(name: str, part: str, array: NDArray[Any], dtype: str, shape: tuple[int, ...]) -> None:
    if array.shape != shape or array.dtype.newbyteorder("=") != NUMPY_DTYPE[dtype].newbyteorder("="):
        raise RsvError(
            "content_invalid", name, f"{part} is {array.dtype} {array.shape}, the header says {dtype} {shape}"
        )


def _refuse(faults: Iterator[RsvError]) -> None:
    """Content that a reader's `verify` would refuse is not written."""
    for fault in faults:
        raise RsvError("content_invalid", fault.where, f"{fault.code}: {fault.detail}")


def _bytes(array: NDArray[Any], dtype: str) -> memoryview:
    """The elements as they are stored, without a copy where they lie so already."""
    flat = np.ascontiguousarray(array, NUMPY_DTYPE[dtype]).reshape(-1)
    return flat.view(np.uint8).data
