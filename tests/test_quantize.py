"""One matrix: the nearest centroids, exact zeros, refusals by place, the same bytes for any number of threads."""

from __future__ import annotations

import sys
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import make_transform

import rsv_format
from rsv_format import LayerData, RsvError, Transform, quantize_matrix
from rsv_format.codebook import CODEBOOKS, boundaries, codebook
from rsv_format.quantizer.matrix import ROTATIONS, channel_scales, column_squares, quantize_rows
from rsv_format.quantizer.matrix import make_transform as transform_for
from rsv_format.quantizer.scalar import _counter, _table, nearest
from rsv_format.threads import run_threads

MODULE = sys.modules["rsv_format.quantizer.matrix"]  # the package shows the function of this name


def gauss(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape).astype(np.float32)


def codes_of(data: LayerData) -> np.ndarray:
    return rsv_format.unpack(data.codes, data.bits, data.in_features)


def dense(data: LayerData) -> np.ndarray:
    """W in float64 from what was stored."""
    w = data.scales.astype(np.float64)[:, None] * data.codebook.astype(np.float64)[codes_of(data)]
    return w if data.transform is None else data.transform.apply_inverse(w)


def same(a: LayerData, b: LayerData) -> bool:
    return a.codes.tobytes() == b.codes.tobytes() and a.scales.tobytes() == b.scales.tobytes()


# --- nearest centroids ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_the_nearest_centroid_is_thenearest(kind: str, bits: int) -> None:
    """Brute force, in float64; on a boundary either neighbour will do."""
    c = codebook(kind, bits)
    edges = boundaries(c)
    near = [np.nextafter(edges, np.float32(sign * 100)) for sign in (-1, 1)]
    extremes = np.array([0, -0.0, 1e-45, -1e-45, 5, -5, 64, -64, 1e4, -1e4], np.float32)
    x = np.concatenate([gauss(bits, 2000), edges, *near, c, extremes, c * 1.01, edges * np.float32(1 + 1e-6)])
    found = nearest(c)(x.reshape(1, -1))[0]
    distance = np.abs(x.astype(np.float64)[:, None] - c.astype(np.float64))
    best = distance.min(axis=1)
    assert found.dtype == np.uint8 and found.max() < 2**bits
    assert (distance[np.arange(x.size), found] <= best + 3e-7 * np.abs(x)).all()
    settled = np.abs(distance - best[:, None]).argsort(axis=1)[:, 0]
    clear = np.sort(distance, axis=1)[:, 1] - best > 1e-6
    assert np.array_equal(found[clear], settled[clear]) and clear.mean() > 0.5


@pytest.mark.parametrize("kind", CODEBOOKS)
@pytest.mark.parametrize("bits", range(2, 9))
def test_table_and_counting_agree(kind: str, bits: int) -> None:
    edges = boundaries(codebook(kind, bits))
    span = np.float32(2.5 * np.abs(edges).max() + 1)
    x = np.concatenate([np.linspace(-span, span, 50_001, dtype=np.float32), gauss(1, 20_000), edges])
    x = np.concatenate([x, np.nextafter(x, np.float32(np.inf)), np.nextafter(x, np.float32(-np.inf))]).reshape(1, -1)
    table, counted = _table(edges)(x), _counter(edges)(x)
    assert np.array_equal(table, counted)
    assert np.array_equal(counted[0], np.searchsorted(edges, x[0], side="left"))


@given(st.integers(0, 2**32 - 1), st.integers(1, 8))
def test_the_index_grows_with_the_value(seed: int, bits: int) -> None:
    x = np.sort(gauss(seed, 300) * np.float32(4))
    for kind in CODEBOOKS:
        assert (np.diff(nearest(codebook(kind, bits))(x[None])[0].astype(int)) >= 0).all()


