"""The transform T = (F (x) H_n) diag(d) and its factors (SPEC section 7).

Element j of a vector of dim = m * n lies at (j // n, j % n); F (order m) acts on the first, H_n on the second.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property, lru_cache
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.householder import positive_q
from rsv_format.limits import HAAR_TOLERANCE, MAX_HAAR

Floats = NDArray[np.floating[Any]]

_DENSE_HARTLEY = 256  # above this order an FFT is faster than a dense product
_PLAIN = (2.0**-40, 2.0**40)  # magnitudes whose sums and products are far from an end of float32
_SPLITMIX_GAMMA = 0x9E3779B97F4A7C15
_SPLITMIX_BLOCK = 2**20  # numbers drawn at a time, so that temporaries stay small


@dataclass(frozen=True)
class Transform:
    """A channel-wise diagonal, then a rotation of Kronecker form.

    Parameters
    ----------
    dim : int
        in_features of the layers that use it, m * hadamard.
    hadamard : int
        n, a power of two.
    signs : uint8 (ceil(dim / 8),), optional
        The diagonal as sign bits, LSB first, 1 = -1. At most one of `signs` and `values`.
    values : float32 (dim,), optional
        The diagonal as numbers.
    factor : str, optional
        "hartley", "matrix" or "haar"; None is the identity of order m.
    seed : int, optional
        Of a "haar" factor.
    stored : float32, optional
        What the file holds of the factor: (m, m) of "matrix", the witness (m,) of "haar".
    """

    dim: int
    hadamard: int = 1
    signs: NDArray[np.uint8] | None = field(default=None, repr=False)
    values: NDArray[np.float32] | None = field(default=None, repr=False)
    factor: str | None = None
    seed: int | None = None
    stored: NDArray[np.float32] | None = field(default=None, repr=False)

    @property
    def m(self) -> int:
        """Order of the factor, dim / hadamard."""
        return self.dim // self.hadamard

    @property
    def diagonal(self) -> str | None:
        """ "signs", "values" or None."""
        return "signs" if self.signs is not None else "values" if self.values is not None else None

    @cached_property
    def d(self) -> NDArray[np.float32] | None:
        """The diagonal, float32 (dim,), or None where it is all ones."""
        if self.signs is None:
            return self.values
        bits = np.unpackbits(self.signs, count=self.dim, bitorder="little")
        return (1 - 2 * bits.astype(np.int8)).astype(np.float32)

    def factor_matrix(self, progress: Callable[[float], None] | None = None) -> NDArray[np.float32]:
        """F, float32 (m, m). A "haar" factor is derived from its seed and held against its witness.

        Parameters
        ----------
        progress : callable(fraction), optional
            Told how far that is.

        Raises
        ------
        RsvError
            haar_witness_mismatch. SPEC section 7.
        """
        if self.factor == "haar" and self.seed is not None and "_factor_matrix" not in vars(self):
            haar(self.m, self.seed, progress)  # which is kept
        return self._factor_matrix

    @cached_property
    def _factor_matrix(self) -> NDArray[np.float32]:
        if self.factor is None:
            return np.eye(self.m, dtype=np.float32)
        if self.factor == "hartley":
            return hartley(self.m)
        assert self.stored is not None
        if self.factor == "matrix":
            return self.stored.reshape(self.m, self.m)
        assert self.seed is not None
        matrix = haar(self.m, self.seed)
        with np.errstate(invalid="ignore"):  # a NaN
            difference = float(np.abs(haar_witness(matrix) - self.stored).max())
        if not difference <= HAAR_TOLERANCE:
            raise RsvError(
                "haar_witness_mismatch", f"seed {self.seed}", f"differs by {difference:.1e} from what was written"
            )
        return matrix

    def apply(self, x: Floats) -> Floats:
        """Transform activations: x @ T.T for x (..., dim), in x's own precision."""
        return _scaled(self.rotate, x if self.d is None else x * self.d.astype(x.dtype, copy=False))

    def apply_inverse(self, w: Floats) -> Floats:
        """Take rows back to the original basis: w @ T for w (..., dim); W = apply_inverse(W_rot)."""
        back = _scaled(self.rotate_back, w)
        return back if self.d is None else back * self.d.astype(w.dtype, copy=False)

    def matrix(self) -> NDArray[np.float32]:
        """T itself, dense float32 (dim, dim): for small dims and for tests."""
        return self.apply_inverse(np.eye(self.dim, dtype=np.float32)).astype(np.float32)

    def rotate(self, x: Floats) -> Floats:
        """x @ (F (x) H_n).T, without the diagonal."""
        return self._rotate(x, transpose=False)

    def rotate_back(self, x: Floats) -> Floats:
        """x @ (F (x) H_n), the inverse of `rotate`."""
        return self._rotate(x, transpose=True)

    def _rotate(self, x: Floats, *, transpose: bool) -> Floats:
        if self._outer is None:
            if self.hadamard == 1 and self.factor is None:
                return x
            folded = x.reshape(-1, self.m, self.hadamard)
            folded = _hartley_fft(folded) if self.factor == "hartley" else folded
            return _hadamard(folded).reshape(x.shape)
        outer, inner = self._outer
        outer = (outer.T if transpose else outer).astype(x.dtype, copy=False)
        folded = x.reshape(-1, outer.shape[0], inner.shape[0])
        if inner.shape[0] > 1:
            folded = np.matmul(folded, inner.astype(x.dtype, copy=False))
        if outer.shape[0] > 1:
            thin = inner.shape[0] == 1  # one large product, not one per row
            folded = (folded[..., 0] @ outer.T)[..., None] if thin else np.matmul(outer, folded)
        return folded.reshape(x.shape)

    @cached_property
    def _outer(self) -> tuple[NDArray[np.float32], NDArray[np.float32]] | None:
        """F (x) H_a and H_b with a * b = n, balanced for the fewest operations; None: F is not held dense."""
        if self.m > 1 and (self.factor is None or (self.factor == "hartley" and self.m > _DENSE_HARTLEY)):
            return None
        splits = [2**k for k in range(self.hadamard.bit_length())]
        a = min(splits, key=lambda a: self.m * a + self.hadamard // a)
        outer = np.kron(self.factor_matrix(), hadamard(a)) if a > 1 else self.factor_matrix()
        return outer, hadamard(self.hadamard // a)


def _scaled(rotate: Callable[[Floats], Floats], x: Floats) -> Floats:
    """rotate(x). Rows near an end of their type's range are scaled by a power of two meanwhile: sums on the way, most
    of all within a Fourier transform, would overflow where the result does not (RSV-723)."""
    high = np.maximum(x.max(axis=-1, keepdims=True, initial=0), -x.min(axis=-1, keepdims=True, initial=0))
    high = high.astype(np.float64)  # a narrow type would not hold the bounds
    odd = (high != 0) & ((high < _PLAIN[0]) | (high > _PLAIN[1])) & np.isfinite(high)
    if not odd.any():
        return rotate(x)
    exponents = np.where(odd, np.frexp(high)[1], 0)
    with np.errstate(over="ignore", under="ignore"):
        return np.asarray(np.ldexp(rotate(np.ldexp(x, -exponents)), exponents), x.dtype)


@lru_cache(maxsize=32)
def hadamard(n: int) -> NDArray[np.float32]:
    """Sylvester's H_n / sqrt(n): entry (a, b) is (-1)^popcount(a & b) / sqrt(n), float32 (n, n)."""
    h = np.ones((1, 1), np.float32)
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    return np.asarray(h / np.sqrt(np.float64(n)), np.float32)


@lru_cache(maxsize=8)
def hartley(m: int) -> NDArray[np.float32]:
    """The Hartley matrix, (cos t + sin t) / sqrt(m) with t = 2 pi (j k mod m) / m, float32 (m, m)."""
    j = np.arange(m, dtype=np.int64)
    t = 2 * np.pi * np.arange(m) / m
    row = ((np.cos(t) + np.sin(t)) / np.sqrt(np.float64(m))).astype(np.float32)
    return np.asarray(row[(j[:, None] * j) % m])


def haar(m: int, seed: int, progress: Callable[[float], None] | None = None) -> NDArray[np.float32]:
    """The seeded Haar matrix of order m: Q of a Gaussian matrix's QR with positive diagonal of R.

    F. Mezzadri, "How to generate random matrices from the classical compact groups", Notices AMS 54 (2007).

    Parameters
    ----------
    m, seed : int
    progress : callable(fraction), optional
        Told how much is done: an order of thousands takes minutes.
    """
    if m > MAX_HAAR:
        raise RsvError("bad_argument", "haar", f"order {m} is above {MAX_HAAR}")
    found = _recent.get((m, seed))
    if found is None:
        found = np.asarray(positive_q(gaussian(m * m, seed).reshape(m, m), progress), np.float32)
        while len(_recent) > 1:
            _recent.pop(next(iter(_recent)), None)
        _recent[m, seed] = found
    return found


_recent: dict[tuple[int, int], NDArray[np.float32]] = {}  # the last matrices: layers of one width use one seed


def haar_witness(matrix: NDArray[np.float32]) -> NDArray[np.float32]:
    """F @ u, float32 (m,), for the fixed u of SPEC section 7."""
    m = matrix.shape[0]
    u = ((5 * np.arange(m) + 1) % 8 - 3.5) / np.sqrt(5.25 * m)
    return np.asarray(matrix.astype(np.float64) @ u, np.float32)


def splitmix64(count: int, seed: int, start: int = 0) -> NDArray[np.uint64]:
    """Numbers `start` to `start + count` of the SplitMix64 stream of a seed.

    G. Steele, D. Lea, C. Flood, "Fast splittable pseudorandom number generators", OOPSLA 2014.
    """
    first = (seed + (start + 1) * _SPLITMIX_GAMMA) % 2**64
    z = np.arange(count, dtype=np.uint64) * np.uint64(_SPLITMIX_GAMMA) + np.uint64(first)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def gaussian(count: int, seed: int) -> NDArray[np.float64]:
    """The first `count` numbers of the Box-Muller stream of SPEC section 7."""
    out = np.empty(count + count % 2)
    for start in range(0, out.size, _SPLITMIX_BLOCK):
        z = splitmix64(min(_SPLITMIX_BLOCK, out.size - start), seed, start) >> np.uint64(11)
        u1, u2 = (z[0::2] + np.uint64(1)) * 2.0**-53, z[1::2] * 2.0**-53
        radius = np.sqrt(-2 * np.log(u1))
        out[start : start + z.size : 2] = radius * np.cos(2 * np.pi * u2)
        out[start + 1 : start + z.size : 2] = radius * np.sin(2 * np.pi * u2)
    return out[:count]


def kronecker_split(dim: int) -> int:
    """The n that the quantizer chooses: the largest power of two that divides dim."""
    return dim & -dim


def random_signs(dim: int, seed: int) -> NDArray[np.uint8]:
    """Sign bits for a diagonal, uint8 (ceil(dim / 8),), the padding bits zero."""
    bits = (splitmix64(dim, seed) >> np.uint64(63)).astype(np.uint8)
    return np.packbits(bits, bitorder="little")


def _hartley_fft(x: Floats) -> Floats:
    """The Hartley transform of axis 1 of (rows, m, n): Re - Im of the Fourier transform, over sqrt(m)."""
    m = x.shape[1]
    spectrum = np.fft.rfft(x, axis=1, norm="ortho")
    head = spectrum.real - spectrum.imag
    tail = (spectrum.real + spectrum.imag)[:, 1 : (m + 1) // 2][:, ::-1]
    return np.asarray(np.concatenate([head, tail], axis=1), x.dtype)


def _hadamard(x: Floats) -> Floats:
    """H_n on the last axis, in two balanced dense steps."""
    n = x.shape[-1]
    if n == 1:
        return x
    a = 2 ** ((n.bit_length() - 1) // 2)
    outer, inner = (hadamard(k).astype(x.dtype, copy=False) for k in (a, n // a))
    folded = np.matmul(x.reshape(-1, a, n // a), inner)
    return np.asarray(np.matmul(outer, folded)).reshape(x.shape)
