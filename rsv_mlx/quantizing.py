"""Quantize the layers of a model in place, their previous weights released as it goes."""

from __future__ import annotations

import fnmatch
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from numpy.typing import NDArray

import rsv_format
from rsv_format import LayerData, Role, RsvError
from rsv_mlx.binding import changed_when_loaded, install, packed_kind
from rsv_mlx.calibrate import random_importance
from rsv_mlx.codebook import Codebook
from rsv_mlx.embedding import QuantizedEmbedding
from rsv_mlx.moments import ModelCalibration
from rsv_mlx.packed import Packed, dense_rows, weight_dtype, weight_shape
from rsv_mlx.transform import Transform
from rsv_mlx.uses import assigned

Floats = NDArray[np.floating[Any]]

_BLOCK = 2**24  # weights that are dense in float32 at a time, 64 MiB


def quantize_model(
    model: Module,
    *,
    bits: int = 4,
    codebook: str = "lloyd-max",
    window: int | None = None,
    rotation: str = "hartley",
    importance: Mapping[str, Floats] | str | None = "auto",
    calibration: Sequence[int] | ModelCalibration | None = None,
    feedback: bool | None = None,
    seed: int = 0,
    embedding_bits: int | str | None = None,
    include: Sequence[str] = (),
    exclude: Sequence[str] = (),
    threads: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> None:
    """Quantize the linear, switch and embedding layers of a model in place, group by group.

    A group's layers share their input, and so a transform. Each layer's previous weight is released before
    the next one's is read: what is needed beyond the model are some 64 MiB and one layer's packed form.
    `rsv_format.quantize` makes the same of a file with these weights in the order of their names.

    Parameters
    ----------
    model : Module
        With nn.Linear, mlx-lm's SwitchLinear, nn.Embedding, or MLX's quantized forms of them; other modules,
        the routers of a mixture of experts, and layers that are packed already stay as they are. What the model's
        own `quant_predicate` leaves out stays too, what it wants to have 8 bits has so many; a layer whose weight the
        model sets as it runs, or changes whenever it is loaded, stays.
    bits, codebook, window, rotation, seed, threads
        As `rsv_format.quantize_matrix`.
    importance : mapping, "auto" or None
        Layer's path -> mean squared activations, floating (in_features,) or one row for each expert. Layers
        that share their input get the mean of those that are named. "auto" runs the model on random tokens, if
        it takes tokens, which makes weights that were loaded lazily resident; None is that all channels matter
        alike.
    calibration : sequence of int or ModelCalibration, optional
        Tokens of a text of the kind that the model will see: "auto" measures importance on them, and later weights put
        right what earlier ones lose, by what the layers see of them.
    feedback : bool, optional
        False leaves the latter out.
    embedding_bits : int or "keep", optional
        1 to 8, of embeddings (a tied head included) and of an untied `lm_head`; "keep" leaves them as they are.
        If not given, 5, or as many as the other layers if those have more.
    include, exclude : patterns
        Shell-style, on paths such as "model.layers.0.mlp.up_proj"; exclude wins.
    progress : callable(done, total, name), optional
        Told the weights done, all of them, and the layer at work.

    Raises
    ------
    RsvError
        bad_argument, importance_mismatch, missing_dependency: nothing was changed. nonfinite_weight, naming the
        layer: it and those after it were not changed.
    """
    if isinstance(importance, str) and importance != "auto":
        raise RsvError("bad_argument", "importance", f"{importance!r} is neither 'auto' nor a mapping")
    job = _Job(model, bits, codebook, window, rotation, seed, embedding_bits, include, exclude, threads)
    if calibration is not None and not isinstance(calibration, ModelCalibration):
        calibration = ModelCalibration(model, calibration)
    if feedback and calibration is None:
        raise RsvError("bad_argument", "feedback", "it goes by a calibration, and there is none")
    if isinstance(importance, str) and calibration is not None:
        found = calibration.importance(progress)
        job.weigh({path: found[name] for path in job.shapes if (name := rsv_format.plain_name(path)) in found})
    elif isinstance(importance, str):
        job.weigh(random_importance(model, seed))
    elif importance is not None:
        job.weigh(importance)
    if isinstance(importance, Mapping) and not job.importance:
        raise RsvError("importance_mismatch", "importance", "it names none of the layers that are quantized")
    told = progress or (lambda done, total, name: None)
    total, done = sum(prod(shape) for shape in job.shapes.values()), 0
    moments: Iterator[Floats | None] = itertools.repeat(None)
    if calibration is not None and feedback is not False:
        moments = calibration.moments([rsv_format.plain_name(group[0]) for group in job.groups])
    for group, moment in zip(job.groups, moments, strict=False):
        told(done, total, group[0])
        transform = job.transform(group, moment is not None)
        spread = None
        if moment is not None and calibration is not None:
            stored = None if transform is None else transform.to_format()
            spread = rsv_format.spread_errors(moment, calibration.tokens, stored)
        for path in group:
            told(done, total, path)
            install(model, {path: job.quantized(path, transform, spread)}, {})
            mx.clear_cache()  # or MLX would keep the memory of the weight that was replaced
            done += prod(job.shapes[path])
    told(total, total, "")


@dataclass
class _Job:
    """What is to be done; it holds paths, no modules, so that nothing outlives its replacement."""

    model: Module
    bits: int
    codebook: str
    window: int | None
    rotation: str
    seed: int
    embedding_bits: int | str | None
    include: Sequence[str]
    exclude: Sequence[str]
    threads: int | None

    def __post_init__(self) -> None:
        rsv_format.QuantizeOptions(include=self.include, exclude=self.exclude)  # refuses strings
        self.table_bits = rsv_format.table_bits(self.embedding_bits, self.bits)
        for bits in (self.bits, self.table_bits):
            if bits is not None:  # refuses bad arguments before any work
                rsv_format.quantize_matrix(
                    np.ones((1, 1)), bits=bits, codebook=self.codebook, window=self.window, rotation=self.rotation,
                    seed=self.seed,
                )  # fmt: skip
        self.layer_bits: dict[str, int] = {}
        self.shapes: dict[str, tuple[int, ...]] = {}
        leaves: Any = self.model.leaf_modules()  # type: ignore[no-untyped-call]
        modules: list[tuple[str, Any]] = tree_flatten(leaves, is_leaf=Module.is_module)  # type: ignore
        candidates = {path: bits for path, module in modules if (bits := self._bits_of(path, module)) is not None}
        own = assigned(self.model.modules())  # type: ignore[no-untyped-call]
        dense = changed_when_loaded(self.model, candidates) | {x for x in candidates if x.rpartition(".")[2] in own}
        candidates = {path: bits for path, bits in candidates.items() if path not in dense}
        self._refuse_idle("include", self.include, candidates)
        self._refuse_idle("exclude", self.exclude, dict(modules))
        for path, module in modules:
            if path in candidates and self._chosen(path):
                self.layer_bits[path], self.shapes[path] = candidates[path], weight_shape(module) or ()
        if not self.shapes:
            raise RsvError("bad_argument", type(self.model).__name__, "no layer of it is chosen")
        self.groups = [part for group in rsv_format.share_groups(self.shapes) for part in self._same_width(group)]
        self.importance: Mapping[str, Floats] = {}
        self._factors: dict[object, mx.array] = {}
        self._haar: dict[int, Transform | None] = {}

    def weigh(self, importance: Mapping[str, Floats]) -> None:
        """Take the importance of the layers from here."""
        self.importance = self._shared_importance(importance)

    def transform(self, group: list[str], feedback: bool) -> Transform | None:
        """The transform of a group; Haar ones of a width are the same one."""
        dim, importance = self.shapes[group[0]][-1], self.importance.get(group[0])
        if feedback and importance is not None:
            importance = rsv_format.feedback_importance(importance)
        shareable = self.rotation == "haar" and importance is None
        if shareable and dim in self._haar:
            return self._haar[dim]
        made = rsv_format.group_transform(
            dim,
            (block for path in group for block in self._blocks(path)),
            name=group[0],
            rotation=self.rotation,
            seed=self.seed,
            importance=importance,
        )
        transform = None if made is None else Transform(made, self._factors)
        if shareable:
            self._haar[dim] = transform
        return transform

    def quantized(self, path: str, transform: Transform | None, spread: Any = None) -> Packed:
        """The packed layer that takes a module's place, in memory."""
        stored = None if transform is None else transform.to_format()
        parts: list[LayerData] = []
        for block in self._blocks(path):
            try:
                part = rsv_format.quantize_matrix(
                    block, name=path, bits=self.layer_bits[path], codebook=self.codebook, window=self.window,
                    rotation="none", transform=stored, spread=spread, threads=self.threads,
                )  # fmt: skip
            except RsvError as e:
                first = sum(part.scales.size for part in parts)
                raise RsvError(e.code, e.where, f"{e.detail} (counted from row {first})") from None
            parts.append(part)
        module, shape = _at(self.model, path), self.shapes[path]
        kind = packed_kind(module)
        assert kind is not None
        layer = kind(
            mx.array(np.concatenate([part.codes for part in parts])),
            mx.array(np.concatenate([part.scales for part in parts])),
            Codebook.of(parts[0].codebook, parts[0].bits),
            transform,
            module.get("bias"),
            input_dims=shape[-1],
            stack=prod(shape[:-2]),
        )
        if isinstance(layer, QuantizedEmbedding):
            layer.dtype = weight_dtype(module)
        mx.eval(dict(layer))
        return layer

    def _blocks(self, path: str) -> Iterator[Floats]:
        """The dense weight, float32 (rows, in_features), some rows at a time."""
        module, shape = _at(self.model, path), self.shapes[path]
        step = max(1, _BLOCK // shape[-1])
        for start in range(0, prod(shape[:-1]), step):
            yield np.asarray(dense_rows(module, slice(start, start + step)))

    def _bits_of(self, path: str, module: Module) -> int | None:
        """The bits of a module's weight, None if it is not quantized."""
        kind, role = packed_kind(module), rsv_format.layer_role(path)
        if kind is None or isinstance(module, Packed) or not path or not role.is_quantized:
            return None
        bits = self.table_bits if kind is QuantizedEmbedding or role is Role.TABLE else self.bits
        predicate = getattr(self.model, "quant_predicate", None)  # mlx-lm's: False, or the bits that a layer needs
        wanted = True if predicate is None else predicate(path, module)
        if bits is None or not wanted:
            return None
        return max(bits, wanted.get("bits", bits)) if isinstance(wanted, dict) else bits

    def _refuse_idle(self, option: str, patterns: Sequence[str], paths: Iterable[str]) -> None:
        """A pattern that matches nothing is a mistake; what is kept anyway may be excluded."""
        for pattern in patterns:
            if not any(fnmatch.fnmatchcase(path, pattern) for path in paths):
                raise RsvError("bad_argument", option, f"{pattern!r} matches no layer")

    def _chosen(self, path: str) -> bool:
        def matches(patterns: Iterable[str]) -> bool:
            return any(fnmatch.fnmatchcase(path, pattern) for pattern in patterns)

        return (not self.include or matches(self.include)) and not matches(self.exclude)

    def _same_width(self, group: list[str]) -> list[list[str]]:
        """Only layers of one width can share a transform, which depends on their order: that of most files."""
        widths: dict[int, list[str]] = {}
        for path in sorted(group):
            widths.setdefault(self.shapes[path][-1], []).append(path)
        return list(widths.values())

    def _shared_importance(self, given: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Layers with one input have one importance: the mean of those that are known."""
        shared: dict[str, Floats] = {}
        for group in self.groups:
            dim = self.shapes[group[0]][-1]
            found = []
            for path in group:
                if path in given:
                    wide = np.asarray(given[path], np.float64)
                    found.append(wide.mean(axis=0) if wide.ndim == 2 else wide)
                    # refuses other lengths and values, before any work
                    rsv_format.group_transform(
                        dim, [np.ones((1, dim))], name=path, rotation="none", importance=found[-1]
                    )
            if found:
                shared.update(dict.fromkeys(group, np.asarray(np.mean(found, axis=0))))
        return shared


def _at(model: Module, path: str) -> Module:
    """The module at a path."""
    found: Any = model
    for part in path.split("."):
        found = found[int(part) if isinstance(found, list | tuple) else part]
    assert isinstance(found, Module)
    return found
