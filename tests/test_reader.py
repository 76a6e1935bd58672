"""Open: framing, references, extent; views; every truncation and every changed byte of a small file."""

from __future__ import annotations

import gc
import io
import json
import math
import os
import pickle
import re
import struct
import subprocess
import sys
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from strategies import (
    MAX_INTEGER,
    Tree,
    align,
    assemble,
    compact,
    exact,
    expected_code,
    layers,
    make_layer,
    make_transform,
    ones_and_all,
    outcome,
    owners_of_blobs,
    resized,
    sign,
    small_file,
    split,
    tree_of,
)

import rsv_format
from rsv_format import AttachmentData, RsvError, quantize_matrix
from rsv_format.limits import MAX_HAAR

FILE = small_file()
HEADER_NBYTES = struct.unpack_from("<Q", FILE, 16)[0]
TEXT = FILE[64 : 64 + HEADER_NBYTES]
BODY = FILE[align(64 + HEADER_NBYTES, 64) :]
DIGEST = "0" * 64


def code_of(file: bytes) -> str | None:
    """What `open` says; the independent reader agrees."""
    code = outcome(file)
    assert code == expected_code(file)
    return code


def code_of_tree(tree: Tree) -> str | None:
    return code_of(sign(compact(tree)))


# --- framing --------------------------------------------------------------------------------------------------------


def test_the_file_is_sound() -> None:
    assert code_of(FILE) is None and rsv_format.verify(FILE) == []


def test_every_truncation() -> None:
    for nbytes in range(len(FILE)):
        assert outcome(FILE[:nbytes]) == ("file_too_short" if nbytes < 64 else "file_truncated")


@pytest.mark.parametrize("extra", [b"\0", b"x", b"\0" * 64, b"\0" * 16384, FILE])
def test_trailing_bytes(extra: bytes) -> None:
    assert code_of(FILE + extra) == "trailing_bytes"


def test_every_byte_of_the_prologue() -> None:
    names = ["bad_magic"] * 8 + ["unsupported_version"] * 2 + ["header_digest_mismatch"] * 2
    names += ["reserved_flags"] * 4
    for at in range(64):
        for value in {0, 1, 0x7F, 0x80, 0xFF, FILE[at] ^ 1, FILE[at] ^ 0x80, FILE[at] + 1 & 0xFF, FILE[at] - 1 & 0xFF}:
            if value == FILE[at]:
                continue
            code = code_of(FILE[:at] + bytes([value]) + FILE[at + 1 :])
            if at < 16:
                assert code == names[at]
            elif at >= 32:
                assert code == "header_digest_mismatch"
            elif at >= 24:
                assert code in ("file_truncated", "trailing_bytes")
            else:
                assert code in ("header_digest_mismatch", "header_out_of_bounds", "header_too_large")


@pytest.mark.parametrize(
    "fields, code",
    [
        ({"magic": b"\x89RSV\n\r\x1a\n"}, "bad_magic"),
        ({"major": 0}, "unsupported_version"),
        ({"major": 2, "flags": 1}, "unsupported_version"),
        ({"minor": 65535}, None),
        ({"flags": 2**31}, "reserved_flags"),
        ({"flags": 1, "header_nbytes": 2**63}, "reserved_flags"),
        ({"header_nbytes": 67108865}, "header_too_large"),
        ({"header_nbytes": 2**64 - 1, "file_nbytes": 0}, "header_too_large"),
        ({"header_nbytes": 67108864}, "header_out_of_bounds"),
        ({"header_nbytes": 16384 - 64}, "header_digest_mismatch"),
        ({"header_nbytes": 16384 - 63}, "header_out_of_bounds"),
        ({"header_nbytes": 0}, "header_digest_mismatch"),
        ({"file_nbytes": 0}, "trailing_bytes"),
        ({"file_nbytes": 16383}, "trailing_bytes"),
        ({"file_nbytes": 16385}, "file_truncated"),
        ({"file_nbytes": 2**64 - 1}, "file_truncated"),
        ({"file_nbytes": 2**63, "header_nbytes": 67108864}, "file_truncated"),
    ],
)
def test_fields_of_the_prologue(fields: dict[str, Any], code: str | None) -> None:
    assert code_of(sign(compact(tree_of()), **fields)) == code


def test_padding_of_the_header() -> None:
    for at in range(64 + HEADER_NBYTES, align(64 + HEADER_NBYTES, 64)):
        assert code_of(FILE[:at] + b"\1" + FILE[at + 1 :]) == "header_padding_nonzero"
    assert align(64 + HEADER_NBYTES, 64) > 64 + HEADER_NBYTES


@pytest.mark.parametrize("length", [0, 1, 63, 64, 65])
def test_a_file_of_zeros_or_noise(length: int) -> None:
    wanted = "file_too_short" if length < 64 else "bad_magic"
    assert code_of(bytes(length)) == wanted
    assert code_of(os.urandom(length)) == wanted


# --- every byte of the header, re-signed ----------------------------------------------------------------------------


def test_every_byte_of_the_header() -> None:
    """Re-signed, so that each change reaches the parser and all that follows."""
    seen: set[str | None] = set()
    for at in changeable():
        for value in {TEXT[at] ^ 1, TEXT[at] ^ 0x80, 0, *b'"5,b'} - {TEXT[at]}:
            changed = TEXT[:at] + bytes([value]) + TEXT[at + 1 :]
            seen.add(code_of(sign(changed, BODY)))
    assert seen == {
        None, "invalid_utf8", "invalid_json", "schema_violation", "bad_reference", "transform_shape", "dim_mismatch",
        "unreferenced", "duplicate_name",
    }  # fmt: skip


