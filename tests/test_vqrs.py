"""VQRS files: taken over exactly, or refused; and RSV files of earlier drafts.

vqrs.npz holds files that VeloxQuant-MLX 0.94.15 wrote and the dense weights that it made of their layers.
"""

from __future__ import annotations

import hashlib
import json
import os
import struct
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rsv_format
from rsv_cli.app import app
from rsv_format import RsvError, convert
from rsv_format.vqrs import Reservoir, hadamard_order, mlx_hadamard

PEER = np.load(Path(__file__).with_name("vqrs.npz"))
BITS = (2, 3, 4)
FILES = [f"b{bits}.{mode}.file" for bits in BITS for mode in ("derive", "persist")]
PAGE = 16384


def paged(data: bytes) -> bytes:
    return data + bytes(-len(data) % PAGE)


def reservoir(layers: list[dict[str, Any]], change: Callable[[Any], Any] = lambda tree: None) -> bytes:
    """A VQRS file of layers given by name, codes, norms, centroids, rotation and bias."""
    sections: dict[str, bytes] = dict.fromkeys(("index", "norms", "rotation", "centroids"), b"")
    entries = []
    for layer in layers:
        rows, columns = layer["codes"].shape
        entry = {"name": layer["name"], "out_features": rows, "in_features": columns,
                 "bits": len(layer["centroids"]).bit_length() - 1, "seed": 42,
                 "use_hadamard": layer["rotation"].ndim == 1, "has_bias": "bias" in layer,
                 "bias": layer["bias"].astype("<f2").tobytes().hex() if "bias" in layer else None}  # fmt: skip
        for section, array in (("index", layer["codes"].astype(np.uint8)), ("norms", layer["norms"].astype("<f4")),
                               ("rotation", layer["rotation"].astype("<f4")),
                               ("centroids", layer["centroids"].astype("<f4"))):  # fmt: skip
            entry |= {f"{section}_offset": len(sections[section]), f"{section}_nbytes": array.nbytes}
            sections[section] = paged(sections[section] + array.tobytes())
        entries.append(entry)
    tree = {"version": 2, "layers": entries} | {f"{name}_blob_nbytes": len(data) for name, data in sections.items()}
    change(tree)
    text = json.dumps(tree).encode()
    return paged(struct.pack("<4sII", b"VQRS", 2, len(text)) + text) + b"".join(sections.values())


def plain(name: str = "a", rows: int = 3, columns: int = 8, **other: Any) -> dict[str, Any]:
    rng = np.random.default_rng(1)
    return {"name": name, "codes": rng.integers(0, 4, (rows, columns)), "norms": rng.uniform(1, 2, rows),
            "centroids": np.array([-1, -0.25, 0.25, 1]), "rotation": np.where(rng.random(columns) < 0.5, -1, 1),
            "bias": rng.standard_normal(rows)} | other  # fmt: skip


def code_of(data: bytes, path: Path) -> str:
    source = path / "old.vqrs"
    source.write_bytes(data)
    try:
        convert(source, path / "new.rsv", force=True, max_order=64)
    except RsvError as e:
        return e.code
    assert rsv_format.verify(path / "new.rsv") == []
    return ""


@pytest.mark.parametrize("name", FILES)
def test_weights_are_those_of_the_peer(name: str, tmp_path: Path) -> None:
    (tmp_path / "old.bin").write_bytes(PEER[name].tobytes())
    result = CliRunner().invoke(app, ["convert", str(tmp_path / "old.bin"), str(tmp_path / "new.rsv"), "--json"])
    assert result.exit_code == 0, result.output
    assert rsv_format.verify(tmp_path / "new.rsv") == []
    dense = {key.split(".")[2]: PEER[key] for key in PEER.files if key.startswith(f"{name[:2]}.dense.")}
    with rsv_format.open(tmp_path / "new.rsv") as file:
        assert file.layers.keys() == dense.keys() and json.loads(result.stdout)["layers"] == len(dense)
        for layer, wanted in dense.items():
            found = file.layers[layer].dequantize()
            assert found.shape == wanted.shape and np.abs(found - wanted).max() <= 1e-6 * np.abs(wanted).max()


