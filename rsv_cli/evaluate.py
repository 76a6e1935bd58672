"""`rsv evaluate`: what quantization does to a model's predictions."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.table import Table

from rsv_cli import describe, terminal
from rsv_cli.options import USUAL_ORDER, Json, MaxOrder, Quiet, Revision, RsvFile, Source, at_revision
from rsv_cli.session import mlx_module, scratch, session

if TYPE_CHECKING:
    from rsv_format import Evaluation, Summary


def evaluate(
    source: Source,
    file: RsvFile,
    text: Annotated[
        Path | None,
        typer.Option("--text", "-t", metavar="FILE", help="UTF-8; one that had no part in any calibration.",
                     show_default="three chapters of Alice's Adventures in Wonderland"),
    ] = None,
    tokens: Annotated[int, typer.Option("--tokens", "-n", min=1, help="Predict so many at most.")] = 4096,
    window: Annotated[int, typer.Option("--window", min=2, help="Tokens of context at most.")] = 512,
    max_order: MaxOrder = USUAL_ORDER,
    revision: Revision = None,
    as_json: Json = False,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Measure how far a file's predictions are from its source's.

    Both models run over a text. Printed are the perplexity of both, and what to compare quantizations by: the
    Kullback-Leibler divergence of the file's next-token distribution from the source's (in nats, its mean and its
    99th percentile among others) and how often both hold the same token most likely, over all tokens and by position
    in the window. Perplexity alone can fall while predictions get worse.

    Llama, Mistral, Qwen2 and Qwen3 run in numpy, one matrix in memory at a time; all else that mlx-lm knows runs with
    MLX, both models in memory.

    Example: [bold cyan]rsv evaluate ./Qwen2.5-0.5B qwen.rsv --text notes.txt[/bold cyan]
    """
    source = at_revision(source, revision)
    with session(as_json), scratch(quiet):
        import rsv_format
        from rsv_cli.texts import read_text

        words = None if text is None else read_text(text)
        summary = rsv_format.summarize(file)
        with terminal.progress("evaluating", quiet=quiet) as told:
            found = _evaluated(source, file, told, text=words, tokens=tokens, window=window, max_order=max_order)
        if as_json:
            sizes = {"nbytes": summary.nbytes, "bits_per_weight": summary.bits_per_weight}
            terminal.write_json({"source": source, "file": file, **sizes, **asdict(found)})
        else:
            _print(found, summary)


def _evaluated(source: str, file: str, told: terminal.Progress, **options: Any) -> Evaluation:
    """In numpy if it runs the family in full, otherwise with MLX."""
    import rsv_format
    from rsv_format import RsvError

    try:
        return rsv_format.evaluate(source, file, progress=told, **options)
    except RsvError as e:
        if e.code != "unsupported_model":
            raise
    found: Evaluation = mlx_module("rsv_mlx").evaluate(source, file, progress=told, **options)
    return found


def _print(found: Evaluation, summary: Summary) -> None:
    console = terminal.stdout()
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column(style="dim")
    table.add_column(justify="right")
    for name, value in (
        ("tokens", str(found.tokens)),
        ("bits per weight", f"{summary.bits_per_weight:.3f}"),
        ("file", describe.size(summary.nbytes)),
        ("perplexity of the source", f"{found.source_perplexity:.4f}"),
        ("perplexity of the file", f"{found.file_perplexity:.4f}"),
        ("mean divergence", f"{found.mean_divergence:.5f} ± {found.divergence_error:.5f}"),
        ("median divergence", f"{found.median_divergence:.5f}"),
        ("99th percentile", f"{found.divergence_99:.5f}"),
        ("largest divergence", f"{found.max_divergence:.5f}"),
        ("same top token", f"{found.same_top:.2%}"),
        ("RMS change of the text's probability", f"{found.probability_rms:.2%}"),
    ):
        table.add_row(name, value)
    console.print(table)
    spans = describe.table("By position", ">position", ">perplexity, source", ">file", ">divergence", ">same top")
    for span in found.spans:
        spans.add_row(
            f"{span.start}–{span.stop - 1}", f"{span.source_perplexity:.3f}", f"{span.file_perplexity:.3f}",
            f"{span.mean_divergence:.5f}", f"{span.same_top:.2%}",
        )  # fmt: skip
    console.print(spans)
