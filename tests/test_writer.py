"""Write: canonical bytes, what is refused, and a path that holds the old file or the new one, whatever happens."""

from __future__ import annotations

import copy
import errno
import hashlib
import io
import json
import os
import signal
import stat
import struct
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import rfc8785
from hypothesis import given
from strategies import (
    align,
    contents,
    expected_code,
    make_layer,
    make_transform,
    scrambled,
    small_file,
    split,
)

import rsv_format
from rsv_format import AttachmentData, LayerData, RsvError, TensorData, Transform, Writer, write
from rsv_format.header import (
    NO_DIGEST,
    AttachmentEntry,
    CodebookEntry,
    HaarEntry,
    Header,
    LayerEntry,
    TensorEntry,
    TransformEntry,
    build_header,
    parse_header,
)
from rsv_format.header import replace as changed
from rsv_format.rotation import haar, haar_witness
from rsv_format.writer import transform_entry

WITNESS = haar_witness(haar(3, 1))


def sample() -> dict[str, Any]:
    """Arguments of `write` that use every method of the writer more than once."""
    t = make_transform(1, 3, 4, "values", "haar")
    u = make_transform(2, 5, 2, "signs", "matrix")
    numbers, nothing = np.arange(6, dtype=np.float32).reshape(2, 3), np.zeros((0, 2), np.uint8)
    layers = [
        make_layer(1, "b", 3, 2, t, bias="bf16"),
        make_layer(2, "a", 4, 5, u, stack=2),
        make_layer(3, "c", 1, 1, 40),
    ]
    return {
        "layers": layers,
        "tensors": {"n": TensorData("f32", numbers), "m": TensorData("u8", nothing)},
        "attachments": {"z.json": AttachmentData("application/json", b"{}"), "Y": AttachmentData("a/b", b"")},
        "metadata": {"name": "x", "é": "\n"},
        "extensions": {"org.example.x": {"b": [1, None], "a": {}}},
    }  # fmt: skip


def written(path: Path, content: dict[str, Any]) -> bytes:
    write(path, **content)
    return path.read_bytes()


def debris(folder: Path) -> list[str]:
    return [name for name in os.listdir(folder) if name.endswith(".tmp") or name.startswith(".")]


# --- canonical bytes ------------------------------------------------------------------------------------------------


@given(contents())
def test_equal_content_gives_equal_bytes(tmp_path: Path, content: dict[str, Any]) -> None:
    first = written(tmp_path / "a.rsv", content)
    assert written(tmp_path / "b.rsv", scrambled(content)) == first
    assert expected_code(first) is None and rsv_format.verify(first) == []
    with rsv_format.open(first) as file:
        rsv_format.save(file, tmp_path / "c.rsv")
    assert (tmp_path / "c.rsv").read_bytes() == first
    assert debris(tmp_path) == []


def test_the_canonical_rules(tmp_path: Path) -> None:
    """RSV-810 to RSV-817, on the bytes."""
    data = written(tmp_path / "a", sample())
    magic, major, minor, flags, nbytes, file_nbytes = struct.unpack_from("<8sHHIQQ", data)
    text = data[64 : 64 + nbytes]
    tree = json.loads(text)
    assert (major, minor, flags, tree["requires"]) == (1, 0, 0, []) and file_nbytes == len(data)
    assert text == rfc8785.dumps(tree) and data[32:64] == hashlib.sha256(data[:32] + text).digest()
    assert [x["name"] for x in tree["layers"]] == ["a", "b", "c"]
    assert [x["name"] for x in tree["tensors"]] == ["m", "n"]
    assert [x["name"] for x in tree["attachments"]] == ["Y", "z.json"]
    assert [x["codebook"] for x in tree["layers"]] == [0, 1, 2]
    assert [x["transform"] for x in tree["layers"]] == [0, 1, None]
    assert [x["bits"] for x in tree["codebooks"]] == [4, 3, 1]
    assert tree["extensions"] == sample()["extensions"] and tree["metadata"] == sample()["metadata"]
    _, blobs = split(data)
    end, rebuilt = 64 + nbytes, bytearray(data[: 64 + nbytes])
    for blob in blobs:
        rebuilt = rebuilt.ljust(align(end, 64), b"\0") + blob
        end = len(rebuilt)
    assert rebuilt.ljust(align(end, 16384), b"\0") == data


def test_names_are_sorted_by_code_points(tmp_path: Path) -> None:
    """RSV-812, unlike the members of RSV-811."""
    names = ["\U0001f600", "\ufb33", "a", "B", "é"]
    data = written(
        tmp_path / "a",
        {
            "tensors": {name: TensorData("u8", np.zeros(1, "u1")) for name in names},
            "metadata": dict.fromkeys(names, ""),
        },
    )
    tree = json.loads(data[64 : 64 + struct.unpack_from("<Q", data, 16)[0]])
    assert [x["name"] for x in tree["tensors"]] == ["B", "a", "é", "\ufb33", "\U0001f600"]
    assert list(tree["metadata"]) == ["B", "a", "é", "\U0001f600", "\ufb33"]


