"""Check a file to its last byte: digests, padding, values (SPEC section 9)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from rsv_format.dtypes import to_float32
from rsv_format.errors import RsvError
from rsv_format.layout import blobs_start
from rsv_format.limits import USUAL_HOLES
from rsv_format.payload import (
    Faults,
    codebook_faults,
    codes_faults,
    diagonal_faults,
    factor_faults,
    floats_faults,
)
from rsv_format.reader import File, Layer, open
from rsv_format.stored import Source
from rsv_format.validate import Blob

_CHUNK = 8 * 2**20  # bytes hashed between two calls of `progress`

Progress = Callable[[int, int, str], None]


def verify(
    source: File | Source,
    *,
    collect: bool = False,
    progress: Progress | None = None,
    max_order: int | None = None,
    max_holes: int = USUAL_HOLES,
) -> list[RsvError]:
    """Check everything that a file promises, blob by blob in the order of the file.

    Parameters
    ----------
    source : File, or whatever `open` takes
    collect : bool
        Go on after a fault and return all of the payload phase.
    progress : callable(done, total, name), optional
        Told the bytes done so far and in all, and the blob at work.

    max_order : int
        As `open`, of a file that is opened here: rotations that are stored are held against the identity, which takes
        as long as to derive one of 0.7 times their order.
    max_holes : int
        Bytes that were never written, as in a download that was begun: a file of some kilobytes can have terabytes
        of them, all to be read.

    Returns
    -------
    list of RsvError, empty for a sound file.

    Raises
    ------
    RsvError
        The first fault (unless `collect`): any code that `open` raises, or of the payload phase. over_limit before
        anything else: its factors take longer than `max_order` allows, or it has more holes than `max_holes`.
    """
    if not isinstance(source, File):
        with open(source, max_order=max_order) as file:
            return verify(file, collect=collect, progress=progress, max_holes=max_holes)
    source.check_order(source.factors_work, "transforms")
    source.check_holes(max_holes)
    faults = []
    for fault in _all_faults(source, progress or (lambda done, total, name: None)):
        if not collect:
            raise fault
        faults.append(fault)
    return faults


def verify_blobs(file: File, blobs: Iterable[Blob]) -> None:
    """Check some blobs alone: their digests, their padding and their values.

    Raises
    ------
    RsvError
        The first fault: any code of the payload phase; over_limit, as `verify`; io_error.
    """
    chosen = list(blobs)
    if any(blob.kind == "factor" for blob in chosen):
        file.check_order(file.factors_work, "transforms")
    for blob in chosen:
        where = f"{blob.kind} {blob.name}"
        if _sha256(file, blob, lambda done, total, name: None) != blob.sha256:
            raise RsvError("blob_digest_mismatch", where, "the bytes are not those that were written")
        for fault in _content(file, blob, where, lambda done, total, name: None):
            raise fault


def _all_faults(file: File, progress: Progress) -> Faults:
    """Those of a file, or of each shard of a set, which are named with it."""
    done = 0
    for i, shard in enumerate(file.shards, 1):
        told = partial(_told_of_shard, progress, done, file.nbytes)
        for fault in _faults(shard.in_order(), told):
            yield RsvError(fault.code, f"shard {i}, {fault.where}", fault.detail)
        done += shard.nbytes
    if not file.shards:
        yield from _faults(file.in_order(), progress)


def _told_of_shard(progress: Progress, before: int, total: int, done: int, of_shard: int, name: str) -> None:
    progress(before + done, total, name)


def _faults(file: File, progress: Progress) -> Faults:
    end = blobs_start(file.header_nbytes)  # open has checked the padding before it
    for blob in file.blobs:
        yield from _gap(file, end, blob.offset)
        end = blob.offset + blob.nbytes
        where = f"{blob.kind} {blob.name}"
        if _sha256(file, blob, progress) != blob.sha256:
            yield RsvError("blob_digest_mismatch", where, "the bytes are not those that were written")
        yield from _content(file, blob, where, progress)
    yield from _gap(file, end, file.nbytes)
    progress(file.nbytes, file.nbytes, "")


def _sha256(file: File, blob: Blob, progress: Progress) -> str:
    digest = hashlib.sha256()
    stop = blob.offset + blob.nbytes
    for start in range(blob.offset, stop, _CHUNK):
        progress(start, file.nbytes, blob.name)
        digest.update(file.read(start, min(_CHUNK, stop - start)))
    return digest.hexdigest()


def _gap(file: File, start: int, stop: int) -> Faults:
    gap = file.read(start, stop - start)
    if gap != bytes(gap.nbytes):
        first = int(np.argmax(np.frombuffer(gap, np.uint8) != 0))
        yield RsvError("padding_nonzero", f"byte {start + first}", "padding must be zero")


def _codes(layer: Layer, where: str) -> Faults:
    """The first fault of a layer's codes, some rows at a time."""
    step = max(1, _CHUNK // (4 * layer.layout.row_words))
    for start in range(0, layer.layout.rows if layer.in_features % 32 else 0, step):
        rows = slice(start, min(start + step, layer.layout.rows))
        for fault in codes_faults(layer.packed_rows(rows), layer.bits, layer.in_features, where):
            yield fault
            return


def _floats(file: File, offset: int, dtype: str, count: int, where: str) -> Faults:
    """The first fault of scales or a bias, some at a time."""
    first = 0
    for values in file.pieces(offset, dtype, count):
        for fault in floats_faults(to_float32(values, dtype), where, first):
            yield fault
            return
        first += values.size


def _content(file: File, blob: Blob, where: str, progress: Progress) -> Faults:
    """Tensors may hold anything (a mask holds infinities), attachments too."""
    if blob.kind == "codebook":
        yield from codebook_faults(file.codebook(blob.index), file.header.codebooks[blob.index].bits, where)
    elif blob.kind == "diagonal":
        yield from diagonal_faults(file.transform(blob.index), where)
    elif blob.kind == "factor":
        yield from factor_faults(
            file.transform(blob.index),
            where,
            lambda done: progress(blob.offset, file.nbytes, f"{blob.name}: rotation {done:.0%}"),
        )
    elif blob.kind == "layer":
        layer = file.layers[blob.name]
        ends = [offset + nbytes for _, offset, nbytes in layer.parts]
        for end, (_, offset, _) in zip(ends[:-1], layer.parts[1:], strict=True):
            yield from _gap(file, end, offset)
        yield from _codes(layer, where)
        for (part, offset, _), dtype in zip(layer.parts[1:], ("f32", layer.bias_dtype or ""), strict=False):
            yield from _floats(file, offset, dtype, layer.layout.rows, f"{where} {part}")
