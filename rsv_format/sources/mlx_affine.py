"""MLX affine-quantized weights, made dense in numpy: w = scale * code + bias per group of input channels.

The packed words are those of RSV (SPEC section on packing): 32 codes are b little-endian uint32 words.  Words and
scales tell group_size * bits alone; the config tells both, for all layers and for some, and where it does not fit or
leaves a layer out, the width of the layer's input does.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.packing import unpack
from rsv_format.sources.base import Floats, SourceTensor, from_float32
from rsv_format.sources.foreign import announced

Tensors = Mapping[str, SourceTensor]

GROUP_SIZES = (32, 64, 128)
BITS = (2, 3, 4, 5, 6, 8)
_SMALL_FLOATS = {32 * 4: "mxfp4", 16 * 4: "nvfp4", 32 * 8: "mxfp8"}  # group_size * bits, where scales are bytes
_FROM_HIDDEN = frozenset({"q_proj", "k_proj", "v_proj", "qkv_proj", "gate_proj", "up_proj", "gate_up_proj", "gate"})
_TABLES = frozenset({"embed_tokens", "lm_head"})
_NORMS = ("input_layernorm", "post_attention_layernorm", "pre_feedforward_layernorm")
_BLOCK = re.compile(r"(?:.+\.)?layers\.\d+(?=\.)")


@dataclass(frozen=True)
class Grouping:
    group_size: int
    bits: int


def is_quantized(tensors: Tensors) -> bool:
    """Whether there are weights in MLX's packed words."""
    return any(x.dtype == "u32" and _scales_of(name) in tensors for name, x in tensors.items())


def dequantized(tensors: Tensors, config: Mapping[str, Any], where: str) -> dict[str, SourceTensor]:
    """Replace every weight, scales, biases triple by one dense tensor, kept in the dtype of its scales.

    Raises
    ------
    RsvError
        `source_unsupported` for MLX's modes with small floats; `source_invalid` where shapes and settings do not fit,
        or more than one setting would.
    """
    settings = _settings(config)
    dense: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        layer, _, part = name.rpartition(".")
        if part not in ("weight", "scales", "biases") or not _is_packed(layer, tensors):
            dense[name] = tensor
        elif part == "weight":
            dense[name] = _dequantized(layer, tensors, settings, where)
    return dense


def _is_packed(layer: str, tensors: Tensors) -> bool:
    weight = tensors.get(f"{layer}.weight")
    return weight is not None and weight.dtype == "u32" and f"{layer}.scales" in tensors


def _scales_of(name: str) -> str:
    layer, _, part = name.rpartition(".")
    return f"{layer}.scales" if part == "weight" else ""


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """What the config says of MLX's quantization, nothing if it does not."""
    found = (entry for _, entry in announced(config) if isinstance(entry, Mapping))
    return next((entry for entry in found if "bits" in entry or "mode" in entry), {})


def _dequantized(layer: str, tensors: Tensors, settings: Mapping[str, Any], where: str) -> SourceTensor:
    weight, scales, biases = (tensors.get(f"{layer}.{part}") for part in ("weight", "scales", "biases"))
    assert weight is not None and scales is not None
    place, own = f"{where}: {layer}", settings.get(layer)
    entry = {**settings, **own} if isinstance(own, Mapping) else settings
    words, groups = (x.shape[-1] if x.shape else 0 for x in (weight, scales))
    product, rest = divmod(32 * words, groups) if groups else (0, 0)  # group_size * bits
    mode = entry.get("mode", "affine")
    if mode == "affine" and scales.dtype == "u8":
        mode = _SMALL_FLOATS.get(product, "with bytes for scales")
    if mode != "affine":
        raise RsvError("source_unsupported", place, f"MLX quantization mode {mode!r} cannot be read")
    declared = _declared(entry, place)
    if not isinstance(own, Mapping) and product and not rest:
        declared = _inferred(product, groups, _input_width(layer, tensors), declared)
    if declared is None:
        detail = f"words {weight.shape} and scales {scales.shape} fit more than one group_size and bits, or none"
        raise RsvError("source_invalid", place, f"no config tells how it is quantized: {detail}")
    return _dense(weight, scales, biases, declared, where)


def _declared(entry: Mapping[str, Any], place: str) -> Grouping | None:
    if not entry:
        return None
    group_size, bits = entry.get("group_size", 64), entry.get("bits", 4)
    if type(group_size) is not int or type(bits) is not int or group_size not in GROUP_SIZES or bits not in BITS:
        detail = f"group_size {group_size!r} with bits {bits!r} is no MLX affine quantization"
        raise RsvError("source_invalid", place, detail)
    return Grouping(group_size, bits)


def _inferred(product: int, groups: int, width: int | None, declared: Grouping | None) -> Grouping | None:
    """For a layer without settings of its own: what fits its input's width, or is nearest to the model's settings."""
    possible = [Grouping(size, product // size) for size in GROUP_SIZES if product % size == 0]
    possible = [x for x in possible if x.bits in BITS]
    fitting = [x for x in possible if x.group_size * groups == width]
    if len(fitting) == 1:
        return fitting[0]
    if not possible or declared in possible:
        return declared
    alike = [x for x in possible if declared is not None and x.group_size == declared.group_size]
    return next((some[0] for some in (alike, possible) if len(some) == 1), None)


def _input_width(layer: str, tensors: Tensors) -> int | None:
    """Input channels of a layer, where the tensors beside it tell: the norm before it, or the layers before it."""
    parent, _, own = layer.rpartition(".")
    if own == "down_proj":
        before = (tensors.get(f"{parent}.{name}.weight") for name in ("up_proj", "gate_proj"))
        return next((x.shape[-2] for x in before if x is not None and len(x.shape) > 1), None)
    norms = []
    if own in _TABLES:
        norms = [name for name in tensors if name.endswith(f".layers.0.{_NORMS[0]}.weight")]
    elif own in _FROM_HIDDEN and (block := _BLOCK.match(layer)) is not None:
        norms = [f"{block[0]}.{norm}.weight" for norm in _NORMS if f"{block[0]}.{norm}.weight" in tensors]
    widths = {tensors[name].shape for name in norms}
    return widths.pop()[0] if len(widths) == 1 and len(next(iter(widths))) == 1 else None


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

    def rows_of(start: int, stop: int) -> SourceTensor:
        words, factors, offsets = (x.row_part(start, stop) for x in (weight, scales, biases))
        return _dense(words, factors, offsets, grouping, where)

    return SourceTensor(
        weight.name, scales.dtype, shape, lambda: from_float32(float32(), scales.dtype, place), float32,
        rows=rows_of if len(shape) > 1 and weight.rows is not None else None,
    )  # fmt: skip
