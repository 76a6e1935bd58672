"""SPEC.md runs, and says what the schema and the code say."""

from __future__ import annotations

import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jsonschema
import jsonschema_rs
import numpy as np
import pytest

import rsv_format
from rsv_format import RsvError, errors, header, layout, limits, packing
from rsv_format.codebook import codebook, distortion
from rsv_format.quantizer import codebooks

ROOT = Path(__file__).resolve().parents[1]
SPEC = (ROOT / "SPEC.md").read_text("utf-8")
SCHEMA: dict[str, Any] = json.loads((ROOT / "schema" / "rsv-header-1.0.schema.json").read_text("utf-8"))
VALIDATORS = (jsonschema.Draft202012Validator(SCHEMA), jsonschema_rs.Draft202012Validator(SCHEMA))
RULE = r"RSV-\d{3}"


def blocks(kind: str) -> Iterator[tuple[int, str]]:
    """(line, text) of each fenced block with this info string."""
    for match in re.finditer(rf"^```{kind}\n(.*?)^```$", SPEC, re.MULTILINE | re.DOTALL):
        yield SPEC.count("\n", 0, match.start(1)), match[1]


def table(section: str, *columns: str) -> list[list[str]]:
    """Cells of the first table with these columns after a heading."""
    lines = SPEC[SPEC.index(f"\n{section}") :].split("\n")
    start = lines.index(f"| {' | '.join(columns)} |") + 2
    rows = []
    for line in lines[start:]:
        if not line.startswith("|"):
            break
        rows.append([cell.strip() for cell in line.strip("|").split(" | ")])
    return rows


