"""Looking into files: ls, cat, diff, verify of several, what a notebook and a shell show."""

from __future__ import annotations

import io
import json
import math
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner, Result

import rsv_format
from rsv_cli.app import app
from rsv_format import AttachmentData, RsvError, TensorData

CONFIG = b'{"model_type": "llama"}'
RNG = np.random.default_rng(5)
WEIGHTS = {name: RNG.standard_normal((6, 48)).astype(np.float32) for name in ("blk.0.up", "blk.1.up", "head")}


def write(
    path: Path, *, bits: int = 4, names: tuple[str, ...] = tuple(WEIGHTS), norm: float = 1.5, **other: Any
) -> Path:
    layers = [
        rsv_format.quantize_matrix(WEIGHTS[name], name=name, bits=bits,
                                   bias=np.arange(6, dtype="<u2") + 0x3F80, bias_dtype="bf16")
        for name in names
    ]  # fmt: skip
    tensors = {
        "norm.weight": TensorData("f32", np.full(3, norm, "<f4")),
        "mask": TensorData("bool", np.array([[0, 1]], np.uint8)),
        "half": TensorData("bf16", np.array([0x3F80, 0xC000], "<u2")),
    }
    attachments = {"config.json": AttachmentData("application/json", CONFIG)}
    rsv_format.write(path, layers=layers, tensors=tensors, attachments=attachments, metadata={"name": "x"}, **other)
    return path


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write(tmp_path_factory.mktemp("look") / "a.rsv")


