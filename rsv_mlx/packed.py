"""What the quantized layers have in common: a weight that stays packed, and inputs shared by siblings."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Self

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

import rsv_format
from rsv_format import LayerData
from rsv_mlx.codebook import Codebook
from rsv_mlx.transform import Transform

_ARRAYS = {"weight", "scales", "bias"}


class Packed(Module):
    """A module whose weight stays packed; its input is transformed instead of its weight.

    Products and sums are taken in float32: no input overflows on the way, and MLX's CPU kernels are fastest
    there. The parameters are frozen; gradients reach the input.

    Parameters
    ----------
    weight : uint32 (rows, ceil(input_dims / 32) * bits)
        Packed codes.
    scales : float32 (rows,)
    codebook : Codebook
    transform : Transform, optional
        None is the identity.
    bias : (rows,), optional
    input_dims : int
    stack : int
        How many equal matrices the rows are.
    """

    weight: mx.array
    scales: mx.array
    bias: mx.array
    dtype: mx.Dtype = mx.float32
    shared_input: SharedInput | None = None
    _unread_bias = False
    _read: Callable[[], Sequence[mx.array]] | None = None

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array,
        codebook: Codebook,
        transform: Transform | None = None,
        bias: mx.array | None = None,
        *,
        input_dims: int,
        stack: int = 1,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._describe(codebook, transform, input_dims, scales.size // stack, stack)
        self._hold(weight, scales, bias)

    @classmethod
    def deferred(
        cls,
        read: Callable[[], Sequence[mx.array]],
        codebook: Codebook,
        transform: Transform | None = None,
        *,
        input_dims: int,
        output_dims: int,
        has_bias: bool,
        stack: int = 1,
    ) -> Self:
        """A layer whose parameters (weight, scales and, if it has one, bias) are read when they are first asked
        for, by a call or by name."""
        layer = cls.__new__(cls)
        Module.__init__(layer)  # type: ignore[no-untyped-call]
        layer._describe(codebook, transform, input_dims, output_dims, stack)
        layer._unread_bias, layer._read = has_bias, read
        return layer

    @classmethod
    def from_data(cls, data: LayerData, transform: Transform | None = None) -> Self:
        """A layer of what `rsv_format.quantize_matrix` returned.

        Parameters
        ----------
        data : LayerData
        transform : Transform, optional
            The data's, where other layers use it too.

        Raises
        ------
        RsvError
            bad_argument: a stack of matrices, where this is one; haar_witness_mismatch.
        """
        bias = None
        if data.bias is not None:
            bias = mx.array(data.bias)
            bias = bias.view(mx.bfloat16) if data.bias_dtype == "bf16" else bias
        if transform is None and data.transform is not None:
            transform = Transform(data.transform)
        codebook = Codebook.of(data.codebook, data.bits)
        weight, scales = mx.array(data.codes), mx.array(data.scales)
        return cls(weight, scales, codebook, transform, bias, input_dims=data.in_features, stack=data.stack)

    @classmethod
    def _quantized(cls, module: Module, **options: Any) -> Self:
        """A layer of MLX, quantized as `rsv_format.quantize_matrix` does it; its bias is kept."""
        shape = weight_shape(module)
        assert shape is not None
        data = rsv_format.quantize_matrix(np.array(dense_rows(module)).reshape(shape), **options)
        layer = cls.from_data(data)
        layer._hold(layer.weight, layer.scales, module.get("bias"))
        return layer

    def _describe(
        self, codebook: Codebook, transform: Transform | None, input_dims: int, output_dims: int, stack: int
    ) -> None:
        self.codebook = codebook
        self.transform = transform
        self.input_dims = input_dims
        self.output_dims = output_dims

    def _hold(self, weight: mx.array, scales: mx.array, bias: mx.array | None = None) -> None:
        self["weight"], self["scales"] = weight, scales  # as attributes, each would be looked up before
        if bias is not None:
            self["bias"] = bias
        self.freeze(recurse=False, keys=list(self.keys() & _ARRAYS))

    def __getattr__(self, key: str) -> Any:
        if key in _ARRAYS and key not in self:
            self.read()
        return super().__getattr__(key)

    def read(self) -> None:
        """Read the parameters of a deferred layer, if that was not done."""
        if self._read is not None:
            arrays, self._read = self._read(), None  # before they are held: to set one asks for it first
            self._hold(*arrays)

    @property
    def bits(self) -> int:
        """Bits of a code."""
        return self.codebook.bits

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return "bias" in self or (self._read is not None and self._unread_bias)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the dense weight that the layer stands for."""
        return (self.output_dims, self.input_dims)

    def unfreeze(self, **kwargs: Any) -> Module:
        """As nn.Module's, but the layer's own parameters stay frozen."""
        super().unfreeze(**kwargs)
        return self.freeze(recurse=False)

    def dequantize(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The dense weight in the original basis, `weight_shape`."""
        return self._rows(self.weight, self.scales).reshape(self.weight_shape).astype(dtype)

    def to_dense(self, dtype: mx.Dtype = mx.float32) -> Module:
        """MLX's own module with the weights that this one stands for."""
        raise NotImplementedError

    def _rows(self, weight: mx.array, scales: mx.array) -> mx.array:
        """Rows of W, float32 (..., input_dims), from packed ones (..., row_words) and their scales (...)."""
        w = self.codebook.dequantize(weight.reshape(-1, weight.shape[-1]), self.input_dims) * scales.reshape(-1, 1)
        return w if self.transform is None else self.transform.inverse(w)

    def _product(self, x: mx.array) -> mx.array:
        """x @ W.T + bias, (..., input_dims) to (..., output_dims), in the dtype of x."""
        dtype = self._checked(x)
        if x.size == 0:
            return mx.zeros((*x.shape[:-1], self.output_dims), dtype)
        y = self.codebook.matmul(self._transformed(x), self.weight) * self.scales
        if self.has_bias:
            y = y + self.bias
        return y.astype(dtype)

    def _checked(self, x: mx.array) -> mx.Dtype:
        """The dtype of the result for this input."""
        if x.shape[-1] != self.input_dims:
            raise ValueError(f"[{type(self).__name__}] the last axis of {x.shape} is not input_dims={self.input_dims}")
        return x.dtype if mx.issubdtype(x.dtype, mx.floating) else mx.float32

    def _transformed(self, x: mx.array) -> mx.array:
        if self.transform is None:
            return x.astype(mx.float32)
        if self.shared_input is not None:
            return self.shared_input.transformed(x, self, self.transform)
        return self.transform(x.astype(mx.float32))

    def _extra_repr(self) -> str:
        kind = "uniform" if self.codebook.step is not None else "table"
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, bias={self.has_bias}, "
            f"bits={self.bits}, window={self.codebook.window}, codebook={kind}, transform={self.transform is not None}"
        )