def from_hexdump(text: str) -> bytes:
    """What `hexdump -C` printed."""
    data = bytearray()
    row, repeat = b"", False
    for line in text.splitlines():
        if line == "*":
            repeat = True
            continue
        offset = int(line[:8], 16)
        if repeat:
            data += row * ((offset - len(data)) // len(row))
            repeat = False
        assert offset == len(data)
        row = bytes.fromhex(line[10:58])
        assert line[60:] == ("|" + re.sub("[^ -~]", ".", row.decode("latin-1")) + "|" if row else "")
        data += row
    return bytes(data)


@pytest.fixture(scope="module")
def tiny() -> bytes:
    [(_, text)] = blocks("hexdump")
    return from_hexdump(text)


@pytest.fixture(scope="module")
def examples(tiny: bytes) -> dict[str, Any]:
    """The namespace that the Python of the text leaves."""
    namespace: dict[str, Any] = {"tiny": tiny}
    for line, text in blocks("python"):
        exec(compile("\n" * line + text, "SPEC.md", "exec"), namespace)
    return namespace


def test_every_block_is_of_a_kind_that_is_tested() -> None:
    fences = re.findall(r"^```(.*)$", SPEC, re.MULTILINE)
    assert set(fences[0::2]) == {"python", "hexdump", "magic"}
    assert set(fences[1::2]) == {""}


def test_python_examples_run(examples: dict[str, Any]) -> None:
    assert set(examples["content"]) == {"mlp.up", "norm.weight", "config.json"}


def test_links_point_to_headings() -> None:
    headings = re.findall(r"^##+ (.*)$", SPEC, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    for target in re.findall(r"\]\(#(.*?)\)", SPEC):
        assert target in anchors
    for target in re.findall(r"\]\(([^#)]+)\)", SPEC):
        assert (ROOT / target).is_file()


# rules and codes


def definitions() -> list[tuple[str, str]]:
    """(rule, code or "") where each rule is defined."""
    found = re.findall(rf"^ *\* \*\*({RULE})\*\*(?: \[`(\w+)`\])? ", SPEC, re.MULTILINE)
    assert len(found) == SPEC.count("**RSV-")
    return found


def test_rules_are_unique_and_every_citation_is_defined() -> None:
    rules = [rule for rule, _ in definitions()]
    assert len(rules) == len(set(rules))
    assert set(re.findall(RULE, SPEC)) == set(rules)
    assert set(re.findall(RULE, json.dumps(SCHEMA))) <= set(rules)


def test_every_requirement_has_a_number() -> None:
    prose = re.sub(r"^```.*?^```$", "", SPEC, flags=re.MULTILINE | re.DOTALL)
    for paragraph in re.split(r"\n\n|\n(?= *\* )", prose):
        if re.search(r"\b(MUST|SHOULD|MAY)\b", paragraph) and "RFC 2119" not in paragraph:
            assert re.match(rf"\s*\* \*\*{RULE}\*\*", paragraph), paragraph


def test_error_table_is_that_of_the_code() -> None:
    rows = table("## 9.", "phase", "when", "code", "rules", "raised where")
    codes = {row[2].strip("`"): row[0] for row in rows}
    assert len(codes) == len(rows)
    contract = [(code, phase) for code, phase in errors.CODES.items() if phase != "input"]
    assert codes == dict(contract)
    phases = [phase for phase in errors.PHASES if phase != "input"]
    assert list(dict.fromkeys(codes.values())) == phases
    # the order within a phase is that of the checks; it is not defined for binding
    for phase in phases[:-1]:
        assert [c for c, p in codes.items() if p == phase] == [c for c, p in contract if p == phase]
    when = {"set": "set", "payload": "verify", "binding": "bind"}
    assert all(row[1] == when.get(row[0], "open") for row in rows)


def test_each_code_cites_the_rules_that_raise_it() -> None:
    rows = table("## 9.", "phase", "when", "code", "rules", "raised where")
    cited = {(rule, row[2].strip("`")) for row in rows for rule in row[3].split()}
    defined = {(rule, code) for rule, code in definitions() if code}
    assert defined == cited
    assert {code for _, code in defined} == {row[2].strip("`") for row in rows}


def test_what_is_frozen_is_what_is_here() -> None:
    """Changed, the schema is another version; the manifest may only grow, by another row."""
    rows = re.findall(r"^\| (\d{4}-\d\d-\d\d) \| `([^`]+)` \| `([0-9a-f]{64})` \|$", SPEC, re.MULTILINE)
    last = {name: digest for _, name, digest in sorted(rows, key=lambda row: row[0])}
    assert last.keys() == {"schema/rsv-header-1.0.schema.json", "conformance/manifest.json"}
    assert last == {name: hashlib.sha256((ROOT / name).read_bytes()).hexdigest() for name in last}


def test_limits_are_those_of_the_code() -> None:
    rows = table("## 10.", "name", "value", "why")
    assert {name.strip("`"): float(value) for name, value, _ in rows} == {
        name: value for name, value in vars(limits).items() if name.isupper() and not name.startswith("USUAL_")
    }  # USUAL_ are bounds that this implementation lifts when it is asked to, no limits of the format


def test_the_scan_is_that_of_the_code(examples: dict[str, Any]) -> None:
    def limited_by_spec(text: bytes) -> bool:
        try:
            examples["scan"](text)
        except ValueError:
            return True
        return False

    def limited_by_code(text: bytes) -> bool:
        try:
            header.parse_json(text)
        except rsv_format.RsvError as e:
            return e.code == "json_limit"
        return False

    for text in (
        b"[" * 32, b"[" * 33, b"]]" + b"{[" * 17, b"]" + b"[" * 33, b'"' + b"[" * 40, b'"\\"' + b"[" * 40,
        b'"\\\\"' + b"[" * 40, b'"a\\', b'\\"' + b"[" * 40, b"[]" * 40, b"{" * 33 + b"}" * 33,
        b"," * 4369, b"," * 4370, b"," * 4370 + b" " * 13, b"," * 4370 + b" " * 14, b"[]" * 4681, b"[]" * 4682,
        b'"' + b"," * 9999, b" " * 70000 + b"," * 9035, b" " * 70000 + b"," * 9036, b"," * 9036 + b" " * 70000,
        b'"' + b"\\" * 70001 + b'"' + b"[" * 40, b'"' + b"\\" * 70000 + b'"' + b"[" * 40,
        b" " * 65530 + b"[" * 32, b" " * 65530 + b"[" * 33, b" " * 65530 + b"[" * 9 + b"]" * 9 + b"[" * 33,
    ):  # fmt: skip
        assert limited_by_spec(text) == limited_by_code(text), text[:50]


def test_errors_of_windows_are_those_of_the_tables() -> None:
    known = codebooks.distortions()
    rows = table("## 14.", "b", "L = b, Lloyd and Max", "L = 8", "L = 12", "bound")
    assert [int(row[0]) for row in rows] == list(codebooks.TRELLIS_BITS)
    for bits, scalar, *cells in ([int(row[0]), *row[1:4]] for row in rows):
        errors_of = (distortion(codebook("lloyd-max", bits).astype(float)), known[bits, 8], known[bits, 12])
        wanted = [f"{error:.5f} ({np.log2(error * 4**bits) / 2:.2f})" for error in errors_of]
        assert [scalar, *cells] == wanted


# schema


def valid(tree: Any) -> bool:
    """The verdict of both validators and of the code, which must agree."""
    verdicts = {validator.is_valid(tree) for validator in VALIDATORS}
    try:
        header.header_of(tree)
        verdicts.add(True)
    except RsvError:
        verdicts.add(False)
    assert len(verdicts) == 1, tree
    return verdicts.pop()


def objects(tree: Any) -> Iterator[dict[str, Any]]:
    if isinstance(tree, dict):
        yield tree
    for item in tree.values() if isinstance(tree, dict) else tree if isinstance(tree, list) else ():
        yield from objects(item)


def full_header(tiny: bytes) -> dict[str, Any]:
    """The header of the example, and an entry of each kind that it lacks."""
    tree: dict[str, Any] = json.loads(tiny[64 : 64 + int.from_bytes(tiny[16:24], "little")])
    [transform] = tree["transforms"]
    sha = transform["diagonal"]["sha256"]
    tree["transforms"] += [
        {"dim": 4, "hadamard": 1, "diagonal": {"kind": "values", "sha256": sha}, "factor": None},
        {"dim": 4, "hadamard": 1, "diagonal": None, "factor": {"kind": "matrix", "sha256": sha}},
        {"dim": 4, "hadamard": 1, "diagonal": None, "factor": {"kind": "haar", "seed": 0, "sha256": sha}},
    ]
    return tree


def test_schema_is_valid_and_accepts_the_example(tiny: bytes) -> None:
    jsonschema.Draft202012Validator.check_schema(SCHEMA)
    assert valid(full_header(tiny))


def test_objects_are_closed_and_complete(tiny: bytes) -> None:
    tree = full_header(tiny)
    for node in objects(tree):
        free = node is tree["metadata"] or node is tree["extensions"]
        node["unknown"] = "text"
        assert valid(tree) == free
        del node["unknown"]
        for member, value in list(node.items()):
            del node[member]
            assert valid(tree) == free, member
            node[member] = value
    assert valid(tree)


def test_schema_describes_every_object_as_the_text_does() -> None:
    tables = {"The header:": SCHEMA, **{
        f"A{'n' if name[0] == 'a' else ''} {name}:": SCHEMA["$defs"][name]
        for name in ("codebook", "transform", "layer", "tensor", "attachment")
    }}  # fmt: skip
    for title, definition in tables.items():
        rows = table(title, "member", "type", "meaning")
        assert [row[0] for row in rows] == list(definition["properties"]) == definition["required"]
        assert all("description" in member for member in definition["properties"].values())


def test_schema_enums_and_ranges_are_those_of_the_code() -> None:
    codebook, transform, layer, tensor, attachment = (
        SCHEMA["$defs"][name]["properties"] for name in ("codebook", "transform", "layer", "tensor", "attachment")
    )
    assert codebook["bits"]["maximum"] == limits.MAX_BITS
    assert codebook["window"]["maximum"] == limits.MAX_WINDOW
    assert transform["dim"]["maximum"] == layer["in_features"]["maximum"] == limits.MAX_IN_FEATURES
    assert transform["hadamard"]["enum"] == [2**k for k in range(limits.MAX_IN_FEATURES.bit_length())]
    seed = transform["factor"]["oneOf"][3]["properties"]["seed"]["maximum"]
    for maximum in (seed, tensor["shape"]["items"]["maximum"], attachment["nbytes"]["maximum"],
                    SCHEMA["$defs"]["index"]["maximum"]):  # fmt: skip
        assert maximum == limits.MAX_INTEGER
    assert layer["out_features"]["maximum"] == limits.MAX_OUT_FEATURES
    assert layer["stack"]["maximum"] == limits.MAX_STACK
    assert layer["bias"]["enum"] == [None, *layout.BIAS_DTYPES]
    assert tensor["dtype"]["enum"] == list(layout.DTYPE_NBYTES)
    assert tensor["shape"]["maxItems"] == limits.MAX_RANK
    assert SCHEMA["$defs"]["name"]["maxLength"] == limits.MAX_NAME
    assert attachment["name"]["maxLength"] == limits.MAX_ATTACHMENT_NAME


@pytest.mark.parametrize(
    ("kind", "good", "bad"),
    [
        (
            "tensors",
            ["a", "..", "a/b", "\\", " ", "\x80", "\u2028", "\U0001f600" * 512, "a" * 512, "\ufeff"],
            ["", "a\n", "\n", "\0", "a\0", "\x1f", "\x7f", "a" * 513, "\U0001f600" * 513, 1, None, True],
        ),
        (
            "attachments",
            ["a", "_", "0.json", "a..", "a-b", "A" * 255, "CON"],
            ["", "a\n", "a\n\n", "\na", "\0", ".", "..", ".a", "-a", "a/b", "a\\b", "a:b", "a b", "A" * 256,
             "\u00e9", "\uff41", "\u0661", "a\r", "a\u2028", None, 0],
        ),
    ],
)  # fmt: skip
def test_names(tiny: bytes, kind: str, good: list[Any], bad: list[Any]) -> None:
    tree = full_header(tiny)
    for name, verdict in [(name, True) for name in good] + [(name, False) for name in bad]:
        tree[kind][0]["name"] = name
        assert valid(tree) == verdict, repr(name)


@pytest.mark.parametrize(
    ("pointer", "good", "bad"),
    [
        ("codebooks/0/bits", [1, 2], [0, 3, 9, True, "4", None, 2**53]),
        ("codebooks/0/window", [2, 3, 8, 16], [0, 1, 17, True, "4", None, 2**53]),
        ("codebooks/0/sha256", ["0" * 64], ["0" * 63, "0" * 65, "0" * 63 + "\n", "0" * 64 + "\n", "A" * 64, "g" * 64]),
        ("transforms/0/dim", [1, 2**24], [0, -1, 2**24 + 1, False]),
        ("transforms/0/hadamard", [1, 2, 2**24], [0, 3, 6, 2**25, True, "1"]),
        ("transforms/0/diagonal", [None], [{}, "signs", {"kind": "signs"}, {"kind": "ones", "sha256": "0" * 64}]),
        ("transforms/0/factor", [None, {"kind": "hartley"}],
         [{}, {"kind": "hartley", "sha256": "0" * 64}, {"kind": "haar", "sha256": "0" * 64}, {"kind": "matrix"},
          {"kind": "matrix", "seed": 0, "sha256": "0" * 64}, {"kind": "haar", "seed": -1, "sha256": "0" * 64}]),
        ("layers/0/out_features", [1, 2**31 - 1], [0, 2**31]),
        ("layers/0/stack", [1, 65535], [0, 65536, None]),
        ("layers/0/codebook", [0, 2**53 - 1], [-1, None, 2**53]),
        ("layers/0/transform", [None, 0, 2**53 - 1], [-1, False, 2**53]),
        ("layers/0/bias", [None, "f32", "f16", "bf16"], ["f64", "", 0, False]),
        ("tensors/0/dtype", ["bool", "f64"], ["F32", "f32 ", "float32", None]),
        ("tensors/0/shape", [[], [0], [1] * 8, [2**53 - 1]], [None, [1] * 9, [-1], [True], ["1"], 1]),
        ("attachments/0/media_type", ["text/plain", "application/vnd.a+json", "a/b", f"{'a' * 127}/{'b' * 127}"],
         ["", "text", "/", "a/", "/a", "a/b/c", "a/b\n", "a/b;c=d", "a/ b", "+/a", "a/-", "a/\u00e9",
          "a" * 254 + "/b"]),
        ("attachments/0/nbytes", [0, 2**53 - 1], [-1, 2**53, "0"]),
        ("metadata", [{}, {"": ""}, {"a\n": "\0"}], [None, [], {"a": 1}, {"a": None}]),
        ("requires", [[], ["a"], [""]], [None, {}, ["a", "a"], [1]]),
        ("extensions", [{}, {"": [None, {"a": -1}]}], [None, []]),
    ],
)  # fmt: skip
def test_members(tiny: bytes, pointer: str, good: list[Any], bad: list[Any]) -> None:
    tree = full_header(tiny)
    *path, last = (int(part) if part.isdigit() else part for part in pointer.split("/"))
    node: Any = tree
    for part in path:
        node = node[part]
    for value, verdict in [(value, True) for value in good] + [(value, False) for value in bad]:
        node[last] = value
        assert valid(tree) == verdict, value


@pytest.mark.parametrize("tree", [None, [], 1, "", {}, True])
def test_roots(tree: Any) -> None:
    assert not valid(tree)


# the complete file


def test_example_opens_and_verifies(tiny: bytes, examples: dict[str, Any]) -> None:
    assert rsv_format.verify(tiny) == []
    with rsv_format.open(tiny) as file:
        layer = file.layers["mlp.up"]
        w_rot, w, _ = examples["content"]["mlp.up"]
        assert layer.transform is not None
        assert np.array_equal(layer.scales[:, None] * layer.codebook[layer.unpack()], w_rot)
        assert np.abs(layer.dequantize() - w).max() < 1e-6
        x = examples["x"].astype(np.float32)
        assert np.abs(layer.matmul(x) - (x @ w.T + [0.25, -1.0])).max() < 1e-5
        assert np.abs(layer.transform.matrix() - examples["T"]).max() < 1e-6
        assert file.tensors["norm.weight"].float32().tolist() == [1.0, -2.0, 0.10009765625]
        assert file.attachments["config.json"].text() == '{"model_type":"tiny"}'
        assert dict(file.metadata) == {"name": "tiny"}
        assert header.build_header(file.header) == examples["header"]


def test_writer_makes_the_example(tiny: bytes, examples: dict[str, Any], tmp_path: Path) -> None:
    transform = rsv_format.Transform(6, hadamard=2, signs=np.array([0b00101001], np.uint8), factor="hartley")
    layer = rsv_format.LayerData(
        "mlp.up",
        6,
        2,
        rsv_format.pack(np.array(examples["codes"], np.uint8), 2),
        examples["scales"],
        examples["centroids"],
        transform,
        examples["bias"],
        "f16",
    )
    path = tmp_path / "tiny.rsv"
    rsv_format.write(
        path,
        layers=[layer],
        tensors={"norm.weight": rsv_format.TensorData("bf16", np.array([0x3F80, 0xC000, 0x3DCD], np.uint16))},
        attachments={"config.json": rsv_format.AttachmentData("application/json", b'{"model_type":"tiny"}')},
        metadata={"name": "tiny"},
        extensions={},
    )
    assert path.read_bytes() == tiny
    with rsv_format.open(path) as file:
        rsv_format.save(file, path)
    assert path.read_bytes() == tiny


def test_transforms_are_those_of_the_code(examples: dict[str, Any]) -> None:
    haar = rsv_format.Transform(
        12, hadamard=4, factor="haar", seed=42, stored=examples["witness"](examples["haar"](3, 42))
    )
    assert np.abs(haar.factor_matrix() - examples["haar"](3, 42)).max() < 1e-6
    for m in (2, 3, 7, 300):
        hartley = rsv_format.Transform(m * 4, hadamard=4, factor="hartley")
        assert np.array_equal(hartley.factor_matrix(), examples["hartley"](m))
        expected = np.kron(examples["hartley"](m), examples["hadamard"](4))
        assert np.abs(hartley.matrix() - expected).max() < 1e-6


def test_packing_is_that_of_the_code(examples: dict[str, Any]) -> None:
    rng = np.random.default_rng(0)
    for bits in range(1, 9):
        for columns in (1, 31, 32, 33, 70):
            codes = rng.integers(0, 2**bits, (3, columns)).astype(np.uint8)
            words = [examples["pack_row"](row, bits) for row in codes.tolist()]
            assert rsv_format.pack(codes, bits).tolist() == words
            assert [examples["unpack_row"](row, bits, columns) for row in words] == codes.tolist()
            for window in {bits, min(bits + 1, 16), 8, 11, 16}:
                got = packing.window_indices(codes, bits, window).tolist()
                assert got == [examples["indices"](row, bits, window, columns) for row in words]
                assert got == [examples["windows"](row, bits, window) for row in codes.tolist()]


@pytest.mark.skipif(shutil.which("file") is None, reason="needs file(1)")
def test_magic_entry(tiny: bytes, tmp_path: Path) -> None:
    [(_, text)] = blocks("magic")
    (tmp_path / "magic").write_text(text)
    (tmp_path / "tiny").write_bytes(tiny)

    def ask(*options: str) -> str:
        command = ["file", "--brief", "-m", str(tmp_path / "magic"), *options, str(tmp_path / "tiny")]
        return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()

    assert ask() == "RSV quantized model, version 1.0, 16384 bytes"
    assert ask("--mime-type") == "application/vnd.rsv"
    assert ask("--extension") == "rsv"
