"""The conformance kit: it can be rebuilt, it is sound, rsv_format passes it, and planted faults do not."""

from __future__ import annotations

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from rsv_format import pack, rotation, unpack
from rsv_format.packing import pack_unchecked, window_indices

ROOT = Path(__file__).resolve().parent.parent
KIT = ROOT / "conformance"
PYTHON = KIT / "adapters" / "python.py"
FAULTY = KIT / "adapters" / "faulty.py"
FAULTS = re.findall(r'^    "([a-z0-9-]+)": \(\w+, "([^"]+)"\)', FAULTY.read_text(), re.MULTILINE)
MANIFEST = json.loads((KIT / "manifest.json").read_bytes())


def script(name: str, *arguments: str, site: bool = True) -> subprocess.CompletedProcess[str]:
    # -S: nothing but the standard library can be imported
    command = [sys.executable, *([] if site else ["-S"]), str(KIT / name), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=False)


def run(adapter: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    return script("run.py", "--adapter", adapter, *arguments, site=False)


def floats(digits: list[str]) -> Any:
    size = len(digits[0]) // 2
    return np.array([int(d, 16) for d in digits], f"<u{size}").view(f"<f{size}")


def kernel(name: str) -> dict[str, Any]:
    return json.loads((KIT / "kernels" / f"{name}.json").read_bytes())


def test_generate_rebuilds_every_file(tmp_path: Path) -> None:
    done = script("generate.py", "--out", str(tmp_path), site=False)
    assert done.returncode == 0, done.stdout + done.stderr
    made = {path.relative_to(tmp_path) for path in tmp_path.rglob("*") if path.is_file()}
    folders = {path.parts[0] for path in made if len(path.parts) > 1}
    kept = {path.relative_to(KIT) for folder in folders for path in (KIT / folder).rglob("*")}
    assert made == kept | {Path("manifest.json")}
    assert [path for path in made if (tmp_path / path).read_bytes() != (KIT / path).read_bytes()] == []


def test_lint() -> None:
    done = script("lint.py", site=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_manifest_fits_its_schema() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    schema = json.loads((KIT / "manifest.schema.json").read_bytes())
    jsonschema.Draft202012Validator.check_schema(schema)
    jsonschema.Draft202012Validator(schema).validate(MANIFEST)


def test_rsv_format_passes() -> None:
    done = run(f"{sys.executable} {PYTHON}")
    assert done.returncode == 0, done.stdout + done.stderr


def test_rsv_format_takes_sets() -> None:
    done = script("sets.py", "--adapter", f"{sys.executable} {PYTHON}", site=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = done.stdout.splitlines()
    assert len(lines) > 10 and all(line.startswith("pass ") for line in lines)
    assert {f"(RSV-{rule})" for rule in range(910, 917)} == {word for line in lines for word in line.split()[2:3]}


def test_readers_without_sets_are_not_asked_for_them() -> None:
    done = script("sets.py", "--adapter", f"{sys.executable} -c 'raise SystemExit(77)'")
    assert done.returncode == 0 and all(line.startswith("skip ") for line in done.stdout.splitlines())


def test_one_process_per_case_gives_the_same() -> None:
    done = run(f"{sys.executable} {PYTHON}", "--no-batch", "--only", "*/*spec-example*", "--json")
    assert done.returncode == 0, done.stdout + done.stderr
    assert {check["status"] for check in json.loads(done.stdout)["checks"]} == {"pass"}


@pytest.mark.parametrize(("fault", "pattern"), FAULTS)
def test_planted_faults_are_noticed(fault: str, pattern: str) -> None:
    done = run(f"{sys.executable} {FAULTY} {fault}", "--jobs", "1", "--only", pattern)
    assert done.returncode == 1, done.stdout + done.stderr
    named = re.findall(r"^FAIL \w+/([a-z0-9-]+):\w+: (.*)$", done.stdout, re.MULTILINE)
    ids = {case["id"] for case in MANIFEST["cases"]}
    assert named and all(id in ids for id, _ in named)
    assert not any(re.search("adapter died|no answer|not what PROTOCOL", detail) for _, detail in named)


def test_ten_faults_are_planted() -> None:
    assert len(FAULTS) >= 10


@pytest.mark.parametrize(
    ("body", "seconds", "detail"),
    [
        ("sys.exit(3)", 60, "exit code 3"),
        ("print('no JSON')", 60, "not JSON"),
        ("os.kill(os.getpid(), 9)", 60, "exit code -9"),
        ("time.sleep(60)", 1, "no answer"),
        ("while time.process_time() < 2: pass", 1, "processor time|no answer"),
        ("b = b'x' * (600 * 2**20); print('{}')", 60, "MiB of memory"),
        ("print('[]')", 60, "not an object"),
    ],
)
def test_a_crash_is_a_failure(tmp_path: Path, body: str, seconds: int, detail: str) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text(f"import os, sys, time\nif sys.argv[1] != 'batch':\n    {body}\n")
    done = script(
        "run.py", "--adapter", f"{sys.executable} {adapter}", "--seconds", f"{seconds}", "--only", "valid/empty:verify"
    )
    assert done.returncode == 1
    assert re.search(detail, done.stdout)


def test_unsupported_is_no_failure(tmp_path: Path) -> None:
    adapter = tmp_path / "adapter.py"
    adapter.write_text("import sys\nsys.exit(77)\n")
    done = run(f"{sys.executable} {adapter}", "--only", "valid/empty")
    assert done.returncode == 0, done.stdout
    assert re.search(r"all +0 +0 +2", done.stdout)


def test_the_runner_starts_without_the_builder(tmp_path: Path) -> None:
    copied = shutil.copytree(KIT, tmp_path / "kit", ignore=shutil.ignore_patterns("builder", "readers", "__pycache__"))
    command = [sys.executable, "-S", str(copied / "run.py"), "--write", str(tmp_path / "out"), "--only", "*/bits-*"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert (tmp_path / "out" / "invalid" / "bits-9.rsv").stat().st_size == 16384


def test_kernel_packing() -> None:
    for case in kernel("packing")["cases"]:
        codes, bits = np.array([case["codes"]], np.uint8), case["bits"]
        row = np.frombuffer(bytes.fromhex(case["row"]), "<u4")[None]
        assert np.array_equal(pack(codes, bits), row)
        assert np.array_equal(pack_unchecked(codes, bits), row)
        assert np.array_equal(unpack(row, bits, codes.shape[1]), codes)


def test_kernel_windows() -> None:
    for case in kernel("windows")["cases"]:
        codes = np.array([case["codes"]], np.uint8)
        assert window_indices(codes, case["bits"], case["window"]).tolist() == [case["indices"]]


def test_kernel_hadamard_and_hartley() -> None:
    for name, member in (("hadamard", "n"), ("hartley", "m")):
        table = kernel(name)
        for case in table["cases"]:
            order, v, out = case[member], floats(case["v"]), floats(case["out"])
            n, factor = (order, None) if member == "n" else (1, "hartley")
            got = rotation.Transform(order, n, factor=factor).apply(v[None])[0]
            assert np.linalg.norm(got - out) <= table["tolerance"] * np.linalg.norm(v)
        for case in table.get("elements", []):
            expected = np.array([floats(row) for row in case["F"]])
            assert np.abs(rotation.hartley(case["m"]) - expected).max() < 1e-7


def test_kernel_haar() -> None:
    for case in kernel("splitmix64")["cases"]:
        assert [f"{z:016x}" for z in rotation.splitmix64(6, case["seed"]).tolist()] == case["z"]
    table = kernel("box-muller")
    for case in table["cases"]:
        assert np.abs(rotation.gaussian(16, case["seed"]) - floats(case["g"])).max() <= table["tolerance"]
    table = kernel("haar")
    for case in table["cases"]:
        matrix = rotation.haar(case["m"], case["seed"])
        assert np.abs(matrix - [floats(row) for row in case["F"]]).max() <= table["tolerance"]
        assert np.abs(rotation.haar_witness(matrix) - floats(case["witness"])).max() <= table["tolerance"]


COMPILE = """
const compiler = require("kaitai-struct-compiler"), yaml = require("js-yaml"), fs = require("fs");
compiler.compile("python", yaml.load(fs.readFileSync(process.argv[1], "utf8")), null, false)
  .then((files) => process.stdout.write(files["rsv.py"]))
  .catch((e) => { console.error(String(e)); process.exit(1); });
"""


@pytest.fixture(scope="module")
def kaitai(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The parser that Kaitai Struct makes of schema/rsv.ksy, for Python."""
    pytest.importorskip("kaitaistruct", reason="kaitaistruct is not installed")
    node, npm = shutil.which("node"), shutil.which("npm")
    if not node or not npm:
        pytest.skip("no node and npm, which the Kaitai Struct compiler needs")
    folder = ROOT / "build" / "kaitai"  # ignored by git, kept between runs
    packages = ["kaitai-struct-compiler@0.11.0", "js-yaml@4"]
    if not (folder / "node_modules" / "kaitai-struct-compiler").exists():
        command = [npm, "install", "--no-audit", "--no-fund", "--prefix", str(folder), *packages]
        try:
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:
            pytest.skip("npm did not answer: no Kaitai Struct compiler")
        if done.returncode:
            pytest.skip(f"no Kaitai Struct compiler: {done.stderr[-200:]}")
    environment = {**os.environ, "NODE_PATH": str(folder / "node_modules")}
    command = [node, "-e", COMPILE, str(ROOT / "schema" / "rsv.ksy")]
    done = subprocess.run(command, capture_output=True, text=True, env=environment, check=False)
    assert done.returncode == 0, done.stderr
    path = tmp_path_factory.mktemp("kaitai") / "rsv_kaitai.py"
    path.write_text(done.stdout)
    spec = importlib.util.spec_from_file_location("rsv_kaitai", path)
    assert spec and spec.loader
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_kaitai_parses_the_valid_files(kaitai: Any) -> None:
    paths = sorted((KIT / "valid").glob("*.rsv"))
    assert len(paths) > 100
    for path in paths:
        data = path.read_bytes()
        parsed = kaitai.Rsv.from_bytes(data)
        n = parsed.prologue.header_nbytes
        assert parsed.header.encode() == data[64 : 64 + n]
        assert parsed.blobs_offset % 64 == 0 and parsed.blobs == data[parsed.blobs_offset :]
        assert parsed.prologue.file_nbytes == len(data)
        assert parsed.trailing == []


def test_kaitai_refuses_what_it_can(kaitai: Any) -> None:
    """All of the framing phase but digests, lengths that only the system knows included."""
    from kaitaistruct import KaitaiStructError

    codes = {
        "file_too_short", "bad_magic", "unsupported_version", "reserved_flags", "header_too_large", "file_truncated",
        "trailing_bytes", "header_padding_nonzero",
    }  # fmt: skip
    seen = set()
    for case in MANIFEST["cases"]:
        if case["error"] in codes and case["group"] == "invalid" and "file" in case:
            seen.add(case["error"])
            with pytest.raises((KaitaiStructError, EOFError, ValueError)):
                kaitai.Rsv.from_bytes((KIT / case["file"]).read_bytes())
    assert seen == codes
