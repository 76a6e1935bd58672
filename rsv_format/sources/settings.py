"""A checkpoint's config as a dense model's, in the spelling that mlx-lm and the decoder here read.

transformers 5 writes what belongs to rotary positions into rope_parameters, for each type of layer if these differ.
Most of mlx-lm's models know the older keys alone, and take a default without a word where one is absent, so these are
added; rope_parameters stays, for the models that read it.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rsv_format.sources.foreign import CONFIG_KEYS

Settings = dict[str, Any]

# model types of which mlx-lm knows the layers with full attention as every n-th one, by this key
_PERIODS = {
    **dict.fromkeys(("gemma3_text", "cohere2"), "sliding_window_pattern"),
    **dict.fromkeys(("qwen3_next", "qwen3_5_text", "qwen3_5_moe_text"), "full_attention_interval"),
}


def current(config: Mapping[str, Any]) -> Settings:
    """The config without its quantization, with the older keys; the configs within it, such as text_config, too."""
    settings = {
        key: current(value) if isinstance(value, Mapping) and key.endswith("config") else value
        for key, value in config.items()
        if key not in CONFIG_KEYS
    }
    for key, value in _older(settings).items():
        if settings.get(key) is None:
            settings[key] = value
    return settings


def _older(settings: Settings) -> Settings:
    """What the newer keys say, by the older ones."""
    rope = settings.get("rope_parameters")
    older: Settings = {}
    if isinstance(rope, Mapping):
        sliding = rope.get("sliding_attention")
        if isinstance(sliding, Mapping) and "rope_theta" in sliding:
            older["rope_local_base_freq"] = older["swa_rope_theta"] = sliding["rope_theta"]
        full = rope.get("full_attention", rope)
        if isinstance(full, Mapping):
            older |= _rope(full)
    if settings.get("model_type") == "gpt_neox":
        names = {"rope_theta": "rotary_emb_base", "partial_rotary_factor": "rotary_pct"}
        older |= {names[key]: value for key, value in older.items() if key in names}
    attention = settings.get("attn_config")  # DBRX's
    if isinstance(attention, Mapping) and "rope_theta" in older:
        settings["attn_config"] = {"rope_theta": older["rope_theta"], **attention}
    period_key = _PERIODS.get(str(settings.get("model_type")))
    period = _period(settings.get("layer_types"))
    return older | ({period_key: period} if period_key is not None and period is not None else {})


def _rope(rope: Mapping[str, Any]) -> Settings:
    older = {key: rope[key] for key in ("rope_theta", "partial_rotary_factor") if rope.get(key) is not None}
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind != "default":
        older["rope_scaling"] = {**rope, "type": kind, "rope_type": kind}
        if "original_max_position_embeddings" in rope:
            older["original_max_position_embeddings"] = rope["original_max_position_embeddings"]
    return older


def _period(types: Any) -> int | None:
    """n, where every n-th of a list of layers has full attention and no other."""
    if not isinstance(types, list) or "full_attention" not in types:
        return None
    period = types.index("full_attention") + 1
    regular = all((kind == "full_attention") == ((i + 1) % period == 0) for i, kind in enumerate(types))
    return period if regular else None
