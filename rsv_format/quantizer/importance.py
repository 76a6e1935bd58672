"""What the architecture alone tells about a layer's input: which norm scales it and which layers share it.

The table knows pre-norm transformers: an RMS norm makes the mean square over the channels one, its gain g
(stored as g or as g - 1) then scales each channel.  Layers behind an activation or attention have no such norm.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

_ATTENTION = dict.fromkeys(("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "input_layernorm")
_MLP = ("mlp.gate_proj", "mlp.up_proj")
_EXPERTS = (
    *(f"mlp.{experts}.gate_proj" for experts in ("switch_mlp", "experts", "shared_expert")),
    *(f"mlp.{experts}.up_proj" for experts in ("switch_mlp", "experts", "shared_expert")),
    *(f"block_sparse_moe.switch_mlp.{part}" for part in ("gate_proj", "up_proj")),
    *(f"block_sparse_moe.experts.{part}" for part in ("w1", "w3")),
    *("mlp.gate", "mlp.shared_expert_gate", "block_sparse_moe.gate"),
)

_PLAIN = _ATTENTION | dict.fromkeys(_MLP, "post_attention_layernorm")
_MIXTURE = _PLAIN | dict.fromkeys(_EXPERTS, "post_attention_layernorm")
_SANDWICH = _ATTENTION | dict.fromkeys(_MLP, "pre_feedforward_layernorm")
_FUSED = {"self_attn.qkv_proj": "input_layernorm", "mlp.gate_up_proj": "post_attention_layernorm"}

# model_type: (layer within a block -> norm within that block, what the model adds to the stored gain)
_ARCHITECTURES: dict[str, tuple[Mapping[str, str], float]] = {
    "llama": (_PLAIN, 0.0),
    "mistral": (_PLAIN, 0.0),
    "qwen2": (_PLAIN, 0.0),
    "qwen3": (_PLAIN, 0.0),
    "mixtral": (_MIXTURE, 0.0),
    "qwen2_moe": (_MIXTURE, 0.0),
    "qwen3_moe": (_MIXTURE, 0.0),
    "phi3": (_FUSED, 0.0),
    "gemma": (_PLAIN, 1.0),
    "gemma2": (_SANDWICH, 1.0),
    "gemma3_text": (_SANDWICH, 1.0),
}

_BLOCK = re.compile(r"(?P<block>(?:.*\.)?layers\.\d+)\.(?P<layer>.+)")
_EXPERT_NUMBER = re.compile(r"(?<=experts)\.\d+(?=\.)")

_LAYER = re.compile(r"(?:model\.|language_model\.)+(?P<block>layers\.\d+)\.(?P<layer>.+)")
_STACK = re.compile(r"(?:\w+\.)?(?:switch_mlp|switch_glu|experts|experts\.switch_glu)\.(?P<part>\w+)")

_SHARING = (
    frozenset({"q_proj", "k_proj", "v_proj"}),
    frozenset({"gate_proj", "up_proj"}),
    frozenset({"query", "key", "value"}),
    frozenset({"w1", "w3"}),
)
_CROSS_ATTENTION = ("cross", "encoder_attn")  # there q sees another input than k and v


def norm_gains(config: Mapping[str, Any] | None, names: Iterable[str]) -> dict[str, tuple[str, float] | None]:
    """The norm whose gain scales each layer's input.

    Parameters
    ----------
    config
        The model's config; `model_type` (or that of its `text_config`) picks the architecture.
    names
        Layer names without ".weight", such as "model.layers.0.self_attn.q_proj".

    Returns
    -------
    dict
        For each name the norm's tensor name and the offset to add to it (1.0 for Gemma, which stores g - 1),
        or None where no norm feeds the layer or the architecture is not in the table.
    """
    norms, offset = _architecture(config or {})
    gains: dict[str, tuple[str, float] | None] = {}
    for name in names:
        match = _BLOCK.fullmatch(name)
        norm = norms.get(_EXPERT_NUMBER.sub("", match["layer"])) if match else None
        gains[name] = (f"{match['block']}.{norm}.weight", offset) if match and norm else None
    return gains


def plain_name(name: str) -> str:
    """What a layer is called where nothing is known of its model, as in llama.cpp's importance matrices.

    A language model within another goes without what holds it, and experts by the usual names.
    """
    match = _LAYER.fullmatch(name)
    if match is None:
        return name
    experts = _STACK.fullmatch(match["layer"])
    return f"model.{match['block']}.{'mlp.switch_mlp.' + experts['part'] if experts else match['layer']}"


def share_groups(names: Iterable[str]) -> list[list[str]]:
    """Layers grouped by the input they share, in the order given; a layer that shares with none is alone."""
    groups: dict[tuple[str, object], list[str]] = {}
    for name in names:
        parent, _, own = name.rpartition(".")
        shared = next((kinds for kinds in _SHARING if own in kinds), None)
        if shared is None or any(word in parent for word in _CROSS_ATTENTION):
            groups[name, None] = [name]
        else:
            groups.setdefault((parent, shared), []).append(name)
    return list(groups.values())


def _architecture(config: Mapping[str, Any]) -> tuple[Mapping[str, str], float]:
    text = config.get("text_config")
    for part in (config, text if isinstance(text, Mapping) else {}):
        if (known := _ARCHITECTURES.get(str(part.get("model_type")))) is not None:
            return known
    return {}, 0.0