# --- rows -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", CODEBOOKS)
@pytest.mark.parametrize("bits", range(1, 9))
def test_without_a_rotation_it_is_the_formula(kind: str, bits: int) -> None:
    w = gauss(bits, 7, 100) * np.exp(gauss(1, 7, 1))
    data = quantize_matrix(w, name="a", bits=bits, codebook=kind, rotation="none", threads=1)
    assert data.transform is None and data.bits == bits and data.name == "a" and data.in_features == 100
    rms = np.sqrt(np.mean(w.astype(np.float64) ** 2, axis=1))
    assert np.abs(data.scales / rms - 1).max() < 1e-6
    ratio = w / rms[:, None]
    distance = np.abs(ratio[..., None] - data.codebook.astype(np.float64))
    chosen = np.take_along_axis(distance, codes_of(data)[..., None].astype(int), -1)[..., 0]
    assert (chosen - distance.min(axis=-1)).max() < 1e-5


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dim", [1, 2, 6, 33, 96, 100])
def test_rotated_rows_are_quantized_where_they_lie(rotation: str, dim: int) -> None:
    """W_rot over scale is what was rounded to the nearest centroids."""
    w = gauss(dim, 5, dim)
    data = quantize_matrix(w, bits=4, rotation=rotation, seed=3)
    t = data.transform
    rotated = w.astype(np.float64) if t is None else t.rotate(w.astype(np.float64) / (1 if t.d is None else t.d))
    ratio = rotated / data.scales[:, None]
    distance = np.abs(ratio[..., None] - data.codebook.astype(np.float64))
    chosen = np.take_along_axis(distance, codes_of(data)[..., None].astype(int), -1)[..., 0]
    assert (chosen - distance.min(axis=-1)).max() < 1e-4


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("bits, error", [(1, 0.3634), (2, 0.1175), (3, 0.03454), (4, 0.009497), (5, 0.0025047)])
def test_the_error_is_that_of_the_codebook(rotation: str, bits: int, error: float) -> None:
    w = gauss(bits, 64, 192)
    data = quantize_matrix(w, bits=bits, rotation=rotation)
    relative = np.mean((dense(data) - w) ** 2) / np.mean(w.astype(np.float64) ** 2)
    assert relative == pytest.approx(error, rel=0.08)


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_rotation_helps_with_outliers(rotation: str) -> None:
    w = gauss(0, 32, 128)
    w[:, 5] *= 40
    error = np.mean((dense(quantize_matrix(w, bits=4, rotation=rotation)) - w) ** 2) / np.mean(w**2)
    assert (error < 0.013) == (rotation != "none")


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("bits", [1, 4, 8])
def test_zero_rows_are_exact(rotation: str, bits: int, tmp_path: Any) -> None:
    w = gauss(0, 4, 40)
    w[1] = 0
    w[3] = -0.0
    data = quantize_matrix(w, name="a", bits=bits, rotation=rotation)
    assert data.scales[[1, 3]].tolist() == [0, 0] and (data.scales[[0, 2]] > 0).all()
    rsv_format.write(tmp_path / "a", layers=[data])
    with rsv_format.open(tmp_path / "a") as file:
        assert not file.layers["a"].dequantize()[[1, 3]].any()
        assert not file.layers["a"].matmul(gauss(1, 3, 40))[:, [1, 3]].any()


def test_a_matrix_of_zeros() -> None:
    for rotation in ROTATIONS:
        data = quantize_matrix(np.zeros((3, 8), np.float32), rotation=rotation, importance=np.ones(8))
        assert not data.scales.any() and not dense(data).any()


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("factor", [1e30, 1e38, 1e-30, 1e-38, 1e-42, 3e18, 1e-18, 1e-21, 1e-22])
def test_huge_and_tiny_rows(rotation: str, factor: float) -> None:
    w = gauss(2, 6, 64)
    plain = quantize_matrix(w, bits=6, rotation=rotation)
    scaled = (w.astype(np.float64) * 0.5).astype(np.float32)
    scaled[::2] = (w[::2].astype(np.float64) * factor * 0.5).astype(np.float32)
    data = quantize_matrix(scaled, bits=6, rotation=rotation)
    assert np.isfinite(data.scales).all()
    wide = scaled.astype(np.float64)
    rms = np.sqrt(np.mean(wide**2, axis=1))
    assert (np.abs(data.scales - rms) <= 1e-45 + 1e-6 * rms).all()
    assert (np.mean((dense(data) - wide) ** 2, axis=1) < 0.002 * rms**2 + 1e-88).all()
    assert np.array_equal(codes_of(data)[1::2], codes_of(plain)[1::2])  # a row knows nothing of its neighbours


