"""Codebooks whose indices are wider than their codes (SPEC section 5, RSV-512)."""

from __future__ import annotations

import struct
from typing import Any

from builder import expect, valid
from builder.cases import Cases
from builder.doc import Doc, bias_bytes, layer_blob
from builder.fault import add, with_value
from builder.kernel import Rng, f32_bytes

RULES = ["RSV-502", "RSV-510", "RSV-512", "RSV-520", "RSV-720"]
BIASES = [None, "f32", "f16", "bf16"]


def widths() -> list[tuple[int, int]]:
    """(bits, window) of all kinds that must be read; window = bits is the subject of `valid`."""
    return [(bits, window) for bits in range(1, 9) for window in sorted({bits + 1, 8, 12, 16}) if window > bits]


def table(window: int, rng: Rng) -> bytes:
    """Centroids in no order; of the largest tables, in steps, so that every index has a value of its own."""
    if window == 16:
        return f32_bytes([(c - 32767.5) / 8192 for c in range(2**16)])
    return f32_bytes([rng.real(-3, 3) for _ in range(2**window)])


def lengths(bits: int, window: int) -> list[int]:
    """Columns of rows that are shorter than the window (by far and just so), as long, longer; with padding codes."""
    short, long = -(-window // bits) - 1, window // bits + 1
    return sorted({1, 3, short, *([window // bits] if window % bits == 0 else []), long, 33, 32 + 2 * bits})


def add_layer(doc: Doc, name: str, n: int, kind: Any, bias: str | None, stack: int, rng: Rng) -> None:
    """A layer of the file's one codebook, with a transform of its own."""
    t = None
    if kind is not None:
        h = n & -n
        if kind[1] != "none" and h == n:
            h //= 2
        t = doc.transform(n, h, valid.diagonal(kind[0], n, rng), valid.factor(kind[1], n // h, rng))
    bits, rows = doc.header["codebooks"][0]["bits"], 2 * stack
    codes = [[rng.below(2**bits) for _ in range(n)] for _ in range(rows)]
    scales = f32_bytes([(-1) ** rng.below(2) * rng.real(0.01, 1) for _ in range(rows)])
    stored = bias_bytes(bias, [rng.real(-2, 2) for _ in range(rows)]) if bias else b""
    doc.layer(name, n, 2, 0, layer_blob(codes, bits, scales, stored), stack=stack, transform=t, bias=bias)


def file(bits: int, window: int, kinds: list[Any]) -> Doc:
    """One layer for each length; `kinds` of transforms are used up from its start and started again."""
    doc, rng = Doc(), Rng(f"window-{bits}-{window}")
    doc.codebook(bits, table(window, rng))
    for k, n in enumerate(lengths(bits, window)):
        kind = kinds[0]
        if valid.possible(kind, n):
            kinds.append(kinds.pop(0))
        else:
            kind = None
        add_layer(doc, f"{k}.n{n}", n, kind, BIASES[(k + bits) % 4], 1 + 2 * (k % 2), rng)
    return doc


def small(id: str, bits: int, centroids: list[float]) -> Doc:
    doc, rng = Doc(), Rng(id)
    doc.codebook(bits, f32_bytes(centroids))
    add_layer(doc, "layer", 12, ("signs", "none"), None, 1, rng)
    return doc


def no_order() -> Doc:
    return small("window-order", 2, [1.0, 0.5, 0.5, -0.0, 0.0, -2.0, 3.0, 1.0])


def bits_differ() -> Doc:
    """Codebooks of the same centroids for other bits, of the same bits for other windows."""
    doc, rng = Doc(), Rng("window-bits-differ")
    rising = f32_bytes([k / 4 - 4.125 for k in range(32)])
    doc.codebook(2, rising)
    add_layer(doc, "a", 7, None, None, 1, rng)
    for name, bits, data in (("b", 3, rising), ("c", 5, rising), ("d", 5, rising * 2)):
        doc.codebook(bits, data)
        codes = [[rng.below(2**bits) for _ in range(7)]]
        doc.layer(name, 7, 1, len(doc.header["codebooks"]) - 1, layer_blob(codes, bits, f32_bytes([0.5])))
    return doc


def all_cases(cases: Cases) -> None:
    kinds = list(valid.KINDS)
    for bits, window in widths():
        rules = [*RULES, "RSV-511", "RSV-531", "RSV-533", "RSV-534", "RSV-701", "RSV-721", "RSV-722"]
        columns = ", ".join(map(str, lengths(bits, window)))
        valid.add(
            cases, f"window-b{bits}-l{window}", file(bits, window, kinds), rules,
            f"codes of {bits} bits, windows of {window}, rows of {columns} columns",
        )  # fmt: skip
    doc, rng = Doc(), Rng("window-4099")
    doc.codebook(3, table(8, rng))
    add_layer(doc, "layer", 4099, ("values", "hartley"), "f16", 1, rng)
    valid.add(cases, "window-n4099", doc, [*RULES, "RSV-705"], "windows in rows of 4099 columns, and a Hartley factor")
    doc = small("window-uniform", 2, [(c - 3.5) / 4 for c in range(8)])
    valid.add(cases, "window-not-uniform", doc, [*RULES, "RSV-521"], "evenly spaced, not uniform: the window is wider",
              flags=["parser-trap"])  # fmt: skip
    base_order = no_order()
    valid.add(cases, "window-no-order", base_order, [*RULES, "RSV-608"],
              "centroids that fall, rise and repeat, -0 beside 0")  # fmt: skip
    one = small("window-all-equal", 1, [0.25] * 4)
    valid.add(cases, "window-all-equal", one, [*RULES, "RSV-608"], "centroids that are all the same")
    valid.add(cases, "window-bits-differ", bits_differ(), [*RULES, "RSV-814"],
              "equal centroids for codes of 2, 3 and 5 bits are three codebooks")  # fmt: skip

    def blob(
        id: str, error: str, rules: str, of: Doc, base: str, key: tuple[str, int], data: bytes, what: str,
        dequantize: bool = False,
    ) -> None:  # fmt: skip
        new = of.copy()
        new.put(key, data)
        expected = expect.dequantize(of) if dequantize else None
        add(cases, id, error, rules, new.render(), what, base=base, dequantize=expected)

    book = base_order.blobs["codebook", 0]
    for id, value in (("nan", 0x7FC00000), ("inf", 0x7F800000)):
        data = book[:-4] + struct.pack("<I", value)
        blob(f"window-centroid-{id}", "nonfinite_value", "RSV-606", base_order, "window-no-order", ("codebook", 0),
             data, f"the last centroid of a window's table is {id}")  # fmt: skip
    padded = file(3, 8, [None])
    at = next(i for i, layer in enumerate(padded.header["layers"]) if layer["in_features"] == 33)
    valid.add(cases, "base-window-padded", padded, [*RULES, "RSV-511"], "windows of 8 in rows with padding codes")
    data = bytearray(padded.blobs["layer", at])
    data[33 * 3 // 8] |= 1 << 33 * 3 % 8
    blob("window-padding-code", "padding_nonzero", "RSV-604", padded, "base-window-padded", ("layer", at), bytes(data),
         "the first bit behind the codes of a row, which a window must not see", dequantize=True)  # fmt: skip
    more = with_value(valid.spec_example(), "/codebooks/0/window", 3)
    add(cases, "window-of-half-a-table", "blob_digest_mismatch", "RSV-602", more.render(),
        "four centroids for a window of 3")  # fmt: skip
    for id, bits, window, said in (("more", 2, 8, 12), ("less", 2, 12, 11), ("most", 8, 9, 16)):
        new = with_value(file(bits, window, [None]), "/codebooks/0/window", said)
        add(cases, f"window-table-{id}", "file_extent", "RSV-505", new.render(),
            f"a table for windows of {window}, not {said}", base=f"base-window-b{bits}-l{window}")  # fmt: skip
        base = file(bits, window, [None])
        valid.add(cases, f"base-window-b{bits}-l{window}", base, RULES, f"windows of {window}, without transforms")
