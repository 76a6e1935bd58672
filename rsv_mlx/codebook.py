"""Centroids, and products of activations with packed codes (SPEC sections 5, 6 and 8).

Evenly spaced centroids run on mx.quantized_matmul. For others there are two ways, both by look-up:

- a table of the centroids of every pattern of bits behind two codes dequantizes them at once; a slice of the weight
  becomes dense, is multiplied and forgotten. Its columns stay as they are found, and those of x are put in their order.
- for few rows of activations and a scalar codebook, a table of the sums of x_j * centroid over every pattern, for each
  group of columns, is made of the activations; then a product is one look-up and one addition per pattern, and no
  weight is made at all.
"""

from __future__ import annotations

import contextlib
import math
from hashlib import blake2b
from typing import Any
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from rsv_mlx import kernels
from rsv_mlx.window import fields, runs, tail_columns, tail_indices

_NATIVE_BITS = (2, 3, 4, 5, 6, 8)  # of mx.quantized_matmul
_GROUP_SIZES = (128, 64, 32)  # its group sizes: 32 divides every padded row
_WEIGHTS_PATTERN = 16  # bits of a pattern of two weights at most: a table of 512 KiB, read at random
_SUMS_TOGETHER = {1: 8, 2: 4, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1}  # bits of a scalar code -> codes in a pattern
_FEW_PAIRS = 64  # of a row and an expert: what a kernel reads for them is not more than their experts dense
_FEW_ROWS = 16  # above, MLX's matrix product makes up for dense weights
_LANES = 32  # partial sums at most that are added up last
_CPU_CHUNK = 2**19  # bytes of float32 that live at a time: a CPU's second-level cache, and memory touched before
_ROWS_CHUNK = 2**20  # the same where each operation is short
_STACK_CHUNK = 2**23  # the same for the rows of a whole stack, or there would be too few of each matrix
_GPU_CHUNK = 2**26  # on a GPU, enough to fill it


