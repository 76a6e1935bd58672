"""Weights that something else has quantized: found wherever a checkpoint says so, and refused by name.

Configs say it, files beside them, and the names and dtypes of tensors.  What can be made dense (`scaled`, `mlx_affine`)
passes; the last check, of dtypes, comes when that is done.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from rsv_format.dtypes import NUMPY_DTYPE
from rsv_format.errors import RsvError
from rsv_format.sources.base import SourceTensor, read_json_object

Tensors = Mapping[str, SourceTensor]

CONFIG_KEYS = ("quantization_config", "quantization", "compression_config")
_READABLE = frozenset({"fp8", "fbgemm_fp8", "mxfp4", "mxfp8"})
_READABLE_FORMATS = frozenset({"dense", "float-quantized", "mixed-precision", "naive-quantized"})  # compressed-tensors
# files beside config.json, and the keys of which one says that the weights are quantized
_SIDE_FILES = {
    "quantize_config.json": ("GPTQ", ("bits", "quant_method")),
    "quant_config.json": ("AWQ", ("w_bit", "bits", "q_group_size", "quant_method")),
    "quantization_config.json": ("AutoRound", ("bits", "quant_method")),
    "hf_quant_config.json": ("NVIDIA ModelOpt", ("quantization", "quant_algo")),
    "quanto_qmap.json": ("quanto", ()),
    "quantization_map.json": ("quanto", ()),
}
# last parts of tensors' names
_PARTS = {
    **dict.fromkeys(("qweight", "qzeros", "g_idx"), "GPTQ or AWQ"),
    **dict.fromkeys(
        ("weight_packed", "weight_shape", "weight_g_idx", "weight_zero_point", "weight_global_scale"),
        "compressed-tensors",
    ),
    **dict.fromkeys(("compressed", "bitmask"), "compressed-tensors (sparse)"),
    **dict.fromkeys(
        ("absmax", "quant_map", "nested_absmax", "nested_quant_map", "SCB", "weight_format"), "bitsandbytes"
    ),
    "W_q": "HQQ",
    "weight_scale_2": "NVIDIA ModelOpt",
    "tables2": "HIGGS",
    "Qidxs": "QuIP#",
    **dict.fromkeys(("trellis", "suh", "svh"), "ExLlamaV3"),
    **dict.fromkeys(("q_scale_max", "q_groups"), "ExLlamaV2"),
    **dict.fromkeys(("weight_qdata", "_weight_qdata"), "torchao"),
    "qscale_weight": "Mistral's own fp8",
}
# parts that say it together
_PAIRS = {
    ("codes", "codebooks"): "AQLM",
    ("q_weight", "q_scale"): "ExLlamaV2",
    ("indices", "centroids.weight"): "VPTQ",
    ("row_offsets", "col_vals"): "SpQR",
    ("weight._data", "weight._scale"): "quanto",
}
_INNER = {"weight_quantizer": "NVIDIA ModelOpt", "input_quantizer": "NVIDIA ModelOpt"}  # any part of a name
_INTEGERS = frozenset({"u8", "i8", "u16", "i16", "u32", "i32", "u64", "i64"})


def refuse(config: Mapping[str, Any], tensors: Tensors, folder: Path | None, where: str) -> None:
    """Raise RsvError `source_unsupported` where the weights are quantized in a way that cannot be read.

    Parameters
    ----------
    config
        config.json's content, or none of it.
    folder
        Of the files beside config.json.
    """
    for place, entry in announced(config):
        method = _method(entry)
        if method is not None:
            _refuse(f"{where}: config.json", method, f", says {place}")
    for name, (method, keys) in _SIDE_FILES.items() if folder is not None else ():
        assert folder is not None
        if (folder / name).is_file() and _says(read_json_object(folder / name), keys):
            _refuse(f"{where}: {name}", method)
    named = _by_name(tensors)
    if named is not None:
        _refuse(f"{where}: {named[1]}", named[0])


def refuse_packed(tensors: Tensors, where: str) -> None:
    """Raise RsvError `source_unsupported` for weights in integers, or in a dtype that a file cannot hold."""
    for name, tensor in tensors.items():
        matrix = len(tensor.shape) > 1 and (name.endswith((".weight", "_proj")) or name == "weight")
        if matrix and tensor.dtype in _INTEGERS:
            detail = f"a weight in {tensor.dtype} {tensor.shape} is packed in a way that cannot be read"
            raise RsvError("source_unsupported", f"{where}: {name}", detail)
        if tensor.dtype not in NUMPY_DTYPE:
            detail = f"tensors of dtype {tensor.dtype.upper()} cannot be kept, and it comes without a scale"
            raise RsvError("source_unsupported", f"{where}: {name}", detail)


def announced(config: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, Any]]:
    """What a config, or the config of a part such as text_config, says of quantization: where, and what."""
    for key, value in config.items():
        if key in CONFIG_KEYS and value:
            yield f"{place}{key}", value
        elif isinstance(value, Mapping) and key not in CONFIG_KEYS and key.endswith("config"):
            yield from announced(value, f"{place}{key}.")


def _method(entry: Any) -> str | None:
    """The name of what has quantized, as an entry of a config gives it; None for what can be read."""
    if not isinstance(entry, Mapping):
        return str(entry)[:80]
    inner = entry.get("quantization")
    algorithm = entry.get("quant_algo") or (inner.get("quant_algo") if isinstance(inner, Mapping) else None)
    method = entry.get("quant_method")
    if entry.get("load_in_4bit") or entry.get("load_in_8bit"):
        return "bitsandbytes"
    if algorithm is not None:
        return None if "FP8" in str(algorithm).upper() else f"NVIDIA ModelOpt ({algorithm})"
    if method == "modelopt":
        return None  # of the cache of keys and values alone
    if method == "compressed-tensors" or "config_groups" in entry:
        sparsity = entry.get("sparsity_config")
        sparse = isinstance(sparsity, Mapping) and sparsity.get("format") not in (None, "dense")
        readable = entry.get("format") in _READABLE_FORMATS and not entry.get("transform_config") and not sparse
        return None if readable else f"compressed-tensors ({entry.get('format')})"
    return None if method is None or method in _READABLE else str(method)


def _says(content: Mapping[str, Any], keys: tuple[str, ...]) -> bool:
    if "quantization" in keys:
        return _method(content) is not None
    return not keys or any(content.get(key) is not None for key in keys)


def _by_name(tensors: Tensors) -> tuple[str, str] | None:
    """What has quantized, and a tensor whose name shows it."""
    for name in tensors:
        parts = name.split(".")
        owner = name.removesuffix(parts[-1])
        if (method := _PARTS.get(parts[-1])) is not None or any(part.startswith("bitsandbytes__") for part in parts):
            return method or "bitsandbytes", name
        if (inner := next((_INNER[part] for part in parts if part in _INNER), None)) is not None:
            return inner, name
        for (first, second), method in _PAIRS.items():
            if f".{name}".endswith(f".{first}") and owner.removesuffix("weight.") + second in tensors:
                return method, name
    return None


def _refuse(where: str, method: str, more: str = "") -> None:
    detail = f"the weights are quantized already{more}: {method}; give the model in float weights"
    raise RsvError("source_unsupported", where, detail)
