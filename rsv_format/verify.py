"""The payload phase: digests, padding, values (SPEC section 9)."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.layout import blobs_start
from rsv_format.limits import ORTHOGONALITY_TOLERANCE
from rsv_format.packing import unpack_padded
from rsv_format.reader import File, Layer, Source, open
from rsv_format.rotation import Transform
from rsv_format.validate import Blob

_CHUNK = 8 * 2**20  # bytes hashed or unpacked between two calls of `progress`

Progress = Callable[[int, int, str], None]


def verify(
    source: File | Source, *, collect: bool = False, progress: Progress | None = None
) -> list[RsvError]:
    """Check everything that a file promises, blob by blob in the order of the file.

    Parameters
    ----------
    source : File, or whatever `open` takes
    collect : bool
        Go on after a fault and return all of the payload phase, at most one of each kind per blob.
    progress : callable(done, total, name), optional
        Told the bytes done so far and in all, and the blob at work.

    Returns
    -------
    list of RsvError, empty for a sound file.

    Raises
    ------
    RsvError
        The first fault (unless `collect`): any code that `open` raises, or of the payload phase.
    """
    if not isinstance(source, File):
        with open(source) as file:
            return verify(file, collect=collect, progress=progress)
    faults = []
    for fault in _faults(source, progress or (lambda done, total, name: None)):
        if not collect:
            raise fault
        faults.append(fault)
    return faults


def _faults(file: File, progress: Progress) -> Iterator[RsvError]:
    end = blobs_start(file.header_nbytes)  # open has checked the padding before it
    for blob in file.blobs:
        progress(blob.offset, file.nbytes, blob.name)
        yield from _gap(file, end, blob.offset)
        end = blob.offset + blob.nbytes
        where = f"{blob.kind} {blob.name}"
        if _sha256(file, blob, progress) != blob.sha256:
            yield RsvError("blob_digest_mismatch", where, "the bytes are not those that were written")
        yield from _CONTENT[blob.kind](file, blob, where)
    yield from _gap(file, end, file.nbytes)
    progress(file.nbytes, file.nbytes, "")


def _sha256(file: File, blob: Blob, progress: Progress) -> str:
    digest = hashlib.sha256()
    for start in range(blob.offset, blob.offset + blob.nbytes, _CHUNK):
        stop = min(start + _CHUNK, blob.offset + blob.nbytes)
        digest.update(file.buffer[start:stop])
        progress(stop, file.nbytes, blob.name)
    return digest.hexdigest()


def _gap(file: File, start: int, stop: int) -> Iterator[RsvError]:
    gap = np.frombuffer(file.buffer, np.uint8, stop - start, start) if stop > start else np.zeros(0, np.uint8)
    if gap.any():
        at = start + int(np.argmax(gap != 0))
        yield RsvError("padding_nonzero", f"byte {at}", "padding must be zero")


def _finite(values: NDArray[np.float32], where: str) -> Iterator[RsvError]:
    if not np.isfinite(values).all():
        at = int(np.argmax(~np.isfinite(values.reshape(-1))))
        yield RsvError("nonfinite_value", where, f"element {at} is {values.reshape(-1)[at]}")


def _codebook(file: File, blob: Blob, where: str) -> Iterator[RsvError]:
    centroids = file.codebook(blob.index)
    yield from _finite(centroids, where)
    if not (np.diff(centroids.astype(np.float64)) > 0).all():
        yield RsvError("codebook_order", where, "the centroids do not increase strictly")


def _diagonal(file: File, blob: Blob, where: str) -> Iterator[RsvError]:
    transform = file.transform(blob.index)
    if transform.signs is not None:
        if transform.dim % 8 and int(transform.signs[-1]) >> transform.dim % 8:
            yield RsvError("padding_nonzero", where, "bits after the last sign must be zero")
        return
    assert transform.values is not None
    yield from _finite(transform.values, where)
    if not transform.values.all():
        yield RsvError("zero_diagonal", where, f"element {int(np.argmin(transform.values != 0))} is 0")


def _factor(file: File, blob: Blob, where: str) -> Iterator[RsvError]:
    transform = file.transform(blob.index)
    assert transform.stored is not None
    broken = list(_finite(transform.stored, where))
    yield from broken
    if broken:
        return
    if transform.factor == "haar":
        try:
            transform.factor_matrix()
        except RsvError as e:
            yield RsvError(e.code, where, e.detail)
    else:
        yield from _orthogonal(transform, where)


def _orthogonal(transform: Transform, where: str) -> Iterator[RsvError]:
    f = transform.factor_matrix()
    rows = max(1, _CHUNK // (8 * transform.m))
    worst = 0.0
    with np.errstate(over="ignore", invalid="ignore"):
        for start in range(0, transform.m, rows):
            gram = f[start : start + rows].astype(np.float64) @ f.T.astype(np.float64)
            gram[np.arange(gram.shape[0]), start + np.arange(gram.shape[0])] -= 1
            worst = max(worst, float(np.abs(gram).max()))
    if not worst <= ORTHOGONALITY_TOLERANCE:
        yield RsvError("not_orthogonal", where, f"F F^T is off the identity by {worst:.1e}")


def _layer(file: File, blob: Blob, where: str) -> Iterator[RsvError]:
    layer = file.layers[blob.name]
    ends = [offset + nbytes for _, offset, nbytes in layer.parts]
    for end, (_, offset, _) in zip(ends[:-1], layer.parts[1:], strict=True):
        yield from _gap(file, end, offset)
    if layer.in_features % 32 and _padding_codes(layer):
        yield RsvError("padding_nonzero", where, "codes after the last of a row must be zero")
    yield from _finite(layer.scales, f"{where} scales")
    bias = layer.bias_float32()
    if bias is not None:
        yield from _finite(bias, f"{where} bias")


def _padding_codes(layer: Layer) -> bool:
    indices = layer.indices[:, -layer.bits :]  # the last 32 codes of each row
    rows = max(1, _CHUNK // 128)
    return any(
        unpack_padded(indices[start : start + rows], layer.bits)[:, layer.in_features % 32 :].any()
        for start in range(0, indices.shape[0], rows)
    )


def _nothing(file: File, blob: Blob, where: str) -> Iterator[RsvError]:
    return iter(())


_CONTENT: dict[str, Callable[[File, Blob, str], Iterator[RsvError]]] = {
    "codebook": _codebook,
    "diagonal": _diagonal,
    "factor": _factor,
    "layer": _layer,
    "tensor": _nothing,  # a mask may hold infinities
    "attachment": _nothing,
}
