"""A file as a header tree and its blobs, and the bytes they make (SPEC sections 2 to 4 and 8)."""

from __future__ import annotations

import copy
import hashlib
import json
import struct
from collections.abc import Sequence
from typing import Any

from builder.kernel import align, f32_bytes, pack_row

MAGIC = b"\x89RSV\r\n\x1a\n"
DTYPE_NBYTES = {
    "bool": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip
_ARRAY = {
    "codebook": "codebooks", "diagonal": "transforms", "factor": "transforms", "layer": "layers",
    "tensor": "tensors", "attachment": "attachments",
}  # fmt: skip
Key = tuple[str, int]


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def canonical(tree: Any) -> bytes:
    """RFC 8785, for trees without floats (RSV-811)."""

    def ordered(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: ordered(node[key]) for key in sorted(node, key=lambda key: key.encode("utf-16-be"))}
        if isinstance(node, list) and any(isinstance(item, (dict, list)) for item in node):
            return [ordered(item) for item in node]
        return node

    return json.dumps(ordered(tree), ensure_ascii=False, separators=(",", ":")).encode()


def bias_bytes(dtype: str, values: Sequence[float]) -> bytes:
    if dtype == "f16":
        return struct.pack(f"<{len(values)}e", *values)
    if dtype == "bf16":
        return b"".join(f32_bytes([v])[2:] for v in values)
    return f32_bytes(values)


def layer_blob(codes: Sequence[Sequence[int]], bits: int, scales: bytes, bias: bytes = b"") -> bytes:
    """RSV-530. codes: one list for each row."""
    data = b"".join(pack_row(row, bits) for row in codes)
    data = data.ljust(align(len(data), 64), b"\0") + scales
    return data.ljust(align(len(data), 64), b"\0") + bias if bias else data


class Doc:
    """Content in the order of the file. Digests follow `put`; everything else may be made wrong by hand."""

    def __init__(self) -> None:
        self.header: dict[str, Any] = {
            "codebooks": [], "transforms": [], "layers": [], "tensors": [], "attachments": [],
            "metadata": {}, "requires": [], "extensions": {},
        }  # fmt: skip
        self.blobs: dict[Key, bytes] = {}

    def copy(self) -> Doc:
        return copy.deepcopy(self)

    def entry(self, key: Key) -> dict[str, Any]:
        kind, i = key
        entry = self.header[_ARRAY[kind]][i]
        return entry[kind] if kind in ("diagonal", "factor") else entry

    def put(self, key: Key, data: bytes, *, sign: bool = True) -> None:
        self.blobs[key] = data
        if sign:
            self.entry(key)["sha256"] = sha256(data)

    def codebook(self, bits: int, data: bytes) -> int:
        """Its window is that of so many centroids: `bits`, unless there are more."""
        self.header["codebooks"].append({"bits": bits, "window": (len(data) // 4).bit_length() - 1})
        i = len(self.header["codebooks"]) - 1
        self.put(("codebook", i), data)
        return i

    def transform(
        self, dim: int, hadamard: int, diagonal: tuple[str, bytes] | None = None, factor: tuple[Any, ...] | None = None
    ) -> int:
        """factor: ("hartley",), ("matrix", data) or ("haar", data, seed)."""
        entry: dict[str, Any] = {"dim": dim, "hadamard": hadamard, "diagonal": None, "factor": None}
        self.header["transforms"].append(entry)
        i = len(self.header["transforms"]) - 1
        if diagonal:
            entry["diagonal"] = {"kind": diagonal[0]}
            self.put(("diagonal", i), diagonal[1])
        if factor:
            entry["factor"] = {"kind": factor[0]}
            if factor[0] == "haar":
                entry["factor"]["seed"] = factor[2]
            if factor[0] != "hartley":
                self.put(("factor", i), factor[1])
        return i

    def layer(
        self, name: str, in_features: int, out_features: int, codebook: int, data: bytes, *,
        stack: int = 1, transform: int | None = None, bias: str | None = None,
    ) -> int:  # fmt: skip
        self.header["layers"].append({
            "name": name, "in_features": in_features, "out_features": out_features, "stack": stack,
            "codebook": codebook, "transform": transform, "bias": bias,
        })  # fmt: skip
        i = len(self.header["layers"]) - 1
        self.put(("layer", i), data)
        return i

    def tensor(self, name: str, dtype: str, shape: Sequence[int], data: bytes) -> int:
        self.header["tensors"].append({"name": name, "dtype": dtype, "shape": list(shape)})
        i = len(self.header["tensors"]) - 1
        self.put(("tensor", i), data)
        return i

    def attachment(self, name: str, media_type: str, data: bytes) -> int:
        self.header["attachments"].append({"name": name, "media_type": media_type, "nbytes": len(data)})
        i = len(self.header["attachments"]) - 1
        self.put(("attachment", i), data)
        return i

    def walk(self) -> list[Key]:
        """Walk order (RSV-501) of the blobs that are there."""
        order = ["codebook", "diagonal", "layer", "tensor", "attachment"]

        def rank(key: Key) -> tuple[int, int, int]:
            kind, i = key
            return (1, i, 1) if kind == "factor" else (order.index(kind), i, 0)

        return sorted(self.blobs, key=rank)

    def text(self) -> bytes:
        return canonical(self.header)

    def layout(self, header_nbytes: int) -> tuple[list[tuple[Key, int, int]], int]:
        """(key, offset, nbytes) of each blob, and the length of the file."""
        end, places = 64 + header_nbytes, []
        for key in self.walk():
            offset = align(end, 64)
            end = offset + len(self.blobs[key])
            places.append((key, offset, len(self.blobs[key])))
        return places, align(end, 16384)

    def render(self, text: bytes | None = None, **prologue: int) -> bytes:
        """The bytes. text: another header text; prologue: fields with another value."""
        text = self.text() if text is None else text
        places, file_nbytes = self.layout(len(text))
        data = bytearray(file_nbytes)
        data[64 : 64 + len(text)] = text
        for key, offset, nbytes in places:
            data[offset : offset + nbytes] = self.blobs[key]
        data[:64] = prologue_bytes(text, **{"file_nbytes": file_nbytes, **prologue})
        return bytes(data)


def prologue_bytes(
    text: bytes, *, file_nbytes: int, version_major: int = 1, version_minor: int = 0, flags: int = 0,
    header_nbytes: int | None = None,
) -> bytes:  # fmt: skip
    header_nbytes = len(text) if header_nbytes is None else header_nbytes
    head = struct.pack("<8sHHIQQ", MAGIC, version_major, version_minor, flags, header_nbytes, file_nbytes)
    return head + hashlib.sha256(head + text).digest()
