"""The architecture table: norms that feed layers, layers that share an input."""

from __future__ import annotations

import pytest

from rsv_format.quantizer.importance import norm_gains, plain_name, share_groups

BLOCK = "model.layers.7"
Q, OUT, GATE, DOWN = (
    f"{BLOCK}.{part}" for part in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
)


@pytest.mark.parametrize("model_type", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_a_pre_norm_block(model_type: str) -> None:
    offset = 1.0 if model_type == "gemma" else 0.0
    assert norm_gains({"model_type": model_type}, [Q, OUT, GATE, DOWN]) == {
        Q: (f"{BLOCK}.input_layernorm.weight", offset),
        OUT: None,
        GATE: (f"{BLOCK}.post_attention_layernorm.weight", offset),
        DOWN: None,
    }


@pytest.mark.parametrize("model_type", ["gemma2", "gemma3_text"])
def test_gemma_norms_the_mlp_by_its_own_norm(model_type: str) -> None:
    assert norm_gains({"model_type": model_type}, [GATE])[GATE] == (
        f"{BLOCK}.pre_feedforward_layernorm.weight",
        1.0,
    )


@pytest.mark.parametrize(
    "model_type, part",
    [
        ("qwen3_moe", "mlp.switch_mlp.gate_proj"),
        ("qwen3_moe", "mlp.experts.11.up_proj"),
        ("qwen3_moe", "mlp.gate"),
        ("qwen2_moe", "mlp.shared_expert.up_proj"),
        ("mixtral", "block_sparse_moe.switch_mlp.up_proj"),
        ("mixtral", "block_sparse_moe.experts.0.w3"),
        ("mixtral", "block_sparse_moe.gate"),
        ("phi3", "mlp.gate_up_proj"),
    ],
)
def test_experts_router_and_fused_layers(model_type: str, part: str) -> None:
    name = f"{BLOCK}.{part}"
    assert norm_gains({"model_type": model_type}, [name])[name] == (
        f"{BLOCK}.post_attention_layernorm.weight",
        0.0,
    )


def test_the_output_of_experts_has_no_norm() -> None:
    names = [f"{BLOCK}.{part}" for part in ("mlp.switch_mlp.down_proj", "mlp.experts.0.down_proj")]
    assert norm_gains({"model_type": "qwen3_moe"}, names) == dict.fromkeys(names)


def test_a_text_model_inside_another() -> None:
    config = {"model_type": "llava", "text_config": {"model_type": "llama"}}
    name = f"language_model.{Q}"
    assert norm_gains(config, [name])[name] == (f"language_model.{BLOCK}.input_layernorm.weight", 0.0)


@pytest.mark.parametrize("config", [None, {}, {"model_type": "olmo2"}, {"model_type": ["llama"]}, {"text_config": 1}])
def test_nothing_is_known_of_other_models(config: dict[str, object] | None) -> None:
    assert norm_gains(config, [Q, "head"]) == {Q: None, "head": None}


def test_layers_share_an_input_within_their_parent_only() -> None:
    names = ["a.q_proj", "a.o_proj", "b.q_proj", "a.k_proj", "b.v_proj", "a.v_proj"]
    assert share_groups(names) == [
        ["a.q_proj", "a.k_proj", "a.v_proj"],
        ["a.o_proj"],
        ["b.q_proj", "b.v_proj"],
    ]


@pytest.mark.parametrize("group", [["gate_proj", "up_proj"], ["query", "key", "value"], ["w1", "w3"]])
def test_groups_by_suffix(group: list[str]) -> None:
    names = [f"x.switch_mlp.{part}" for part in group]
    assert share_groups([*names, "x.switch_mlp.down_proj", "x.w2"]) == [
        names,
        ["x.switch_mlp.down_proj"],
        ["x.w2"],
    ]


def test_cross_attention_shares_nothing() -> None:
    names = ["x.encoder_attn.q_proj", "x.encoder_attn.k_proj", "x.crossattention.self.query"]
    assert share_groups(names) == [[name] for name in names]


@pytest.mark.parametrize(
    "name, plain",
    [
        ("language_model.model.layers.3.self_attn.q_proj", "model.layers.3.self_attn.q_proj"),
        ("model.language_model.layers.3.mlp.switch_mlp.up_proj", "model.layers.3.mlp.switch_mlp.up_proj"),
        ("model.layers.3.mlp.experts.gate_proj", "model.layers.3.mlp.switch_mlp.gate_proj"),
        ("model.layers.3.experts.switch_glu.down_proj", "model.layers.3.mlp.switch_mlp.down_proj"),
        ("language_model.model.layers.3.feed_forward.experts.up_proj", "model.layers.3.mlp.switch_mlp.up_proj"),
        ("vision_tower.encoder.layers.3.self_attn.q_proj", "vision_tower.encoder.layers.3.self_attn.q_proj"),
        ("lm_head", "lm_head"),
    ],
)
def test_plain_names(name: str, plain: str) -> None:
    assert plain_name(name) == plain
