"""A tiny random model of each architecture that mlx-lm has, and its tensors as checkpoints lay them out.

A config takes from `SIZES` what its class of arguments asks for, by name, and from `ARCHITECTURES` what is its own.
"""

from __future__ import annotations

import dataclasses
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import mlx.core as mx
from mlx.utils import tree_flatten, tree_map_with_path

VOCABULARY = 256
WIDTH, HEADS, KV_HEADS, HEAD_DIM = 64, 4, 2, 16

_ATTENTION = {
    "num_attention_heads": HEADS, "n_head": HEADS, "num_heads": HEADS, "n_heads": HEADS,
    "num_key_value_heads": KV_HEADS, "num_kv_heads": KV_HEADS, "n_kv_heads": KV_HEADS, "head_dim": HEAD_DIM,
    "attention_bias": False, "qkv_bias": False,
    "use_qkv_bias": False, "qk_norm": True, "use_qk_norm": True, "sliding_window": 8, "query_pre_attn_scalar": HEAD_DIM,
    "rope_theta": 1e4, "rope_local_base_freq": 1e3, "rope_scaling": None, "partial_rotary_factor": 0.5,
    "kv_lora_rank": 32, "q_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 16, "v_head_dim": 16,
    "index_head_dim": 16, "index_n_heads": 2, "index_topk": 8, "attention_multiplier": 0.25,
}  # fmt: skip
_EXPERTS = {
    "num_experts": 4, "num_local_experts": 4, "n_routed_experts": 4, "moe_num_experts": 4, "num_experts_per_tok": 2,
    "n_shared_experts": 1, "num_shared_experts": 1, "moe_intermediate_size": 48, "shared_intermediate_size": 48,
    "shared_expert_intermediate_size": 48, "norm_topk_prob": True, "decoder_sparse_step": 1, "mlp_only_layers": [],
    "first_k_dense_replace": 1, "moe_layer_freq": 1, "n_group": 1, "topk_group": 1, "routed_scaling_factor": 1.0,
    "topk_method": "noaux_tc", "scoring_func": "sigmoid",
}  # fmt: skip
_RECURRENT = {
    "state_size": 8, "ssm_state_size": 8, "time_step_rank": 8, "conv_kernel": 4, "conv_L_cache": 3, "conv_bias": False,
    "use_conv_bias": True, "linear_num_value_heads": 4, "linear_num_key_heads": 2, "linear_key_head_dim": 16,
    "linear_value_head_dim": 16, "linear_conv_kernel_dim": 4, "mamba_d_conv": 4, "mamba_d_state": 8, "mamba_expand": 2,
    "mamba_n_heads": 4, "mamba_d_head": 16, "mamba_n_groups": 1, "mamba_conv_bias": True, "mamba_proj_bias": False,
}  # fmt: skip
SIZES: dict[str, Any] = _ATTENTION | _EXPERTS | _RECURRENT | {
    "vocab_size": VOCABULARY, "hidden_size": WIDTH, "n_embd": WIDTH, "intermediate_size": 96, "n_inner": 96,
    "num_hidden_layers": 2, "num_layers": 2, "n_layer": 2, "n_layers": 2, "max_position_embeddings": 512,
    "n_positions": 512, "n_ctx": 512, "rms_norm_eps": 1e-5, "layer_norm_eps": 1e-5, "layer_norm_epsilon": 1e-5,
    "layernorm_epsilon": 1e-5, "norm_eps": 1e-5, "norm_epsilon": 1e-5, "tie_word_embeddings": False, "mlp_bias": False,
    "use_bias": False, "layer_norm_bias": False, "post_norm": True, "dim_model_base": 32, "scale_depth": 1.4,
    "scale_emb": 2.0, "logits_scaling": 2.0, "embedding_multiplier": 3.0, "residual_multiplier": 0.5,
}  # fmt: skip

Config = dict[str, Any]
Tensors = dict[str, mx.array]
Layout = Callable[[Tensors], Tensors]


@dataclasses.dataclass(frozen=True)
class Within:
    """An architecture whose language model is configured apart, by a class of a module."""

    module: str
    own: Config = dataclasses.field(default_factory=dict)
    arguments: str = "ModelArgs"
    beside: Config = dataclasses.field(default_factory=dict)  # the language model's config


