"""`rsv serve`: the model in a file behind OpenAI's endpoints."""

from __future__ import annotations

import json
import logging
import os
import sys
from typing import Annotated, Any

import typer
from rich.text import Text

from rsv_cli import sampling as s
from rsv_cli import terminal
from rsv_cli.options import USUAL_ORDER, MaxOrder, Quiet, RsvFile
from rsv_cli.session import mlx_module, scratch, session


def serve(
    file: RsvFile,
    host: Annotated[str, typer.Option("--host", help="Where to listen; 0.0.0.0 is for everyone who can reach this "
                                      "machine: there is no password.")] = "127.0.0.1",
    port: Annotated[int, typer.Option("--port", min=0, max=65535, help="0 takes a free one.")] = 8080,
    allowed_origins: Annotated[
        str, typer.Option("--allowed-origins", help="Web pages that may ask, as http://localhost:3000, with commas "
                          "between them; * is all.", show_default="none")
    ] = "",
    max_tokens: Annotated[int, typer.Option("--max-tokens", min=1, help="Where a request does not say.")] = 512,
    temp: s.Temp = 0.0,
    top_p: s.TopP = 1.0,
    min_p: s.MinP = 0.0,
    top_k: s.TopK = 0,
    chat_template_args: Annotated[
        str, typer.Option("--chat-template-args", help='JSON for the chat template, as {"enable_thinking": false}.')
    ] = "{}",
    decode_concurrency: Annotated[int, typer.Option("--decode-concurrency", min=1, help="Answers at a time.")] = 32,
    prompt_concurrency: Annotated[int, typer.Option("--prompt-concurrency", min=1, help="Prompts at a time.")] = 8,
    prefill_step_size: Annotated[int, typer.Option("--prefill-step-size", min=1, help="Tokens at a time.")] = 2048,
    prompt_cache_size: Annotated[
        int, typer.Option("--prompt-cache-size", min=1, help="How many conversations are remembered.")
    ] = 10,
    kv_bits: s.KvBits = None,
    kv_group_size: s.KvGroupSize = 64,
    quantized_kv_start: s.QuantizedKvStart = 5000,
    draft_model: s.DraftModel = None,
    num_draft_tokens: s.NumDraftTokens = 3,
    template_seconds: s.TemplateSeconds = 20.0,
    max_order: MaxOrder = USUAL_ORDER,
    quiet: Quiet = False,
) -> None:  # fmt: skip
    """Answer OpenAI's requests: models, completions, chat completions, streamed or not.

    mlx-lm's server, with the model in the file, under the file's name; several requests at once. A request can
    choose neither another model nor make the server fetch anything; images are refused. Requests are logged to
    standard error. Ctrl-C or SIGTERM ends it. Needs [bold]pip install 'rsv-format\\[mlx]'[/bold].

    Example: [bold cyan]rsv serve smol.rsv --port 8080[/bold cyan], then
    [bold cyan]OpenAI(base_url="http://127.0.0.1:8080/v1", api_key="none")[/bold cyan]
    """
    from rsv_format import RsvError

    with session(), scratch(quiet):
        origins = [origin.strip() for origin in allowed_origins.split(",") if origin.strip()]
        options = {
            "allowed_origins": origins, "max_tokens": max_tokens, "temp": temp, "top_p": top_p, "min_p": min_p,
            "top_k": top_k, "decode_concurrency": decode_concurrency, "prompt_concurrency": prompt_concurrency,
            "prefill_step_size": prefill_step_size, "prompt_cache_size": prompt_cache_size, "prompt_cache_bytes": None,
            "kv_bits": kv_bits, "kv_group_size": kv_group_size, "quantized_kv_start": quantized_kv_start,
            "num_draft_tokens": num_draft_tokens, "log_level": "WARNING" if quiet else "INFO",
        }  # fmt: skip
        try:
            options["chat_template_args"] = json.loads(chat_template_args)
        except (ValueError, RecursionError) as e:
            raise RsvError("bad_argument", "--chat-template-args", f"it is no JSON: {e}") from None
        if not isinstance(options["chat_template_args"], dict):
            raise RsvError("bad_argument", "--chat-template-args", "it is no JSON object")
        s.Sampling(
            max_tokens, temp, top_p, min_p, top_k, None, 20, 0, None, kv_bits, kv_group_size, quantized_kv_start,
            num_draft_tokens,
        ).check()  # fmt: skip
        _serve(file, draft_model, host, port, template_seconds, max_order, quiet, options)


def _serve(
    file: str,
    draft_file: str | None,
    host: str,
    port: int,
    seconds: float,
    max_order: int,
    quiet: bool,
    options: dict[str, Any],
) -> None:
    from rsv_format import RsvError

    logging.basicConfig(level=options["log_level"], format="%(asctime)s %(levelname)s %(message)s", stream=sys.stderr)
    mlx_module("mlx.core")
    rsv_mlx, calibrate = mlx_module("rsv_mlx"), mlx_module("rsv_mlx.calibrate")
    serving, prompts = mlx_module("rsv_mlx.serving"), mlx_module("rsv_mlx.prompt")
    with prompts.encoder(file, seconds) as encoder:
        with terminal.waiting("loading", quiet=quiet):
            model, tokenizer = rsv_mlx.load(file, max_order=max_order)
            draft = None if draft_file is None else rsv_mlx.load_model(draft_file, max_order=max_order)
            if draft is not None and calibrate.table_rows(draft) != calibrate.table_rows(model):
                raise RsvError("bad_argument", "--draft-model", "it has another vocabulary")
        server = serving.Server(
            os.path.basename(file), model, serving.limited(tokenizer, encoder), draft, host=host, port=port, **options
        )
        if not quiet:
            line = f"{terminal.plain(os.path.basename(file))} at http://{server.address[0]}:{server.address[1]}/v1"
            terminal.stderr().print(Text(line, "bold"), soft_wrap=True)
        server.run()
