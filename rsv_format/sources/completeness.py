"""Whether a checkpoint is a whole model: nothing is missing that its config, or its other blocks, promise.

What every block has is known for common families.  Of all others it is known that blocks and experts are numbered
without holes, as many as the config says, and that a block has the parts that its modules have in other blocks, if
they are of those that no module does without.
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from rsv_format.errors import RsvError
from rsv_format.sources.base import SourceTensor

Tensors = Mapping[str, SourceTensor]
Config = Mapping[str, Any]
Blocks = Mapping[int, set[str]]  # number of a block -> names of the tensors within

_ADAPTER = re.compile(
    r"lora_(?:A|B|a|b|E|up|down|mid|embedding_A|embedding_B|magnitude_vector)|lokr_\w+|hada_\w+|b?oft_\w+|ia3_l"
    r"|vera_lambda_\w+|fourierft_spectrum|dora_scale|prompt_embeddings"
)
_EXPERT = re.compile(r"(?P<owner>.*\bexperts)\.(?P<number>0|[1-9]\d{0,6})\.(?P<part>.+)")
_BLOCK_LIST = re.compile(r"(?:.*[._])?(?:layers|h|blocks|block|layer)")
_COUNTS = ("num_hidden_layers", "n_layer", "num_layers", "n_layers", "num_transformer_layers")
_EXPERT_COUNTS = ("num_experts", "n_routed_experts", "num_local_experts", "moe_num_experts")
# in the names of what is not the language model, or only guesses ahead for it
_OTHERS = (
    "vision", "visual", "image", "audio", "speech", "video", "mtp", "nextn", "draft", "eagle", "medusa", "talker",
    "code2wav", "projector", "connector", "merger", "resampler", "perceiver",
)  # fmt: skip
_KINDS = 64  # of modules that are told apart by their parts; models have a handful
_UNEVEN = frozenset({"albert", "nemotron-nas"})  # blocks that are used again, or that are empty
# parts that no module does without if it has them in another block; keys and values may be those of a block before
_ALWAYS = frozenset({
    "q_proj", "o_proj", "qkv_proj", "query_key_value", "dense", "out_proj", "in_proj", "gate_proj", "up_proj",
    "down_proj", "gate_up_proj", "fc1", "fc2", "c_attn", "c_proj", "c_fc", "wqkv", "wo", "w1", "w2", "w3",
    "dense_h_to_4h", "dense_4h_to_h", "query", "key", "value", "gate", "router", "input_layernorm",
    "post_attention_layernorm", "ln_1", "ln_2", "attention_norm", "ffn_norm", "operator_norm", "norm",
})  # fmt: skip
# parts that no module has without one more
_TOGETHER = (
    ({"gate_proj", "up_proj"}, "down_proj"), ({"gate_proj", "down_proj"}, "up_proj"), ({"gate_up_proj"}, "down_proj"),
    ({"q_a_proj"}, "q_b_proj"), ({"q_b_proj"}, "q_a_proj"), ({"kv_a_layernorm"}, "kv_a_proj_with_mqa"),
    ({"w1", "w3"}, "w2"), ({"w2", "w3"}, "w1"), ({"fc1"}, "fc2"), ({"c_fc"}, "c_proj"), ({"c_attn"}, "c_proj"),
    ({"dense_h_to_4h"}, "dense_4h_to_h"),
)  # fmt: skip


@dataclass(frozen=True)
class _Family:
    """What models of a type have: in every block, and beside the list of blocks."""

    block: tuple[str, ...]
    beside: tuple[str, ...] = ("embed_tokens.weight", "norm.weight")
    alike: bool = True  # whether all blocks have the same parts


def _weights(*layers: str) -> tuple[str, ...]:
    return tuple(f"{layer}.weight" for layer in layers)


_ATTENTION = _weights(*(f"self_attn.{part}_proj" for part in "qkvo"))
_GATED = _weights("mlp.gate_proj", "mlp.up_proj", "mlp.down_proj")
_NORMS = _weights("input_layernorm", "post_attention_layernorm")
_SANDWICH = _weights("pre_feedforward_layernorm", "post_feedforward_layernorm")
_HEAD_NORMS = _weights("self_attn.q_norm", "self_attn.k_norm")
_PLAIN = _Family(_NORMS + _ATTENTION + _GATED)
_GPT2 = _weights("ln_1", "attn.c_attn", "attn.c_proj", "ln_2", "mlp.c_fc", "mlp.c_proj")
_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys(
        ("llama", "mistral", "ministral3", "qwen2", "qwen2_vl", "qwen2_5_vl", "qwen2_vl_text", "qwen2_5_vl_text",
         "gemma", "granite", "helium", "seed_oss", "smollm3"), _PLAIN),
    **dict.fromkeys(("qwen3", "qwen3_vl_text"), _Family(_PLAIN.block + _HEAD_NORMS)),
    "gemma2": _Family(_PLAIN.block + _SANDWICH),
    "gemma3_text": _Family(_PLAIN.block + _SANDWICH + _HEAD_NORMS),
    "phi3": _Family(_NORMS + _weights("self_attn.qkv_proj", "self_attn.o_proj", "mlp.gate_up_proj", "mlp.down_proj")),
    "olmo2": _Family(_NORMS[1:] + _SANDWICH[1:] + _ATTENTION + _GATED + _HEAD_NORMS),
    **dict.fromkeys(("mixtral", "qwen2_moe", "qwen3_moe"), _Family(_NORMS + _ATTENTION, alike=False)),
    "olmoe": _Family(_NORMS + _ATTENTION + _HEAD_NORMS, alike=False),
    "gpt2": _Family(_GPT2, ("wte.weight", "wpe.weight", "ln_f.weight")),
}  # fmt: skip


def refuse_adapters(tensors: Iterable[str], where: str) -> None:
    """Raise RsvError `source_unsupported` for an adapter (LoRA and others), alone or beside the weights it adapts."""
    for name in tensors:
        if name.startswith("base_model.model.") or any(_ADAPTER.fullmatch(part) for part in name.split(".")):
            detail = "is part of an adapter (such as LoRA's), not of a model: merge it into its base model first"
            raise RsvError("source_unsupported", f"{where}: {name}", detail)


def refuse_empty(tensors: Tensors, where: str) -> None:
    """Raise RsvError `source_invalid` for weights of which nothing but the names were saved."""
    for name, tensor in tensors.items():
        if 0 in tensor.shape and name.endswith((".weight", ".bias")):
            detail = f"is empty {tensor.shape}: the weights were saved without being gathered (DeepSpeed ZeRO-3)"
            raise RsvError("source_invalid", f"{where}: {name}", detail)


def check_whole(tensors: Tensors, config: Config, where: str) -> None:
    """Raise RsvError `source_invalid`, naming what is missing, unless the tensors are all of the config's model."""
    text = _text_config(config)
    if any(str(part.get("model_type")) in _UNEVEN for part in (config, text)):
        return
    lists = _block_lists(tensors)
    _check_numbers(lists, text, where)
    for prefix, blocks in lists.items():
        _check_experts(prefix, blocks, text, where)
        _check_modules(prefix, blocks, where)
    if _count(text, _COUNTS) is None:  # it describes no model
        return
    family = _FAMILIES.get(str(text.get("model_type"))) or _FAMILIES.get(str(config.get("model_type")))
    if family is not None:
        _check_family(lists, tensors, family, where)
    if lists and _is_causal(config):
        _check_ends(tensors, lists, config, where)


