"""Tokenizers straight from tokenizer.json: the same as transformers' own, or left to it."""

from __future__ import annotations

import copy
import json
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("mlx.core", reason="MLX is not installed")
tokenizers = pytest.importorskip("tokenizers")
with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # what transformers says while it is imported is not ours
    pytest.importorskip("mlx_lm", reason="mlx-lm is not installed")
    transformers = pytest.importorskip("transformers")
gguf = pytest.importorskip("gguf")

from gguf_models import byte_tokens, piece_tokens, write_model  # noqa: E402

from rsv_format import RsvError  # noqa: E402
from rsv_format.sources import open_source  # noqa: E402
from rsv_mlx import tokenizing  # noqa: E402
from rsv_mlx.untrusted import data_folder, tokenizer  # noqa: E402

ROOT = Path(__file__).resolve().parents[1]
TEXTS = [
    "", " ", "Hello, world!", "  two  spaces \n\n\tand a tab", "it's 1234 we'll don't", "ab ba aab",
    "caf\u00e9 cafe\u0301 \u4f60\u597d \U0001f600\u200d",
    "<|im_start|>user\nhi<|im_end|> <s>x</s> <tool>", "a ,b . c !", "<|endoftext|>\u0000\ufffd",
]  # fmt: skip
CHATML = (
    "{% if tools %}{{ tools | tojson(indent=2) }}{% endif %}{% set ns = namespace(n=0) %}"
    "{% for m in messages %}{% set ns.n = ns.n + 1 %}{% if loop.last %}{{ ns.n }}{% endif %}\n"
    "    {%- if m.role == 'skip' %}{% continue %}{% endif %}"
    "{{ '<|im_start|>' + m['role'] + '\n' }}{% generation %}{{ m.content }}{% endgeneration %}{{ '<|im_end|>' }}\n"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{{ eos_token }}{% endif %}"
    "{{ enable_thinking is defined and enable_thinking }}{{ dict(a=1).items() | list }}{{ documents is none }}"
)
TOOLS = [
    {"type": "function", "function": {"name": "add", "description": "<b> & \u00e9", "parameters": {"a": [1, None]}}}
]
CHATS: list[list[dict[str, Any]]] = [
    [{"role": "user", "content": "hi there"}],
    [{"role": "system", "content": "be brief"}, {"role": "skip", "content": "x"}, {"role": "user", "content": "\u00e9"},
     {"role": "assistant", "content": "ok", "tool_calls": None}],
]  # fmt: skip

Files = dict[str, bytes]


def trained(**options: Any) -> Any:
    """A small byte-level BPE as Qwen's."""
    text = ["Hello, world! hello hello it's 1234 two spaces and a tab we'll don't user hi there"] * 3
    made = tokenizers.Tokenizer(tokenizers.models.BPE(**options))
    pre = tokenizers.pre_tokenizers
    made.normalizer = tokenizers.normalizers.NFC()
    made.pre_tokenizer = pre.Sequence([
        pre.Split(tokenizers.Regex(tokenizing._QWEN_SPLIT), "isolated"),
        pre.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(text, trainer)
    made.add_special_tokens(["<|endoftext|>", "<|im_start|>", "<|im_end|>"])
    made.add_tokens([tokenizers.AddedToken("<tool>", normalized=False)])
    return made


def added(made: Any) -> dict[str, dict[str, Any]]:
    """added_tokens_decoder, as transformers writes it."""
    return {
        str(token["id"]): {k: v for k, v in token.items() if k != "id"}
        for token in json.loads(made.to_str())["added_tokens"]
    }


def files_of(made: Any, settings: dict[str, Any], config: dict[str, Any], **more: Any) -> Files:
    trees = {"tokenizer_config.json": settings, "config.json": config} | more
    return {"tokenizer.json": made.to_str().encode()} | {
        name.replace("__", "."): tree if isinstance(tree, bytes) else json.dumps(tree).encode()
        for name, tree in trees.items()
    }


QWEN = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", "bos_token": None,
        "unk_token": None, "chat_template": CHATML, "model_max_length": 1000, "add_bos_token": False,
        "clean_up_tokenization_spaces": False, "errors": "replace", "split_special_tokens": False,
        "additional_special_tokens": ["<|im_start|>", "<|im_end|>"]}  # fmt: skip
PLAIN = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "bos_token": "<|endoftext|>",
         "chat_template": CHATML}  # fmt: skip


