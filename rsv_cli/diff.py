"""`rsv diff`: what differs between two files."""

from __future__ import annotations

from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer
from rich.text import Text

from rsv_cli import terminal
from rsv_cli.files import opened_file
from rsv_cli.options import USUAL_ORDER, USUAL_ROWS, Json, MaxOrder, MaxRows, Quiet
from rsv_cli.session import FAILED, session

_LONGEST = 2000  # characters of a line: a key of metadata has no limit of its own

if TYPE_CHECKING:
    from rsv_format import Change, Changes


def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="An RSV file.", show_default=False)],
    b: Annotated[str, typer.Argument(metavar="B", help="Another.", show_default=False)],
    max_order: MaxOrder = USUAL_ORDER,
    max_rows: MaxRows = USUAL_ROWS,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Show what differs between two RSV files.

    Layers, tensors, attachments and metadata that B has and A has not (+), that A has and B has not (−), and that both
    have with another content (~): what is stored otherwise, and of layers and floating tensors the relative error
    ‖A − B‖ / ‖A‖ of their dense weights. Both files are verified first. The exit code is 0 if nothing differs and 1 if
    something does, as of diff(1).

    Example: [bold cyan]rsv diff four.rsv five.rsv[/bold cyan]
    """
    with session(as_json):
        import rsv_format

        with opened_file(a, max_order=max_order) as first, opened_file(b, max_order=max_order) as second:
            for file in (first, second):
                with terminal.progress("verifying", quiet=quiet, of_bytes=True) as told:
                    rsv_format.verify(file, progress=told)
            with terminal.progress("comparing", quiet=quiet) as told:
                found = rsv_format.diff(first, second, progress=told)
            for file in (first, second):
                file.check_unchanged()
        if as_json:
            terminal.write_json({"a": a, "b": b, "equal": not found, **asdict(found)})
        else:
            for kind, changes in vars(found).items():
                _print(kind, changes, max_rows)
            if not found:
                terminal.stdout().print(
                    Text.assemble(("equal", "bold green"), "  all layers, tensors, attachments, metadata")
                )
        if found:
            raise typer.Exit(FAILED)


def _print(kind: str, changes: Changes, most: int) -> None:
    console = terminal.stdout()
    if not changes:
        return
    counts = {"added": changes.added, "gone": changes.gone, "changed": changes.changed}
    facts = [f"{len(x)} {word}" for word, x in counts.items() if x] + [f"{changes.equal} equal"] * bool(changes.equal)
    console.print(Text.assemble((kind, "bold"), f"  {', '.join(facts)}"))
    lines = [("+", "green", name) for name in changes.added] + [("−", "red", name) for name in changes.gone]
    lines += [("~", "yellow", _change(x)) for x in changes.changed]
    for sign, color, text in lines[:most]:
        shown = terminal.plain(terminal.short(text, _LONGEST))
        console.print(Text.assemble((f"  {sign} ", color), shown), soft_wrap=True)
    if len(lines) > most:
        console.print(Text(f"  … and {len(lines) - most} more; --max-rows shows them, --json says all", "dim"))


def _change(change: Change) -> str:
    error = "" if change.relative_error is None else f"  {100 * change.relative_error:.3g} %"
    return f"{change.name}  {', '.join(change.what)}{error}"
