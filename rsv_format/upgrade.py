"""Files of other formats and of earlier drafts of this one, their content unchanged, as RSV files of today.

Earlier drafts: the digest in the prologue was of the header alone; codebooks had no window, which was their bits.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from functools import partial
from typing import Any

from rsv_format.errors import RsvError
from rsv_format.header import (
    NO_DIGEST,
    CodebookEntry,
    Header,
    LayerEntry,
    header_of,
    parse_header,
    parse_json,
)
from rsv_format.layout import MAGIC, blobs_start, header_digest, parse_prologue
from rsv_format.limits import PROLOGUE_NBYTES, USUAL_HOLES, USUAL_ORDER
from rsv_format.outputs import check
from rsv_format.reader import File, Layer
from rsv_format.remote import Remote
from rsv_format.stored import Disk, Memory, stored_bytes
from rsv_format.validate import check_references, walk
from rsv_format.verify import verify
from rsv_format.version import VERSION
from rsv_format.vqrs import MAGIC as VQRS_MAGIC
from rsv_format.vqrs import VERSION as VQRS_VERSION
from rsv_format.vqrs import Reservoir, VqrsLayer
from rsv_format.writer import RSV_FILE, LayerData, Writer

Progress = Callable[[int, int, str], None]
StrPath = str | os.PathLike[str]


def convert(
    source: StrPath,
    path: StrPath,
    *,
    force: bool = False,
    max_order: int = USUAL_ORDER,
    progress: Progress | None = None,
) -> str:
    """Write an RSV file with the content of a file of another format, bit for bit what it stands for.

    Parameters
    ----------
    source : path
        VeloxQuant-MLX's reservoir (VQRS, version 2), or an RSV file, of an earlier draft too, which may be a pipe.
    path : path
        Where the RSV file comes, whole or not at all; never the source.
    force : bool
        As `Writer`.
    max_order : int
        Of a rotation matrix that may be derived or checked; several may take as long together as one of this order.
    progress : callable(done, total, name), optional
        Told the numbers done so far and in all, and the layer at work.

    Returns
    -------
    str
        What the source was, in words.

    Raises
    ------
    RsvError
        io_error, bad_argument, over_limit; source_unsupported, source_invalid or content_invalid: not a reservoir
        that can be taken over exactly; of an RSV file, any code of `open` and `verify`.
    """
    told = progress or (lambda done, total, name: None)
    check(path, RSV_FILE, inputs=[source], force=force)
    begin = partial(Writer, path, inputs=[source], force=force)
    stored = stored_bytes(source, mmap=False)
    start = bytes(stored.view(0, min(len(MAGIC), stored.nbytes)))
    if start == MAGIC:
        return _rewrite(stored, begin, max_order, told)
    if start.startswith(VQRS_MAGIC):
        if not isinstance(stored, Disk):
            raise RsvError(
                "source_unsupported", os.fspath(source), "a VQRS file that is no regular file: copy it first"
            )
        return _take_over(Reservoir(stored, max_order=max_order), begin, told)
    detail = "is neither an RSV nor a VQRS file; models are for rsv quantize"
    raise RsvError("source_unsupported", os.fspath(source), detail)


def _take_over(reservoir: Reservoir, begin: Callable[[Header], Writer], told: Progress) -> str:
    """A reservoir's layers."""
    holes = reservoir.holes()
    if holes > USUAL_HOLES:
        raise RsvError("over_limit", "file", f"{holes} of its bytes were never written")
    codebooks: dict[tuple[int, bytes], tuple[int, VqrsLayer]] = {}  # content -> its position, a layer that has it
    transforms: dict[tuple[Any, ...], tuple[int, VqrsLayer]] = {}
    entries = []
    for layer in reservoir.layers:
        codebook = (layer.bits, reservoir.codebook(layer).tobytes())
        entries.append(
            LayerEntry(
                layer.name,
                layer.in_features,
                layer.out_features,
                1,
                codebooks.setdefault(codebook, (len(codebooks), layer))[0],
                transforms.setdefault(reservoir.transform_key(layer), (len(transforms), layer))[0],
                None if layer.bias is None else "f16",
                NO_DIGEST,
            )
        )
    header = Header(
        tuple(CodebookEntry(bits, bits, NO_DIGEST) for bits, _ in codebooks),
        tuple(reservoir.transform_entry(layer) for _, layer in transforms.values()),
        tuple(entries),
        (),
        (),
        {"generator": f"rsv-format {VERSION}", "source.kind": f"VQRS {VQRS_VERSION}"},
        (),
        {},
    )
    total, done = sum(layer.out_features * layer.in_features for layer in reservoir.layers), 0
    with begin(header) as writer:
        for i, user in codebooks.values():
            writer.codebook(i, reservoir.codebook(user))
        for i, user in transforms.values():
            told(0, total, f"rotation of {user.name}")
            writer.transform(i, reservoir.transform(user))
        for layer in reservoir.layers:
            told(done, total, layer.name)
            writer.layer(reservoir.layer(layer))
            done += layer.out_features * layer.in_features
        reservoir.check_unchanged()
    return f"a VQRS file, version {VQRS_VERSION}"


