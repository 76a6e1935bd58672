"""Files that every reader must refuse, one fault each, named for the fault."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

from builder import valid
from builder.cases import PHASE, Case, Cases
from builder.doc import Doc, layer_blob, prologue_bytes
from builder.kernel import align, f32_bytes, haar, witness
from builder.recipe import Recipe, build, part, split, squeeze

DROP = object()


def add(
    cases: Cases, id: str, error: str, rules: list[str] | str, data: bytes | None, what: str, *,
    base: str | None = "spec-example", flags: list[str] | None = None, faults: list[str] | None = None,
    recipe: Recipe | None = None, group: str = "invalid",
) -> None:  # fmt: skip
    flags = list(flags or [])
    if recipe is not None:
        flags.append("large")
        data = build(recipe)
    elif PHASE[error] in ("json", "schema") and data is not None and group == "invalid":
        # there are many of these, and it is the text that matters
        recipe = split(data, 64, 64 + int.from_bytes(data[16:24], "little"))
    assert data is not None
    if PHASE[error] == "payload":
        # open accepts the file: what decode prints is not compared
        operations = {"decode": "accepted", "verify": "invalid"}
        if "derived" in flags:
            operations["dequantize"] = "invalid"
    else:
        operations = {"decode": "invalid", "verify": "invalid", "dequantize": "invalid"}
    rules = [rules] if isinstance(rules, str) else rules
    if faults:
        flags.append("two-fault")
    if "bomb" in flags:
        rules = [*rules, "RSV-002"]
    if operations["decode"] == "accepted":
        rules = [*rules, "RSV-003"]
    cases.add(Case(
        id, group, data, "invalid", rules, operations, what, error=error, faults=faults, flags=flags, base=base,
        recipe=recipe,
    ))  # fmt: skip


def at(tree: Any, pointer: str) -> tuple[Any, Any]:
    """The container and key that a JSON pointer leads to."""
    keys = pointer.split("/")[1:]
    for key in keys[:-1]:
        tree = tree[int(key) if isinstance(tree, list) else key]
    return tree, int(keys[-1]) if isinstance(tree, list) else keys[-1]


def with_value(doc: Doc, pointer: str, value: Any) -> Doc:
    doc = doc.copy()
    node, key = at(doc.header, pointer)
    if value is DROP:
        del node[key]
    else:
        node[key] = value
    return doc


def all_cases(cases: Cases) -> None:
    framing(cases)
    json_phase(cases)
    schema(cases)
    reference(cases)
    extent(cases)
    payload(cases)


def framing(cases: Cases) -> None:
    doc = valid.spec_example()
    good = doc.render()
    text = doc.text()

    for n in (0, 1, 8, 63):
        add(cases, f"file-of-{n}-bytes", "file_too_short", "RSV-101", good[:n], f"cut to {n} bytes", flags=["edge"])
    for id, magic, what in (
        ("magic-first-byte", b"\x09RSV\r\n\x1a\n", "bit 7 lost, as a 7-bit channel does"),
        ("magic-lowercase", b"\x89rsv\r\n\x1a\n", "lower case"),
        ("magic-last-byte", b"\x89RSV\r\n\x1a\r", "the last byte"),
        ("magic-png", b"\x89PNG\r\n\x1a\n", "that of PNG"),
        ("magic-zero", bytes(8), "zeros"),
    ):
        add(cases, id, "bad_magic", "RSV-102", magic + good[8:], f"magic: {what}")
    for major in (0, 2, 256, 65535):
        data = doc.render(version_major=major)
        add(cases, f"major-version-{major}", "unsupported_version", "RSV-103", data, f"version_major {major}")
    for bit in (0, 7, 8, 31):
        add(cases, f"flag-{bit}", "reserved_flags", "RSV-104", doc.render(flags=1 << bit), f"flag bit {bit} set")
    for id, n in (
        ("64-mib-and-1", 2**26 + 1), ("2-32", 2**32 + len(text)), ("2-53", 2**53), ("2-63", 2**63),
        ("2-64-minus-1", 2**64 - 1), ("2-64-minus-64", 2**64 - 64),
    ):  # fmt: skip
        add(cases, f"header-nbytes-{id}", "header_too_large", "RSV-105", doc.render(header_nbytes=n),
            f"header_nbytes is {n}", flags=["bomb"])  # fmt: skip
    whole = text + b" " * (2**26 + 1 - len(text))
    head = prologue_bytes(whole, file_nbytes=align(64 + len(whole), 16384))
    recipe = [part(head + text), part(b" ", 2**26 + 1 - len(text))]
    recipe.append(part(b"\0", align(64 + len(whole), 16384) - 64 - len(whole)))
    add(cases, "header-really-64-mib-and-1", "header_too_large", "RSV-105", None,
        "a header that is there, signed, and one byte too long", flags=["linked"], recipe=recipe)  # fmt: skip
    for n in (64, 65, 4096, len(good) - 1):
        add(cases, f"truncated-to-{n}", "file_truncated", "RSV-106", good[:n], f"cut to {n} bytes")
    for id, n in (
        ("plus-1", 16385), ("page-more", 32768), ("2-32", 2**32 + 16384), ("2-53", 2**53), ("2-63", 2**63),
        ("2-64-minus-1", 2**64 - 1),
    ):  # fmt: skip
        add(cases, f"file-nbytes-{id}", "file_truncated", "RSV-106", doc.render(file_nbytes=n), f"file_nbytes is {n}",
            flags=["bomb"] if n > 2**31 else [])  # fmt: skip
    add(cases, "trailing-zero", "trailing_bytes", "RSV-107", good + b"\0", "a zero byte appended")
    add(cases, "trailing-newline", "trailing_bytes", "RSV-107", good + b"\n", "a line feed appended")
    add(cases, "trailing-page", "trailing_bytes", "RSV-107", good + bytes(16384), "a page of zeros appended")
    for n in (0, 63, 64, 16383):
        add(cases, f"file-nbytes-{n}", "trailing_bytes", "RSV-107", doc.render(file_nbytes=n), f"file_nbytes is {n}")
    for id, n in (("file", 16384), ("room-plus-1", 16384 - 63), ("64-mib", 2**26)):
        add(cases, f"header-nbytes-{id}", "header_out_of_bounds", "RSV-108", doc.render(header_nbytes=n),
            f"header_nbytes is {n}", flags=["edge"] if id != "file" else [])  # fmt: skip
    short = Doc().text()
    n = 64 + len(short)
    assert n % 64
    add(cases, "header-cell-cut", "header_out_of_bounds", "RSV-108", prologue_bytes(short, file_nbytes=n) + short,
        "the file ends with the header, in the middle of a cell", base="empty", flags=["edge", "linked"])  # fmt: skip
    for byte in (32, 63):
        data = bytearray(good)
        data[byte] ^= 1
        add(cases, f"header-digest-byte-{byte - 32}", "header_digest_mismatch", "RSV-109", bytes(data),
            f"a bit of byte {byte - 32} of header_sha256")  # fmt: skip
    add(cases, "header-byte", "header_digest_mismatch", "RSV-109", good.replace(b'"mlp.up"', b'"mlp.uq"'),
        "a byte of the header, not signed")  # fmt: skip
    add(cases, "header-digest-zero", "header_digest_mismatch", "RSV-109", good[:32] + bytes(32) + good[64:],
        "header_sha256 is zero")  # fmt: skip
    add(cases, "header-digest-of-cell", "header_digest_mismatch", "RSV-109",
        good[:32] + prologue_bytes(good[64 : align(64 + len(text), 64)], file_nbytes=0)[32:] + good[64:],
        "header_sha256 is that of header and padding")  # fmt: skip
    end = 64 + len(text)
    for id, byte in (("first", end), ("last", align(end, 64) - 1)):
        data = bytearray(good)
        data[byte] = 0x20
        add(cases, f"header-padding-{id}", "header_padding_nonzero", "RSV-110", bytes(data),
            f"the {id} byte of the header's padding is a space")  # fmt: skip


def json_phase(cases: Cases) -> None:
    doc = valid.spec_example()
    text = doc.text()

    def swap(id: str, error: str, rules: list[str] | str, old: bytes, new: bytes, what: str, *, flags: list[str] | None = None) -> None:
        assert text.count(old) == 1, (id, old)
        add(cases, id, error, rules, doc.render(text.replace(old, new)), what, flags=flags)

    def whole(id: str, error: str, rules: list[str] | str, new: bytes, what: str, *, flags: list[str] | None = None) -> None:
        add(cases, id, error, rules, doc.render(new), what, flags=flags)

    def extension(id: str, error: str, rules: list[str] | str, value: bytes, what: str, *, flags: list[str] | None = None) -> None:
        swap(id, error, rules, b'"extensions":{}', b'"extensions":{"x":' + value + b"}", what, flags=flags)

    for id, octets, what in (
        ("overlong-2", b"\xc0\xaf", "a slash in two bytes"),
        ("overlong-3", b"\xe0\x80\xaf", "a slash in three bytes"),
        ("overlong-nul", b"\xc0\x80", "U+0000 in two bytes, as Java writes it"),
        ("surrogate", b"\xed\xa0\x80", "U+D800"),
        ("surrogate-pair", b"\xed\xa0\xbd\xed\xb8\x80", "a surrogate pair, each in three bytes (CESU-8)"),
        ("above-10ffff", b"\xf4\x90\x80\x80", "U+110000"),
        ("five-bytes", b"\xf8\x88\x80\x80\x80", "a form of five bytes"),
        ("continuation", b"\x80", "a continuation byte alone"),
        ("cut", b"\xe2\x82", "a character without its last byte"),
        ("latin-1", b"caf\xe9", "Latin-1"),
        ("ff", b"\xff", "byte FF"),
    ):
        swap(f"utf8-{id}", "invalid_utf8", "RSV-201", b'"name":"tiny"', b'"name":"' + octets + b'"', f"in a string: {what}")
    swap("utf8-outside-string", "invalid_utf8", "RSV-201", b'"extensions":{}', b'"extensions":\xc2{}',
         "outside strings: a lead byte alone")  # fmt: skip
    whole("utf8-end", "invalid_utf8", "RSV-201", text + b"\xe2\x82", "a character cut by the end of the header")
    whole("utf16-le-bom", "invalid_utf8", "RSV-201", b"\xff\xfe" + text.decode().encode("utf-16-le"),
          "UTF-16 with a byte order mark")  # fmt: skip

    deep = b"[" * 31 + b"]" * 31
    extension("nesting-33-arrays", "json_limit", "RSV-202", deep, "arrays nested 33 deep", flags=["edge"])
    objects = b'{"a":' * 30 + b"{}" + b"}" * 30
    extension("nesting-33-objects", "json_limit", "RSV-202", objects, "objects nested 33 deep", flags=["edge"])
    for id, unit in (("arrays", b"["), ("objects", b'{"a":')):
        n = 100000
        body = unit * n
        head = prologue_bytes(body, file_nbytes=align(64 + len(body), 16384))
        tail = bytes(align(64 + len(body), 16384) - 64 - len(body))
        add(cases, f"nesting-100000-{id}", "json_limit", "RSV-202", None, f"{n} {id} opened and never closed",
            base=None, flags=["bomb"], recipe=[part(head), part(unit, n), part(tail)])  # fmt: skip
    prefix = text.replace(b'"extensions":{}', b'"extensions":{"x":[0').split(b'{"x":[0')[0] + b'{"x":[0'
    suffix = b"]}" + text.split(b'"extensions":{}')[1]
    count = sum((prefix + suffix).count(c) for c in (b",", b"[", b"{"))
    n = 2**22 + 1 - count
    body = prefix + b",0" * n + suffix
    file_nbytes = align(64 + len(body), 16384)
    base_file = doc.render(body)
    tail = base_file[64 + len(body) :]
    assert len(base_file) == file_nbytes
    add(cases, "json-values-limit-plus-1", "json_limit", "RSV-203", None, "4194305 commas and brackets",
        flags=["edge"], recipe=[part(base_file[:64] + prefix), part(b",0", n), part(suffix + tail)])  # fmt: skip
    n = 2**24
    head = prologue_bytes(b"," * n, file_nbytes=align(64 + n, 16384))
    add(cases, "json-commas", "json_limit", "RSV-203", None, "16777216 commas and nothing else", base=None,
        flags=["bomb"], recipe=[part(head), part(b",", n), part(bytes(align(64 + n, 16384) - 64 - n))])  # fmt: skip

    for id, new, what in (
        ("empty-header", b"", "header_nbytes is 0"),
        ("white-space-only", b"   ", "nothing but white space"),
        ("bom", b"\xef\xbb\xbf" + text, "a byte order mark"),
        ("cut", text[:-1], "the last brace is missing"),
        ("extra-brace", text + b"}", "one brace too many"),
        ("two-texts", text + b"{}", "a second text"),
        ("trailing-nul", text + b"\0", "NUL after the text"),
        ("trailing-comma-after", text + b",", "a comma after the text"),
        ("trailing-letter", text + b"x", "a letter after the text"),
        ("form-feed", b"\x0c" + text, "a form feed before the text"),
        ("vertical-tab", text + b"\x0b", "a vertical tab after the text"),
        ("no-break-space", "\u00a0".encode() + text, "U+00A0 before the text"),
        ("line-separator", text + "\u2028".encode(), "U+2028 after the text"),
        ("line-comment", text + b"\n// comment", "a comment"),
        ("python-repr", text.replace(b'"', b"'"), "single quotes"),
    ):
        whole(f"json-{id}", "invalid_json", "RSV-204", new, what)
    swap("json-block-comment", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions":/* none */{}', "a comment")
    swap("json-trailing-comma-object", "invalid_json", "RSV-204", b'"metadata":{"name":"tiny"}', b'"metadata":{"name":"tiny",}',
         "a comma before a brace")  # fmt: skip
    swap("json-trailing-comma-array", "invalid_json", "RSV-204", b'"shape":[3]', b'"shape":[3,]', "a comma before a bracket")
    swap("json-leading-comma", "invalid_json", "RSV-204", b'"shape":[3]', b'"shape":[,3]', "a comma after a bracket")
    swap("json-missing-comma", "invalid_json", "RSV-204", b'"shape":[3]', b'"shape":[3 3]', "no comma between values")
    swap("json-missing-colon", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions" {}', "no colon")
    swap("json-missing-value", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions":', "no value")
    swap("json-key-without-quotes", "invalid_json", "RSV-204", b'"extensions":{}', b"extensions:{}", "a bare name")
    swap("json-number-as-key", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions":{1:2}', "a number as name")
    swap("json-brackets-crossed", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions":{"x":[}]', "brackets cross")
    for id, value, what in (
        ("nan", b"NaN", "NaN"), ("infinity", b"Infinity", "Infinity"), ("minus-infinity", b"-Infinity", "-Infinity"),
        ("undefined", b"undefined", "undefined"), ("true-capital", b"True", "True"), ("literal-cut", b"nul", "nul"),
        ("literal-long", b"nulll", "nulll"), ("leading-zero", b"01", "01"), ("minus-leading-zero", b"-01", "-01"),
        ("plus", b"+1", "+1"), ("dot-first", b".5", ".5"), ("dot-last", b"1.", "1."), ("minus", b"-", "- alone"),
        ("hex", b"0x10", "0x10"), ("exponent-cut", b"1e", "1e"), ("exponent-sign-cut", b"1e+", "1e+"),
        ("underscore", b"1_000", "1_000"), ("bigint", b"1n", "1n"), ("minus-space", b"- 1", "- 1"),
        ("digits-arabic", "\u0661".encode(), "an Arabic-Indic digit"),
        ("control-in-string", b'"\x01"', "U+0001 in a string"), ("nul-in-string", b'"\0"', "U+0000 in a string"),
        ("tab-in-string", b'"\t"', "a tab in a string"), ("newline-in-string", b'"\n"', "a line feed in a string"),
        ("unit-separator-in-string", b'"\x1f"', "U+001F in a string"),
        ("escape-unknown", b'"\\x41"', "escape \\x"), ("escape-quote", b'"\\\'"', "escape \\'"),
        ("escape-0", b'"\\0"', "escape \\0"), ("escape-capital-u", b'"\\U0041"', "escape \\U"),
        ("escape-short", b'"\\u12"', "an escape of two digits"), ("escape-not-hex", b'"\\u12G4"', "an escape with G"),
        ("escape-plus", b'"\\u+123"', "an escape with a sign"), ("escape-space", b'"\\u 123"', "an escape with a space"),
        ("escape-low-cut", b'"\\ud83d\\u"', "a high surrogate, then an escape without digits"),
        ("string-concatenation", b'"a" "b"', "two strings"),
    ):
        trap = ["parser-trap"]
        extension(f"json-{id}", "invalid_json", "RSV-204", value, f"a value: {what}", flags=trap)
    extension("json-string-never-ends", "invalid_json", "RSV-204", b'"', "a quote too many: strings inside out")

    for id, value, what in (
        ("fraction-zero", b"1.0", "1.0"), ("fraction", b"0.5", "0.5"), ("exponent", b"1e0", "1e0"),
        ("exponent-capital", b"1E2", "1E2"), ("exponent-plus", b"1e+2", "1e+2"), ("exponent-zero", b"0e0", "0e0"),
        ("minus-zero", b"-0", "-0"), ("minus-zero-fraction", b"-0.0", "-0.0"), ("2-53", b"9007199254740992", "2^53"),
        ("minus-2-53", b"-9007199254740992", "-2^53"), ("2-53-plus-1", b"9007199254740993", "2^53 + 1"),
        ("2-63", b"9223372036854775808", "2^63"), ("2-64-plus-6", b"18446744073709551622", "2^64 + 6"),
        ("1e400", b"1e400", "1e400"), ("1e-400", b"1e-400", "1e-400"), ("17-digits", b"10000000000000000", "10^16"),
        ("16-nines", b"9999999999999999", "10^16 - 1"), ("5000-digits", b"1" * 5000, "5000 digits"),
        ("minus-5000-digits", b"-" + b"1" * 5000, "5000 digits and a sign"),
        ("long-fraction", b"0." + b"0" * 400 + b"1", "a fraction of 400 zeros"),
    ):
        extension(f"number-{id}", "json_number", "RSV-205", value, f"in an extension: {what}",
                  flags=["parser-trap"])  # fmt: skip
    swap("number-dim-fraction", "json_number", "RSV-205", b'"dim":6', b'"dim":6.0', "a member of the format is 6.0")
    swap("number-bits-exponent", "json_number", "RSV-205", b'"bits":2', b'"bits":2e0', "a member of the format is 2e0")
    swap("number-transform-minus-zero", "json_number", "RSV-205", b'"transform":0', b'"transform":-0', "an index is -0")
    swap("number-hadamard-million-digits", "json_number", "RSV-205", b'"hadamard":2', b'"hadamard":' + b"2" * 20000,
         "a member of the format has 20000 digits", flags=["bomb"])  # fmt: skip
    whole("number-alone", "json_number", "RSV-205", b"1.5", "the header is the number 1.5")

    dup = "json_duplicate_key"
    swap("duplicate-top", dup, "RSV-206", b'"extensions":{}', b'"extensions":{},"extensions":{}', "a member of the header")
    swap("duplicate-bits", dup, "RSV-206", b'"bits":2', b'"bits":2,"bits":2', "a member of a codebook, the same value")
    swap("duplicate-bits-last-right", dup, "RSV-206", b'"bits":2', b'"bits":3,"bits":2', "the last value is the right one",
         flags=["parser-trap"])  # fmt: skip
    swap("duplicate-bits-first-right", dup, "RSV-206", b'"bits":2', b'"bits":2,"bits":3', "the first value is the right one",
         flags=["parser-trap"])  # fmt: skip
    swap("duplicate-escaped", dup, "RSV-206", b'"bits":2', b'"bits":2,"b\\u0069ts":2', "one name written with an escape",
         flags=["parser-trap"])  # fmt: skip
    swap("duplicate-metadata", dup, "RSV-206", b'"name":"tiny"', b'"name":"tiny","name":"tiny"', "a key of metadata")
    swap("duplicate-proto", dup, "RSV-206", b'"name":"tiny"', b'"__proto__":"a","__proto__":"a"', "the name __proto__",
         flags=["parser-trap"])  # fmt: skip
    swap("duplicate-empty", dup, "RSV-206", b'"name":"tiny"', b'"":"a","":"b"', "the empty name")
    swap("duplicate-astral", dup, "RSV-206", b'"name":"tiny"', b'"\xf0\x9f\x98\x80":"a","\\ud83d\\ude00":"b"',
         "a name beyond U+FFFF, once as a pair of escapes", flags=["parser-trap"])  # fmt: skip
    swap("duplicate-null-byte", dup, "RSV-206", b'"name":"tiny"', b'"a\\u0000":"a","a\\u0000":"b"', "a name with U+0000",
         flags=["parser-trap"])  # fmt: skip
    extension("duplicate-deep", dup, "RSV-206", b'[[{"a":[{"b":1,"c":2,"b":1}]}]]', "deep inside an extension")
    extension("duplicate-last-of-many", dup, "RSV-206",
              b"{" + b",".join(b'"k%d":0' % k for k in range(300)) + b',"k7":0}', "the 301st member")  # fmt: skip

    lone = "json_lone_surrogate"
    for id, value, what in (
        ("high", b"\\ud800", "a high half alone"), ("low", b"\\udc00", "a low half alone"),
        ("last-low", b"\\udfff", "the last low half"), ("high-then-text", b"\\ud83dx", "a high half, then a letter"),
        ("high-then-escape", b"\\ud83d\\u0041", "a high half, then another escape"),
        ("high-then-newline", b"\\ud83d\\n", "a high half, then a short escape"),
        ("high-high-low", b"\\ud83d\\ud83d\\ude00", "a high half before a pair"),
        ("low-high", b"\\ude00\\ud83d", "the halves in the wrong order"),
        ("pair-then-low", b"\\ud83d\\ude00\\ude00", "a low half after a pair"),
        ("high-then-backslash", b"\\ud83d\\\\ude00", "a high half, then a backslash and the text ude00"),
        ("high-then-raw", b"\\ud83d\xf0\x9f\x98\x80", "a high half, then a character beyond U+FFFF"),
    ):
        swap(f"surrogate-{id}", lone, "RSV-207", b'"name":"tiny"', b'"name":"' + value + b'"', f"in metadata: {what}",
             flags=["parser-trap"])  # fmt: skip
    swap("surrogate-in-key", lone, "RSV-207", b'"name":"tiny"', b'"\\ud800":"tiny"', "in a name of metadata")
    extension("surrogate-in-extension", lone, "RSV-207", b'[{"a":"\\uDBFF"}]', "in an extension, upper case digits")
    swap("surrogate-in-layer-name", lone, "RSV-207", b'"mlp.up"', b'"mlp.\\udead"', "in the name of a layer")
    swap("surrogate-in-member-name", lone, "RSV-207", b'"extensions":{}', b'"extensions":{"\\udead":1}', "in an extension's name")


def _word(value: Any, string: Any = "string") -> str:
    """A word for a value in an id."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, str):
        return string or "empty"
    return "array" if isinstance(value, list) else str(value).replace("-", "minus-")


