"""What differs between two files: layers, tensors, attachments and metadata."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import sqrt
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.dtypes import FLOAT_DTYPES
from rsv_format.reader import File, Layer, Tensor

_CHUNK = 2**17  # numbers taken to binary64 at a time: 1 MiB stays in the cache

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class Change:
    """One thing that two files have, and not alike.

    `relative_error` is ||A - B|| / ||A|| (Frobenius) of equal shapes of numbers, None of others, and where A is zero
    and B is not. `what` names what is stored otherwise.
    """

    name: str
    what: tuple[str, ...]
    relative_error: float | None


@dataclass(frozen=True)
class Changes:
    """Names of one kind that only one of two files has, or both with another content."""

    added: tuple[str, ...]
    gone: tuple[str, ...]
    changed: tuple[Change, ...]
    equal: int

    def __bool__(self) -> bool:
        return bool(self.added or self.gone or self.changed)


@dataclass(frozen=True)
class Difference:
    """What differs between two files, kind by kind."""

    layers: Changes
    tensors: Changes
    attachments: Changes
    metadata: Changes

    def __bool__(self) -> bool:
        return any((self.layers, self.tensors, self.attachments, self.metadata))


def diff(a: File, b: File, *, progress: Progress | None = None) -> Difference:
    """Compare what two files hold. What has equal digests is taken to be equal: `verify` tells whether they are true.

    Parameters
    ----------
    a, b : File
    progress : callable(done, total, name), optional
        Told the layers done so far and in all, and the layer at work.

    Raises
    ------
    RsvError
        over_limit, haar_witness_mismatch: a layer cannot be dequantized; io_error.
    """
    told = progress or (lambda done, total, name: None)
    positions = {name: i for i, name in enumerate(name for name in a.layers if name in b.layers)}

    def layer(name: str) -> Change | None:
        told(positions[name], len(positions), name)
        return _layer(a.layers[name], b.layers[name])

    return Difference(
        _changes(a.layers, b.layers, layer),
        _changes(a.tensors, b.tensors, lambda name: _tensor(a.tensors[name], b.tensors[name])),
        _changes(
            a.attachments,
            b.attachments,
            lambda name: _other(
                name,
                content=(a.attachments[name].entry.sha256, b.attachments[name].entry.sha256),
                media_type=(a.attachments[name].media_type, b.attachments[name].media_type),
            ),
        ),
        _changes(a.metadata, b.metadata, lambda name: _other(name, value=(a.metadata[name], b.metadata[name]))),
    )


def squares(wanted: NDArray[Any], found: NDArray[Any]) -> tuple[float, float]:
    """||wanted - found||^2 and ||wanted||^2, in binary64, of two arrays with as many numbers."""
    error = norm = 0.0
    first, second = wanted.reshape(-1), found.reshape(-1)
    with np.errstate(over="ignore", invalid="ignore"):  # a tensor's values are free
        for start in range(0, first.size, _CHUNK):
            w = first[start : start + _CHUNK].astype(np.float64)
            difference = w - second[start : start + _CHUNK]
            norm += float(np.vdot(w, w))
            error += float(np.vdot(difference, difference))
    return error, norm


def relative(error: float, norm: float) -> float | None:
    """The root of their quotient; None where a zero matrix did not stay one, or a number is not finite."""
    if not np.isfinite(error) or not np.isfinite(norm):
        return None
    return sqrt(error / norm) if norm else None if error else 0.0


def _changes(a: Mapping[str, Any], b: Mapping[str, Any], compare: Callable[[str], Change | None]) -> Changes:
    both = [name for name in a if name in b]
    changed = tuple(change for name in both if (change := compare(name)) is not None)
    return Changes(
        tuple(name for name in b if name not in a),
        tuple(name for name in a if name not in b),
        changed,
        len(both) - len(changed),
    )


def _layer(a: Layer, b: Layer) -> Change | None:
    parts: dict[str, tuple[Any, Any]] = {
        "shape": (_shape(a), _shape(b)),
        "bits": (a.bits, b.bits),
        "codebook": (a.file.header.codebooks[a.codebook_id], b.file.header.codebooks[b.codebook_id]),
        "transform": (_transform(a), _transform(b)),
        "bias": (a.bias_dtype, b.bias_dtype),
        "content": (a.entry.sha256, b.entry.sha256),
    }
    what = _different(parts)
    if not what:
        return None
    error = None
    if _shape(a) == _shape(b):
        with np.errstate(over="ignore", invalid="ignore"):  # a scale times a centroid may be beyond float32
            error = relative(*squares(a.dequantize(), b.dequantize()))
    return Change(a.name, what, error)


def _tensor(a: Tensor, b: Tensor) -> Change | None:
    what = _different(
        {
            "dtype": (a.dtype, b.dtype),
            "shape": (a.shape, b.shape),
            "content": (a.entry.sha256, b.entry.sha256),
        }
    )
    if not what:
        return None
    error = None
    if a.shape == b.shape and {a.dtype, b.dtype} <= set(FLOAT_DTYPES):
        error = relative(*squares(a.float32(), b.float32()))
    return Change(a.name, what, error)


def _other(name: str, **parts: tuple[Any, Any]) -> Change | None:
    what = _different(parts)
    return Change(name, what, None) if what else None


def _different(parts: Mapping[str, tuple[Any, Any]]) -> tuple[str, ...]:
    return tuple(name for name, (a, b) in parts.items() if a != b)


def _shape(layer: Layer) -> tuple[int, int, int]:
    return layer.stack, layer.out_features, layer.in_features


def _transform(layer: Layer) -> Any:
    return None if layer.transform_id is None else layer.file.header.transforms[layer.transform_id]
