"""The Python adapter with one planted fault: what the vectors must notice.

    python adapters/faulty.py FAULT decode|verify|dequantize|encode FILE
    python adapters/faulty.py FAULT batch

Each fault is one that readers really have. tests/test_conformance.py runs them all.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import python

np = python.np


def module(name: str) -> Any:
    """A module of the implementation that the adapter imports."""
    return import_module(f"{python.rsv_format.__name__}.{name}")


def msb_first() -> None:
    """Codes are read from the high end of each byte."""
    right = module("reader").unpack_padded

    def wrong(words: Any, bits: int) -> Any:
        stream = np.unpackbits(np.ascontiguousarray(words).view("u1"), axis=1, bitorder="big")
        groups = stream.reshape(words.shape[0], -1, bits)
        codes = (groups << np.arange(bits)[::-1]).sum(axis=2).astype("u1")
        return codes.reshape(right(words, bits).shape)

    module("reader").unpack_padded = wrong


def kronecker_swapped() -> None:
    """H (x) F instead of F (x) H."""
    transform = python.rsv_format.Transform
    rotate = transform._rotate

    def wrong(self: Any, x: Any, *, transpose: bool) -> Any:
        m, n = self.m, self.hadamard
        turned = x.reshape(-1, n, m).swapaxes(1, 2).reshape(x.shape)
        return rotate(self, turned, transpose=transpose).reshape(-1, m, n).swapaxes(1, 2).reshape(x.shape)

    transform._rotate = wrong


def sign_inverted() -> None:
    """A sign bit of 1 is taken for +1."""
    transform = python.rsv_format.Transform
    right = transform.d.func

    def wrong(self: Any) -> Any:
        d = right(self)
        return -d if self.signs is not None else d

    transform.d = property(wrong)


def last_duplicate_wins() -> None:
    """Duplicate names are not noticed."""

    def wrong(self: Any, tree: Any) -> Any:
        self.members = np.inf
        return tree

    module("header")._Parser.object = wrong


def fractions_accepted() -> None:
    """1.0 and 1e0 are taken for 1."""
    parser = module("header")._Parser
    right = parser.number

    def wrong(self: Any, token: str) -> int:
        whole = any(c in token for c in ".eE") and float(token).is_integer()
        return int(float(token)) if whole else right(self, token)

    parser.number = wrong


def padding_unchecked() -> None:
    """The gaps are not looked at."""
    module("verify")._gap = lambda file, start, stop: iter(())


def align_off_by_one() -> None:
    """What lies on a cell already is moved to the next."""
    module("layout").align = lambda offset, to: (offset // to + 1) * to


def digest_ignored() -> None:
    """Digests of blobs are not compared."""
    module("verify")._sha256 = lambda file, blob, progress: blob.sha256


def haar_without_signs() -> None:
    """The factor is Q of the library's QR, whatever the signs of U."""
    rotation = module("rotation")

    def wrong(m: int, seed: int, progress: Any = None) -> Any:
        return np.linalg.qr(rotation.gaussian(m * m, seed).reshape(m, m))[0].astype("f4")

    rotation.haar = wrong


def bf16_as_f16() -> None:
    """A bias of bf16 is read as f16."""
    right = module("reader").to_float32

    def wrong(array: Any, dtype: str) -> Any:
        return array.view("<f2").astype("<f4") if dtype == "bf16" else right(array, dtype)

    module("reader").to_float32 = wrong


def inverse_not_transposed() -> None:
    """R is used as its own inverse, which is right for Hadamard and Hartley only."""
    transform = python.rsv_format.Transform
    rotate = transform._rotate
    transform._rotate = lambda self, x, *, transpose: rotate(self, x, transpose=False)


def schema_first() -> None:
    """Structure is checked before features: a file of the future is called broken."""
    module("header")._check_features = lambda tree: None


def windows(wrong: Callable[[Any, int, int], Any]) -> Callable[[], None]:
    """A fault in the indices of codes (rows, n), bits and window given."""

    def plant() -> None:
        right = module("reader").window_indices
        module("reader").window_indices = lambda codes, bits, window: (
            codes if window == bits else wrong(codes, bits, window).astype(right(codes, bits, window).dtype)
        )

    return plant


def windows_of(stream: Any, starts: Any, window: int) -> Any:
    """Windows of a stream of bits (rows, many)."""
    return sum(stream[:, starts + i].astype("u4") << i for i in range(window))


def bits_of(codes: Any, bits: int) -> Any:
    """The bits of rows of codes, each code's lowest first."""
    return (codes[..., None] >> np.arange(bits, dtype="u1") & 1).reshape(len(codes), -1)


def not_cyclic(codes: Any, bits: int, window: int) -> Any:
    """Behind a row's last code there are zeros."""
    return windows_of(np.pad(bits_of(codes, bits), ((0, 0), (0, 16))), np.arange(codes.shape[1]) * bits, window)


