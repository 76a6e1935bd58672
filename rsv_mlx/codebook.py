"""Centroids, and products of activations with packed codes (SPEC sections 5, 6 and 8).

Evenly spaced centroids run on mx.quantized_matmul. For others there are two ways, both by look-up:

- many rows of activations: a table of the centroids of every pattern of a few codes unpacks and dequantizes
  them at once; a slice of the weight becomes dense, is multiplied and forgotten.
- few rows: a table of the sums of x_j * centroid over every pattern, for each group of columns, is made of the
  activations; then a product is one look-up and one addition per pattern, and no weight is made at all.
"""

from __future__ import annotations

import contextlib
import math
from weakref import WeakValueDictionary

import mlx.core as mx
import numpy as np
from numpy.typing import NDArray

from rsv_format import RsvError

_NATIVE_BITS = (2, 3, 4, 5, 6, 8)  # of mx.quantized_matmul
_GROUP_SIZES = (128, 64, 32)  # its group sizes: 32 divides every padded row
# bits of a code -> codes looked up together, as the widths of the tables' rows allow
_WEIGHTS_TOGETHER = {1: 8, 2: 8, 3: 4, 4: 4, 5: 2, 6: 2, 7: 2, 8: 2}  # tables of at most 2 MiB, read at random
_SUMS_TOGETHER = {1: 8, 2: 4, 3: 2, 4: 2, 5: 2, 6: 1, 7: 1, 8: 1}  # made anew for each activation
_FEW_ROWS = 16  # above, MLX's matrix product makes up for dense weights
_CPU_CHUNK = 2**19  # bytes of float32 that live at a time: a CPU's second-level cache, and memory touched before
_STACK_CHUNK = 2**23  # the same for the rows of a whole stack, or there would be too few of each matrix
_GPU_CHUNK = 2**26  # on a GPU, enough to fill it


