"""Weights that something else has quantized are refused by its name, wherever that is said, or made dense."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sources import plain, refuses, write_folder, write_safetensors

from rsv_format import open_source
from rsv_format.dtypes import to_bfloat16, to_float32
from rsv_format.sources import scaled

pytest.importorskip("safetensors")

Arrays = dict[str, tuple[str, np.ndarray]]


def rng() -> np.random.Generator:
    return np.random.default_rng(3)


@pytest.mark.parametrize(
    "entry, name",
    [
        ({"quant_method": "gptq", "bits": 4}, "gptq"),
        ({"quant_method": "awq"}, "awq"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "bitsandbytes"),
        ({"load_in_8bit": True}, "bitsandbytes"),
        ({"quant_method": "hqq"}, "hqq"),
        ({"quant_method": "torchao"}, "torchao"),
        ({"quant_method": "something new"}, "something new"),
        ({"quant_method": "compressed-tensors", "format": "pack-quantized"}, "compressed-tensors (pack-quantized)"),
        ({"config_groups": {}, "format": "nvfp4-pack-quantized"}, "compressed-tensors"),
        (
            {"quant_method": "compressed-tensors", "format": "dense", "sparsity_config": {"format": "sparse-bitmask"}},
            "compressed-tensors",
        ),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "ModelOpt (NVFP4)"),
        ({"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "W4A16_AWQ"}}, "W4A16_AWQ"),
    ],
)
@pytest.mark.parametrize("place", ["quantization_config", "compression_config", "text_config"])
def test_what_configs_say(tmp_path: Path, entry: dict[str, Any], name: str, place: str) -> None:
    config = {place: {"quantization_config": entry} if place == "text_config" else entry}
    write_folder(tmp_path, config, model=plain("a.weight"))
    refuses("source_unsupported", lambda: open_source(tmp_path), name)


@pytest.mark.parametrize(
    "entry",
    [
        None,
        {},
        {"quant_method": "modelopt", "kv_cache_scheme": {"num_bits": 8}},
        {"quant_method": "fp8", "weight_block_size": [128, 128]},
        {"quant_method": "compressed-tensors", "format": "float-quantized"},
    ],
)
def test_what_needs_no_refusal_and_leaves_the_config(tmp_path: Path, entry: Any) -> None:
    config = {"model_type": "x", "quantization_config": entry, "text_config": {"quantization_config": entry}}
    write_folder(tmp_path, config, model=plain("a.weight"))
    source = open_source(tmp_path)
    assert source.config == {"model_type": "x", "text_config": {}} and len(source.tensors) == 1


@pytest.mark.parametrize(
    "file, content, name",
    [
        ("quantize_config.json", {"bits": 4, "group_size": 128}, "GPTQ"),
        ("quant_config.json", {"w_bit": 4, "zero_point": True}, "AWQ"),
        ("quantization_config.json", {"bits": 4}, "AutoRound"),
        ("hf_quant_config.json", {"quantization": {"quant_algo": "NVFP4"}}, "ModelOpt"),
        ("quanto_qmap.json", {}, "quanto"),
    ],
)
def test_what_side_files_say(tmp_path: Path, file: str, content: dict[str, Any], name: str) -> None:
    write_folder(tmp_path, {}, model=plain("a.weight"))
    (tmp_path / file).write_text(json.dumps(content))
    refuses("source_unsupported", lambda: open_source(tmp_path), name)


@pytest.mark.parametrize("content", [{}, {"quantization": {"quant_algo": None, "kv_cache_quant_algo": "FP8"}}])
def test_side_files_that_say_nothing(tmp_path: Path, content: dict[str, Any]) -> None:
    write_folder(tmp_path, {}, model=plain("a.weight"))
    (tmp_path / "hf_quant_config.json").write_text(json.dumps(content))
    assert open_source(tmp_path).tensors.keys() == {"a.weight"}


@pytest.mark.parametrize(
    "names, method",
    [
        (["q_proj.qweight", "q_proj.scales"], "GPTQ or AWQ"),
        (["q_proj.weight_packed"], "compressed-tensors"),
        (["q_proj.weight.absmax"], "bitsandbytes"),
        (["q_proj.weight.quant_state.bitsandbytes__nf4"], "bitsandbytes"),
        (["q_proj.SCB"], "bitsandbytes"),
        (["q_proj.W_q"], "HQQ"),
        (["q_proj.weight_scale_2"], "ModelOpt"),
        (["q_proj.weight_quantizer._amax"], "ModelOpt"),
        (["q_proj.codes", "q_proj.codebooks"], "AQLM"),
        (["q_proj.indices", "q_proj.centroids.weight"], "VPTQ"),
        (["q_proj.row_offsets", "q_proj.col_vals"], "SpQR"),
        (["q_proj.weight._data", "q_proj.weight._scale"], "quanto"),
        (["q_proj.Qidxs"], "QuIP#"),
        (["q_proj.trellis"], "ExLlamaV3"),
        (["q_proj.q_weight", "q_proj.q_scale"], "ExLlamaV2"),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_what_names_of_tensors_say(tmp_path: Path, names: list[str], method: str, config: bool) -> None:
    tensors = plain("model.norm.weight") | {f"layers.0.{name}": ("I32", np.ones((2, 2), np.int32)) for name in names}
    write_safetensors(tmp_path / "model.safetensors", tensors)
    if config:
        (tmp_path / "config.json").write_text("{}")
    refuses("source_unsupported", lambda: open_source(tmp_path), method)


@pytest.mark.parametrize("dtype, kind", [("I8", np.int8), ("U8", np.uint8), ("I32", np.int32), ("U32", np.uint32)])
def test_weights_in_integers_are_packed_somehow(tmp_path: Path, dtype: str, kind: type) -> None:
    write_safetensors(tmp_path / "m.safetensors", {"x.weight": (dtype, np.ones((2, 2), kind))})
    refuses("source_unsupported", lambda: open_source(tmp_path / "m.safetensors"), "m.safetensors: x.weight")


def test_other_integers_are_kept(tmp_path: Path) -> None:
    tensors: Arrays = {
        "position_ids": ("I64", np.arange(4)[None]),
        "attn.bias": ("U8", np.ones((1, 1, 2, 2), np.uint8)),
        "batch_norm.num_batches_tracked": ("I64", np.array(3)),
        "codes": ("I32", np.ones((2, 2), np.int32)),
    }
    write_safetensors(tmp_path / "m.safetensors", tensors)
    assert open_source(tmp_path / "m.safetensors").tensors.keys() == tensors.keys()


# 8-bit floats


def test_the_values_of_8_bit_floats() -> None:
    mx = pytest.importorskip("mlx.core")
    codes = np.arange(256, dtype=np.uint8)
    theirs = np.array(mx.from_fp8(mx.array(codes), dtype=mx.float32))
    ours = scaled.TABLES["f8_e4m3"]
    finite = np.isfinite(ours)
    assert finite.sum() == 254 and np.array_equal(ours[finite], theirs[finite])
    assert ours[0b0_1111_110] == 448 and ours[0b1_0000_001] == -(2.0**-9)
    assert scaled.TABLES["f8_e5m2"][[0x3C, 0xC0, 0x7B]].tolist() == [1, -2, 57344]
    assert scaled.TABLES["f8_e8m0"][[0, 127, 254]].tolist() == [2.0**-127, 1, 2.0**127]


def spread(scale: np.ndarray, rows: int, columns: int, shape: tuple[int, ...]) -> np.ndarray:
    """By definition: one scale for each block."""
    return np.repeat(np.repeat(scale, rows, -2), columns, -1)[..., : shape[-2], : shape[-1]]


@pytest.mark.parametrize(
    "suffix, shape, scale, block",
    [
        ("_scale_inv", (200, 300), (2, 3), (128, 128)),
        ("_scale_inv", (3, 130, 256), (3, 2, 2), (128, 128)),
        ("_scale_inv", (200, 300), (7, 10), (32, 32)),
        ("_scale_inv", (8, 8), (), None),
        ("_scale", (8, 40), (1,), None),
        ("_scale", (8, 40), (8,), None),
        ("_scale", (8, 40), (8, 1), None),
        ("_scale", (3, 8, 40), (3, 1, 40), None),
        ("_scale", (3, 8, 40), (3,), None),
        ("_scale", (8, 64), (8, 2), None),
    ],
)
@pytest.mark.parametrize("config", [True, False])
def test_fp8_is_made_dense(
    tmp_path: Path, suffix: str, shape: tuple[int, ...], scale: tuple[int, ...], block: Any, config: bool
) -> None:
    codes = rng().integers(0, 0x7E, shape, np.uint8)
    factors = rng().uniform(0.5, 2, scale).astype(np.float32)
    name = "model.x_proj.weight"
    tensors: Arrays = {
        name: ("F8_E4M3", codes),
        name + suffix: ("F32", factors),
        "model.x_proj.input_scale": ("F32", np.ones((), np.float32)),
        "model.norm.weight": ("F32", np.ones(4, np.float32)),
    }
    if config or block == (32, 32):
        entry = {"quant_method": "fp8"} | ({"weight_block_size": list(block)} if block else {})
        write_folder(tmp_path, {"dtype": "float16", "quantization_config": entry}, model=tensors)
    else:
        write_safetensors(tmp_path / "model.safetensors", tensors)
    if block is not None:
        wide = spread(factors, *block, shape)
    elif scale == (8, 2):
        wide = np.repeat(factors, 32, -1)
    elif len(scale) == 1 and scale != (1,):
        wide = factors.reshape(scale + (1,) * (len(shape) - 1))
    else:
        wide = factors
    dense = scaled.TABLES["f8_e4m3"][codes] * wide
    source = open_source(tmp_path)
    assert source.tensors.keys() == {name, "model.norm.weight"}
    tensor = source.tensors[name]
    assert (tensor.shape, tensor.dtype) == (shape, "f16" if source.config is not None else "bf16")
    assert np.array_equal(tensor.float32(), dense.astype(np.float32))
    kept = dense.astype(np.float16) if source.config is not None else to_bfloat16(dense.astype(np.float32))
    assert np.array_equal(tensor.read(), kept)
    assert tensor.rows is not None
    whole = tensor.float32().reshape(-1, shape[-1])
    for start, stop in ((0, 1), (1, 3), (5, whole.shape[0]), (0, whole.shape[0])):
        part = tensor.row_part(start, stop)
        assert part.shape == (stop - start, shape[-1])
        assert np.array_equal(part.float32(), whole[start:stop])
        assert np.array_equal(part.read(), tensor.read().reshape(whole.shape)[start:stop])
        assert np.array_equal(part.row_part(0, 1).float32(), whole[start : start + 1])


def test_fp8_as_mlx_lm_reads_it(tmp_path: Path) -> None:
    """DeepSeek's blocks, against the sanitize of its model."""
    mx = pytest.importorskip("mlx.core")
    codes, factors = rng().integers(0, 0x7E, (200, 300), np.uint8), rng().uniform(0.5, 2, (2, 3)).astype(np.float32)
    write_folder(tmp_path, {}, model={"x.weight": ("F8_E4M3", codes), "x.weight_scale_inv": ("F32", factors)})
    deepseek = pytest.importorskip("mlx_lm.models.deepseek_v3")

    class Arguments:
        num_hidden_layers, n_routed_experts = 0, 0

    model = deepseek.Model.__new__(deepseek.Model)
    object.__setattr__(model, "args", Arguments)
    theirs = deepseek.Model.sanitize(model, {"x.weight": mx.array(codes), "x.weight_scale_inv": mx.array(factors)})
    ours = open_source(tmp_path).tensors["x.weight"].read()
    assert np.array_equal(to_float32(ours, "bf16"), np.array(theirs["x.weight"].astype(mx.float32)))


