"""The typer application."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, cleandoc, signature
from typing import Annotated, Any, get_type_hints

import typer

from rsv_cli import (
    calibrate,
    cat,
    chat,
    compare,
    convert,
    diff,
    doctor,
    evaluate,
    export,
    generate,
    inspect,
    ls,
    quantize,
    report,
    serve,
    split,
    terminal,
)

_HELP = """
Quantized weights, computed once and loaded in a blink.

[bold]rsv quantize[/bold] turns a model into one RSV file: packed codes, their codebooks and rotations, all other
tensors, config and tokenizer. The other commands look into such a file, check it, compare it with its source,
run it, and turn it back.

[bold cyan]rsv quantize SmolLM2.gguf -o smol.rsv[/bold cyan], then [bold cyan]rsv info smol.rsv[/bold cyan]
"""


def _unwrapped(text: str | None) -> str:
    """A docstring whose paragraphs are one line each, to be wrapped to the terminal."""
    return "\n\n".join(" ".join(part.split()) for part in cleandoc(text or "").split("\n\n"))


_VERBOSE = Annotated[
    bool,
    typer.Option("--verbose", "-v", help="A line on standard error for each step, with the seconds since its phase "
                 "began, in the place of bars."),
]  # fmt: skip


def _verbose(command: Callable[..., Any]) -> Callable[..., Any]:
    """A command with what all have: --verbose."""

    @wraps(command)
    def run(*, verbose: bool, **arguments: Any) -> None:
        terminal.is_verbose = verbose
        command(**arguments)

    hints = get_type_hints(command, include_extras=True)
    known = [p.replace(annotation=hints[p.name]) for p in signature(command).parameters.values()]
    option = Parameter("verbose", Parameter.KEYWORD_ONLY, annotation=_VERBOSE, default=False)
    run.__signature__ = Signature([*known, option])  # type: ignore[attr-defined]
    run.__annotations__ = {**hints, "verbose": _VERBOSE}
    return run


app = typer.Typer(
    help=_unwrapped(_HELP),
    no_args_is_help=True,
    rich_markup_mode="rich",
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(wanted: bool) -> None:
    if wanted:
        from rsv_format import __version__  # brings numpy: not before it is asked for

        typer.echo(f"rsv {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and exit.")
    ] = False,
) -> None:
    """Options of `rsv` itself."""


_COMMANDS: tuple[Callable[..., Any], ...] = (
    quantize.quantize,
    calibrate.calibrate,
    inspect.info,
    inspect.verify,
    ls.ls,
    cat.cat,
    diff.diff,
    compare.compare,
    report.report,
    evaluate.evaluate,
    export.export,
    export.extract,
    convert.convert,
    split.split,
    split.merge,
    generate.generate,
    chat.chat,
    serve.serve,
    doctor.doctor,
)
for _command in _COMMANDS:
    app.command(help=_unwrapped(_command.__doc__))(_verbose(_command))
