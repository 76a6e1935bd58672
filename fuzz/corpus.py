"""Seeds for the fuzzers: the small files of the conformance vectors and of fuzz/regressions, without their zeros.

python -m fuzz.corpus FOLDER
"""

from __future__ import annotations

import hashlib
import json
import struct
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
CONFORMANCE = ROOT / "conformance"
MAX_NBYTES = 4096  # of a seed; a fuzzer learns more in a second from ten small inputs than from a large one
MAX_PADDED_NBYTES = 256 << 10  # of the file that it stands for, as FUZZ_MAX_NBYTES of the C reader's target


def trim(file: bytes) -> bytes:
    """The file without the zeros at its end; a prologue stays whole."""
    return file[:64] + file[64:].rstrip(b"\0")


def pad(data: bytes) -> bytes:
    """The zeros put back, up to the file_nbytes of the prologue."""
    claimed = struct.unpack_from("<Q", data, 24)[0] if len(data) >= 64 else 0
    return data.ljust(claimed, b"\0") if claimed <= MAX_PADDED_NBYTES else data


def vectors(*groups: str, max_nbytes: int = 1 << 20) -> dict[str, bytes]:
    """The files of the manifest by id, those of recipes built."""
    found = {}
    for case in json.loads((CONFORMANCE / "manifest.json").read_bytes())["cases"]:
        if case["group"] not in groups or case["nbytes"] > max_nbytes:
            continue
        if "file" in case:
            found[case["id"]] = (CONFORMANCE / case["file"]).read_bytes()
            continue
        parts = json.loads((CONFORMANCE / case["recipe"]).read_bytes())
        units = [p["text"].encode() if "text" in p else bytes.fromhex(p["hex"]) for p in parts]
        found[case["id"]] = b"".join(u * p.get("times", 1) for u, p in zip(units, parts, strict=True))
    return found


def regressions() -> dict[str, bytes]:
    return {path.stem: path.read_bytes() for path in sorted((ROOT / "fuzz" / "regressions").glob("*.rsv"))}


def seeds() -> dict[str, bytes]:
    files = vectors("valid", "invalid", "order") | regressions()
    short = {trim(file): name for name, file in files.items() if pad(trim(file)) == file}
    return {name: data for data, name in short.items() if len(data) <= MAX_NBYTES}


def main(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    found = seeds()
    for data in found.values():
        (folder / hashlib.sha256(data).hexdigest()[:16]).write_bytes(data)
    print(f"{len(found)} seeds of {sum(map(len, found.values()))} bytes in {folder}")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
