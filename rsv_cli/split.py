"""`rsv split`: a file as a set of shards. `rsv merge`: a set as one file."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.leftovers import tell_leftovers_beside
from rsv_cli.options import Force, Json, Quiet, RsvFile
from rsv_cli.session import session

ShardSize = Annotated[
    str,
    typer.Option("--shard-size", metavar="SIZE", help="Of each at most, such as 2GB; a layer is never divided.",
                 show_default=False),
]  # fmt: skip


def split(
    file: RsvFile,
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="OUT.rsv", help="As of one file: the shards are OUT-00001-of-00003.rsv "
                     "and so on. All are written, or none.", show_default=False),
    ],
    shard_size: ShardSize,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Spread a file over shards, for hosts that take no large files.

    Each shard is an RSV file by itself, and says of which set it is a part; the attachments are in the first. The other
    commands take a set by the path of any of its shards. A set is spread anew. What is stored is copied, its digests
    checked: bytes are not made again.

    Example: [bold cyan]rsv split model.rsv -o parts/model.rsv --shard-size 2GB[/bold cyan]
    """
    nbytes = size_of(shard_size, "--shard-size")
    with session(as_json):
        from rsv_format.splitting import split as spread

        tell_leftovers_beside(output, quiet)
        with terminal.progress("splitting", quiet=quiet, of_bytes=True) as told:
            names = spread(file, output, nbytes, force=force, progress=told)
        tell_written(names, as_json, quiet)


def merge(
    file: Annotated[
        Path, typer.Argument(metavar="SHARD", help="One shard of a set, or 'NAME-*.rsv'.", show_default=False)
    ],
    output: Annotated[
        Path, typer.Option("--output", "-o", metavar="OUT.rsv", help="Written whole or not at all.", show_default=False)
    ],
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Put the shards of a set into one file.

    It is, byte for byte, the file that was split. What is stored is copied, its digests checked.

    Example: [bold cyan]rsv merge parts/model-00001-of-00003.rsv -o model.rsv[/bold cyan]
    """
    with session(as_json):
        from rsv_format.splitting import merge as join

        tell_leftovers_beside(output, quiet)
        with terminal.progress("merging", quiet=quiet, of_bytes=True) as told:
            join(file, output, force=force, progress=told)
        tell_written([str(output)], as_json, quiet)


def tell_written(names: list[str], as_json: bool, quiet: bool) -> None:
    """The files that have come into place."""
    if as_json:
        terminal.write_json([{"path": name, "nbytes": Path(name).stat().st_size} for name in names])
    for name in () if quiet or as_json else names:
        line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(name)}  ")
        line.append(describe.size(Path(name).stat().st_size), "dim")
        terminal.stdout().print(line, soft_wrap=True)


def size_of(text: str, option: str) -> int:
    """Bytes, of a size such as 500MB."""
    match = re.fullmatch(r"(\d{1,15}(?:\.\d{1,15})?) ?([kMGT]?)B?", text)
    nbytes = int(float(match[1]) * float(f"1e{3 * ' kMGT'.index(match[2] or ' ')}")) if match else 0
    if nbytes < 1:
        raise typer.BadParameter(f"{text!r} is no size such as 500MB or 2GB", param_hint=option)
    return nbytes
