"""What the numbers of a file must satisfy: the payload phase, value by value (SPEC section 9).

Pure checks on arrays. `verify` runs them on what a file holds, the writer on what it is given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.limits import HAAR_TOLERANCE, ORTHOGONALITY_TOLERANCE
from rsv_format.rotation import Transform, haar_witness

_CHUNK = 8 * 2**20  # bytes of temporaries
_BLOCK = 2**21  # elements of a factor in binary64 at a time; their product is done in less than a second

Faults = Iterator[RsvError]


def codebook_faults(centroids: NDArray[np.float32], bits: int, where: str) -> Faults:
    """nonfinite_value; codebook_order of one whose indices are its codes."""
    yield from _finite(centroids, where)
    if centroids.size > 2**bits:
        return
    with np.errstate(invalid="ignore"):  # a signalling NaN
        increasing = bool((centroids[1:] > centroids[:-1]).all())
    if not increasing:
        yield RsvError("codebook_order", where, "the centroids do not increase strictly")


def diagonal_faults(transform: Transform, where: str) -> Faults:
    """padding_nonzero of sign bits; nonfinite_value, zero_diagonal of values."""
    if transform.signs is not None and transform.dim % 8 and int(transform.signs[-1]) >> transform.dim % 8:
        yield RsvError("padding_nonzero", where, "bits after the last sign must be zero")
    if transform.values is not None:
        yield from _finite(transform.values, where)
        with np.errstate(invalid="ignore"):  # a signalling NaN
            zero = transform.values == 0
        if zero.any():
            yield RsvError("zero_diagonal", where, f"element {int(np.argmax(zero))} is 0")


def factor_faults(
    transform: Transform,
    where: str,
    progress: Callable[[float], None] = lambda fraction: None,
    *,
    share: float = 1.0,
) -> Faults:
    """nonfinite_value; not_orthogonal of a matrix; haar_witness_mismatch of a derived one. `share` of the tolerances
    is allowed."""
    if transform.stored is None:
        return
    broken = list(_finite(transform.stored, where))
    yield from broken
    if broken:
        return
    if transform.factor == "matrix":
        worst = _off_identity(transform.factor_matrix(), progress)
        if not worst <= share * ORTHOGONALITY_TOLERANCE:
            yield RsvError("not_orthogonal", where, f"F F^T is off the identity by {worst:.1e}")
        return
    try:
        derived = haar_witness(transform.factor_matrix(progress))
    except RsvError as e:
        yield RsvError(e.code, where, e.detail)
        return
    worst = float(np.abs(derived - transform.stored).max())
    if not worst <= share * HAAR_TOLERANCE:
        yield RsvError("haar_witness_mismatch", where, f"it differs by {worst:.1e} from what the seed gives")


def codes_faults(codes: NDArray[np.uint32], bits: int, in_features: int, where: str) -> Faults:
    """padding_nonzero of the codes that fill up a row."""
    if in_features % 32 == 0:
        return
    used = in_features % 32 * bits  # bits of a row's last `bits` words, which hold 32 codes
    padding = np.array([0xFFFFFFFF << min(max(used - 32 * k, 0), 32) & 0xFFFFFFFF for k in range(bits)], np.uint32)
    rows = _CHUNK // (4 * bits)
    for start in range(0, codes.shape[0], rows):
        if (codes[start : start + rows, -bits:] & padding).any():
            yield RsvError("padding_nonzero", where, "codes after the last of a row must be zero")
            return


def floats_faults(values: NDArray[np.float32] | None, where: str, first: int = 0) -> Faults:
    """nonfinite_value of scales or a bias, or a piece of them that begins with the element `first`."""
    if values is not None:
        yield from _finite(values, where, first)


def _finite(values: NDArray[np.float32], where: str, first: int = 0) -> Faults:
    finite = np.isfinite(values).reshape(-1)
    if not finite.all():
        at = int(np.argmin(finite))
        yield RsvError("nonfinite_value", where, f"element {first + at} is {values.reshape(-1)[at]}")


def _off_identity(f: NDArray[np.float32], progress: Callable[[float], None]) -> float:
    """max |F F^T - I|, a block at a time: the product is symmetric."""
    m, worst = f.shape[0], 0.0
    step = max(1, min(m, _BLOCK // m))
    for top in range(0, m, step):
        rows = f[top : top + step].astype(np.float64)
        for left in range(top, m, step):
            gram = rows @ f[left : left + step].astype(np.float64).T  # finite: far from binary64's end
            if left == top:
                gram[np.arange(gram.shape[0]), np.arange(gram.shape[0])] -= 1
            worst = max(worst, float(np.abs(gram).max()))
        progress(1 - (max(0, m - top - step) / m) ** 2)
    return worst
