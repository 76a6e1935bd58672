"""`rsv ls`: the names in a file, a line each."""

from __future__ import annotations

from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsv_cli import describe, terminal
from rsv_cli.files import opened_file
from rsv_cli.options import Json, RsvFile
from rsv_cli.session import session

if TYPE_CHECKING:
    from rsv_format import File


def ls(
    file: RsvFile,
    patterns: Annotated[
        list[str] | None, typer.Argument(metavar="PATTERN", help="Names like '*.mlp.*'; all of them if none is given.")
    ] = None,
    as_json: Json = False,
) -> None:
    """List what is in a file: layers, tensors and attachments.

    A line each: kind, size, bits or element type, shape, name. Only the header is read. The exit code is 1 if patterns
    are given and nothing is like them.

    Example: [bold cyan]rsv ls model.rsv '*.0.mlp.*'[/bold cyan]
    """
    with session(as_json):
        with opened_file(file) as opened:
            entries = [x for x in _entries(opened) if not patterns or any(fnmatchcase(x["name"], p) for p in patterns)]
        if as_json:
            terminal.write_json(entries)
        else:
            for entry in entries:  # of which a file may have a million
                facts = (
                    f"{entry['kind']:<10} {describe.size(entry['nbytes']):>8}  {_type(entry):<12} {_shape(entry):<16}"
                )
                print(facts, terminal.plain(entry["name"]))
        if patterns and not entries:
            raise typer.Exit(1)


def _entries(file: File) -> list[dict[str, Any]]:
    """In the order of the file."""
    layers = [
        {
            "kind": "layer",
            "name": x.name,
            "nbytes": x.nbytes,
            "bits": x.bits,
            "window": x.window,
            "shape": [x.out_features, x.in_features] if x.stack == 1 else [x.stack, x.out_features, x.in_features],
        }
        for x in file.layers.values()
    ]
    tensors = [
        {"kind": "tensor", "name": x.name, "nbytes": x.nbytes, "dtype": x.dtype, "shape": list(x.shape)}
        for x in file.tensors.values()
    ]
    attachments = [
        {"kind": "attachment", "name": x.name, "nbytes": x.nbytes, "media_type": x.media_type}
        for x in file.attachments.values()
    ]
    return [*layers, *tensors, *attachments]


def _type(entry: dict[str, Any]) -> str:
    if entry["kind"] == "layer":
        return (
            f"{entry['bits']} bits" if entry["bits"] == entry["window"] else f"{entry['bits']} bits/{entry['window']}"
        )
    return str(entry.get("dtype", ""))


def _shape(entry: dict[str, Any]) -> str:
    return describe.shape(entry["shape"]) if "shape" in entry else terminal.plain(entry["media_type"])
