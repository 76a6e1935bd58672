"""Load a file: the model that its config describes, or one that is given, with its layers packed in place."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections import Counter
from collections.abc import Container, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.nn.layers.base import Module
from mlx.nn.layers.quantized import quantize

import rsv_format
from rsv_format import RsvError
from rsv_mlx.adopt import Held, Loader, LoadReport, adoption_obstacle, make_loader, parts_of
from rsv_mlx.binding import install, make_plan
from rsv_mlx.codebook import Codebook
from rsv_mlx.deferred import Unread, defer
from rsv_mlx.embedding import QuantizedEmbedding
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.packed import Packed
from rsv_mlx.switch import QuantizedSwitchLinear
from rsv_mlx.transform import Transform
from rsv_mlx.untrusted import (
    CONFIGS,
    DATA,
    VOCABULARIES,
    config_of,
    data_folder,
    library,
    mlx_lm_utils,
    skeleton,
    tokenizer,
)

MATERIALIZE = ("packed", "dense")
_DTYPES = {"float32": mx.float32, "float16": mx.float16, "bfloat16": mx.bfloat16}


def load(
    path: str | os.PathLike[str],
    *,
    model: Module | None = None,
    strict: bool = True,
    zero_copy: str = "auto",
    lazy: bool = False,
    materialize: str = "packed",
    dtype: mx.Dtype | str | None = None,
    return_report: bool = False,
    tokenizer_config: Mapping[str, Any] | None = None,
    max_order: int | None = None,
) -> Any:
    """Load a model and its tokenizer, as `mlx_lm.load` does, or graft a file onto a model.

    Parameters
    ----------
    path : path
    model : Module, optional
        Filled as by `graft`, instead of one that is made from the config.
    strict : bool
        False leaves parameters that are not in the file alone, and ignores what the model does not know.
    zero_copy : str
        "auto" adopts mapped pages where MLX can, and copies elsewhere; "require" refuses to copy; "never"
        copies.
    lazy : bool
        Where bytes are copied, copy a packed layer's when it is first used; the file stays open as long.
    materialize : str
        "packed" keeps the codes and transforms the activations. "dense" builds nn.Linear layers: the memory
        of an unquantized model, for its speed.
    dtype : mx.Dtype or "keep", optional
        Of kept floating tensors, hence of activations, and of dense layers; "keep" is the file's. Not given:
        what the config says on a GPU; on a CPU the file's, but float32 for float16, at which MLX is slow there.
    return_report : bool
        Return a `LoadReport` as the last item.
    tokenizer_config : mapping, optional
        As mlx-lm's, but for trust_remote_code: no code of a file is ever run. Given, even if empty, the tokenizer
        is made by transformers; otherwise without it where that is provably the same.
    max_order : int, optional
        As `rsv_format.open`: Haar factors that take long to derive must be asked for.

    Returns
    -------
    (model, tokenizer), or the model alone where one was given; a report after them if it was asked for.

    Raises
    ------
    RsvError
        What `rsv_format.open` raises; missing_layer, unexpected_layer, shape_mismatch, missing_attachment,
        unsupported_model; haar_witness_mismatch; bad_argument; missing_dependency.
    """
    if model is not None:
        report = graft(
            model,
            path,
            strict=strict,
            zero_copy=zero_copy,
            lazy=lazy,
            materialize=materialize,
            dtype=dtype,
            max_order=max_order,
        )
        return (model, report) if return_report else model
    report = LoadReport()
    result: tuple[Any, ...]
    with _opened(path, report, max_order) as file, _data(file) as folder:
        _require_vocabulary(file)
        model, config = _skeleton(folder, file, report)
        _fill(file, model, strict, zero_copy, lazy, materialize, dtype, report, config)
        with _timed(report, "tokenizer"):
            result = (model, tokenizer(folder, config, tokenizer_config))
    return (*result, report) if return_report else result


def load_model(
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    zero_copy: str = "auto",
    lazy: bool = False,
    materialize: str = "packed",
    dtype: mx.Dtype | str | None = None,
    return_report: bool = False,
    max_order: int | None = None,
) -> Any:
    """As `load`, without the tokenizer: for files that carry none, and for less time.

    Returns
    -------
    model, or (model, report).
    """
    report = LoadReport()
    with _opened(path, report, max_order) as file:
        with _data(file, CONFIGS) as folder:
            model, config = _skeleton(folder, file, report)
        _fill(file, model, strict, zero_copy, lazy, materialize, dtype, report, config)
    return (model, report) if return_report else model


def load_tokenizer(path: str | os.PathLike[str], *, tokenizer_config: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer alone, as `load` returns it.

    Raises
    ------
    RsvError
        What `rsv_format.open` raises; missing_attachment, unsupported_model; bad_argument; missing_dependency.
    """
    with rsv_format.open(path, mmap=False) as file, _data(file) as folder:
        _require_vocabulary(file)
        return tokenizer(folder, config_of(folder), tokenizer_config)


