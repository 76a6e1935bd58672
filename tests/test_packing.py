"""Packing, against a bit by bit definition and against MLX."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from rsv_format import RsvError, pack, unpack
from rsv_format.layout import row_words
from rsv_format.packing import window_indices

ALL_BITS = range(1, 9)


def bit_by_bit(codes: np.ndarray, bits: int) -> np.ndarray:
    """RSV-510, one bit at a time."""
    rows, n = codes.shape
    words = np.zeros((rows, -(-n // 32) * bits), np.uint32)
    for i in range(rows):
        for j in range(n):
            for k in range(bits):
                if int(codes[i, j]) >> k & 1:
                    p = j * bits + k
                    words[i, p // 32] |= np.uint32(1 << p % 32)
    return words


def codes_of(seed: int, rows: int, n: int, bits: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 2**bits, (rows, n), np.uint8)


@given(st.integers(1, 8), st.integers(0, 3), st.integers(1, 100), st.integers(0, 2**32 - 1))
def test_pack_is_the_definition_and_unpack_its_inverse(bits: int, rows: int, n: int, seed: int) -> None:
    codes = codes_of(seed, rows, n, bits)
    words = pack(codes, bits)
    assert words.dtype == np.uint32 and words.shape == (rows, row_words(n, bits))
    assert np.array_equal(words, bit_by_bit(codes, bits))
    back = unpack(words, bits, n)
    assert back.dtype == np.uint8 and np.array_equal(back, codes)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_any_words_unpack(bits: int) -> None:
    words = np.random.default_rng(bits).integers(0, 2**32, (5, 2 * bits), np.uint32)
    assert np.array_equal(pack(unpack(words, bits, 64), bits), words)  # every bit of a row belongs to a code
    assert np.array_equal(unpack(words, bits, 37), unpack(words, bits, 64)[:, :37])  # padding is not looked at


@pytest.mark.parametrize("bits", ALL_BITS)
def test_codes_that_do_not_lie_in_one_piece(bits: int) -> None:
    codes = codes_of(bits, 6, 90, bits)
    assert np.array_equal(pack(codes[::2, ::3], bits), pack(codes[::2, ::3].copy(), bits))
    assert np.array_equal(pack(np.asfortranarray(codes), bits), pack(codes, bits))
    words = pack(codes, bits)
    assert np.array_equal(unpack(words[::2], bits, 90), codes[::2])


def test_packing_leaves_its_input_alone() -> None:
    codes = codes_of(0, 4, 64, 3)
    before = codes.copy()
    words = pack(codes, 3)
    words_before = words.copy()
    unpack(words, 3, 64)
    assert np.array_equal(codes, before) and np.array_equal(words, words_before)


@pytest.mark.parametrize("bits", [2, 3, 4, 5, 6, 8])
def test_layout_is_that_of_mlx(bits: int) -> None:
    mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
    codes = codes_of(bits, 4, 128, bits)
    words = pack(codes, bits)
    ones = mx.ones((4, 2))
    dense = mx.dequantize(mx.array(words), ones, mx.zeros((4, 2)), group_size=64, bits=bits)
    assert np.array_equal(np.array(dense), codes)


@pytest.mark.parametrize("bits", range(1, 8))
def test_a_code_that_does_not_fit_is_refused(bits: int) -> None:
    codes = np.zeros((2, 3), np.uint8)
    codes[1, 2] = 2**bits
    with pytest.raises(RsvError) as e:
        pack(codes, bits)
    assert e.value.code == "bad_argument" and str(2**bits) in e.value.detail


@pytest.mark.parametrize("bits", [0, 9, -1])
def test_widths(bits: int) -> None:
    for action in (
        lambda: pack(np.zeros((1, 1), np.uint8), bits),
        lambda: unpack(np.zeros((1, max(bits, 0)), np.uint32), bits, 1),
    ):
        with pytest.raises(RsvError) as e:
            action()
        assert (e.value.code, e.value.where) == ("bad_argument", "bits")


@pytest.mark.parametrize(
    "codes", [np.zeros(3, np.uint8), np.zeros((1, 1, 3), np.uint8), np.zeros((1, 3), np.int64), np.zeros((1, 3), bool)]
)
def test_codes_of_another_type_are_refused(codes: Any) -> None:
    with pytest.raises(RsvError) as e:
        pack(codes, 4)
    assert e.value.code == "bad_argument"


@pytest.mark.parametrize(
    "words", [np.zeros((2, 3), np.uint32), np.zeros((2, 4), np.int32), np.zeros(4, np.uint32)], ids=str
)
def test_words_of_another_shape_are_refused(words: Any) -> None:
    with pytest.raises(RsvError) as e:
        unpack(words, 4, 32)
    assert e.value.code == "bad_argument"


@pytest.mark.parametrize("bits", ALL_BITS)
def test_a_window_is_the_bits_from_its_code_on_around_the_row(bits: int) -> None:
    rng = np.random.default_rng(bits)
    for window in range(bits, 17):
        for n in (1, 2, 3, 5, 16, 17, 33):
            codes = rng.integers(0, 2**bits, (3, n), np.uint8)
            stream = [[code >> i & 1 for code in map(int, row) for i in range(bits)] for row in codes]
            want = [
                [sum(row[(j * bits + i) % len(row)] << i for i in range(window)) for j in range(n)] for row in stream
            ]
            got = window_indices(codes, bits, window)
            assert got.tolist() == want
            assert got.dtype == (np.uint8 if window <= 8 else np.uint16)
