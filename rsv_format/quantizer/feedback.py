"""Error feedback: what quantization does to a weight is put right by the weights that come after it.

With H the second moment of a layer's transformed input, a row's error e costs e H e'. Blocks of columns are quantized
in order, and what each loses is spread over the columns to come so that the whole costs least:

    inv(H) = U' U,   E = (W - Q)[:, block] inv(U[block, block]),   W[:, later] -= E U[block, later].

U is the inverse of the upper triangular V with H = V V', so that H itself is never inverted; all of it is done in the
place of H, which is the largest thing in memory here, in float32, which the white noise below makes precise enough.

H comes from few tokens and fits them: it is made to have seen some tokens of white noise as well. And since feedback
heeds what it says of single channels too, the transform's channel scales need heed their importance half as much: if
feedback were perfect, not at all.

Mean divergence of SmolLM2 from itself, its linear layers at 4 bits, a trellis of window 8, on 512 tokens of each of two
texts; moments of prose, and above 3072 tokens half of verse:

    no feedback                                                    0.0871  0.0828
    3072 tokens, white noise as of as many, half of H's diagonal   0.0778  0.0688
    8192 tokens, white noise as of 2048, importance halved         0.0635  0.0682
    4096 tokens, the same                                          0.0652  0.0700
    4096 tokens, what layers see of the layers quantized before    0.0687  0.0712

and its embedding table alone, which is the head too, at 5 bits: 0.0101 and 0.0108 without, 0.0057 and 0.0054 with it.

E. Frantar et al., "GPTQ", arXiv 2210.17323; J. Chee et al., "QuIP", arXiv 2307.13304, whose LDLQ is the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.quantizer import trellis
from rsv_format.quantizer.scalar import nearest
from rsv_format.rotation import Transform

Floats = NDArray[np.floating[Any]]
Spread = tuple[tuple[int, int, NDArray[np.float32]], ...]

_DOUBT = 2048  # tokens of white noise that H is made to have seen as well
_LEAST_DOUBT = 1e-3  # of white noise in H, so that it has a root in float32
_BLOCK = 64  # columns
_PANEL = 8  # blocks that are factored together
_STRIP = 128  # rows or columns that are transformed together
_AHEAD = 16  # columns that a path looks ahead, so that it does not end in a bad state
_ROWS = 256  # of a scalar codebook, at a time


def feedback_importance(importance: Floats) -> Floats:
    """The importance of channels for the transform of layers with feedback: half of it, in logarithms."""
    return np.asarray(np.sqrt(importance))


def spread_errors(
    moment: Floats, tokens: int, transform: Transform | None, *, overwrite: bool = False
) -> Spread | None:
    """How the errors of each block of columns are spread over those that come later.

    Parameters
    ----------
    moment : floating (in_features, in_features)
        The mean of x' x over the tokens, x (in_features,) being the layer's input.
    tokens : int
    transform : Transform or None
        The layer's.
    overwrite : bool
        Work in the moment's own memory, which is then no moment any more, if it is float32.

    Returns
    -------
    For each block: its first column, the one behind its last, and float32 (columns, later columns) to multiply its
    errors with, a part of one matrix (in_features, in_features). None where the moment says nothing, or there is one
    block.
    """
    h: NDArray[np.float32] = np.require(moment, np.float32, ["C", "W"])
    if not overwrite and np.shares_memory(h, moment):
        h = h.copy()
    edges = [*range(0, max(h.shape[0] - _BLOCK // 2, 1), _BLOCK), h.shape[0]]
    panels = _spans([*edges[:-1:_PANEL], edges[-1]])
    if transform is not None:
        for start in range(0, h.shape[0], _STRIP):
            some = slice(start, start + _STRIP)
            h[some] = transform.apply(h[some].astype(np.float64))
        for start in range(0, h.shape[0], _STRIP):
            some = slice(start, start + _STRIP)
            h[:, some] = transform.apply(h[:, some].T.astype(np.float64, order="C")).T
    mean = np.einsum("ii->", h, dtype=np.float64) / h.shape[0]
    if len(edges) == 2 or not all(np.isfinite(h[start:stop]).all() for start, stop in panels) or not mean > 0:
        return None
    h /= np.float32(mean)
    h[np.diag_indices_from(h)] += np.float32(max(_DOUBT / tokens, _LEAST_DOUBT))
    _invert_root(h, panels)
    for start, stop in _spans(edges):
        h[start:stop, stop:] = np.linalg.solve(h[start:stop, start:stop], h[start:stop, stop:])
    return tuple((start, stop, h[start:stop, stop:]) for start, stop in _spans(edges))


def _spans(edges: list[int]) -> list[tuple[int, int]]:
    return [*zip(edges, edges[1:], strict=False)]


def _invert_root(h: NDArray[np.float32], panels: list[tuple[int, int]]) -> None:
    """Make h = V V', with V upper triangular, into inv(V); below the panels on the diagonal it has no meaning then."""
    for start, stop in reversed(panels):
        panel = slice(start, stop)
        root = np.linalg.cholesky(h[panel, panel][::-1, ::-1].astype(np.float64))[::-1, ::-1]
        h[panel, panel] = root
        h[:start, panel] = h[:start, panel] @ np.linalg.inv(root).T.astype(np.float32)
        for top, bottom in panels[: panels.index((start, stop))]:
            h[top:bottom, top:start] -= h[top:bottom, panel] @ h[top:start, panel].T
    for start, stop in panels:
        panel = slice(start, stop)
        inverse = np.linalg.inv(h[panel, panel].astype(np.float64)).astype(np.float32)
        for top, bottom in panels[: panels.index((start, stop))]:  # from above: it is what those below it were
            h[top:bottom, panel] = -(h[top:bottom, top:start] @ h[top:start, panel]) @ inverse
        h[panel, panel] = inverse