def test_scales_that_are_powers_of_two(tmp_path: Path) -> None:
    codes, powers = rng().integers(0, 0x7E, (8, 64), np.uint8), rng().integers(120, 134, (8, 2), np.uint8)
    for dtype in ("F8_E8M0", "U8"):
        tensors: Arrays = {"x.weight": ("F8_E4M3", codes), "x.weight_scale_inv": (dtype, powers)}
        write_safetensors(tmp_path / "m.safetensors", tensors)
        dense = scaled.TABLES["f8_e4m3"][codes] * np.repeat(2.0 ** (powers - 127.0), 32, -1)
        assert np.array_equal(open_source(tmp_path / "m.safetensors").tensors["x.weight"].float32(), dense)


@pytest.mark.parametrize(
    "scale",
    [("F32", np.ones((3, 3), np.float32)), ("I32", np.ones((2, 2), np.int32)), ("F32", np.ones((4,), np.float32))],
)
def test_scales_that_do_not_fit(tmp_path: Path, scale: tuple[str, np.ndarray]) -> None:
    tensors: Arrays = {"x.weight": ("F8_E4M3", np.zeros((200, 200), np.uint8)), "x.weight_scale_inv": scale}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    refuses("source_invalid", lambda: open_source(tmp_path / "m.safetensors"), "x.weight")