def schema(cases: Cases) -> None:
    doc = valid.spec_example()
    matrix, haar_doc = valid.base_matrix(), valid.base_haar()
    bad = "schema_violation"

    def put(id: str, pointer: str, value: Any, what: str, *, of: Doc = doc, base: str = "spec-example",
            error: str = bad, rules: str = "RSV-302", flags: list[str] | None = None) -> None:  # fmt: skip
        add(cases, id, error, rules, with_value(of, pointer, value).render(), what, base=base, flags=flags)

    for id, features in (
        ("one", ["x"]), ("dotted", ["org.example.sparse"]), ("two", ["a", "b"]), ("empty-string", [""]),
        ("odd", ["Not An Id \u2603"]), ("same-twice", ["a", "a"]),
    ):  # fmt: skip
        put(f"requires-{id}", "/requires", features, f"requires {len(features)} unknown features",
            error="unsupported_feature", rules="RSV-301")  # fmt: skip
    put("requires-reserved", "/requires", ["float8"], "requires an id without a dot: reserved, and not defined",
        error="unsupported_feature", rules="RSV-903")  # fmt: skip
    for id, value in (("not-strings", [1]), ("mixed", ["a", 1]), ("string", "a"), ("object", {}), ("null", None)):
        put(f"requires-{id}", "/requires", value, "requires is not an array of strings: a fault of structure")

    for id, whole in (("array", b"[]"), ("string", b'"codebooks"'), ("number", b"0"), ("null", b"null"), ("true", b"true"),
                      ("empty-object", b"{}")):  # fmt: skip
        add(cases, f"header-is-{id}", bad, "RSV-302", doc.render(whole), f"the header is {whole.decode()}",
            flags=["linked"] if id == "empty-object" else [])  # fmt: skip

    for member in doc.header:
        put(f"missing-{member}", f"/{member}", DROP, f"{member} is missing")
        put(f"null-{member}", f"/{member}", None, f"{member} is null") if member != "requires" else None
    for member, value in (("codebooks", {}), ("layers", {}), ("tensors", {}), ("metadata", []), ("extensions", [])):
        put(f"type-{member}", f"/{member}", value, f"{member} is of the other container type")
    put("extra-member", "/offsets", [], "a member that is not defined")
    put("extra-member-case", "/Layers", [], "a member in another case")

    objects: list[tuple[str, str, Doc, str, str, list[str]]] = [
        ("codebook", "/codebooks/0", doc, "spec-example", "bits", ["sha256"]),
        ("transform", "/transforms/0", doc, "spec-example", "dim", ["hadamard", "diagonal", "factor"]),
        ("signs", "/transforms/0/diagonal", doc, "spec-example", "kind", ["sha256"]),
        ("hartley", "/transforms/0/factor", doc, "spec-example", "kind", []),
        ("values", "/transforms/0/diagonal", matrix, "base-matrix", "kind", ["sha256"]),
        ("matrix", "/transforms/0/factor", matrix, "base-matrix", "kind", ["sha256"]),
        ("haar", "/transforms/0/factor", haar_doc, "base-haar", "kind", ["seed", "sha256"]),
        ("layer", "/layers/0", doc, "spec-example", "name",
         ["in_features", "out_features", "stack", "codebook", "transform", "bias", "sha256"]),
        ("tensor", "/tensors/0", doc, "spec-example", "name", ["dtype", "shape", "sha256"]),
        ("attachment", "/attachments/0", doc, "spec-example", "name", ["media_type", "nbytes", "sha256"]),
    ]  # fmt: skip
    for word, pointer, of, base, first, rest in objects:
        for member in [first, *rest]:
            put(f"{word}-missing-{member.replace('_', '-')}", f"{pointer}/{member}", DROP, f"{member} of a {word} is missing", of=of, base=base)
        put(f"{word}-extra-member", f"{pointer}/offset", 0, f"a member of a {word} that is not defined", of=of, base=base)
    put("hartley-with-sha256", "/transforms/0/factor/sha256", "0" * 64, "a hartley factor has no blob")
    put("matrix-with-seed", "/transforms/0/factor/seed", 1, "a matrix factor has no seed", of=matrix, base="base-matrix")

    integers: list[tuple[str, str, Doc, str, list[Any]]] = [
        ("bits", "/codebooks/0/bits", doc, "spec-example", [0, 9, -1, True, "2", None, [2]]),
        ("dim", "/transforms/0/dim", doc, "spec-example", [0, 2**24 + 1, -6, "6", None]),
        ("hadamard", "/transforms/0/hadamard", doc, "spec-example", [0, 3, 6, 2**25, -2, True, None]),
        ("seed", "/transforms/0/factor/seed", haar_doc, "base-haar", [-1, "42", None]),
        ("in-features", "/layers/0/in_features", doc, "spec-example", [0, 2**24 + 1, -6, "6", None]),
        ("out-features", "/layers/0/out_features", doc, "spec-example", [0, 2**31, -1, None]),
        ("stack", "/layers/0/stack", doc, "spec-example", [0, 65536, -1, None, True]),
        ("layer-codebook", "/layers/0/codebook", doc, "spec-example", [-1, None, "0", False]),
        ("layer-transform", "/layers/0/transform", doc, "spec-example", [-1, "0", False, [0]]),
        ("nbytes", "/attachments/0/nbytes", doc, "spec-example", [-1, None, "21"]),
        ("shape-axis", "/tensors/0/shape/0", doc, "spec-example", [-1, None, "3", True]),
    ]  # fmt: skip
    for word, pointer, of, base, values in integers:
        for value in values:
            tail = _word(value)
            flags = ["parser-trap"] if isinstance(value, bool) else []
            put(f"{word}-{tail}", pointer, value, f"{word} is {tail}", of=of, base=base, flags=flags)

    sha = doc.header["codebooks"][0]["sha256"]
    assert any(c.isalpha() for c in sha)
    for id, value in (
        ("uppercase", sha.upper()), ("63-digits", sha[:-1]), ("65-digits", sha + "0"), ("newline", sha + "\n"),
        ("newline-inside", sha[:-1] + "\n"), ("not-hex", sha[:-1] + "g"), ("empty", ""), ("prefix", "0x" + sha[2:]),
        ("number", 0), ("full-width", sha[:-1] + "\uff11"),
    ):  # fmt: skip
        put(f"sha256-{id}", "/codebooks/0/sha256", value, f"a digest: {id}", flags=["parser-trap"] if "newline" in id else [])
    for id, pointer in (("layer", "/layers/0"), ("tensor", "/tensors/0"), ("attachment", "/attachments/0"),
                        ("diagonal", "/transforms/0/diagonal")):  # fmt: skip
        put(f"sha256-{id}-uppercase", f"{pointer}/sha256", "A" * 64, f"the digest of a {id} is in upper case")

    for word in ("layer", "tensor"):
        for id, value, flags in (
            ("empty", "", []), ("513", "n" * 513, ["edge"]), ("513-astral", "\U0001F600" * 513, ["edge"]),
            ("nul", "a\0", ["parser-trap"]), ("newline-last", "a\n", ["parser-trap"]), ("unit-separator", "a\x1fb", ["edge"]),
            ("delete", "a\x7f", ["edge"]), ("number", 1, []), ("null", None, []),
        ):  # fmt: skip
            put(f"{word}-name-{id}", f"/{word}s/0/name", value, f"the name of a {word}: {id}", flags=flags)
    for id, value in (
        ("empty", ""), ("dot", "."), ("dot-dot", ".."), ("hidden", ".config"), ("slash", "a/b"), ("backslash", "a\\b"),
        ("colon", "a:b"), ("space", "a b"), ("256", "a" * 256), ("newline-last", "config.json\n"), ("nul", "a\0"),
        ("minus-first", "-a"), ("accent", "\u00e9"), ("delete", "a\x7f"), ("number", 7), ("up", "../a"),
        ("tilde", "~"), ("percent", "%41"),
    ):  # fmt: skip
        put(f"attachment-name-{id}", "/attachments/0/name", value, f"the name of an attachment: {id}")
    for id, value in (
        ("no-slash", "text"), ("no-subtype", "text/"), ("no-type", "/plain"), ("parameter", "text/plain; charset=utf-8"),
        ("space", "te xt/plain"), ("two-slashes", "a/b/c"), ("256", "a" * 128 + "/" + "b" * 127), ("empty", ""),
        ("newline-last", "text/plain\n"), ("dot-first", ".a/b"), ("plus-first", "a/+json"), ("star", "*/*"),
        ("null", None), ("accent", "text/pl\u00e4in"),
    ):  # fmt: skip
        put(f"media-type-{id}", "/attachments/0/media_type", value, f"a media type: {id}")
    for value in ("F32", "bfloat16", "i4", "f8", "u128", "", "BF16", None, 32):
        tail = _word(value, value)
        put(f"dtype-{tail.lower()}{'-upper' * tail.isupper()}", "/tensors/0/dtype", value, f"dtype is {value!r}")
    for id, value in (("number", 3), ("null", None), ("rank-9", [1, 1, 1, 1, 1, 1, 1, 1, 3]), ("nested", [[3]]), ("string", "3")):
        put(f"shape-{id}", "/tensors/0/shape", value, f"shape: {id}")
    for value in ("f64", "F16", "none", "", 16, False):
        tail = _word(value, value)
        put(f"bias-{tail.lower()}{'-upper' * tail.isupper()}", "/layers/0/bias", value, f"bias is {value!r}")
    for kind, values in (("diagonal", ["sign", "Signs", "", None, 1, "hartley"]), ("factor", ["dct", "Hartley", "hadamard", None, "values"])):
        for value in values:
            tail = _word(value, value)
            put(f"{kind}-kind-{tail.lower()}{'-capital' * tail[0].isupper()}", f"/transforms/0/{kind}/kind", value, f"the kind of a {kind} is {value!r}")
        put(f"{kind}-string", f"/transforms/0/{kind}", "signs", f"a {kind} is a string")
        put(f"{kind}-false", f"/transforms/0/{kind}", False, f"a {kind} is false")
    for id, value in (("number", 1), ("null", None), ("object", {}), ("array", ["tiny"]), ("true", True)):
        put(f"metadata-value-{id}", "/metadata/name", value, f"a value of metadata is of type {id}")
    put("codebook-null", "/codebooks/0", None, "a codebook is null")
    put("layer-array", "/layers/0", [], "a layer is an array")


