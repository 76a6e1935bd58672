"""Check the vectors themselves: ids, schema, digests, coverage, one fault per invalid file.

    python conformance/lint.py

Prints what is wrong and exits with 1 if anything is. Standard library only.
"""

from __future__ import annotations

import ast
import hashlib
import json
import re
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from builder.cases import CODES
from generate import FOLDERS
from run import content

HERE = Path(__file__).resolve().parent
SPEC = HERE.parent / "SPEC.md"
MAX_NBYTES = 20 * 10**6  # all of it lives in git
DTYPE_NBYTES = {"bool": 1, "u8": 1, "i8": 1, "u16": 2, "i16": 2, "f16": 2, "bf16": 2, "u32": 4, "i32": 4, "f32": 4}


def align(x: int, a: int) -> int:
    return -(-x // a) * a


# --- JSON Schema, as far as manifest.schema.json uses it ---

_TYPES = {"object": dict, "array": list, "string": str, "integer": int, "number": (int, float), "null": type(None)}


def violations(value: Any, schema: dict[str, Any], root: dict[str, Any], where: str = "") -> Iterator[str]:
    if "$ref" in schema:
        target = root
        for key in schema["$ref"].split("/")[1:]:
            target = target[key]
        yield from violations(value, target, root, where)
        return
    types = schema.get("type")
    if types:
        allowed = [types] if isinstance(types, str) else types
        if not any(isinstance(value, _TYPES[t]) and not isinstance(value, bool) for t in allowed):
            yield f"{where} is not {types}"
            return
    if "enum" in schema and value not in schema["enum"]:
        yield f"{where} is {value!r}, not one of {schema['enum']}"
    if "pattern" in schema and isinstance(value, str) and not re.search(schema["pattern"], value):
        yield f"{where} is {value!r}, which {schema['pattern']} does not match"
    if isinstance(value, dict):
        properties, extra = schema.get("properties", {}), schema.get("additionalProperties", True)
        yield from (f"{where}/{key} is missing" for key in schema.get("required", []) if key not in value)
        for key, item in value.items():
            if key in properties:
                yield from violations(item, properties[key], root, f"{where}/{key}")
            elif extra is False:
                yield f"{where}/{key} is not defined"
            elif isinstance(extra, dict):
                yield from violations(item, extra, root, f"{where}/{key}")
    if isinstance(value, list):
        if len(value) < schema.get("minItems", 0):
            yield f"{where} has too few items"
        for i, item in enumerate(value):
            yield from violations(item, schema.get("items", {}), root, f"{where}/{i}")


# --- what SPEC.md says ---


def spec_rules(text: str) -> dict[str, str | None]:
    """Every numbered rule and the code that breaking it raises."""
    rules = re.findall(r"^\* \*\*(RSV-\d{3})\*\*(?: \[`(\w+)`\])?", text, re.MULTILINE)
    return {rule: code or None for rule, code in rules}


def spec_codes(text: str) -> dict[str, list[str]]:
    """Codes by phase, in the order of the table of section 9."""
    codes: dict[str, list[str]] = {}
    for phase, code in re.findall(r"^\| (\w+) \| (?:open|verify) \| `(\w+)` \|", text, re.MULTILINE):
        codes.setdefault(phase, []).append(code)
    return codes


# --- where two files differ ---


def tree_places(a: Any, b: Any, where: str = "") -> Iterator[str]:
    if type(a) is not type(b):
        yield where or "/"
    elif isinstance(a, dict):
        gone, new = a.keys() - b.keys(), b.keys() - a.keys()
        if len(gone) == len(new) == 1 and a[min(gone)] == b[min(new)]:  # renamed
            a, b = a | {min(new): a[min(gone)]}, b | {min(gone): a[min(gone)]}
            yield f"{where}/{min(gone)}"
        for key in sorted(a.keys() | b.keys()):
            if key in a and key in b:
                yield from tree_places(a[key], b[key], f"{where}/{key}")
            else:
                yield f"{where}/{key}"
    elif isinstance(a, list) and not any(isinstance(item, dict) for item in [*a, *b]):
        if a != b:  # a shape, a list of strings: one value
            yield where
    elif isinstance(a, list):
        for i in range(max(len(a), len(b))):
            if i < min(len(a), len(b)):
                yield from tree_places(a[i], b[i], f"{where}/{i}")
            else:
                yield f"{where}/{i}"
    elif a != b:
        yield where or "/"


def segments(header: dict[str, Any]) -> list[tuple[str, int, int]]:
    """(pointer of the entry, or gap, start, stop) of all bytes from the first blob on, counted from there."""
    sizes: list[tuple[str, int]] = []
    for i, book in enumerate(header["codebooks"]):
        sizes.append((f"/codebooks/{i}", 4 * 2 ** book["window"]))
    for i, t in enumerate(header["transforms"]):
        m = t["dim"] // t["hadamard"]
        if t["diagonal"]:
            sizes.append(
                (f"/transforms/{i}/diagonal", 4 * t["dim"] if t["diagonal"]["kind"] == "values" else -(-t["dim"] // 8))
            )
        if t["factor"] and t["factor"]["kind"] != "hartley":
            sizes.append((f"/transforms/{i}/factor", 4 * m * (m if t["factor"]["kind"] == "matrix" else 1)))
    for i, layer in enumerate(header["layers"]):
        rows = layer["stack"] * layer["out_features"]
        bits = header["codebooks"][layer["codebook"]]["bits"]
        end = align(rows * align(layer["in_features"], 32) // 8 * bits, 64) + 4 * rows
        if layer["bias"]:
            end = align(end, 64) + rows * DTYPE_NBYTES[layer["bias"]]
        sizes.append((f"/layers/{i}", end))
    for i, tensor in enumerate(header["tensors"]):
        nbytes = DTYPE_NBYTES.get(tensor["dtype"], 8)
        for n in tensor["shape"]:
            nbytes *= n
        sizes.append((f"/tensors/{i}", nbytes))
    sizes += [(f"/attachments/{i}", a["nbytes"]) for i, a in enumerate(header["attachments"])]
    out, end = [], 0
    for pointer, nbytes in sizes:
        start = align(end, 64)
        out += [(f"gap before {pointer}", end, start), (pointer, start, start + nbytes)]
        end = start + nbytes
    return [*out, ("gap at the end", end, 1 << 62)]


def _pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise ValueError
    return dict(pairs)


def places(base: bytes, data: bytes) -> set[str]:
    """Where a mutant of a valid file was changed; what follows from a change (digests, lengths) does not count."""
    if len(data) < 64:
        return {"length"} if base[: len(data)] == data else {"length", "bytes"}
    out = set()
    for name, start, stop in (("magic", 0, 8), ("version_major", 8, 10), ("version_minor", 10, 12), ("flags", 12, 16)):
        if base[start:stop] != data[start:stop]:
            out.add(name)
    (base_n, base_size), (n, size) = struct.unpack_from("<QQ", base, 16), struct.unpack_from("<QQ", data, 16)
    base_text = base[64 : 64 + base_n]

    def digest_covers(nbytes: int) -> bool:
        return hashlib.sha256(data[:32] + data[64 : 64 + nbytes]).digest() == data[32:64]

    signed = n < 2**32 and len(data) >= 64 + n and digest_covers(n)
    header = json.loads(base_text)
    used = segments(header)[-1][1]
    region_start = align(64 + base_n, 64)
    changed: set[str] = set()
    if signed:
        text = data[64 : 64 + n]
        region_start = align(64 + n, 64)
        if text != base_text:
            try:
                tree = json.loads(text, object_pairs_hook=_pairs)
                changed = set(tree_places(header, tree)) or {"header text"}
            except (ValueError, RecursionError):
                changed = {"header text"}
        if any(data[64 + n : region_start]):
            out.add("header padding")
    else:
        if n != base_n:
            out.add("header_nbytes")
        if data[32:64] != base[32:64] and not digest_covers(base_n):
            out.add("header_sha256")
        if data[64 : 64 + base_n] != base_text[: max(0, len(data) - 64)]:
            out.add("header text")
    natural = align(region_start + used if used else 64 + (n if signed else base_n), 16384)
    if len(data) != natural:
        out.add("length")
    if size != base_size and size != natural:
        out.add("file_nbytes")
    region, base_region = data[region_start : max(natural, len(base))], base[align(64 + base_n, 64) :]
    touched = set()
    for name, start, stop in segments(header):
        one, other = region[start:stop], base_region[start:stop]
        if name == "gap at the end" or len(data) < len(base):
            short = min(len(one), len(other))
            differs = one[:short] != other[:short] or any(one[short:])
        else:
            differs = one != other
        if differs:
            touched.add(name)
    changed = {place for place in changed if not (place.endswith("/sha256") and place[:-7] in touched)}
    return out | changed | touched


# --- the checks ---


def check() -> Iterator[str]:
    manifest = json.loads((HERE / "manifest.json").read_bytes())
    schema = json.loads((HERE / "manifest.schema.json").read_bytes())
    yield from violations(manifest, schema, schema)
    cases, kernels = manifest["cases"], manifest["kernels"]
    by_id = {case["id"]: case for case in cases}

    ids = [item["id"] for item in [*cases, *kernels]]
    yield from (f"{id}: the id is there twice" for id in set(ids) if ids.count(id) > 1)
    yield from (f"{id}: the id was retired" for id in ids if id in manifest["retired"])
    listed = [id for version in manifest["versions"].values() for id in version]
    if sorted(listed) != sorted(by_id):
        yield "versions and cases do not list the same ids"
    for version, members in manifest["versions"].items():
        yield from (f"{id}: since is not {version}" for id in members if by_id[id]["since"] != version)

    text = SPEC.read_text("utf-8")
    rules, codes = spec_rules(text), spec_codes(text)
    if {phase: list(members) for phase, members in CODES.items()} != codes:
        yield "builder/cases.py and SPEC section 9 do not list the same codes in the same order"
    yield from coverage(cases, kernels, rules, manifest["not_covered"])
    for case in cases:
        yield from (f"{case['id']}: {problem}" for problem in one_case(case, by_id, rules, manifest["flags"]))
    yield from (
        f"flag {flag} is on no case" for flag in manifest["flags"] if not any(flag in c["flags"] for c in cases)
    )
    yield from listing(cases, kernels)
    yield from independence()


def coverage(cases: Any, kernels: Any, rules: dict[str, str | None], not_covered: dict[str, str]) -> Iterator[str]:
    single = [
        case for case in cases if case["result"] == "invalid" and "faults" not in case and case["group"] != "encode"
    ]
    for phase, members in CODES.items():
        for code in members:
            found = [case for case in single if case["error"] == code]
            if not found:
                yield f"no case for {code}"
            yield from (f"{c['id']}: {code} is of phase {phase}" for c in found if c["phase"] != phase)
    cited = {rule for item in [*cases, *kernels] for rule in item["rules"]}
    yield from (f"SPEC has no rule {rule}" for rule in sorted(cited - set(rules)))
    for rule, code in rules.items():
        if rule in not_covered:
            if rule in cited:
                yield f"{rule} is listed as not covered, and covered"
        elif rule not in cited:
            yield f"{rule} is cited by no case"
        elif code and not any(rule in case["rules"] and case["error"] == code for case in single):
            yield f"{rule}: no case breaks it and expects {code}"


def one_case(case: Any, by_id: Any, rules: dict[str, str | None], flags: dict[str, str]) -> Iterator[str]:
    yield from (f"flag {flag} is not explained" for flag in case["flags"] if flag not in flags)
    if case["result"] == "valid":
        if case["error"] or any("invalid" in outcome for outcome in case["operations"].values()):
            yield "a valid case with an error"
        return
    if not case["error"]:
        yield "an invalid case without a code"
    raised = {rules.get(rule) for rule in case["rules"]}
    if case["error"] not in raised:
        yield f"none of its rules raises {case['error']}"
    if ("two-fault" in case["flags"]) != ("faults" in case):
        yield "faults and the flag two-fault go together"
    if "faults" in case and case["faults"][0] != case["error"]:
        yield "the first fault is not the error"
    if case["base"] is None:
        if "bomb" not in case["flags"]:
            yield "no base"
        return
    if case["base"] not in by_id or by_id[case["base"]]["result"] != "valid":
        yield f"the base {case['base']} is not a valid case"
        return
    base, data = content(by_id[case["base"]]), content(case)
    if "faults" in case:
        return
    if case["group"] == "encode":
        found = set(tree_places(json.loads(base), json.loads(data)))
        if len({place.rsplit("/", 1)[0] for place in found}) != 1:
            yield f"more than one change: {sorted(found)}"
        return
    found = places(base, data)
    if "linked" in case["flags"]:
        if len(found) < 2:
            yield f"one change only, {sorted(found)}, and the flag linked"
    elif len(found) != 1:
        yield f"{len(found)} changes: {sorted(found)}"


def listing(cases: Any, kernels: Any) -> Iterator[str]:
    expected = {}
    for item in [*cases, *kernels]:
        for entry in (item, item.get("expected", {})):
            if "file" in entry:
                expected[entry["file"]] = entry["sha256"]
        if "recipe" in item:
            expected[item["recipe"]] = None
            content(item)
    found = {p.relative_to(HERE).as_posix() for folder in FOLDERS for p in (HERE / folder).rglob("*") if p.is_file()}
    yield from (f"{path} is not listed" for path in sorted(found - expected.keys()))
    yield from (f"{path} is missing" for path in sorted(expected.keys() - found))
    for path in sorted(found & expected.keys()):
        if expected[path] and hashlib.sha256((HERE / path).read_bytes()).hexdigest() != expected[path]:
            yield f"{path} has another digest"
    total = sum((HERE / path).stat().st_size for path in found)
    if total > MAX_NBYTES:
        yield f"{total} bytes, the limit is {MAX_NBYTES}"


def independence() -> Iterator[str]:
    """No file but the one adapter imports an implementation; the builder imports the standard library alone."""
    for path in sorted(HERE.rglob("*.py")):
        name = path.relative_to(HERE).as_posix()
        for node in ast.walk(ast.parse(path.read_text("utf-8"))):
            modules = [a.name for a in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom):
                modules = [node.module or ""]
            for module in modules:
                top = module.split(".")[0]
                local = (HERE / top).exists() or (HERE / f"{top}.py").exists() or (path.parent / f"{top}.py").exists()
                if top not in sys.stdlib_module_names and not local and name != "adapters/python.py":
                    yield f"{name} imports {module}"


def main() -> int:
    problems = list(check())
    print("\n".join(problems) or "no fault found")
    return 1 if problems else 0


if __name__ == "__main__":
    sys.exit(main())