def test_fp8_without_a_scale(tmp_path: Path) -> None:
    for dtype in ("F8_E4M3", "F8_E5M2", "F8_E8M0"):
        write_safetensors(tmp_path / "m.safetensors", {"x.weight": (dtype, np.zeros((2, 2), np.uint8))})
        refuses("source_unsupported", lambda: open_source(tmp_path / "m.safetensors"), "x.weight")


@pytest.mark.parametrize(
    "code, scale, part", [(0x7F, 1.0, "not finite"), (0x7E, 1e36, "bf16"), (0x7E, 3e38, "not finite")]
)
def test_weights_that_overflow_are_refused(tmp_path: Path, code: int, scale: float, part: str) -> None:
    if scale == 1e36:
        scale = float(np.float32(3.39e38 / 448 * 1.003))  # finite in float32, beyond bfloat16's largest
    tensors: Arrays = {
        "x.weight": ("F8_E4M3", np.full((2, 2), code, np.uint8)),
        "x.weight_scale": ("F32", np.array(scale, np.float32)),
    }
    write_safetensors(tmp_path / "m.safetensors", tensors)
    refuses("source_invalid", open_source(tmp_path / "m.safetensors").tensors["x.weight"].read, part)


def test_dense_values_of_mlx_weights_that_overflow(tmp_path: Path) -> None:
    words, scales = np.full((2, 8), 2**32 - 1, np.uint32), np.full((2, 1), 6e4, np.float16)
    parts: Arrays = {"x.weight": ("U32", words), "x.scales": ("F16", scales), "x.biases": ("F16", scales)}
    write_folder(tmp_path, {"quantization": {"group_size": 64, "bits": 4}}, model=parts)
    refuses("source_invalid", open_source(tmp_path).tensors["x.weight"].read, "f16")


