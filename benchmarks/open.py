"""How fast a file is opened, and what checks the structure of its header.

Of the same headers: msgspec, which rsv_format uses and which makes the header's structs at once, and validators of
JSON Schema, the tests' oracles: jsonschema-rs and python-jsonschema.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import drop_from_page_cache, in_fresh_process, machine, seconds, table
from rsv_format.header import (
    NO_DIGEST,
    CodebookEntry,
    Header,
    LayerEntry,
    TransformEntry,
    ValuesEntry,
    build_header,
    header_of,
    parse_json,
)
from rsv_format.layout import build_prologue
from rsv_format.validate import walk

COUNTS = (168, 20_000)
PROCESSES = 7
CHECKS = ("msgspec", "jsonschema_rs", "jsonschema")  # packages


def write_sparse(path: Path, layers: int) -> bytes:
    """A file with this many layers whose blobs are holes; its header."""
    names = (f"model.layers.{i // 7:05d}.mlp.proj_{i % 7}" for i in range(layers))
    header = Header(
        (CodebookEntry(4, 4, NO_DIGEST),),
        (TransformEntry(896, 128, ValuesEntry(NO_DIGEST), None),) * layers,
        tuple(LayerEntry(name, 896, 64, 1, 0, i, None, NO_DIGEST) for i, name in enumerate(names)),
        (), (), {}, (), {},
    )  # fmt: skip
    text = build_header(header)
    _, nbytes = walk(header, len(text))
    with open(path, "wb") as file:
        file.truncate(nbytes)
        file.write(build_prologue(text, nbytes))
        file.write(text)
    return text


def opened(path: str) -> dict[str, float]:
    """First and later calls of `rsv_format.open` in a process."""
    import rsv_format

    first = seconds(lambda: rsv_format.open(path).close(), repeat=1, warm=0)
    return {"first": first, "later": seconds(lambda: rsv_format.open(path).close())}


def validated(path: str) -> dict[str, float]:
    """All of CHECKS on one header."""
    import jsonschema
    import jsonschema_rs

    schema = json.loads((Path(__file__).parent.parent / "schema" / "rsv-header-1.0.schema.json").read_text())
    tree = parse_json(Path(path).read_bytes())
    rust, python = jsonschema_rs.validator_for(schema), jsonschema.Draft202012Validator(schema)
    assert rust.is_valid(tree) and python.is_valid(tree)
    return {
        "msgspec": seconds(lambda: header_of(tree)),
        "jsonschema_rs": seconds(lambda: rust.is_valid(tree)),
        "jsonschema": seconds(lambda: python.is_valid(tree), 1, 0),
    }


def imported(package: str) -> float:
    """Median time to import a package in a fresh process, after numpy."""
    code = f"import time, numpy; t = time.perf_counter(); import {package}; print(time.perf_counter() - t)"
    runs = (subprocess.check_output([sys.executable, "-c", code]) for _ in range(PROCESSES))
    return statistics.median(map(float, runs))


def in_processes(path: Path, *, cold: bool = True) -> dict[str, float]:
    """Medians over some fresh processes, each with the file dropped from the page cache if `cold`."""
    runs = []
    for _ in range(PROCESSES):
        if cold:
            drop_from_page_cache(path)
        runs.append(in_fresh_process("benchmarks.open", "--child", "opened", str(path)))
    return {name: statistics.median(run[name] for run in runs) for name in runs[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of tables")
    parser.add_argument("--child", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.child:
        print(json.dumps({"opened": opened, "validated": validated}[arguments.child[0]](arguments.child[1])))
        return
    results: dict[int, dict[str, Any]] = {}
    with tempfile.TemporaryDirectory() as folder:
        for count in COUNTS:
            path, header = Path(folder, f"{count}.rsv"), Path(folder, f"{count}.json")
            text = write_sparse(path, count)
            header.write_bytes(text)
            results[count] = {
                "header": len(text),
                "cold": in_processes(path) if drop_from_page_cache(path) else None,
                "warm": in_processes(path, cold=False),
                "checks": in_fresh_process("benchmarks.open", "--child", "validated", str(header)),
            }
    imports = {package: imported(package) for package in CHECKS}
    if arguments.json:
        print(json.dumps({"opened": results, "imports": imports}))
        return
    print(machine())
    table(
        f"rsv_format.open, milliseconds after import, medians of {PROCESSES} fresh processes",
        ("layers", "header MB", "first, cold", "first, warm", "later"),
        [
            (
                count,
                f"{r['header'] / 1e6:.2f}",
                f"{r['cold']['first'] * 1e3:.1f}" if r["cold"] else "not possible here",
                f"{r['warm']['first'] * 1e3:.1f}",
                f"{r['warm']['later'] * 1e3:.1f}",
            )
            for count, r in results.items()
        ],
    )
    table(
        "Checking the header's structure alone, milliseconds; msgspec's include making the structs",
        ("with", "import", *(f"{count} layers" for count in COUNTS)),
        [
            (
                package.replace("_", "-"),
                f"{imports[package] * 1e3:.0f}",
                *(f"{r['checks'][package] * 1e3:.2f}" for r in results.values()),
            )
            for package in CHECKS
        ],
    )


if __name__ == "__main__":
    main()