def test_equal_tables_are_stored_once_and_others_are_not(tmp_path: Path) -> None:
    """RSV-814: bit for bit."""
    t = make_transform(1, 3, 4, "values", "haar")
    assert t.values is not None
    minus = replace(t, values=t.values * np.float32(-1))
    zero, minus_zero = np.array([0.0, 1.0], np.float32), np.array([-0.0, 1.0], np.float32)
    layers = [make_layer(i, f"l{i}", 1, 2, u, centroids=c.copy()) for i, (u, c) in enumerate(
        [(t, zero), (copy.deepcopy(t), zero), (minus, zero), (replace(t, hadamard=4), minus_zero)]
    )]  # fmt: skip
    with rsv_format.open(written(tmp_path / "a", {"layers": layers})) as file:
        assert [x.codebook_id for x in file.layers.values()] == [0, 0, 0, 1]
        assert [x.transform_id for x in file.layers.values()] == [0, 0, 1, 0]
    same_blobs = [
        make_transform(1, 4, 1, "signs"), make_transform(1, 2, 2, "signs"), make_transform(1, 4, 1, "signs", "hartley"),
    ]  # fmt: skip
    layers = [make_layer(9, f"l{i}", 1, 2, u, centroids=zero) for i, u in enumerate(same_blobs)]
    with rsv_format.open(written(tmp_path / "b", {"layers": layers})) as file:
        assert len(file.header.transforms) == 3


def test_content_is_not_simplified(tmp_path: Path) -> None:
    """RSV-815."""
    t = Transform(4, 1, values=np.ones(4, np.float32))
    layers = [
        replace(make_layer(1, "a", 1, 2, t, bias="f32"), bias=np.zeros(2, np.float32)),
        make_layer(1, "b", 1, 2, Transform(4)),
    ]
    with rsv_format.open(written(tmp_path / "a", {"layers": layers})) as file:
        assert file.layers["a"].transform is not None and file.layers["a"].transform.diagonal == "values"
        assert file.layers["b"].transform is not None and file.layers["b"].transform.diagonal is None
        assert file.layers["a"].bias_dtype == "f32"


def test_tuples_are_arrays(tmp_path: Path) -> None:
    first, second = (
        written(tmp_path / "a", {"extensions": {"x": kind([{"b": 1, "a": kind([2])}])}}) for kind in (list, tuple)
    )
    assert first == second


def test_layouts_of_arrays_do_not_matter(tmp_path: Path) -> None:
    content = sample()
    first = written(tmp_path / "a", content)

    def odd(a: np.ndarray) -> np.ndarray:
        """The same values, big-endian and not in one piece."""
        wide = np.zeros((*a.shape, 2), a.dtype.newbyteorder(">"))
        wide[..., 0] = a
        return wide[..., 0]

    content["layers"] = [
        replace(
            x, codes=odd(x.codes), scales=odd(x.scales), codebook=odd(x.codebook),
            bias=None if x.bias is None else odd(x.bias),
        )
        for x in content["layers"]
    ]  # fmt: skip
    content["tensors"] = {name: TensorData(x.dtype, odd(x.array)) for name, x in content["tensors"].items()}
    assert written(tmp_path / "b", content) == first


def test_an_empty_file_is_a_page(tmp_path: Path) -> None:
    data = written(tmp_path / "a", {})
    assert len(data) == 16384 and rsv_format.verify(data) == []


# --- what is refused ------------------------------------------------------------------------------------------------


def refused(path: Path, content: dict[str, Any]) -> RsvError:
    with pytest.raises(RsvError) as e:
        write(path, **content)
    assert not path.exists() and debris(path.parent) == []
    return e.value


def one(**changes: Any) -> dict[str, Any]:
    """One layer of 3 bits, 6 inputs, 2 outputs, with a transform and a bias."""
    t = make_transform(1, 3, 2, "values", "matrix")
    return {"layers": [replace(make_layer(1, "a", 3, 2, t, bias="f32"), **changes)]}


def test_equal_centroids_for_other_bits_are_another_codebook(tmp_path: Path) -> None:
    layers = [make_layer(1, name, bits, 2, 6, window=3) for name, bits in (("a", 1), ("b", 2), ("c", 2))]
    layers = [replace(x, codebook=layers[0].codebook) for x in layers]
    data = written(tmp_path / "a", {"layers": layers})
    with rsv_format.open(data) as file:
        assert [(x.bits, x.window) for x in file.header.codebooks] == [(1, 3), (2, 3)]
        for layer in layers:
            check = file.layers[layer.name]
            assert (check.bits, check.window) == (layer.bits, 3)
            assert np.array_equal(check.codes, layer.codes)


