"""Options of commands that make and compare files: --dry-run, --json, --revision, an RSV file as a source."""

from __future__ import annotations

import contextlib
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from typer.testing import CliRunner, Result

import rsv_format
from rsv_cli.app import app
from rsv_format.dense import as_source
from rsv_format.quantizer.plan import plan

RNG = np.random.default_rng(8)
NAMES = [f"model.layers.{i}.self_attn.{part}_proj" for i in range(2) for part in "qo"]


def rsv(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(argument) for argument in arguments])


def tree(*arguments: object, code: int = 0) -> Any:
    result = rsv(*arguments, "--json")
    assert result.exit_code == code, result.output
    return json.loads(result.stdout)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tensors = {f"{name}.weight": RNG.standard_normal((64, 96)).astype("f2") for name in NAMES}
    tensors[f"{NAMES[0]}.bias"] = RNG.standard_normal(64).astype("f2")
    tensors["model.embed_tokens.weight"] = RNG.standard_normal((50, 96)).astype("f2")
    tensors["model.norm.weight"] = np.ones(96, "f4")
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"model_type": "llama", "hidden_size": 96}))
    rsv_format.quantize(folder, folder / "model.rsv", bits=4)
    return folder


def test_quantize_tells_programs_what_it_did(model: Path, tmp_path: Path) -> None:
    told = tree("quantize", model, "-o", tmp_path / "a.rsv", "--bits", 3)
    summary = rsv_format.summarize(tmp_path / "a.rsv")
    assert told["nbytes"] == summary.nbytes == (tmp_path / "a.rsv").stat().st_size
    assert told["bits_per_weight"] == summary.bits_per_weight and told["layers"] == 5 and told["left_out"] == []
    assert tree("quantize", model / "nothing", "-o", tmp_path / "b", code=1)["error"] == "io_error"


def test_export_and_extract_tell_programs_what_they_wrote(model: Path, tmp_path: Path) -> None:
    told = tree("export", model / "model.rsv", "-o", tmp_path / "x.safetensors")
    assert told["nbytes"] == (tmp_path / "x.safetensors").stat().st_size
    assert told["tensors"] == len(load_file(tmp_path / "x.safetensors")) == 7
    (item,) = tree("extract", model / "model.rsv", "-o", tmp_path / "out")
    assert Path(item["path"]).stat().st_size == item["nbytes"]


@pytest.mark.parametrize("options", [
    {}, {"bits": 2}, {"rotation": "none"}, {"importance": "none"}, {"rotation": "haar", "importance": "none"},
    {"exclude": ["*.q_proj"]}, {"embedding_bits": "keep"},
], ids=str)  # fmt: skip
def test_a_plan_has_the_size_of_the_file(options: dict[str, Any], model: Path, tmp_path: Path) -> None:
    planned = plan(model, **options)
    report = rsv_format.quantize(model, tmp_path / "a.rsv", **options)
    if report.weighted_layers in (0, report.layers):
        assert planned.nbytes == report.summary.nbytes and planned.bits_per_weight == report.summary.bits_per_weight
    else:
        assert planned.nbytes >= report.summary.nbytes
    with rsv_format.open(tmp_path / "a.rsv") as file:
        assert {x.name: (x.bits, x.shape) for x in planned.layers} == {
            x.name: (x.bits, (x.out_features, x.in_features)) for x in file.layers.values()
        }
    assert planned.weights == report.summary.weights and planned.kept_weights == report.summary.kept_weights
    assert planned.seconds > 0 and planned.memory > 0


def test_a_plan_with_a_budget_is_a_bound(model: Path, tmp_path: Path) -> None:
    planned = plan(model, bits_per_weight=5.5)
    report = rsv_format.quantize(model, tmp_path / "a.rsv", bits_per_weight=5.5)
    assert planned.nbytes >= report.summary.nbytes and planned.bits_per_weight == pytest.approx(5.5, abs=1e-3)
    assert {x.bits for x in planned.layers} == {None, 5}  # the table's are fixed


