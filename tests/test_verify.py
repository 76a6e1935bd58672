"""Verify: each fault of a blob, put in on purpose with the digest renewed, is found, named and placed."""

from __future__ import annotations

import struct
import sys
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from strategies import (
    Tree,
    align,
    assemble,
    blob_sizes,
    compact,
    make_layer,
    make_transform,
    ones_and_all,
    owners_of_blobs,
    sha,
    sign,
    small_file,
    split,
    tree_of,
)

import rsv_format
from rsv_format import RsvError, Transform
from rsv_format.payload import codebook_faults, codes_faults, diagonal_faults, factor_faults, floats_faults

CODEBOOK, SIGNS, VALUES, WITNESS, LAYER_A, LAYER_B, TENSOR, ATTACHMENT = range(8)  # blobs of the small file
SCALES, BIAS = 64, 128  # within a layer's blob
F4, F2 = "<f4", "<f2"


def faults(file: bytes) -> list[tuple[str, str]]:
    """(code, where) of all; the first is what verify raises without `collect`."""
    found = rsv_format.verify(file, collect=True)
    if found:
        with pytest.raises(RsvError) as e:
            rsv_format.verify(file)
        assert (e.value.code, e.value.where) == (found[0].code, found[0].where)
        assert all(fault.phase == "payload" for fault in found)
    else:
        assert rsv_format.verify(file) == []
    return [(fault.code, fault.where) for fault in found]


def patched(blob: int, at: int, data: bytes) -> bytes:
    """The small file with bytes of a blob replaced, and its digest renewed."""
    tree, blobs = ones_and_all()
    changed = blobs[blob][:at] + data + blobs[blob][at + len(data) :]
    assert len(changed) == len(blobs[blob]) and changed != blobs[blob]
    return assemble(tree, [*blobs[:blob], changed, *blobs[blob + 1 :]])


def f4(value: float) -> bytes:
    return np.array(value, F4).tobytes()


SIGNALLING = struct.pack("<I", 0x7F800001)  # a NaN that computing with sets a flag, and warns in numpy


@pytest.mark.parametrize(
    "blob, at, data, codes",
    [
        (CODEBOOK, 4, f4(np.nan), ["nonfinite_value", "codebook_order"]),
        (CODEBOOK, 12, f4(np.inf), ["nonfinite_value"]),
        (CODEBOOK, 0, f4(-np.inf), ["nonfinite_value"]),
        (CODEBOOK, 8, f4(np.inf) * 2, ["nonfinite_value", "codebook_order"]),
        (CODEBOOK, 4, SIGNALLING, ["nonfinite_value", "codebook_order"]),
        (CODEBOOK, 4, f4(0.5), ["codebook_order"]),
        (CODEBOOK, 4, f4(0.75), ["codebook_order"]),
        (CODEBOOK, 4, f4(0) + f4(-0.0), ["codebook_order"]),
        (CODEBOOK, 4, f4(1e-45) + f4(3e-45), []),
        (CODEBOOK, 0, f4(-3.4e38), []),
        (SIGNS, 0, b"\x69", ["padding_nonzero"]),
        (SIGNS, 0, b"\xa9", ["padding_nonzero"]),
        (SIGNS, 0, b"\x3f", []),
        (VALUES, 8, f4(0.0), ["zero_diagonal"]),
        (VALUES, 8, f4(-0.0), ["zero_diagonal"]),
        (VALUES, 8, f4(1e-45), []),
        (VALUES, 20, f4(np.nan), ["nonfinite_value"]),
        (VALUES, 0, SIGNALLING, ["nonfinite_value"]),
        (VALUES, 0, f4(-np.inf) + f4(0), ["nonfinite_value", "zero_diagonal"]),
        (WITNESS, 0, f4(np.nan), ["nonfinite_value"]),
        (WITNESS, 8, SIGNALLING, ["nonfinite_value"]),
        (WITNESS, 4, f4(np.inf), ["nonfinite_value"]),
        (WITNESS, 4, f4(3e38), ["haar_witness_mismatch"]),
        (LAYER_A, 3, b"\x80", ["padding_nonzero"]),
        (LAYER_A, 1, b"\x16", ["padding_nonzero"]),
        (LAYER_A, 7, b"\x80", ["padding_nonzero"]),
        (LAYER_A, 15, b"\x01", ["padding_nonzero"]),
        (LAYER_A, 0, b"\xff\x0f", []),
        (LAYER_A, 16, b"\x01", ["padding_nonzero"]),
        (LAYER_A, SCALES - 1, b"\x01", ["padding_nonzero"]),
        (LAYER_A, SCALES + 8, b"\x01", ["padding_nonzero"]),
        (LAYER_A, BIAS - 1, b"\x80", ["padding_nonzero"]),
        (LAYER_A, SCALES + 4, f4(np.inf), ["nonfinite_value"]),
        (LAYER_A, SCALES, SIGNALLING, ["nonfinite_value"]),
        (LAYER_A, SCALES, f4(-0.0), []),
        (LAYER_A, BIAS, b"\x00\x7c", ["nonfinite_value"]),
        (LAYER_A, BIAS + 2, b"\x01\x7c", ["nonfinite_value"]),
        (LAYER_A, BIAS + 2, b"\xff\x7b", []),
        (LAYER_B, SCALES, f4(np.nan), ["nonfinite_value"]),
        (TENSOR, 0, b"\x81\x7f", []),
        (ATTACHMENT, 0, b"\xff\xff", []),
    ],
)  # fmt: skip
def test_each_fault(blob: int, at: int, data: bytes, codes: list[str]) -> None:
    assert [code for code, _ in faults(patched(blob, at, data))] == codes