def encoder(
    centroids: NDArray[np.float32], bits: int, known: Spread
) -> tuple[Callable[[NDArray[np.float32]], NDArray[np.uint16]], int]:
    """A function from rows (rows, in_features) to the indices of centroids, and how many rows to give it."""
    if centroids.size == 2**bits:
        return partial(_scalar, nearest(centroids), centroids, known), _ROWS
    return partial(_trellis, centroids, bits, known), trellis.kernels().LANES


def _scalar(
    closest: Callable[[NDArray[np.float32]], NDArray[np.uint8]],
    centroids: NDArray[np.float32],
    known: Spread,
    rows: NDArray[np.float32],
) -> NDArray[np.uint16]:
    x, indices = rows.copy(), np.empty(rows.shape, np.uint16)
    for start, stop, matrix in known:
        block = slice(start, stop)
        indices[:, block] = closest(x[:, block])
        x[:, stop:] -= (x[:, block] - centroids[indices[:, block]]) @ matrix
    return indices


def _trellis(table: NDArray[np.float32], bits: int, known: Spread, rows: NDArray[np.float32]) -> NDArray[np.uint16]:
    """A block starts in the state where the one before has ended; the last ends where the first has started."""
    viterbi = trellis.kernels()
    lanes, states, length = viterbi.LANES, table.size >> bits, rows.shape[1]
    x, indices = np.zeros((length, lanes), np.float32), np.empty((length, lanes), np.uint16)
    x[:, : rows.shape[0]] = rows.T
    longest = max(stop - start for start, stop, _ in known) + _AHEAD
    back, unused = np.empty((longest, states, lanes), np.uint8), np.empty((longest, lanes), np.uint16)
    state, tie = np.empty(lanes, np.int64), np.empty(lanes, np.int64)
    for start, stop, matrix in known:
        end = min(stop + _AHEAD, length)
        costs = np.zeros((states, lanes), np.float32)
        if start:
            viterbi.start_at(costs, state)
        viterbi.forward(x[start:end], table, bits, costs, back)
        if stop < length:
            viterbi.nearest(costs, state)
        else:
            state = tie.copy()
        viterbi.trace(back, stop - start, end - start, bits, state, unused)
        before = state.copy()
        viterbi.trace(back, 0, stop - start, bits, before, indices[start:stop])
        if start == 0:
            tie = before
        x[stop:] -= matrix.T @ (x[start:stop] - table[indices[start:stop]])
    return np.ascontiguousarray(indices[:, : rows.shape[0]].T)