_TIED = {"tie_word_embeddings": True}
_ALL_HEADS = {"num_key_value_heads": HEADS}
_WINDOWS = {"layer_types": ["sliding_attention", "full_attention"]}
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_ROPES = {"rope_parameters": {"sliding_attention": _ROPE, "full_attention": _ROPE}}
_LONGROPE = {"type": "longrope", "short_factor": [1.0] * 8, "long_factor": [1.0] * 8}
_DYNAMIC = {"rope_scaling": {"type": "dynamic", "factor": 1.0, "alpha": 1000.0}}
_MINISTRAL = {"rope_parameters": _ROPE | {"llama_4_scaling_beta": 0.1, "original_max_position_embeddings": 128}}
_GEMMA4 = _TIED | {"num_hidden_layers": 4, "layer_types": [*_WINDOWS["layer_types"] * 2], "global_head_dim": 32,
                   "vocab_size_per_layer_input": VOCABULARY, "num_key_value_heads": 1,
                   "partial_rotary_factor": 1.0}  # fmt: skip
_PER_LAYER = {"num_kv_shared_layers": 2, "hidden_size_per_layer_input": 32}
_GEMMA3N = _PER_LAYER | _GEMMA4 | {
    "model_type": "gemma3n_text", "final_logit_softcapping": 30.0, "activation_sparsity_pattern": [0.95, 0.0, 0.0, 0.0],
    "altup_num_inputs": 4, "altup_coef_clip": 120.0, "altup_correct_scale": True, "altup_active_idx": 0,
    "laurel_rank": 16, "num_key_value_heads": KV_HEADS,
}  # fmt: skip
_LFM2 = {"block_dim": WIDTH, "block_ff_dim": 96, "block_multiple_of": 32, "block_ffn_dim_multiplier": 1.0,
         "block_auto_adjust_ff_dim": False, "full_attn_idxs": [1]}  # fmt: skip
_LONGCAT = {"attention_method": "MLA", "zero_expert_type": "identity", "ffn_hidden_size": 96, "moe_topk": 2,
            "expert_ffn_hidden_size": 48, "zero_expert_num": 1, "mla_scale_q_lora": True,
            "mla_scale_kv_lora": True}  # fmt: skip
_QWEN35 = {
    "num_hidden_layers": 4,
    "rope_parameters": _ROPE | {"partial_rotary_factor": 0.5, "mrope_section": [2, 1, 1]},
}
_KDA = {"num_experts_per_token": 2, "first_k_dense_replace": 1, "linear_attn_config": {
    "kda_layers": [1], "full_attn_layers": [2], "num_heads": HEADS, "head_dim": HEAD_DIM,
    "short_conv_kernel_size": 4}}  # fmt: skip
_LLAMA4 = {"model_type": "llama4_text", "attention_chunk_size": 16, "interleave_moe_layer_step": 2,
           "num_hidden_layers": 4, "intermediate_size_mlp": 96, "num_experts_per_tok": 1}  # fmt: skip

