"""The command line: results, messages, exit codes, signals, closed pipes, and no half-written output."""

from __future__ import annotations

import contextlib
import importlib
import io
import json
import os
import re
import signal
import subprocess
import sys
import time
import types
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

import rsv_format
from rsv_cli import adoption, describe, terminal
from rsv_cli.app import app
from rsv_format import RsvError, TensorData
from rsv_format.summary import family

CONFIG = {"model_type": "llama", "hidden_size": 96}
RSV = [sys.executable, "-W", "error", "-m", "rsv_cli"]
COMMANDS = (
    "quantize", "calibrate", "info", "verify", "ls", "cat", "diff", "compare", "evaluate", "export", "extract",
    "convert", "split", "merge", "report", "generate", "doctor",
)  # fmt: skip


def rsv(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def ok(*arguments: object) -> str:
    result = rsv(*arguments)
    assert result.exit_code == 0, result.output
    return result.stdout


def failed(code: int, *arguments: object) -> Result:
    result = rsv(*arguments)
    assert result.exit_code == code, (result.exit_code, result.output)
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result


def process(*arguments: object, **options: Any) -> subprocess.CompletedProcess[bytes]:
    command = [*RSV, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False, **options)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    rng = np.random.default_rng(7)
    tensors = {"model.embed_tokens.weight": rng.standard_normal((50, 96)).astype(np.float16)}
    for i in range(2):
        block = f"model.layers.{i}"
        tensors[f"{block}.input_layernorm.weight"] = rng.uniform(0.5, 2, 96).astype(np.float32)
        tensors[f"{block}.self_attn.q_proj.weight"] = rng.standard_normal((64, 96)).astype(np.float32)
        tensors[f"{block}.self_attn.q_proj.bias"] = rng.standard_normal(64).astype(np.float16)
        tensors[f"{block}.mlp.down_proj.weight"] = rng.standard_normal((96, 160)).astype(np.float16)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    (folder / "tokenizer.json").write_text('{"version": "1.0"}')
    return folder


@pytest.fixture(scope="module")
def quantized(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("rsv") / "model.rsv"
    rsv_format.quantize(model, path, seed=3, embedding_bits="keep")
    return path


@pytest.fixture
def broken(quantized: Path, tmp_path: Path) -> Path:
    """Two layers with a changed byte each."""
    with rsv_format.open(quantized) as file:
        offsets = [layer.offset for layer in file.layers.values()][:2]
    data = bytearray(quantized.read_bytes())
    for offset in offsets:
        data[offset] ^= 1
    path = tmp_path / "broken.rsv"
    path.write_bytes(data)
    return path


# ---- help and start-up


def test_help_names_every_command() -> None:
    text = ok("--help")
    assert all(command in text for command in COMMANDS)


@pytest.mark.parametrize("command", COMMANDS)
def test_help_of_a_command_has_an_example(command: str) -> None:
    text = " ".join(ok(command, "--help").split())
    assert f"Example: rsv {command}" in text
    assert "'rsv-format'" not in text  # an extra that markup has taken for its own


def test_version() -> None:
    assert ok("--version") == f"rsv {rsv_format.__version__}\n"
    for module in ("rsv_format", "rsv_mlx"):
        pytest.importorskip("mlx.core") if module == "rsv_mlx" else None
        assert importlib.import_module(module).__version__ == rsv_format.__version__


def test_no_arguments_show_help() -> None:
    assert "Usage" in rsv().output


def test_start_up_imports_nothing_heavy() -> None:
    code = "import sys, rsv_cli.app; print({'numpy', 'rsv_format', 'rsv_mlx', 'mlx', 'safetensors'} & set(sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "set()\n"


@pytest.mark.parametrize("missing", ["typer", "rich"])
def test_missing_extra_says_how_to_install(missing: str) -> None:
    code = f"import sys; sys.modules[{missing!r}] = None; import rsv_cli; rsv_cli.run()"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.returncode == 1
    assert result.stderr == f"rsv needs {missing}: pip install 'rsv-format[cli]'\n"


# ---- quantize


def test_quantize_writes_what_the_library_writes(model: Path, quantized: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.rsv"
    text = ok("quantize", model, "-o", out, "--seed", 3, "--embedding-bits", "keep")
    assert out.read_bytes() == quantized.read_bytes()
    assert "wrote" in text and "4 layers" in text


def test_quantize_passes_its_options_on(model: Path, tmp_path: Path) -> None:
    out, wanted = tmp_path / "out.rsv", tmp_path / "wanted.rsv"
    options = ("--bits", 3, "--codebook", "uniform", "--rotation", "haar", "--persist-rotation", "--threads", 1)
    patterns = ("--include", "*.self_attn.*", "--include", "*.mlp.*", "--exclude", "*.1.*")
    assert ok("quantize", model, "-o", out, "--importance", "none", "--quiet", *options, *patterns) == ""
    rsv_format.quantize(
        model, wanted, bits=3, codebook="uniform", rotation="haar", persist_rotation=True, importance="none",
        include=["*.self_attn.*", "*.mlp.*"], exclude=["*.1.*"],
    )  # fmt: skip
    assert out.read_bytes() == wanted.read_bytes()


@pytest.mark.parametrize(
    "options",
    [
        ("--bits", 0),
        ("--bits", 9),
        ("--codebook", "nf4"),
        ("--rotation", "givens"),
        ("--seed", -1),
        ("--seed", 2**53),
        ("--threads", 0),
        ("--bits-per-weight", 0),
        ("--bits-per-weight", 1.5),
        ("--bits-per-weight", "nan"),
        ("--bits", 4, "--bits-per-weight", 4.5),
        ("--embedding-bits", 9),
        ("--embedding-bits", ""),
        ("--embedding-bits", "some"),
        ("--persist-rotation",),
        ("--include", "nothing.*"),
        ("--surprise",),
    ],
)
def test_bad_option_values_are_usage_errors(model: Path, tmp_path: Path, options: tuple[object, ...]) -> None:
    failed(2, "quantize", model, "-o", tmp_path / "out.rsv", *options)
    assert list(tmp_path.iterdir()) == []


def test_quantize_spends_a_budget(model: Path, tmp_path: Path) -> None:
    out, wanted = tmp_path / "out.rsv", tmp_path / "wanted.rsv"
    text = ok("quantize", model, "-o", out, "--bits-per-weight", 6.5, "--embedding-bits", 5)
    rsv_format.quantize(model, wanted, bits_per_weight=6.5, embedding_bits=5)
    assert out.read_bytes() == wanted.read_bytes()
    found = re.search(r"([0-9.]+) bits per weight", text)
    assert found is not None and 3 < float(found[1]) <= 6.5
    tree = json.loads(ok("info", out, "--json"))
    assert tree["metadata"]["quantizer.bits_per_weight"] == "6.5"
    assert {x["name"]: x["bits"] for x in tree["layers"]}["model.embed_tokens"] == 5
    ok("quantize", model, "-o", out, "--embedding-bits", "keep", "--seed", 3)
    assert "model.embed_tokens" not in ok("info", out, "--layers").split("Kept tensors")[0]


def test_quantize_says_how_many_bits_tables_get(model: Path, tmp_path: Path) -> None:
    assert f"default: ({rsv_format.EMBEDDING_BITS}, or" in ok("quantize", "--help")
    ok("quantize", model, "-o", tmp_path / "out.rsv")
    with rsv_format.open(tmp_path / "out.rsv") as file:
        assert file.layers["model.embed_tokens"].bits == rsv_format.EMBEDDING_BITS


def test_quantize_fails_with_the_code_of_the_library(tmp_path: Path) -> None:
    result = failed(1, "quantize", tmp_path / "absent.safetensors", "-o", tmp_path / "out.rsv")
    assert result.stderr.startswith("error[io_error] ")
    assert result.stdout == ""
    save_file({"a.weight": np.full((2, 8), np.nan, np.float32)}, tmp_path / "nan.safetensors")
    result = failed(1, "quantize", tmp_path / "nan.safetensors", "-o", tmp_path / "out.rsv")
    assert result.stderr.startswith("error[nonfinite_weight] a: ")
    assert [path.name for path in tmp_path.iterdir()] == ["nan.safetensors"]


def test_quantize_does_not_replace_its_source_or_another_kind_of_file(model: Path, tmp_path: Path) -> None:
    source = tmp_path / "model.safetensors"
    source.write_bytes((model / "model.safetensors").read_bytes())
    before = source.read_bytes()
    alias = tmp_path / "alias.rsv"
    alias.symlink_to(source)
    for out in (source, alias):
        assert "is the input itself" in failed(2, "quantize", source, "-o", out).stderr
    other = tmp_path / "notes.txt"
    other.write_text("precious")
    assert "not an RSV file" in failed(2, "quantize", source, "-o", other).stderr
    assert "is a file of the input's" in failed(2, "quantize", tmp_path, "-o", source).stderr
    assert "not a regular file" in failed(2, "quantize", source, "-o", os.devnull).stderr
    assert source.read_bytes() == before and other.read_text() == "precious"


def test_quantize_replaces_an_rsv_file_and_an_empty_one(model: Path, quantized: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.rsv"
    out.touch()
    ok("quantize", model, "-o", out, "--seed", 4)
    ok("quantize", model, "-o", out, "--seed", 3, "--embedding-bits", "keep")
    assert out.read_bytes() == quantized.read_bytes()


# ---- info


def test_info_counts_every_byte(quantized: Path) -> None:
    tree = json.loads(ok("info", quantized, "--json"))
    assert tree["nbytes"] == quantized.stat().st_size == sum(tree["by_kind"].values())
    assert tree["weights"] == 2 * (64 * 96 + 96 * 160)
    assert [layer["name"] for layer in tree["layers"]] == sorted(layer["name"] for layer in tree["layers"])
    assert {layer["bias"] for layer in tree["layers"]} == {None, "f16"}
    assert {transform["diagonal"] for transform in tree["transforms"]} == {"signs", "values"}
    assert sum(t["nbytes"] for t in tree["transforms"]) == tree["by_kind"]["diagonals"] + tree["by_kind"]["factors"]
    assert len(tree["codebooks"][0]["centroids"]) == 16
    assert [item["name"] for item in tree["attachments"]] == ["config.json", "tokenizer.json"]
    assert tree["metadata"]["quantizer.seed"] == "3"


def test_info_groups_layers_into_families(quantized: Path) -> None:
    text = ok("info", quantized)
    assert re.search(r"model\.layers\.\*\.mlp\.down_proj +×2 +96 × 160 +4 ", text)
    assert "hartley 5 ⊗ hadamard 32 · signs" in text
    assert "codes" in text and "bits per weight" in text
    listed = ok("info", quantized, "--layers")
    assert "model.layers.0.mlp.down_proj" in listed and "model.layers.*" not in listed


def test_info_of_a_file_of_rotation_matrices(model: Path, tmp_path: Path) -> None:
    for flags, wanted in (((), "haar 96 seed 0"), (("--persist-rotation",), "matrix 96")):
        ok("quantize", model, "-o", tmp_path / "out.rsv", "--rotation", "haar", *flags)
        text = ok("info", tmp_path / "out.rsv")
        assert wanted in text and ("derived by QR" in text) == (not flags)


def test_info_of_an_empty_file(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "empty.rsv")
    assert "0 layers" in ok("info", tmp_path / "empty.rsv")
    assert json.loads(ok("info", tmp_path / "empty.rsv", "--json"))["bits_per_weight"] == 0


def test_names_and_metadata_cannot_command_the_terminal(tmp_path: Path) -> None:
    path = tmp_path / "rude.rsv"
    name = "a\x9b31m[bold]b\u202e"
    rsv_format.write(
        path,
        tensors={name: rsv_format.TensorData("f32", np.zeros(3, np.float32))},
        metadata={"\x1b[2J": "\x1b]0;title\x07\n[red]no[/red]"},
    )
    text = ok("info", path)
    assert not set(text) & set("\x1b\x07\x9b\u202e")
    assert r"a\x9b31m[bold]b\u202e" in text and r"\x1b]0;title\x07\n[red]no[/red]" in text


# ---- verify


def test_verify_of_a_sound_file(quantized: Path) -> None:
    assert "sound" in ok("verify", quantized)
    assert ok("verify", quantized, "--quiet") == ""
    tree = json.loads(ok("verify", quantized, "--json"))
    assert tree["valid"] is True and tree["faults"] == [] and "error" not in tree


def test_verify_lists_all_faults(broken: Path) -> None:
    result = failed(1, "verify", broken)
    lines = result.stderr.splitlines()
    assert [line.startswith("error[blob_digest_mismatch] layer ") for line in lines] == [True, True, False]
    assert lines[-1].endswith("2 faults") and result.stdout == ""
    assert len(failed(1, "verify", broken, "--first").stderr.splitlines()) == 1


def test_verify_json_of_a_broken_file(broken: Path) -> None:
    result = failed(1, "verify", broken, "--json")
    tree = json.loads(result.stdout)
    assert tree["valid"] is False and tree["error"] == "blob_digest_mismatch" and tree["phase"] == "payload"
    assert len(tree["faults"]) == 2 and set(tree["faults"][0]) == {"error", "phase", "where", "detail"}
    assert result.stderr == ""
    assert json.loads(failed(1, "verify", broken, "--json", "--first").stdout)["error"] == "blob_digest_mismatch"


@pytest.mark.parametrize("command", ["info", "verify"])
def test_what_does_not_open(command: str, tmp_path: Path) -> None:
    path = tmp_path / "text.rsv"
    path.write_text("x" * 100)
    result = failed(1, command, path)
    assert result.stderr.startswith("error[bad_magic] magic: ") and result.stdout == ""
    result = failed(1, command, path, "--json")
    assert json.loads(result.stdout)["error"] == "bad_magic" and result.stderr == ""
    tree = json.loads(failed(1, command, tmp_path / "absent.rsv", "--json").stdout)
    assert tree == {
        "error": "io_error",
        "phase": "input",
        "where": str(tmp_path / "absent.rsv"),
        "detail": "No such file or directory",
    }
    failed(1, command, tmp_path)


# ---- compare


def test_compare_measures_each_layer(model: Path, quantized: Path) -> None:
    tree = json.loads(ok("compare", model, quantized, "--json"))
    weights = load_file(model / "model.safetensors")
    error = norm = 0.0
    with rsv_format.open(quantized) as file:
        for entry in tree["layers"]:
            w = weights[f"{entry['name']}.weight"].astype(np.float64)
            e, n = np.sum((w - file.layers[entry["name"]].dequantize()) ** 2), np.sum(w**2)
            assert entry["relative_error"] == pytest.approx(np.sqrt(e / n), rel=1e-9)
            error, norm = error + e, norm + n
    assert tree["relative_error"] == pytest.approx(np.sqrt(error / norm), rel=1e-9)
    assert 0.05 < tree["relative_error"] < 0.15
    assert len(tree["tensors"].pop("equal")) == 5 and not any(tree["tensors"].values())


def test_compare_for_people(model: Path, quantized: Path) -> None:
    text = ok("compare", model, quantized)
    assert re.search(r"model\.layers\.\*\.mlp\.down_proj +×2 +30\.7 k +\d+\.\d\d % ", text)
    assert "all layers" in text and "all 5 kept tensors and biases" in text
    assert "model.layers.1.mlp.down_proj" in ok("compare", model, quantized, "--layers")


def test_compare_names_kept_tensors_that_differ(model: Path, quantized: Path, tmp_path: Path) -> None:
    weights = load_file(model / "model.safetensors")
    weights["model.embed_tokens.weight"][3, 3] += 1
    weights["model.layers.0.self_attn.q_proj.bias"] = weights["model.layers.0.self_attn.q_proj.bias"].astype("f4")
    del weights["model.layers.1.input_layernorm.weight"]
    weights["extra.weight"] = np.zeros(1, np.float32)
    save_file(weights, tmp_path / "other.safetensors")
    tree = json.loads(failed(1, "compare", tmp_path / "other.safetensors", quantized, "--json").stdout)
    assert tree["tensors"] == {
        "equal": ["model.layers.0.input_layernorm.weight", "model.layers.1.self_attn.q_proj.bias"],
        "different": ["model.embed_tokens.weight", "model.layers.0.self_attn.q_proj.bias"],
        "only_in_file": ["model.layers.1.input_layernorm.weight"],
        "only_in_source": ["extra.weight"],
    }
    text = failed(1, "compare", tmp_path / "other.safetensors", quantized).stdout
    assert "different  model.embed_tokens.weight" in text and "only in the source  extra.weight" in text


def test_compare_refuses_another_model(quantized: Path, tmp_path: Path) -> None:
    save_file({"a.weight": np.ones((2, 8), np.float32)}, tmp_path / "a.safetensors")
    tree = json.loads(failed(1, "compare", tmp_path / "a.safetensors", quantized, "--json").stdout)
    assert (tree["error"], tree["phase"]) == ("missing_layer", "binding")
    save_file({"model.layers.0.mlp.down_proj.weight": np.ones((2, 8), np.float32)}, tmp_path / "b.safetensors")
    assert "error[shape_mismatch]" in failed(1, "compare", tmp_path / "b.safetensors", quantized).stderr


def test_compare_of_zero_and_nonfinite_weights(tmp_path: Path) -> None:
    save_file({"a.weight": np.zeros((2, 8), np.float32)}, tmp_path / "zero.safetensors")
    ok("quantize", tmp_path / "zero.safetensors", "-o", tmp_path / "a.rsv")
    assert json.loads(ok("compare", tmp_path / "zero.safetensors", tmp_path / "a.rsv", "--json"))["relative_error"] == 0
    save_file({"a.weight": np.ones((2, 8), np.float32)}, tmp_path / "one.safetensors")
    ok("quantize", tmp_path / "one.safetensors", "-o", tmp_path / "b.rsv")
    tree = json.loads(ok("compare", tmp_path / "zero.safetensors", tmp_path / "b.rsv", "--json"))
    assert tree["relative_error"] is None
    assert "∞" in ok("compare", tmp_path / "zero.safetensors", tmp_path / "b.rsv")
    save_file({"a.weight": np.full((2, 8), np.inf, np.float32)}, tmp_path / "inf.safetensors")
    assert "error[nonfinite_weight]" in failed(1, "compare", tmp_path / "inf.safetensors", tmp_path / "b.rsv").stderr


# ---- export and extract


def test_export_round_trips(model: Path, quantized: Path, tmp_path: Path) -> None:
    out = tmp_path / "dense.safetensors"
    assert "wrote" in ok("export", quantized, "-o", out)
    source, dense = load_file(model / "model.safetensors"), load_file(out)
    assert {name: array.shape for name, array in dense.items()} == {n: a.shape for n, a in source.items()}
    with rsv_format.open(quantized) as file:
        for name, array in dense.items():
            layer = file.layers.get(name.removesuffix(".weight"))
            wanted = source[name] if layer is None else layer.dequantize()
            assert array.dtype == wanted.dtype and np.array_equal(array, wanted), name
    tree = json.loads(ok("compare", out, quantized, "--json"))
    assert tree["relative_error"] == 0 and tree["tensors"]["different"] == []
    with safe_open(out, "numpy") as dense_file:
        assert dense_file.metadata() == {"format": "pt", "generator": "rsv export"}


@pytest.mark.parametrize("dtype", [[], ["--dtype", "float16"]], ids=["kept", "float16"])
def test_export_and_compare_and_extract_in_pieces(
    dtype: list[str], model: Path, quantized: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ok("export", quantized, "-o", tmp_path / "whole.safetensors", *dtype)
    compared = ok("compare", model, quantized, "--json")
    monkeypatch.setattr("rsv_format.reader._PIECE_NBYTES", 1000)
    ok("export", quantized, "-o", tmp_path / "pieces.safetensors", *dtype)
    assert (tmp_path / "pieces.safetensors").read_bytes() == (tmp_path / "whole.safetensors").read_bytes()
    tree, wanted = json.loads(ok("compare", model, quantized, "--json")), json.loads(compared)
    assert tree["relative_error"] == pytest.approx(wanted["relative_error"]) and tree["tensors"] == wanted["tensors"]
    monkeypatch.setattr("rsv_format.reader._PIECE_NBYTES", 7)
    ok("extract", quantized, "-o", tmp_path / "x")
    assert (tmp_path / "x" / "tokenizer.json").read_bytes() == (model / "tokenizer.json").read_bytes()


@pytest.mark.parametrize(("dtype", "stored", "tolerance"), [("float16", "F16", 2**-11), ("bfloat16", "BF16", 2**-8)])
def test_export_dtype(quantized: Path, tmp_path: Path, dtype: str, stored: str, tolerance: float) -> None:
    out = tmp_path / "dense.safetensors"
    ok("export", quantized, "-o", out, "--dtype", dtype, "--quiet")
    with safe_open(out, "numpy") as dense:
        assert {dense.get_slice(name).get_dtype() for name in dense.keys()} == {stored}  # noqa: SIM118
    with rsv_format.open_source(out) as source, rsv_format.open(quantized) as file:
        for layer in file.layers.values():
            wanted, found = layer.dequantize(), source.tensors[f"{layer.name}.weight"].float32()
            assert np.all(np.abs(found - wanted) <= tolerance * np.abs(wanted) + 1e-7)


def test_export_keeps_integers_and_stacks(tmp_path: Path) -> None:
    experts = np.random.default_rng(1).standard_normal((3, 8, 32)).astype(np.float32)
    layer = rsv_format.quantize_matrix(experts, name="experts", bits=8)
    tensors = {
        "ids": rsv_format.TensorData("i64", np.arange(5)),
        "mask": rsv_format.TensorData("bool", np.array([[1, 0]], np.uint8)),
        "none": rsv_format.TensorData("f32", np.zeros((0, 3), np.float32)),
        "scalar": rsv_format.TensorData("f64", np.array(0.1)),
    }
    rsv_format.write(tmp_path / "a.rsv", layers=[layer], tensors=tensors)
    ok("export", tmp_path / "a.rsv", "-o", tmp_path / "a.safetensors", "--dtype", "float32")
    dense = load_file(tmp_path / "a.safetensors")
    assert dense["experts.weight"].shape == (3, 8, 32)
    assert np.linalg.norm(dense["experts.weight"] - experts) < 0.02 * np.linalg.norm(experts)
    assert dense["ids"].tolist() == [0, 1, 2, 3, 4] and dense["mask"].tolist() == [[True, False]]
    assert dense["none"].shape == (0, 3) and dense["scalar"] == np.float32(0.1) and dense["scalar"].shape == ()


def test_export_refuses_an_overflow(tmp_path: Path) -> None:
    big = rsv_format.TensorData("f32", np.array([1e9], np.float32))
    rsv_format.write(tmp_path / "a.rsv", tensors={"big": big})
    result = failed(1, "export", tmp_path / "a.rsv", "-o", tmp_path / "a.safetensors", "--dtype", "float16")
    assert result.stderr.startswith("error[content_invalid] big: ")
    assert [path.name for path in tmp_path.iterdir()] == ["a.rsv"]
    ok("export", tmp_path / "a.rsv", "-o", tmp_path / "a.safetensors", "--dtype", "bfloat16")


def test_export_of_a_broken_file_writes_nothing(broken: Path) -> None:
    result = failed(1, "export", broken, "-o", broken.parent / "a.safetensors")
    assert result.stderr.startswith("error[blob_digest_mismatch] ")
    assert [path.name for path in broken.parent.iterdir()] == ["broken.rsv"]


def test_export_spares_rsv_files(quantized: Path, tmp_path: Path) -> None:
    other = tmp_path / "other.rsv"
    other.write_bytes(quantized.read_bytes())
    assert "is the input itself" in failed(2, "export", quantized, "-o", quantized).stderr
    assert "--force" in failed(2, "export", quantized, "-o", other).stderr
    assert "error[io_error]" in failed(1, "export", quantized, "-o", tmp_path / "no" / "a.safetensors").stderr
    assert other.read_bytes() == quantized.read_bytes()


def test_extract(quantized: Path, tmp_path: Path) -> None:
    out = tmp_path / "new" / "folder"
    ok("extract", quantized, "tokenizer.json", "-o", out)
    assert [path.name for path in out.iterdir()] == ["tokenizer.json"]
    result = failed(2, "extract", quantized, "-o", out)
    assert "--force" in result.stderr and not (out / "config.json").exists()
    ok("extract", quantized, "-o", out, "--force")
    assert json.loads((out / "config.json").read_text()) == CONFIG
    assert (out / "tokenizer.json").read_text() == '{"version": "1.0"}'
    assert "error[missing_attachment] ../x" in failed(1, "extract", quantized, "../x", "-o", out).stderr


def test_extract_replaces_a_link_not_its_target(quantized: Path, tmp_path: Path) -> None:
    target = tmp_path / "target"
    target.write_text("precious")
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").symlink_to(target)
    ok("extract", quantized, "config.json", "-o", out, "--force")
    assert target.read_text() == "precious" and json.loads((out / "config.json").read_text()) == CONFIG


def test_extract_checks_the_digest(quantized: Path, tmp_path: Path) -> None:
    data = bytearray(quantized.read_bytes())
    with rsv_format.open(quantized) as file:
        data[file.attachments["config.json"].offset] ^= 1
    (tmp_path / "a.rsv").write_bytes(data)
    failed(1, "extract", tmp_path / "a.rsv", "-o", tmp_path / "out")
    assert not (tmp_path / "out").exists()


# ---- generate, with stand-ins for MLX


@contextlib.contextmanager
def _encoder(path: Path, seconds: float, process: subprocess.Popen[bytes]) -> Any:
    asked: list[Any] = []
    yield types.SimpleNamespace(send=asked.append, receive=lambda: [*asked, seconds])


@pytest.fixture
def prompts(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    seen: list[Any] = []

    def stream_generate(
        model: Any, tokenizer: Any, prompt: Any, *, max_tokens: int, sampler: Any, **options: Any
    ) -> Any:
        assert (model, tokenizer) == ("model", "tokenizer")
        seen.append((prompt, max_tokens, sampler))
        facts = {"prompt_tokens": 3, "prompt_tps": 9.0, "generation_tokens": 2, "generation_tps": 8.0, "peak_memory": 0}
        for text in ("blue", " sky"):
            yield types.SimpleNamespace(text=text, **facts)

    fakes: dict[str, dict[str, Any]] = {
        "mlx": {},
        "mlx.core": {"random": types.SimpleNamespace(seed=lambda n: None)},
        "mlx_lm": {"stream_generate": stream_generate},
        "mlx_lm.sample_utils": {
            "make_sampler": lambda temp, **options: temp,
            "make_logits_processors": lambda **options: [],
        },
        "mlx_lm.models": {},
        "mlx_lm.models.cache": {"make_prompt_cache": lambda model, size: []},
        "rsv_mlx": {"load_model": lambda path, max_order: "model", "load_tokenizer": lambda path: "tokenizer"},
        "rsv_mlx.prompt": {"encoder": _encoder},
        "rsv_mlx.calibrate": {"check_tokens": lambda model, tokens: None, "table_rows": lambda model: None},
        "rsv_mlx.untrusted": {"library": lambda code, where: contextlib.nullcontext(), "mlx_lm_utils": lambda: None},
    }
    for name, members in fakes.items():
        module = types.ModuleType(name)
        vars(module).update(members)
        monkeypatch.setitem(sys.modules, name, module)
    return seen


def test_generate_applies_the_chat_template(prompts: list[Any], quantized: Path) -> None:
    result = rsv("generate", quantized, "--prompt", "Why?", "--max-tokens", 7, "--temp", 0.5)
    assert result.exit_code == 0 and result.stdout == "blue sky\n"
    assert "generated 2 tokens" in result.stderr
    messages = [{"role": "user", "content": "Why?"}]
    asked = {"messages": messages, "text": "Why?", "options": {"add_generation_prompt": True}}
    assert prompts == [([asked, 20.0], 7, 0.5)]


def test_generate_raw_from_standard_input(prompts: list[Any], quantized: Path) -> None:
    result = CliRunner().invoke(app, ["generate", str(quantized), "-p", "-", "--raw", "--quiet"], input="Once")
    assert (result.exit_code, result.stdout, result.stderr) == (0, "blue sky\n", "")
    assert prompts == [([{"text": "Once"}, 20.0], 256, 0.0)]


def test_generate_without_mlx(monkeypatch: pytest.MonkeyPatch, quantized: Path) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    result = failed(1, "generate", quantized, "--prompt", "Why?")
    assert result.stderr.startswith("error[missing_dependency] ") and "rsv-format[mlx]" in result.stderr


def test_limits_of_the_command_line_are_the_librarys() -> None:
    from rsv_cli import options
    from rsv_format import limits

    assert (options.USUAL_ORDER, options.USUAL_HOLES) == (limits.USUAL_ORDER, limits.USUAL_HOLES)


def test_holes_that_take_long_must_be_asked_for(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "m.rsv", tensors={"t": TensorData("u8", np.zeros(2**20, np.uint8))})
    with (tmp_path / "m.rsv").open("r+b") as file:
        length = file.seek(0, os.SEEK_END)
        file.truncate(2**15)
        file.truncate(length)
        if not hasattr(os, "SEEK_HOLE") or os.lseek(file.fileno(), 0, os.SEEK_HOLE) >= length:
            pytest.skip("no holes in files here")
    ok("verify", tmp_path / "m.rsv")
    said = failed(1, "verify", tmp_path / "m.rsv", "--max-holes", 2**19).stderr
    assert said.startswith("error[over_limit] file: ") and "were never written" in said
    with (tmp_path / "m.rsv").open("rb") as file:
        file.seek(5)
        with pytest.raises(RsvError, match="over_limit"):
            rsv_format.verify(file, max_holes=0)
        assert file.tell() == 5


@pytest.mark.parametrize("command", ["verify", "compare", "export"])
def test_rotations_that_take_long_must_be_asked_for(command: str, tmp_path: Path) -> None:
    weight = np.random.default_rng(1).standard_normal((2, 70)).astype(np.float32)
    save_file({"a.up_proj.weight": weight}, tmp_path / "m.safetensors")
    rsv_format.quantize(tmp_path / "m.safetensors", tmp_path / "m.rsv", rotation="haar", importance="none")
    arguments: list[object] = [tmp_path / "m.rsv"]
    arguments = [tmp_path / "m.safetensors", *arguments] if command == "compare" else arguments
    arguments += ["-o", tmp_path / "out.safetensors"] if command == "export" else []
    said = failed(1, command, *arguments, "--max-order", 69).stderr
    assert said.startswith("error[over_limit]") and "order 70" in said and said.count("\n") == 1
    ok(command, *arguments, "--max-order", 70)


@pytest.mark.skipif(sys.platform != "linux", reason="file names of any bytes")
def test_a_source_whose_name_is_no_text(tmp_path: Path) -> None:
    source = tmp_path / os.fsdecode(b"\xff.safetensors")
    save_file({"a.up_proj.weight": np.ones((2, 32), np.float32)}, tmp_path / "m.safetensors")
    (tmp_path / "m.safetensors").rename(source)
    rsv_format.quantize(source, tmp_path / "m.rsv", importance="none")
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert file.metadata["source"] == r"\udcff.safetensors"


# ---- doctor


def test_doctor() -> None:
    tree = json.loads(ok("doctor", "--json"))
    assert tree["packages"]["numpy"] == np.__version__ and isinstance(tree["mlx"]["zero_copy"], bool)
    assert set(tree["mlx"]) == {"device", "zero_copy", "detail", "attempts", "trial"}


def test_doctor_for_people(monkeypatch: pytest.MonkeyPatch) -> None:
    finding: dict[str, Any] = {"device": None, "zero_copy": False, "detail": "MLX cannot be imported"}
    finding |= {"attempts": {"x": "no"}, "trial": []}
    monkeypatch.setattr(adoption, "probe", lambda with_trial: finding)
    text = ok("doctor")
    assert "zero-copy" in text and "MLX cannot be imported" in text
    failed(1, "doctor", "--zero-copy")  # nothing was tried
    finding["trial"] = [["layers are adopted", None], ["the file is as it was", None]]
    assert "the file is as it was" in ok("doctor", "--zero-copy")
    finding["trial"][1][1] = "it was written to"
    assert "it was written to" in failed(1, "doctor", "--zero-copy").stdout


def test_doctor_tries_adoption_where_there_is_none() -> None:
    pytest.importorskip("mlx.core")
    import rsv_mlx

    if rsv_mlx.adoption_obstacle() is None:
        pytest.skip("adoption works here")
    tree = json.loads(failed(1, "doctor", "--zero-copy", "--json").stdout)
    assert len(tree["mlx"]["trial"]) == 1 and "zero_copy" in tree["mlx"]["trial"][0][1]


@pytest.mark.parametrize("faulty", [False, True])
def test_trial_of_adoption(faulty: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a copy in the place of MLX's adoption: the trial passes, and fails if a byte differs."""
    mx = pytest.importorskip("mlx.core")
    from rsv_mlx import adopt

    def adopted(words: np.ndarray, copy: bool) -> Any:
        assert not copy
        return mx.array(words ^ np.uint32(faulty))

    monkeypatch.setattr(adopt, "_probe", lambda: None)
    monkeypatch.setattr(mx, "asarray", adopted)
    checks = list(adoption.trial())
    assert [what for what, problem in checks if problem is not None] == ([checks[2][0], checks[4][0]] if faulty else [])
    assert len(checks) == 5


def test_doctor_survives_a_missing_or_crashing_mlx(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mlx.core", None)
    assert "cannot be imported" in adoption.attempt()["detail"]

    def crash(*_: Any, **__: Any) -> subprocess.CompletedProcess[bytes]:
        return subprocess.CompletedProcess([], -11, b"", b"Segmentation fault\n")

    monkeypatch.setattr(subprocess, "run", crash)
    assert adoption.probe()["detail"] == "the attempt ended with -11: Segmentation fault"


# ---- what people see


@pytest.mark.parametrize("columns", ["0", "-1", "x", ""])
def test_columns_that_are_none_silence_nothing(columns: str, quantized: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "COLUMNS": columns}
    assert "model.layers.*.mlp.down_proj" in process("info", quantized, env=environment).stdout
    assert "error[io_error]" in process("info", tmp_path / "none.rsv", env=environment).stderr
    assert "Missing argument" in process("info", env=environment).stderr


@pytest.mark.parametrize("columns", [20, 30, 44, 59])
def test_names_stay_in_narrow_tables(
    columns: int, quantized: Path, model: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    for text in (ok("info", quantized), ok("compare", model, quantized)):
        whole = text if columns > 28 else text.replace("\n", "")
        assert "model.layers.*.mlp.down_proj" in whole and "model.layers.*.self_attn.q_proj" in text.replace("\n", "")
    assert "model.layers.0.input_layernorm.weight" in ok("info", quantized, "--layers").replace("\n", "")


def test_tables_are_shortened(tmp_path: Path) -> None:
    tensors = {f"t{chr(97 + i // 26)}{chr(97 + i % 26)}": TensorData("u8", np.zeros(0, np.uint8)) for i in range(300)}
    metadata = {"K" * 10**6: "v" * 10**6} | {f"k{i}": "" for i in range(300)}
    extensions = {"E" * 10**6: 1} | {f"e{i}": 1 for i in range(30)}
    rsv_format.write(tmp_path / "m.rsv", tensors=tensors, metadata=metadata, extensions=extensions)
    text = ok("info", tmp_path / "m.rsv", "--max-rows", 10)
    assert text.count("and 290 more; --max-rows shows them") == 1 and "and 291 more" in text and len(text) < 10_000
    assert "(1000000 characters)" in text and "and 11 more" in text
    assert "taa" in text and "tlm" not in text and "tlm" in ok("info", tmp_path / "m.rsv", "--max-rows", 301)
    assert len(json.loads(ok("info", tmp_path / "m.rsv", "--json"))["metadata"]) == 301


def test_faults_are_shortened(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "m.rsv", tensors={f"t{i}": TensorData("u8", np.ones(1, np.uint8)) for i in range(150)})
    data = bytearray((tmp_path / "m.rsv").read_bytes())
    with rsv_format.open(tmp_path / "m.rsv") as file:
        for blob in file.blobs:
            data[blob.offset] ^= 1
    (tmp_path / "m.rsv").write_bytes(data)
    said = failed(1, "verify", tmp_path / "m.rsv").stderr
    assert said.count("error[") == 100 and "and 50 more, which --json lists" in said and "150 faults" in said
    assert len(json.loads(failed(1, "verify", tmp_path / "m.rsv", "--json").stdout)["faults"]) == 150


def test_numbers_that_are_not_finite_in_json(tmp_path: Path) -> None:
    layer = rsv_format.quantize_matrix(np.ones((2, 32), np.float32), name="a", bits=1)
    rsv_format.write(tmp_path / "m.rsv", layers=[layer])
    data = bytearray((tmp_path / "m.rsv").read_bytes())
    with rsv_format.open(tmp_path / "m.rsv") as file:
        offset = next(blob.offset for blob in file.blobs if blob.kind == "codebook")
    data[offset : offset + 8] = np.array([np.nan, np.inf], "<f4").tobytes()
    (tmp_path / "m.rsv").write_bytes(data)
    assert json.loads(ok("info", tmp_path / "m.rsv", "--json"))["codebooks"][0]["centroids"] == ["nan", "inf"]


@pytest.mark.parametrize(
    "start, kind",
    [
        (b"GGUF\3\0\0\0", "a GGUF file, which rsv quantize takes"), (b"PK\3\4", "zip"), (b"<html>", "a web page"),
        (b"\x10\0\0\0\0\0\0\0{}", "a safetensors file, which rsv quantize takes"),
        (b"version https://git-lfs.github.com/spec/v1", "a pointer of Git LFS"), (b"abcdefgh", "61 62 63 64 65 66 67"),
    ],
)  # fmt: skip
def test_files_of_another_kind_are_told(start: bytes, kind: str, tmp_path: Path) -> None:
    (tmp_path / "x").write_bytes(start.ljust(100, b" "))
    assert kind in failed(1, "info", tmp_path / "x").stderr
    assert "is a folder, which rsv quantize takes" in failed(1, "info", tmp_path).stderr


@pytest.mark.parametrize(
    "raised, code",
    [
        (MemoryError("no room for 9 GB"), "out_of_memory"), (OSError(28, "full"), "io_error"),
        (OSError(12, "Cannot allocate memory"), "out_of_memory"),
        (RuntimeError("[malloc] Unable to allocate 9"), "out_of_memory"),
        (KeyError("x"), "internal_error"), (RecursionError("deep"), "internal_error"),
    ],
)  # fmt: skip
def test_whatever_is_raised_is_one_line(
    raised: Exception, code: str, quantized: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise raised

    monkeypatch.setattr(rsv_format, "open", fail)
    said = failed(1, "info", quantized).stderr
    assert said.startswith(f"error[{code}]") and said.count("\n") == 1
    assert json.loads(failed(1, "info", quantized, "--json").stdout)["error"] == code
    monkeypatch.setenv("RSV_TRACEBACK", "1")
    if code == "internal_error":
        assert rsv("info", quantized).exception is raised


def test_text_of_a_model_on_a_terminal_and_in_a_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    text = "a\tb\n\x1b]0;owned\x07\u202e\x9b31m"
    for terminal_there, shown in ((False, text), (True, "a\tb\n\\x1b]0;owned\\x07\\u202e\\x9b31m")):
        stream = io.StringIO()
        monkeypatch.setattr(stream, "isatty", lambda there=terminal_there: there)
        monkeypatch.setattr(sys, "stdout", stream)
        terminal.write_text(text)
        monkeypatch.undo()
        assert stream.getvalue() == shown


def test_phases_of_progress_have_bars_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    shown: list[tuple[str, float | None]] = []
    monkeypatch.setattr(sys, "stderr", io.StringIO())
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    from rich.progress import Progress

    made = Progress.add_task
    monkeypatch.setattr(Progress, "add_task", lambda *a, **k: shown.append((a[1], k["total"])) or made(*a, **k))
    with terminal.progress("quantizing") as told:
        for done, total, name in ((0, 2, "importance: a"), (2, 2, "importance: b"), (0, 9, "a"), (9, 9, "odd: b")):
            told(done, total, name)
    assert [label for label, _ in shown] == ["quantizing", "importance", "quantizing"]


def test_what_is_missing_is_named_and_what_is_not_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    from rsv_format.sources.base import library

    def fail(name: str) -> None:
        raise raised

    monkeypatch.setattr(importlib, "import_module", fail)
    for raised, part in (
        (ModuleNotFoundError("No module named 'tokenizers'", name="tokenizers"), "tokenizers is not installed"),
        (ImportError("libgomp: cannot allocate memory in static TLS block"), "cannot allocate memory"),
    ):
        with pytest.raises(RsvError, match=f"missing_dependency at x: .*{part}") as info:
            library("tokenizers", "x")
        assert ("pip install" in info.value.detail) is isinstance(raised, ModuleNotFoundError)


# ---- as a process: pipes, signals, streams


def test_exit_codes_of_the_process(quantized: Path, broken: Path) -> None:
    assert process("verify", quantized).returncode == 0
    result = process("verify", broken)
    assert result.returncode == 1 and "Traceback" not in result.stderr
    assert process("verify").returncode == 2


def test_piped_output_is_plain_and_whole(quantized: Path) -> None:
    environment = {name: value for name, value in os.environ.items() if name not in ("COLUMNS", "FORCE_COLOR")}
    result = process("info", quantized, "--layers", env={**environment, "PYTHONUTF8": "1"})
    assert result.returncode == 0 and result.stderr == ""
    assert "\x1b" not in result.stdout and "…" not in result.stdout
    narrow = process("info", quantized, env={**environment, "PYTHONUTF8": "0", "PYTHONIOENCODING": "ascii"})
    assert narrow.returncode == 0 and "Traceback" not in narrow.stderr


@pytest.mark.parametrize("arguments", [("info", "--layers"), ("info", "--json"), ("verify",)])
@pytest.mark.skipif(os.name == "nt", reason="POSIX pipes")
def test_closed_pipe(quantized: Path, arguments: tuple[str, ...]) -> None:
    command, *options = arguments
    reader, writer = os.pipe()
    os.close(reader)
    try:
        result = subprocess.run(
            [*RSV, command, quantized, *options], stdout=writer, stderr=subprocess.PIPE, text=True, timeout=60
        )
    finally:
        os.close(writer)
    assert (result.returncode, result.stderr) == (141, "")


@pytest.mark.skipif(os.name == "nt", reason="POSIX shell")
def test_closed_standard_streams(quantized: Path) -> None:
    shell = f"exec {sys.executable} -m rsv_cli verify {quantized} >&- 2>&-"
    assert subprocess.run(["sh", "-c", shell], timeout=60, check=False).returncode == 0


@pytest.fixture(scope="module")
def big(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Enough to be interrupted in: some seconds of work."""
    path = tmp_path_factory.mktemp("big") / "big.safetensors"
    weight = np.random.default_rng(2).standard_normal((1024, 1024)).astype(np.float16)
    save_file({f"layers.{i}.up_proj.weight": weight for i in range(40)}, path)
    return path


def writing(child: subprocess.Popen[bytes], folder: Path) -> bool:
    """Whether a process has a file in a folder that is not finished: with a hidden name, or, on Linux, with none."""
    if any(folder.iterdir()):
        return True
    with contextlib.suppress(OSError):  # a descriptor that it has just closed
        files = f"/proc/{child.pid}/fd"
        return any(os.readlink(f"{files}/{number}").startswith(f"{folder}/#") for number in os.listdir(files))
    return False


@pytest.mark.skipif(os.name == "nt", reason="POSIX signals")
@pytest.mark.parametrize("name", ["SIGINT", "SIGTERM", "SIGHUP"])
@pytest.mark.parametrize("command", ["quantize", "export"])
def test_interrupted_work_leaves_nothing(big: Path, tmp_path: Path, name: str, command: str) -> None:
    number = getattr(signal, name)
    if signal.getsignal(number) is signal.SIG_IGN:
        pytest.skip(f"{name} is ignored here, and so it is in a child")
    source, out = big, tmp_path / "out" / "result"
    out.parent.mkdir()
    if command == "export":
        source = tmp_path / "big.rsv"
        rsv_format.quantize(big, source, rotation="none", bits=1)
    child = subprocess.Popen([*RSV, command, source, "-o", out], stderr=subprocess.PIPE, stdout=subprocess.PIPE)
    deadline = time.monotonic() + 30
    while not writing(child, out.parent):
        assert child.poll() is None and time.monotonic() < deadline
        time.sleep(0.01)
    child.send_signal(number)
    output, complaint = child.communicate(timeout=30)
    assert child.returncode == 128 + number
    assert complaint == (b"interrupted\n" if name == "SIGINT" else b"stopped\n") and output == b""
    assert list(out.parent.iterdir()) == []


@pytest.mark.skipif(sys.platform != "linux", reason="needs a pseudo-terminal of Linux")
def test_progress_shows_on_a_terminal_only(big: Path, tmp_path: Path) -> None:
    import pty

    for quiet in (False, True):
        ours, theirs = pty.openpty()
        command = [*RSV, "quantize", big, "-o", tmp_path / "a.rsv", "--bits", "1", *(["--quiet"] if quiet else [])]
        child = subprocess.Popen(command, stderr=theirs, stdout=subprocess.PIPE, env={**os.environ, "TERM": "xterm"})
        os.close(theirs)
        shown = b""
        while True:
            try:
                part = os.read(ours, 65536)
            except OSError:  # the other end is closed
                break
            if not part:
                break
            shown += part
        os.close(ours)
        assert child.stdout is not None
        with child.stdout as out:
            assert (out.read() == b"") is quiet
        assert child.wait() == 0
        assert (b"quantizing" in shown and b"layers." in shown) is not quiet


# ---- words


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [(0, "0 B"), (999, "999 B"), (1000, "1.00 kB"), (9994, "9.99 kB"), (9996, "10.0 kB"), (341_000_000, "341 MB"),
     (999_499, "999 kB"), (999_600, "1.00 MB"), (2_517_000_000, "2.52 GB")],
)  # fmt: skip
def test_sizes(nbytes: int, text: str) -> None:
    assert describe.size(nbytes) == text


def test_families() -> None:
    assert family("model.layers.11.mlp.w1") == "model.layers.*.mlp.w1"
    assert family("0.block2.3") == "*.block2.*"


def test_plain() -> None:
    assert terminal.plain("é 漢 ok") == "é 漢 ok"
    assert terminal.plain("\x1b[0m\n") == r"\x1b[0m\n"


@pytest.mark.parametrize("command", COMMANDS)
def test_help_in_an_encoding_that_lacks_its_characters(command: str) -> None:
    done = process(command, "--help", env={**os.environ, "PYTHONIOENCODING": "ascii"})
    assert done.returncode == 0 and done.stderr == "" and "Usage" in done.stdout


def test_a_prompt_from_a_closed_standard_input(tmp_path: Path) -> None:
    command = f"{sys.executable} -m rsv_cli generate {tmp_path / 'none.rsv'} --prompt - <&-"
    done = subprocess.run(["sh", "-c", command], capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 1 and "internal_error" not in done.stderr and done.stderr.count("\n") == 1
