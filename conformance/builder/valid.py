"""Files that every reader must accept, and what they hold."""

from __future__ import annotations

import itertools
import json
import struct
from typing import Any

from recipe import squeeze

from builder import expect
from builder.cases import Case, Cases
from builder.doc import DTYPE_NBYTES, Doc, bias_bytes, layer_blob
from builder.kernel import Rng, f32, f32_bytes, f32_list, haar, norm, witness

LLOYD_2 = [-1.5104176, -0.45278004, 0.45278004, 1.5104176]
IN_FEATURES = [1, 31, 32, 33, 50, 576, 896, 4099]
FACTORS = ["none", "hartley", "matrix", "haar"]
KINDS = [None, *itertools.product(["none", "signs", "values"], FACTORS)]
PARAMETERS: list[list[Any]] = [
    [1, 2, 3, 4, 5, 6, 7, 8], KINDS, [None, "f32", "f16", "bf16"], ["bell", "uniform", "arbitrary"], [1, 3],
    IN_FEATURES,
]  # fmt: skip


def add(
    cases: Cases, id: str, doc: Doc, rules: list[str], what: str, *, text: bytes | None = None, minor: int = 0,
    flags: list[str] | None = None, dequantize: bool = True, large: bool = False,
    decode: bool = True, base: str | None = None, period: int = 1,
) -> None:  # fmt: skip
    text = doc.text() if text is None else text
    data = doc.render(text, version_minor=minor)
    flags = list(flags or [])
    if large:
        flags.append("large")
    if "non-canonical" not in flags:
        flags.append("canonical")
    if "edge" in flags:
        rules = [*rules, "RSV-005"]
    expected: dict[str, Any] = {}
    operations = {"verify": "valid"}
    if decode:
        operations = {"decode": "valid", "verify": "valid"}
        expected["decode"] = expect.decode(doc, text, minor)
    if dequantize and doc.header["layers"]:
        operations["dequantize"] = "valid"
        expected["dequantize"] = expect.dequantize(doc)
        if any(layer["y"] for layer in expected["dequantize"]["layers"]):
            rules = [*rules, "RSV-725"]
    cases.add(Case(
        id, "valid", data, "valid", rules, operations, what, flags=flags, base=base, expected=expected or None,
        recipe=squeeze(data, period) if large else None,
    ))  # fmt: skip


def possible(kind: tuple[str, str] | None, in_features: int) -> bool:
    if kind is None or kind[1] == "none":
        return True
    return in_features != 1 and (in_features != 4099 or kind[1] == "hartley")


def pairwise() -> list[list[Any]]:
    """Rows of values such that every possible pair of values of two parameters is in one of them."""

    def fits(row: list[Any]) -> bool:
        return possible(row[1], row[5])

    todo = set()
    for a, b in itertools.combinations(range(len(PARAMETERS)), 2):
        for i, j in itertools.product(range(len(PARAMETERS[a])), range(len(PARAMETERS[b]))):
            if (a, b) != (1, 5) or possible(KINDS[i], IN_FEATURES[j]):
                todo.add((a, i, b, j))
    rng, rows = Rng("pairwise"), []
    while todo:
        a, i, b, j = min(todo)
        best, best_gain = None, -1
        for _ in range(40):
            choice = [rng.below(len(values)) for values in PARAMETERS]
            choice[a], choice[b] = i, j
            if not fits([values[c] for values, c in zip(PARAMETERS, choice, strict=True)]):
                continue
            pairs = itertools.combinations(range(len(choice)), 2)
            gain = sum((p, choice[p], q, choice[q]) in todo for p, q in pairs)
            if gain > best_gain:
                best, best_gain = choice, gain
        if best is None:
            continue
        todo -= {(p, best[p], q, best[q]) for p, q in itertools.combinations(range(len(best)), 2)}
        rows.append([values[c] for values, c in zip(PARAMETERS, best, strict=True)])
    return rows


def codebook(kind: str, bits: int, rng: Rng) -> list[float]:
    n = 2**bits
    if kind == "uniform":
        return [f32((k - (n - 1) / 2) * 0.0625) for k in range(n)]
    if kind == "bell":  # dense in the middle and symmetric, as Lloyd and Max's
        out = []
        for k in range(n):
            x = (2 * k + 1) / n - 1
            out.append(f32(x * (1.1 + 1.9 * x * x)))
        return out
    value, out = rng.real(-3, -2), []
    for _ in range(n):
        out.append(f32(value))
        value = f32(value) + rng.real(0.001, 8 / n)
    return out


def random_bias(dtype: str, rows: int, rng: Rng) -> bytes:
    return bias_bytes(dtype, [rng.real(-2, 2) for _ in range(rows)])


def factor(kind: str, m: int, rng: Rng) -> tuple[Any, ...] | None:
    if kind == "none":
        return None
    if kind == "hartley":
        return ("hartley",)
    seed = rng.below(2**53)
    if kind == "matrix":
        return ("matrix", f32_bytes([v for row in haar(m, seed) for v in row]))
    return ("haar", f32_bytes(witness(haar(m, seed))), seed)