def both(files: Files, config: dict[str, Any]) -> tuple[Any, Any]:
    """Ours and transformers', in mlx-lm's wrapper; ours is None where it is left to transformers."""
    with data_folder(files.items()) as folder:
        whole = tokenizer(folder, config, {})
        ours = tokenizer(folder, config)
    return ours if isinstance(ours._tokenizer, tokenizing.Tokenizer) else None, whole


def stream(tokenizer: Any, ids: list[int]) -> str:
    detokenizer = tokenizer.detokenizer
    for token in ids:
        detokenizer.add_token(token)
    detokenizer.finalize()
    return str(detokenizer.text)


def check_same(ours: Any, whole: Any) -> None:
    assert type(ours._detokenizer) is type(whole._detokenizer)
    assert ours.eos_token_ids == whole.eos_token_ids and len(ours) == len(whole)
    assert ours.has_chat_template == whole.has_chat_template and ours.has_tool_calling == whole.has_tool_calling
    assert ours.has_thinking == whole.has_thinking and ours.special_tokens_map == whole.special_tokens_map
    assert ours.vocab_size == whole.vocab_size and ours.get_vocab() == whole.get_vocab()
    assert ours.chat_template == whole.chat_template
    for name in tokenizing._NAMED:
        assert getattr(ours, name) == getattr(whole, name)
        assert getattr(ours, f"{name}_id") == getattr(whole, f"{name}_id")
    every = list(range(len(whole)))
    assert ours.convert_ids_to_tokens(every) == whole.convert_ids_to_tokens(every)
    assert ours.convert_ids_to_tokens(3) == whole.convert_ids_to_tokens(3)
    assert ours.decode(3) == whole.decode(3) and ours.decode([]) == whole.decode([])
    for words in ("Hello", "nothing like it", "<|im_end|>", ["<s>", "no such"]):
        assert ours.convert_tokens_to_ids(words) == whole.convert_tokens_to_ids(words)
    for text in TEXTS:
        for special in (True, False):
            ids = ours.encode(text, add_special_tokens=special)
            assert ids == whole.encode(text, add_special_tokens=special), text
            assert ours.decode(ids) == whole.decode(ids)
            assert ours.decode(ids, skip_special_tokens=True) == whole.decode(ids, skip_special_tokens=True)
            assert stream(ours, ids) == stream(whole, ids)
    assert stream(ours, every[::-1]) == stream(whole, every[::-1])
    if ours.has_chat_template:
        for chat in CHATS:
            for options in ({}, {"tools": TOOLS}, {"add_generation_prompt": True, "enable_thinking": False}):
                for tokenize in (True, False):
                    found = ours.apply_chat_template(chat, tokenize=tokenize, **options)
                    assert found == whole.apply_chat_template(chat, tokenize=tokenize, **options)
    assert isinstance(ours._tokenizer, tokenizing.Tokenizer)  # nothing above asked for more


# of all kinds that sources make


@pytest.mark.parametrize("model_type", tokenizing.TYPES)
@pytest.mark.parametrize("name", [*tokenizing.AS_IT_IS, *tokenizing.QWEN])
def test_classes_and_model_types(model_type: str, name: str) -> None:
    """Ours is what transformers makes, or none of ours, and that only where the class is not the type's."""
    made = trained()
    ours, whole = both(
        files_of(made, QWEN | {"tokenizer_class": name}, {"model_type": model_type}), {"model_type": model_type}
    )
    if ours is not None:
        check_same(ours, whole)
    assert (ours is not None) or (model_type not in ("llama", "qwen2", "qwen3") or name in tokenizing.QWEN)


