"""The codebooks that the quantizer offers: those of `rsv_format.codebook`, and the trained tables of trellis codes.

The tables are package data, made by tools/train_codebooks.py.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from rsv_format import codebook as scalar
from rsv_format.errors import RsvError

KINDS: tuple[str, ...] = (*scalar.CODEBOOKS, "trellis")
TRELLIS_BITS: tuple[int, ...] = (1, 2, 3, 4, 5, 6)
WINDOWS: tuple[int, ...] = (8, 12)
DEFAULT_WINDOW = 8

FOLDER = Path(__file__).parent / "tables"
DISTORTIONS = FOLDER / "distortions.json"


def centroids(kind: str, bits: int, window: int | None = None) -> NDArray[np.float32]:
    """The centroids of a codebook.

    Parameters
    ----------
    kind : str
        One of `KINDS`.
    bits : int
        Of a code, 1 to 8. More than 6 leave a trellis nothing to gain: they get "lloyd-max" instead.
    window : int, optional
        Of an index into a trellis' table, one of `WINDOWS`; the default if not given. Others have none.

    Returns
    -------
    float32 (2**window,) of a trellis, antisymmetric; else (2**bits,), strictly increasing. Read-only.

    Raises
    ------
    RsvError
        bad_argument.
    """
    if kind not in KINDS:
        raise RsvError("bad_argument", "codebook", f"{kind!r} is not one of {', '.join(KINDS)}")
    if kind == "trellis":
        window = DEFAULT_WINDOW if window is None else window
        if window not in WINDOWS:
            raise RsvError("bad_argument", "window", f"{window} is not one of {', '.join(map(str, WINDOWS))}")
        return _table(bits, window) if bits in TRELLIS_BITS else scalar.codebook("lloyd-max", bits)
    if window is not None:
        raise RsvError("bad_argument", "window", f"only a trellis has one, {kind} has none")
    return scalar.codebook(kind, bits)


def distortion(kind: str, bits: int, window: int | None = None) -> float:
    """Mean squared error of N(0, 1) under what `centroids` gives; a trellis' as measured when it was trained."""
    if kind == "trellis" and bits in TRELLIS_BITS:
        return distortions()[bits, DEFAULT_WINDOW if window is None else window]
    return scalar.distortion(centroids(kind, bits, window).astype(np.float64))


@cache
def distortions() -> Mapping[tuple[int, int], float]:
    """Of all trellises: (bits, window) -> mean squared error of N(0, 1)."""
    known = json.loads(DISTORTIONS.read_text("utf-8"))
    return {(int(bits), int(window)): known[key] for key in known for bits, window in [key.split("-")]}


def table_path(bits: int, window: int) -> Path:
    """Where the first half of a trellis' table is; the second is the first reversed and negated."""
    return FOLDER / f"trellis-{bits}-{window}.npy"


@cache
def _table(bits: int, window: int) -> NDArray[np.float32]:
    half = np.load(table_path(bits, window))
    table = np.concatenate([half, -half[::-1]])
    table.setflags(write=False)
    return table
