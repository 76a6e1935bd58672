"""Rebuild the vectors: every file below valid, invalid, order, kernels and encode, and manifest.json.

    python conformance/generate.py [--check] [--out DIR]

Standard library only, no implementation of RSV imported; the same bytes on every platform. --check writes
nothing and exits with 1 if a file differs.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from builder import encode, framing, kernels, order, payload, reference, structure, text, valid, windows
from builder.cases import FLAGS, TOLERANCE, Cases, dump
from builder.doc import sha256

HERE = Path(__file__).resolve().parent
FOLDERS = ("valid", "invalid", "order", "kernels", "encode")
VERSION = "1.0"
# Ids of cases that were withdrawn: never to be used again.
RETIRED = ["json-values-limit", "json-values-limit-plus-1"]
NOT_COVERED = {
    "RSV-780": "raised by a loader that binds a file to a model, which the protocol does not reach",
    "RSV-781": "as RSV-780",
    "RSV-782": "as RSV-780",
    "RSV-783": "as RSV-780",
    "RSV-784": "as RSV-780",
    "RSV-551": "about programs that extract attachments to files",
    "RSV-724": "about documentation",
    "RSV-818": "about programs that copy and change files",
    "RSV-820": "about replacing a file, which shows only in a crash",
    "RSV-901": "about versions to come",
    **{f"RSV-{rule}": "of the optional level of sets: sets.py" for rule in range(910, 917)},
}


def manifest(cases: Cases, tables: dict[str, Any]) -> bytes:
    """One case a line, so that a change shows as one."""
    head = {
        "$schema": "manifest.schema.json",
        "format": "RSV",
        "flags": FLAGS,
        "tolerances": TOLERANCE,
        "not_covered": NOT_COVERED,
        "retired": RETIRED,
        "versions": {VERSION: [case.id for case in cases if case.since == VERSION]},
    }
    lines = ["{"]
    lines += [f" {dump(key).decode().strip()}: {dump(value).decode().strip()}," for key, value in head.items()]
    entries = []
    for name, table in tables.items():
        data = dump(table)
        entry = {"id": f"kernel-{name}", "file": f"kernels/{name}.json", "sha256": sha256(data)}
        entries.append(entry | {"rules": table["rules"], "tolerance": table["tolerance"], "since": VERSION})
    for member, items in (("kernels", entries), ("cases", [case.entry() for case in cases])):
        lines.append(f' "{member}": [')
        lines += [f"  {dump(item).decode().strip()}," for item in items]
        lines[-1] = lines[-1][:-1]
        lines.append(" ]," if member == "kernels" else " ]")
    return ("\n".join(lines) + "\n}\n").encode()


def build() -> dict[str, bytes]:
    """Paths below conformance/ and their bytes."""
    cases = Cases()
    for module in (valid, windows, framing, text, structure, reference, payload, order, encode):
        module.all_cases(cases)
    tables = kernels.tables()
    files: dict[str, bytes] = {}
    for case in cases:
        for path, data in case.files().items():
            assert path not in files, path
            files[path] = data
    files |= {f"kernels/{name}.json": dump(table) for name, table in tables.items()}
    files["manifest.json"] = manifest(cases, tables)
    return files


def existing(root: Path) -> set[str]:
    """Generated files that are there."""
    found = {p.relative_to(root).as_posix() for folder in FOLDERS for p in (root / folder).rglob("*") if p.is_file()}
    return found | ({"manifest.json"} if (root / "manifest.json").exists() else set())


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="compare, write nothing")
    parser.add_argument("--out", type=Path, default=HERE, help="where the tree goes")
    options = parser.parse_args()
    files, root = build(), options.out
    if options.check:
        wrong = sorted(existing(root) ^ set(files))
        wrong += sorted(p for p in existing(root) & set(files) if (root / p).read_bytes() != files[p])
        print("\n".join(f"differs: {path}" for path in wrong) or f"{len(files)} files as generated")
        return 1 if wrong else 0
    for path in existing(root) - set(files):
        (root / path).unlink()
    for path, data in files.items():
        target = root / path
        target.parent.mkdir(parents=True, exist_ok=True)
        target.write_bytes(data)
    print(f"{len(files)} files, {sum(map(len, files.values()))} bytes")
    return 0


if __name__ == "__main__":
    sys.exit(main())
