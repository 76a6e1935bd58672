"""Weights in 8-bit floats with scales, and OpenAI's in 4-bit ones (mxfp4), made dense.

A weight W in fp8 has a scale beside it, W_scale_inv or W_scale, which multiplies it: one number, one for each row, or
one for each block.  An mxfp4 weight is W_blocks, two numbers a byte, and W_scales, a power of two for each 32.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.sources.base import Array, Floats, SourceTensor, from_float32, stacked, transposed
from rsv_format.sources.foreign import announced

_AT_ONCE = 2**20  # weights that are multiplied by their scales in one piece
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

    def positions(self, shape: tuple[int, ...], start: int, stop: int) -> NDArray[np.intp]:
        """Where, among all rows of scales, those of a weight's rows start to stop are."""
        *axes, last = np.unravel_index(np.arange(start, stop), (1, *shape[:-1]))
        own = (1, *self.shape[:-1])
        held = [np.minimum(axis, n - 1) for axis, n in zip((*axes, last // self.rows), own, strict=True)]
        at: NDArray[np.intp] = np.ravel_multi_index(held, own)  # one for all is at 0
        return at


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
    if spread is None or not shape or scale.dtype not in ("f32", "bf16", "f16", "f8_e8m0", "u8"):
        detail = f"{weight.dtype} {shape} does not fit its scale {scale.dtype} {scale.shape}"
        raise RsvError("source_invalid", place, detail)
    by_row = scale.rows is not None and scale.shape == spread.shape  # else there are few of them

    def factors(start: int, stop: int) -> Floats:
        """Of rows start to stop, one for each column or for all of a row."""
        at = spread.positions(shape, start, stop)
        first, part = 0, scale
        if by_row:
            first, part = int(at.min()), scale.row_part(int(at.min()), int(at.max()) + 1)
        values = E8M0[part.read()] if scale.dtype == "u8" else part.float32()
        return np.repeat(values.reshape(-1, spread.shape[-1])[at - first], spread.columns, axis=1)[:, : shape[-1]]

    def some(part: SourceTensor, top: int, left: int) -> SourceTensor:
        height, width = part.matrix_shape

        def float32() -> Floats:
            values = part.float32()
            lying = values.reshape(height, width)
            step = max(1, _AT_ONCE // width)
            with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused by its name
                for i in range(0, height, step):
                    own = factors(top + i, top + min(i + step, height))
                    lying[i : i + step] *= own if own.shape[1] == 1 else own[:, left : left + width]
            return values

        def rows(start: int, stop: int) -> SourceTensor:
            return some(part.row_part(start, stop), top + start, left)

        def columns(start: int, stop: int) -> SourceTensor:
            return some(part.column_part(start, stop), top, left + start)

        has_parts = part.rows is not None and part.columns is not None
        return SourceTensor(
            weight.name, kept, part.shape, lambda: from_float32(float32(), kept, place), float32,
            rows=rows if has_parts else None, columns=columns if has_parts else None,
        )  # fmt: skip

    return some(weight, 0, 0)


def _mxfp4(blocks: SourceTensor, scales: SourceTensor, where: str) -> SourceTensor:
    """Of blocks (n, out, groups, 16) and scales (n, out, groups) the weight (n, in, out), as gpt-oss has it dense."""
    name, place = blocks.name.removesuffix("_blocks"), f"{where}: {blocks.name}"
    if (blocks.dtype, scales.dtype) != ("u8", "u8") or len(blocks.shape) != 4 or blocks.shape != (*scales.shape, 16):
        detail = f"{blocks.dtype} {blocks.shape} with scales {scales.dtype} {scales.shape} is not mxfp4"
        raise RsvError("source_invalid", place, detail)
    n, height, groups = scales.shape
    rows, width = n * height, groups * 32

    def some(codes: SourceTensor, powers: SourceTensor) -> SourceTensor:
        """Rows (rows, in) of blocks (rows * groups, 16) and scales (rows, groups)."""

        def float32() -> Floats:
            packed = codes.read().reshape(-1, 16)
            values = np.empty((packed.shape[0], 32), np.float32)
            values[:, 0::2], values[:, 1::2] = _FP4[packed & 15], _FP4[packed >> 4]
            values *= E8M0[powers.read()].reshape(-1, 1)
            return values.reshape(-1, width)

        def part(start: int, stop: int) -> SourceTensor:
            return some(codes.row_part(start * groups, stop * groups), powers.row_part(start, stop))

        shape = powers.matrix_shape[0], width
        read = partial(_bfloat16, float32, place)  # two bits of mantissa: exact
        return SourceTensor(name, "bf16", shape, read, float32, rows=None if codes.rows is None else part)

    whole = some(blocks, scales)
    return stacked(name, [transposed(whole.row_part(i, i + height)) for i in range(0, rows, height)])


def _bfloat16(float32: Callable[[], Floats], place: str) -> Array:
    return from_float32(float32(), "bf16", place)
