"""Transforms: against dense float64 matrices made from the formulas of SPEC section 7."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from strategies import DIAGONALS, FACTORS, exact, exact_hadamard, exact_hartley, make_transform, transforms

from rsv_format import RsvError, Transform
from rsv_format.householder import positive_q
from rsv_format.rotation import (
    gaussian,
    haar,
    haar_witness,
    hadamard,
    hartley,
    kronecker_split,
    random_signs,
    splitmix64,
)

TOLERANCE = 1e-5  # RSV-721, RSV-722
LARGE_PRIMES = (257, 521, 1009, 4099)  # above the order from which a Fourier transform is used
# m, n: an odd number times a power of two, the widths of trained models, awkward ones
ORDERS = [(1, 1), (1, 2), (1, 64), (3, 1), (5, 8), (9, 64), (19, 16), (107, 4), (6, 4), (7, 1), (256, 2), (300, 2)]


def norm(x: np.ndarray) -> np.ndarray:
    return np.asarray(np.linalg.norm(x, axis=-1))


def check_precision(t: Transform, rows: int = 5) -> None:
    """RSV-721 and RSV-722."""
    x = np.random.default_rng(t.dim).standard_normal((rows, t.dim)).astype(np.float32)
    d = np.ones(t.dim) if t.d is None else t.d.astype(np.float64)
    dense, wide = exact(t), x.astype(np.float64)
    forth, back = t.apply(x), t.apply_inverse(x)
    assert forth.dtype == back.dtype == np.float32 and forth.shape == back.shape == x.shape
    assert (norm(forth - wide @ dense.T) <= TOLERANCE * norm(wide * d)).all()
    assert (norm((back - wide @ dense) / d) <= TOLERANCE * norm(wide)).all()


@pytest.mark.parametrize("n", [1, 2, 4, 8, 128, 512])
def test_hadamard_is_the_popcount_formula(n: int) -> None:
    assert hadamard(n).dtype == np.float32 and np.abs(hadamard(n) - exact_hadamard(n)).max() < 3e-8
    assert np.abs(hadamard(n) @ hadamard(n) - np.eye(n)).max() < 1e-5


@pytest.mark.parametrize("m", [1, 2, 3, 7, 12, 107, 256, 263, 1009])
def test_hartley_is_its_formula(m: int) -> None:
    h = hartley(m)
    assert h.dtype == np.float32 and np.array_equal(h, h.T)
    assert np.abs(h - exact_hartley(m)).max() < 1e-7
    assert np.abs(h.astype(np.float64) @ h - np.eye(m)).max() < 1e-6


@pytest.mark.parametrize("m", LARGE_PRIMES[:3])
@pytest.mark.parametrize("n", [1, 4])
def test_fft_is_the_dense_hartley_transform(m: int, n: int) -> None:
    t = Transform(m * n, n, factor="hartley")
    assert t._outer is None  # so the Fourier transform is at work
    check_precision(t, 3)


@pytest.mark.parametrize("m", [*range(2, 40), 255, 256, 257, 258])
def test_even_and_odd_orders_on_both_sides_of_the_switch(m: int, monkeypatch: pytest.MonkeyPatch) -> None:
    x = np.random.default_rng(m).standard_normal((2, m))
    wanted = x @ exact_hartley(m)
    for limit in (0, 10**6):  # always by Fourier transform, never
        monkeypatch.setattr("rsv_format.rotation._DENSE_HARTLEY", limit)
        t = Transform(m, 1, factor="hartley")
        assert (t._outer is None) == (limit == 0)
        assert np.abs(t.apply(x) - wanted).max() < 1e-6


def test_a_large_hartley_factor_is_never_held() -> None:
    """RSV-705: m^2 numbers would be 4 TiB here."""
    m = 2**20 + 7
    t = Transform(m, 1, factor="hartley")
    x = np.zeros(m, np.float32)
    x[3] = 1
    column = t.apply(x)
    k = np.arange(m, dtype=np.int64) * 3 % m
    angle = 2 * np.pi * k / m
    assert np.abs(column - (np.cos(angle) + np.sin(angle)) / math.sqrt(m)).max() < 1e-6
    assert np.abs(t.apply_inverse(column) - x).max() < 1e-5


@pytest.mark.parametrize("m, n", ORDERS)
@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("diagonal", DIAGONALS)
def test_application_is_the_dense_product(m: int, n: int, diagonal: str | None, factor: str | None) -> None:
    t = make_transform(m + n, m, n, diagonal, factor)
    check_precision(t)
    assert np.abs(t.matrix() - exact(t)).max() <= 1e-5 * (1 if t.d is None else np.abs(t.d).max())


@pytest.mark.parametrize(
    "kind, dim",
    [("hartley", dim) for dim in (1, 2, 3, 8, 30, 96, 100, 127, 288, 360, 576, 641)]
    + [("haar", dim) for dim in (1, 2, 3, 30, 127, 200)],
)
def test_rotations_are_orthogonal(kind: str, dim: int) -> None:
    n = kronecker_split(dim) if kind == "hartley" else 1
    t = make_transform(3, dim // n, n, "signs", kind)
    dense = t.matrix().astype(np.float64)
    assert np.abs(dense @ dense.T - np.eye(dim)).max() < 1e-5


@given(transforms())
def test_the_inverse_undoes(t: Transform) -> None:
    """RSV-708: T^-1 = diag(1 / d) R^T."""
    x = np.random.default_rng(1).standard_normal((3, t.dim))
    assert np.abs(t.rotate_back(t.rotate(x)) - x).max() < 1e-5
    d = np.ones(t.dim) if t.d is None else t.d
    assert np.abs(t.apply_inverse(t.apply(x / d)) / d - x).max() < 1e-5


def test_the_inverse_is_not_the_rotation_itself() -> None:
    t = make_transform(5, 5, 2, None, "haar")
    x = np.random.default_rng(2).standard_normal((4, 10))
    assert np.abs(t.rotate(x) - t.rotate_back(x)).max() > 0.1


@pytest.mark.parametrize("factor", FACTORS)
@pytest.mark.parametrize("shape", [(12,), (0, 12), (2, 3, 12), (1, 1, 1, 12)])
def test_leading_axes(factor: str | None, shape: tuple[int, ...]) -> None:
    t = make_transform(1, 3, 4, "values", factor)
    x = np.random.default_rng(3).standard_normal(shape).astype(np.float32)
    for action in (t.apply, t.apply_inverse):
        y = action(x)
        assert y.shape == shape and y.dtype == np.float32
        rows = [action(row) for row in x.reshape(-1, 12)]
        assert np.allclose(y.reshape(-1, 12), np.array(rows, np.float32).reshape(-1, 12), atol=1e-5)


@pytest.mark.parametrize("dtype", [np.float16, np.float32, np.float64])
def test_it_works_in_the_precision_of_the_activation(dtype: Any) -> None:
    for m in (3, 263):
        t = make_transform(1, m, 1, "values", "hartley")
        x = np.random.default_rng(3).standard_normal((2, m)).astype(dtype)
        y = t.apply(x)
        assert y.dtype == dtype
        wanted = x.astype(np.float64) @ exact(t).T
        assert np.abs(y - wanted).max() < 30 * np.abs(wanted).max() * max(np.finfo(dtype).eps, 1e-7)


def test_what_it_is_given_is_left_alone() -> None:
    for factor in FACTORS:
        t = make_transform(4, 3, 4, None, factor)
        x = np.random.default_rng(3).standard_normal((2, 12)).astype(np.float32)
        before = x.copy()
        t.apply(x), t.apply_inverse(x)
        assert np.array_equal(x, before)


@pytest.mark.parametrize("dim", [1, 7, 8, 9, 16, 33])
def test_signs(dim: int) -> None:
    """RSV-702."""
    signs = random_signs(dim, 11)
    assert signs.dtype == np.uint8 and signs.shape == (-(-dim // 8),)
    assert not dim % 8 or int(signs[-1]) >> dim % 8 == 0
    d = Transform(dim, signs=signs).d
    assert d is not None and d.dtype == np.float32
    assert [float(v) for v in d] == [1 - 2 * (int(signs[j // 8]) >> j % 8 & 1) for j in range(dim)]


def test_signs_are_fair_and_depend_on_the_seed() -> None:
    bits = np.unpackbits(random_signs(10000, 0))
    assert 4800 < bits.sum() < 5200
    assert not np.array_equal(random_signs(10000, 0), random_signs(10000, 1))
    assert np.array_equal(random_signs(10000, 5), random_signs(10000, 5))


def mix(seed: int, k: int) -> int:
    """RSV-710 in Python's integers."""
    z = (seed + (k + 1) * 0x9E3779B97F4A7C15) % 2**64
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 % 2**64
    z = (z ^ z >> 27) * 0x94D049BB133111EB % 2**64
    return z ^ z >> 31


