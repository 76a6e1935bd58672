"""The Hugging Face config of a GGUF model, complete enough for mlx-lm's model class."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.sources.base import Floats
from rsv_format.sources.gguf_reader import Metadata
from rsv_format.sources.gguf_rope import decimal, rope_base, rope_scaling
from rsv_format.sources.gguf_vocabulary import Vocabulary


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

_MIXTURES = frozenset({"mixtral", "qwen2_moe", "qwen3_moe"})

# The one model of each family, by depth, whose queries are scaled by hidden_size / heads, not head_dim.
_QUERY_SCALED_BY_WIDTH = {"gemma2": 46, "gemma3_text": 62}

# What mlx-lm's models of these types take no notice of.
_UNSCALED = frozenset({"mixtral", "qwen2_moe", "qwen3_moe", "gemma", "gemma2"})
_HEADS_FILL_WIDTH = frozenset({"mixtral", "qwen2", "qwen2_moe"})

# Metadata that changes what a model computes, and the values that change nothing.
_NEUTRAL: dict[str, tuple[Any, ...]] = {
    "attention.causal": (True,),
    "attention.clamp_kqv": (0,),
    "attention.max_alibi_bias": (0,),
    "embedding_scale": (0, 1),
    "expert_gating_func": (0, 1),
    "expert_weights_scale": (0, 1),
    "logit_scale": (0, 1),
    "residual_scale": (0, 1),
    "use_parallel_residual": (False,),
}

# What general.type or general.architecture says of files that are no models.
_PROJECTOR = "is the vision or audio part (mmproj) of a model: give the file of the model itself"
_NO_MODELS = {
    "clip": _PROJECTOR,
    "mmproj": _PROJECTOR,
    "adapter": "is a LoRA adapter, no model: merge it into its model first",
    "imatrix": "is an importance matrix, no model: give it as the importance",
}


def architecture(metadata: Metadata) -> Architecture:
    """The architecture of a GGUF model; `source_unsupported` naming what cannot be read."""
    for key in ("general.type", "general.architecture"):
        if (content := metadata.get(key, str)) in _NO_MODELS:
            raise RsvError("source_unsupported", metadata.where, _NO_MODELS[content])
    name = metadata.require("general.architecture", str)
    if name not in _ARCHITECTURES:
        detail = f"models of architecture {name!r} cannot be read from GGUF, only {', '.join(_ARCHITECTURES)}"
        raise RsvError("source_unsupported", metadata.where, detail)
    if name == "llama" and (metadata.get("llama.expert_count", int) or 0) > 0:
        return _MIXTRAL
    return _ARCHITECTURES[name]


def block_count(metadata: Metadata) -> tuple[int, int]:
    """The number of the model's blocks, and of those behind them that only predict further tokens."""
    prefix = metadata.require("general.architecture", str)
    blocks = metadata.positive(f"{prefix}.block_count")
    extra = metadata.get(f"{prefix}.nextn_predict_layers", int) or 0
    if not 0 <= extra < blocks:
        place = f"{metadata.where}: {prefix}.nextn_predict_layers"
        raise RsvError("source_invalid", place, f"{extra} of {blocks} blocks")
    return blocks - extra, extra


