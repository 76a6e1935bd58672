"""`rsv convert`: files of another format, or of an earlier draft, as RSV."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.leftovers import tell_leftovers_beside
from rsv_cli.options import USUAL_ORDER, Force, Json, MaxOrder, Quiet
from rsv_cli.session import session


def convert(
    source: Annotated[
        Path, typer.Argument(metavar="OLD", help="A VQRS file, or an RSV file of an earlier draft.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Argument(metavar="NEW", help="The RSV file to write, whole or not at all.", show_default=False)
    ],
    max_order: MaxOrder = USUAL_ORDER,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Take over files that are quantized already.

    VeloxQuant-MLX's reservoirs (VQRS, version 2): codes, norms and biases stay as they are, Hadamard rotations become
    RSV's, and matrices, those too that the reservoir derives on each load, are stored: the file loads at once, and
    grows by the square of a layer's width for each matrix. What cannot be taken over exactly is refused by name. Such a
    file has the quantized layers alone; rsv_mlx.graft puts them into a model. Rotations of orders 20 and 28 times a
    power of two are undone by their inverse, which the reservoir's own dense weights were not.

    An RSV file of an earlier draft, which the other commands refuse, is written again as the format is now. Models are
    for [bold]rsv quantize[/bold].

    Example: [bold cyan]rsv convert reservoir.bin model.rsv[/bold cyan]
    """
    with session(as_json):
        from rsv_format import open as open_file
        from rsv_format.summary import summarize
        from rsv_format.upgrade import convert as take_over

        tell_leftovers_beside(output, quiet)
        with terminal.progress("converting", quiet=quiet) as told:
            what = take_over(source, output, force=force, max_order=max_order, progress=told)
        with open_file(output, alone=True) as written:  # a shard stays one
            summary = summarize(written)
        if as_json:
            terminal.write_json(
                {
                    "source": str(source),
                    "was": what,
                    "path": str(output),
                    "nbytes": summary.nbytes,
                    "layers": summary.layers,
                    "weights": summary.weights,
                }
            )
        elif not quiet:
            line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(str(output))}")
            line.append(f"  {describe.size(summary.nbytes)}  from {what}, {summary.layers} layers", "dim")
            terminal.stdout().print(line, soft_wrap=True)
