"""QuantizedSwitchLinear: a stack of expert matrices, of which each input takes its own (SPEC section 8.1)."""

from __future__ import annotations

import sys
from math import prod
from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module

from rsv_mlx.codebook import Codebook
from rsv_mlx.packed import Packed
from rsv_mlx.transform import Transform


class QuantizedSwitchLinear(Packed):
    """In place of mlx-lm's SwitchLinear, its weight packed. Parameters as `Packed`; they are held as

    codes : uint32 (num_experts, output_dims, row_words)
    scales : float32 (num_experts, output_dims)
    bias : (num_experts, output_dims), optional
    """

    @classmethod
    def from_switch_linear(cls, switch: Module, *, bits: int = 4, **options: Any) -> Self:
        """Quantize a SwitchLinear or QuantizedSwitchLinear of mlx-lm; other options as
        `rsv_format.quantize_matrix`.

        Raises
        ------
        RsvError
            nonfinite_weight, importance_mismatch, bad_argument.
        """
        return cls._quantized(switch, bits=bits, **options)

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        """As mlx-lm's: x (..., n, input_dims) and experts' numbers (...), broadcast against each other, to
        (..., n, output_dims) in the dtype of x."""
        dtype = self._checked(x)
        shape = (*mx.broadcast_shapes(x.shape[:-2], indices.shape), x.shape[-2], self.output_dims)
        if prod(shape) == 0:
            return mx.zeros(shape, dtype)
        y = self.codebook.gather_matmul(self._transformed(x), self.codes, indices, sorted_indices)
        y = y * self.scales[indices][..., None, :]
        if self.has_bias:
            y = y + self.bias[indices][..., None, :]
        return y.astype(dtype)

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the dense weight that the layer stands for."""
        return (self.num_experts, self.output_dims, self.input_dims)

    def to_dense(self, dtype: mx.Dtype = mx.float32) -> Module:
        """A SwitchLinear of mlx-lm with the weights that this one stands for."""
        from mlx_lm.models.switch_layers import SwitchLinear

        dense: Module = SwitchLinear(1, 1, 1, bias=self.has_bias)
        dense.weight = self.dequantize(dtype)
        if self.has_bias:
            dense.bias = self.bias.astype(dtype)
        return dense

    def _describe(
        self, codebook: Codebook, transform: Transform | None, input_dims: int, output_dims: int, stack: int
    ) -> None:
        super()._describe(codebook, transform, input_dims, output_dims, stack)
        self.num_experts = stack

    def _hold(self, codes: mx.array, scales: mx.array, bias: mx.array | None = None) -> None:
        shape = (self.num_experts, self.output_dims)
        bias = None if bias is None else bias.reshape(shape)
        super()._hold(codes.reshape(*shape, codes.shape[-1]), scales.reshape(shape), bias)

    def _extra_repr(self) -> str:
        return f"num_experts={self.num_experts}, {super()._extra_repr()}"


def is_switch(module: Module) -> bool:
    """Whether it is a SwitchLinear of mlx-lm, quantized or not, and does the same when it is called. mlx-lm's takes
    seconds to import: nobody has one who has not done so."""
    layers = sys.modules.get("mlx_lm.models.switch_layers")
    kinds = () if layers is None else (layers.SwitchLinear, layers.QuantizedSwitchLinear)
    return any(isinstance(module, kind) and type(module).__call__ is kind.__call__ for kind in kinds)