class SharedInput:
    """The last input of sibling layers with one transform, transformed once for all of them.

    An input is known by identity: it is held weakly, and forgotten when it dies or when each of the siblings
    has had it. A layer that is called again transforms again. What this cannot see is an array that is
    changed in place (`x += 1`) between the calls of two siblings.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[mx.array], mx.array, set[int]] | None = None
        self._members: set[int] = set()

    def join(self, layer: Packed) -> None:
        """Make the layer one of the siblings."""
        layer.shared_input = self
        self._members.add(id(layer))

    def transformed(self, x: mx.array, layer: Packed, transform: Transform) -> mx.array:
        """transform(x), float32, kept for the siblings that have not had it."""
        last = self._last
        if last is not None and last[0]() is x and id(layer) in last[2]:
            last[2].discard(id(layer))
            if not last[2]:
                self._last = None
            return last[1]
        z = transform(x.astype(mx.float32))
        self._last = (weakref.ref(x, self._forget), z, self._members - {id(layer)})
        return z

    def _forget(self, dead: weakref.ref[mx.array]) -> None:
        if self._last is not None and self._last[0] is dead:
            self._last = None


def dense_rows(module: Module, rows: slice = slice(None)) -> mx.array:
    """Rows of the weight of a linear or embedding layer of MLX, dequantized where it is quantized; the matrices
    of a stack are one below the other. float32 (rows, input_dims)."""

    def cut(array: mx.array) -> mx.array:
        return array.reshape(-1, array.shape[-1])[rows]

    weight = cut(module["weight"])
    if "scales" in module:
        biases = module.get("biases")
        weight = mx.dequantize(
            weight,
            cut(module["scales"]),
            None if biases is None else cut(biases),
            module.group_size,
            module.bits,
            mode=module.mode,
        )
    return weight.astype(mx.float32)


def weight_shape(module: Module) -> tuple[int, ...] | None:
    """The shape of the weight that a module stands for, None if it has no weight."""
    if isinstance(module, Packed):
        return module.weight_shape
    if "weight" not in module:
        return None
    shape = tuple(module["weight"].shape)
    return (*shape[:-1], shape[-1] * 32 // int(module.bits)) if "scales" in module else shape


def weight_dtype(module: Module) -> mx.Dtype:
    """The floating dtype of the weight that a module stands for: what an embedding's rows have."""
    if isinstance(module, Packed):
        return module.dtype
    known: mx.array = module["scales" if "scales" in module else "weight"]
    return known.dtype if mx.issubdtype(known.dtype, mx.floating) else mx.bfloat16  # MLX's, of its fp4 and fp8 modes