def changeable() -> list[int]:
    """All bytes of the header but the digits within a digest, of which the ends stand for all."""
    within = {at for match in re.finditer(rb"[0-9a-f]{64}", TEXT) for at in range(match.start() + 1, match.end() - 1)}
    return [at for at in range(HEADER_NBYTES) if at not in within]


def test_every_byte_within_a_digest() -> None:
    for at in set(range(HEADER_NBYTES)) - set(changeable()):
        for value, code in (
            (b"a", None),
            (b"5", None),
            (b"A", "schema_violation"),
            (b'"', "invalid_json"),
            (b"\x80", "invalid_utf8"),
        ):
            assert outcome(sign(TEXT[:at] + value + TEXT[at + 1 :], BODY)) == code


def test_every_removed_byte_and_every_doubled_one() -> None:
    for at in changeable():
        code_of(sign(TEXT[:at] + TEXT[at + 1 :], BODY))
        code_of(sign(TEXT[: at + 1] + TEXT[at:], BODY))
    assert code_of(sign(TEXT[:-1], BODY)) == "invalid_json"


def test_every_byte_without_a_new_digest() -> None:
    for at in range(64, 64 + HEADER_NBYTES):
        assert outcome(FILE[:at] + bytes([FILE[at] ^ 1]) + FILE[at + 1 :]) == "header_digest_mismatch"


@given(st.data())
def test_spliced_headers(data: st.DataObject) -> None:
    """Pieces of the header moved, doubled and overwritten."""
    text = bytearray(TEXT)
    for _ in range(data.draw(st.integers(1, 3))):
        start, stop, at = sorted(data.draw(st.tuples(*[st.integers(0, len(text))] * 3)))
        piece = data.draw(
            st.sampled_from([bytes(text[start:stop]), b"", b"1e400", b"-0", b'"a":1,', b"null", b"\\ud800"])
        )
        text[start : data.draw(st.sampled_from([start, stop, at]))] = piece
    assert outcome(sign(bytes(text), BODY)) == expected_code(sign(bytes(text), BODY))


# --- references and extent ------------------------------------------------------------------------------------------


def layer(**members: Any) -> Tree:
    plain = {
        "name": "a",
        "in_features": 4,
        "out_features": 1,
        "stack": 1,
        "codebook": 0,
        "transform": None,
        "bias": None,
    }
    return plain | {"sha256": DIGEST} | members


def transform(dim: int = 4, hadamard: int = 1, diagonal: Any = None, factor: Any = None) -> Tree:
    return {"dim": dim, "hadamard": hadamard, "diagonal": diagonal, "factor": factor}


def tensor(name: str, dtype: str = "u8", shape: list[int] | None = None) -> Tree:
    return {"name": name, "dtype": dtype, "shape": [1] if shape is None else shape, "sha256": DIGEST}


def attachment(name: str, nbytes: int = 0) -> Tree:
    return {"name": name, "media_type": "a/b", "nbytes": nbytes, "sha256": DIGEST}


BOOK = {"bits": 1, "window": 1, "sha256": DIGEST}
HAAR = {"kind": "haar", "seed": 0, "sha256": DIGEST}
MATRIX = {"kind": "matrix", "sha256": DIGEST}


