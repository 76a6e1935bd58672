"""How tokens are chosen and remembered: options of `rsv generate` and `rsv chat`, named as mlx-lm names them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Annotated, Any

import typer

from rsv_cli.session import mlx_module

if TYPE_CHECKING:
    from rsv_mlx.prompt import Encoder

MaxTokens = Annotated[int, typer.Option("--max-tokens", "-m", min=1, help="Stop after so many.")]
Temp = Annotated[float, typer.Option("--temp", min=0, help="Temperature; 0 takes the likeliest token.")]
TopP = Annotated[float, typer.Option("--top-p", min=0, max=1, help="Choose among the likeliest tokens that have this "
                                     "probability together; 1 is all.")]  # fmt: skip
MinP = Annotated[float, typer.Option("--min-p", min=0, max=1, help="Leave out tokens that are less likely than this "
                                     "share of the likeliest one's probability.")]  # fmt: skip
TopK = Annotated[int, typer.Option("--top-k", min=0, help="Choose among so many of the likeliest tokens; 0 is all.")]
RepetitionPenalty = Annotated[
    float | None,
    typer.Option("--repetition-penalty", min=0, help="Above 1, tokens that came already are less likely.",
                 show_default=False),
]  # fmt: skip
RepetitionContextSize = Annotated[
    int, typer.Option("--repetition-context-size", min=1, help="How many of the last tokens the penalty looks at.")
]
Seed = Annotated[int, typer.Option("--seed", min=0, max=2**53 - 1, help="Of the sampling.")]
SystemPrompt = Annotated[
    str | None, typer.Option("--system-prompt", help="What the model is told before all else.", show_default=False)
]
MaxKvSize = Annotated[
    int | None,
    typer.Option("--max-kv-size", min=8, help="Remember so many tokens: the first four and the last.",
                 show_default=False),
]  # fmt: skip
KvBits = Annotated[
    int | None, typer.Option("--kv-bits", help="Quantize what is remembered to 2, 3, 4, 5, 6 or 8 bits.",
                             show_default=False)
]  # fmt: skip
KvGroupSize = Annotated[int, typer.Option("--kv-group-size", help="Of that quantization: 32, 64 or 128.")]
QuantizedKvStart = Annotated[int, typer.Option("--quantized-kv-start", min=0, help="Quantize it from this token on.")]
DraftModel = Annotated[
    str | None,
    typer.Option("--draft-model", metavar="FILE", help="An RSV file of a smaller model with the same tokenizer: it "
                 "proposes tokens, the large one checks several at a time.", show_default=False),
]  # fmt: skip
NumDraftTokens = Annotated[int, typer.Option("--num-draft-tokens", min=1, help="How many are proposed at a time.")]
TemplateSeconds = Annotated[
    float, typer.Option("--template-seconds", min=0.1, help="Processor time that the file's chat template and "
                        "tokenizer may take for a prompt.")
]  # fmt: skip


@dataclass(frozen=True)
class Sampling:
    """What the options above say."""

    max_tokens: int
    temp: float
    top_p: float
    min_p: float
    top_k: int
    repetition_penalty: float | None
    repetition_context_size: int
    seed: int
    max_kv_size: int | None
    kv_bits: int | None
    kv_group_size: int
    quantized_kv_start: int
    num_draft_tokens: int

    def check(self, with_draft: bool = False) -> None:
        """Refuse what does not go together.

        Raises
        ------
        RsvError
            bad_argument.
        """
        from rsv_format import RsvError

        if self.kv_bits not in (None, 2, 3, 4, 5, 6, 8):
            raise RsvError("bad_argument", "--kv-bits", f"{self.kv_bits} is none of 2, 3, 4, 5, 6, 8")
        if self.kv_group_size not in (32, 64, 128):
            raise RsvError("bad_argument", "--kv-group-size", f"{self.kv_group_size} is none of 32, 64, 128")
        if self.max_kv_size is not None and self.kv_bits is not None:
            raise RsvError("bad_argument", "--kv-bits", "a cache with --max-kv-size is not quantized")
        if self.max_kv_size is not None and with_draft:
            raise RsvError("bad_argument", "--max-kv-size", "there is no such limit with --draft-model")


class Running:
    """A model at hand, and its draft model, if there is one."""

    def __init__(self, file: str, draft: str | None, sampling: Sampling, max_order: int) -> None:
        from rsv_format import RsvError

        sampling.check(draft is not None)
        mlx_module("rsv_mlx.untrusted").mlx_lm_utils()
        self._mlx_lm, self._samplers = mlx_module("mlx_lm"), mlx_module("mlx_lm.sample_utils")
        self._calibrate, self._untrusted = mlx_module("rsv_mlx.calibrate"), mlx_module("rsv_mlx.untrusted")
        rsv_mlx = mlx_module("rsv_mlx")
        self.file, self.sampling = file, sampling
        self.model = rsv_mlx.load_model(file, max_order=max_order)
        self._draft = None if draft is None else rsv_mlx.load_model(draft, max_order=max_order)
        tables = [self._calibrate.table_rows(model) for model in (self.model, self._draft) if model is not None]
        if len(set(tables)) > 1:
            raise RsvError("bad_argument", "--draft-model", "it has another vocabulary: its tokenizer is another one")
        rows = tables[0]
        if rows is not None and sampling.top_k >= rows:
            raise RsvError("bad_argument", "--top-k", f"the model has {rows} tokens")
        mlx_module("mlx.core").random.seed(sampling.seed)

    @cached_property
    def tokenizer(self) -> Any:
        """Loaded when it is needed: by then it has encoded a prompt in a process that has limits."""
        return mlx_module("rsv_mlx").load_tokenizer(self.file)

    def cache(self) -> list[Any]:
        """What is remembered, nothing yet."""
        made = mlx_module("mlx_lm.models.cache").make_prompt_cache
        cache: list[Any] = made(self.model, self.sampling.max_kv_size)
        return cache if self._draft is None else cache + made(self._draft)

    def stream(self, tokens: list[int], cache: list[Any]) -> Iterator[Any]:
        """mlx-lm's parts of an answer, as they come; its faults are errors of the file."""
        s = self.sampling
        self._calibrate.check_tokens(self.model, tokens)
        options: dict[str, Any] = {"kv_bits": s.kv_bits, "kv_group_size": s.kv_group_size,
                                   "quantized_kv_start": s.quantized_kv_start}  # fmt: skip
        if self._draft is not None:
            options |= {"draft_model": self._draft, "num_draft_tokens": s.num_draft_tokens}
        parts = self._mlx_lm.stream_generate(
            self.model,
            self.tokenizer,
            tokens,
            max_tokens=s.max_tokens,
            sampler=self._samplers.make_sampler(temp=s.temp, top_p=s.top_p, min_p=s.min_p, top_k=s.top_k),
            logits_processors=self._samplers.make_logits_processors(
                repetition_penalty=s.repetition_penalty, repetition_context_size=s.repetition_context_size
            ),
            prompt_cache=cache,
            **options,
        )
        try:
            while True:
                with self._untrusted.library("unsupported_model", str(self.file)):
                    part = next(parts, None)
                if part is None:
                    return
                yield part
        finally:
            parts.close()


def asked(prompt: str, system: str | None, raw: bool) -> dict[str, Any]:
    """What an `Encoder` is asked for a prompt."""
    if raw:
        return {"text": prompt}
    messages = [] if system is None else [{"role": "system", "content": system}]
    messages += [{"role": "user", "content": prompt}]
    return {"messages": messages, "text": prompt, "options": {"add_generation_prompt": True}}


def summary(part: Any) -> str:
    """Counts and speeds of an answer, of its last part."""
    line = f"prompt {part.prompt_tokens} tokens, {part.prompt_tps:.1f}/s · "
    line += f"generated {part.generation_tokens} tokens, {part.generation_tps:.1f}/s · "
    return line + f"peak memory {part.peak_memory:.2f} GB"


def prompt_tokens(encoder: Encoder) -> list[int]:
    """The answer to what was asked.

    Raises
    ------
    RsvError
        bad_argument: it has no tokens; what `Encoder.receive` raises.
    """
    from rsv_format import RsvError

    tokens = encoder.receive()
    if not tokens:
        raise RsvError("bad_argument", "--prompt", "it has no tokens: there is nothing to continue")
    return tokens
