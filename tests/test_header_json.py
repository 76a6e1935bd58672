"""The json and schema phases: traps of Python's parser, limits, and oracles for canonical text and the schema."""

from __future__ import annotations

import json
import tracemalloc
from typing import Any

import numpy as np
import pytest
import rfc8785
from hypothesis import given
from hypothesis import strategies as st
from strategies import (
    ITEMSIZE,
    JSON_VALUES,
    MAX_INTEGER,
    ORACLE,
    Refused,
    Tree,
    compact,
    expected_code,
    ones_and_all,
    outcome,
    parse_strictly,
    sign,
    tree_of,
)

import rsv_format
from rsv_format import RsvError
from rsv_format.header import (
    NO_DIGEST,
    CodebookEntry,
    HaarEntry,
    HartleyEntry,
    Header,
    LayerEntry,
    MatrixEntry,
    TransformEntry,
    _outside_strings,
    build_header,
    canonical_json,
    header_of,
    parse_header,
    parse_json,
)
from rsv_format.limits import JSON_VALUE_NBYTES

EMPTY = compact(tree_of())


def code_of(text: bytes) -> str | None:
    """What `open` says of a header, re-signed; the independent reader agrees."""
    file = sign(text)
    code = outcome(file)
    assert code == expected_code(file)
    return code


def inside(value: bytes) -> bytes:
    """A header that holds a JSON text in an extension, where any value may be."""
    return EMPTY.replace(b'"extensions":{}', b'"extensions":{"x":' + value + b"}")


def test_the_frame_is_sound() -> None:
    assert code_of(EMPTY) is None and code_of(inside(b'[1,"a",{"b":null}]')) is None


@pytest.mark.parametrize(
    "value",
    [
        b"", b"nul", b"True", b"NaN", b"Infinity", b"-Infinity", b"-", b"01", b"-01", b"+1", b".5", b"1.", b"1e",
        b"1e+", b"0x1", b"1_0", b"'a'", b'"a', b'"\\', b'"\\x"', b'"\\u12"', b'"\\u12g4"', b'"\\u 123"', b'"\\u+123"',
        b'"\\u0x12"', b'"\\U00000041"', b'"\x00"', b'"\n"', b'"\x1f"', b"[1,]", b"[,1]", b"[1 2]", b"[", b"]",
        b'{"a"}', b'{"a":}', b'{"a":1,}', b"{a:1}", b"{1:2}", b'{"a":1 "b":2}', b"[1}", b"1 2", b"1,", b"// x\n1",
        b"/* */1", b"\x0b1", b"\x0c1", b"\xc2\xa01", b"\xe2\x80\xa81", b"\xef\xbb\xbf1", b"\xd9\xa1", b"\xef\xbc\x91",
        b"undefined", b"nullx", b"1a", b"--1", b"- 1", b"1 .5", b"1E1.0",
    ],
)  # fmt: skip
def test_grammar(value: bytes) -> None:
    assert code_of(inside(value)) == "invalid_json"


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b" ",
        b"\xef\xbb\xbf" + EMPTY,
        EMPTY + b",",
        EMPTY + EMPTY,
        EMPTY + b"\0",
        b"\0" + EMPTY,
        EMPTY[:-1],
        EMPTY[1:],
    ],
)
def test_one_text_and_nothing_else(text: bytes) -> None:
    assert code_of(text) == "invalid_json"


@pytest.mark.parametrize("space", [b" ", b"\t", b"\n", b"\r", b" \r\n\t "])
def test_space_around_tokens(space: bytes) -> None:
    """RSV-209."""
    text = EMPTY.replace(b":", space + b":" + space).replace(b",", space + b"," + space)
    assert code_of(space + text + space) is None


