"""The header: JSON text <-> frozen structs, which say what each member may be (SPEC section 3)."""

from __future__ import annotations

import json
import re
from itertools import pairwise
from typing import Annotated, Any, ClassVar

import numpy as np
from msgspec import Meta, Struct, ValidationError, convert
from msgspec.structs import replace as replace  # of members of an entry

from rsv_format.errors import RsvError
from rsv_format.layout import BIAS_DTYPES, DTYPE_NBYTES
from rsv_format.limits import (
    FREE_JSON_VALUES,
    JSON_VALUE_NBYTES,
    MAX_ATTACHMENT_NAME,
    MAX_BITS,
    MAX_IN_FEATURES,
    MAX_INTEGER,
    MAX_JSON_DEPTH,
    MAX_NAME,
    MAX_OUT_FEATURES,
    MAX_RANK,
    MAX_STACK,
    MAX_WINDOW,
)

FEATURES: frozenset[str] = frozenset()  # the feature ids of "requires" that this reader knows
NO_DIGEST = "0" * 64  # stands in for a digest until the blob is written: the header's length is known before

_ODD_NUMBER = re.compile(rb"-|[0-9]{16}")  # without these, an integer needs no closer look
_LONE_SURROGATE = re.compile(rb"\\u[dD](?:[89abAB]..(?!\\u[dD][c-fC-F])|(?<!\\u[dD][89abAB]..\\u[dD])[c-fC-F])")
_PIECE = re.compile(rb"(?s).{1,65536}\\*[^\\]?")  # never ends between a backslash and what it escapes
_NOT_STRUCTURE = bytes(set(range(256)) - set(b"[]{},"))
_STEPS = bytes.maketrans(b"[{]}", b"\1\1\xff\xff")  # of the depth, as int8
_WAY = re.compile(r" - at `\$((?:\.[a-z_0-9]+|\[[0-9]+\]|\[\.\.\.\])+)`$")  # to a value, as msgspec writes it
_MAX_DIGITS = len(str(-MAX_INTEGER))

_TOKEN = r"[A-Za-z0-9][A-Za-z0-9!#$&^_.+-]*"  # of a media type, RFC 6838

_Sha256 = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
_Index = Annotated[int, Meta(ge=0, le=MAX_INTEGER)]
_Order = Annotated[int, Meta(ge=1, le=MAX_IN_FEATURES)]  # of a transform, hence the length of a row
_Name = Annotated[str, Meta(min_length=1, max_length=MAX_NAME, pattern=r"^[^\x00-\x1f\x7f]*\Z")]
_FileName = Annotated[str, Meta(max_length=MAX_ATTACHMENT_NAME, pattern=r"^[A-Za-z0-9_][A-Za-z0-9._-]*\Z")]
_MediaType = Annotated[str, Meta(max_length=255, pattern=rf"^{_TOKEN}/{_TOKEN}\Z")]
_Dtype = Annotated[str, Meta(pattern=rf"^({'|'.join(DTYPE_NBYTES)})\Z")]
_BiasDtype = Annotated[str, Meta(pattern=rf"^({'|'.join(BIAS_DTYPES)})\Z")]


class _Entry(Struct, frozen=True, forbid_unknown_fields=True, gc=False):
    """An object of the header: its members are all required, in the order of SPEC section 3."""


class _Tagged(_Entry, frozen=True, tag_field="kind"):
    """An object that a member `kind` tells from others in its place."""

    @property
    def kind(self) -> str:
        """The member's value."""
        return str(self.__struct_config__.tag)


class CodebookEntry(_Entry, frozen=True):
    """2**window float32 centroids, for codes of so many bits."""

    bits: Annotated[int, Meta(ge=1, le=MAX_BITS)]
    window: Annotated[int, Meta(ge=1, le=MAX_WINDOW)]  # bits of an index, at least those of a code: see header_of
    sha256: _Sha256


class SignsEntry(_Tagged, frozen=True, tag="signs"):
    """A diagonal of 1 and -1."""

    sha256: _Sha256


class ValuesEntry(_Tagged, frozen=True, tag="values"):
    """A diagonal of any numbers but zero."""

    sha256: _Sha256


class HartleyEntry(_Tagged, frozen=True, tag="hartley"):
    """The Hartley matrix as a factor: nothing is stored."""

    seed: ClassVar[None] = None
    sha256: ClassVar[None] = None


class MatrixEntry(_Tagged, frozen=True, tag="matrix"):
    """A factor that is stored."""

    seed: ClassVar[None] = None
    sha256: _Sha256


class HaarEntry(_Tagged, frozen=True, tag="haar"):
    """A factor that is derived from a seed, with a stored witness."""

    seed: _Index
    sha256: _Sha256


