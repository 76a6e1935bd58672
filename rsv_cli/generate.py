"""`rsv generate`: run the model in a file."""

from __future__ import annotations

import os
import subprocess
import sys
from typing import Annotated

import typer
from rich.text import Text

from rsv_cli import sampling as s
from rsv_cli import terminal
from rsv_cli.ahead import encoder_process
from rsv_cli.options import USUAL_ORDER, MaxOrder, Quiet, RsvFile
from rsv_cli.session import mlx_module, scratch, session
from rsv_cli.texts import decoded, read_bytes


def generate(
    file: RsvFile,
    prompt: Annotated[
        str, typer.Option("--prompt", "-p", help="What to continue or answer; - reads standard input.",
                          show_default=False)
    ],
    system_prompt: s.SystemPrompt = None,
    max_tokens: s.MaxTokens = 256,
    temp: s.Temp = 0.0,
    top_p: s.TopP = 1.0,
    min_p: s.MinP = 0.0,
    top_k: s.TopK = 0,
    repetition_penalty: s.RepetitionPenalty = None,
    repetition_context_size: s.RepetitionContextSize = 20,
    seed: s.Seed = 0,
    raw: Annotated[bool, typer.Option("--raw", help="Continue the prompt as it is, without a chat template.")] = False,
    max_kv_size: s.MaxKvSize = None,
    kv_bits: s.KvBits = None,
    kv_group_size: s.KvGroupSize = 64,
    quantized_kv_start: s.QuantizedKvStart = 5000,
    draft_model: s.DraftModel = None,
    num_draft_tokens: s.NumDraftTokens = 3,
    template_seconds: s.TemplateSeconds = 20.0,
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
    with encoder_process() as process, session(), scratch(quiet):
        sampling = s.Sampling(
            max_tokens, temp, top_p, min_p, top_k, repetition_penalty, repetition_context_size, seed, max_kv_size,
            kv_bits, kv_group_size, quantized_kv_start, num_draft_tokens,
        )  # fmt: skip
        asked = s.asked(_text(prompt), system_prompt, raw)
        _generate(file, asked, sampling, draft_model, template_seconds, max_order, quiet, process)


def _text(prompt: str) -> str:
    """What the option says, or standard input; UTF-8 in any locale."""
    data = read_bytes(sys.stdin.buffer, "--prompt") if prompt == "-" else os.fsencode(prompt)
    return decoded(data, "bad_argument", "--prompt")


def _generate(
    file: str,
    asked: dict[str, object],
    sampling: s.Sampling,
    draft: str | None,
    seconds: float,
    max_order: int,
    quiet: bool,
    process: subprocess.Popen[bytes] | None,
) -> None:
    mlx_module("mlx.core")  # first: what else is missing without it, it says less well
    sampling.check(draft is not None)
    prompts = mlx_module("rsv_mlx.prompt")
    with terminal.waiting("loading", quiet=quiet), prompts.encoder(file, seconds, process) as encoder:
        encoder.send(asked)
        running = s.Running(file, draft, sampling, max_order)
        tokens = s.prompt_tokens(encoder)
    last = None
    for part in running.stream(tokens, running.cache()):
        terminal.write_text(part.text)
        last = part
    terminal.write_text("\n")
    if last is not None and not quiet:
        terminal.stderr().print(Text(s.summary(last), "dim"), soft_wrap=True)
