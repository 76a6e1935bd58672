"""`rsv chat`: a conversation with the model in a file."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Iterator
from typing import Any

import typer
from rich.text import Text

from rsv_cli import sampling as s
from rsv_cli import terminal
from rsv_cli.options import USUAL_ORDER, MaxOrder, Quiet, RsvFile
from rsv_cli.session import FAILED, mlx_module, report, scratch, session
from rsv_cli.texts import read_line

_HELP = """/help          this
/reset         forget what was said
/system TEXT   forget it, and tell the model this before all else; without a text, nothing
/again         answer the last question once more
/quit          end; so does Ctrl-D. Ctrl-C stops an answer."""


def chat(
    file: RsvFile,
    system_prompt: s.SystemPrompt = None,
    max_tokens: s.MaxTokens = 1024,
    temp: s.Temp = 0.0,
    top_p: s.TopP = 1.0,
    min_p: s.MinP = 0.0,
    top_k: s.TopK = 0,
    repetition_penalty: s.RepetitionPenalty = None,
    repetition_context_size: s.RepetitionContextSize = 20,
    seed: s.Seed = 0,
    max_kv_size: s.MaxKvSize = None,
    kv_bits: s.KvBits = None,
    kv_group_size: s.KvGroupSize = 64,
    quantized_kv_start: s.QuantizedKvStart = 5000,
    draft_model: s.DraftModel = None,
    num_draft_tokens: s.NumDraftTokens = 3,
    template_seconds: s.TemplateSeconds = 20.0,
    max_order: MaxOrder = USUAL_ORDER,
    quiet: Quiet = False,
) -> None:
    """Talk to a model: it remembers what was said, and answers as it comes.

    A line is a question; /help lists what else there is. Ctrl-C stops an answer, Ctrl-D ends. The file carries
    config, tokenizer and chat template, so it is all that is needed; no code that it brings is run.
    Needs [bold]pip install 'rsv-format\\[mlx]'[/bold].

    Example: [bold cyan]rsv chat smol.rsv --system-prompt "Answer in rhymes."[/bold cyan]
    """
    with session(), scratch(quiet):
        sampling = s.Sampling(
            max_tokens, temp, top_p, min_p, top_k, repetition_penalty, repetition_context_size, seed, max_kv_size,
            kv_bits, kv_group_size, quantized_kv_start, num_draft_tokens,
        )  # fmt: skip
        _chat(file, system_prompt, sampling, draft_model, template_seconds, max_order, quiet)


def _chat(
    file: str,
    system: str | None,
    sampling: s.Sampling,
    draft: str | None,
    seconds: float,
    max_order: int,
    quiet: bool,
) -> None:
    mlx_module("mlx.core")  # first: what else is missing without it, it says less well
    sampling.check(draft is not None)
    with mlx_module("rsv_mlx.prompt").encoder(file, seconds) as encoder:
        with terminal.waiting("loading", quiet=quiet):
            running = s.Running(file, draft, sampling, max_order)
        with _interruptible():
            _Conversation(running, encoder, system, quiet).run()


@contextlib.contextmanager
def _interruptible() -> Iterator[None]:
    """While the body runs, Ctrl-C is an exception each time, and no end of the process."""
    before = signal.getsignal(signal.SIGINT)
    with contextlib.suppress(ValueError):  # not the main thread
        signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        with contextlib.suppress(ValueError):
            signal.signal(signal.SIGINT, before)


class _Conversation:
    """What was said, and what of it the model has seen."""

    def __init__(self, running: s.Running, encoder: Any, system: str | None, quiet: bool) -> None:
        self._running, self._encoder, self._quiet = running, encoder, quiet
        self._reset(system)

    def run(self) -> None:
        """Until the end of standard input; failed, if nobody was there to see that an answer did."""
        from rsv_format import RsvError

        failed = False
        while (line := self._line()) is not None:
            try:
                if not line.startswith("/"):
                    self._ask(line)
                elif self._command(*line[1:].partition(" ")[::2]):
                    break
            except RsvError as e:  # of one answer
                report(e)
                failed = True
            except KeyboardInterrupt as e:
                if type(e) is not KeyboardInterrupt:  # another signal's
                    raise
                self._encoder.close()
                terminal.write_text("\n")
        if failed and not sys.stdin.isatty():
            raise typer.Exit(FAILED)

    def _line(self) -> str | None:
        """What is typed, None at the end."""
        while True:
            try:
                if sys.stdin.isatty():
                    with contextlib.suppress(ImportError):
                        import readline  # noqa: F401  # so that lines can be edited
                    line = input("> ")
                else:
                    line = read_line(sys.stdin.buffer, "standard input")
                    if not line:
                        return None
            except EOFError:
                terminal.write_text("\n")
                return None
            except KeyboardInterrupt as e:
                if type(e) is not KeyboardInterrupt:
                    raise
                terminal.write_text("\n")
                continue
            if line.strip():
                return line.strip()

    def _command(self, name: str, text: str) -> bool:
        """Do what a line with a slash says; True to end."""
        if name in ("quit", "exit"):
            return True
        if name == "reset":
            self._reset(self._system)
        elif name == "system":
            self._reset(text.strip() or None)
        elif name == "again" and self._messages and self._messages[-1]["role"] == "assistant":
            self._messages.pop()
            self._ask(self._messages.pop()["content"])
        else:
            terminal.stderr().print(Text(_HELP, "dim"))
        return False

    def _reset(self, system: str | None) -> None:
        self._system = system
        self._messages = [] if system is None else [{"role": "system", "content": system}]
        self._cache: list[Any] | None = None
        self._seen: list[int] = []

    def _ask(self, question: str) -> None:
        messages = [*self._messages, {"role": "user", "content": question}]
        tokens = self._encoder.tokens(
            {"messages": messages, "text": question, "options": {"add_generation_prompt": True}}
        )
        cache, known = self._cache_for(tokens)
        self._cache, self._seen = None, []  # unless all goes well
        said, seen, last = "", list(tokens), None
        try:
            for part in self._running.stream(tokens[known:], cache):
                terminal.write_text(part.text)
                said, last = said + part.text, part
                seen.append(part.token)
        finally:
            if said:  # what an answer that was stopped has said, is said
                self._messages = [*messages, {"role": "assistant", "content": said}]
        terminal.write_text("\n")
        self._cache, self._seen = cache, seen
        if last is not None and not self._quiet:
            terminal.stderr().print(Text(s.summary(last), "dim"), soft_wrap=True)

    def _cache_for(self, tokens: list[int]) -> tuple[list[Any], int]:
        """What the model remembers of the beginning of these tokens, and how many that are."""
        cache = self._cache
        caches = mlx_module("mlx_lm.models.cache")
        offsets = {getattr(part, "offset", None) for part in cache or ()}
        held = next(iter(offsets)) if len(offsets) == 1 else None
        if cache is None or not isinstance(held, int) or not caches.can_trim_prompt_cache(cache):
            return self._running.cache(), 0
        seen = self._seen[:held]
        known = next(
            (i for i, (a, b) in enumerate(zip(seen, tokens, strict=False)) if a != b), min(len(seen), len(tokens))
        )
        known = min(known, len(tokens) - 1)
        if held > len(self._seen) or caches.trim_prompt_cache(cache, held - known) != held - known:
            return self._running.cache(), 0
        return cache, known