Diagonal = SignsEntry | ValuesEntry
Factor = HartleyEntry | MatrixEntry | HaarEntry


class TransformEntry(_Entry, frozen=True):
    """(F (x) H_hadamard) diag(d) of order dim."""

    dim: _Order
    hadamard: _Order  # a power of two: see header_of
    diagonal: Diagonal | None
    factor: Factor | None


class LayerEntry(_Entry, frozen=True):
    """One quantized matrix, or `stack` of them."""

    name: _Name
    in_features: _Order
    out_features: Annotated[int, Meta(ge=1, le=MAX_OUT_FEATURES)]
    stack: Annotated[int, Meta(ge=1, le=MAX_STACK)]
    codebook: _Index
    transform: _Index | None
    bias: _BiasDtype | None
    sha256: _Sha256

    @property
    def rows(self) -> int:
        """Rows of the blob: stack * out_features."""
        return self.stack * self.out_features


class TensorEntry(_Entry, frozen=True):
    """An array kept as it was."""

    name: _Name
    dtype: _Dtype
    shape: Annotated[tuple[_Index, ...], Meta(max_length=MAX_RANK)]
    sha256: _Sha256


class AttachmentEntry(_Entry, frozen=True):
    """A file carried along."""

    name: _FileName
    media_type: _MediaType
    nbytes: _Index
    sha256: _Sha256


class Header(_Entry, frozen=True):
    """All that the JSON says, references by position."""

    codebooks: tuple[CodebookEntry, ...]
    transforms: tuple[TransformEntry, ...]
    layers: tuple[LayerEntry, ...]
    tensors: tuple[TensorEntry, ...]
    attachments: tuple[AttachmentEntry, ...]
    metadata: dict[str, str]
    requires: tuple[str, ...]
    extensions: dict[str, Any]


def parse_header(data: bytes) -> Header:
    """Decode, limit, parse and check the structure of a header, in this order (SPEC section 9).

    Raises
    ------
    RsvError
        Any code of the json and schema phases.
    """
    tree = parse_json(data)
    _check_features(tree)
    return header_of(tree)


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


def header_of(tree: Any) -> Header:
    """The header that a JSON value is.

    Raises
    ------
    RsvError
        schema_violation, with a JSON pointer to what the schema does not allow, or to what holds it.
    """
    unknown = tree.keys() - set(Header.__struct_fields__) if isinstance(tree, dict) else set()
    if unknown:  # msgspec tells no place at the root, and the name could pose as one
        raise RsvError("schema_violation", "/", f"there is no member {min(unknown)[:80]!r}")
    try:
        header = convert(tree, Header)
    except ValidationError as e:
        what, way = str(e), _WAY.search(str(e))
        where = "" if way is None else re.sub(r"[.[]", "/", way[1].replace("[...]", "").replace("]", ""))
        if where == "/metadata" and isinstance(tree["metadata"], dict):  # nor does it tell names there
            wrong = [name for name, value in tree["metadata"].items() if not isinstance(value, str)]
            where += "".join("/" + name[:100].replace("~", "~0").replace("/", "~1") for name in wrong[:1])
        raise RsvError("schema_violation", where or "/", what[: way.start() if way else None][:200]) from None
    for i, codebook in enumerate(header.codebooks):
        if codebook.window < codebook.bits:
            raise RsvError("schema_violation", f"/codebooks/{i}/window", f"less than a code, {codebook.bits}")
    for i, transform in enumerate(header.transforms):
        if transform.hadamard & (transform.hadamard - 1):
            raise RsvError("schema_violation", f"/transforms/{i}/hadamard", "not a power of two")
    if len(set(header.requires)) < len(header.requires):
        raise RsvError("schema_violation", "/requires", "a feature is there twice")
    return header


def _to_tree(node: Any) -> Any:
    """Structs to plain JSON."""
    if isinstance(node, tuple):
        return [_to_tree(item) for item in node]
    if not isinstance(node, Struct):
        return node
    kind = {"kind": node.kind} if isinstance(node, _Tagged) else {}
    return kind | {name: _to_tree(getattr(node, name)) for name in node.__struct_fields__}


def _sorted(tree: Any) -> Any:
    if isinstance(tree, dict):
        plain = all(map(str.isascii, tree))  # then all orders are one
        return {key: _sorted(tree[key]) for key in sorted(tree, key=None if plain else _utf16)}
    if isinstance(tree, list | tuple):
        return [_sorted(item) for item in tree]
    return tree


def _utf16(text: str) -> bytes:
    return text.encode("utf-16-be")
