"""Headers whose entries do not fit one another, or the length of the file (SPEC sections 3.3 and 4)."""

from __future__ import annotations

from recipe import squeeze

from builder import valid
from builder.cases import Cases
from builder.doc import Doc, layer_blob
from builder.fault import add, with_value
from builder.kernel import align, f32_bytes, witness


def all_cases(cases: Cases) -> None:
    references(cases)
    extent(cases)


def references(cases: Cases) -> None:
    doc, two = valid.spec_example(), valid.base_two()

    def whole(id: str, error: str, rules: str, new: Doc, what: str, base: str = "base-two", *flags: str) -> None:
        add(cases, id, error, rules, new.render(), what, base=base, flags=list(flags))

    whole(
        "hadamard-does-not-divide",
        "transform_shape",
        "RSV-401",
        with_value(doc, "/transforms/0/hadamard", 4),
        "H_4 in a transform of order 6",
        "spec-example",
    )
    whole(
        "hadamard-above-dim",
        "transform_shape",
        "RSV-401",
        with_value(doc, "/transforms/0/hadamard", 8),
        "H_8 in a transform of order 6",
        "spec-example",
    )
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
        whole(
            f"order-1-{kind}",
            "transform_shape",
            "RSV-402",
            new,
            f"a {kind} factor of order 1",
            "base-hadamard-8",
            *(["linked"] if kind != "hartley" else []),
        )
    m = 16385
    new = Doc()
    new.codebook(1, f32_bytes([-1.0, 1.0]))
    new.transform(m, 1, None, ("haar", bytes(4 * m), 1))
    new.layer("layer", m, 1, 0, layer_blob([[0] * m], 1, f32_bytes([0.5])), transform=0)
    data = new.render()
    add(
        cases,
        "haar-16385",
        "transform_shape",
        "RSV-403",
        None,
        "a haar factor of order 16385",
        base=None,
        flags=["bomb", "edge"],
        recipe=squeeze(data),
    )
    for id, value in (("1", 1), ("2-53-minus-1", 2**53 - 1), ("2-32", 2**32)):
        whole(
            f"codebook-{id}-of-1",
            "bad_reference",
            "RSV-404",
            with_value(two, "/layers/1/codebook", value),
            f"a layer's codebook is number {value} of one",
        )
        whole(
            f"transform-{id}-of-1",
            "bad_reference",
            "RSV-405",
            with_value(two, "/layers/1/transform", value),
            f"a layer's transform is number {value} of one",
        )
    new = two.copy()
    for layer in new.header["layers"]:
        layer["transform"] = None
    del new.header["transforms"][0], new.blobs["diagonal", 0]
    valid.add(cases, "base-no-transform", new, ["RSV-405"], "two layers that share a codebook, no transform")
    whole(
        "transform-of-none",
        "bad_reference",
        "RSV-405",
        with_value(new, "/layers/1/transform", 0),
        "a layer's transform is number 0 of none",
        "base-no-transform",
    )
    bare = Doc()
    bare.layer("layer", 4, 1, 0, layer_blob([[0, 1, 2, 3]], 2, f32_bytes([0.5])))
    whole(
        "codebook-of-none",
        "bad_reference",
        "RSV-404",
        bare,
        "a layer's codebook is number 0 of none",
        "empty",
        "linked",
    )
    for id, n in (("less", 5), ("more", 7), ("far-more", 64)):
        whole(
            f"dim-{id}",
            "dim_mismatch",
            "RSV-406",
            with_value(two, "/layers/1/in_features", n),
            f"in_features is {n}, the transform's order 6",
        )
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
    whole(
        "codebook-without-layers",
        "unreferenced",
        "RSV-407",
        new,
        "a codebook in a file without layers",
        "empty",
        "linked",
    )

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
    whole(
        "tensor-named-as-absent-bias",
        "duplicate_name",
        "RSV-409",
        new,
        "a tensor, named as the bias that a layer has not",
        "base-no-bias",
    )
    text = two.text().replace(b'"name":"u"', b'"name":"\\u0074"')
    add(
        cases,
        "tensor-name-escaped",
        "duplicate_name",
        "RSV-409",
        two.render(text),
        "one of the two written with an escape",
        base="base-two",
        flags=["parser-trap"],
    )
    whole(
        "two-attachments-one-name",
        "duplicate_name",
        "RSV-410",
        with_value(two, "/attachments/1/name", "A.txt"),
        "two attachments of one name",
    )
    whole(
        "two-attachments-case",
        "duplicate_name",
        "RSV-410",
        with_value(two, "/attachments/1/name", "a.TXT"),
        "two attachments whose names differ in case",
    )