def graft(
    model: Module,
    path: str | os.PathLike[str],
    *,
    strict: bool = True,
    zero_copy: str = "auto",
    lazy: bool = False,
    materialize: str = "packed",
    dtype: mx.Dtype | str | None = None,
    max_order: int | None = None,
) -> LoadReport:
    """Put what a file holds into a model, in place.

    Parameters
    ----------
    model : Module
        Its linear, embedding and switch modules that are named in the file are replaced, other parameters set.
    path, zero_copy, lazy, materialize, dtype, max_order
        As `load`.
    strict : bool
        False leaves what is not in the file alone, as for files that hold only some layers, and ignores what
        the model does not know.

    Raises
    ------
    RsvError
        What `rsv_format.open` raises; missing_layer, unexpected_layer, shape_mismatch, all naming what is
        wrong, before anything is changed; haar_witness_mismatch; bad_argument.
    """
    report = LoadReport()
    with _opened(path, report, max_order) as file:
        _fill(file, model, strict, zero_copy, lazy, materialize, dtype, report)
    return report


def _fill(
    file: rsv_format.File,
    model: Module,
    strict: bool,
    zero_copy: str,
    lazy: bool,
    materialize: str,
    dtype: mx.Dtype | str | None,
    report: LoadReport,
    config: Mapping[str, Any] | None = None,
) -> None:
    """Bind everything in the file to the model."""
    if materialize not in MATERIALIZE:
        raise RsvError("bad_argument", "materialize", f"{materialize!r} is not one of {', '.join(MATERIALIZE)}")
    casts = _casts(dtype, config)
    if config and config.get("quantization"):
        _quantize_skeleton(model, config["quantization"], file.tensors)
    content = _Content(file, make_loader(file, zero_copy, lazy, report), report)
    with _timed(report, "tensors"):
        tensors = {name: content.tensor(tensor) for name, tensor in file.tensors.items()}
        plan = make_plan(model, file.layers, tensors, content.dequantized, strict)
        report.dense_nbytes += sum(a.nbytes for path, a in plan.parameters.items() if path not in plan.kept)
        parameters = {path: _cast(array, casts, report) for path, array in plan.parameters.items()}
        mx.eval(parameters)
    with _timed(report, "layers"):
        modules: dict[str, Module] = {}
        common = _common_dtype(parameters) or casts.get(mx.float32)
        for path, place in plan.packed.items():
            layer = content.layer(file.layers[place.name], place.kind, lazy and materialize == "packed")
            wanted = casts.get(mx.float32, mx.float32)
            if isinstance(layer, QuantizedEmbedding):
                layer.dtype = wanted = common or place.dtype
            if materialize == "dense":
                modules[path] = layer.to_dense(wanted)
                mx.eval(dict(modules[path]))
                report.dense_nbytes += modules[path].weight.nbytes
            else:
                modules[path] = layer
        for path, (name, has_bias) in plan.dense.items():
            for part, array in content.dequantized(name).items():
                if part == "bias" and not has_bias:
                    continue
                parameters[f"{path}.{part}"] = _cast(array, casts, report)
                mx.eval(parameters[f"{path}.{part}"])
            report.dense_nbytes += parameters[f"{path}.weight"].nbytes
        install(model, modules, parameters)
        model.eval()
        read = [dict(module) for module in modules.values() if not isinstance(module, Unread)]
        mx.eval(read, content.shared_arrays())
    if content.bases:  # not parameters; they live as long as the model
        object.__setattr__(model, "rsv_bases", [*getattr(model, "rsv_bases", []), *content.bases])
    report.layers, report.tensors = len(plan.packed) + len(plan.dense), len(plan.parameters)