ARCHITECTURES: dict[str, Config | Within] = {
    "Klear": {},
    "afm7": {"hidden_dim": WIDTH, "num_layers": 3, "num_kv_reuse_layers": 1, "hidden_dim_scale_factor": 2.0},
    "afmoe": _WINDOWS | {"num_dense_layers": 1},
    "apertus": {},
    "baichuan_m1": {"sliding_window_layers": [0], "conv_window": 2},
    "bailing_hybrid": _ALL_HEADS | {"layer_group_size": 2, "group_norm_size": 1, "num_nextn_predict_layers": 0},
    "bailing_moe": {},
    "bailing_moe_linear": _ALL_HEADS | {"layer_group_size": 2, "group_norm_size": 1},
    "bailing_moe_v3": _ALL_HEADS | {
        "model_type": "bailing_hybrid", "architectures": ["BailingMoeV3ForCausalLM"], "layer_group_size": 2,
        "num_nextn_predict_layers": 0, "group_norm_size": 1, "short_conv_kernel_size": 4},
    "bitnet": _TIED,
    "cohere": _TIED,
    "cohere2": _TIED | {"num_hidden_layers": 4},
    "dbrx": {"d_model": WIDTH, "ffn_config": {"ffn_hidden_size": 48, "moe_num_experts": 4, "moe_top_k": 2},
             "attn_config": {"kv_n_heads": KV_HEADS, "clip_qkv": 8.0, "rope_theta": 1e4}},
    "deepseek": _ALL_HEADS,
    "deepseek_v2": _ALL_HEADS | {"topk_method": "greedy", "rope_scaling": {
        "type": "yarn", "factor": 2.0, "original_max_position_embeddings": 128, "mscale": 1.0, "mscale_all_dim": 1.0,
        "beta_fast": 32, "beta_slow": 1}},
    "deepseek_v3": _ALL_HEADS,
    "deepseek_v32": _ALL_HEADS | {"index_topk": 4},
    "deepseek_v41": {"o_groups": 2, "o_lora_rank": 16, "compress_ratios": [0, 4], "hc_mult": 2, "head_dim": 32,
                     "candidate_topk_blocks": 4, "index_topk": 4},
    "dots1": {"scoring_func": "noaux_tc"},
    "ernie4_5": {},
    "ernie4_5_moe": {"moe_k": 2, "moe_layer_start_index": 1, "moe_layer_end_index": 1, "moe_num_shared_experts": 1},
    "exaone": _TIED,
    "exaone4": {"num_hidden_layers": 4, "sliding_window_pattern": "LLLG", "rope_scaling": {"rope_type": "default"},
                "layer_types": ["sliding_attention"] * 3 + ["full_attention"]},
    "exaone_moe": _WINDOWS | {"is_moe_layer": [False, True]},
    "falcon_h1": {"mamba_d_ssm": WIDTH, "mlp_multipliers": [0.9, 0.8], "ssm_multipliers": [0.3, 0.2, 0.1, 0.5, 0.3]},
    "gear": _WINDOWS | _TIED,
    "gemma": {},
    "gemma2": {},
    "gemma3": Within("gemma3_text", {"num_hidden_layers": 3, "sliding_window_pattern": 3}),
    "gemma3_text": {"num_hidden_layers": 3, "sliding_window_pattern": 3},
    "gemma3n": Within("gemma3n", _GEMMA3N, "TextConfig"),
    "gemma4": Within("gemma4_text", _GEMMA4 | _PER_LAYER),
    "gemma4_text": _GEMMA4 | {"num_kv_shared_layers": 0, "hidden_size_per_layer_input": 0, "enable_moe_block": True,
                              "top_k_experts": 2, "use_double_wide_mlp": False},
    "glm": {},
    "glm4": {},
    "glm4_moe": {},
    "glm4_moe_lite": _ALL_HEADS | {"num_nextn_predict_layers": 0},
    "glm_moe_dsa": _ALL_HEADS | {"rope_parameters": _ROPE},
    "gpt2": {},
    "gpt_bigcode": _TIED,
    "gpt_neox": {"rotary_emb_base": 10000, "rotary_pct": 0.5},
    "gpt_oss": _WINDOWS,
    "gptj": {"rotary_dim": 8},
    "granite": _TIED,
    "granitemoe": _TIED,
    "granitemoehybrid": _TIED | {"layer_types": ["mamba", "attention"], "mamba_n_heads": 8},
    "helium": {},
    "hunyuan": _DYNAMIC | {"moe_topk": 2, "num_shared_expert": 1, "use_mixed_mlp_moe": True, "use_cla": True,
                           "cla_share_factor": 2},
    "hunyuan_v1_dense": _DYNAMIC,
    "internlm2": {},
    "internlm3": {},
    "iquestloopcoder": {"loop_window_size": 4},
    "jamba": _TIED | {"num_hidden_layers": 4, "attn_layer_offset": 1, "attn_layer_period": 2, "expert_layer_offset": 1,
                      "expert_layer_period": 2},
    "kimi_k2": _ALL_HEADS,
    "kimi_k25": Within("deepseek_v3", _ALL_HEADS),
    "kimi_k3": Within("kimi_k3", _KDA | _ALL_HEADS | {
        "model_type": "kimi_linear", "attn_res_block_size": 1, "activation_situ_beta": 4.0,
        "activation_situ_linear_beta": 25.0}, "TextArgs"),
    "kimi_linear": _KDA | {"model_max_length": 512},
    "kimi_vl": Within("deepseek_v3", _ALL_HEADS),
    "laguna": _WINDOWS | _ROPES | {"mlp_layer_types": ["dense", "sparse"],
                                   "num_attention_heads_per_layer": [HEADS, HEADS]},
    "lfm2": _LFM2,
    "lfm2-vl": Within("lfm2", _LFM2),
    "lfm2_moe": {"num_hidden_layers": 3, "full_attn_idxs": [1], "use_expert_bias": True, "num_dense_layers": 1},
    "lille-130m": _TIED | {"block_size": 512},
    "llama": {},
    "llama4": Within("llama4", _LLAMA4, "TextArgs"),
    "llama4_text": {"intermediate_size_mlp": 96, "no_rope_layers": [1, 0]},
    "longcat_flash": _LONGCAT,
    "longcat_flash_ngram": _LONGCAT | {"ngram_vocab_size_ratio": 4, "emb_neighbor_num": 3, "emb_split_num": 2},
    "mamba": _TIED | {"intermediate_size": 128},
    "mamba2": _TIED | {"num_heads": 8, "head_dim": 16, "intermediate_size": 128, "n_groups": 1,
                       "time_step_limit": [0.0, 100.0]},
    "mellum": _WINDOWS | _ROPES,
    "mimo": {"num_nextn_predict_layers": 1},
    "mimo_v2_flash": {
        "hybrid_layer_pattern": [0, 1], "moe_layer_freq": [0, 1], "add_swa_attention_sink_bias": True,
        "add_full_attention_sink_bias": False, "sliding_window_size": 8, "swa_rope_theta": 1000.0,
        "swa_num_attention_heads": HEADS, "swa_num_key_value_heads": KV_HEADS, "swa_head_dim": 16, "swa_v_head_dim": 16,
        "n_shared_experts": None},
    "minicpm": {},
    "minicpm3": _ALL_HEADS | {"rope_scaling": _LONGROPE | {"original_max_position_embeddings": 512}},
    "minimax": {"rotary_dim": 8},
    "minimax_m3_vl": Within("minimax_m3_vl", {
        "dense_intermediate_size": 96, "rotary_dim": 8, "mlp_layer_types": ["dense", "sparse"],
        "layer_types": ["full_attention"] * 2, "model_type": "minimax_m3_vl_text"}, "TextArgs"),
    "ministral3": _WINDOWS | _MINISTRAL,
    "mistral": {},
    "mistral3": Within("llama"),
    "mistral4": _ALL_HEADS | _MINISTRAL,
    "mixtral": {},
    "muse_glimmer": _WINDOWS | {"layer_rope_theta": [1e4, 1e4]},
    "muse_spark": Within("muse_spark", _WINDOWS | {
        "post_norm_eps": 1e-8, "rope_parameters": _ROPE, "layer_rope_theta": [1e4, 1e4], "num_shared_experts": 0,
        "final_logit_softcapping": 20.0, "output_multiplier": 0.2, "moe_hidden_size": 48,
        "mlp_layer_types": ["sparse", "sparse"]}, "TextArgs", {"audio_config": {"out_hidden_size": 64}}),
    "nanbeige": {},
    "nanochat": _ALL_HEADS,
    "nemotron": {"hidden_act": "relu2"},
    "nemotron-nas": {"num_hidden_layers": 3, "block_configs": [
        {"attention": {"n_heads_in_group": 2}, "ffn": {"ffn_mult": 1.5}},
        {"attention": {"no_op": True}, "ffn": {"replace_with_linear": True}},
        {"attention": {"replace_with_linear": True}, "ffn": {"ffn_mult": 1.0}}]},
    "nemotron_h": {"num_hidden_layers": 4, "hybrid_override_pattern": ["M", "*", "-", "E"], "mamba_num_heads": 8,
                   "mamba_head_dim": 16, "n_groups": 1, "moe_shared_expert_intermediate_size": 48,
                   "time_step_limit": [0.0, 100.0]},
    "olmo2": {},
    "olmo3": _WINDOWS,
    "olmo_hybrid": _ALL_HEADS | {"num_hidden_layers": 4, "linear_allow_neg_eigval": True, "linear_num_key_heads": HEADS,
                                 "layer_types": ["linear_attention"] * 3 + ["full_attention"]},
    "olmoe": {},
    "openelm": {"num_transformer_layers": 2, "model_dim": WIDTH, "ffn_dim_divisor": 16, "num_query_heads": [4, 4],
                "num_kv_heads": [2, 2], "ffn_multipliers": [1.0, 2.0]},
    "phi": _ALL_HEADS,
    "phi3": {},
    "phimoe": {"rope_scaling": _LONGROPE | {"short_mscale": 1.0, "long_mscale": 1.0},
               "original_max_position_embeddings": 512},
    "phixtral": {"num_vocab": VOCABULARY, "model_dim": WIDTH, "rotary_dim": 8},
    "pixtral": Within("llama"),
    "plamo": {"n_shared_head": 2},
    "plamo2": _TIED | {"num_hidden_layers": 4, "mamba_num_heads": 4, "hidden_size_per_head": 16},
    "plamo3": _TIED | {"num_hidden_layers": 4, "window_size": 8, "sliding_window_pattern": 2},
    "qwen": {"kv_channels": 16},
    "qwen2": _TIED,
    "qwen2_moe": {},
    "qwen2_vl": Within("qwen2"),
    "qwen3": {},
    "qwen3_5": Within("qwen3_5", _QWEN35 | {"num_experts": 0}, "TextModelArgs"),
    "qwen3_5_moe": Within("qwen3_5", _QWEN35, "TextModelArgs"),
    "qwen3_moe": {},
    "qwen3_next": {"num_hidden_layers": 4},
    "qwen3_vl": Within("qwen3"),
    "qwen3_vl_moe": Within("qwen3_moe"),
    "recurrent_gemma": {"num_hidden_layers": 3, "conv1d_width": 4, "logits_soft_cap": 30.0, "attention_window_size": 16,
                        "num_key_value_heads": 1, "block_types": ["recurrent", "recurrent", "attention"]},
    "rwkv7": {"a_low_rank_dim": 8, "v_low_rank_dim": 8, "gate_low_rank_dim": 8, "decay_low_rank_dim": 8},
    "seed_oss": {},
    "smollm3": _TIED | {"num_hidden_layers": 4},
    "solar_open": {},
    "spark2_5": _WINDOWS | _ROPES | _TIED,
    "stablelm": {},
    "starcoder2": _TIED,
    "step3p5": _WINDOWS | {"num_attention_groups": 2, "moe_top_k": 2, "share_expert_dim": 48, "moe_layers_enum": "1"},
    "talkie": {},
    "telechat3": {},
    "youtu_llm": _ALL_HEADS | _TIED,
}  # fmt: skip


