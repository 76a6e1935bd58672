"""Experts in every layout that checkpoints have: stacks in the file, packed in memory, mlx-lm's logits."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

import rsv_format
from rsv_format import Source, SourceTensor
from rsv_format.dtypes import to_bfloat16, to_float32
from rsv_format.sources.experts import stack_experts

OWNER = "model.layers.0.mlp"
COUNT, MIDDLE, WIDTH = 3, 4, 6


def source(config: dict[str, Any], **tensors: np.ndarray) -> Source:
    def tensor(name: str, array: np.ndarray) -> SourceTensor:
        return SourceTensor(name, "f32", array.shape, lambda: array, lambda: array)

    return Source("test", "", {name: tensor(name, array) for name, array in tensors.items()}, config)


def normal(*shape: int) -> np.ndarray:
    return np.random.default_rng(sum(shape)).standard_normal(shape).astype(np.float32)


GATE_UP, DOWN = normal(COUNT, 2 * MIDDLE, WIDTH), normal(COUNT, WIDTH, MIDDLE)


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize(
    "family, names, holder, interleaved",
    [
        ("qwen3_5_moe", ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "mlp.switch_mlp", False),
        ("qwen3_moe", ("mlp.experts.gate_up_proj.weight", "mlp.experts.down_proj.weight"), "mlp.switch_mlp", False),
        ("llama4", ("feed_forward.experts.gate_up_proj", "feed_forward.experts.down_proj"), "feed_forward.experts", 0),
        ("gemma4", ("experts.gate_up_proj", "experts.down_proj"), "experts.switch_glu", False),
        ("gpt_oss", ("mlp.experts.gate_up_proj", "mlp.experts.down_proj"), "mlp.experts", True),
        ("granitemoe", ("moe.input_linear.weight", "moe.output_linear.weight"), "moe.switch_mlp", False),
    ],
)
def test_fused_experts_are_three_stacks(
    family: str, names: tuple[str, str], holder: str, interleaved: bool, turned: bool
) -> None:
    axes = (0, 2, 1) if turned else (0, 1, 2)
    tensors = {f"block.{name}": x.transpose(axes) for name, x in zip(names, (GATE_UP, DOWN), strict=True)}
    found = stack_experts(source({"text_config": {"model_type": family}}, **tensors)).tensors
    gate, up = (GATE_UP[:, ::2], GATE_UP[:, 1::2]) if interleaved else (GATE_UP[:, :MIDDLE], GATE_UP[:, MIDDLE:])
    assert found.keys() == {f"block.{holder}.{part}_proj.weight" for part in ("gate", "up", "down")}
    for part, wanted in (("gate", gate), ("up", up), ("down", DOWN)):
        tensor = found[f"block.{holder}.{part}_proj.weight"]
        assert tensor.shape == wanted.shape and np.array_equal(tensor.read(), wanted)
        assert np.array_equal(tensor.float32(), wanted) and tensor.float32().flags.c_contiguous
        whole = names[1 if part == "down" else 0]
        assert [x.name for x in tensor.experts] == [f"block.{whole}"]  # patterns and importances know it


def test_square_experts_lie_as_their_gates_do() -> None:
    gate_up, down = normal(2, 8, 16), normal(2, 8, 8)
    names = f"{OWNER}.experts.gate_up_proj", f"{OWNER}.experts.down_proj"
    found = stack_experts(source({"model_type": "gpt_oss"}, **dict(zip(names, (gate_up, down), strict=True)))).tensors
    assert np.array_equal(found[f"{OWNER}.experts.up_proj.weight"].read(), gate_up.swapaxes(1, 2)[:, 1::2])
    assert np.array_equal(found[f"{OWNER}.experts.down_proj.weight"].read(), down.swapaxes(1, 2))


@pytest.mark.parametrize("experts", [0, 4])
def test_the_mlp_of_a_granite_without_experts_is_split_as_well(experts: int) -> None:
    names = [f"model.layers.0.shared_mlp.{part}_linear.weight" for part in ("input", "output")]
    config = {"model_type": "granitemoehybrid", "num_local_experts": experts}
    found = stack_experts(source(config, **dict(zip(names, (GATE_UP[0], DOWN[0]), strict=True)))).tensors
    if experts:  # there mlx-lm's module has the fused matrix
        assert list(found) == names
        return
    assert np.array_equal(found["model.layers.0.mlp.gate_proj.weight"].read(), GATE_UP[0, :MIDDLE])
    assert np.array_equal(found["model.layers.0.mlp.up_proj.weight"].float32(), GATE_UP[0, MIDDLE:])
    assert np.array_equal(found["model.layers.0.mlp.down_proj.weight"].read(), DOWN[0])


@pytest.mark.parametrize("end", ["_bias", ".bias"])
def test_fused_biases_are_split_as_the_rows_are(end: str) -> None:
    biases = {f"{OWNER}.experts.gate_up_proj{end}": normal(3, 8), f"{OWNER}.experts.down_proj{end}": normal(3, 6)}
    tensors = {f"{OWNER}.experts.gate_up_proj": GATE_UP, f"{OWNER}.experts.down_proj": DOWN} | biases
    found = stack_experts(source({"model_type": "gpt_oss"}, **tensors)).tensors
    both, down = biases.values()
    assert len(found) == 6
    assert np.array_equal(found[f"{OWNER}.experts.gate_proj.bias"].read(), both[:, ::2])
    assert np.array_equal(found[f"{OWNER}.experts.up_proj.bias"].read(), both[:, 1::2])
    assert np.array_equal(found[f"{OWNER}.experts.down_proj.bias"].read(), down)


@pytest.mark.parametrize(
    "family, gate_up, down",
    [("t5", (3, 8, 6), (3, 6, 4)), ("qwen3_moe", (3, 8, 6), (3, 6, 5)), ("qwen3_moe", (3, 8, 6), (2, 6, 4))],
)
def test_experts_of_no_known_layout_are_kept_and_named(
    family: str, gate_up: tuple[int, ...], down: tuple[int, ...], tmp_path: Path
) -> None:
    tensors = {f"{OWNER}.experts.gate_up_proj": normal(*gate_up), f"{OWNER}.experts.down_proj": normal(*down)}
    tensors["model.layers.0.self_attn.q_proj.weight"] = normal(6, 6)
    report = rsv_format.quantize(source({"model_type": family}, **tensors), tmp_path / "a.rsv")
    assert {(x.family, x.reason) for x in report.summary.kept} == {
        ("model.layers.*.mlp.experts.gate_up_proj", "experts in no known layout"),
        ("model.layers.*.mlp.experts.down_proj", "experts in no known layout"),
    }
    assert report.summary.share == 36 / (36 + tensors[f"{OWNER}.experts.gate_up_proj"].size
                                         + tensors[f"{OWNER}.experts.down_proj"].size)  # fmt: skip


def test_dbrx_experts_come_apart() -> None:
    name, given = "transformer.blocks.0.ffn.experts", {"model_type": "dbrx", "ffn_config": {"moe_num_experts": 3}}
    tensors = {f"{name}.mlp.{part}": normal(12, 6) for part in ("v1", "w1", "w2")}
    found = stack_experts(source(given, **tensors)).tensors
    assert found.keys() == {f"{name}.{i}.{part}.weight" for i in range(3) for part in ("v1", "w1", "w2")}
    assert np.array_equal(found[f"{name}.1.w1.weight"].read(), tensors[f"{name}.mlp.w1"][4:8])
    assert np.array_equal(found[f"{name}.2.w2.weight"].float32(), tensors[f"{name}.mlp.w2"][8:].T)
    odd = given | {"ffn_config": {"moe_num_experts": 5}}
    assert stack_experts(source(odd, **tensors)).tensors.keys() == tensors.keys()


def test_qwen3_next_is_converted_once() -> None:
    """Stacks tell mlx-lm that norms and convolutions are converted, too."""
    gain = to_float32(to_bfloat16(normal(6)), "bf16")
    tensors = {f"{OWNER}.experts.{i}.up_proj.weight": normal(4, 6) for i in range(2)} | {
        "model.norm.weight": gain, "model.layers.0.linear_attn.conv1d.weight": normal(6, 1, 4),
        "mtp.fc.weight": normal(4, 4), "lm_head.weight": normal(8, 6), "model.layers.0.linear_attn.norm.weight": gain,
    }  # fmt: skip
    apart = source({"model_type": "qwen3_next", "tie_word_embeddings": True}, **tensors)
    bits = to_bfloat16(gain)
    apart.tensors["model.norm.weight"] = SourceTensor("model.norm.weight", "bf16", (6,), lambda: bits, lambda: gain)
    stacked = stack_experts(apart)
    assert stacked.tensors.keys() == {
        f"{OWNER}.switch_mlp.up_proj.weight", "model.norm.weight", "model.layers.0.linear_attn.conv1d.weight",
        "model.layers.0.linear_attn.norm.weight",
    }  # fmt: skip
    assert np.array_equal(stacked.tensors["model.norm.weight"].read(), to_bfloat16(gain + 1))
    assert np.array_equal(stacked.tensors["model.norm.weight"].float32(), gain + 1)
    assert np.array_equal(stacked.tensors["model.layers.0.linear_attn.norm.weight"].read(), gain)
    convolution = stacked.tensors["model.layers.0.linear_attn.conv1d.weight"]
    assert np.array_equal(convolution.read(), tensors[convolution.name].swapaxes(1, 2))
    assert convolution.shape == (6, 4, 1)
    again = stack_experts(stacked).tensors
    assert all(again[name] is tensor for name, tensor in stacked.tensors.items())


@pytest.mark.parametrize("turned", [False, True])
@pytest.mark.parametrize("dtype", [np.float32, np.float16])
def test_experts_of_a_file_are_read_one_by_one(tmp_path: Path, turned: bool, dtype: Any) -> None:
    axes = (0, 2, 1) if turned else (0, 1, 2)
    tensors = {f"{OWNER}.experts.{name}_proj": np.ascontiguousarray(x.transpose(axes).astype(dtype))
               for name, x in (("gate_up", GATE_UP), ("down", DOWN))}  # fmt: skip
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text('{"model_type": "qwen3_5_moe"}')
    with rsv_format.open_source(tmp_path) as opened:
        found = opened.tensors[f"{OWNER}.switch_mlp.up_proj.weight"]
        wanted = GATE_UP[:, MIDDLE:].astype(dtype)
        assert np.array_equal(found.read(), wanted) and np.array_equal(found.float32(), wanted.astype(np.float32))
        assert [(x.name, x.shape) for x in found.experts] == [(f"{OWNER}.experts.gate_up_proj", (MIDDLE, WIDTH))] * 3
        assert np.array_equal(found.experts[1].float32(), wanted[1].astype(np.float32))


# importance of experts


def importances(path: Path, entries: dict[str, list[float]]) -> Path:
    """llama.cpp's older format."""
    data = struct.pack("<i", len(entries))
    for name, values in entries.items():
        data += struct.pack("<i", len(name)) + name.encode() + struct.pack("<ii", 1, len(values))
        data += np.array(values, "<f4").tobytes()
    path.write_bytes(data)
    return path


