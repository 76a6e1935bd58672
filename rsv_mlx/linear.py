"""QuantizedLinear: y = transform(x) @ W_rot.T + bias, in place of mlx.nn.Linear (SPEC section 8)."""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedLinear as AffineLinear

import rsv_format
from rsv_format import RsvError
from rsv_mlx.codebook import Codebook
from rsv_mlx.packed import Packed
from rsv_mlx.transform import Transform


class QuantizedLinear(Packed, AffineLinear):
    """A linear layer whose weight stays packed. Parameters as `Packed`, but for `stack`.

    Examples
    --------
    >>> layer = QuantizedLinear.from_linear(nn.Linear(896, 4864), bits=4)
    """

    def __call__(self, x: mx.array) -> mx.array:
        """As nn.Linear: (..., input_dims) to (..., output_dims), in the dtype of x."""
        return self._product(x)

    def to_linear(self, dtype: mx.Dtype = mx.float32) -> Linear:
        """A dense layer with the weights that this one stands for; 32 / bits times the memory in float32."""
        linear = Linear(1, 1, bias=self.has_bias)
        linear.weight = self.dequantize(dtype)
        if self.has_bias:
            linear.bias = self.bias.astype(dtype)
        return linear

    def to_dense(self, dtype: mx.Dtype = mx.float32) -> Module:
        """As `to_linear`."""
        return self.to_linear(dtype)

    @classmethod
    def from_linear(  # type: ignore[override]
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
    ) -> Self:
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
        return cls._quantized(
            linear,
            bits=bits,
            codebook=codebook,
            rotation=rotation,
            persist_rotation=persist_rotation,
            seed=seed,
            importance=importance,
            transform=transform,
        )

    def _describe(
        self, codebook: Codebook, transform: Transform | None, input_dims: int, output_dims: int, stack: int
    ) -> None:
        if stack != 1:
            raise RsvError("bad_argument", type(self).__name__, f"a stack of {stack} matrices is not one layer")
        super()._describe(codebook, transform, input_dims, output_dims, stack)