class Codebook:
    """Centroids, float32 (2**bits,), and the bits of a code, shared by the layers that use them."""

    def __init__(self, centroids: NDArray[np.float32], bits: int) -> None:
        if centroids.size != 2**bits:
            raise RsvError("unsupported_model", "codebook", f"{centroids.size} centroids for codes of {bits} bits")
        self.centroids = np.array(centroids, np.float32)
        self.bits = bits
        self.step = _step(self.centroids)
        self.native = self.step is not None and self.bits in _NATIVE_BITS
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

    @property
    def arrays(self) -> list[mx.array]:
        """What is held in memory so far."""
        tables = [self._centroids] if self._weights is None else [self._centroids, self._weights]
        return tables + [array for pair in self._constants.values() for array in pair]

    def matmul(self, x: mx.array, codes: mx.array) -> mx.array:
        """x @ W_rot.T, its scales being 1, without the dense matrix.

        Parameters
        ----------
        x : float32 (..., in_features)
        codes : uint32 (rows, row_words), packed

        Returns
        -------
        float32 (..., rows)
        """
        rows, words = codes.shape
        x, padded = self._padded(x, words)
        if self.native:
            return self._native_matmul(x, codes)
        if x.size // padded <= _FEW_ROWS:
            return self._by_sums(x, codes)
        chunk = _chunk(padded)
        last: mx.array | None = None
        products = []
        for start in range(0, rows, chunk):
            packed = _after(codes[start : start + chunk], last)
            last = _begun(x @ self.dequantize(packed).T, last)
            products.append(last)
        return _joined(products)

    def gather_matmul(self, x: mx.array, codes: mx.array, chosen: mx.array, sorted_indices: bool = False) -> mx.array:
        """x @ centroids[codes[chosen]].T without the dense matrices.

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
        x, padded = self._padded(x, words)
        if self.native:
            scales, biases = self._scales_and_biases(stack * rows, padded)
            return mx.gather_qmm(
                x, codes, scales.reshape(stack, rows, -1), biases.reshape(stack, rows, -1), rhs_indices=chosen,
                transpose=True, group_size=_group_size(padded), bits=self.bits, sorted_indices=sorted_indices,
            )  # fmt: skip
        batch = mx.broadcast_shapes(x.shape[:-2], chosen.shape)
        pairs = math.prod(batch)
        x, chosen = mx.broadcast_to(x, (*batch, *x.shape[-2:])), mx.broadcast_to(chosen, batch)
        if pairs <= _FEW_ROWS:
            inputs, numbers = x.reshape(pairs, *x.shape[-2:]), chosen.reshape(pairs)
            products = [self.matmul(inputs[i], codes[numbers[i]]) for i in range(pairs)]
            return mx.stack(products).reshape(*batch, x.shape[-2], rows)
        if pairs < stack:  # fewer than there are matrices: only theirs become dense
            codes, chosen, stack = codes[chosen.reshape(pairs)], mx.arange(pairs).reshape(batch), pairs
        chunk = _chunk(stack * padded, _STACK_CHUNK)
        last: mx.array | None = None
        products = []
        for start in range(0, rows, chunk):
            packed = _after(codes[:, start : start + chunk], last).reshape(-1, words)
            dense = self.dequantize(packed).reshape(stack, -1, padded).swapaxes(-1, -2)
            last = _begun(mx.gather_mm(x, dense, rhs_indices=chosen, sorted_indices=sorted_indices), last)
            products.append(last)
        return _joined(products)

    def dequantize(self, codes: mx.array) -> mx.array:
        """centroids[codes], float32 (rows, padded in_features)."""
        together = _WEIGHTS_TOGETHER[self.bits]
        if self._weights is None:
            patterns = np.arange(2 ** (self.bits * together), dtype=np.uint32)[:, None]
            shifts = np.arange(together, dtype=np.uint32) * np.uint32(self.bits)
            values = self.centroids[(patterns >> shifts) & np.uint32(2**self.bits - 1)]
            # complex64 for two: one element is gathered faster than a row of two
            self._weights = mx.array(values.view(np.complex64).reshape(-1) if together == 2 else values)
        fields = _fields(codes, self.bits * together)
        looked_up = self._weights[fields[0] if len(fields) == 1 else mx.stack(fields, axis=-1)]
        if together == 2:
            looked_up = looked_up.view(mx.float32)
        return looked_up.reshape(codes.shape[0], -1)

    def _padded(self, x: mx.array, words: int) -> tuple[mx.array, int]:
        """x with zeros for the padding codes, and the length of its last axis then."""
        padded = words // self.bits * 32
        if x.shape[-1] != padded:
            x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, padded - x.shape[-1])])
        return x, padded

    def _by_sums(self, x: mx.array, codes: mx.array) -> mx.array:
        """As `matmul`, each group of columns having a table of what it adds to a product."""
        together = _SUMS_TOGETHER[self.bits]
        count = _fields_of_a_group(self.bits * together)
        columns = x.reshape(-1, x.shape[-1] // (count * together), count, together)
        tables = columns[..., :1] * self._centroids
        for k in range(1, together):
            added = columns[..., k : k + 1] * self._centroids
            tables = (added[..., :, None] + tables[..., None, :]).reshape(*columns.shape[:-1], -1)
        chunk = _chunk(columns.shape[1])  # of what one look-up finds
        last: mx.array | None = None
        products = []  # (rows of x, rows of a chunk)
        for start in range(0, codes.shape[0], chunk):
            fields = _fields(_after(codes[start : start + chunk], last), self.bits * together)
            rows: list[mx.array] = []
            for table in tables:
                for k, field in enumerate(fields):
                    part = mx.take_along_axis(table[:, k], field.T, axis=1).sum(axis=0, keepdims=True)
                    if k > 0:
                        part = rows.pop() + part
                    last = _begun(part, last)
                    rows.append(part)
            products.append(_joined(rows, axis=0))
        return _joined(products).reshape(*x.shape[:-1], -1)

    def _native_matmul(self, x: mx.array, codes: mx.array) -> mx.array:
        """As `matmul`, by MLX's kernel for evenly spaced centroids."""
        rows, padded = codes.shape[0], x.shape[-1]
        group_size = _group_size(padded)
        chunk = min(rows, _chunk(2 * padded // group_size))  # of scales and biases, 6 % of a head of 4 bits
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


def _chunk(width: int, cpu_chunk: int | None = None) -> int:
    """How many rows of so many float32 live at a time."""
    return max(1, (_GPU_CHUNK if mx.default_device() == mx.gpu else cpu_chunk or _CPU_CHUNK) // (4 * width))


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


def _fields_of_a_group(width: int) -> int:
    """How many fields of so many bits are whole bytes."""
    return 8 // math.gcd(width, 8)


def _fields(codes: mx.array, width: int) -> list[mx.array]:
    """The bits of each row as unsigned integers of `width` bits, LSB first: the first ones of groups of whole
    bytes, (rows, groups), then the second ones, and so on."""
    if width in (8, 16):
        return [codes.view(mx.uint8 if width == 8 else mx.uint16)]
    count = _fields_of_a_group(width)
    groups = codes.view(mx.uint8).reshape(codes.shape[0], -1, count * width // 8)
    fields = []
    for start in range(0, count * width, width):
        first, shift = divmod(start, 8)
        end, last = shift + width, (start + width - 1) // 8
        dtype = mx.uint8 if end <= 8 else mx.uint16 if end <= 16 else mx.uint32
        field = groups[..., first].astype(dtype) >> shift
        for byte in range(first + 1, last + 1):
            field = field | (groups[..., byte].astype(dtype) << (8 * (byte - first) - shift))
        fields.append(field if end % 8 == 0 else field & (2**width - 1))
    return fields
