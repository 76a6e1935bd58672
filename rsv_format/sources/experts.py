"""Experts that a checkpoint keeps apart become stacks: X.experts.N.up_proj to X.switch_mlp.up_proj.

mlx-lm stacks them so when it loads a checkpoint. A file that has the stacks is bound to its modules as it is.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from rsv_format.dtypes import NUMPY_DTYPE
from rsv_format.sources.base import Array, Floats, Source, SourceTensor

# Model types for which mlx-lm makes the same of a checkpoint and of its stacks. Not so qwen3_next, where it takes
# stacks for a sign that the gains of the norms have been converted too.
_FAMILIES = frozenset({
    "bailing_moe", "deepseek", "deepseek_v2", "deepseek_v3", "ernie4_5_moe", "exaone_moe", "glm4_moe",
    "glm4_moe_lite", "hunyuan", "jamba", "kimi_k2", "laguna", "lfm2_moe", "mellum", "minimax", "minimax_m2",
    "mixtral", "olmoe", "phimoe", "qwen2_moe", "qwen3_moe",
})  # fmt: skip
_RENAMED = {"w1": "gate_proj", "w2": "down_proj", "w3": "up_proj"}
_EXPERT = re.compile(r"(?P<owner>.+)\.experts\.(?P<number>0|[1-9][0-9]{0,4})\.(?P<part>.+)")

Expert = dict[str, SourceTensor]  # "up_proj.weight" -> tensor


def stack_experts(source: Source) -> Source:
    """The source with each part of its experts as one tensor, (n, out, in) of n weights (out, in).

    It is all or nothing, for mlx-lm looks at one block to see whether a checkpoint has to be stacked: the source
    comes back as it is where its family is not known or the experts of any block are not numbered from 0 to
    n - 1, differ in their parts, shapes or dtypes, or have parts besides weights and biases.
    """
    if str((source.config or {}).get("model_type")) not in _FAMILIES:
        return source
    blocks: dict[str, dict[int, Expert]] = {}
    for name, tensor in source.tensors.items():
        if match := _EXPERT.fullmatch(name):
            blocks.setdefault(match["owner"], {}).setdefault(int(match["number"]), {})[match["part"]] = tensor
    if not blocks or not all(_equal(experts) for experts in blocks.values()):
        return source
    tensors: dict[str, SourceTensor] = {}
    for name, tensor in source.tensors.items():
        match = _EXPERT.fullmatch(name)
        if match is None:
            tensors[name] = tensor
        elif match["number"] == "0":
            experts = blocks[match["owner"]]
            layer, _, kind = match["part"].rpartition(".")
            stacked = f"{match['owner']}.switch_mlp.{_RENAMED.get(layer, layer)}.{kind}"
            if stacked in tensors or stacked in source.tensors:
                return source
            tensors[stacked] = _stack(stacked, [experts[i][match["part"]] for i in range(len(experts))])
    return replace(source, tensors=tensors)


def _equal(experts: Mapping[int, Expert]) -> bool:
    forms = [{part: (x.dtype, x.shape) for part, x in expert.items()} for expert in experts.values()]
    return (
        experts.keys() == set(range(len(experts)))
        and all(form == forms[0] for form in forms)
        and all(part.endswith((".weight", ".bias")) for part in forms[0])
    )


def _stack(name: str, experts: Sequence[SourceTensor]) -> SourceTensor:
    """Read into place: beside the stack, one expert is in memory."""
    dtype, shape = experts[0].dtype, (len(experts), *experts[0].shape)

    def read() -> Array:
        stack = np.empty(shape, NUMPY_DTYPE[dtype])
        for i, expert in enumerate(experts):
            stack[i] = expert.read()
        return stack

    def float32() -> Floats:
        stack = np.empty(shape, np.float32)
        for i, expert in enumerate(experts):
            stack[i] = expert.float32()
        return stack

    return SourceTensor(name, dtype, shape, read, float32, tuple(experts))
