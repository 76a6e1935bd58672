"""GGUF files of llama.cpp, turned back into the Hugging Face checkpoint that they were made from.

Float tensors keep their dtype; quantized ones are dequantized by the gguf package and kept as float16.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rsv_format.dtypes import to_float32
from rsv_format.errors import RsvError
from rsv_format.sources.base import (
    Array,
    Floats,
    Source,
    SourceFile,
    SourceTensor,
    from_float32,
    json_attachment,
    library,
    reading,
)
from rsv_format.sources.gguf_config import Architecture, architecture, build_config, head_count
from rsv_format.sources.gguf_names import hugging_face_name
from rsv_format.sources.gguf_reader import Metadata, open_gguf
from rsv_format.sources.gguf_tokenizer import tokenizer_attachments

ROPE_FACTORS = "rope_freqs.weight"
_FLOAT_TYPES = {"F32": "f32", "F16": "f16", "BF16": "bf16"}
_TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def open_file(path: Path) -> Source:
    """Open a GGUF model.

    Raises
    ------
    RsvError
        `io_error`; `source_invalid` for a malformed file, and on reading a tensor with a value that float16
        cannot hold; `source_unsupported` for an architecture, tensor, tensor type, rope scaling or tokenizer
        that is not known, or without the gguf and tokenizers packages.
    """
    file = SourceFile(path)
    reader, metadata = open_gguf(path)
    file.check_unchanged()  # what is mapped is what was opened
    where = str(path)
    kind = architecture(metadata)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    factors = stored.pop(ROPE_FACTORS, None)
    _check_types(stored, where)
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in stored.items():
        converted = _convert(tensor, kind, metadata)
        if converted.name in tensors:
            raise RsvError("source_invalid", f"{where}: {name}", f"is a second {converted.name}")
        tensors[converted.name] = converted
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise RsvError("source_invalid", f"{where}: token_embd.weight", "is missing or no matrix")
    rope = None if factors is None else np.array(factors.data, dtype=np.float32).reshape(-1)
    dtype = _TORCH_DTYPES[embedding.dtype]
    config = build_config(metadata, kind, tensors.keys(), embedding.shape[0], dtype, rope)
    attachments = {"config.json": json_attachment(config), **tokenizer_attachments(metadata)}
    return Source("gguf", where, tensors, config, attachments, (file,))


def _check_types(stored: dict[str, Any], where: str) -> None:
    """Dequantize one row of each type, to refuse an unknown one before any work is done."""
    for kind, tensor in {tensor.tensor_type: tensor for tensor in stored.values()}.items():
        place = f"{where}: {tensor.name}"
        if kind.name not in _FLOAT_TYPES:
            with reading(place):
                _dequantize(tensor.data.reshape(-1, tensor.data.shape[-1])[:1], kind, place)


def _dequantize(data: Array, kind: Any, place: str) -> Floats:
    quants = library("gguf.quants", place)
    with reading(place), np.errstate(all="ignore"):  # the quantizer refuses what is not finite by name
        try:
            values: Floats = quants.dequantize(data, kind)
        except NotImplementedError as error:
            raise RsvError("source_unsupported", place, f"{kind.name} tensors cannot be dequantized") from error
    return values


def _convert(tensor: Any, kind: Architecture, metadata: Metadata) -> SourceTensor:
    place = f"{metadata.where}: {tensor.name}"
    name = hugging_face_name(tensor.name, kind.model_type)
    if name is None:
        raise RsvError("source_unsupported", place, f"is not a tensor of {kind.model_type} models")
    dtype = _FLOAT_TYPES.get(tensor.tensor_type.name, "f16")
    shape = tuple(int(side) for side in reversed(tensor.shape))
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)  # llama.cpp drops the axis of the single output
    restore = partial(_restore, name=name, kind=kind, heads=_heads(name, shape, kind, metadata, place))

    def stored() -> Array:
        if tensor.tensor_type.name == "BF16":
            bits: Array = np.ascontiguousarray(tensor.data).view("<u2")
            return bits.reshape(shape)
        return np.array(tensor.data).reshape(shape)

    if tensor.tensor_type.name not in _FLOAT_TYPES:

        def float32() -> Floats:
            return restore(_dequantize(tensor.data, tensor.tensor_type, place).reshape(shape))
    elif name.endswith("norm.weight") and kind.norm_offset:

        def float32() -> Floats:
            return restore(to_float32(stored(), dtype))
    else:  # only the order of the rows changes
        return SourceTensor(name, dtype, shape, lambda: restore(stored()), lambda: to_float32(restore(stored()), dtype))
    return SourceTensor(name, dtype, shape, lambda: from_float32(float32(), dtype, place), float32)


def _heads(name: str, shape: tuple[int, ...], kind: Architecture, metadata: Metadata, place: str) -> int:
    """How many heads' rows to put back in order; 0 for none."""
    *_, owner, _part = name.split(".")
    if not kind.interleaved_rope or owner not in ("q_proj", "k_proj"):
        return 0
    key = "llama.attention.head_count"
    if owner == "k_proj" and f"{key}_kv" in metadata.values:
        key += "_kv"
    heads = head_count(metadata, key)
    if not shape or shape[0] % (2 * heads):
        raise RsvError("source_invalid", place, f"{shape} does not divide into {heads} heads")
    return heads


def _restore(values: Array, *, name: str, kind: Architecture, heads: int) -> Array:
    """Undo what llama.cpp's converter does to the values: interleaved q and k rows, offset norm gains."""
    if heads:
        rest = values.shape[1:]
        halves = values.reshape(heads, values.shape[0] // heads // 2, 2, *rest).swapaxes(1, 2)
        return np.ascontiguousarray(halves).reshape(values.shape)
    if kind.norm_offset and name.endswith("norm.weight"):
        return values - np.float32(kind.norm_offset)
    return values


def load_tensors(path: Path) -> dict[str, Floats]:
    """All tensors of a small GGUF file that is no model, such as an importance matrix, as float32."""
    reader, _ = open_gguf(path)
    with reading(str(path)):
        return {tensor.name: _dequantize(tensor.data, tensor.tensor_type, tensor.name) for tensor in reader.tensors}
