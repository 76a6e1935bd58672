"""Model folders as they are published: what lies beside the weights, what stands in a file's place, GPT-2's layers."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sources import named, plain, refuses, rng, write_folder, write_safetensors

import rsv_format
from rsv_format import open_source
from rsv_format.packing import pack
from rsv_format.sources import hub as hub_module
from rsv_format.sources import settings

pytest.importorskip("safetensors")

Arrays = dict[str, tuple[str, np.ndarray]]


# Git LFS

POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:" + b"ab" * 32 + b"\nsize 4976698672\n"


@pytest.mark.parametrize(
    "file", ["model.safetensors", "config.json", "model.safetensors.index.json", "tokenizer.json", "tokenizer.model"]
)
def test_pointers_of_git_lfs(tmp_path: Path, file: str) -> None:
    write_folder(tmp_path, {}, **{"model-00001-of-00001": plain("a")})
    if file != "model.safetensors.index.json":
        (tmp_path / "model-00001-of-00001.safetensors").rename(tmp_path / "model.safetensors")
    (tmp_path / file).write_bytes(POINTER)
    refuses("source_invalid", lambda: open_source(tmp_path), f"{file}: is a Git LFS pointer")
    if file.startswith("tokenizer"):
        with open_source(tmp_path, tokenizer=False) as source:
            assert set(source.attachments) == {"config.json"}
    if file == "model.safetensors":
        refuses("source_invalid", lambda: open_source(tmp_path / file), "git lfs pull")


def test_pointers_in_the_place_of_gguf_files(tmp_path: Path) -> None:
    (tmp_path / "m.gguf").write_bytes(POINTER)
    refuses("source_invalid", lambda: open_source(tmp_path / "m.gguf"), "Git LFS pointer")


# Files beside the weights


ATTACHED = [
    "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "vocab.json",
    "merges.txt", "vocab.txt", "tokenizer.model", "tiktoken.model", "qwen.tiktoken", "tekken.json", "spiece.model",
    "sentencepiece.bpe.model", "source.spm", "chat_template.jinja", "other.jinja", "chat_template.json",
    "preprocessor_config.json", "processor_config.json", "video_preprocessor_config.json", "generation_config.json",
]  # fmt: skip
LEFT_OUT = [
    "additional_chat_templates/tool_use.jinja", "modeling_x.py", "my tokenizer.model", "tokenization_x.py",
    "tokenizer.pkl",
]  # fmt: skip
IGNORED = ["README.md", "LICENSE", ".gitattributes", "pytorch_model.bin", "image.png", "trainer_state.json"]


def test_files_are_attached_or_told_or_of_no_use(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_folder(tmp_path, {"model_type": "x"}, model=plain("q_proj.weight"))
    (tmp_path / "additional_chat_templates").mkdir()
    for name in [*ATTACHED, *LEFT_OUT, *IGNORED]:
        (tmp_path / name).write_bytes(b"{}")
    source = open_source(tmp_path)
    assert source.attachments.keys() == {"config.json", *ATTACHED}
    assert source.left_out == tuple(LEFT_OUT)
    assert source.attachments["tekken.json"] == ("application/json", b"{}")
    assert source.attachments["tiktoken.model"][0] == "application/octet-stream"
    report = rsv_format.quantize(source, tmp_path / "m.rsv")
    assert report.left_out == tuple(LEFT_OUT)
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert file.attachments.keys() == source.attachments.keys()


def test_left_out_files_are_printed(tmp_path: Path) -> None:
    typer_testing = pytest.importorskip("typer.testing")
    from rsv_cli.app import app

    write_folder(tmp_path, {}, model=plain("q_proj.weight"))
    (tmp_path / "tokenization_\x1b[31m.py").write_bytes(b"")
    output = typer_testing.CliRunner().invoke(app, ["quantize", str(tmp_path), "-o", str(tmp_path / "m.rsv")]).output
    assert r"left out  tokenization_\x1b[31m.py" in output


# Configs of transformers 5


@pytest.mark.parametrize(
    "config, older",
    [
        ({"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}}, {"rope_theta": 5e5}),
        (
            {"rope_parameters": {"rope_theta": 5e5, "rope_type": "llama3", "factor": 8.0}},
            {
                "rope_theta": 5e5,
                "rope_scaling": {"rope_theta": 5e5, "rope_type": "llama3", "type": "llama3", "factor": 8.0},
            },
        ),
        (
            {"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rope_type": "default"}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25},
        ),
        (
            {"model_type": "gpt_neox", "rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.25}},
            {"rope_theta": 1e4, "partial_rotary_factor": 0.25, "rotary_emb_base": 1e4, "rotary_pct": 0.25},
        ),
        (
            {
                "rope_parameters": {
                    "full_attention": {"rope_theta": 1e6, "rope_type": "linear", "factor": 8.0},
                    "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
                }
            },
            {
                "rope_theta": 1e6,
                "rope_scaling": {"rope_theta": 1e6, "rope_type": "linear", "type": "linear", "factor": 8.0},
                "rope_local_base_freq": 1e4,
                "swa_rope_theta": 1e4,
            },
        ),
        ({"rope_theta": 1e3, "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 1e3}),  # said outright
        ({"rope_theta": None, "rope_parameters": {"rope_theta": 5e5}}, {"rope_theta": 5e5}),
        ({"attn_config": {"clip": 8}, "rope_parameters": {"rope_theta": 5e5}},
         {"rope_theta": 5e5, "attn_config": {"clip": 8, "rope_theta": 5e5}}),
        ({"model_type": "cohere2", "layer_types": ["sliding_attention", "full_attention"] * 2},
         {"sliding_window_pattern": 2}),
        ({"model_type": "cohere2", "layer_types": ["full_attention", "sliding_attention"]}, {}),
        ({"rope_parameters": "odd", "layer_types": 3}, {}),
        ({"rope_parameters": {"full_attention": 3, "sliding_attention": None}}, {}),
    ],
)  # fmt: skip
def test_newer_keys_are_told_by_the_older_ones(config: dict[str, Any], older: dict[str, Any]) -> None:
    assert settings.current(config) == config | older
    assert settings.current({"text_config": config})["text_config"] == config | older
    assert settings.current(settings.current(config)) == config | older


@pytest.mark.parametrize("model_type", ["llama", "gemma3_text", "glm4", "phi", "gpt_neox", "qwen3", "dbrx"])
def test_what_transformers_writes_mlx_lm_reads(model_type: str) -> None:
    transformers = pytest.importorskip("transformers")
    utils = pytest.importorskip("mlx_lm.utils")
    theta = {"rope_theta": 12345.0, "rope_type": "default"}
    if model_type == "gemma3_text":
        theta = {"full_attention": theta, "sliding_attention": {"rope_theta": 678.0, "rope_type": "default"}}
    made = transformers.AutoConfig.for_model(model_type, rope_parameters=theta)
    config = settings.current(json.loads(made.to_json_string(use_diff=False)))
    arguments = utils._get_classes(config)[1].from_dict(config)
    found = getattr(arguments, "rope_theta", None) or getattr(arguments, "rotary_emb_base", None)
    assert (arguments.attn_config["rope_theta"] if model_type == "dbrx" else found) == 12345
    if model_type == "gemma3_text":
        assert arguments.rope_local_base_freq == 678


def test_the_decoder_reads_what_transformers_5_writes(tmp_path: Path) -> None:
    from rsv_format.decoder import Decoder

    shape = {"hidden_size": 8, "num_hidden_layers": 0, "num_attention_heads": 2}
    given = {"model_type": "llama", **shape, "rope_parameters": {"rope_theta": 5e5}}
    write_folder(tmp_path, given, model=plain("q_proj.weight"))
    config = open_source(tmp_path).config
    assert config is not None and Decoder(config, lambda name: None).theta == 5e5


# GPT-2


GPT2 = {"model_type": "gpt2", "n_layer": 2, "n_head": 2, "n_embd": 16, "n_positions": 8, "n_ctx": 8, "vocab_size": 20}
GPT2 |= {"layer_norm_epsilon": 1e-5, "num_hidden_layers": 2}


def gpt2() -> dict[str, np.ndarray]:
    """As published: the weights of Conv1D lie (in, out)."""
    wide = {"attn.c_attn": (16, 48), "attn.c_proj": (16, 16), "mlp.c_fc": (16, 64), "mlp.c_proj": (64, 16)}
    made = {"wte.weight": rng().standard_normal((20, 16)), "wpe.weight": rng().standard_normal((8, 16))}
    for i in range(2):
        for part, shape in wide.items():
            made[f"h.{i}.{part}.weight"] = rng().standard_normal(shape) * 0.3
            made[f"h.{i}.{part}.bias"] = rng().standard_normal(shape[1])
        made |= {f"h.{i}.ln_{j}.{x}": rng().uniform(0.5, 1, 16) for j in (1, 2) for x in ("weight", "bias")}
    made |= {"ln_f.weight": np.ones(16), "ln_f.bias": np.zeros(16)}
    return {name: array.astype(np.float32) for name, array in made.items()}


@pytest.mark.parametrize("prefix", ["", "transformer."])
def test_layers_of_gpt2_are_turned(tmp_path: Path, prefix: str) -> None:
    arrays = gpt2()
    tensors: Arrays = {prefix + name: ("F32", array) for name, array in arrays.items()}
    mask = {f"{prefix}h.0.attn.bias": ("U8", np.ones((1, 1, 8, 8), np.uint8))}
    head = {"lm_head.weight": ("F32", arrays["wte.weight"])} if prefix else {}
    write_folder(tmp_path, GPT2, model=tensors | mask | head)
    source = open_source(tmp_path)
    assert source.tensors.keys() == {f"model.{name}" for name in arrays}
    layer = source.tensors["model.h.1.attn.c_attn.weight"]
    assert layer.shape == (48, 16) and np.array_equal(layer.read(), arrays["h.1.attn.c_attn.weight"].T)
    assert np.array_equal(layer.float32(), layer.read()) and layer.name == "model.h.1.attn.c_attn.weight"
    converted: Arrays = {name: ("F32", x.read()) for name, x in source.tensors.items()}
    write_folder(tmp_path, GPT2, model=converted)  # mlx-lm's own names: as they are
    again = open_source(tmp_path).tensors["model.h.1.attn.c_attn.weight"]
    assert np.array_equal(again.read(), arrays["h.1.attn.c_attn.weight"].T)


def test_gpt2_gives_the_logits_of_mlx_lm(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    import rsv_mlx

    write_folder(tmp_path, GPT2, model={name: ("F32", array) for name, array in gpt2().items()})
    rsv_format.quantize(tmp_path, tmp_path / "m.rsv", bits=8, embedding_bits=8)
    tokens = mx.array([[1, 7, 3, 19]])
    wanted = np.array(load_model(tmp_path)[0](tokens))
    found = np.array(rsv_mlx.load_model(tmp_path / "m.rsv")(tokens))
    assert np.linalg.norm(found - wanted) < 0.05 * np.linalg.norm(wanted)


# MLX's layers whose settings the config does not have


def mlx_layer(bits: int, group_size: int, rows: int, columns: int) -> tuple[Arrays, np.ndarray]:
    codes = rng().integers(0, 2**bits, (rows, columns), np.uint8)
    scales, biases = (rng().standard_normal((rows, columns // group_size)).astype(np.float16) for _ in range(2))
    dense = codes * np.repeat(scales, group_size, -1).astype(np.float32) + np.repeat(biases, group_size, -1)
    return {"weight": ("U32", pack(codes, bits)), "scales": ("F16", scales), "biases": ("F16", biases)}, dense


@pytest.mark.parametrize("bits, group_size", [(4, 64), (8, 64), (2, 64), (8, 32), (2, 128), (6, 32)])
@pytest.mark.parametrize("settings", [{"group_size": 64, "bits": 4}, {}])
@pytest.mark.parametrize("layer", ["self_attn.q_proj", "mlp.down_proj", "mlp.gate"])
def test_the_width_of_the_input_tells_the_settings(
    tmp_path: Path, layer: str, bits: int, group_size: int, settings: dict[str, int]
) -> None:
    """Also where the config's settings would fit the shapes: 8 bits in groups of 32 take the words of 4 in 64."""
    block = "model.layers.0"
    parts, dense = mlx_layer(bits, group_size, 8, 256)
    norms: Arrays = {f"{block}.input_layernorm.weight": ("F32", np.ones(256, np.float32))}
    above = named(f"{block}.mlp.up_proj", mlx_layer(4, 64, 256, 256)[0])
    write_folder(tmp_path, {"quantization": settings}, model=named(f"{block}.{layer}", parts) | norms | above)
    tensor = open_source(tmp_path).tensors[f"{block}.{layer}.weight"]
    assert tensor.shape == dense.shape and np.allclose(tensor.float32(), dense, atol=1e-6)


