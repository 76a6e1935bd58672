"""Damaged VQRS files: each is refused by an RsvError, or taken over as a file that is sound.

    python -m fuzz.vqrs [--count N] [--seed S]

Numbers of the header are replaced by others, members by values of other types, layers repeated and dropped; then bytes
anywhere, and the length. Memory is limited, so that a file that asks for much of it is found.
"""

from __future__ import annotations

import argparse
import copy
import json
import random
import resource
import struct
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np

import rsv_format

ROOT = Path(__file__).resolve().parents[1]
PAGE = 16384
ROOM = 2**30  # bytes of memory that one file may take, with all that is there
NUMBERS = [0, 1, 2, 3, 4, 5, 8, 12, 20, 63, 2**14, 2**24, 2**24 + 1, 2**31 - 1, 2**31, 2**53 - 1, 2**53, -1, 2**64]
OTHERS: list[Any] = [None, True, "", "x" * 600, [], {}, 1.5, "00" * 40]


def parts(file: bytes) -> tuple[Any, bytes]:
    """The header as a tree, and the sections."""
    end = 12 + int.from_bytes(file[8:12], "little")
    return json.loads(file[12:end]), file[-(-end // PAGE) * PAGE :]


def whole(tree: Any, sections: bytes) -> bytes:
    text = json.dumps(tree).encode()
    head = struct.pack("<4sII", b"VQRS", 2, len(text)) + text
    return head + bytes(-len(head) % PAGE) + sections


def mutated(file: bytes, rng: random.Random) -> bytes:
    tree, sections = parts(file)
    tree = copy.deepcopy(tree)
    for _ in range(rng.randrange(4)):
        layers = tree.get("layers")
        layers = layers if isinstance(layers, list) else None
        target = rng.choice(layers) if layers and rng.random() < 0.8 else tree
        if not isinstance(target, dict) or not target:
            continue
        name = rng.choice([*target])
        match rng.randrange(6):
            case 0:
                target[name] = rng.choice(NUMBERS)
            case 1 if isinstance(target[name], int):
                target[name] += rng.choice([-PAGE, -4, -1, 1, 4, PAGE])
            case 2:
                target[name] = rng.choice(OTHERS)
            case 3:
                del target[name]
            case 4 if layers:
                layers.insert(rng.randrange(len(layers) + 1), copy.deepcopy(rng.choice(layers)))
            case 5 if layers:
                del layers[rng.randrange(len(layers))]
    data = bytearray(whole(tree, sections))
    for _ in range(rng.choice([0, 0, 1, 3])):
        data[rng.randrange(len(data)) if rng.random() < 0.5 else rng.randrange(min(2000, len(data)))] ^= (
            1 << rng.randrange(8)
        )
    for _ in range(rng.choice([0, 0, 1])):  # a float of a section
        at = len(data) - len(sections) + 4 * rng.randrange(len(sections) // 4)
        data[at : at + 4] = rng.choice([b"\0\0\xc0\x7f", b"\0\0\x80\x7f", b"\0\0\x80\xff", b"\xff" * 4, b"\0" * 4])
    if rng.random() < 0.1:
        del data[rng.randrange(len(data)) :]
    return bytes(data)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    if sys.platform == "linux":
        resource.setrlimit(resource.RLIMIT_DATA, (ROOM, ROOM))
    peer = np.load(ROOT / "tests" / "vqrs.npz")
    seeds = [peer[name].tobytes() for name in peer.files if name.endswith(".file")]
    rng, outcomes = random.Random(arguments.seed), Counter[str]()
    memory = "/dev/shm" if Path("/dev/shm").is_dir() else None  # each file is synced, which a disk takes its time for
    with tempfile.TemporaryDirectory(dir=memory) as folder:
        source, target = Path(folder) / "old", Path(folder) / "new.rsv"
        for i in range(arguments.count):
            source.write_bytes(mutated(rng.choice(seeds), rng))
            try:
                rsv_format.convert(source, target, force=True, max_order=256)
                assert rsv_format.verify(target) == []
                outcomes["taken over"] += 1
            except rsv_format.RsvError as e:
                outcomes[e.code] += 1
            except BaseException:
                kept = Path(f"vqrs-{arguments.seed}-{i}.bin")
                kept.write_bytes(source.read_bytes())
                print(f"kept as {kept}", file=sys.stderr)
                raise
    print(", ".join(f"{code} {count}" for code, count in outcomes.most_common()))


if __name__ == "__main__":
    main()