def test_both_modes_give_one_file_and_the_biases_stay(tmp_path: Path) -> None:
    for mode in ("derive", "persist"):
        (tmp_path / f"{mode}.bin").write_bytes(PEER[f"b4.{mode}.file"].tobytes())
        convert(tmp_path / f"{mode}.bin", tmp_path / f"{mode}.rsv")
    with rsv_format.open(tmp_path / "derive.rsv") as a, rsv_format.open(tmp_path / "persist.rsv") as b:
        for name in a.layers:
            first, second = a.layers[name], b.layers[name]
            assert first.bias_dtype == second.bias_dtype == (None if name == "b" else "f16")
            assert np.array_equal(first.codes, second.codes) and np.array_equal(first.scales, second.scales)
            assert first.bias_dtype is None or np.array_equal(first.bias, second.bias)


@pytest.mark.parametrize("n", [1, 2, 12, 20, 28, 48, 56, 80])
def test_hadamard_matrices_are_those_of_mlx(n: int) -> None:
    mx = pytest.importorskip("mlx.core")
    order = hadamard_order(n)
    ours = rsv_format.Transform(n, n)
    if order > 1:
        ours = rsv_format.Transform(n, n // order, factor="matrix", stored=mlx_hadamard(order))
    x = np.random.default_rng(0).standard_normal((3, n)).astype(np.float32)
    assert np.abs(ours.apply(x) - np.array(mx.hadamard_transform(mx.array(x)))).max() < 1e-5


def test_only_mlx_orders_are_hadamard() -> None:
    assert [n for n in range(1, 100) if hadamard_order(n)] == [
        1, 2, 4, 8, 12, 16, 20, 24, 28, 32, 40, 48, 56, 64, 80, 96]  # fmt: skip


@pytest.mark.parametrize("n", [20, 28, 40])
def test_rotations_that_are_not_symmetric_are_undone_by_their_inverse(n: int, tmp_path: Path) -> None:
    layer = plain(columns=n)
    (tmp_path / "old.vqrs").write_bytes(reservoir([layer]))
    convert(tmp_path / "old.vqrs", tmp_path / "new.rsv")
    order = hadamard_order(n)
    h = np.kron(mlx_hadamard(order), rsv_format.rotation.hadamard(n // order)).astype(np.float64)
    assert np.abs(h - h.T).max() > 0.1
    stored = layer["centroids"][layer["codes"]] * layer["norms"][:, None]
    with rsv_format.open(tmp_path / "new.rsv") as file:
        weights = file.layers["a"].dequantize()
    assert np.abs((weights * layer["rotation"]) @ h.T - stored).max() < 1e-5  # rotated again, it is what is stored


def bigger(tree: Any) -> None:
    tree["layers"][0]["norms_nbytes"] += 4


def beyond(tree: Any) -> None:
    tree["layers"][0]["index_offset"] = 2**52


def overlapping(tree: Any) -> None:
    tree["layers"].append(tree["layers"][0] | {"name": "b"})


def of_five_bits(tree: Any) -> None:
    tree["layers"][0]["bits"] = 5


def narrow_hadamard(tree: Any) -> None:
    tree["layers"][0] |= {"in_features": 36}


def longer_section(tree: Any) -> None:
    tree["index_blob_nbytes"] *= 2


def true_rows(tree: Any) -> None:
    tree["layers"][0]["out_features"] = True


def another_member(tree: Any) -> None:
    tree["layers"][0]["window"] = 8


def no_bias(tree: Any) -> None:
    tree["layers"][0]["bias"] = "zz" * 6


def spaced_bias(tree: Any) -> None:
    tree["layers"][0]["bias"] = "00 00 000000"


def enormous(tree: Any) -> None:
    tree["layers"][0] |= {"in_features": 2**24, "out_features": 2**31 - 1, "index_nbytes": 2**55 - 2**24}


def nothing(tree: Any) -> None:
    tree["layers"] = []


HOSTILE: list[tuple[bytes, str]] = [
    *((reservoir([plain()], change), "source_invalid") for change in (
        bigger, beyond, overlapping, longer_section, true_rows, another_member, no_bias, spaced_bias, nothing)),
    (reservoir([plain()], enormous), "source_invalid"),
    (reservoir([plain()], of_five_bits), "source_unsupported"),
    (reservoir([plain()], narrow_hadamard), "source_unsupported"),
    (reservoir([plain(codes=np.full((3, 8), 4))]), "source_invalid"),
    (reservoir([plain(rotation=np.full(8, 0.5))]), "source_invalid"),
    (reservoir([plain(rotation=np.full(8, np.nan))]), "source_invalid"),
    (reservoir([plain(rotation=np.ones((8, 8)))]), "content_invalid"),
    (reservoir([plain(norms=np.full(3, np.inf))]), "content_invalid"),
    (reservoir([plain(bias=np.full(3, np.nan))]), "content_invalid"),
    (reservoir([plain(centroids=np.array([0, 1, 1 + 2**-20, 2]))]), "content_invalid"),  # one in float16
    (reservoir([plain(centroids=np.array([0, 1, 2, 1e9]))]), "content_invalid"),  # infinite there
    (reservoir([plain("a\nb")]), "source_invalid"),
    (reservoir([plain(), plain()]), "source_invalid"),
    (reservoir([plain()])[:-1], "source_invalid"),
    (reservoir([plain()]) + b"\0", "source_invalid"),
    (b"VQRS\2\0", "source_invalid"),
    (b"VQRS\2\0\0\0\xff\xff\xff\xff", "source_invalid"),
    (b"VQRS\1\0\0\0\2\0\0\0{}", "source_unsupported"),
    (b"VQRS\2\0\0\0\2\0\0\0[]", "source_invalid"),
    (b"", "source_unsupported"),
]  # fmt: skip


@pytest.mark.parametrize("case", range(len(HOSTILE)))
def test_what_cannot_be_taken_over_is_refused(case: int, tmp_path: Path) -> None:
    data, code = HOSTILE[case]
    assert code_of(data, tmp_path) == code and not (tmp_path / "new.rsv").exists()


def test_a_small_file_does_not_buy_a_large_matrix(tmp_path: Path) -> None:
    def derived(tree: Any) -> None:
        tree["layers"][0] |= {"use_hadamard": False, "rotation_nbytes": 0}
        tree["rotation_blob_nbytes"] = 0

    wide = plain(rows=1, columns=65, rotation=np.ones((0,)))
    assert code_of(reservoir([wide], derived), tmp_path) == "over_limit"
    assert code_of(reservoir([plain(rows=1, columns=64, rotation=np.ones((0,)))], derived), tmp_path) == ""


def test_damaged_files_are_refused_or_sound(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    file = reservoir([plain(), plain("b", columns=12), plain("c", columns=5, rotation=np.eye(5))])
    header_nbytes = 12 + int.from_bytes(file[8:12], "little")
    outcomes = set()
    for _ in range(300):
        data = bytearray(file)
        for _ in range(rng.integers(1, 4)):
            end = header_nbytes if rng.random() < 0.7 else len(data)
            data[rng.integers(0, end)] = rng.choice(list(b'0129-"{}[],:truefalsn\x00\xff'))
        if rng.random() < 0.1:
            del data[rng.integers(0, len(data)) :]
        outcomes.add(code_of(bytes(data), tmp_path))
    assert outcomes <= {"", "source_invalid", "source_unsupported", "content_invalid", "over_limit"}
    assert {"", "source_invalid"} <= outcomes


def test_a_reservoir_is_never_replaced(tmp_path: Path) -> None:
    path = tmp_path / "old"
    path.write_bytes(reservoir([plain()]))
    before = path.read_bytes()
    with pytest.raises(RsvError, match="is the input itself"):
        convert(path, path, force=True)
    assert path.read_bytes() == before and Reservoir(path).layers[0].name == "a"


def draft(path: Path, *, windows: bool, signed: bool) -> bytes:
    """The bytes of an RSV file as drafts had them: without windows, and with a digest of the header alone."""
    data = path.read_bytes()
    nbytes = int.from_bytes(data[16:24], "little")
    tree = json.loads(data[64 : 64 + nbytes])
    if not windows:
        for codebook in tree["codebooks"]:
            del codebook["window"]
    text = json.dumps(tree, separators=(",", ":")).encode()
    text += b" " * (nbytes - len(text))
    digest = hashlib.sha256(data[:32] + text if signed else text).digest()
    return data[:32] + digest + text + data[64 + nbytes :]


@pytest.mark.parametrize("windows", [False, True])
@pytest.mark.parametrize("signed", [False, True])
def test_a_file_of_an_earlier_draft_becomes_one_of_today(windows: bool, signed: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(3)
    layers = [rsv_format.quantize_matrix(rng.standard_normal((4, 24)).astype(np.float32), name=n, bits=3) for n in "ab"]
    tensors = {"norm": rsv_format.TensorData("f32", np.arange(5, dtype="<f4"))}
    attachments = {"config.json": rsv_format.AttachmentData("application/json", b"{}")}
    rsv_format.write(tmp_path / "a", layers=layers, tensors=tensors, attachments=attachments, metadata={"name": "x"})
    (tmp_path / "old").write_bytes(draft(tmp_path / "a", windows=windows, signed=signed))
    what = convert(tmp_path / "old", tmp_path / "new")
    assert what == ("an RSV file" if windows and signed else "an RSV file of an earlier draft")
    assert (tmp_path / "new").read_bytes() == (tmp_path / "a").read_bytes()


def test_a_damaged_draft_is_refused(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "a", layers=[rsv_format.quantize_matrix(np.ones((2, 32)), name="a", bits=2)])
    data = bytearray(draft(tmp_path / "a", windows=False, signed=False))
    for position, code in ((70, "header_digest_mismatch"), (len(data) - 1, "padding_nonzero")):
        (tmp_path / "old").write_bytes(data[:position] + bytes([data[position] ^ 1]) + data[position + 1 :])
        with pytest.raises(RsvError) as caught:
            convert(tmp_path / "old", tmp_path / "new")
        assert caught.value.code == code and not (tmp_path / "new").exists()


def test_a_file_that_was_taken_over_goes_into_a_model(tmp_path: Path) -> None:
    nn = pytest.importorskip("mlx.nn")
    import mlx.core as mx

    import rsv_mlx

    (tmp_path / "old.bin").write_bytes(PEER["b3.persist.file"].tobytes())
    convert(tmp_path / "old.bin", tmp_path / "new.rsv")
    with rsv_format.open(tmp_path / "new.rsv") as file:
        layers = {name: (x.in_features, x.out_features, x.bias_float32()) for name, x in file.layers.items()}
    model = nn.Module()
    for name, (columns, rows, bias) in layers.items():
        setattr(model, name, nn.Linear(columns, rows, bias=bias is not None))
    rsv_mlx.graft(model, tmp_path / "new.rsv")
    for name, (columns, _, bias) in layers.items():
        found = np.array(getattr(model, name)(mx.eye(columns))) - (0 if bias is None else bias)
        assert np.abs(found.T - PEER[f"b3.dense.{name}"]).max() < 1e-5


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("alias", ["itself", "link", "hard link"])
@pytest.mark.parametrize("is_rsv", [False, True], ids=["VQRS", "RSV"])
def test_what_is_taken_over_is_never_replaced(tmp_path: Path, alias: str, force: bool, is_rsv: bool) -> None:
    old, new = tmp_path / "old", tmp_path / "new"
    if is_rsv:
        rsv_format.write(old, layers=[rsv_format.quantize_matrix(np.ones((2, 32)), name="a", bits=2)])
    else:
        old.write_bytes(reservoir([plain()]))
    if alias == "link":
        new.symlink_to(old)
    elif alias == "hard link":
        new.hardlink_to(old)
    before = old.stat()
    with pytest.raises(RsvError, match="is the input itself") as caught:
        convert(old, old if alias == "itself" else new, force=force)
    assert caught.value.code == "bad_argument" and old.stat() == before


def test_an_output_that_is_refused_is_refused_before_the_work(tmp_path: Path) -> None:
    (tmp_path / "old").write_bytes(b"not looked at")
    (tmp_path / "new").write_text("precious")
    with pytest.raises(RsvError, match="is not an RSV file"):
        convert(tmp_path / "old", tmp_path / "new")


def through_a_pipe(data: bytes, path: Path) -> Any:
    """What the writer of a pipe came to, which `convert` reads."""
    os.mkfifo(path / "pipe")
    with ThreadPoolExecutor(1) as pool:
        writing = pool.submit((path / "pipe").write_bytes, data)
        try:
            return convert(path / "pipe", path / "new")
        finally:
            writing.exception(60)


def test_a_pipe_is_read_once_and_no_further_than_needed(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "old", layers=[rsv_format.quantize_matrix(np.ones((2, 32)), name="a", bits=2)])
    assert through_a_pipe((tmp_path / "old").read_bytes(), tmp_path) == "an RSV file"
    assert (tmp_path / "new").read_bytes() == (tmp_path / "old").read_bytes()


def test_a_reservoir_is_no_pipe(tmp_path: Path) -> None:
    """Its first bytes do not say how long it is."""
    with pytest.raises(RsvError, match="no regular file") as caught:
        through_a_pipe(b"VQRS" + bytes(2**22), tmp_path)
    assert caught.value.code == "source_unsupported" and not (tmp_path / "new").exists()
