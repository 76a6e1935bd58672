"""What tensors are for, by their names and shapes, in checkpoints and module trees."""

from __future__ import annotations

import pytest

from rsv_format import Role, layer_role
from rsv_format.roles import tensor_role

BLOCK = "model.layers.3"


@pytest.mark.parametrize(
    "name",
    [
        "mlp.gate", "mlp.shared_expert_gate", "block_sparse_moe.gate", "block_sparse_moe.router.layer", "mlp.router",
        "mlp.gate.gate_proj", "mlp.gate.wg", "mlp.gate.proj", "mlp.gate.gate", "moe.gate", "ffn.router.layer",
        "mlp.router.classifier", "router.proj", "mlp.router.gate", "feed_forward.router", "mlp.coefficient",
        "altup.modality_router", "mixer.gate", "feed_forward.gate", "moe_router.dense",
    ],
)  # fmt: skip
def test_routers(name: str) -> None:
    assert layer_role(f"{BLOCK}.{name}") is Role.ROUTER
    assert tensor_role(f"{BLOCK}.{name}.weight", "bf16", (8, 64)) is Role.ROUTER


@pytest.mark.parametrize(
    "name",
    [
        "model.embed_tokens", "language_model.model.embed_tokens", "model.embed_tokens_per_layer", "lm_head",
        "language_model.lm_head", "lm_head.linear", "transformer.wte", "backbone.embeddings", "model.embeddings",
        "model.tok_embeddings", "transformer.token_embeddings", "model.word_embeddings", "gpt_neox.embed_in",
        "embed_out", "model.embed_out", "model.embedding", "model.embed", "output", "model.output", "shared",
        "embeddings.word_embeddings", "model.ngram_embeddings.embedders.2", "transformer.ff_out",
        "transformer.embd.wte",
    ],
)  # fmt: skip
def test_tables(name: str) -> None:
    assert layer_role(name) is Role.TABLE
    assert tensor_role(f"{name}.weight", "f16", (256, 64)) is Role.TABLE


@pytest.mark.parametrize(
    "name",
    [
        f"{BLOCK}.mlp.gate_proj", f"{BLOCK}.self_attn.g_proj", f"{BLOCK}.attention.output.dense", "pooler.dense",
        "transformer.blocks.0.ff_out", f"{BLOCK}.mlp.experts.3.w1", f"{BLOCK}.conv.in_proj", f"{BLOCK}.attn.lora.2",
        "altup_unembed_projections.0", "model.embed_vision.embedding_projection", f"{BLOCK}.mlp.shared_expert.up_proj",
        "model.ngram_embeddings.post_projs.1", f"{BLOCK}.per_layer_input_gate", f"{BLOCK}.attention.output",
    ],
)  # fmt: skip
def test_linear_layers(name: str) -> None:
    assert layer_role(name) is Role.LINEAR
    assert tensor_role(f"{name}.weight", "f32", (64, 64)) is Role.LINEAR


@pytest.mark.parametrize(
    "name, dtype, shape, role",
    [
        (f"{BLOCK}.mlp.switch_mlp.up_proj.weight", "bf16", (4, 8, 8), Role.STACK),
        (f"{BLOCK}.mlp.experts.up_proj.weight", "bf16", (4, 8, 8), Role.STACK),
        (f"{BLOCK}.experts.switch_glu.up_proj.weight", "bf16", (4, 8, 8), Role.STACK),
        (f"{BLOCK}.moe.up_proj.weight", "bf16", (4, 8, 8), Role.STACK),
        (f"{BLOCK}.mlp.experts.gate_up_proj", "bf16", (4, 8, 8), Role.EXPERTS),
        (f"{BLOCK}.mlp.up_proj.weight", "bf16", (4, 8, 8), Role.NO_MATRIX),
        (f"{BLOCK}.mlp.switch_mlp.up_proj.weight", "bf16", (8, 8), Role.NO_MATRIX),
        (f"{BLOCK}.self_attn.embed_q.weight", "bf16", (4, 8, 8), Role.NO_MATRIX),
        (f"{BLOCK}.mlp.up_proj.weight", "u32", (8, 8), Role.NO_FLOATS),
        (f"{BLOCK}.mlp.up_proj.bias", "f32", (8,), Role.VECTOR),
        (f"{BLOCK}.mamba.A_log", "f32", (8, 8), Role.PARAMETER),
        ("weight", "f32", (8, 8), Role.PARAMETER),
        (f"{BLOCK}.mamba.conv1d.weight", "f32", (8, 1, 4), Role.CONVOLUTION),
        (f"{BLOCK}.self_attn.q_norm.weight", "f32", (8, 8), Role.NORM),
        ("transformer.wpe.weight", "f32", (8, 8), Role.POSITIONS),
        ("embeddings.position_embeddings.weight", "f32", (8, 8), Role.POSITIONS),
        ("embeddings.token_type_embeddings.weight", "f32", (2, 8), Role.POSITIONS),
        (f"{BLOCK}.self_attn.relative_attention_bias.weight", "f32", (8, 8), Role.POSITIONS),
        (f"{BLOCK}.altup.prediction_coefs.weight", "f32", (16, 4), Role.COEFFICIENTS),
        (f"{BLOCK}.mlp_res_proj.weight", "f32", (1, 64), Role.COEFFICIENTS),
        ("model.gate_projections.1.weight", "f32", (4, 16), Role.COEFFICIENTS),
    ],
)
def test_tensors(name: str, dtype: str, shape: tuple[int, ...], role: Role) -> None:
    assert tensor_role(name, dtype, shape) is role
    assert role.is_quantized == (role is Role.STACK)
