"""Element types and their numpy views; bfloat16, which numpy lacks, is seen as its bits (SPEC section 8)."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.layout import DTYPE_NBYTES

# name -> numpy dtype of the zero-copy view
NUMPY_DTYPE: dict[str, np.dtype[Any]] = {
    "bool": np.dtype(np.uint8), "u8": np.dtype(np.uint8), "i8": np.dtype(np.int8),
    "u16": np.dtype("<u2"), "i16": np.dtype("<i2"), "u32": np.dtype("<u4"), "i32": np.dtype("<i4"),
    "u64": np.dtype("<u8"), "i64": np.dtype("<i8"),
    "f16": np.dtype("<f2"), "bf16": np.dtype("<u2"), "f32": np.dtype("<f4"), "f64": np.dtype("<f8"),
}  # fmt: skip
assert {name: dtype.itemsize for name, dtype in NUMPY_DTYPE.items()} == DTYPE_NBYTES

FLOAT_DTYPES: tuple[str, ...] = ("f16", "bf16", "f32", "f64")


def to_float32(array: NDArray[Any], dtype: str) -> NDArray[np.float32]:
    """The values of an array of an RSV dtype as float32; bf16 bits become the upper half of a float32."""
    if dtype == "bf16":
        wide = array.astype("<u4")
        wide <<= np.uint32(16)
        return wide.view("<f4")
    with np.errstate(over="ignore"):  # a float64 beyond float32 becomes inf, and is refused where it matters
        return array.astype("<f4")


def to_bfloat16(array: NDArray[np.float32]) -> NDArray[np.uint16]:
    """float32 to bfloat16 bits, ties to even; NaN stays NaN."""
    bits = np.ascontiguousarray(array, "<f4").view("<u4")
    rounded = ((bits + (np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1)))) >> np.uint32(16)).astype("<u2")
    return np.where(np.isnan(array), np.uint16(0x7FC0), rounded)
