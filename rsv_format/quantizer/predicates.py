"""What mlx-lm's models say of their own layers: that some need 8 bits, or are to stay as they are.

The `quant_predicate` of a model, as a table; of routers, which are kept in any model, `roles` knows.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

ANY, KEPT = 1, None

_SENSITIVE = re.compile(r".*(self_attn\.o_proj|mlp\.down_proj)|lm_head")
_RWKV7 = re.compile(r".*\.lora\.2|.*embeddings.*")
_SPARK = re.compile(r".*\.self_attn\.g_proj")
_BAILING_V3 = re.compile(
    r"model\.word_embeddings|lm_head|.*\.attention\.(q_a_proj|q_b_proj|kv_a_proj_with_mqa|embed_q|unembed_out|b_proj)"
)
_BAILING_V3_LATENT = re.compile(r"model\.layers\.(\d+)\.attention\.[qg]_proj")
_MUSE_EXPERTS = re.compile(r"model\.language_model\.layers\.(\d+)\.mlp\.experts\.(gate|up|down)_proj")


def least_bits(config: Mapping[str, Any] | None, name: str) -> int | None:
    """The fewest bits that a layer should have.

    Parameters
    ----------
    config : mapping
        The model's.
    name : str
        Of the layer, such as "model.layers.0.self_attn.o_proj".

    Returns
    -------
    int or None
        8 or 1; None if it is to stay as it is.
    """
    config = config or {}
    kind = config.get("model_type")
    if kind in ("granite", "granitemoe"):
        return 8 if _SENSITIVE.fullmatch(name) else ANY
    if kind == "rwkv7":
        return 8 if _RWKV7.fullmatch(name) else ANY
    if kind == "spark2_5":
        return KEPT if _SPARK.fullmatch(name) else ANY
    if kind == "bailing_hybrid" and "BailingMoeV3ForCausalLM" in (config.get("architectures") or ()):
        latent = _BAILING_V3_LATENT.fullmatch(name)
        kept = _is_latent(config, int(latent[1])) if latent else _BAILING_V3.fullmatch(name) is not None
        return KEPT if kept else ANY
    if kind == "muse_spark":
        experts = _MUSE_EXPERTS.fullmatch(name)
        text = config.get("text_config")
        blocks = text.get("num_hidden_layers") if isinstance(text, Mapping) else None
        return ANY if experts and int(experts[1]) not in (0, blocks and blocks - 1) else KEPT
    return ANY


def _is_latent(config: Mapping[str, Any], block: int) -> bool:
    """Whether a block of Bailing V3 has latent attention: the last of a group, and those after the last group."""
    size, blocks = config.get("layer_group_size"), config.get("num_hidden_layers")
    if type(size) is not int or type(blocks) is not int or size < 1:
        return True
    return (block + 1) % size == 0 or block >= blocks // size * size
