"""What a case is, and the list that the modules of cases fill."""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from typing import Any

from recipe import Recipe, build

from builder.doc import sha256

TOLERANCE = {"w": 1e-5, "tx": 1e-5, "y": 1e-4}

# SPEC section 9, in its order: the lint holds this to the text.
CODES = {
    "framing": [
        "file_too_short", "bad_magic", "unsupported_version", "reserved_flags", "header_too_large", "file_truncated",
        "trailing_bytes", "header_out_of_bounds", "header_digest_mismatch", "header_padding_nonzero",
    ],
    "json": [
        "invalid_utf8", "json_limit", "invalid_json", "json_number", "json_duplicate_key", "json_lone_surrogate",
    ],
    "schema": ["unsupported_feature", "schema_violation"],
    "reference": ["transform_shape", "bad_reference", "dim_mismatch", "unreferenced", "duplicate_name"],
    "extent": ["file_extent"],
    "payload": [
        "padding_nonzero", "blob_digest_mismatch", "nonfinite_value", "zero_diagonal", "codebook_order",
        "not_orthogonal", "haar_witness_mismatch",
    ],
}  # fmt: skip
PHASE = {code: phase for phase, codes in CODES.items() for code in codes}

FLAGS = {
    "canonical": "The file is in canonical form (SPEC section 11): an encoder given its content makes these bytes.",
    "non-canonical": "The file is valid but a canonical writer would not have written it (RSV-803).",
    "two-fault": "Holds two faults, `faults`, to pin the order of checks; `error` is the first of them.",
    "linked": "One fault that cannot be made in one place: the mutation needs consistent changes elsewhere.",
    "bomb": "Declares or implies far more than it holds; refusing it must not cost memory or time.",
    "large": "A file of many bytes, stored as a recipe.",
    "edge": "Lies exactly on a limit, on its legal side.",
    "parser-trap": "Where common parsers, regular expressions, compilers or languages go another way.",
    "derived": "The fault shows when a factor is derived for use (dequantize) as well as in verify.",
}


@dataclass
class Case:
    id: str
    group: str
    data: bytes
    result: str
    rules: list[str]
    operations: dict[str, str]
    mutation: str
    error: str | None = None
    faults: list[str] | None = None
    flags: list[str] = field(default_factory=list)
    base: str | None = None
    expected: dict[str, Any] | None = None
    recipe: Recipe | None = None
    content: bytes | None = None
    since: str = "1.0"

    @property
    def suffix(self) -> str:
        return "json" if self.content is not None else "rsv"

    def files(self) -> dict[str, bytes]:
        """Paths below conformance/ and what they hold."""
        files: dict[str, bytes] = {}
        stem = f"{self.group}/{self.id}"
        if self.content is not None:
            files[f"{stem}.json"] = self.content
            if self.result == "valid":
                files[f"{stem}.rsv"] = self.data
        else:
            if self.recipe is None:
                files[f"{stem}.rsv"] = self.data
            else:
                files[f"{stem}.recipe.json"] = dump(self.recipe)
                assert build(self.recipe) == self.data
            if self.expected is not None:
                files[f"{stem}.json"] = dump(self.expected)
        return files

    def entry(self) -> dict[str, Any]:
        """The case in the manifest."""
        stem, files = f"{self.group}/{self.id}", self.files()
        entry: dict[str, Any] = {"id": self.id, "group": self.group}
        if self.content is not None:
            entry |= {"file": f"{stem}.json", "nbytes": len(self.content), "sha256": sha256(self.content)}
        else:
            source = {"recipe": f"{stem}.recipe.json"} if self.recipe else {"file": f"{stem}.rsv"}
            entry |= source | {"nbytes": len(self.data), "sha256": sha256(self.data)}
        entry |= {
            "operations": self.operations,
            "result": self.result,
            "error": self.error,
            "phase": PHASE[self.error] if self.error else None,
            "rules": self.rules,
            "flags": self.flags,
            "base": self.base,
            "mutation": self.mutation,
            "since": self.since,
        }
        if self.faults:
            entry["faults"] = self.faults
        if self.content is not None and self.result == "valid":
            entry["expected"] = {"file": f"{stem}.rsv", "sha256": sha256(self.data)}
        elif self.expected is not None:
            entry["expected"] = {"file": f"{stem}.json", "sha256": sha256(files[f"{stem}.json"])}
            if "dequantize" in self.expected:
                entry["tolerance"] = TOLERANCE
        return entry


def dump(tree: Any) -> bytes:
    return (json.dumps(tree, ensure_ascii=True, sort_keys=True, separators=(",", ":")) + "\n").encode()


class Cases(list[Case]):
    """The list; `add` refuses an id that is taken."""

    def add(self, case: Case) -> None:
        assert all(case.id != other.id for other in self), f"{case.id} is taken"
        self.append(case)

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return next(case for case in self if case.id == key)
        return super().__getitem__(key)