@pytest.mark.parametrize(
    "bad",
    [
        b"\x80", b"\xff", b"\xc0\x80", b"\xc1\xbf", b"\xe0\x80\x80", b"\xed\xa0\x80", b"\xed\xbf\xbf",
        b"\xf4\x90\x80\x80",
        b"\xf8\x88\x80\x80\x80", b"\xe2\x82", b"\xf0\x9f\x98",
    ],
)  # fmt: skip
def test_utf8(bad: bytes) -> None:
    assert code_of(inside(b'"' + bad + b'"')) == "invalid_utf8"
    assert code_of(EMPTY + bad) == "invalid_utf8"
    assert code_of(b"[" * 40 + bad) == "invalid_utf8"  # RSV-201 comes before RSV-202


@pytest.mark.parametrize("good", ["é", "\u2028", "\uffff", "\U0001f600", "\U0010ffff", "\x7f", "\ufeff"])
def test_any_code_point_may_stand_in_a_string(good: str) -> None:
    assert code_of(inside(f'"{good}"'.encode())) is None


@pytest.mark.parametrize(
    "token",
    [
        b"-0", b"0.0", b"1.0", b"-1.5", b"1e0", b"1E2", b"1e-1", b"1e400", b"-1e400", b"1e99999", b"9007199254740992",
        b"-9007199254740992", b"9999999999999999", b"10000000000000000", b"1" + b"0" * 400, b"9" * 5000,
        b"-" + b"9" * 5000,
        b"0." + b"0" * 5000, b"0e0", b"-0.0", b"-0e1", b"18446744073709551616",
    ],
)  # fmt: skip
def test_numbers_that_are_no_integers_of_53_bits(token: bytes) -> None:
    assert code_of(inside(token)) == "json_number"
    assert code_of(inside(b'[{"y":[' + token + b"]}]")) == "json_number"
    assert code_of(inside(token + b",")) == "invalid_json"  # RSV-204 comes before RSV-205


@pytest.mark.parametrize("token", [b"0", b"1", b"-1", b"9007199254740991", b"-9007199254740991", b"999999999999999"])
def test_numbers_that_are(token: bytes) -> None:
    with rsv_format.open(sign(inside(token))) as file:
        assert file.header.extensions == {"x": int(token)}


def test_a_million_digits_are_refused_without_being_read_as_a_number() -> None:
    assert outcome(sign(inside(b"9" * 10**6))) == "json_number"


@pytest.mark.parametrize(
    "value",
    [
        b'{"a":1,"a":1}', b'{"a":1,"b":2,"a":3}', b'{"a":1,"\\u0061":2}', b'{"":1,"":2}', b'[[{"a":{"k":1,"k":1}}]]',
        b'{"\\/":1,"/":2}', b'{"\\ud83d\\ude00":1,"\xf0\x9f\x98\x80":2}', b'{"\\ud800":1,"\\ud800":2}',
        b'{"a":"\\ud800","a":1}', b'{"a":{"b":1,"b":2},"a":0}',
    ],
)  # fmt: skip
def test_duplicate_names(value: bytes) -> None:
    assert code_of(inside(value)) == "json_duplicate_key"


def test_a_duplicate_among_the_headers_own_members() -> None:
    assert code_of(EMPTY[:-1] + b',"layers":[]}') == "json_duplicate_key"
    assert code_of(EMPTY[:-1] + b',"layers":[-0]}') == "json_number"  # RSV-205 comes first
    assert code_of(b'{"requires":["x"],"requires":["x"]}') == "json_duplicate_key"


@pytest.mark.parametrize("value", [b'{"a":1,"A":2}', b'{"a":{"a":1}}', b'["a","a"]', '{"é":1,"e\u0301":2}'.encode()])
def test_names_that_differ(value: bytes) -> None:
    """RSV-208: no folding, no normalization."""
    assert code_of(inside(value)) is None