def _rewrite(stored: Memory | Disk | Remote, begin: Callable[[Header], Writer], max_order: int, told: Progress) -> str:
    """An RSV file's content, which is verified first."""
    file, what = _open_any_draft(stored, max_order)
    with file:
        verify(file, progress=told)
        header = file.header
        with begin(header) as writer:
            for i in range(len(header.codebooks)):
                writer.codebook(i, file.codebook(i))
            for i in range(len(header.transforms)):
                writer.transform(i, file.transform(i))
            for layer in file.layers.values():
                told(layer.offset, file.nbytes, layer.name)
                writer.layer(_data(layer))
            for tensor in file.tensors.values():
                told(tensor.offset, file.nbytes, tensor.name)
                writer.tensor(tensor.name, tensor.array)
            for attachment in file.attachments.values():
                writer.attachment(attachment.name, attachment.data)
            file.check_unchanged()
    return what


def _data(layer: Layer) -> LayerData:
    """A layer as a writer takes it."""
    return LayerData(
        layer.name,
        layer.in_features,
        layer.bits,
        layer.codes,
        layer.scales,
        layer.codebook,
        bias=layer.bias,
        bias_dtype=layer.bias_dtype,
        stack=layer.stack,
    )


def _open_any_draft(stored: Memory | Disk | Remote, max_order: int) -> tuple[File, str]:
    """As `open`, for earlier drafts too."""
    start = bytes(stored.view(0, min(PROLOGUE_NBYTES, stored.nbytes)))
    prologue = parse_prologue(start, stored.nbytes)
    text = bytes(stored.view(PROLOGUE_NBYTES, prologue.header_nbytes))
    is_draft = hashlib.sha256(text).digest() == prologue.header_sha256
    if not is_draft and header_digest(start, text) != prologue.header_sha256:
        raise RsvError("header_digest_mismatch", "header_sha256", "prologue and header are not what was written")
    end = PROLOGUE_NBYTES + prologue.header_nbytes
    if any(stored.view(end, blobs_start(prologue.header_nbytes) - end)):
        raise RsvError("header_padding_nonzero", f"byte {end}", "the padding after the header must be zero")
    header, has_windows = _header(text)
    check_references(header)
    blobs, file_nbytes = walk(header, prologue.header_nbytes)
    if file_nbytes != prologue.file_nbytes:
        detail = f"the header describes {file_nbytes} bytes, not {prologue.file_nbytes}"
        raise RsvError("file_extent", "file_nbytes", detail)
    what = "an RSV file" if has_windows and not is_draft else "an RSV file of an earlier draft"
    return File(stored, header, blobs, prologue.header_nbytes, max_order), what


def _header(text: bytes) -> tuple[Header, bool]:
    """The header, and whether its codebooks have windows: before they had, an index was a code."""
    try:
        return parse_header(text), True
    except RsvError as e:
        tree = parse_json(text)
        codebooks = tree.get("codebooks") if isinstance(tree, dict) else None
        if e.code != "schema_violation" or not isinstance(codebooks, list) or not codebooks:
            raise
        if not all(isinstance(x, dict) and "window" not in x and "bits" in x for x in codebooks):
            raise
        return header_of(tree | {"codebooks": [x | {"window": x["bits"]} for x in codebooks]}), False
