"""GGUF files of llama.cpp, turned back into the Hugging Face checkpoint that they were made from.

Float tensors keep their dtype; quantized ones are dequantized by the gguf package and kept as float16.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from rsv_format.dtypes import to_float32
from rsv_format.errors import RsvError
from rsv_format.sources.base import Array, Floats, Source, SourceTensor, from_float32, json_attachment
from rsv_format.sources.gguf_config import (
    Architecture,
    architecture,
    block_count,
    build_config,
    head_count,
    kv_head_count,
)
from rsv_format.sources.gguf_names import block_of, hugging_face_name
from rsv_format.sources.gguf_reader import FLOAT_TYPES, Metadata, StoredTensor, dequantize, open_gguf
from rsv_format.sources.gguf_rope import ROPE_FACTORS
from rsv_format.sources.gguf_tensors import completed
from rsv_format.sources.gguf_tokenizer import tokenizer_attachments, without_tokenizer
from rsv_format.sources.gguf_vocabulary import Vocabulary, read_vocabulary

_TORCH_DTYPES = {"f32": "float32", "f16": "float16", "bf16": "bfloat16"}


def open_file(path: Path, *, tokenizer: bool = True) -> Source:
    """Open a GGUF model, all parts of it if it was split.

    Raises
    ------
    RsvError
        `io_error`; `source_invalid` for a malformed file, a tensor that is missing, and on reading a tensor with a
        value that float16 cannot hold; `source_unsupported` for an architecture, tensor, tensor type, rope scaling
        or, if a tokenizer is asked for, tokenizer that is not known; `missing_dependency` without the gguf and
        tokenizers packages.
    """
    opened = open_gguf(path)
    metadata, where = opened.metadata, opened.metadata.where
    kind = architecture(metadata)
    _check_types(opened.tensors.values())
    blocks, extra = block_count(metadata)
    factors: Floats | None = None
    tensors: dict[str, SourceTensor] = {}
    for stored in opened.tensors.values():
        block = block_of(stored.name)
        if stored.name == ROPE_FACTORS:
            factors = _dense(stored).reshape(-1)
        elif block is None or not blocks <= block < blocks + extra:
            converted = _convert(stored, kind, metadata)
            if converted.name in tensors:
                raise RsvError("source_invalid", stored.place, f"is a second {converted.name}")
            tensors[converted.name] = converted
    embedding = tensors.get("model.embed_tokens.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise RsvError("source_invalid", f"{where}: token_embd.weight", "is missing or no matrix")
    vocabulary = _vocabulary(metadata, embedding.shape[0], tokenizer)
    dtype = _TORCH_DTYPES[embedding.dtype]
    config = build_config(metadata, kind, tensors.keys(), embedding.shape[0], dtype, factors, vocabulary)
    tensors = completed(tensors, config, where)
    attachments = {"config.json": json_attachment(config)}
    if tokenizer and vocabulary is not None:
        attachments |= tokenizer_attachments(metadata, vocabulary)
    return Source("gguf", str(path), tensors, config, attachments, opened.files)


def _vocabulary(metadata: Metadata, rows: int, tokenizer: bool) -> Vocabulary | None:
    """Without a tokenizer, the ids of a vocabulary are kept if it is sound."""
    with without_tokenizer() if tokenizer else contextlib.suppress(RsvError):
        vocabulary = read_vocabulary(metadata)
        if vocabulary is not None and len(vocabulary.tokens) > rows:
            detail = f"there are {len(vocabulary.tokens)} tokens, but {rows} rows in token_embd.weight"
            raise RsvError("source_invalid", f"{metadata.where}: tokenizer.ggml.tokens", detail)
        return vocabulary
    return None


def _check_types(tensors: Any) -> None:
    """Refuse a type that cannot be dequantized before any work is done."""
    for kind, tensor in {tensor.kind: tensor for tensor in tensors}.items():
        if kind.name not in FLOAT_TYPES:
            dequantize(np.zeros((1, tensor.row_nbytes), np.uint8), kind, tensor.place)


def _dense(tensor: StoredTensor) -> Floats:
    if tensor.kind.name in FLOAT_TYPES:
        return to_float32(tensor.stored(), FLOAT_TYPES[tensor.kind.name][0])
    return tensor.dequantized()


def _convert(tensor: StoredTensor, kind: Architecture, metadata: Metadata) -> SourceTensor:
    name = hugging_face_name(tensor.name, kind.model_type)
    if name is None:
        raise RsvError("source_unsupported", tensor.place, f"is not a tensor of {kind.model_type} models")
    quantized = tensor.kind.name not in FLOAT_TYPES
    dtype = "f16" if quantized else FLOAT_TYPES[tensor.kind.name][0]
    shape = tensor.shape
    if name.endswith("shared_expert_gate.weight") and len(shape) == 1:
        shape = (1, *shape)  # llama.cpp drops the axis of the single output
    head = _head(name, shape, kind, metadata, tensor.place)
    computed = quantized or (name.endswith("norm.weight") and kind.norm_offset != 0)
    return _restored(name, dtype, shape, tensor, partial(_restore, name=name, kind=kind, head=head), computed, head)


def _restored(
    name: str,
    dtype: str,
    shape: tuple[int, ...],
    tensor: StoredTensor,
    restore: Callable[[Array], Array],
    computed: bool,
    head: int,
) -> SourceTensor:
    """A tensor whose stored values `restore` turns back, all rows of a head together."""

    def stored() -> Array:
        return restore(tensor.stored().reshape(shape))

    def float32() -> Floats:
        return restore(_dense(tensor).reshape(shape))

    def kept() -> Array:
        return from_float32(float32(), dtype, tensor.place)

    def rows(start: int, stop: int) -> SourceTensor:
        unit = head or 1
        first, end = start // unit * unit, -(-stop // unit) * unit
        part = _restored(name, dtype, (end - first, shape[-1]), tensor.rows(first, end), restore, computed, head)
        if (first, end) == (start, stop):
            return part
        return replace(part, rows=None).row_part(start - first, stop - first)

    return SourceTensor(
        name, dtype, shape, kept if computed else stored, float32, rows=rows if len(shape) > 1 else None
    )


def _head(name: str, shape: tuple[int, ...], kind: Architecture, metadata: Metadata, place: str) -> int:
    """Rows of a head, if each head's are to be put back in order; 0 if not."""
    *_, owner, _part = name.split(".")
    if not kind.interleaved_rope or owner not in ("q_proj", "k_proj"):
        return 0
    heads = head_count(metadata) if owner == "q_proj" else kv_head_count(metadata)
    if shape[0] % (2 * heads):
        raise RsvError("source_invalid", place, f"{shape} does not divide into {heads} heads")
    return shape[0] // heads


def _restore(values: Array, *, name: str, kind: Architecture, head: int) -> Array:
    """Undo what llama.cpp's converter does to the values: interleaved q and k rows, offset norm gains."""
    if head:
        halves = values.reshape(-1, head // 2, 2, *values.shape[1:]).swapaxes(1, 2)
        return np.ascontiguousarray(halves).reshape(values.shape)
    if kind.norm_offset and name.endswith("norm.weight"):
        return values - np.float32(kind.norm_offset)
    return values


def load_tensors(path: Path) -> dict[str, Floats]:
    """All tensors of a small GGUF file that is no model, such as an importance matrix, as float32."""
    opened = open_gguf(path)
    tensors = {name: _dense(tensor) for name, tensor in opened.tensors.items()}
    for file in opened.files:
        file.close()
    return tensors
