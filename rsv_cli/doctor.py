"""`rsv doctor`: what is installed, and what it can do here."""

from __future__ import annotations

import platform
from typing import Any

from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.options import Json
from rsv_cli.session import session

_PACKAGES = {
    "rsv-format": "",
    "numpy": "",
    "construct": "",
    "jsonschema-rs": "",
    "typer": "cli",
    "rich": "cli",
    "safetensors": "sources",
    "gguf": "sources",
    "huggingface_hub": "sources",
    "tokenizers": "sources",
    "mlx": "mlx",
    "mlx-lm": "mlx",
}  # package -> the extra that brings it


def doctor(as_json: Json = False) -> None:
    """Show versions, platform and device, and try whether MLX can adopt mapped memory here.

    A page-aligned read-only map of a temporary file is offered to MLX without a copy. Where that works, loading
    a file costs no memory of its own, and processes share one copy of it. Missing packages are no error.

    Example: [bold cyan]rsv doctor --json > report.json[/bold cyan]
    """
    with session(as_json):
        from rsv_cli.adoption import probe

        tree = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "mlx": probe(),
        }
        if as_json:
            terminal.write_json(tree)
        else:
            _print(tree)


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print(tree: dict[str, Any]) -> None:
    console = terminal.stdout()
    table = describe.table("Installed", "package", "version", "extra")
    table.add_row("python", tree["python"], "")
    for name, extra in _PACKAGES.items():
        found = tree["packages"][name]
        version = Text("missing", "yellow") if found is None else Text(found)
        table.add_row(name, version, Text(f"rsv-format[{extra}]" if extra else "", "dim"))
    console.print(table)
    here = describe.table("Here", "", "")
    here.show_header = False
    here.add_row("platform", Text(tree["platform"]))
    mlx = tree["mlx"]
    here.add_row("device", Text(mlx["device"] or "none"))
    verdict = Text("yes", "bold green") if mlx["zero_copy"] else Text("no", "bold yellow")
    here.add_row("zero-copy", Text.assemble(verdict, f"  {terminal.plain(mlx['detail'])}"))
    for name, outcome in mlx["attempts"].items():
        here.add_row("", Text(f"{name}: {terminal.plain(outcome)}", "dim"))
    console.print(here)
