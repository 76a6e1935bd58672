"""The header: JSON text <-> frozen dataclasses, and its schema (SPEC section 3)."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass, field
from functools import lru_cache
from importlib import resources
from itertools import pairwise
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.limits import FREE_JSON_VALUES, JSON_VALUE_NBYTES, MAX_INTEGER, MAX_JSON_DEPTH

SCHEMA_NAME = "rsv-header-1.0.schema.json"
FEATURES: frozenset[str] = frozenset()  # the feature ids of "requires" that this reader knows
NO_DIGEST = "0" * 64  # stands in for a digest until the blob is written: the header's length is known before

_ODD_NUMBER = re.compile(rb"-|[0-9]{16}")  # without these, an integer needs no closer look
_LONE_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])")
_PIECE = re.compile(rb"(?s).{1,65536}\\*[^\\]?")  # never ends between a backslash and what it escapes
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_STEPS = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")  # of the depth, as int8
_MAX_DIGITS = len(str(-MAX_INTEGER))


@dataclass(frozen=True, slots=True)
class CodebookEntry:
    """2**bits float32 centroids."""

    bits: int
    sha256: str = NO_DIGEST


@dataclass(frozen=True, slots=True)
class DiagonalEntry:
    """kind: "signs" or "values"."""

    kind: str
    sha256: str = NO_DIGEST


@dataclass(frozen=True, slots=True)
class FactorEntry:
    """kind: "hartley" (nothing stored), "matrix" or "haar" (with a seed and a stored witness)."""

    kind: str
    seed: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class TransformEntry:
    """(F (x) H_hadamard) diag(d) of order dim."""

    dim: int
    hadamard: int
    diagonal: DiagonalEntry | None
    factor: FactorEntry | None


@dataclass(frozen=True, slots=True)
class LayerEntry:
    """One quantized matrix, or `stack` of them."""

    name: str
    in_features: int
    out_features: int
    stack: int
    codebook: int
    transform: int | None
    bias: str | None
    sha256: str = NO_DIGEST

    @property
    def rows(self) -> int:
        """Rows of the blob: stack * out_features."""
        return self.stack * self.out_features


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """An array kept as it was."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    sha256: str = NO_DIGEST


@dataclass(frozen=True, slots=True)
class AttachmentEntry:
    """A file carried along."""

    name: str
    media_type: str
    nbytes: int
    sha256: str = NO_DIGEST


@dataclass(frozen=True, slots=True)
class Header:
    """All that the JSON says, references by position."""

    codebooks: tuple[CodebookEntry, ...] = ()
    transforms: tuple[TransformEntry, ...] = ()
    layers: tuple[LayerEntry, ...] = ()
    tensors: tuple[TensorEntry, ...] = ()
    attachments: tuple[AttachmentEntry, ...] = ()
    metadata: dict[str, str] = field(default_factory=dict)
    requires: tuple[str, ...] = ()
    extensions: dict[str, Any] = field(default_factory=dict)


def parse_header(data: bytes) -> Header:
    """Decode, limit, parse and check the structure of a header, in this order (SPEC section 9).

    Raises
    ------
    RsvError
        Any code of the json and schema phases.
    """
    tree = parse_json(data)
    _check_features(tree)
    check_schema(tree)
    return _from_tree(tree)


def build_header(header: Header) -> bytes:
    """The canonical JSON text (RFC 8785) of a header."""
    return canonical_json(_to_tree(header))


def canonical_json(tree: Any) -> bytes:
    """RFC 8785 for the JSON that the format allows: no floats, keys sorted by their UTF-16 code units."""
    return json.dumps(_sorted(tree), ensure_ascii=False, separators=(",", ":")).encode()


def parse_json(data: bytes) -> Any:
    """Strict JSON without floats, limited before it is parsed.

    Raises
    ------
    RsvError
        Any code of the json phase. SPEC section 3.
    """
    try:
        text = str(data, "utf-8")
    except UnicodeDecodeError as e:
        raise RsvError("invalid_utf8", f"header byte {e.start}", e.reason) from None
    bare = _scan(data)
    odd, members = _ODD_NUMBER.search(bare) is not None, bare.count(b":")
    del bare
    parse = _Parser()
    try:
        tree = json.loads(
            text,
            parse_float=parse.number,
            parse_int=parse.number if odd else None,
            parse_constant=parse.constant,
            object_hook=parse.object,
        )
    except json.JSONDecodeError as e:
        raise RsvError("invalid_json", f"header character {e.pos}", e.msg) from None
    if parse.bad_number is not None:
        raise RsvError("json_number", "header", f"{parse.bad_number[:40]} is not an integer within +-(2^53 - 1)")
    if parse.members < members:
        del tree
        raise RsvError("json_duplicate_key", "header", f"{_duplicate(text)[:80]!r} occurs twice in one object")
    if b"\\u" in data and _LONE_SURROGATE.search(data.replace(rb"\\", b"__")):
        raise RsvError("json_lone_surrogate", "header", "an escape is half of a surrogate pair")
    return tree


def _scan(data: bytes) -> bytearray:
    """The lexical scan of SPEC section 3: limits on what is outside strings, which is returned."""
    rest = bytearray()
    depth = values = inside = 0
    limit = FREE_JSON_VALUES + len(data) // JSON_VALUE_NBYTES
    for piece in _PIECE.finditer(data):
        bare, inside = _outside_strings(piece.group(), inside)
        rest += bare
        structure = bare.translate(None, _NOT_STRUCTURE)
        levels = np.cumsum(np.frombuffer(structure.translate(_STEPS, b","), np.int8), dtype=np.int32)
        if depth + levels.max(initial=0) > MAX_JSON_DEPTH:
            raise RsvError("json_limit", "header", f"nested deeper than {MAX_JSON_DEPTH}")
        depth += int(levels[-1]) if levels.size else 0
        values += len(structure.translate(None, b"]}"))
        if values > limit:
            raise RsvError("json_limit", "header", f"more than {limit} values in {len(data)} bytes")
    return rest


