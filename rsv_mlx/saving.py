"""Save a model: its packed layers as they are, its other parameters as tensors."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.utils import tree_flatten
from numpy.typing import NDArray

import rsv_format
from rsv_format import AttachmentData, LayerData, RsvError, TensorData
from rsv_mlx.adapters import is_adapter
from rsv_mlx.packed import Packed

_DTYPES = {
    mx.bool_: "bool", mx.uint8: "u8", mx.int8: "i8", mx.uint16: "u16", mx.int16: "i16", mx.uint32: "u32",
    mx.int32: "i32", mx.uint64: "u64", mx.int64: "i64", mx.float16: "f16", mx.bfloat16: "bf16", mx.float32: "f32",
    mx.float64: "f64",
}  # fmt: skip
_SAME_BITS = {mx.bool_: mx.uint8, mx.bfloat16: mx.uint16}  # what numpy reads in their stead

_FILES = (
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json",
    "added_tokens.json", "vocab.json", "merges.txt", "vocab.txt", "tokenizer.model", "chat_template.jinja",
    "chat_template.json",
)  # fmt: skip
_MEDIA_TYPES = {".json": "application/json", ".txt": "text/plain", ".jinja": "text/plain"}


def save(
    model: Module,
    path: str | os.PathLike[str],
    *,
    config: Mapping[str, Any] | None = None,
    tokenizer_from: str | os.PathLike[str] | None = None,
    persist_rotation: bool = False,
    metadata: Mapping[str, str] | None = None,
    force: bool = False,
) -> None:
    """Write a model to a file that `load` gives back: logits are the same to the byte.

    Nothing is quantized here, and nothing copied: arrays are written from where they lie. Layers of a model
    that was loaded with `lazy=True` are read for it, and stay.

    Parameters
    ----------
    model : Module
        Packed layers (see `quantize_model`) become layers; all other parameters become tensors. Modules that
        MLX has quantized stay so, and the config will say so.
    path : path
        Written whole or not at all.
    config : mapping, optional
        The model's config.json, without which `load` needs a model to fill.
    tokenizer_from : folder or RSV file, optional
        Its tokenizer's files are attached, and its config.json if `config` is not given.
    persist_rotation : bool
        Store a Haar matrix (4 dim^2 bytes, loads at once) instead of its seed (small, derived at load). One
        that was loaded from such a file has no seed, and stays a matrix.
    metadata : mapping, optional
        Text about the file.
    force : bool
        Replace a file that is not RSV, or write-protected; but never a model in another format.

    Raises
    ------
    RsvError
        bad_argument: a parameter of a dtype that the format lacks, an adapter, or what is at the path may not be
        replaced; content_invalid, naming a parameter; what opening `tokenizer_from` raises; io_error.
    """
    layers, packed = [], set()
    transforms: dict[int, rsv_format.Transform] = {}
    for name, module in model.named_modules():  # type: ignore[no-untyped-call]
        if is_adapter(module):
            detail = "an adapter is no layer: put what its `fuse` returns in its place first"
            raise RsvError("bad_argument", name, detail)
        if "_group" in vars(module):
            raise RsvError("bad_argument", name, "it is sharded: this process has a part of the model alone")
        if isinstance(module, Packed):
            packed.add(name)
            t = module.transform
            if t is not None and id(t) not in transforms:
                transforms[id(t)] = t.to_format(persist_rotation)
            layers.append(_layer(name, module, None if t is None else transforms[id(t)]))
    parameters: dict[str, mx.array] = tree_flatten(model.parameters(), destination={})  # type: ignore
    attachments, inputs = _attachments(model, config, tokenizer_from)
    rsv_format.write(
        path,
        layers=layers,
        tensors={
            name: TensorData(_dtype(name, array), _view(array))
            for name, array in parameters.items()
            if name.rpartition(".")[0] not in packed
        },
        attachments=attachments,
        metadata={"generator": f"rsv-format {rsv_format.__version__}", **(metadata or {})},
        inputs=inputs,
        force=force,
    )


def _layer(name: str, module: Packed, transform: rsv_format.Transform | None) -> LayerData:
    codes, rows = module.codes, module.scales.size
    bias = module.bias.reshape(rows) if module.has_bias else None
    return LayerData(
        name,
        module.input_dims,
        module.codebook.bits,
        _view(codes.reshape(rows, codes.shape[-1])),
        _view(module.scales.reshape(rows)),
        module.codebook.centroids,
        transform,
        None if bias is None else _view(bias),
        None if bias is None else _dtype(f"{name}.bias", bias),
        rows // module.output_dims,
    )


def _dtype(name: str, array: mx.array) -> str:
    if array.dtype not in _DTYPES:
        raise RsvError("bad_argument", name, f"{array.dtype} cannot be stored")
    return _DTYPES[array.dtype]


def _view(array: mx.array) -> NDArray[Any]:
    """The array's own memory, bfloat16 and bool as their bits."""
    same = _SAME_BITS.get(array.dtype)
    return np.asarray(array if same is None else array.view(same))


def _attachments(
    model: Module, config: Mapping[str, Any] | None, source: str | os.PathLike[str] | None
) -> tuple[dict[str, AttachmentData], list[str]]:
    """The files, and the paths of what they are read from."""
    files: dict[str, bytes] = {}
    inputs: list[str] = []
    if source is not None:
        try:
            if (folder := Path(source)).is_dir():
                inputs = [str(folder)]
                files = {name: (folder / name).read_bytes() for name in _FILES if (folder / name).is_file()}
            else:
                with rsv_format.open(source, mmap=False) as file:
                    inputs = file.paths
                    files = {name: bytes(file.attachments[name].data) for name in _FILES if name in file.attachments}
        except OSError as e:
            raise RsvError("io_error", str(source), e.strerror or str(e)) from e
    if config is None and "config.json" in files:
        try:
            config = json.loads(files["config.json"])
        except ValueError as e:
            raise RsvError("source_invalid", str(source), f"config.json: {e}") from e
    if config is not None:
        described = {key: value for key, value in config.items() if key not in ("quantization", "quantization_config")}
        affine = _affine(model)
        if affine:
            described["quantization"] = affine
        if described != config or "config.json" not in files:
            files["config.json"] = json.dumps(described, ensure_ascii=False).encode()
    attachments = {
        name: AttachmentData(_MEDIA_TYPES.get(Path(name).suffix, "application/octet-stream"), data)
        for name, data in files.items()
    }
    return attachments, inputs


def _affine(model: Module) -> dict[str, Any]:
    """What MLX has quantized, as mlx-lm's configs say it; empty if nothing."""
    found = {
        name: {"group_size": module.group_size, "bits": module.bits, "mode": module.mode}
        for name, module in model.named_modules()  # type: ignore[no-untyped-call]
        if "scales" in module and "weight" in module and not isinstance(module, Packed)
    }
    return {**next(iter(found.values())), **found} if found else {}
