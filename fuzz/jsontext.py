"""JSON trees that may break the rules: an object is a list of pairs, a token may be any text, a blob is its digest."""

from __future__ import annotations

import hashlib
import json
import random
from dataclasses import dataclass
from typing import Any


class Members(list[list[Any]]):
    """An object: [name, value] pairs, names not necessarily different."""

    def get(self, name: str) -> Any:
        return next((value for key, value in self if key == name), None)

    def set(self, name: str, value: Any) -> None:
        for pair in self:
            if pair[0] == name:
                pair[1] = value


class Raw(str):
    """Text that goes into the header as it is."""


@dataclass
class Blob:
    """Stands where the digest of an entry stands; `stated` is written in its place."""

    data: bytes
    stated: str | None = None

    def digest(self) -> str:
        return self.stated or hashlib.sha256(self.data).hexdigest()


def parse(text: bytes) -> Any:
    """A tree of Members, lists and scalars."""
    return json.loads(text, object_pairs_hook=lambda pairs: Members([key, value] for key, value in pairs))


class Style:
    """How to write a tree: `chance` of white space and of escapes where they are not needed."""

    def __init__(self, rng: random.Random | None = None, chance: float = 0.0) -> None:
        self._rng = rng or random.Random(0)
        self._chance = chance

    def dump(self, tree: Any) -> bytes:
        return self._value(tree).encode("utf-8", "surrogatepass")

    def _value(self, tree: Any) -> str:
        if isinstance(tree, Raw):
            return str(tree)
        if isinstance(tree, Blob):
            return f'"{tree.digest()}"'
        if isinstance(tree, str):
            return self._string(tree)
        if isinstance(tree, Members):
            parts = (f"{self._value(key)}{self._space()}:{self._space()}{self._value(value)}" for key, value in tree)
            return f"{{{self._join(parts)}}}"
        if isinstance(tree, list):
            return f"[{self._join(map(self._value, tree))}]"
        return json.dumps(tree)

    def _join(self, parts: Any) -> str:
        return f"{self._space()},{self._space()}".join(parts) + self._space()

    def _space(self) -> str:
        return self._rng.choice([" ", "\n", "\t", "\r\n", "  "]) if self._rng.random() < self._chance else ""

    def _string(self, text: str) -> str:
        if self._rng.random() >= self._chance:
            return json.dumps(text, ensure_ascii=False)
        return f'"{"".join(self._character(c) for c in text)}"'

    def _character(self, c: str) -> str:
        if self._rng.random() < 0.5:
            units = c.encode("utf-16-be", "surrogatepass").hex()
            escapes = (units[i : i + 4] for i in range(0, len(units), 4))
            return "".join(f"\\u{unit.upper() if self._rng.random() < 0.5 else unit}" for unit in escapes)
        return "\\/" if c == "/" else json.dumps(c, ensure_ascii=False)[1:-1]
