"""How fast a file is opened, and which JSON Schema validator that takes.

Validators on the same header: jsonschema-rs, which rsv_format uses, and python-jsonschema, the tests' oracle.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
from pathlib import Path
from typing import Any

from benchmarks.common import drop_from_page_cache, in_fresh_process, machine, seconds, table
from rsv_format.header import (
    CodebookEntry,
    DiagonalEntry,
    Header,
    LayerEntry,
    TransformEntry,
    build_header,
    parse_json,
)
from rsv_format.layout import build_prologue
from rsv_format.validate import walk

COUNTS = (168, 20_000)
PROCESSES = 7


def write_sparse(path: Path, layers: int) -> bytes:
    """A file with this many layers whose blobs are holes; its header."""
    header = Header(
        (CodebookEntry(4),),
        tuple(TransformEntry(896, 128, DiagonalEntry("values"), None) for _ in range(layers)),
        tuple(LayerEntry(f"model.layers.{i // 7:05d}.mlp.proj_{i % 7}", 896, 64, 1, 0, i, None) for i in range(layers)),
    )
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
    """Both validators on one header."""
    import jsonschema
    import jsonschema_rs

    schema = json.loads((Path(__file__).parent.parent / "schema" / "rsv-header-1.0.schema.json").read_text())
    tree = parse_json(Path(path).read_bytes())
    ours, oracle = jsonschema_rs.validator_for(schema), jsonschema.Draft202012Validator(schema)
    assert ours.is_valid(tree) and oracle.is_valid(tree)
    return {"rs": seconds(lambda: ours.is_valid(tree)), "python": seconds(lambda: oracle.is_valid(tree), 1, 0)}


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
                "validators": in_fresh_process("benchmarks.open", "--child", "validated", str(header)),
            }
    if arguments.json:
        print(json.dumps(results))
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
        "Schema validation of the header alone, milliseconds",
        ("layers", "jsonschema-rs", "python-jsonschema", "ratio"),
        [
            (count, f"{v['rs'] * 1e3:.1f}", f"{v['python'] * 1e3:.0f}", f"{v['python'] / v['rs']:.0f}")
            for count, r in results.items()
            for v in [r["validators"]]
        ],
    )


if __name__ == "__main__":
    main()
