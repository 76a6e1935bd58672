"""Experts become stacks, one for each of their parts, by the names that mlx-lm's modules have.

A checkpoint keeps them apart, X.experts.N.up_proj, or fuses gate and up into one parameter without a module,
X.experts.gate_up_proj.  mlx-lm stacks, splits and turns them when it loads a checkpoint, and takes stacks as they
are: a file that holds those is bound to its modules without a dense copy.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from rsv_format.sources.base import Array, Floats, Source, SourceTensor, from_float32, selected, stacked, transposed

Tensors = dict[str, SourceTensor]


@dataclass(frozen=True)
class _Family:
    """Where the modules of a family are, and what it does unlike most."""

    holder: str = "switch_mlp"  # in the place of "experts"
    parts: Mapping[str, str] = field(default_factory=lambda: {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"})
    interleaved: bool = False  # rows of gate and up, where these are fused
    owners: tuple[str, str] = ("", "")  # the end of an owner's name, and what comes instead
    dense: bool = False  # gate and up are fused in a single MLP, shared_mlp, that mlx-lm calls mlp


_FAMILIES: dict[str, _Family] = {
    **dict.fromkeys((
        "bailing_hybrid", "bailing_moe", "bailing_moe_linear", "deepseek", "deepseek_v2", "deepseek_v3", "deepseek_v32",
        "ernie4_5_moe", "exaone_moe", "glm4_moe", "glm4_moe_lite", "glm_moe_dsa", "granitemoe", "granitemoehybrid",
        "hunyuan", "jamba", "joyai_llm_flash", "kimi_k2", "kimi_k25", "kimi_vl", "laguna", "lfm2_moe", "longcat_flash",
        "longcat_flash_ngram", "mellum", "mimo_v2_flash", "minimax", "minimax_m2", "minimax_m3_vl", "mistral4",
        "mixtral", "olmoe", "phi-msft", "phimoe", "phixtral", "qwen2_moe", "qwen3_5_moe", "qwen3_moe", "qwen3_next",
        "qwen3_vl_moe", "solar_open",
    ), _Family()),
    **dict.fromkeys(("Klear", "afmoe", "dots1", "llama4", "muse_spark"), _Family("experts")),
    **dict.fromkeys(("gemma4", "gemma4_text", "gemma4_unified"), _Family("experts.switch_glu")),
    **dict.fromkeys(("kimi_linear", "kimi_k3"), _Family(owners=(".block_sparse_moe", ".mlp"))),
    "gpt_oss": _Family("experts", interleaved=True),
    "nemotron_h": _Family(parts={"up_proj": "fc1", "down_proj": "fc2"}),
}  # fmt: skip

_PARTS = frozenset({"gate_proj", "up_proj", "down_proj", "w1", "w2", "w3", "fc1", "fc2"})
_APART = re.compile(r"(?P<owner>.+)\.(?:experts|(?<=\.moe\.)mlp)\.(?P<number>0|[1-9][0-9]{0,4})\.(?P<part>.+)")
_FUSED = re.compile(r"(?P<owner>.+)\.(?:experts\.gate_up_proj|input_linear)(?:\.weight)?")
_FUSED_DBRX = re.compile(r"(?P<owner>.+\.experts)\.mlp\.(?P<part>v1|w1|w2)")
_QWEN3_NEXT_NORMS = (
    ".input_layernorm.weight", ".post_attention_layernorm.weight", "model.norm.weight", ".q_norm.weight",
    ".k_norm.weight",
)  # fmt: skip

Expert = dict[str, SourceTensor]  # "up_proj.weight" -> tensor


def stack_experts(source: Source) -> Source:
    """The source with each part of its experts as one tensor, (n, out, in) of n weights (out, in).

    It is all or nothing, for mlx-lm looks at one block to see whether a checkpoint has to be stacked: the source
    comes back as it is where its family is not known or the experts of any block are not numbered from 0 to
    n - 1, differ in their parts, shapes or dtypes, or have other parts than weights and biases of the usual names.
    """
    config = source.config or {}
    if _text(config).get("model_type") == "dbrx":
        return replace(source, tensors=_separated(source.tensors, config))
    family = _family(config)
    if family is None:
        return source
    tensors = _stacked(_split(source.tensors, family), family)
    if tensors is None:
        return source
    if config.get("model_type") == "qwen3_next" and tensors.keys() != source.tensors.keys():
        tensors = _converted(tensors, tied=bool(config.get("tie_word_embeddings")))
    return replace(source, tensors=tensors)


def _family(config: Mapping[str, Any]) -> _Family | None:
    """That of the model, or of the language model within."""
    known = (_FAMILIES.get(str(part.get("model_type"))) for part in (config, _text(config)))
    family = next((family for family in known if family is not None), None)
    if family is not None and config.get("model_type") == "granitemoehybrid" and not config.get("num_local_experts"):
        return replace(family, dense=True)
    return family


def _text(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _stacked(tensors: Tensors, family: _Family) -> Tensors | None:
    """The tensors with stacks in the place of experts that are apart; None where they cannot be stacked."""
    blocks: dict[str, dict[int, Expert]] = {}
    for name, tensor in tensors.items():
        if match := _APART.fullmatch(name):
            blocks.setdefault(match["owner"], {}).setdefault(int(match["number"]), {})[match["part"]] = tensor
    if not all(_equal(experts) for experts in blocks.values()):
        return None
    made: Tensors = {}
    for name, tensor in tensors.items():
        match = _APART.fullmatch(name)
        if match is None:
            made[name] = tensor
        elif match["number"] == "0":
            experts = blocks[match["owner"]]
            layer, _, kind = match["part"].rpartition(".")
            stacked = f"{_place(match['owner'], layer, family)}.{kind}"
            if stacked in made or stacked in tensors:
                return None
            made[stacked] = _stack(stacked, [experts[i][match["part"]] for i in range(len(experts))])
    return made


def _place(owner: str, part: str, family: _Family) -> str:
    """The module that holds a part of all experts of a block."""
    end, instead = family.owners
    owner = owner.removesuffix(end) + instead if end and owner.endswith(end) else owner
    return f"{owner}.{family.holder}.{family.parts.get(part, part)}"


def _equal(experts: Mapping[int, Expert]) -> bool:
    forms = [{part: (x.dtype, x.shape) for part, x in expert.items()} for expert in experts.values()]
    return (
        experts.keys() == set(range(len(experts)))
        and all(form == forms[0] for form in forms)
        and all(
            layer in _PARTS and kind in ("weight", "bias") for layer, _, kind in (x.rpartition(".") for x in forms[0])
        )
    )


def _stack(name: str, experts: Sequence[SourceTensor]) -> SourceTensor:
    return replace(stacked(name, experts), experts=tuple(experts))


def _split(tensors: Tensors, family: _Family) -> Tensors:
    """The tensors with stacks of gate, up and down in the place of fused ones.

    The shapes say which way these lie, gate_up (n, 2 m, d) with down (n, d, m) or gate_up (n, d, 2 m) with
    down (n, m, d): no two shapes are both. What is neither stays as it is. A single MLP lies the first way, without n.
    """
    made = dict(tensors)
    for name, fused in tensors.items():
        match = _FUSED.fullmatch(name)
        down = tensors.get(name.replace("gate_up_proj", "down_proj").replace("input_linear", "output_linear"))
        axes = len(fused.shape)
        if match is None or down is None or len(down.shape) != axes or axes not in ((2, 3) if family.dense else (3,)):
            continue
        *count, a, b = down.shape
        turned = axes == 3 and fused.shape == (*count, b, 2 * a)
        if not turned and fused.shape != (*count, 2 * b, a):
            continue
        middle = a if turned else b
        gate, up = (slice(0, middle), slice(middle, None))
        if family.interleaved:
            gate, up = slice(0, None, 2), slice(1, None, 2)
        for whole, part, rows in ((fused, "gate_proj", gate), (fused, "up_proj", up), (down, "down_proj", slice(None))):
            place = _place(match["owner"], part, family)
            if axes == 2:
                place = f"{match['owner'].removesuffix('shared_mlp')}mlp.{part}"
            made.pop(whole.name, None)
            made[f"{place}.weight"] = _cut(f"{place}.weight", whole, rows, turned)
            layer = whole.name.removesuffix(".weight")
            for bias in (f"{layer}_bias", f"{layer}.bias"):
                if bias in tensors:
                    made.pop(bias, None)
                    made[f"{place}.bias"] = _cut(f"{place}.bias", tensors[bias], rows, False)
    return made


def _cut(name: str, whole: SourceTensor, rows: slice, turned: bool) -> SourceTensor:
    """Some rows of a matrix or of each in a stack, or of biases; matrices may lie turned.

    They are known by the name of the whole, too.
    """
    if name.endswith(".bias"):
        return _known(_derived(name, whole, lambda array: array[..., rows]), whole.name)
    if whole.rows is None:
        return _known(
            _derived(name, whole, lambda array: (array.swapaxes(-1, -2) if turned else array)[..., rows, :]), whole.name
        )

    def cut(matrix: SourceTensor) -> SourceTensor:
        return replace(selected(transposed(matrix) if turned else matrix, rows), name=whole.name)

    if len(whole.shape) == 2:
        return _known(replace(cut(whole), name=name), whole.name)
    height = whole.shape[-2]
    return _stack(name, [cut(whole.row_part(i * height, (i + 1) * height)) for i in range(whole.shape[0])])


def _known(tensor: SourceTensor, other: str) -> SourceTensor:
    """The tensor, which goes by another name, too."""
    return replace(tensor, experts=(replace(tensor, name=other),))


def _derived(name: str, whole: SourceTensor, cut: Callable[[Array], Array]) -> SourceTensor:
    """What a view of a tensor shows."""
    return SourceTensor(
        name,
        whole.dtype,
        cut(np.broadcast_to(np.uint8(0), whole.shape)).shape,
        lambda: np.ascontiguousarray(cut(whole.read())),
        lambda: np.ascontiguousarray(cut(whole.float32())),
    )


def _separated(tensors: Tensors, config: Mapping[str, Any]) -> Tensors:
    """DBRX's experts, which lie one below the other in one matrix, as mlx-lm has them: apart."""
    given = config.get("ffn_config")
    count = given.get("moe_num_experts") if isinstance(given, Mapping) else None
    made: Tensors = {}
    for name, whole in tensors.items():
        match = _FUSED_DBRX.fullmatch(name)
        if match is None or type(count) is not int or len(whole.shape) != 2 or count < 1 or whole.shape[0] % count:
            made[name] = whole
            continue
        height = whole.shape[0] // count
        for i in range(count):
            part, apart = whole.row_part(i * height, (i + 1) * height), f"{match['owner']}.{i}.{match['part']}.weight"
            made[apart] = _known(replace(transposed(part) if match["part"] == "w2" else part, name=apart), name)
    return made


def _converted(tensors: Tensors, tied: bool) -> Tensors:
    """What mlx-lm does to a checkpoint of Qwen3-Next besides, which it takes stacks for a sign of."""
    made: Tensors = {}
    for name, tensor in tensors.items():
        if "mtp." in name or (tied and name == "lm_head.weight"):
            continue
        if name.endswith(_QWEN3_NEXT_NORMS) and len(tensor.shape) == 1:
            made[name] = _plus_one(tensor)
        elif "conv1d.weight" in name and len(tensor.shape) == 3 and tensor.shape[-1] != 1:
            made[name] = _derived(name, tensor, lambda x: np.moveaxis(x, 2, 1))
        else:
            made[name] = tensor
    return made


def _plus_one(tensor: SourceTensor) -> SourceTensor:
    def float32() -> Floats:
        return tensor.float32() + np.float32(1)

    return replace(tensor, read=lambda: from_float32(float32(), tensor.dtype, tensor.name), float32=float32)
