"""What the quantized layers have in common: a weight that stays packed.

What a layer's codes mean is said by its codebook and its transform, which are no parameters: so the names of the
parameters end with a digest of both, and codes of another basis do not fit, in `load_weights` or wherever parameters
go by their names.
"""

from __future__ import annotations

from collections.abc import Mapping
from hashlib import blake2b
from typing import Any, NoReturn, Self

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module

import rsv_format
from rsv_format import LayerData, RsvError
from rsv_mlx.codebook import Codebook
from rsv_mlx.transform import Transform

_MLX_ONLY = frozenset({"biases", "group_size", "mode"})  # what MLX's quantized layers have besides
_REFUSAL = (
    "the layer is RSV's, not MLX's kind: rsv_mlx.save writes it, rsv_mlx.shard shards it, load(materialize='dense') "
    "makes it MLX's own"
)


class Packed(Module):
    """A module whose weight stays packed; its input is transformed instead of its weight.

    Products and sums are taken in float32: no input overflows on the way, and MLX's CPU kernels are fastest
    there. The parameters are frozen; gradients reach the input. They may be set to others of the same shape and
    basis; scales stay float32, whatever a model is cast to.

    Parameters
    ----------
    codes : uint32 (rows, ceil(input_dims / 32) * bits)
        Packed.
    scales : float32 (rows,)
    codebook : Codebook
    transform : Transform, optional
        None is the identity.
    bias : (rows,), optional
    input_dims : int
    stack : int
        How many equal matrices the rows are.
    """

    bias: mx.array
    _keys: tuple[str, str]

    def __init__(
        self,
        codes: mx.array,
        scales: mx.array,
        codebook: Codebook,
        transform: Transform | None = None,
        bias: mx.array | None = None,
        *,
        input_dims: int,
        stack: int = 1,
    ) -> None:
        Module.__init__(self)  # type: ignore[no-untyped-call]
        self._describe(codebook, transform, input_dims, scales.size // stack, stack)
        self._hold(codes, scales, bias)

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
        codes, scales = mx.array(data.codes), mx.array(data.scales)
        return cls(codes, scales, codebook, transform, bias, input_dims=data.in_features, stack=data.stack)

    @classmethod
    def _quantized(cls, module: Module, **options: Any) -> Self:
        """A layer of MLX, quantized as `rsv_format.quantize_matrix` does it; its bias is kept."""
        shape = weight_shape(module)
        assert shape is not None
        data = rsv_format.quantize_matrix(np.array(dense_rows(module)).reshape(shape), **options)
        layer = cls.from_data(data)
        layer._hold(layer.codes, layer.scales, module.get("bias"))
        return layer

    def _describe(
        self, codebook: Codebook, transform: Transform | None, input_dims: int, output_dims: int, stack: int
    ) -> None:
        self.codebook = codebook
        self.transform = transform
        self.input_dims = input_dims
        self.output_dims = output_dims
        basis = blake2b(codebook.digest + (b"" if transform is None else transform.digest), digest_size=4).hexdigest()
        vars(self)["_keys"] = f"codes_{basis}", f"scales_{basis}"  # among the items it would be a parameter

    def _hold(self, codes: mx.array, scales: mx.array, bias: mx.array | None = None) -> None:
        arrays = dict(zip(self._keys, (codes, scales), strict=True)) | ({} if bias is None else {"bias": bias})
        dict.update(self, arrays)
        self._no_grad.update(arrays)

    @property
    def codes(self) -> mx.array:
        """Packed, uint32 (rows, row_words)."""
        codes: mx.array = self[self._keys[0]]
        return codes

    @codes.setter
    def codes(self, codes: mx.array) -> None:
        self[self._keys[0]] = codes

    @property
    def scales(self) -> mx.array:
        """Of the rows, float32 (rows,)."""
        scales: mx.array = self[self._keys[1]]
        return scales

    @scales.setter
    def scales(self, scales: mx.array) -> None:
        self[self._keys[1]] = scales

    @property
    def weight(self) -> mx.array:
        """The dense weight, made anew each time; set to another, the layer becomes MLX's own dense one."""
        return self.dequantize()

    @weight.setter
    def weight(self, weight: mx.array) -> None:
        self._become_dense(weight)

    @property
    def dtype(self) -> mx.Dtype:
        """Of what is computed."""
        return mx.float32

    @property
    def bits(self) -> NoReturn:
        """Not there: mlx-lm counts, saves and adapts layers by it, and would take words for weights."""
        raise RsvError("bad_argument", f"{type(self).__name__}.bits", _REFUSAL)

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        return "bias" in self

    @property
    def weight_shape(self) -> tuple[int, ...]:
        """Of the dense weight that the layer stands for."""
        return (self.output_dims, self.input_dims)

    def __getattr__(self, key: str) -> Any:
        if key in _MLX_ONLY:
            raise AttributeError(f"{type(self).__name__} has no {key}: {_REFUSAL}")
        return super().__getattr__(key)

    def __setattr__(self, key: str, value: Any) -> None:
        if key in ("codes", "scales", "weight"):
            object.__setattr__(self, key, value)
        else:
            super().__setattr__(key, value)

    def __setitem__(self, key: str, value: Any) -> None:
        super().__setitem__(key, self._admitted(key, value) if isinstance(value, mx.array) else value)

    def _admitted(self, key: str, value: mx.array) -> mx.array:
        """An array as the parameter of this name; refused if it cannot be one."""
        codes, scales = self._keys
        if key not in (codes, scales, "bias"):
            raise RsvError("bad_argument", key, f"{type(self).__name__} has {codes}, {scales} and a bias")
        held = self[codes if key == codes else scales]
        if value.shape != held.shape:
            raise RsvError("shape_mismatch", key, f"{value.shape}, not {held.shape}")
        if (value.dtype != mx.uint32) if key == codes else not mx.issubdtype(value.dtype, mx.floating):
            raise RsvError("bad_argument", key, f"it cannot be {value.dtype}")
        if key != scales or value.dtype == mx.float32:
            return value
        return held if mx.array_equal(value, held.astype(value.dtype)) else value.astype(mx.float32)

    def _become_dense(self, weight: Any) -> None:
        """Turn into the layer of MLX that has this weight, where others hold this object: a model may set it in
        each call."""
        if not isinstance(weight, mx.array) or weight.shape != self.weight_shape:
            raise RsvError("shape_mismatch", f"{type(self).__name__}.weight", f"an array of {self.weight_shape} is")
        if not mx.issubdtype(weight.dtype, mx.floating):
            raise RsvError("bad_argument", f"{type(self).__name__}.weight", f"it cannot be {weight.dtype}")
        arrays = {"weight": weight} | ({"bias": self.bias} if self.has_bias else {})
        kept = {name: value for name, value in vars(self).items() if name in ("_training", "rsv_base")}
        dense: Any = type(self.to_dense())
        dict.clear(self)
        vars(self).clear()
        self.__class__ = dense
        dict.update(self, arrays)
        vars(self).update(kept, _no_grad=set(arrays))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _remade, (type(self), dict(self), dict(vars(self)))

    def children(self) -> dict[str, Any]:
        """None."""
        return {}

    def unfreeze(self, **kwargs: Any) -> Module:
        """As nn.Module's, but the layer's own parameters stay frozen."""
        Module.unfreeze(self, **kwargs)
        return self.freeze(recurse=False)

    def dequantize(self, dtype: mx.Dtype = mx.float32) -> mx.array:
        """The dense weight in the original basis, `weight_shape`."""
        return self._rows(self.codes, self.scales).reshape(self.weight_shape).astype(dtype)

    def to_lora(self, r: int = 8, dropout: float = 0.0, scale: float = 20.0) -> Module:
        """mlx-lm's adapter on this layer, which stays packed; the adapter's `fuse` makes a layer of both again."""
        from rsv_mlx.adapters import adapted  # which knows the kinds of layers

        return adapted(self, r, dropout, scale)

    def to_dense(self, dtype: mx.Dtype = mx.float32) -> Module:
        """MLX's own module with the weights that this one stands for."""
        raise NotImplementedError

    def _rows(self, codes: mx.array, scales: mx.array) -> mx.array:
        """Rows of W, float32 (..., input_dims), from packed ones (..., row_words) and their scales (...)."""
        w = self.codebook.dequantize(codes.reshape(-1, codes.shape[-1]), self.input_dims) * scales.reshape(-1, 1)
        return w if self.transform is None else self.transform.inverse(w)

    def _product(self, x: mx.array) -> mx.array:
        """x @ W.T + bias, (..., input_dims) to (..., output_dims), in the dtype of x."""
        dtype = self._checked(x)
        if x.size == 0:
            return mx.zeros((*x.shape[:-1], self.output_dims), dtype)
        y = self.codebook.matmul(self._transformed(x), self.codes) * self.scales
        if self.has_bias:
            y = y + self.bias
        return y.astype(dtype)

    def _checked(self, x: mx.array) -> mx.Dtype:
        """The dtype of the result for this input."""
        if x.shape[-1] != self.input_dims:
            raise ValueError(f"[{type(self).__name__}] the last axis of {x.shape} is not input_dims={self.input_dims}")
        return x.dtype if mx.issubdtype(x.dtype, mx.floating) else mx.float32

    def _transformed(self, x: mx.array) -> mx.array:
        x = x.astype(mx.float32)
        return x if self.transform is None else self.transform(x)

    def _extra_repr(self) -> str:
        kind = "uniform" if self.codebook.step is not None else "table"
        return (
            f"input_dims={self.input_dims}, output_dims={self.output_dims}, bias={self.has_bias}, "
            f"bits={self.codebook.bits}, window={self.codebook.window}, codebook={kind}, "
            f"transform={self.transform is not None}"
        )


def _remade(kind: type[Packed], items: Mapping[str, Any], attributes: Mapping[str, Any]) -> Packed:
    """A layer of what another one held: a copy, or one that was pickled."""
    layer = kind.__new__(kind)
    vars(layer).update(attributes)
    dict.update(layer, items)
    return layer


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
