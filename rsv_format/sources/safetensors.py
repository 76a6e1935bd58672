"""Safetensors files: a lone file, or a Hugging Face folder with one file or a sharded index.

The safetensors library validates the header but cannot hand out bfloat16 without a framework, so it tells
names, dtypes and shapes, and the bytes are read here: it guarantees that the tensors, in the order of
`offset_keys`, fill the data section with no hole.
"""

from __future__ import annotations

import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rsv_format.dtypes import NUMPY_DTYPE
from rsv_format.errors import RsvError
from rsv_format.sources import mlx_affine
from rsv_format.sources.base import (
    Array,
    Source,
    SourceTensor,
    dense_tensor,
    json_attachment,
    library,
    read_json_object,
    reading,
)
from rsv_format.sources.experts import stack_experts

INDEX = "model.safetensors.index.json"
ATTACHMENTS = {
    "generation_config.json": "application/json",
    "tokenizer.json": "application/json",
    "tokenizer_config.json": "application/json",
    "special_tokens_map.json": "application/json",
    "added_tokens.json": "application/json",
    "vocab.json": "application/json",
    "merges.txt": "text/plain",
    "vocab.txt": "text/plain",
    "tokenizer.model": "application/octet-stream",
    "chat_template.jinja": "text/plain",
    "chat_template.json": "application/json",
}
_DTYPES = {
    "BOOL": "bool", "U8": "u8", "I8": "i8", "U16": "u16", "I16": "i16", "U32": "u32", "I32": "i32",
    "U64": "u64", "I64": "i64", "F16": "f16", "BF16": "bf16", "F32": "f32", "F64": "f64",
}  # fmt: skip


def open_file(path: Path) -> Source:
    """One .safetensors file; the config and tokenizer are those beside it, if a config.json is.

    Raises
    ------
    RsvError
        `io_error`, `source_invalid`, or `source_unsupported` for an unknown dtype or a missing library.
    """
    return _with_config("safetensors", path, read_file(path), path.parent)


def open_folder(path: Path) -> Source:
    """A Hugging Face or MLX-quantized model folder.

    Raises
    ------
    RsvError
        As `open_file`; `source_invalid` too where the index and the files disagree, or no weights are there.
    """
    index = path / INDEX
    return _with_config("folder", path, _read_sharded(index) if index.exists() else _read_unindexed(path), path)


def read_file(path: Path) -> dict[str, SourceTensor]:
    """The tensors of one file, in the order of their data."""
    where = str(path)
    safetensors = library("safetensors", where)
    tensors: dict[str, SourceTensor] = {}
    with reading(where), safetensors.safe_open(where, framework="numpy") as file:
        with path.open("rb") as raw:
            offset = 8 + int.from_bytes(raw.read(8), "little")
        for name in file.offset_keys():
            header = file.get_slice(name)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            if dtype not in _DTYPES:
                raise RsvError("source_unsupported", f"{where}: {name}", f"tensors of dtype {dtype} cannot be kept")
            kept = _DTYPES[dtype]
            tensors[name] = dense_tensor(name, kept, shape, partial(_read, path, name, kept, shape, offset))
            offset += math.prod(shape) * NUMPY_DTYPE[kept].itemsize
    return tensors


def _read(path: Path, name: str, dtype: str, shape: tuple[int, ...], offset: int) -> Array:
    with reading(f"{path}: {name}"):
        return np.fromfile(path, NUMPY_DTYPE[dtype], count=math.prod(shape), offset=offset).reshape(shape)


def _read_sharded(index: Path) -> dict[str, SourceTensor]:
    where = str(index)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise RsvError("source_invalid", where, "weight_map does not map tensor names to file names")
    shards: dict[str, dict[str, SourceTensor]] = {}
    for file in sorted(set(weight_map.values())):
        if not file.endswith(".safetensors") or "/" in file or "\\" in file or "\0" in file:
            raise RsvError("source_invalid", where, f"{file!r} is not the plain name of a .safetensors file")
        if not (index.parent / file).exists():
            raise RsvError("source_invalid", where, f"{file} is missing")
        shards[file] = read_file(index.parent / file)
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise RsvError("source_invalid", where, f"{file} has no tensor {name!r}")
    return {name: shards[file][name] for name, file in weight_map.items()}


def _read_unindexed(folder: Path) -> dict[str, SourceTensor]:
    whole = folder / "model.safetensors"
    tensors: dict[str, SourceTensor] = {}
    for file in [whole] if whole.exists() else sorted(folder.glob("*.safetensors")):
        shard = read_file(file)
        if twice := tensors.keys() & shard.keys():
            raise RsvError("source_invalid", str(file), f"tensor {min(twice)!r} is in another file too")
        tensors |= shard
    if not tensors:
        raise RsvError("source_invalid", str(folder), "holds no weights in .safetensors files")
    return tensors


def _with_config(kind: str, path: Path, tensors: dict[str, SourceTensor], folder: Path) -> Source:
    if not (folder / "config.json").exists():
        return Source(kind, str(path), tensors)
    config = read_json_object(folder / "config.json")
    if mlx_affine.is_quantized(config, str(path)):
        kind, tensors, config = (
            "mlx",
            mlx_affine.dequantized(tensors, config, str(path)),
            mlx_affine.stripped(config),
        )
    return stack_experts(Source(kind, str(path), tensors, config, _attachments(folder, config)))


def _attachments(folder: Path, config: dict[str, Any]) -> dict[str, tuple[str, bytes]]:
    attachments = {"config.json": json_attachment(config)}
    for name, media_type in ATTACHMENTS.items():
        if (folder / name).is_file():
            with reading(str(folder / name)):
                attachments[name] = media_type, (folder / name).read_bytes()
    return attachments
