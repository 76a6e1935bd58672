"""Layers and tensors of a file to the modules and parameters of a model (SPEC section 9, binding)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding as AffineEmbedding
from mlx.nn.layers.quantized import QuantizedLinear as AffineLinear
from mlx.utils import tree_flatten

from rsv_format import Layer, RsvError
from rsv_mlx.embedding import QuantizedEmbedding
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.packed import Packed, SharedInput, weight_dtype, weight_shape
from rsv_mlx.switch import QuantizedSwitchLinear, is_switch

_NAMED = 8  # names that an error lists; the rest are counted


@dataclass(frozen=True)
class Place:
    """What comes in the place of a module: the layer's name in the file, its kind, and the module's dtype."""

    name: str
    kind: type[Packed]
    dtype: mx.Dtype


@dataclass(frozen=True)
class Plan:
    """Where everything goes.

    Attributes
    ----------
    packed : dict
        Path of a linear, embedding or switch module -> what takes its place.
    dense : dict
        Path of another module -> name of the layer whose dequantized weight it takes, and whether it has a bias.
    parameters : dict
        Path of a parameter -> array.
    """

    packed: dict[str, Place]
    dense: dict[str, tuple[str, bool]]
    parameters: dict[str, mx.array]


def make_plan(
    model: Module,
    layers: Mapping[str, Layer],
    tensors: Mapping[str, mx.array],
    dequantized: Callable[[str], dict[str, mx.array]],
    strict: bool,
) -> Plan:
    """Match names and shapes; nothing is changed.

    Parameters
    ----------
    model
        A skeleton. If it has mlx-lm's `sanitize`, names go through it.
    layers, tensors
        By their names in the file.
    dequantized : callable
        For a layer's name, its "weight" and "bias" as dense arrays: for a model that merges or converts
        weights as it loads them.
    strict : bool
        Every parameter must be in the file, and everything in the file in the model.

    Raises
    ------
    RsvError
        missing_layer, unexpected_layer, shape_mismatch.
    """
    placed, parameters = _sanitized(model, layers, tensors, dequantized)
    modules = dict(model.named_modules())  # type: ignore[no-untyped-call]
    wanted: dict[str, mx.array] = tree_flatten(model.parameters(), destination={})  # type: ignore
    packed: dict[str, Place] = {}
    dense: dict[str, tuple[str, bool]] = {}
    missing: list[str] = []
    unexpected: list[str] = []
    misshapen: list[str] = []
    for path, name in placed.items():
        layer, module = layers[name], modules.get(path)
        shape = None if module is None else weight_shape(module)
        if module is None or shape is None:
            unexpected.append(path)
            continue
        kind = packed_kind(module)
        has_bias = module.has_bias if isinstance(module, Packed) else "bias" in module
        if shape not in (_layer_shape(layer), (layer.stack, layer.out_features, layer.in_features)):
            misshapen.append(f"{path} {_layer_shape(layer)}, not {shape}")
        elif kind is not None:
            packed[path] = Place(name, kind, weight_dtype(module))
        else:
            dense[path] = name, has_bias
        if has_bias != (layer.bias_dtype is not None):
            (missing if has_bias else unexpected).append(f"{path}.bias")
    for path, array in parameters.items():
        if path not in wanted or path.rpartition(".")[0] in packed:
            unexpected.append(path)
        elif array.shape != wanted[path].shape:
            misshapen.append(f"{path} {array.shape}, not {wanted[path].shape}")
    missing += [path for path in wanted if path not in parameters and path.rpartition(".")[0] not in placed]
    if strict and missing:
        _refuse("missing_layer", missing, "the model has what the file has not")
    if strict and unexpected:
        _refuse("unexpected_layer", unexpected, "the file has what the model has not")
    if misshapen:
        _refuse("shape_mismatch", misshapen, "the file's and the model's shapes differ")
    refused = set(unexpected)
    return Plan(packed, dense, {path: array for path, array in parameters.items() if path not in refused})


def install(model: Module, layers: Mapping[str, Module], parameters: Mapping[str, mx.array]) -> None:
    """Put modules and parameters in their places, by their paths."""
    holders: dict[str, Any] = {"": model}

    def slot(path: str) -> tuple[Any, str | int]:
        parent, _, key = path.rpartition(".")
        if parent not in holders:
            holder, at = slot(parent)
            holders[parent] = holder[at]
        holder = holders[parent]
        return holder, int(key) if isinstance(holder, list) else key

    for path, value in [*layers.items(), *parameters.items()]:
        holder, at = slot(path)
        holder[at] = value


def packed_kind(module: Module) -> type[Packed] | None:
    """The packed layer that can take a module's place."""
    if isinstance(module, Linear | AffineLinear | QuantizedLinear):
        return QuantizedLinear
    if isinstance(module, Embedding | AffineEmbedding | QuantizedEmbedding):
        return QuantizedEmbedding
    return QuantizedSwitchLinear if isinstance(module, QuantizedSwitchLinear) or is_switch(module) else None


