"""`rsv evaluate`: the arithmetic against the definitions, numpy against MLX, and what is refused."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file
from typer.testing import CliRunner, Result

import rsv_format
from rsv_cli.app import app
from rsv_format import RsvError, evaluate, evaluate_logits, text_windows
from rsv_format.panics import own_process

tokenizers = pytest.importorskip("tokenizers")

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 32,
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 0, "rope_theta": 10000.0,
}  # fmt: skip
WORDS = [f"w{i}" for i in range(32)]
TEXT = " ".join(WORDS[i] for i in np.random.default_rng(3).integers(1, 32, 90))


def rsv(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.output)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a tokenizer of one token a word."""
    path = tmp_path_factory.mktemp("evaluate") / "model"
    path.mkdir()
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {"model.embed_tokens.weight": normal(32, 64), "model.norm.weight": 1 + normal(64)}
    for i in range(2):
        block = f"model.layers.{i}"
        for name, rows, columns in (
            ("self_attn.q_proj", 64, 64), ("self_attn.k_proj", 32, 64), ("self_attn.v_proj", 32, 64),
            ("self_attn.o_proj", 64, 64), ("mlp.gate_proj", 96, 64), ("mlp.up_proj", 96, 64), ("mlp.down_proj", 64, 96),
        ):  # fmt: skip
            tensors[f"{block}.{name}.weight"] = normal(rows, columns)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{norm}.weight"] = 1 + 0.1 * normal(64)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    tokenizer = tokenizers.Tokenizer(tokenizers.models.WordLevel({w: i for i, w in enumerate(WORDS)}, "w0"))
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
    tokenizer.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "PreTrainedTokenizerFast"}))
    return path


@pytest.fixture(scope="module")
def file(folder: Path) -> Path:
    path = folder.parent / "model.rsv"
    rsv_format.quantize(folder, path, bits=3, importance="none")
    return path


def test_divergence_is_by_the_definition() -> None:
    rng = np.random.default_rng(0)
    source, other = (rng.standard_normal((10, 7)).astype(np.float32) for _ in range(2))
    targets = rng.integers(0, 7, 10)
    p, q = (
        np.exp(x.astype(np.float64)) / np.exp(x.astype(np.float64)).sum(axis=1, keepdims=True) for x in (source, other)
    )
    divergence = (p * np.log(p / q)).sum(axis=1)
    own = np.arange(10)
    found = evaluate_logits([(source[:4], other[:4], targets[:4]), (source[4:], other[4:], targets[4:])], 5)
    assert found.tokens == 10 and found.window == 5
    assert np.isclose(found.mean_divergence, divergence.mean())
    assert np.isclose(found.divergence_99, np.quantile(divergence, 0.99))
    assert np.isclose(found.max_divergence, divergence.max()) and np.isclose(
        found.median_divergence, np.median(divergence)
    )
    assert np.isclose(found.divergence_error, divergence.std(ddof=1) / np.sqrt(10))
    assert np.isclose(found.source_perplexity, np.exp(-np.log(p[own, targets]).mean()))
    assert np.isclose(found.file_perplexity, np.exp(-np.log(q[own, targets]).mean()))
    assert found.same_top == np.mean(p.argmax(axis=1) == q.argmax(axis=1))
    assert np.isclose(found.probability_rms, np.sqrt(np.square(p[own, targets] - q[own, targets]).mean()))
    assert [(span.start, span.stop) for span in found.spans] == [(0, 2), (2, 4), (4, 5)]
    assert np.isclose(found.spans[2].mean_divergence, divergence[[4, 9]].mean())


def test_a_model_is_at_no_distance_from_itself() -> None:
    logits = np.random.default_rng(0).standard_normal((6, 9)).astype(np.float32)
    found = evaluate_logits([(logits, logits + 3, np.zeros(6, np.intp))], 6)
    assert found.mean_divergence < 1e-12 and found.same_top == 1 and found.probability_rms < 1e-7