def test_a_dry_run_writes_nothing(model: Path, tmp_path: Path) -> None:
    before = sorted(model.iterdir())
    text = rsv("quantize", model, "--dry-run")
    assert text.exit_code == 0 and "5 layers" in text.stdout
    told = tree("quantize", model, "--dry-run", "-o", tmp_path / "a.rsv")
    assert len(told["layers"]) == 5 and not list(tmp_path.iterdir()) and sorted(model.iterdir()) == before
    assert tree("quantize", model, "--dry-run", "--bits-per-weight", 1.0, code=2)["error"] == "bad_argument"
    missing = rsv("quantize", model)
    assert missing.exit_code == 2 and "--output" in missing.stderr


@pytest.mark.parametrize(
    "options",
    [
        ["--calibrate", "empty.txt"], ["--calibrate", "missing.txt"], ["--include", "nothing"], ["--memory", "1"],
        ["--importance", "missing"], ["--bits-per-weight", "0.5"], ["--scheduler", "tcp://127.0.0.1:1"],
        ["--resume", "--bits", "3"], ["--feedback"], ["--window", "9", "--codebook", "trellis"], ["-o", "config.json"],
    ],
    ids=" ".join,
)  # fmt: skip
@pytest.mark.parametrize("kind", ["llama", "gemma"])  # numpy runs the one on texts, MLX the other
def test_a_dry_run_refuses_what_the_run_would(
    options: list[str], kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("mlx_lm" if kind == "gemma" else "tokenizers")
    if "--scheduler" in options:
        pytest.importorskip("distributed")
        monkeypatch.setattr("rsv_cli.cluster._SECONDS", 0.1)
    folder = tmp_path / "m"
    words(folder, kind)
    monkeypatch.chdir(folder)
    Path("empty.txt").touch()
    if "--resume" in options:
        with monkeypatch.context() as patch, contextlib.suppress(KeyboardInterrupt):
            patch.setattr("rsv_format.quantizer.conversion.Job.bias_of", interrupt)
            rsv_format.quantize(folder, "x.rsv", resume=True)
        assert Path(".x.rsv.unfinished").exists()
    before = sorted(folder.iterdir())
    command = ["quantize", folder, "-o", "x.rsv", *options]
    dry, real = rsv(*command, "--dry-run"), rsv(*command)
    assert dry.exit_code == real.exit_code > 0 and dry.stderr == real.stderr and dry.stderr.startswith("error[")
    assert sorted(folder.iterdir()) == before


def interrupt(*_: Any) -> None:
    raise KeyboardInterrupt


def words(to: Path, kind: str) -> None:
    """A model of one block that can run, with a tokenizer of one token a word."""
    from tokenizers import Tokenizer, models

    rng, width = np.random.default_rng(1), 64
    shapes = {f"self_attn.{part}_proj": (rows, width) for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64))}
    shapes |= {"mlp.gate_proj": (96, width), "mlp.up_proj": (96, width), "mlp.down_proj": (width, 96)}
    tensors = {f"model.layers.0.{name}.weight": rng.standard_normal(shape) / 8 for name, shape in shapes.items()}
    for norm in ("model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm", "model.norm"):
        tensors[f"{norm}.weight"] = np.ones(width)
    tensors["model.embed_tokens.weight"] = rng.standard_normal((32, width))
    to.mkdir()
    save_file({name: x.astype("f4") for name, x in tensors.items()}, to / "model.safetensors")
    config = {
        "model_type": kind, "hidden_size": width, "num_hidden_layers": 1, "intermediate_size": 96, "head_dim": 16,
        "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 32,
        "tie_word_embeddings": True, "rope_theta": 10000.0,
    }  # fmt: skip
    (to / "config.json").write_text(json.dumps(config))
    Tokenizer(models.WordLevel({f"w{i}": i for i in range(32)}, unk_token="w0")).save(str(to / "tokenizer.json"))