CODES = np.zeros((2, 6), np.uint8)
CENTROIDS = np.arange(8, dtype=np.float32)
BAD_PADDING = rsv_format.pack(np.full((2, 7), 1, np.uint8), 3)
INF = np.float32(np.inf)


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": rsv_format.pack(CODES, 4)}, {"codes": rsv_format.pack(np.zeros((3, 6), np.uint8), 3)},
        {"codes": rsv_format.pack(CODES, 3).view(np.int32)}, {"codes": rsv_format.pack(CODES, 3).reshape(-1)},
        {"scales": np.ones(3, np.float32)}, {"scales": np.ones((2, 1), np.float32)}, {"scales": np.ones(2)},
        {"stack": 3}, {"stack": 0}, {"stack": -1}, {"scales": np.ones(0, np.float32)},
        {"bias": np.zeros(3, np.float32)}, {"bias": np.zeros(2, np.float16)}, {"bias": None}, {"bias_dtype": None},
        {"bias_dtype": "bf16"}, {"codebook": CENTROIDS[:5]}, {"codebook": CENTROIDS[:4]},
        {"codebook": np.arange(12, dtype=np.float32)}, {"codebook": np.arange(2**17, dtype=np.float32)},
        {"codebook": CENTROIDS[:1]}, {"in_features": 33, "transform": None},
        {"transform": replace(make_transform(1, 3, 2, None, "matrix"), stored=None)},
        {"transform": replace(make_transform(1, 3, 2, "values"), values=np.ones(5, np.float32))},
        {"transform": replace(make_transform(1, 3, 2, "signs"), signs=np.zeros(2, np.uint8))},
        {"transform": replace(make_transform(1, 3, 2, None, "matrix"), stored=np.eye(2, dtype=np.float32))},
        {"transform": replace(make_transform(1, 3, 2, None, "haar"), stored=np.ones(4, np.float32))},
    ],
    ids=lambda changes: "-".join(changes),
)  # fmt: skip
def test_arrays_that_do_not_fit(tmp_path: Path, changes: dict[str, Any]) -> None:
    assert refused(tmp_path / "a", one(**changes)).code in ("content_invalid", "schema_violation")


@pytest.mark.parametrize(
    "changes",
    [
        {"codes": BAD_PADDING},
        {"scales": np.array([1, INF], np.float32)}, {"scales": np.array([np.nan, 1], np.float32)},
        {"bias": np.array([1, -INF], np.float32)},
        {"bias": np.array([0x7F80, 0], np.uint16), "bias_dtype": "bf16"},
        {"bias": np.array([0, np.inf], np.float16), "bias_dtype": "f16"},
        {"codebook": CENTROIDS[::-1]}, {"codebook": np.zeros(8, np.float32)},
        {"codebook": np.array([*range(7), np.inf], np.float32)},
        {"codebook": np.array([np.nan, *range(7)], np.float32)},
        {"codebook": np.array([*range(6), np.inf, np.inf], np.float32)},
        {"transform": Transform(6, 2, signs=np.array([0x40], np.uint8))},
        {"transform": Transform(6, 2, values=np.array([1, 2, 3, 0, 4, 5], np.float32))},
        {"transform": Transform(6, 2, values=np.array([1, 2, 3, -0.0, 4, 5], np.float32))},
        {"transform": Transform(6, 2, values=np.array([1, 2, 3, np.nan, 4, 5], np.float32))},
        {"transform": Transform(6, 2, factor="matrix", stored=np.ones((3, 3), np.float32))},
        {"transform": Transform(6, 2, factor="matrix", stored=np.full((3, 3), np.nan, np.float32))},
        {"transform": Transform(6, 2, factor="haar", seed=2, stored=WITNESS)},
        {"transform": Transform(6, 2, factor="haar", stored=WITNESS)},
        {"transform": Transform(6, 2, factor="householder", stored=WITNESS)},
        {"transform": Transform(6, 2, factor="hartley", seed=1)},
        {"transform": Transform(6, 2, factor="matrix", seed=1, stored=np.eye(3, dtype=np.float32))},
        {"transform": Transform(6, 2, factor="haar", seed=1, stored=WITNESS * INF)},
    ],
    ids=lambda changes: "-".join(changes),
)  # fmt: skip
def test_content_that_would_not_verify(tmp_path: Path, changes: dict[str, Any]) -> None:
    """RSV-801."""
    assert refused(tmp_path / "a", one(**changes)).code == "content_invalid"


U1 = TensorData("u8", np.zeros(2, "u1"))


