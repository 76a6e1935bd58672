"""Round trips of all content, and damage of any kind: only RsvError comes out, and nothing goes unnoticed."""

from __future__ import annotations

import itertools
import math
import struct
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    DIAGONALS,
    FACTORS,
    align,
    assemble,
    contents,
    expected_code,
    make_layer,
    make_transform,
    ones_and_all,
    outcome,
    small_file,
    split,
)

import rsv_format
from rsv_format import LayerData, RsvError, Transform
from rsv_format.packing import window_indices

FILE = small_file()


def same_bits(a: Any, b: Any) -> bool:
    """Arrays of the same bytes; or both None."""
    if a is None or b is None:
        return a is b
    a, b = np.asarray(a), np.asarray(b)
    return bool(a.shape == b.shape and a.dtype == b.dtype and a.tobytes() == b.tobytes())


def same_transform(a: Transform | None, b: Transform | None) -> bool:
    if a is None or b is None:
        return a is b
    plain = (a.dim, a.hadamard, a.factor, a.seed) == (b.dim, b.hadamard, b.factor, b.seed)
    return plain and all(same_bits(getattr(a, part), getattr(b, part)) for part in ("signs", "values", "stored"))


def check_layer(layer: rsv_format.Layer, data: LayerData) -> None:
    """All that was written is there."""
    assert (layer.in_features, layer.stack, layer.bits) == (data.in_features, data.stack, data.bits)
    assert layer.out_features * layer.stack == data.scales.size and layer.bias_dtype == data.bias_dtype
    assert same_bits(layer.codes, data.codes) and same_bits(layer.scales, data.scales)
    assert same_bits(layer.codebook, data.codebook) and same_bits(layer.bias, data.bias)
    assert same_transform(layer.transform, data.transform)
    unpacked = rsv_format.unpack(data.codes, data.bits, data.in_features)
    assert same_bits(layer.unpack(), unpacked)
    indices = window_indices(unpacked, data.bits, data.window)
    assert same_bits(layer.indices(), indices) and layer.window == data.window
    with np.errstate(over="ignore"):
        assert same_bits(layer.dequantize_rotated(), data.codebook[indices] * data.scales[:, None])


def check(path: Path, content: dict[str, Any]) -> None:
    assert rsv_format.verify(path) == []
    with rsv_format.open(path) as file:
        assert set(file.layers) == {layer.name for layer in content["layers"]}
        for data in content["layers"]:
            check_layer(file.layers[data.name], data)
        assert set(file.tensors) == set(content["tensors"])
        for name, tensor in content["tensors"].items():
            assert file.tensors[name].dtype == tensor.dtype and same_bits(file.tensors[name].array, tensor.array)
        assert set(file.attachments) == set(content["attachments"])
        for name, attachment in content["attachments"].items():
            found = file.attachments[name]
            assert (found.media_type, bytes(found.data)) == (attachment.media_type, attachment.data)
        assert dict(file.metadata) == content["metadata"] and file.header.extensions == content["extensions"]
        assert rsv_format.summarize(file).nbytes == path.stat().st_size == file.nbytes


@given(contents())
def test_round_trip(tmp_path: Path, content: dict[str, Any]) -> None:
    path = tmp_path / "a.rsv"
    rsv_format.write(path, **content)
    check(path, content)
    assert expected_code(path.read_bytes()) is None


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bias", [None, "f32", "f16", "bf16"])
def test_round_trip_of_every_kind(tmp_path: Path, bits: int, bias: str | None) -> None:
    """Each width and bias with each diagonal, factor and stack, at widths on both sides of a group of 32."""
    layers = []
    for i, (diagonal, factor, stack) in enumerate(itertools.product(DIAGONALS, FACTORS, (1, 3))):
        t = make_transform(i, *[(3, 2), (3, 16), (33, 1), (5, 8)][i % 4], diagonal, factor)
        layers.append(make_layer(i, f"l{i}", bits, 2 + i % 3, t, stack=stack, bias=bias))
    layers.append(make_layer(0, "prime", bits, 3, make_transform(0, 263, 1, "signs", "hartley"), bias=bias))
    layers += [make_layer(n, f"plain{n}", bits, 1, n, bias=bias) for n in (1, 31, 32, 33, 64)]
    content = {"layers": layers, "tensors": {}, "attachments": {}, "metadata": {}, "extensions": {}}
    path = tmp_path / "a.rsv"
    rsv_format.write(path, **content)
    check(path, content)


