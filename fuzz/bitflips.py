"""Every single-bit flip and every truncation of a small file, in three readers: all refused, with the same codes.

python -m fuzz.bitflips [FILE]
"""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import rsv_format

ROOT = Path(__file__).resolve().parents[1]
FILE = ROOT / "conformance" / "valid" / "spec-example.rsv"
C = ROOT / "conformance" / "readers" / "c" / "build" / "rsv-bitflips"
JAVASCRIPT = ROOT / "fuzz" / "bitflips.mjs"


def answer(data: bytes | bytearray, *, verify: bool) -> str:
    try:
        with rsv_format.open(data) as file:
            if verify:
                rsv_format.verify(file)
    except rsv_format.RsvError as e:
        return e.code
    return "ok"


def flips(data: bytes, bits: Iterable[int]) -> list[str]:
    """The answer to each flip. Read-only bytes, so that nothing of a file outlives its call."""
    answers = []
    for bit in bits:
        flipped = bytearray(data)
        flipped[bit // 8] ^= 1 << bit % 8
        answers.append(answer(bytes(flipped), verify=True))
    return answers


def tally(answers: list[str]) -> dict[str, Any]:
    text = "".join(f"{a}\n" for a in answers)
    return {"answers": dict(Counter(answers)), "sha256": hashlib.sha256(text.encode()).hexdigest()}


def python(path: Path) -> dict[str, Any]:
    data = path.read_bytes()
    answers = flips(data, range(8 * len(data)))
    accepted = [bit for bit, a in enumerate(answers) if a == "ok"]
    assert not accepted, f"accepted with one of these bits flipped: {accepted}"
    cuts = [answer(data[:length], verify=False) for length in range(len(data))]
    return {"flips": tally(answers), "truncations": tally(cuts)}


def driver(*command: str | Path) -> dict[str, Any]:
    return json.loads(subprocess.run([*command], check=True, capture_output=True).stdout)


READERS = {
    "C": lambda path: driver(C, path),
    "JavaScript": lambda path: driver("node", JAVASCRIPT, path),
    "Python": python,
}


def main(path: Path) -> int:
    results = {}
    for name, reader in READERS.items():
        start = time.monotonic()
        results[name] = found = reader(path)
        for kind, one in found.items():
            accepted = one["answers"].get("ok", 0)
            total = sum(one["answers"].values())
            print(f"{name:10} {kind:11} {total} tried, {total - accepted} refused, {accepted} accepted", end="; ")
        print(f"{time.monotonic() - start:.1f} s")
    print(json.dumps(results["Python"], indent=1))
    same = all(found == results["Python"] for found in results.values())
    print("each answer is the same in all readers" if same else "the readers disagree")
    whole = not any("ok" in one["answers"] for one in results["Python"].values())
    return 0 if same and whole else 1


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1]) if len(sys.argv) > 1 else FILE))
