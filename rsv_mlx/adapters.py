"""Adapters of mlx-lm's tuner (LoRA) on packed layers: trained beside the codes, fused with them in the end."""

from __future__ import annotations

import importlib
from functools import cache
from typing import Any

import numpy as np
from mlx.nn.layers.base import Module

import rsv_format
from rsv_format import RsvError
from rsv_mlx.embedding import QuantizedEmbedding
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.packed import Packed, dense_rows, weight_dtype, weight_shape


def adapted(layer: Packed, r: int, dropout: float, scale: float) -> Module:
    """mlx-lm's adapter of rank r on a packed layer, which stays as it is.

    Raises
    ------
    RsvError
        missing_dependency.
    """
    try:
        lora: Any = importlib.import_module("mlx_lm.tuner.lora")
    except ImportError as e:
        raise RsvError.of_import(e, "mlx_lm.tuner") from e
    if isinstance(layer, QuantizedEmbedding):
        made = _fusing(lora.LoRAEmbedding)(layer.output_dims, layer.input_dims, r, dropout, scale)
    elif isinstance(layer, QuantizedLinear):
        made = _fusing(lora.LoRALinear)(layer.input_dims, layer.output_dims, r, dropout, scale)
    else:
        sides = (layer.input_dims, layer.output_dims, layer.weight_shape[0])
        made = _fusing(lora.LoRASwitchLinear)(*sides, r, dropout, scale)
    setattr(made, _inner(made), layer)  # in the place of a dense one that nobody evaluates
    adapter: Module = made
    return adapter


def is_adapter(module: Module) -> bool:
    """Whether it is one of mlx-lm's adapters, which is no layer of a file."""
    return "lora_a" in module


@cache
def _fusing(kind: Any) -> Any:
    """mlx-lm's class of an adapter, which fuses with what a packed layer stands for."""

    def fuse(self: Any, dequantize: bool = False) -> Module:
        """The layer with what the adapter adds: dense, or packed in the basis of the layer that was adapted."""
        packed = self[_inner(self)]
        plain = kind.__new__(kind)
        dict.update(plain, self)
        vars(plain).update(vars(self))
        dense = packed.to_dense()
        setattr(plain, _inner(self), dense)
        fused: Module = plain.fuse(dequantize=True)
        return fused if dequantize else _packed_again(packed, fused)

    return type(kind.__name__, (kind,), {"fuse": fuse, "__doc__": kind.__doc__, "__module__": __name__})


def _inner(adapter: Module) -> str:
    return "embedding" if "embedding" in adapter else "linear"


def _packed_again(layer: Packed, dense: Module) -> Packed:
    """A dense layer, quantized as another one is: the same bits, kind of codebook, transform."""
    codebook, transform = layer.codebook, layer.transform
    trellis = codebook.window > codebook.bits
    kind = "trellis" if trellis else "uniform" if codebook.step is not None else "lloyd-max"
    shape = weight_shape(dense)
    assert shape is not None
    data = rsv_format.quantize_matrix(
        np.array(dense_rows(dense)).reshape(shape),
        bits=codebook.bits,
        codebook=kind,
        window=codebook.window if trellis else None,
        rotation="none",
        transform=None if transform is None else transform.to_format(),
    )
    made = type(layer).from_data(data, transform)
    made._hold(made.codes, made.scales, dense.get("bias"))
    if isinstance(made, QuantizedEmbedding):
        made.dtype = weight_dtype(layer)
    return made
