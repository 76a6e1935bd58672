"""What it costs to open a hostile file of n bytes: resident memory at its peak, above that of opening a small one.

    python -m fuzz.memory [--kib N ...] [--only WORD]

Each file has a header that is made to cost as much as RSV-203 lets it, and is verified in a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
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
ADAPTERS = {name: command[:-1] for name, command in COMMANDS.items()} | {"Python": PYTHON}
MIB = 2**20
SIZES = [4, 64, 1024, 8192, 65536]  # KiB of header; the last is what RSV-105 allows
CONSTANT = 16 * MIB  # what any file may cost: heaps grow in steps
MEMBERS = dict.fromkeys(("codebooks", "transforms", "layers", "tensors", "attachments", "requires"), "[]")
MEMBERS |= {"metadata": "{}", "extensions": "{}"}
WIDE = "\U0001f600"  # makes each character of its string 4 bytes in Python, 2 in JavaScript

Item = Callable[[int, int], str]  # of a number and a width in bytes by which it is stretched
Shape = Callable[[int], tuple[bytes, bytes]]  # of the header's length; header, blobs


def counted(text: str) -> int:
    """The bytes of RSV-203, in text that has none in strings."""
    return sum(text.count(c) for c in ",[{")


def shape(
    item: Item | str = "", around: str = '{"x":[*]}', member: str = "extensions", unit: str = "a",
    blobs: Callable[[int], bytes] = lambda count: b"", **others: str,
) -> Shape:  # fmt: skip
    """A header with as many items, in the place of `*`, as RSV-203 lets it have, stretched to fill it.

    around: the value of a member of the header; what is left of the length is filled with the unit in the place of `%`,
    or with spaces. blobs: those of a number of items.
    """
    members = MEMBERS | {member: around} | others
    template = "{" + ",".join(f'"{name}":{value}' for name, value in members.items()) + "}"
    make = item if callable(item) else lambda i, width: str(item)

    def header(nbytes: int) -> tuple[bytes, bytes]:
        values, room = 4096 + nbytes // 16 - counted(template), nbytes - len(template.encode())
        least = make(0, 0) + ","
        count = max(1, min(values // max(1, counted(least)), room // len(least.encode())))
        width = room // count - len(least.encode())
        text = template.replace("*", ",".join(make(i, width) for i in range(count)) if "*" in around else "")
        rest = nbytes - len(text.encode()) + 1
        text = text.replace("%", unit * (rest // len(unit.encode())))
        return text.encode().ljust(nbytes), blobs(count)

    return header


def dense(item: str, end: str = "") -> Shape:
    """Small items, the rest of the header being one string."""
    return shape(item, '{"x":[*],"y":"%' + end + '"}')


def string(unit: str, start: str = "", end: str = "") -> Shape:
    return shape(around='{"x":"' + start + "%" + end + '"}', unit=unit)


def name(i: int, width: int) -> str:
    return f'"{i:06x}{"a" * width}"'


def wide(i: int, width: int) -> str:
    return f'"{i:06x}{"a" * max(0, width - 4)}{WIDE if width >= 4 else ""}"'


def nested(i: int, width: int) -> str:
    return "".join(f"{{{name(24 * i + k, width // 24)}:" for k in range(24)) + "0" + "}" * 24


def sha(data: bytes) -> str:
    return f'"sha256":"{hashlib.sha256(data).hexdigest()}"'


NESTED_ARRAYS, NESTED_OBJECTS = "[" * 28 + "]" * 28, '{"":' * 28 + "0" + "}" * 28
BOOK = b"\0\0\x80\xbf\0\0\x80\x3f"
LAYER = '"in_features":1,"out_features":1,"stack":1,"codebook":0,"transform":null,"bias":null,' + sha(bytes(68))
TENSOR = '"dtype":"u8","shape":[0],' + sha(b"")
SHAPES: dict[str, Shape] = {
    "empty arrays": dense("[]"),
    "empty objects": dense("{}"),
    "small objects": dense('{"":0}'),
    "objects of 6": dense('{"":0,"1":0,"2":0,"3":0,"4":0,"5":0}'),
    "nested arrays": dense(NESTED_ARRAYS),
    "nested objects": dense(NESTED_OBJECTS),
    "nested arrays, wide": dense(NESTED_ARRAYS, WIDE),
    "nested objects, wide": dense(NESTED_OBJECTS, WIDE),
    "objects of 6, wide": dense('{"":0,"1":0,"2":0,"3":0,"4":0,"5":0}', WIDE),
    "names": shape(lambda i, w: f"{name(i, w)}:0", '{"x":{*}}'),
    "names, wide": shape(lambda i, w: f"{wide(i, w)}:0", '{"x":{*}}'),
    "names and strings": shape(lambda i, w: f'{name(i, w)}:"ab"', '{"x":{*}}'),
    "names, one twice": shape(lambda i, w: f"{name(max(0, i - 1), w)}:0", '{"x":{*}}'),
    "names, one twice, wide": shape(lambda i, w: f"{wide(max(0, i - 1), w)}:0", '{"x":{*}}'),
    "objects of one name": shape(lambda i, w: f"{{{name(i, w)}:0}}"),
    "nested objects, names": shape(nested),
    "nested objects, names, wide": shape(nested, f'{{"x":[*],"{WIDE}":0}}'),
    "numbers": shape(lambda i, w: str(10**14 + i)),
    "negative numbers": shape(lambda i, w: str(-(10**13) - i)),
    "strings": shape(name),
    "strings, wide": shape(wide),
    "strings with escapes": shape(lambda i, w: name(i, max(0, w - 6))[:-1] + '\\u0100"'),
    "metadata": shape(lambda i, w: f'{name(i, w)}:"ab"', "{*}", "metadata"),
    "metadata, wide": shape(lambda i, w: f'{name(i, w)}:"{WIDE}"', "{*}", "metadata"),
    "requires": shape(name, "[*]", "requires"),
    "one string": string("a"),
    "one string, wide": string("a", "é", WIDE),
    "one string, wide, an escape": string("a", r"\u0100", WIDE),
    "wide characters": string(WIDE),
    "escapes": string(r"\u0100"),
    "escaped pairs": string(r"\ud83d\ude00"),
    "escaped quotes": string(r"\""),
    "escaped backslashes": string(r"\\"),
    "short escapes": string(r"a\n"),
    "lone surrogates": string(r"\ud83d"),
    "one number": shape(around="%", unit="1"),
    "white space": shape(around="{}"),
    "quotes": lambda n: (b'"' * n, b""),
    "commas": lambda n: (b"," * n, b""),
    "closing brackets": lambda n: (b"]" * n, b""),
    "layers, legal": shape(
        lambda i, w: f'{{"name":{name(i, 0)},{LAYER}}}', "[*]", "layers",
        blobs=lambda count: BOOK.ljust(64, b"\0") + bytes(128 * count - 60),
        codebooks=f'[{{"bits":1,"window":1,{sha(BOOK)}}}]',
    ),
    "tensors, legal": shape(lambda i, w: f'{{"name":{name(i, w)},{TENSOR}}}', "[*]", "tensors"),
    "tensors of rank 8, legal": shape(
        lambda i, w: f'{{"name":{name(i, w)},{TENSOR.replace("[0]", "[0,1,1,1,1,1,1,1]")}}}', "[*]", "tensors"
    ),
    "attachments, legal": shape(
        lambda i, w: f'{{"name":{name(i, 0)},"media_type":"a/b","nbytes":0,{sha(b"")}}}', "[*]", "attachments"
    ),
    "codebooks": shape(f'{{"bits":1,"window":1,{sha(BOOK)}}}', "[*]", "codebooks"),
    "transforms": shape('{"dim":1,"hadamard":1,"diagonal":null,"factor":null}', "[*]", "transforms"),
    "a table of wrong items": shape(lambda i, w: str(10**14 + i), "[*]", "tensors"),
    "a table that is an object": shape(lambda i, w: f"{name(i, w)}:0", "{*}", "tensors"),
    "a table that is a string": shape(around=f'"%{WIDE}"', member="tensors"),
    "a name too long": shape(around=f'[{{"name":"%{WIDE}",{TENSOR}}}]', member="tensors"),
}  # fmt: skip


def file(text: bytes, blobs: bytes = b"") -> Iterator[bytes]:
    """Without a copy of the text."""
    start = align(64 + len(text), 64)
    nbytes = align(start + len(blobs) if blobs else 64 + len(text), 16384)
    yield prologue(text, nbytes)
    yield text
    if blobs:
        yield bytes(start - 64 - len(text))
        yield blobs
    yield bytes(nbytes - (start + len(blobs) if blobs else 64 + len(text)))


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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kib", type=int, nargs="*", default=SIZES, help="lengths of the header")
    parser.add_argument("--only", default="", help="shapes whose names hold this")
    options = parser.parse_args()
    worst = dict.fromkeys(ADAPTERS, (0.0, ""))
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "a.rsv"
        path.write_bytes(b"".join(file(*SHAPES["white space"](256))))
        least = {reader: peak(adapter, path)[0] for reader, adapter in ADAPTERS.items()}
        print("a small file:", ", ".join(f"{reader} {nbytes / MIB:.0f} MiB" for reader, nbytes in least.items()))
        print(f"{'':28} {'KiB':>6}  " + "  ".join(f"{reader:>16}" for reader in least) + "   MiB above that (times n)")
        for title, make in SHAPES.items():
            for kib in options.kib if options.only in title else ():
                with path.open("wb") as f:
                    f.writelines(file(*make(1024 * kib)))
                n = path.stat().st_size
                found = {reader: peak(adapter, path) for reader, adapter in ADAPTERS.items()}
                above = {reader: nbytes - least[reader] for reader, (nbytes, _) in found.items()}
                worst |= {
                    reader: max(worst[reader], ((nbytes - CONSTANT) / n, title)) for reader, nbytes in above.items()
                }
                columns = (f"{f'{nbytes / MIB:.1f} ({nbytes / n:.1f})':>16}" for nbytes in above.values())
                answers = ", ".join(sorted({answer for _, answer in found.values()}))
                print(f"{title:28} {kib:6}  {'  '.join(columns)}   {answers}", flush=True)
    for reader, (times, title) in worst.items():
        print(f"{reader}: at most {CONSTANT // MIB} MiB + {times:.1f} n ({title})")


if __name__ == "__main__":
    main()