class Codebook:
    """The centroids that codes of a bit width select from, shared by the layers that use them.

    Parameters
    ----------
    centroids : float32 (2**window,)
    bits : int
        1 to 8, of a code; an index has `window` bits, those of its code and of the codes behind it.
    """

    def __init__(self, centroids: NDArray[np.float32], bits: int) -> None:
        self.centroids = np.array(centroids, np.float32)
        self.bits = bits
        self.window = self.centroids.size.bit_length() - 1
        self.step = _step(self.centroids) if self.window == bits else None
        self.native = self.step is not None and self.bits in _NATIVE_BITS
        self.digest = blake2b(bytes([bits]) + self.centroids.tobytes(), digest_size=16).digest()
        self._together = 2 if self.window + bits <= _WEIGHTS_PATTERN else 1  # weights that a look-up finds
        self._stride = self._together * bits
        self._pattern = self.window + self._stride - bits
        self._weights: mx.array | None = None
        self._centroids = mx.array(self.centroids)
        self._constants: dict[tuple[int, int], tuple[mx.array, mx.array]] = {}

    @staticmethod
    def of(centroids: NDArray[np.float32], bits: int) -> Codebook:
        """The one object for these centroids, so that its table is in memory once."""
        key = bits, np.asarray(centroids, np.float32).tobytes()
        codebook = _LIVING.get(key)
        if codebook is None:
            codebook = _LIVING[key] = Codebook(centroids, bits)
        return codebook

    def __reduce__(self) -> tuple[Any, ...]:
        return Codebook.of, (self.centroids, self.bits)

    @property
    def arrays(self) -> list[mx.array]:
        """What is held in memory so far."""
        tables = [self._centroids] if self._weights is None else [self._centroids, self._weights]
        return tables + [array for pair in self._constants.values() for array in pair]

    def matmul(self, x: mx.array, codes: mx.array) -> mx.array:
        """x @ centroids[indices].T without the dense matrix.

        Parameters
        ----------
        x : float32 (..., in_features)
        codes : uint32 (rows, row_words), packed

        Returns
        -------
        float32 (..., rows)
        """
        rows, in_features = codes.shape[0], x.shape[-1]
        if self.native:
            return self._native_matmul(self._padded(x, codes), codes)
        if kernels.usable():
            by_kernel = self._by_kernel(x.reshape(1, -1, in_features), codes[None], None)
            if by_kernel is not None:
                return by_kernel.reshape(*x.shape[:-1], rows)
        few = x.size // in_features <= _FEW_ROWS
        if few and self.window == self.bits:
            return self._by_sums(x, codes)
        ordered = self._ordered(x.reshape(-1, in_features), codes)
        chunk = _chunk(in_features, _ROWS_CHUNK if few else _CPU_CHUNK)
        last: mx.array | None = None
        products = []
        for start in range(0, rows, chunk):
            packed = _after(codes[start : start + chunk], last)
            # what MLX's products take for one row, its elementwise operations do in half of the time; the columns have
            # no name here, so that they are multiplied in place
            y = _dots(ordered, self._columns(packed)) if few else ordered @ self._columns(packed).T
            last = _begun(y, last)
            products.append(last)
        y = _joined(products).reshape(*x.shape[:-1], rows)
        tail = tail_columns(self.bits, self.window, in_features)
        return y + x[..., in_features - tail :] @ self._tail(codes, in_features).T if tail else y

    def gather_matmul(self, x: mx.array, codes: mx.array, chosen: mx.array, sorted_indices: bool = False) -> mx.array:
        """x @ centroids[indices[chosen]].T without the dense matrices.

        Parameters
        ----------
        x : float32 (..., n, in_features)
        codes : uint32 (stack, rows, row_words), packed
        chosen : integer (...)
            A matrix of the stack for each (n, in_features) of x; the leading axes are broadcast.
        sorted_indices : bool
            Whether `chosen` ascends.

        Returns
        -------
        float32 (..., n, rows)
        """
        stack, rows, words = codes.shape
        in_features = x.shape[-1]
        if self.native:
            x = self._padded(x, codes)
            scales, biases = self._scales_and_biases(stack * rows, x.shape[-1])
            return mx.gather_qmm(
                x, codes, scales.reshape(stack, rows, -1), biases.reshape(stack, rows, -1), rhs_indices=chosen,
                transpose=True, group_size=_group_size(x.shape[-1]), bits=self.bits, sorted_indices=sorted_indices,
            )  # fmt: skip
        batch = mx.broadcast_shapes(x.shape[:-2], chosen.shape)
        pairs = math.prod(batch)
        x, chosen = mx.broadcast_to(x, (*batch, *x.shape[-2:])), mx.broadcast_to(chosen, batch)
        if pairs <= _FEW_PAIRS and kernels.usable():
            by_kernel = self._by_kernel(x.reshape(pairs, *x.shape[-2:]), codes, chosen.reshape(pairs))
            if by_kernel is not None:
                return by_kernel.reshape(*batch, x.shape[-2], rows)
        if pairs <= _FEW_ROWS:
            inputs, numbers = x.reshape(pairs, *x.shape[-2:]), chosen.reshape(pairs)
            products = [self.matmul(inputs[i], codes[numbers[i]]) for i in range(pairs)]
            return mx.stack(products).reshape(*batch, x.shape[-2], rows)
        if pairs < stack:  # fewer than there are matrices: only theirs become dense
            codes, chosen, stack = codes[chosen.reshape(pairs)], mx.arange(pairs).reshape(batch), pairs
        ordered = self._ordered(x, codes)
        chunk = _chunk(stack * in_features, _STACK_CHUNK)
        last: mx.array | None = None
        products = []
        for start in range(0, rows, chunk):
            packed = _after(codes[:, start : start + chunk], last).reshape(-1, words)
            dense = self._columns(packed).reshape(stack, -1, ordered.shape[-1]).swapaxes(-1, -2)
            last = _begun(mx.gather_mm(ordered, dense, rhs_indices=chosen, sorted_indices=sorted_indices), last)
            products.append(last)
        y = _joined(products)
        tail = tail_columns(self.bits, self.window, in_features)
        if not tail:
            return y
        ends = self._tail(codes.reshape(-1, words), in_features).reshape(stack, rows, tail).swapaxes(-1, -2)
        return y + mx.gather_mm(x[..., in_features - tail :], ends, rhs_indices=chosen, sorted_indices=sorted_indices)

    def _by_kernel(self, x: mx.array, codes: mx.array, which: mx.array | None) -> mx.array | None:
        """Products (pairs, n, rows) of (pairs, n, in_features) and a matrix each of a stack, if there is a kernel."""

        def generic(x: mx.array, codes: mx.array, which: mx.array | None) -> mx.array:
            if which is None:
                return self.matmul(x[0], codes[0])[None]
            return self.gather_matmul(x, codes, which)

        return kernels.product(x, codes, which, self._centroids, self.bits, self.window, generic)

    def dequantize(self, codes: mx.array, in_features: int) -> mx.array:
        """centroids[indices], float32 (rows, in_features)."""
        patterns = self._patterns(codes)
        split = patterns.reshape(codes.shape[0], runs(self._pattern, self._stride), -1)
        weights = self._values(split.swapaxes(1, 2).reshape(codes.shape[0], -1))
        tail = tail_columns(self.bits, self.window, in_features)
        if tail:
            return mx.concatenate([weights[:, : in_features - tail], self._tail(codes, in_features)], axis=1)
        return weights if weights.shape[1] == in_features else weights[:, :in_features]

    def _columns(self, codes: mx.array) -> mx.array:
        """As `dequantize`, columns in the order in which they are found, those of the tail with other values:
        float32 (rows, ...)."""
        return self._values(self._patterns(codes))

    def _ordered(self, x: mx.array, codes: mx.array) -> mx.array:
        """The columns of x that belong to `_columns`, with zeros for those of the tail and of padding."""
        tail = tail_columns(self.bits, self.window, x.shape[-1])
        inner = self._padded(x[..., : x.shape[-1] - tail], codes)
        parts = inner.reshape(*x.shape[:-1], -1, runs(self._pattern, self._stride), self._together)
        return parts.swapaxes(-2, -3).reshape(inner.shape)

    def _patterns(self, codes: mx.array) -> mx.array:
        """Patterns, of two weights where a look-up finds two: see `fields`."""
        return fields(codes, self._pattern, self._stride)

    def _values(self, patterns: mx.array) -> mx.array:
        """The weights of patterns: (rows, groups) to float32 (rows, groups * together)."""
        if self._weights is None:
            table = self._centroids
            if self._together == 2:
                every = np.arange(2**self._pattern, dtype=np.uint32)[:, None]
                shifts = np.array([0, self.bits], np.uint32)
                values = self.centroids[(every >> shifts) & np.uint32(2**self.window - 1)]
                table = mx.array(values.view(np.complex64).reshape(-1))  # two are looked up as one number
            self._weights = table  # at once: other threads may look
        return _looked_up(self._weights, patterns).view(mx.float32).reshape(patterns.shape[0], -1)

    def _tail(self, codes: mx.array, in_features: int) -> mx.array:
        """The weights of a row's last windows, float32 (rows, tail_columns)."""
        indices = tail_indices(codes, self.bits, self.window, in_features)
        return _looked_up(self._centroids, indices).reshape(indices.shape)

    def _padded(self, x: mx.array, codes: mx.array) -> mx.array:
        """x with zeros for the padding codes."""
        padded = codes.shape[-1] // self.bits * 32
        return x if x.shape[-1] == padded else mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded - x.shape[-1])])

    def _by_sums(self, x: mx.array, codes: mx.array) -> mx.array:
        """As `matmul` of a scalar codebook, each group of columns having a table of what it adds to a product."""
        together = _SUMS_TOGETHER[self.bits]
        flat = self._padded(x.reshape(-1, x.shape[-1]), codes)
        tables = self._sums(flat, together)
        chunk = _chunk(flat.shape[1] // max(2, together), _CPU_CHUNK)  # of what look-ups in one table find
        last: mx.array | None = None
        products = []  # (rows of x, rows of a chunk)
        for start in range(0, codes.shape[0], chunk):
            found = fields(_after(codes[start : start + chunk], last), together * self.bits, together * self.bits)
            rows = []
            for sums in tables:
                last = _begun(mx.take_along_axis(sums, found.T[None], axis=2).sum(axis=1), last)
                rows.append(last)
            products.append(_joined(rows, axis=0))
        return _joined(products).reshape(*x.shape[:-1], -1)

    def _sums(self, x: mx.array, together: int) -> list[mx.array]:
        """For each row of x, of each group of columns, the sums over all patterns: (1, groups, patterns)."""
        columns = x.reshape(x.shape[0], -1, together)
        sums = columns[..., :1] * self._centroids
        for k in range(1, together):
            added = columns[..., k : k + 1] * self._centroids
            sums = (added[..., :, None] + sums[..., None, :]).reshape(*sums.shape[:-1], -1)
        return list(mx.split(sums, x.shape[0]))

    def _native_matmul(self, x: mx.array, codes: mx.array) -> mx.array:
        """As `matmul`, by MLX's kernel for evenly spaced centroids."""
        rows, padded = codes.shape[0], x.shape[-1]
        group_size = _group_size(padded)
        chunk = min(rows, _chunk(2 * padded // group_size, _CPU_CHUNK))  # of scales and biases, 6 % of a head of 4 bits
        scales, biases = self._scales_and_biases(chunk, padded)
        products = []
        for start in range(0, rows, chunk):
            packed = codes[start : start + chunk]
            held = packed.shape[0]
            products.append(mx.quantized_matmul(
                x, packed, scales[:held], biases[:held], transpose=True, group_size=group_size, bits=self.bits
            ))  # fmt: skip
        return _joined(products)

    def _scales_and_biases(self, rows: int, padded: int) -> tuple[mx.array, mx.array]:
        """The same number everywhere: row scales are applied to the product, so layers of a shape share them."""
        groups = padded // _group_size(padded)
        if (rows, groups) not in self._constants:
            assert self.step is not None
            self._constants[rows, groups] = (
                mx.array(np.full((rows, groups), self.step, np.float32)),
                mx.array(np.full((rows, groups), self.centroids[0])),
            )
        return self._constants[rows, groups]


_LIVING: WeakValueDictionary[tuple[int, bytes], Codebook] = WeakValueDictionary()


def _step(centroids: NDArray[np.float32]) -> float | None:
    """The step of evenly spaced centroids, by equality; None if they are not, or if float32 cannot hold it."""
    wide = centroids.astype(np.float64)
    step = float(wide[1] - wide[0])
    even = float(np.float32(step)) == step and np.array_equal(wide[0] + np.arange(wide.size) * step, wide)
    return step if even else None


def _group_size(padded: int) -> int:
    """The largest of MLX's that divides a padded row."""
    return next(size for size in _GROUP_SIZES if padded % size == 0)


def _chunk(width: int, cpu_chunk: int) -> int:
    """How many rows of so many float32 live at a time."""
    return max(1, (_GPU_CHUNK if mx.default_device() == mx.gpu else cpu_chunk) // (4 * width))


def _after(codes: mx.array, before: mx.array | None) -> mx.array:
    """The same codes, once something else is done: or what is made of all chunks would be in memory at once. On a
    CPU `_begun` sees to that."""
    if before is None or mx.default_device() == mx.cpu:
        return codes
    depending: mx.array = mx.depends([codes], [mx.stop_gradient(before)])[0]
    return depending


def _begun(product: mx.array, before: mx.array | None) -> mx.array:
    """The same array. On a CPU it is evaluated from now on, and what was begun before it is waited for: the
    operations of a model, noted before the first is done, would take more memory than what they work on."""
    if mx.default_device() == mx.cpu:
        with contextlib.suppress(ValueError):  # within mx.compile and mx.vmap there is nothing to evaluate yet
            mx.async_eval(product)  # type: ignore[no-untyped-call]
            mx.eval([] if before is None else before)
    return product


def _joined(parts: list[mx.array], axis: int = -1) -> mx.array:
    return parts[0] if len(parts) == 1 else mx.concatenate(parts, axis=axis)


def _dots(x: mx.array, columns: mx.array) -> mx.array:
    """x @ columns.T, (few, rows). Rows are added up in lanes: MLX adds one number after the other along the last
    axis."""
    lanes = columns.shape[0], -1, math.gcd(columns.shape[1], _LANES)
    rows = [(columns * row).reshape(lanes).sum(axis=1).sum(axis=1)[None] for row in mx.split(x, x.shape[0])]
    return _joined(rows, axis=0)


def _looked_up(table: mx.array, at: mx.array) -> mx.array:
    """table[at], (1, ...): elements are found many times faster along an axis; an index of its own would copy them."""
    return mx.take_along_axis(table[None], at.reshape(1, -1), axis=1)
