"""The orthogonal factor of a QR decomposition, in pieces that a progress bar and Ctrl-C can enter.

LAPACK's one call takes minutes for a large matrix, and nothing is heard meanwhile. This is its own blocked algorithm
(R. Schreiber, C. Van Loan, "A storage-efficient WY representation for products of Householder transformations",
SIAM J. Sci. Stat. Comput. 10, 1989): LAPACK factors panels, products of matrices do the rest. Q takes A's place.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

Matrix = NDArray[np.float64]
Progress = Callable[[float], None]

_PANEL = 128  # columns factored at a time: enough for fast products, few enough for LAPACK's slow part
_PIECE = 2**22  # elements updated by one product: half a second on a slow core


def positive_q(a: Matrix, progress: Progress | None = None) -> Matrix:
    """Q of A = Q R with a positive diagonal of R, which makes it unique.

    Parameters
    ----------
    a : float64 (m, m), contiguous
        Overwritten by Q, which is returned.
    progress : callable(fraction), optional
        Told how much of the work is done, after each piece.
    """
    m = a.shape[0]
    told = progress or (lambda fraction: None)
    total = 2 * sum((m - start) * max(0, m - start - _PANEL) for start in range(0, m, _PANEL))
    done = 0
    panels: list[tuple[int, Matrix, Matrix]] = []  # where, the triangle T of I - V T V^T, the signs of R's diagonal
    for start in range(0, m, _PANEL):
        stop = min(start + _PANEL, m)
        packed, tau = np.linalg.qr(a[start:, start:stop], mode="raw")
        a[start:, start:stop] = packed.T
        panels.append((start, _triangle(packed, tau), np.where(np.diagonal(packed) < 0, -1.0, 1.0)))
        v, t = _reflectors(a, start, stop), panels[-1][1]
        for rest in _pieces(stop, m, m - start):
            part = a[start:, rest]
            part -= v @ (t.T @ (v.T @ part))
            done += (m - start) * part.shape[1]
            told(done / total)
    for start, t, signs in reversed(panels):
        stop = start + len(signs)
        v = _reflectors(a, start, stop)
        a[start:stop, stop:] = 0
        for rest in _pieces(stop, m, m - start):
            part = a[start:, rest]
            part -= v @ (t @ (v.T @ part))
            done += (m - start) * part.shape[1]
            told(done / total)
        own = v @ (-t @ v[: stop - start].T)
        own[np.arange(stop - start), np.arange(stop - start)] += 1
        a[start:, start:stop] = own * signs
        a[:start, start:stop] = 0
    return a


def _pieces(start: int, stop: int, rows: int) -> Iterator[slice]:
    """Columns from `start` to `stop`, some at a time."""
    step = max(1, _PIECE // rows)
    for first in range(start, stop, step):
        yield slice(first, min(first + step, stop))


def _reflectors(a: Matrix, start: int, stop: int) -> Matrix:
    """V of a panel: what lies below the diagonal, which is 1."""
    v = np.tril(a[start:, start:stop], -1)
    v[np.arange(stop - start), np.arange(stop - start)] = 1
    return v


def _triangle(packed: Matrix, tau: Matrix) -> Matrix:
    """T, upper triangular, of Q = I - V T V^T (LAPACK's dlarft)."""
    v = np.tril(packed.T, -1)
    v[np.arange(len(tau)), np.arange(len(tau))] = 1
    gram: NDArray[Any] = v.T @ v
    t = np.diag(tau)
    for k in range(1, len(tau)):
        t[:k, k] = -tau[k] * (t[:k, :k] @ gram[:k, k])
    return t
