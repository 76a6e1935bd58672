"""Files to test with: an independent reader of headers, a builder, and Hypothesis strategies.

`expected_code` says what a file must be refused with. It follows SPEC.md and shares nothing with rsv_format: its
parser is a recursive descent over RFC 8259, its schema validator is jsonschema, its sums are Python's.
"""

from __future__ import annotations

import copy
import hashlib
import json
import math
import re
import struct
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
from hypothesis import strategies as st

import rsv_format
from rsv_format import AttachmentData, LayerData, TensorData, Transform
from rsv_format.rotation import haar, haar_witness

Tree = dict[str, Any]
SCHEMA_PATH = Path(__file__).resolve().parents[1] / "schema" / "rsv-header-1.0.schema.json"
ORACLE = jsonschema.Draft202012Validator(json.loads(SCHEMA_PATH.read_text("utf-8")))
ITEMSIZE = {
    "bool": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "u32": 4, "i32": 4, "u64": 8, "i64": 8,
    "f16": 2, "bf16": 2, "f32": 4, "f64": 8,
}  # fmt: skip
MAX_INTEGER = 2**53 - 1

# --- building files --------------------------------------------------------------------------------------------------


def align(x: int, a: int) -> int:
    return -(-x // a) * a


def sha(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def sign(text: bytes, rest: bytes = b"", file_nbytes: int | None = None, **fields: Any) -> bytes:
    """A file of a header, re-signed, and the bytes after its cells, padded to a page; fields override."""
    body = text.ljust(align(64 + len(text), 64) - 64, b"\0") + rest
    body = body.ljust(align(64 + len(body), 16384) - 64, b"\0")
    if file_nbytes is None:
        file_nbytes = 64 + len(body)
    digest = fields.pop("digest", None)
    prologue = {
        "magic": b"\x89RSV\r\n\x1a\n", "major": 1, "minor": 0, "flags": 0, "header_nbytes": len(text),
        "file_nbytes": file_nbytes,
    }  # fmt: skip
    start = struct.pack("<8sHHIQQ", *(prologue | fields).values())
    return start + (digest or hashlib.sha256(start + text).digest()) + body


def resized(file: bytes, nbytes: int) -> bytes:
    """A file cut or padded with zeros, its prologue saying so, re-signed."""
    start, header_nbytes = file[:24] + struct.pack("<Q", nbytes), struct.unpack_from("<Q", file, 16)[0]
    digest = hashlib.sha256(start + file[64 : 64 + header_nbytes]).digest()
    return (start + digest + file[64:])[:nbytes].ljust(nbytes, b"\0")


def compact(tree: Any) -> bytes:
    return json.dumps(tree, ensure_ascii=False, separators=(",", ":")).encode("utf-8", "surrogatepass")


def assemble(tree: Tree, blobs: list[bytes]) -> bytes:
    """A file of a header whose digests may be stale, and its blobs in walk order."""
    tree = copy.deepcopy(tree)
    owners = list(owners_of_blobs(tree))
    assert len(owners) == len(blobs)
    for owner, blob in zip(owners, blobs, strict=True):
        owner["sha256"] = sha(blob)
    text = compact(tree)
    data = bytearray(align(64 + len(text), 64))
    for blob in blobs:
        data = bytearray(bytes(data).ljust(align(len(data), 64), b"\0") + blob)
    return sign(text, bytes(data[align(64 + len(text), 64) :]))


def owners_of_blobs(tree: Tree) -> Iterator[Tree]:
    """The header entries that own blobs, in walk order."""
    yield from tree["codebooks"]
    for t in tree["transforms"]:
        yield from (part for part in (t["diagonal"], t["factor"]) if part and "sha256" in part)
    for table in ("layers", "tensors", "attachments"):
        yield from tree[table]


def split(file: bytes) -> tuple[Tree, list[bytes]]:
    """The header and the blobs of a sound file, in walk order."""
    nbytes = struct.unpack_from("<Q", file, 16)[0]
    tree = json.loads(file[64 : 64 + nbytes])
    end, blobs = 64 + nbytes, []
    for size in blob_sizes(tree):
        start = align(end, 64)
        end = start + size
        blobs.append(file[start:end])
    return tree, blobs


def blob_sizes(tree: Tree) -> list[int]:
    sizes = [4 * 2 ** c["window"] for c in tree["codebooks"]]
    for t in tree["transforms"]:
        m = t["dim"] // t["hadamard"]
        if t["diagonal"]:
            sizes.append(-(-t["dim"] // 8) if t["diagonal"]["kind"] == "signs" else 4 * t["dim"])
        if t["factor"] and t["factor"]["kind"] != "hartley":
            sizes.append(4 * m * m if t["factor"]["kind"] == "matrix" else 4 * m)
    for layer in tree["layers"]:
        rows = layer["stack"] * layer["out_features"]
        codes = rows * -(-layer["in_features"] // 32) * tree["codebooks"][layer["codebook"]]["bits"] * 4
        scales_end = align(codes, 64) + rows * 4
        bias = layer["bias"]
        sizes.append(align(scales_end, 64) + rows * ITEMSIZE[bias] if bias else scales_end)
    sizes += [math.prod(t["shape"]) * ITEMSIZE[t["dtype"]] for t in tree["tensors"]]
    return sizes + [a["nbytes"] for a in tree["attachments"]]


# --- what a reader must say -----------------------------------------------------------------------------------------


class Refused(Exception):
    """Its argument is the code."""


def expected_code(file: bytes, *, nbytes: int | None = None) -> str | None:
    """The code that `open` must refuse a file with, or None for one that it must accept."""
    try:
        _check(file)
    except Refused as refused:
        return str(refused)
    return None


def _check(file: bytes) -> None:
    def refuse_if(condition: bool, code: str) -> None:
        if condition:
            raise Refused(code)

    refuse_if(len(file) < 64, "file_too_short")
    magic, major, _, flags, header_nbytes, file_nbytes, digest = struct.unpack_from("<8sHHIQQ32s", file)
    refuse_if(magic != b"\x89RSV\r\n\x1a\n", "bad_magic")
    refuse_if(major != 1, "unsupported_version")
    refuse_if(flags != 0, "reserved_flags")
    refuse_if(header_nbytes > 67108864, "header_too_large")
    refuse_if(len(file) < file_nbytes, "file_truncated")
    refuse_if(len(file) > file_nbytes, "trailing_bytes")
    refuse_if(align(64 + header_nbytes, 64) > file_nbytes, "header_out_of_bounds")
    text = file[64 : 64 + header_nbytes]
    refuse_if(hashlib.sha256(file[:32] + text).digest() != digest, "header_digest_mismatch")
    refuse_if(any(file[64 + header_nbytes : align(64 + header_nbytes, 64)]), "header_padding_nonzero")
    tree = parse_strictly(text)
    requires = tree.get("requires") if isinstance(tree, dict) else None
    if isinstance(requires, list) and all(isinstance(feature, str) for feature in requires):
        refuse_if(len(requires) > 0, "unsupported_feature")
    refuse_if(not ORACLE.is_valid(tree), "schema_violation")
    for t in tree["transforms"]:
        refuse_if(t["dim"] % t["hadamard"] != 0, "transform_shape")
        refuse_if(t["dim"] == t["hadamard"] and t["factor"] is not None, "transform_shape")
        haar_order = t["dim"] // t["hadamard"] if t["factor"] and t["factor"]["kind"] == "haar" else 0
        refuse_if(haar_order > 16384, "transform_shape")
    for layer in tree["layers"]:
        refuse_if(layer["codebook"] >= len(tree["codebooks"]), "bad_reference")
        refuse_if(layer["transform"] is not None and layer["transform"] >= len(tree["transforms"]), "bad_reference")
    for layer in tree["layers"]:
        used = layer["transform"]
        refuse_if(used is not None and tree["transforms"][used]["dim"] != layer["in_features"], "dim_mismatch")
    for table, member in (("codebooks", "codebook"), ("transforms", "transform")):
        pointed = {layer[member] for layer in tree["layers"]}
        refuse_if(any(i not in pointed for i in range(len(tree[table]))), "unreferenced")
    names = [layer["name"] + end for layer in tree["layers"] for end in ("", ".weight", ".bias")]
    names += [tensor["name"] for tensor in tree["tensors"]]
    refuse_if(len(set(names)) < len(names), "duplicate_name")
    attached = [a["name"].lower() for a in tree["attachments"]]  # ASCII, by the schema
    refuse_if(len(set(attached)) < len(attached), "duplicate_name")
    for tensor in tree["tensors"]:
        lengths = [n for n in tensor["shape"] if n]
        refuse_if(math.prod(lengths) * ITEMSIZE[tensor["dtype"]] > MAX_INTEGER, "file_extent")
    end = 64 + header_nbytes
    for size in blob_sizes(tree):
        end = align(end, 64) + size
    refuse_if(end > MAX_INTEGER or align(end, 16384) != file_nbytes, "file_extent")


_SPACE = re.compile(r"[ \t\n\r]*")
_STRING = re.compile(r'"((?:[^"\\\x00-\x1f]|\\(?:["\\/bfnrt]|u[0-9a-fA-F]{4}))*)"')
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_INTEGER = re.compile(r"0|-?[1-9][0-9]{0,15}")
_ESCAPE = re.compile(r'\\(?:u([0-9a-fA-F]{4})|(["\\/bfnrt]))')
_SHORT = {'"': '"', "\\": "\\", "/": "/", "b": "\b", "f": "\f", "n": "\n", "r": "\r", "t": "\t"}


def parse_strictly(data: bytes) -> Any:
    """RSV-201 to RSV-207, or Refused."""
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        raise Refused("invalid_utf8") from None
    _scan(data)
    parser = _Parser(text)
    tree = parser.document()
    for code in ("json_number", "json_duplicate_key", "json_lone_surrogate"):
        if code in parser.faults:
            raise Refused(code)
    return tree


def _scan(data: bytes) -> None:
    depth = count = 0
    in_string = escaped = False
    for c in data:
        if in_string:
            in_string = escaped or c != 0x22
            escaped = not escaped and c == 0x5C
        elif c == 0x22:
            in_string = True
        else:
            depth += (c in b"[{") - (c in b"]}")
            count += c in b",[{"
        if depth > 32 or count > 4096 + len(data) // 16:
            raise Refused("json_limit")


class _Parser:
    def __init__(self, text: str) -> None:
        self.text, self.at = text, 0
        self.faults: set[str] = set()

    def document(self) -> Any:
        value = self.value()
        if self.at != len(self.text):
            raise Refused("invalid_json")
        return value

    def take(self, pattern: re.Pattern[str]) -> str | None:
        match = pattern.match(self.text, self.at)
        if match is None:
            return None
        self.at = match.end()
        return match[match.lastindex or 0]

    def literal(self, token: str) -> bool:
        found = self.text.startswith(token, self.at)
        self.at += len(token) if found else 0
        self.take(_SPACE) if found else None
        return found

    def need(self, token: str) -> None:
        if not self.literal(token):
            raise Refused("invalid_json")

    def value(self) -> Any:
        self.take(_SPACE)
        value = self.bare_value()
        self.take(_SPACE)
        return value

    def bare_value(self) -> Any:
        for token, constant in (("true", True), ("false", False), ("null", None)):
            if self.literal(token):
                return constant
        if self.literal("["):
            return self.array()
        if self.literal("{"):
            return self.object()
        if self.text.startswith('"', self.at):
            return self.string()
        token = self.take(_NUMBER)
        if token is None:
            raise Refused("invalid_json")
        if _INTEGER.fullmatch(token) and abs(int(token)) <= MAX_INTEGER:
            return int(token)
        self.faults.add("json_number")
        return 0

    def array(self) -> list[Any]:
        items: list[Any] = []
        if self.literal("]"):
            return items
        while True:
            items.append(self.value())
            if self.literal("]"):
                return items
            self.need(",")

    def object(self) -> Tree:
        members: Tree = {}
        if self.literal("}"):
            return members
        while True:
            self.take(_SPACE)
            name = self.string()
            self.take(_SPACE)
            self.need(":")
            if name in members:
                self.faults.add("json_duplicate_key")
            members[name] = self.value()
            if self.literal("}"):
                return members
            self.need(",")

    def string(self) -> str:
        raw = self.take(_STRING)
        if raw is None:
            raise Refused("invalid_json")
        text = _ESCAPE.sub(lambda m: chr(int(m[1], 16)) if m[1] else _SHORT[m[2]], raw)
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "surrogatepass")  # joins the pairs
        if any(0xD800 <= ord(c) <= 0xDFFF for c in text):
            self.faults.add("json_lone_surrogate")
        return text


def outcome(file: bytes, action: Callable[[bytes], Any] | None = None) -> str | None:
    """What `open` says of bytes; anything but an RsvError goes through."""
    try:
        with (action or rsv_format.open)(file):
            return None
    except rsv_format.RsvError as e:
        assert e.where and e.detail and str(e).startswith(e.code)
        return e.code


# --- sample content -------------------------------------------------------------------------------------------------


def tree_of(**members: Any) -> Tree:
    """A header with these members, the others empty."""
    empty: Tree = {name: [] for name in ("codebooks", "transforms", "layers", "tensors", "attachments", "requires")}
    return empty | {"metadata": {}, "extensions": {}} | members


def ones_and_all() -> tuple[Tree, list[bytes]]:
    """A file with one of each kind of blob but a matrix; small, and sound."""
    f4 = np.dtype("<f4")
    centroids = np.array([-1.5, -0.5, 0.5, 1.5], f4).tobytes()
    witness = haar_witness(haar(3, 7)).astype(f4).tobytes()
    rows = struct.pack("<4I", 0x6E4, 0, 0xA4F, 0).ljust(64, b"\0")
    scales = np.array([0.5, 2.0], f4).tobytes().ljust(64, b"\0")
    bias = np.array([0.25, -1.0], "<f2").tobytes()
    layer = {"in_features": 6, "out_features": 2, "stack": 1, "codebook": 0, "sha256": ""}
    tree = tree_of(
        codebooks=[{"bits": 2, "window": 2, "sha256": ""}],
        transforms=[
            {
                "dim": 6, "hadamard": 2, "diagonal": {"kind": "signs", "sha256": ""},
                "factor": {"kind": "hartley"},
            },
            {
                "dim": 6, "hadamard": 2, "diagonal": {"kind": "values", "sha256": ""},
                "factor": {"kind": "haar", "seed": 7, "sha256": ""},
            },
        ],
        layers=[
            {"name": "a", "transform": 0, "bias": "f16", **layer},
            {"name": "b", "transform": 1, "bias": None, **layer},
        ],
        tensors=[{"name": "n", "dtype": "bf16", "shape": [3], "sha256": ""}],
        attachments=[{"name": "c.json", "media_type": "application/json", "nbytes": 2, "sha256": ""}],
        metadata={"name": "tiny"},
    )  # fmt: skip
    values = np.array([1, -2, 0.5, 4, -1, 3], f4).tobytes()
    return tree, [
        centroids, bytes([0b101001]), values, witness,
        rows + scales + bias, rows + scales[:8],
        struct.pack("<3H", 0x3F80, 0xC000, 0x7FC0), b"{}",
    ]  # fmt: skip


def small_file() -> bytes:
    """As short a header as has an entry in every table."""
    tree, blobs = ones_and_all()
    return assemble(tree, blobs)


# --- strategies -----------------------------------------------------------------------------------------------------

FACTORS = (None, "hartley", "matrix", "haar")
DIAGONALS = (None, "signs", "values")
NAMES = st.text(
    st.characters(codec="utf-8", exclude_characters=[chr(c) for c in (*range(32), 127)]), min_size=1, max_size=8
)
SEEDS = st.integers(0, 2**32 - 1)


def make_codebook(rng: np.random.Generator, bits: int, window: int) -> np.ndarray:
    """Any finite float32, subnormal and huge ones too; strictly increasing where indices are codes."""
    span = 10.0 ** rng.uniform(-44, 37)
    if window > bits:
        return (rng.standard_normal(2**window).clip(-9, 9) * span).astype(np.float32)
    while True:
        centroids = np.unique((rng.standard_normal(2**bits) * span).astype(np.float32))
        if centroids.size == 2**bits and np.isfinite(centroids).all():
            return centroids
        span = 1.0


def make_diagonal(rng: np.random.Generator, kind: str | None, dim: int) -> dict[str, np.ndarray]:
    if kind == "signs":
        return {"signs": np.packbits(rng.integers(0, 2, dim, np.uint8), bitorder="little")}
    if kind == "values":
        values = np.exp(rng.uniform(-3, 3, dim)) * rng.choice([-1, 1], dim)
        return {"values": values.astype(np.float32)}
    return {}


def make_factor(kind: str | None, m: int, seed: int) -> dict[str, Any]:
    if kind is None or m == 1:
        return {}
    if kind == "hartley":
        return {"factor": kind}
    matrix = haar(m, seed)
    if kind == "matrix":
        return {"factor": kind, "stored": matrix}
    return {"factor": kind, "seed": seed, "stored": haar_witness(matrix)}


def make_transform(seed: int, m: int, n: int, diagonal: str | None = None, factor: str | None = None) -> Transform:
    rng = np.random.default_rng(seed)
    return Transform(m * n, n, **make_diagonal(rng, diagonal, m * n), **make_factor(factor, m, seed))


@st.composite
def transforms(draw: st.DrawFn) -> Transform:
    n = draw(st.sampled_from([1, 1, 2, 4, 8, 64]))
    m = draw(st.one_of(st.integers(1, 12), st.sampled_from([17, 31, 263])))
    factor = draw(st.sampled_from(FACTORS))
    if m == 263:
        n, factor = 1, "hartley"  # a prime above the order from which an FFT is used
    return make_transform(draw(SEEDS), m, n, draw(st.sampled_from(DIAGONALS)), factor)


def make_bias(rng: np.random.Generator, dtype: str | None, rows: int) -> np.ndarray | None:
    if dtype is None:
        return None
    values = rng.standard_normal(rows).astype(np.float32)
    if dtype == "bf16":
        return (values.view(np.uint32) >> 16).astype(np.uint16)
    return values.astype({"f32": np.float32, "f16": np.float16}[dtype])


def make_layer(
    seed: int, name: str, bits: int, out_features: int, transform: Transform | int, *,
    stack: int = 1, bias: str | None = None, centroids: np.ndarray | None = None, window: int | None = None,
) -> LayerData:  # fmt: skip
    """`transform` is the layer's, or its in_features."""
    rng = np.random.default_rng(seed)
    rows, in_features = stack * out_features, transform if isinstance(transform, int) else transform.dim
    codes = rng.integers(0, 2**bits, (rows, in_features), np.uint8)
    scales = (rng.standard_normal(rows) * 10.0 ** rng.uniform(-6, 3, rows)).astype(np.float32)
    scales[rng.integers(rows)] = rng.choice([0.0, -0.0, 1.0])
    return LayerData(
        name, in_features, bits, rsv_format.pack(codes, bits), scales,
        make_codebook(rng, bits, window or bits) if centroids is None else centroids,
        None if isinstance(transform, int) else transform, make_bias(rng, bias, rows), bias, stack,
    )  # fmt: skip


@st.composite
def layers(draw: st.DrawFn, name: str = "layer") -> LayerData:
    bits = draw(st.integers(1, 8))
    transform = draw(st.one_of(st.integers(1, 100), transforms()))
    stack = draw(st.sampled_from([1, 1, 1, 2, 3]))
    bias = draw(st.sampled_from([None, "f32", "f16", "bf16"]))
    window = draw(st.sampled_from([bits, bits, bits + 1, max(bits, 8), 12, 16]))
    return make_layer(
        draw(SEEDS), name, bits, draw(st.integers(1, 9)), transform, stack=stack, bias=bias, window=window
    )


@st.composite
def tensors(draw: st.DrawFn) -> TensorData:
    dtype = draw(st.sampled_from(sorted(ITEMSIZE)))
    shape = tuple(draw(st.lists(st.integers(0, 4), max_size=8)))
    rng = np.random.default_rng(draw(SEEDS))
    data = rng.integers(0, 256, math.prod(shape) * ITEMSIZE[dtype], np.uint8)  # NaN and infinities too
    if dtype == "bool":
        data &= 1
    view = {"bool": "u1", "bf16": "u2"}.get(dtype) or f"{dtype[0]}{ITEMSIZE[dtype]}"
    return TensorData(dtype, data.view(f"<{view}").reshape(shape))


@st.composite
def attachments(draw: st.DrawFn) -> AttachmentData:
    media_type = draw(st.sampled_from(["application/json", "text/plain", "a/b", "x/vnd.y+z"]))
    return AttachmentData(media_type, draw(st.binary(max_size=200)))


_JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-MAX_INTEGER, MAX_INTEGER) | st.text(max_size=6),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)
JSON_VALUES = _JSON


@st.composite
def contents(draw: st.DrawFn) -> dict[str, Any]:
    """Arguments of `write`."""
    names = draw(st.lists(NAMES, unique_by=lambda name: name.split(".")[0], max_size=6))
    cut = draw(st.integers(0, len(names)))
    chosen = [draw(layers(name)) for name in names[:cut]]
    if len(chosen) > 1 and draw(st.booleans()):  # two layers that share codebook and transform
        first = chosen[0]
        chosen[1] = make_layer(
            draw(SEEDS), names[1], first.bits, 3, first.transform or first.in_features, centroids=first.codebook
        )
    files = draw(
        st.lists(st.from_regex(r"[A-Za-z0-9_][A-Za-z0-9._-]{0,10}", fullmatch=True), unique_by=str.lower, max_size=3)
    )
    return {
        "layers": chosen,
        "tensors": {name: draw(tensors()) for name in names[cut:]},
        "attachments": {name: draw(attachments()) for name in files},
        "metadata": draw(st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=3)),
        "extensions": draw(st.dictionaries(st.text(max_size=8), JSON_VALUES, max_size=3)),
    }


def scrambled(content: dict[str, Any]) -> dict[str, Any]:
    """The same content in the opposite order, no object shared with it or within it."""
    copied = {name: copy.deepcopy(part) for name, part in content.items()}
    copied["layers"] = [copy.deepcopy(layer) for layer in reversed(content["layers"])]
    for part in ("tensors", "attachments", "metadata", "extensions"):
        copied[part] = dict(reversed(copied[part].items()))
    return copied


# --- transforms in binary64 -----------------------------------------------------------------------------------------


def exact_hadamard(n: int) -> np.ndarray:
    """RSV-703."""
    parity = np.array([[(j & k).bit_count() % 2 for k in range(n)] for j in range(n)])
    return (1 - 2 * parity) / math.sqrt(n)


def exact_hartley(m: int) -> np.ndarray:
    """RSV-705 without its rounding."""
    t = 2 * np.pi * (np.outer(np.arange(m), np.arange(m)) % m) / m
    return (np.cos(t) + np.sin(t)) / math.sqrt(m)


def exact(t: Transform) -> np.ndarray:
    """T in binary64."""
    f = exact_hartley(t.m) if t.factor == "hartley" else t.factor_matrix().astype(np.float64)
    d = np.ones(t.dim) if t.d is None else t.d.astype(np.float64)
    return np.kron(f, exact_hadamard(t.hadamard)) * d
