"""A model of mlx-lm with random weights, written as llama.cpp's converter does and read back, gives its logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsv_format.sources import open_source

gguf = pytest.importorskip("gguf")
mx = pytest.importorskip("mlx.core")
pytest.importorskip("mlx_lm")
import mlx.utils  # noqa: E402
from gguf_models import HEAD_DIM, HEADS, INNER, KV_HEADS, ROWS, WIDTH, interleaved, write_file  # noqa: E402
from mlx_lm.utils import _get_classes  # noqa: E402

BLOCKS, EXPERTS = 2, 4
COMMON = {
    "hidden_size": WIDTH, "num_hidden_layers": BLOCKS, "intermediate_size": INNER, "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "head_dim": HEAD_DIM, "rms_norm_eps": 1e-5, "vocab_size": ROWS,
    "max_position_embeddings": 512, "rope_theta": 10000.0, "tie_word_embeddings": True,
}  # fmt: skip
MOE = {
    "num_experts": EXPERTS, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True,
    "decoder_sparse_step": 1, "mlp_only_layers": [],
}  # fmt: skip
MOE_KEYS = {"expert_count": EXPERTS, "expert_used_count": 2, "expert_feed_forward_length": 32}
YARN = {"type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}

# name: architecture, config, metadata beside that of all
FAMILIES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "llama": ("llama", {"model_type": "llama", "tie_word_embeddings": False}, {}),
    "llama with biases": ("llama", {"model_type": "llama", "attention_bias": True, "mlp_bias": True}, {}),
    "llama, linear": (
        "llama",
        {"model_type": "llama", "rope_scaling": {"type": "linear", "factor": 4.0}},
        {"rope.scale_linear": 4.0},
    ),
    "llama, yarn": (
        "llama",
        {"model_type": "llama", "rope_scaling": {**YARN, "original_max_position_embeddings": 512}},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0},
    ),
    "mixtral": (
        "llama",
        {"model_type": "mixtral", "num_local_experts": EXPERTS, "num_experts_per_tok": 2, "tie_word_embeddings": False},
        {"expert_count": EXPERTS, "expert_used_count": 2},
    ),
    "qwen2": ("qwen2", {"model_type": "qwen2"}, {}),
    "qwen2, yarn": (
        "qwen2",
        {"model_type": "qwen2", "rope_scaling": YARN},
        {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0, "rope.scaling.original_context_length": 128},
    ),
    "qwen3": ("qwen3", {"model_type": "qwen3"}, {}),
    "qwen2_moe": (
        "qwen2moe",
        {"model_type": "qwen2_moe", **MOE, "shared_expert_intermediate_size": 48},
        {**MOE_KEYS, "expert_shared_feed_forward_length": 48},
    ),
    "qwen3_moe": ("qwen3moe", {"model_type": "qwen3_moe", **MOE}, MOE_KEYS),
    "gemma": ("gemma", {"model_type": "gemma"}, {}),
    "gemma2": ("gemma2", {"model_type": "gemma2", "query_pre_attn_scalar": HEAD_DIM}, {}),
    "gemma3": (
        "gemma3",
        {"model_type": "gemma3_text", "query_pre_attn_scalar": HEAD_DIM, "sliding_window": 8,
         "sliding_window_pattern": 2, "rope_scaling": {"type": "linear", "factor": 8.0}},
        {"attention.sliding_window": 8, "attention.sliding_window_pattern": 2, "rope.scaling.factor": 8.0},
    ),
    "gemma3 without windows": (
        "gemma3",
        {"model_type": "gemma3_text", "query_pre_attn_scalar": HEAD_DIM, "sliding_window_pattern": 1},
        {},
    ),
}  # fmt: skip


def converted(arch: str, config: dict[str, Any], weights: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
    """Weights by mlx-lm's names as llama.cpp's converter writes them, by the gguf package's table of names."""
    kind = next(kind for kind, name in gguf.MODEL_ARCH_NAMES.items() if name == arch)
    names = gguf.get_tensor_name_map(kind, BLOCKS)
    tensors = {}
    for name, value in weights.items():
        stem, _, part = name.replace("switch_mlp", "experts").rpartition(".")
        stem = stem.replace("block_sparse_moe.experts", "mlp.experts")
        if arch == "llama" and ("q_proj" in name or "k_proj" in name):
            value = interleaved(value, HEADS if "q_proj" in name else KV_HEADS)
        if arch.startswith("gemma") and name.endswith("norm.weight"):
            value = value + 1
        tensors[f"{names.get_name(stem)}.{part}"] = value.reshape(-1) if "shared_expert_gate" in name else value
    return tensors


@pytest.mark.parametrize("family", FAMILIES)
def test_logits_are_those_of_the_model(tmp_path: Path, family: str) -> None:
    arch, own, keys = FAMILIES[family]
    config = {**COMMON, **own}
    model_class, args_class = _get_classes(config)
    model = model_class(args_class.from_dict(config))
    g = np.random.default_rng(len(family))
    weights = {
        name: (0.2 * g.standard_normal(value.shape) + name.endswith("norm.weight")).astype(np.float32)
        for name, value in mlx.utils.tree_flatten(model.parameters())
    }
    tokens = mx.array([g.integers(0, ROWS, 30).tolist()])
    model.load_weights([(name, mx.array(value)) for name, value in weights.items()])
    want = np.array(model(tokens))

    names = ("context_length", "embedding_length", "block_count", "feed_forward_length", "attention.head_count",
             "attention.head_count_kv", "attention.key_length", "attention.layer_norm_rms_epsilon",
             "rope.freq_base")  # fmt: skip
    values = (512, WIDTH, BLOCKS, INNER, HEADS, KV_HEADS, HEAD_DIM, 1e-5, config["rope_theta"])
    metadata = {**dict(zip(names, values, strict=True)), **keys}
    metadata = {f"{arch}.{name}": value for name, value in metadata.items()}
    path = write_file(tmp_path / "m.gguf", arch, metadata, converted(arch, config, weights))
    with open_source(path) as source:
        assert source.config is not None and source.config["model_type"] == config["model_type"]
        again = model_class(args_class.from_dict(source.config))
        again.load_weights([(name, mx.array(tensor.float32())) for name, tensor in source.tensors.items()])
    assert np.allclose(np.array(again(tokens)), want, rtol=1e-4, atol=1e-4)
