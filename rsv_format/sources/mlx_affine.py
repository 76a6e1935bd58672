"""MLX affine-quantized weights, made dense in numpy: w = scale * code + bias per group of input channels.

The packed words are those of RSV (SPEC section on packing): 32 codes are b little-endian uint32 words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.packing import unpack
from rsv_format.sources.base import Floats, SourceTensor, from_float32

GROUP_SIZES = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)
_CONFIG_KEYS = ("quantization", "quantization_config")


@dataclass(frozen=True)
class Grouping:
    group_size: int
    bits: int


def is_quantized(config: dict[str, Any], where: str) -> bool:
    """Whether a config announces MLX quantization; any other announced kind is `source_unsupported`."""
    announced = _announced(config)
    if announced is None:
        return False
    if not isinstance(announced, dict):
        raise RsvError("source_invalid", where, "config.json: quantization is not an object")
    if "quant_method" in announced:
        method = announced["quant_method"]
        raise RsvError("source_unsupported", where, f"weights quantized by {method!r} cannot be read")
    return True


def stripped(config: dict[str, Any]) -> dict[str, Any]:
    """The config of the dense model."""
    return {key: value for key, value in config.items() if key not in _CONFIG_KEYS}


def dequantized(tensors: dict[str, SourceTensor], config: dict[str, Any], where: str) -> dict[str, SourceTensor]:
    """Replace every weight, scales, biases triple by one dense tensor, kept in the dtype of its scales."""
    quantization = _announced(config)
    assert quantization is not None
    dense: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if f"{layer}.scales" not in tensors or part not in ("weight", "scales", "biases"):
            dense[name] = tensor
        elif part == "weight":
            grouping = _grouping(quantization, layer, where)
            dense[name] = _dense(tensor, tensors[f"{layer}.scales"], tensors.get(f"{layer}.biases"), grouping, where)
    return dense


def _announced(config: dict[str, Any]) -> Any:
    return next((config[key] for key in _CONFIG_KEYS if config.get(key) is not None), None)


def _grouping(quantization: dict[str, Any], layer: str, where: str) -> Grouping:
    """The layer's own entry if it has one, else the model's."""
    own = quantization.get(layer)
    entry = {**quantization, **own} if isinstance(own, dict) else quantization
    mode, group_size, bits = entry.get("mode", "affine"), entry.get("group_size", 64), entry.get("bits", 4)
    if mode != "affine":
        raise RsvError("source_unsupported", f"{where}: {layer}", f"MLX quantization mode {mode!r} cannot be read")
    if type(group_size) is not int or type(bits) is not int or group_size not in GROUP_SIZES or bits not in BITS:
        detail = f"group_size {group_size!r} with bits {bits!r} is no MLX affine quantization"
        raise RsvError("source_invalid", f"{where}: {layer}", detail)
    return Grouping(group_size, bits)


def _dense(
    weight: SourceTensor, scales: SourceTensor, biases: SourceTensor | None, grouping: Grouping, where: str
) -> SourceTensor:
    place = f"{where}: {weight.name}"
    if biases is None:
        raise RsvError("source_invalid", place, "has scales but no biases")
    *rows, groups = scales.shape or (0,)
    in_features = groups * grouping.group_size
    if (
        in_features == 0
        or weight.dtype != "u32"
        or weight.shape != (*rows, in_features // 32 * grouping.bits)
        or scales.dtype not in ("f16", "bf16", "f32")
        or (biases.dtype, biases.shape) != (scales.dtype, scales.shape)
    ):
        detail = (
            f"{weight.dtype} {weight.shape} with scales {scales.dtype} {scales.shape} and biases "
            f"{biases.dtype} {biases.shape} is not {grouping.bits} bits in groups of {grouping.group_size}"
        )
        raise RsvError("source_invalid", place, detail)
    shape = (*rows, in_features)

    def float32() -> Floats:
        words = weight.read()
        codes = unpack(words.reshape(-1, words.shape[-1]), grouping.bits, in_features)
        values = codes.astype(np.float32).reshape(*scales.shape, grouping.group_size)
        values *= scales.float32()[..., None]
        values += biases.float32()[..., None]
        return values.reshape(shape)

    return SourceTensor(weight.name, scales.dtype, shape, lambda: from_float32(float32(), scales.dtype, place), float32)
