"""Which module may import which, and what the packages show of themselves."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import rsv_format

ROOT = Path(__file__).resolve().parents[1]
OURS = {"rsv_format", "rsv_mlx", "rsv_cli", "conformance", "tests"}
PUBLIC = {
    "CALIBRATION_TOKENS", "CODES", "EMBEDDING_BITS", "PAGE", "Attachment", "AttachmentData", "Calibration",
    "Change", "Changes", "Difference", "Evaluation", "File", "Layer", "LayerData", "QuantizeOptions",
    "QuantizeReport", "Role", "RsvError", "Source", "SourceTensor", "Summary", "Tensor", "TensorData", "Transform",
    "Writer", "__version__", "convert", "default_text", "diff", "evaluate", "evaluate_logits", "feedback_importance",
    "group_transform", "is_out_of_memory", "is_url", "layer_role", "merge", "open", "open_source",
    "pack", "plain_name", "quantize", "quantize_layers", "quantize_matrix", "quiet_panics", "random_tokens", "save",
    "share_groups", "split", "spread_errors", "summarize", "table_bits", "text_windows", "unpack", "verify", "write",
}  # fmt: skip
# conformance is independent of the implementation that it tests, but for what drives it
DRIVERS = {"conformance/adapters/python.py", "conformance/adapters/faulty.py", "conformance/faulty.py"}


def sources(package: str) -> list[Path]:
    return sorted((ROOT / package).rglob("*.py"))


def imports(path: Path) -> set[str]:
    """Dotted names of all that a file imports, also within functions: "a.b.c" of `from a.b import c`."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text("utf-8"))):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", getattr(node.func, "id", "")) == "import_module":
            found |= {arg.value for arg in node.args if isinstance(arg, ast.Constant) and isinstance(arg.value, str)}
    return found


def packages(path: Path) -> set[str]:
    return {name.split(".")[0] for name in imports(path)}


def modules(name: str, package: str = "rsv_format") -> set[str]:
    """The modules of a package that one of them imports: "reader" of `from rsv_format.reader import open`."""
    dots = package.split(".")
    path = ROOT.joinpath(*dots, f"{name}.py")
    return {x.split(".")[len(dots)] for x in imports(path) if x.startswith(f"{package}.")}


def name_of(path: Path) -> str:
    return path.relative_to(ROOT).as_posix()


@pytest.mark.parametrize("path", sources("rsv_format"), ids=name_of)
def test_the_format_knows_of_nothing_above_it(path: Path) -> None:
    assert packages(path) & OURS <= {"rsv_format"}
    assert not packages(path) & {"mlx", "mlx_lm", "typer", "rich", "jsonschema", "jsonschema_rs", "torch"}


@pytest.mark.parametrize("path", sources("rsv_mlx"), ids=name_of)
def test_mlx_uses_public_names_only(path: Path) -> None:
    assert packages(path) & OURS <= {"rsv_format", "rsv_mlx"}
    used = {x for x in imports(path) if x.split(".")[0] == "rsv_format"}
    tree = ast.parse(path.read_text("utf-8"))
    attributes = {
        f"rsv_format.{node.attr}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id == "rsv_format"
    }
    assert (used | attributes) - {"rsv_format"} <= {f"rsv_format.{name}" for name in rsv_format.__all__}


def test_conformance_is_independent() -> None:
    paths = [path for path in sources("conformance") if name_of(path) not in DRIVERS]
    if not paths:
        pytest.skip("there is no conformance suite here")
    for path in paths:
        assert not packages(path) & {"rsv_format", "rsv_mlx", "rsv_cli", "tests"}, path


@pytest.mark.parametrize("package, module", [("construct", "layout"), ("msgspec", "header")])
def test_what_declares_the_format_is_imported_in_one_place(package: str, module: str) -> None:
    assert [path.stem for path in sources("rsv_format") if package in packages(path)] == [module]


# the layers of rsv_format: a module may import those in the lines above it, and those of its own that are named
LAYERS = [
    {"errors": set(), "limits": set(), "version": set()},
    {"locks": set(), "panics": set(), "scratch": {"locks"}, "replaceable": set(), "outputs": {"locks", "replaceable"}},
    {"remote": set(), "layout": set(), "householder": set(), "threads": set(), "decoder": {"threads"}},
    {"packing": set(), "codebook": set(), "rotation": set(), "dtypes": set(), "stored": set(), "tables": set()},
    {"header": set(), "payload": set(), "roles": set()},
    {"validate": set(), "canonical": set()},
    {"sets": set()},
    {"reader": set(), "writer": set()},
    {"verify": set(), "summary": set(), "difference": set(), "splitting": set()},
    {"vqrs": set()},
    {"upgrade": set()},
    {"sources": set()},
    {"report": set(), "dense": set()},
    {"quantizer": set()},
]
# within the quantizer, likewise
QUANTIZER = [
    {name: set() for name in ("options", "importance", "predicates", "codebooks")},
    {"scalar": set(), "viterbi": set(), "synthetic": set(), "budget": set(), "evaluation": set()},
    {"trellis": set(), "calibration": set()},
    {"feedback": set(), "unfinished": set()},
    {"matrix": set()},
    {"conversion": {"elsewhere"}, "elsewhere": {"conversion"}},
    {"plan": set()},
]