def _text_config(config: Config) -> Config:
    """The config of the language model: the one that counts blocks."""
    if _count(config, _COUNTS) is not None:
        return config
    for key, value in config.items():
        if key.endswith("config") and isinstance(value, Mapping) and not any(word in key for word in _OTHERS):
            inner = _text_config(value)
            if _count(inner, _COUNTS) is not None:
                return inner
    return config


def _count(config: Config, keys: Iterable[str]) -> int | None:
    return next((config[key] for key in keys if type(config.get(key)) is int), None)


def _numbered(name: str) -> tuple[str, int, str] | None:
    """The list of blocks that a tensor is of, the block's number, and the name within: of the outermost list."""
    parts = name.split(".")
    for i, part in enumerate(parts[1:-1], 1):
        if part.isascii() and part.isdigit() and len(part) < 8:
            return ".".join(parts[:i]), int(part), ".".join(parts[i + 1 :])
    return None


def _block_lists(tensors: Iterable[str]) -> dict[str, dict[int, set[str]]]:
    """Of each list of blocks of a language model, by its name: number -> names of the tensors within."""
    lists: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for name in tensors:
        prefix, number, part = _numbered(name) or ("", 0, "")
        if _BLOCK_LIST.fullmatch(prefix) and not any(word in prefix for word in _OTHERS):
            lists[prefix][number].add(part)
    return lists


def _check_numbers(lists: Mapping[str, Blocks], config: Config, where: str) -> None:
    wanted = _count(config, _COUNTS)
    if not wanted or wanted < 0:
        return
    found: dict[str, int] = defaultdict(int)
    for prefix, blocks in lists.items():
        found[prefix.rpartition(".")[0]] += max(blocks) + 1
    most = max(found.values(), default=0)
    if most < wanted:
        held = f"blocks up to number {most - 1}" if most else "no blocks"
        _incomplete(where, f"the config says {wanted} blocks, the weights hold {held}")
    for prefix, blocks in lists.items():
        if found[prefix.rpartition(".")[0]] >= wanted:
            for i in range(max(blocks)):
                if i not in blocks:
                    _incomplete(where, f"{prefix}.{i} is missing")


