"""Safetensors files: a lone file, or a Hugging Face or MLX folder with one file, shards, or a sharded index.

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

from rsv_format.dtypes import NUMPY_DTYPE, to_float32
from rsv_format.errors import RsvError
from rsv_format.sources import attachments, completeness, conv1d, foreign, mlx_affine, scaled, settings
from rsv_format.sources.base import (
    CONFIGS,
    Floats,
    Source,
    SourceFile,
    SourceTensor,
    library,
    read_json_object,
    reading,
)
from rsv_format.sources.experts import stack_experts
from rsv_format.sources.shards import INDEX, indexed_files, missing_siblings, unindexed_files

_DTYPES = {
    "BOOL": "bool", "U8": "u8", "I8": "i8", "U16": "u16", "I16": "i16", "U32": "u32", "I32": "i32",
    "U64": "u64", "I64": "i64", "F16": "f16", "BF16": "bf16", "F32": "f32", "F64": "f64",
    "F8_E4M3": "f8_e4m3", "F8_E5M2": "f8_e5m2", "F8_E8M0": "f8_e8m0",  # made dense before they leave this module
}  # fmt: skip


def open_file(path: Path, *, tokenizer: bool = True) -> Source:
    """One .safetensors file; the config and tokenizer are those beside it, if a config.json is.

    Raises
    ------
    RsvError
        `io_error`, `source_invalid`, or `source_unsupported` for an unknown dtype or a missing library.
    """
    if missing := missing_siblings([path.name]):
        detail = f"is one of several files, and {missing[0]} is another: give their folder"
        raise RsvError("source_invalid", str(path), detail)
    file = SourceFile(path)
    return _with_config("safetensors", path, read_file(file), (file,), path.parent, tokenizer)


def open_folder(path: Path, *, tokenizer: bool = True) -> Source:
    """A Hugging Face or MLX-quantized model folder.

    Raises
    ------
    RsvError
        As `open_file`; `source_invalid` too where the index and the files disagree, or no weights are there.
    """
    weight_map = indexed_files(path)
    names = unindexed_files(path) if weight_map is None else sorted(set(weight_map.values()))
    files = tuple(SourceFile(path / name) for name in names)
    tensors: dict[str, SourceTensor] = {}
    for file in files:
        shard = read_file(file)
        for name in [name for name in shard if name in tensors]:
            if weight_map is None or name not in weight_map:
                raise RsvError("source_invalid", str(file.path), f"tensor {name!r} is in another file too")
            if weight_map[name] != file.path.name:
                del shard[name]  # the index says which of the two it is
        tensors |= shard
    for name, held in (weight_map or {}).items():
        if name not in tensors:
            raise RsvError("source_invalid", str(path / INDEX), f"{held} has no tensor {name!r}")
    return _with_config("folder", path, tensors, files, path, tokenizer)


def read_file(file: SourceFile) -> dict[str, SourceTensor]:
    """The tensors of one file, in the order of their data; those in 8-bit floats have a dtype of that name."""
    where = str(file.path)
    safetensors = library("safetensors", where)
    tensors: dict[str, SourceTensor] = {}
    offset = 8 + int.from_bytes(file.read("u1", (8,), 0, where).tobytes(), "little")
    with reading(where), safetensors.safe_open(where, framework="numpy") as opened:
        for name in opened.offset_keys():
            header = opened.get_slice(name)
            dtype, shape = header.get_dtype(), tuple(header.get_shape())
            if dtype not in _DTYPES:
                raise RsvError("source_unsupported", f"{where}: {name}", f"tensors of dtype {dtype} cannot be kept")
            tensors[name] = _tensor(file, name, _DTYPES[dtype], shape, offset)
            offset += math.prod(shape) * (
                1 if _DTYPES[dtype] in scaled.TABLES else NUMPY_DTYPE[_DTYPES[dtype]].itemsize
            )
    file.check_unchanged()  # the library has opened the path again
    return tensors


def _tensor(
    file: SourceFile, name: str, dtype: str, shape: tuple[int, ...], offset: int, stride: int | None = None
) -> SourceTensor:
    table = scaled.TABLES.get(dtype)
    stored = np.dtype(np.uint8) if table is not None else NUMPY_DTYPE[dtype]
    read = partial(file.read, stored, shape, offset, f"{file.path}: {name}", stride)
    pitch = stride or math.prod(shape[-1:]) * stored.itemsize  # bytes from row to row

    def rows(start: int, stop: int) -> SourceTensor:
        return _tensor(file, name, dtype, (stop - start, shape[-1]), offset + start * pitch, stride)

    def columns(start: int, stop: int) -> SourceTensor:
        narrow = math.prod(shape[:-1]), stop - start
        return _tensor(file, name, dtype, narrow, offset + start * stored.itemsize, pitch)

    def float32() -> Floats:
        array = read()
        values: Floats = to_float32(array, dtype) if table is None else table[array]
        return values

    has_rows = len(shape) > 1
    return SourceTensor(
        name, dtype, shape, read, float32, rows=rows if has_rows else None, columns=columns if has_rows else None
    )


def _with_config(
    kind: str,
    path: Path,
    tensors: dict[str, SourceTensor],
    files: tuple[SourceFile, ...],
    folder: Path,
    tokenizer: bool,
) -> Source:
    """What the tensors mean in the light of the config beside them: dense ones of a whole model."""
    where, has_config = str(path), (folder / "config.json").exists()
    config: dict[str, Any] = read_json_object(folder / "config.json") if has_config else {}
    with reading(f"{where}: config.json"):  # its values may be of any kind
        return _meant(kind, where, tensors, files, folder, config, has_config, tokenizer)


def _meant(
    kind: str,
    where: str,
    tensors: dict[str, SourceTensor],
    files: tuple[SourceFile, ...],
    folder: Path,
    config: dict[str, Any],
    has_config: bool,
    tokenizer: bool,
) -> Source:
    completeness.refuse_adapters(tensors, where)
    completeness.refuse_empty(tensors, where)
    foreign.refuse(config, tensors, folder if has_config else None, where)
    if mlx_affine.is_quantized(tensors):
        kind, tensors = "mlx", mlx_affine.dequantized(tensors, config, where)
    tensors = scaled.dense(tensors, config, where)
    foreign.refuse_packed(tensors, where)
    if not has_config:
        return Source(kind, where, tensors, files=files)
    config = settings.current(config)
    completeness.check_whole(tensors, config, where)
    if config.get("model_type") == "gpt2":
        tensors = conv1d.turned(tensors, config)
    attached, left_out = attachments.beside(folder, config, None if tokenizer else CONFIGS)
    return stack_experts(Source(kind, where, tensors, config, attached, files, left_out))
