"""Tensors that a file cannot hold are refused by their names, before and while they are quantized."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from test_sources import refuses

import rsv_format

safetensors = pytest.importorskip("safetensors.numpy")

WEIGHT = np.random.default_rng(0).standard_normal((32, 64)).astype(np.float32)


def quantize(folder: Path, tensors: dict[str, np.ndarray], **options: object) -> None:
    safetensors.save_file({"a.proj.weight": WEIGHT} | tensors, folder / "m.safetensors")
    rsv_format.quantize(folder / "m.safetensors", folder / "m.rsv", **options)


@pytest.mark.parametrize("name", ["", "a\nb", "a\0b", "\x7f", "n" * 513])
def test_names(tmp_path: Path, name: str) -> None:
    refuses("source_unsupported", lambda: quantize(tmp_path, {name: np.zeros(2)}), repr(name)[:70])
    assert not (tmp_path / "m.rsv").exists()


def test_axes(tmp_path: Path) -> None:
    refuses("source_unsupported", lambda: quantize(tmp_path, {"mask": np.zeros((1,) * 9, np.float32)}), "mask")
    quantize(tmp_path, {"mask": np.zeros((1,) * 8, np.float32)})
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert file.tensors["mask"].array.shape == (1,) * 8


@pytest.mark.parametrize(
    "bias", [np.zeros(32), np.zeros((1, 32), np.float32), np.zeros(31, np.float32), np.zeros(32, np.int32)]
)
def test_biases(tmp_path: Path, bias: np.ndarray) -> None:
    tensors = {"a.proj.bias": bias, "b.proj.weight": WEIGHT}
    refuses("source_unsupported", lambda: quantize(tmp_path, tensors), "a.proj.bias")
    quantize(tmp_path, tensors, exclude=["a.proj"])
    with rsv_format.open(tmp_path / "m.rsv") as file:
        kept = file.tensors["a.proj.bias"].array
        assert kept.dtype == bias.dtype and np.array_equal(kept, bias)


def test_weights_that_overflow_when_they_are_dequantized(tmp_path: Path) -> None:
    largest = np.full((4, 64), 3e38, np.float32)
    refuses("nonfinite_weight", lambda: quantize(tmp_path, {"b.proj.weight": largest}), "b.proj")
    assert not (tmp_path / "m.rsv").exists()
    quantize(tmp_path, {"b.proj.weight": largest * np.float32(1e-4)})
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert np.isfinite(file.layers["b.proj"].dequantize()).all()
