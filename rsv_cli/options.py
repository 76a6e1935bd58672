"""Arguments and options that several commands share."""

from __future__ import annotations

import os
from typing import Annotated

import typer

RsvFile = Annotated[
    str,
    typer.Argument(metavar="FILE", help="An RSV file, or a set by the path of any of its shards or as 'NAME-*.rsv'; or "
                   "its URL.", show_default=False),
]  # fmt: skip
Source = Annotated[
    str,
    typer.Argument(
        metavar="SOURCE",
        help="A .safetensors file, a .gguf file, a Hugging Face or MLX model folder, or a hub name owner/model.",
        show_default=False,
    ),
]
Revision = Annotated[
    str | None,
    typer.Option("--revision", metavar="REV", help="Branch, tag or commit of a hub name; owner/model@REV is the same.",
                 show_default=False),
]  # fmt: skip


def at_revision(source: str, revision: str | None) -> str:
    """A source by its hub name, at a revision if one is given."""
    if revision is None:
        return source
    from rsv_format.sources.hub import is_repository

    spec = f"{source}@{revision}"
    if "@" in source or os.path.exists(source) or not is_repository(spec):
        raise typer.BadParameter("only hub names owner/model have revisions", param_hint="--revision")
    return spec


Force = Annotated[
    bool,
    typer.Option("--force", "-f", help="Replace what else is there, or write-protected. Inputs and models that are not "
                 "RSV are never replaced."),
]  # fmt: skip
Json = Annotated[bool, typer.Option("--json", help="Print one JSON object instead.")]
Quiet = Annotated[bool, typer.Option("--quiet", "-q", help="No progress, no summary: errors only.")]
USUAL_HOLES = 4 * 2**30
USUAL_ORDER = 4096  # rsv_format.limits: not imported before a command runs
MaxOrder = Annotated[
    int,
    typer.Option("--max-order", min=1, metavar="N", help="Of a rotation matrix that is derived from a seed or "
                 "checked: several may take as long together as one of this order. 8192 takes 8 times as long."),
]  # fmt: skip
USUAL_ROWS = 1000
MaxRows = Annotated[
    int, typer.Option("--max-rows", min=1, max=2**31, metavar="N", help="Of each table; --json says all.")
]
