"""Files from trees: sizes by SPEC section 4 as far as a tree makes sense, digests and lengths put right."""

from __future__ import annotations

import hashlib
import math
import struct
from collections.abc import Iterator
from typing import Any

from fuzz.jsontext import Blob, Members, Style, parse

MAX_BLOB_NBYTES = 1 << 18  # a blob that claims more keeps the bytes it has
MAGIC = b"\x89RSV\r\n\x1a\n"
ITEMSIZE = {
    "bool": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip


def align(x: int, a: int) -> int:
    return -(-x // a) * a


def prologue(text: bytes, file_nbytes: int, /, **fields: Any) -> bytes:
    right = {
        "magic": MAGIC, "major": 1, "minor": 0, "flags": 0, "header_nbytes": len(text), "file_nbytes": file_nbytes,
    }  # fmt: skip
    digest = fields.pop("digest", None)
    start = struct.pack("<8sHHIQQ", *(right | fields).values())
    return start + (digest or hashlib.sha256(start + text).digest())


def sign(tree: Any, style: Style | None = None, text: bytes | None = None) -> bytes:
    """The file of a tree; `text` takes the place of its header."""
    blobs = [fit(blob, size) for blob, size in owned(tree)]
    text = (style or Style()).dump(tree) if text is None else text
    body = bytearray(align(64 + len(text), 64) - 64)
    body[: len(text)] = text
    end = 64 + len(text)
    for blob in blobs:
        body.extend(bytes(align(end, 64) - 64 - len(body)) + blob.data)
        end = 64 + len(body)
    body.extend(bytes(max(0, align(end, 16384) - 64 - len(body))))
    return prologue(text, 64 + len(body)) + bytes(body)


def fit(blob: Blob, size: int | None) -> Blob:
    """The blob itself, at the size that its entry implies."""
    if size is not None and size <= MAX_BLOB_NBYTES:
        blob.data = blob.data[:size].ljust(size, b"\0")
    return blob


def split(file: bytes) -> Any:
    """The tree of a sound file, its blobs in the place of their digests."""
    nbytes = struct.unpack_from("<Q", file, 16)[0]
    tree = parse(file[64 : 64 + nbytes])
    end = 64 + nbytes
    for entry, size in _entries(tree):
        start = align(end, 64)
        end = start + (size or 0)
        entry.set("sha256", Blob(file[start:end]))
    return tree


def owned(tree: Any) -> Iterator[tuple[Blob, int | None]]:
    """The blobs of a tree in walk order, with the sizes they must have; None where that is not known."""
    for entry, size in _entries(tree):
        blob = entry.get("sha256")
        if isinstance(blob, Blob):
            yield blob, size


def _entries(tree: Any) -> Iterator[tuple[Members, int | None]]:
    for entry in _table(tree, "codebooks"):
        window = entry.get("window")
        yield entry, 4 * 2**window if _is_size(window) and window <= 20 else None
    for entry in _table(tree, "transforms"):
        dim, n = entry.get("dim"), entry.get("hadamard")
        known = _is_size(dim) and _is_size(n) and n > 0
        for part in (entry.get("diagonal"), entry.get("factor")):
            if isinstance(part, Members) and part.get("kind") != "hartley":
                yield part, _part_nbytes(part.get("kind"), dim, dim // n) if known else None
    for entry in _table(tree, "layers"):
        yield entry, _layer_nbytes(entry, _table(tree, "codebooks"))
    for entry in _table(tree, "tensors"):
        shape, size = entry.get("shape"), ITEMSIZE.get(str(entry.get("dtype")))
        known = isinstance(shape, list) and all(map(_is_size, shape)) and size is not None
        yield entry, math.prod(shape) * size if known else None
    for entry in _table(tree, "attachments"):
        nbytes = entry.get("nbytes")
        yield entry, nbytes if _is_size(nbytes) else None


def _table(tree: Any, name: str) -> list[Members]:
    table = tree.get(name) if isinstance(tree, Members) else None
    return [entry for entry in table if isinstance(entry, Members)] if type(table) is list else []


def _is_size(value: Any) -> bool:
    return type(value) is int and value >= 0


def _part_nbytes(kind: Any, dim: int, m: int) -> int | None:
    return {"signs": -(-dim // 8), "values": 4 * dim, "matrix": 4 * m * m, "haar": 4 * m}.get(str(kind))


def _layer_nbytes(entry: Members, codebooks: list[Members]) -> int | None:
    lengths = [entry.get(name) for name in ("in_features", "out_features", "stack", "codebook")]
    if not all(map(_is_size, lengths)) or lengths[3] >= len(codebooks):
        return None
    bits = codebooks[lengths[3]].get("bits")
    if not _is_size(bits):
        return None
    rows = lengths[1] * lengths[2]
    scales_end = align(rows * -(-lengths[0] // 32) * bits * 4, 64) + rows * 4
    bias = entry.get("bias")
    return align(scales_end, 64) + rows * ITEMSIZE.get(str(bias), 0) if bias else scales_end
