"""Headers that need an unknown feature, or break the schema (SPEC section 3.2)."""

from __future__ import annotations

from typing import Any

from builder import valid
from builder.cases import Cases
from builder.doc import Doc
from builder.fault import DROP, add, with_value


def _word(value: Any, string: Any = "string") -> str:
    """A word for a value in an id."""
    if value is None or isinstance(value, bool):
        return str(value).lower().replace("none", "null")
    if isinstance(value, str):
        return string or "empty"
    return "array" if isinstance(value, list) else str(value).replace("-", "minus-")


def all_cases(cases: Cases) -> None:
    doc = valid.spec_example()
    matrix, haar_doc = valid.base_matrix(), valid.base_haar()
    bad = "schema_violation"

    def put(
        id: str,
        pointer: str,
        value: Any,
        what: str,
        *,
        of: Doc = doc,
        base: str = "spec-example",
        error: str = bad,
        rules: str = "RSV-302",
        flags: list[str] | None = None,
    ) -> None:
        add(cases, id, error, rules, with_value(of, pointer, value).render(), what, base=base, flags=flags)

    for id, features in (
        ("one", ["x"]),
        ("dotted", ["org.example.sparse"]),
        ("two", ["a", "b"]),
        ("empty-string", [""]),
        ("odd", ["Not An Id \u2603"]),
        ("same-twice", ["a", "a"]),
    ):
        put(
            f"requires-{id}",
            "/requires",
            features,
            f"requires {len(features)} unknown features",
            error="unsupported_feature",
            rules="RSV-301",
        )
    put(
        "requires-reserved",
        "/requires",
        ["float8"],
        "requires an id without a dot: reserved, and not defined",
        error="unsupported_feature",
        rules="RSV-903",
    )
    for id, value in (("not-strings", [1]), ("mixed", ["a", 1]), ("string", "a"), ("object", {}), ("null", None)):
        put(f"requires-{id}", "/requires", value, "requires is not an array of strings: a fault of structure")

    for id, whole in (
        ("array", b"[]"),
        ("string", b'"codebooks"'),
        ("number", b"0"),
        ("null", b"null"),
        ("true", b"true"),
        ("empty-object", b"{}"),
    ):
        add(
            cases,
            f"header-is-{id}",
            bad,
            "RSV-302",
            doc.render(whole),
            f"the header is {whole.decode()}",
            flags=["linked"] if id == "empty-object" else [],
        )

    for member in doc.header:
        put(f"missing-{member}", f"/{member}", DROP, f"{member} is missing")
        put(f"null-{member}", f"/{member}", None, f"{member} is null") if member != "requires" else None
    for member, value in (("codebooks", {}), ("layers", {}), ("tensors", {}), ("metadata", []), ("extensions", [])):
        put(f"type-{member}", f"/{member}", value, f"{member} is of the other container type")
    put("extra-member", "/offsets", [], "a member that is not defined")
    put("extra-member-case", "/Layers", [], "a member in another case")

    objects: list[tuple[str, str, Doc, str, str, list[str]]] = [
        ("codebook", "/codebooks/0", doc, "spec-example", "bits", ["window", "sha256"]),
        ("transform", "/transforms/0", doc, "spec-example", "dim", ["hadamard", "diagonal", "factor"]),
        ("signs", "/transforms/0/diagonal", doc, "spec-example", "kind", ["sha256"]),
        ("hartley", "/transforms/0/factor", doc, "spec-example", "kind", []),
        ("values", "/transforms/0/diagonal", matrix, "base-matrix", "kind", ["sha256"]),
        ("matrix", "/transforms/0/factor", matrix, "base-matrix", "kind", ["sha256"]),
        ("haar", "/transforms/0/factor", haar_doc, "base-haar", "kind", ["seed", "sha256"]),
        (
            "layer",
            "/layers/0",
            doc,
            "spec-example",
            "name",
            ["in_features", "out_features", "stack", "codebook", "transform", "bias", "sha256"],
        ),
        ("tensor", "/tensors/0", doc, "spec-example", "name", ["dtype", "shape", "sha256"]),
        ("attachment", "/attachments/0", doc, "spec-example", "name", ["media_type", "nbytes", "sha256"]),
    ]
    for word, pointer, of, base, first, rest in objects:
        for member in [first, *rest]:
            put(
                f"{word}-missing-{member.replace('_', '-')}",
                f"{pointer}/{member}",
                DROP,
                f"{member} of a {word} is missing",
                of=of,
                base=base,
            )
        put(
            f"{word}-extra-member",
            f"{pointer}/offset",
            0,
            f"a member of a {word} that is not defined",
            of=of,
            base=base,
        )
    put("hartley-with-sha256", "/transforms/0/factor/sha256", "0" * 64, "a hartley factor has no blob")
    put(
        "matrix-with-seed", "/transforms/0/factor/seed", 1, "a matrix factor has no seed", of=matrix, base="base-matrix"
    )

    integers: list[tuple[str, str, Doc, str, list[Any]]] = [
        ("bits", "/codebooks/0/bits", doc, "spec-example", [0, 3, 9, -1, True, "2", None, [2]]),
        ("window", "/codebooks/0/window", doc, "spec-example", [0, 1, 17, -1, 2**53 - 1, True, "2", None, [2]]),
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
    ]
    for word, pointer, of, base, values in integers:
        for value in values:
            tail = _word(value)
            flags = ["parser-trap"] if isinstance(value, bool) else []
            put(f"{word}-{tail}", pointer, value, f"{word} is {tail}", of=of, base=base, flags=flags)

    sha = doc.header["codebooks"][0]["sha256"]
    assert any(c.isalpha() for c in sha)
    for id, value in (
        ("uppercase", sha.upper()),
        ("63-digits", sha[:-1]),
        ("65-digits", sha + "0"),
        ("newline", sha + "\n"),
        ("newline-inside", sha[:-1] + "\n"),
        ("not-hex", sha[:-1] + "g"),
        ("empty", ""),
        ("prefix", "0x" + sha[2:]),
        ("number", 0),
        ("full-width", sha[:-1] + "\uff11"),
    ):
        put(
            f"sha256-{id}",
            "/codebooks/0/sha256",
            value,
            f"a digest: {id}",
            flags=["parser-trap"] if "newline" in id else [],
        )
    for id, pointer in (
        ("layer", "/layers/0"),
        ("tensor", "/tensors/0"),
        ("attachment", "/attachments/0"),
        ("diagonal", "/transforms/0/diagonal"),
    ):
        put(f"sha256-{id}-uppercase", f"{pointer}/sha256", "A" * 64, f"the digest of a {id} is in upper case")

    for word in ("layer", "tensor"):
        for id, value, flags in (
            ("empty", "", []),
            ("513", "n" * 513, ["edge"]),
            ("513-astral", "\U0001f600" * 513, ["edge"]),
            ("nul", "a\0", ["parser-trap"]),
            ("newline-last", "a\n", ["parser-trap"]),
            ("unit-separator", "a\x1fb", ["edge"]),
            ("delete", "a\x7f", ["edge"]),
            ("number", 1, []),
            ("null", None, []),
        ):
            put(f"{word}-name-{id}", f"/{word}s/0/name", value, f"the name of a {word}: {id}", flags=flags)
    for id, value in (
        ("empty", ""),
        ("dot", "."),
        ("dot-dot", ".."),
        ("hidden", ".config"),
        ("slash", "a/b"),
        ("backslash", "a\\b"),
        ("colon", "a:b"),
        ("space", "a b"),
        ("256", "a" * 256),
        ("newline-last", "config.json\n"),
        ("nul", "a\0"),
        ("minus-first", "-a"),
        ("accent", "\u00e9"),
        ("delete", "a\x7f"),
        ("number", 7),
        ("up", "../a"),
        ("tilde", "~"),
        ("percent", "%41"),
    ):
        put(f"attachment-name-{id}", "/attachments/0/name", value, f"the name of an attachment: {id}")
    for id, value in (
        ("no-slash", "text"),
        ("no-subtype", "text/"),
        ("no-type", "/plain"),
        ("parameter", "text/plain; charset=utf-8"),
        ("space", "te xt/plain"),
        ("two-slashes", "a/b/c"),
        ("256", "a" * 128 + "/" + "b" * 127),
        ("empty", ""),
        ("newline-last", "text/plain\n"),
        ("dot-first", ".a/b"),
        ("plus-first", "a/+json"),
        ("star", "*/*"),
        ("null", None),
        ("accent", "text/pl\u00e4in"),
    ):
        put(f"media-type-{id}", "/attachments/0/media_type", value, f"a media type: {id}")
    for value in ("F32", "bfloat16", "i4", "f8", "u128", "", "BF16", None, 32):
        tail = _word(value, value)
        put(f"dtype-{tail.lower()}{'-upper' * tail.isupper()}", "/tensors/0/dtype", value, f"dtype is {value!r}")
    for id, value in (
        ("number", 3),
        ("null", None),
        ("rank-9", [1, 1, 1, 1, 1, 1, 1, 1, 3]),
        ("nested", [[3]]),
        ("string", "3"),
    ):
        put(f"shape-{id}", "/tensors/0/shape", value, f"shape: {id}")
    for value in ("f64", "F16", "none", "", 16, False):
        tail = _word(value, value)
        put(f"bias-{tail.lower()}{'-upper' * tail.isupper()}", "/layers/0/bias", value, f"bias is {value!r}")
    for kind, values in (
        ("diagonal", ["sign", "Signs", "", None, 1, "hartley"]),
        ("factor", ["dct", "Hartley", "hadamard", None, "values"]),
    ):
        for value in values:
            tail = _word(value, value)
            put(
                f"{kind}-kind-{tail.lower()}{'-capital' * tail[0].isupper()}",
                f"/transforms/0/{kind}/kind",
                value,
                f"the kind of a {kind} is {value!r}",
            )
        put(f"{kind}-string", f"/transforms/0/{kind}", "signs", f"a {kind} is a string")
        put(f"{kind}-false", f"/transforms/0/{kind}", False, f"a {kind} is false")
    for id, value in (("number", 1), ("null", None), ("object", {}), ("array", ["tiny"]), ("true", True)):
        put(f"metadata-value-{id}", "/metadata/name", value, f"a value of metadata is of type {id}")
    put("codebook-null", "/codebooks/0", None, "a codebook is null")
    put("layer-array", "/layers/0", [], "a layer is an array")
