"""The Viterbi algorithm over the trellis of windows, compiled by numba; `trellis` is what callers use.

A *state* is the L - b bits that two neighbouring windows have in common. From state k the code c (b bits at the
low end) leads by way of a window: windows that lead to state k are `k << b | c`, adjacent in the table, and come
from the states `(k << b | c) mod 2^(L - b)`. LANES rows are encoded side by side, so that the processor's vectors
hold one state of several rows.

A. Viterbi, "Error bounds for convolutional codes and an asymptotically optimum decoding algorithm", IEEE Trans.
Inf. Theory 13 (1967); M. Marcellin, T. Fischer, "Trellis coded quantization of memoryless and Gauss-Markov
sources", IEEE Trans. Commun. 38 (1990).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np
from numba import njit
from numpy.typing import NDArray

F = TypeVar("F", bound=Callable[..., Any])

LANES = 64  # rows at a time; half as many are vectorised worse
_FAR = np.float32(1e30)  # the cost of a state that may not be
_EASE = 64  # steps after which costs are counted from the least again, so that they stay small


def _compiled(function: F) -> F:
    """Machine code, kept on disk where there is a place for it."""
    options: dict[str, Any] = {"nogil": True, "fastmath": {"contract", "nnan", "nsz"}}
    try:
        return njit(cache=True, **options)(function)  # type: ignore[no-any-return]
    except RuntimeError:  # no folder for it
        return njit(**options)(function)  # type: ignore[no-any-return]


@_compiled
def forward(
    x: NDArray[np.float32],
    table: NDArray[np.float32],
    bits: int,
    costs: NDArray[np.float32],
    back: NDArray[np.uint8],
) -> None:
    """All steps of some rows: the least costs of ending in each state.

    Parameters
    ----------
    x : float32 (steps, LANES)
    table : float32 (2**window,)
    bits : int
    costs : float32 (states, LANES)
        Those of starting in each state; then, up to a constant of the lane, those of ending in each.
    back : uint8 (at least steps, states, LANES)
        Receives the code by which each state is reached best.
    """
    states = table.size >> bits
    old, new = costs, np.empty_like(costs)
    best, chosen, target = np.empty(LANES, np.float32), np.empty(LANES, np.int32), np.empty(LANES, np.float32)
    for step in range(x.shape[0]):
        for lane in range(LANES):
            target[lane] = x[step, lane]
        for state in range(states):
            first = state << bits
            for lane in range(LANES):
                error = target[lane] - table[first]
                best[lane] = error * error + old[first & (states - 1), lane]
                chosen[lane] = 0
            for code in range(1, 1 << bits):
                centroid, origin = table[first | code], (first | code) & (states - 1)
                for lane in range(LANES):
                    error = target[lane] - centroid
                    cost = error * error + old[origin, lane]
                    chosen[lane] = np.int32(code) if cost < best[lane] else chosen[lane]
                    best[lane] = cost if cost < best[lane] else best[lane]
            for lane in range(LANES):
                new[state, lane] = best[lane]
                back[step, state, lane] = chosen[lane]
        if step % _EASE == _EASE - 1:
            for lane in range(LANES):
                best[lane] = new[0, lane]
            for state in range(1, states):
                for lane in range(LANES):
                    best[lane] = min(best[lane], new[state, lane])
            for state in range(states):
                for lane in range(LANES):
                    new[state, lane] -= best[lane]
        old, new = new, old
    if x.shape[0] % 2:
        for state in range(states):
            for lane in range(LANES):  # numba compiles an assignment of arrays far longer
                costs[state, lane] = old[state, lane]


@_compiled
def start_at(costs: NDArray[np.float32], states: NDArray[np.int64]) -> None:
    """Costs (states, LANES) of a start in one given state (LANES,) of each lane."""
    for state in range(costs.shape[0]):
        for lane in range(LANES):
            costs[state, lane] = _FAR
    for lane in range(LANES):
        costs[states[lane], lane] = 0


@_compiled
def nearest(costs: NDArray[np.float32], states: NDArray[np.int64]) -> None:
    """Set the state (LANES,) of least cost of each lane."""
    for lane in range(LANES):
        best = 0
        for state in range(costs.shape[0]):
            if costs[state, lane] < costs[best, lane]:
                best = state
        states[lane] = best


@_compiled
def trace(
    back: NDArray[np.uint8], first: int, last: int, bits: int, states: NDArray[np.int64], indices: NDArray[np.uint16]
) -> None:
    """Follow `back` from the states (LANES,) after step `last` - 1 to those before step `first`, which replace them.

    The windows of these steps are written to indices (at least last - first, LANES).
    """
    mask = back.shape[1] - 1
    for step in range(last - 1, first - 1, -1):
        for lane in range(LANES):
            index = (states[lane] << bits) | back[step, states[lane], lane]
            indices[step - first, lane] = index
            states[lane] = index & mask


@_compiled
def encode(
    x: NDArray[np.float32],
    table: NDArray[np.float32],
    bits: int,
    depth: int,
    back: NDArray[np.uint8],
    indices: NDArray[np.uint16],
) -> None:
    """Whole rows, whose end meets their start.

    Which state the two share is taken from a best path through the codes around it. Then the row is encoded with it
    at both ends, so many steps at a time as `back` holds, of which the last `depth` only look ahead: by then all
    best paths have come together.

    Parameters
    ----------
    x : float32 (steps, LANES)
        Steps * bits is at least the window.
    table, bits
        As `forward`.
    depth : int
        At least the steps that lead from any state to any other.
    back : uint8 (more than 2 * depth, states, LANES)
        Room to work.
    indices : uint16 (steps, LANES)
        The result: the windows, whose low bits are the codes.
    """
    length, span = x.shape[0], back.shape[0]
    costs = np.zeros((table.size >> bits, LANES), np.float32)
    state, unused = np.empty(LANES, np.int64), np.empty((span, LANES), np.uint16)
    around = np.empty((2 * depth, LANES), np.float32)
    for step in range(2 * depth):
        for lane in range(LANES):
            around[step, lane] = x[(step - depth) % length, lane]
    forward(around, table, bits, costs, back)
    nearest(costs, state)
    trace(back, depth, 2 * depth, bits, state, unused)
    tie = state.copy()
    done = 0
    while length - done > span:
        start_at(costs, state)
        forward(x[done : done + span], table, bits, costs, back)
        nearest(costs, state)
        trace(back, span - depth, span, bits, state, unused)
        after = state.copy()
        trace(back, 0, span - depth, bits, state, indices[done:])
        state = after
        done += span - depth
    start_at(costs, state)
    forward(x[done:], table, bits, costs, back)
    trace(back, 0, length - done, bits, tie, indices[done:])


@_compiled
def encode_short(
    x: NDArray[np.float32],
    table: NDArray[np.float32],
    bits: int,
    starts: NDArray[np.int64],
    back: NDArray[np.uint8],
    indices: NDArray[np.uint16],
) -> None:
    """As `encode`, the best of some starts (tries, LANES): for few steps, of which `back` has as many."""
    length, states = x.shape[0], table.size >> bits
    costs, start, own = np.empty((states, LANES), np.float32), np.empty(LANES, np.int64), np.empty_like(indices)
    least = np.full(LANES, _FAR, np.float32)
    for i in range(starts.shape[0]):
        start[:] = starts[i]
        start_at(costs, start)
        forward(x, table, bits, costs, back)
        start[:] = starts[i]
        trace(back, 0, length, bits, start, own)
        for lane in range(LANES):
            if costs[starts[i, lane], lane] < least[lane]:
                least[lane] = costs[starts[i, lane], lane]
                for step in range(length):
                    indices[step, lane] = own[step, lane]
