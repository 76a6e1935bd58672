"""Layers whose indices overlap: windows of their codes (SPEC section 5), as rsv_format reads them."""

from __future__ import annotations

import math

import mlx.core as mx
import mlx.nn as nn
import numpy as np
import pytest

import rsv_mlx
from rsv_format import LayerData, Transform
from rsv_format.packing import unpack, window_indices
from rsv_format.quantizer.matrix import make_transform
from rsv_mlx.codebook import Codebook
from rsv_mlx.window import fields, runs, tail_columns, tail_indices

WINDOWS = [(bits, window) for bits in range(1, 9) for window in sorted({bits, bits + 1, 8, 12, 16}) if window >= bits]


def indices_of(codes: np.ndarray, bits: int, window: int, in_features: int) -> np.ndarray:
    """From the definition: bit p of a row is bit p mod (in_features * bits)."""
    row = np.unpackbits(codes.view(np.uint8), axis=1, bitorder="little")[:, : in_features * bits].astype(np.int64)
    positions = (np.arange(in_features)[:, None] * bits + np.arange(window)) % (in_features * bits)
    return (row[:, positions] << np.arange(window)).sum(axis=-1)


def random_codes(rng: np.random.Generator, rows: int, in_features: int, bits: int) -> np.ndarray:
    """With padding codes that are not zero, which must not count."""
    return rng.integers(0, 2**32, (rows, -(-in_features // 32) * bits), dtype=np.uint32)


@pytest.mark.parametrize("bits, window", WINDOWS)
def test_products_and_weights_are_those_of_the_windows(bits: int, window: int) -> None:
    rng = np.random.default_rng(0)
    centroids = rng.standard_normal(2**window).astype(np.float32)
    book = Codebook.of(centroids, bits)
    for in_features in (1, 2, 7, 31, 32, 33, 64, 70):
        codes = random_codes(rng, 5, in_features, bits)
        indices = indices_of(codes, bits, window, in_features)
        assert np.array_equal(window_indices(unpack(codes, bits, in_features), bits, window), indices)
        weight = centroids[indices]
        assert np.array_equal(np.array(book.dequantize(mx.array(codes), in_features)), weight)
        for count in (1, 3, 20):  # by tables of sums, and by dense slices
            x = rng.standard_normal((count, in_features)).astype(np.float32)
            y = np.array(book.matmul(mx.array(x), mx.array(codes)))
            assert np.abs(y - x @ weight.T).max() <= 1e-5 * math.sqrt(in_features) * np.abs(x).max() * 4


@pytest.mark.parametrize("bits, window", [(1, 1), (3, 8), (4, 8), (5, 12), (8, 16)])
def test_fields_and_the_tail_together_are_all_indices(bits: int, window: int) -> None:
    rng = np.random.default_rng(1)
    codes, tail = random_codes(rng, 3, 40, bits), tail_columns(bits, window, 40)
    found = (
        np.array(fields(mx.array(codes), window, bits)).reshape(3, runs(window, bits), -1).swapaxes(1, 2).reshape(3, -1)
    )
    last = [np.array(tail_indices(mx.array(codes), bits, window, 40))] if tail else []
    whole = np.concatenate([found[:, : 40 - tail], *last], axis=1)
    assert np.array_equal(whole, indices_of(codes, bits, window, 40))


def data_of(bits: int, window: int, shape: tuple[int, ...], transform: Transform | None) -> LayerData:
    rng = np.random.default_rng(2)
    rows = math.prod(shape[:-1])
    return LayerData(
        "a", shape[-1], bits, random_codes(rng, rows, shape[-1], bits), rng.random(rows).astype(np.float32),
        rng.standard_normal(2**window).astype(np.float32), transform, stack=math.prod(shape[:-2]),
    )  # fmt: skip


def dense_of(data: LayerData) -> np.ndarray:
    w_rot = data.scales[:, None] * data.codebook[indices_of(data.codes, data.bits, data.window, data.in_features)]
    return w_rot if data.transform is None else data.transform.apply_inverse(w_rot)


@pytest.mark.parametrize("bits, window", [(4, 8), (2, 12), (3, 16)])
def test_every_kind_of_layer_takes_windows(bits: int, window: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsv_mlx.codebook._CPU_CHUNK", 4 * 48 * 8)  # several pieces
    plain = data_of(bits, window, (30, 48), make_transform(48, seed=1))
    weight = dense_of(plain)
    x = np.random.default_rng(3).standard_normal((20, 48)).astype(np.float32)
    linear = rsv_mlx.QuantizedLinear.from_data(plain)
    for count in (1, 20):
        assert np.allclose(np.array(linear(mx.array(x[:count]))), x[:count] @ weight.T, atol=1e-4)
    slope = mx.grad(lambda v: linear(v).sum())(mx.array(x[0]))
    assert np.allclose(np.array(slope), weight.sum(axis=0), atol=1e-4)
    mapped = mx.vmap(linear)(mx.array(x[:3]))
    assert np.allclose(np.array(mapped), x[:3] @ weight.T, atol=1e-4)
    assert np.allclose(np.array(mx.compile(linear)(mx.array(x))), x @ weight.T, atol=1e-4)

    embedding = rsv_mlx.QuantizedEmbedding.from_data(plain)
    assert np.allclose(np.array(embedding(mx.array([[3, 29]]))), weight[[[3, 29]]], atol=1e-5)
    assert np.allclose(np.array(embedding.as_linear(mx.array(x))), x @ weight.T, atol=1e-4)

    stacked = data_of(bits, window, (4, 30, 48), make_transform(48, seed=1))
    experts = dense_of(stacked).reshape(4, 30, 48)
    switch = rsv_mlx.QuantizedSwitchLinear.from_data(stacked)
    for tokens in (2, 20):
        chosen = np.arange(2 * tokens).reshape(tokens, 2) % 4
        y = switch(mx.array(x[:tokens, None, None]), mx.array(chosen))
        expected = np.einsum("ti,teoi->teo", x[:tokens], experts[chosen])[:, :, None]
        assert np.allclose(np.array(y), expected, atol=1e-4)


def test_layers_with_one_codebook_share_its_tables() -> None:
    first, second = (rsv_mlx.QuantizedLinear.from_data(data_of(4, 8, (6, 32), None)) for _ in range(2))
    assert first.codebook is second.codebook
    assert rsv_mlx.QuantizedLinear.from_data(data_of(3, 8, (6, 32), None)).codebook is not first.codebook
    assert "window=8" in repr(first) and isinstance(first, nn.Module)
