"""What the modules of invalid files share: a case with one fault, and changes of a header tree."""

from __future__ import annotations

from typing import Any

from builder.cases import PHASE, Case, Cases
from builder.doc import Doc
from builder.recipe import Recipe, build, split

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
) -> None:
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
    else:
        operations = {"decode": "invalid", "verify": "invalid", "dequantize": "invalid"}
    rules = [rules] if isinstance(rules, str) else rules
    if faults:
        flags.append("two-fault")
    if "bomb" in flags:
        rules = [*rules, "RSV-002"]
    if operations["decode"] == "accepted":
        rules = [*rules, "RSV-003"]
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