def share_inputs(layers: Mapping[str, Module]) -> None:
    """Let siblings with the same transform, such as q, k and v, transform their input once."""
    groups: dict[tuple[str, int], list[Packed]] = {}
    for path, layer in layers.items():
        if isinstance(layer, Packed) and layer.transform is not None:
            groups.setdefault((path.rpartition(".")[0], id(layer.transform)), []).append(layer)
    for group in groups.values():
        if len(group) > 1:
            shared = SharedInput()
            for layer in group:
                shared.join(layer)


def _sanitized(
    model: Module,
    layers: Mapping[str, Layer],
    tensors: Mapping[str, mx.array],
    dequantized: Callable[[str], dict[str, mx.array]],
) -> tuple[dict[str, str], dict[str, mx.array]]:
    """Path of a module -> name of the layer there, and the other parameters, both as the model calls them.

    Placeholders stand for the weights of layers: one that comes out of `sanitize` as it went in was at most
    renamed. Where one does not, it was dropped or merged into another weight: then the real one goes in.
    """
    zero = mx.array(0.0)
    stubs = {
        f"{name}.{part}": mx.broadcast_to(zero, shape)
        for name, layer in layers.items()
        for part, shape in (("weight", _layer_shape(layer)), ("bias", _layer_shape(layer)[:-1]))
        if part == "weight" or layer.bias_dtype is not None
    }
    if not hasattr(model, "sanitize"):
        return {name: name for name in layers}, dict(tensors)
    weights = _sanitize(model, dict(tensors) | stubs)
    left = {id(value) for value in weights.values()}
    vanished = [name for name in layers if id(stubs[f"{name}.weight"]) not in left]
    if vanished:
        for name in vanished:
            stubs.update({f"{name}.{part}": array for part, array in dequantized(name).items()})
        weights = _sanitize(model, dict(tensors) | stubs)
    origins = {id(stubs[f"{name}.{part}"]): (name, part) for name in layers.keys() - set(vanished)
               for part in ("weight", "bias") if f"{name}.{part}" in stubs}  # fmt: skip
    placed, parameters = {}, {}
    for path, value in weights.items():
        if id(value) not in origins:
            parameters[path] = value
        elif origins[id(value)][1] == "weight":
            placed[path.removesuffix(".weight")] = origins[id(value)][0]
    return placed, parameters


def _sanitize(model: Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """mlx-lm's, which may have been called before: Gemma's drops a head, and fails where there is none."""
    try:
        sanitized: dict[str, mx.array] = model.sanitize(dict(weights))
        return sanitized
    except KeyError:
        if weights.keys() <= tree_flatten(model.parameters(), destination={}).keys():  # type: ignore
            return weights
        raise


def _layer_shape(layer: Layer) -> tuple[int, ...]:
    shape = (layer.out_features, layer.in_features)
    return shape if layer.stack == 1 else (layer.stack, *shape)


def _refuse(code: str, names: list[str], why: str) -> NoReturn:
    listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    raise RsvError(code, names[0].split(" ")[0], f"{why}: {listed}")
