"""Trellis codes (SPEC section 6): of all codes of a row those whose windows select the nearest centroids.

Each window of L bits selects a centroid and moves on by one code of b bits, so neighbours have L - b bits in common,
and a row's codes are a path through a trellis, whose end meets its start. The best path is found by the Viterbi
algorithm, in time proportional to 2^L.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from types import ModuleType

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.packing import window_indices
from rsv_format.threads import run_threads

_DEPTH, _MEMORIES = 32, 6  # steps, and times the trellis' memory: by then all best paths have come together
_ROOM = 2**24  # bytes of the way back that a thread keeps, if that is enough
_EXHAUSTIVE = 16  # bits of a row up to which all that it can say is tried
_ALL_STARTS = 2**13  # steps that a short row may take when every start is tried
_TRIED, _SHORT = 64, 4  # starts of rows of fewer than so many windows, which are short of codes that go round
_ROUNDS = 3  # in which those are found
_WORDS = 64  # rows that are held against all words at a time


def encoder(table: NDArray[np.float32], bits: int) -> tuple[Callable[[NDArray[np.float32]], NDArray[np.uint16]], int]:
    """A function from rows (rows, in_features) to indices, as `encode` in one thread, and how many rows to give it."""
    return partial(encode, table=table, bits=bits, threads=1), kernels().LANES


def encode(
    rows: NDArray[np.float32], table: NDArray[np.float32], bits: int, *, threads: int | None = None
) -> NDArray[np.uint16]:
    """The indices of centroids close to the rows, each the window that begins with its weight's code.

    Parameters
    ----------
    rows : float32 (rows, in_features)
        Finite, of the table's scale: normalised, where it is made for N(0, 1).
    table : float32 (2**window,)
        The centroids; window is bits to 16.
    bits : int
        1 to 8.
    threads : int, optional
        One per core if not given.

    Returns
    -------
    uint16 (rows, in_features); their lowest bits are the codes. The best there are for short rows, hardly worse than
    those for others.

    Raises
    ------
    RsvError
        missing_dependency: numba is not there.
    """
    count, in_features = rows.shape
    window = table.size.bit_length() - 1
    if in_features * bits <= max(window, _EXHAUSTIVE):
        return _exhaustive(rows, table, bits)
    viterbi = kernels()
    lanes, states = viterbi.LANES, table.size >> bits
    depth = max(_MEMORIES * -(-(window - bits) // bits), _DEPTH)
    tried = _TRIED if in_features * bits <= _SHORT * window else 0
    if in_features <= 2 * depth and in_features * states <= _ALL_STARTS:
        tried = states
    span = max(min(in_features, _ROOM // (states * lanes)), 3 * depth)
    indices = np.empty((count, in_features), np.uint16)
    table = np.ascontiguousarray(table)

    def work(start: int) -> None:
        part = rows[start : start + lanes]
        x = np.zeros((in_features, lanes), np.float32)
        x[:, : part.shape[0]] = part.T
        own = np.empty(x.shape, np.uint16)
        if tried:
            back = np.empty((in_features, states, lanes), np.uint8)
            viterbi.encode_short(x, table, bits, _starts(x, table, bits, min(tried, states), back), back, own)
        else:
            viterbi.encode(x, table, bits, depth, np.empty((span, states, lanes), np.uint8), own)
        indices[start : start + lanes] = own.T[: part.shape[0]]

    run_threads(work, range(0, count, lanes), threads)
    return indices


def _starts(
    x: NDArray[np.float32], table: NDArray[np.float32], bits: int, count: int, back: NDArray[np.uint8]
) -> NDArray[np.int64]:
    """The states (count, lanes) in which rows x (in_features, lanes) end best that go round and round."""
    costs = np.zeros((back.shape[1], back.shape[2]), np.float32)
    if count < costs.shape[0]:
        for _ in range(_ROUNDS):
            kernels().forward(x, table, bits, costs, back)
    best = np.argpartition(costs, count - 1, axis=0)[:count]
    return np.ascontiguousarray(best.astype(np.int64))


def kernels() -> ModuleType:
    """The compiled part, loaded when it is needed: numba takes a second.

    Raises
    ------
    RsvError
        missing_dependency.
    """
    try:
        from rsv_format.quantizer import viterbi
    except ImportError as e:
        raise RsvError.of_import(e, "trellis", "pip install 'rsv-format[quantize]'") from e
    return viterbi


def _exhaustive(rows: NDArray[np.float32], table: NDArray[np.float32], bits: int) -> NDArray[np.uint16]:
    """Rows of few bits: held against all that codes can say."""
    in_features = rows.shape[1]
    window = table.size.bit_length() - 1
    words = np.arange(2 ** (in_features * bits))[:, None] >> np.arange(0, in_features * bits, bits)
    codes = (words & (2**bits - 1)).astype(np.uint8)
    indices = window_indices(codes, bits, window).astype(np.uint16)
    said = table[indices]
    squares = np.einsum("ij,ij->i", said, said) / 2
    best = np.empty(rows.shape[0], np.intp)
    for start in range(0, rows.shape[0], _WORDS):
        chunk = slice(start, start + _WORDS)
        np.argmin(squares - rows[chunk] @ said.T, axis=1, out=best[chunk])
    return np.asarray(indices[best])