PLACES = [
    "codebook codebooks/0",
    "diagonal transforms/0",
    "diagonal transforms/1",
    "factor transforms/1",
    "layer a",
    "layer b",
    "tensor n",
    "attachment c.json",
]


def test_a_digest_of_each_blob() -> None:
    tree, blobs = split(small_file())
    for owner, place in zip(owners_of_blobs(tree), PLACES, strict=True):
        kept, owner["sha256"] = owner["sha256"], sha(b"something else")
        text = compact(tree)
        rest = b"".join(blob.ljust(align(len(blob), 64), b"\0") for blob in blobs)
        assert faults(sign(text, rest)) == [("blob_digest_mismatch", place)]
        owner["sha256"] = kept


def test_every_byte_after_the_header() -> None:
    """Without a new digest: none goes unnoticed, and padding is told from content."""
    file = small_file()
    tree, _ = split(file)
    end, owner = align(64 + struct.unpack_from("<Q", file, 16)[0], 64), {}
    for place, size in zip(PLACES, blob_sizes(tree), strict=True):
        start = align(end, 64)
        owner.update(dict.fromkeys(range(start, start + size), place))
        end = start + size
    first = min(owner)
    for at in [*range(first, end + 70), len(file) - 1]:
        code, where = faults(file[:at] + bytes([file[at] ^ 0x10]) + file[at + 1 :])[0]
        if at in owner:
            assert (code, where) == ("blob_digest_mismatch", owner[at])
        else:
            assert (code, where) == ("padding_nonzero", f"byte {at}")


def test_the_digest_of_an_empty_blob() -> None:
    tree = tree_of(attachments=[{"name": "a", "media_type": "a/b", "nbytes": 0, "sha256": sha(b"x")}])
    assert faults(sign(compact(tree))) == [("blob_digest_mismatch", "attachment a")]


def test_padding_at_the_end_of_a_file_without_blobs() -> None:
    file = bytearray(sign(compact(tree_of())))
    file[-1] = 1
    assert faults(bytes(file)) == [("padding_nonzero", f"byte {len(file) - 1}")]


def test_collect_gives_all_in_the_order_of_the_file() -> None:
    """RSV-004: of each blob the gap before it, the digest, then the rest; last the end of the file."""
    file = bytearray(small_file())
    with rsv_format.open(bytes(file)) as opened:
        offset = {blob.name + blob.kind: blob.offset for blob in opened.blobs}
    book, values, a = offset["codebooks/0codebook"], offset["transforms/1diagonal"], offset["alayer"]
    file[book : book + 16] = f4(np.nan) * 4
    file[values - 1] = 1
    file[values : values + 4] = f4(0)
    file[a + 7] = 0xFF
    file[a + 20] = 1
    file[a + SCALES : a + SCALES + 4] = f4(np.inf)
    file[a + BIAS : a + BIAS + 2] = b"\0\x7c"
    file[-1] = 1
    assert faults(bytes(file)) == [
        ("blob_digest_mismatch", PLACES[0]), ("nonfinite_value", PLACES[0]), ("codebook_order", PLACES[0]),
        ("padding_nonzero", f"byte {values - 1}"), ("blob_digest_mismatch", PLACES[2]), ("zero_diagonal", PLACES[2]),
        ("blob_digest_mismatch", PLACES[4]), ("padding_nonzero", f"byte {a + 20}"), ("padding_nonzero", PLACES[4]),
        ("nonfinite_value", f"{PLACES[4]} scales"), ("nonfinite_value", f"{PLACES[4]} bias"),
        ("padding_nonzero", f"byte {len(file) - 1}"),
    ]  # fmt: skip


