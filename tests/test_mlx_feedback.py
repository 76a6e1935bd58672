"""Calibration through MLX: as in numpy for what both run, and for what numpy does not run."""

from __future__ import annotations

import json
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from typer.testing import CliRunner

import rsv_format
from rsv_cli.app import app
from rsv_format import RsvError
from rsv_format.quantizer.calibration import DecoderCalibration, block_of

tokenizers = pytest.importorskip("tokenizers")
mx = pytest.importorskip("mlx.core", reason="MLX is not installed")

from mlx.utils import tree_flatten  # noqa: E402

import rsv_mlx  # noqa: E402
from rsv_mlx import moments  # noqa: E402
from rsv_mlx.calibrate import load_anything  # noqa: E402

with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    from mlx_lm.models import llama, qwen3_moe

LLAMA = {
    "model_type": "llama", "hidden_size": 128, "num_hidden_layers": 3, "intermediate_size": 160,
    "num_attention_heads": 4, "num_key_value_heads": 2, "rms_norm_eps": 1e-5, "vocab_size": 64,
    "tie_word_embeddings": True, "rope_theta": 10000.0, "eos_token_id": 0,
}  # fmt: skip
MIXTURE = LLAMA | {
    "model_type": "qwen3_moe", "num_hidden_layers": 2, "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2,
    "decoder_sparse_step": 1, "mlp_only_layers": [], "moe_intermediate_size": 128, "max_position_embeddings": 1024,
    "norm_topk_prob": True,
}  # fmt: skip
WORDS = ["<e>", "<b>", *(f"w{i}" for i in range(2, 64))]
TEXT = " ".join(WORDS[i] for i in np.random.default_rng(3).integers(2, 64, 700))


def folder(path: Path, kind: Any, config: dict[str, Any], begin: bool = False) -> Path:
    """A model with random weights and a tokenizer of one token a word, which may begin texts with one of its own."""
    path.mkdir()
    mx.random.seed(1)
    model = kind.Model(kind.ModelArgs.from_dict(config))
    weights = dict(tree_flatten(model.parameters()))
    weights = {k: mx.random.normal(v.shape) / np.sqrt(v.shape[-1]) if v.ndim > 1 else v for k, v in weights.items()}
    mx.save_safetensors(str(path / "model.safetensors"), weights)
    (path / "config.json").write_text(json.dumps(config))
    words = tokenizers.Tokenizer(
        tokenizers.models.WordLevel({word: i for i, word in enumerate(WORDS)}, unk_token="<e>")
    )
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    if begin:
        words.post_processor = tokenizers.processors.TemplateProcessing("<b> $A", special_tokens=[("<b>", 1)])
    words.save(str(path / "tokenizer.json"))
    (path / "tokenizer_config.json").write_text(
        json.dumps({"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<e>", "bos_token": "<b>"})
    )
    return path


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("models")
    positions = {"rope_type": "linear", "factor": 2.0}  # which numpy does not know
    return {
        "llama": folder(root / "llama", llama, LLAMA),
        "begun": folder(root / "begun", llama, LLAMA, begin=True),
        "scaled": folder(root / "scaled", llama, LLAMA | {"rope_scaling": positions}),
        "mixture": folder(root / "mixture", qwen3_moe, MIXTURE),
    }


