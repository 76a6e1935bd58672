"""Scalar codebooks: each weight's code is that of the nearest centroid."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rsv_format.codebook import boundaries

_COUNTED_BITS = 4  # up to here, comparing with every boundary is faster than a table
_CELLS = 2**12  # of that table; finer than the closest centroids of any codebook


def nearest(centroids: NDArray[np.float32]) -> Callable[[NDArray[np.float32]], NDArray[np.uint8]]:
    """A function from values (rows, n) to the codes of the nearest centroids, uint8."""
    return _nearest_cached(centroids.astype("<f4").tobytes())


@lru_cache(maxsize=32)
def _nearest_cached(data: bytes) -> Callable[[NDArray[np.float32]], NDArray[np.uint8]]:
    centroids = np.frombuffer(data, "<f4")
    edges = boundaries(centroids)
    bits = centroids.size.bit_length() - 1
    return _counter(edges) if bits <= _COUNTED_BITS else _table(edges)


def _counter(edges: NDArray[np.float32]) -> Callable[[NDArray[np.float32]], NDArray[np.uint8]]:
    """The code is the number of boundaries below the value."""

    def nearest(x: NDArray[np.float32]) -> NDArray[np.uint8]:
        codes = np.zeros(x.shape, np.uint8)
        above = np.empty(x.shape, np.bool_)
        for edge in edges:
            np.greater(x, edge, out=above)
            codes += above.view(np.uint8)
        return codes

    return nearest


def _table(edges: NDArray[np.float32]) -> Callable[[NDArray[np.float32]], NDArray[np.uint8]]:
    """The same from a grid fine enough that a cell holds one boundary at most: a look-up and one comparison."""
    span = np.float32(_CELLS / 2 / (float(np.abs(edges).max()) * 1.01))

    def cell(x: NDArray[np.float32]) -> NDArray[np.intp]:
        return (x * span + np.float32(_CELLS / 2)).astype(np.intp)

    cells = cell(edges)
    assert np.unique(cells).size == edges.size, "two boundaries in one cell"
    below = np.searchsorted(cells, np.arange(_CELLS)).astype(np.uint8)  # boundaries in lower cells
    own = np.full(_CELLS, np.inf, np.float32)
    own[cells] = edges

    def nearest(x: NDArray[np.float32]) -> NDArray[np.uint8]:
        at = cell(x)
        codes = below.take(at, mode="clip")
        codes += x > own.take(at, mode="clip")
        return codes

    return nearest