def over_padding(codes: Any, bits: int, window: int) -> Any:
    """The padding codes are part of the cycle."""
    n = codes.shape[1]
    stream = bits_of(np.pad(codes, ((0, 0), (0, -n % 32))), bits)
    return windows_of(np.tile(stream, 2), np.arange(n) * bits, window)


def once_around(codes: Any, bits: int, window: int) -> Any:
    """A row shorter than the window is gone around once, then come zeros."""
    stream = np.pad(np.tile(bits_of(codes, bits), 2), ((0, 0), (0, 16)))
    return windows_of(stream, np.arange(codes.shape[1]) * bits, window)


def own_code_highest(codes: Any, bits: int, window: int) -> Any:
    """A code's bits are the highest of its index, those of the codes behind it follow downwards."""
    index, n = np.zeros(codes.shape, "u8"), codes.shape[1]
    reach = -(-window // bits)
    for k in range(reach):
        index |= np.roll(np.tile(codes, (1, 1 + reach // n)), -k, axis=1)[:, :n].astype("u8") << (reach - 1 - k) * bits
    return index >> (reach * bits - window)


def ends_at_its_code(codes: Any, bits: int, window: int) -> Any:
    """A window is the bits up to the end of its code, not from its start."""
    stream = np.tile(bits_of(codes, bits), 18)
    return windows_of(stream, (np.arange(codes.shape[1]) + 1) * bits - window + 17 * codes.shape[1] * bits, window)


def windows_in_order() -> None:
    """Centroids must rise whatever the window."""
    right = module("verify").codebook_faults
    module("verify").codebook_faults = lambda centroids, bits, where: right(centroids, 16, where)


def windows_uniform() -> None:
    """Evenly spaced centroids are uniform whatever the window."""
    right = python._codebook
    python._codebook = lambda centroids, bits: right(centroids, len(centroids).bit_length() - 1)


def rows_as_they_are() -> None:
    """Rows near the end of float32 are transformed as they are: sums on the way overflow."""
    module("rotation")._scaled = lambda rotate, x: rotate(x)


def padding_in_the_product() -> None:
    """A padding code that is not zero changes the codes of its row."""
    reader = module("reader")
    right = reader.Layer._unpacked

    def wrong(self: Any, rows: slice) -> Any:
        spare = reader.unpack_padded(self.codes[rows], self.bits)[:, self.in_features :]
        return right(self, rows) ^ spare.any(axis=1, keepdims=True).astype("u1")

    reader.Layer._unpacked = wrong


def products_with_w() -> None:
    """y is made of W in float32, which may be infinite where x is zero."""

    def wrong(self: Any, x: Any) -> Any:
        return (x @ self.dequantize().reshape(-1, self.in_features).T).reshape(*x.shape[:-1], -1)

    module("reader").Layer.matmul = wrong


# fault -> (what plants it, cases that must notice)
FAULTS: dict[str, tuple[Callable[[], None], str]] = {
    "msb-first": (msb_first, "valid/codes-all-*"),
    "kronecker-swapped": (kronecker_swapped, "valid/*hartley*n576"),
    "sign-inverted": (sign_inverted, "valid/layer-*-signs-none-*"),
    "last-duplicate-wins": (last_duplicate_wins, "invalid/duplicate-*"),
    "fractions-accepted": (fractions_accepted, "invalid/number-*"),
    "padding-unchecked": (padding_unchecked, "invalid/gap-*"),
    "align-off-by-one": (align_off_by_one, "valid/header-mod-64-*"),
    "digest-ignored": (digest_ignored, "invalid/digest-*"),
    "haar-without-signs": (haar_without_signs, "valid/haar-*"),
    "bf16-as-f16": (bf16_as_f16, "valid/bias-bf16-*"),
    "inverse-not-transposed": (inverse_not_transposed, "valid/matrix-*"),
    "schema-first": (schema_first, "order/*schema-violation*"),
    "windows-not-cyclic": (windows(not_cyclic), "valid/window-b4-*"),
    "windows-over-padding": (windows(over_padding), "valid/window-b3-*"),
    "windows-once-around": (windows(once_around), "valid/window-b1-*"),
    "windows-own-code-highest": (windows(own_code_highest), "valid/window-b2-*"),
    "windows-end-at-their-code": (windows(ends_at_its_code), "valid/window-b5-*"),
    "windows-in-order": (windows_in_order, "valid/window-*"),
    "rows-as-they-are": (rows_as_they_are, "valid/range-*"),
    "products-with-w": (products_with_w, "valid/range-w-*"),
    "padding-in-the-product": (padding_in_the_product, "invalid/*padding-code-*"),
    "windows-uniform": (windows_uniform, "valid/window-not-*"),
}

if __name__ == "__main__":
    FAULTS[sys.argv[1]][0]()
    sys.exit(python.main(sys.argv[2:]))
