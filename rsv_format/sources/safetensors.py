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

from rsv_format.dtypes import NUMPY_DTYPE
from rsv_format.errors import RsvError
from rsv_format.sources import mlx_affine
from rsv_format.sources.base import (
    Source,
    SourceFile,
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
    file = SourceFile(path)
    return _with_config("safetensors", path, read_file(file), (file,), path.parent)


def open_folder(path: Path) -> Source:
    """A Hugging Face or MLX-quantized model folder.

    Raises
    ------
    RsvError
        As `open_file`; `source_invalid` too where the index and the files disagree, or no weights are there.
    """
    index = path / INDEX
    tensors, files = _read_sharded(index) if index.exists() else _read_unindexed(path)
    return _with_config("folder", path, tensors, files, path)


def read_file(file: SourceFile) -> dict[str, SourceTensor]:
    """The tensors of one file, in the order of their data."""
    where = str(file.path)
    safetensors = library("safetensors", where)
    tensors: dict[str, SourceTensor] = {}
    offset = 8 + int.from_bytes(file.read("u1", (8,), 0, where).tobytes(), "little")
    with reading(where), safetensors.safe_open(where, framework="numpy") as opened:
        for name in opened.offset_keys():
            header = opened.get_slice(name)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            place = f"{where}: {name}"
            if dtype not in _DTYPES:
                raise RsvError("source_unsupported", place, f"tensors of dtype {dtype} cannot be kept")
            kept = _DTYPES[dtype]
            read = partial(file.read, NUMPY_DTYPE[kept], shape, offset, place)
            tensors[name] = dense_tensor(name, kept, shape, read)
            offset += math.prod(shape) * NUMPY_DTYPE[kept].itemsize
    file.check_unchanged()  # the library has opened the path again
    return tensors


def _read_sharded(index: Path) -> tuple[dict[str, SourceTensor], tuple[SourceFile, ...]]:
    where = str(index)
    weight_map = read_json_object(index).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(file, str) for file in weight_map.values()):
        raise RsvError("source_invalid", where, "weight_map does not map tensor names to file names")
    files: list[SourceFile] = []
    shards: dict[str, dict[str, SourceTensor]] = {}
    for file in sorted(set(weight_map.values())):
        if not file.endswith(".safetensors") or "/" in file or "\\" in file or "\0" in file:
            raise RsvError("source_invalid", where, f"{file!r} is not the plain name of a .safetensors file")
        if not (index.parent / file).exists():
            raise RsvError("source_invalid", where, f"{file} is missing")
        files.append(SourceFile(index.parent / file))
        shards[file] = read_file(files[-1])
    for name, file in weight_map.items():
        if name not in shards[file]:
            raise RsvError("source_invalid", where, f"{file} has no tensor {name!r}")
    return {name: shards[file][name] for name, file in weight_map.items()}, tuple(files)


def _read_unindexed(folder: Path) -> tuple[dict[str, SourceTensor], tuple[SourceFile, ...]]:
    whole = folder / "model.safetensors"
    tensors: dict[str, SourceTensor] = {}
    files = tuple(map(SourceFile, [whole] if whole.exists() else sorted(folder.glob("*.safetensors"))))
    for file in files:
        shard = read_file(file)
        if twice := tensors.keys() & shard.keys():
            raise RsvError("source_invalid", str(file.path), f"tensor {min(twice)!r} is in another file too")
        tensors |= shard
    if not tensors:
        raise RsvError("source_invalid", str(folder), "holds no weights in .safetensors files")
    return tensors, files


def _with_config(
    kind: str, path: Path, tensors: dict[str, SourceTensor], files: tuple[SourceFile, ...], folder: Path
) -> Source:
    if not (folder / "config.json").exists():
        return Source(kind, str(path), tensors, files=files)
    config = read_json_object(folder / "config.json")
    if mlx_affine.is_quantized(config, str(path)):
        kind, tensors, config = (
            "mlx",
            mlx_affine.dequantized(tensors, config, str(path)),
            mlx_affine.stripped(config),
        )
    return stack_experts(Source(kind, str(path), tensors, config, _attachments(folder, config), files))


def _attachments(folder: Path, config: dict[str, Any]) -> dict[str, tuple[str, bytes]]:
    attachments = {"config.json": json_attachment(config)}
    for name, media_type in ATTACHMENTS.items():
        if (folder / name).is_file():
            with reading(str(folder / name)):
                attachments[name] = media_type, (folder / name).read_bytes()
    return attachments
