"""The tokens of a GGUF model, what each is for, and which of them end a turn, as llama.cpp has it (llama-vocab.cpp).

Its converters leave much unsaid: ids that are missing have defaults, and tokens that end a turn are known by their
text.
"""

from __future__ import annotations

from dataclasses import dataclass

from rsv_format.errors import RsvError
from rsv_format.sources.gguf_reader import Metadata

# Values of tokenizer.ggml.token_type.
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)

_NO_VOCABULARY = ("none", "no_vocab")
_NO_TOKEN = (-1, 2**32 - 1)  # an id that says that there is none
_IDS = {
    "bos": "bos_token_id",
    "eos": "eos_token_id",
    "eot": "eot_token_id",
    "eom": "eom_token_id",
    "unk": "unknown_token_id",
    "pad": "padding_token_id",
}
_SENTENCE_PIECE_IDS = {"bos": 1, "eos": 2, "unk": 0}

# Tokens that end what a model says, whatever they are marked as.
_ENDS = frozenset({
    "<|eot_id|>", "<|im_end|>", "<|end|>", "<|return|>", "<|call|>", "<|flush|>", "<|calls|>", "<end_of_turn>",
    "<|endoftext|>", "</s>", "<|eom_id|>", "<EOT>", "_<EOT>", "[EOT]", "[EOS]", "<|end_of_text|>",
    "<end_of_utterance>", "<eos>", "<turn|>", "<|tool_response>", "<\uff5cend\u2581of\u2581sentence\uff5c>", "[e~[",
    # what pads or separates code that is filled in
    "<|fim_pad|>", "<fim-pad>", "<fim_pad>", "<PAD>", "[PAD]", "<|fim_repo|>", "<|repo_name|>", "<fim-repo>", "<REPO>",
    "<reponame>", "<|file_sep|>",
})  # fmt: skip
_SHOWN = frozenset({"<|channel|>", "<|message|>", "<|start|>", "<|constrain|>"})  # control tokens that are text


@dataclass(frozen=True)
class Vocabulary:
    """Tokens by id; `ids` has those of bos, eos, eot, eom, unk and pad that there are, `ends` all that end a turn."""

    model: str
    tokens: list[str]
    kinds: list[int]
    scores: list[float] | None
    ids: dict[str, int]
    ends: frozenset[int]


def read_vocabulary(metadata: Metadata) -> Vocabulary | None:
    """The vocabulary of a GGUF model, or None where it has none.

    Raises
    ------
    RsvError
        `source_invalid` where it is malformed: an id that is no token's, two tokens of one text.
    """
    where = f"{metadata.where}: tokenizer.ggml"
    model = metadata.get("tokenizer.ggml.model", str)
    texts = metadata.array("tokenizer.ggml.tokens", str)
    if model in _NO_VOCABULARY or (model is None and texts is None):
        return None
    if model is None or not texts:
        raise RsvError("source_invalid", f"{where}.{'model' if model is None else 'tokens'}", "is missing")
    tokens = [spelled(text) or f"[EMPTY_{i}]" for i, text in enumerate(texts)]
    ids = {token: i for i, token in enumerate(tokens)}
    if len(ids) < len(tokens):
        second = next(i for i, token in enumerate(tokens) if ids[token] != i)
        detail = f"{tokens[second]!r} is the text of {second} and of {ids[tokens[second]]}"
        raise RsvError("source_invalid", f"{where}.tokens", detail)
    kinds = metadata.array("tokenizer.ggml.token_type", int) or [NORMAL] * len(tokens)
    scores = metadata.array("tokenizer.ggml.scores", float)
    for name, entries in (("token_type", kinds), ("scores", scores)):
        if entries is not None and len(entries) < len(tokens):
            raise RsvError("source_invalid", f"{where}.{name}", "has not one entry per token")
    kinds = [_kind(*pair) for pair in zip(texts, kinds[: len(tokens)], strict=True)]
    special = _ids(metadata, model, len(tokens))
    ends = {ids[text] for text in _ends(ids)}
    kinds = [CONTROL if i in ends else kind for i, kind in enumerate(kinds)]
    ends |= {special[name] for name in ("eos", "eot", "eom") if name in special}
    return Vocabulary(model, tokens, kinds, scores, special, frozenset(ends))


def spelled(stored: str) -> str:
    """Text that JSON can hold; bytes that are no UTF-8 are spelled out."""
    return stored.encode("utf-8", "surrogateescape").decode("utf-8", "backslashreplace")


def _kind(stored: str, kind: int) -> int:
    if stored in _SHOWN:
        return USER_DEFINED
    return NORMAL if kind not in range(NORMAL, BYTE + 1) else kind


def _ids(metadata: Metadata, model: str, count: int) -> dict[str, int]:
    ids = {name: i for name, i in _SENTENCE_PIECE_IDS.items() if model == "llama" and i < count}
    for name, key in _IDS.items():
        token = metadata.get(f"tokenizer.ggml.{key}", int)
        if token is None or token in _NO_TOKEN:
            continue
        if not 0 <= token < count:
            where = f"{metadata.where}: tokenizer.ggml.{key}"
            raise RsvError("source_invalid", where, f"{token} is not the id of a token")
        ids[name] = token
    return ids


def _ends(ids: dict[str, int]) -> set[str]:
    """The texts that end a turn, but those that do not where others do."""
    found = _ENDS & ids.keys()
    if found & {"<|call|>", "<|calls|>"} and found & {"<|return|>", "<|flush|>"}:
        found -= {"<|end|>"}  # of a message, not of the turn
    if "<|tool_response>" in found:
        found -= {"</s>"}
    return set(found)