def test_the_largest_float_and_a_single_spike() -> None:
    w = np.zeros((3, 64), np.float32)
    w[0, 3] = np.finfo(np.float32).max
    w[1, 5] = 1e-45
    w[2] = np.finfo(np.float32).max
    for rotation in ROTATIONS:
        data = quantize_matrix(w, bits=8, rotation=rotation)
        assert np.isfinite(data.scales).all()
        assert abs(data.scales[2] / np.finfo(np.float32).max - 1) < 1e-6
        error = np.abs(dense(data)[0] - w[0].astype(np.float64)).max()
        assert error < (0.5 if rotation == "none" else 0.05) * 3.4e38  # 8 standard deviations are clipped


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_zero_columns(rotation: str) -> None:
    w = gauss(0, 16, 24)
    w[:, [0, 7]] = 0
    h = np.ones(24)
    h[3] = 0
    for importance in (None, np.ones(24), h, np.zeros(24)):
        data = quantize_matrix(w, bits=5, rotation=rotation, importance=importance)
        back = dense(data)
        wanted = np.delete(back - w, 3, axis=1)  # an input that is always zero may have any weight
        assert np.isfinite(back).all() and np.mean(wanted**2) < 0.02


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("weighted", [False, True])
def test_what_is_not_finite_is_refused_by_place(value: float, rotation: str, weighted: bool) -> None:
    w = gauss(0, 9, 40)
    w[7, 21] = value
    importance = np.ones(40) if weighted else None
    with pytest.raises(RsvError) as e:
        quantize_matrix(w, name="model.up", rotation=rotation, importance=importance)
    assert (e.value.code, e.value.where) == ("nonfinite_weight", "model.up")
    assert "row 7, column 21" in e.value.detail and str(value) in e.value.detail


@pytest.mark.parametrize("dtype", [np.float16, np.float64])
def test_places_in_other_types_and_stacks(dtype: Any) -> None:
    w = gauss(0, 3, 4, 8).astype(dtype)
    w[2, 1, 6] = np.nan
    with pytest.raises(RsvError) as e:
        quantize_matrix(w, name="x")
    assert e.value.code == "nonfinite_weight" and "row 9, column 6" in e.value.detail


def test_what_float32_cannot_hold_is_refused() -> None:
    w = np.ones((2, 4))
    w[1, 2] = 1e300
    with pytest.raises(RsvError) as e:
        quantize_matrix(w, name="x")
    assert e.value.code == "nonfinite_weight" and "row 1, column 2" in e.value.detail


def test_scaling_that_overflows_is_refused() -> None:
    w = np.full((2, 4), 3e38, np.float32)
    for rotation in ROTATIONS:
        with pytest.raises(RsvError) as e:
            quantize_matrix(w, name="x", importance=np.array([1e-8, 1e-8, 1, 1e-8]), rotation=rotation)
        assert e.value.code == "nonfinite_weight" and e.value.detail.startswith("row 0, column 2 is 3.0")


def test_the_first_fault_is_the_one_that_is_named() -> None:
    w = gauss(0, 5000, 64)
    w[4000, 1] = w[700, 9] = w[2999, 3] = np.nan
    for threads in (1, 4):
        with pytest.raises(RsvError) as e:
            quantize_matrix(w, threads=threads)
        assert "row 700, column 9" in e.value.detail


# --- types, stacks, biases ------------------------------------------------------------------------------------------


