"""`rsv calibrate`: recorded activations against a forward pass in numpy, the imatrix file, every kind of model."""

from __future__ import annotations

import json
import shutil
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file
from test_synthetic import fetched
from typer.testing import CliRunner, Result

import rsv_format
from rsv_cli.app import app
from rsv_format import RsvError
from rsv_format.decoder import Decoder
from rsv_format.sources.gguf_names import hugging_face_name, llama_cpp_name
from rsv_format.sources.imatrix import load_imatrix, save_imatrix

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
mx = pytest.importorskip("mlx.core", reason="MLX is not installed")
nn = pytest.importorskip("mlx.nn")

from rsv_mlx import calibrate as calibrate_module  # noqa: E402
from rsv_mlx.calibrate import Sums, calibrate, counts_nbytes, encode, load_anything, observed  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from mlx_lm.models.switch_layers import SwitchGLU

CONFIG = {
    "model_type": "llama", "hidden_size": 64, "num_hidden_layers": 2, "intermediate_size": 96,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 32,
    "tie_word_embeddings": True, "torch_dtype": "float32", "eos_token_id": 0, "rope_theta": 10000.0,
}  # fmt: skip
WORDS = [f"w{i}" for i in range(32)]
TOKENS = [int(i) for i in np.random.default_rng(3).integers(1, 32, 40)]
TEXT = " ".join(WORDS[i] for i in TOKENS)


