"""`rsv info`: where the bytes went. `rsv verify`: whether they are the right ones."""

from __future__ import annotations

import contextlib
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import asdict
from itertools import islice
from math import isfinite
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.bar import Bar
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.files import opened_file
from rsv_cli.options import USUAL_HOLES, USUAL_ORDER, USUAL_ROWS, Json, MaxOrder, MaxRows, Quiet, RsvFile
from rsv_cli.session import FAILED, error_object, report, scratch, session

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from rsv_format import File, RsvError
    from rsv_format.header import LayerEntry
    from rsv_format.summary import Summary

_MEANING = {
    "codes": "so many bits for each weight",
    "scales": "one float32 per row",
    "biases": "as the model had them",
    "codebooks": "the numbers that codes stand for",
    "diagonals": "signs or scales of input channels",
    "factors": "rotation matrices, or their witnesses",
    "header": "names, shapes, digests",
    "padding": "to cells of 64 bytes, the file to 16 KiB",
    "tensors": "kept as they were",
    "attachments": "config, tokenizer",
}
_BAR_WIDTH = 28
_WIDE = 108  # columns from which there is room for remarks
_LONGEST_NAME, _LONGEST_VALUE = 100, 300  # characters of a metadata key, or an extension's name, and of a value
_FEW = 20  # extensions that are named
_FAULTS = 100  # lines of faults


def info(
    file: RsvFile,
    layers: Annotated[bool, typer.Option("--layers", help="List every layer and tensor, not families.")] = False,
    max_rows: MaxRows = USUAL_ROWS,
    as_json: Json = False,
) -> None:
    """Show where the bytes of a file went.

    Sizes by kind of content and by layer, bits per weight, rotations, kept tensors, attachments and metadata.
    Layers that differ only in their number are shown as one family, [dim]model.layers.*.mlp.up_proj[/dim].
    Only the header is read, so it is quick on any file; [bold]rsv verify[/bold] looks at the rest. Of a GGUF or
    safetensors file, or a model folder, it says what it is.

    Example: [bold cyan]rsv info model.rsv[/bold cyan]
    """
    with session(as_json):
        from rsv_format.summary import summarize

        with opened_file(file) as opened:
            summary = summarize(opened)
            if as_json:
                terminal.write_json(_info_tree(file, opened, summary))
            else:
                _print_info(terminal.stdout(), file, opened, summary, layers, max_rows)


