"""The optional level of sets (SPEC section 12.1, PROTOCOL.md): shards are made and given to an adapter's `merge`.

    python conformance/sets.py --adapter "CMD"     a line for each case; exit code 1 if one fails
    python conformance/sets.py --write DIR         all files, a folder for each case, and cases.json

Standard library only.
"""

from __future__ import annotations

import argparse
import base64
import copy
import hashlib
import json
import shlex
import struct
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

COUNT = 3
FLAGS = [b"\0\1\2"]  # a tensor of bool; a blob that is copied stays as it is (RSV-818)
SECONDS = 60
Files = dict[str, bytes]


def align(x: int, a: int) -> int:
    return -(-x // a) * a


def canonical(tree: Any) -> bytes:
    """RFC 8785, of what is here: integers, and no member beyond U+FFFF."""
    return json.dumps(tree, sort_keys=True, separators=(",", ":"), ensure_ascii=False).encode()


def digest(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


@dataclass
class Layer:
    """Two rows of 8 codes of 1 bit."""

    centroids: bytes
    signs: bytes | None
    data: bytes


@dataclass
class Content:
    """What one file holds."""

    layers: dict[str, Layer]
    tensors: dict[str, bytes]
    attachments: dict[str, bytes] = field(default_factory=dict)
    metadata: dict[str, str] = field(default_factory=dict)
    extensions: dict[str, Any] = field(default_factory=dict)

    def header(self) -> tuple[dict[str, Any], list[bytes]]:
        """By the rules of section 11, and the blobs in walk order."""
        layers = sorted(self.layers.items())
        books = list(dict.fromkeys(x.centroids for _, x in layers))
        signs = list(dict.fromkeys(x.signs for _, x in layers if x.signs is not None))
        tensors, attachments = sorted(self.tensors.items()), sorted(self.attachments.items())
        header = {
            "codebooks": [{"bits": 1, "window": 1, "sha256": digest(x)} for x in books],
            "transforms": [
                {"dim": 8, "hadamard": 8, "diagonal": {"kind": "signs", "sha256": digest(x)}, "factor": None}
                for x in signs
            ],
            "layers": [
                {
                    "name": name, "in_features": 8, "out_features": 2, "stack": 1, "bias": None,
                    "codebook": books.index(x.centroids), "sha256": digest(x.data),
                    "transform": None if x.signs is None else signs.index(x.signs),
                }
                for name, x in layers
            ],
            "tensors": [
                {"name": name, "dtype": "bool" if x in FLAGS else "u8", "shape": [len(x)], "sha256": digest(x)}
                for name, x in tensors
            ],
            "attachments": [
                {"name": name, "media_type": "text/plain", "nbytes": len(x), "sha256": digest(x)}
                for name, x in attachments
            ],
            "metadata": self.metadata, "requires": [], "extensions": self.extensions,
        }  # fmt: skip
        return header, [
            *books,
            *signs,
            *(x.data for _, x in layers),
            *(x for _, x in tensors),
            *(x for _, x in attachments),
        ]

    def file(self) -> bytes:
        header, blobs = self.header()
        text = canonical(header)
        file = bytes(64) + text
        for blob in blobs:
            file = file.ljust(align(len(file), 64), b"\0") + blob
        file = file.ljust(align(len(file), 16384), b"\0")
        prologue = struct.pack("<8sHHIQQ", b"\x89RSV\r\n\x1a\n", 1, 0, 0, len(text), len(file))
        return prologue + hashlib.sha256(prologue + text).digest() + file[64:]


def a_layer(centroids: tuple[float, float], signs: int | None, k: int) -> Layer:
    codes = struct.pack("<II", 0x5A ^ k, 0x0F ^ k).ljust(64, b"\0")
    data = codes + struct.pack("<ff", 1 + k, 0.5)
    return Layer(struct.pack("<ff", *centroids), None if signs is None else bytes([signs]), data)


def a_set(salt: str = "", note: bool = True) -> tuple[list[Content], Content]:
    """The shards, and the file that holds the same.

    Codebooks and transforms are in several shards, and come in another order there than in the whole.
    """
    tensors = {f"{salt}{kind}.{i}": kind.encode() * (100 + i) for kind in "ab" for i in range(COUNT)}
    tensors |= {f"{salt}\xe9": b"1", f"{salt}\uffee": b"2", f"{salt}\U0001f600": FLAGS[0]}
    wide, narrow = (-1.0, 1.0), (-0.5, 0.5)
    layers = {
        f"{salt}m.0": a_layer(wide, 0x96, 0),
        f"{salt}m.1": a_layer(narrow, None, 1),
        f"{salt}m.2": a_layer(narrow, 0x3C, 2),
        f"{salt}m.3": a_layer(wide, 0x96, 3),
    }
    attachments, metadata = {"notes.txt": b"attached"}, {"name": f"set {salt}"}
    others: dict[str, Any] = {"org.example.note": [1]} if note else {}
    whole = Content(layers, tensors, attachments, metadata, others)
    id, named = hashlib.sha256(canonical(whole.header()[0])).hexdigest(), sorted(tensors)
    shards = []
    for i, held in enumerate(("1", "20", "3")):  # the numbers of the layers
        shard = Content(
            {f"{salt}m.{k}": layers[f"{salt}m.{k}"] for k in held}, {k: tensors[k] for k in named[3 * i : 3 * i + 3]}
        )
        shard.metadata = dict(metadata)
        shard.extensions = {**(others if i == 0 else {}), "set": {"id": id, "count": COUNT, "position": i}}
        shard.attachments = attachments if i == 0 else {}
        shards.append(shard)
    return shards, whole


def name(position: int) -> str:
    return f"model-{position + 1:05d}-of-{COUNT:05d}.rsv"


def named(shards: list[Content]) -> Files:
    return {name(i): shard.file() for i, shard in enumerate(shards)}


def cases() -> list[tuple[str, str, Files, str, str | bytes]]:
    """Id, rule, files, which one is given, and the code to refuse it with or the file to make of it."""
    shards, content = a_set()
    files, whole = named(shards), content.file()
    foreign = named(a_set("x.")[0])
    plain, plain_whole = a_set(note=False)
    first, second, third = (name(i) for i in range(COUNT))
    id = hashlib.sha256(canonical(content.header()[0])).hexdigest()

    def alone(**members: Any) -> Content:
        return replace(
            content, extensions={**content.extensions, "set": {"id": id, "count": 1, "position": 0} | members}
        )

    recoded = {"m.2": a_layer((-2.0, 2.0), 0x3C, 2)}

    def spoilt(change: Callable[[Content], object]) -> Files:
        shard = copy.deepcopy(shards[1])
        change(shard)
        return files | {second: shard.file()}

    def without(*names: str) -> Files:
        return {key: data for key, data in files.items() if key not in names}

    other = "foreign_shard"
    return [
        ("whole", "RSV-915", files, first, whole),
        ("by-the-last", "RSV-911", files, third, whole),
        ("no-extensions", "RSV-915", named(plain), first, plain_whole.file()),
        ("a-file-alone", "RSV-910", {"model.rsv": whole}, "model.rsv", whole),
        ("first-missing", "RSV-913", without(first), second, "missing_shard"),
        ("last-missing", "RSV-913", without(third), first, "missing_shard"),
        ("another-set", "RSV-912", files | {second: foreign[second]}, first, other),
        ("no-shard", "RSV-912", spoilt(lambda x: x.extensions.clear()), first, other),
        ("a-member-more", "RSV-910", spoilt(lambda x: x.extensions["set"].update(more=1)), first, other),
        ("doubled", "RSV-912", files | {second: files[third]}, first, other),
        ("exchanged", "RSV-912", files | {second: files[third], third: files[second]}, first, other),
        ("one-of-one", "RSV-911", {"model.rsv": alone().file()}, "model.rsv", whole),
        ("renamed", "RSV-911", {"model.rsv": files[first]} | without(first), "model.rsv", other),
        ("no-name", "RSV-911", {key.removeprefix("model"): data for key, data in files.items()}, first[5:], other),
        ("position-beyond", "RSV-910", {"model.rsv": alone(position=1).file()}, "model.rsv", other),
        ("count-beyond", "RSV-910", {"model.rsv": alone(count=100000).file()}, "model.rsv", other),
        ("id-in-capitals", "RSV-910", {"model.rsv": alone(id="A" * 64).file()}, "model.rsv", other),
        ("foreign-and-missing", "RSV-912", {first: files[first], third: foreign[third]}, first, other),
        ("another-count", "RSV-912", spoilt(lambda x: x.extensions["set"].update(count=4)), first, other),
        ("broken-and-foreign", "RSV-916", files | {second: foreign[second], third: bytes(64)}, first, "bad_magic"),
        ("metadata", "RSV-914", spoilt(lambda x: x.metadata.update(name="other")), first, "set_mismatch"),
        ("extension-twice", "RSV-914", spoilt(lambda x: x.extensions.update(more=1)), first, "set_mismatch"),
        ("attachment-behind", "RSV-914", spoilt(lambda x: x.attachments.update(more=b"1")), first, "set_mismatch"),
        ("tensor-twice", "RSV-914", spoilt(lambda x: x.tensors.update({"a.0": b"a"})), first, "set_mismatch"),
        ("name-claimed", "RSV-914", spoilt(lambda x: x.tensors.update({"m.3.bias": b"a"})), first, "set_mismatch"),
        ("a-tensor-less", "RSV-915", spoilt(lambda x: x.tensors.popitem()), first, "set_mismatch"),
        ("another-codebook", "RSV-915", spoilt(lambda x: x.layers.update(recoded)), first, "set_mismatch"),
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