class _Content:
    """Layers and tensors of a file as they are asked for; codebooks and transforms made once."""

    def __init__(self, file: rsv_format.File, loader: Loader, report: LoadReport) -> None:
        self.file, self.loader, self.report = file, loader, report
        self.bases: list[Held] = []
        self._lock = threading.RLock()
        self._transforms: dict[int, Transform] = {}
        self._factors: dict[object, mx.array] = {}
        self._codebooks: dict[int, Codebook] = {}

    def tensor(self, tensor: rsv_format.Tensor) -> mx.array:
        """A kept tensor."""
        loaded = self.loader.load(parts_of(tensor))
        if loaded.base is not None:
            self.bases.append(Held(loaded.base))
        return loaded.arrays[0]

    def layer(self, layer: rsv_format.Layer, kind: type[Packed], lazy: bool = False) -> Packed:
        """A layer."""
        parts = parts_of(layer)
        has_bias = layer.bias_dtype is not None and kind is not QuantizedEmbedding
        base: list[mx.array] = []

        def read() -> list[mx.array]:
            loaded = self.loader.load(parts)
            base.extend([] if loaded.base is None else [loaded.base])
            return loaded.arrays if has_bias else loaded.arrays[:2]

        codebook, transform = self._codebook(layer), self._transform(layer)
        if lazy and not self.loader.adopts:
            self.report.deferred_nbytes += sum(nbytes for _, _, nbytes in layer.parts)
            return defer(
                kind, read, self._lock, codebook, transform, input_dims=layer.in_features,
                output_dims=layer.out_features, has_bias=has_bias, stack=layer.stack,
            )  # fmt: skip
        codes, scales, *bias = read()
        made = kind(codes, scales, codebook, transform, *bias, input_dims=layer.in_features, stack=layer.stack)
        if base:
            object.__setattr__(made, "rsv_base", Held(base[0]))
        return made

    def dequantized(self, name: str) -> dict[str, mx.array]:
        """The dense weight, and the bias if there is one, with a leading axis if stacked."""
        layer = self.file.layers[name]
        dense = self.layer(layer, QuantizedLinear if layer.stack == 1 else QuantizedSwitchLinear)
        return {"weight": dense.dequantize()} | ({"bias": dense.bias} if dense.has_bias else {})

    def shared_arrays(self) -> list[mx.array]:
        """Codebooks' tables and transforms, which are no layer's parameters."""
        owners: list[Transform | Codebook] = [*self._transforms.values(), *self._codebooks.values()]
        return [array for owner in owners for array in owner.arrays]

    def _codebook(self, layer: rsv_format.Layer) -> Codebook:
        if layer.codebook_id not in self._codebooks:
            self._codebooks[layer.codebook_id] = Codebook.of(layer.codebook, layer.bits)
        return self._codebooks[layer.codebook_id]

    def _transform(self, layer: rsv_format.Layer) -> Transform | None:
        if layer.transform is None or layer.transform_id is None:
            return None
        if layer.transform_id not in self._transforms:
            self._transforms[layer.transform_id] = Transform(layer.transform, self._factors)
        return self._transforms[layer.transform_id]


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str], report: LoadReport, max_order: int | None) -> Iterator[rsv_format.File]:
    """The file, closed at the end unless layers are yet to be read from it."""
    with _timed(report, "open"):
        file = rsv_format.open(path, mmap=adoption_obstacle() is None, max_order=max_order)  # no map that nobody adopts
    report.nbytes = file.nbytes
    try:
        yield file
    finally:
        if not report.deferred_nbytes:
            file.close()