def test_windows_with_and_without_a_first_token() -> None:
    inputs, targets = text_windows(range(10, 20), None, 6, 3)
    assert inputs.tolist() == [10, 11, 12, 13, 14, 15] and targets.tolist() == [11, 12, 13, 14, 15, 16]
    inputs, targets = text_windows(range(10, 20), 1, 6, 3)
    assert inputs.tolist() == [1, 10, 11, 1, 13, 14] and targets.tolist() == [10, 11, 12, 13, 14, 15]
    for bad in (([1], None, 4, 4), ([1, 2], None, 0, 4), ([1, 2], None, 4, 1)):
        with pytest.raises(RsvError) as caught:
            text_windows(*bad)
        assert caught.value.code == "bad_argument"


def test_numpy_and_mlx_agree(folder: Path, file: Path) -> None:
    rsv_mlx = pytest.importorskip("rsv_mlx", reason="MLX is not installed")
    own = evaluate(folder, file, text=TEXT, tokens=80, window=32)
    other = rsv_mlx.evaluate(folder, file, text=TEXT, tokens=80, window=32)
    assert own.tokens == other.tokens == 80 and own.mean_divergence > 0.01
    for name in ("source_perplexity", "file_perplexity", "mean_divergence", "divergence_99"):
        assert np.isclose(getattr(own, name), getattr(other, name), rtol=1e-3), name


def test_windows_are_texts_of_their_own(folder: Path, file: Path) -> None:
    """One window after the other gives what each gives alone."""
    words = TEXT.split()
    whole = evaluate(folder, file, text=" ".join(words[:33]), tokens=32, window=16)
    first = evaluate(folder, file, text=" ".join(words[:17]), tokens=16, window=16)
    second = evaluate(folder, file, text=" ".join(words[16:33]), tokens=16, window=16)
    assert np.isclose(whole.mean_divergence, (first.mean_divergence + second.mean_divergence) / 2, rtol=1e-4)