@pytest.mark.parametrize(
    "value",
    [
        b'"\\ud800"', b'"\\udfff"', b'"\\uDC00"', b'"\\ud83d\\ud83d"', b'"\\ude00\\ud83d"', b'"\\ud83d \\ude00"',
        b'"\\ud83d\\n\\ude00"', b'["a",{"b":"\\udbff"}]', b'{"\\ud800":1}', b'{"a":{"\\udc00":0}}', b'"\\ud83dx"',
        b'"\\ud83d\\u0041"', b'"\\\\\\ud800"',
    ],
)  # fmt: skip
def test_lone_surrogates(value: bytes) -> None:
    assert code_of(inside(value)) == "json_lone_surrogate"


@pytest.mark.parametrize("value", [b'"\\ud83d\\ude00"', b'"\\\\ud800"', b'"\\uD834\\udd1e"', b'"\\ud7ff\\ue000"'])
def test_surrogates_in_pairs_and_what_only_looks_like_one(value: bytes) -> None:
    assert code_of(inside(value)) is None


def test_a_surrogate_beside_a_schema_violation() -> None:
    assert code_of(EMPTY.replace(b'"metadata":{}', b'"metadata":{"a":"\\ud800"},"z":0')) == "json_lone_surrogate"


def nested(depth: int, opening: bytes = b"[", closing: bytes = b"]") -> bytes:
    return opening * depth + closing * depth


def test_depth() -> None:
    """RSV-202; an extension's value lies two deep."""
    assert code_of(inside(nested(30))) is None
    assert code_of(inside(nested(31))) == "json_limit"
    assert code_of(inside(b'{"a":' * 30 + b"0" + b"}" * 30)) is None
    assert code_of(inside(b'{"a":' * 31 + b"0" + b"}" * 31)) == "json_limit"
    assert code_of(b"[" * 33) == "json_limit" and code_of(b"[" * 32) == "invalid_json"


@pytest.mark.parametrize("opening", [b"[", b"{", b'{"a":', b"[[],", b'[["]",', b"][" + b" " * 30])
def test_deep_nesting_does_not_reach_the_parser(opening: bytes) -> None:
    wanted = "invalid_json" if opening[:2] == b"][" else "json_limit"
    assert outcome(sign(opening * 100_000)) == wanted
    assert outcome(sign(inside(opening * 100_000))) == wanted


def test_brackets_in_strings_do_not_count() -> None:
    for string in (b'"' + b"[" * 100 + b'"', b'"\\"' + b"[{" * 50 + b'"', b'"\\\\","' + b"[" * 99 + b'"'):
        assert code_of(inside(b"[" + string + b"]")) is None
    assert code_of(inside(b'"\\\\"' + b"[" * 40)) == "json_limit"  # the string ends before them
    assert code_of(b'"' + b"[" * 99) == "invalid_json"  # the last string never ends


def counted(text: bytes) -> int:
    """What RSV-203 counts, of text that has none of it in strings."""
    return sum(text.count(c) for c in b",[{")


def full(unit: bytes, nbytes: int, count: int) -> bytes:
    """A header of this length in which RSV-203 counts this much, most of it in repetitions of the unit."""
    start, end = inside(b'[*"%"]').split(b"*")
    times, rest = divmod(count - counted(start + end), counted(unit))
    text = start + unit * times + b"0," * rest + end
    return text.replace(b"%", b"a" * (nbytes - len(text) + 1))


@pytest.mark.parametrize("unit", [b"0,", b'"",', b"[],", b"{},", b'{"":0},', b'[{"a":[]}],'])
@pytest.mark.parametrize("nbytes", [20480, 20495, 200_007])
def test_the_number_of_values(unit: bytes, nbytes: int) -> None:
    """RSV-203; the length is that of all the header in bytes."""
    most = 4096 + nbytes // 16
    text, more = full(unit, nbytes, most), full(unit, nbytes, most + 1)
    assert len(text) == len(more) == nbytes and counted(text) == counted(more) - 1 == most
    assert code_of(text) is None and code_of(more) == "json_limit"
    missing = 16 - nbytes % 16
    assert code_of(more + b" " * (missing - 1)) == "json_limit" and code_of(more + b" " * missing) is None
    if nbytes % 16 == 0:
        assert code_of(text[:-2] + b"}") == "json_limit"  # a byte less, before the brace is missed


