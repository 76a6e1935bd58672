"""Codes: 32 of b bits are b little-endian uint32 words, LSB first, back to back (SPEC section 5).

Eight codes are exactly b bytes, so both directions work on groups of eight codes held in one uint64.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.layout import row_words
from rsv_format.limits import MAX_BITS


def pack(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """Pack codes.

    Parameters
    ----------
    codes : uint8 (rows, in_features)
        Each below 2**bits.
    bits : int
        1 to 8.

    Returns
    -------
    uint32 (rows, ceil(in_features / 32) * bits)
        Each row padded to a multiple of 32 codes with zeros.

    Raises
    ------
    RsvError
        bad_argument: a code needs more bits, or `codes` is not such an array. SPEC section 5.
    """
    _check_bits(bits)
    if codes.ndim != 2 or codes.dtype != np.uint8:
        raise RsvError("bad_argument", "codes", f"want uint8 (rows, in_features), not {codes.dtype} {codes.shape}")
    if bits < 8 and codes.size and int(codes.max()) >> bits:
        raise RsvError("bad_argument", "codes", f"{int(codes.max())} does not fit {bits} bits")
    return pack_unchecked(codes, bits)


def pack_unchecked(codes: NDArray[np.uint8], bits: int) -> NDArray[np.uint32]:
    """As `pack`, for codes known to fit."""
    rows, in_features = codes.shape
    words = row_words(in_features, bits)
    padded = -(-in_features // 32) * 32
    if padded != in_features:
        wide = np.zeros((rows, padded), np.uint8)
        wide[:, :in_features] = codes
        codes = wide
    if bits == 8:
        return np.ascontiguousarray(codes).view("<u4").reshape(rows, words)
    # Halve the number of fields thrice: 8 codes in a uint64 of 8-bit fields become 8 * bits low bits.
    groups = np.ascontiguousarray(codes).view("<u8")
    for width, mask in ((8, 0x00FF00FF00FF00FF), (16, 0x0000FFFF0000FFFF), (32, 0x00000000FFFFFFFF)):
        field = bits * width // 8
        odd = groups >> np.uint64(width)
        odd &= np.uint64(mask)
        odd <<= np.uint64(field)
        groups = groups & np.uint64(mask)
        groups |= odd
    octets = groups.view(np.uint8).reshape(-1, 8)[:, :bits]
    return np.ascontiguousarray(octets).reshape(-1).view("<u4").reshape(rows, words)


def unpack(words: NDArray[np.uint32], bits: int, in_features: int) -> NDArray[np.uint8]:
    """Unpack codes: uint32 (rows, row_words) to uint8 (rows, in_features), padding dropped. SPEC section 5.

    Raises
    ------
    RsvError
        bad_argument: the shape does not fit `bits` and `in_features`.
    """
    _check_bits(bits)
    if words.ndim != 2 or words.dtype != np.uint32 or words.shape[1] != row_words(in_features, bits):
        raise RsvError(
            "bad_argument", "words", f"want uint32 (rows, {row_words(in_features, bits)}), not {words.shape}"
        )
    return unpack_padded(words, bits)[:, :in_features]


def unpack_padded(words: NDArray[np.uint32], bits: int) -> NDArray[np.uint8]:
    """All codes of the rows, those of the padding too."""
    shape = words.shape[0], words.shape[1] // bits * 32
    octets = np.ascontiguousarray(words).view(np.uint8)
    if bits == 8:
        return octets.reshape(shape)
    groups = np.zeros((octets.size // bits, 8), np.uint8)
    groups[:, :bits] = octets.reshape(-1, bits)
    fields = groups.view("<u8").reshape(-1)
    for width in (32, 16, 8):
        field = bits * width // 8
        low = np.uint64(sum(((1 << field) - 1) << shift for shift in range(0, 64, 2 * width)))
        odd = fields >> np.uint64(field)
        odd &= low
        odd <<= np.uint64(width)
        fields = fields & low
        fields |= odd
    return fields.view(np.uint8).reshape(shape)


def window_indices(codes: NDArray[np.uint8], bits: int, window: int) -> NDArray[np.uint8 | np.uint16]:
    """The indices of rows of codes: `window` bits from the start of each code on, over the row's end to its start.

    Parameters
    ----------
    codes : uint8 (rows, in_features)
    bits : int
        Of a code.
    window : int
        Of an index, `bits` to 16.

    Returns
    -------
    (rows, in_features), uint8 for a window of at most 8, else uint16. SPEC section 5.
    """
    if window == bits:
        return codes
    in_features, reach = codes.shape[1], -(-window // bits)  # codes that a window touches
    following = np.take(codes, np.arange(reach - 1) % in_features, axis=1)
    indices: NDArray[Any] = np.concatenate([codes, following], axis=1, dtype=np.uint8 if window <= 8 else np.uint16)
    have = 1  # codes in each index so far; the others, doubled, follow
    while have < reach:
        step = min(have, reach - have)
        indices = indices[:, :-step] | (indices[:, step:] << (step * bits))
        have += step
    indices &= 2**window - 1
    return indices


def _check_bits(bits: int) -> None:
    if not 1 <= bits <= MAX_BITS:
        raise RsvError("bad_argument", "bits", f"{bits} is not in 1..{MAX_BITS}")
