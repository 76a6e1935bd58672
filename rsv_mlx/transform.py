"""The transform of activations, x @ T.T with T = (F (x) H_n) diag(d), and its inverse (SPEC section 7).

All of it is float32, as it comes: sums on the way may overflow for rows above 2^80, far beyond any model's
(RSV-724).
"""

from __future__ import annotations

import math
from hashlib import blake2b

import mlx.core as mx
import numpy as np

import rsv_format

_DENSE_HARTLEY = 256  # above this order an FFT is faster than a dense product
_METAL_HADAMARD = 8192  # the largest float32 order of MLX's Metal kernel


class Transform:
    """A transform in MLX's memory.

    Parameters
    ----------
    source : rsv_format.Transform
    factors : dict, optional
        Factors made so far, added to: transforms with equal ones then share them, and a Haar factor is
        derived once.

    Attributes
    ----------
    digest : bytes
        The same for equal transforms, however they are stored.

    Raises
    ------
    RsvError
        haar_witness_mismatch.
    """

    def __init__(self, source: rsv_format.Transform, factors: dict[object, mx.array] | None = None) -> None:
        self.dim, self.hadamard, self.m = source.dim, source.hadamard, source.m
        self.kind, self.seed = source.factor, source.seed
        self.signed = source.signs is not None
        self.witness = np.array(source.stored) if self.kind == "haar" else None
        self.diagonal = None if source.d is None else mx.array(source.d)
        self.by_fft = self.kind == "hartley" and self.m > _DENSE_HARTLEY
        self.factor: mx.array | None = None
        if self.kind is not None and not self.by_fft:
            key = (self.kind, self.m, source.seed, None if source.stored is None else source.stored.tobytes())
            factors = {} if factors is None else factors
            if key not in factors:
                factors[key] = mx.array(source.factor_matrix())
            self.factor = factors[key]
        digest = blake2b(repr((self.dim, self.hadamard, self.m, self.kind, self.seed)).encode(), digest_size=16)
        for values in (source.d, source.stored if self.kind == "matrix" else None):
            digest.update(b"" if values is None else np.ascontiguousarray(values).data)
        self.digest = digest.digest()

    @property
    def arrays(self) -> list[mx.array]:
        """What is held in memory."""
        return [a for a in (self.diagonal, self.factor) if a is not None]

    def to_format(self, persist_rotation: bool = False) -> rsv_format.Transform:
        """The transform as it is stored: a Haar matrix by its seed, or, with `persist_rotation`, in full."""
        kind, seed, stored = self.kind, self.seed, self.witness
        if kind == "matrix" or (kind == "haar" and persist_rotation):
            kind, seed, stored = "matrix", None, np.asarray(self.factor)
        values = None if self.diagonal is None else np.array(self.diagonal)
        signs = None
        if self.signed and values is not None:
            signs, values = np.packbits(values < 0, bitorder="little"), None
        return rsv_format.Transform(self.dim, self.hadamard, signs, values, kind, seed, stored)

    def __call__(self, x: mx.array) -> mx.array:
        """x @ T.T, float32 (..., dim) to float32 (..., dim)."""
        if self.diagonal is not None:
            x = x * self.diagonal
        return self._rotate(x, self.factor)

    def inverse(self, w: mx.array) -> mx.array:
        """w @ T, float32 (..., dim): rows of W_rot to rows of W."""
        w = self._rotate(w, None if self.factor is None else self.factor.T)
        return w if self.diagonal is None else w * self.diagonal

    def _rotate(self, x: mx.array, factor: mx.array | None) -> mx.array:
        """H_n and the Hartley matrix are symmetric; any other factor comes transposed for the inverse."""
        if x.size == 0:
            return x
        if self.m == 1:
            return _hadamard(x)
        if self.hadamard == 1 and factor is not None:
            return x @ factor.T
        folded = _hadamard(x.reshape(-1, self.m, self.hadamard))
        if self.by_fft:
            spectrum = mx.fft.fft(folded, axis=1)
            folded = (mx.real(spectrum) - mx.imag(spectrum)) * (1 / math.sqrt(self.m))
        elif factor is not None:
            folded = factor @ folded
        return folded.reshape(x.shape)


def _hadamard(x: mx.array) -> mx.array:
    """Sylvester's H_n / sqrt(n) on the last axis. Never for another n: MLX's matrices of 12, 20, 28 differ."""
    n = x.shape[-1]
    if n == 1:
        return x
    if n <= _METAL_HADAMARD:
        return mx.hadamard_transform(x, scale=1 / math.sqrt(n))
    folded = _hadamard(x.reshape(*x.shape[:-1], -1, _METAL_HADAMARD))
    return _hadamard(folded.swapaxes(-1, -2)).swapaxes(-1, -2).reshape(x.shape)