def test_what_the_format_itself_needs_is_within_the_limit() -> None:
    """Bytes of the header for each value, at the least; 20,000 layers fit by far."""
    tree = full_tree()
    layer, tensor = compact(tree["layers"][0]), compact(tree["tensors"][0] | {"name": "n" * 20, "shape": [64] * 4})
    for entry in (layer, tensor, *map(compact, tree["codebooks"] + tree["attachments"])):
        assert len(entry) + 1 >= JSON_VALUE_NBYTES * (counted(entry) + 1)
    transforms = tuple(TransformEntry(dim, 1, None, HartleyEntry()) for dim in range(2, 20_002))
    layers = tuple(LayerEntry(f"{i:x}", t.dim, 1, 1, 0, i, None, NO_DIGEST) for i, t in enumerate(transforms))
    parse_header(build_header(Header((CodebookEntry(1, 1, NO_DIGEST),), transforms, layers, (), (), {}, (), {})))


LETTERS = b'[]{},:"\\u0d8- a1e.\xc3'


@given(st.text(alphabet='"\\[{,]}x ', max_size=80))
def test_what_lies_outside_strings(text: str) -> None:
    """The scan of RSV-202 byte by byte, on text that need not be JSON, whole and in two pieces."""
    wanted, in_string, escaped = "", False, False
    for c in text:
        if in_string:
            in_string, escaped = escaped or c != '"', not escaped and c == "\\"
        elif c == '"':
            in_string = True
        else:
            wanted += c
    data = text.encode()
    for stop in range(1, len(data) + 1):
        if not data[:stop].endswith(b"\\"):
            first, inside = _outside_strings(data[:stop], 0)
            second, _ = _outside_strings(data[stop:], inside) if stop < len(data) else (b"", 0)
            assert (first + second).decode().replace('"', "") == wanted


@given(st.binary(max_size=60).map(lambda data: bytes(LETTERS[b % len(LETTERS)] for b in data)))
def test_json_like_noise(text: bytes) -> None:
    """Against the independent parser, with few enough letters that much of it is JSON."""
    try:
        wanted: Any = parse_strictly(text)
    except Refused as refused:
        with pytest.raises(RsvError) as e:
            parse_json(text)
        assert e.value.code == str(refused)
    else:
        assert same(parse_json(text), wanted)


def same(a: Any, b: Any) -> bool:
    """Equal, types too: True is not 1."""
    return json.dumps(a, sort_keys=True) == json.dumps(b, sort_keys=True)


@given(JSON_VALUES, st.booleans(), st.sampled_from([None, 1]))
def test_any_json_is_read_as_python_reads_it(value: Any, ascii_only: bool, indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=ascii_only, indent=indent).encode("utf-8", "surrogatepass")
    try:
        wanted = parse_strictly(text)
    except Refused as refused:
        with pytest.raises(RsvError) as e:
            parse_json(text)
        assert e.value.code == str(refused)
    else:
        assert same(wanted, value) and same(parse_json(text), value)


@given(JSON_VALUES)
def test_canonical_json_is_rfc8785(value: Any) -> None:
    assert canonical_json(value) == rfc8785.dumps(value)


def test_canonical_order_is_that_of_utf16() -> None:
    tree = {"\U0001f600": 1, "\ufb33": 2, "z": 3, "": 4, "\x7f": '\x00\x1f\x7f\u2028\\"/\b\f\n\r\t', "é": [], "aa": {}}
    text = canonical_json({"x": [tree]})
    assert text == rfc8785.dumps({"x": [tree]})
    assert text.index("\U0001f600".encode()) < text.index("\ufb33".encode())


# --- schema ---------------------------------------------------------------------------------------------------------