@pytest.mark.parametrize("keys", [
    byte_tokens("th", "the", "he"),
    byte_tokens("th", "the", "he") | {"tokenizer.ggml.eos_token_id": 11, "tokenizer.chat_template": CHATML},
    piece_tokens(("<tool>", 4, 0.0)) | {"tokenizer.chat_template": CHATML},
    piece_tokens() | {"tokenizer.ggml.add_space_prefix": False, "tokenizer.ggml.add_eos_token": True},
    piece_tokens(("<ctl>", 3, 0.0), ("<use>", 4, 0.0), ("<|im_end|>", 1, 0.0)),
    piece_tokens() | {"tokenizer.chat_templates": ["tool_use", "short"], "tokenizer.chat_template": "{{ messages }}",
                      "tokenizer.chat_template.tool_use": CHATML, "tokenizer.chat_template.short": "x"},
], ids=["bytes", "bytes with a template", "pieces", "pieces with an end", "kinds", "templates"])  # fmt: skip
def test_of_gguf(keys: dict[str, Any], tmp_path: Path) -> None:
    with open_source(write_model(tmp_path / "m.gguf", keys=keys)) as source:
        files = {name: data for name, (_, data) in source.attachments.items()}
        config = dict(source.config or {})
    ours, whole = both(files, config)
    check_same(ours, whole)


def test_of_folders() -> None:
    made = trained()
    config = {"model_type": "qwen2", "eos_token_id": [300, 301]}
    plain = {"model_type": "llama", "eos_token_id": 301}
    variants: list[tuple[Files, dict[str, Any]]] = [
        (files_of(made, QWEN | {"added_tokens_decoder": added(made)}, config), config),
        (files_of(made, QWEN, config, special_tokens_map__json={"eos_token": {"content": "<|endoftext|>",
         "lstrip": False, "rstrip": False, "normalized": False, "single_word": False}}), config),
        (files_of(made, QWEN, config, chat_template__jinja=b"{{ messages[0].content }}"), config),
        (files_of(made, PLAIN, plain), plain),
        (files_of(made, PLAIN | {"chat_template": None}, plain), plain),
        (files_of(made, PLAIN | {"eos_token": {"__type": "AddedToken", "content": "<|im_end|>", "lstrip": False,
         "rstrip": False, "normalized": False, "single_word": False, "special": True}}, plain), plain),
        (files_of(made, PLAIN | {"chat_template": [{"name": "default", "template": CHATML}]}, plain), plain),
        (files_of(made, PLAIN | {"tool_parser_type": "json_tools"}, plain), plain),
        (files_of(made, PLAIN | {"clean_up_tokenization_spaces": True}, plain), plain),
    ]  # fmt: skip
    words = tokenizers.Tokenizer(tokenizers.models.WordLevel({f"w{i}": i for i in range(9)}, unk_token="w0"))
    words.pre_tokenizer = tokenizers.pre_tokenizers.WhitespaceSplit()
    words.add_special_tokens(["w0"])
    variants.append((files_of(words, {"tokenizer_class": "TokenizersBackend", "unk_token": "w0"}, plain), plain))
    for files, config in variants:
        ours, whole = both(files, config)
        assert ours is not None, files["tokenizer_config.json"]
        check_same(ours, whole)