def test_a_bad_frame_is_raised_even_when_collecting() -> None:
    for file, code in ((b"", "file_too_short"), (small_file() + b"x", "trailing_bytes")):
        with pytest.raises(RsvError) as e:
            rsv_format.verify(file, collect=True)
        assert e.value.code == code


# --- factors --------------------------------------------------------------------------------------------------------


def with_factor(kind: str, m: int, data: bytes, **members: Any) -> bytes:
    """A file with one layer behind a factor."""
    tree: Tree = tree_of(
        codebooks=[{"bits": 1, "window": 1}],
        transforms=[{"dim": m, "hadamard": 1, "diagonal": None, "factor": {"kind": kind, "sha256": "", **members}}],
        layers=[
            {"name": "a", "in_features": m, "out_features": 1, "stack": 1, "codebook": 0, "transform": 0, "bias": None}
        ],
    )
    layer = bytes(4 * -(-m // 32)).ljust(align(4 * -(-m // 32), 64), b"\0") + f4(1)
    return assemble(tree, [f4(-1) + f4(1), data, layer])


def matrix_file(matrix: np.ndarray) -> bytes:
    return with_factor("matrix", len(matrix), matrix.astype(F4).tobytes())


ROTATION = make_transform(3, 5, 1, None, "matrix").factor_matrix()


@pytest.mark.parametrize(
    "change, codes",
    [
        (lambda f: f, []),
        (lambda f: f.T, []),
        (lambda f: -f, []),
        (lambda f: f[::-1], []),
        (lambda f: f * (1 + 4e-5), []),
        (lambda f: f * (1 + 6e-5), ["not_orthogonal"]),
        (lambda f: f * 2, ["not_orthogonal"]),
        (lambda f: f * 0, ["not_orthogonal"]),
        (lambda f: np.ones_like(f), ["not_orthogonal"]),
        (lambda f: np.vstack([f[:-1], f[:1]]), ["not_orthogonal"]),
        (lambda f: f * 1e30, ["not_orthogonal"]),
        (lambda f: np.where(f == f[4, 4], np.nan, f), ["nonfinite_value"]),
        (lambda f: np.where(f == f[0, 0], -np.inf, f), ["nonfinite_value"]),
    ],
)
def test_matrices(change: Callable[[np.ndarray], np.ndarray], codes: list[str]) -> None:
    """RSV-606, RSV-609."""
    assert faults(matrix_file(change(ROTATION))) == [(code, "factor transforms/0") for code in codes]


def factors_file(orders: list[tuple[int, int]], matrices: tuple[int, ...] = ()) -> bytes:
    """Layers of one row behind factors, (order, seed) of derived ones and orders of stored ones; all values zero."""
    factors: list[Tree] = [{"kind": "haar", "sha256": "", "seed": seed} for _, seed in orders]
    factors += [{"kind": "matrix", "sha256": ""} for _ in matrices]
    dims = [m for m, _ in orders] + list(matrices)
    one = {"out_features": 1, "stack": 1, "codebook": 0, "bias": None}
    tree = tree_of(
        codebooks=[{"bits": 1, "window": 1}],
        transforms=[
            {"dim": m, "hadamard": 1, "diagonal": None, "factor": f} for m, f in zip(dims, factors, strict=True)
        ],
        layers=[{**one, "name": f"a{i}", "in_features": m, "transform": i} for i, m in enumerate(dims)],
    )
    stored = [bytes(4 * m) for m, _ in orders] + [bytes(4 * m * m) for m in matrices]
    rows = [bytes(4 * -(-m // 32)).ljust(align(4 * -(-m // 32), 64), b"\0") + f4(1) for m in dims]
    return assemble(tree, [f4(-1) + f4(1), *stored, *rows])


def test_factors_that_take_long_are_not_begun() -> None:
    """Equal ones count once; stored ones take 3/8."""
    allowed = [([(10, 1)], ()), ([(10, 1)] * 9, ()), ([(5, i) for i in range(8)], ()), ([], (13,)), ([], (10, 11))]
    refused = [
        ([(11, 1)], ()),
        ([(5, i) for i in range(9)], ()),
        ([(10, 1), (2, 1)], ()),
        ([], (14,)),
        ([(9, 1)], (10,)),
    ]
    for orders, matrices in allowed:
        with rsv_format.open(factors_file(orders, matrices), max_order=10) as file:
            found = {fault.code for fault in rsv_format.verify(file, collect=True)}
        assert found <= {"haar_witness_mismatch", "not_orthogonal"} and found
    for orders, matrices in refused:
        data = factors_file(orders, matrices)
        with rsv_format.open(data, max_order=10) as file:
            with pytest.raises(RsvError, match="over_limit at transforms: .*max_order is 10"):
                rsv_format.verify(file, collect=True)
            if orders and not matrices:
                with pytest.raises(RsvError, match="over_limit at transforms/0: "):
                    file.layers["a0"].dequantize()
            elif not orders:
                file.layers["a0"].dequantize()  # which takes no longer than to read it
        with pytest.raises(RsvError, match="over_limit"):
            rsv_format.verify(data, max_order=10)
    assert rsv_format.verify(factors_file([(16, 1)], (13,)), collect=True, max_order=18)
    with pytest.raises(RsvError, match="over_limit"):
        rsv_format.verify(factors_file([(4097, 1)]))


def test_long_work_on_factors_is_told() -> None:
    told: list[tuple[int, int, str]] = []
    rsv_format.verify(factors_file([(200, 9)], (20,)), collect=True, progress=lambda *news: told.append(news))
    names = [name for _, _, name in told]
    assert "transforms/0: rotation 100%" in names and "transforms/1: rotation 100%" in names


def test_the_last_row_of_a_matrix_that_is_checked_in_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    for block in (1, 7 * 3, 7 * 100):
        monkeypatch.setattr("rsv_format.payload._BLOCK", block)
        for row in range(7):
            f = np.eye(7, dtype=np.float32)
            assert codes(factor_faults(Transform(7, factor="matrix", stored=f[::-1]), "x")) == []
            f[row, row] = 1.001
            assert codes(factor_faults(Transform(7, factor="matrix", stored=f), "x")) == ["not_orthogonal"]


def test_witnesses() -> None:
    """RSV-610."""
    t = make_transform(0, 6, 1, None, "haar")
    assert t.stored is not None
    for change, codes in (
        (0.0, []),
        (8e-6, []),
        (-8e-6, []),
        (1.3e-5, ["haar_witness_mismatch"]),
        (-1.0, ["haar_witness_mismatch"]),
    ):
        for at in range(6):
            witness = t.stored.copy()
            witness[at] += np.float32(change)
            file = with_factor("haar", 6, witness.tobytes(), seed=0)
            assert faults(file) == [(code, "factor transforms/0") for code in codes]
    assert faults(with_factor("haar", 6, t.stored.tobytes(), seed=1)) == [
        ("haar_witness_mismatch", "factor transforms/0")
    ]


def test_a_factor_that_fails_is_not_used_either() -> None:
    witness = np.zeros(6, F4).tobytes()
    with rsv_format.open(with_factor("haar", 6, witness, seed=0)) as file:
        for action in (file.layers["a"].dequantize, lambda: file.layers["a"].matmul(np.ones(6, np.float32))):
            with pytest.raises(RsvError) as e:
                action()
            assert e.value.code == "haar_witness_mismatch"


# --- the checks by themselves ---------------------------------------------------------------------------------------


def codes(found: Any) -> list[str]:
    return [fault.code for fault in found]


@pytest.mark.parametrize("bits", range(1, 9))
def test_every_padding_bit_of_a_row(bits: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """RSV-604, in each row, whatever the number of rows looked at together."""
    n, rows = 37, 5
    words = rsv_format.pack(np.full((rows, n), 2**bits - 1, np.uint8), bits)
    for chunk in (8 * 2**20, 128, 256):
        monkeypatch.setattr("rsv_format.payload._CHUNK", chunk)
        assert codes(codes_faults(words, bits, n, "x")) == []
        for bit in range(n * bits, 64 * bits, 3):
            dirty = words.copy()
            dirty[bit % rows, bit // 32] |= np.uint32(1 << bit % 32)
            assert codes(codes_faults(dirty, bits, n, "x")) == ["padding_nonzero"]


@pytest.mark.parametrize("bits", range(1, 9))
def test_rows_without_padding(bits: int) -> None:
    words = np.full((2, 2 * bits), 0xFFFFFFFF, np.uint32)
    assert codes(codes_faults(words, bits, 64, "x")) == []


@pytest.mark.parametrize("dim", [1, 7, 8, 9, 15, 16])
def test_padding_of_signs(dim: int) -> None:
    signs = np.full(-(-dim // 8), 0xFF, np.uint8)
    if dim % 8:
        assert codes(diagonal_faults(Transform(dim, signs=signs), "x")) == ["padding_nonzero"]
        signs[-1] = 2 ** (dim % 8) - 1
    assert codes(diagonal_faults(Transform(dim, signs=signs), "x")) == []


def test_messages_say_where() -> None:
    values = np.array([1, 2, np.nan, np.inf], np.float32)
    for found in (
        floats_faults(values, "x"),
        diagonal_faults(Transform(4, values=values), "x"),
        codebook_faults(values, 2, "x"),
    ):
        fault = next(found)
        assert (fault.code, fault.where, fault.detail) == ("nonfinite_value", "x", "element 2 is nan")
    assert codes(floats_faults(None, "x")) == [] and codes(factor_faults(Transform(4), "x")) == []


def test_only_centroids_that_codes_select_directly_must_be_in_order() -> None:
    falling = np.array([3, 2, 2, 1], np.float32)
    assert codes(codebook_faults(falling, 2, "x")) == ["codebook_order"]
    assert codes(codebook_faults(falling, 1, "x")) == []
    assert codes(codebook_faults(np.array([3, 2, np.inf, 1], np.float32), 1, "x")) == ["nonfinite_value"]


# --- sources and progress ---------------------------------------------------------------------------------------------


def test_an_open_file_stays_open(tmp_path: Any) -> None:
    path = tmp_path / "a"
    path.write_bytes(small_file())
    with rsv_format.open(path) as file:
        assert rsv_format.verify(file) == [] and file.layers["a"].scales[0] == 0.5
    assert rsv_format.verify(path) == rsv_format.verify(str(path)) == []


def test_progress_goes_up_to_the_end(monkeypatch: pytest.MonkeyPatch) -> None:
    for chunk in (8 * 2**20, 10):
        monkeypatch.setattr(sys.modules["rsv_format.verify"], "_CHUNK", chunk)
        calls: list[tuple[int, int, str]] = []
        rsv_format.verify(small_file(), progress=lambda *call, calls=calls: calls.append(call))
        done = [call[0] for call in calls]
        assert done == sorted(done) and calls[-1] == (16384, 16384, "") and {call[1] for call in calls} == {16384}
        assert {"codebooks/0", "a", "b", "n", "c.json"} <= {call[2] for call in calls}
        assert len(calls) == 9 or chunk == 10


def test_a_sound_file_of_every_width(tmp_path: Any) -> None:
    for bits in range(1, 9):
        layers = [make_layer(bits, f"l{n}", bits, 3, n, stack=2, bias="bf16") for n in (1, 31, 32, 33, 64)]
        rsv_format.write(tmp_path / "a", layers=layers)
        assert rsv_format.verify(tmp_path / "a") == []


@pytest.mark.parametrize(
    "part, blob, at, element",
    [("scales", LAYER_A, SCALES, 0), ("scales", LAYER_A, SCALES + 4, 1), ("bias", LAYER_A, BIAS + 2, 1)],
)
def test_elements_of_pieces(part: str, blob: int, at: int, element: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("rsv_format.reader._PIECE_NBYTES", 4)
    data = f4(np.nan) if part == "scales" else b"\x00\x7c"
    (fault,) = rsv_format.verify(patched(blob, at, data), collect=True)
    assert fault.where.endswith(f" {part}") and fault.detail.startswith(f"element {element} ")


def test_a_file_read_in_order_is_the_same(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    data = small_file()
    (tmp_path / "a.rsv").write_bytes(data)
    rng = np.random.default_rng(0)
    for together in (64, 2**20):
        monkeypatch.setattr("rsv_format.stored._AHEAD_NBYTES", together)
        with rsv_format.open(tmp_path / "a.rsv") as opened:
            file = opened.in_order()
            for offset in rng.integers(0, len(data), 300).tolist():
                nbytes = int(rng.integers(0, min(100, len(data) - offset) + 1))
                assert file.read(offset, nbytes) == data[offset : offset + nbytes]
            assert file.buffer == data