def full_tree() -> Tree:
    """Valid against the schema, with every kind of entry."""
    tree, _ = ones_and_all()
    for table in ("codebooks", "layers", "tensors", "attachments"):
        for entry in tree[table]:
            entry["sha256"] = "0" * 64
    for t in tree["transforms"]:
        for part in (t["diagonal"], t["factor"]):
            if "sha256" in part:
                part["sha256"] = "f" * 64
    tree["transforms"].append(
        {"dim": 4, "hadamard": 1, "diagonal": None, "factor": {"kind": "matrix", "sha256": "a" * 64}}
    )
    tree["extensions"] = {"x": [1, {"y": None}]}
    return tree


def agree(tree: Any) -> bool:
    """Whether a tree is valid, on which both validators agree."""
    try:
        header_of(tree)
        valid = True
    except RsvError as e:
        assert e.code == "schema_violation" and e.where.startswith("/")
        valid = False
    assert valid == ORACLE.is_valid(tree), tree
    return valid


def places(node: Any, path: tuple[Any, ...] = ()) -> list[tuple[Any, ...]]:
    """The paths of all nodes below this one."""
    found = [path] if path else []
    children = node.items() if isinstance(node, dict) else enumerate(node) if isinstance(node, list) else ()
    return found + [place for key, child in children for place in places(child, (*path, key))]


def replaced(tree: Any, path: tuple[Any, ...], value: Any) -> Any:
    """A copy with the value at a path; the ellipsis deletes what is there."""
    copied = json.loads(json.dumps(tree))
    node = copied
    for key in path[:-1]:
        node = node[key]
    if value is ...:
        del node[path[-1]]
    else:
        node[path[-1]] = value
    return copied


ODD_VALUES = [
    ..., None, True, False, 0, 1, 2, 3, 8, 9, -1, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 65535, 65536, MAX_INTEGER, "",
    "f32", "bf16",
    "u8", "signs", "hartley", "haar", "matrix", "a" * 64, "A" * 64, "a" * 63, "a" * 65, "a" * 64 + "\n", "a" * 63 + "é",
    *ITEMSIZE, "f320", "xu8", "f32\n", "x/y", "x/y\n", "x/y/z", "x/y;z", "x/-y", "1/2+3",
    "x/" + "y" * 253, "x/" + "y" * 254,
    "/", "a//b", "x" * 255, "x" * 256, "x" * 512, "x" * 513, "\U0001f600" * 255, "\U0001f600" * 512, "\U0001f600" * 513,
    "a\0", "a\x7f",
    "a\x1f", "a\n", "..", ".a", "a.", "a b", "CON", "é", [], [None], [0], [0] * 8, [0] * 9, [MAX_INTEGER], [-1], ["a"],
    ["a", "a"], {},
    {"kind": "hartley"}, {"kind": "signs"}, {"kind": "signs", "sha256": "0" * 64}, {"kind": "haar", "sha256": "0" * 64},
    {"kind": "haar", "seed": -1, "sha256": "0" * 64}, {"kind": "x"}, {"a": "b"}, {"a": 1},
]  # fmt: skip


@pytest.mark.parametrize("table", full_tree())
def test_every_place_with_every_odd_value(table: str) -> None:
    full = full_tree()
    tree = tree_of(**{table: full[table][:1] if table == "layers" else full[table]})
    assert agree(tree)
    chosen = [path for path in places(tree) if path[0] == table]
    results = [agree(replaced(tree, path, value)) for path in chosen for value in ODD_VALUES]
    assert 0 < sum(results) < len(results)


def test_an_unknown_member_anywhere() -> None:
    tree = full_tree()
    objects = [path for path in [(), *places(tree)] if isinstance(value_at(tree, path), dict)]
    for path in objects:
        free = path[:1] in (("extensions",), ("metadata",))
        assert agree(replaced(tree, (*path, "colour"), "red")) == free
    assert len(objects) > 15


