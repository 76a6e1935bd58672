"""An open file as a source: its layers dense, under the names of the weights that they stand for."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from numpy.typing import NDArray

from rsv_format.reader import File, Layer
from rsv_format.sources import Source, SourceTensor
from rsv_format.sources.base import dense_tensor


def as_source(file: File, path: str) -> Source:
    """What `open_source` would give of a file that held the weights dense; attachments are left out.

    Its tensors are read from the file, which must stay open.
    """
    tensors = {}
    for layer in file.layers.values():
        sides = (layer.out_features, layer.in_features)
        shape = sides if layer.stack == 1 else (layer.stack, *sides)
        name = f"{layer.name}.weight"
        tensors[name] = SourceTensor(name, "f32", shape, layer.dequantize, layer.dequantize)
        if layer.bias_dtype is not None:
            name = f"{layer.name}.bias"
            tensors[name] = dense_tensor(name, layer.bias_dtype, shape[:-1], _bias(layer, shape[:-1]))
    for tensor in file.tensors.values():
        read = partial(getattr, tensor, "array")
        tensors[tensor.name] = dense_tensor(tensor.name, tensor.dtype, tensor.shape, read)
    return Source("rsv", path, tensors)


def _bias(layer: Layer, shape: tuple[int, ...]) -> Callable[[], NDArray[Any]]:
    def read() -> NDArray[Any]:
        bias = layer.bias
        assert bias is not None
        return bias.reshape(shape)

    return read
