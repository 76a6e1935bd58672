"""The Hugging Face config of a GGUF model, complete enough for mlx-lm's model class."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.sources.base import Floats
from rsv_format.sources.gguf_reader import Metadata


@dataclass(frozen=True)
class Architecture:
    """What Hugging Face calls one of llama.cpp's architectures, and how its tensors differ from there."""

    model_type: str
    model_class: str
    interleaved_rope: bool = False  # the rows of q and k are permuted for llama.cpp's rope
    norm_offset: float = 0.0  # what llama.cpp has added to every norm's gain


_ARCHITECTURES = {
    "llama": Architecture("llama", "LlamaForCausalLM", interleaved_rope=True),
    "qwen2": Architecture("qwen2", "Qwen2ForCausalLM"),
    "qwen3": Architecture("qwen3", "Qwen3ForCausalLM"),
    "qwen2moe": Architecture("qwen2_moe", "Qwen2MoeForCausalLM"),
    "qwen3moe": Architecture("qwen3_moe", "Qwen3MoeForCausalLM"),
    "gemma": Architecture("gemma", "GemmaForCausalLM", norm_offset=1.0),
    "gemma2": Architecture("gemma2", "Gemma2ForCausalLM", norm_offset=1.0),
    "gemma3": Architecture("gemma3_text", "Gemma3ForCausalLM", norm_offset=1.0),
}
_MIXTRAL = Architecture("mixtral", "MixtralForCausalLM", interleaved_rope=True)  # llama.cpp calls it llama, too

# The one model of each family, by depth, whose queries are scaled by hidden_size / heads, not head_dim.
_QUERY_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}

# Llama 3's rope scaling, of which llama.cpp keeps only the resulting divisors.
_LOW_FREQ_FACTOR, _HIGH_FREQ_FACTOR, _ORIGINAL_CONTEXT = 1.0, 4.0, 8192


def architecture(metadata: Metadata) -> Architecture:
    """The architecture of a GGUF model; `source_unsupported` naming it when it is not in the table."""
    name = metadata.require("general.architecture", str)
    if name not in _ARCHITECTURES:
        raise RsvError("source_unsupported", metadata.where, f"models of architecture {name!r} cannot be read")
    if name == "llama" and (metadata.get("llama.expert_count", int) or 0) > 0:
        return _MIXTRAL
    return _ARCHITECTURES[name]