def use(file: rsv_format.File) -> None:
    """Everything that a reader may ask of a file that opens."""
    for layer in file.layers.values():
        layer.unpack(), layer.bias_float32()
        try:
            w = layer.dequantize()
            assert layer.matmul(np.ones((2, layer.in_features), np.float32)).shape[-1] == layer.out_features
            assert w.shape[-1] == layer.in_features
        except RsvError as e:
            assert e.code == "haar_witness_mismatch"
    for tensor in file.tensors.values():
        assert tensor.float32().size == math.prod(tensor.shape)
    for attachment in file.attachments.values():
        assert len(attachment.data) == attachment.nbytes
    rsv_format.summarize(file)


def exercise(data: bytes) -> list[str]:
    """Open, use, verify: the codes; other exceptions go through."""
    with warnings.catch_warnings(), np.errstate(all="ignore"):  # numbers that are not finite are to be expected
        try:
            with rsv_format.open(data) as file:
                use(file)
                return [fault.code for fault in rsv_format.verify(file, collect=True)]
        except RsvError as e:
            return [e.code]


@given(st.data())
def test_damage_anywhere(data: st.DataObject) -> None:
    """Overwritten, removed, inserted, cut: without a new digest nothing goes unnoticed."""
    file = bytearray(FILE)
    end = 64 * 40
    for _ in range(data.draw(st.integers(1, 4))):
        start = data.draw(st.integers(0, end))
        stop = data.draw(st.integers(start, min(start + 20, end)))
        file[start:stop] = data.draw(st.binary(max_size=20))
    damaged = bytes(file[: data.draw(st.sampled_from([len(file)] * 3 + [len(FILE), end]))])
    code = outcome(damaged)
    assert code == expected_code(damaged)
    codes = exercise(damaged)
    assert (codes == []) == (damaged == FILE)
    assert code is None or codes == [code]


@given(st.data())
def test_blobs_of_noise(data: st.DataObject) -> None:
    """RSV-003: with the digests renewed, a reader must stand whatever the blobs hold."""
    tree, blobs = ones_and_all()
    for i in data.draw(st.sets(st.integers(0, len(blobs) - 1), min_size=1)):
        noise = data.draw(st.binary(min_size=len(blobs[i]), max_size=len(blobs[i])))
        blobs[i] = noise
    file = assemble(tree, blobs)
    assert outcome(file) is None
    codes = exercise(file)
    assert "blob_digest_mismatch" not in codes
    assert set(codes) <= {
        "padding_nonzero", "nonfinite_value", "zero_diagonal", "codebook_order", "haar_witness_mismatch",
    }  # fmt: skip


@given(st.binary(max_size=200), st.booleans(), st.integers(0, 120))
def test_noise(noise: bytes, framed: bool, header_nbytes: int) -> None:
    file = noise
    if framed:
        file = struct.pack("<8sHHIQQ", FILE[:8], 1, 0, 0, header_nbytes, len(noise) + 40) + noise
    assert outcome(file) == expected_code(file)


@given(contents(), st.data())
def test_damage_of_any_file(tmp_path: Path, content: dict[str, Any], data: st.DataObject) -> None:
    path = tmp_path / "a.rsv"
    rsv_format.write(path, **content)
    file = bytearray(path.read_bytes())
    _, blobs = split(bytes(file))
    used = align(64 + struct.unpack_from("<Q", file, 16)[0] + sum(map(len, blobs)), 64)
    at = data.draw(st.integers(0, min(used, len(file) - 1)))
    file[at] ^= data.draw(st.integers(1, 255))
    assert exercise(bytes(file)) != []
