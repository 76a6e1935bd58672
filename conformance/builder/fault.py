"""What the modules of invalid files share: a case with one fault, and changes of a header tree."""

from __future__ import annotations

from typing import Any

from recipe import Recipe, build, split

from builder.cases import PHASE, Case, Cases
from builder.doc import Doc

DROP = object()


def add(
    cases: Cases,
    id: str,
    error: str,
    rules: list[str] | str,
    data: bytes | None,
    what: str,
    *,
    base: str | None = "spec-example",
    flags: list[str] | None = None,
    faults: list[str] | None = None,
    recipe: Recipe | None = None,
    group: str = "invalid",
    dequantize: dict[str, Any] | None = None,
) -> None:
    """dequantize: what must come out although the file is not sound (RSV-511)."""
    flags = list(flags or [])
    if recipe is not None:
        flags.append("large")
        data = build(recipe)
    elif PHASE[error] in ("json", "schema") and data is not None and group == "invalid":
        # there are many of these, and it is the text that matters
        recipe = split(data, 64, 64 + int.from_bytes(data[16:24], "little"))
    assert data is not None
    if PHASE[error] == "payload":
        # open accepts the file: what decode prints is not compared
        operations = {"decode": "accepted", "verify": "invalid"}
        if "derived" in flags:
            code = "haar_witness_mismatch"
            operations["dequantize"] = "invalid" if error == code else f"invalid:{code}"
        if dequantize is not None:
            operations["dequantize"] = "valid"
    else:
        operations = {"decode": "invalid", "verify": "invalid", "dequantize": "invalid"}
    rules = [rules] if isinstance(rules, str) else rules
    if faults:
        flags.append("two-fault")
    if "bomb" in flags:
        rules = [*rules, "RSV-002"]
    if operations["decode"] == "accepted":
        rules = [*rules, "RSV-003"]
    if dequantize is not None:
        rules = [*rules, "RSV-511"]
    cases.add(
        Case(
            id,
            group,
            data,
            "invalid",
            rules,
            operations,
            what,
            error=error,
            faults=faults,
            flags=flags,
            base=base,
            recipe=recipe,
            expected=None if dequantize is None else {"dequantize": dequantize},
        )
    )


def at(tree: Any, pointer: str) -> tuple[Any, Any]:
    """The container and key that a JSON pointer leads to."""
    keys = pointer.split("/")[1:]
    for key in keys[:-1]:
        tree = tree[int(key) if isinstance(tree, list) else key]
    return tree, int(keys[-1]) if isinstance(tree, list) else keys[-1]


def with_value(doc: Doc, pointer: str, value: Any) -> Doc:
    doc = doc.copy()
    node, key = at(doc.header, pointer)
    if value is DROP:
        del node[key]
    else:
        node[key] = value
    return doc