# What mlx-lm has besides, and why it is not tried.
LEFT_OUT = {
    "olmo": "mlx-lm wants ai2-olmo for it",
    "phi3small": "mlx-lm's own writes where it must not, on Linux, and ends the process sooner or later",
    "prism_hadamard_qwen35": "mlx-lm has it for weights that are quantized already",
}


def tiny_config(name: str) -> Config:
    """The config.json of an architecture's tiny model."""
    from mlx_lm.utils import MODEL_REMAPPING

    own = ARCHITECTURES[name]
    if isinstance(own, Within):
        text = {"model_type": own.module} | _filled(own.module, own.arguments, own.own)
        return {"model_type": name, "vocab_size": VOCABULARY, "text_config": text} | own.beside
    return {"model_type": name} | _filled(MODEL_REMAPPING.get(name, name), "ModelArgs", own)


def _filled(module: str, arguments: str, own: Config) -> Config:
    kind = getattr(importlib.import_module(f"mlx_lm.models.{module}"), arguments)
    names = [field.name for field in dataclasses.fields(kind)]
    return {name: SIZES[name] for name in names if name in SIZES} | own


def tiny_model(name: str) -> tuple[Any, Config]:
    """A random model and its config; what starts as a constant varies too, so that it shows where it goes.

    Returns
    -------
    (model, config)
        float32, in evaluation mode.
    """
    from mlx_lm.utils import _get_classes

    mx.random.seed(11)
    config = tiny_config(name)
    model_class, arguments = _get_classes(json.loads(json.dumps(config)))
    model = model_class(arguments.from_dict(json.loads(json.dumps(config)))).eval()

    def varied(path: str, array: mx.array) -> mx.array:
        if not mx.issubdtype(array.dtype, mx.floating):
            return array
        array = array.astype(mx.float32)
        constant = array.size and mx.all(array == array.reshape(-1)[0]).item()
        return array + 0.1 * mx.random.normal(array.shape) if constant else array

    model.update(tree_map_with_path(varied, model.parameters()))
    mx.eval(model.parameters())
    return model, config


