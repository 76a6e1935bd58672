"""Layers and tensors of a file to the modules and parameters of a model (SPEC section 9, binding)."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding as AffineEmbedding
from mlx.nn.layers.quantized import QuantizedLinear as AffineLinear
from mlx.utils import tree_flatten

from rsv_format import Layer, RsvError, is_out_of_memory
from rsv_mlx.embedding import QuantizedEmbedding
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.packed import Packed, weight_dtype, weight_shape
from rsv_mlx.switch import QuantizedSwitchLinear, is_switch
from rsv_mlx.tracing import Trace, alias, make_stub, trace
from rsv_mlx.uses import assigned

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
    kept : set
        Those parameters that are tensors of the file as they were.
    """

    packed: dict[str, Place]
    dense: dict[str, tuple[str, bool]]
    parameters: dict[str, mx.array]
    kept: set[str]


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
    placed, parameters, kept = _sanitized(model, layers, tensors, dequantized)
    modules = dict(model.named_modules())  # type: ignore[no-untyped-call]
    wanted = _wanted(model)
    own = assigned(modules.values())
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
        elif kind is not None and path.rpartition(".")[2] not in own:
            packed[path] = Place(name, kind, weight_dtype(module))
        else:
            dense[path] = name, has_bias
        if has_bias != (layer.bias_dtype is not None):
            (missing if has_bias else unexpected).append(f"{path}.bias")
    for path, array in parameters.items():
        if path not in wanted or path.rpartition(".")[0] in packed:
            unexpected.append(path)
        elif array.shape != wanted[path]:
            misshapen.append(f"{path} {array.shape}, not {wanted[path]}")
    missing += [path for path in wanted if path not in parameters and path.rpartition(".")[0] not in placed]
    if strict and missing:
        _refuse("missing_layer", missing, "the model has what the file has not")
    if strict and unexpected:
        _refuse("unexpected_layer", unexpected, "the file has what the model has not")
    if misshapen:
        _refuse("shape_mismatch", misshapen, "the file's and the model's shapes differ")
    taken = {path: array for path, array in parameters.items() if path not in set(unexpected)}
    return Plan(packed, dense, taken, kept & taken.keys())


def _wanted(model: Module) -> dict[str, tuple[int, ...]]:
    """Names and shapes of a model's parameters, of packed layers what they stand for: no such layer is read for it."""

    def is_leaf(value: Any) -> bool:
        return isinstance(value, Packed) or not isinstance(value, dict | list)

    tree = model.filter_and_map(Module.valid_parameter_filter, is_leaf_fn=lambda m, k, v: is_leaf(v))
    leaves: dict[str, Any] = tree_flatten(tree, is_leaf=lambda v: isinstance(v, Packed), destination={})  # type: ignore
    wanted: dict[str, tuple[int, ...]] = {}
    for path, held in leaves.items():
        if isinstance(held, Packed):
            wanted[f"{path}.weight"] = held.weight_shape
            if held.has_bias:
                wanted[f"{path}.bias"] = held.weight_shape[:-1]
        else:
            wanted[path] = held.shape
    return wanted


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
    for kind in (QuantizedLinear, QuantizedEmbedding, QuantizedSwitchLinear):
        if isinstance(module, kind):
            return kind
    if _acts_as(module, Linear, AffineLinear):
        return QuantizedLinear
    if _acts_as(module, Embedding, AffineEmbedding):
        return QuantizedEmbedding
    return QuantizedSwitchLinear if is_switch(module) else None


def _acts_as(module: Module, *kinds: type[Module]) -> bool:
    """Whether it is one of these, or a subclass that does the same when it is called."""
    return any(
        isinstance(module, kind)
        and all(getattr(type(module), name, None) is getattr(kind, name, None) for name in ("__call__", "as_linear"))
        for kind in kinds
    )


