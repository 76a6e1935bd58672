"""`rsv doctor`: what is installed, and what it can do here."""

from __future__ import annotations

import platform
from typing import Annotated, Any

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.options import Json
from rsv_cli.session import FAILED, scratch, session

_PACKAGES = {
    "rsv-format": "",
    "numpy": "",
    "construct": "",
    "msgspec": "",
    "typer": "cli",
    "rich": "cli",
    "safetensors": "sources",
    "gguf": "sources",
    "huggingface_hub": "sources",
    "tokenizers": "sources",
    "mlx": "mlx",
    "mlx-lm": "mlx",
}  # package -> the extra that brings it


def doctor(
    zero_copy: Annotated[
        bool,
        typer.Option("--zero-copy", help="Load layers of every kind by adoption as well, run them, and check that the "
                     "file is left as it was. Exit code 1 where that does not work."),
    ] = False,
    kernels: Annotated[
        bool,
        typer.Option("--kernels", help="Compare every Metal kernel with generic operations, and time both. Exit code 1 "
                     "where one differs, or where there is no Metal."),
    ] = False,
    as_json: Json = False,
) -> None:  # fmt: skip
    """Show versions, platform and device, and try whether MLX can adopt mapped memory here.

    A page-aligned read-only map of a temporary file is offered to MLX without a copy. Where that works, loading
    a file costs no memory of its own, and processes share one copy of it. Missing packages are no error.

    Example: [bold cyan]rsv doctor --zero-copy --kernels[/bold cyan]
    """
    with session(as_json), scratch(quiet=as_json):
        from rsv_cli.adoption import probe

        tree: dict[str, Any] = {
            "python": platform.python_version(),
            "platform": platform.platform(),
            "machine": platform.machine(),
            "packages": {name: _version(name) for name in _PACKAGES},
            "mlx": probe(with_trial=zero_copy),
            "kernels": _kernels(as_json) if kernels else None,
        }
        if as_json:
            terminal.write_json(tree)
        else:
            _print(tree)
        trial = tree["mlx"]["trial"]
        failed = zero_copy and not (trial and all(problem is None for _, problem in trial))
        if failed or (kernels and not (tree["kernels"] and all(found["right"] for found in tree["kernels"]))):
            raise typer.Exit(FAILED)


def _kernels(quiet: bool) -> list[dict[str, Any]]:
    """What became of every kernel; nothing where there is no device for them."""
    from rsv_cli.kernels import is_right, trial
    from rsv_cli.session import mlx_module

    if not mlx_module("rsv_mlx.kernels").usable():
        return []
    found = []
    with terminal.waiting("comparing kernels", quiet=quiet):
        for one in trial():
            found.append({**one, "right": is_right(one)})
    return found


def _version(package: str) -> str | None:
    from importlib.metadata import PackageNotFoundError, version

    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _print_kernels(found: list[dict[str, Any]]) -> None:
    if not found:
        terminal.stdout().print(Text("Kernels: there is no Metal here to run them on", "yellow"))
        return
    table = describe.table("Kernels", "bits", "window", "rows", "experts", "", "error", "ms", "generic ms", "affine ms")
    for one in found:
        times = ("" if one.get(key) is None else f"{one[key] * 1e3:.2f}" for key in ("seconds", "generic", "affine"))
        error = terminal.plain(one.get("problem", "")) if one["error"] is None else f"{one['error']:.1e}"
        verdict = Text("right", "green") if one["right"] else Text("wrong", "bold red")
        table.add_row(*(str(one[key]) for key in ("bits", "window", "rows", "experts")), verdict, error, *times)
    terminal.stdout().print(table)


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
    for what, problem in mlx["trial"]:
        outcome = Text("yes", "bold green") if problem is None else Text("no", "bold red")
        detail = "" if problem is None else f"  {terminal.plain(problem)}"
        here.add_row("", Text.assemble(f"{what}: ", outcome, detail))
    console.print(here)
    if tree["kernels"] is not None:
        _print_kernels(tree["kernels"])