def _data(file: rsv_format.File, names: Iterable[str] = DATA) -> contextlib.AbstractContextManager[Path]:
    """A temporary folder with the attachments that are data of a model."""
    if "config.json" not in file.attachments:
        raise RsvError("missing_attachment", "config.json", "without it, pass a model to fill: load(path, model=...)")
    return data_folder(((name, attachment.data) for name, attachment in file.attachments.items()), names)


def _require_vocabulary(file: rsv_format.File) -> None:
    if not any(name in VOCABULARIES for name in file.attachments):
        raise RsvError("missing_attachment", "tokenizer.json", "no tokenizer is attached; load_model needs none")


def _skeleton(folder: Path, file: rsv_format.File, report: LoadReport) -> tuple[Module, dict[str, Any]]:
    """The model that the config describes, not larger than the file shows."""
    shapes: dict[str, tuple[int, ...]] = {tensor.name: tensor.shape for tensor in file.header.tensors}
    for entry in file.header.layers:
        sides = (entry.out_features, entry.in_features)
        shapes[entry.name] = sides if entry.stack == 1 else (entry.stack, *sides)
    with _timed(report, "mlx_lm"):
        mlx_lm_utils()
    with _timed(report, "model"):
        return skeleton(folder, shapes)


def _quantize_skeleton(model: Module, settings: Mapping[str, Any], names: Container[str]) -> None:
    """Give modules that were saved as MLX had quantized them that form; as lazy as the skeleton's weights."""

    def chosen(path: str, module: Module) -> bool | dict[str, Any]:
        own = settings.get(path)
        if f"{path}.scales" not in names or not hasattr(module, "to_quantized"):
            return False
        return own if isinstance(own, dict) else True

    with library("unsupported_model", "config.json, quantization"):
        general = {key: settings[key] for key in ("group_size", "bits", "mode") if key in settings}
        quantize(model, **general, class_predicate=chosen)


def _casts(dtype: mx.Dtype | str | None, config: Mapping[str, Any] | None) -> dict[mx.Dtype, mx.Dtype]:
    """Floating dtype of a kept tensor -> what it becomes."""
    if dtype == "keep":
        return {}
    if dtype is None and mx.default_device() == mx.cpu:
        return {mx.float16: mx.float32}
    if dtype is None:
        named = (config or {}).get("torch_dtype") or (config or {}).get("dtype")
        dtype = _DTYPES.get(str(named))
    if isinstance(dtype, str):
        raise RsvError("bad_argument", "dtype", f"{dtype!r} is neither an mx.Dtype nor 'keep'")
    return {} if dtype is None else dict.fromkeys(_DTYPES.values(), dtype)


def _cast(array: mx.array, casts: Mapping[mx.Dtype, mx.Dtype], report: LoadReport) -> mx.array:
    dtype = casts.get(array.dtype, array.dtype)
    if dtype == array.dtype:
        return array
    array = array.astype(dtype)
    report.cast_nbytes += array.nbytes
    return array


def _common_dtype(parameters: Mapping[str, mx.array]) -> mx.Dtype | None:
    """The floating dtype of most of these parameters: that of a model's activations."""
    floating = Counter(a.dtype for a in parameters.values() if mx.issubdtype(a.dtype, mx.floating))
    return floating.most_common(1)[0][0] if floating else None


@contextlib.contextmanager
def _timed(report: LoadReport, step: str) -> Iterator[None]:
    started = time.perf_counter()
    try:
        yield
    finally:
        report.seconds[step] = report.seconds.get(step, 0.0) + time.perf_counter() - started
