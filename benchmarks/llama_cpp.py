"""llama.cpp's own quantizers, through llama-cpp-python: what they make of a GGUF model's weights, and at what size."""

from __future__ import annotations

import ctypes
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.sources.gguf_names import llama_cpp_name

EMBEDDING = "token_embd.weight"
ITS_OWN = ("general.architecture", "general.file_type", "general.quantization_version")  # the writers' affair


@dataclass(frozen=True)
class Quantized:
    """A GGUF file's tensors: their bytes and types by llama.cpp's name."""

    nbytes: Mapping[str, int]
    types: Mapping[str, str]

    def described(self) -> str:
        """The types of the quantized matrices, the most frequent first: rows that its blocks of 256 do not divide
        get others than the name of the file says."""
        counts = Counter(kind for name, kind in self.types.items() if kind not in ("F32", "F16") and name != EMBEDDING)
        return ", ".join(f"{count} {kind}" for kind, count in counts.most_common())


def dense_copy(source: Path, target: Path) -> None:
    """The same model, all tensors in float32."""
    import gguf

    reader = gguf.GGUFReader(source)
    writer = gguf.GGUFWriter(target, reader.fields["general.architecture"].contents())
    for name, field in reader.fields.items():
        if not name.startswith("GGUF.") and name not in ITS_OWN:
            inner = field.types[-1] if field.types[0] == gguf.GGUFValueType.ARRAY else None
            writer.add_key_value(name, field.contents(), field.types[0], inner)
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, gguf.quants.dequantize(tensor.data, tensor.tensor_type).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def quantize(dense: Path, target: Path, file_type: str, importance: Mapping[str, NDArray[np.float64]]) -> Quantized:
    """Quantize a file of `dense_copy` as `llama-quantize --imatrix` does, the embedding table kept in float16.

    Parameters
    ----------
    dense, target : Path
    file_type : str
        Such as "Q4_K_M".
    importance : mapping of str to float64 (in_features,)
        Mean squared activations by layer, under the names of Hugging Face: what an imatrix file holds.
    """
    import gguf
    import llama_cpp

    silent = llama_cpp.llama_log_callback(lambda level, text, data: None)
    llama_cpp.llama_log_set(silent, ctypes.c_void_p(0))
    names = {layer: llama_cpp_name(f"{layer}.weight") for layer in importance}
    data = {name.encode(): np.ascontiguousarray(importance[layer], np.float32) for layer, name in names.items() if name}
    entries: Any = (llama_cpp.llama_model_imatrix_data * (len(data) + 1))()  # the last, without a name, ends them
    for entry, (name, values) in zip(entries, data.items(), strict=False):
        entry.name = name
        entry.data = values.ctypes.data_as(ctypes.POINTER(ctypes.c_float))
        entry.size = values.size
    options = llama_cpp.llama_model_quantize_default_params()
    options.ftype = getattr(llama_cpp, f"LLAMA_FTYPE_MOSTLY_{file_type}")
    options.token_embedding_type = options.output_tensor_type = gguf.GGMLQuantizationType.F16
    options.allow_requantize = True
    options.imatrix = entries
    code = llama_cpp.llama_model_quantize(str(dense).encode(), str(target).encode(), ctypes.byref(options))
    if code:
        raise RuntimeError(f"llama_model_quantize returned {code}")
    tensors = gguf.GGUFReader(target).tensors
    return Quantized(
        {tensor.name: int(tensor.n_bytes) for tensor in tensors},
        {tensor.name: tensor.tensor_type.name for tensor in tensors},
    )
