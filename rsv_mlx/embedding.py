"""QuantizedEmbedding: rows of W looked up, and the product with W as a tied head (SPEC section 8.4)."""

from __future__ import annotations

from typing import Any, Self

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.quantized import QuantizedEmbedding as AffineEmbedding

from rsv_format import RsvError
from rsv_mlx.codebook import Codebook
from rsv_mlx.packed import Packed, weight_dtype
from rsv_mlx.transform import Transform


class QuantizedEmbedding(Packed, AffineEmbedding):
    """An embedding whose table stays packed: a row is unpacked, and taken back to its basis, when looked up.

    Parameters as `Packed`, with input_dims the length of a row and output_dims the number of rows; neither
    bias nor stack.

    Attributes
    ----------
    dtype : mx.Dtype
        Of the rows that are looked up, float32 unless set: that of the model's activations. It is that of the
        parameter `one`, so it is cast and saved with the model.
    """

    @property
    def dtype(self) -> mx.Dtype:
        """Of the rows that are looked up."""
        one: mx.array = self["one"]
        return one.dtype

    @dtype.setter
    def dtype(self, dtype: mx.Dtype) -> None:
        self["one"] = mx.array(1, dtype)

    def __call__(self, x: mx.array) -> mx.array:
        """As nn.Embedding: integers (...) to rows (..., input_dims), in `dtype`."""
        if x.size == 0:
            return mx.zeros((*x.shape, self.input_dims), self.dtype)
        rows = self._rows(self.codes[x], self.scales[x])
        return rows.reshape(*x.shape, self.input_dims).astype(self.dtype)

    @classmethod
    def from_embedding(  # type: ignore[override]
        cls, embedding: Module, *, bits: int = 4, **options: Any
    ) -> Self:
        """Quantize an nn.Embedding or nn.QuantizedEmbedding; other options as `rsv_format.quantize_matrix`.

        Raises
        ------
        RsvError
            nonfinite_weight, importance_mismatch, bad_argument.
        """
        made = cls._quantized(embedding, bits=bits, **options)
        made.dtype = weight_dtype(embedding)
        return made

    def as_linear(self, x: mx.array) -> mx.array:
        """As nn.Embedding: x @ W.T, (..., input_dims) to (..., output_dims), in the dtype of x."""
        return self._product(x)

    def to_dense(self, dtype: mx.Dtype = mx.float32) -> Module:
        """An nn.Embedding with the table that this one stands for."""
        embedding = Embedding(1, 1)
        embedding.weight = self.dequantize(dtype)
        return embedding

    def _describe(
        self, codebook: Codebook, transform: Transform | None, input_dims: int, output_dims: int, stack: int
    ) -> None:
        if stack != 1:
            raise RsvError("bad_argument", type(self).__name__, f"a stack of {stack} matrices is not one table")
        super()._describe(codebook, transform, input_dims, output_dims, stack)
        dict.update(self, one=mx.array(1, mx.float32))
        self._no_grad.add("one")

    def _hold(self, codes: mx.array, scales: mx.array, bias: mx.array | None = None) -> None:
        if bias is not None:
            raise RsvError("bad_argument", type(self).__name__, "an embedding has no bias")
        super()._hold(codes, scales)

    def _admitted(self, key: str, value: mx.array) -> mx.array:
        if key == "one" and value.shape == () and mx.issubdtype(value.dtype, mx.floating):
            return value
        if key in ("one", "bias"):
            raise RsvError("bad_argument", key, "an embedding has no bias, and one number, 1, in the dtype of its rows")
        return super()._admitted(key, value)