def test_settings_are_inferred_from_the_models_group_size(tmp_path: Path) -> None:
    parts, dense = mlx_layer(8, 64, 8, 256)  # nothing tells the width
    write_folder(tmp_path, {"quantization": {"group_size": 64, "bits": 4}}, model=named("x.proj", parts))
    assert np.allclose(open_source(tmp_path).tensors["x.proj.weight"].float32(), dense, atol=1e-6)
    write_folder(tmp_path, {}, model=named("x.proj", parts))
    refuses("source_invalid", lambda: open_source(tmp_path), "x.proj")
    (tmp_path / "config.json").unlink()
    refuses("source_invalid", lambda: open_source(tmp_path / "model.safetensors"), "x.proj")


@pytest.mark.parametrize("mode, group_size, bits", [("mxfp4", 32, 4), ("nvfp4", 16, 4), ("mxfp8", 32, 8)])
@pytest.mark.parametrize("declared", [True, False])
def test_other_modes_of_mlx_are_named(tmp_path: Path, mode: str, group_size: int, bits: int, declared: bool) -> None:
    parts: Arrays = {
        "weight": ("U32", np.zeros((4, 64 * bits // 32), np.uint32)),
        "scales": ("U8", np.zeros((4, 64 // group_size), np.uint8)),
    }
    own = {"q_proj": {"group_size": group_size, "bits": bits, "mode": mode}} if declared else {}
    write_folder(tmp_path, {"quantization": {"group_size": 64, "bits": 4, **own}}, model=named("q_proj", parts))
    refuses("source_unsupported", lambda: open_source(tmp_path), f"q_proj: MLX quantization mode '{mode}'")


# Paths and the hub


@pytest.mark.parametrize("spec", ["models/qwen", "x/model.gguf", "x/model.safetensors"])
def test_a_mistyped_path_is_not_downloaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spec: str) -> None:
    hub = pytest.importorskip("huggingface_hub")
    monkeypatch.setattr(hub, "snapshot_download", lambda *_, **__: pytest.fail("it was asked for"))
    (tmp_path / "models").mkdir()
    monkeypatch.chdir(tmp_path)
    assert hub_module.is_repository(spec)
    refuses("io_error", lambda: open_source(spec), f"{spec}: no such file or folder")


def test_what_is_neither_here_nor_there(monkeypatch: pytest.MonkeyPatch) -> None:
    hub = pytest.importorskip("huggingface_hub")

    def fail(spec: str, **patterns: Any) -> str:
        raise RuntimeError("no network")

    monkeypatch.setattr(hub, "snapshot_download", fail)
    refuses(
        "io_error", lambda: open_source("some-org/some-model"), "no such file or folder, nor could it be downloaded"
    )


def test_a_repository_is_asked_for_what_a_folder_is_read_for(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    hub = pytest.importorskip("huggingface_hub")
    from huggingface_hub.utils import filter_repo_objects

    asked: dict[str, Any] = {}
    monkeypatch.setattr(hub, "snapshot_download", lambda spec, **patterns: asked.update(patterns) or str(tmp_path))
    write_safetensors(tmp_path / "model.safetensors", plain("a"))
    open_source("some-org/some-model")
    names = [*ATTACHED, "model-00001-of-00002.safetensors", "quantize_config.json", "config.json"]
    others = ["original/model.safetensors", "pytorch_model.bin", "modeling_x.py", "README.md"]
    patterns = {key: asked[key] for key in ("allow_patterns", "ignore_patterns")}
    assert list(filter_repo_objects([*names, *others], **patterns)) == names
