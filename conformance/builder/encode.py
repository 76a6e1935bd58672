"""Content in, canonical bytes out (SPEC section 11, PROTOCOL.md encode)."""

from __future__ import annotations

import json
from typing import Any

from builder import valid, windows
from builder.cases import PHASE, Case, Cases
from builder.doc import Doc, bias_bytes, layer_blob
from builder.expect import diagonal, layer_parts
from builder.kernel import f32_bytes, f32_hex, f32_list, haar, witness


def content(doc: Doc) -> dict[str, Any]:
    """The content description of a file."""
    layers = []
    header = doc.header
    for i, entry in enumerate(header["layers"]):
        part, c, t = layer_parts(doc, i), entry["codebook"], entry["transform"]
        transform = None
        if t is not None:
            stored = header["transforms"][t]
            transform = {"dim": stored["dim"], "hadamard": stored["hadamard"], "diagonal": None, "factor": None}
            if stored["diagonal"]:
                d = diagonal(doc, t) or []
                kind = stored["diagonal"]["kind"]
                values = [int(v) for v in d] if kind == "signs" else [f32_hex(v) for v in d]
                transform["diagonal"] = {"kind": kind, "values": values}
            if stored["factor"]:
                kind = stored["factor"]["kind"]
                factor: dict[str, Any] = {"kind": kind}
                if kind == "haar":
                    factor["seed"] = stored["factor"]["seed"]
                if kind != "hartley":
                    numbers = [f32_hex(v) for v in f32_list(doc.blobs["factor", t])]
                    factor["witness" if kind == "haar" else "values"] = numbers
                transform["factor"] = factor
        bias = None
        if entry["bias"]:
            at, nbytes = part["parts"]["bias"]
            size = 4 if entry["bias"] == "f32" else 2
            data = doc.blobs["layer", i][at : at + nbytes]
            values = [data[k : k + size][::-1].hex() for k in range(0, nbytes, size)]
            bias = {"dtype": entry["bias"], "values": values}
        layers.append({
            "name": entry["name"], "in_features": entry["in_features"], "out_features": entry["out_features"],
            "stack": entry["stack"],
            "codebook": {
                "bits": header["codebooks"][c]["bits"],
                "window": header["codebooks"][c]["window"],
                "centroids": [f32_hex(v) for v in f32_list(doc.blobs["codebook", c])],
            },
            "transform": transform, "codes": b"".join(part["codes"]).hex(),
            "scales": [f32_hex(v) for v in part["scales"]], "bias": bias,
        })  # fmt: skip
    return {
        "layers": layers,
        "tensors": [
            {"name": t["name"], "dtype": t["dtype"], "shape": t["shape"], "data": doc.blobs["tensor", i].hex()}
            for i, t in enumerate(header["tensors"])
        ],
        "attachments": [
            {"name": a["name"], "media_type": a["media_type"], "data": doc.blobs["attachment", i].hex()}
            for i, a in enumerate(header["attachments"])
        ],
        "metadata": header["metadata"],
        "extensions": header["extensions"],
    }