def value_at(tree: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        tree = tree[key]
    return tree


@given(st.data())
def test_mutated_headers(data: st.DataObject) -> None:
    tree = full_tree()
    values = st.sampled_from(ODD_VALUES) | JSON_VALUES
    for _ in range(data.draw(st.integers(1, 3))):
        tree = replaced(tree, data.draw(st.sampled_from(places(tree))), data.draw(values))
    agree(tree)
    text = compact(tree)
    assert outcome(sign(text)) == expected_code(sign(text))


@pytest.mark.parametrize("tree", [None, True, 0, "", [], {}, [tree_of()]])
def test_roots(tree: Any) -> None:
    assert code_of(compact(tree)) == "schema_violation"


@pytest.mark.parametrize("path", places(full_tree()), ids=lambda path: "/".join(map(str, path)))
def test_no_member_is_optional(path: tuple[Any, ...]) -> None:
    if isinstance(path[-1], str) and path[0] not in ("metadata", "extensions") or len(path) == 1:
        assert code_of(compact(replaced(full_tree(), path, ...))) == "schema_violation"
    else:
        assert agree(replaced(full_tree(), path, ...))


@pytest.mark.parametrize("requires", [["x"], ["org.example.sparse"], ["", "x"], ["x", "x"]])
def test_unknown_features(requires: list[str]) -> None:
    """RSV-301: before the schema, whatever else is wrong."""
    assert code_of(compact(tree_of(requires=requires))) == "unsupported_feature"
    assert code_of(compact({"requires": requires})) == "unsupported_feature"
    assert code_of(compact(tree_of(requires=requires, layers=[{"new": 1}], sparse=1))) == "unsupported_feature"


@pytest.mark.parametrize("requires", [None, "x", {"x": 1}, [1], ["x", 1], [["x"]], [None, "x"]])
def test_requires_of_another_type(requires: Any) -> None:
    assert code_of(compact(tree_of(requires=requires))) == "schema_violation"


@pytest.mark.parametrize(
    "path, value, where",
    [
        ((), [], "/"),
        (("layers",), 1, "/layers"),
        (("layers", 0, "in_features"), 0, "/layers/0/in_features"),
        (("layers", 0, "colour"), "red", "/layers/0"),
        (("layers", 0, "bias"), ..., "/layers/0"),
        (("transforms", 1, "hadamard"), 3, "/transforms/1/hadamard"),
        (("transforms", 1, "factor", "seed"), -1, "/transforms/1/factor/seed"),
        (("tensors", 0, "shape", 0), "3", "/tensors/0/shape/0"),
        (("metadata",), [], "/metadata"),
        (("metadata",), {"a": "", "a/b~c": 1}, "/metadata/a~1b~0c"),
        (("colour",), "red", "/"),
        (("a` - at `$.metadata",), 1, "/"),
        (("layers", 0, "a` - at `$.metadata"), 1, "/layers/0"),
        (("metadata",), {"a` - at `$.layers[0]": 1}, "/metadata/a` - at `$.layers[0]"),
    ],
)  # fmt: skip
def test_the_place_of_a_violation_is_a_json_pointer(path: tuple[Any, ...], value: Any, where: str) -> None:
    with pytest.raises(RsvError) as e:
        header_of(replaced(full_tree(), path, value) if path else value)
    assert (e.value.code, e.value.where) == ("schema_violation", where)


def test_a_message_about_a_huge_value_is_short() -> None:
    for text in (
        compact(tree_of(metadata={"a" * 10**5: 1})), compact(tree_of(requires=["x" * 10**5])), compact("x" * 10**5),
        inside(b"9" * 10**5), inside(b'{"%s":1,"%s":2}' % (b"k" * 10**5, b"k" * 10**5)),
    ):  # fmt: skip
        with pytest.raises(RsvError) as e:
            parse_header(text)
        assert len(str(e.value)) < 1000


# --- structs -------------------------------------------------------------------------------------------------------


def test_text_and_structs_hold_the_same() -> None:
    text = canonical_json(full_tree())
    header = parse_header(text)
    assert build_header(header) == text
    assert header.layers[0] == LayerEntry("a", 6, 2, 1, 0, 0, "f16", NO_DIGEST)
    assert header.transforms[2] == TransformEntry(4, 1, None, MatrixEntry("a" * 64))
    assert header.transforms[1].factor == HaarEntry(7, "f" * 64)
    assert header.tensors[0].shape == (3,) and header.layers[0].rows == 2
    assert parse_header(EMPTY) == Header((), (), (), (), (), {}, (), {})


def test_a_factor_with_seed_zero_keeps_it() -> None:
    tree = replaced(full_tree(), ("transforms", 1, "factor", "seed"), 0)
    assert build_header(parse_header(compact(tree))) == canonical_json(tree)


def test_order_and_escapes_do_not_matter() -> None:
    """RSV-209."""
    tree = full_tree()
    tree["metadata"]["name"] = "é😀/"
    backwards = json.dumps(dict(reversed(tree.items())), indent=3, ensure_ascii=True).replace("/", "\\/")
    assert parse_header(backwards.encode()) == parse_header(canonical_json(tree))


# --- memory ---------------------------------------------------------------------------------------------------------

N = 2**18


def dense(unit: bytes) -> bytes:
    return full(unit, N, 4096 + N // 16)


def names(pattern: bytes) -> bytes:
    return inside(b"{" + b",".join(pattern % i for i in range(N // 16)) + b"}").ljust(N)


@pytest.mark.parametrize(
    "text",
    [
        b"[" * N, b"]" * N, b"{" * N, b"," * N, b'"' * N, b"\\" * N, b'"' + b"\\" * N, b'"a",' * (N // 4), b" " * N,
        b'"\\"' + b'"' * N, b'"\\"' * (N // 3), b'\\"' * (N // 2), b"9" * N, b'{"a":0,' * (N // 7),
        inside(b'"' + b"\\u0061" * (N // 6) + b'"'), inside(b'"' + b"\\ud800" * (N // 6) + b'"'),
        inside(b'"' + b'\\"' * (N // 2) + b'"'), inside(b'"' + b"a\\n" * (N // 3) + b'"'),
        dense(b"0,"), dense(b"[],"), dense(b"{},"), dense(b'{"":0},'), dense(b'"ab",'), dense(b'"\\n\\"",'),
        dense(b"[" * 28 + b"]" * 28 + b","), dense(b'{"":' * 28 + b"0" + b"}" * 28 + b","),
        dense('"\U0001f600",'.encode()), dense(b"-99,"), dense(b"9007199254740992,"), dense(b"1.5,"),
        names(b'"%010x":0'), names('"%06x\U0001f600":0'.encode()), names(b'"%08x":""'),
        inside(b"{" + b'"k":0,' * (N // 16) + b'"k":0}').ljust(N),
        compact(tree_of(codebooks=[{"bits": 0, "window": 0, "sha256": "0" * 64}] * (N // 87))),
        compact(tree_of(tensors="a" * N + "\U0001f600")),
    ],
    ids=lambda text: repr(text[:12] + text[len(EMPTY) - 2 : len(EMPTY) + 20])[:40],
)  # fmt: skip
def test_memory_is_a_few_times_the_header(text: bytes) -> None:
    file = sign(text)
    outcome(sign(inside(b"[0]")))  # what is kept for later calls
    tracemalloc.start()
    try:
        outcome(file)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak < 2**20 + 20 * len(text)


def test_types_of_arrays_in_the_header() -> None:
    """JSON numbers come as Python's integers: sizes computed from them do not wrap."""
    header = parse_header(canonical_json(full_tree()))
    assert all(type(n) is int for n in (*header.tensors[0].shape, header.layers[0].in_features))
    assert not isinstance(header.layers[0].rows, np.integer)