def extent(cases: Cases) -> None:
    doc, empty = valid.spec_example(), Doc()

    def whole(id: str, rules: str, new: Doc, what: str, base: str = "spec-example", *flags: str) -> None:
        add(cases, id, "file_extent", rules, new.render(), what, base=base, flags=list(flags))

    good = doc.render()
    add(
        cases,
        "page-too-many",
        "file_extent",
        "RSV-505",
        doc.render(file_nbytes=32768) + bytes(16384),
        "a page of zeros that file_nbytes counts",
        flags=["linked"],
    )
    add(
        cases,
        "page-cut",
        "file_extent",
        "RSV-505",
        doc.render(file_nbytes=8192)[:8192],
        "half the page, and file_nbytes says so",
        flags=["linked"],
    )
    add(
        cases,
        "not-a-page",
        "file_extent",
        "RSV-505",
        doc.render(file_nbytes=1344)[:1344],
        "the last cell ends the file, and file_nbytes says so",
        flags=["linked"],
    )
    n = align(64 + len(empty.text()), 64)
    add(
        cases,
        "empty-not-a-page",
        "file_extent",
        "RSV-505",
        empty.render(file_nbytes=n)[:n],
        "a header alone, its last cell ending the file",
        base="empty",
        flags=["linked"],
    )
    add(
        cases,
        "blobs-cut",
        "file_extent",
        "RSV-505",
        doc.render(file_nbytes=1024)[:1024],
        "the file ends before the layer, and file_nbytes says so",
        flags=["linked"],
    )
    assert len(good) == 16384
    whole(
        "attachment-longer",
        "RSV-505",
        with_value(doc, "/attachments/0/nbytes", 16384),
        "an attachment that reaches beyond the end",
    )
    whole(
        "attachment-2-53-minus-1",
        "RSV-503",
        with_value(doc, "/attachments/0/nbytes", 2**53 - 1),
        "an attachment of 2^53 - 1 bytes",
        "spec-example",
        "bomb",
    )
    for id, shape in (
        ("large", [2**20]),
        ("2-32", [2**31 + 3]),
        ("2-53", [2**52]),
        ("2-64", [2**32, 2**31]),
        ("2-64-and-3", [2**53 - 1, 2**53 - 1]),
        ("rank-8", [2**53 - 1] * 8),
    ):
        rule = "RSV-505" if id in ("large", "2-32") else "RSV-503"
        whole(
            f"shape-bomb-{id}",
            rule,
            with_value(doc, "/tensors/0/shape", shape),
            f"a tensor of shape {shape}",
            "spec-example",
            "bomb",
        )
    for id, dtype, shape, what in (
        ("wraps-to-zero", "u8", [2**32, 2**32], "2^64 bytes: 0 if products wrap"),
        ("wraps-to-zero-f64", "f64", [2**52, 2**9], "2^64 bytes: 0 if products wrap, the element size being the last"),
        ("wraps-32", "u8", [2**16, 2**16], "2^32 bytes: 0 if products wrap at 32 bits"),
        ("empty-2-53", "f16", [0, 2**52], "empty, but 2 * 2^52 exceeds 2^53 - 1"),
        ("empty-2-53-first", "u8", [2**53 - 1, 2, 0], "empty, the zero coming last"),
        ("empty-rank-8", "f64", [0] + [2**53 - 1] * 7, "empty, with a product beyond 2^371"),
        (
            "empty-element-size",
            "f64",
            [2**50, 0],
            "empty; the product of the lengths fits, that with the element size does not",
        ),
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
    whole(
        "offset-2-53",
        "RSV-503",
        with_value(base, "/attachments/0/nbytes", 2**53 - 64),
        "the offset of the second attachment exceeds 2^53 - 1",
        "base-empty-attachments",
        "bomb",
    )
    flat = valid.plain("layer")
    valid.add(cases, "base-plain", flat, ["RSV-530"], "one layer without a transform")
    for id, changes, what in (
        ("largest", {"in_features": 2**24, "out_features": 2**31 - 1, "stack": 65535}, "the largest layer there is"),
        ("rows-2-30", {"out_features": 32768, "stack": 32768}, "4 * rows is 2^32: 0 if products wrap at 32 bits"),
        (
            "rows-2-46",
            {"out_features": 2**30, "stack": 32768, "in_features": 2**24},
            "rows * row_words wraps at 64 bits",
        ),
        ("in-features", {"in_features": 2**24}, "more columns than the file has"),
        ("out-features", {"out_features": 2**31 - 1}, "more rows than the file has"),
    ):
        new = flat.copy()
        new.header["layers"][0] |= changes
        whole(
            f"layer-{id}",
            "RSV-503" if id in ("largest", "rows-2-46") else "RSV-505",
            new,
            what,
            "base-plain",
            "bomb",
            *(["linked"] if len(changes) > 1 else []),
        )
    big = Doc()
    big.codebook(1, f32_bytes([-1.0, 1.0]))
    big.transform(2**24, 1, None, ("matrix", f32_bytes([1.0])))
    big.layer("layer", 2**24, 1, 0, layer_blob([[0]], 1, f32_bytes([0.5])), transform=0)
    add(
        cases,
        "matrix-2-24",
        "file_extent",
        "RSV-505",
        big.render(),
        "a matrix factor of order 2^24: 2^50 bytes",
        base=None,
        flags=["bomb"],
    )
    big = Doc()
    big.codebook(1, f32_bytes([-1.0, 1.0]))
    big.transform(2**16, 1, None, ("matrix", b""))
    big.layer("layer", 2**16, 1, 0, layer_blob([[0] * 2**16], 1, f32_bytes([0.5])), transform=0)
    add(
        cases,
        "matrix-2-16",
        "file_extent",
        "RSV-505",
        big.render(),
        "a matrix factor of order 2^16: 0 bytes if 4 * m * m wraps at 32 bits",
        base=None,
        flags=["bomb"],
    )
    wide = valid.plain("layer", n=65536, window=8)
    valid.add(cases, "base-plain-65536", wide, ["RSV-530"], "65536 columns, 2 bits, windows of 8")
    whole(
        "bits-more",
        "RSV-505",
        with_value(wide, "/codebooks/0/bits", 8),
        "codes of 2 bits, said to be of 8",
        "base-plain-65536",
    )
