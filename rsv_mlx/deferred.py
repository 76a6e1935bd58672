"""Layers whose parameters are read when they are first looked at: by a call, by name, or among a model's."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module

from rsv_mlx.codebook import Codebook
from rsv_mlx.packed import Packed
from rsv_mlx.transform import Transform


def defer(
    kind: type[Packed],
    read: Callable[[], Sequence[mx.array]],
    lock: threading.RLock,
    codebook: Codebook,
    transform: Transform | None = None,
    *,
    input_dims: int,
    output_dims: int,
    has_bias: bool,
    stack: int = 1,
) -> Packed:
    """A layer of this kind that is yet to be read.

    Parameters
    ----------
    read : callable
        Codes, scales and, if there is one, bias; called once.
    lock : RLock
        Held meanwhile: one for all layers that read alike.
    codebook, transform, input_dims, output_dims, has_bias, stack
        As a packed layer has them.
    """
    layer = kind.__new__(kind)
    Module.__init__(layer)  # type: ignore[no-untyped-call]
    layer._describe(codebook, transform, input_dims, output_dims, stack)
    vars(layer).update(_has_bias=has_bias, _lock=lock, _read=read)
    layer.__class__ = _unread(kind)
    return layer


class Unread:
    """What a layer that is yet to be read does first, whatever it is asked for: become the layer that it is.

    Only its class is another one until then, so nothing is left behind that costs time in a call.
    """

    @property
    def has_bias(self) -> bool:
        """Whether a bias is added."""
        has_bias: bool = vars(self)["_has_bias"]
        return has_bias


def _read(layer: Any) -> None:
    """Read the parameters, unless another thread has done so meanwhile."""
    lock = vars(layer).get("_lock")
    if lock is None:
        return
    with lock:
        if type(layer).__bases__[0] is Unread:
            kind = type(layer).__bases__[1]
            kind._hold(layer, *vars(layer)["_read"]())  # type: ignore[attr-defined]
            mx.eval([dict.__getitem__(layer, key) for key in layer._no_grad])  # threads may share what is evaluated
            layer.__class__ = kind
            for name in ("_has_bias", "_lock", "_read"):
                del vars(layer)[name]


def _first_reading(name: str) -> Callable[..., Any]:
    def method(self: Any, *args: Any) -> Any:
        if args and isinstance(args[0], str) and args[0] not in (*self._keys, "bias"):  # of another attribute
            return getattr(super(Unread, self), name)(*args)
        _read(self)
        return getattr(self, name)(*args)

    return method


_LOOKING = (
    "__contains__", "__delitem__", "__getitem__", "__iter__", "__len__", "__reduce_ex__", "__setitem__", "copy", "get",
    "items", "keys", "pop", "values",
)  # fmt: skip
for _name in _LOOKING:
    setattr(Unread, _name, _first_reading(_name))


@cache
def _unread(kind: type[Packed]) -> type[Packed]:
    return type(kind.__name__, (Unread, kind), {})
