"""The binary layout: prologue, sizes and offsets (SPEC sections 2, 4 and 8). Only this file uses construct."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache

import construct as c

from rsv_format.errors import RsvError
from rsv_format.limits import CELL, MAX_HEADER_NBYTES, PAGE, PROLOGUE_NBYTES

MAGIC = b"\x89RSV\r\n\x1a\n"
VERSION_MAJOR = 1
VERSION_MINOR = 0

_SIGNED_NBYTES = 32  # of the prologue: all but the digest

# name -> bytes per element, of tensors; biases use the last three of the float kinds
DTYPE_NBYTES: dict[str, int] = {
    "bool": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip
BIAS_DTYPES: tuple[str, ...] = ("f32", "f16", "bf16")

_PROLOGUE = c.Struct(
    "magic" / c.Bytes(8),
    "version_major" / c.Int16ul,
    "version_minor" / c.Int16ul,
    "flags" / c.Int32ul,
    "header_nbytes" / c.Int64ul,
    "file_nbytes" / c.Int64ul,
    "header_sha256" / c.Bytes(32),
    c.Terminated,
)


_TAKEN = "which rsv quantize takes"
_OTHERS = {
    b"GGUF": f"a GGUF file, {_TAKEN}",
    b"PK\x03\x04": "a zip file, as PyTorch's checkpoints are: rsv quantize takes safetensors",
    b"version https://git-lfs": "a pointer of Git LFS: the file itself has not been fetched",
    b"\x1f\x8b": "one that gzip has packed",
    b"<!DOCTYPE": "a web page",
    b"<html": "a web page",
    b"{": "JSON",
}  # what people take for one


@dataclass(frozen=True)
class Prologue:
    """The first 64 bytes of a file."""

    header_nbytes: int
    file_nbytes: int
    header_sha256: bytes
    version_minor: int = VERSION_MINOR


def declared_nbytes(start: bytes) -> int | None:
    """How long a file is that begins so, if it is one of this format: what never ends need not be read whole."""
    if len(start) < PROLOGUE_NBYTES or not start.startswith(MAGIC):
        return None
    return int(_PROLOGUE.parse(start[:PROLOGUE_NBYTES]).file_nbytes)


def build_prologue(text: bytes, file_nbytes: int) -> bytes:
    """The 64 bytes before a header."""
    fields = {
        "magic": MAGIC,
        "version_major": VERSION_MAJOR,
        "version_minor": VERSION_MINOR,
        "flags": 0,
        "header_nbytes": len(text),
        "file_nbytes": file_nbytes,
        "header_sha256": bytes(32),
    }
    signed = header_digest(bytes(_PROLOGUE.build(fields)), text)
    return bytes(_PROLOGUE.build({**fields, "header_sha256": signed}))


def header_digest(prologue: bytes, text: bytes) -> bytes:
    """SHA-256 of the prologue up to the digest itself, then of the header."""
    return hashlib.sha256(prologue[:_SIGNED_NBYTES] + text).digest()


def _what_it_is(data: bytes) -> str:
    """A file of another kind, by its first bytes, in words."""
    for start, kind in _OTHERS.items():
        if data.startswith(start):
            return kind
    if data[8:9] == b"{" and int.from_bytes(data[:8], "little") < 2**32:
        return f"a safetensors file, {_TAKEN}"
    return f"one that begins with {data[:8].hex(' ')}"


def parse_prologue(data: bytes, actual_nbytes: int) -> Prologue:
    """Check the framing of a file of `actual_nbytes` from its first 64 bytes, in the order of SPEC section 9."""
    if len(data) < PROLOGUE_NBYTES:
        raise RsvError("file_too_short", "file", f"{len(data)} bytes; the prologue alone has {PROLOGUE_NBYTES}")
    p = _PROLOGUE.parse(bytes(data[:PROLOGUE_NBYTES]))
    if p.magic != MAGIC:
        raise RsvError("bad_magic", "magic", f"not an RSV file, but {_what_it_is(bytes(data))}")
    if p.version_major != VERSION_MAJOR:
        raise RsvError("unsupported_version", "version_major", f"{p.version_major}; this reader knows {VERSION_MAJOR}")
    if p.flags != 0:
        raise RsvError("reserved_flags", "flags", f"{p.flags:#010x}; all bits are reserved and must be 0")
    if p.header_nbytes > MAX_HEADER_NBYTES:
        raise RsvError(
            "header_too_large", "header_nbytes", f"{p.header_nbytes} bytes, the limit is {MAX_HEADER_NBYTES}"
        )
    if actual_nbytes < p.file_nbytes:
        raise RsvError("file_truncated", "file_nbytes", f"{actual_nbytes} of {p.file_nbytes} bytes are there")
    if actual_nbytes > p.file_nbytes:
        raise RsvError("trailing_bytes", "file_nbytes", f"{actual_nbytes - p.file_nbytes} bytes after the end")
    if blobs_start(p.header_nbytes) > p.file_nbytes:
        raise RsvError("header_out_of_bounds", "header_nbytes", f"{p.header_nbytes} bytes do not fit the file")
    return Prologue(p.header_nbytes, p.file_nbytes, p.header_sha256, p.version_minor)


def align(offset: int, to: int) -> int:
    """The smallest multiple of `to` that is at least `offset`."""
    return -(-offset // to) * to


def blobs_start(header_nbytes: int) -> int:
    """Offset of the first cell after the header."""
    return align(PROLOGUE_NBYTES + header_nbytes, CELL)


def place(header_nbytes: int, sizes: Iterable[int]) -> tuple[list[int], int]:
    """Offsets of blobs of these sizes, in walk order, and the length of the file."""
    offsets = []
    end = PROLOGUE_NBYTES + header_nbytes
    for nbytes in sizes:
        offsets.append(align(end, CELL))
        end = offsets[-1] + nbytes
    return offsets, align(align(end, CELL), PAGE)


def row_words(in_features: int, bits: int) -> int:
    """uint32 words in a row of codes: 32 of them are `bits` words."""
    return -(-in_features // 32) * bits


@dataclass(frozen=True)
class LayerLayout:
    """Sizes and offsets inside a layer's blob, in bytes from its start."""

    rows: int
    row_words: int
    codes_nbytes: int
    scales_offset: int
    scales_nbytes: int
    bias_offset: int
    bias_nbytes: int
    nbytes: int


@lru_cache(maxsize=1024)
def layer_layout(in_features: int, rows: int, bits: int, bias: str | None) -> LayerLayout:
    """Where codes, scales and bias of a layer lie: each starts on a cell, the blob ends with the last."""
    words = row_words(in_features, bits)
    codes_nbytes = rows * words * 4
    scales_offset = align(codes_nbytes, CELL)
    scales_nbytes = rows * 4
    scales_end = scales_offset + scales_nbytes
    bias_offset = align(scales_end, CELL)
    bias_nbytes = rows * DTYPE_NBYTES[bias] if bias else 0
    return LayerLayout(
        rows, words, codes_nbytes, scales_offset, scales_nbytes, bias_offset, bias_nbytes,
        bias_offset + bias_nbytes if bias else scales_end,
    )  # fmt: skip
