"""`rsv quantize`: a model into a file."""

from __future__ import annotations

from dataclasses import asdict
from enum import StrEnum
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.text import Text

from rsv_cli import describe, terminal
from rsv_cli.cluster import cluster
from rsv_cli.leftovers import remove_leftovers, tell_leftovers_beside
from rsv_cli.options import Force, Json, Quiet, Revision, Source, at_revision
from rsv_cli.session import mlx_module, scratch, session
from rsv_cli.split import size_of
from rsv_cli.texts import read_text

if TYPE_CHECKING:
    from rsv_format import QuantizeReport, Summary
    from rsv_format.quantizer.plan import QuantizePlan

_NEARLY_ALL = 0.99  # of the weights quantized: then what is kept is not listed
_FAMILIES, _NEGLIGIBLE = 8, 0.001  # that are listed, of which share at least


class Codebook(StrEnum):
    """Names of the quantizer's codebooks."""

    lloyd_max = "lloyd-max"
    uniform = "uniform"
    trellis = "trellis"


class Rotation(StrEnum):
    """Names of the quantizer's rotations."""

    hartley = "hartley"
    haar = "haar"
    none = "none"


def quantize(
    source: Source,
    output: Annotated[
        Path | None,
        typer.Option("--output", "-o", metavar="OUT", help="The RSV file to write, whole or not at all.",
                     show_default=False),
    ] = None,
    bits: Annotated[
        int | None,
        typer.Option("--bits", "-b", min=1, max=8, help="Bits of a code, the same for all layers but "
                     "tables and those that mlx-lm's model wants to have 8.", show_default="4"),
    ] = None,
    bits_per_weight: Annotated[
        float | None,
        typer.Option("--bits-per-weight", metavar="X", help="Instead of --bits: a budget, such as 4.5, for all that "
                     "is not kept, scales and header too. What is beyond whole bits for all goes to the layers "
                     "with the largest error.", show_default=False),
    ] = None,
    embedding_bits: Annotated[
        str | None,
        typer.Option("--embedding-bits", metavar="N|keep", help="Bits of the embedding table and of an untied head, "
                     "1 to 8, or keep them as they are.", show_default="5, or --bits if that is more"),
    ] = None,
    codebook: Annotated[
        Codebook,
        typer.Option("--codebook", help="Centroids fitted to a normal distribution; evenly spaced ones; or a trellis, "
                     "where a code and those behind it select a centroid together, which leaves three fifths of the "
                     "error (more than 6 bits are as lloyd-max)."),
    ] = Codebook.lloyd_max,
    window: Annotated[
        int | None,
        typer.Option("--window", metavar="8|12", help="Bits that select a centroid of a trellis: 12 take another sixth "
                     "of the error away, and ten times as long, a million weights a second on a core.",
                     show_default="8"),
    ] = None,
    rotation: Annotated[
        Rotation,
        typer.Option("--rotation", help="hartley is stored in a few bytes; haar is a random orthogonal matrix."),
    ] = Rotation.hartley,
    persist_rotation: Annotated[
        bool,
        typer.Option("--persist-rotation", help="Store haar matrices: a large file that loads at once, instead of a "
                     "small one whose matrices are derived on every load."),
    ] = False,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**53 - 1, help="Of signs and haar matrices.")] = 0,
    importance: Annotated[
        str,
        typer.Option("--importance", metavar="auto|gains|none|FILE", help="Which input channels matter: from a run on "
                     "random tokens (where the architecture is not known, as gains); from the gains of the norms "
                     "that feed the layers; all alike; or from an imatrix file of rsv calibrate or llama.cpp."),
    ] = "auto",
    calibrate: Annotated[
        Path | None,
        typer.Option("--calibrate", metavar="TEXT", help="A text of the kind that the model will see, UTF-8; up to "
                     "8192 tokens of it say which input channels matter, better than random ones, and what error "
                     "feedback needs. Llama, Mistral, Qwen2 and Qwen3 run in numpy, a matrix in memory at a time; all "
                     "else that mlx-lm knows runs with MLX, whole. An imatrix file tells of single channels only.",
                     show_default=False),
    ] = None,
    feedback: Annotated[
        bool | None,
        typer.Option("--feedback/--no-feedback", help="Let later weights put right what earlier ones lose, by what "
                     "layers see of the text.", show_default="with --calibrate"),
    ] = None,
    include: Annotated[
        list[str] | None,
        typer.Option("--include", metavar="PATTERN", help="Quantize only layers like '*.mlp.*'. Repeatable.",
                     show_default=False),
    ] = None,
    exclude: Annotated[
        list[str] | None,
        typer.Option("--exclude", metavar="PATTERN", help="Keep these layers as they are. Repeatable; wins.",
                     show_default=False),
    ] = None,
    no_tokenizer: Annotated[
        bool,
        typer.Option("--no-tokenizer", help="Leave the tokenizer and chat template out, as of a source whose tokenizer "
                     "cannot be read."),
    ] = False,
    threads: Annotated[
        int | None, typer.Option("--threads", min=1, help="One per core unless given.", show_default=False)
    ] = None,
    memory: Annotated[
        str,
        typer.Option("--memory", metavar="SIZE", help="For what is read and encoded at a time, such as 500MB: matrices "
                     "are taken some rows at a time, so a model may be larger than memory. The file is the same. Error "
                     "feedback needs 4 bytes × in_features² for each input of a block besides: about 1 GB for a model "
                     "as wide as Qwen3-4B."),
    ] = "64MB",
    resume: Annotated[
        bool,
        typer.Option("--resume", help="Go on with what a run of the same options and source has left, as one that was "
                     "killed does; and keep what is done if this one ends early, by Ctrl-C, a full disk or a power "
                     "cut. The file is the same as without an interruption."),
    ] = False,
    scheduler: Annotated[
        str | None,
        typer.Option("--scheduler", metavar="ADDRESS", help="Of Dask, such as tcp://host:8786, whose workers quantize "
                     "the layers, each group on one of them. They see SOURCE and OUT's folder by the same paths, on "
                     "storage that they share, and have rsv-format\\[cluster] installed. The work of a lost worker is "
                     "done again.", show_default=False),
    ] = None,
    shard_size: Annotated[
        str | None,
        typer.Option("--shard-size", metavar="SIZE", help="Write shards of at most so much, such as 2GB, OUT-00001-of-"
                     "00003.rsv and so on, all or none: while they are written, the disk holds the content twice.",
                     show_default=False),
    ] = None,
    drop_leftovers: Annotated[
        bool,
        typer.Option("--remove-leftovers", help="Remove first what killed runs have left of OUT, which is named "
                     "otherwise."),
    ] = False,
    revision: Revision = None,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Write nothing: say which layers get how many bits, how large the file "
                           "would be, and what time and memory it would take, by a short trial.")
    ] = False,
    force: Force = False,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Quantize a model into an RSV file.

    Each linear layer, stack of experts and embedding table is rotated, divided by its rows' root mean squares and
    mapped onto a codebook; everything else (norms, routers, config, tokenizer) is kept, and named if it is more
    than 1 % of the weights. Equal input and options give an equal file. The output appears only when it is
    complete; until then what was there stays.

    Example: [bold cyan]rsv quantize ./Qwen2.5-0.5B -o qwen.rsv --bits 4 --importance imatrix.gguf[/bold cyan]
    """
    if persist_rotation and rotation is not Rotation.haar:
        raise typer.BadParameter("only --rotation haar has a matrix to store", param_hint="--persist-rotation")
    if bits is not None and bits_per_weight is not None:
        raise typer.BadParameter("give a budget, or --bits for all layers", param_hint="--bits-per-weight")
    if window is not None and codebook is not Codebook.trellis:
        raise typer.BadParameter("only --codebook trellis has windows", param_hint="--window")
    if resume and drop_leftovers:
        raise typer.BadParameter("there would be nothing left to resume", param_hint="--remove-leftovers")
    if output is None and not dry_run:
        raise typer.BadParameter("is missing", param_hint="--output")
    room = size_of(memory, "--memory")
    most = None if shard_size is None else size_of(shard_size, "--shard-size")
    source = at_revision(source, revision)
    with session(as_json), scratch(quiet):
        from rsv_format.outputs import check
        from rsv_format.writer import RSV_FILE

        if output is not None:
            if drop_leftovers and not dry_run:
                remove_leftovers(output, quiet)
            tell_leftovers_beside(output, quiet or resume)
            check(output, RSV_FILE, inputs=[source, *([calibrate] if calibrate else [])], force=force)
        words = None if calibrate is None else read_text(calibrate)
        options: dict[str, Any] = {
            "bits": bits,
            "bits_per_weight": bits_per_weight,
            "embedding_bits": _table_bits(embedding_bits),
            "codebook": codebook.value,
            "window": window,
            "rotation": rotation.value,
            "persist_rotation": persist_rotation,
            "seed": seed,
            "importance": importance,
            "feedback": feedback,
            "include": include or (),
            "exclude": exclude or (),
            "tokenizer": not no_tokenizer,
            "threads": threads,
            "memory": room,
            "shard_size": most,
        }
        if output is None or dry_run:
            with cluster(scheduler):
                planned = _planned(source, output, words, force=force, resume=resume, **options)
            if as_json:
                terminal.write_json({"source": source, **asdict(planned)})
            else:
                _print_plan(planned)
            return
        with terminal.progress("quantizing", quiet=quiet) as told, cluster(scheduler) as away:
            report = _quantized(
                source,
                output,
                text=words,
                force=force,
                resume=resume,
                progress=told,
                **away,
                **options,
            )
        if as_json:
            terminal.write_json(_tree(report))
        elif not quiet:
            _print_report(report)


def _quantized(source: str, output: Path, text: str | None, **options: Any) -> QuantizeReport:
    """Calibrated in numpy if it runs the family in full, otherwise with MLX."""
    import rsv_format
    from rsv_format import RsvError

    try:
        return rsv_format.quantize(source, output, calibration=text, **options)
    except RsvError as e:
        if e.code != "unsupported_model" or text is None:
            raise
    calibration = mlx_module("rsv_mlx").text_calibration(source, text)
    return rsv_format.quantize(source, output, calibration=calibration, **options)


def _planned(source: str, output: Path | None, text: str | None, **options: Any) -> QuantizePlan:
    """What quantizing would do, for what MLX would calibrate too."""
    from rsv_format import RsvError
    from rsv_format.quantizer.plan import plan

    try:
        return plan(source, output, calibration=text, **options)
    except RsvError as e:
        if e.code != "unsupported_model" or text is None:
            raise
    calibration = mlx_module("rsv_mlx").text_calibration(source, text, weights=False)
    return plan(source, output, calibration=calibration, **options)


def _table_bits(text: str | None) -> int | str | None:
    if text is None or text == "keep":
        return text
    if text not in list("12345678"):
        raise typer.BadParameter(f"{text!r} is neither 1 to 8 nor 'keep'", param_hint="--embedding-bits")
    return int(text)


def _tree(report: QuantizeReport) -> dict[str, Any]:
    summary = report.summary
    return {
        "path": report.path,
        "shards": list(report.shards),
        "seconds": report.seconds,
        "layers": report.layers,
        "weighted_layers": report.weighted_layers,
        "weights": summary.weights,
        "nbytes": summary.nbytes,
        "bits_per_weight": summary.bits_per_weight,
        "share": summary.share,
        "kept": [asdict(kept) for kept in summary.kept],
        "left_out": list(report.left_out),
        "memory": report.memory,
    }


def _print_plan(planned: QuantizePlan) -> None:
    from rsv_format.summary import family

    groups: dict[tuple[str, str, str], int] = {}
    for layer in planned.layers:
        key = (family(layer.name), describe.shape(layer.shape), "by budget" if layer.bits is None else str(layer.bits))
        groups[key] = groups.get(key, 0) + 1
    table = describe.table("Layers", "name", ">", ">shape", ">bits")
    for (name, shape, bits), count in groups.items():
        table.add_row(Text(terminal.plain(name)), f"×{count}" if count > 1 else "", shape, bits)
    share = describe.percent(planned.weights, planned.weights + planned.kept_weights)
    most = "at most " if any(layer.bits is None for layer in planned.layers) else ""
    lines = [
        f"{len(planned.layers)} layers, {describe.count(planned.weights)} weights, {share} of all",
        f"{most}{describe.size(planned.nbytes)}, {planned.bits_per_weight:.3f} bits per weight",
        f"{planned.seconds:.1f} s to encode, by a trial; to read, and to find out what matters, takes more",
        f"{describe.size(planned.memory)} of memory in the trial",
        *(
            [f"{planned.shards} shards; the disk holds {describe.size(planned.disk)} while they are written"]
            if planned.shards
            else []
        ),
    ]
    console = terminal.stdout()
    console.print(table)
    console.print()
    for line in lines:
        console.print(Text(line), soft_wrap=True)


def _print_report(report: QuantizeReport) -> None:
    summary = report.summary
    line = Text.assemble(("wrote", "bold green"), f"  {terminal.plain(report.path)}  {describe.size(summary.nbytes)}")
    facts = [
        *([f"the first of {len(report.shards)} shards"] if report.shards else []),
        f"{report.layers} layers",
        f"{describe.count(summary.weights)} weights, {describe.percent(summary.share, 1)} of all",
        f"{summary.bits_per_weight:.3f} bits per weight",
        f"importance known for {report.weighted_layers}",
        f"{describe.size(report.memory)} of memory for pieces",
        f"{report.seconds:.1f} s",
    ]
    line.append(f"\n       {' · '.join(facts)}", "dim")
    terminal.stdout().print(line, soft_wrap=True)
    if summary.share < _NEARLY_ALL:
        terminal.stdout().print(_kept(summary), soft_wrap=True)
    if report.left_out:
        names = terminal.plain(", ".join(report.left_out))
        terminal.stdout().print(Text.assemble(("left out", "bold yellow"), f"  {names}"), soft_wrap=True)


def _kept(summary: Summary) -> Text:
    """What stays as it is and why, the largest families first."""
    total = summary.weights + summary.kept_weights
    text = Text.assemble(("kept", "bold yellow"), f"   {describe.percent(summary.kept_weights, total)} as it was:")
    shown = [x for x in summary.kept[:_FAMILIES] if x.weights > _NEGLIGIBLE * total]
    for x in shown:
        text.append(f"\n       {describe.percent(x.weights, total):>6}  {terminal.plain(x.family)}")
        text.append(f"  ({x.reason})", "dim")
    rest = sum(x.weights for x in summary.kept[len(shown) :])
    if rest:
        text.append(f"\n       {describe.percent(rest, total):>6}  others", "dim")
    return text