@pytest.mark.parametrize("router", [True, False])
def test_an_old_importance_matrix_may_lack_the_router(router: bool, tmp_path: Path) -> None:
    """Then the layer tells the number of experts, whose values lie one after the other."""
    per_expert = np.arange(1.0, 1 + COUNT * WIDTH).reshape(COUNT, WIDTH)
    entries = {"blk.0.ffn_gate_up_exps.weight": per_expert.ravel().tolist()}
    entries |= {"blk.0.ffn_gate_inp.weight": [1.0] * WIDTH} if router else {}
    file = importances(tmp_path / "i.dat", entries)
    tensors = {"model.language_model.layers.0.mlp.experts.gate_up_proj": GATE_UP,
               "model.language_model.layers.0.mlp.experts.down_proj": DOWN}  # fmt: skip
    given, layer = source({"model_type": "gpt_oss"}, **tensors), "model.language_model.layers.0.mlp.experts.up_proj"
    report = rsv_format.quantize(given, tmp_path / "a.rsv", importance=file)
    assert report.weighted_layers == 2  # gate and up, whose input it is
    means = {layer: per_expert.mean(axis=0)}
    rsv_format.quantize(given, tmp_path / "b.rsv", importance=means)
    assert (tmp_path / "a.rsv").read_bytes() == (tmp_path / "b.rsv").read_bytes()