def build_config(
    metadata: Metadata,
    kind: Architecture,
    tensors: Collection[str],
    vocab_size: int,
    dtype: str,
    rope_factors: Floats | None,
    vocabulary: Vocabulary | None,
) -> dict[str, Any]:
    """The config; `tensors` are Hugging Face names, `rope_factors` the contents of rope_freqs.weight."""
    prefix = metadata.require("general.architecture", str)
    _refuse_what_changes_the_numbers(metadata, prefix)
    hidden, heads = metadata.positive(f"{prefix}.embedding_length"), head_count(metadata)
    config: dict[str, Any] = {
        "model_type": kind.model_type,
        "architectures": [kind.model_class],
        "torch_dtype": dtype,
        "hidden_size": hidden,
        "num_hidden_layers": block_count(metadata)[0],
        "intermediate_size": metadata.per_block(f"{prefix}.feed_forward_length"),
        "num_attention_heads": heads,
        "num_key_value_heads": kv_head_count(metadata),
        "head_dim": _head_dim(metadata, prefix, kind, hidden, heads),
        "rms_norm_eps": decimal(metadata.require(f"{prefix}.attention.layer_norm_rms_epsilon", float)),
        "vocab_size": vocab_size,
        "max_position_embeddings": metadata.positive(f"{prefix}.context_length"),
        "rope_theta": rope_base(metadata, prefix),
        "tie_word_embeddings": "lm_head.weight" not in tensors,
        **_token_ids(vocabulary),
    }
    config["rope_scaling"] = rope_scaling(metadata, prefix, config["head_dim"], rope_factors)
    if config["rope_scaling"] is not None and kind.model_type in _UNSCALED:
        place = f"{metadata.where}: {prefix}.rope.scaling"
        raise RsvError("source_unsupported", place, f"{kind.model_type} models do not scale rope in mlx-lm")
    if kind.model_type == "llama":
        config["attention_bias"] = any(name.endswith("_proj.bias") and ".self_attn." in name for name in tensors)
        config["mlp_bias"] = any(name.endswith("_proj.bias") and ".mlp." in name for name in tensors)
    elif kind.model_type.startswith("gemma"):
        config |= _gemma(metadata, prefix, kind.model_type, config)
    if kind.model_type in _MIXTURES:
        config |= _experts(metadata, prefix, kind.model_type, config["intermediate_size"])
    if config["intermediate_size"] is None:
        raise RsvError("source_invalid", f"{metadata.where}: {prefix}.feed_forward_length", "is missing")
    return config


def head_count(metadata: Metadata) -> int:
    """The number of heads that queries have; `source_unsupported` where blocks differ."""
    key = f"{metadata.require('general.architecture', str)}.attention.head_count"
    heads = metadata.per_block(key)
    if heads is None:
        raise RsvError("source_invalid", f"{metadata.where}: {key}", "is missing")
    return heads


def kv_head_count(metadata: Metadata) -> int:
    """The number of heads that keys and values have, as many as queries where nothing is said."""
    key = f"{metadata.require('general.architecture', str)}.attention.head_count_kv"
    heads, queries = metadata.per_block(key), head_count(metadata)
    if heads is not None and queries % heads:
        raise RsvError("source_invalid", f"{metadata.where}: {key}", f"{queries} heads do not share {heads}")
    return heads or queries


def _head_dim(metadata: Metadata, prefix: str, kind: Architecture, hidden: int, heads: int) -> int:
    head_dim = metadata.get(f"{prefix}.attention.key_length", int) or hidden // heads
    where = f"{metadata.where}: {prefix}"
    if (metadata.get(f"{prefix}.attention.value_length", int) or head_dim) != head_dim:
        raise RsvError("source_unsupported", f"{where}.attention.value_length", "is not that of the keys")
    if (metadata.get(f"{prefix}.rope.dimension_count", int) or head_dim) != head_dim:
        raise RsvError("source_unsupported", f"{where}.rope.dimension_count", "rotates only a part of each head")
    if kind.model_type in _HEADS_FILL_WIDTH and head_dim * heads != hidden:
        detail = f"{heads} heads of {head_dim} do not make up the width {hidden} of a {kind.model_type} model"
        raise RsvError("source_unsupported", f"{where}.attention.key_length", detail)
    return head_dim


def _refuse_what_changes_the_numbers(metadata: Metadata, prefix: str) -> None:
    for name, neutral in _NEUTRAL.items():
        value = metadata.values.get(f"{prefix}.{name}")
        if value is not None and not (isinstance(value, bool | int | float) and value in neutral):
            detail = f"is {value!r:.80}, which models of this architecture are not run with"
            raise RsvError("source_unsupported", f"{metadata.where}: {prefix}.{name}", detail)