def reference(cases: Cases) -> None:
    doc, two = valid.spec_example(), valid.base_two()

    def whole(id: str, error: str, rules: str, new: Doc, what: str, base: str = "base-two", *flags: str) -> None:
        add(cases, id, error, rules, new.render(), what, base=base, flags=list(flags))

    whole("hadamard-does-not-divide", "transform_shape", "RSV-401", with_value(doc, "/transforms/0/hadamard", 4),
          "H_4 in a transform of order 6", "spec-example")  # fmt: skip
    whole("hadamard-above-dim", "transform_shape", "RSV-401", with_value(doc, "/transforms/0/hadamard", 8),
          "H_8 in a transform of order 6", "spec-example")  # fmt: skip
    one, rng = Doc(), valid.Rng("order-1")
    one.codebook(1, f32_bytes([-1.0, 1.0]))
    one.transform(8, 8, ("signs", b"\x5a"), None)
    one.layer("layer", 8, 1, 0, layer_blob([[rng.below(2) for _ in range(8)]], 1, f32_bytes([0.5])), transform=0)
    valid.add(cases, "base-hadamard-8", one, ["RSV-402", "RSV-703"], "m = 1: H_8 and signs")
    for kind in ("hartley", "matrix", "haar"):
        new = one.copy()
        new.header["transforms"][0]["factor"] = {"kind": kind} | ({"seed": 1} if kind == "haar" else {})
        if kind != "hartley":
            new.put(("factor", 0), f32_bytes([1.0]) if kind == "matrix" else f32_bytes(witness(((1.0,),))))
        whole(f"order-1-{kind}", "transform_shape", "RSV-402", new, f"a {kind} factor of order 1", "base-hadamard-8",
              *(["linked"] if kind != "hartley" else []))  # fmt: skip
    m = 16385
    new = Doc()
    new.codebook(1, f32_bytes([-1.0, 1.0]))
    new.transform(m, 1, None, ("haar", bytes(4 * m), 1))
    new.layer("layer", m, 1, 0, layer_blob([[0] * m], 1, f32_bytes([0.5])), transform=0)
    data = new.render()
    add(cases, "haar-16385", "transform_shape", "RSV-403", None, "a haar factor of order 16385", base=None,
        flags=["bomb", "edge"], recipe=squeeze(data))  # fmt: skip
    for id, value in (("1", 1), ("2-53-minus-1", 2**53 - 1), ("2-32", 2**32)):
        whole(f"codebook-{id}-of-1", "bad_reference", "RSV-404", with_value(two, "/layers/1/codebook", value),
              f"a layer's codebook is number {value} of one")  # fmt: skip
        whole(f"transform-{id}-of-1", "bad_reference", "RSV-405", with_value(two, "/layers/1/transform", value),
              f"a layer's transform is number {value} of one")  # fmt: skip
    new = two.copy()
    for layer in new.header["layers"]:
        layer["transform"] = None
    del new.header["transforms"][0], new.blobs["diagonal", 0]
    valid.add(cases, "base-no-transform", new, ["RSV-405"], "two layers that share a codebook, no transform")
    whole("transform-of-none", "bad_reference", "RSV-405", with_value(new, "/layers/1/transform", 0),
          "a layer's transform is number 0 of none", "base-no-transform")  # fmt: skip
    bare = Doc()
    bare.layer("layer", 4, 1, 0, layer_blob([[0, 1, 2, 3]], 2, f32_bytes([0.5])))
    whole("codebook-of-none", "bad_reference", "RSV-404", bare, "a layer's codebook is number 0 of none", "empty", "linked")
    for id, n in (("less", 5), ("more", 7), ("far-more", 64)):
        whole(f"dim-{id}", "dim_mismatch", "RSV-406", with_value(two, "/layers/1/in_features", n),
              f"in_features is {n}, the transform's order 6")  # fmt: skip
    new = with_value(two, "/transforms/0/dim", 8)
    whole("dim-transform-8", "dim_mismatch", "RSV-406", new, "the transform's order is 8, in_features 6")
    new = two.copy()
    new.codebook(3, f32_bytes([k - 3.5 for k in range(8)]))
    whole("codebook-unused", "unreferenced", "RSV-407", new, "a codebook that no layer uses", "base-two", "linked")
    new = two.copy()
    new.transform(6, 2, None, ("hartley",))
    whole("transform-unused", "unreferenced", "RSV-408", new, "a transform that no layer uses", "base-two")
    new = with_value(with_value(two, "/layers/0/transform", None), "/layers/1/transform", None)
    whole("transform-used-no-more", "unreferenced", "RSV-408", new, "no layer uses the transform", "base-two", "linked")
    new = Doc()
    new.codebook(1, f32_bytes([-1.0, 1.0]))
    whole("codebook-without-layers", "unreferenced", "RSV-407", new, "a codebook in a file without layers", "empty", "linked")

    def rename(id: str, rules: str, pointer: str, name: str, what: str) -> None:
        whole(id, "duplicate_name", rules, with_value(two, pointer, name), what)

    rename("two-layers-one-name", "RSV-409", "/layers/1/name", "a", "two layers of one name")
    rename("two-tensors-one-name", "RSV-409", "/tensors/1/name", "t", "two tensors of one name")
    rename("tensor-named-as-layer", "RSV-409", "/tensors/1/name", "a", "a tensor, named as a layer is")
    rename("tensor-named-as-weight", "RSV-409", "/tensors/1/name", "a.weight", "a tensor, named as a layer's weight")
    rename("tensor-named-as-bias", "RSV-409", "/tensors/1/name", "a.bias", "a tensor, named as a layer's bias")
    rename("layer-named-as-weight", "RSV-409", "/layers/1/name", "a.weight", "a layer, named as another's weight")
    rename("layer-named-as-bias", "RSV-409", "/layers/1/name", "a.bias", "a layer, named as another's bias")
    new = valid.plain("a")
    new.tensor("a.bias", "u8", [1], b"\1")
    none = valid.plain("a")
    none.tensor("b.bias", "u8", [1], b"\1")
    valid.add(cases, "base-no-bias", none, ["RSV-409"], "a layer without bias and a tensor")
    whole("tensor-named-as-absent-bias", "duplicate_name", "RSV-409", new, "a tensor, named as the bias that a layer has not",
          "base-no-bias")  # fmt: skip
    text = two.text().replace(b'"name":"u"', b'"name":"\\u0074"')
    add(cases, "tensor-name-escaped", "duplicate_name", "RSV-409", two.render(text), "one of the two written with an escape",
        base="base-two", flags=["parser-trap"])  # fmt: skip
    whole("two-attachments-one-name", "duplicate_name", "RSV-410", with_value(two, "/attachments/1/name", "A.txt"),
          "two attachments of one name")  # fmt: skip
    whole("two-attachments-case", "duplicate_name", "RSV-410", with_value(two, "/attachments/1/name", "a.TXT"),
          "two attachments whose names differ in case")  # fmt: skip