@pytest.mark.parametrize("package, layers", [("rsv_format", LAYERS), ("rsv_format.quantizer", QUANTIZER)])
def test_modules_import_what_lies_below_them(package: str, layers: list[dict[str, set[str]]]) -> None:
    folder = ROOT.joinpath(*package.split("."))
    below: set[str] = set()
    for layer in layers:
        for name, beside in layer.items():
            if (folder / f"{name}.py").exists():
                assert modules(name, package) <= below | beside, name
        below |= set(layer)
    present = {path.stem for path in folder.glob("*.py")} - {"__init__", "__main__"}
    assert present <= below, "a module that is not in the table"


def test_nothing_below_the_quantizer_knows_of_it() -> None:
    paths = [*(ROOT / "rsv_format").glob("*.py"), *sources("rsv_format/sources")]
    knowing = {path.name for path in paths if any(x.startswith("rsv_format.quantizer") for x in imports(path))}
    assert knowing == {"__init__.py"}


def test_sources_know_of_nothing_but_arrays() -> None:
    used = {
        parts[1]
        for path in sources("rsv_format/sources")
        for parts in (x.split(".") for x in imports(path))
        if parts[0] == "rsv_format"
    }
    below = {"sources", "errors", "limits", "layout", "dtypes", "packing", "outputs", "panics", "replaceable", "roles"}
    assert "sources" in used and used <= below


def test_reader_and_writer_are_strangers() -> None:
    assert "writer" not in modules("reader") and "reader" not in modules("writer")
    assert "reader" in modules("verify") and "verify" not in modules("writer")


def test_public_names() -> None:
    assert set(rsv_format.__all__) == PUBLIC and len(rsv_format.__all__) == len(PUBLIC)
    assert all(hasattr(rsv_format, name) for name in PUBLIC)
    assert rsv_format.__all__ == sorted(
        rsv_format.__all__, key=lambda name: (not name.isupper(), name[0].islower(), name)
    )


def test_the_front_door_only_imports() -> None:
    for package in ("rsv_format", "rsv_format/sources"):
        body = ast.parse((ROOT / package / "__init__.py").read_text("utf-8")).body
        kinds = {type(node).__name__ for node in body}
        known = {"Expr", "Import", "ImportFrom", "Assign", "If", "FunctionDef"}  # the last two for later imports
        assert package != "rsv_format" or kinds == known, kinds


def test_what_is_imported_later_is_what_type_checkers_see() -> None:
    for package in ("rsv_format", "rsv_mlx"):
        body = ast.parse((ROOT / package / "__init__.py").read_text("utf-8")).body
        checked = next(node for node in body if isinstance(node, ast.If)).body
        seen = {f"{x.module}.{alias.name}" for x in checked if isinstance(x, ast.ImportFrom) for alias in x.names}
        text = next(
            node.value for node in body if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_LATER"
        )
        later = ast.literal_eval(text)
        pairs = (
            [(m, n) for m, names in later.items() for n in names]
            if package == "rsv_format"
            else [(module, name) for name, module in later.items()]
        )
        assert seen == {f"{package}.{module}.{name}" for module, name in pairs}
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        _ = rsv_format.nothing


@pytest.mark.parametrize("path", [*sources("rsv_format"), *sources("rsv_mlx"), *sources("rsv_cli")], ids=name_of)
def test_every_module_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(ast.parse(path.read_text("utf-8")))
    assert text and len(text.splitlines()[0]) <= 120


HEAVY = [
    "numba",
    "mlx",
    "mlx_lm",
    "gguf",
    "safetensors",
    "huggingface_hub",
    "tokenizers",
    "typer",
    "rich",
    "jsonschema",
    "jsonschema_rs",
    "transformers",
    "torch",
    "rsv_mlx",
    "rsv_cli",
]


def loaded(program: str) -> set[str]:
    code = f"import sys\n{program}\nprint(*{{name.split('.')[0] for name in sys.modules}})"
    run = subprocess.run(
        [sys.executable, "-W", "error", "-c", code], capture_output=True, text=True, check=True, cwd=ROOT
    )
    return set(run.stdout.split())


def test_importing_the_format_is_light() -> None:
    found = loaded("import rsv_format")
    assert "numpy" in found and not found & set(HEAVY)


def test_using_the_format_is_light() -> None:
    program = "import rsv_format, numpy as np, tempfile\n"
    program += "path = tempfile.mkdtemp() + '/a'\n"
    program += "rsv_format.write(path, layers=[rsv_format.quantize_matrix(np.ones((2, 6)), name='a')])\n"
    program += "assert rsv_format.verify(path) == []; rsv_format.open(path).layers['a'].dequantize()"
    assert not loaded(program) & set(HEAVY)


def imported(*arguments: object) -> set[str]:
    """The modules that a command imports."""
    command = [sys.executable, "-X", "importtime", "-m", "rsv_cli", *map(str, arguments)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT)
    return {line.rpartition("|")[2].strip() for line in run.stderr.splitlines() if line.startswith("import time:")}


@pytest.mark.parametrize("arguments", [["--help"], ["info", "--help"]])
def test_help_needs_no_arrays(arguments: list[str]) -> None:
    found = {name.split(".")[0] for name in imported(*arguments)}
    assert {"typer", "rich"} <= found
    assert not found & ({"numpy", "rsv_format"} | set(HEAVY) - {"typer", "rich", "rsv_cli"})


def test_info_is_light(tmp_path: Path) -> None:
    rsv_format.write(tmp_path / "a.rsv")
    found = imported("info", tmp_path / "a.rsv")
    assert "numpy" in found and not {name.split(".")[0] for name in found} & set(HEAVY) - {"typer", "rich", "rsv_cli"}
    assert not [name for name in found if name.startswith(("rsv_format.quantizer", "rsv_format.sources"))]