def test_what_is_left_to_transformers() -> None:
    made, config = trained(), {"model_type": "llama"}
    other = copy.deepcopy(added(made))
    other["301"]["lstrip"] = True
    truncated = trained()
    truncated.enable_truncation(4)
    digits = trained()
    digits.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel()
    for files in (
        files_of(made, PLAIN | {"tokenizer_class": "LlamaTokenizer"}, config),
        files_of(made, {k: v for k, v in PLAIN.items() if k != "tokenizer_class"}, config),
        files_of(made, PLAIN | {"eos_token": "<new>"}, config), files_of(made, PLAIN | {"eos_token": "<tool>"}, config),
        files_of(made, PLAIN | {"eos_token": "H"}, config),
        files_of(made, PLAIN | {"image_token": "<|im_end|>"}, config),
        files_of(made, PLAIN | {"added_tokens_decoder": other}, config),
        files_of(made, PLAIN | {"split_special_tokens": True}, config), files_of(truncated, PLAIN, config),
        files_of(made, PLAIN, config, added_tokens__json={"<x>": 305}),
        files_of(made, PLAIN, {"model_type": "mistral"}), files_of(digits, QWEN, {"model_type": "qwen2"}),
        files_of(trained(fuse_unk=True), QWEN, {"model_type": "qwen2"}),
        files_of(made, PLAIN | {"additional_special_tokens": ["<other>"]}, config),
        files_of(made, PLAIN, config, special_tokens_map__json={"eos_token": "<new>"}),
    ):  # fmt: skip
        ours, whole = both(files, json.loads(files["config.json"]))
        assert ours is None and isinstance(whole._tokenizer, transformers.PreTrainedTokenizerBase)


# what it becomes


def fresh() -> Any:
    ours, _ = both(files_of(trained(), PLAIN, {"model_type": "llama"}), {"model_type": "llama", "eos_token_id": 302})
    return ours


@pytest.mark.parametrize("use", [
    lambda t: t._tokenizer(["hi", "there"]),
    lambda t: t.add_tokens(["<new>"]), lambda t: t.encode("hi", return_tensors=None),
    lambda t: t.decode([[1, 2], [3]]), lambda t: t.all_special_ids, lambda t: copy.deepcopy(t._tokenizer),
    lambda t: t.apply_chat_template(CHATS[0], continue_final_message=True, tokenize=False),
    lambda t: t.apply_chat_template([*CHATS[0], {"role": "assistant", "content": "x", "reasoning": "y"}]),
    lambda t: setattr(t, "eos_token", "<|endoftext|>"),
    lambda t: t.convert_ids_to_tokens([1], skip_special_tokens=True),
], ids=range(10))  # fmt: skip
def test_it_becomes_transformers_own_for_anything_else(use: Any) -> None:
    wrapper = fresh()
    before, holder = wrapper.encode("Hello, hi<tool>"), wrapper._tokenizer
    _, whole = both(files_of(trained(), PLAIN, {"model_type": "llama"}), {"model_type": "llama", "eos_token_id": 302})
    assert repr(use(wrapper)) == repr(use(whole)) or use.__code__.co_names == ("copy", "deepcopy", "_tokenizer")
    assert wrapper._tokenizer is holder and isinstance(holder, transformers.PreTrainedTokenizerBase)
    assert wrapper.encode("Hello, hi<tool>") == before and wrapper.eos_token == whole.eos_token
    assert stream(wrapper, before) == stream(whole, before)
    assert wrapper.apply_chat_template(CHATS[1]) == whole.apply_chat_template(CHATS[1])


def test_a_template_that_is_set_stays() -> None:
    wrapper = fresh()
    wrapper.chat_template = "{{ messages[0].content }}!"
    assert wrapper.apply_chat_template(CHATS[0], tokenize=False) == "hi there!"
    wrapper._tokenizer("hi")
    assert wrapper.apply_chat_template(CHATS[0], tokenize=False) == "hi there!"


@pytest.mark.parametrize("template", [
    "{{ ''.__class__ }}", "{% set ns = namespace(__x__=1) %}", "{{ dict.__init__ }}", "{{ messages.append(1) }}",
    "{{ raise_exception('no') }}", "{{ namespace.__globals__ }}", "{% for x in %}", "{{ nothing.at.all }}",
    "{{ strftime_now.__globals__ }}", "{{ ''.join.__self__.__class__ }}",
    "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
])  # fmt: skip
def test_odd_templates_end_alike(template: str) -> None:
    _, whole = both(files_of(trained(), PLAIN, {"model_type": "llama"}), {"model_type": "llama"})
    ends = []
    for made in (fresh(), whole):
        made.chat_template = template
        try:
            ends.append(made.apply_chat_template(CHATS[0], tokenize=False))
        except Exception as e:
            ends.append(type(e).__name__)
    assert ends[0] == ends[1] and "<" not in ends[0], ends