# on mlx-lm's models


PUBLISHED = (
    "afmoe", "bailing_hybrid", "dbrx", "deepseek_v32", "gemma4_text", "granitemoe", "kimi_linear", "llama4",
    "longcat_flash", "minimax_m3_vl", "mistral4", "nemotron_h", "phixtral", "qwen3_5_moe", "qwen3_next",
    "qwen3_vl_moe", "step3p5",
)  # fmt: skip


@pytest.mark.parametrize("name, layout", [*((x, "published") for x in PUBLISHED), ("dots1", "mlx"), ("gpt_oss", "mlx")])
def test_experts_of_a_checkpoint_are_packed_and_right(name: str, layout: str, tmp_path: Path) -> None:
    pytest.importorskip("mlx_lm")
    from benchmarks.architectures import examine

    row = examine(name, layout, tmp_path)
    assert row.verdict == "right"
    assert row.packed_in_file == row.packed_in_memory == row.experts and (row.experts or name == "dbrx")
    assert row.share > 0.97


def test_all_architectures_of_mlx_lm_are_tried() -> None:
    mlx_lm = pytest.importorskip("mlx_lm")
    from mlx_lm.utils import MODEL_REMAPPING

    from benchmarks.tiny_models import ARCHITECTURES, LEFT_OUT

    paths = (Path(mlx_lm.__file__).parent / "models").glob("*.py")
    modules = {path.stem for path in paths if "class ModelArgs" in path.read_text("utf-8")}
    assert modules == {MODEL_REMAPPING.get(name, name) for name in ARCHITECTURES} | LEFT_OUT.keys()


def test_fused_experts_that_mlx_lm_would_not_load(tmp_path: Path) -> None:
    """As transformers 5 saves them: Qwen3 MoE with one parameter for all gates and ups of a block."""
    pytest.importorskip("mlx_lm")
    import mlx.core as mx

    import rsv_mlx
    from benchmarks.tiny_models import fused_experts, tiny_model, write_checkpoint

    model, _ = tiny_model("qwen3_moe")
    write_checkpoint("qwen3_moe", tmp_path / "m", fused_experts())
    rsv_format.quantize(tmp_path / "m", tmp_path / "m.rsv", bits=8)
    loaded, report = rsv_mlx.load_model(tmp_path / "m.rsv", return_report=True)
    tokens = mx.array([[3, 1, 4, 1, 5, 9, 2, 6]])
    wanted, found = model(tokens), loaded(tokens)
    assert report.dense_nbytes == 0 and mx.linalg.norm(found - wanted) < 0.15 * mx.linalg.norm(wanted)
    assert json.loads((tmp_path / "m" / "config.json").read_text())["model_type"] == "qwen3_moe"