def diagonal(kind: str, dim: int, rng: Rng) -> tuple[str, bytes] | None:
    if kind == "signs":
        bits = sum(rng.below(2) << j for j in range(dim))
        return ("signs", bits.to_bytes((dim + 7) // 8, "little"))
    if kind == "values":
        return ("values", f32_bytes([(-1) ** rng.below(2) * rng.real(0.05, 4) for _ in range(dim)]))
    return None


def order(kind: str, dim: int) -> int:
    """The order of the Hadamard part used with a factor."""
    if dim == 32:
        return 32 if kind == "none" else 8
    return dim & -dim


def one_layer(bits: int, kind: Any, bias: str | None, book: str, stack: int, n: int, rng: Rng) -> Doc:
    doc = Doc()
    c = doc.codebook(bits, f32_bytes(codebook(book, bits, rng)))
    t = None
    if kind is not None:
        h = order(kind[1], n)
        t = doc.transform(n, h, diagonal(kind[0], n, rng), factor(kind[1], n // h, rng))
    out = (3 if stack == 1 else 2) if n < 500 else (2 if stack == 1 else 1)
    rows = stack * out
    codes = [[rng.below(2**bits) for _ in range(n)] for _ in range(rows)]
    scales = f32_bytes([(-1) ** rng.below(2) * rng.real(0.01, 1) for _ in range(rows)])
    stored = random_bias(bias, rows, rng) if bias else b""
    doc.layer("layer", n, out, c, layer_blob(codes, bits, scales, stored), stack=stack, transform=t, bias=bias)
    return doc


def spec_example() -> Doc:
    """SPEC section 16."""
    doc = Doc()
    doc.codebook(2, f32_bytes(LLOYD_2))
    doc.transform(6, 2, ("signs", b"\x29"), ("hartley",))
    codes = [[0, 1, 2, 3, 2, 1], [3, 3, 0, 1, 2, 2]]
    data = layer_blob(codes, 2, f32_bytes([0.1, 2.0]), bias_bytes("f16", [0.25, -1.0]))
    doc.layer("mlp.up", 6, 2, 0, data, transform=0, bias="f16")
    doc.tensor("norm.weight", "bf16", [3], struct.pack("<3H", 0x3F80, 0xC000, 0x3DCD))
    doc.attachment("config.json", "application/json", b'{"model_type":"tiny"}')
    doc.header["metadata"] = {"name": "tiny"}
    return doc


def base_two() -> Doc:
    """Two layers that share tables, two tensors, two attachments."""
    doc, rng = Doc(), Rng("base-two")
    doc.codebook(3, f32_bytes(codebook("arbitrary", 3, rng)))
    doc.transform(6, 2, ("signs", b"\x15"), None)
    for name in ("a", "b"):
        codes = [[rng.below(8) for _ in range(6)] for _ in range(2)]
        data = layer_blob(codes, 3, f32_bytes([0.5, -0.25]), bias_bytes("bf16", [1.5, -3.0]))
        doc.layer(name, 6, 2, 0, data, transform=0, bias="bf16")
    doc.tensor("t", "f32", [2], f32_bytes([1.0, 2.0]))
    doc.tensor("u", "u8", [3], b"\1\2\3")
    doc.attachment("A.txt", "text/plain", b"A")
    doc.attachment("b.txt", "text/plain", b"bb")
    return doc


def base_matrix() -> Doc:
    """Values on the diagonal, a stored factor that is not symmetric, a bias of f32."""
    doc, rng = Doc(), Rng("base-matrix")
    doc.codebook(2, f32_bytes(codebook("bell", 2, rng)))
    F = [v for row in haar(3, 7) for v in row]
    doc.transform(12, 4, ("values", f32_bytes([0.5 + j / 8 for j in range(12)])), ("matrix", f32_bytes(F)))
    codes = [[rng.below(4) for _ in range(12)] for _ in range(3)]
    data = layer_blob(codes, 2, f32_bytes([0.5, -0.25, 1.0]), bias_bytes("f32", [1.5, -3.0, 0.125]))
    doc.layer("m", 12, 3, 0, data, transform=0, bias="f32")
    return doc


def base_haar() -> Doc:
    """SPEC section 7.3: a factor of order 3 from seed 42."""
    doc, rng = Doc(), Rng("base-haar")
    doc.codebook(2, f32_bytes(codebook("bell", 2, rng)))
    doc.transform(12, 4, None, ("haar", f32_bytes(witness(haar(3, 42))), 42))
    codes = [[rng.below(4) for _ in range(12)] for _ in range(3)]
    doc.layer("h", 12, 3, 0, layer_blob(codes, 2, f32_bytes([0.5, -0.25, 1.0])), transform=0)
    return doc


def base_padding(bits: int) -> Doc:
    """One layer of 33 columns without a transform: 31 padding codes in each row."""
    doc, rng = Doc(), Rng(f"base-padding-{bits}")
    doc.codebook(bits, f32_bytes(codebook("uniform", bits, rng)))
    codes = [[rng.below(2**bits) for _ in range(33)] for _ in range(2)]
    doc.layer("p", 33, 2, 0, layer_blob(codes, bits, f32_bytes([0.5, 2.0])))
    return doc


def plain(name: str = "layer", *, n: int = 4, bits: int = 2, window: int = 2, doc: Doc | None = None) -> Doc:
    """One layer of a row without a transform."""
    doc = doc or Doc()
    if not doc.header["codebooks"]:
        doc.codebook(bits, f32_bytes([k - 1.5 for k in range(2**window)]))
    codes = [[j % 2**bits for j in range(n)]]
    doc.layer(name, n, 1, 0, layer_blob(codes, bits, f32_bytes([0.5])))
    return doc


def all_cases(cases: Cases) -> None:
    bases(cases)
    for bits, kind, bias, book, stack, n in pairwise():
        word = "plain" if kind is None else f"{kind[0]}-{kind[1]}"
        id = f"layer-b{bits}-{word}-{bias or 'nobias'}-{book}-s{stack}-n{n}"
        doc = one_layer(bits, kind, bias, book, stack, n, Rng(id))
        rules = ["RSV-501", "RSV-502", "RSV-504", "RSV-510", "RSV-520", "RSV-530", "RSV-720"]
        if stack > 1:
            rules += ["RSV-531", "RSV-534"]
        if bias:
            rules.append("RSV-533")
        if kind:
            rules += ["RSV-701", "RSV-702", "RSV-703", "RSV-721", "RSV-722"]
            rules.append({"none": "RSV-704", "hartley": "RSV-705", "matrix": "RSV-706", "haar": "RSV-707"}[kind[1]])
        if kind and kind[1] in ("matrix", "haar"):
            rules.append("RSV-708")
        if kind and kind[1] == "haar":
            rules += ["RSV-710", "RSV-711", "RSV-712", "RSV-713"]
        if n % 32:
            rules.append("RSV-511")
        what = f"one layer: {bits} bits, transform {word}, bias {bias}, {book} codebook, stack {stack}, {n} columns"
        add(cases, id, doc, sorted(set(rules)), what)
    tables(cases)
    numbers(cases)
    transforms(cases)
    ranges(cases)
    tensors(cases)
    texts(cases)
    names(cases)
    limits(cases)


def bases(cases: Cases) -> None:
    add(cases, "spec-example", spec_example(), ["RSV-501", "RSV-505"], "the file of SPEC section 16")
    add(cases, "empty", Doc(), ["RSV-505"], "no layer, no tensor, no attachment: a header alone")
    add(cases, "base-two", base_two(), ["RSV-501"], "two layers that share a codebook and a transform")
    add(cases, "base-matrix", base_matrix(), ["RSV-706", "RSV-708"], "values on the diagonal and a stored factor")
    add(cases, "base-haar", base_haar(), ["RSV-707", "RSV-712", "RSV-713"], "a derived factor: the one of SPEC 7.3")
    for bits in (1, 3, 8):
        add(
            cases, f"base-padding-b{bits}", base_padding(bits), ["RSV-511"], f"31 padding codes of {bits} bits in a row"
        )


def tables(cases: Cases) -> None:
    doc = base_two()
    doc.codebook(3, doc.blobs["codebook", 0])
    doc.header["layers"][1]["codebook"] = 1
    add(cases, "equal-codebooks-twice", doc, ["RSV-803", "RSV-814"], "two equal codebooks, each used by a layer",
        flags=["non-canonical"])  # fmt: skip
    doc = base_two()
    doc.transform(6, 2, ("signs", b"\x15"), None)
    doc.header["layers"][1]["transform"] = 1
    add(cases, "equal-transforms-twice", doc, ["RSV-803", "RSV-814"], "two equal transforms, each used by a layer",
        flags=["non-canonical"])  # fmt: skip
    doc = base_two()
    doc.header["layers"].reverse()
    doc.blobs["layer", 0], doc.blobs["layer", 1] = doc.blobs["layer", 1], doc.blobs["layer", 0]
    doc.header["tensors"].reverse()
    doc.blobs["tensor", 0], doc.blobs["tensor", 1] = doc.blobs["tensor", 1], doc.blobs["tensor", 0]
    doc.header["attachments"].reverse()
    doc.blobs["attachment", 0], doc.blobs["attachment", 1] = doc.blobs["attachment", 1], doc.blobs["attachment", 0]
    add(cases, "entries-not-sorted", doc, ["RSV-209", "RSV-803", "RSV-812"], "entries in the reverse order of names",
        flags=["non-canonical"])  # fmt: skip
    # tables in another order than that of use, of different sizes, so that a wrong walk shows
    doc, rng = Doc(), Rng("tables")
    doc.codebook(5, f32_bytes(codebook("bell", 5, rng)))
    doc.codebook(1, f32_bytes(codebook("arbitrary", 1, rng)))
    doc.codebook(4, f32_bytes(codebook("uniform", 4, rng)))
    doc.transform(24, 8, diagonal("values", 24, rng), factor("haar", 3, rng))
    doc.transform(10, 2, None, factor("matrix", 5, rng))
    doc.transform(24, 4, diagonal("signs", 24, rng), factor("hartley", 6, rng))
    doc.transform(10, 1, None, None)
    for k, (book, t, n, bits) in enumerate(
        [(2, 1, 10, 4), (0, 0, 24, 5), (1, 2, 24, 1), (0, 3, 10, 5), (1, None, 7, 1)]
    ):
        codes = [[rng.below(2**bits) for _ in range(n)] for _ in range(2)]
        scales = f32_bytes([rng.real(0.1, 1), rng.real(0.1, 1)])
        bias = [None, "f32", "f16", "bf16", None][k]
        stored = random_bias(bias, 2, rng) if bias else b""
        doc.layer(f"l{k}", n, 2, book, layer_blob(codes, bits, scales, stored), transform=t, bias=bias)
    doc.tensor("t", "i64", [2], struct.pack("<2q", -1, 2**62))
    doc.attachment("x", "text/plain", b"x")
    add(cases, "tables-out-of-order", doc, ["RSV-501", "RSV-502", "RSV-803", "RSV-813"],
        "three codebooks and four transforms of every kind, in another order than that of use",
        flags=["non-canonical"])  # fmt: skip
    doc = plain("only")
    doc.codebook(2, f32_bytes([-1.5, -0.5, 0.5, 1.75]))
    plain("second", doc=doc)
    doc.header["layers"][1]["codebook"] = 1
    add(cases, "codebooks-two", doc, ["RSV-813"], "two layers with two codebooks of equal width")


def numbers(cases: Cases) -> None:
    def books(id: str, centroids: list[float], rules: list[str], what: str, bits: int = 2, **more: Any) -> None:
        doc = Doc()
        doc.codebook(bits, f32_bytes(centroids))
        n = len(centroids)
        doc.layer("layer", n, 1, 0, layer_blob([list(range(n))], bits, f32_bytes([0.5])))
        add(cases, id, doc, rules, what, **more)

    books("uniform-through-negative-zero", [-1.0, -0.0, 1.0, 2.0], ["RSV-521"],
          "uniform: -0 equals the 0 of the formula", flags=["edge"])  # fmt: skip
    books("uniform-not-by-a-rounding", [f32(0.1 * k) for k in range(4)], ["RSV-521"],
          "steps of a tenth: equal as f32 arithmetic goes, not uniform in binary64")  # fmt: skip
    books("uniform-not-by-an-ulp", [0.0, 1.0, 2.0, 3.0000002384185791015625], ["RSV-521"],
          "the last centroid is one unit in the last place off")  # fmt: skip
    books(
        "uniform-one-bit",
        [0.1, 0.30000001192092896],
        ["RSV-521"],
        "two centroids, uniform as nearly all pairs are",
        bits=1,
    )
    books(
        "uniform-one-bit-not", [f32(-1e30), 1.0], ["RSV-521"], "two centroids: -1e30 + (1 + 1e30) is 0, not 1", bits=1
    )
    books("uniform-fused-only", [f32(-1.2 * 2.0**-52), 1.5, 3.0, 4.5], ["RSV-521"],
          "uniform if multiply and add were fused, not if each is rounded", flags=["parser-trap"])  # fmt: skip
    books("centroids-subnormal", [-2.0**-149, 0.0, 2.0**-149, 2.0**-148], ["RSV-520", "RSV-608", "RSV-720"],
          "the smallest numbers there are; half of 2^-149 rounds to 0, to even", flags=["edge"])  # fmt: skip
    big = struct.unpack("<f", b"\xff\xff\x7f\x7f")[0]
    books("centroids-largest", [-big, -1.0, 1.0, big], ["RSV-520", "RSV-606"], "the largest finite numbers",
          flags=["edge"])  # fmt: skip
    books("centroids-adjacent", [1.0, 1.00000011920928955, 1.0000002384185791, 1.0000003576278687],
          ["RSV-608"], "neighbours in binary32", flags=["edge"])  # fmt: skip

    def scales(id: str, values: list[float], rules: list[str], what: str, **more: Any) -> None:
        doc = Doc()
        doc.codebook(2, f32_bytes(LLOYD_2))
        codes = [[(r + j) % 4 for j in range(5)] for r in range(len(values))]
        doc.layer("layer", 5, len(values), 0, layer_blob(codes, 2, f32_bytes(values)))
        add(cases, id, doc, rules, what, **more)

    scales("scales-zero-and-negative", [0.0, -0.0, -1.0, -0.75], ["RSV-532", "RSV-720"],
           "scales of 0, -0 and below; W_rot keeps the sign of zero")  # fmt: skip
    scales("scales-subnormal", [2.0**-149, 3 * 2.0**-148, 2.0**-126, -(2.0**-127)], ["RSV-532", "RSV-720"],
           "subnormal scales and products: rounded once, to even, not flushed", flags=["edge"])  # fmt: skip
    scales("scales-rounding", [f32(1 / 3), f32(2 / 7), f32(1.1), f32(1e-20)], ["RSV-720"], "products that round")
    scales("scales-overflow", [3e38, -3e38, 1.0], ["RSV-720", "RSV-723", "RSV-802"],
           "scale times centroid overflows: a writer should not, a reader yields infinity")  # fmt: skip
    for dtype, words, what in (
        ("f16", [0x0001, 0x83FF, 0x7BFF, 0xFBFF, 0x8000, 0x3C01], "subnormal, largest, -0, 1 + 2^-10"),
        ("bf16", [0x0001, 0x807F, 0x7F7F, 0xFF7F, 0x8000, 0x3F81], "subnormal, largest, -0, 1 + 2^-7"),
    ):
        doc = Doc()
        doc.codebook(2, f32_bytes(LLOYD_2))
        data = layer_blob([[0, 1, 2]] * 6, 2, f32_bytes([1.0] * 6), struct.pack("<6H", *words))
        doc.layer("layer", 3, 6, 0, data, bias=dtype)
        add(cases, f"bias-{dtype}-extremes", doc, ["RSV-533", "RSV-606"], f"bias of {dtype}: {what}", flags=["edge"])
    for bits in range(1, 9):
        doc, rng = Doc(), Rng(f"codes-{bits}")
        doc.codebook(bits, f32_bytes(codebook("arbitrary", bits, rng)))
        n = max(64, 2**bits)
        rows = [[j % 2**bits for j in range(n)], [2**bits - 1] * n, [0] * n, [rng.below(2**bits) for _ in range(n)]]
        doc.layer("layer", n, 4, 0, layer_blob(rows, bits, f32_bytes([1.0, -0.5, 0.25, 2.0])))
        add(cases, f"codes-all-b{bits}", doc, ["RSV-510"], f"every code of {bits} bits, all ones, all zeros, and noise")
    for n in (2, 63, 64, 65, 95, 97):
        doc, rng = Doc(), Rng(f"columns-{n}")
        doc.codebook(3, f32_bytes(codebook("bell", 3, rng)))
        rows = [[rng.below(8) for _ in range(n)] for _ in range(17)]
        doc.layer("layer", n, 17, 0, layer_blob(rows, 3, f32_bytes([rng.real(0.1, 1) for _ in range(17)])))
        add(cases, f"columns-{n}-rows-17", doc, ["RSV-510", "RSV-511", "RSV-530"], f"17 rows of {n} columns")


def transforms(cases: Cases) -> None:
    def one(id: str, dim: int, h: int, d: Any, F: Any, rules: list[str], what: str, **more: Any) -> None:
        doc, rng = Doc(), Rng(id)
        doc.codebook(4, f32_bytes(codebook("bell", 4, rng)))
        doc.transform(dim, h, d, F)
        codes = [[rng.below(16) for _ in range(dim)] for _ in range(2)]
        doc.layer("layer", dim, 2, 0, layer_blob(codes, 4, f32_bytes([0.5, -0.75])), transform=0)
        add(cases, id, doc, rules, what, **more)

    rng = Rng("transforms")
    one("transform-identity", 5, 1, None, None, ["RSV-704", "RSV-721", "RSV-815"], "a transform that is the identity")
    one("transform-ones", 5, 1, ("values", f32_bytes([1.0] * 5)), None, ["RSV-702", "RSV-721", "RSV-815"],
        "a diagonal of ones")  # fmt: skip
    one("transform-one-dim", 1, 1, ("signs", b"\1"), None, ["RSV-702", "RSV-703"], "of order 1, the sign set",
        flags=["edge"])  # fmt: skip
    one("transform-hadamard-only", 64, 64, None, None, ["RSV-703"], "H_64 alone")
    one("transform-hadamard-4096", 4096, 4096, diagonal("signs", 4096, rng), None, ["RSV-703"], "H_4096 and signs")
    one("transform-factor-null-m-3", 12, 4, None, None, ["RSV-704"], "the identity of order 3 times H_4")
    for m, h in ((2, 1), (2, 4), (4, 2), (64, 1), (100, 1), (129, 2)):
        one(f"hartley-{m}-h{h}", m * h, h, None, ("hartley",), ["RSV-705"], f"a Hartley factor of order {m}, H_{h}")
    one("hartley-20011", 20011, 1, diagonal("signs", 20011, rng), ("hartley",), ["RSV-705"],
        "a Hartley factor of a large prime order: the matrix must not be built")  # fmt: skip
    one("matrix-permutation", 12, 4, None, ("matrix", f32_bytes([0, 1, 0, 0, 0, 1, 1, 0, 0])),
        ["RSV-706", "RSV-708"], "a cyclic permutation, the simplest factor that is not its own inverse")  # fmt: skip
    one("matrix-identity", 6, 2, None, ("matrix", f32_bytes([1, 0, 0, 0, 1, 0, 0, 0, 1])), ["RSV-706", "RSV-815"],
        "a stored factor that is the identity")  # fmt: skip
    one("matrix-reflection", 6, 2, None, ("matrix", f32_bytes([-1, 0, 0, 0, 1, 0, 0, 0, 1])), ["RSV-706"],
        "a factor of determinant -1")  # fmt: skip
    F = [1.0, 0.0, 8.9e-5, 0.0, 1.0, 0.0, 0.0, 0.0, 1.0]
    one("matrix-orthogonal-enough", 6, 2, None, ("matrix", f32_bytes(F)), ["RSV-609"],
        "an element of F F^T - I is 8.9e-5: a reader takes it, a writer would not",
        flags=["edge", "non-canonical"])  # fmt: skip
    for m, seed in ((2, 0), (3, 42), (5, 2**53 - 1), (16, 1), (33, 2**32), (64, 123456789)):
        one(f"haar-{m}-seed-{seed}", m * 2, 2, None, ("haar", f32_bytes(witness(haar(m, seed))), seed),
            ["RSV-710", "RSV-711", "RSV-712", "RSV-713"], f"a Haar factor of order {m} from seed {seed}",
            flags=["edge"] if seed in (0, 2**53 - 1) else [])  # fmt: skip
    near = witness(haar(3, 42))
    near[1] += 8.9e-6
    one("haar-witness-near", 6, 2, None, ("haar", f32_bytes(near), 42), ["RSV-610"], "a witness that is 8.9e-6 off",
        flags=["edge", "non-canonical"])  # fmt: skip
    values = [2.0 ** (-60 + 10 * (j % 13)) * (-1) ** j for j in range(24)]
    one("values-wide-range", 24, 8, ("values", f32_bytes(values)), ("hartley",), ["RSV-702", "RSV-721", "RSV-722"],
        "a diagonal from 2^-60 to 2^60")  # fmt: skip
    one("values-subnormal", 3, 1, ("values", f32_bytes([1.0, 2.0**-149, -(2.0**-126)])), None,
        ["RSV-606", "RSV-607"], "a diagonal with subnormal numbers, which are not zero",
        flags=["edge"], dequantize=False)  # fmt: skip
    for dim, bits in ((7, 0x7F), (8, 0xFF), (9, 0x1FF)):
        data = bits.to_bytes((dim + 7) // 8, "little")
        one(f"signs-all-{dim}", dim, dim & -dim, ("signs", data), None, ["RSV-502", "RSV-605", "RSV-702"],
            f"{dim} signs, all set")  # fmt: skip


def ranges(cases: Cases) -> None:
    """Rows and results near both ends of binary32, where sums on the way may overflow (RSV-723)."""

    def normal(values: list[float]) -> bool:
        return all(v == 0 or 2.0**-126 <= abs(v) < f32(3e38) for v in values)

    def one(id: str, dim: int, h: int, d: list[float] | None, F: Any, scale: float, what: str) -> None:
        doc, rng = Doc(), Rng(id)
        doc.codebook(4, f32_bytes(codebook("bell", 4, rng)))
        doc.transform(dim, h, None if d is None else ("values", f32_bytes(d)), F)
        codes = [[rng.below(16) for _ in range(dim)] for _ in range(2)]
        doc.layer("layer", dim, 2, 0, layer_blob(codes, 4, f32_bytes([scale, -0.75 * scale])), transform=0)
        T = expect.Transform(doc, 0)
        x = expect.input_vector(dim)
        xd = [a * b for a, b in zip(x, T.d, strict=True)]
        results = [norm(xd), *xd, *T.activation(x)]
        for row, s in zip(codes, (scale, -0.75 * scale), strict=True):
            w = [f32(f32(s) * c) for c in (f32_list(doc.blobs["codebook", 0])[k] for k in row)]
            results += [norm(w), *T.row(w)]
        assert normal(results), id
        add(cases, id, doc, ["RSV-721", "RSV-722", "RSV-723"], what, flags=["edge"])

    rng = Rng("ranges")
    matrix = factor("matrix", 33, rng)
    one(
        "range-hartley-4099-large",
        4099,
        1,
        None,
        ("hartley",),
        1.5e36,
        "a Hartley factor of order 4099, rows near the largest f32",
    )
    one(
        "range-hartley-1031-large",
        1031,
        1,
        None,
        ("hartley",),
        6e36,
        "a Hartley factor of prime order, rows near the largest f32",
    )
    one("range-hadamard-4096-large", 4096, 4096, None, None, 2e36, "H_4096 of rows near the largest f32")
    one("range-matrix-33-large", 33, 1, None, matrix, 2e37, "a stored factor, rows near the largest f32")
    one(
        "range-hartley-260-h8-large",
        2080,
        8,
        None,
        ("hartley",),
        3e36,
        "Hartley and Hadamard, rows near the largest f32",
    )
    one(
        "range-hartley-1031-small",
        1031,
        1,
        None,
        ("hartley",),
        3e-34,
        "a Hartley factor of prime order, rows near the least normal f32",
    )
    one("range-hadamard-64-small", 64, 64, None, None, 2e-36, "H_64 of rows near the least normal f32")
    large = [(-1) ** rng.below(2) * rng.real(0.5, 2) for _ in range(1031)]
    one("range-d-large", 1031, 1, [4e36 * v for v in large], ("hartley",), 1.0, "a diagonal near the largest f32")
    one("range-d-small", 1031, 1, [3e-33 * v for v in large], ("hartley",), 1.0, "a diagonal near the least normal f32")
    one(
        "range-w-large-d-small", 1031, 1, [1e-30 * v for v in large], ("hartley",), 6e36, "large rows, a small diagonal"
    )
    one(
        "range-w-small-d-large", 1031, 1, [1e30 * v for v in large], ("hartley",), 3e-33, "small rows, a large diagonal"
    )
    doc, rng = Doc(), Rng("range-w-overflows")
    doc.codebook(4, f32_bytes(codebook("bell", 4, rng)))
    assert expect.input_vector(16)[8] == 0
    doc.transform(16, 16, ("values", f32_bytes([2.0**125 if j == 8 else 1.0 for j in range(16)])), None)
    codes = [[rng.below(16) for _ in range(16)] for _ in range(2)]
    doc.layer("layer", 16, 2, 0, layer_blob(codes, 4, f32_bytes([1024.0, 2048.0])), transform=0)
    add(cases, "range-w-overflows", doc, ["RSV-722", "RSV-723", "RSV-725"],
        "W is beyond f32 where x is zero: y is finite", flags=["edge"])  # fmt: skip


def tensors(cases: Cases) -> None:
    doc, rng = Doc(), Rng("dtypes")
    for dtype, size in DTYPE_NBYTES.items():
        data = bytes(rng.below(256) for _ in range(12 * size)) if dtype != "bool" else bytes([0, 1] * 6)
        doc.tensor(f"t.{dtype}", dtype, [3, 4], data)
    add(cases, "tensor-every-dtype", doc, ["RSV-502", "RSV-540"], "a tensor of each dtype, in the order of the table",
        flags=["non-canonical"])  # fmt: skip
    doc = Doc()
    doc.tensor("a.bool", "bool", [4], bytes([0, 1, 2, 255]))
    doc.tensor("b.f16", "f16", [3], struct.pack("<3H", 0x7E01, 0x7C00, 0xFC00))
    doc.tensor("c.bf16", "bf16", [3], struct.pack("<3H", 0x7FC1, 0x7F80, 0xFF80))
    doc.tensor("d.f32", "f32", [3], struct.pack("<3I", 0x7F800001, 0xFFC12345, 0xFF800000))
    doc.tensor("e.f64", "f64", [2], struct.pack("<2Q", 0x7FF0000000000001, 0xFFF8000000000001))
    add(cases, "tensor-values-free", doc, ["RSV-541", "RSV-542"],
        "bool bytes above 1; NaN with payloads, signalling too, and infinities", flags=["non-canonical"])  # fmt: skip
    doc = Doc()
    doc.tensor("a.scalar", "f64", [], struct.pack("<d", -0.0))
    doc.tensor("b.empty", "f32", [0], b"")
    doc.tensor("c.empty", "u8", [3, 0, 2], b"")
    doc.tensor("d.rank-8", "i16", [1, 2, 1, 3, 1, 1, 2, 1], struct.pack("<12h", *range(-6, 6)))
    doc.tensor("e.ones", "u8", [1, 1, 1, 1, 1, 1, 1, 1], b"\x07")
    doc.tensor("f.empty", "bool", [0, 0, 0, 0, 0, 0, 0, 0], b"")
    add(cases, "tensor-shapes", doc, ["RSV-502", "RSV-540"], "rank 0, rank 8, and empty ones between others")
    doc = Doc()
    doc.tensor("huge.empty", "u8", [0, 2**53 - 1], b"")
    doc.tensor("huge.f64", "f64", [2**50 - 1, 0], b"")
    add(cases, "tensor-empty-huge-axis", doc, ["RSV-503"], "empty, but the lengths that are not zero reach the limit",
        flags=["edge"])  # fmt: skip
    doc = Doc()
    doc.tensor("end", "u8", [0], b"")
    add(cases, "tensor-empty-last", doc, ["RSV-502", "RSV-505"], "the last blob is empty", flags=["edge"])
    doc = Doc()
    doc.attachment("a.bin", "application/octet-stream", bytes(range(256)))
    doc.attachment("empty.txt", "text/plain", b"")
    doc.attachment("z.json", "application/vnd.api+json", b'{"a": 1}')
    add(cases, "attachments", doc, ["RSV-502", "RSV-550"], "three attachments, one of them empty")
    # the file ends exactly at a page
    doc = Doc()
    doc.attachment("fill", "text/plain", b"")
    text = doc.text()
    room = 16384 - (64 + -(-len(text) // 64) * 64)
    for extra, word in ((0, "full"), (1, "over")):
        doc = Doc()
        doc.attachment("fill", "text/plain", b"x" * (room - 64 + extra))
        grown = 64 + -(-len(doc.text()) // 64) * 64
        doc.put(("attachment", 0), b"x" * (16384 - grown + extra))
        doc.header["attachments"][0]["nbytes"] = 16384 - grown + extra
        add(cases, f"page-{word}", doc, ["RSV-505"],
            "the last blob ends at the end of a page" if extra == 0 else "the last blob ends one byte into a new page",
            flags=["edge"])  # fmt: skip


def texts(cases: Cases) -> None:
    """Legal JSON in forms that are not canonical."""
    doc = spec_example()

    def variant(
        id: str, text: bytes, rules: list[str], what: str, *, of: Doc = doc, flags: tuple[str, ...] = ()
    ) -> None:
        add(
            cases,
            id,
            of,
            rules,
            what,
            text=text,
            flags=["non-canonical", *flags],
            base="spec-example" if of is doc else None,
        )

    loose = json.dumps(doc.header, indent="\t", separators=(" ,\r\n", " : ")).encode()
    variant(
        "json-white-space", b" \t\r\n" + loose + b"\r\n\t ", ["RSV-209"], "white space of all four kinds around tokens"
    )

    def backwards(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: backwards(node[key]) for key in sorted(node, reverse=True)}
        return [backwards(item) for item in node] if isinstance(node, list) else node

    variant("json-member-order", json.dumps(backwards(doc.header), separators=(",", ":")).encode(), ["RSV-209"],
            "members in the reverse order")  # fmt: skip
    escaped = "".join(f"\\u{ord(c):04X}" if c.isalpha() else c for c in '"mlp.up"')
    text = doc.text().replace(b'"mlp.up"', escaped.encode()).replace(b'"bits"', b'"\\u0062\\u0069\\u0074\\u0073"')
    text = text.replace(b"application/json", b"application\\/json").replace(b'"hartley"', b'"h\\u0061rtley"')
    variant("json-escapes", text, ["RSV-208", "RSV-209"], "escapes where none is needed, in names and values")
    doc2 = plain()
    doc2.header["metadata"] = {"emoji": "\U0001f600", "controls": '\b\f\n\r\t"\\/\x00\x1f\x7f\u2028'}
    text = doc2.text().replace("\U0001f600".encode(), b"\\uD83D\\uDe00")
    variant("json-surrogate-pair", text, ["RSV-207"], "an escaped surrogate pair, and all short escapes", of=doc2)
    doc3 = plain()
    doc3.header["metadata"] = {"brackets": "[" * 99 + '{,"\\', 'quote\\": [[': ",,,"}
    variant("json-brackets-in-strings", doc3.text(), ["RSV-202", "RSV-203"],
            "brackets, commas, quotes and backslashes inside strings", of=doc3, flags=("parser-trap",))  # fmt: skip
    doc4 = plain()
    doc4.header["metadata"] = {
        "": "empty key", "clé": "é", "cle\u0301": "e + U+0301, another key", "ключ": "键", "\U0001F511": "astral",
        "\uffff": "U+FFFF", "\ue000": "private", "a\u202eb": "bidirectional", "K": "Kelvin", "k": "k",
        "__proto__": "p", "constructor": "c", "toString": "t", "hasOwnProperty": "h", "length": "7", "0": "zero",
        "1": "one", "01": "zero one", "nul\x00": "\x00", "line\u2028": "\u2029",
    }  # fmt: skip
    add(cases, "metadata-unicode-keys", doc4, ["RSV-208", "RSV-811"],
        "keys of every kind: empty, equal only when normalized, beyond U+FFFF, names of JavaScript's objects",
        flags=["parser-trap"])  # fmt: skip
    doc5 = plain()
    deep: Any = 7
    for k in range(30):
        deep = [deep] if k % 2 else {"x": deep}
    doc5.header["extensions"] = {
        "org.example.deep": deep, "org.example.numbers": [0, -1, 2**53 - 1, -(2**53 - 1), 10, 1000000],
        "org.example.kinds": [True, False, None, "", {}, [], {"": [None]}],
        "__proto__": {"sha256": "x"}, "UPPER case / odd": 1, "org.example.layers": {"layers": [{"name": "layer"}]},
    }  # fmt: skip
    add(cases, "extensions", doc5, ["RSV-202", "RSV-205", "RSV-904"],
        "extensions of every JSON value, nested exactly 32 deep, with names that no rule allows or forbids",
        flags=["edge", "parser-trap"])  # fmt: skip
    for minor in (1, 2, 65535):
        add(cases, f"minor-version-{minor}", plain(), ["RSV-103", "RSV-902"], f"version 1.{minor}", minor=minor,
            flags=["non-canonical"])  # fmt: skip
    for extra in range(0, 64):
        doc6 = plain()
        doc6.header["metadata"] = {"pad": "x" * extra}
        if len(doc6.text()) % 64 in (0, 1, 63):
            add(cases, f"header-mod-64-is-{len(doc6.text()) % 64}", doc6, ["RSV-110", "RSV-504"],
                f"header_nbytes is {len(doc6.text()) % 64} mod 64", flags=["edge"])  # fmt: skip


def names(cases: Cases) -> None:
    for id, name, what in (
        ("name-512-astral", "\U0001f600" * 512, "512 code points, 1024 UTF-16 units, 2048 bytes"),
        ("name-512-ascii", "n" * 512, "512 characters"),
        ("name-one", "x", "one character"),
        ("name-odd", 'a/b\\c:.. \u0080\u202e\ufeff"', "no path: separators, quotes, bidirectional characters"),
        ("name-proto", "__proto__", "the name of a JavaScript object's prototype"),
        ("name-space", " ", "a space"),
    ):
        doc = plain(name)
        doc.tensor(name + ".tensor" if len(name) < 500 else name[:-1] + "t", "u8", [1], b"\1")
        add(cases, id, doc, ["RSV-302"], f"a name of {what}", flags=["edge", "parser-trap"])
    doc = plain("a")
    plain("a.weights", doc=doc)
    plain("a.b", doc=doc)
    plain("A", doc=doc)
    plain("\u00e9", doc=doc)
    plain("e\u0301", doc=doc)
    doc.header["layers"].sort(key=lambda layer: layer["name"])
    doc.tensor("a.bia", "u8", [1], b"\1")
    doc.tensor("a.weight.x", "u8", [1], b"\2")
    doc.tensor("weight", "u8", [1], b"\3")
    add(cases, "names-almost-equal", doc, ["RSV-208", "RSV-409"],
        "names that differ in case, in normalization, or by a suffix that claims nothing")  # fmt: skip
    doc = Doc()
    doc.attachment("a" * 255, "a/b", b"1")
    doc.attachment("a..b-_", "x" * 127 + "/" + "y" * 127, b"2")
    doc.attachment("a.", "application/1!#$&^_.+-", b"3")
    doc.attachment("0", "0/0", b"4")
    doc.attachment("_x", "text/plain", b"5")
    doc.attachment("CON", "text/plain", b"6")
    doc.header["attachments"].sort(key=lambda a: a["name"])
    for i, entry in enumerate(doc.header["attachments"]):
        data = {"a" * 255: b"1", "a..b-_": b"2", "a.": b"3", "0": b"4", "_x": b"5", "CON": b"6"}[entry["name"]]
        doc.put(("attachment", i), data)
    add(cases, "attachment-names", doc, ["RSV-302", "RSV-410"], "names and media types at their limits",
        flags=["edge"])  # fmt: skip
    doc = Doc()
    doc.attachment("x", "a" * 127 + "/" + "b" * 127, b"")
    add(cases, "attachment-name-that-is-a-layer", plain("x", doc=doc), ["RSV-409", "RSV-410"],
        "an attachment, named as a layer is: they do not share their names")  # fmt: skip


def limits(cases: Cases) -> None:
    doc = plain()
    text = doc.text()
    full = text + b" " * (2**26 - len(text))
    add(cases, "header-64-mib", doc, ["RSV-105"], "a header of exactly 64 MiB, most of it white space", text=full,
        large=True, flags=["edge", "non-canonical"], dequantize=False)  # fmt: skip
    for id, nbytes in (("small", 12288), ("large", 81920)):
        doc = with_values(nbytes, 4096 + nbytes // 16)
        add(cases, f"json-values-most-{id}", doc, ["RSV-203"],
            f"{4096 + nbytes // 16} commas and brackets in {nbytes} bytes", large=True, period=2,
            flags=["edge"], dequantize=False)  # fmt: skip
    doc = with_values(12288, 4096 + 12288 // 16, "\U0001f600")
    add(cases, "json-values-most-wide", doc, ["RSV-203"], "the same in characters of four bytes each", large=True,
        period=4, flags=["edge", "parser-trap"], dequantize=False)  # fmt: skip
    doc = with_values(12000, 4096 + 12288 // 16)
    add(cases, "json-values-most-padded", doc, ["RSV-203", "RSV-209"], "the same, legal only by the spaces at the end",
        text=doc.text().ljust(12288), large=True, period=2, flags=["edge", "non-canonical"],
        dequantize=False)  # fmt: skip
    doc = Doc()
    doc.codebook(1, f32_bytes([-1.0, 1.0]))
    data = b"\1\0\0\0" * 65535
    data = data.ljust(-(-len(data) // 64) * 64, b"\0") + f32_bytes([0.5]) * 65535
    doc.layer("layer", 1, 1, 0, data, stack=65535)
    add(cases, "stack-65535", doc, ["RSV-302", "RSV-531"], "the largest stack, of 1 by 1 matrices", large=True,
        period=4, flags=["edge"])  # fmt: skip
    doc = Doc()
    doc.codebook(1, f32_bytes([-1.0, 1.0]))
    doc.layer("layer", 2**24, 1, 0, _wide(2**24))
    add(cases, "in-features-16777216", doc, ["RSV-302", "RSV-510"], "the widest row", large=True, flags=["edge"],
        dequantize=False)  # fmt: skip
    doc = Doc()
    doc.codebook(1, f32_bytes([-1.0, 1.0]))
    doc.transform(2**24, 2**24, ("signs", b"\xaa" * 2**21), None)
    doc.layer("layer", 2**24, 1, 0, _wide(2**24), transform=0)
    add(cases, "hadamard-16777216", doc, ["RSV-302", "RSV-703"], "the largest Hadamard part", large=True,
        flags=["edge"], decode=False, dequantize=False)  # fmt: skip
    doc = Doc()
    doc.codebook(1, f32_bytes([-1.0, 1.0]))
    doc.transform(2**24, 1, None, ("hartley",))
    doc.layer("layer", 2**24, 1, 0, _wide(2**24), transform=0)
    add(cases, "hartley-16777216", doc, ["RSV-302", "RSV-705"],
        "the largest Hartley factor: 2^50 bytes if a reader built it", large=True, flags=["edge", "bomb"],
        decode=False, dequantize=False)  # fmt: skip


def with_values(nbytes: int, count: int, unit: str = "a") -> Doc:
    """A header of this length and with so many of the bytes of RSV-203, by an extension that ends in a long string."""
    doc = spec_example()
    doc.header["extensions"] = {"x": [""]}
    text = doc.text()
    zeros = count - sum(text.count(c) for c in (b",", b"[", b"{"))
    times, rest = divmod(nbytes - len(text) - 2 * zeros, len(unit.encode()))
    doc.header["extensions"] = {"x": [0] * zeros + [unit * times + "a" * rest]}
    assert len(doc.text()) == nbytes
    return doc


def _wide(n: int) -> bytes:
    """One row of n codes of 1 bit, 0 and 1 in turn, and its scale."""
    return b"\xaa" * (n // 8) + f32_bytes([0.5])
