"""Everything that a program may ask of a file: only RsvError may come out."""

from __future__ import annotations

import math

import numpy as np

import rsv_format

MAX_ORDER = 64  # of a haar or matrix factor, MAX_FEATURES of a layer that is multiplied: more only costs time
MAX_FEATURES = 1024


def exercise(data: bytes) -> list[str]:
    """The codes that open, or else verify, gives."""
    try:
        with rsv_format.open(data) as file:
            return _use(file)
    except rsv_format.RsvError as e:
        assert e.code in rsv_format.CODES and e.where and e.detail
        return [e.code]


def _use(file: rsv_format.File) -> list[str]:
    for tensor in file.tensors.values():
        assert tensor.float32().size == math.prod(tensor.shape)
    for attachment in file.attachments.values():
        assert len(attachment.data) == attachment.nbytes
    rsv_format.summarize(file)
    if any(t.factor and t.dim // t.hadamard > MAX_ORDER for t in file.header.transforms):
        return []
    codes = [fault.code for fault in rsv_format.verify(file, collect=True)]
    for layer in list(file.layers.values())[:4]:
        if layer.in_features <= MAX_FEATURES and layer.scales.size <= MAX_FEATURES:
            _multiply(layer, codes)
    return codes


def _multiply(layer: rsv_format.Layer, codes: list[str]) -> None:
    assert layer.unpack().max(initial=0) < 2**layer.bits
    assert layer.indices().max(initial=0) < 2**layer.window
    try:
        w = layer.dequantize()
        y = layer.matmul(np.ones((2, layer.in_features), np.float32))
        assert (w.shape[-1], y.shape[-1]) == (layer.in_features, layer.out_features)
    except rsv_format.RsvError as e:
        assert e.code == "haar_witness_mismatch" and not {e.code, "nonfinite_value"}.isdisjoint(codes)
