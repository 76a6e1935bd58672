"""Trellis codes: the best paths, rows of any length, the shipped tables, and matrices quantized with them."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import rsv_format
from rsv_format import LayerData, RsvError, Source, quantize_matrix
from rsv_format.packing import window_indices
from rsv_format.quantizer import trellis
from rsv_format.quantizer.codebooks import TRELLIS_BITS, WINDOWS, centroids, distortion, distortions
from rsv_format.quantizer.trellis import encode
from rsv_format.sources.base import dense_tensor

BOUND = {bits: 4.0**-bits for bits in range(1, 9)}


def gauss(seed: int, *shape: int) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(shape, np.float32)


def errors(rows: np.ndarray, indices: np.ndarray, table: np.ndarray, bits: int) -> np.ndarray:
    """Sum of squares of each row, in float64, of what its codes stand for."""
    codes = (indices & (2**bits - 1)).astype(np.uint8)
    assert np.array_equal(window_indices(codes, bits, table.size.bit_length() - 1), indices)
    said = table[indices]
    return np.sum(np.square(said.astype(np.float64) - rows), axis=1)


def least_errors(rows: np.ndarray, table: np.ndarray, bits: int) -> np.ndarray:
    """Of all rows of codes that there are."""
    n = rows.shape[1]
    words = np.arange(2 ** (n * bits))[:, None] >> np.arange(0, n * bits, bits) & (2**bits - 1)
    window = table.size.bit_length() - 1
    said = table[window_indices(words.astype(np.uint8), bits, window)].astype(np.float64)
    return np.array([np.square(said - row).sum(axis=1).min() for row in rows])


def dense(data: LayerData) -> np.ndarray:
    indices = window_indices(rsv_format.unpack(data.codes, data.bits, data.in_features), data.bits, data.window)
    w = data.scales.astype(np.float64)[:, None] * data.codebook.astype(np.float64)[indices]
    return w if data.transform is None else data.transform.apply_inverse(w)


# --- paths ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "bits, window, in_features",
    [(1, 1, 5), (1, 3, 12), (1, 8, 6), (1, 6, 17), (2, 2, 7), (2, 3, 6), (2, 8, 1), (2, 8, 4), (2, 8, 5), (2, 10, 9),
     (3, 4, 5), (3, 8, 6), (4, 4, 3), (4, 5, 4), (4, 8, 4), (4, 12, 2), (5, 12, 3), (5, 16, 1), (6, 8, 2), (6, 12, 2),
     (7, 8, 2), (7, 16, 2), (8, 8, 2), (8, 9, 2), (8, 16, 1)],
)  # fmt: skip
def test_short_rows_get_the_best_codes_there_are(bits: int, window: int, in_features: int) -> None:
    table, rows = gauss(window, 2**window), gauss(bits, 5, in_features)
    indices = encode(rows, table, bits)
    assert indices.dtype == np.uint16 and indices.shape == rows.shape
    assert errors(rows, indices, table, bits) == pytest.approx(least_errors(rows, table, bits), rel=1e-5, abs=1e-6)


@pytest.mark.parametrize("bits, in_features", [(1, 17), (2, 9)])
def test_rows_of_few_windows_get_codes_hardly_worse(bits: int, in_features: int) -> None:
    table, rows = centroids("trellis", bits, 12), gauss(bits, 5, in_features)
    found = errors(rows, encode(rows, table, bits), table, bits)
    assert found.sum() < 1.4 * least_errors(rows, table, bits).sum()


@pytest.mark.parametrize("bits, window", [(1, 8), (2, 8), (4, 8), (5, 8), (8, 8), (2, 12), (4, 12), (3, 10), (8, 10)])
def test_rows_of_any_length_are_encoded_well(bits: int, window: int) -> None:
    """Against rows so long that their ends do not matter; very short ones have fewer codes to choose from."""
    table = gauss(window, 2**window)
    rows = np.clip(gauss(1, 64, 800), -2, 2)  # a table that is not trained has few centroids beyond
    usual = errors(rows, encode(rows, table, bits), table, bits).sum() / rows.size
    for n in range(4 * window // bits, 71, 13):
        rows = np.clip(gauss(n, 64, n), -2, 2)
        assert errors(rows, encode(rows, table, bits), table, bits).sum() / rows.size < 1.35 * usual, n


@pytest.mark.parametrize("bits, window", [(1, 8), (4, 8), (3, 10), (2, 12)])
def test_neither_neighbours_nor_threads_nor_pieces_matter(
    bits: int, window: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    table, rows = gauss(window, 2**window), gauss(3, 130, 400)
    whole = encode(rows, table, bits)
    assert np.array_equal(encode(rows, table, bits, threads=1), whole)
    assert np.array_equal(encode(rows[65:67], table, bits), whole[65:67])
    assert np.array_equal(encode(np.asfortranarray(rows)[:3], table[::-1][::-1], bits), whole[:3])
    monkeypatch.setattr(trellis, "_ROOM", 0)  # as few steps at a time as there may be
    pieces = encode(rows, table, bits)
    assert errors(rows, pieces, table, bits).sum() == pytest.approx(errors(rows, whole, table, bits).sum(), rel=1e-2)


def test_where_a_row_begins_does_not_matter() -> None:
    table, rows = centroids("trellis", 4, 8), gauss(0, 64, 96)
    there = errors(rows, encode(rows, table, 4), table, 4)
    turned = np.roll(rows, 31, axis=1)
    assert errors(turned, encode(turned, table, 4), table, 4).sum() == pytest.approx(there.sum(), rel=0.02)


def test_numba_is_asked_for_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "rsv_format.quantizer.viterbi", raising=False)
    monkeypatch.delattr("rsv_format.quantizer.viterbi", raising=False)
    monkeypatch.setitem(sys.modules, "numba", None)
    with pytest.raises(RsvError) as e:
        quantize_matrix(gauss(0, 2, 40), codebook="trellis")
    assert e.value.code == "missing_dependency" and "rsv-format[quantize]" in e.value.detail


# --- tables ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("window", WINDOWS)
@pytest.mark.parametrize("bits", TRELLIS_BITS)
def test_tables_are_what_they_are_said_to_be(bits: int, window: int) -> None:
    table = centroids("trellis", bits, window)
    assert table.shape == (2**window,) and table.dtype == np.float32 and not table.flags.writeable
    assert np.array_equal(table, -table[::-1]) and np.isfinite(table).all() and np.abs(table).max() < 6
    rows = gauss(5, 64, 512)
    error = errors(rows, encode(rows, table, bits), table, bits).sum() / rows.size
    assert error == pytest.approx(distortion("trellis", bits, window), rel=0.03 if bits < 5 else 0.1)
    assert BOUND[bits] < error < distortion("lloyd-max", bits)


def test_tables_are_near_the_bound() -> None:
    def distance(bits: int, window: int) -> float:
        return float(0.5 * np.log2(distortions()[bits, window] / BOUND[bits]))

    assert distance(4, 8) < 0.28 and distance(2, 8) < 0.15 and distance(4, 12) < 0.14 and distance(2, 12) < 0.09
    for bits in TRELLIS_BITS:
        assert distance(bits, 12) < distance(bits, 8), bits


@pytest.mark.parametrize(
    "options, where",
    [({"bits": 9}, "bits"), ({"bits": 0}, "bits"), ({"window": 9}, "window"), ({"window": 16}, "window"),
     ({"codebook": "lloyd-max", "window": 8}, "window"), ({"codebook": "other"}, "codebook")],
)  # fmt: skip
def test_what_there_is_no_table_for(options: dict[str, object], where: str) -> None:
    with pytest.raises(RsvError) as e:
        quantize_matrix(gauss(0, 2, 40), **{"codebook": "trellis", **options})  # type: ignore[arg-type]
    assert (e.value.code, e.value.where) == ("bad_argument", where)


# --- matrices -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("bits", TRELLIS_BITS)
@pytest.mark.parametrize("window", [8, 12])
def test_a_matrix_is_as_close_as_its_table_allows(bits: int, window: int) -> None:
    w = gauss(0, 100, 384) * np.exp(gauss(1, 100, 1))
    data = quantize_matrix(w, bits=bits, codebook="trellis", window=window)
    assert (data.bits, data.window) == (bits, window)
    relative = np.square(dense(data) - w).sum(1) / np.square(w.astype(np.float64)).sum(1)
    assert relative.mean() == pytest.approx(distortion("trellis", bits, window), rel=0.06)
    again = quantize_matrix(w, bits=bits, codebook="trellis", window=window, threads=1)
    assert np.array_equal(data.codes, again.codes) and np.array_equal(data.scales, again.scales)


def test_scales_are_those_of_least_squares() -> None:
    w = gauss(0, 70, 50)
    data = quantize_matrix(w, bits=3, codebook="trellis")
    least = np.square(dense(data) - w).sum(1)
    for factor in (0.999, 1.001):
        other = LayerData(**{**vars(data), "scales": data.scales * np.float32(factor)})
        assert (np.square(dense(other) - w).sum(1) > least).all()


@pytest.mark.parametrize("rotation", ["hartley", "none"])
@pytest.mark.parametrize("in_features", [*range(1, 20), 31, 32, 33, 70])
def test_rows_that_are_odd(in_features: int, rotation: str) -> None:
    w = gauss(0, 7, in_features)
    w[1], w[2] = 0, 0
    w[2, in_features // 2] = -3.5
    w[3] *= 1e-42
    w[4] *= 2e37
    w[5] = 1
    for bits in TRELLIS_BITS if in_features in (1, 2, 9, 33) else (4,):
        data = quantize_matrix(w, bits=bits, codebook="trellis", rotation=rotation)
        assert np.isfinite(data.scales).all() and (data.scales >= 0).all() and data.scales[1] == 0
        out = dense(data)
        assert np.isfinite(out).all() and not out[1].any()
        norms = np.linalg.norm(w.astype(np.float64), axis=1)
        relative = np.linalg.norm(out - w, axis=1)[norms > 0] / norms[norms > 0]
        assert (relative < 1).all()
        if in_features == 1:
            assert (relative[[0, 1, 3, 4, 5]] < 1e-6).all()


def test_what_is_not_finite_is_refused_by_its_place() -> None:
    w = gauss(0, 100, 64)
    w[77, 3] = np.nan
    with pytest.raises(RsvError) as e:
        quantize_matrix(w, name="x", codebook="trellis")
    assert (e.value.code, e.value.where) == ("nonfinite_weight", "x") and "row 77, column 3" in e.value.detail


def test_stacks_are_rows() -> None:
    w = gauss(0, 3, 10, 48)
    stack, rows = (quantize_matrix(x, codebook="trellis", rotation="none") for x in (w, w.reshape(30, 48)))
    assert stack.stack == 3 and np.array_equal(stack.codes, rows.codes) and np.array_equal(stack.scales, rows.scales)


# --- files ----------------------------------------------------------------------------------------------------------


def model() -> Source:
    """Linear layers, a stack of experts and a table."""
    shapes = {
        "model.embed_tokens": (70, 96), "model.layers.0.self_attn.q_proj": (64, 96),
        "model.layers.0.self_attn.k_proj": (32, 96), "model.layers.0.mlp.up_proj": (128, 96),
        "model.layers.0.mlp.down_proj": (96, 128), "model.layers.0.mlp.switch_mlp.up_proj": (3, 40, 96),
    }  # fmt: skip
    arrays = {name: gauss(i, *shape) for i, (name, shape) in enumerate(shapes.items())}

    def tensor(name: str, array: np.ndarray) -> Any:
        return dense_tensor(f"{name}.weight", "f32", array.shape, lambda: array)

    return Source("test", "model.x", {f"{name}.weight": tensor(name, array) for name, array in arrays.items()})


@pytest.mark.parametrize("options, window", [({}, 8), ({"window": 12}, 12)])
def test_a_file_holds_what_the_layers_hold(options: dict[str, int], window: int, tmp_path: Path) -> None:
    source, path = model(), tmp_path / "a.rsv"
    rsv_format.quantize(source, path, bits=3, codebook="trellis", importance="none", **options)
    assert rsv_format.verify(path) == []
    layers = {
        layer.name: layer
        for layer in rsv_format.quantize_layers(source, bits=3, codebook="trellis", importance="none", **options)
    }
    with rsv_format.open(path) as file:
        assert {(x.bits, x.window) for x in file.header.codebooks} == {(3, window), (5, window)}
        assert file.metadata["quantizer.codebook"] == "trellis" and file.metadata["quantizer.window"] == str(window)
        assert set(file.layers) == set(layers) and len(layers) == 6
        for name, layer in file.layers.items():
            w = source.tensors[f"{name}.weight"].float32()
            found = layer.dequantize()
            assert layer.bits == (5 if "embed" in name else 3)
            np.testing.assert_allclose(found.reshape(-1, w.shape[-1]), dense(layers[name]), rtol=1e-4, atol=1e-5)
            relative = np.square(found - w).sum() / np.square(w).sum()
            assert relative == pytest.approx(distortion("trellis", layer.bits, window), rel=0.1)
        rsv_format.save(file, tmp_path / "b.rsv")
    assert (tmp_path / "b.rsv").read_bytes() == path.read_bytes()


@pytest.mark.parametrize("wanted", [11.0, 40.0])
def test_a_budget_buys_windows_too(wanted: float, tmp_path: Path) -> None:
    source, path = model(), tmp_path / "a.rsv"
    report = rsv_format.quantize(
        source, path, bits_per_weight=wanted, codebook="trellis", importance="none", embedding_bits="keep"
    )
    assert report.summary.bits_per_weight <= wanted and rsv_format.verify(path) == []
    with rsv_format.open(path) as file:
        bits = {layer.bits for layer in file.layers.values()}
    assert bits == ({6} if wanted > 30 else bits) and len(bits) <= 2 and bits <= {2, 3, 4, 5, 6}


def test_the_command_line_has_it(tmp_path: Path) -> None:
    from typer.testing import CliRunner

    from rsv_cli.app import app

    def run(*options: str) -> Any:
        return CliRunner().invoke(app, ["quantize", str(tmp_path / "a.safetensors"), "-o", str(path), *options])

    path = tmp_path / "a.rsv"
    save_file({"model.layers.0.mlp.up_proj.weight": gauss(0, 40, 64)}, tmp_path / "a.safetensors")
    assert run("--codebook", "trellis", "--window", "12").exit_code == 0
    with rsv_format.open(path) as file:
        assert [(x.bits, x.window) for x in file.header.codebooks] == [(4, 12)]
    assert run("--window", "8").exit_code == 2 and run("--codebook", "trellis", "--window", "9").exit_code != 0
    assert run("--codebook", "trellis", "--bits", "8").exit_code == 0
    with rsv_format.open(path) as file:
        assert [(x.bits, x.window) for x in file.header.codebooks] == [(8, 8)]
