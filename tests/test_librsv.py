"""The C library as it is installed: found by pkg-config, linked either way, usable from C++, clean under valgrind."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import rsv_format

FOLDER = Path(__file__).resolve().parents[1] / "conformance" / "readers" / "c"
TOOLS = [tool for tool in ("cc", "make", "pkg-config") if shutil.which(tool) is None]

pytestmark = [
    pytest.mark.skipif(bool(TOOLS), reason=f"needs {', '.join(TOOLS)}"),
    pytest.mark.skipif(not FOLDER.exists(), reason="needs the conformance suite"),
]


def ran(*command: object, **environment: str) -> str:
    run = subprocess.run(
        [str(word) for word in command], capture_output=True, text=True, check=False, timeout=120,
        env={**os.environ, **environment},
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


@pytest.fixture(scope="module")
def root(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the library lies, made in a copy and installed by way of DESTDIR."""
    folder = tmp_path_factory.mktemp("librsv")
    copy = folder / "source"
    shutil.copytree(FOLDER, copy, ignore=shutil.ignore_patterns("build"))
    ran("make", "-C", copy, "install", "PREFIX=/opt/rsv", f"DESTDIR={folder}")
    return folder


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("file") / "a.rsv"
    rng = np.random.default_rng(3)
    layers = [
        rsv_format.quantize_matrix(
            rng.standard_normal((5, 48)).astype(np.float32), name=name, rotation=rotation,
            bias=rng.standard_normal(5).astype("<f2"), bias_dtype="f16",
        )
        for name, rotation in (("a", "hartley"), ("b.c", "haar"), ("d", "none"))
    ]  # fmt: skip
    rsv_format.write(path, layers=layers)
    return path


def flags(root: Path, *options: str) -> list[str]:
    where = {"PKG_CONFIG_PATH": str(root / "opt/rsv/lib/pkgconfig"), "PKG_CONFIG_SYSROOT_DIR": str(root)}
    return ran("pkg-config", *options, "librsv", **where).split()


def program(root: Path, kind: str) -> Path:
    made, example = root / f"multiply-{kind}", root / "source" / "example.c"
    found = flags(root, "--cflags", "--libs")
    if kind == "static":
        found = flags(root, "--cflags") + [str(root / "opt/rsv/lib/librsv.a"), "-lm"]
    ran("cc", "-std=c11", "-Wall", "-Wextra", "-Werror", "-o", made, example, *found)
    return made


@pytest.mark.parametrize("kind", ["shared", "static"])
def test_the_example_multiplies(kind: str, root: Path, path: Path) -> None:
    x = (1 / np.arange(1, 49)).astype(np.float32)
    lines = ran(program(root, kind), path, LD_LIBRARY_PATH=str(root / "opt/rsv/lib"),
                DYLD_LIBRARY_PATH=str(root / "opt/rsv/lib")).splitlines()  # fmt: skip
    with rsv_format.open(path) as file:
        assert [line.split()[0] for line in lines] == list(file.layers)
        for line in lines:
            name, *numbers = line.split()
            assert np.allclose(np.array(numbers, float), file.layers[name].matmul(x), rtol=1e-4, atol=1e-5)


def test_the_example_takes_a_layer_and_numbers(root: Path, path: Path) -> None:
    multiply = program(root, "static")
    x = np.arange(48) - 20.0
    name, *numbers = ran(multiply, path, "b.c", *x.tolist()).split()
    with rsv_format.open(path) as file:
        assert name == "b.c" and np.allclose(
            np.array(numbers, float), file.layers[name].matmul(x), rtol=1e-4, atol=1e-4
        )
    for arguments in (["nothing"], ["a", "1"]):
        assert subprocess.run([multiply, path, *arguments], capture_output=True, check=False).returncode == 2
    (root / "broken").write_bytes(path.read_bytes()[:-1])
    run = subprocess.run([multiply, root / "broken"], capture_output=True, text=True, check=False)
    assert run.returncode == 1 and "file_truncated" in run.stderr


@pytest.mark.skipif(shutil.which("c++") is None, reason="needs a C++ compiler")
def test_the_header_is_one_of_c_plus_plus_too(root: Path) -> None:
    source = root / "use.cc"
    source.write_text(
        "#include <rsv.h>\n#include <cstring>\n"
        'int main() { return std::strcmp(rsv_code_name(RSV_BAD_MAGIC), "bad_magic"); }\n'
    )
    ran("c++", "-Wall", "-Wextra", "-Werror", "-o", root / "use", source, *flags(root, "--cflags", "--libs"))
    ran(root / "use", LD_LIBRARY_PATH=str(root / "opt/rsv/lib"), DYLD_LIBRARY_PATH=str(root / "opt/rsv/lib"))


@pytest.mark.skipif(sys.platform != "linux" or shutil.which("nm") is None, reason="needs nm")
def test_the_library_exports_what_the_header_names(root: Path) -> None:
    header = (FOLDER / "rsv.h").read_text()
    names = {line.split()[2] for line in ran("nm", "-D", "--defined-only", root / "opt/rsv/lib/librsv.so").splitlines()}
    assert names and all(name.startswith("rsv_") and f"{name}(" in header for name in names)


@pytest.mark.skipif(shutil.which("valgrind") is None, reason="needs valgrind")
def test_the_example_is_clean_under_valgrind(root: Path, path: Path) -> None:
    ran("valgrind", "--quiet", "--leak-check=full", "--error-exitcode=9", program(root, "static"), path)


def test_the_example_is_clean_under_sanitizers(root: Path, path: Path) -> None:
    made = root / "sanitized"
    checks = ["-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all", "-ffp-contract=off"]
    sources = [root / "source" / name for name in ("example.c", "rsv.c")]
    ran("cc", "-std=c11", *checks, f"-I{root / 'source'}", "-o", made, *sources, "-lm")
    ran(made, path)