def _token_ids(vocabulary: Vocabulary | None) -> dict[str, Any]:
    if vocabulary is None:
        return {}
    ids: dict[str, Any] = {f"{name}_token_id": vocabulary.ids.get(name) for name in ("bos", "eos", "pad")}
    ends = sorted(vocabulary.ends, key=lambda token: (token != ids["eos_token_id"], token))
    if len(ends) > 1 or ids["eos_token_id"] is None:
        ids["eos_token_id"] = ends or None
    return {key: value for key, value in ids.items() if value is not None}


def _gemma(metadata: Metadata, prefix: str, model_type: str, config: dict[str, Any]) -> dict[str, Any]:
    extra: dict[str, Any] = {"hidden_act": "gelu_pytorch_tanh", "hidden_activation": "gelu_pytorch_tanh"}
    if model_type == "gemma":
        return extra
    by_width = config["num_hidden_layers"] == _QUERY_SCALED_BY_WIDTH[model_type]
    width = config["hidden_size"] // config["num_attention_heads"]
    extra["query_pre_attn_scalar"] = width if by_width else config["head_dim"]
    window = metadata.get(f"{prefix}.attention.sliding_window", int)
    if model_type == "gemma2":
        extra["sliding_window"] = window or 4096
        for name, value in (("attn_logit_softcapping", 50.0), ("final_logit_softcapping", 30.0)):
            extra[name] = metadata.get(f"{prefix}.{name}", float) or value
        return extra
    if metadata.get(f"{prefix}.final_logit_softcapping", float):
        place = f"{metadata.where}: {prefix}.final_logit_softcapping"
        raise RsvError("source_unsupported", place, "mlx-lm's gemma3_text models cap no logits")
    if not window:  # llama.cpp takes it that all blocks attend to everything
        return extra | {"sliding_window": config["max_position_embeddings"], "sliding_window_pattern": 1}
    local = metadata.get(f"{prefix}.rope.freq_base_swa", float)
    return extra | {
        "sliding_window": window,
        "sliding_window_pattern": _window_pattern(metadata, f"{prefix}.attention.sliding_window_pattern"),
        "rope_local_base_freq": 10000.0 if local is None else decimal(local),
    }


def _window_pattern(metadata: Metadata, key: str) -> int:
    """Every how many blocks one attends to everything: 6, a number, or a flag for each block that has a window."""
    if not isinstance(metadata.values.get(key), np.ndarray):
        return metadata.positive(key) if key in metadata.values else 6
    flags = [bool(flag) for flag in metadata.values[key].tolist()]
    period = flags.index(False) + 1 if False in flags else len(flags) + 1
    if flags != [(i + 1) % period != 0 for i in range(len(flags))]:
        raise RsvError("source_unsupported", f"{metadata.where}: {key}", "has no period")
    return period


def _experts(metadata: Metadata, prefix: str, model_type: str, inner: int | None) -> dict[str, Any]:
    """Widths that are not given follow from the dense one."""
    count, used = (metadata.positive(f"{prefix}.expert_{name}") for name in ("count", "used_count"))
    if used > count:
        place = f"{metadata.where}: {prefix}.expert_used_count"
        raise RsvError("source_invalid", place, f"{used} of {count} experts")
    extra: dict[str, Any] = {"num_experts_per_tok": used}
    if model_type == "mixtral":
        return extra | {"num_local_experts": count}
    own = metadata.per_block(f"{prefix}.expert_feed_forward_length") or (inner and inner // used)
    extra |= {"num_experts": count, "moe_intermediate_size": own, "intermediate_size": inner or own}
    if model_type == "qwen2_moe":
        shared = metadata.per_block(f"{prefix}.expert_shared_feed_forward_length") or inner or own
        return extra | {"shared_expert_intermediate_size": shared, "norm_topk_prob": False}
    return extra | {"decoder_sparse_step": 1, "mlp_only_layers": [], "norm_topk_prob": True}
