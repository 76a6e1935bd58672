"""Codebooks: the best ones for N(0, 1), by integration that shares nothing with their computation."""

from __future__ import annotations

import numpy as np
import pytest

from rsv_format import RsvError
from rsv_format.codebook import CODEBOOKS, boundaries, codebook, uniform_step

ALL_BITS = range(1, 9)
NODES, WEIGHTS = np.polynomial.legendre.leggauss(80)


def moments(centroids: np.ndarray) -> tuple[np.ndarray, np.ndarray, float]:
    """Mass and mean of each nearest-centroid cell under N(0, 1), and the mean squared error: Gauss-Legendre."""
    c = centroids.astype(np.float64)
    edges = np.array([-12, *((c[1:] + c[:-1]) / 2), 12])
    mass, first, error = np.zeros_like(c), np.zeros_like(c), 0.0
    for i in range(c.size):
        pieces = np.linspace(edges[i], edges[i + 1], 9)
        for low, high in zip(pieces[:-1], pieces[1:], strict=True):
            x = (high - low) / 2 * NODES + (high + low) / 2
            density = WEIGHTS * (high - low) / 2 * np.exp(-x * x / 2) / np.sqrt(2 * np.pi)
            mass[i] += density.sum()
            first[i] += (density * x).sum()
            error += float((density * (x - c[i]) ** 2).sum())
    return mass, first / mass, error


@pytest.mark.parametrize("bits", ALL_BITS)
def test_lloyd_max_centroids_are_the_means_of_their_cells(bits: int) -> None:
    c = codebook("lloyd-max", bits)
    mass, means, _ = moments(c)
    assert abs(mass.sum() - 1) < 1e-12
    assert np.abs(means - c).max() < 1e-6


@pytest.mark.parametrize(
    "bits, outermost, error",
    [(1, 0.7979, 0.3634), (2, 1.510, 0.1175), (3, 2.152, 0.03454), (4, 2.733, 0.009497), (5, 3.263, 0.0025047)],
)
def test_lloyd_max_is_that_of_max_1960(bits: int, outermost: float, error: float) -> None:
    """His error for 5 bits, 0.002499, is off in the last digits: it is 26.01 dB."""
    c = codebook("lloyd-max", bits)
    assert c[-1] == pytest.approx(outermost, abs=3e-3)  # he computed to three digits
    assert moments(c)[2] == pytest.approx(error, rel=5e-4)


@pytest.mark.parametrize(
    "bits, step, error",
    [(1, 1.596, 0.3634), (2, 0.9957, 0.1188), (3, 0.5860, 0.03744), (4, 0.3352, 0.01154), (5, 0.1881, 0.003495)],
)
def test_uniform_is_that_of_max_1960(bits: int, step: float, error: float) -> None:
    c = codebook("uniform", bits)
    assert uniform_step(c) == pytest.approx(step, abs=4e-4)
    assert moments(c)[2] == pytest.approx(error, rel=5e-4)


@pytest.mark.parametrize("bits", ALL_BITS)
def test_no_other_step_is_better(bits: int) -> None:
    c = codebook("uniform", bits).astype(np.float64)
    best = moments(c)[2]
    assert best < moments(c * 1.002)[2] and best < moments(c / 1.002)[2]


@pytest.mark.parametrize("bits", ALL_BITS)
def test_uniform_is_uniform_by_equality(bits: int) -> None:
    c = codebook("uniform", bits)
    step = uniform_step(c)
    assert step is not None
    assert all(float(c[i]) == float(c[0]) + i * step for i in range(2**bits))
    assert np.array_equal(c[0] + np.arange(2**bits, dtype=np.float32) * np.float32(step), c)  # in binary32 too
    nearly = c.copy()
    nearly[-1] = np.nextafter(nearly[-1], np.float32(9))
    assert bits == 1 or uniform_step(nearly) is None


@pytest.mark.parametrize("bits", range(2, 9))
def test_lloyd_max_is_not_uniform(bits: int) -> None:
    assert uniform_step(codebook("lloyd-max", bits)) is None


@pytest.mark.parametrize("kind", CODEBOOKS)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_shape_of_every_codebook(kind: str, bits: int) -> None:
    c = codebook(kind, bits)
    assert c.dtype == np.dtype("<f4") and c.shape == (2**bits,)
    assert (np.diff(c) > 0).all() and np.array_equal(c, -c[::-1]) and not c.flags.writeable
    assert codebook(kind, bits) is c


@pytest.mark.parametrize("bits", ALL_BITS)
def test_lloyd_max_beats_uniform(bits: int) -> None:
    better, worse = (moments(codebook(kind, bits))[2] for kind in CODEBOOKS)
    assert better < worse or bits == 1


@pytest.mark.parametrize("kind", CODEBOOKS)
@pytest.mark.parametrize("bits", ALL_BITS)
def test_boundaries_lie_between(kind: str, bits: int) -> None:
    c = codebook(kind, bits)
    edges = boundaries(c)
    assert edges.dtype == np.float32 and edges.shape == (2**bits - 1,)
    assert (c[:-1] < edges).all() and (edges < c[1:]).all()
    below, above = (np.nextafter(edges, np.float32(s * 9)).astype(np.float64) for s in (-1, 1))
    wide = c.astype(np.float64)
    assert (np.abs(below - wide[:-1]) <= np.abs(below - wide[1:])).all()
    assert (np.abs(above - wide[:-1]) >= np.abs(above - wide[1:])).all()


@pytest.mark.parametrize("kind, bits, where", [("nf4", 4, "codebook"), ("uniform", 0, "bits"), ("uniform", 9, "bits")])
def test_arguments(kind: str, bits: int, where: str) -> None:
    with pytest.raises(RsvError) as e:
        codebook(kind, bits)
    assert (e.value.code, e.value.where) == ("bad_argument", where)
