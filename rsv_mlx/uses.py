"""Layers that a model does not treat as layers: whose weight its own code sets, or its `sanitize` changes.

Packed, the first would become dense in the first call, and the second when they are loaded.
"""

from __future__ import annotations

import ast
import re
import sys
from collections.abc import Iterable
from functools import cache
from pathlib import Path

from mlx.nn.layers.base import Module

_SETS = re.compile(r"\bself\.[\w.]+\.weight\s*=[^=]")
_NOT_IN_CALLS = {"__init__", "sanitize", "shard"}


def assigned(modules: Iterable[Module]) -> set[str]:
    """Of a model's modules, names of those whose weight is set while it runs: the last parts of their paths."""
    code = {type(module).__module__ for module in modules}
    return {name for module in code if not module.startswith(("mlx.nn.", "rsv_mlx.")) for name in _assigned(module)}


@cache
def _assigned(module: str) -> frozenset[str]:
    """Those in the code of one Python module; Gemma 3n's has some."""
    try:
        source = Path(getattr(sys.modules[module], "__file__", None) or "").read_text("utf-8")
        functions = ast.walk(ast.parse(source)) if _SETS.search(source) else ()
    except (OSError, ValueError, SyntaxError):  # what has no source is not of mlx-lm
        return frozenset()
    return frozenset(
        target.value.attr
        for function in functions
        if isinstance(function, ast.FunctionDef) and function.name not in _NOT_IN_CALLS
        for statement in ast.walk(function)
        if isinstance(statement, ast.Assign | ast.AugAssign)
        for target in (statement.targets if isinstance(statement, ast.Assign) else [statement.target])
        if isinstance(target, ast.Attribute) and target.attr == "weight" and isinstance(target.value, ast.Attribute)
    )
