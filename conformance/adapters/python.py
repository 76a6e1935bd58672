"""The adapter of rsv_format (PROTOCOL.md): the only file of conformance/ that imports it."""

from __future__ import annotations

import base64
import hashlib
import json
import os
import sys
import tempfile
from typing import Any

import numpy as np

import rsv_format
from rsv_format import RsvError

NUMPY = {
    "bool": "u1", "u8": "u1", "i8": "i1", "u16": "<u2", "i16": "<i2", "u32": "<u4", "i32": "<i4", "u64": "<u8",
    "i64": "<i8", "f16": "<f2", "bf16": "<u2", "f32": "<f4", "f64": "<f8",
}  # fmt: skip


def array(a: Any, dtype: str, shape: Any = None) -> dict[str, Any]:
    data = np.ascontiguousarray(a).tobytes()
    size = np.dtype(NUMPY[dtype]).itemsize
    first = [data[i : i + size][::-1].hex() for i in range(0, min(len(data), 8 * size), size)]
    shape = list(a.shape if shape is None else shape)
    return {"shape": shape, "dtype": dtype, "sha256": hashlib.sha256(data).hexdigest(), "first": first}


def hexes(a: Any) -> list[str]:
    return [f"{bits:08x}" for bits in np.ascontiguousarray(a, "<f4").view("<u4").reshape(-1).tolist()]


def decode(path: str) -> dict[str, Any]:
    with rsv_format.open(path, alone=True) as f:
        prologue = bytes(f.buffer[:64])
        text = bytes(f.buffer[64 : 64 + f.header_nbytes])
        layers = []
        for layer in f.layers.values():
            bias = layer.bias_float32()
            parts: dict[str, Any] = {kind: [at, size] for kind, at, size in layer.parts}
            layers.append({
                "name": layer.name, "parts": {"bias": None} | parts, "codes": array(layer.unpack(), "u8"),
                "indices": array(layer.indices().astype("<u2"), "u16"),
                "scales": array(layer.scales, "f32"), "bias": None if bias is None else array(bias, "f32"),
            })  # fmt: skip
        return {
            "version": [int.from_bytes(prologue[8:10], "little"), int.from_bytes(prologue[10:12], "little")],
            "header_nbytes": f.header_nbytes,
            "header_sha256": prologue[32:64].hex(),
            "file_nbytes": f.nbytes,
            "header": json.loads(text),
            "blobs": [
                {"kind": b.kind, "entry": b.index, "offset": b.offset, "nbytes": b.nbytes} for b in f.blobs
            ],
            "codebooks": [_codebook(f.codebook(i), c.bits) for i, c in enumerate(f.header.codebooks)],
            "transforms": [_transform(f.transform(i)) for i in range(len(f.header.transforms))],
            "layers": layers,
            "tensors": [
                {"name": t.name, "data": array(t.array, t.dtype, t.shape)} for t in f.tensors.values()
            ],
            "attachments": [
                {"name": a.name, "data": array(np.frombuffer(a.data, "u1"), "u8")} for a in f.attachments.values()
            ],
        }  # fmt: skip


def _codebook(centroids: Any, bits: int) -> dict[str, Any]:
    from rsv_format.codebook import uniform_step

    uniform = len(centroids) == 2**bits and uniform_step(centroids) is not None
    return {"centroids": array(centroids, "f32"), "uniform": uniform}


def _transform(t: Any) -> dict[str, Any]:
    d = t.values
    if t.signs is not None:
        bits = np.unpackbits(np.asarray(t.signs), bitorder="little")[: t.dim]
        d = (1 - 2 * bits.astype("<f4")).astype("<f4")
    m = t.dim // t.hadamard
    factor = None if t.stored is None else array(t.stored, "f32", [m, m] if t.factor == "matrix" else [m])
    return {"diagonal": None if d is None else array(d, "f32"), "factor": factor}


def verify(path: str) -> dict[str, Any]:
    with rsv_format.open(path, alone=True) as f:
        rsv_format.verify(f)
    return {}