@pytest.mark.parametrize("name", ["llama", "begun"])
@pytest.mark.parametrize("room", [moments._ROOM, 0], ids=["one run", "a run for each layer"])
def test_it_sees_what_numpy_sees(
    name: str, room: int, models: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(moments, "_ROOM", room)
    with rsv_format.open_source(models[name]) as source:
        own, other = DecoderCalibration.of_text(source, TEXT), rsv_mlx.text_calibration(models[name], TEXT)
        assert own.tokens == other.tokens == (702 if name == "begun" else 700)
        means, others = own.importance(), other.importance()
        assert means is not None and means.keys() == others.keys()
        for layer, mean in means.items():
            np.testing.assert_allclose(others[layer], mean, rtol=1e-3, atol=1e-4 * float(mean.max()))
        layers = [*sorted(means, key=block_of), "lm_head", "model.layers.7.mlp.up_proj"]
        for a, b in zip(own.moments(layers), other.moments(layers), strict=True):
            assert (a is None) == (b is None)
            if a is not None and b is not None:
                np.testing.assert_allclose(b, a, atol=1e-3 * float(np.diag(a).max()))


def test_files_are_alike(models: dict[str, Path], tmp_path: Path) -> None:
    options: dict[str, Any] = {"bits": 3}
    calibration = rsv_mlx.text_calibration(models["llama"], TEXT)
    rsv_format.quantize(models["llama"], tmp_path / "a.rsv", calibration=TEXT, **options)
    rsv_format.quantize(models["llama"], tmp_path / "b.rsv", calibration=calibration, **options)
    rsv_format.quantize(models["llama"], tmp_path / "c.rsv", calibration=TEXT, feedback=False, **options)
    model, tokenizer = load_anything(models["llama"])
    rsv_mlx.quantize_model(model, calibration=tokenizer.encode(TEXT), **options)
    weights = {
        name: np.array(module.weight)
        for name, module in model.named_modules()
        if isinstance(module, rsv_mlx.QuantizedLinear | rsv_mlx.QuantizedEmbedding)
    }
    with (
        rsv_format.open(tmp_path / "a.rsv") as a,
        rsv_format.open(tmp_path / "b.rsv") as b,
        rsv_format.open(tmp_path / "c.rsv") as c,
    ):
        assert b.metadata == a.metadata and a.layers.keys() == b.layers.keys() == weights.keys()
        for name, layer in a.layers.items():
            dense, unlike = layer.dequantize(), c.layers[name].dequantize()
            for other in (b.layers[name].dequantize(), weights[name]):
                assert np.square(other - dense).sum() < 0.1 * np.square(unlike - dense).sum()


@pytest.mark.parametrize("name", ["scaled", "mixture"])
def test_the_command_line_turns_to_mlx(name: str, models: dict[str, Path], tmp_path: Path) -> None:
    def made(path: Path, *options: str) -> bytes:
        arguments = ["quantize", str(models[name]), "-o", str(path), "-b", "3", "--calibrate", str(text), *options]
        result = CliRunner().invoke(app, arguments)
        assert result.exit_code == 0, result.output
        assert rsv_format.verify(path) == []
        return path.read_bytes()

    text = tmp_path / "text.txt"
    text.write_text(TEXT)
    whole = made(tmp_path / "a.rsv")
    assert made(tmp_path / "b.rsv") == whole and made(tmp_path / "c.rsv", "--no-feedback") != whole
    with rsv_format.open(tmp_path / "a.rsv") as a, rsv_format.open(tmp_path / "c.rsv") as c:
        assert a.metadata["quantizer.feedback"] == "true" and a.metadata["quantizer.calibration"] == "700 tokens"
        outputs = [error(name, models[name], file.layers) for file in (a, c)]
    for layer, less in outputs[0].items():
        assert less < outputs[1][layer] or layer.endswith("o_proj"), layer
    assert sum(outputs[0].values()) < 0.95 * sum(outputs[1].values())


def error(name: str, path: Path, layers: Any) -> dict[str, float]:
    """What quantization does to the outputs of layers on the text, relative to them."""
    calibration = rsv_mlx.text_calibration(path, TEXT)
    found = {}
    names = list(layers)
    with rsv_format.open_source(path) as source:
        for layer, moment in zip(names, calibration.moments(names), strict=True):
            assert moment is not None
            weight = source.tensors[f"{layer}.weight"].float32().reshape(-1, moment.shape[0])
            lost = layers[layer].dequantize().reshape(weight.shape) - weight
            found[layer] = float(np.vdot(lost @ moment, lost) / np.vdot(weight @ moment, weight))
    return found


def test_experts_have_one_moment_of_all_their_inputs(models: dict[str, Path]) -> None:
    calibration = rsv_mlx.text_calibration(models["mixture"], TEXT)
    block, importance = "model.layers.1", calibration.importance()
    names = [f"{block}.mlp.gate", *(f"{block}.mlp.switch_mlp.{part}_proj" for part in ("gate", "up", "down"))]
    router, gate, up, down = calibration.moments(names)
    assert router is not None and gate is not None and up is not None and down is not None
    np.testing.assert_allclose(gate, router, rtol=1e-3, atol=1e-4)  # all go to as many experts
    np.testing.assert_allclose(up, gate)
    np.testing.assert_allclose(np.diag(down), importance[names[3]], rtol=1e-3)


@pytest.mark.parametrize(
    "use, code",
    [(lambda model: rsv_mlx.quantize_model(model, calibration=[]), "bad_argument"),
     (lambda model: rsv_mlx.quantize_model(model, calibration=[64]), "unsupported_model"),
     (lambda model: rsv_mlx.quantize_model(model, feedback=True), "bad_argument")],
)  # fmt: skip
def test_refusals(use: Callable[[Any], None], code: str, models: dict[str, Path]) -> None:
    model, _ = load_anything(models["llama"])
    with pytest.raises(RsvError) as e:
        use(model)
    assert e.value.code == code
    assert not any(isinstance(module, rsv_mlx.QuantizedLinear) for module in model.modules())


def test_what_is_not_finite_is_refused(models: dict[str, Path]) -> None:
    model, _ = load_anything(models["llama"])
    model.layers[1].mlp.up_proj.weight = mx.full((160, 128), 3e38)
    with pytest.raises(RsvError) as e:
        list(rsv_mlx.ModelCalibration(model, [1, 2, 3]).moments(["model.layers.2.mlp.up_proj"]))
    assert e.value.code == "source_invalid"
