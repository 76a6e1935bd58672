"""The inspector's modules, without a browser: the same facts as the report's, and only what is asked for is read."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import rsv_format
from rsv_format.report import describe

ROOT = Path(__file__).resolve().parents[1]
NODE = shutil.which("node")
SCRIPT = """
import fs from "node:fs";
import { openLazily } from "ROOT/conformance/readers/javascript/lazy.mjs";
import { factsOf, numbersOf } from "ROOT/inspect/facts.mjs";
const [path, ...positions] = process.argv.slice(2);
const bytes = fs.readFileSync(path);
let read = 0;
const slice = async (offset, nbytes) => {
  read += nbytes;
  return new Uint8Array(bytes.subarray(offset, offset + nbytes));
};
try {
  const lazy = await openLazily(slice, bytes.length);
  const facts = await factsOf(lazy, "x");
  const readForFacts = read;
  for (const i of positions) facts.layers[i].numbers = await numbersOf(lazy, Number(i));
  console.log(JSON.stringify({ facts, read: readForFacts }));
} catch (error) {
  console.log(JSON.stringify({ error: error.code ?? String(error) }));
}
"""

needs_node = pytest.mark.skipif(NODE is None, reason="needs node")


def inspected(path: Path, folder: Path, *positions: int) -> Any:
    script = folder / "look.mjs"
    script.write_text(SCRIPT.replace("ROOT", ROOT.as_posix()))
    command = [str(NODE), str(script), str(path), *map(str, positions)]
    return json.loads(subprocess.run(command, capture_output=True, text=True, check=True, timeout=60).stdout)


def write(path: Path) -> None:
    rng = np.random.default_rng(4)
    importance = rng.uniform(0.5, 2, 96)
    layers = []
    for name, rotation, options in (
        ("model.layers.0.up", "hartley", {"importance": importance}),
        ("model.layers.11.up", "haar", {"bits": 3}),
        ("head", "none", {"codebook": "trellis", "bits": 2}),
    ):
        weight = rng.standard_normal((5, 96)).astype(np.float32)
        weight[2] *= name != "head"
        layers.append(rsv_format.quantize_matrix(weight, name=name, rotation=rotation, **options))
    rsv_format.write(
        path, layers=layers, tensors={"model.layers.3.norm": rsv_format.TensorData("f32", np.ones((2, 3), "<f4"))},
        attachments={"config.json": rsv_format.AttachmentData("application/json", b"{}")}, metadata={"name": "x"},
    )  # fmt: skip


def alike(a: Any, b: Any) -> bool:
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key]) for key in a)
    if isinstance(a, list):
        return len(a) == len(b) and all(map(alike, a, b))
    return a == pytest.approx(b) if isinstance(a, float) else a == b


@needs_node
def test_its_facts_are_those_of_the_report(tmp_path: Path) -> None:
    write(tmp_path / "a.rsv")
    found = inspected(tmp_path / "a.rsv", tmp_path, 0, 1, 2)
    with rsv_format.open(tmp_path / "a.rsv") as file:
        wanted = describe(file, "x")
    for facts in (wanted, found["facts"]):
        facts.pop("warnings")
        for layer in facts["layers"]:  # at the edges of their steps numbers may be rounded to either side
            for spread in (layer["numbers"]["scales"], layer["numbers"]["importance"]):
                assert spread is None or sum(spread.pop("bins")) > 0
    for key, value in wanted.items():
        assert alike(value, found["facts"][key]), key


@needs_node
def test_only_header_and_codebooks_are_read_at_first(tmp_path: Path) -> None:
    layer = rsv_format.quantize_matrix(np.ones((4096, 64), np.float32), name="a", bits=4)
    rsv_format.write(tmp_path / "a.rsv", layers=[layer])
    assert (tmp_path / "a.rsv").stat().st_size > 100_000
    assert inspected(tmp_path / "a.rsv", tmp_path)["read"] < 2000


@needs_node
@pytest.mark.parametrize(
    "position, code", [(0, "bad_magic"), (9, "unsupported_version"), (70, "header_digest_mismatch")]
)
def test_errors_have_their_codes(position: int, code: str, tmp_path: Path) -> None:
    write(tmp_path / "a.rsv")
    data = bytearray((tmp_path / "a.rsv").read_bytes())
    data[8 if position == 9 else position] ^= 1
    (tmp_path / "b.rsv").write_bytes(data)
    assert inspected(tmp_path / "b.rsv", tmp_path) == {"error": code}
    (tmp_path / "c.rsv").write_bytes(data[:10])
    assert inspected(tmp_path / "c.rsv", tmp_path) == {"error": "file_too_short"}


def test_its_rules_are_those_of_the_specification() -> None:
    table = re.findall(
        r"^\| \w+ \| (?:open|verify|bind) \| `(\w+)` \| ((?:RSV-\d+ ?)+)\|", (ROOT / "SPEC.md").read_text(), re.M
    )
    rules = re.findall(r"^  (\w+): (\[.*\]),$", (ROOT / "inspect" / "rules.mjs").read_text(), re.M)
    assert table and {code: json.loads(found) for code, found in rules} == {code: x.split() for code, x in table}


@needs_node
@pytest.mark.skipif(shutil.which("npm") is None, reason="needs npm")
def test_the_package_has_what_it_exports(tmp_path: Path) -> None:
    folder = ROOT / "conformance" / "readers" / "javascript"
    run = subprocess.run(
        ["npm", "pack", "--dry-run", "--json", "--offline"], cwd=folder, capture_output=True, text=True, check=True,
        env={"PATH": str(Path(str(NODE)).parent) + ":/usr/bin:/bin", "HOME": str(tmp_path)},
    )  # fmt: skip
    (package,) = json.loads(run.stdout)
    exported = json.loads((folder / "package.json").read_text())["exports"].values()
    files = {"./" + entry["path"] for entry in package["files"]}
    assert {path for entry in exported for path in entry.values()} <= files


@needs_node
def test_types_name_what_there_is() -> None:
    folder = ROOT / "conformance" / "readers" / "javascript"
    for name in ("rsv", "lazy", "write"):
        said = set(re.findall(r"^export (?:class|function) (\w+)", (folder / f"{name}.d.mts").read_text(), re.M))
        module = (folder / f"{name}.mjs").read_text()
        there = set(re.findall(r"^export (?:async )?(?:class|function) (\w+)", module, re.M))
        assert said and said <= there