def test_a_tokenizer_that_is_broken_beyond_its_head() -> None:
    files = files_of(trained(), PLAIN, {"model_type": "llama"})
    files["tokenizer.json"] = files["tokenizer.json"].replace(b'"type":"NFC"', b'"type":"NFX"')
    with pytest.raises(RsvError, match="unsupported_model at tokenizer"), data_folder(files.items()) as folder:
        tokenizer(folder, {"model_type": "llama"})


# mlx-lm without transformers

LEAN = """
import sys, warnings
warnings.simplefilter("ignore")
from rsv_mlx.lean import import_mlx_lm
mlx_lm = import_mlx_lm()
assert not {"transformers", "huggingface_hub"} & sys.modules.keys() and import_mlx_lm() is mlx_lm
import mlx_lm.tokenizer_utils as utils, mlx_lm.utils, mlx_lm.server
"""


def lean(program: str) -> None:
    done = subprocess.run([sys.executable, "-c", LEAN + program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr


def test_transformers_comes_when_it_is_wanted(tmp_path: Path) -> None:
    files = files_of(trained(), PLAIN | {"tokenizer_class": "NewlineTokenizer"}, {"model_type": "llama"})
    for name, data in files.items():
        (tmp_path / name).write_bytes(data)
    lean(f"""
tokenizer = utils.load(__import__("pathlib").Path({str(tmp_path)!r}))
import transformers, huggingface_hub
assert utils.AutoTokenizer is transformers.AutoTokenizer
assert sys.modules["mlx_lm.generate"].PreTrainedTokenizer is transformers.PreTrainedTokenizer
assert issubclass(utils.NewlineTokenizer, transformers.PreTrainedTokenizerFast)
assert isinstance(tokenizer._tokenizer, utils.NewlineTokenizer), type(tokenizer._tokenizer)
assert tokenizer.encode("a\\nb") == tokenizer.encode("a<n>b") != tokenizer._tokenizer._tokenizer.encode("a\\nb").ids
assert type(transformers.__spec__.loader).__module__ != "rsv_mlx.lean"
assert not any("rsv_mlx" in str(type(finder)) for finder in sys.meta_path)
""")


def test_who_imports_transformers_gets_it() -> None:
    lean("""
import importlib.util
assert importlib.util.find_spec("transformers").origin and "transformers" not in sys.modules  # who only looks
import transformers
assert issubclass(utils.NewlineTokenizer, transformers.PreTrainedTokenizerFast)
assert not any("rsv_mlx" in str(type(finder)) for finder in sys.meta_path)
assert utils.PreTrainedTokenizerBase is transformers.PreTrainedTokenizerBase
assert mlx_lm.utils.snapshot_download.__module__.startswith("rsv_mlx")
""")


def test_nothing_is_put_between_where_mlx_lm_is_there() -> None:
    lean("""
import importlib
for name in [n for n in sys.modules if n.partition(".")[0] in ("mlx_lm", "rsv_mlx")]:
    del sys.modules[name]
import transformers
from rsv_mlx.lean import import_mlx_lm
import_mlx_lm()
import mlx_lm.tokenizer_utils as again
assert again.AutoTokenizer is transformers.AutoTokenizer and again is not utils
""")


def test_an_mlx_lm_that_wants_other_names(tmp_path: Path) -> None:
    package = tmp_path / "mlx_lm"
    package.mkdir()
    (package / "__init__.py").write_text("from .other import PretrainedConfig\n")
    (package / "other.py").write_text("from transformers import PretrainedConfig\n")
    program = f"""
import sys, warnings
warnings.simplefilter("ignore")
sys.path.insert(0, {str(tmp_path)!r})
from rsv_mlx.lean import import_mlx_lm
import transformers as real
"""
    program = program.replace("import transformers as real\n", "found = import_mlx_lm()\nimport transformers\n")
    program += "assert found.PretrainedConfig is transformers.PretrainedConfig\n"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 0, done.stderr
