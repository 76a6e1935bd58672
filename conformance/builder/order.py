"""Two faults in one file: which is reported pins the order of checks (SPEC section 9)."""

from __future__ import annotations

import struct

from builder import valid
from builder.cases import Cases
from builder.doc import Doc
from builder.fault import add, with_value
from builder.kernel import f32_bytes, haar, witness

NAN = struct.pack("<I", 0x7FC00000)


def all_cases(cases: Cases) -> None:
    def two(
        first: str,
        second: str,
        rules: list[str],
        data: bytes,
        what: str,
        *,
        base: str | None = "spec-example",
        tail: str = "",
    ) -> None:
        id = f"order-{first}-{second}{tail}".replace("_", "-")
        add(cases, id, first, ["RSV-001", *rules], data, what, base=base, faults=[first, second], group="order")

    doc = valid.spec_example()
    good, text = doc.render(), doc.text()
    end = 64 + len(text)

    def pad(data: bytes) -> bytes:
        out = bytearray(data)
        out[end] = 1
        return bytes(out)

    # framing: each check against the next
    two("file_too_short", "bad_magic", ["RSV-101", "RSV-102"], b"PK\x03\x04" + bytes(20), "24 bytes of another format")
    two(
        "bad_magic",
        "unsupported_version",
        ["RSV-102", "RSV-103"],
        b"\x89RSV\r\n\x1a\r" + doc.render(version_major=2)[8:],
        "magic and major version",
    )
    two(
        "unsupported_version",
        "reserved_flags",
        ["RSV-103", "RSV-104"],
        doc.render(version_major=2, flags=1),
        "major version and flags",
    )
    two(
        "reserved_flags",
        "header_too_large",
        ["RSV-104", "RSV-105"],
        doc.render(flags=1, header_nbytes=2**63),
        "flags and header_nbytes",
    )
    two(
        "header_too_large",
        "file_truncated",
        ["RSV-105", "RSV-106"],
        doc.render(header_nbytes=2**26 + 1)[:-1],
        "header_nbytes, and a byte cut",
    )
    two(
        "file_truncated",
        "header_out_of_bounds",
        ["RSV-106", "RSV-108"],
        doc.render(header_nbytes=32768)[:100],
        "a cut, and header_nbytes",
    )
    two(
        "trailing_bytes",
        "header_out_of_bounds",
        ["RSV-107", "RSV-108"],
        doc.render(header_nbytes=32768) + b"\0",
        "a byte more, and header_nbytes",
    )
    two(
        "trailing_bytes",
        "header_out_of_bounds",
        ["RSV-107", "RSV-108"],
        doc.render(file_nbytes=0),
        "file_nbytes is 0",
        tail="-zero",
    )
    two(
        "header_out_of_bounds",
        "header_digest_mismatch",
        ["RSV-108", "RSV-109"],
        doc.render(header_nbytes=16384)[:32] + bytes(32) + good[64:],
        "header_nbytes and header_sha256",
    )
    two(
        "header_digest_mismatch",
        "header_padding_nonzero",
        ["RSV-109", "RSV-110"],
        pad(good[:32] + bytes(32) + good[64:]),
        "header_sha256 and padding",
    )
    two(
        "header_digest_mismatch",
        "invalid_json",
        ["RSV-109", "RSV-204"],
        good[:64] + b"[" + good[65:],
        "a header changed and not signed",
    )
    broken = doc.render(text[:-1] + b"]")
    two(
        "header_padding_nonzero",
        "invalid_json",
        ["RSV-110", "RSV-204"],
        pad(broken),
        "padding, and a header that is not JSON",
    )

    # json: the later fault comes first in the text, or inside what the earlier one spoils
    def swap(new: bytes, of: bytes = text) -> bytes:
        return doc.render(of.replace(b'"extensions":{}', b'"extensions":' + new))

    deep = b"[" * 40 + b"]" * 40
    two("invalid_utf8", "json_limit", ["RSV-201", "RSV-202"], swap(deep + b"\xff"), "too deep, then a byte FF")
    two(
        "invalid_utf8",
        "invalid_json",
        ["RSV-201", "RSV-204"],
        swap(b"[,]", text.replace(b'"tiny"', b'"t\xff"')),
        "a comma out of place, then a byte FF in a string",
    )
    two("json_limit", "invalid_json", ["RSV-202", "RSV-204"], swap(b"nope" + deep), "not JSON, then too deep")
    two(
        "json_limit",
        "invalid_json",
        ["RSV-202", "RSV-204"],
        swap(b"]]]]" + b"[" * 36),
        "brackets that close nothing, then 36 that open",
        tail="-negative-depth",
    )
    two(
        "invalid_json",
        "json_number",
        ["RSV-204", "RSV-205"],
        swap(b'[1.5,-0,"\x01"]'),
        "fractions, then a control character in a string",
    )
    two(
        "invalid_json",
        "json_duplicate_key",
        ["RSV-204", "RSV-206"],
        swap(b'{"a":1,"a":2,}'),
        "a name twice, then a trailing comma",
    )
    two(
        "invalid_json",
        "json_lone_surrogate",
        ["RSV-204", "RSV-207"],
        swap(b'["\\ud800",nope]'),
        "a lone surrogate, then a bare word",
    )
    two(
        "json_number",
        "json_duplicate_key",
        ["RSV-205", "RSV-206"],
        swap(b'{"a":1,"a":1.5}'),
        "a name twice, the second value 1.5",
    )
    two(
        "json_number",
        "json_duplicate_key",
        ["RSV-205", "RSV-206"],
        swap(b'[{"a":1,"a":2},1e9]'),
        "a name twice, then an exponent",
        tail="-later",
    )
    two(
        "json_number",
        "json_lone_surrogate",
        ["RSV-205", "RSV-207"],
        swap(b'["\\ud800",-0]'),
        "a lone surrogate, then -0",
    )
    two(
        "json_duplicate_key",
        "json_lone_surrogate",
        ["RSV-206", "RSV-207"],
        swap(b'["\\ud800",{"a":1,"a":2}]'),
        "a lone surrogate, then a name twice",
    )
    two(
        "json_duplicate_key",
        "json_lone_surrogate",
        ["RSV-206", "RSV-207"],
        swap(b'{"\\ud800":1,"\\uD800":2}'),
        "a lone surrogate as a name twice",
        tail="-same",
    )
    two(
        "json_number",
        "unsupported_feature",
        ["RSV-205", "RSV-301"],
        doc.render(text.replace(b'"requires":[]', b'"requires":["x"],"z":1.0')),
        "an unknown feature, then a fraction",
    )
    two(
        "json_duplicate_key",
        "unsupported_feature",
        ["RSV-206", "RSV-301"],
        doc.render(text.replace(b'"requires":[]', b'"requires":["x"],"requires":["x"]')),
        "an unknown feature, named by a member that is there twice",
    )
    two(
        "json_lone_surrogate",
        "unsupported_feature",
        ["RSV-207", "RSV-301"],
        doc.render(text.replace(b'"requires":[]', b'"requires":["\\ud800"]')),
        "a feature whose name is half a surrogate pair",
    )

    # schema
    feature = with_value(doc, "/requires", ["org.example.wide"])
    two(
        "unsupported_feature",
        "schema_violation",
        ["RSV-301", "RSV-302"],
        with_value(feature, "/codebooks/0/bits", 9).render(),
        "9 bits, which an unknown feature may well allow",
    )
    feature.header["zones"] = []
    two(
        "unsupported_feature",
        "schema_violation",
        ["RSV-301", "RSV-302"],
        feature.render(),
        "a member that an unknown feature may define",
        tail="-member",
    )
    only = b'{"requires":["x"]}'
    two(
        "unsupported_feature",
        "schema_violation",
        ["RSV-301", "RSV-302"],
        Doc().render(only),
        "requires is the only member",
        base="empty",
        tail="-only",
    )
    two(
        "unsupported_feature",
        "schema_violation",
        ["RSV-301", "RSV-302"],
        with_value(doc, "/requires", ["a", "b", "a"]).render(),
        "an unknown feature twice",
        tail="-unique",
    )
    both = with_value(with_value(doc, "/transforms/0/hadamard", 4), "/tensors/0/dtype", "f8")
    two(
        "schema_violation",
        "transform_shape",
        ["RSV-302", "RSV-401"],
        both.render(),
        "an order that does not divide, then an unknown dtype",
    )

    # reference: over the whole of a table, and against the order of the file
    pair = valid.base_two()
    both = with_value(with_value(pair, "/layers/0/codebook", 7), "/transforms/0/hadamard", 4)
    two(
        "transform_shape",
        "bad_reference",
        ["RSV-401", "RSV-404"],
        both.render(),
        "a transform's shape and a layer's codebook",
        base="base-two",
    )
    both = with_value(with_value(pair, "/layers/0/in_features", 5), "/layers/1/codebook", 1)
    two(
        "bad_reference",
        "dim_mismatch",
        ["RSV-404", "RSV-406"],
        both.render(),
        "layer 0 is of another width, layer 1 has no codebook",
        base="base-two",
    )
    both = with_value(with_value(pair, "/layers/0/in_features", 5), "/layers/1/transform", 1)
    two(
        "bad_reference",
        "dim_mismatch",
        ["RSV-405", "RSV-406"],
        both.render(),
        "layer 0 is of another width, layer 1 has no transform",
        base="base-two",
        tail="-transform",
    )
    both = with_value(pair, "/layers/1/in_features", 5)
    both.codebook(3, f32_bytes([k - 3.5 for k in range(8)]))
    two(
        "dim_mismatch",
        "unreferenced",
        ["RSV-406", "RSV-407"],
        both.render(),
        "a codebook without use and a layer of another width",
        base="base-two",
    )
    both = with_value(pair, "/layers/1/name", "a")
    both.codebook(3, f32_bytes([k - 3.5 for k in range(8)]))
    two(
        "unreferenced",
        "duplicate_name",
        ["RSV-407", "RSV-409"],
        both.render(),
        "a codebook without use and a name twice",
        base="base-two",
    )
    both = with_value(with_value(pair, "/tensors/1/name", "t"), "/attachments/0/nbytes", 2**30)
    two(
        "duplicate_name",
        "file_extent",
        ["RSV-409", "RSV-505"],
        both.render(),
        "a name twice, and an attachment of a GiB",
        base="base-two",
    )
    both = with_value(with_value(pair, "/attachments/1/name", "a.txt"), "/tensors/0/shape", [2**53 - 1, 2**53 - 1])
    two(
        "duplicate_name",
        "file_extent",
        ["RSV-410", "RSV-503"],
        both.render(),
        "an attachment's name twice, and a tensor beyond 2^53",
        base="base-two",
        tail="-attachment",
    )
    both = with_value(with_value(pair, "/layers/0/codebook", 2**53 - 1), "/layers/0/out_features", 2**31 - 1)
    two(
        "bad_reference",
        "file_extent",
        ["RSV-404", "RSV-505"],
        both.render(),
        "a layer without a codebook has no size",
        base="base-two",
    )

    # extent and payload
    long = bytearray(doc.render(file_nbytes=32768) + bytes(16384))
    long[-1] = 1
    two("file_extent", "padding_nonzero", ["RSV-505", "RSV-601"], bytes(long), "a page too many, and its last byte")
    bad = doc.copy()
    bad.put(("codebook", 0), NAN * 4)
    data = bad.render(file_nbytes=8192)[:8192]
    two("file_extent", "nonfinite_value", ["RSV-505", "RSV-606"], data, "half a page cut, and centroids that are NaN")

    # payload: blob by blob in walk order; of each the gap, the digest, the rest
    def places(of: Doc) -> dict[tuple[str, int], int]:
        return {key: offset for key, offset, _ in of.layout(len(of.text()))[0]}

    def gap(data: bytes, offset: int) -> bytes:
        out = bytearray(data)
        out[offset] = 1
        return bytes(out)

    flipped = doc.copy()
    flipped.put(("codebook", 0), f32_bytes([-1.5, -0.5, 0.5, 1.25]), sign=False)
    two(
        "blob_digest_mismatch",
        "padding_nonzero",
        ["RSV-004", "RSV-601", "RSV-602"],
        gap(flipped.render(), places(doc)["diagonal", 0] - 1),
        "a digest of the first blob, then the gap after it",
    )
    flipped = doc.copy()
    flipped.put(("diagonal", 0), b"\x28", sign=False)
    two(
        "padding_nonzero",
        "blob_digest_mismatch",
        ["RSV-004", "RSV-601", "RSV-602"],
        gap(flipped.render(), places(doc)["diagonal", 0] - 1),
        "the gap before a blob, and its digest",
    )
    flipped = doc.copy()
    flipped.put(("codebook", 0), NAN * 4)
    flipped.put(("attachment", 0), b"x" * 21, sign=False)
    two(
        "nonfinite_value",
        "blob_digest_mismatch",
        ["RSV-004", "RSV-602", "RSV-606"],
        flipped.render(),
        "NaN in the first blob, the digest of the last",
    )
    flipped = doc.copy()
    flipped.put(("codebook", 0), NAN * 4, sign=False)
    two(
        "blob_digest_mismatch",
        "nonfinite_value",
        ["RSV-004", "RSV-602", "RSV-606"],
        flipped.render(),
        "NaN in a blob whose digest is wrong",
    )
    flipped = doc.copy()
    flipped.put(("attachment", 0), b"x" * 21, sign=False)
    two(
        "blob_digest_mismatch",
        "padding_nonzero",
        ["RSV-004", "RSV-601", "RSV-602"],
        gap(flipped.render(), 16383),
        "the digest of the last blob, and the last byte of the file",
        tail="-end",
    )
    flipped = doc.copy()
    flipped.put(("diagonal", 0), b"\x69")
    flipped.put(("layer", 0), flipped.blobs["layer", 0], sign=True)
    flipped.header["layers"][0]["sha256"] = "0" * 64
    two(
        "padding_nonzero",
        "blob_digest_mismatch",
        ["RSV-004", "RSV-602", "RSV-605"],
        flipped.render(),
        "a bit beyond the signs, then the digest of the layer",
        tail="-signs",
    )

    def blob(
        of: Doc,
        base: str,
        key: tuple[str, int],
        data: bytes,
        first: str,
        second: str,
        rules: list[str],
        what: str,
        tail: str = "",
    ) -> None:
        new = of.copy()
        new.put(key, data)
        two(first, second, ["RSV-004", *rules], new.render(), what, base=base, tail=tail)

    layer = doc.blobs["layer", 0]
    inner = bytearray(layer)
    inner[63], inner[64:68] = 1, NAN
    blob(
        doc,
        "spec-example",
        ("layer", 0),
        bytes(inner),
        "padding_nonzero",
        "nonfinite_value",
        ["RSV-603", "RSV-606"],
        "a byte between codes and scales, and a scale that is NaN",
    )
    inner = bytearray(layer)
    inner[68:72], inner[80] = NAN, 1
    blob(
        doc,
        "spec-example",
        ("layer", 0),
        bytes(inner),
        "padding_nonzero",
        "nonfinite_value",
        ["RSV-603", "RSV-606"],
        "a scale that is NaN, then a byte between scales and bias",
        "-later",
    )
    inner = bytearray(layer)
    inner[4], inner[-2:] = 1, b"\x00\x7e"
    blob(
        doc,
        "spec-example",
        ("layer", 0),
        bytes(inner),
        "padding_nonzero",
        "nonfinite_value",
        ["RSV-604", "RSV-606"],
        "a padding code, and a bias that is NaN",
        "-code",
    )
    blob(
        doc,
        "spec-example",
        ("codebook", 0),
        f32_bytes([1.0, 0.5, 0.25]) + NAN,
        "nonfinite_value",
        "codebook_order",
        ["RSV-606", "RSV-608"],
        "falling centroids, then NaN",
    )
    matrix, derived = valid.base_matrix(), valid.base_haar()
    blob(
        matrix,
        "base-matrix",
        ("diagonal", 0),
        bytes(4) + matrix.blobs["diagonal", 0][4:-4] + NAN,
        "nonfinite_value",
        "zero_diagonal",
        ["RSV-606", "RSV-607"],
        "a diagonal that begins with 0 and ends with NaN",
    )
    blob(
        matrix,
        "base-matrix",
        ("factor", 0),
        f32_bytes([5.0] * 8) + NAN,
        "nonfinite_value",
        "not_orthogonal",
        ["RSV-606", "RSV-609"],
        "no rotation, and NaN",
    )
    blob(
        derived,
        "base-haar",
        ("factor", 0),
        f32_bytes(witness(haar(3, 9))[:2]) + NAN,
        "nonfinite_value",
        "haar_witness_mismatch",
        ["RSV-606", "RSV-610"],
        "the witness of another seed, and NaN",
    )
    new = matrix.copy()
    new.put(("diagonal", 0), bytes(48))
    new.put(("factor", 0), f32_bytes([5.0] * 9))
    two(
        "zero_diagonal",
        "not_orthogonal",
        ["RSV-004", "RSV-607", "RSV-609"],
        new.render(),
        "a diagonal of zeros, then a factor that is no rotation",
        base="base-matrix",
    )
    new = matrix.copy()
    new.put(("codebook", 0), f32_bytes([1.0, 1.0, 1.0, 1.0]))
    new.put(("diagonal", 0), bytes(48))
    two(
        "codebook_order",
        "zero_diagonal",
        ["RSV-004", "RSV-607", "RSV-608"],
        new.render(),
        "equal centroids, then a diagonal of zeros: the walk decides",
        base="base-matrix",
    )
    new = matrix.copy()
    new.put(("factor", 0), f32_bytes([5.0] * 9))
    inner = bytearray(new.blobs["layer", 0])
    inner[-4:] = NAN
    new.put(("layer", 0), bytes(inner))
    two(
        "not_orthogonal",
        "nonfinite_value",
        ["RSV-004", "RSV-606", "RSV-609"],
        new.render(),
        "a factor that is no rotation, then a bias that is NaN",
        base="base-matrix",
    )
