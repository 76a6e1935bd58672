"""What an adapter must print of a file (PROTOCOL.md)."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Sequence
from typing import Any

from builder.doc import DTYPE_NBYTES, Doc, prologue_bytes
from builder.kernel import (
    align,
    f32,
    f32_bytes,
    f32_hex,
    f32_list,
    haar,
    hadamard_apply,
    hartley_apply,
    norm,
    windows,
)

_BIAS_NBYTES = {"f32": 4, "f16": 2, "bf16": 2}


def array(shape: Sequence[int], dtype: str, data: bytes) -> dict[str, Any]:
    size = DTYPE_NBYTES[dtype]
    first = [data[i : i + size][::-1].hex() for i in range(0, min(len(data), 8 * size), size)]
    return {"shape": list(shape), "dtype": dtype, "sha256": hashlib.sha256(data).hexdigest(), "first": first}


def floats(shape: Sequence[int], values: Sequence[float]) -> dict[str, Any]:
    return array(shape, "f32", f32_bytes(values))


def _u16(values: Sequence[int]) -> bytes:
    if isinstance(values, bytes):
        out = bytearray(2 * len(values))
        out[::2] = values
        return bytes(out)
    return struct.pack(f"<{len(values)}H", *values)


def is_uniform(centroids: Sequence[float], bits: int) -> bool:
    """RSV-521."""
    if len(centroids) > 2**bits:
        return False
    step = centroids[1] - centroids[0]
    return all(c == centroids[0] + i * step for i, c in enumerate(centroids))


def diagonal(doc: Doc, i: int) -> list[float] | None:
    entry = doc.header["transforms"][i]
    if entry["diagonal"] is None:
        return None
    data = doc.blobs["diagonal", i]
    if entry["diagonal"]["kind"] == "values":
        return f32_list(data)
    return [-1.0 if data[j // 8] >> j % 8 & 1 else 1.0 for j in range(entry["dim"])]


def layer_parts(doc: Doc, i: int) -> dict[str, Any]:
    """codes and indices (for each row), scales, bias as numbers, and (offset in the blob, nbytes) of each part."""
    entry, data = doc.header["layers"][i], doc.blobs["layer", i]
    book = doc.header["codebooks"][entry["codebook"]]
    bits, window = book["bits"], book["window"]
    rows, columns = entry["stack"] * entry["out_features"], entry["in_features"]
    row_nbytes = align(columns, 32) // 32 * bits * 4
    scales_at = align(rows * row_nbytes, 64)
    bias_at = align(scales_at + 4 * rows, 64)
    mask, codes = 2**bits - 1, []
    cache: dict[bytes, bytes] = {}
    for r in range(rows):
        packed = data[r * row_nbytes : (r + 1) * row_nbytes]
        if packed not in cache:
            # 8 codes are bits bytes
            out = bytearray()
            for g in range(0, len(packed), bits):
                group = int.from_bytes(packed[g : g + bits], "little")
                out += bytes([group >> (k * bits) & mask for k in range(8)])
            cache[packed] = bytes(out[:columns])
        codes.append(cache[packed])
    scales = f32_list(data[scales_at : scales_at + 4 * rows])
    bias, dtype = None, entry["bias"]
    parts: dict[str, Any] = {"codes": (0, rows * row_nbytes), "scales": (scales_at, 4 * rows), "bias": None}
    if dtype:
        size = _BIAS_NBYTES[dtype]
        stored = data[bias_at : bias_at + size * rows]
        parts["bias"] = (bias_at, size * rows)
        if dtype == "f16":
            bias = list(struct.unpack(f"<{rows}e", stored))
        elif dtype == "bf16":
            bias = f32_list(b"".join(b"\0\0" + stored[k : k + 2] for k in range(0, len(stored), 2)))
        else:
            bias = f32_list(stored)
    indices = codes if window == bits else [windows(row, bits, window) for row in codes]
    return {"codes": codes, "indices": indices, "scales": scales, "bias": bias, "parts": parts}


def decode(doc: Doc, text: bytes, version_minor: int = 0) -> dict[str, Any]:
    places, file_nbytes = doc.layout(len(text))
    offset = {key: at for key, at, _ in places}
    header = doc.header
    books = [f32_list(doc.blobs["codebook", i]) for i in range(len(header["codebooks"]))]
    transforms = []
    for i, entry in enumerate(header["transforms"]):
        d, factor = diagonal(doc, i), None
        if ("factor", i) in doc.blobs:
            m = entry["dim"] // entry["hadamard"]
            shape = [m, m] if entry["factor"]["kind"] == "matrix" else [m]
            factor = array(shape, "f32", doc.blobs["factor", i])
        transforms.append({"diagonal": None if d is None else floats([len(d)], d), "factor": factor})
    layers = []
    for i, entry in enumerate(header["layers"]):
        part, at = layer_parts(doc, i), offset["layer", i]
        rows = len(part["scales"])
        layers.append({
            "name": entry["name"],
            "parts": {k: None if v is None else [at + v[0], v[1]] for k, v in part["parts"].items()},
            "codes": array([rows, entry["in_features"]], "u8", b"".join(part["codes"])),
            "indices": array([rows, entry["in_features"]], "u16", b"".join(map(_u16, part["indices"]))),
            "scales": floats([rows], part["scales"]),
            "bias": None if part["bias"] is None else floats([rows], part["bias"]),
        })  # fmt: skip
    return {
        "version": [1, version_minor],
        "header_nbytes": len(text),
        "header_sha256": prologue_bytes(text, file_nbytes=file_nbytes, version_minor=version_minor)[32:].hex(),
        "file_nbytes": file_nbytes,
        "header": header,
        "blobs": [{"kind": key[0], "entry": key[1], "offset": at, "nbytes": n} for key, at, n in places],
        "codebooks": [
            {"centroids": floats([len(c)], c), "uniform": is_uniform(c, e["bits"])}
            for c, e in zip(books, header["codebooks"], strict=True)
        ],
        "transforms": transforms,
        "layers": layers,
        "tensors": [
            {"name": t["name"], "data": array(t["shape"], t["dtype"], doc.blobs["tensor", i])}
            for i, t in enumerate(header["tensors"])
        ],
        "attachments": [
            {"name": a["name"], "data": array([a["nbytes"]], "u8", doc.blobs["attachment", i])}
            for i, a in enumerate(header["attachments"])
        ],
    }


def input_vector(n: int) -> list[float]:
    return [((7 * j + 3) % 17 - 8) / 8 for j in range(n)]


def sampled_rows(rows: int) -> list[int]:
    return list(range(rows)) if rows <= 16 else sorted({0, rows // 2, rows - 1})


def sampled_columns(n: int) -> list[int]:
    return list(range(n)) if n <= 640 else sorted({*range(0, n, -(-n // 256)), n - 1})


class Transform:
    """T of a header entry; T = None is the identity."""

    def __init__(self, doc: Doc, i: int) -> None:
        entry = doc.header["transforms"][i]
        self.dim, self.n = entry["dim"], entry["hadamard"]
        self.m = self.dim // self.n
        self.d = diagonal(doc, i) or [1.0] * self.dim
        kind = entry["factor"] and entry["factor"]["kind"]
        self.hartley, self.F = kind == "hartley", None
        if kind == "matrix":
            flat = f32_list(doc.blobs["factor", i])
            self.F = [flat[self.m * j : self.m * (j + 1)] for j in range(self.m)]
        elif kind == "haar":
            self.F = haar(self.m, entry["factor"]["seed"])

    def _rotate(self, v: list[float], transpose: bool) -> list[float]:
        m, n = self.m, self.n
        rows = [hadamard_apply(v[n * j : n * (j + 1)]) for j in range(m)]
        if self.hartley:
            columns = [hartley_apply([row[c] for row in rows]) for c in range(n)]
            rows = [[column[j] for column in columns] for j in range(m)]
        elif self.F is not None:
            F = list(zip(*self.F, strict=True)) if transpose else self.F
            rows = [
                [math.fsum(F[j][k] * rows[k][c] for k in range(m)) for c in range(n)]
                for j in range(m)
            ]  # fmt: skip
        return [a for row in rows for a in row]

    def activation(self, x: list[float]) -> list[float]:
        return self._rotate([a * b for a, b in zip(x, self.d, strict=True)], False)

    def row(self, w: list[float]) -> list[float]:
        return [a * b for a, b in zip(self._rotate(w, True), self.d, strict=True)]


def dequantize(doc: Doc) -> dict[str, Any]:
    """The output, and what run.py needs to compare it: d, norm(w) and norm(x * d) as members of `bounds`."""
    transforms = [Transform(doc, i) for i in range(len(doc.header["transforms"]))]
    books = [f32_list(doc.blobs["codebook", i]) for i in range(len(doc.header["codebooks"]))]
    out = []
    for i, entry in enumerate(doc.header["layers"]):
        part, book = layer_parts(doc, i), books[entry["codebook"]]
        T = None if entry["transform"] is None else transforms[entry["transform"]]
        n = entry["in_features"]
        rotated = [[f32(s * book[c]) for c in row] for row, s in zip(part["indices"], part["scales"], strict=True)]
        rows, columns = sampled_rows(len(rotated)), sampled_columns(n)
        x = input_vector(n)
        tx = x if T is None else T.activation(x)
        xd = x if T is None else [a * b for a, b in zip(x, T.d, strict=True)]
        bias = part["bias"]
        w = [rotated[r] if T is None else T.row(rotated[r]) for r in rows]
        plain = T is None or all(v == 1 for v in T.d)
        norms = [norm(rotated[r]) for r in rows]
        bound = all(v == 0 or 2.0**-100 <= v <= 2.0**100 for v in (norm(xd) * v for v in norms))  # RSV-725
        out.append({
            "name": entry["name"],
            "w_rot": floats([len(rotated), n], [v for row in rotated for v in row]),
            "w": [  # RSV-723
                [f32_hex(row[c]) for c in columns] if T is None or max(map(abs, row)) <= 2.0**127 else None for row in w
            ],
            "tx": [f32_hex(tx[c]) for c in columns],
            "y": [
                f32_hex(math.fsum(a * b for a, b in zip(tx, rotated[r], strict=True)) + (bias[r] if bias else 0.0))
                for r in rows
            ] if bound else None,
            "bounds": {
                "exact": T is None,
                "d": None if plain or T is None else [f32_hex(T.d[c]) for c in columns],
                "norm_w": [f32_hex(v) for v in norms],
                "norm_xd": f32_hex(norm(xd)),
                "bias": None if bias is None else [f32_hex(bias[r]) for r in rows],
            },
        })  # fmt: skip
    return {"layers": out}
