"""The optional level of sets (SPEC section 12.1, PROTOCOL.md): shards are made and given to an adapter's `merge`.

    python conformance/sets.py --adapter "CMD"     a line for each case; exit code 1 if one fails
    python conformance/sets.py --write DIR         all files, a folder for each case, and cases.json

Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import hashlib
import json
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

COUNT = 3
SECONDS = 60
Files = dict[str, bytes]


def align(x: int, a: int) -> int:
    return -(-x // a) * a


def canonical(tree: Any) -> bytes:
    """RFC 8785, of what is here: ASCII, integers."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":")).encode()


def a_file(
    tensors: dict[str, bytes], attachments: dict[str, bytes], metadata: dict[str, str], extensions: dict[str, Any]
) -> tuple[bytes, dict[str, Any]]:
    """A file without layers, and its header."""

    def digest(data: bytes) -> str:
        return hashlib.sha256(data).hexdigest()

    header = {
        "codebooks": [], "transforms": [], "layers": [], "requires": [],
        "tensors": [
            {"name": name, "dtype": "u8", "shape": [len(data)], "sha256": digest(data)}
            for name, data in sorted(tensors.items())
        ],
        "attachments": [
            {"name": name, "media_type": "text/plain", "nbytes": len(data), "sha256": digest(data)}
            for name, data in sorted(attachments.items())
        ],
        "metadata": metadata, "extensions": extensions,
    }  # fmt: skip
    text, body = canonical(header), b""
    start = 64 + len(text)
    for data in [*(x for _, x in sorted(tensors.items())), *(x for _, x in sorted(attachments.items()))]:
        body = body.ljust(align(start + len(body), 64) - start, b"\0") + data
    nbytes = align(start + len(body), 16384)
    prologue = struct.pack("<8sHHIQQ", b"\x89RSV\r\n\x1a\n", 1, 0, 0, len(text), nbytes)
    file = prologue + hashlib.sha256(prologue + text).digest() + text + body
    return file.ljust(nbytes, b"\0"), header


def a_set(salt: str = "", note: bool = True) -> tuple[Files, bytes]:
    """Shards by their names, and the file that holds the same."""
    content = {f"{salt}{kind}.{i}": kind.encode() * (100 + i) for kind in "ab" for i in range(COUNT)}
    named = sorted(content)
    spread = [{name: content[name] for name in named[2 * i : 2 * i + 2]} for i in range(COUNT)]
    attachments, metadata = {"notes.txt": b"attached"}, {"name": f"set {salt}"}
    others: dict[str, Any] = {"org.example.note": [1]} if note else {}
    whole, header = a_file(content, attachments, metadata, others)
    id = hashlib.sha256(canonical(header)).hexdigest()
    files = {}
    for i, tensors in enumerate(spread):
        extensions = {**(others if i == 0 else {}), "set": {"id": id, "count": COUNT, "position": i}}
        files[name(i)] = a_file(tensors, attachments if i == 0 else {}, metadata, extensions)[0]
    return files, whole


def name(position: int) -> str:
    return f"model-{position + 1:05d}-of-{COUNT:05d}.rsv"


def changed(file: bytes, change: Callable[[dict[str, Any]], object]) -> bytes:
    """A file with another header; its blobs must not be touched by the change."""
    length = struct.unpack_from("<Q", file, 16)[0]
    header = json.loads(file[64 : 64 + length])
    offset, blobs = align(64 + length, 64), {}
    for kind in ("tensors", "attachments"):
        for entry in header[kind]:
            nbytes = entry["shape"][0] if kind == "tensors" else entry["nbytes"]
            blobs[kind, entry["name"]] = file[offset : offset + nbytes]
            offset = align(offset + nbytes, 64)
    change(header)
    of = {kind: {x["name"]: blobs[kind, x["name"]] for x in header[kind]} for kind in ("tensors", "attachments")}
    return a_file(of["tensors"], of["attachments"], header["metadata"], header["extensions"])[0]


