"""Recipes: a file as a list of parts, `{"hex": H}` or `{"text": T}`, with `"times": n` if it is repeated.

The file is the parts one after the other; text is ASCII. run.py turns recipes into bytes.
"""

from __future__ import annotations

from typing import Any

Recipe = list[dict[str, Any]]


def part(data: bytes, times: int = 1) -> dict[str, Any]:
    body: dict[str, Any] = {"hex": data.hex()}
    if data.isascii() and all(32 <= c < 127 for c in data):
        body = {"text": data.decode()}
    return body if times == 1 else body | {"times": times}


def unit(part: dict[str, Any]) -> bytes:
    return part["text"].encode("ascii") if "text" in part else bytes.fromhex(part["hex"])


def build(recipe: Recipe) -> bytes:
    return b"".join(unit(p) * p.get("times", 1) for p in recipe)


def split(data: bytes, *cuts: int) -> Recipe:
    """A recipe of data whose parts also end at the cuts."""
    ends = [0, *cuts, len(data)]
    return [p for start, stop in zip(ends, ends[1:], strict=False) for p in squeeze(data[start:stop], least=32)]


def squeeze(data: bytes, period: int = 1, least: int = 256) -> Recipe:
    """A recipe of data: runs that repeat with the period become one part."""
    recipe: Recipe = []
    start = i = 0
    while i + period < len(data):
        piece = data[i : i + period]
        # doubling keeps long runs fast
        n = 1
        while data[i : i + 2 * n * period] == piece * (2 * n):
            n *= 2
        step = n
        while step:
            if data[i : i + (n + step) * period] == piece * (n + step):
                n += step
            step //= 2
        if n * period >= least:
            if start < i:
                recipe.append(part(data[start:i]))
            recipe.append(part(piece, n))
            i += n * period
            start = i
        else:
            i += 1
    if start < len(data):
        recipe.append(part(data[start:]))
    return recipe
