"""Headers that are not the JSON of SPEC section 3.1."""

from __future__ import annotations

from recipe import part, squeeze

from builder import valid
from builder.cases import Cases
from builder.doc import prologue_bytes
from builder.fault import add
from builder.kernel import align


def all_cases(cases: Cases) -> None:
    doc = valid.spec_example()
    text = doc.text()

    def swap(
        id: str,
        error: str,
        rules: list[str] | str,
        old: bytes,
        new: bytes,
        what: str,
        *,
        flags: list[str] | None = None,
    ) -> None:
        assert text.count(old) == 1, (id, old)
        add(cases, id, error, rules, doc.render(text.replace(old, new)), what, flags=flags)

    def whole(
        id: str, error: str, rules: list[str] | str, new: bytes, what: str, *, flags: list[str] | None = None
    ) -> None:
        add(cases, id, error, rules, doc.render(new), what, flags=flags)

    def extension(
        id: str, error: str, rules: list[str] | str, value: bytes, what: str, *, flags: list[str] | None = None
    ) -> None:
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
        swap(
            f"utf8-{id}",
            "invalid_utf8",
            "RSV-201",
            b'"name":"tiny"',
            b'"name":"' + octets + b'"',
            f"in a string: {what}",
        )
    swap(
        "utf8-outside-string",
        "invalid_utf8",
        "RSV-201",
        b'"extensions":{}',
        b'"extensions":\xc2{}',
        "outside strings: a lead byte alone",
    )
    whole("utf8-end", "invalid_utf8", "RSV-201", text + b"\xe2\x82", "a character cut by the end of the header")
    whole(
        "utf16-le-bom",
        "invalid_utf8",
        "RSV-201",
        b"\xff\xfe" + text.decode().encode("utf-16-le"),
        "UTF-16 with a byte order mark",
    )

    deep = b"[" * 31 + b"]" * 31
    extension("nesting-33-arrays", "json_limit", "RSV-202", deep, "arrays nested 33 deep", flags=["edge"])
    objects = b'{"a":' * 30 + b"{}" + b"}" * 30
    extension("nesting-33-objects", "json_limit", "RSV-202", objects, "objects nested 33 deep", flags=["edge"])
    for id, unit in (("arrays", b"["), ("objects", b'{"a":')):
        n = 100000
        body = unit * n
        head = prologue_bytes(body, file_nbytes=align(64 + len(body), 16384))
        tail = bytes(align(64 + len(body), 16384) - 64 - len(body))
        add(
            cases,
            f"nesting-100000-{id}",
            "json_limit",
            "RSV-202",
            None,
            f"{n} {id} opened and never closed",
            base=None,
            flags=["bomb"],
            recipe=[part(head), part(unit, n), part(tail)],
        )
    for id, nbytes in (("small", 12303), ("large", 81935)):  # 15 mod 64: a length that is rounded up is another limit
        count = 4097 + nbytes // 16
        data = valid.with_values(nbytes, count).render()
        what = f"{count} commas and brackets in {nbytes} bytes"
        add(cases, f"json-values-too-many-{id}", "json_limit", "RSV-203", None, what, recipe=squeeze(data, 2))
    n = 2**24
    head = prologue_bytes(b"," * n, file_nbytes=align(64 + n, 16384))
    add(
        cases,
        "json-commas",
        "json_limit",
        "RSV-203",
        None,
        "16777216 commas and nothing else",
        base=None,
        flags=["bomb"],
        recipe=[part(head), part(b",", n), part(bytes(align(64 + n, 16384) - 64 - n))],
    )

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
    swap(
        "json-trailing-comma-object",
        "invalid_json",
        "RSV-204",
        b'"metadata":{"name":"tiny"}',
        b'"metadata":{"name":"tiny",}',
        "a comma before a brace",
    )
    swap(
        "json-trailing-comma-array",
        "invalid_json",
        "RSV-204",
        b'"shape":[3]',
        b'"shape":[3,]',
        "a comma before a bracket",
    )
    swap("json-leading-comma", "invalid_json", "RSV-204", b'"shape":[3]', b'"shape":[,3]', "a comma after a bracket")
    swap("json-missing-comma", "invalid_json", "RSV-204", b'"shape":[3]', b'"shape":[3 3]', "no comma between values")
    swap("json-missing-colon", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions" {}', "no colon")
    swap("json-missing-value", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions":', "no value")
    swap("json-key-without-quotes", "invalid_json", "RSV-204", b'"extensions":{}', b"extensions:{}", "a bare name")
    swap("json-number-as-key", "invalid_json", "RSV-204", b'"extensions":{}', b'"extensions":{1:2}', "a number as name")
    swap(
        "json-brackets-crossed",
        "invalid_json",
        "RSV-204",
        b'"extensions":{}',
        b'"extensions":{"x":[}]',
        "brackets cross",
    )
    for id, value, what in (
        ("nan", b"NaN", "NaN"),
        ("infinity", b"Infinity", "Infinity"),
        ("minus-infinity", b"-Infinity", "-Infinity"),
        ("undefined", b"undefined", "undefined"),
        ("true-capital", b"True", "True"),
        ("literal-cut", b"nul", "nul"),
        ("literal-long", b"nulll", "nulll"),
        ("leading-zero", b"01", "01"),
        ("minus-leading-zero", b"-01", "-01"),
        ("plus", b"+1", "+1"),
        ("dot-first", b".5", ".5"),
        ("dot-last", b"1.", "1."),
        ("minus", b"-", "- alone"),
        ("hex", b"0x10", "0x10"),
        ("exponent-cut", b"1e", "1e"),
        ("exponent-sign-cut", b"1e+", "1e+"),
        ("underscore", b"1_000", "1_000"),
        ("bigint", b"1n", "1n"),
        ("minus-space", b"- 1", "- 1"),
        ("digits-arabic", "\u0661".encode(), "an Arabic-Indic digit"),
        ("control-in-string", b'"\x01"', "U+0001 in a string"),
        ("nul-in-string", b'"\0"', "U+0000 in a string"),
        ("tab-in-string", b'"\t"', "a tab in a string"),
        ("newline-in-string", b'"\n"', "a line feed in a string"),
        ("unit-separator-in-string", b'"\x1f"', "U+001F in a string"),
        ("escape-unknown", b'"\\x41"', "escape \\x"),
        ("escape-quote", b'"\\\'"', "escape \\'"),
        ("escape-0", b'"\\0"', "escape \\0"),
        ("escape-capital-u", b'"\\U0041"', "escape \\U"),
        ("escape-short", b'"\\u12"', "an escape of two digits"),
        ("escape-not-hex", b'"\\u12G4"', "an escape with G"),
        ("escape-plus", b'"\\u+123"', "an escape with a sign"),
        ("escape-space", b'"\\u 123"', "an escape with a space"),
        ("escape-low-cut", b'"\\ud83d\\u"', "a high surrogate, then an escape without digits"),
        ("string-concatenation", b'"a" "b"', "two strings"),
    ):
        trap = ["parser-trap"]
        extension(f"json-{id}", "invalid_json", "RSV-204", value, f"a value: {what}", flags=trap)
    extension("json-string-never-ends", "invalid_json", "RSV-204", b'"', "a quote too many: strings inside out")

    for id, value, what in (
        ("fraction-zero", b"1.0", "1.0"),
        ("fraction", b"0.5", "0.5"),
        ("exponent", b"1e0", "1e0"),
        ("exponent-capital", b"1E2", "1E2"),
        ("exponent-plus", b"1e+2", "1e+2"),
        ("exponent-zero", b"0e0", "0e0"),
        ("minus-zero", b"-0", "-0"),
        ("minus-zero-fraction", b"-0.0", "-0.0"),
        ("2-53", b"9007199254740992", "2^53"),
        ("minus-2-53", b"-9007199254740992", "-2^53"),
        ("2-53-plus-1", b"9007199254740993", "2^53 + 1"),
        ("2-63", b"9223372036854775808", "2^63"),
        ("2-64-plus-6", b"18446744073709551622", "2^64 + 6"),
        ("1e400", b"1e400", "1e400"),
        ("1e-400", b"1e-400", "1e-400"),
        ("17-digits", b"10000000000000000", "10^16"),
        ("16-nines", b"9999999999999999", "10^16 - 1"),
        ("5000-digits", b"1" * 5000, "5000 digits"),
        ("minus-5000-digits", b"-" + b"1" * 5000, "5000 digits and a sign"),
        ("long-fraction", b"0." + b"0" * 400 + b"1", "a fraction of 400 zeros"),
    ):
        extension(f"number-{id}", "json_number", "RSV-205", value, f"in an extension: {what}", flags=["parser-trap"])
    swap("number-dim-fraction", "json_number", "RSV-205", b'"dim":6', b'"dim":6.0', "a member of the format is 6.0")
    swap("number-bits-exponent", "json_number", "RSV-205", b'"bits":2', b'"bits":2e0', "a member of the format is 2e0")
    swap("number-transform-minus-zero", "json_number", "RSV-205", b'"transform":0', b'"transform":-0', "an index is -0")
    swap(
        "number-hadamard-million-digits",
        "json_number",
        "RSV-205",
        b'"hadamard":2',
        b'"hadamard":' + b"2" * 20000,
        "a member of the format has 20000 digits",
        flags=["bomb"],
    )
    whole("number-alone", "json_number", "RSV-205", b"1.5", "the header is the number 1.5")

    dup = "json_duplicate_key"
    swap(
        "duplicate-top",
        dup,
        "RSV-206",
        b'"extensions":{}',
        b'"extensions":{},"extensions":{}',
        "a member of the header",
    )
    swap("duplicate-bits", dup, "RSV-206", b'"bits":2', b'"bits":2,"bits":2', "a member of a codebook, the same value")
    swap(
        "duplicate-bits-last-right",
        dup,
        "RSV-206",
        b'"bits":2',
        b'"bits":3,"bits":2',
        "the last value is the right one",
        flags=["parser-trap"],
    )
    swap(
        "duplicate-bits-first-right",
        dup,
        "RSV-206",
        b'"bits":2',
        b'"bits":2,"bits":3',
        "the first value is the right one",
        flags=["parser-trap"],
    )
    swap(
        "duplicate-escaped",
        dup,
        "RSV-206",
        b'"bits":2',
        b'"bits":2,"b\\u0069ts":2',
        "one name written with an escape",
        flags=["parser-trap"],
    )
    swap("duplicate-metadata", dup, "RSV-206", b'"name":"tiny"', b'"name":"tiny","name":"tiny"', "a key of metadata")
    swap(
        "duplicate-proto",
        dup,
        "RSV-206",
        b'"name":"tiny"',
        b'"__proto__":"a","__proto__":"a"',
        "the name __proto__",
        flags=["parser-trap"],
    )
    swap("duplicate-empty", dup, "RSV-206", b'"name":"tiny"', b'"":"a","":"b"', "the empty name")
    swap(
        "duplicate-astral",
        dup,
        "RSV-206",
        b'"name":"tiny"',
        b'"\xf0\x9f\x98\x80":"a","\\ud83d\\ude00":"b"',
        "a name beyond U+FFFF, once as a pair of escapes",
        flags=["parser-trap"],
    )
    swap(
        "duplicate-null-byte",
        dup,
        "RSV-206",
        b'"name":"tiny"',
        b'"a\\u0000":"a","a\\u0000":"b"',
        "a name with U+0000",
        flags=["parser-trap"],
    )
    extension("duplicate-deep", dup, "RSV-206", b'[[{"a":[{"b":1,"c":2,"b":1}]}]]', "deep inside an extension")
    extension(
        "duplicate-last-of-many",
        dup,
        "RSV-206",
        b"{" + b",".join(b'"k%d":0' % k for k in range(300)) + b',"k7":0}',
        "the 301st member",
    )

    lone = "json_lone_surrogate"
    for id, value, what in (
        ("high", b"\\ud800", "a high half alone"),
        ("low", b"\\udc00", "a low half alone"),
        ("last-low", b"\\udfff", "the last low half"),
        ("high-then-text", b"\\ud83dx", "a high half, then a letter"),
        ("high-then-escape", b"\\ud83d\\u0041", "a high half, then another escape"),
        ("high-then-newline", b"\\ud83d\\n", "a high half, then a short escape"),
        ("high-high-low", b"\\ud83d\\ud83d\\ude00", "a high half before a pair"),
        ("low-high", b"\\ude00\\ud83d", "the halves in the wrong order"),
        ("pair-then-low", b"\\ud83d\\ude00\\ude00", "a low half after a pair"),
        ("high-then-backslash", b"\\ud83d\\\\ude00", "a high half, then a backslash and the text ude00"),
        ("high-then-raw", b"\\ud83d\xf0\x9f\x98\x80", "a high half, then a character beyond U+FFFF"),
    ):
        swap(
            f"surrogate-{id}",
            lone,
            "RSV-207",
            b'"name":"tiny"',
            b'"name":"' + value + b'"',
            f"in metadata: {what}",
            flags=["parser-trap"],
        )
    swap("surrogate-keys-differ", lone, "RSV-207", b'"name":"tiny"', b'"\\ud800":"a","\\ud801":"b","\\ufffd":"c"',
         "two names that are different halves, and U+FFFD: no name twice", flags=["linked", "parser-trap"])  # fmt: skip
    swap("surrogate-in-key", lone, "RSV-207", b'"name":"tiny"', b'"\\ud800":"tiny"', "in a name of metadata")
    extension("surrogate-in-extension", lone, "RSV-207", b'[{"a":"\\uDBFF"}]', "in an extension, upper case digits")
    swap("surrogate-in-layer-name", lone, "RSV-207", b'"mlp.up"', b'"mlp.\\udead"', "in the name of a layer")
    swap(
        "surrogate-in-member-name",
        lone,
        "RSV-207",
        b'"extensions":{}',
        b'"extensions":{"\\udead":1}',
        "in an extension's name",
    )
