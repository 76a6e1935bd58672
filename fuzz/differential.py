"""Mutated files through the three readers: the same files accepted, the same codes, the same content.

    python -m fuzz.differential [--count N] [--seed S] [FILE...]

File number i is made from seed S + i alone. One on which the readers disagree is kept in fuzz/finds.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib.util
import json
import random
import struct
import sys
import tempfile
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np

from fuzz import corpus
from fuzz.adapters import COMMANDS, Adapter, Answer
from fuzz.agree import same_dequantized
from fuzz.mutate import mutate

ROOT = Path(__file__).resolve().parents[1]
FINDS = ROOT / "fuzz" / "finds"
MAX_ORDER = 512  # of a haar or matrix factor: beyond, m^3 steps are a matter of patience


def python_adapter() -> ModuleType:
    spec = importlib.util.spec_from_file_location("python_adapter", ROOT / "conformance" / "adapters" / "python.py")
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


class Readers:
    """All of them behind one question."""

    def __init__(self) -> None:
        self._python = python_adapter()
        self._others = {name: Adapter(command) for name, command in COMMANDS.items()}

    def ask(self, operation: str, path: Path) -> dict[str, Answer]:
        for other in self._others.values():
            other.send(operation, path)
        try:
            exit_code, output = self._python.answer(operation, str(path))
            answers: dict[str, Answer] = {"Python": (exit_code, json.loads(json.dumps(output)))}
        except Exception as e:  # a find, whatever it is
            answers = {"Python": ("crash", repr(e))}
        return answers | {name: other.receive() for name, other in self._others.items()}

    def close(self) -> None:
        for other in self._others.values():
            other.close()


def code(answer: Answer) -> str:
    """ "ok", the code, or "crash"."""
    exit_code, output = answer
    if exit_code == 1:
        return str(output["error"])
    return "ok" if exit_code == 0 else "crash"


def compare(readers: Readers, path: Path) -> tuple[str, str]:
    """The outcome of a file, and where the readers disagree on it, if they do."""
    decoded = readers.ask("decode", path)
    problem = _codes(decoded)
    if problem or code(decoded["Python"]) != "ok":
        return code(decoded["Python"]), problem and f"decode: {problem}"
    if costly(path.read_bytes()):
        return "(not verified)", ""
    verified = readers.ask("verify", path)
    problem = _codes(verified)
    if problem or code(verified["Python"]) != "ok":  # what decode says of a damaged payload is not defined
        return code(verified["Python"]), problem and f"verify: {problem}"
    for name, (_, output) in decoded.items():
        if output != decoded["Python"][1]:
            return "ok", f"decode: {name} has other content"
    values = readers.ask("dequantize", path)
    problem = _codes(values) or same_dequantized(path, {name: output for name, (_, output) in values.items()})
    return "ok", problem and f"dequantize: {problem}"


def _codes(answers: dict[str, Answer]) -> str:
    codes = {name: code(answer) for name, answer in answers.items()}
    agreed = len(set(codes.values())) == 1 and "crash" not in codes.values()
    return "" if agreed else ", ".join(f"{name}: {c}" for name, c in codes.items())


def costly(file: bytes) -> bool:
    """A factor that takes too long to derive or to check; of headers that do not parse, none."""
    try:
        nbytes = struct.unpack_from("<Q", file, 16)[0]
        transforms = json.loads(file[64 : 64 + nbytes])["transforms"]
        return any(t["dim"] // t["hadamard"] > MAX_ORDER for t in transforms if t["factor"])
    except (ValueError, LookupError, TypeError, ArithmeticError, RecursionError, struct.error):
        return False


def generated(count: int, seed: int) -> Iterator[tuple[str, bytes]]:
    """Mutations of the small valid vectors."""
    files = list(corpus.vectors("valid", max_nbytes=16384).values())
    for i in range(seed, seed + count):
        rng = random.Random(i)
        yield f"seed {i}", mutate(rng.choice(files), rng, other=rng.choice(files))


def keep(file: bytes, text: str) -> None:
    FINDS.mkdir(exist_ok=True)
    name = hashlib.sha256(file).hexdigest()[:12]
    (FINDS / f"{name}.rsv").write_bytes(file)
    (FINDS / f"{name}.txt").write_text(text + "\n", "utf-8")


def run(files: Iterator[tuple[str, bytes]]) -> tuple[Counter[str], int]:
    """How often each outcome was agreed on, and the number of disagreements."""
    outcomes: Counter[str] = Counter()
    finds = 0
    readers = Readers()
    with tempfile.TemporaryDirectory() as folder, np.errstate(all="ignore"):
        path = Path(folder) / "a.rsv"
        for name, file in files:
            path.write_bytes(file)
            outcome, problem = compare(readers, path)
            outcomes[outcome] += 1
            if problem:
                finds += 1
                print(f"{name}: {problem}", flush=True)
                keep(file, f"{name}\n{problem}")
    readers.close()
    return outcomes, finds


def main(arguments: Any = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--count", type=int, default=2000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("files", nargs="*", type=Path)
    options = parser.parse_args(arguments)
    given = ((str(path), path.read_bytes()) for path in options.files)
    outcomes, finds = run(given if options.files else generated(options.count, options.seed))
    for outcome, count in outcomes.most_common():
        print(f"{count:8} {outcome}")
    print(f"{outcomes.total()} files, {finds} disagreements")
    return 1 if finds else 0


if __name__ == "__main__":
    sys.exit(main())