@pytest.mark.parametrize(
    "members, code",
    [
        ({"codebooks": [BOOK], "layers": [layer()]}, None),
        ({"layers": [layer()]}, "bad_reference"),
        ({"codebooks": [BOOK], "layers": [layer(codebook=1)]}, "bad_reference"),
        ({"codebooks": [BOOK], "layers": [layer(codebook=MAX_INTEGER)]}, "bad_reference"),
        ({"codebooks": [BOOK], "layers": [layer(transform=0)]}, "bad_reference"),
        ({"codebooks": [BOOK], "layers": [layer(transform=MAX_INTEGER)]}, "bad_reference"),
        ({"codebooks": [BOOK]}, "unreferenced"),
        ({"codebooks": [BOOK, BOOK], "layers": [layer(codebook=1)]}, "unreferenced"),
        ({"transforms": [transform()]}, "unreferenced"),
        ({"codebooks": [BOOK], "transforms": [transform()], "layers": [layer()]}, "unreferenced"),
        ({"codebooks": [BOOK], "transforms": [transform(5)], "layers": [layer(transform=0)]}, "dim_mismatch"),
        ({"codebooks": [BOOK], "transforms": [transform(4)], "layers": [layer(transform=0)]}, None),
        ({"transforms": [transform(6, 4)]}, "transform_shape"),
        ({"transforms": [transform(4, 8)]}, "transform_shape"),
        ({"transforms": [transform(4, 4, factor={"kind": "hartley"})]}, "transform_shape"),
        ({"transforms": [transform(1, 1, factor=MATRIX)]}, "transform_shape"),
        ({"transforms": [transform(16385, 1, factor=HAAR)]}, "transform_shape"),
        ({"transforms": [transform(2**24, 512, factor=HAAR)]}, "transform_shape"),
        ({"transforms": [transform(16384, 1, factor=HAAR)]}, "unreferenced"),
        ({"transforms": [transform(2**24, 1, factor={"kind": "hartley"})]}, "unreferenced"),
        ({"layers": [layer(codebook=7)], "transforms": [transform(3, 2)]}, "transform_shape"),
        ({"codebooks": [BOOK, BOOK], "layers": [layer(), layer()]}, "unreferenced"),
        ({"codebooks": [BOOK], "layers": [layer(), layer()]}, "duplicate_name"),
        ({"codebooks": [BOOK], "layers": [layer(), layer(name="a.weight")]}, "duplicate_name"),
        ({"codebooks": [BOOK], "layers": [layer(name="a.bias"), layer()]}, "duplicate_name"),
        ({"codebooks": [BOOK], "layers": [layer(), layer(name="A")]}, None),
        ({"codebooks": [BOOK], "layers": [layer()], "tensors": [tensor("a")]}, "duplicate_name"),
        ({"codebooks": [BOOK], "layers": [layer()], "tensors": [tensor("a.bias")]}, "duplicate_name"),
        ({"codebooks": [BOOK], "layers": [layer()], "tensors": [tensor("a.weight")]}, "duplicate_name"),
        ({"codebooks": [BOOK], "layers": [layer()], "tensors": [tensor("a.scale"), tensor("a.Weight")]}, None),
        ({"tensors": [tensor("a.weight"), tensor("a")]}, None),
        ({"tensors": [tensor("a"), tensor("a")]}, "duplicate_name"),
        ({"tensors": [tensor("é"), tensor("e\u0301")]}, None),
        ({"attachments": [attachment("a"), attachment("a")]}, "duplicate_name"),
        ({"attachments": [attachment("Config.json"), attachment("config.JSON")]}, "duplicate_name"),
        ({"tensors": [tensor("a")], "attachments": [attachment("a")]}, None),
    ],
)  # fmt: skip
def test_references(members: Tree, code: str | None) -> None:
    assert code_of_tree(tree_of(**members)) == code


HUGE = 2**53 - 1