def _check_experts(prefix: str, blocks: Blocks, config: Config, where: str) -> None:
    """Experts of one block are numbered without holes, as many as the config says, and have the same parts."""
    wanted = min((config[key] for key in _EXPERT_COUNTS if type(config.get(key)) is int), default=0)
    for i, parts in blocks.items():
        experts: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
        for part in parts:
            if match := _EXPERT.fullmatch(part):
                experts[match["owner"]][int(match["number"])].add(match["part"])
        for owner, numbered in experts.items():
            every = set().union(*numbered.values())
            for number in range(max(wanted, max(numbered) + 1)):
                for part in sorted(every - numbered.get(number, set())):
                    _incomplete(where, f"{prefix}.{i}.{owner}.{number}.{part} is missing")


def _check_modules(prefix: str, blocks: Blocks, where: str) -> None:
    """Of the parts above, a module has those that come together, and those that it has in another block.

    It is the same kind of module there if it has all of its parts there.
    """
    modules: dict[str, dict[int, set[str]]] = defaultdict(lambda: defaultdict(set))
    for i, parts in blocks.items():
        for part in parts:
            expert = _EXPERT.fullmatch(part)
            layer = expert["owner"] if expert is not None else part.removesuffix(".weight")
            module, _, own = layer.rpartition(".")
            if layer != part:
                modules[module][i].add(own)
    for module, numbered in modules.items():
        kinds = set(map(frozenset, numbered.values()))
        for i, own in numbered.items():
            wanted = {part for others, part in _TOGETHER if own >= others}
            if len(kinds) <= _KINDS:
                wanted |= {part for kind in kinds if own < kind for part in kind & _ALWAYS}
            for part in sorted(wanted - own):
                name = ".".join(filter(None, (prefix, str(i), module, part)))
                _incomplete(where, f"{name}.weight is missing")


def _check_family(lists: Mapping[str, Blocks], tensors: Tensors, family: _Family, where: str) -> None:
    """What the family has, in the list of blocks that is most like it."""
    alike = {prefix: set().union(*blocks.values()) for prefix, blocks in lists.items()}
    prefix = max(alike, key=lambda x: len(alike[x].intersection(family.block)), default="")
    if not alike or alike[prefix].isdisjoint(family.block):
        return
    wanted = set(family.block)
    if family.alike:
        layers = {part.removesuffix(".weight") for part in alike[prefix] if part.endswith(".weight")}
        wanted |= {f"{layer}{kind}" for layer in layers for kind in (".weight", ".bias")} & alike[prefix]
    for i, parts in sorted(lists[prefix].items()):
        for part in sorted(wanted - parts):
            _incomplete(where, f"{prefix}.{i}.{part} is missing")
    for part in family.beside:
        name = ".".join(filter(None, (prefix.rpartition(".")[0], part)))
        if name not in tensors:
            _incomplete(where, f"{name} is missing")


def _is_causal(config: Config) -> bool:
    architectures = config.get("architectures")
    return isinstance(architectures, list) and any(str(x).endswith("ForCausalLM") for x in architectures)


def _check_ends(tensors: Tensors, lists: Iterable[str], config: Config, where: str) -> None:
    """A model that writes text has an embedding, a norm after the last block if blocks begin with one, and a head."""
    owners = {
        owner: len(tensor.shape)
        for name, tensor in tensors.items()
        if _numbered(name) is None and not any(word in name for word in _OTHERS)
        for owner in name.split(".")[:-1]
    }
    if not any(axes == 2 and ("emb" in owner or owner in ("wte", "shared")) for owner, axes in owners.items()):
        _incomplete(where, "there is no embedding of the tokens")
    starts = any(f"{prefix}.0.input_layernorm.weight" in tensors for prefix in lists)
    if starts and not any("norm" in owner or owner.startswith("ln") for owner in owners):
        _incomplete(where, "there is no norm after the last block")
    untied = str(config.get("model_type")) in _FAMILIES and config.get("tie_word_embeddings") is False
    if untied and "model.embed_tokens.weight" in tensors and "lm_head.weight" not in tensors:
        _incomplete(where, "lm_head.weight is missing, and the config says that it is not tied to the embedding")


def _incomplete(where: str, detail: str) -> NoReturn:
    raise RsvError("source_invalid", where, f"the model is not whole: {detail}")
