"""The documentation says what is so: its codes are the closed list, its Python runs, its commands exist."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

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