def test_the_command_prints_numbers_and_json(folder: Path, file: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    shown = rsv("evaluate", folder, file, "--text", text, "-n", 40, "--window", 16).stdout
    for word in ("mean divergence", "99th percentile", "same top token", "perplexity of the source", "0–3", "12–15"):
        assert word in shown
    found = json.loads(rsv("evaluate", folder, file, "--text", text, "-n", 40, "--window", 16, "--json").stdout)
    direct = evaluate(folder, file, text=TEXT, tokens=40, window=16)
    assert found["mean_divergence"] == direct.mean_divergence and found["spans"][0]["stop"] == 4
    assert found["bits_per_weight"] == rsv_format.summarize(file).bits_per_weight


def test_rotations_that_take_long_must_be_asked_for(folder: Path, tmp_path: Path) -> None:
    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    rsv_format.quantize(folder, tmp_path / "haar.rsv", rotation="haar", importance="none", bits=8)
    arguments = ["--text", text, "-n", 16, "--window", 16, "--max-order"]
    for source in (folder, changed(folder, tmp_path / "mlx", rope_scaling={"type": "linear", "factor": 2.0})):
        shown = rsv("evaluate", source, tmp_path / "haar.rsv", *arguments, 63, code=1).output
        assert shown.startswith("error[over_limit]") and "max_order is 63" in shown
        rsv("evaluate", source, tmp_path / "haar.rsv", *arguments, 5000)


def test_a_tokenizer_that_panics_is_one_error(
    folder: Path, file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = changed(folder, tmp_path / "m")
    tree = json.loads((other / "tokenizer.json").read_text())
    piece = {"Sequence": {"id": "A", "type_id": 0}}, {"SpecialToken": {"id": "none", "type_id": 0}}
    tree["post_processor"] = {"type": "TemplateProcessing", "single": piece, "pair": piece, "special_tokens": {}}
    (other / "tokenizer.json").write_text(json.dumps(tree))
    with pytest.raises(RsvError, match="source_invalid at tokenizer.json: PanicException"):
        evaluate(other, file, text=TEXT)
    assert "panicked" in capfd.readouterr().err  # the process is not ours, nor its standard error
    with own_process():
        with pytest.raises(RsvError, match="source_invalid at tokenizer.json: PanicException"):
            evaluate(other, file, text=TEXT)
        rsv_mlx = pytest.importorskip("rsv_mlx", reason="MLX is not installed")
        with pytest.raises(RsvError, match="unsupported_model at tokenizer: PanicException"):
            rsv_mlx.evaluate(other, file, text=TEXT)
    assert capfd.readouterr().err == ""


def test_standard_error_of_others_is_left_alone(capfd: pytest.CaptureFixture[str]) -> None:
    before = os.fstat(2).st_ino
    with rsv_format.quiet_panics():
        assert os.fstat(2).st_ino == before
    with own_process(), rsv_format.quiet_panics():
        assert os.fstat(2).st_ino != before
    assert os.fstat(2).st_ino == before


def test_what_is_printed_without_a_panic_is_kept(capfd: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(KeyError), own_process(), rsv_format.quiet_panics():
        os.write(2, b"said")
        raise KeyError
    assert capfd.readouterr().err == "said"


def test_of_a_panic_only_its_own_text_is_dropped(capfd: pytest.CaptureFixture[str]) -> None:
    panicked = type("PanicException", (BaseException,), {})
    words = b"one\n\nthread '<unnamed>' (7) panicked at src/a.rs:1:2:\nleft: 1\nright: 2\nnote: run with `RUST`\ntwo\n"
    with pytest.raises(panicked), own_process(), rsv_format.quiet_panics():
        os.write(2, words)
        raise panicked
    assert capfd.readouterr().err == "one\ntwo\n"


@pytest.mark.parametrize("change", [{"model_type": [1]}, {"rope_scaling": "x"}, {"num_hidden_layers": None}], ids=str)
def test_configs_of_odd_kinds(folder: Path, file: Path, tmp_path: Path, change: dict) -> None:
    with pytest.raises(RsvError):
        evaluate(changed(folder, tmp_path / "m", **change), file, text=TEXT)


def changed(folder: Path, to: Path, **config: object) -> Path:
    to.mkdir()
    for path in folder.iterdir():
        (to / path.name).write_bytes(path.read_bytes())
    (to / "config.json").write_text(json.dumps({**CONFIG, **config}))
    return to


@pytest.mark.parametrize(
    "config",
    [
        {"model_type": "gemma"},
        {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
        {"rope_scaling": {"type": "linear", "factor": 2.0}},
        {"sliding_window": 8},
    ],
)
def test_what_numpy_would_run_otherwise_is_refused(folder: Path, file: Path, tmp_path: Path, config: dict) -> None:
    with pytest.raises(RsvError) as caught:
        evaluate(changed(folder, tmp_path / "m", **config), file, text=TEXT, tokens=40, window=16)
    assert caught.value.code == "unsupported_model"


def test_what_is_missing_is_named(folder: Path, file: Path, tmp_path: Path) -> None:
    bare = changed(folder, tmp_path / "m")
    (bare / "tokenizer.json").unlink()
    result = rsv("evaluate", bare, file, code=1)
    assert "missing_attachment" in result.output and "tokenizer.json" in result.output
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    assert "nothing to predict" in rsv("evaluate", folder, file, "--text", empty, code=2).output
    other = tmp_path / "other.rsv"
    rsv_format.quantize(folder, other, bits=4, importance="none", include=["*.0.*"])
    with rsv_format.open(other) as opened:
        tensors = {
            name: rsv_format.TensorData(x.dtype, x.array) for name, x in opened.tensors.items() if "1" not in name
        }
        rsv_format.write(tmp_path / "part.rsv", layers=[], tensors=tensors)
    told = rsv("evaluate", folder, tmp_path / "part.rsv", code=1).output
    assert "missing_layer" in told and "it lacks '" in told and "Error" not in told
