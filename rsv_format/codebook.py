"""Codebooks for N(0, 1), computed (SPEC section 6): Lloyd-Max and uniform.

Lloyd-Max: S. Lloyd, "Least squares quantization in PCM", IEEE Trans. Inf. Theory 28 (1982);
J. Max, "Quantizing for minimum distortion", IRE Trans. Inf. Theory 6 (1960).
"""

from __future__ import annotations

import math
from functools import lru_cache

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.limits import MAX_BITS

CODEBOOKS: tuple[str, ...] = ("lloyd-max", "uniform")

_STEP_BITS = 12  # significant bits of a uniform step; times an odd integer of up to 8 bits, exact in float32


def codebook(kind: str, bits: int) -> NDArray[np.float32]:
    """The centroids of a codebook.

    Parameters
    ----------
    kind : str
        "lloyd-max" (least mean squared error for N(0, 1)) or "uniform" (that among evenly spaced ones).
    bits : int
        1 to 8.

    Returns
    -------
    float32 (2**bits,), strictly increasing, antisymmetric, read-only.

    Raises
    ------
    RsvError
        bad_argument: another kind, or bits out of range. SPEC section 6.
    """
    if kind not in CODEBOOKS:
        raise RsvError("bad_argument", "codebook", f"{kind!r} is not one of {', '.join(CODEBOOKS)}")
    if not 1 <= bits <= MAX_BITS:
        raise RsvError("bad_argument", "bits", f"{bits} is not in 1..{MAX_BITS}")
    return _lloyd_max(bits) if kind == "lloyd-max" else _uniform(bits)


def uniform_step(centroids: NDArray[np.float32]) -> float | None:
    """The step of evenly spaced centroids, or None: c[i] == c[0] + i * step exactly, by equality.

    Whether a codebook is uniform (RSV-521) also depends on its window, which must be the bits of a code.
    """
    wide = centroids.astype(np.float64)
    step = wide[1] - wide[0]
    even = wide[0] + np.arange(wide.size) * step
    return float(step) if np.array_equal(even, wide) else None


def boundaries(centroids: NDArray[np.float32]) -> NDArray[np.float32]:
    """float32 (2**bits - 1,): a value's code is the number of boundaries below it."""
    wide = centroids.astype(np.float64)
    return ((wide[1:] + wide[:-1]) / 2).astype(np.float32)


def distortion(c: NDArray[np.float64]) -> float:
    """Mean squared error of N(0, 1) under nearest-centroid quantization."""
    edges = (c[1:] + c[:-1]) / 2
    density = np.array([0.0, *map(_pdf, edges), 0.0])
    mean = density[:-1] - density[1:]
    return float(1 - 2 * (c * mean).sum() + (c * c * _masses(edges)).sum())


@lru_cache
def _lloyd_max(bits: int) -> NDArray[np.float32]:
    """Each centroid the mean of its cell: some of Lloyd's steps, then Newton's method, which is quadratic."""
    n = 2**bits
    # the companding density phi^(1/3) is that of N(0, 3)
    c = np.array([math.sqrt(3) * _normal_quantile((i + 0.5) / n) for i in range(n)])
    for iteration in range(200):
        edges = (c[1:] + c[:-1]) / 2
        density = np.array([0.0, *map(_pdf, edges), 0.0])
        mass = _masses(edges)
        excess = c * mass + density[1:] - density[:-1]  # c_i P_i - M_i, zero at the optimum
        if iteration < 50:
            step = excess / mass
        else:
            # an edge moves by half of what each neighbour does; dP/dedge = phi, dM/dedge = edge * phi
            right = (c[:-1] - edges) * density[1:-1] / 2
            left = (edges - c[1:]) * density[1:-1] / 2
            jacobian = np.diag(mass) + np.diag(right, 1) + np.diag(left, -1)
            jacobian += np.diag([*right, 0.0]) + np.diag([0.0, *left])
            step = np.linalg.solve(jacobian, excess)
        c = c - step
        c = (c - c[::-1]) / 2
        if np.abs(step).max() < 1e-10:  # float32 sees 1e-7; rounding noise is about 1e-12
            break
    return _frozen(c)


@lru_cache
def _uniform(bits: int) -> NDArray[np.float32]:
    """Golden-section search over the step, rounded to `_STEP_BITS` significant bits."""
    levels = np.arange(2**bits) - (2**bits - 1) / 2
    golden = (math.sqrt(5) - 1) / 2
    low, high = 1e-3, 3.0
    while high - low > 1e-9:
        a, b = high - golden * (high - low), low + golden * (high - low)
        if distortion(levels * a) < distortion(levels * b):
            high = b
        else:
            low = a
    mantissa, exponent = math.frexp((low + high) / 2)
    step = math.ldexp(round(mantissa * 2**_STEP_BITS), exponent - _STEP_BITS)
    return _frozen(levels * step)


def _frozen(c: NDArray[np.float64]) -> NDArray[np.float32]:
    result = c.astype("<f4")
    result.setflags(write=False)
    return result


def _masses(edges: NDArray[np.float64]) -> NDArray[np.float64]:
    """Probability of each cell; the tails from erfc, so that small ones keep their digits."""
    lower = np.array([0.5 * math.erfc(-e / math.sqrt(2)) for e in edges])
    upper = np.array([0.5 * math.erfc(e / math.sqrt(2)) for e in edges])
    below = np.diff(np.array([0.0, *lower, 1.0]))
    above = -np.diff(np.array([1.0, *upper, 0.0]))
    return np.where(np.arange(below.size) < below.size / 2, below, above)


def _pdf(x: float) -> float:
    return math.exp(-x * x / 2) / math.sqrt(2 * math.pi)


def _normal_quantile(p: float) -> float:
    low, high = -10.0, 10.0
    for _ in range(60):
        mid = (low + high) / 2
        if 0.5 * math.erfc(-mid / math.sqrt(2)) < p:
            low = mid
        else:
            high = mid
    return (low + high) / 2
