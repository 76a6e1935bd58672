"""What it costs to open a hostile file of n bytes: resident memory at its peak, above that of opening a small one.

    python -m fuzz.memory [--mib N] [--only WORD]

Each file has a header of N MiB that is made to cost as much as can be, and is opened in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from fuzz.adapters import COMMANDS
from fuzz.signing import align, prologue

ROOT = Path(__file__).resolve().parents[1]
PYTHON = [sys.executable, str(ROOT / "conformance" / "adapters" / "python.py")]
ADAPTERS = {"Python": PYTHON} | {name: command[:-1] for name, command in COMMANDS.items()}
MIB = 2**20
MAX_VALUES = 4194304  # RSV-203
EMPTY = (
    b'{"codebooks":[],"transforms":[],"layers":[],"tensors":[],"attachments":[],"metadata":{},"requires":[],'
    b'"extensions":{}}'
)
SHA = b'"sha256":"' + b"0" * 64 + b'"'


def extensions(value: bytes) -> bytes:
    return EMPTY.replace(b'"extensions":{}', b'"extensions":{"x":' + value + b"}")


def table(name: str, entries: bytes) -> bytes:
    return EMPTY.replace(f'"{name}":[]'.encode(), f'"{name}":['.encode() + entries + b"]")


def repeated(item: bytes, nbytes: int, values: int = 1) -> bytes:
    """The item over and over with commas between, in nbytes and within RSV-203; values are its own `,` `[` `{`."""
    count = min(nbytes // (len(item) + 1), (MAX_VALUES - 64) // (values + 1))
    return b",".join([item] * max(1, count))


def numbered(pattern: str, nbytes: int, values: int) -> bytes:
    count = min(nbytes // (len(pattern) + 5), (MAX_VALUES - 64) // (values + 1))
    return b",".join((pattern % i).encode() for i in range(count))


TENSOR = '{"name":"%d","dtype":"u8","shape":[0],' + SHA.decode() + "}"
LAYER = (
    '{"name":"%d","in_features":1,"out_features":1,"stack":1,"codebook":0,"transform":null,"bias":null,'
    + SHA.decode()
    + "}"
)

HEADERS: dict[str, Callable[[int], bytes]] = {
    "empty arrays": lambda n: extensions(b"[" + repeated(b"[]", n) + b"]"),
    "empty objects": lambda n: extensions(b"[" + repeated(b"{}", n) + b"]"),
    "small objects": lambda n: extensions(b"[" + repeated(b'{"":0}', n) + b"]"),
    "different names": lambda n: extensions(b"{" + numbered('"%d":0', n, 0) + b"}"),
    "one name": lambda n: extensions(b"{" + repeated(b'"a":0', n, 0) + b"}"),
    "numbers": lambda n: extensions(b"[" + repeated(b"1000", n, 0) + b"]"),
    "short strings": lambda n: extensions(b"[" + repeated(b'"ab"', n, 0) + b"]"),
    "nested arrays": lambda n: extensions(b"[" + repeated(b"[" * 28 + b"]" * 28, n, 28) + b"]"),
    "one string": lambda n: extensions(b'"' + b"a" * n + b'"'),
    "one wide string": lambda n: extensions('"é'.encode() + b"a" * n + '\U0001f600"'.encode()),
    "escapes": lambda n: extensions(b'"' + rb"\u0100" * (n // 6) + b'"'),
    "backslashes": lambda n: extensions(b'"' + rb"\\" * (n // 2) + b'"'),
    "quotes": lambda n: b'"' * n,
    "white space": lambda n: EMPTY + b" " * n,
    "one number": lambda n: extensions(b"1" * n),
    "metadata": lambda n: EMPTY.replace(b'"metadata":{}', b'"metadata":{' + numbered('"%d":""', n, 0) + b"}"),
    "requires": lambda n: table("requires", numbered('"%d"', n, 0)),
    "codebooks": lambda n: table("codebooks", repeated(b'{"bits":1,' + SHA + b"}", n, 2)),
    "tensors": lambda n: table("tensors", numbered(TENSOR, n, 6)),
    "layers": lambda n: table("layers", numbered(LAYER, n, 9)),
    "faults of structure": lambda n: table("tensors", repeated(b"0", n, 0)),
}


def file(text: bytes) -> Iterator[bytes]:
    """Without a copy of the text."""
    end = align(64 + len(text), 64)
    nbytes = align(64 + len(text), 16384)
    yield prologue(text, nbytes)
    yield text
    yield bytes(nbytes - 64 - len(text) if nbytes >= end else 0)


# Linux counts what a process was before exec as its own: so a small one starts the reader, and asks
LAUNCHER = """
import json, os, subprocess, sys
with subprocess.Popen(sys.argv[1:], stdout=subprocess.PIPE) as process:
    output = process.stdout.read().decode()
    _, status, usage = os.wait4(process.pid, 0)
    process.returncode = os.waitstatus_to_exitcode(status)
code = output.split('"')[3] if process.returncode == 1 else {0: "ok"}.get(process.returncode, "crash")
print(json.dumps([usage.ru_maxrss * 1024, code]))
"""


def peak(adapter: list[str], path: Path) -> tuple[int, str]:
    """Bytes of resident memory, and the answer."""
    command = [sys.executable, "-I", "-S", "-c", LAUNCHER, *adapter, "verify", str(path)]
    nbytes, code = json.loads(subprocess.run(command, check=True, capture_output=True).stdout)
    return nbytes, code


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--mib", type=float, default=8)
    parser.add_argument("--only", default="")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.rsv"
        path.write_bytes(b"".join(file(EMPTY)))
        least = {name: peak(adapter, path)[0] for name, adapter in ADAPTERS.items()}
        print("a small file:", ", ".join(f"{name} {nbytes / MIB:.0f} MiB" for name, nbytes in least.items()))
        print(f"{'header':20} {'n, MiB':>7}  " + "  ".join(f"{name:>10}" for name in least) + "   times n, above that")
        for name, make in HEADERS.items():
            if options.only not in name:
                continue
            with path.open("wb") as f:
                f.writelines(file(make(int(options.mib * MIB))))
            n = path.stat().st_size
            found = {reader: peak(adapter, path) for reader, adapter in ADAPTERS.items()}
            times = "  ".join(f"{(nbytes - least[reader]) / n:10.1f}" for reader, (nbytes, _) in found.items())
            print(
                f"{name:20} {n / MIB:7.1f}  {times}   {', '.join({answer for _, answer in found.values()})}", flush=True
            )


if __name__ == "__main__":
    main()