def _sanitized(
    model: Module,
    layers: Mapping[str, Layer],
    tensors: Mapping[str, mx.array],
    dequantized: Callable[[str], dict[str, mx.array]],
) -> tuple[dict[str, str], dict[str, mx.array], set[str]]:
    """Path of a module -> name of the layer there, and the other parameters, both as the model calls them; and which
    of those parameters are the file's tensors as they were.

    Stubs stand for the weights of layers. A layer whose stubs come out of `sanitize` as they went in was at most
    renamed, or dropped if they do not come out at all. Where something was made of one, the real weight goes in: as
    often as that shows new ones, since what `sanitize` does may depend on what it is given.
    """
    if not hasattr(model, "sanitize"):
        return {name: name for name in layers}, dict(tensors), set(tensors)
    stubs = {f"{name}.{part}": make_stub(shape) for name, layer in layers.items() for part, shape in _parts(layer)}
    real: dict[str, mx.array] = {}
    before = _structure(model)
    while True:
        given = {**tensors, **stubs, **real}
        results = _sanitize(model, {name: alias(array) for name, array in given.items()})
        found = trace({**tensors, **stubs}, results)
        paths: dict[str, set[str]] = {}
        for path, origin in found.origins.items():
            paths.setdefault(origin, set()).add(path)
        changed = [
            name
            for name, layer in layers.items()
            if f"{name}.weight" in stubs and not _renamed(name, layer, paths, found, results)
        ]
        if not changed:
            break
        for name in changed:
            real.update({f"{name}.{part}": array for part, array in dequantized(name).items()})
            for part, _ in _parts(layers[name]):
                del stubs[f"{name}.{part}"]
        _restore(before)
    placed = {path.removesuffix(".weight"): name for name in layers for path in paths.get(f"{name}.weight", ())}
    parameters = {path: array for path, array in results.items() if found.origins.get(path) not in stubs}
    return placed, parameters, found.origins.keys() & parameters.keys()


def changed_when_loaded(model: Module, paths: Collection[str]) -> set[str]:
    """Those of these layers, which MLX has not quantized, that `sanitize` makes something else of: packed, they would
    not be what they are now when they are loaded."""
    if not hasattr(model, "sanitize"):
        return set()
    modules = dict(model.named_modules())  # type: ignore[no-untyped-call]
    stubs = {f"{path}.weight": make_stub(modules[path].weight.shape) for path in paths if "scales" not in modules[path]}
    own: dict[str, mx.array] = tree_flatten(model.parameters(), destination={})  # type: ignore
    before = _structure(model)
    try:
        results = model.sanitize({name: alias(array) for name, array in (own | stubs).items()})
    except Exception as e:  # it is meant for checkpoints
        if is_out_of_memory(e):
            raise
        return set()
    finally:
        _restore(before)
    return {name.removesuffix(".weight") for name in trace(stubs, results).touched}


def _parts(layer: Layer) -> list[tuple[str, tuple[int, ...]]]:
    """Names and shapes of what a layer stands for in a checkpoint."""
    shape = _layer_shape(layer)
    return [("weight", shape)] if layer.bias_dtype is None else [("weight", shape), ("bias", shape[:-1])]


def _renamed(
    name: str, layer: Layer, paths: Mapping[str, set[str]], found: Trace, results: Mapping[str, mx.array]
) -> bool:
    """Whether a layer came through as a whole, unchanged and with no other's bias, or was dropped."""
    places = []
    for part, _ in _parts(layer):
        ends = paths.get(f"{name}.{part}", set())
        if f"{name}.{part}" in found.touched or not all(path.endswith(f".{part}") for path in ends):
            return False
        places.append({path.removesuffix(f".{part}") for path in ends})
    if len(places) == 1 and any(f"{place}.bias" in results for place in places[0]):
        return False
    return all(place == places[0] for place in places)


def _structure(model: Module) -> list[tuple[Module, dict[str, Any], dict[str, Any]]]:
    """What the modules of a model hold."""
    return [(module, dict(module), dict(vars(module))) for module in model.modules() if not isinstance(module, Packed)]  # type: ignore


def _restore(structure: list[tuple[Module, dict[str, Any], dict[str, Any]]]) -> None:
    """Give modules back what they held: `sanitize` may drop a module that has no weights, a head that is tied."""
    for module, items, attributes in structure:
        for held, was in ((module, items), (vars(module), attributes)):
            dict.clear(held)  # a module's own `update` is another
            dict.update(held, was)


def _sanitize(model: Module, weights: dict[str, mx.array]) -> dict[str, mx.array]:
    """mlx-lm's, which may have been called before: Gemma's drops a head, and fails where there is none."""
    try:
        sanitized: dict[str, mx.array] = model.sanitize(dict(weights))
        return sanitized
    except KeyError:
        if weights.keys() <= _wanted(model).keys():
            return weights
        raise


def _layer_shape(layer: Layer) -> tuple[int, ...]:
    shape = (layer.out_features, layer.in_features)
    return shape if layer.stack == 1 else (layer.stack, *shape)


def _refuse(code: str, names: list[str], why: str) -> NoReturn:
    listed = ", ".join(names[:_NAMED]) + (f" and {len(names) - _NAMED} more" if len(names) > _NAMED else "")
    raise RsvError(code, names[0].split(" ")[0], f"{why}: {listed}")
