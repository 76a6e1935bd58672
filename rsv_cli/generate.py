"""`rsv generate`: run the model in a file."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.text import Text

from rsv_cli import terminal
from rsv_cli.options import Quiet, RsvFile
from rsv_cli.session import mlx_module, session


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
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Generate text with MLX.

    The file carries config and tokenizer, so it is all that is needed. The prompt is wrapped in the tokenizer's
    chat template if it has one. The text goes to standard output as it comes, speeds to standard error.
    Needs [bold]pip install 'rsv-format[mlx]'[/bold].

    Example: [bold cyan]rsv generate smol.rsv --prompt "Why is the sky blue?" --max-tokens 100[/bold cyan]
    """
    with session():
        text = sys.stdin.read() if prompt == "-" else prompt
        _generate(file, text, max_tokens, temp, seed, raw, quiet)


def _generate(file: Path, prompt: str, max_tokens: int, temp: float, seed: int, raw: bool, quiet: bool) -> None:
    core, mlx_lm, samplers = (mlx_module(name) for name in ("mlx.core", "mlx_lm", "mlx_lm.sample_utils"))
    model, tokenizer = mlx_module("rsv_mlx").load(file)
    core.random.seed(seed)
    tokens: Any = prompt
    if not raw and getattr(tokenizer, "chat_template", None):
        messages = [{"role": "user", "content": prompt}]
        tokens = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_dict=False)
    last = None
    for last in mlx_lm.stream_generate(
        model, tokenizer, tokens, max_tokens=max_tokens, sampler=samplers.make_sampler(temp=temp)
    ):
        sys.stdout.write(last.text)
        sys.stdout.flush()
    sys.stdout.write("\n")
    if last is not None and not quiet:
        line = f"prompt {last.prompt_tokens} tokens, {last.prompt_tps:.1f}/s · "
        line += f"generated {last.generation_tokens} tokens, {last.generation_tps:.1f}/s · "
        line += f"peak memory {last.peak_memory:.2f} GB"
        terminal.stderr().print(Text(line, "dim"), soft_wrap=True)
