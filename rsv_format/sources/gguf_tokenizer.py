"""tokenizer.json and tokenizer_config.json of a GGUF model, rebuilt with the tokenizers package.

llama.cpp names the pre-tokenizer instead of storing it, and leaves SentencePiece's merges to the scores;
the table here and the scores give both back.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

from rsv_format.errors import RsvError
from rsv_format.sources.base import json_attachment, library, reading
from rsv_format.sources.gguf_reader import Metadata

_UNKNOWN, _CONTROL, _USER_DEFINED, _BYTE = 2, 3, 4, 6  # values of tokenizer.ggml.token_type

_GPT2_WORDS = r"'(?:[sdmt]|ll|ve|re)| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{digits}"
    r"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


@dataclass(frozen=True)
class _PreTokenizer:
    """The patterns that split text, one after the other, before the bytes of each piece are merged."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    starts_with_bos: bool = False


_GPT2 = _PreTokenizer((_GPT2_WORDS,))
_DIGITS = _PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = _PreTokenizer((_WORDS.format(digits="{1,3}"),), ignore_merges=True, starts_with_bos=True)
_QWEN2 = _PreTokenizer((_WORDS.format(digits=""),), nfc=True)
_DEFAULT = _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))
_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(("gpt-2", "phi-2", "olmo", "jais", "mpt"), _GPT2),
    **dict.fromkeys(("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone"), _DIGITS),
    **dict.fromkeys(("llama-bpe", "llama3", "llama-v3"), _LLAMA3),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
}


def tokenizer_attachments(metadata: Metadata) -> dict[str, tuple[str, bytes]]:
    """The attachments that transformers' AutoTokenizer loads; none for a file without a vocabulary.

    Raises
    ------
    RsvError
        `source_unsupported` for an unknown tokenizer model or pre-tokenizer; `source_invalid` if malformed.
    """
    where = metadata.where
    model = metadata.get("tokenizer.ggml.model", str)
    tokens = metadata.array("tokenizer.ggml.tokens", str)
    if tokens is None or model is None:
        return {}
    kinds = metadata.array("tokenizer.ggml.token_type", int) or [1] * len(tokens)
    if len(kinds) != len(tokens):
        raise RsvError("source_invalid", f"{where}: tokenizer.ggml.token_type", "has not one entry per token")
    if model not in ("gpt2", "llama"):
        raise RsvError("source_unsupported", f"{where}: tokenizer.ggml.model", f"{model!r} tokenizers cannot be read")
    tokenizers = library("tokenizers", where)
    special = _special_tokens(metadata, tokens)
    with reading(f"{where}: tokenizer"):
        build = _byte_level if model == "gpt2" else _sentence_piece
        tokenizer, starts_with_bos = build(tokenizers, metadata, tokens, kinds)
        added = [
            tokenizers.AddedToken(token, special=kind != _USER_DEFINED, normalized=False)
            for token, kind in zip(tokens, kinds, strict=True)
            if token and kind in (_UNKNOWN, _CONTROL, _USER_DEFINED)
        ]
        tokenizer.add_tokens(added)
        begins = metadata.get("tokenizer.ggml.add_bos_token", bool)
        begins = (starts_with_bos if begins is None else begins) and "bos_token" in special
        ends = bool(metadata.get("tokenizer.ggml.add_eos_token", bool)) and "eos_token" in special
        _add_ends(tokenizers, tokenizer, special, begins, ends)
        text = tokenizer.to_str()
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        **special,
        "add_bos_token": begins,
        "add_eos_token": ends,
        "clean_up_tokenization_spaces": False,
    }
    if (template := metadata.get("tokenizer.chat_template", str)) is not None:
        config["chat_template"] = template
    return {
        "tokenizer.json": ("application/json", json.dumps(json.loads(text), ensure_ascii=False).encode()),
        "tokenizer_config.json": json_attachment(config),
    }


def _special_tokens(metadata: Metadata, tokens: list[str]) -> dict[str, str]:
    special = {}
    for name, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token = metadata.get(f"tokenizer.ggml.{key}_token_id", int)
        if token is None:
            continue
        if not 0 <= token < len(tokens):
            where = f"{metadata.where}: tokenizer.ggml.{key}_token_id"
            raise RsvError("source_invalid", where, f"{token} is not the id of a token")
        special[f"{name}_token"] = tokens[token]
    return special


def _byte_level(tokenizers: Any, metadata: Metadata, tokens: list[str], _kinds: list[int]) -> tuple[Any, bool]:
    """GPT-2's byte-level BPE, merges as stored."""
    name = metadata.get("tokenizer.ggml.pre", str) or "default"
    if name not in _PRE_TOKENIZERS:
        detail = f"the pre-tokenizer {name!r} is not known"
        raise RsvError("source_unsupported", f"{metadata.where}: tokenizer.ggml.pre", detail)
    split = _PRE_TOKENIZERS[name]
    merges = [tuple(merge.split(" ")) for merge in metadata.array("tokenizer.ggml.merges", str) or []]
    pre = tokenizers.pre_tokenizers
    bpe = tokenizers.models.BPE(vocab=_vocabulary(tokens), merges=merges, ignore_merges=split.ignore_merges)
    tokenizer = tokenizers.Tokenizer(bpe)
    splits = [pre.Split(tokenizers.Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    if split.nfc:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer, split.starts_with_bos


def _sentence_piece(tokenizers: Any, metadata: Metadata, tokens: list[str], kinds: list[int]) -> tuple[Any, bool]:
    """SentencePiece BPE: any two tokens whose concatenation is a token merge, the best score first."""
    scores = metadata.array("tokenizer.ggml.scores", float)
    if scores is None or len(scores) != len(tokens):
        raise RsvError("source_invalid", f"{metadata.where}: tokenizer.ggml.scores", "has not one entry per token")
    vocabulary = _vocabulary(tokens)
    merges = []
    for token, kind, score in zip(tokens, kinds, scores, strict=True):
        if kind in (_UNKNOWN, _CONTROL, _BYTE):
            continue
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [
            (-score, vocabulary[left], vocabulary[right], (left, right))
            for left, right in pairs
            if left in vocabulary and right in vocabulary
        ]
    unknown = metadata.get("tokenizer.ggml.unknown_token_id", int)
    bpe = tokenizers.models.BPE(
        vocab=vocabulary,
        merges=[pair for *_, pair in sorted(merges)],
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=_BYTE in kinds,
    )
    tokenizer = tokenizers.Tokenizer(bpe)
    prefixed = metadata.get("tokenizer.ggml.add_space_prefix", bool)
    normalizers, decoders = tokenizers.normalizers, tokenizers.decoders
    to_bars, to_spaces = normalizers.Replace(" ", "▁"), decoders.Replace("▁", " ")
    if prefixed or prefixed is None:
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), to_bars])
        tokenizer.decoder = decoders.Sequence(
            [to_spaces, decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
        )
    else:
        tokenizer.normalizer = to_bars
        tokenizer.decoder = decoders.Sequence([to_spaces, decoders.ByteFallback(), decoders.Fuse()])
    return tokenizer, True


def _vocabulary(tokens: list[str]) -> dict[str, int]:
    """Text to id, the first of equal tokens winning."""
    return {token: index for index, token in reversed(list(enumerate(tokens)))}


def _add_ends(tokenizers: Any, tokenizer: Any, special: dict[str, str], begins: bool, ends: bool) -> None:
    if not (begins or ends):
        return
    bos, eos = ([special[name]] if wanted else [] for name, wanted in (("bos_token", begins), ("eos_token", ends)))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*bos, *eos}],
    )
