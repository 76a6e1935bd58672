"""`rsv generate`: run the model in a file."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import Annotated

import typer
from rich.text import Text

from rsv_cli import terminal
from rsv_cli.options import USUAL_ORDER, MaxOrder, Quiet, RsvFile
from rsv_cli.session import mlx_module, scratch, session
from rsv_cli.texts import decoded, read_bytes


def generate(
    file: RsvFile,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What to continue or answer; - reads standard input.",
                          show_default=False)
    ],
    max_tokens: Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Stop after so many.")] = 256,
    temp: Annotated[float, typer.Option("--temp", min=0, help="Temperature; 0 takes the likeliest token.")] = 0.0,
    seed: Annotated[int, typer.Option("--seed", min=0, max=2**53 - 1, help="Of the sampling.")] = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    template_seconds: Annotated[
        float, typer.Option("--template-seconds", min=0.1, help="Processor time that the file's chat template and "
                            "tokenizer may take for the prompt.")
    ] = 20.0,
    max_order: MaxOrder = USUAL_ORDER,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Generate text with MLX.

    The file carries config and tokenizer, so it is all that is needed. The prompt is wrapped in the tokenizer's
    chat template if it has one. The text goes to standard output as it comes, speeds to standard error; on a
    terminal its control characters are escaped. No code that a file brings is run.
    Needs [bold]pip install 'rsv-format\\[mlx]'[/bold].

    Example: [bold cyan]rsv generate smol.rsv --prompt "Why is the sky blue?" --max-tokens 100[/bold cyan]
    """
    with session(), scratch(quiet):
        _generate(file, _text(prompt), max_tokens, temp, seed, raw, template_seconds, max_order, quiet)


def _text(prompt: str) -> str:
    """What the option says, or standard input; UTF-8 in any locale."""
    data = read_bytes(sys.stdin.buffer, "--prompt") if prompt == "-" else os.fsencode(prompt)
    return decoded(data, "bad_argument", "--prompt")


def _generate(
    file: Path,
    prompt: str,
    max_tokens: int,
    temp: float,
    seed: int,
    raw: bool,
    seconds: float,
    max_order: int,
    quiet: bool,
) -> None:
    from rsv_format import RsvError

    core, prompts = mlx_module("mlx.core"), mlx_module("rsv_mlx.prompt")
    with terminal.waiting("loading", quiet=quiet):
        with prompts.encoding(file, prompt, chat=not raw, seconds=seconds) as encoding:
            mlx_module("rsv_mlx.untrusted").mlx_lm_utils()
            mlx_lm, samplers, calibrate = map(mlx_module, ("mlx_lm", "mlx_lm.sample_utils", "rsv_mlx.calibrate"))
            model, tokenizer = mlx_module("rsv_mlx").load(file, max_order=max_order)
            tokens = encoding.tokens()
        if not tokens:
            raise RsvError("bad_argument", "--prompt", "it has no tokens: there is nothing to continue")
    calibrate.check_tokens(model, tokens)
    core.random.seed(seed)
    sampler = samplers.make_sampler(temp=temp)
    stream = mlx_lm.stream_generate(model, tokenizer, tokens, max_tokens=max_tokens, sampler=sampler)
    last = None
    while True:
        with mlx_module("rsv_mlx.untrusted").library("unsupported_model", str(file)):
            part = next(stream, None)
        if part is None:
            break
        terminal.write_text(part.text)
        last = part
    terminal.write_text("\n")
    if last is not None and not quiet:
        line = f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f}/s · "
        line += f"generated {last.generation_tokens} tokens, {last.generation_tps:.1f}/s · "
        line += f"peak memory {last.peak_memory:.2f} GB"
        terminal.stderr().print(Text(line, "dim"), soft_wrap=True)