@pytest.mark.parametrize("seed", [0, 1, 42, 2**53 - 1])
@pytest.mark.parametrize("start", [0, 5, 2**33])
def test_splitmix64(seed: int, start: int) -> None:
    assert splitmix64(20, seed, start).tolist() == [mix(seed, start + k) for k in range(20)]


def test_published_splitmix64_numbers() -> None:
    """Vigna's splitmix64.c from the state 1234567."""
    assert splitmix64(3, 1234567).tolist() == [6457827717110365317, 3203168211198807973, 9817491932198370423]


@pytest.mark.parametrize("count", [1, 2, 9, 10])
def test_gaussian_is_box_muller(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    wanted = []
    for k in range(5):
        u1, u2 = ((mix(3, 2 * k) >> 11) + 1) * 2.0**-53, (mix(3, 2 * k + 1) >> 11) * 2.0**-53
        r = math.sqrt(-2 * math.log(u1))
        wanted += [r * math.cos(2 * math.pi * u2), r * math.sin(2 * math.pi * u2)]
    assert gaussian(count, 3) == pytest.approx(wanted[:count], rel=1e-14)
    monkeypatch.setattr("rsv_format.rotation._SPLITMIX_BLOCK", 4)  # more than one block
    assert gaussian(count, 3) == pytest.approx(wanted[:count], rel=1e-14)


def test_gaussian_is_normal() -> None:
    g = gaussian(200_001, 9)
    assert abs(g.mean()) < 0.01 and abs(g.std() - 1) < 0.01 and np.isfinite(g).all()
    assert abs((np.abs(g) < 1).mean() - 0.6827) < 0.005


@pytest.mark.parametrize("m", [1, 2, 5, 50, 200])
def test_haar_is_the_unique_factor(m: int) -> None:
    """RSV-712: Q^T G is upper triangular with a positive diagonal."""
    q = haar(m, 77).astype(np.float64)
    assert np.abs(q @ q.T - np.eye(m)).max() < 1e-6
    u = q.T @ gaussian(m * m, 77).reshape(m, m)
    assert np.abs(np.tril(u, -1)).max(initial=0) < 1e-4 and (np.diag(u) > 0).all()
    j = np.arange(m)
    wanted = q @ ((((5 * j + 1) % 8) - 3.5) / math.sqrt(5.25 * m))
    assert np.abs(haar_witness(haar(m, 77)) - wanted).max() < 1e-7


@pytest.mark.parametrize("panel, piece", [(128, 2**22), (7, 40), (1, 1), (16, 2**22)])
def test_q_in_pieces(panel: int, piece: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Panels that fit, that do not, and of one column: LAPACK's own Q, with the work told from piece to piece."""
    monkeypatch.setattr("rsv_format.householder._PANEL", panel)
    monkeypatch.setattr("rsv_format.householder._PIECE", piece)
    for m in (1, 2, 7, 48, 50):
        a, told = np.random.default_rng(m).standard_normal((m, m)), list[float]()
        q, r = np.linalg.qr(a)
        made = a.copy()
        assert positive_q(made, told.append) is made
        assert np.abs(made - q * np.sign(np.diagonal(r))).max() < 1e-12
        assert told == sorted(told) and (m <= panel or told[-1] == 1)


def test_work_on_a_haar_factor_can_be_left() -> None:
    def leave(fraction: float) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        haar(200, 5, leave)
    told: list[float] = []
    found = haar(200, 5, told.append)
    assert told[-1] == 1 and haar(200, 5, leave) is found  # derived once


def test_a_haar_factor_is_held_against_its_witness() -> None:
    """RSV-713: also without verify."""
    witness = haar_witness(haar(4, 1))
    assert np.array_equal(Transform(4, factor="haar", seed=1, stored=witness).factor_matrix(), haar(4, 1))
    nearly = witness + np.float32(5e-6)
    assert np.array_equal(Transform(4, factor="haar", seed=1, stored=nearly).factor_matrix(), haar(4, 1))
    off, nan, signalling = witness.copy(), witness.copy(), witness.copy()
    off[3] += np.float32(1.5e-5)
    nan[0] = np.nan
    signalling.view(np.uint32)[0] = 0x7F800001
    for seed, stored in ((2, witness), (1, off), (1, nan), (1, signalling)):
        t = Transform(4, factor="haar", seed=seed, stored=stored)
        for action in (t.factor_matrix, t.matrix, lambda t=t: t.apply(np.ones(4)), t.factor_matrix):
            with pytest.raises(RsvError) as e:
                action()
            assert e.value.code == "haar_witness_mismatch"


def test_a_haar_factor_beyond_the_limit_is_not_derived() -> None:
    with pytest.raises(RsvError) as e:
        haar(16385, 0)
    assert e.value.code == "bad_argument"


@pytest.mark.parametrize(
    "dim, n", [(1, 1), (2, 2), (3, 1), (12, 4), (576, 64), (4864, 256), (13696, 128), (2**24, 2**24)]
)
def test_split(dim: int, n: int) -> None:
    assert kronecker_split(dim) == n


def test_a_transform_of_nothing_is_the_identity() -> None:
    for t in (Transform(7), Transform(1, 1)):
        x = np.random.default_rng(1).standard_normal((2, t.dim)).astype(np.float32)
        assert np.array_equal(t.apply(x), x) and np.array_equal(t.apply_inverse(x), x)
        assert np.array_equal(t.factor_matrix(), np.eye(t.m)) and t.diagonal is None and t.d is None


@pytest.mark.parametrize("peak", [2.0**-126, 1e-30, 2.0**-41, 1.0, 2.0**41, 1e30, 3e36])
@pytest.mark.parametrize("factor", [None, "hartley"])
def test_rows_near_the_ends_of_float32(peak: float, factor: str | None) -> None:
    """RSV-723: nothing overflows on the way to a result that float32 can hold; rows of other sizes stand beside."""
    m, n = 4099, 1 if factor else 4
    t = Transform(m * n, n, factor=factor)
    rows = np.random.default_rng(5).standard_normal((3, m * n)).astype(np.float32)
    rows /= np.abs(rows).max()
    rows[0] *= np.float32(peak)
    rows[2] = 0
    for got, wide in (
        (t.apply(rows), t.apply(rows.astype(np.float64))), (t.apply_inverse(rows), t.apply_inverse(rows.astype(float))),
    ):  # fmt: skip
        assert got.dtype == np.float32 and np.isfinite(got).all() and not got[2].any()
        for i in (0, 1):
            scale = np.abs(wide[i]).max()
            assert np.linalg.norm((got[i].astype(float) - wide[i]) / scale) <= TOLERANCE * np.sqrt(m * n)


def test_rows_that_are_not_finite_stay_apart() -> None:
    t = Transform(12, 4, factor="hartley")
    rows = np.ones((3, 12), np.float32)
    rows[0, 3], rows[1, 5] = np.nan, np.inf
    with np.errstate(invalid="ignore"):
        got = t.apply(rows)
    assert np.isfinite(got[2]).all() and not np.isfinite(got[:2]).any()