def test_types_of_weights() -> None:
    half = gauss(0, 6, 48).astype(np.float16)
    wanted = quantize_matrix(half.astype(np.float32))
    assert same(quantize_matrix(half), wanted) and same(quantize_matrix(half.astype(np.float64)), wanted)
    assert same(quantize_matrix(half.astype(">f4")), wanted)


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_the_weight_is_left_alone(rotation: str, dtype: Any) -> None:
    w = gauss(0, 6, 48).astype(dtype)
    w[0] *= dtype(1e-3)
    before = w.copy()
    quantize_matrix(w, rotation=rotation)
    quantize_matrix(w, rotation=rotation, importance=np.arange(48))
    assert np.array_equal(w, before)


def test_weights_that_do_not_lie_in_one_piece() -> None:
    w = gauss(0, 12, 96)
    assert same(quantize_matrix(w[::2, ::3]), quantize_matrix(w[::2, ::3].copy()))
    assert same(quantize_matrix(np.asfortranarray(w)), quantize_matrix(w))


@pytest.mark.parametrize("rotation", ROTATIONS)
def test_a_stack_is_its_rows(rotation: str, tmp_path: Any) -> None:
    w = gauss(0, 3, 4, 24)
    data = quantize_matrix(w, name="a", rotation=rotation)
    assert data.stack == 3 and same(data, quantize_matrix(w.reshape(12, 24), rotation=rotation))
    rsv_format.write(tmp_path / "a", layers=[data])
    with rsv_format.open(tmp_path / "a") as file:
        assert file.layers["a"].dequantize().shape == w.shape
        assert np.mean((file.layers["a"].dequantize() - w) ** 2) < 0.02


def test_a_bias_is_kept(tmp_path: Any) -> None:
    bias = gauss(0, 4).astype(np.float16)
    data = quantize_matrix(gauss(1, 4, 8), name="a", bias=bias, bias_dtype="f16")
    rsv_format.write(tmp_path / "a", layers=[data])
    with rsv_format.open(tmp_path / "a") as file:
        assert np.array_equal(np.asarray(file.layers["a"].bias), bias)


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("n", [1, 31, 33, 64])
def test_what_it_makes_is_valid(bits: int, n: int, tmp_path: Any) -> None:
    layers = [quantize_matrix(gauss(1, 3, n), name=rotation, bits=bits, rotation=rotation) for rotation in ROTATIONS]
    rsv_format.write(tmp_path / "a", layers=layers)
    assert rsv_format.verify(tmp_path / "a") == []


# --- chunks and threads ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("shape", [(700, 320), (2, 2**17 + 5), (2049, 64), (2048, 64)])
def test_threads_give_the_same_bytes(rotation: str, shape: tuple[int, int]) -> None:
    if rotation == "haar" and shape[1] > 1000:
        rotation = "hartley"
    w = gauss(0, *shape)
    importance = np.abs(gauss(1, shape[1])) + 0.1
    one, *others = [quantize_matrix(w, rotation=rotation, importance=importance, threads=n) for n in (1, 2, 5, None)]
    assert all(same(one, other) for other in others)


@pytest.mark.parametrize("chunk", [1, 39, 40, 41, 80, 360, 400])
def test_chunks(chunk: int, monkeypatch: pytest.MonkeyPatch) -> None:
    w = gauss(0, 10, 40)
    importance = np.abs(gauss(1, 40))
    plain, rotated = quantize_matrix(w, rotation="none"), quantize_matrix(w, importance=importance)
    monkeypatch.setattr(MODULE, "_CHUNK", chunk)
    assert same(quantize_matrix(w, rotation="none", threads=3), plain)
    small = quantize_matrix(w, importance=importance, threads=1)
    assert np.allclose(small.scales, rotated.scales, rtol=1e-6)
    assert (codes_of(small) != codes_of(rotated)).mean() < 0.01  # a product of fewer rows may round otherwise
    assert same(quantize_matrix(w, importance=importance, threads=4), small)