def extent(cases: Cases) -> None:
    doc, empty = valid.spec_example(), Doc()

    def whole(id: str, rules: str, new: Doc, what: str, base: str = "spec-example", *flags: str) -> None:
        add(cases, id, "file_extent", rules, new.render(), what, base=base, flags=list(flags))

    good = doc.render()
    add(cases, "page-too-many", "file_extent", "RSV-505", doc.render(file_nbytes=32768) + bytes(16384),
        "a page of zeros that file_nbytes counts", flags=["linked"])  # fmt: skip
    add(cases, "page-cut", "file_extent", "RSV-505", doc.render(file_nbytes=8192)[:8192], "half the page, and file_nbytes says so",
        flags=["linked"])  # fmt: skip
    add(cases, "not-a-page", "file_extent", "RSV-505", doc.render(file_nbytes=1344)[:1344],
        "the last cell ends the file, and file_nbytes says so", flags=["linked"])  # fmt: skip
    n = align(64 + len(empty.text()), 64)
    add(cases, "empty-not-a-page", "file_extent", "RSV-505", empty.render(file_nbytes=n)[:n],
        "a header alone, its last cell ending the file", base="empty", flags=["linked"])  # fmt: skip
    add(cases, "blobs-cut", "file_extent", "RSV-505", doc.render(file_nbytes=1024)[:1024],
        "the file ends before the layer, and file_nbytes says so", flags=["linked"])  # fmt: skip
    assert len(good) == 16384
    whole("attachment-longer", "RSV-505", with_value(doc, "/attachments/0/nbytes", 16384), "an attachment that reaches beyond the end")
    whole("attachment-2-53-minus-1", "RSV-503", with_value(doc, "/attachments/0/nbytes", 2**53 - 1), "an attachment of 2^53 - 1 bytes",
          "spec-example", "bomb")  # fmt: skip
    for id, shape in (
        ("large", [2**20]), ("2-32", [2**31 + 3]), ("2-53", [2**52]), ("2-64", [2**32, 2**31]), ("2-64-and-3", [2**53 - 1, 2**53 - 1]),
        ("rank-8", [2**53 - 1] * 8),
    ):  # fmt: skip
        rule = "RSV-505" if id in ("large", "2-32") else "RSV-503"
        whole(f"shape-bomb-{id}", rule, with_value(doc, "/tensors/0/shape", shape), f"a tensor of shape {shape}", "spec-example", "bomb")
    for id, dtype, shape, what in (
        ("wraps-to-zero", "u8", [2**32, 2**32], "2^64 bytes: 0 if products wrap"),
        ("wraps-to-zero-f64", "f64", [2**52, 2**9], "2^64 bytes: 0 if products wrap, the element size being the last"),
        ("wraps-32", "u8", [2**16, 2**16], "2^32 bytes: 0 if products wrap at 32 bits"),
        ("empty-2-53", "f16", [0, 2**52], "empty, but 2 * 2^52 exceeds 2^53 - 1"),
        ("empty-2-53-first", "u8", [2**53 - 1, 2, 0], "empty, the zero coming last"),
        ("empty-rank-8", "f64", [0] + [2**53 - 1] * 7, "empty, with a product beyond 2^371"),
        ("empty-element-size", "f64", [2**50, 0], "empty; the product of the lengths fits, that with the element size does not"),
    ):
        base = Doc()
        base.tensor("t", dtype, [0], b"")
        bid = f"base-empty-{dtype}"
        if all(case.id != bid for case in cases):
            valid.add(cases, bid, base, ["RSV-502"], f"an empty tensor of {dtype}")
        new = with_value(base, "/tensors/0/shape", shape)
        whole(f"tensor-{id}", "RSV-503" if id != "wraps-32" else "RSV-505", new, what, bid, "bomb")
    base = Doc()
    base.attachment("a", "text/plain", b"")
    base.attachment("b", "text/plain", b"")
    valid.add(cases, "base-empty-attachments", base, ["RSV-502"], "two empty attachments")
    whole("offset-2-53", "RSV-503", with_value(base, "/attachments/0/nbytes", 2**53 - 64), "the offset of the second attachment exceeds 2^53 - 1",
          "base-empty-attachments", "bomb")  # fmt: skip
    flat = valid.plain("layer")
    valid.add(cases, "base-plain", flat, ["RSV-530"], "one layer without a transform")
    for id, changes, what in (
        ("largest", {"in_features": 2**24, "out_features": 2**31 - 1, "stack": 65535}, "the largest layer there is"),
        ("rows-2-30", {"out_features": 32768, "stack": 32768}, "4 * rows is 2^32: 0 if products wrap at 32 bits"),
        ("rows-2-46", {"out_features": 2**30, "stack": 32768, "in_features": 2**24}, "rows * row_words wraps at 64 bits"),
        ("in-features", {"in_features": 2**24}, "more columns than the file has"),
        ("out-features", {"out_features": 2**31 - 1}, "more rows than the file has"),
    ):
        new = flat.copy()
        new.header["layers"][0] |= changes
        whole(f"layer-{id}", "RSV-503" if id in ("largest", "rows-2-46") else "RSV-505", new, what, "base-plain", "bomb",
              *(["linked"] if len(changes) > 1 else []))  # fmt: skip
    big = Doc()
    big.codebook(1, f32_bytes([-1.0, 1.0]))
    big.transform(2**24, 1, None, ("matrix", f32_bytes([1.0])))
    big.layer("layer", 2**24, 1, 0, layer_blob([[0]], 1, f32_bytes([0.5])), transform=0)
    add(cases, "matrix-2-24", "file_extent", "RSV-505", big.render(), "a matrix factor of order 2^24: 2^50 bytes", base=None, flags=["bomb"])
    big = Doc()
    big.codebook(1, f32_bytes([-1.0, 1.0]))
    big.transform(2**16, 1, None, ("matrix", b""))
    big.layer("layer", 2**16, 1, 0, layer_blob([[0] * 2**16], 1, f32_bytes([0.5])), transform=0)
    add(cases, "matrix-2-16", "file_extent", "RSV-505", big.render(), "a matrix factor of order 2^16: 0 bytes if 4 * m * m wraps at 32 bits",
        base=None, flags=["bomb"])  # fmt: skip
    wide = valid.plain("layer", n=65536)
    valid.add(cases, "base-plain-65536", wide, ["RSV-530"], "65536 columns, 2 bits")
    whole("bits-more", "RSV-505", with_value(wide, "/codebooks/0/bits", 8), "codebook and layer of 2 bits, said to be of 8",
          "base-plain-65536")  # fmt: skip