# mxfp4


def test_mxfp4_is_made_dense(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    blocks = rng().integers(0, 256, (3, 6, 2, 16), np.uint8)
    scales = rng().integers(118, 134, (3, 6, 2), np.uint8)
    name = "model.layers.0.mlp.experts.gate_up_proj"
    tensors: Arrays = {f"{name}_blocks": ("U8", blocks), f"{name}_scales": ("U8", scales)}
    write_safetensors(tmp_path / "m.safetensors", tensors)
    (tensor,) = open_source(tmp_path / "m.safetensors").tensors.values()
    assert (tensor.name, tensor.dtype, tensor.shape) == (name, "bf16", (3, 64, 6))
    words = mx.array(np.ascontiguousarray(blocks.reshape(3, 6, 32)).view(np.uint32))
    theirs = np.array(mx.dequantize(words, mx.array(scales), group_size=32, bits=4, mode="mxfp4").astype(mx.float32))
    assert np.array_equal(tensor.float32(), theirs.swapaxes(1, 2))
    assert np.array_equal(to_float32(tensor.read(), "bf16"), tensor.float32())
    assert tensor.rows is not None
    assert np.array_equal(tensor.row_part(60, 130).float32(), tensor.float32().reshape(-1, 6)[60:130])


@pytest.mark.parametrize("shape", [(3, 6, 3), (3, 6), (3, 6, 2, 1)])
def test_mxfp4_that_does_not_fit(tmp_path: Path, shape: tuple[int, ...]) -> None:
    tensors: Arrays = {
        "experts.down_proj_blocks": ("U8", np.zeros((3, 6, 2, 16), np.uint8)),
        "experts.down_proj_scales": ("U8", np.zeros(shape, np.uint8)),
    }
    write_safetensors(tmp_path / "m.safetensors", tensors)
    refuses("source_invalid", lambda: open_source(tmp_path / "m.safetensors"), "down_proj_blocks")


def test_gpt_oss_as_it_is_published_gives_mlx_lms_logits(tmp_path: Path) -> None:
    mx = pytest.importorskip("mlx.core")
    load_model = pytest.importorskip("mlx_lm.utils").load_model
    import rsv_format
    import rsv_mlx
    from benchmarks.tiny_models import write_checkpoint

    write_checkpoint("gpt_oss", tmp_path / "m")
    weights = dict(mx.load(str(tmp_path / "m" / "model.safetensors")))
    packed = {}
    for name, weight in weights.items():
        owner, _, part = name.rpartition(".experts.")
        if not owner or part.startswith("up_proj"):
            packed |= {} if owner else {name: weight}
            continue
        gate = part.startswith("gate_proj")
        if gate:  # rows of gate and up by turns
            both = (weight, weights[f"{owner}.experts.up_proj.{part.split('.')[1]}"])
            weight = mx.stack(both, axis=2).reshape(weight.shape[0], -1, *weight.shape[2:])
        fused = f"{owner}.experts.{'gate_up_proj' if gate else 'down_proj'}"
        if part.endswith("bias"):
            packed[f"{fused}_bias"] = weight
        else:
            words, scales = mx.quantize(weight, 32, 4, mode="mxfp4")
            packed[f"{fused}_blocks"] = words.view(mx.uint8).reshape(*words.shape[:-1], -1, 16)
            packed[f"{fused}_scales"] = scales
    mx.save_safetensors(str(tmp_path / "m" / "model.safetensors"), packed)
    config = json.loads((tmp_path / "m" / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "m" / "config.json").write_text(json.dumps(config))
    rsv_format.quantize(tmp_path / "m", tmp_path / "m.rsv", bits=8, embedding_bits=8)
    loaded, report = rsv_mlx.load_model(tmp_path / "m.rsv", return_report=True)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    wanted, found = load_model(tmp_path / "m")[0](tokens), loaded(tokens)
    assert report.dense_nbytes == 0 and mx.linalg.norm(found - wanted) < 0.1 * mx.linalg.norm(wanted)