def verify(
    files: Annotated[
        list[str],
        typer.Argument(metavar="FILE...", help="RSV files; - is standard input.", show_default=False),
    ],
    first: Annotated[bool, typer.Option("--first", help="Stop at the first fault of each file.")] = False,
    max_order: MaxOrder = USUAL_ORDER,
    max_holes: Annotated[
        int, typer.Option("--max-holes", min=0, metavar="BYTES", help="Never written, as in a download that was begun.")
    ] = USUAL_HOLES,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:
    """Check everything a file promises.

    Structure first: framing, header, references, extent; a fault there ends the check. Then every blob: its
    SHA-256, zero padding, finite numbers, sorted codebooks, orthogonal rotations; all faults are listed. The
    exit code is 0 for sound files and 1 if any is not; the others are checked all the same. With --json several files
    give one object with a list of theirs.

    Example: [bold cyan]rsv verify model.rsv && echo sound[/bold cyan]
    """
    with session(as_json):
        import rsv_format

        trees = []
        for file in files:
            started = time.perf_counter()
            try:
                with _input(file, max_order) as opened:
                    with terminal.progress("verifying", quiet=quiet, of_bytes=True) as told:
                        faults = rsv_format.verify(opened, collect=not first, progress=told, max_holes=max_holes)
                    tree = {"nbytes": opened.nbytes, "blobs": len(opened.blobs)}
            except rsv_format.RsvError as e:
                if len(files) == 1:
                    raise
                faults, tree = [e], {}
            if not as_json:
                _tell(file, faults, tree, time.perf_counter() - started, quiet)
            head = error_object(faults[0]) if faults else {}
            found = {**head, "path": file, "valid": not faults, **tree}
            trees.append({**found, "faults": [error_object(fault) for fault in faults]})
        valid = all(tree["valid"] for tree in trees)
        if as_json:
            terminal.write_json(trees[0] if len(files) == 1 else {"valid": valid, "files": trees})
        if not valid:
            raise typer.Exit(FAILED)


@contextlib.contextmanager
def _input(name: str, max_order: int) -> Iterator[File]:
    """A file by its path, or what standard input gives: a pipe's bytes lie in a temporary file meanwhile."""
    import rsv_format
    from rsv_format.stored import copy_stream

    if name != "-":
        with opened_file(name, max_order=max_order) as opened:
            yield opened
        return
    with scratch(), tempfile.TemporaryFile() as kept:
        copy_stream(sys.stdin.buffer, kept.write)
        kept.flush()
        with rsv_format.open(kept, max_order=max_order) as file:
            yield file.unmapped()


def _tell(file: str, faults: list[RsvError], tree: Mapping[str, int], seconds: float, quiet: bool) -> None:
    name = terminal.plain(file)
    for fault in faults[:_FAULTS]:
        report(fault)
    if len(faults) > _FAULTS:
        more = f"and {len(faults) - _FAULTS} more, which --json lists"
        terminal.stderr().print(Text(more, "dim"), soft_wrap=True)
    if faults:
        noun = "fault" if len(faults) == 1 else "faults"
        terminal.stderr().print(Text(f"{name}: {len(faults)} {noun}", "bold red"), soft_wrap=True)
    elif not quiet:
        line = Text.assemble(("sound", "bold green"), f"  {name}")
        line.append(f"  {tree['blobs']} blobs, {describe.size(tree['nbytes'])}, {seconds:.1f} s", "dim")
        terminal.stdout().print(line, soft_wrap=True)


def _info_tree(path: str, file: File, summary: Summary) -> dict[str, Any]:
    header = file.header
    stored = _stored(file)
    return {
        "path": path,
        "nbytes": file.nbytes,
        "shards": len(file.shards),
        "weights": summary.weights,
        "bits_per_weight": summary.bits_per_weight,
        "share": summary.share,
        "kept": [asdict(family) for family in summary.kept],
        "by_kind": summary.by_kind,
        "codebooks": [
            {"bits": entry.bits, "window": entry.window, "centroids": [_number(c) for c in file.codebook(i)]}
            for i, entry in enumerate(header.codebooks)
        ],
        "transforms": [
            {
                "dim": entry.dim,
                "hadamard": entry.hadamard,
                "diagonal": entry.diagonal and entry.diagonal.kind,
                "factor": entry.factor and entry.factor.kind,
                "seed": entry.factor and entry.factor.seed,
                "nbytes": stored[i],
            }
            for i, entry in enumerate(header.transforms)
        ],
        "layers": [
            {
                "name": layer.name,
                "in_features": layer.in_features,
                "out_features": layer.out_features,
                "stack": layer.stack,
                "bits": layer.bits,
                "window": layer.window,
                "codebook": layer.codebook_id,
                "transform": layer.transform_id,
                "bias": layer.bias_dtype,
                "nbytes": layer.nbytes,
            }
            for layer in file.layers.values()
        ],
        "tensors": [
            {"name": tensor.name, "dtype": tensor.dtype, "shape": list(tensor.shape), "nbytes": tensor.nbytes}
            for tensor in file.tensors.values()
        ],
        "attachments": [
            {"name": attachment.name, "media_type": attachment.media_type, "nbytes": attachment.nbytes}
            for attachment in file.attachments.values()
        ],
        "metadata": dict(file.metadata),
        "requires": list(header.requires),
        "extensions": header.extensions,
    }


def _number(value: Any) -> float | str:
    """A number for JSON, which has none that are not finite: those are strings."""
    number = float(value)
    return number if isfinite(number) else str(number)


def _stored(file: File) -> Counter[int]:
    """Bytes of each transform's blobs, by its position in the table."""
    stored: Counter[int] = Counter()
    for blob in file.blobs:
        if blob.kind in ("diagonal", "factor"):
            stored[blob.index] += blob.nbytes
    return stored


def _print_info(console: Console, path: str, file: File, summary: Summary, every: bool, most: int) -> None:
    title = Text(terminal.plain(os.path.basename(path)), "bold")
    facts = [
        describe.size(file.nbytes),
        *([f"{len(file.shards)} shards"] if file.shards else []),
        f"{summary.layers} layers",
        f"{describe.count(summary.weights)} weights, {describe.percent(summary.share, 1)} of all",
        f"{summary.bits_per_weight:.3f} bits per weight",
    ]
    console.print(title, Text(" · ".join(facts)), sep="  ")
    wide = console.width >= _WIDE
    console.print(_kinds(summary, wide))
    if file.layers:
        console.print(_layers(file, every, wide, most))
    if file.header.transforms:
        console.print(_transforms(file, most))
    if file.tensors:
        console.print(_tensors(file, every, most))
    if file.attachments:
        console.print(_attachments(file, most))
    if file.metadata:
        console.print(_metadata(file, most))
    if file.header.extensions:
        names = [terminal.short(name, _LONGEST_NAME) for name in islice(file.header.extensions, _FEW)]
        more = len(file.header.extensions) - len(names)
        console.print(Text(f"extensions: {terminal.plain(', '.join(names))}{f' and {more} more' if more else ''}"))


def _kinds(summary: Summary, wide: bool) -> Table:
    table = describe.table("Where the bytes went", "kind", ">size", ">share", "", *(["what"] if wide else []))
    for kind, nbytes in sorted(summary.by_kind.items(), key=lambda item: -item[1]):
        if nbytes:
            bar = Bar(summary.nbytes, 0, nbytes, width=_BAR_WIDTH, color="cyan")
            share = describe.percent(nbytes, summary.nbytes)
            meaning = [Text(_MEANING[kind], "dim")] if wide else []
            table.add_row(kind, describe.size(nbytes), share, bar, *meaning)
    table.add_section()
    table.add_row("file", describe.size(summary.nbytes), style="bold")
    return table


def _layers(file: File, every: bool, wide: bool, most: int) -> Table:
    from rsv_format.summary import family

    groups: dict[tuple[str, str, str, str], list[LayerEntry]] = {}
    for entry in file.header.layers:
        name = entry.name if every else family(entry.name)
        transform = None if entry.transform is None else file.header.transforms[entry.transform]
        sides = (entry.out_features, entry.in_features)
        codebook = file.header.codebooks[entry.codebook]
        key = (
            name,
            describe.shape(sides if entry.stack == 1 else (entry.stack, *sides)),
            f"{codebook.bits}" if codebook.window == codebook.bits else f"{codebook.bits}, window {codebook.window}",
            describe.transform(transform),
        )
        groups.setdefault(key, []).append(entry)
    remark = ["transform"] if wide else []
    table = describe.table("Layers", "name", ">", ">shape", ">bits", ">size", ">share", *remark)
    for (name, shape, bits, kind), entries in islice(groups.items(), most):
        nbytes = sum(file.layers[entry.name].nbytes for entry in entries)
        table.add_row(
            Text(terminal.plain(name)),
            f"×{len(entries)}" if len(entries) > 1 else "",
            shape,
            bits,
            describe.size(nbytes),
            describe.percent(nbytes, file.nbytes),
            *([Text(kind, "dim")] if wide else []),
        )
    describe.tell_rest(table, len(groups), most)
    return table


def _transforms(file: File, most: int) -> Table:
    users = Counter(entry.transform for entry in file.header.layers)
    stored = _stored(file)
    groups: dict[str, list[int]] = {}
    for i, transform in enumerate(file.header.transforms):
        groups.setdefault(describe.transform(transform), []).append(i)
    table = describe.table("Transforms", "kind", ">", ">layers", ">size", ">share", "on load")
    for text, members in islice(groups.items(), most):
        nbytes = sum(stored[i] for i in members)
        factor = file.header.transforms[members[0]].factor
        derived = factor is not None and factor.kind == "haar"
        table.add_row(
            Text(text),
            f"×{len(members)}" if len(members) > 1 else "",
            str(sum(users[i] for i in members)),
            describe.size(nbytes),
            describe.percent(nbytes, file.nbytes),
            Text("derived by QR: slow" if derived else "ready", "yellow" if derived else "dim"),
        )
    describe.tell_rest(table, len(groups), most)
    return table


def _tensors(file: File, every: bool, most: int) -> Table:
    from rsv_format.summary import family, why_kept

    groups: dict[tuple[str, str, str, str], list[int]] = {}
    for tensor in file.tensors.values():
        name = tensor.name if every else family(tensor.name)
        key = (name, tensor.dtype, describe.shape(tensor.shape), why_kept(tensor))
        groups.setdefault(key, []).append(tensor.nbytes)
    table = describe.table("Kept tensors", "name", ">", "dtype", ">shape", ">size", ">share", "why")
    for (name, dtype, shape, reason), sizes in islice(groups.items(), most):
        table.add_row(
            Text(terminal.plain(name)),
            f"×{len(sizes)}" if len(sizes) > 1 else "",
            dtype,
            shape,
            describe.size(sum(sizes)),
            describe.percent(sum(sizes), file.nbytes),
            Text(reason, "dim"),
        )
    describe.tell_rest(table, len(groups), most)
    return table


def _attachments(file: File, most: int) -> Table:
    table = describe.table("Attachments", "name", "type", ">size", ">share")
    for item in islice(file.attachments.values(), most):
        share = describe.percent(item.nbytes, file.nbytes)
        table.add_row(Text(item.name), Text(terminal.plain(item.media_type)), describe.size(item.nbytes), share)
    describe.tell_rest(table, len(file.attachments), most)
    return table


def _metadata(file: File, most: int) -> Table:
    table = describe.table("Metadata", "key", "value")
    for key, value in islice(file.metadata.items(), most):
        shown = (terminal.short(key, _LONGEST_NAME), terminal.short(value, _LONGEST_VALUE))
        table.add_row(*(Text(terminal.plain(text)) for text in shown))
    describe.tell_rest(table, len(file.metadata), most)
    return table