def payload(cases: Cases) -> None:
    doc, two = valid.spec_example(), valid.base_two()
    good, text = doc.render(), doc.text()
    places, _ = doc.layout(len(text))
    where = {key: (offset, nbytes) for key, offset, nbytes in places}

    def patch(data: bytes, byte: int, value: int | None = None) -> bytes:
        out = bytearray(data)
        out[byte] = out[byte] ^ 1 if value is None else value
        return bytes(out)

    # gaps
    pad = "padding_nonzero"
    for (key, offset, nbytes), after in zip(places, [*places[1:], None], strict=True):
        end = offset + nbytes
        stop = after[1] if after else len(good)
        name = f"{key[0]}-{key[1]}"
        add(cases, f"gap-after-{name}-first", pad, "RSV-601", patch(good, end, 1), f"the first byte after {name}")
        add(cases, f"gap-after-{name}-last", pad, "RSV-601", patch(good, stop - 1, 0x80), f"the last byte of the gap after {name}")
    empty = Doc()
    add(cases, "gap-empty-last", pad, "RSV-601", patch(empty.render(), 16383, 1), "the last byte of a file without blobs", base="empty")
    add(cases, "gap-empty-first", pad, "RSV-601", patch(empty.render(), align(64 + len(empty.text()), 64), 1),
        "the first byte after the header's cell, in a file without blobs", base="empty")  # fmt: skip
    # digests: a bit of each blob
    for key, (offset, nbytes) in where.items():
        name = f"{key[0]}-{key[1]}"
        for id, byte in (("first", offset), ("last", offset + nbytes - 1)):
            if nbytes == 1 and id == "last":
                continue
            flip = patch(good, byte, good[byte] ^ (2 if key[0] == "diagonal" else 1))
            add(cases, f"digest-{name}-{id}", "blob_digest_mismatch", "RSV-602", flip, f"a bit of the {id} byte of {name}")
    for key, base_doc, base in ((("diagonal", 0), valid.base_matrix(), "base-matrix"), (("factor", 0), valid.base_matrix(), "base-matrix"),
                                (("factor", 0), valid.base_haar(), "base-haar")):  # fmt: skip
        new = base_doc.copy()
        new.put(key, patch(new.blobs[key], 0), sign=False)
        add(cases, f"digest-{base[5:]}-{key[0]}", "blob_digest_mismatch", "RSV-602", new.render(), f"a bit of the {key[0]}", base=base)
    for pointer, word in (("/codebooks/0", "codebook"), ("/layers/0", "layer"), ("/tensors/0", "tensor"), ("/attachments/0", "attachment"),
                          ("/transforms/0/diagonal", "diagonal")):  # fmt: skip
        new = with_value(doc, f"{pointer}/sha256", "0" * 64)
        add(cases, f"digest-zero-{word}", "blob_digest_mismatch", "RSV-602", new.render(), f"the digest of a {word} is zeros")
    new = Doc()
    new.tensor("t", "f16", [0], b"")
    add(cases, "digest-of-empty", "blob_digest_mismatch", "RSV-602", with_value(new, "/tensors/0/sha256", "0" * 64).render(),
        "the digest of an empty tensor is zeros", base="base-empty-f16")  # fmt: skip

    def blob(id: str, error: str, rules: str, of: Doc, base: str, key: tuple[str, int], change: Callable[[bytes], bytes], what: str,
             *flags: str) -> None:  # fmt: skip
        new = of.copy()
        new.put(key, change(new.blobs[key]))
        add(cases, id, error, rules, new.render(), what, base=base, flags=list(flags))

    layer = ("layer", 0)
    for id, byte in (("scales-first", 16), ("scales-last", 63), ("bias-first", 72), ("bias-last", 127)):
        blob(f"layer-gap-{id}", pad, "RSV-603", doc, "spec-example", layer, lambda b, k=byte: patch(b, k),
             f"the {id.split('-')[1]} byte before the {id.split('-')[0]}")  # fmt: skip
    for bits in (1, 3, 8):
        row_nbytes = 2 * bits * 4
        of = valid.base_padding(bits)

        def set_bit(b: bytes, bit: int) -> bytes:
            return patch(b, bit // 8, b[bit // 8] | 1 << bit % 8)

        for id, bit in (("first", 33 * bits), ("last", 64 * bits - 1)):
            blob(f"padding-code-b{bits}-{id}", pad, "RSV-604", of, f"base-padding-b{bits}", layer,
                 lambda b, k=bit: set_bit(b, k), f"the {id} bit of the padding codes of row 0")  # fmt: skip
        blob(f"padding-code-b{bits}-last-row", pad, "RSV-604", of, f"base-padding-b{bits}", layer,
             lambda b, k=8 * row_nbytes + 40 * bits: set_bit(b, k), "a padding code of the last row")  # fmt: skip
    for bit in (6, 7):
        blob(f"signs-bit-{bit}-of-6", pad, "RSV-605", doc, "spec-example", ("diagonal", 0),
             lambda b, k=bit: bytes([b[0] | 1 << k]), f"bit {bit} of six signs")  # fmt: skip

    nan, inf, ninf, snan = 0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001
    matrix, haar_doc = valid.base_matrix(), valid.base_haar()

    def word(b: bytes, k: int, value: int) -> bytes:
        return b[: 4 * k] + struct.pack("<I", value) + b[4 * k + 4 :]

    for id, value in (("nan", nan), ("signalling-nan", snan), ("inf", inf), ("minus-inf", ninf)):
        last = 0 if id == "minus-inf" else 3
        blob(f"centroid-{id}", "nonfinite_value", "RSV-606", doc, "spec-example", ("codebook", 0),
             lambda b, v=value, k=last: word(b, k, v), f"a centroid is {id}")  # fmt: skip
        blob(f"scale-{id}", "nonfinite_value", "RSV-606", doc, "spec-example", layer,
             lambda b, v=value: word(b, 17, v), f"the last scale is {id}")  # fmt: skip
        blob(f"diagonal-{id}", "nonfinite_value", "RSV-606", matrix, "base-matrix", ("diagonal", 0),
             lambda b, v=value: word(b, 11, v), f"the last value of the diagonal is {id}")  # fmt: skip
    blob("matrix-nan", "nonfinite_value", "RSV-606", matrix, "base-matrix", ("factor", 0), lambda b: word(b, 8, nan),
         "an element of a matrix factor is NaN")  # fmt: skip
    blob("matrix-inf", "nonfinite_value", "RSV-606", matrix, "base-matrix", ("factor", 0), lambda b: word(b, 0, inf),
         "an element of a matrix factor is infinite")  # fmt: skip
    blob("witness-nan", "nonfinite_value", "RSV-606", haar_doc, "base-haar", ("factor", 0), lambda b: word(b, 2, nan),
         "an element of a witness is NaN")  # fmt: skip
    blob("bias-f32-nan", "nonfinite_value", "RSV-606", matrix, "base-matrix", layer, lambda b: b[:-4] + struct.pack("<I", nan),
         "a bias of f32 is NaN")  # fmt: skip
    for id, value in (("nan", 0x7E00), ("inf", 0x7C00), ("minus-inf", 0xFC00)):
        blob(f"bias-f16-{id}", "nonfinite_value", "RSV-606", doc, "spec-example", layer, lambda b, v=value: b[:-2] + struct.pack("<H", v),
             f"a bias of f16 is {id}")  # fmt: skip
    for id, value in (("nan", 0x7FC0), ("nan-least", 0x7F81), ("inf", 0x7F80), ("minus-inf", 0xFF80)):
        blob(f"bias-bf16-{id}", "nonfinite_value", "RSV-606", two, "base-two", ("layer", 1), lambda b, v=value: b[:-2] + struct.pack("<H", v),
             f"a bias of bf16 is {id}")  # fmt: skip
    for id, value in (("zero", 0), ("minus-zero", 0x80000000)):
        blob(f"diagonal-{id}", "zero_diagonal", "RSV-607", matrix, "base-matrix", ("diagonal", 0), lambda b, v=value: word(b, 5, v),
             f"a value of the diagonal is {id}")  # fmt: skip
    for id, centroids, what in (
        ("equal", [-1.0, 0.5, 0.5, 1.0], "two equal centroids"), ("falling", [1.0, 0.5, -0.5, -1.0], "falling centroids"),
        ("swapped-last", [-1.0, -0.5, 1.0, 0.5], "the last two swapped"), ("zeros", [-1.0, -0.0, 0.0, 1.0], "-0, then 0"),
        ("all-zero", [0.0] * 4, "all zero"),
    ):  # fmt: skip
        blob(f"centroids-{id}", "codebook_order", "RSV-608", doc, "spec-example", ("codebook", 0), lambda b, c=centroids: f32_bytes(c), what)
    good_F = [list(row) for row in haar(3, 7)]
    for id, F, what in (
        ("scaled", [[1.0001 * v for v in row] for row in good_F], "1.0001 times a rotation"),
        ("zero", [[0.0] * 3] * 3, "zeros"),
        ("row-twice", [good_F[0], good_F[1], good_F[1]], "a row twice"),
        ("shear", [[1.0, 0.0, 1.2e-4], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], "an element of F F^T - I is 1.2e-4"),
        ("huge", [[3e38] * 3] * 3, "products that overflow f32"),
    ):
        blob(f"matrix-{id}", "not_orthogonal", "RSV-609", matrix, "base-matrix", ("factor", 0),
             lambda b, F=F: f32_bytes([v for row in F for v in row]), f"a matrix factor: {what}")  # fmt: skip
    good_w = witness(haar(3, 42))
    for id, w, what in (
        ("far", [good_w[0], good_w[1], good_w[2] + 1.3e-5], "an element is 1.3e-5 off"),
        ("other-seed", witness(haar(3, 43)), "that of seed 43"),
        ("no-sign-fix", witness(haar(3, 42, False)), "that of the factor with U[i, i] < 0"),
        ("transposed", witness([list(c) for c in zip(*haar(3, 42), strict=True)]), "that of the transposed factor"),
        ("zero", [0.0] * 3, "zeros"),
    ):
        blob(f"witness-{id}", "haar_witness_mismatch", "RSV-610", haar_doc, "base-haar", ("factor", 0), lambda b, w=w: f32_bytes(w),
             f"a witness: {what}", "derived")  # fmt: skip
    add(cases, "witness-seed-changed", "haar_witness_mismatch", "RSV-713", with_value(haar_doc, "/transforms/0/factor/seed", 41).render(),
        "the seed is 41, the witness that of 42", base="base-haar", flags=["derived"])  # fmt: skip

