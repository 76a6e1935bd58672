"""GPT-2's layers of class Conv1D, whose weights lie (in, out): turned round, as linear layers have them.

mlx-lm turns them when it loads a checkpoint, by the names that they have there. Under the names of its own modules it
takes them as they are.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from rsv_format.sources.base import SourceTensor, transposed

_LAYER = re.compile(r"model\.h\.\d+\.(?:attn\.c_attn|attn\.c_proj|mlp\.c_fc|mlp\.c_proj)\.weight")
_MASK = re.compile(r"h\.\d+\.attn\.(?:bias|masked_bias)")


def turned(tensors: Mapping[str, SourceTensor], config: Mapping[str, Any]) -> dict[str, SourceTensor]:
    """The tensors of a GPT-2, by mlx-lm's names; what has these already is mlx-lm's, and left as it is.

    A head that is the embedding again is left out, and so are masks that old checkpoints hold.
    """
    if any(name.startswith("model.") for name in tensors):
        return dict(tensors)
    made: dict[str, SourceTensor] = {}
    for name, tensor in tensors.items():
        own = name.removeprefix("transformer.")
        repeats = own == "lm_head.weight" and config.get("tie_word_embeddings") is not False
        if not repeats and not _MASK.fullmatch(own):
            own = f"model.{own}"
            made[own] = replace(transposed(tensor), name=own) if _LAYER.fullmatch(own) else replace(tensor, name=own)
    return made