def all_cases(cases: Cases) -> None:
    def add(
        id: str, doc: Doc, rules: list[str], what: str, tree: dict[str, Any] | None = None, text: bytes | None = None
    ) -> None:
        text = text or _dump(tree or content(doc))
        rules = [*rules, "RSV-816", "RSV-817"]
        cases.add(Case(f"encode-{id}", "encode", doc.render(), "valid", rules, {"encode": "valid"}, what, content=text))

    def refuse(id: str, error: str, rules: list[str], tree: dict[str, Any] | bytes, what: str, base: str) -> None:
        assert error in PHASE
        cases.add(Case(
            f"encode-{id}", "encode", b"", "invalid", ["RSV-801", *rules], {"encode": "invalid"}, what, error=error,
            content=tree if isinstance(tree, bytes) else _dump(tree), base=f"encode-{base}",
        ))  # fmt: skip

    example = valid.spec_example()
    add("spec-example", example, ["RSV-810", "RSV-811"], "the file of SPEC section 16")
    add("empty", Doc(), ["RSV-810"], "nothing")
    add("matrix", valid.base_matrix(), ["RSV-810"], "values on the diagonal and a stored factor")
    add("haar", valid.base_haar(), ["RSV-810"], "a haar factor, its witness given")

    pair = valid.base_two()
    add("shared", pair, ["RSV-814"], "two layers, each with its own copy of equal tables")
    tree = content(pair)
    for member in ("layers", "tensors", "attachments"):
        tree[member].reverse()
    add("sorted", pair, ["RSV-812"], "layers, tensors and attachments in the reverse order", tree)

    # names that UTF-16 order and code point order sort differently, as layers, tensors and keys
    doc = Doc()
    doc.codebook(2, f32_bytes([-1.5, -0.5, 0.5, 1.5]))
    names = ["B", "a", "a.b", "\u00e9", "\ue000", "\uffff", "\U0001f600"]
    for k, name in enumerate(names):
        doc.layer(name, 3, 1, 0, layer_blob([[k % 4, 1, 2]], 2, f32_bytes([0.5])))
    for k, name in enumerate(sorted(names, key=lambda name: name + ".t")):
        doc.tensor(name + ".t", "u8", [1], bytes([k]))
    doc.header["metadata"] = {name: str(k) for k, name in enumerate(names)}
    doc.header["extensions"] = {name: {n: k for n in reversed(names)} for k, name in enumerate(names)}
    tree = content(doc)
    tree["layers"] = tree["layers"][3:] + tree["layers"][:3]
    tree["tensors"].reverse()
    add(
        "code-points-and-utf-16",
        doc,
        ["RSV-811", "RSV-812"],
        "names that code points and UTF-16 units sort differently",
        tree,
    )

    doc = Doc()
    doc.header["metadata"] = {
        "controls": "".join(map(chr, range(32))), "delete": "\x7f", "quote": '"', "backslash": "\\", "slash": "/",
        "separators": "\u2028\u2029", "astral": "\U0001F600", "c1": "\u0080\u009f", "html": "<&>", "bom": "\ufeff",
    }  # fmt: skip
    doc.header["extensions"] = {"org.example": [0, -1, 2**53 - 1, -(2**53 - 1), True, False, None, "", [], {}]}
    add("escapes", doc, ["RSV-811"], "the shortest escapes, and none where none is needed")

    # first use: the layer that sorts first has what is given last
    doc, rng = Doc(), valid.Rng("encode-first-use")
    doc.codebook(1, f32_bytes([-1.0, 1.0]))
    doc.codebook(2, f32_bytes([-1.5, -0.5, 0.5, 1.5]))
    doc.codebook(2, f32_bytes([-1.5, -0.5, 0.5, 2.5]))
    doc.transform(8, 8, ("signs", b"\x0f"), None)
    doc.transform(8, 4, ("signs", b"\x0f"), None)
    doc.transform(8, 4, ("signs", b"\x0f"), ("hartley",))
    for name, c, t in (("a", 0, 0), ("b", 1, None), ("c", 0, 1), ("d", 2, 2), ("e", 1, 0)):
        bits = doc.header["codebooks"][c]["bits"]
        codes = [[rng.below(2**bits) for _ in range(8)] for _ in range(2)]
        doc.layer(name, 8, 2, c, layer_blob(codes, bits, f32_bytes([0.5, 0.25])), transform=t)
    tree = content(doc)
    tree["layers"] = [tree["layers"][k] for k in (3, 1, 4, 2, 0)]
    add("first-use", doc, ["RSV-813", "RSV-814"], "tables in the order of first use by sorted layers", tree)

    # 0 and -0 differ; ones and zeros are kept
    doc = Doc()
    doc.codebook(1, f32_bytes([-0.0, 1.0]))
    doc.codebook(1, f32_bytes([0.0, 1.0]))
    doc.transform(3, 1, ("values", f32_bytes([1.0] * 3)), None)
    doc.transform(3, 1, ("signs", b"\0"), None)
    doc.transform(3, 1, None, None)
    for k, (c, t) in enumerate([(0, 0), (1, 1), (0, 2), (1, None)]):
        data = layer_blob([[0, 1, 0]], 1, f32_bytes([0.0]), bias_bytes("bf16", [0.0]) if k else b"")
        doc.layer(f"l{k}", 3, 1, c, data, transform=t, bias="bf16" if k else None)
    add(
        "not-simplified",
        doc,
        ["RSV-814", "RSV-815"],
        "-0 and 0 in codebooks, transforms that are the identity, biases of 0",
    )

    doc = Doc()
    doc.tensor("a", "f64", [], bytes(8))
    doc.tensor("b", "i16", [2, 0], b"")
    doc.tensor("c", "bool", [2], b"\0\1")
    doc.tensor("d", "f32", [1], bytes.fromhex("0100807f"))
    doc.attachment("E", "text/plain", b"")
    doc.attachment("a", "text/plain", b"a")
    add("tensors", doc, ["RSV-542", "RSV-812"], "a scalar, an empty tensor, a signalling NaN; capitals sort first")

    for bits, window in ((1, 2), (2, 8), (3, 8), (8, 9)):
        doc = windows.file(bits, window, list(valid.KINDS))
        add(f"window-b{bits}-l{window}", doc, ["RSV-512", "RSV-520"], f"codes of {bits} bits, windows of {window}")
    add(
        "window-no-order",
        windows.no_order(),
        ["RSV-520"],
        "centroids in no order, for windows of 3 and codes of 2 bits",
    )
    add(
        "window-bits-differ",
        windows.bits_differ(),
        ["RSV-814"],
        "equal centroids for codes of other bits are not shared",
    )

    for bits, n, stack in ((1, 33, 1), (3, 31, 2), (5, 32, 1), (6, 65, 3), (7, 50, 1), (8, 96, 2)):
        doc = valid.one_layer(bits, ("values", "hartley"), "f16", "arbitrary", stack, n, valid.Rng(f"encode-{bits}"))
        add(f"b{bits}-n{n}-s{stack}", doc, ["RSV-510", "RSV-530"], f"{bits} bits, {n} columns, stack {stack}")

    def changed(doc: Doc, change: Any) -> dict[str, Any]:
        tree = content(doc)
        change(tree)
        return tree

    one = content(example)["layers"][0]
    refuse(
        "scale-nan",
        "nonfinite_value",
        ["RSV-606"],
        changed(example, lambda t: t["layers"][0].update(scales=["7fc00000", "3f800000"])),
        "a scale is NaN",
        "spec-example",
    )
    refuse(
        "bias-inf",
        "nonfinite_value",
        ["RSV-606"],
        changed(example, lambda t: t["layers"][0].update(bias={"dtype": "f16", "values": ["7c00", "bc00"]})),
        "a bias is infinite",
        "spec-example",
    )
    falling = {"bits": 2, "window": 2, "centroids": one["codebook"]["centroids"][::-1]}
    refuse(
        "codebook-falling",
        "codebook_order",
        ["RSV-608"],
        changed(example, lambda t: t["layers"][0].update(codebook=falling)),
        "falling centroids",
        "spec-example",
    )
    narrow = {"bits": 2, "window": 1, "centroids": one["codebook"]["centroids"][:2]}
    refuse(
        "window-less-than-bits",
        "schema_violation",
        ["RSV-302"],
        changed(example, lambda t: t["layers"][0].update(codebook=narrow)),
        "a window of 1 for codes of 2 bits",
        "spec-example",
    )
    doc = valid.base_matrix()
    F = f32_list(doc.blobs["factor", 0])
    doc.put(("factor", 0), f32_bytes([F[0] * (1 + 2e-5), *F[1:]]))
    add("matrix-nearly", doc, ["RSV-804"], "a matrix factor that misses the identity by less than 5e-5")
    off = [f32_hex(v) for v in [F[0] * (1 + 4e-5 / F[0] ** 2), *F[1:]]]
    refuse(
        "matrix-half-tolerance",
        "not_orthogonal",
        ["RSV-609", "RSV-804"],
        changed(valid.base_matrix(), lambda t: t["layers"][0]["transform"]["factor"].update(values=off)),
        "a matrix factor that misses the identity by 8e-5: readers take it",
        "matrix",
    )
    w = witness(haar(3, 42))
    off_witness = [f32_hex(v) for v in [w[0] + 7e-6, *w[1:]]]
    refuse(
        "witness-half-tolerance",
        "haar_witness_mismatch",
        ["RSV-610", "RSV-804"],
        changed(valid.base_haar(), lambda t: t["layers"][0]["transform"]["factor"].update(witness=off_witness)),
        "a witness that is 7e-6 off: readers take it",
        "haar",
    )
    doc = Doc()
    doc.tensor("mask", "bool", [5], bytes([0, 1, 1, 1, 1]))
    tree = content(doc)
    tree["tensors"][0]["data"] = "000102ff80"
    add("bool-bytes", doc, ["RSV-541"], "elements of bool that are neither 0 nor 1", tree)
    doc = Doc()
    doc.header["extensions"] = {"org.example": [0, {"a": 0}]}
    text = _dump(content(doc)).replace(b" 0,", b" -0,").replace(b'"a": 0', b'"a": -0')
    assert text.count(b"-0") == 2
    add("minus-zero", doc, ["RSV-205", "RSV-811"], "-0 in an extension is 0", text=text)
    text = _dump(content(example)).replace(b'"name": "tiny"', b'"name": "tiny", "name": "tinier"')
    refuse("duplicate-member", "json_duplicate_key", ["RSV-206"], text, "an object of the description has a name twice",
           "spec-example")  # fmt: skip
    for table, name, rule in (("tensors", "t", "RSV-409"), ("attachments", "A.txt", "RSV-410")):
        refuse(
            f"two-{table}-one-name",
            "duplicate_name",
            [rule],
            changed(pair, lambda t, table=table, name=name: t[table][1].update(name=name)),
            f"two {table} of one name",
            "shared",
        )
    refuse(
        "two-layers-one-name",
        "duplicate_name",
        ["RSV-409"],
        changed(pair, lambda t: t["layers"][1].update(name="a")),
        "two layers of one name",
        "shared",
    )
    refuse(
        "name-empty",
        "schema_violation",
        ["RSV-302"],
        changed(pair, lambda t: t["tensors"][0].update(name="")),
        "a tensor without a name",
        "shared",
    )

    def zero(tree: dict[str, Any]) -> None:
        tree["layers"][0]["transform"]["diagonal"]["values"][3] = "00000000"

    refuse(
        "diagonal-zero",
        "zero_diagonal",
        ["RSV-607"],
        changed(valid.base_matrix(), zero),
        "a value of the diagonal is 0",
        "matrix",
    )

    def shear(tree: dict[str, Any]) -> None:
        tree["layers"][0]["transform"]["factor"]["values"] = ["3f800000"] * 9

    refuse(
        "matrix-of-ones",
        "not_orthogonal",
        ["RSV-609"],
        changed(valid.base_matrix(), shear),
        "a factor of ones",
        "matrix",
    )

    def other(tree: dict[str, Any]) -> None:
        tree["layers"][0]["transform"]["factor"]["witness"] = [f32_hex(v) for v in witness(haar(3, 43))]

    refuse(
        "witness-other",
        "haar_witness_mismatch",
        ["RSV-610"],
        changed(valid.base_haar(), other),
        "the witness of another seed",
        "haar",
    )

    def width(tree: dict[str, Any]) -> None:
        tree["layers"][0]["transform"].update(hadamard=4)

    refuse(
        "hadamard-4-of-6",
        "transform_shape",
        ["RSV-401"],
        changed(example, width),
        "H_4 in a transform of order 6",
        "spec-example",
    )


def _dump(tree: dict[str, Any]) -> bytes:
    return (json.dumps(tree, ensure_ascii=True, indent=1) + "\n").encode()