def rsv(*arguments: object, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exit_code == code, (result.exit_code, result.output)
    return result


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A llama with a tokenizer of one token a word."""
    path = tmp_path_factory.mktemp("calibrate") / "model"
    path.mkdir()
    rng = np.random.default_rng(1)

    def normal(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    tensors = {"model.embed_tokens.weight": 8 * normal(32, 64), "model.norm.weight": 1 + normal(64)}
    for block in ("model.layers.0", "model.layers.1"):
        for part, rows in (("q", 64), ("k", 32), ("v", 32), ("o", 64)):
            tensors[f"{block}.self_attn.{part}_proj.weight"] = normal(rows, 64)
        for part, shape in (("gate", (96, 64)), ("up", (96, 64)), ("down", (64, 96))):
            tensors[f"{block}.mlp.{part}_proj.weight"] = normal(*shape)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{block}.{norm}.weight"] = rng.uniform(0.1, 4, 64).astype(np.float32)
    save_file(tensors, path / "model.safetensors")
    (path / "config.json").write_text(json.dumps(CONFIG))
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "w0"})
    )
    return path


@pytest.fixture(scope="module")
def wanted(folder: Path) -> dict[str, np.ndarray]:
    """What the layers see of TOKENS, by the forward pass in numpy."""
    weights, seen = load_file(folder / "model.safetensors"), {}
    decoder = Decoder(CONFIG, fetched(weights), lambda name, x: seen.update({name: np.mean(np.square(x), axis=0)}))
    head = decoder.run(weights["model.embed_tokens.weight"][TOKENS])
    return seen | {"model.embed_tokens": np.mean(np.square(head), axis=0)}


def means(found: dict[str, Any]) -> dict[str, np.ndarray]:
    return {name: sums / counts for name, (sums, counts) in found.items()}


def agree(found: dict[str, np.ndarray], wanted: dict[str, np.ndarray], tolerance: float = 1e-4) -> None:
    assert found.keys() == wanted.keys()
    for name, mean in wanted.items():
        np.testing.assert_allclose(found[name], mean, rtol=tolerance, atol=tolerance * float(mean.max()), err_msg=name)


# what is recorded


def test_what_the_layers_see_is_what_is_recorded(folder: Path, wanted: dict[str, np.ndarray]) -> None:
    model, _ = load_anything(folder)
    told: list[tuple[int, int, str]] = []
    found = calibrate(model, TOKENS, progress=lambda *news: told.append(news))
    agree(means(found), wanted)
    assert counts_nbytes(model) == sum(4 * (sums.size + counts.size) for sums, counts in found.values())
    assert {counts.tolist()[0] for _, counts in found.values()} == {40}
    assert told[0][:2] == (0, 40) and told[-1][:2] == (40, 40)


def test_chunks_add_up_and_do_not_see_one_another(folder: Path) -> None:
    model, _ = load_anything(folder)
    whole = calibrate(model, TOKENS, chunk=16)
    parts = [calibrate(model, TOKENS[start : start + 16]) for start in (0, 16, 32)]
    agree(means(whole), {name: sum(p[name][0] for p in parts) / 40 for name in whole}, 1e-6)
    begun = calibrate(model, TOKENS, chunk=17, bos=5)
    assert begun["model.embed_tokens"][1] == 43
    parts = [calibrate(model, [5, *TOKENS[start : start + 16]]) for start in (0, 16, 32)]
    agree(means(begun), {name: sum(p[name][0] for p in parts) / 43 for name in whole}, 1e-6)


def test_the_model_is_left_as_it_was(folder: Path) -> None:
    model, _ = load_anything(folder)
    model.again = model.layers[0].mlp.up_proj  # one module at two paths
    kinds = [type(module) for module in model.modules()]
    before = np.array(model(mx.array([TOKENS])))
    calibrate(model, TOKENS)
    with pytest.raises(RuntimeError), observed(model, Sums().see):
        assert [type(module) for module in model.modules()] != kinds
        raise RuntimeError
    assert [type(module) for module in model.modules()] == kinds
    assert np.array_equal(np.array(model(mx.array([TOKENS]))), before)


def test_quantized_layers_are_observed_too(folder: Path, wanted: dict[str, np.ndarray], tmp_path: Path) -> None:
    model, _ = load_anything(folder)
    nn.quantize(
        model, 64, 8, class_predicate=lambda path, module: hasattr(module, "to_quantized") and "down" not in path
    )
    agree(means(calibrate(model, TOKENS)), wanted, 0.05)
    rsv_format.quantize(folder, tmp_path / "m.rsv", bits=8, importance="none")
    model, _ = load_anything(tmp_path / "m.rsv")
    agree(means(calibrate(model, TOKENS)), wanted, 0.05)
    rsv_format.quantize(folder, tmp_path / "m.rsv", bits_per_weight=20, embedding_bits=8, importance=wanted)
    model, _ = load_anything(tmp_path / "m.rsv")
    agree(means(calibrate(model, TOKENS)), wanted, 0.05)


@pytest.mark.parametrize("tokens", [5, 64], ids=["few", "many, which mlx-lm sorts"])
@pytest.mark.parametrize("bits", [0, 8])
def test_experts_count_their_own_tokens(tokens: int, bits: int) -> None:
    rng = np.random.default_rng(2)
    box = nn.Module()
    box.switch_mlp = SwitchGLU(64, 64, 4)
    if bits:
        nn.quantize(box, 64, bits)
    x = rng.standard_normal((1, tokens, 64)).astype(np.float32)
    indices = np.stack([rng.permutation(3)[:2] for _ in range(tokens)])[None]  # nobody goes to the last
    seen = Sums()
    with observed(box, seen.see):
        mx.eval(box.switch_mlp(mx.array(x), mx.array(indices)))
        mx.eval(seen)
    assert set(seen) == {f"switch_mlp.{part}_proj" for part in ("gate", "up", "down")}
    sums, counts = np.zeros((4, 64)), np.zeros(4)
    for t in range(tokens):
        for expert in indices[0, t]:
            sums[expert] += x[0, t] ** 2
            counts[expert] += 1
    for part in ("gate", "up"):
        np.testing.assert_allclose(np.array(seen[f"switch_mlp.{part}_proj"][0]), sums, rtol=1e-5)
    assert all(np.array_equal(np.array(seen[name][1]), counts) for name in seen)
    down = np.array(seen["switch_mlp.down_proj"][0])
    assert down.shape == (4, 64) and not down[3].any() and down[:3].any()


def test_refusals(folder: Path, tmp_path: Path) -> None:
    model, _ = load_anything(folder)
    for arguments in (([], {}), (TOKENS, {"chunk": 0}), (TOKENS, {"chunk": 1, "bos": 1})):
        with pytest.raises(RsvError) as info:
            calibrate(model, arguments[0], **arguments[1])
        assert info.value.code == "bad_argument"
    model.model.norm.weight = mx.full((64,), float("inf"))
    with pytest.raises(RsvError) as info:
        calibrate(model, TOKENS)
    assert (info.value.code, info.value.where) == ("source_invalid", "model.embed_tokens")


# models


def test_models_without_what_it_takes(folder: Path, tmp_path: Path) -> None:
    def refused(spec: Path, code: str, part: str) -> None:
        with pytest.raises(RsvError) as info:
            load_anything(spec)
        assert info.value.code == code and part in str(info.value)

    weights = (folder / "model.safetensors").read_bytes()
    lone = tmp_path / "model.safetensors"
    lone.write_bytes(weights)
    refused(lone, "missing_attachment", "config.json")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    refused(lone, "missing_attachment", "tokenizer.json")
    refused(tmp_path / "absent.gguf", "io_error", "absent")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"model_file": "evil.py"}))
    refused(tmp_path, "unsupported_model", "its own code")
    (tmp_path / "config.json").write_text(json.dumps(CONFIG | {"intermediate_size": 128}))
    (tmp_path / "tokenizer.json").write_bytes((folder / "tokenizer.json").read_bytes())
    refused(lone, "unsupported_model", "mlp")
    empty = tmp_path / "empty"
    empty.mkdir()
    refused(empty, "missing_attachment", "config.json")


def test_ctrl_c_keeps_what_was_measured(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whole chunks, as if so many tokens had been asked for; nothing if there was none."""
    (tmp_path / "text").write_text(TEXT)
    arguments = ["calibrate", folder, "-t", tmp_path / "text", "--chunk", "16"]
    rsv(*arguments, "-o", tmp_path / "wanted.gguf", "-n", "32")
    measure = calibrate_module.calibrate
    for stop, shown, code in ((32, "32 tokens of 40", 130), (0, "", 130), (40, "40 tokens", 0)):  # the last too late

        def interrupted(*a: Any, stop: int = stop, **options: Any) -> Any:
            told = options.pop("progress")

            def note(done: int, total: int, name: str) -> None:
                told(done, total, name)
                if done == stop:
                    raise KeyboardInterrupt

            return measure(*a, **options, progress=note)

        monkeypatch.setattr(calibrate_module, "calibrate", interrupted)
        out = tmp_path / f"{stop}.gguf"
        result = rsv(*arguments, "-o", out, code=code)
        assert shown in result.stdout and out.exists() is (stop > 0)
    assert (tmp_path / "32.gguf").read_bytes() == (tmp_path / "wanted.gguf").read_bytes()


def test_of_a_long_text_only_the_beginning_is_encoded() -> None:
    class Letters:
        bos_token_id = None
        longest = 0

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            self.longest = max(self.longest, len(text))
            return [len(word) for word in text.split()]

    letters = Letters()
    for text, wanted in (("ab " * 10**6, 160), ("ab" * 20 + " c" * 10**6, 160), ("abcdefghi" * 100 + " d" * 20, 1280)):
        letters.longest = 0
        assert encode(letters, text, 10)[0] == [len(word) for word in text.split()[:10]]
        assert letters.longest <= wanted


def test_a_tokenizer_that_begins_texts(folder: Path, tmp_path: Path) -> None:
    _, tokenizer = load_anything(folder)
    assert encode(tokenizer, TEXT) == (TOKENS, None)

    class Beginning:
        bos_token_id = 7

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            return [7] * add_special_tokens + [1] * len(text)

    assert encode(Beginning(), "ab") == ([1, 1], 7)


# the file


def test_an_importance_matrix_is_llama_cpp_s(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    layers = {
        "model.layers.3.mlp.down_proj": (np.array([2.0, 6.0]), 4),
        "model.layers.0.block_sparse_moe.switch_mlp.up_proj": (np.array([[1.0, 2, 0], [5, 0, 0]]), np.array([1, 2])),
        "lm_head": (np.array([1.0]), 2),
        "encoder.layer.0.query": (np.array([9.0]), 3),
        "model.layers.1.mlp.up_proj": (np.array([0.0]), 0),
    }
    save_imatrix(path, layers, datasets=["a.txt"], chunks=3, chunk_size=512)
    assert [other.name for other in tmp_path.iterdir()] == ["i.gguf"]
    reader = gguf.GGUFReader(path)
    keys = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert keys == {
        "general.architecture": "imatrix", "general.type": "imatrix", "imatrix.datasets": ["a.txt"],
        "imatrix.chunk_count": 3, "imatrix.chunk_size": 512,
    }  # fmt: skip
    shapes = {tensor.name: (tensor.shape.tolist(), tensor.tensor_type.name) for tensor in reader.tensors}
    assert shapes == {  # innermost axis first
        "blk.0.ffn_up_exps.weight.in_sum2": ([3, 2], "F32"), "blk.0.ffn_up_exps.weight.counts": ([1, 2], "F32"),
        "blk.3.ffn_down.weight.in_sum2": ([2, 1], "F32"), "blk.3.ffn_down.weight.counts": ([1, 1], "F32"),
        "encoder.layer.0.query.weight.in_sum2": ([1, 1], "F32"), "encoder.layer.0.query.weight.counts": ([1, 1], "F32"),
        "output.weight.in_sum2": ([1, 1], "F32"), "output.weight.counts": ([1, 1], "F32"),
    }  # fmt: skip
    found = {name: mean.tolist() for name, mean in load_imatrix(path).items()}
    assert found["model.layers.3.mlp.down_proj"] == [0.5, 1.5] and found["encoder.layer.0.query"] == [3]
    assert found["model.layers.0.block_sparse_moe.switch_mlp.up_proj"] == pytest.approx([2, 2 / 3, 0])
    assert found["lm_head"] == [0.5] and "model.layers.1.mlp.up_proj" not in found


def test_an_importance_matrix_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "i.gguf"
    path.write_bytes(b"before")
    for bad in ((np.zeros((2, 3)), np.ones(3)), (np.zeros(0), 1), (np.zeros((1, 2, 3)), 1)):
        with pytest.raises(RsvError) as info:
            save_imatrix(path, {"a": bad})
        assert info.value.code == "bad_argument"
    with pytest.raises(RsvError) as info:
        save_imatrix(tmp_path / "absent" / "i.gguf", {"a": (np.ones(3), 1)})
    assert info.value.code == "io_error"
    assert path.read_bytes() == b"before" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("stem", ["attn_q", "attn_output", "ffn_down", "ffn_gate_exps", "ffn_up_shexp", "ffn_gate_inp"])
def test_names_there_and_back(stem: str) -> None:
    for model_type in ("llama", "mixtral"):
        full = hugging_face_name(f"blk.12.{stem}.weight", model_type)
        assert full is not None and llama_cpp_name(full) == f"blk.12.{stem}.weight"


def test_names_that_llama_cpp_has_not() -> None:
    for name in ("model.layers.0.odd.weight", "model.layers.00.mlp.up_proj.weight", "a.weight", "lm_head.scale", "x"):
        assert llama_cpp_name(name) is None
    assert llama_cpp_name("model.embed_tokens.weight") == "token_embd.weight"


# the command


def test_calibrate_then_quantize(folder: Path, wanted: dict[str, np.ndarray], tmp_path: Path) -> None:
    text, out = tmp_path / "text.txt", tmp_path / "i.gguf"
    text.write_text(TEXT)
    assert "15 layers · 40 tokens" in rsv("calibrate", folder, "--text", text, "-o", out).stdout
    found = load_imatrix(out)
    agree({name: found[name] for name in wanted}, wanted)
    rsv("quantize", folder, "-o", tmp_path / "a.rsv", "--importance", out, "--quiet")
    rsv_format.quantize(folder, tmp_path / "b.rsv", importance={name: found[name] for name in wanted})
    assert (tmp_path / "a.rsv").read_bytes() == (tmp_path / "b.rsv").read_bytes()
    again = tmp_path / "again.gguf"
    assert rsv("calibrate", folder / "model.safetensors", "-t", text, "-o", again, "-q").stdout == ""
    assert again.read_bytes() == out.read_bytes()
    rsv("calibrate", tmp_path / "a.rsv", "-t", text, "-o", again, "--tokens", 20, "--chunk", 8)
    keys = gguf.GGUFReader(again).fields
    assert [keys[f"imatrix.{key}"].contents() for key in ("datasets", "chunk_count", "chunk_size")] == [
        ["text.txt"],
        3,
        8,
    ]


def test_calibrate_fails_with_a_code(folder: Path, tmp_path: Path) -> None:
    out = tmp_path / "i.gguf"
    text = tmp_path / "text.txt"
    assert "error[io_error]" in rsv("calibrate", folder, "-t", text, "-o", out, code=1).stderr
    text.write_bytes(b"ab\xff")
    assert "not UTF-8" in rsv("calibrate", folder, "-t", text, "-o", out, code=1).stderr
    text.write_text("")
    assert "error[bad_argument]" in rsv("calibrate", folder, "-t", text, "-o", out, code=2).stderr
    assert "is the input itself" in rsv("calibrate", folder, "-t", text, "-o", text, code=2).stderr
    assert [path.name for path in tmp_path.iterdir()] == ["text.txt"]


def test_a_config_of_transformers_5(folder: Path, tmp_path: Path) -> None:
    """mlx-lm's llama would take its default base instead."""
    copy = tmp_path / "model"
    shutil.copytree(folder, copy)
    older = {key: value for key, value in CONFIG.items() if key != "rope_theta"}
    given = {**older, "rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}
    (copy / "config.json").write_text(json.dumps(given))
    model, _ = load_anything(copy)
    assert model.model.layers[0].self_attn.rope.base == 5e5