def _outside_strings(piece: bytes, inside: int) -> tuple[bytes, int]:
    """A piece of JSON text, well-formed or not, without its strings; whether one is open before it, and after."""
    text = np.frombuffer(piece, np.uint8)
    toggles = (text == ord('"')).view(np.uint8)
    toggles[0] ^= inside
    if b"\\" in piece:
        edges = np.flatnonzero(np.diff(text == ord("\\"), prepend=False, append=False))
        behind = edges[1::2][(edges[1::2] - edges[0::2]) % 2 == 1]  # what follows an odd run of backslashes
        behind = behind[behind < text.size]
        behind = behind[toggles[behind] != 0]
        # such a quote is escaped within a string and opens one elsewhere: either way it lies inside
        toggles[behind] = 0
        before = np.bitwise_xor.accumulate(toggles)[behind]
        toggles[behind] = np.concatenate([[np.uint8(1)], before[:-1]]) ^ before
    within = np.bitwise_xor.accumulate(toggles)
    return bytes(text[within == 0]), int(within[-1])


class _Parser:
    """Hooks for json.loads that note what Python's parser lets pass; grammar errors come first."""

    def __init__(self) -> None:
        self.bad_number: str | None = None
        self.members = 0  # fewer than colons if a name occurs twice

    def number(self, token: str) -> int:
        if len(token) <= _MAX_DIGITS and token.lstrip("-").isdigit() and token != "-0":
            value = int(token)
            if abs(value) <= MAX_INTEGER:
                return value
        self.bad_number = self.bad_number or token
        return 0

    def constant(self, token: str) -> None:
        raise json.JSONDecodeError(f"{token} is not JSON", token, 0)

    def object(self, tree: dict[str, Any]) -> dict[str, Any]:
        self.members += len(tree)
        return tree


def _duplicate(text: str) -> str:
    """A name that an object of JSON text has twice."""
    found: list[str] = []

    def look(pairs: list[tuple[str, Any]]) -> None:
        names = sorted(name for name, _ in pairs)
        found.extend(name for name, following in pairwise(names) if name == following)

    json.loads(text, object_pairs_hook=look)
    return found[0]


def _check_features(tree: Any) -> None:
    """Before the schema: what this reader lacks may change the structure too."""
    requires = tree.get("requires") if isinstance(tree, dict) else None
    if isinstance(requires, list) and all(isinstance(feature, str) for feature in requires):
        for feature in requires:
            if feature not in FEATURES:
                raise RsvError("unsupported_feature", "/requires", f"this reader does not know {feature[:80]!r}")


def check_schema(tree: Any) -> None:
    """Hold a tree to the JSON Schema: RsvError schema_violation, with a JSON pointer."""
    try:
        _validator().validate(tree)  # stops at the first error; a list of all of them can be 400 times the header
    except ValueError as e:  # jsonschema_rs.ValidationError
        path: list[str | int] = getattr(e, "instance_path", [])
        pointer = "".join(f"/{str(part).replace('~', '~0').replace('/', '~1')}" for part in path)
        raise RsvError("schema_violation", pointer[:200] or "/", str(getattr(e, "message", e))[:200]) from None


@lru_cache(maxsize=1)
def _validator() -> Any:
    import jsonschema_rs  # 30 ms; 20 times faster than jsonschema on a large header (benchmarks/open.py)

    schema = json.loads(resources.files("rsv_format").joinpath(SCHEMA_NAME).read_text("utf-8"))
    return jsonschema_rs.validator_for(schema, mask="the value")  # which may be as long as the header


def _from_tree(tree: dict[str, Any]) -> Header:
    return Header(
        tuple(CodebookEntry(**entry) for entry in tree["codebooks"]),
        tuple(
            TransformEntry(
                entry["dim"],
                entry["hadamard"],
                entry["diagonal"] and DiagonalEntry(**entry["diagonal"]),
                entry["factor"] and FactorEntry(**entry["factor"]),
            )
            for entry in tree["transforms"]
        ),
        tuple(LayerEntry(**entry) for entry in tree["layers"]),
        tuple(TensorEntry(**{**entry, "shape": tuple(entry["shape"])}) for entry in tree["tensors"]),
        tuple(AttachmentEntry(**entry) for entry in tree["attachments"]),
        tree["metadata"],
        tuple(tree["requires"]),
        tree["extensions"],
    )


def _to_tree(node: Any) -> Any:
    """Dataclasses to plain JSON; a factor's members that its kind lacks are left out."""
    if isinstance(node, tuple):
        return [_to_tree(item) for item in node]
    if not hasattr(node, "__dataclass_fields__"):
        return node
    tree = {name: _to_tree(getattr(node, name)) for name in node.__dataclass_fields__}
    if isinstance(node, FactorEntry):
        return {name: value for name, value in tree.items() if value is not None}
    return tree


def _sorted(tree: Any) -> Any:
    if isinstance(tree, dict):
        return {key: _sorted(tree[key]) for key in sorted(tree, key=lambda key: key.encode("utf-16-be"))}
    if isinstance(tree, list | tuple):
        return [_sorted(item) for item in tree]
    return tree
