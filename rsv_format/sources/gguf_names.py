"""llama.cpp's tensor names in the Hugging Face convention and back, expert stacks as mlx-lm names them.

One table serves all architectures, for an importance matrix does not tell its own.  Only two things vary:
what "ffn_norm" feeds in Gemma 2 and 3, and what Mixtral calls its mixture of experts.
"""

from __future__ import annotations

import re

_MODEL = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_BLOCK = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
    "ffn_gate_inp": "mlp.gate",
    "ffn_gate_exps": "mlp.switch_mlp.gate_proj",
    "ffn_up_exps": "mlp.switch_mlp.up_proj",
    "ffn_down_exps": "mlp.switch_mlp.down_proj",
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
_SANDWICHED = ("gemma2", "gemma3_text")  # with a norm behind each part of a block, too
_MIXTURE = ("mlp.gate", "mlp.switch_mlp.")
_NAME = re.compile(r"(?:blk\.(?P<block>0|[1-9][0-9]{0,4})\.)?(?P<stem>[a-z0-9_]+)\.(?P<part>weight|bias)")
_FULL_NAME = re.compile(r"model\.layers\.(?P<block>0|[1-9][0-9]{0,4})\.(?P<suffix>.+)\.(?P<part>weight|bias)")
_MODEL_STEMS = {name: stem for stem, name in _MODEL.items()}
_BLOCK_STEMS = {suffix: stem for stem, suffix in _BLOCK.items()}


def hugging_face_name(name: str, model_type: str = "") -> str | None:
    """The Hugging Face name of a GGUF tensor such as "blk.0.attn_q.weight", or None for an unknown one."""
    match = _NAME.fullmatch(name)
    if match is None:
        return None
    block, stem, part = match["block"], match["stem"], match["part"]
    if block is None:
        return f"{_MODEL[stem]}.{part}" if stem in _MODEL else None
    if stem not in _BLOCK:
        return None
    suffix = _BLOCK[stem]
    if stem == "post_attention_norm" and model_type not in _SANDWICHED:
        return None
    if stem == "ffn_norm" and model_type in _SANDWICHED:
        suffix = "pre_feedforward_layernorm"
    if model_type == "mixtral":
        suffix = mixtral_suffix(suffix)
    return f"model.layers.{block}.{suffix}.{part}"


def mixtral_suffix(suffix: str) -> str:
    """Mixtral's name for a part of a mixture of experts; other names are left as they are."""
    if suffix == _MIXTURE[0] or suffix.startswith(_MIXTURE[1]):
        return suffix.replace("mlp.", "block_sparse_moe.", 1)
    return suffix


def gguf_name(name: str, model_type: str) -> str:
    """The inverse of `hugging_face_name` for a name that it gives to models of a type."""
    block = match["block"] if (match := _FULL_NAME.fullmatch(name)) else None
    stems = [*_MODEL] if block is None else [f"blk.{block}.{stem}" for stem in _BLOCK]
    names = (f"{stem}.{name.rpartition('.')[2]}" for stem in stems)
    return next(other for other in names if hugging_face_name(other, model_type) == name)


def block_of(name: str) -> int | None:
    """The number in a GGUF name such as "blk.3.nextn.eh_proj.weight", known or not."""
    match = re.match(r"blk\.([0-9]{1,9})\.", name)
    return None if match is None else int(match[1])


def llama_cpp_name(name: str) -> str | None:
    """The inverse of `hugging_face_name` for the parts of a layer; None where llama.cpp has no name for it."""
    if match := _FULL_NAME.fullmatch(name):
        suffix = re.sub(r"^block_sparse_moe\.", "mlp.", match["suffix"])
        stem = _BLOCK_STEMS.get(suffix)
        return None if stem is None else f"blk.{match['block']}.{stem}.{match['part']}"
    owner, _, part = name.rpartition(".")
    return f"{_MODEL_STEMS[owner]}.{part}" if owner in _MODEL_STEMS and part in ("weight", "bias") else None
