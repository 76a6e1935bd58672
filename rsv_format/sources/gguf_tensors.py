"""Which tensors a model of a GGUF architecture has, and of what shapes: what a file must hold, no more and no less."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.sources.base import SourceTensor, dense_tensor
from rsv_format.sources.gguf_names import gguf_name

Shapes = dict[str, tuple[int, ...]]


def completed(tensors: Mapping[str, SourceTensor], config: Mapping[str, Any], where: str) -> dict[str, SourceTensor]:
    """Tensors, by their Hugging Face names, compared with a config; biases that no block has become zeros.

    Raises
    ------
    RsvError
        `source_invalid` where one is missing or of another shape, `source_unsupported` where the model has no use
        for one.
    """
    if config["num_hidden_layers"] > len(tensors):
        detail = f"there are {len(tensors)} tensors for {config['num_hidden_layers']} blocks"
        raise RsvError("source_invalid", where, detail)
    expected, model_type = _expected(config), str(config["model_type"])
    biases = {_in_block(name) for name in tensors if name.endswith(".bias")}
    zeros = {name for name in expected if name.endswith(".bias") and _in_block(name) not in biases}
    if missing := [name for name in expected if name not in tensors and name not in zeros]:
        detail = f"is missing, of {len(expected)} tensors that the model has {len(missing)} are"
        raise RsvError("source_invalid", f"{where}: {gguf_name(missing[0], model_type)}", detail)
    for name, tensor in tensors.items():
        place = f"{where}: {gguf_name(name, model_type)}"
        if name not in expected:
            detail = f"is not a tensor of {model_type} models of {config['num_hidden_layers']} blocks"
            raise RsvError("source_unsupported", place, detail)
        if tensor.shape != expected[name]:
            raise RsvError("source_invalid", place, f"has the shape {tensor.shape}, not {expected[name]}")
    return {**tensors, **{name: _zeros(name, expected[name]) for name in expected if name in zeros}}


def _in_block(name: str) -> str:
    """A name without its block: model.layers.3.self_attn.q_proj.bias -> self_attn.q_proj.bias."""
    return name.split(".", 3)[-1]


def _zeros(name: str, shape: tuple[int, ...]) -> SourceTensor:
    return dense_tensor(name, "f32", shape, lambda: np.zeros(shape, np.float32))


def _expected(config: Mapping[str, Any]) -> Shapes:
    width, table = config["hidden_size"], (config["vocab_size"], config["hidden_size"])
    shapes: Shapes = {"model.embed_tokens.weight": table, "model.norm.weight": (width,)}
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = table
    block = {**_attention(config), **_norms(config), **_mlp(config)}
    for i in range(config["num_hidden_layers"]):
        shapes |= {f"model.layers.{i}.{name}": shape for name, shape in block.items()}
    return shapes


def _attention(config: Mapping[str, Any]) -> Shapes:
    width, head_dim, model_type = config["hidden_size"], config["head_dim"], config["model_type"]
    queries, keys = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    rows = {"q_proj": queries, "k_proj": keys, "v_proj": keys}
    shapes: Shapes = {f"self_attn.{name}.weight": (n, width) for name, n in rows.items()}
    shapes["self_attn.o_proj.weight"] = (width, queries)
    if model_type in ("qwen2", "qwen2_moe") or config.get("attention_bias"):
        shapes |= {f"self_attn.{name}.bias": (n,) for name, n in rows.items()}
    if config.get("attention_bias"):
        shapes["self_attn.o_proj.bias"] = (width,)
    if model_type in ("qwen3", "qwen3_moe", "gemma3_text"):
        shapes |= {f"self_attn.{name}_norm.weight": (head_dim,) for name in "qk"}
    return shapes


def _norms(config: Mapping[str, Any]) -> Shapes:
    names = ["input_layernorm", "post_attention_layernorm"]
    if config["model_type"] in ("gemma2", "gemma3_text"):
        names += ["pre_feedforward_layernorm", "post_feedforward_layernorm"]
    return {f"{name}.weight": (config["hidden_size"],) for name in names}


def _mlp(config: Mapping[str, Any]) -> Shapes:
    width, model_type = config["hidden_size"], config["model_type"]
    if model_type == "mixtral":
        count = config["num_local_experts"]
        stacks = _gated("block_sparse_moe.switch_mlp", config["intermediate_size"], width, count)
        return {"block_sparse_moe.gate.weight": (count, width), **stacks}
    if model_type in ("qwen2_moe", "qwen3_moe"):
        count = config["num_experts"]
        shapes = _gated("mlp.switch_mlp", config["moe_intermediate_size"], width, count)
        shapes["mlp.gate.weight"] = (count, width)
        if model_type == "qwen2_moe":
            shapes |= _gated("mlp.shared_expert", config["shared_expert_intermediate_size"], width)
            shapes["mlp.shared_expert_gate.weight"] = (1, width)
        return shapes
    shapes = _gated("mlp", config["intermediate_size"], width)
    if config.get("mlp_bias"):
        shapes |= {name.replace(".weight", ".bias"): shape[:1] for name, shape in shapes.items()}
    return shapes


def _gated(owner: str, inner: int, width: int, *stack: int) -> Shapes:
    sides = {"gate_proj": (inner, width), "up_proj": (inner, width), "down_proj": (width, inner)}
    return {f"{owner}.{name}.weight": (*stack, *shape) for name, shape in sides.items()}
