"""The indices of packed codes: overlapping windows of their bits (SPEC section 5).

All windows of a row are cut out of its words in a few operations, whatever their number: a small layer costs what it
costs to note them. Where a row ends in padding, its last windows, which go on at its start, are made by themselves.
"""

from __future__ import annotations

from functools import lru_cache

import mlx.core as mx
import numpy as np


def tail_columns(bits: int, window: int, in_features: int) -> int:
    """How many windows at the end of a row `fields` does not find: those that go on at its start beyond padding."""
    return min(in_features, -(-(window - bits) // bits)) if in_features % 32 else 0


def runs(width: int, stride: int) -> int:
    """How many runs the fields of a row come in: of `n` runs the first one has every n-th field from the first on."""
    unit = _unit(width, stride)
    return unit // stride if unit % stride == 0 else 1


def _unit(width: int, stride: int) -> int:
    return 8 if width == stride == 8 else 16


def fields(words: mx.array, width: int, stride: int) -> mx.array:
    """Fields of `width` bits that start every `stride` bits of a row, LSB first, and go on at its start.

    Parameters
    ----------
    words : uint32 (rows, row_words)
    width, stride : int
        At most 16 and width; an even multiple of the stride is a row.

    Returns
    -------
    uint8 or uint16 (rows, fields)
        In `runs`, one after the other.
    """
    unit = _unit(width, stride)
    first, second, right, left = _places(stride, unit, words.shape[1])
    mask = 2**width - 1
    if unit % stride == 0:  # fields a unit apart lie in place
        moved = words
        if stride < unit:
            moved = words[:, None] >> right
            if width > stride:
                moved = moved | mx.take_along_axis(words, second, axis=1)[:, None] * left
        if width < unit:
            moved = moved & sum(mask << lane for lane in range(0, 32, unit))
    else:  # two and two, side by side, are taken apart
        moved = mx.take_along_axis(words, first, axis=1) >> right
        moved = moved | mx.take_along_axis(words, second, axis=1) * left
        moved = (moved & mask) | ((moved << (16 - stride)) & (mask << 16))
    return moved.view(mx.uint8 if unit == 8 else mx.uint16).reshape(words.shape[0], -1)


@lru_cache(256)
def _places(stride: int, unit: int, row_words: int) -> tuple[mx.array, ...]:
    """The two words that each field, or pair of fields, begins and ends in, (1, ...); how far the first one is shifted
    to the right, and the power of two that shifts the second one to the left (2^32, for no bits of it, is 0)."""
    if unit % stride == 0:
        words, shifts = np.arange(row_words), np.arange(0, unit, stride)[:, None]
    else:
        words, shifts = np.divmod(np.arange(0, 32 * row_words, 2 * stride), 32)
    lefts = (1 << (32 - shifts.astype(np.uint64))).astype(np.uint32)
    places = words[None], (words[None] + 1) % row_words, shifts, lefts
    return tuple(mx.array(place.astype(np.uint32)) for place in places)


def tail_indices(words: mx.array, bits: int, window: int, in_features: int) -> mx.array:
    """The last windows of each row, `tail_columns` of them: uint32 (rows, columns)."""
    cycle = in_features * bits
    start = words[:, :1] & (2 ** min(cycle, 32) - 1 if cycle < 32 else 0xFFFFFFFF)
    length = min(cycle, 32)
    while length < window:  # a row shorter than a window repeats itself
        start, length = start | (start << length), 2 * length
    columns = []
    for column in range(in_features - tail_columns(bits, window, in_features), in_features):
        position = column * bits
        word, shift = divmod(position, 32)
        rest = cycle - position  # bits before the row's end
        value = words[:, word : word + 1] >> shift
        if shift + rest > 32:
            value = value | (words[:, word + 1 : word + 2] << (32 - shift))
        if rest < window:
            value = (value & (2**rest - 1)) | (start << rest)
        columns.append(value & (2**window - 1))
    return mx.concatenate(columns, axis=1)