def build_config(
    metadata: Metadata,
    kind: Architecture,
    tensors: Collection[str],
    vocab_size: int,
    dtype: str,
    rope_factors: Floats | None,
) -> dict[str, Any]:
    """The config; `tensors` are Hugging Face names, `rope_factors` the contents of rope_freqs.weight."""
    prefix = metadata.require("general.architecture", str)
    hidden, heads = (
        metadata.positive(f"{prefix}.embedding_length"),
        head_count(metadata, f"{prefix}.attention.head_count"),
    )
    head_dim = metadata.get(f"{prefix}.attention.key_length", int) or hidden // heads
    if (metadata.get(f"{prefix}.rope.dimension_count", int) or head_dim) != head_dim:
        raise RsvError("source_unsupported", metadata.where, "rotates only a part of each head")
    config: dict[str, Any] = {
        "model_type": kind.model_type,
        "architectures": [kind.model_class],
        "torch_dtype": dtype,
        "hidden_size": hidden,
        "num_hidden_layers": metadata.positive(f"{prefix}.block_count"),
        "intermediate_size": metadata.positive(f"{prefix}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "head_dim": head_dim,
        "rms_norm_eps": _decimal(metadata.require(f"{prefix}.attention.layer_norm_rms_epsilon", float)),
        "vocab_size": vocab_size,
        "max_position_embeddings": metadata.positive(f"{prefix}.context_length"),
        "rope_theta": _decimal(metadata.get(f"{prefix}.rope.freq_base", float) or 10000.0),
        "rope_scaling": _rope_scaling(metadata, prefix, head_dim, rope_factors),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        **_token_ids(metadata),
    }
    if f"{prefix}.attention.head_count_kv" in metadata.values:
        config["num_key_value_heads"] = head_count(metadata, f"{prefix}.attention.head_count_kv")
    if kind.model_type == "llama":
        config["attention_bias"] = "model.layers.0.self_attn.q_proj.bias" in tensors
        config["mlp_bias"] = "model.layers.0.mlp.gate_proj.bias" in tensors
    elif kind.model_type.startswith("gemma"):
        config |= _gemma(metadata, prefix, kind.model_type, config)
    if f"{prefix}.expert_count" in metadata.values and metadata.values[f"{prefix}.expert_count"]:
        config |= _experts(metadata, prefix, kind.model_type)
    return config


def head_count(metadata: Metadata, key: str) -> int:
    """The number of heads of every layer; `source_unsupported` where layers differ."""
    if isinstance(metadata.values.get(key), list):
        raise RsvError("source_unsupported", f"{metadata.where}: {key}", "varies from layer to layer")
    return metadata.positive(key)


def _decimal(value: float) -> float:
    """The shortest decimal of a float32: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value)))


def _token_ids(metadata: Metadata) -> dict[str, Any]:
    names = {"bos_token_id": "bos", "eos_token_id": "eos", "pad_token_id": "padding"}
    ids: dict[str, Any] = {key: metadata.get(f"tokenizer.ggml.{name}_token_id", int) for key, name in names.items()}
    turn = metadata.get("tokenizer.ggml.eot_token_id", int)
    if turn is not None and turn != ids["eos_token_id"]:
        ids["eos_token_id"] = [token for token in (ids["eos_token_id"], turn) if token is not None]
    return {key: value for key, value in ids.items() if value is not None}


def _rope_scaling(metadata: Metadata, prefix: str, head_dim: int, factors: Floats | None) -> dict[str, Any] | None:
    if factors is not None:
        return _llama3_scaling(metadata, prefix, head_dim, factors)
    kind = metadata.get(f"{prefix}.rope.scaling.type", str) or "none"
    if kind == "none":
        return None
    if kind not in ("linear", "yarn"):
        raise RsvError("source_unsupported", metadata.where, f"rope scaling of type {kind!r} cannot be read")
    scaling: dict[str, Any] = {"type": kind, "rope_type": kind}
    scaling["factor"] = _decimal(metadata.require(f"{prefix}.rope.scaling.factor", float))
    original = metadata.get(f"{prefix}.rope.scaling.original_context_length", int)
    if kind == "yarn" and original is not None:
        scaling["original_max_position_embeddings"] = original
    return scaling


def _llama3_scaling(metadata: Metadata, prefix: str, head_dim: int, factors: Floats) -> dict[str, Any] | None:
    """Find the Llama 3 scaling that gives these divisors, or refuse them."""
    if np.all(factors == 1):
        return None
    factor = max(_decimal(float(factors.max())), 1.0)
    theta = metadata.get(f"{prefix}.rope.freq_base", float) or 10000.0
    turns = _ORIGINAL_CONTEXT * theta ** (-np.arange(0, head_dim, 2) / head_dim) / (2 * np.pi)
    smooth = np.clip((turns - _LOW_FREQ_FACTOR) / (_HIGH_FREQ_FACTOR - _LOW_FREQ_FACTOR), 0, 1)
    expected = 1 / ((1 - smooth) / factor + smooth)
    if factors.shape != expected.shape or not np.allclose(factors, expected, rtol=1e-3):
        place = f"{metadata.where}: rope_freqs.weight"
        raise RsvError("source_unsupported", place, "is not the rope scaling of Llama 3")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": _LOW_FREQ_FACTOR,
        "high_freq_factor": _HIGH_FREQ_FACTOR,
        "original_max_position_embeddings": _ORIGINAL_CONTEXT,
    }


def _gemma(metadata: Metadata, prefix: str, model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if model_type == "gemma":
        return extra
    by_width = config["num_hidden_layers"] == _QUERY_SCALED_BY_WIDTH[model_type]
    width = config["hidden_size"] // config["num_attention_heads"]
    extra["query_pre_attn_scalar"] = width if by_width else config["head_dim"]
    extra["sliding_window"] = metadata.get(f"{prefix}.attention.sliding_window", int) or 4096
    if model_type == "gemma2":
        extra["attn_logit_softcapping"] = metadata.get(f"{prefix}.attn_logit_softcapping", float) or 50.0
        extra["final_logit_softcapping"] = metadata.get(f"{prefix}.final_logit_softcapping", float) or 30.0
    else:
        extra |= {"sliding_window_pattern": 6, "rope_local_base_freq": 10000.0}
    return extra


def _experts(metadata: Metadata, prefix: str, model_type: str) -> dict[str, Any]:
    count = metadata.positive(f"{prefix}.expert_count")
    extra: dict[str, Any] = {"num_experts_per_tok": metadata.positive(f"{prefix}.expert_used_count")}
    if model_type == "mixtral":
        return extra | {"num_local_experts": count}
    extra |= {
        "num_experts": count,
        "moe_intermediate_size": metadata.positive(f"{prefix}.expert_feed_forward_length"),
    }
    if model_type == "qwen2_moe":
        key = f"{prefix}.expert_shared_feed_forward_length"
        return extra | {"shared_expert_intermediate_size": metadata.positive(key), "norm_topk_prob": False}
    return extra | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