def test_two_files_are_compared(model: Path, tmp_path: Path) -> None:
    rsv_format.quantize(model, tmp_path / "three.rsv", bits=3)
    told = tree("compare", model / "model.rsv", tmp_path / "three.rsv")
    with rsv_format.open(model / "model.rsv") as a, rsv_format.open(tmp_path / "three.rsv") as b:
        for layer in told["layers"]:
            first, second = (x.layers[layer["name"]].dequantize().astype("f8") for x in (a, b))
            error = np.linalg.norm(first - second) / np.linalg.norm(first)
            assert layer["relative_error"] == pytest.approx(error, rel=1e-6)
    assert len(told["tensors"]["equal"]) == 2  # the norm and a bias
    assert tree("compare", model / "model.rsv", model / "model.rsv")["relative_error"] == 0
    broken = bytearray((model / "model.rsv").read_bytes())
    with rsv_format.open(model / "model.rsv") as file:
        broken[file.layers[NAMES[0]].offset] ^= 1
    (tmp_path / "broken.rsv").write_bytes(broken)
    told = tree("compare", tmp_path / "broken.rsv", model / "model.rsv", code=1)
    assert told["error"] == "blob_digest_mismatch"


def test_a_file_as_a_source_has_the_tensors_of_its_export(model: Path, tmp_path: Path) -> None:
    assert rsv("export", model / "model.rsv", "-o", tmp_path / "x.safetensors").exit_code == 0
    dense = load_file(tmp_path / "x.safetensors")
    with rsv_format.open(model / "model.rsv") as file:
        source = as_source(file, "x")
        assert source.tensors.keys() == dense.keys()
        for name, tensor in source.tensors.items():
            assert tensor.shape == dense[name].shape and np.array_equal(tensor.read(), dense[name])


def test_a_revision_of_a_repository(model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")
    commit = tmp_path / ("c" * 40)
    commit.symlink_to(model)
    asked: list[str | None] = []

    def answer(api: Any, spec: str, timeout: float, revision: str | None = None) -> Any:
        asked.append(revision)
        return SimpleNamespace(sha="c" * 40)

    def download(spec: str, revision: str | None = None, **options: Any) -> str:
        assert spec == "some-org/some-model" and revision == "c" * 40
        return str(commit)

    monkeypatch.setattr(hub.HfApi, "model_info", answer)
    monkeypatch.setattr(hub, "snapshot_download", download)
    for arguments in (["some-org/some-model", "--revision", "v1/x"], ["some-org/some-model@v1/x"]):
        assert rsv("quantize", *arguments, "-o", tmp_path / "a.rsv").exit_code == 0
        with rsv_format.open(tmp_path / "a.rsv") as file:
            assert file.metadata["source"] == "some-model" and file.metadata["source.revision"] == "c" * 40
    assert asked == ["v1/x", "v1/x"]
    with rsv_format.open_source("some-org/some-model") as source:
        assert source.revision == "c" * 40 and asked[-1] is None


@pytest.mark.parametrize("command", [
    ["quantize", "MODEL", "-o", "OUT"], ["compare", "MODEL", "FILE"], ["evaluate", "MODEL", "FILE"],
    ["calibrate", "MODEL", "-t", "FILE", "-o", "OUT"], ["report", "FILE", "-o", "OUT"],
    ["report", "FILE", "-o", "OUT", "-s", "MODEL"],
])  # fmt: skip
def test_what_has_no_revisions_is_told_so(command: list[str], model: Path, tmp_path: Path) -> None:
    places = {"MODEL": model, "FILE": model / "model.rsv", "OUT": tmp_path / "out"}
    result = rsv(*(places.get(word, word) for word in command), "--revision", "main")
    assert result.exit_code == 2 and "--revision" in result.stderr
