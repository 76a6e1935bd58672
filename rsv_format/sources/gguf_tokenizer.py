"""tokenizer.json and tokenizer_config.json of a GGUF model, rebuilt with the tokenizers package.

llama.cpp names the pre-tokenizer instead of storing it, and leaves SentencePiece's merges to the scores;
the table here and the scores give both back.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from rsv_format.errors import RsvError
from rsv_format.panics import quiet_panics
from rsv_format.sources.base import json_attachment, library, reading
from rsv_format.sources.gguf_reader import Metadata
from rsv_format.sources.gguf_vocabulary import BYTE, CONTROL, UNKNOWN, USER_DEFINED, Vocabulary, spelled

_SUFFIXES = r"'s|'t|'re|'ve|'m|'ll|'d"
_SPACES = r"|\s*[\r\n]+|\s+(?!\S)|\s+"
_GPT2_WORDS = rf"{_SUFFIXES}| ?\p{{L}}+| ?\p{{N}}+| ?[^\s\p{{L}}\p{{N}}]+|\s+(?!\S)|\s+"
_WORDS = rf"(?i:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*{_SPACES}"
_LOWER, _UPPER = r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]", r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]"
_CASED_WORDS = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+SUFFIXES|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*SUFFIXES"
    rf"|\p{{N}}DIGITS| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*{_SPACES}"
)
_BAILING = r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*|\s*[\r\n]|\s+(?!\S)|\s+"
_SEED_CODER = rf"(?i:{_SUFFIXES})|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+{_SPACES}"
_CHINESE_JAPANESE = "[\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff]+"
_DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*{_SPACES}"
)
_EAST_ASIAN = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff]+"


@dataclass(frozen=True)
class _PreTokenizer:
    """The patterns that split text, one after the other, before the bytes of each piece are merged."""

    patterns: tuple[str, ...]
    nfc: bool = False
    ignore_merges: bool = False
    starts_with_bos: bool = False


def _words(pattern: str, digits: str = "", suffixes: str = "") -> str:
    return pattern.replace("DIGITS", digits).replace("SUFFIXES", suffixes)


_GPT2 = _PreTokenizer((_GPT2_WORDS,))
_DIGITS = _PreTokenizer((r"\p{N}", _GPT2_WORDS))
_LLAMA3 = _PreTokenizer((_words(_WORDS, "{1,3}"),), ignore_merges=True, starts_with_bos=True)
_THREES = _PreTokenizer((_words(_WORDS, "{1,3}"),))
_QWEN2 = _PreTokenizer((_words(_WORDS),), nfc=True)
_ONES = _PreTokenizer((_words(_WORDS),))
_TEKKEN = _PreTokenizer((_words(_CASED_WORDS),), ignore_merges=True, starts_with_bos=True)
_GPT4O = _PreTokenizer((_words(_CASED_WORDS, "{1,3}", f"(?i:{_SUFFIXES})?"),))
_DEFAULT = _PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2_WORDS, r"\p{N}+", "[0-9][0-9][0-9]"))
_PRE_TOKENIZERS = {
    "default": _DEFAULT,
    **dict.fromkeys(
        ("gpt-2", "phi-2", "olmo", "jais", "mpt", "gigachat", "a.x-4.0", "mellum", "trillion", "granite-docling",
         "exaone4"), _GPT2),
    **dict.fromkeys(
        ("smollm", "starcoder", "refact", "command-r", "codeshell", "exaone", "minerva-7b"), _DIGITS),
    **dict.fromkeys(
        ("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0", "lfm2"), _LLAMA3),
    **dict.fromkeys(("dbrx", "smaug-bpe", "glm4", "chatglm-bpe"), _THREES),
    **dict.fromkeys(("qwen2", "deepseek-r1-qwen"), _QWEN2),
    **dict.fromkeys(("stablelm2", "megrez", "kormo", "hunyuan", "solar-open", "grok-2"), _ONES),
    "tekken": _TEKKEN,
    **dict.fromkeys(("gpt-4o", "llama4", "kanana2"), _GPT4O),
    **dict.fromkeys(("bailingmoe", "bailingmoe2", "llada-moe"), _PreTokenizer((_BAILING,))),
    "seed-coder": _PreTokenizer((_SEED_CODER,)),
    **dict.fromkeys(
        ("deepseek-v3", "hunyuan-dense", "joyai-llm"),
        _PreTokenizer((r"\p{N}{1,3}", _CHINESE_JAPANESE, _DEEPSEEK)),
    ),
    "deepseek-coder": _PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _EAST_ASIAN, r"\p{N}")),
}  # fmt: skip


@contextmanager
def without_tokenizer() -> Iterator[None]:
    """Around the making of a tokenizer: what is wrong with it is no reason to do without the weights."""
    try:
        yield
    except RsvError as error:
        if error.code not in ("source_invalid", "source_unsupported"):
            raise
        way = "the model can be had without a tokenizer: --no-tokenizer, tokenizer=False in Python"
        raise RsvError(error.code, error.where, f"{error.detail}; {way}") from error


def tokenizer_attachments(metadata: Metadata, vocabulary: Vocabulary) -> dict[str, tuple[str, bytes]]:
    """The attachments that transformers' AutoTokenizer loads.

    Raises
    ------
    RsvError
        `source_unsupported` for an unknown tokenizer model or pre-tokenizer; `source_invalid` if malformed.
    """
    where, tokens = metadata.where, vocabulary.tokens
    with without_tokenizer():
        if vocabulary.model not in ("gpt2", "llama"):
            detail = f"{vocabulary.model!r} tokenizers cannot be read"
            raise RsvError("source_unsupported", f"{where}: tokenizer.ggml.model", detail)
        tokenizers = library("tokenizers", where)
        special = {
            f"{name}_token": tokens[vocabulary.ids[name]]
            for name in ("bos", "eos", "unk", "pad")
            if name in vocabulary.ids
        }
        with reading(f"{where}: tokenizer"), quiet_panics():
            build = _byte_level if vocabulary.model == "gpt2" else _sentence_piece
            tokenizer, starts_with_bos = build(tokenizers, metadata, vocabulary)
            added = [
                tokenizers.AddedToken(token, special=kind != USER_DEFINED, normalized=False)
                for token, kind in zip(tokens, vocabulary.kinds, strict=True)
                if kind in (UNKNOWN, CONTROL, USER_DEFINED)
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
            **_chat_template(metadata),
        }
    return {
        "tokenizer.json": ("application/json", json.dumps(json.loads(text), ensure_ascii=False).encode()),
        "tokenizer_config.json": json_attachment(config),
    }


def _chat_template(metadata: Metadata) -> dict[str, Any]:
    """The chat template, or all that there are by their names; nothing is known here of their language."""
    key = "tokenizer.chat_template"
    names = metadata.array(f"{key}s", str) or []
    named = {name: metadata.get(f"{key}.{name}", str) for name in names}
    found = {name: text for name, text in {"default": metadata.get(key, str), **named}.items() if text is not None}
    found = {name: text.encode("utf-8", "surrogateescape").decode("utf-8", "replace") for name, text in found.items()}
    if not found:
        return {}
    if found.keys() == {"default"}:
        return {"chat_template": found["default"]}
    return {"chat_template": [{"name": name, "template": text} for name, text in found.items()]}


def _byte_level(tokenizers: Any, metadata: Metadata, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """GPT-2's byte-level BPE, merges as stored."""
    name = metadata.get("tokenizer.ggml.pre", str) or "default"
    if name not in _PRE_TOKENIZERS:
        detail = f"the pre-tokenizer {name!r} is not known"
        raise RsvError("source_unsupported", f"{metadata.where}: tokenizer.ggml.pre", detail)
    split = _PRE_TOKENIZERS[name]
    stored = metadata.array("tokenizer.ggml.merges", str)
    if not stored:
        detail = "is missing: every word would fall into its bytes"
        raise RsvError("source_invalid", f"{metadata.where}: tokenizer.ggml.merges", detail)
    cuts = ((merge[:1], *merge[1:].partition(" ")) for merge in map(spelled, stored))  # a token may begin with a space
    merges = [(first + rest, right) for first, rest, _, right in cuts]
    pre = tokenizers.pre_tokenizers
    bpe = tokenizers.models.BPE(vocab=_by_text(vocabulary), merges=merges, ignore_merges=split.ignore_merges)
    tokenizer = tokenizers.Tokenizer(bpe)
    splits = [pre.Split(tokenizers.Regex(pattern), "isolated") for pattern in split.patterns]
    tokenizer.pre_tokenizer = pre.Sequence([*splits, pre.ByteLevel(add_prefix_space=False, use_regex=False)])
    if split.nfc:
        tokenizer.normalizer = tokenizers.normalizers.NFC()
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    return tokenizer, split.starts_with_bos


