"""QuantizedLinear: y = transform(x) @ W_rot.T + bias, in place of mlx.nn.Linear (SPEC section 8)."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear

import rsv_format
from rsv_format import LayerData, RsvError
from rsv_mlx.codebook import Codebook
from rsv_mlx.transform import Transform

BIAS_DTYPES = {"f32": mx.float32, "f16": mx.float16, "bf16": mx.bfloat16}


class QuantizedLinear(Module):
    """A linear layer whose weight stays packed; its input is transformed instead of its weight.

    Products and sums are taken in float32: no input overflows on the way, and MLX's CPU kernels are fastest
    there. The parameters are frozen; gradients reach the input.

    Parameters
    ----------
    weight : uint32 (output_dims, ceil(input_dims / 32) * bits)
        Packed indices.
    scales : float32 (output_dims,)
    codebook : Codebook
    transform : Transform, optional
        None is the identity.
    bias : (output_dims,), optional
    input_dims : int

    Examples
    --------
    >>> layer = QuantizedLinear.from_linear(nn.Linear(896, 4864), bits=4)
    """

    def __init__(
        self,
        weight: mx.array,
        scales: mx.array,
        codebook: Codebook,
        transform: Transform | None = None,
        bias: mx.array | None = None,
        *,
        input_dims: int,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._describe(codebook, transform, input_dims, int(weight.shape[0]))
        self._hold(weight, scales, bias)

    def _describe(self, codebook: Codebook, transform: Transform | None, input_dims: int, output_dims: int) -> None:
        self.codebook = codebook
        self.transform = transform
        self.input_dims = input_dims
        self.output_dims = output_dims
        self.bits = codebook.bits
        self.shared_input: SharedInput | None = None

    def _hold(self, weight: mx.array, scales: mx.array, bias: mx.array | None = None) -> None:
        self.weight = weight
        self.scales = scales
        if bias is not None:
            self.bias = bias
        self.freeze(recurse=False)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return "bias" in self

    def unfreeze(self, **kwargs: Any) -> Module:
        """As nn.Module's, but the layer's own parameters stay frozen."""
        super().unfreeze(**kwargs)
        return self.freeze(recurse=False)

    def __call__(self, x: mx.array) -> mx.array:
        """As nn.Linear: (..., input_dims) to (..., output_dims), in the dtype of x."""
        if x.shape[-1] != self.input_dims:
            raise ValueError(f"[QuantizedLinear] the last axis of {x.shape} is not input_dims={self.input_dims}")
        dtype = x.dtype if mx.issubdtype(x.dtype, mx.floating) else mx.float32
        if x.size == 0:
            return mx.zeros((*x.shape[:-1], self.output_dims), dtype)
        y = self.codebook.matmul(self._transformed(x), self.weight) * self.scales
        if self.has_bias:
            y = y + self.bias
        return y.astype(dtype)

    def dequantize(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The dense weight in the original basis, (output_dims, input_dims)."""
        w = self.codebook.dequantize(self.weight)[:, : self.input_dims] * self.scales[:, None]
        return (w if self.transform is None else self.transform.inverse(w)).astype(dtype)

    def to_linear(self, dtype: mx.Dtype = mx.float32) -> Linear:
        """A dense layer with the weights that this one stands for; 32 / bits times the memory in float32."""
        linear = Linear(1, 1, bias=self.has_bias)
        linear.weight = self.dequantize(dtype)
        if self.has_bias:
            linear.bias = self.bias.astype(dtype)
        return linear

    @classmethod
    def from_linear(
        cls,
        linear: Module,
        *,
        bits: int = 4,
        codebook: str = "lloyd-max",
        rotation: str = "hartley",
        persist_rotation: bool = False,
        seed: int = 0,
        importance: Any = None,
        transform: rsv_format.Transform | None = None,
    ) -> QuantizedLinear:
        """Quantize a layer.

        Parameters
        ----------
        linear : nn.Linear or nn.QuantizedLinear
        bits, codebook, rotation, persist_rotation, seed, importance, transform
            As `rsv_format.quantize_matrix`.

        Raises
        ------
        RsvError
            nonfinite_weight, importance_mismatch, bad_argument.
        """
        bias = linear.get("bias")
        data = rsv_format.quantize_matrix(
            np.array(dense_weight(linear)),
            bits=bits,
            codebook=codebook,
            rotation=rotation,
            persist_rotation=persist_rotation,
            seed=seed,
            importance=importance,
            transform=transform,
        )
        layer = cls.from_data(data)
        layer._hold(layer.weight, layer.scales, bias)
        return layer

    @classmethod
    def from_data(cls, data: LayerData) -> QuantizedLinear:
        """A layer of what `rsv_format.quantize_matrix` returned.

        Raises
        ------
        RsvError
            bad_argument: a stack of matrices; haar_witness_mismatch.
        """
        if data.stack != 1:
            raise RsvError("bad_argument", data.name, f"a stack of {data.stack} matrices is not one linear layer")
        bias = None
        if data.bias is not None:
            assert data.bias_dtype is not None
            bias = mx.array(data.bias)
            bias = bias.view(mx.bfloat16) if data.bias_dtype == "bf16" else bias
        return cls(
            mx.array(data.indices),
            mx.array(data.scales),
            Codebook.of(data.codebook),
            None if data.transform is None else Transform(data.transform),
            bias,
            input_dims=data.in_features,
        )

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
            f"bits={self.bits}, codebook={kind}, transform={self.transform is not None}"
        )


class DeferredLinear(QuantizedLinear):
    """A QuantizedLinear whose parameters are read when they are first asked for, by a call or by name."""

    def __init__(
        self,
        read: Callable[[], Sequence[mx.array]],
        codebook: Codebook,
        transform: Transform | None = None,
        *,
        input_dims: int,
        output_dims: int,
        has_bias: bool,
    ) -> None:
        Module.__init__(self)  # type: ignore[no-untyped-call]
        self._describe(codebook, transform, input_dims, output_dims)
        self._read: Callable[[], Sequence[mx.array]] | None = read
        self._has_bias = has_bias

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return self._has_bias

    def __getattr__(self, key: str) -> Any:
        if key in ("weight", "scales", "bias") and key not in self and self._read is not None:
            arrays, self._read = self._read(), None  # before they are held: to set one asks for it first
            self._hold(*arrays)
        return super().__getattr__(key)


class SharedInput:
    """The last input of sibling layers with one transform, transformed once for all of them.

    An input is known by identity: it is held weakly, and forgotten when it dies or when each of the siblings
    has had it. A layer that is called again transforms again. What this cannot see is an array that is
    changed in place (`x += 1`) between the calls of two siblings.
    """

    def __init__(self) -> None:
        self._last: tuple[weakref.ref[mx.array], mx.array, set[int]] | None = None
        self._members: set[int] = set()

    def join(self, layer: QuantizedLinear) -> None:
        """Make the layer one of the siblings."""
        layer.shared_input = self
        self._members.add(id(layer))

    def transformed(self, x: mx.array, layer: QuantizedLinear, transform: Transform) -> mx.array:
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


def dense_weight(module: Module) -> mx.array:
    """The weight of a linear or embedding layer of MLX, float32, dequantized where it is quantized."""
    weight: mx.array = module["weight"]
    if "scales" in module:
        weight = mx.dequantize(
            weight, module["scales"], module.get("biases"), module.group_size, module.bits, mode=module.mode
        )
    return weight.astype(mx.float32)
