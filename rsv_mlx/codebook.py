"""Centroids, and products of activations with packed indices (SPEC sections 5, 6 and 8).

Evenly spaced centroids run on mx.quantized_matmul. For others a table holds the centroids of every pattern
of a few indices, so that one look-up unpacks and dequantizes them together; the cost is per look-up.
"""

from __future__ import annotations

from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

_NATIVE_BITS = (2, 3, 4, 5, 6, 8)  # of mx.quantized_matmul
_GROUPS = (128, 64, 32)  # its group sizes; 32 divides every padded row
# bits of an index -> indices looked up together: a few bytes at a time, in tables of at most 2 MiB
_TOGETHER = {1: 8, 2: 8, 3: 4, 4: 4, 5: 2, 6: 2, 7: 2, 8: 2}
_CPU_CHUNK = 2**20  # bytes of float32 weights that live at a time: a CPU's second-level cache
_GPU_CHUNK = 2**26  # on a GPU, enough to fill it


class Codebook:
    """The centroids of a bit width, float32 (2**bits,), shared by the layers that use them."""

    def __init__(self, centroids: NDArray[np.float32]) -> None:
        self.centroids = np.array(centroids, np.float32)
        self.bits = self.centroids.size.bit_length() - 1
        self.step = _step(self.centroids)
        self.native = self.step is not None and self.bits in _NATIVE_BITS
        self._table: mx.array | None = None
        self._constants: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    @staticmethod
    def of(centroids: NDArray[np.float32]) -> Codebook:
        """The one object for these centroids, so that its table is in memory once."""
        key = np.asarray(centroids, np.float32).tobytes()
        codebook = _LIVING.get(key)
        if codebook is None:
            codebook = _LIVING[key] = Codebook(centroids)
        return codebook

    @property
    def arrays(self) -> list[mx.array]:
        """What is held in memory so far."""
        table = [] if self._table is None else [self._table]
        return table + [array for pair in self._constants.values() for array in pair]

    def prepare(self, rows: int, words: int) -> None:
        """Make what products with indices (rows, words) need, so that the first one is as fast as the next."""
        mx.eval(self._scales_and_biases(rows, words) if self.native else self.table)

    def matmul(self, x: mx.array, indices: mx.array) -> mx.array:
        """x @ centroids[indices].T without the dense matrix.

        Parameters
        ----------
        x : float32 (..., in_features)
        indices : uint32 (rows, row_words), packed

        Returns
        -------
        float32 (..., rows)
        """
        rows, words = indices.shape
        padded = words // self.bits * 32
        if x.shape[-1] != padded:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded - x.shape[-1])])
        if self.native:
            scales, biases = self._scales_and_biases(rows, words)
            return mx.quantized_matmul(
                x, indices, scales, biases, transpose=True, group_size=padded // scales.shape[1], bits=self.bits
            )
        chunk = max(1, (_GPU_CHUNK if mx.default_device() == mx.gpu else _CPU_CHUNK) // (4 * padded))
        parts = [x @ self.dequantize(indices[i : i + chunk]).T for i in range(0, rows, chunk)]
        return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=-1)

    def dequantize(self, indices: mx.array) -> mx.array:
        """centroids[indices], float32 (rows, padded in_features)."""
        rows = indices.shape[0]
        looked_up = self.table[_fields(indices, self.bits * _TOGETHER[self.bits])]
        if looked_up.dtype == mx.complex64:
            looked_up = looked_up.view(mx.float32)
        return looked_up.reshape(rows, -1)

    @property
    def table(self) -> mx.array:
        """The centroids of every pattern of so many indices: float32 (patterns, indices), or complex64
        (patterns,) for two: one element is gathered faster than a row of two."""
        if self._table is None:
            together = _TOGETHER[self.bits]
            patterns = np.arange(2 ** (self.bits * together), dtype=np.uint32)
            shifts = np.arange(together, dtype=np.uint32) * np.uint32(self.bits)
            codes = (patterns[:, None] >> shifts) & np.uint32(2**self.bits - 1)
            values = self.centroids[codes]
            self._table = mx.array(values.view(np.complex64).reshape(-1) if together == 2 else values)
        return self._table

    def _scales_and_biases(self, rows: int, words: int) -> tuple[mx.array, mx.array]:
        """The same number everywhere: row scales are applied to the product, so layers of a shape share them."""
        padded = words // self.bits * 32
        groups = padded // next(group for group in _GROUPS if padded % group == 0)
        if (rows, groups) not in self._constants:
            assert self.step is not None
            self._constants[rows, groups] = (
                mx.full((rows, groups), self.step, mx.float32),
                mx.full((rows, groups), float(self.centroids[0]), mx.float32),
            )
        return self._constants[rows, groups]


_LIVING: WeakValueDictionary[bytes, Codebook] = WeakValueDictionary()


def _step(centroids: NDArray[np.float32]) -> float | None:
    """The step of evenly spaced centroids, by equality; None if they are not, or if float32 cannot hold it."""
    wide = centroids.astype(np.float64)
    step = float(wide[1] - wide[0])
    even = float(np.float32(step)) == step and np.array_equal(wide[0] + np.arange(wide.size) * step, wide)
    return step if even else None


def _fields(indices: mx.array, width: int) -> mx.array:
    """The bits of each row as unsigned integers of `width` bits, LSB first: (rows, fields)."""
    if width == 8:
        return indices.view(mx.uint8)
    if width == 16:
        return indices.view(mx.uint16)
    # the least number of bytes that holds whole fields
    count = next(k for k in (1, 2, 4) if k * width % 8 == 0)
    groups = indices.view(mx.uint8).reshape(indices.shape[0], -1, count * width // 8)
    fields = []
    for start in range(0, count * width, width):
        first, shift = divmod(start, 8)
        last = (start + width - 1) // 8
        field = groups[..., first].astype(mx.uint32) >> shift
        for byte in range(first + 1, last + 1):
            field = field | (groups[..., byte].astype(mx.uint32) << (8 * (byte - first) - shift))
        fields.append(field & (2**width - 1))
    return mx.stack(fields, axis=-1).reshape(indices.shape[0], -1)