def _sentence_piece(tokenizers: Any, metadata: Metadata, vocabulary: Vocabulary) -> tuple[Any, bool]:
    """SentencePiece BPE: any two tokens whose concatenation is a token merge, the best score first."""
    if vocabulary.scores is None:
        raise RsvError("source_invalid", f"{metadata.where}: tokenizer.ggml.scores", "is missing")
    tokens, kinds, ids = vocabulary.tokens, vocabulary.kinds, _by_text(vocabulary)
    merges = []
    for token, kind, score in zip(tokens, kinds, vocabulary.scores, strict=False):
        if kind in (UNKNOWN, CONTROL, BYTE):
            continue
        pairs = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
        merges += [
            (-score, ids[left], ids[right], (left, right)) for left, right in pairs if left in ids and right in ids
        ]
    unknown = vocabulary.ids.get("unk")
    bpe = tokenizers.models.BPE(
        vocab=ids,
        merges=[pair for *_, pair in sorted(merges)],
        unk_token=tokens[unknown] if unknown is not None else None,
        fuse_unk=True,
        byte_fallback=True,
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


def _by_text(vocabulary: Vocabulary) -> dict[str, int]:
    return {token: i for i, token in enumerate(vocabulary.tokens)}


def _add_ends(tokenizers: Any, tokenizer: Any, special: dict[str, str], begins: bool, ends: bool) -> None:
    if not (begins or ends):
        return
    bos, eos = ([special[name]] if wanted else [] for name, wanted in (("bos_token", begins), ("eos_token", ends)))
    tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
        single=[*bos, "$A", *eos],
        pair=[*bos, "$A", *eos, *(f"{token}:1" for token in bos), "$B:1", *(f"{token}:1" for token in eos)],
        special_tokens=[(token, tokenizer.token_to_id(token)) for token in {*bos, *eos}],
    )
