"""What a tensor of a model is for, by its name and shape: whether it is quantized, and why not if it is not.

Checkpoints and module trees have the same names where it matters, so that one table serves both.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum

from rsv_format.dtypes import FLOAT_DTYPES


class Role(StrEnum):
    """What a tensor is for; the values of those that stay as they are say why."""

    LINEAR = "a linear layer"
    STACK = "a stack of experts"
    TABLE = "an embedding table or a head"
    ROUTER = "a router"
    COEFFICIENTS = "mixing coefficients"
    NORM = "a norm"
    CONVOLUTION = "a convolution"
    POSITIONS = "a table of positions or types"
    VECTOR = "a vector"
    EXPERTS = "experts in no known layout"
    PARAMETER = "not the weight of a layer"
    NO_MATRIX = "not a matrix"
    NO_FLOATS = "not floating-point numbers"

    @property
    def is_quantized(self) -> bool:
        """Whether such tensors are quantized unless they are excluded."""
        return self in _QUANTIZED


_QUANTIZED = frozenset({Role.LINEAR, Role.STACK, Role.TABLE})

# Small and sensitive: a few rows decide where every token goes. A part of the name, or its last part alone.
_GATES = frozenset({"gate", "shared_expert_gate"})
_LAST_GATES = frozenset({"wg", "coefficient"})
_COEFFICIENTS = ("_coefs", "_res_proj", "gate_projections")  # ends: what mixes streams, which models use their own way
_POSITIONS = frozenset({"wpe", "relative_attention_bias"})
_TABLES = frozenset({"wte", "lm_head", "embed_out"})
_HEADS = frozenset({"output", "head", "ff_out"})  # outside of blocks, where these are linear layers
_NO_TABLE = ("pos", "type", "segment", "patch", "class", "proj")  # with "embed" in one name
_SWITCHES = frozenset({"switch_mlp", "switch_glu"})  # hold stacks alone
_STACKS = _SWITCHES | {"experts", "moe", "block_sparse_moe"}
_LAST_STACKS = frozenset({"o_a_proj"})  # DeepSeek V4.1's, one matrix per group of heads


def layer_role(name: str) -> Role:
    """What a layer with a matrix, or a stack of them, is for.

    Parameters
    ----------
    name : str
        Of the layer, such as "model.layers.0.mlp.up_proj", in a checkpoint or in a module tree.

    Returns
    -------
    Role
        LINEAR, TABLE, ROUTER, COEFFICIENTS, NORM, CONVOLUTION or POSITIONS.
    """
    parts = [part for part in name.split(".") if not part.isdigit()]
    own, in_block = (parts or [""])[-1], len(parts) < name.count(".") + 1
    if own in _LAST_GATES or not _GATES.isdisjoint(parts) or any("router" in part for part in parts):
        return Role.ROUTER
    if own.endswith(_COEFFICIENTS):
        return Role.COEFFICIENTS
    if "norm" in own:
        return Role.NORM
    if "conv" in own:
        return Role.CONVOLUTION
    embeds = "embed" in own
    if own in _POSITIONS or (embeds and any(word in own for word in _NO_TABLE[:3])):
        return Role.POSITIONS
    if own in _TABLES or "lm_head" in parts or (own in _HEADS and not in_block) or name == "shared":
        return Role.TABLE
    return Role.TABLE if embeds and not any(word in own for word in _NO_TABLE) else Role.LINEAR


def tensor_role(name: str, dtype: str, shape: Sequence[int]) -> Role:
    """What a tensor of a checkpoint is for.

    Parameters
    ----------
    name : str
        Such as "model.layers.0.mlp.up_proj.weight".
    dtype : str
        Its RSV name.
    shape : sequence of int
    """
    layer, _, last = name.rpartition(".")
    if dtype not in FLOAT_DTYPES:
        return Role.NO_FLOATS
    if len(shape) < 2:
        return Role.VECTOR
    parts = layer.split(".")
    if last != "weight" or not layer:
        return Role.EXPERTS if "experts" in parts and len(shape) == 3 else Role.PARAMETER
    role = layer_role(layer)
    if not role.is_quantized or (len(shape) == 2 and _SWITCHES.isdisjoint(parts)):
        return role
    stacked = not _STACKS.isdisjoint(parts[:-1]) or parts[-1] in _LAST_STACKS
    return Role.STACK if len(shape) == 3 and stacked else Role.NO_MATRIX
