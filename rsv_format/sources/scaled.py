"""Weights in 8-bit floats with scales, and OpenAI's in 4-bit ones (mxfp4), made dense.

A weight W in fp8 has a scale beside it, W_scale_inv or W_scale, which multiplies it: one number, one for each row, or
one for each block.  An mxfp4 weight is W_blocks, two numbers a byte, and W_scales, a power of two for each 32.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.sources.base import Array, Floats, SourceTensor, from_float32
from rsv_format.sources.foreign import announced

_BLOCK = 128  # of fp8's square blocks, if the config names no other
_GROUPS = (16, 32, 64, 128)  # input channels with one scale, where rows have several
_DTYPES = {"float32": "f32", "float16": "f16", "bfloat16": "bf16"}
# scales of activations and of the cache: a dense model has no use for them
_ACTIVATION_SCALES = frozenset({
    "input_scale", "input_scale_inv", "input_scale_ub", "activation_scale", "activation_scale_inv", "output_scale",
    "q_scale", "k_scale", "v_scale", "kv_scale", "prob_output_scale",
})  # fmt: skip


def _e4m3() -> Floats:
    codes = np.arange(256)
    exponent, mantissa = (codes >> 3) & 15, codes & 7
    values = np.where(exponent == 0, mantissa * 2.0**-9, (8 + mantissa) * 2.0 ** (exponent - 10.0))
    values[codes & 127 == 127] = np.nan
    return np.where(codes < 128, values, -values).astype(np.float32)


def _e8m0() -> Floats:
    values = 2.0 ** (np.arange(256) - 127.0)
    values[255] = np.nan
    return values.astype(np.float32)


FP8 = {
    "f8_e4m3": _e4m3(),
    "f8_e5m2": (np.arange(256, dtype=np.uint16) << 8).view(np.float16).astype(np.float32),
}
E8M0 = _e8m0()
TABLES = {**FP8, "f8_e8m0": E8M0}  # dtype -> the value of each byte
_FP4 = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, 0, -0.5, -1, -1.5, -2, -3, -4, -6], np.float32)


def dense(tensors: Mapping[str, SourceTensor], config: Mapping[str, Any], where: str) -> dict[str, SourceTensor]:
    """The tensors with dense ones in the place of fp8 and mxfp4 weights and their scales.

    Raises
    ------
    RsvError
        `source_invalid` where the shapes of a weight and its scale do not fit.
    """
    kept, block = _kept_dtype(config), _block(config)
    made = dict(tensors)
    for name, tensor in tensors.items():
        if tensor.dtype in FP8:
            scale_name = next((x for x in (f"{name}_scale_inv", f"{name}_scale") if x in tensors), None)
            if scale_name is not None:
                made[name] = _scaled(tensor, tensors[scale_name], block, kept, where)
                made.pop(scale_name, None)
        elif name.endswith("_blocks") and f"{name.removesuffix('blocks')}scales" in tensors:
            whole = _mxfp4(tensor, tensors[f"{name.removesuffix('blocks')}scales"], where)
            made |= {whole.name: whole}
            del made[name], made[f"{whole.name}_scales"]
    if made.keys() != tensors.keys():
        made = {name: x for name, x in made.items() if not _scales_activations(name, x)}
    return made


def _scales_activations(name: str, tensor: SourceTensor) -> bool:
    return name.rpartition(".")[2] in _ACTIVATION_SCALES and tensor.shape in ((), (1,))


def _kept_dtype(config: Mapping[str, Any]) -> str:
    """The dtype that the config names for the weights, else bfloat16."""
    parts = [config, *(x for x in config.values() if isinstance(x, Mapping))]
    names = (str(part[key]) for part in parts for key in ("dtype", "torch_dtype") if part.get(key) is not None)
    return next((_DTYPES[name] for name in names if name in _DTYPES), "bf16")


def _block(config: Mapping[str, Any]) -> tuple[int, int]:
    """Rows and columns that share a scale."""

    def sizes(value: Any) -> Iterator[tuple[int, int]]:
        if isinstance(value, Mapping):
            for key, inner in value.items():
                if key in ("weight_block_size", "block_structure") and _is_pair(inner):
                    yield inner[0], inner[1]
                else:
                    yield from sizes(inner)

    return next((size for _, entry in announced(config) for size in sizes(entry)), (_BLOCK, _BLOCK))


def _is_pair(value: Any) -> bool:
    return isinstance(value, list) and len(value) == 2 and all(type(x) is int and x > 0 for x in value)


@dataclass(frozen=True)
class _Spread:
    """How scales lie on a weight: their shape, of as many axes, and the rows and columns that one is for."""

    shape: tuple[int, ...]
    rows: int = 1
    columns: int = 1


def _spread(shape: tuple[int, ...], scales: tuple[int, ...], block: tuple[int, int]) -> _Spread | None:
    """None where they do not fit."""
    if math.prod(scales) == 1:
        return _Spread((1,) * len(shape))
    if scales == shape[: len(scales)]:  # of rows, of experts, or of the rows of experts
        return _Spread(scales + (1,) * (len(shape) - len(scales)))
    if (
        len(scales) != len(shape)
        or len(shape) < 2
        or any(s not in (1, n) for s, n in zip(scales[:-2], shape, strict=False))
    ):
        return None
    if all(s in (1, n) for s, n in zip(scales, shape, strict=True)):
        return _Spread(scales)
    (rows, columns), (s_rows, s_columns) = shape[-2:], scales[-2:]
    if s_rows == -(-rows // block[0]) and s_columns == -(-columns // block[1]):
        return _Spread(scales, *block)
    group, rest = divmod(columns, s_columns)
    return _Spread(scales, 1, group) if s_rows == rows and not rest and group in _GROUPS else None


def _scaled(weight: SourceTensor, scale: SourceTensor, block: tuple[int, int], kept: str, where: str) -> SourceTensor:
    place, shape = f"{where}: {weight.name}", weight.shape
    spread = _spread(shape, scale.shape, block)
    if spread is None or scale.dtype not in ("f32", "bf16", "f16", "f8_e8m0", "u8"):
        detail = f"{weight.dtype} {shape} does not fit its scale {scale.dtype} {scale.shape}"
        raise RsvError("source_invalid", place, detail)

    def float32() -> Floats:
        values = weight.float32()
        factors = (E8M0[scale.read()] if scale.dtype == "u8" else scale.float32()).reshape(spread.shape)
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by its name
            if (spread.rows, spread.columns) == (1, 1):
                values *= factors
                return values
            for i in range(factors.shape[-2]):
                rows = slice(i * spread.rows, (i + 1) * spread.rows)
                wide = np.repeat(factors[..., i : i + 1, :], spread.columns, axis=-1)
                values[..., rows, :] *= wide[..., : shape[-1]]
        return values

    def rows(start: int, stop: int) -> SourceTensor:
        """Some of a stack: their scales are their own, or the same for all."""
        assert weight.rows is not None
        own = scale.rows is not None and scale.shape[:1] == shape[:1]
        part = scale.rows(start, stop) if own and scale.rows is not None else scale
        return _scaled(weight.rows(start, stop), part, block, kept, where)

    stacked = rows if weight.rows is not None and len(shape) > 2 else None
    return SourceTensor(weight.name, kept, shape, lambda: from_float32(float32(), kept, place), float32, rows=stacked)


def _mxfp4(blocks: SourceTensor, scales: SourceTensor, where: str) -> SourceTensor:
    """Of blocks (n, out, groups, 16) and scales (n, out, groups) the weight (n, in, out), as gpt-oss has it dense."""
    name, place = blocks.name.removesuffix("_blocks"), f"{where}: {blocks.name}"
    if (blocks.dtype, scales.dtype) != ("u8", "u8") or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
        detail = f"{blocks.dtype} {blocks.shape} with scales {scales.dtype} {scales.shape} is not mxfp4"
        raise RsvError("source_invalid", place, detail)
    n, rows, groups = scales.shape

    def float32() -> Floats:
        codes, values = blocks.read(), np.empty((n, rows, groups, 32), np.float32)
        values[..., 0::2], values[..., 1::2] = _FP4[codes & 15], _FP4[codes >> 4]
        values *= E8M0[scales.read()][..., None]
        return values.reshape(n, rows, groups * 32).swapaxes(1, 2)

    def read() -> Array:
        return from_float32(float32(), "bf16", place)  # two bits of mantissa: exact

    def some(start: int, stop: int) -> SourceTensor:
        assert blocks.rows is not None and scales.rows is not None
        return _mxfp4(blocks.rows(start, stop), scales.rows(start, stop), where)

    stacked = None if blocks.rows is None or scales.rows is None else some
    return SourceTensor(name, "bf16", (n, groups * 32, rows), read, float32, rows=stacked)