@pytest.mark.parametrize(
    "members",
    [
        {"tensors": [tensor("a", "u8", [16384])]},
        {"tensors": [tensor("a", "f64", [HUGE])]},
        {"tensors": [tensor("a", "f64", [HUGE] * 8)]},
        {"tensors": [tensor("a", "u8", [2**32, 2**32])]},  # 2^64 wraps to 0
        {"tensors": [tensor("a", "u8", [2**16] * 4)]},
        {"tensors": [tensor("a", "f64", [2**50, 2**11])]},  # times 8, wraps to 0
        {"tensors": [tensor("a", "u8", [0, HUGE, 2])]},  # empty, but no library can index it
        {"tensors": [tensor("a", "u16", [HUGE, 0])]},
        {"tensors": [tensor("a", "f64", [0, 2**50])]},
        {"attachments": [attachment("a", HUGE)]},
        {"attachments": [attachment(f"a{i}", HUGE) for i in range(2**11 + 1)]},  # the sum wraps to little
        {
            "codebooks": [{"bits": 8, "window": 8, "sha256": DIGEST}],
            "layers": [layer(in_features=2**24, out_features=2**31 - 1, stack=65535)],
        },
        {
            "codebooks": [BOOK],
            "transforms": [transform(2**24, 1, factor=MATRIX)],
            "layers": [layer(in_features=2**24, transform=0)],
        },
    ],
    ids=range(13),
)
def test_sizes_beyond_the_file(members: Tree) -> None:
    tracemalloc.start()
    try:
        assert outcome(sign(compact(tree_of(**members)))) == "file_extent"
        assert tracemalloc.get_traced_memory()[1] < 8 * 2**20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    "shape, dtype",
    [([0, HUGE], "u8"), ([HUGE // 8, 0], "f64"), ([0] * 8, "f64"), ([2**26, 0, 2**26], "u8"), ([0], "bool")],
)
def test_empty_tensors_within_bounds(shape: list[int], dtype: str) -> None:
    file = assemble(tree_of(tensors=[tensor("a", dtype, shape)]), [b""])
    assert code_of(file) is None and rsv_format.verify(file) == []
    with rsv_format.open(file) as opened:
        assert opened.tensors["a"].array.shape == tuple(shape) and opened.tensors["a"].nbytes == 0


@pytest.mark.parametrize("change", [-64, -1, 1, 64, 16384])
def test_a_length_that_is_not_the_sum_of_the_sizes(change: int) -> None:
    assert code_of(resized(sign(TEXT, BODY), len(FILE) + change)) == "file_extent"


@pytest.mark.parametrize("change", [-64, 64])
def test_shifted_blobs(change: int) -> None:
    """The extent is unchanged as all lies within a page, so it is for the digests to tell."""
    shifted = sign(TEXT, (bytes(max(change, 0)) + BODY[max(-change, 0) :])[: len(BODY)])
    assert code_of(shifted) is None
    codes = {e.code for e in rsv_format.verify(shifted, collect=True)}
    assert "blob_digest_mismatch" in codes


def test_wrong_sizes_within_a_page() -> None:
    """A size that leaves the length as it is shifts what follows: digests again."""
    tree, blobs = split(FILE)
    tree["attachments"].insert(0, {"name": "b", "media_type": "a/b", "nbytes": 65, "sha256": DIGEST})
    file = sign(compact(tree), BODY[:10000])
    assert code_of(file) is None and len(file) == len(FILE)
    assert [e.code for e in rsv_format.verify(file, collect=True)].count("blob_digest_mismatch") >= 1
    assert len(blobs) == len(list(owners_of_blobs(tree))) - 1


def test_a_blob_that_ends_with_the_page() -> None:
    """The header's length decides how much fits."""
    for extra in range(-70, 70):
        tree = tree_of(attachments=[attachment("a", 10000)])
        start = align(64 + len(compact(tree)), 64)
        tree["attachments"][0]["nbytes"] = 16384 - start + extra
        file = assemble(tree, [bytes(16384 - start + extra)])
        assert len(file) == (16384 if extra <= 0 else 32768)
        assert code_of(file) is None and rsv_format.verify(file) == []
        assert code_of(resized(file, 49152)) == "file_extent"


@given(st.data())
def test_generated_headers(data: st.DataObject) -> None:
    """Any mix of entries: the code is the one that the independent reader gives."""
    small = st.integers(0, 3)
    sizes = st.one_of(st.integers(1, 70), st.sampled_from([2**24, 255, 256]))
    kinds = st.sampled_from([None, {"kind": "hartley"}, MATRIX, HAAR])
    books = data.draw(
        st.lists(st.integers(1, 8).map(lambda bits: {"bits": bits, "window": bits, "sha256": DIGEST}), max_size=2)
    )
    diagonals = st.sampled_from([None, {"kind": "signs", "sha256": DIGEST}, {"kind": "values", "sha256": DIGEST}])
    dims = st.sampled_from([1, 2, 4, 6, 8, 96])
    changed = st.builds(transform, dims, st.sampled_from([1, 2, 4]), diagonals, kinds)
    names = st.sampled_from(["a", "b", "c", "a.weight", "b.bias"])
    rows = st.builds(
        lambda **members: layer(**members), name=names, in_features=dims | sizes,
        out_features=st.integers(1, 2**31 - 1) | small.map(lambda n: n + 1),
        stack=st.integers(1, 3), codebook=small.map(lambda i: i // 2),
        transform=st.none() | small.map(lambda i: i // 2),
        bias=st.sampled_from([None, "f32", "bf16"]),
    )  # fmt: skip
    tree = tree_of(
        codebooks=books,
        transforms=data.draw(st.lists(changed, max_size=2)),
        layers=data.draw(st.lists(rows, max_size=3)),
        tensors=data.draw(
            st.lists(st.builds(tensor, names, st.sampled_from(["u8", "f64"]), st.lists(small, max_size=3)), max_size=2)
        ),
        attachments=data.draw(st.lists(st.builds(attachment, st.sampled_from(["x", "X", "y"]), sizes), max_size=2)),
    )
    code_of_tree(tree)


# --- kinds of source ------------------------------------------------------------------------------------------------


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "a.rsv"
    path.write_bytes(FILE)
    return path


def opened_from(path: Path) -> list[Callable[[], Any]]:
    return [
        lambda: path, lambda: str(path), lambda: FILE, lambda: bytearray(FILE), lambda: memoryview(FILE),
        lambda: memoryview(FILE).cast("Q"), lambda: io.BytesIO(FILE),
    ]  # fmt: skip


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("kind", range(7))
def test_sources(path: Path, kind: int, mmap: bool) -> None:
    with rsv_format.open(opened_from(path)[kind](), mmap=mmap) as file:
        assert file.nbytes == len(FILE) and bytes(file.buffer) == FILE and file.buffer.readonly
        assert not file.layers["a"].scales.flags.writeable
        assert rsv_format.verify(file) == []
    assert rsv_format.verify(opened_from(path)[kind]()) == []


@pytest.mark.parametrize("mmap", [True, False])
@pytest.mark.parametrize("buffering", [-1, 0])
def test_an_open_file(path: Path, mmap: bool, buffering: int) -> None:
    with open(path, "rb", buffering=buffering) as handle:
        file = rsv_format.open(handle, mmap=mmap)
    assert bytes(file.buffer) == FILE  # although the handle is closed
    file.close()


def test_a_pipe(path: Path) -> None:
    reading, writing = os.pipe()
    os.write(writing, FILE)
    os.close(writing)
    with os.fdopen(reading, "rb") as pipe, rsv_format.open(pipe) as file:
        assert bytes(file.buffer) == FILE


@pytest.mark.parametrize("mmap", [True, False])
def test_sources_that_are_not_there(tmp_path: Path, mmap: bool) -> None:
    unreadable = tmp_path / "loop"
    unreadable.symlink_to(unreadable)
    for source in (tmp_path / "none.rsv", tmp_path, str(tmp_path / "none" / "a"), unreadable):
        with pytest.raises(RsvError) as e:
            rsv_format.open(source, mmap=mmap)
        assert e.value.code == "io_error" and e.value.where == str(source) and e.value.phase == "input"


@pytest.mark.parametrize("mmap", [True, False])
def test_an_empty_file(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "empty"
    path.touch()
    for source in (path, b"", io.BytesIO()):
        with pytest.raises(RsvError) as e:
            rsv_format.open(source, mmap=mmap)
        assert e.value.code == "file_too_short"


def test_an_unreadable_handle_is_an_io_error(path: Path) -> None:
    with open(path, "ab") as handle, pytest.raises(RsvError) as e:
        rsv_format.open(handle)
    assert e.value.code == "io_error"


# --- views ----------------------------------------------------------------------------------------------------------


def arrays(file: rsv_format.File) -> dict[str, np.ndarray]:
    a, b = file.layers["a"], file.layers["b"]
    assert a.bias is not None and b.transform is not None and b.transform.stored is not None
    assert a.transform is not None and a.transform.signs is not None and b.transform.values is not None
    return {
        "codes": a.codes, "scales": a.scales, "bias": a.bias, "codebook": a.codebook, "signs": a.transform.signs,
        "values": b.transform.values, "witness": b.transform.stored, "tensor": file.tensors["n"].array,
        "attachment": np.frombuffer(file.attachments["c.json"].data, np.uint8),
    }  # fmt: skip


def test_arrays_of_a_file_that_is_not_mapped(path: Path) -> None:
    with rsv_format.open(path, mmap=False) as file, rsv_format.open(path) as mapped:
        assert mapped.mapped and not file.mapped and not mapped.unmapped().mapped
        for name, array in arrays(file).items():
            assert array.tobytes() == arrays(mapped)[name].tobytes() and array.shape == arrays(mapped)[name].shape
            assert not array.flags.writeable
            assert not np.shares_memory(array, np.frombuffer(mapped.buffer, np.uint8)), name
        assert bytes(file.buffer) == FILE


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_becomes_shorter_is_an_error_where_it_is_not_touched_through_a_map(
    tmp_path: Path, mmap: bool
) -> None:
    path = tmp_path / "a"
    large = quantize_matrix(np.random.default_rng(0).standard_normal((200, 300)), name="a")
    rsv_format.write(path, layers=[large], attachments={"x": AttachmentData("a/b", bytes(10**5))})
    with rsv_format.open(path, mmap=mmap) as file:
        file.check_unchanged()
        os.truncate(path, 16384)
        read = file.unmapped()
        for action in (
            lambda: rsv_format.verify(file), lambda: rsv_format.verify(file, collect=True), file.check_unchanged,
            lambda: read.layers["a"].dequantize(), lambda: read.layers["a"].matmul(np.ones(300)),
            lambda: read.attachments["x"].data, lambda: read.buffer, lambda: rsv_format.save(read, tmp_path / "b"),
        ):  # fmt: skip
            with pytest.raises(RsvError) as e:
                action()
            assert e.value.code == "io_error"
    assert os.listdir(tmp_path) == ["a"]


@pytest.mark.parametrize("mmap", [True, False])
def test_a_file_that_was_written_to_is_told(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "a"
    path.write_bytes(FILE)
    os.utime(path, ns=(0, 0))
    with rsv_format.open(path, mmap=mmap) as file:
        path.with_name("b").write_bytes(b"another")
        os.replace(path.with_name("b"), path)
        file.check_unchanged()  # the file that was opened is as it was
    path.write_bytes(FILE)
    os.utime(path, ns=(0, 0))
    with rsv_format.open(path, mmap=mmap) as file:
        path.write_bytes(FILE)
        with pytest.raises(RsvError) as e:
            file.check_unchanged()
        assert e.value.code == "io_error"


def test_views_are_read_only_and_share_the_file(path: Path) -> None:
    with rsv_format.open(path) as file:
        whole = np.frombuffer(file.buffer, np.uint8)
        for name, view in arrays(file).items():
            assert np.shares_memory(whole, view), name
            assert not view.flags.writeable and not view.flags.owndata, name
            with pytest.raises(ValueError, match="read-only"):
                view.flat[0] = 0
        with pytest.raises(TypeError):
            file.buffer[0] = 0  # type: ignore[index]
        at = [blob.offset for blob in file.blobs]
        assert arrays(file)["codebook"].ctypes.data - whole.ctypes.data == at[0]
        assert all(offset % 64 == 0 for offset in at)


@pytest.mark.parametrize("mmap", [True, False])
def test_views_survive_close(path: Path, mmap: bool) -> None:
    file = rsv_format.open(path, mmap=mmap)
    views = arrays(file)
    values = {name: view.copy() for name, view in views.items()}
    file.close()
    del file
    gc.collect()
    path.unlink()
    assert all(np.array_equal(views[name], values[name], equal_nan=False) for name in views)


@pytest.mark.parametrize("keep", [True, False])
def test_nothing_is_read_after_close(path: Path, keep: bool) -> None:
    file = rsv_format.open(path)
    a, b, n, c = file.layers["a"], file.layers["b"], file.tensors["n"], file.attachments["c.json"]
    kept = arrays(file) if keep else None
    file.close()
    file.close()
    x = np.ones(6, np.float32)
    for action in (
        lambda: file.buffer, lambda: a.codes, lambda: a.scales, lambda: a.bias, lambda: a.codebook,
        lambda: a.transform,
        lambda: b.transform, a.unpack, a.dequantize, a.dequantize_rotated, lambda: b.matmul(x), a.bias_float32,
        lambda: n.array, n.float32, lambda: c.data, c.text, lambda: rsv_format.verify(file),
        lambda: rsv_format.save(file, path.with_name("b")), lambda: file.codebook(0), lambda: file.transform(0),
    ):  # fmt: skip
        with pytest.raises(RsvError) as e:
            action()
        assert e.value.code == "closed"
    assert not path.with_name("b").exists() and (kept is None) != keep
    assert (a.name, a.bits, n.shape, c.media_type, len(file.blobs)) == ("a", 2, (3,), "application/json", 8)


def test_a_context_manager_closes_even_after_an_error(path: Path) -> None:
    with pytest.raises(KeyError), rsv_format.open(path) as file:
        _ = file.layers["none"]
    with pytest.raises(RsvError):
        _ = file.buffer


def test_the_map_goes_away_with_the_last_view(path: Path) -> None:
    def mapped() -> bool:
        return str(path) in Path("/proc/self/maps").read_text()

    if not Path("/proc/self/maps").exists():
        pytest.skip("no /proc here")
    file = rsv_format.open(path)
    scales = file.layers["a"].scales
    assert mapped()
    file.close()
    assert mapped() and scales[0] == 0.5
    del scales
    gc.collect()
    assert not mapped()


# --- what a file says ------------------------------------------------------------------------------------------------


def test_everything_about_the_small_file() -> None:
    with rsv_format.open(FILE) as file:
        _, blobs = split(FILE)
        assert [(blob.kind, blob.name, blob.nbytes) for blob in file.blobs] == [
            ("codebook", "codebooks/0", 16), ("diagonal", "transforms/0", 1), ("diagonal", "transforms/1", 24),
            ("factor", "transforms/1", 12), ("layer", "a", 132), ("layer", "b", 72), ("tensor", "n", 6),
            ("attachment", "c.json", 2),
        ]  # fmt: skip
        assert [FILE[blob.offset : blob.offset + blob.nbytes] for blob in file.blobs] == blobs
        a, b = file.layers["a"], file.layers["b"]
        assert (a.in_features, a.out_features, a.stack, a.bits, a.bias_dtype) == (6, 2, 1, 2, "f16")
        assert (a.codebook_id, a.transform_id, b.codebook_id, b.transform_id) == (0, 0, 0, 1)
        assert a.parts == [("codes", a.offset, 16), ("scales", a.offset + 64, 8), ("bias", a.offset + 128, 4)]
        assert b.parts == [("codes", b.offset, 16), ("scales", b.offset + 64, 8)] and a.nbytes == 132
        assert a.unpack().tolist() == [[0, 1, 2, 3, 2, 1], [3, 3, 0, 1, 2, 2]]
        assert a.scales.tolist() == [0.5, 2.0] and a.bias is not None and a.bias.tolist() == [0.25, -1.0]
        assert b.bias is None and b.bias_float32() is None
        assert a.codebook.tolist() == [-1.5, -0.5, 0.5, 1.5]
        assert a.dequantize_rotated().tolist() == [[-0.75, -0.25, 0.25, 0.75, 0.25, -0.25], [3, 3, -3, -1, 1, 1]]
        first, second = a.transform, b.transform
        assert first is not None and second is not None and first.d is not None
        assert (first.diagonal, first.factor, first.m, first.hadamard) == ("signs", "hartley", 3, 2)
        assert first.d.tolist() == [-1, 1, 1, -1, 1, -1]
        assert (second.diagonal, second.factor, second.seed) == ("values", "haar", 7)
        assert a.transform is first and file.transform(0) is first and file.layers["a"] is a
        n = file.tensors["n"]
        assert (n.dtype, n.shape, n.nbytes, n.array.dtype) == ("bf16", (3,), 6, np.uint16)
        assert n.float32()[:2].tolist() == [1.0, -2.0] and math.isnan(n.float32()[2])
        c = file.attachments["c.json"]
        assert (c.name, c.media_type, c.nbytes, bytes(c.data), c.text()) == (
            "c.json",
            "application/json",
            2,
            b"{}",
            "{}",
        )
        assert dict(file.metadata) == {"name": "tiny"} and file.header.extensions == {}
        assert (
            list(file.layers) == ["a", "b"] and len(file.layers) == 2 and "a" in file.layers and "x" not in file.layers
        )
        assert "n" not in file.layers and file.layers.get("x") is None
        assert repr(file) == f"<rsv_format.File: 2 layers, 1 tensors, {len(FILE)} bytes>"
        summary = rsv_format.summarize(file)
        assert summary.nbytes == len(FILE) == sum(summary.by_kind.values()) and summary.weights == 24
        assert summary.by_kind["codes"] == 32 and summary.by_kind["biases"] == 4


def test_text_that_is_no_utf8() -> None:
    tree, blobs = ones_and_all()
    with rsv_format.open(assemble(tree, [*blobs[:-1], b"\xff\xfe"])) as file, pytest.raises(RsvError) as e:
        file.attachments["c.json"].text()
    assert e.value.code == "invalid_utf8"


def test_an_error_can_be_pickled() -> None:
    with pytest.raises(RsvError) as e:
        rsv_format.open(b"")
    copy = pickle.loads(pickle.dumps(e.value))
    assert (copy.code, copy.where, copy.detail, str(copy)) == (
        e.value.code,
        e.value.where,
        e.value.detail,
        str(e.value),
    )
    assert isinstance(copy, ValueError) and copy.phase == "framing"
    with pytest.raises(AssertionError):
        RsvError("unheard_of", "x", "y")


# --- numbers --------------------------------------------------------------------------------------------------------


def opened(data: rsv_format.LayerData, path: Path) -> rsv_format.Layer:
    rsv_format.write(path, layers=[data])
    return rsv_format.open(path).layers[data.name]


def rotated_exactly(layer: rsv_format.Layer) -> np.ndarray:
    """RSV-512 and RSV-720, element by element."""
    n = layer.in_features * layer.bits
    streams = np.unpackbits(np.array(layer.codes).view(np.uint8), axis=1, bitorder="little")
    codes = [
        [sum(int(row[(j * layer.bits + i) % n]) << i for i in range(layer.window)) for j in range(layer.in_features)]
        for row in streams
    ]
    return np.array(
        [[np.float32(s) * layer.codebook[c] for c in row] for s, row in zip(layer.scales, codes, strict=True)],
        np.float32,
    )


@given(layers())
def test_dense_weights_and_products(tmp_path: Path, data: rsv_format.LayerData) -> None:
    """Against float64; RSV-720, RSV-721, RSV-533 and RSV-534."""
    with np.errstate(over="ignore", under="ignore"):
        huge = np.abs(data.codebook).max() * np.abs(data.scales).max() > 1e34  # sums of rows must not overflow
    assume(not huge)
    layer = opened(data, tmp_path / "a.rsv")
    w_rot = layer.dequantize_rotated()
    assert w_rot.dtype == np.float32 and np.array_equal(w_rot.view(np.uint32), rotated_exactly(layer).view(np.uint32))
    dense = w_rot.astype(np.float64)
    t = layer.transform
    d = np.ones(layer.in_features)
    if t is not None:
        dense, d = dense @ exact(t), d if t.d is None else t.d.astype(np.float64)
    w = layer.dequantize()
    shape = (layer.out_features, layer.in_features)
    assert w.dtype == np.float32 and w.shape == (shape if layer.stack == 1 else (layer.stack, *shape))
    flat = w.reshape(-1, layer.in_features).astype(np.float64)
    norms = np.linalg.norm(w_rot.astype(np.float64), axis=1)
    assert (np.linalg.norm((flat - dense) / d, axis=1) <= 1e-5 * norms + 1e-40).all()
    assert t is not None or np.array_equal(w.reshape(w_rot.shape), w_rot)

    x = np.random.default_rng(0).standard_normal((2, 3, layer.in_features)).astype(np.float32)
    bias = layer.bias_float32()
    wanted = x.astype(np.float64) @ dense.T + (0 if bias is None else bias.astype(np.float64))
    y = layer.matmul(x)
    assert y.dtype == np.float32
    if layer.stack > 1:
        wanted = np.moveaxis(wanted.reshape(2, 3, layer.stack, layer.out_features), 2, 0)
    assert y.shape == wanted.shape
    scale = np.linalg.norm(x * d, axis=-1).max() * norms.max() + (0 if bias is None else np.abs(bias).max())
    assert np.abs(y - wanted).max() <= 1e-5 * scale + 1e-40
    one = layer.matmul(x[0, 0])
    assert one.shape == y[..., 0, 0, :].shape and np.allclose(one, y[..., 0, 0, :], atol=1e-5 * scale)
    assert layer.matmul(x[:0]).size == 0


def test_rows_are_dequantized_in_pieces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    t = make_transform(5, 3, 8, "values", "hartley")
    layer = opened(make_layer(1, "a", 3, 7, t, stack=3, bias="bf16"), tmp_path / "a.rsv")
    x = np.random.default_rng(0).standard_normal((2, 24)).astype(np.float32)
    whole, product = layer.dequantize(), layer.matmul(x)
    for nbytes in (1, 4 * 24 * 2, 4 * 24 * 21):
        monkeypatch.setattr("rsv_format.reader._PIECE_NBYTES", nbytes)
        assert np.allclose(layer.dequantize(), whole, rtol=1e-5) and np.allclose(layer.matmul(x), product, rtol=1e-4)
        assert np.array_equal(layer.dequantize_rotated(), rotated_exactly(layer))


@pytest.mark.parametrize("shape", [(), (5,), (7, 2), (2, 5), (0,)])
def test_products_with_another_width_are_refused(tmp_path: Path, shape: tuple[int, ...]) -> None:
    layer = opened(make_layer(1, "a", 3, 2, 6), tmp_path / "a.rsv")
    with pytest.raises(RsvError) as e:
        layer.matmul(np.zeros(shape, np.float32))
    assert e.value.code == "bad_argument" and e.value.where == "a"


def test_padding_codes_have_no_influence() -> None:
    """RSV-511."""
    tree, blobs = ones_and_all()
    index = 4  # the blob of layer a; its rows have 6 of 32 codes
    rows = bytearray(blobs[index])
    rows[2:8] = b"\xff" * 6
    dirty = assemble(tree, [*blobs[:index], bytes(rows), *blobs[index + 1 :]])
    with rsv_format.open(dirty) as file, rsv_format.open(FILE) as clean:
        x = np.arange(6, dtype=np.float32)
        a, b = file.layers["a"], clean.layers["a"]
        assert not np.array_equal(a.codes, b.codes)
        assert np.array_equal(a.unpack(), b.unpack()) and np.array_equal(a.dequantize(), b.dequantize())
        assert np.array_equal(a.matmul(x), b.matmul(x))


# --- memory ---------------------------------------------------------------------------------------------------------


def test_a_large_file_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "a.rsv"
    nbytes = 2**30
    text = compact(tree_of(attachments=[attachment("a", nbytes)]))
    start = align(64 + len(text), 64)
    with open(path, "wb") as f:
        f.write(sign(text, file_nbytes=align(start + nbytes, 16384)))
        f.truncate(align(start + nbytes, 16384))  # sparse
    rsv_format.open(FILE).close()
    tracemalloc.start()
    try:
        with rsv_format.open(path) as file:
            assert file.attachments["a"].nbytes == nbytes
        assert tracemalloc.get_traced_memory()[1] < 2**18
    finally:
        tracemalloc.stop()


HOSTILE = """
import resource, sys
import rsv_format
def peak():
    try:  # Linux counts in ru_maxrss what the process was before exec
        return int(open("/proc/self/status").read().split("VmHWM:")[1].split()[0]) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)
for warm in sys.argv[1].split(","):
    rsv_format.open(warm).close()
before = peak()
for path in sys.argv[2].split(","):
    try:
        rsv_format.open(path).close()
    except rsv_format.RsvError as e:
        print(e.code, end=" ")
print(peak() - before)
"""


def test_hostile_files_cost_little_memory(tmp_path: Path) -> None:
    """Of the whole process: the schema validator allocates outside of Python."""
    text = compact(tree_of(codebooks=[{"bits": 0, "window": 0, "sha256": "x" * 64}] * 10**5))
    objects = json.loads(b'{"":' * 28 + b"0" + b"}" * 28)
    dense = {"x": [objects] * (len(text) // 16 // 29), "y": "a" * (len(text) * 11 // 16)}  # about what RSV-203 allows
    hostile = {
        "objects": compact(tree_of(extensions=dense)),
        "schema": text,
        "haar": compact(
            tree_of(
                codebooks=[BOOK],
                transforms=[transform(MAX_HAAR, 1, factor=HAAR)],
                layers=[layer(in_features=MAX_HAAR, transform=0)],
            )  # fmt: skip
        ),
        "hartley": compact(
            tree_of(
                codebooks=[BOOK],
                transforms=[transform(2**24, 1, factor={"kind": "hartley"})],
                layers=[layer(in_features=2**24, transform=0)],
            )  # fmt: skip
        ),
        "tensor": compact(tree_of(tensors=[tensor("a", "f64", [2**49])])),
        "quotes": b'"' * 2**21,
    }
    for name, header in hostile.items():
        (tmp_path / name).write_bytes(sign(header))
    (tmp_path / "ok").write_bytes(FILE)
    (tmp_path / "bad").write_bytes(sign(compact(tree_of(extensions={"x": ["\\" * 9] * 99}))))
    warm = ",".join(str(tmp_path / name) for name in ("ok", "bad"))
    paths = ",".join(str(tmp_path / name) for name in hostile)
    run = subprocess.run([sys.executable, "-c", HOSTILE, warm, paths], capture_output=True, text=True, check=True)
    *codes, grown = run.stdout.split()
    assert codes == ["schema_violation", "file_extent", "file_extent", "file_extent", "invalid_json"]
    assert int(grown) < 20 * len(text) + 32 * 2**20


def test_reading_ahead_is_a_hint(tmp_path: Path) -> None:
    path = tmp_path / "a.rsv"
    path.write_bytes(FILE)
    for opened in (rsv_format.open(path), rsv_format.open(FILE)):
        for where in ((0, opened.nbytes), (opened.nbytes, 10), (2**40, 2**40), (0, 0)):
            opened.read_ahead(*where)
        assert bytes(opened.buffer) == FILE
        opened.close()
        opened.read_ahead(0, 10)


@pytest.mark.skipif(not os.path.exists("/dev/zero"), reason="needs /dev/zero")
def test_what_never_ends_is_not_read_whole(tmp_path: Path) -> None:
    with pytest.raises(RsvError, match="bad_magic"):
        rsv_format.open("/dev/zero")
    data = small_file()

    class Endless(io.RawIOBase):
        """A file, and zeros for ever."""

        read_so_far = 0

        def readable(self) -> bool:
            return True

        def readinto(self, out: Any) -> int:
            count = min(len(out), 1000)
            part = data[self.read_so_far :][:count].ljust(count, b"\0")
            out[:count] = part
            self.read_so_far += count
            return count

    endless = Endless()
    with pytest.raises(RsvError, match="trailing_bytes"):
        rsv_format.open(endless)
    assert endless.read_so_far < len(data) + 2000
    for whole in (data, data[:100], data[:10], b""):
        reader, writer = os.pipe()
        os.write(writer, whole)
        os.close(writer)
        with os.fdopen(reader, "rb") as pipe:
            if whole == data:
                assert bytes(rsv_format.open(pipe).buffer) == data
            else:
                with pytest.raises(RsvError, match="file_t"):
                    rsv_format.open(pipe)


@pytest.mark.skipif(not Path("/proc/self/fd").exists(), reason="needs /proc")
def test_a_descriptor_goes_with_the_file(tmp_path: Path) -> None:
    """At once, and not with the next collection: its lock too would stay."""
    rsv_format.write(tmp_path / "a.rsv")
    before = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        for mmap in (True, False):
            with rsv_format.open(tmp_path / "a.rsv", mmap=mmap) as file:
                file.unmapped().check_unchanged()
            del file
            assert len(os.listdir("/proc/self/fd")) == before
    finally:
        gc.enable()
