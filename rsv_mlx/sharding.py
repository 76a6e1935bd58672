"""Tensor parallelism: each process keeps some of the rows of each packed layer.

MLX cuts a layer along its outputs, or along its inputs where those lie apart already, and adds what comes out. A
transform mixes all inputs, so packed layers are cut along the outputs in both cases: where the inputs lie apart they
are gathered, and where what comes out would be added, rows that others have are zeros, or come from them. The result
is that of the whole layer, for any transform.
"""

from __future__ import annotations

from types import FunctionType
from typing import Any

import mlx.core as mx
from mlx.nn.layers import distributed
from mlx.nn.layers.base import Module

from rsv_format import RsvError
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.packed import Packed
from rsv_mlx.switch import QuantizedSwitchLinear

_OUT, _IN = "all-to-sharded", "sharded-to-all"


def shard(model: Module, group: mx.distributed.Group | None = None) -> None:
    """Cut a model into as many parts as a group has processes, as its own `shard` does, in place.

    Parameters
    ----------
    model : Module
        Of mlx-lm, loaded in each process; with `lazy=True` no more than a layer is whole at a time.
    group : mx.distributed.Group, optional
        The global one if not given.

    Raises
    ------
    RsvError
        unsupported_model: mlx-lm cannot shard it, or shards it in a way that packed layers do not know, which is said
        before anything is changed where it can be; shape_mismatch: rows that cannot be dealt out.
    """
    group = group or mx.distributed.init()
    inner = getattr(model, "language_model", None)
    if isinstance(inner, Module) and hasattr(inner, "shard"):
        return shard(inner, group)
    method = getattr(type(model), "shard", None)
    if not isinstance(method, FunctionType):
        raise RsvError("unsupported_model", type(model).__module__, "mlx-lm has no tensor parallelism for it")
    names = {"shard_linear": _shard_linear, "shard_inplace": _shard_inplace}
    if not set(method.__code__.co_names) & names.keys():
        raise RsvError("unsupported_model", type(model).__module__, "its parts are sharded by code of their own")
    for name, module in model.named_modules():  # type: ignore[no-untyped-call]
        if isinstance(module, Packed) and module.output_dims % group.size() and "embed" not in name:
            raise RsvError("shape_mismatch", name, f"{module.output_dims} rows for {group.size()} processes")
    with_ours = FunctionType(
        method.__code__, {**method.__globals__, **names}, method.__name__, method.__defaults__, method.__closure__
    )
    with_ours(model, group)
    return None


class AllToSharded(Module):
    """A part of a packed layer's outputs, of all inputs."""

    def __init__(self, part: QuantizedLinear, group: mx.distributed.Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = part
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        """(..., input_dims) to (..., output_dims / size)."""
        y: mx.array = self.part(distributed.sum_gradients(self._group)(x))
        return y


class ShardedToAll(Module):
    """All outputs of a packed layer, of a part of the inputs."""

    def __init__(self, part: QuantizedLinear, group: mx.distributed.Group) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.part = part
        self._group = group

    def __call__(self, x: mx.array) -> mx.array:
        """(..., input_dims / size) to (..., output_dims)."""
        return _gathered(self.part(_gathered(x, self._group)), self._group)


def _shard_linear(
    module: Module, sharding: str, *, segments: Any = 1, group: mx.distributed.Group | None = None
) -> Module:
    """MLX's, and of packed layers."""
    if not isinstance(module, Packed):
        made: Module = distributed.shard_linear(module, sharding, segments=segments, group=group)
        return made
    group = group or mx.distributed.init()
    _check(module, sharding, segments)
    len(module)  # one that is yet to be read is read now, and is of another class then
    part = type(module).__new__(type(module))
    vars(part).update({**vars(module), "_no_grad": set(module._no_grad)})
    dict.update(part, module)
    _cut(part, group, segments)
    assert isinstance(part, QuantizedLinear)
    return AllToSharded(part, group) if sharding == _OUT else ShardedToAll(part, group)


def _shard_inplace(
    module: Module, sharding: Any, *, segments: Any = 1, group: mx.distributed.Group | None = None
) -> None:
    """MLX's, and of packed layers: the model adds up what comes out of those that take a part of the inputs."""
    if not isinstance(module, Packed):
        distributed.shard_inplace(module, sharding, segments=segments, group=group)
        return
    group = group or mx.distributed.init()
    _check(module, sharding, segments)
    len(module)
    whole = module.output_dims
    _cut(module, group, segments)
    if sharding == _IN:
        kind = _PartialSwitchLinear if isinstance(module, QuantizedSwitchLinear) else _PartialLinear
        vars(module).update(_group=group, _before=group.rank() * module.output_dims, _whole=whole)
        module.__class__ = kind


def _check(module: Packed, sharding: Any, segments: Any) -> None:
    if sharding not in (_OUT, _IN) or (sharding == _IN and segments != 1):
        detail = "packed layers are cut along the outputs, or where their inputs are cut into equal parts; "
        raise RsvError(
            "unsupported_model", type(module).__name__, f"{detail}load(materialize='dense') has no such limit"
        )


def _cut(layer: Packed, group: mx.distributed.Group, segments: Any) -> None:
    """Keep this process's rows."""
    codes, scales = (_mine(array, axis, group, segments) for array, axis in ((layer.codes, -2), (layer.scales, -1)))
    bias = _mine(layer.bias, -1, group, segments) if layer.has_bias else None
    layer.output_dims = scales.shape[-1]
    layer._hold(codes, scales, bias)


def _mine(array: mx.array, axis: int, group: mx.distributed.Group, segments: Any) -> mx.array:
    """This process's part of each segment."""
    if isinstance(segments, list | tuple) and not isinstance(segments[0], int):
        segments = [int(share * array.shape[axis]) for share in segments]
    found = [mx.split(part, group.size(), axis)[group.rank()] for part in mx.split(array, segments, axis)]
    mine = mx.contiguous(found[0] if len(found) == 1 else mx.concatenate(found, axis))
    mx.eval(mine)
    return mine


class _PartialLinear(QuantizedLinear):
    """Of a part of the inputs, outputs that add up: zeros where another process has the row."""

    def __call__(self, x: mx.array) -> mx.array:
        return _widened(super().__call__(_gathered(x, self._group)), self)


class _PartialSwitchLinear(QuantizedSwitchLinear):
    """The same of experts."""

    def __call__(self, x: mx.array, indices: mx.array, sorted_indices: bool = False) -> mx.array:
        return _widened(super().__call__(_gathered(x, self._group), indices, sorted_indices), self)


def _widened(y: mx.array, layer: Any) -> mx.array:
    after = layer._whole - layer._before - y.shape[-1]
    return mx.pad(y, [(0, 0)] * (y.ndim - 1) + [(layer._before, after)])


def _gathered(x: mx.array, group: mx.distributed.Group) -> mx.array:
    """What the processes have, one behind the other on the last axis."""
    return mx.distributed.all_gather(mx.contiguous(mx.moveaxis(x, -1, 0)), group=group).moveaxis(0, -1)
