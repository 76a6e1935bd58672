"""`rsv report`: a file as one page to look at."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.files import opened_file, opened_model
from rsv_cli.leftovers import tell_leftovers_beside
from rsv_cli.options import USUAL_ORDER, Force, MaxOrder, Quiet, Revision, RsvFile, at_revision
from rsv_cli.session import FAILED, session
from rsv_cli.session import report as tell


def report(
    file: RsvFile,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT.html", help="Written whole or not at all.", show_default=False),
    ],
    source: Annotated[
        str | None,
        typer.Option("--source", "-s", metavar="SOURCE", help="What it was made of, as rsv quantize takes it: the "
                     "relative error of each layer is shown then.", show_default=False),
    ] = None,
    max_order: MaxOrder = USUAL_ORDER,
    revision: Revision = None,
    force: Force = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Draw a file as a page for a browser.

    Where the bytes are, as a map; bits, sizes and, with --source, the relative error of each layer; how often codes
    occur against the ideal; the spread of scales and of importance; what is worth a warning. One HTML file that needs
    no network. The file is verified first; faults are on the page too, and the exit code is 1 then.

    Example: [bold cyan]rsv report qwen.rsv -o qwen.html --source ./Qwen2.5-0.5B[/bold cyan]
    """
    if source is not None:
        source = at_revision(source, revision)
    elif revision is not None:
        raise typer.BadParameter("is of a --source", param_hint="--revision")
    with session():
        import contextlib

        import rsv_format
        from rsv_format.outputs import check
        from rsv_format.report import PAGE, write_report
        from rsv_format.report import describe as facts_of

        tell_leftovers_beside(output, quiet)
        with contextlib.ExitStack() as stack:
            opened = stack.enter_context(opened_file(file, max_order=max_order))
            inputs = [*opened.paths, *([source] if source else [])]
            check(output, PAGE, inputs=inputs, force=force)
            model = source and stack.enter_context(opened_model(source, max_order=max_order, quiet=quiet))
            with terminal.progress("verifying", quiet=quiet, of_bytes=True) as told:
                faults = rsv_format.verify(opened, collect=True, progress=told)
            with terminal.progress("looking", quiet=quiet) as told:
                facts = facts_of(opened, os.path.basename(file), source=model or None, faults=faults, progress=told)
            opened.check_unchanged()
            write_report(output, facts, inputs=inputs, force=force)
        for fault in faults[:20]:
            tell(fault)
        if not quiet:
            line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(str(output))}")
            line.append(f"  {describe.size(output.stat().st_size)}", "dim")
            terminal.stdout().print(line, soft_wrap=True)
        if faults:
            raise typer.Exit(FAILED)