@pytest.mark.parametrize(
    "content, code",
    [
        ({"tensors": {"a": TensorData("f32", np.zeros(2))}}, "content_invalid"),
        ({"tensors": {"a": TensorData("bf16", np.zeros(2, np.float32))}}, "content_invalid"),
        ({"tensors": {"a": TensorData("u8", np.zeros(2, "i1"))}}, "content_invalid"),
        ({"tensors": {"a": TensorData("f8", np.zeros(2))}}, "schema_violation"),
        ({"tensors": {"a": TensorData("u8", np.zeros((1,) * 9, "u1"))}}, "schema_violation"),
        ({"tensors": {"": U1}}, "schema_violation"),
        ({"tensors": {"a\n": U1}}, "schema_violation"),
        ({"tensors": {"a" * 513: U1}}, "schema_violation"),
        ({"tensors": {"\ud800": U1}}, "content_invalid"),
        ({"tensors": {"a.weight": U1}, "layers": one()["layers"]}, "duplicate_name"),
        ({"layers": one()["layers"] * 2}, "duplicate_name"),
        ({"attachments": {"A": AttachmentData("a/b", b""), "a": AttachmentData("a/b", b"")}}, "duplicate_name"),
        ({"attachments": {"../a": AttachmentData("a/b", b"")}}, "schema_violation"),
        ({"attachments": {"a": AttachmentData("json", b"")}}, "schema_violation"),
        ({"metadata": {"a": 1}}, "schema_violation"),
        ({"metadata": {"\udfff": "a"}}, "content_invalid"),
        ({"metadata": {1: "a"}}, "content_invalid"),
        ({"extensions": {"a": {1: 2}}}, "content_invalid"),
        ({"extensions": {"a": [{None: 2}]}}, "content_invalid"),
        ({"extensions": {"a": b"x"}}, "content_invalid"),
        ({"extensions": {"a": {1, 2}}}, "content_invalid"),
        ({"extensions": {"a": 1.5}}, "json_number"),
        ({"extensions": {"a": 2**53}}, "json_number"),
        ({"extensions": {"a": float("nan")}}, "invalid_json"),
        ({"layers": one(transform=Transform(7))["layers"]}, "dim_mismatch"),
        ({"layers": one(transform=Transform(6, 4))["layers"]}, "transform_shape"),
        ({"layers": one(transform=Transform(6, 3))["layers"]}, "schema_violation"),
        ({"layers": one(in_features=0, transform=None)["layers"]}, "schema_violation"),
        ({"layers": one(bias_dtype="f64")["layers"]}, "schema_violation"),
    ],
)  # fmt: skip
def test_content_that_no_header_can_say(tmp_path: Path, content: dict[str, Any], code: str) -> None:
    assert refused(tmp_path / "a", content).code == code


def test_an_extension_that_nests_too_deeply(tmp_path: Path) -> None:
    value: Any = 0
    for _ in range(31):
        value = [value]
    assert refused(tmp_path / "a", {"extensions": {"x": value}}).code == "json_limit"
    write(tmp_path / "b", extensions={"x": value[0]})
    for _ in range(10**5):
        value = [value]
    assert refused(tmp_path / "a", {"extensions": {"x": value}}).code == "content_invalid"
    while value:  # or its destruction would recurse
        value = value[0]