def test_rows_beyond_a_chunk_are_named_rightly(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(MODULE, "_CHUNK", 80)
    w = gauss(0, 10, 40)
    w[7, 3] = np.inf
    with pytest.raises(RsvError) as e:
        quantize_matrix(w, rotation="none")
    assert "row 7, column 3" in e.value.detail


@pytest.mark.parametrize("threads", [None, 1, 3])
def test_threads_do_all_of_the_work(threads: int | None) -> None:
    done: list[int] = []
    run_threads(done.append, range(0, 100, 7), threads)
    assert sorted(done) == list(range(0, 100, 7))

    def fail(item: int) -> None:
        if item == 3:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        run_threads(fail, range(5), threads)


# --- transforms and importance --------------------------------------------------------------------------------------


@pytest.mark.parametrize("rotation", ROTATIONS)
@pytest.mark.parametrize("weighted", [False, True])
@pytest.mark.parametrize("persist", [False, True])
@pytest.mark.parametrize("dim", [1, 8, 12, 33])
def test_the_transform_of_each_rotation(rotation: str, weighted: bool, persist: bool, dim: int) -> None:
    scales = np.exp(gauss(1, dim).astype(np.float64)) if weighted else None
    t = transform_for(dim, rotation=rotation, persist_rotation=persist, seed=5, scales=scales)
    if t is None:
        assert not weighted and (rotation == "none" or dim == 1)
        return
    assert t.dim == dim and dim % t.hadamard == 0
    if rotation == "hartley":
        m = dim // (dim & -dim)
        assert t.hadamard == dim & -dim and t.factor == ("hartley" if m > 1 else None)
        assert t.diagonal == ("values" if weighted else "signs")
    else:
        assert t.hadamard == 1 and t.diagonal == ("values" if weighted else None)
        kind = None if rotation == "none" or dim == 1 else "matrix" if persist else "haar"
        assert t.factor == kind and t.seed == (5 if kind == "haar" else None)
    if weighted:
        assert t.values is not None and scales is not None
        assert np.allclose(np.abs(t.values), 1 / scales, rtol=1e-6)


def test_seeds_differ_and_repeat() -> None:
    w = gauss(0, 8, 40)
    for rotation in ("hartley", "haar"):
        assert same(quantize_matrix(w, rotation=rotation, seed=1), quantize_matrix(w, rotation=rotation, seed=1))
        assert not same(quantize_matrix(w, rotation=rotation, seed=1), quantize_matrix(w, rotation=rotation, seed=2))
    a, b = (quantize_matrix(w, rotation="haar", persist_rotation=persist) for persist in (True, False))
    assert same(a, b)


def test_a_transform_may_be_given() -> None:
    t = make_transform(1, 5, 8, "signs", "matrix")
    w = gauss(0, 6, 40)
    data = quantize_matrix(w, bits=6, transform=t, rotation="none")
    assert data.transform is t and np.mean((dense(data) - w) ** 2) < 0.002
    with pytest.raises(RsvError) as e:
        quantize_matrix(gauss(0, 6, 41), transform=t)
    assert e.value.code == "bad_argument"


def test_importance_lowers_the_weighted_error() -> None:
    """What it is for: sum_j h_j |dW_j|^2."""
    rng = np.random.default_rng(4)
    h = np.exp(rng.normal(0, 2, 128))
    w = gauss(4, 96, 128) * np.exp(rng.normal(0, 0.5, 128)).astype(np.float32)
    for rotation in ("hartley", "haar"):
        for bits in (2, 3, 4):
            error = {}
            for importance in (None, h):
                back = dense(quantize_matrix(w, bits=bits, rotation=rotation, importance=importance))
                error[importance is h] = float((h * (back - w) ** 2).sum())
            assert error[True] < 0.7 * error[False]


def test_channel_scales_are_the_formula() -> None:
    h, squares = np.array([1.0, 16.0, 256.0, 2.0]), np.array([1.0, 1.0, 16.0, 2.0])
    c = channel_scales(h, squares, "x")
    raw = (h / squares) ** 0.25
    assert np.allclose(c, raw / np.exp(np.log(raw).mean())) and np.isclose(np.log(c).sum(), 0)
    assert np.allclose(channel_scales(h * 1e-20, squares, "x"), c)  # the unit does not matter
    assert np.allclose(channel_scales(h, squares * 1e9, "x"), c)


def test_channel_scales_are_optimal() -> None:
    """c minimises sum_j h_j / c_j^2 times sum_j c_j^2 s_j: the error of a rotation that spreads it evenly."""
    rng = np.random.default_rng(0)
    h, squares = np.exp(rng.normal(0, 1, 20)), np.exp(rng.normal(0, 1, 20))
    c = channel_scales(h, squares, "x")

    def cost(c: np.ndarray) -> float:
        return float((h / c**2).sum() * (squares * c**2).sum())

    assert all(cost(c) <= cost(c * np.exp(rng.normal(0, 0.05, 20))) for _ in range(50))


def test_channel_scales_at_the_edges() -> None:
    c = channel_scales(np.array([0.0, 1, 1, 1e30]), np.array([1.0, 0, 1, 1]), "x")
    assert c[0] == 1 / 64 and c[1] == 1 and c[3] == 64 and np.isfinite(c).all()
    assert np.array_equal(channel_scales(np.zeros(3), np.ones(3), "x"), np.ones(3))
    assert np.array_equal(channel_scales(np.ones(3), np.zeros(3), "x"), np.ones(3))
    assert np.isfinite(channel_scales(np.array([5e-324, 1e308]), np.array([5e-324, 1e308]), "x")).all()


@pytest.mark.parametrize(
    "importance",
    [np.ones(5), np.ones((1, 6)), np.array([1, 1, 1, 1, 1, np.nan]), np.array([1, 1, np.inf, 1, 1, 1]), -np.ones(6)],
)
def test_importances_that_do_not_fit(importance: np.ndarray) -> None:
    with pytest.raises(RsvError) as e:
        quantize_matrix(gauss(0, 2, 6), name="model.up", importance=importance)
    assert (e.value.code, e.value.where) == ("importance_mismatch", "model.up")


def test_column_squares_go_over_all_matrices_and_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    matrices = [gauss(1, 7, 5), gauss(2, 3, 5).astype(np.float16), gauss(3, 1, 5)]
    wanted = sum((m.astype(np.float64) ** 2).sum(axis=0) for m in matrices)
    for chunk in (2**17, 1, 12):
        monkeypatch.setattr(MODULE, "_CHUNK", chunk)
        assert np.allclose(column_squares(matrices), wanted, rtol=1e-12)
    assert column_squares([np.full((2, 2), 1e30, np.float32)])[0] == pytest.approx(2e60, rel=1e-6)


@pytest.mark.parametrize(
    "arguments, where",
    [
        ({"bits": 0}, "bits"), ({"bits": 9}, "bits"), ({"codebook": "nf4"}, "codebook"),
        ({"rotation": "random"}, "rotation"),
        ({"seed": -1}, "seed"), ({"seed": 2**53}, "seed"),
    ],
)  # fmt: skip
def test_arguments(arguments: dict[str, Any], where: str) -> None:
    with pytest.raises(RsvError) as e:
        quantize_matrix(gauss(0, 2, 4), **arguments)
    assert (e.value.code, e.value.where) == ("bad_argument", where)


@pytest.mark.parametrize(
    "weight",
    [np.zeros(4, np.float32), np.zeros((2, 4), np.int8), np.zeros((0, 4), np.float32), np.zeros((2, 0), np.float32),
               np.zeros((1, 1, 1, 4), np.float32), np.zeros((2, 4), np.complex64),
               np.zeros((65536, 1, 1), np.float32)], ids=str
)  # fmt: skip
def test_weights_of_another_kind(weight: Any) -> None:
    with pytest.raises(RsvError) as e:
        quantize_matrix(weight, name="x")
    assert (e.value.code, e.value.where) == ("bad_argument", "x")


def test_rows_can_be_quantized_alone() -> None:
    w, c = gauss(0, 4, 12), codebook("uniform", 3)
    t = Transform(12, 4, factor="hartley")
    codes, scales = quantize_rows(w, t, c, 3)
    data = quantize_matrix(w, bits=3, codebook="uniform", transform=t)
    assert np.array_equal(codes, data.codes) and np.array_equal(scales, data.scales)