def write_checkpoint(name: str, folder: Path, layout: Layout | None = None) -> None:
    """Write a tiny model as a folder: model.safetensors and config.json.

    Parameters
    ----------
    name : str
        Of `ARCHITECTURES`.
    folder : path
        Is made.
    layout : callable, optional
        Such as one of `PUBLISHED`; mlx-lm's own names and stacks if not given.
    """
    model, config = tiny_model(name)
    tensors: Tensors = tree_flatten(model.parameters(), destination={})
    if layout is not None:
        tensors = layout(tensors)
    folder.mkdir(parents=True, exist_ok=True)
    tensors = {key: mx.contiguous(array) for key, array in tensors.items()}
    mx.save_safetensors(str(folder / "model.safetensors"), tensors, metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(config))


_W123 = {"gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}
_FC = {"fc1": "up_proj", "fc2": "down_proj"}


def _apart(holder: str = "switch_mlp", to: str = "experts", parts: dict[str, str] | None = None) -> Layout:
    """One tensor for each expert."""

    def changed(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for name, array in tensors.items():
            match = re.fullmatch(rf"(.+)\.{holder}\.(\w+)\.(weight|bias)", name)
            if match is None:
                made[name] = array
                continue
            part = (parts or {}).get(match[2], match[2])
            made |= {f"{match[1]}.{to}.{i}.{part}.{match[3]}": array[i] for i in range(array.shape[0])}
        return made

    return changed


def fused_experts(holder: str = "switch_mlp", to: str = "experts", *, turned: bool = False, parts: tuple[str, str] = (
    "gate_up_proj", "down_proj"), end: str = "") -> Layout:  # fmt: skip
    """Gate above up in one tensor, all experts in it; turned, the input's axis comes first."""

    def place(owner: str, part: str) -> str:
        return ".".join(filter(None, (owner, to, part))) + end

    def changed(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for name, array in tensors.items():
            match = re.fullmatch(rf"(.+)\.{holder}\.(gate_proj|up_proj|down_proj)\.weight", name)
            if match is None:
                made[name] = array
            elif match[2] == "gate_proj":
                up = tensors[name.replace("gate_proj", "up_proj")]
                both = mx.concatenate([array, up], axis=1)
                made[place(match[1], parts[0])] = both.swapaxes(1, 2) if turned else both
            elif match[2] == "down_proj":
                made[place(match[1], parts[1])] = array.swapaxes(1, 2) if turned else array
        return made

    return changed


def _convolutions(tensors: Tensors) -> Tensors:
    """Torch's order of their axes."""
    return {key: x.swapaxes(1, 2) if "conv" in key and x.ndim == 3 else x for key, x in tensors.items()}


def _renamed(*pairs: tuple[str, str]) -> Layout:
    def changed(tensors: Tensors) -> Tensors:
        made: Tensors = {}
        for name, array in tensors.items():
            for pattern, instead in pairs:
                name = re.sub(pattern, instead, name)
            made[name] = array
        return made

    return changed


def _less_one(tensors: Tensors) -> Tensors:
    """Gains of Qwen3-Next's norms."""
    ends = ("input_layernorm.weight", "post_attention_layernorm.weight", "model.norm.weight", "q_norm.weight",
            "k_norm.weight")  # fmt: skip
    return {key: x - 1 if key.endswith(ends) else x for key, x in tensors.items()} | {"mtp.fc.weight": mx.ones((4, 8))}


def _dbrx(tensors: Tensors) -> Tensors:
    made: Tensors = {}
    for name, array in tensors.items():
        match = re.fullmatch(r"(.+\.experts)\.(\d+)\.(\w+)\.weight", name)
        if match is None:
            made[name] = array
            continue
        key, matrix = f"{match[1]}.mlp.{match[3]}", array.T if match[3] == "w2" else array
        made[key] = matrix if match[2] == "0" else mx.concatenate([made[key], matrix])
    return made


def _absorbed(tensors: Tensors) -> Tensors:
    """kv_b_proj, which mlx-lm takes apart into embed_q and unembed_out."""
    made: Tensors = {}
    for name, array in tensors.items():
        if name.endswith(".embed_q.weight"):
            out = tensors[name.replace("embed_q", "unembed_out")]
            both = mx.concatenate([array.swapaxes(1, 2), out], axis=1)
            made[name.replace("embed_q", "kv_b_proj")] = both.reshape(-1, both.shape[-1])
        elif not name.endswith(".unembed_out.weight"):
            made[name] = array
    return made


def _each(*layouts: Layout) -> Layout:
    def changed(tensors: Tensors) -> Tensors:
        for layout in layouts:
            tensors = layout(tensors)
        return tensors

    return changed


# How checkpoints that are published lay out what mlx-lm converts.
PUBLISHED: dict[str, Layout] = {
    **dict.fromkeys((
        "bailing_moe", "bailing_moe_linear", "deepseek", "deepseek_v2", "ernie4_5_moe", "exaone_moe", "glm4_moe",
        "hunyuan", "kimi_vl", "laguna", "mellum", "mimo_v2_flash", "olmoe", "qwen2_moe", "qwen3_moe", "solar_open",
    ), _apart()),
    **dict.fromkeys((
        "bailing_hybrid", "bailing_moe_v3", "deepseek_v3", "deepseek_v32", "glm4_moe_lite", "glm_moe_dsa", "kimi_k2",
        "kimi_k25", "longcat_flash", "longcat_flash_ngram",
    ), _each(_apart(), _absorbed)),
    **dict.fromkeys(("minimax", "minimax_m3_vl", "mixtral", "phimoe"), _apart(parts=_W123)),
    **dict.fromkeys(("Klear", "afmoe", "dots1"), _apart("experts")),
    **dict.fromkeys(("kimi_k3", "kimi_linear"), _each(_apart(parts=_W123), _absorbed, _renamed(
        (r"\.mlp\.(experts|shared_experts|gate\.)", r".block_sparse_moe.\1")))),
    "dbrx": _dbrx,
    "gemma4_text": fused_experts("switch_glu", ""),
    "granitemoe": fused_experts(to="", parts=("input_linear", "output_linear"), end=".weight"),
    "granitemoehybrid": _each(
        fused_experts(to="", parts=("input_linear", "output_linear"), end=".weight"), _convolutions),
    "jamba": _each(_apart(), _convolutions),
    "lfm2_moe": _each(_apart(), _renamed(*((rf"{a}\.weight", f"{b}.weight") for a, b in _W123.items())), _convolutions),
    "llama4": fused_experts("experts", turned=True),
    "mistral4": _each(fused_experts(), _absorbed),
    "nemotron_h": _each(_apart(parts=_FC), _convolutions),
    "phixtral": _apart(to="mlp"),
    "qwen3_5_moe": _each(fused_experts(), _renamed((r"^language_model\.model", "model.language_model"),
                                            (r"^language_model\.lm_head", "lm_head"))),
    "qwen3_next": _each(_apart(), _convolutions, _less_one),
    "qwen3_vl_moe": fused_experts(turned=True),
    "step3p5": _renamed((r"\.mlp\.switch_mlp\.", ".moe.")),
}  # fmt: skip