def zeros(header: Header) -> int:
    """How many zeros the extension `x`, an array of one, may get by RSV-203."""
    text = build_header(header)
    count, nbytes = sum(text.count(c) for c in b",[{"), len(text)
    return max(z for z in range(9999) if count + z <= 4096 + (nbytes + 2 * z) // 16)


def test_an_extension_of_too_many_values(tmp_path: Path) -> None:
    """What no reader would take is refused before anything is written."""
    most = zeros(Header((), (), (), (), (), {}, (), {"x": [0]}))
    write(tmp_path / "b", extensions={"x": [0] * (1 + most)})
    assert expected_code((tmp_path / "b").read_bytes()) is None
    assert refused(tmp_path / "a", {"extensions": {"x": [0] * (2 + most)}}).code == "json_limit"


def test_the_limit_is_that_of_the_header_as_written(tmp_path: Path) -> None:
    """In canonical order positions have fewer digits: the header is shorter, and may hold less."""
    layers = [LayerEntry(f"{i:03}", 1, 1, 1, 10, None, None, NO_DIGEST) for i in range(100)]
    layers += [LayerEntry(f"b{i}", 1, 1, 1, i, None, None, NO_DIGEST) for i in range(10)]
    header = Header((CodebookEntry(1, 1, NO_DIGEST),) * 11, (), tuple(layers), (), (), {}, (), {"x": [0]})
    header = changed(header, extensions={"x": [0] * (1 + zeros(header))})
    parse_header(build_header(header))
    with pytest.raises(RsvError) as e:
        Writer(tmp_path / "a", header)
    assert e.value.code == "json_limit"


HEADER = Header(
    (CodebookEntry(1, 1, NO_DIGEST),), (), (LayerEntry("a", 4, 1, 1, 0, None, None, NO_DIGEST),),
    (TensorEntry("n", "u8", (2,), NO_DIGEST),), (), {}, (), {},
)  # fmt: skip


def layer_a() -> LayerData:
    return LayerData("a", 4, 1, np.zeros((1, 1), np.uint32), np.ones(1, np.float32), np.array([-1, 1], np.float32))


@pytest.mark.parametrize("left_out", ["codebook", "layer", "tensor"])
def test_blobs_that_were_never_written(tmp_path: Path, left_out: str) -> None:
    path = tmp_path / "a"
    with pytest.raises(RsvError) as e, Writer(path, HEADER) as writer:
        if left_out != "codebook":
            writer.codebook(0, layer_a().codebook)
        if left_out != "layer":
            writer.layer(layer_a())
        if left_out != "tensor":
            writer.tensor("n", np.zeros(2, np.uint8))
    assert e.value.code == "content_invalid" and left_out in e.value.where
    assert os.listdir(tmp_path) == []


def test_streaming_in_any_order(tmp_path: Path) -> None:
    steps: list[Callable[[Writer], None]] = [
        lambda w: w.codebook(0, layer_a().codebook), lambda w: w.layer(layer_a()),
        lambda w: w.tensor("n", np.ones(2, np.uint8)),
    ]  # fmt: skip
    files = []
    for i, order in enumerate(([0, 1, 2], [2, 1, 0], [1, 0, 2, 1])):
        with Writer(tmp_path / str(i), HEADER) as writer:
            for step in order:
                steps[step](writer)
        files.append((tmp_path / str(i)).read_bytes())
    assert files[0] == files[1] == files[2] and rsv_format.verify(files[0]) == []


def test_a_header_in_any_order_is_written_canonically(tmp_path: Path) -> None:
    """RSV-812, RSV-813: tables by first use, although the caller's are the other way round."""
    content = sample()
    wanted = written(tmp_path / "a", content)
    layers = sorted(content["layers"], key=lambda layer: layer.name, reverse=True)
    rotated = [layer for layer in layers if layer.transform is not None]
    entries = [
        LayerEntry(
            x.name, x.in_features, x.scales.size // x.stack, x.stack, i,
            rotated.index(x) if x.transform is not None else None, x.bias_dtype, NO_DIGEST,
        )
        for i, x in enumerate(layers)
    ]  # fmt: skip
    header = Header(
        tuple(CodebookEntry(x.bits, x.window, NO_DIGEST) for x in layers),
        tuple(transform_entry(x.transform) for x in rotated),
        tuple(entries),
        tuple(TensorEntry(name, x.dtype, x.array.shape, NO_DIGEST) for name, x in content["tensors"].items()),
        tuple(
            AttachmentEntry(name, x.media_type, len(x.data), NO_DIGEST) for name, x in content["attachments"].items()
        ),
        content["metadata"],
        (),
        content["extensions"],
    )
    with Writer(tmp_path / "b", header) as writer:
        for i, x in enumerate(layers):
            writer.codebook(i, x.codebook)
            writer.layer(x)
        for i, x in enumerate(rotated):
            writer.transform(i, x.transform)
        for name, tensor in content["tensors"].items():
            writer.tensor(name, tensor.array)
        for name, attachment in content["attachments"].items():
            writer.attachment(name, attachment.data)
    assert (tmp_path / "b").read_bytes() == wanted


@pytest.mark.parametrize(
    "action",
    [
        lambda w: w.layer(replace(layer_a(), name="b")),
        lambda w: w.tensor("x", np.zeros(2, np.uint8)),
        lambda w: w.attachment("x", b""),
        lambda w: w.tensor("n", np.zeros(3, np.uint8)),
        lambda w: w.layer(replace(layer_a(), bias=np.zeros(1, np.float32), bias_dtype="f32")),
        lambda w: w.codebook(0, np.arange(4, dtype=np.float32)),
        lambda w: w.codebook(1, np.arange(2, dtype=np.float32)),
        lambda w: w.codebook(0, np.arange(2.0)),
        lambda w: w.transform(0, Transform(4)),
    ],
)
def test_what_the_header_does_not_say_is_not_written(tmp_path: Path, action: Callable[[Writer], None]) -> None:
    with pytest.raises(RsvError) as e, Writer(tmp_path / "a", HEADER) as writer:
        action(writer)
    assert e.value.code == "content_invalid" and os.listdir(tmp_path) == []
    assert "never written" not in e.value.detail


@pytest.mark.parametrize(
    "changes, code",
    [
        ({"layers": (changed(HEADER.layers[0], codebook=1),)}, "bad_reference"),
        ({"layers": (changed(HEADER.layers[0], codebook=-1),)}, "schema_violation"),
        ({"layers": (changed(HEADER.layers[0], transform=0),)}, "bad_reference"),
        ({"codebooks": (CodebookEntry(1, 1, NO_DIGEST), CodebookEntry(2, 2, NO_DIGEST))}, "unreferenced"),
        ({"transforms": (TransformEntry(4, 1, None, None),)}, "unreferenced"),
        ({"codebooks": (CodebookEntry(9, 9, NO_DIGEST),)}, "schema_violation"),
        ({"requires": ("x",)}, "unsupported_feature"),
        ({"tensors": (TensorEntry("n", "f64", (2**53 - 1, 8), NO_DIGEST),)}, "file_extent"),
        (
            {
                "layers": (changed(HEADER.layers[0], transform=0),),
                "transforms": (TransformEntry(4, 1, None, HaarEntry(-1, NO_DIGEST)),),
            },
            "schema_violation",
        ),
    ],
)  # fmt: skip
def test_headers_that_no_reader_would_take(tmp_path: Path, changes: dict[str, Any], code: str) -> None:
    with pytest.raises(RsvError) as e:
        Writer(tmp_path / "a", changed(HEADER, **changes))
    assert e.value.code == code and os.listdir(tmp_path) == []


def test_digests_that_are_given_are_not_believed(tmp_path: Path) -> None:
    header = changed(HEADER, tensors=(TensorEntry("n", "u8", (2,), "not a digest"),))
    with Writer(tmp_path / "a", header) as writer:
        writer.codebook(0, layer_a().codebook)
        writer.layer(layer_a())
        writer.tensor("n", np.ones(2, np.uint8))
    assert rsv_format.verify(tmp_path / "a") == []


# --- the path -------------------------------------------------------------------------------------------------------

OLD = small_file()


class Fragile(io.FileIO):
    """A file whose write number `fails_at`, from 0, raises; `short` writes a few bytes at a time."""

    writes = 0
    fails_at = -1
    error: BaseException = OSError(errno.ENOSPC, "No space left on device")
    short = False

    def write(self, data: Any, /) -> int:
        Fragile.writes += 1
        if Fragile.writes - 1 == Fragile.fails_at:
            raise Fragile.error
        return super().write(memoryview(data)[:1000] if Fragile.short else data)


@pytest.fixture
def fragile(monkeypatch: pytest.MonkeyPatch) -> type[Fragile]:
    monkeypatch.setattr("rsv_format.outputs.FileIO", Fragile)
    monkeypatch.setattr(Fragile, "writes", 0)
    return Fragile


@pytest.fixture(params=["named", "unnamed"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """Files that are not finished have a name, as on most systems, or none, as on Linux."""
    if request.param == "named":
        monkeypatch.delattr(os, "O_TMPFILE", raising=False)
    elif not hasattr(os, "O_TMPFILE"):
        pytest.skip("there are no files without a name here")
    return str(request.param)


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize(
    "error", [OSError(errno.ENOSPC, "No space left on device"), KeyboardInterrupt(), MemoryError()], ids=repr
)
def test_a_failure_at_each_write(
    tmp_path: Path, fragile: type[Fragile], monkeypatch: pytest.MonkeyPatch, error: BaseException
) -> None:
    path = tmp_path / "a.rsv"
    new = written(tmp_path / "new", sample())
    count = fragile.writes
    assert count > 10
    wanted = RsvError if isinstance(error, OSError) else type(error)
    monkeypatch.setattr(fragile, "error", error)
    for before in (None, OLD):
        for at in range(count):
            if before is not None:
                path.write_bytes(before)
            monkeypatch.setattr(fragile, "writes", 0)
            monkeypatch.setattr(fragile, "fails_at", at)
            with pytest.raises(wanted) as e:
                write(path, **sample())
            assert not isinstance(e.value, RsvError) or (e.value.code, e.value.detail) == ("io_error", error.args[1])
            assert (path.read_bytes() if before else path.exists()) == (before or False)
            assert debris(tmp_path) == []
    monkeypatch.setattr(fragile, "fails_at", -1)
    assert written(path, sample()) == new


def test_short_writes(tmp_path: Path, fragile: type[Fragile], monkeypatch: pytest.MonkeyPatch) -> None:
    content = {"tensors": {"a": TensorData("u8", np.arange(10**4).astype(np.uint8))}}
    whole = written(tmp_path / "a", content)
    monkeypatch.setattr(fragile, "short", True)
    monkeypatch.setattr(fragile, "writes", 0)
    assert written(tmp_path / "b", content) == whole and fragile.writes > 10


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("name", ["fsync", "replace", "open", "truncate"])
@pytest.mark.parametrize("before", [None, OLD], ids=["new", "old"])
def test_a_failure_of_a_system_call(
    tmp_path: Path, fragile: type[Fragile], monkeypatch: pytest.MonkeyPatch, name: str, before: bytes | None
) -> None:
    path = tmp_path / "a.rsv"
    if before is not None:
        path.write_bytes(before)

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    if name == "truncate":
        monkeypatch.setattr(fragile, "truncate", fail, raising=False)
    elif name == "open":
        monkeypatch.setattr(os, "open", fail)
    else:
        monkeypatch.setattr(os, name, fail)
    with pytest.raises(RsvError) as e:
        write(path, **sample())
    assert (e.value.code, e.value.detail) == ("io_error", "Input/output error")
    assert (path.read_bytes() if path.exists() else None) == before and debris(tmp_path) == []


@pytest.mark.usefixtures("way")
def test_the_file_is_durable_before_it_takes_the_place_and_the_folder_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """RSV-820."""
    calls: list[str] = []
    fsync, replace_file = os.fsync, os.replace

    def noted_fsync(descriptor: int) -> None:
        calls.append("folder" if stat.S_ISDIR(os.fstat(descriptor).st_mode) else "file")
        fsync(descriptor)

    def noted_replace(old: str, new: str) -> None:
        calls.append("replace")
        assert os.path.dirname(old) == os.path.dirname(new) and rsv_format.verify(old) == []
        replace_file(old, new)

    monkeypatch.setattr(os, "fsync", noted_fsync)
    monkeypatch.setattr(os, "replace", noted_replace)
    write(tmp_path / "a", **sample())
    assert calls == ["file", "replace", "folder"]


def test_a_folder_that_cannot_be_synced_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync = os.fsync

    def no_folders(descriptor: int) -> None:
        if stat.S_ISDIR(os.fstat(descriptor).st_mode):
            raise OSError(errno.EINVAL, "Invalid argument")
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", no_folders)
    assert rsv_format.verify(written(tmp_path / "a", sample())) == []


@pytest.mark.usefixtures("way")
def test_a_file_system_without_permissions_is_no_failure(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any) -> None:
        raise PermissionError(errno.EPERM, "Operation not permitted")

    monkeypatch.setattr(os, "fchmod", fail)
    for _ in range(2):
        assert rsv_format.verify(written(tmp_path / "a", sample())) == []


def test_a_writer_that_was_not_entered_writes_nothing(tmp_path: Path) -> None:
    writer = Writer(tmp_path / "a", HEADER)
    with pytest.raises(RsvError) as e:
        writer.tensor("n", np.ones(2, np.uint8))
    assert e.value.code == "closed" and os.listdir(tmp_path) == []


@pytest.mark.usefixtures("way")
def test_an_exception_in_the_caller_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_bytes(OLD)
    with pytest.raises(ZeroDivisionError), Writer(path, HEADER) as writer:
        writer.layer(layer_a())
        raise ZeroDivisionError
    assert path.read_bytes() == OLD and os.listdir(tmp_path) == ["a"]


CHILD = """
import os, sys, time
import numpy as np
from rsv_format import Writer
from rsv_format.header import NO_DIGEST, Header, TensorEntry
path, stop = sys.argv[1:]
def here(name):
    if name == stop:
        print("here", flush=True)
        time.sleep(60)
replace = os.replace
def replaced(old, new):
    here("before replace")
    replace(old, new)
    here("after replace")
os.replace = replaced
tensors = tuple(TensorEntry(name, "u8", (10**6,), NO_DIGEST) for name in "ab")
header = Header((), (), (), tensors, (), {}, (), {})
with Writer(path, header) as writer:
    here("before blobs")
    writer.tensor("a", np.ones(10**6, np.uint8))
    here("between blobs")
    writer.tensor("b", np.ones(10**6, np.uint8))
    here("before commit")
"""


@pytest.mark.parametrize("stop", ["before blobs", "between blobs", "before commit", "before replace", "after replace"])
@pytest.mark.parametrize("before", [None, OLD], ids=["new", "old"])
def test_a_writer_that_is_killed(tmp_path: Path, stop: str, before: bytes | None) -> None:
    path = tmp_path / "a.rsv"
    if before is not None:
        path.write_bytes(before)
    with subprocess.Popen([sys.executable, "-c", CHILD, str(path), stop], stdout=subprocess.PIPE) as child:
        assert child.stdout is not None and child.stdout.readline() == b"here\n"
        child.kill()
        assert child.wait() == -signal.SIGKILL
    if stop == "after replace":
        assert rsv_format.verify(path) == [] and os.listdir(tmp_path) == ["a.rsv"]
    else:
        assert (path.read_bytes() if path.exists() else None) == before
    write(path, **sample())  # what was left behind is in no one's way
    assert rsv_format.verify(path) == []


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mode", [0o600, 0o640, 0o666, 0o444, 0o755])
def test_permissions_are_kept(tmp_path: Path, mode: int) -> None:
    path = tmp_path / "a"
    path.write_bytes(OLD)
    path.chmod(mode)
    write(path, **sample(), force=True)
    assert stat.S_IMODE(path.stat().st_mode) == mode


@pytest.mark.usefixtures("way")
@pytest.mark.parametrize("mask", [0o022, 0o077, 0o002])
def test_permissions_of_a_new_file(tmp_path: Path, mask: int) -> None:
    before = os.umask(mask)
    try:
        write(tmp_path / "a", **sample())
        assert os.umask(mask) == mask
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o666 & ~mask


@pytest.mark.parametrize("mmap", [True, False])
def test_saving_over_the_file_that_is_read(tmp_path: Path, mmap: bool) -> None:
    path = tmp_path / "a"
    path.write_bytes(OLD)  # by hand: other orders and spaces than the writer's
    with rsv_format.open(path, mmap=mmap) as file:
        scales = file.layers["a"].scales
        rsv_format.save(file, path)
        assert file.layers["a"].scales[0] == scales[0] == 0.5 and bytes(file.buffer) == OLD
    new = path.read_bytes()
    assert rsv_format.verify(new) == [] and new != OLD
    with rsv_format.open(path) as file, rsv_format.open(OLD) as old:
        assert np.array_equal(file.layers["b"].dequantize(), old.layers["b"].dequantize())
        rsv_format.save(file, path)
    assert path.read_bytes() == new and os.listdir(tmp_path) == ["a"]


def test_a_damaged_file_is_not_saved(tmp_path: Path) -> None:
    with rsv_format.open(OLD) as file:
        offset = file.layers["a"].offset
    damaged = bytearray(OLD)
    damaged[offset + 7] = 0xFF  # a padding code
    path = tmp_path / "a"
    path.write_bytes(damaged)
    with rsv_format.open(path) as file, pytest.raises(RsvError) as e:
        rsv_format.save(file, path)
    assert e.value.code == "content_invalid" and path.read_bytes() == damaged and os.listdir(tmp_path) == ["a"]


def test_a_link_stays_and_its_target_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "there").mkdir()
    target, link = tmp_path / "there" / "target.rsv", tmp_path / "link.rsv"
    link.symlink_to(target)  # dangling at first
    for _ in range(2):
        write(link, **sample())
        assert link.is_symlink() and not target.is_symlink() and rsv_format.verify(target) == []
    assert os.listdir(tmp_path / "there") == ["target.rsv"] and debris(tmp_path) == []


def test_paths_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", tmp_path / "none" / "a", tmp_path / "file" / "a", tmp_path / ("x" * 300)):
        with pytest.raises(RsvError) as e:
            write(path, **sample())
        assert e.value.code == ("bad_argument" if path.name in ("pipe", tmp_path.name) else "io_error")
        assert e.value.where == str(path) and e.value.detail
    assert sorted(os.listdir(tmp_path)) == ["file", "pipe"]


def test_a_relative_path_and_a_long_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("a.rsv", "é" * 120, "x" * 255):
        write(name, **sample())
        assert rsv_format.verify(name) == []
    assert debris(tmp_path) == []


# --- what a writer puts right, and what it allows itself -------------------------------------------------------------


def test_half_a_surrogate_pair_in_metadata_is_replaced(tmp_path: Path) -> None:
    """As os.fsdecode gives for a file name that is not UTF-8."""
    metadata = {"source": os.fsdecode(b"mod\xe8le.gguf"), "name": "\ud83d\ude00", "plain": "é"}
    path = tmp_path / "a.rsv"
    rsv_format.write(path, metadata=metadata)
    with rsv_format.open(path) as file:
        assert dict(file.metadata) == {"source": "mod\ufffdle.gguf", "name": "\U0001f600", "plain": "é"}
    header = Header((), (), (), (), (), metadata, (), {})
    with Writer(tmp_path / "b.rsv", header):
        pass
    assert (tmp_path / "b.rsv").read_bytes() == path.read_bytes()


def test_bool_elements_become_0_or_1(tmp_path: Path) -> None:
    given = np.array([[0, 1, 2], [255, 0, 128]], np.uint8)
    written(tmp_path / "a", {"tensors": {"mask": TensorData("bool", given)}})
    with rsv_format.open(tmp_path / "a") as file:
        assert file.tensors["mask"].array.tolist() == [[0, 1, 1], [1, 0, 1]]
    assert given.max() == 255


@pytest.mark.parametrize(("off", "fine"), [(4e-5, True), (6e-5, False), (9e-5, False), (2e-4, False)])
def test_a_writer_allows_itself_half_the_tolerance_of_a_matrix(tmp_path: Path, off: float, fine: bool) -> None:
    """RSV-804; a reader takes up to 1e-4."""
    stored = np.array([[1, off, 0], [0, 1, 0], [0, 0, 1]], np.float32)
    layer = make_layer(1, "a", 2, 2, Transform(6, 2, factor="matrix", stored=stored))
    if fine:
        rsv_format.verify(written(tmp_path / "a", {"layers": [layer]}))
    else:
        assert refused(tmp_path / "a", {"layers": [layer]}).code == "content_invalid"


@pytest.mark.parametrize(("off", "fine"), [(4e-6, True), (6e-6, False), (9e-6, False), (2e-5, False)])
def test_a_writer_allows_itself_half_the_tolerance_of_a_witness(tmp_path: Path, off: float, fine: bool) -> None:
    stored = haar_witness(haar(3, 7)) + np.array([0, off, 0], np.float32)
    layer = make_layer(1, "a", 2, 2, Transform(6, 2, factor="haar", seed=7, stored=stored))
    if fine:
        rsv_format.verify(written(tmp_path / "a", {"layers": [layer]}))
    else:
        assert refused(tmp_path / "a", {"layers": [layer]}).code == "content_invalid"


def test_many_layers_with_a_transform_each(tmp_path: Path) -> None:
    """Work that grows with the square of the layers would take minutes."""
    count, ones = 20_000, np.ones(1, np.float32)
    codes, centroids = np.zeros((1, 1), np.uint32), np.array([-1, 1], np.float32)
    layers = [
        LayerData(f"l{i}", 4, 1, codes, ones, centroids, Transform(4, 4, values=np.full(4, 1 + i, np.float32)))
        for i in range(count)
    ]
    path = tmp_path / "a.rsv"
    rsv_format.write(path, layers=layers)
    with rsv_format.open(path) as file:
        assert len(file.header.transforms) == len(file.layers) == count
        for i in (0, 1, 10, 9_999, 19_999):
            transform = file.layers[f"l{i}"].transform
            assert transform is not None and transform.values is not None and transform.values[0] == 1 + i
