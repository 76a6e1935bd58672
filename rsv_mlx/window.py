"""The indices of packed codes: overlapping windows of their bits (SPEC section 5).

A window is cut out of words that are shifted as a whole, all windows at one bit position of a word together. The
last windows of a row go on at its start: there are few, and they are made by themselves.
"""

from __future__ import annotations

import math

import mlx.core as mx


def tail_columns(bits: int, window: int, in_features: int) -> int:
    """How many windows at the end of a row go on at its start."""
    return min(in_features, -(-(window - bits) // bits))


def _unit(width: int) -> int:
    return 8 if width <= 8 else 16


def fields_together(width: int, stride: int) -> int:
    """How many fields lie between two that begin at the same bit of a unit: the entries that `fields` returns."""
    return _unit(width) // math.gcd(stride, _unit(width))


def fields(words: mx.array, width: int, stride: int) -> list[mx.array]:
    """Fields of `width` bits that start every `stride` bits of a row, LSB first.

    Parameters
    ----------
    words : uint32 (rows, row_words)
    width, stride : int
        At most 16 and width; a multiple of 32 strides is a row.

    Returns
    -------
    list of uint8 or uint16 (rows, groups)
        The first fields of groups of as many as there are entries, then the second ones, and so on. Those that
        reach beyond the row have other bits there.
    """
    unit = _unit(width)
    count = fields_together(width, stride)
    step = count * stride // unit
    flat = words.reshape(-1)
    following = mx.concatenate([flat[1:], flat[:1]]) if count > 1 or width > unit else flat
    mask = sum((2**width - 1) << lane for lane in range(0, 32, unit))
    shifted: dict[int, mx.array] = {}
    found = []
    for k in range(count):
        first, shift = divmod(k * stride, unit)
        if shift not in shifted:
            moved = flat if shift == 0 else (flat >> shift) | (following << (32 - shift))
            moved = moved if width == unit else moved & mask
            shifted[shift] = moved.view(mx.uint8 if unit == 8 else mx.uint16).reshape(words.shape[0], -1)
        found.append(shifted[shift][:, first::step])
    return found


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
