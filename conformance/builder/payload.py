"""Files that open and hold bad blobs: what a verifier must refuse (SPEC section 9)."""

from __future__ import annotations

import struct
from collections.abc import Callable

from builder import expect, valid
from builder.cases import Cases
from builder.doc import Doc
from builder.fault import add, with_value
from builder.kernel import align, f32_bytes, haar, witness


def all_cases(cases: Cases) -> None:
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
        add(
            cases,
            f"gap-after-{name}-last",
            pad,
            "RSV-601",
            patch(good, stop - 1, 0x80),
            f"the last byte of the gap after {name}",
        )
    empty = Doc()
    add(
        cases,
        "gap-empty-last",
        pad,
        "RSV-601",
        patch(empty.render(), 16383, 1),
        "the last byte of a file without blobs",
        base="empty",
    )
    add(
        cases,
        "gap-empty-first",
        pad,
        "RSV-601",
        patch(empty.render(), align(64 + len(empty.text()), 64), 1),
        "the first byte after the header's cell, in a file without blobs",
        base="empty",
    )
    # digests: a bit of each blob
    for key, (offset, nbytes) in where.items():
        name = f"{key[0]}-{key[1]}"
        for id, byte in (("first", offset), ("last", offset + nbytes - 1)):
            if nbytes == 1 and id == "last":
                continue
            flip = patch(good, byte, good[byte] ^ (2 if key[0] == "diagonal" else 1))
            add(
                cases,
                f"digest-{name}-{id}",
                "blob_digest_mismatch",
                "RSV-602",
                flip,
                f"a bit of the {id} byte of {name}",
            )
    for key, base_doc, base in (
        (("diagonal", 0), valid.base_matrix(), "base-matrix"),
        (("factor", 0), valid.base_matrix(), "base-matrix"),
        (("factor", 0), valid.base_haar(), "base-haar"),
    ):
        new = base_doc.copy()
        new.put(key, patch(new.blobs[key], 0), sign=False)
        add(
            cases,
            f"digest-{base[5:]}-{key[0]}",
            "blob_digest_mismatch",
            "RSV-602",
            new.render(),
            f"a bit of the {key[0]}",
            base=base,
        )
    for pointer, word in (
        ("/codebooks/0", "codebook"),
        ("/layers/0", "layer"),
        ("/tensors/0", "tensor"),
        ("/attachments/0", "attachment"),
        ("/transforms/0/diagonal", "diagonal"),
    ):
        new = with_value(doc, f"{pointer}/sha256", "0" * 64)
        add(
            cases,
            f"digest-zero-{word}",
            "blob_digest_mismatch",
            "RSV-602",
            new.render(),
            f"the digest of a {word} is zeros",
        )
    new = Doc()
    new.tensor("t", "f16", [0], b"")
    add(
        cases,
        "digest-of-empty",
        "blob_digest_mismatch",
        "RSV-602",
        with_value(new, "/tensors/0/sha256", "0" * 64).render(),
        "the digest of an empty tensor is zeros",
        base="base-empty-f16",
    )

    def blob(
        id: str,
        error: str,
        rules: str,
        of: Doc,
        base: str,
        key: tuple[str, int],
        change: Callable[[bytes], bytes],
        what: str,
        *flags: str,
        dequantize: bool = False,
    ) -> None:
        new = of.copy()
        new.put(key, change(new.blobs[key]))
        expected = expect.dequantize(of) if dequantize else None
        add(cases, id, error, rules, new.render(), what, base=base, flags=list(flags), dequantize=expected)

    layer = ("layer", 0)
    for id, byte in (("scales-first", 16), ("scales-last", 63), ("bias-first", 72), ("bias-last", 127)):
        blob(
            f"layer-gap-{id}",
            pad,
            "RSV-603",
            doc,
            "spec-example",
            layer,
            lambda b, k=byte: patch(b, k),
            f"the {id.split('-')[1]} byte before the {id.split('-')[0]}",
        )
    for bits in (1, 3, 8):
        row_nbytes = 2 * bits * 4
        of = valid.base_padding(bits)

        def set_bit(b: bytes, bit: int) -> bytes:
            return patch(b, bit // 8, b[bit // 8] | 1 << bit % 8)

        for id, bit in (("first", 33 * bits), ("last", 64 * bits - 1)):
            blob(
                f"padding-code-b{bits}-{id}",
                pad,
                "RSV-604",
                of,
                f"base-padding-b{bits}",
                layer,
                lambda b, k=bit: set_bit(b, k),
                f"the {id} bit of the padding codes of row 0",
                dequantize=True,
            )
        blob(
            f"padding-code-b{bits}-last-row",
            pad,
            "RSV-604",
            of,
            f"base-padding-b{bits}",
            layer,
            lambda b, k=8 * row_nbytes + 40 * bits: set_bit(b, k),
            "a padding code of the last row",
            dequantize=True,
        )
    for bit in (6, 7):
        blob(
            f"signs-bit-{bit}-of-6",
            pad,
            "RSV-605",
            doc,
            "spec-example",
            ("diagonal", 0),
            lambda b, k=bit: bytes([b[0] | 1 << k]),
            f"bit {bit} of six signs",
        )

    nan, inf, ninf, snan = 0x7FC00000, 0x7F800000, 0xFF800000, 0x7F800001
    matrix, haar_doc = valid.base_matrix(), valid.base_haar()

    def word(b: bytes, k: int, value: int) -> bytes:
        return b[: 4 * k] + struct.pack("<I", value) + b[4 * k + 4 :]

    for id, value in (("nan", nan), ("signalling-nan", snan), ("inf", inf), ("minus-inf", ninf)):
        last = 0 if id == "minus-inf" else 3
        blob(
            f"centroid-{id}",
            "nonfinite_value",
            "RSV-606",
            doc,
            "spec-example",
            ("codebook", 0),
            lambda b, v=value, k=last: word(b, k, v),
            f"a centroid is {id}",
        )
        blob(
            f"scale-{id}",
            "nonfinite_value",
            "RSV-606",
            doc,
            "spec-example",
            layer,
            lambda b, v=value: word(b, 17, v),
            f"the last scale is {id}",
        )
        blob(
            f"diagonal-{id}",
            "nonfinite_value",
            "RSV-606",
            matrix,
            "base-matrix",
            ("diagonal", 0),
            lambda b, v=value: word(b, 11, v),
            f"the last value of the diagonal is {id}",
        )
    blob(
        "matrix-nan",
        "nonfinite_value",
        "RSV-606",
        matrix,
        "base-matrix",
        ("factor", 0),
        lambda b: word(b, 8, nan),
        "an element of a matrix factor is NaN",
    )
    blob(
        "matrix-inf",
        "nonfinite_value",
        "RSV-606",
        matrix,
        "base-matrix",
        ("factor", 0),
        lambda b: word(b, 0, inf),
        "an element of a matrix factor is infinite",
    )
    blob(
        "witness-nan",
        "nonfinite_value",
        "RSV-606",
        haar_doc,
        "base-haar",
        ("factor", 0),
        lambda b: word(b, 2, nan),
        "an element of a witness is NaN",
        "derived",
    )
    blob(
        "bias-f32-nan",
        "nonfinite_value",
        "RSV-606",
        matrix,
        "base-matrix",
        layer,
        lambda b: b[:-4] + struct.pack("<I", nan),
        "a bias of f32 is NaN",
    )
    for id, value in (("nan", 0x7E00), ("inf", 0x7C00), ("minus-inf", 0xFC00)):
        blob(
            f"bias-f16-{id}",
            "nonfinite_value",
            "RSV-606",
            doc,
            "spec-example",
            layer,
            lambda b, v=value: b[:-2] + struct.pack("<H", v),
            f"a bias of f16 is {id}",
        )
    for id, value in (("nan", 0x7FC0), ("nan-least", 0x7F81), ("inf", 0x7F80), ("minus-inf", 0xFF80)):
        blob(
            f"bias-bf16-{id}",
            "nonfinite_value",
            "RSV-606",
            two,
            "base-two",
            ("layer", 1),
            lambda b, v=value: b[:-2] + struct.pack("<H", v),
            f"a bias of bf16 is {id}",
        )
    for id, value in (("zero", 0), ("minus-zero", 0x80000000)):
        blob(
            f"diagonal-{id}",
            "zero_diagonal",
            "RSV-607",
            matrix,
            "base-matrix",
            ("diagonal", 0),
            lambda b, v=value: word(b, 5, v),
            f"a value of the diagonal is {id}",
        )
    for id, centroids, what in (
        ("equal", [-1.0, 0.5, 0.5, 1.0], "two equal centroids"),
        ("falling", [1.0, 0.5, -0.5, -1.0], "falling centroids"),
        ("swapped-last", [-1.0, -0.5, 1.0, 0.5], "the last two swapped"),
        ("zeros", [-1.0, -0.0, 0.0, 1.0], "-0, then 0"),
        ("all-zero", [0.0] * 4, "all zero"),
    ):
        blob(
            f"centroids-{id}",
            "codebook_order",
            "RSV-608",
            doc,
            "spec-example",
            ("codebook", 0),
            lambda b, c=centroids: f32_bytes(c),
            what,
        )
    good_F = [list(row) for row in haar(3, 7)]
    for id, F, what in (
        ("scaled", [[1.0001 * v for v in row] for row in good_F], "1.0001 times a rotation"),
        ("zero", [[0.0] * 3] * 3, "zeros"),
        ("row-twice", [good_F[0], good_F[1], good_F[1]], "a row twice"),
        ("shear", [[1.0, 0.0, 1.2e-4], [0.0, 1.0, 0.0], [0.0, 0.0, 1.0]], "an element of F F^T - I is 1.2e-4"),
        ("huge", [[3e38] * 3] * 3, "products that overflow f32"),
    ):
        blob(
            f"matrix-{id}",
            "not_orthogonal",
            "RSV-609",
            matrix,
            "base-matrix",
            ("factor", 0),
            lambda b, F=F: f32_bytes([v for row in F for v in row]),
            f"a matrix factor: {what}",
        )
    good_w = witness(haar(3, 42))
    for id, w, what in (
        ("far", [good_w[0], good_w[1], good_w[2] + 1.3e-5], "an element is 1.3e-5 off"),
        ("other-seed", witness(haar(3, 43)), "that of seed 43"),
        ("no-sign-fix", witness(haar(3, 42, False)), "that of the factor with U[i, i] < 0"),
        ("transposed", witness([list(c) for c in zip(*haar(3, 42), strict=True)]), "that of the transposed factor"),
        ("zero", [0.0] * 3, "zeros"),
    ):
        blob(
            f"witness-{id}",
            "haar_witness_mismatch",
            "RSV-610",
            haar_doc,
            "base-haar",
            ("factor", 0),
            lambda b, w=w: f32_bytes(w),
            f"a witness: {what}",
            "derived",
        )
    add(
        cases,
        "witness-seed-changed",
        "haar_witness_mismatch",
        "RSV-713",
        with_value(haar_doc, "/transforms/0/factor/seed", 41).render(),
        "the seed is 41, the witness that of 42",
        base="base-haar",
        flags=["derived"],
    )
