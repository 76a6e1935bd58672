"""Where weights come from.

Modules, bottom up: base (what a source is), experts (stacks of them), mlx_affine (dense weights from MLX's
packed ones), safetensors (files and folders), hub (downloads a folder), gguf_names, gguf_reader, gguf_config,
gguf_tokenizer and gguf (llama.cpp's files), imatrix (llama.cpp's importance matrices).  A library is imported
when a source of its kind is opened, never by importing this package.
"""

from __future__ import annotations

import os
from pathlib import Path

from rsv_format.errors import RsvError
from rsv_format.sources.base import Source, SourceTensor

__all__ = ["Source", "SourceTensor", "open_source"]


def open_source(spec: str | os.PathLike[str]) -> Source:
    """Open a model for reading, tensor by tensor.

    Parameters
    ----------
    spec
        A .safetensors file, a .gguf file, a Hugging Face or MLX-quantized folder, or, where no such path
        exists, a hub repository "owner/name".

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
    from rsv_format.sources import gguf, hub, safetensors

    path = Path(spec)
    if not path.exists():
        if not hub.is_repository(str(spec)):
            raise RsvError("io_error", str(spec), "no such file or folder")
        source = safetensors.open_folder(hub.download(str(spec)))
        source.path = str(spec)
        return source
    if path.is_dir():
        return safetensors.open_folder(path)
    if path.suffix == ".safetensors":
        return safetensors.open_file(path)
    if path.suffix == ".gguf":
        return gguf.open_file(path)
    raise RsvError("source_unsupported", str(path), "is neither a .safetensors nor a .gguf file, nor a model folder")
