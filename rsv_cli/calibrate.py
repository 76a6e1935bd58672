"""`rsv calibrate`: which input channels matter, measured on a text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.leftovers import tell_leftovers_beside
from rsv_cli.options import USUAL_ORDER, Force, Json, MaxOrder, Quiet, Revision, at_revision
from rsv_cli.session import is_interrupt, mlx_module, scratch, session
from rsv_cli.texts import read_text


def calibrate(
    model: Annotated[
        str,
        typer.Argument(metavar="MODEL", help="An RSV file, a .gguf or .safetensors file, a Hugging Face or MLX model "
                       "folder, or a hub name owner/model, with its config and tokenizer.", show_default=False),
    ],
    text: Annotated[
        Path, typer.Option("--text", "-t", metavar="FILE", help="UTF-8, of the kind that the model will see.",
                           show_default=False),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT.gguf", help="The importance matrix, written whole or not at all.",
                     show_default=False),
    ],
    tokens: Annotated[
        int, typer.Option("--tokens", "-n", min=1, help="Stop after so many. They take as long as a prompt of so many.")
    ] = 4096,
    chunk: Annotated[int, typer.Option("--chunk", min=2, help="Tokens run together, from no context.")] = 512,
    max_order: MaxOrder = USUAL_ORDER,
    revision: Revision = None,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Measure which input channels of each layer matter.

    The model runs on the text with MLX; the mean squares of what its linear layers see go into a file in llama.cpp's
    imatrix format, for [bold]rsv quantize --importance[/bold] or llama-quantize. A few thousand tokens say nearly as
    much as many. Ctrl-C ends the measuring early: what was measured until then is written, and the exit code is 130.
    Needs [bold]pip install 'rsv-format\\[mlx]'[/bold].

    Example: [bold cyan]rsv calibrate ./Qwen2.5-0.5B --text notes.txt -o imatrix.gguf --tokens 8192[/bold cyan]
    """
    model = at_revision(model, revision)
    with session(as_json), scratch(quiet):
        from rsv_format.outputs import check
        from rsv_format.sources.imatrix import IMATRIX, save_imatrix

        tell_leftovers_beside(output, quiet)
        check(output, IMATRIX, inputs=[model, text], force=force)
        words = read_text(text)
        mlx = mlx_module("rsv_mlx.calibrate")
        with terminal.waiting("loading", quiet=quiet):
            loaded, tokenizer = mlx.load_anything(model, max_order=max_order)
            check(output, IMATRIX, force=force, nbytes=mlx.counts_nbytes(loaded))
            ids, bos = mlx.encode(tokenizer, words, tokens)
        mlx.check_tokens(loaded, ids)
        found: dict[str, Any] = {}
        done, interrupted = 0, None
        with terminal.progress("calibrating", quiet=quiet) as told:

            def note(count: int, total: int, name: str) -> None:
                nonlocal done
                done = count
                told(count, total, name)

            try:
                mlx.calibrate(loaded, ids, chunk=chunk, bos=bos, progress=note, found=found)
            except KeyboardInterrupt as e:
                if not found or not is_interrupt(e):
                    raise
                interrupted = e if done < len(ids) else None
        chunks = -(-done // (chunk - (bos is not None)))
        save_imatrix(output, found, datasets=[text.name], chunks=chunks, chunk_size=chunk, force=force)
        if as_json:
            tree = {"path": str(output), "nbytes": output.stat().st_size, "layers": len(found), "tokens": done}
            terminal.write_json({**tree, "complete": interrupted is None})
        elif not quiet:
            line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(str(output))}  ")
            line.append(describe.size(output.stat().st_size))
            line.append(
                f"  {len(found)} layers · {done} tokens{'' if interrupted is None else f' of {len(ids)}'}", "dim"
            )
            terminal.stdout().print(line, soft_wrap=True)
        if interrupted is not None:
            sys.stdout.flush()
            raise interrupted
