"""Where weights come from.

Modules, bottom up: base (what a source is), experts (stacks of them); shards (which files hold the weights), foreign
(weights that something else has quantized), mlx_affine and scaled (dense weights from MLX's packed ones, from fp8 and
mxfp4), settings (a config as mlx-lm reads it), completeness (nothing is missing), conv1d (GPT-2's layers), attachments
(tokenizers' files), safetensors (files and folders); hub (downloads a folder); gguf_header, gguf_reader, gguf_names,
gguf_vocabulary, gguf_rope, gguf_config, gguf_tensors, gguf_tokenizer and gguf (llama.cpp's files); imatrix
(llama.cpp's importance matrices).  A library is imported when a source of its kind is opened, never by importing
this package.
"""

from __future__ import annotations

import os
from pathlib import Path

from rsv_format.errors import RsvError
from rsv_format.sources.base import Source, SourceTensor

__all__ = ["Source", "SourceTensor", "open_source"]


def open_source(spec: str | os.PathLike[str], *, tokenizer: bool = True) -> Source:
    """Open a model for reading, tensor by tensor.

    Parameters
    ----------
    spec
        A .safetensors file, a GGUF file of any name (of a model that was split, any part), a Hugging Face or
        MLX-quantized folder, or, where no such path exists, a hub repository "owner/name" or
        "owner/name@revision", a branch, tag or commit.
    tokenizer
        False leaves out all attachments but config.json and generation_config.json; a tokenizer that cannot be read
        is no error then.

    Returns
    -------
    Source
        A context manager that holds its files open; tensors go by their Hugging Face names, stacks of experts by
        mlx-lm's.

    Raises
    ------
    RsvError
        `io_error` when nothing can be read there, `source_unsupported` for a kind of file, tensor or model
        that this package does not know or whose library is missing, `source_invalid` for a malformed file.
    """
    try:
        source = _open(Path(spec), str(spec), tokenizer)
    except OSError as e:  # a folder on the way that may not be entered
        raise RsvError("io_error", str(spec), e.strerror or str(e)) from e
    return source if tokenizer else source.without_tokenizer()


def _open(path: Path, spec: str, tokenizer: bool) -> Source:
    from rsv_format.sources import gguf, gguf_reader, hub, safetensors

    if not path.exists():
        if not hub.is_repository(spec):
            raise RsvError("io_error", spec, "no such file or folder")
        name, folder = hub.download(spec)
        source = _open(folder, name, tokenizer)
        source.path, source.revision = name, folder.name
        return source
    if path.is_dir():
        if not any(path.glob("*.safetensors")) and (models := gguf_reader.gguf_models(path)):
            raise RsvError("source_unsupported", spec, f"is a folder: give the GGUF file in it, {' or '.join(models)}")
        return safetensors.open_folder(path, tokenizer=tokenizer)
    if path.suffix.lower() == ".safetensors":
        return safetensors.open_file(path, tokenizer=tokenizer)
    if path.suffix.lower() == ".gguf" or gguf_reader.is_gguf(path):
        return gguf.open_file(path, tokenizer=tokenizer)
    raise RsvError("source_unsupported", str(path), "is neither a safetensors nor a GGUF file, nor a model folder")