def cases() -> list[tuple[str, str, Files, str, str | bytes]]:
    """Id, rule, files, which one is given, and the code to refuse it with or the file to make of it."""
    files, whole = a_set()
    foreign, _ = a_set("x.")
    first, second, third = (name(i) for i in range(COUNT))

    def spoilt(change: Callable[[dict[str, Any]], object]) -> Files:
        return files | {second: changed(files[second], change)}

    def without(*names: str) -> Files:
        return {key: data for key, data in files.items() if key not in names}

    other = "foreign_shard"
    return [
        ("whole", "RSV-915", files, first, whole),
        ("by-the-last", "RSV-911", files, third, whole),
        ("no-extensions", "RSV-915", a_set(note=False)[0], first, a_set(note=False)[1]),
        ("a-file-alone", "RSV-910", {"model.rsv": whole}, "model.rsv", whole),
        ("first-missing", "RSV-913", without(first), second, "missing_shard"),
        ("last-missing", "RSV-913", without(third), first, "missing_shard"),
        ("another-set", "RSV-912", files | {second: foreign[second]}, first, other),
        ("no-shard", "RSV-912", spoilt(lambda h: h["extensions"].clear()), first, other),
        ("a-member-more", "RSV-910", spoilt(lambda h: h["extensions"]["set"].update(more=1)), first, other),
        ("doubled", "RSV-912", files | {second: files[third]}, first, other),
        ("another-count", "RSV-912", spoilt(lambda h: h["extensions"]["set"].update(count=4)), first, other),
        ("metadata", "RSV-914", spoilt(lambda h: h["metadata"].update(name="other")), first, "set_mismatch"),
        ("extension-twice", "RSV-914", spoilt(lambda h: h["extensions"].update(more=1)), first, "set_mismatch"),
        ("a-tensor-less", "RSV-915", spoilt(lambda h: h["tensors"].pop()), first, "set_mismatch"),
    ]  # fmt: skip


def write(root: Path) -> None:
    listed = []
    for id, rule, files, given, outcome in cases():
        folder = root / id
        folder.mkdir(parents=True, exist_ok=True)
        for file, data in files.items():
            (folder / file).write_bytes(data)
        if isinstance(outcome, bytes):
            (folder / "expected").write_bytes(outcome)
        error = outcome if isinstance(outcome, str) else None
        listed.append({"id": id, "rule": rule, "file": f"{id}/{given}", "error": error})
    (root / "cases.json").write_text(json.dumps(listed, indent=1) + "\n")


def verdict(command: list[str], path: Path, outcome: str | bytes) -> str:
    """What is wrong with an adapter's answer, "" for nothing, "skip" where it has no sets."""
    done = subprocess.run([*command, "merge", str(path)], capture_output=True, timeout=SECONDS, check=False)
    if done.returncode == 77:
        return "skip"
    try:
        answer = json.loads(done.stdout)
    except ValueError:
        return f"exit code {done.returncode}, and no JSON"
    if isinstance(outcome, str):
        return "" if (done.returncode, answer.get("error")) == (1, outcome) else f"expected {outcome}: {answer}"[:300]
    if done.returncode != 0:
        return f"refused: {answer}"
    return "" if base64.b64decode(answer.get("file", "")) == outcome else "another file than expected"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--adapter", metavar="CMD")
    parser.add_argument("--write", type=Path, metavar="DIR")
    options = parser.parse_args()
    if options.write:
        write(options.write)
        return 0
    if not options.adapter:
        parser.error("--adapter or --write is missing")
    failed = 0
    with tempfile.TemporaryDirectory() as folder:
        write(Path(folder))
        for id, rule, _, given, outcome in cases():
            problem = verdict(shlex.split(options.adapter), Path(folder, id, given), outcome)
            failed += problem not in ("", "skip")
            print(f"{'skip' if problem == 'skip' else 'FAIL' if problem else 'pass'} {id} ({rule})", problem)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