def rsv(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [sys.executable, "-W", "error", "-m", "rsv_format", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, timeout=60, check=False, **options)


def damaged(path: Path, where: int, to: Path) -> Path:
    data = bytearray(path.read_bytes())
    data[where] ^= 1
    to.write_bytes(data)
    return to


def test_ls_names_what_is_there(path: Path) -> None:
    names = [line.split()[-1] for line in rsv("ls", path).stdout.splitlines()]
    assert names == [*sorted(WEIGHTS), "half", "mask", "norm.weight", "config.json"]
    assert [entry["name"] for entry in json.loads(rsv("ls", path, "blk.*", "--json").stdout)] == [
        "blk.0.up",
        "blk.1.up",
    ]
    layer, *_, tensor, attachment = json.loads(rsv("ls", path, "--json").stdout)
    assert (layer["kind"], layer["shape"], layer["bits"]) == ("layer", [6, 48], 4)
    assert (tensor["dtype"], tensor["shape"]) == ("f32", [3]) and attachment["nbytes"] == len(CONFIG)
    assert rsv("ls", path, "nothing*").exit_code == 1


def test_cat_takes_one_thing_out(path: Path) -> None:
    def array(name: str) -> Any:
        run = process("cat", path, name)
        assert run.returncode == 0 and run.stderr == b""
        return np.load(io.BytesIO(run.stdout))

    with rsv_format.open(path) as file:
        dense = file.layers["head"].dequantize()
    for name in ("head", "head.weight"):
        assert array(name).dtype == np.float32 and np.array_equal(array(name), dense)
    assert array("head.bias").tolist() == [1 + i / 128 for i in range(6)]  # bfloat16, as float32
    assert array("half").tolist() == [1, -2] and array("norm.weight").tolist() == [1.5] * 3
    assert array("mask").dtype == bool and array("mask").tolist() == [[False, True]]
    assert process("cat", path, "config.json").stdout == CONFIG


def test_cat_into_a_file(path: Path, tmp_path: Path) -> None:
    assert rsv("cat", path, "norm.weight", "-o", tmp_path / "x.npy").exit_code == 0
    assert np.load(tmp_path / "x.npy").tolist() == [1.5] * 3
    assert rsv("cat", path, "mask", "-o", tmp_path / "x.npy").exit_code == 0  # an array replaces an array
    assert rsv("cat", path, "config.json", "-o", tmp_path / "x.npy").exit_code == 2
    assert rsv("cat", path, "config.json", "-o", tmp_path / "x.npy", "--force").exit_code == 0
    assert (tmp_path / "x.npy").read_bytes() == CONFIG
    assert rsv("cat", path, "head", "-o", path, "--force").exit_code == 2


def test_cat_refuses_what_is_not_there_or_damaged(path: Path, tmp_path: Path) -> None:
    for name in ("nothing", "head.scale", "config.json.weight", ""):
        result = rsv("cat", path, name)
        assert result.exit_code == 2 and "rsv ls" in result.stderr
    with rsv_format.open(path) as file:
        blobs = {blob.name: blob for blob in file.blobs}
        parts = {"head": file.layers["head"].blobs, "mask": [blobs["mask"]], "config.json": [blobs["config.json"]]}
        assert {blob.kind for blob in parts["head"]} >= {"layer", "codebook", "diagonal"}
    for name, needed in parts.items():
        for blob in needed:
            broken = damaged(path, blob.offset, tmp_path / "broken.rsv")
            result = rsv("cat", broken, name)
            assert result.exit_code == 1 and "blob_digest_mismatch" in result.stderr and not result.stdout
            other = "norm.weight"
            assert rsv("cat", broken, other).exit_code == 0


def test_cat_of_a_name_that_two_things_have(tmp_path: Path) -> None:
    rsv_format.write(
        tmp_path / "a",
        tensors={"x": TensorData("u8", np.zeros(2, np.uint8))},
        attachments={"x": AttachmentData("text/plain", b"x")},
    )
    result = rsv("cat", tmp_path / "a", "x")
    assert result.exit_code == 2 and "rsv extract" in result.stderr


def test_diff_of_equal_files(path: Path, tmp_path: Path) -> None:
    result = rsv("diff", path, write(tmp_path / "b.rsv"))
    assert result.exit_code == 0 and result.stdout.startswith("equal")


def test_diff_tells_what_and_by_how_much(path: Path, tmp_path: Path) -> None:
    other = write(tmp_path / "b.rsv", bits=5, names=("head", "blk.1.up"), norm=3.0)
    result = rsv("diff", path, other, "--json")
    tree = json.loads(result.stdout)
    assert result.exit_code == 1 and tree["equal"] is False
    assert tree["layers"]["gone"] == ["blk.0.up"] and tree["layers"]["added"] == []
    with rsv_format.open(path) as a, rsv_format.open(other) as b:
        found = rsv_format.diff(a, b)
        assert [change.name for change in found.layers.changed] == ["blk.1.up", "head"]
        for change in found.layers.changed:
            first, second = (x.layers[change.name].dequantize() for x in (a, b))
            error = np.linalg.norm(first - second) / np.linalg.norm(first)
            assert change.relative_error == pytest.approx(error, rel=1e-5) and {"bits", "codebook"} <= set(change.what)
    (change,) = found.tensors.changed
    assert (change.name, change.what, change.relative_error) == ("norm.weight", ("content",), 1.0)
    assert found.tensors.equal == 2 and not found.attachments and not found.metadata
    text = rsv("diff", path, other).stdout
    assert "− blk.0.up" in text and "~ norm.weight  content  100 %" in text
    assert "+ blk.0.up" in rsv("diff", other, path).stdout


def test_diff_verifies_before_it_compares(path: Path, tmp_path: Path) -> None:
    with rsv_format.open(path) as file:
        broken = damaged(path, file.layers["head"].offset, tmp_path / "b")
    result = rsv("diff", path, broken, "--json")
    assert result.exit_code == 1 and json.loads(result.stdout)["error"] == "blob_digest_mismatch"


def test_numbers_that_are_not_finite_have_no_relative_error(tmp_path: Path) -> None:
    for name, value in (("a", np.inf), ("b", 1.0), ("c", 0.0)):
        rsv_format.write(tmp_path / name, tensors={"x": TensorData("f32", np.full(2, value, "<f4"))})
    with (
        rsv_format.open(tmp_path / "a") as a,
        rsv_format.open(tmp_path / "b") as b,
        rsv_format.open(tmp_path / "c") as c,
    ):
        assert [rsv_format.diff(*pair).tensors.changed[0].relative_error for pair in ((a, b), (b, a), (c, b))] == [
            None
        ] * 3
        assert rsv_format.diff(b, c).tensors.changed[0].relative_error == 1.0


def test_verify_of_several_files_and_standard_input(path: Path, tmp_path: Path) -> None:
    with rsv_format.open(path) as file:
        broken = damaged(path, file.layers["head"].offset, tmp_path / "b")
    result = rsv("verify", path, broken, tmp_path / "none", "--json")
    tree = json.loads(result.stdout)
    assert result.exit_code == 1 and tree["valid"] is False
    assert [x["valid"] for x in tree["files"]] == [True, False, False]
    assert [x.get("error") for x in tree["files"]] == [None, "blob_digest_mismatch", "io_error"]
    assert rsv("verify", path, path).stdout.count("sound") == 2
    assert process("verify", "-", input=path.read_bytes()).returncode == 0
    with path.open("rb") as file:
        assert process("verify", "-", stdin=file).returncode == 0
    cut = process("verify", "-", input=path.read_bytes()[:-1])
    assert cut.returncode == 1 and cut.stderr.startswith(b"error[file_truncated]")
    assert process("verify", "-", input=b"").returncode == 1


def test_verbose_tells_each_step(path: Path) -> None:
    lines = rsv("verify", path, "--verbose").stderr.splitlines()
    assert [line.split()[-1] for line in lines if "verifying" in line][-1] == "config.json" and len(lines) > 5
    assert rsv("verify", path).stderr == "" and rsv("verify", path, "--verbose", "--quiet").stderr == ""


def test_objects_show_themselves_briefly(path: Path) -> None:
    with rsv_format.open(path) as file:
        layer = file.layers["head"]
        assert repr(layer) == f"<rsv_format.Layer head: 6 x 48, 4 bits, bf16 bias, {layer.nbytes} bytes>"
        assert repr(file.tensors["half"]) == "<rsv_format.Tensor half: bf16 (2,), 4 bytes>"
        shown = [file, layer.transform, file.attachments["config.json"], rsv_format.summarize(file),
                 rsv_format.quantize_matrix(WEIGHTS["head"], name="head", bits=2), TensorData("u8", np.zeros(9999)),
                 AttachmentData("text/plain", bytes(9999))]  # fmt: skip
        assert all(len(repr(x)) < 200 and "\n" not in repr(x) for x in shown)


def test_a_notebook_shows_tables_of_text(tmp_path: Path) -> None:
    layer = rsv_format.quantize_matrix(WEIGHTS["head"], name="<script>", bits=2)
    rsv_format.write(tmp_path / "a", layers=[layer])
    rsv_format.write(tmp_path / "b", tensors={f"t{i}": TensorData("u8", np.zeros(1, np.uint8)) for i in range(103)})
    with rsv_format.open(tmp_path / "a") as a, rsv_format.open(tmp_path / "b") as b:
        assert "&lt;script&gt;" in a._repr_html_() and "<script>" not in a._repr_html_()
        assert b._repr_html_().count("<tr>") == 101 and "3 more" in b._repr_html_()
        assert "codes" in rsv_format.summarize(a)._repr_html_()


@pytest.mark.parametrize("words, found", [
    ("rsv cat FILE bl", ["blk.0.up", "blk.1.up"]),
    ("rsv cat FILE conf", ["config.json"]),
    ("rsv cat none h", []),
    ("rsv ver", ["verify"]),
])  # fmt: skip
def test_a_shell_completes_names(words: str, found: list[str], path: Path) -> None:
    line = words.replace("FILE", str(path))
    environment = {
        **os.environ,
        "_RSV_COMPLETE": "complete_bash",
        "COMP_WORDS": line,
        "COMP_CWORD": str(line.count(" ")),
    }
    run = process(env=environment)
    assert run.stdout.decode().split() == found


def test_verify_blobs_declines_costly_factors(tmp_path: Path) -> None:
    from rsv_format.verify import verify_blobs

    layer = rsv_format.quantize_matrix(WEIGHTS["head"], name="head", bits=2, rotation="haar")
    rsv_format.write(tmp_path / "a", layers=[layer])
    with rsv_format.open(tmp_path / "a", max_order=8) as file, pytest.raises(RsvError, match="over_limit"):
        verify_blobs(file, file.layers["head"].blobs)


def test_weights_beyond_float32_are_no_result(tmp_path: Path) -> None:
    layer = rsv_format.quantize_matrix(WEIGHTS["head"], name="head", bits=2)
    for name, scale in (("a", 3e38), ("b", 2e38), ("c", 1.0)):
        huge = rsv_format.LayerData(
            "head", 48, 2, layer.codes, np.full(6, scale, "<f4"), layer.codebook, layer.transform
        )
        rsv_format.write(tmp_path / name, layers=[huge])
    result = rsv("cat", tmp_path / "a", "head")
    assert result.exit_code == 1 and "nonfinite_value" in result.stderr and result.stdout == ""
    assert (
        json.loads(rsv("diff", tmp_path / "a", tmp_path / "b", "--json").stdout)["layers"]["changed"][0][
            "relative_error"
        ]
        is None
    )
    result = rsv("report", tmp_path / "a", "-o", tmp_path / "r.html", "--source", tmp_path / "c")
    assert result.exit_code == 1 and "nonfinite_value" in result.stderr and not (tmp_path / "r.html").exists()
    assert rsv("report", tmp_path / "a", "-o", tmp_path / "r.html").exit_code == 0


def test_cat_refuses_before_the_work_and_never_adds_to_its_input(path: Path, tmp_path: Path) -> None:
    own = write(tmp_path / "a.rsv")
    before = own.read_bytes()
    with own.open("ab") as out:
        command = [sys.executable, "-m", "rsv_format", "cat", own, "config.json"]
        said = subprocess.run(command, stdout=out, stderr=subprocess.PIPE, timeout=60, check=False)
    assert said.returncode == 2 and b"is where this process prints to" in said.stderr and own.read_bytes() == before
    bad = damaged(own, own.stat().st_size - 1, tmp_path / "bad.rsv")
    (tmp_path / "text").write_text("precious")
    assert "is not a NumPy array" in rsv("cat", bad, "head", "-o", tmp_path / "text").output


@pytest.mark.parametrize("table", ["keep", 5])
def test_compare_holds_rows_of_the_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, table: Any) -> None:
    """The largest array that is read of a source whose tensors are read in parts, and the same sums."""
    from safetensors.numpy import save_file

    from rsv_cli import compare
    from rsv_format.sources.base import SourceFile

    weights = {f"model.layers.{i}.mlp.up_proj.weight": RNG.standard_normal((700, 64)).astype("<f4") for i in range(2)}
    save_file(
        weights | {"model.embed_tokens.weight": RNG.standard_normal((900, 64)).astype("<f4")},
        tmp_path / "s.safetensors",
    )
    rsv_format.quantize(tmp_path / "s.safetensors", tmp_path / "m.rsv", importance="none", embedding_bits=table)
    whole = json.loads(rsv("compare", tmp_path / "s.safetensors", tmp_path / "m.rsv", "--json").stdout)
    sizes, read = [], SourceFile.read
    monkeypatch.setattr(SourceFile, "read", lambda *a, **k: sizes.append(math.prod(a[2])) or read(*a, **k))
    monkeypatch.setattr(compare, "_CHUNK", 2**12)
    monkeypatch.setattr("rsv_format.reader._PIECE_NBYTES", 2**14)
    parts = json.loads(rsv("compare", tmp_path / "s.safetensors", tmp_path / "m.rsv", "--json").stdout)
    assert parts["tensors"] == whole["tensors"] and np.isclose(parts["relative_error"], whole["relative_error"])
    assert max(sizes) < 900 * 64