def dequantize(path: str) -> dict[str, Any]:
    out = []
    with rsv_format.open(path, alone=True) as f:
        for layer in f.layers.values():
            n, rows = layer.in_features, layer.scales.size
            x = (((7 * np.arange(n) + 3) % 17 - 8) / 8).astype("<f4")
            columns = list(range(n)) if n <= 640 else sorted({*range(0, n, -(-n // 256)), n - 1})
            sampled = list(range(rows)) if rows <= 16 else sorted({0, rows // 2, rows - 1})
            tx = x if layer.transform is None else layer.transform.apply(x[None])[0]
            out.append({
                "name": layer.name,
                "w_rot": array(layer.dequantize_rotated(), "f32"),
                "w": [hexes(row[columns]) for row in layer.dequantize().reshape(rows, n)[sampled]],
                "tx": hexes(tx[columns]),
                "y": hexes(layer.matmul(x).reshape(-1)[sampled]),
            })  # fmt: skip
    return {"layers": out}


def encode(path: str) -> dict[str, Any]:
    with open(path, encoding="utf-8") as f:
        content = json.load(f, object_pairs_hook=_members)
    layers = [_layer(entry) for entry in content["layers"]]
    tensors: dict[str, Any] = {}
    for t in content["tensors"]:
        data = np.frombuffer(bytes.fromhex(t["data"]), NUMPY[t["dtype"]]).reshape(t["shape"])
        _put(tensors, t["name"], rsv_format.TensorData(t["dtype"], data))
    attachments: dict[str, Any] = {}
    for a in content["attachments"]:
        _put(attachments, a["name"], rsv_format.AttachmentData(a["media_type"], bytes.fromhex(a["data"])))
    with tempfile.TemporaryDirectory() as folder:
        target = os.path.join(folder, "out.rsv")
        rsv_format.write(
            target, layers=layers, tensors=tensors, attachments=attachments,
            metadata=content["metadata"], extensions=content["extensions"],
        )  # fmt: skip
        with open(target, "rb") as f:
            return {"file": base64.b64encode(f.read()).decode()}


def _members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) < len(pairs):
        raise RsvError("json_duplicate_key", "description", "an object has a name twice")
    return dict(pairs)


def _put(items: dict[str, Any], name: str, item: Any) -> None:
    if name in items:
        raise RsvError("duplicate_name", name[:100], "it is given twice")
    items[name] = item


def _floats(digits: list[str]) -> Any:
    return np.array([int(d, 16) for d in digits], "<u4").view("<f4")


def _layer(entry: dict[str, Any]) -> Any:
    transform, t = None, entry["transform"]
    if t is not None:
        signs = values = stored = kind = seed = None
        if t["diagonal"] is not None:
            numbers = t["diagonal"]["values"]
            if t["diagonal"]["kind"] == "signs":
                signs = np.packbits(np.array(numbers) < 0, bitorder="little")
            else:
                values = _floats(numbers)
        if t["factor"] is not None:
            kind, seed = t["factor"]["kind"], t["factor"].get("seed")
            digits = t["factor"].get("values") or t["factor"].get("witness")
            m = t["dim"] // t["hadamard"]
            if digits is not None:
                stored = _floats(digits).reshape((m, m) if kind == "matrix" else (m,))
        transform = rsv_format.Transform(t["dim"], t["hadamard"], signs, values, kind, seed, stored)
    rows = entry["stack"] * entry["out_features"]
    bits = entry["codebook"]["bits"]
    codes = np.frombuffer(bytes.fromhex(entry["codes"]), "u1").reshape(rows, entry["in_features"])
    bias = dtype = None
    if entry["bias"] is not None:
        dtype = entry["bias"]["dtype"]
        size = "<u4" if dtype == "f32" else "<u2"
        bias = np.array([int(d, 16) for d in entry["bias"]["values"]], size).view(NUMPY[dtype])
    return rsv_format.LayerData(
        entry["name"], entry["in_features"], bits, rsv_format.pack(codes, bits),
        _floats(entry["scales"]), _floats(entry["codebook"]["centroids"]), transform, bias, dtype, entry["stack"],
    )  # fmt: skip


def merge(path: str) -> dict[str, Any]:
    with tempfile.TemporaryDirectory() as folder:
        out = os.path.join(folder, "whole")
        rsv_format.merge(path, out)
        with open(out, "rb") as f:
            return {"file": base64.b64encode(f.read()).decode()}


OPERATIONS = {"decode": decode, "verify": verify, "dequantize": dequantize, "encode": encode, "merge": merge}


def answer(operation: str, path: str) -> tuple[int, Any]:
    """Exit code and output."""
    if operation not in OPERATIONS:
        return 77, None
    try:
        return 0, OPERATIONS[operation](path)
    except RsvError as e:
        return 1, {"error": e.code, "where": e.where}


def _dump(value: Any) -> str:
    return json.dumps(value, sort_keys=True, separators=(",", ":"))


def main(arguments: list[str]) -> int:
    np.seterr(all="ignore")  # a scale may overflow: the result is then infinite, as it must be
    if arguments == ["batch"]:
        print(_dump({"batch": 1}), flush=True)
        for line in sys.stdin:
            code, output = answer(*line.rstrip("\n").split("\t", 1))
            print(_dump({"exit": code, "output": output}), flush=True)
        return 0
    code, output = answer(*arguments)
    if output is not None:
        print(_dump(output))
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
