"""A tokenizer straight from tokenizer.json, where that is provably what transformers would make of a model's files.

transformers takes most of a second to be imported and to build what the `tokenizers` package builds in a tenth of it.
What it adds is known: the classes below take tokenizer.json as it is, provided that no other setting changes it.
Anything else is left to transformers; and whatever a tokenizer is asked for that is not here, it becomes transformers'
own for it, and stays that.
"""

from __future__ import annotations

import contextlib
import json
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from functools import lru_cache
from typing import Any

import msgspec

FILE, SETTINGS, SPECIALS = "tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"
_NAMED = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")
_EXTRA = ("additional_special_tokens", "extra_special_tokens")
_HARMLESS = {
    "tokenizer_class", "add_bos_token", "add_eos_token", "clean_up_tokenization_spaces", "chat_template",
    "model_max_length", "added_tokens_decoder", "padding_side", "errors", "legacy", "use_default_system_prompt",
    "tool_parser_type", "chat_template_type", "backend", "is_local", "name_or_path", "model_input_names",
    "sp_model_kwargs", "spaces_between_special_tokens", "local_files_only", *_NAMED, *_EXTRA,
}  # fmt: skip
"""Settings that change nothing of what is done here, or are looked at one by one."""
_OFF = ("add_prefix_space", "split_special_tokens")  # allowed if they are
AS_IT_IS = ("PreTrainedTokenizerFast", "TokenizersBackend")
QWEN = ("Qwen2Tokenizer", "Qwen2TokenizerFast")
TYPES = ("llama", "qwen2", "qwen2_moe", "qwen3", "qwen3_moe", "gemma", "gemma2", "gemma3_text")
"""Of models: for others transformers may choose another class than the settings name, as it does for qwen2."""
_becoming = threading.RLock()
_PLAIN = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False, "special": True}

# what Qwen2Tokenizer makes of a vocabulary and merges, whatever tokenizer.json says
_QWEN_END = "<|endoftext|>"
_QWEN_SPLIT = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_QWEN_PRE_TOKENIZER = {
    "type": "Sequence",
    "pretokenizers": [
        {"type": "Split", "pattern": {"Regex": _QWEN_SPLIT}, "behavior": "Isolated", "invert": False},
        {"type": "ByteLevel", "add_prefix_space": False, "use_regex": False},
    ],
}


class _Model(msgspec.Struct):
    type: str | None = None
    dropout: float | None = None
    unk_token: str | None = None
    continuing_subword_prefix: str | None = None
    end_of_word_suffix: str | None = None
    fuse_unk: bool = False
    byte_fallback: bool = False
    ignore_merges: bool = False
    vocab: msgspec.Raw = msgspec.Raw()


class _File(msgspec.Struct):
    """tokenizer.json without its vocabulary, which takes long to read."""

    model: _Model
    added_tokens: list[dict[str, Any]] = []
    truncation: Any = None
    padding: Any = None
    normalizer: Any = None
    pre_tokenizer: Any = None
    decoder: Any = None


def read(
    files: Mapping[str, bytes], config: Mapping[str, Any], whole: Callable[[Mapping[str, bytes]], Any]
) -> tuple[Tokenizer, Any] | None:
    """The tokenizer of a model's files, and the decoder of its tokenizer.json; None where transformers has to make it.

    Parameters
    ----------
    files : mapping of name to bytes
        Data of a model, checked.
    config : mapping
        Its config.json.
    whole : callable
        Makes transformers' own tokenizer of such files.
    """
    if not {FILE, SETTINGS} <= files.keys():
        return None
    try:
        settings = json.loads(files[SETTINGS])
        file = msgspec.json.decode(files[FILE], type=_File)
        special = _special_tokens(files, config, settings, file)
        template = _template(files, settings)
    except (ValueError, TypeError, AttributeError, KeyError, msgspec.MsgspecError):
        return None  # transformers says what is wrong with them
    if special is None:
        return None
    from tokenizers import Tokenizer as Backend  # not before it is asked for

    backend = Backend.from_buffer(files[FILE])
    others = {name: data for name, data in files.items() if name != FILE}
    made = Tokenizer(backend, special, settings, template, lambda: whole({**others, FILE: backend.to_str().encode()}))
    return made, file.decoder


def _special_tokens(
    files: Mapping[str, bytes], config: Mapping[str, Any], settings: Mapping[str, Any], file: _File
) -> dict[str, str] | None:
    """Names and texts of special tokens; None if transformers might make something else of the files."""
    qwen = config["model_type"] == "qwen2" or settings["tokenizer_class"] in QWEN
    wanted = (*AS_IT_IS, *QWEN) if qwen else AS_IT_IS
    if config["model_type"] not in TYPES or settings["tokenizer_class"] not in wanted:
        return None
    if "chat_template.json" in files or file.truncation is not None or file.padding is not None:
        return None
    if not all(key in _HARMLESS or (key in _OFF and not value) for key, value in settings.items()):
        return None
    if settings.get("clean_up_tokenization_spaces") and file.model.type != "BPE":
        return None
    added = {token["content"]: token for token in file.added_tokens}
    by_id = {str(token["id"]): {k: v for k, v in token.items() if k != "id"} for token in file.added_tokens}
    merged = dict(settings)
    if "added_tokens_decoder" in settings:
        if settings["added_tokens_decoder"] != by_id:
            return None
    elif "added_tokens.json" in files:
        return None
    elif SPECIALS in files:
        specials = json.loads(files[SPECIALS])
        merged.update(
            {name: value["content"] if isinstance(value, dict) else value for name, value in specials.items()}
        )
    if qwen:
        if not _is_qwen(file):
            return None
        merged = {"unk_token": _QWEN_END, "eos_token": _QWEN_END, "pad_token": _QWEN_END} | merged
    special = {}
    for name in _NAMED:
        if merged.get(name) is not None:
            special[name] = _text(merged[name])
    extra = merged.get("extra_special_tokens") or merged.get("additional_special_tokens") or []
    if not isinstance(extra, list) or set(merged) - _HARMLESS - set(_OFF):
        return None
    for text in (*special.values(), *map(_text, extra)):
        if text not in added or any(added[text].get(key) != value for key, value in _PLAIN.items()):
            return None
    return special


def _is_qwen(file: _File) -> bool:
    """Whether tokenizer.json says what Qwen2Tokenizer does."""
    model, pre = file.model, file.pre_tokenizer
    if model.type != "BPE" or model.dropout or model.unk_token or model.fuse_unk or model.byte_fallback:
        return False
    if model.continuing_subword_prefix or model.end_of_word_suffix or model.ignore_merges:
        return False
    for part in (pre or {}).get("pretokenizers", ()):
        part.pop("trim_offsets", None)  # of no effect on tokens
    if pre != _QWEN_PRE_TOKENIZER or file.normalizer != {"type": "NFC"} or file.decoder.get("type") != "ByteLevel":
        return False
    vocabulary = msgspec.json.decode(file.model.vocab, type=dict[str, int])
    beyond = [token["id"] for token in file.added_tokens if token["content"] not in vocabulary]
    same = all(vocabulary.get(token["content"], token["id"]) == token["id"] for token in file.added_tokens)
    return same and beyond == list(range(len(vocabulary), len(vocabulary) + len(beyond)))


def _text(token: Any) -> str:
    """Of a token in tokenizer_config.json."""
    text = token["content"] if isinstance(token, dict) and token["__type"] == "AddedToken" else token
    if not isinstance(text, str):
        raise TypeError(text)
    return text


def _template(files: Mapping[str, bytes], settings: Mapping[str, Any]) -> str | dict[str, str] | None:
    """The chat template, or all that there are by their names."""
    if "chat_template.jinja" in files:
        return files["chat_template.jinja"].decode()
    template = settings.get("chat_template")
    if isinstance(template, list):
        template = {item["name"]: item["template"] for item in template}
    texts = list(template.values()) if isinstance(template, dict) else [] if template is None else [template]
    if not all(isinstance(text, str) for text in texts):
        raise TypeError(template)
    found: str | dict[str, str] | None = template
    return found


class Tokenizer:
    """What mlx-lm and most callers ask of a tokenizer of transformers; for anything else it becomes that.

    Parameters
    ----------
    backend : tokenizers.Tokenizer
    special : mapping
        Names of special tokens, as bos_token, and their texts.
    settings : mapping
        tokenizer_config.json.
    chat_template : str or dict, optional
    whole : callable
        Makes the tokenizer of transformers.
    """

    def __init__(
        self,
        backend: Any,
        special: Mapping[str, str],
        settings: Mapping[str, Any],
        chat_template: str | dict[str, str] | None,
        whole: Callable[[], Any],
    ) -> None:
        vars(self).update(
            _tokenizer=backend, _special=dict(special), init_kwargs=dict(settings), chat_template=chat_template,
            _whole=whole,
        )  # fmt: skip

    def __getattr__(self, name: str) -> Any:
        key = name.removesuffix("_id")
        if key in _NAMED:
            text = self._special.get(key)
            return text if text is None or key == name else self.convert_tokens_to_ids(text)
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self._become(), name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in ("chat_template", "has_chat_template"):
            vars(self)[name] = value
        else:
            setattr(self._become(), name, value)

    def __call__(self, *arguments: Any, **options: Any) -> Any:
        return self._become()(*arguments, **options)

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self._become().__reduce_ex__(protocol)

    def __repr__(self) -> str:
        return f"{type(self).__name__}(vocab_size={self.vocab_size}, {self._special})"

    def __len__(self) -> int:
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    @property
    def vocab_size(self) -> int:
        """Without the added tokens."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=False))

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """Names of special tokens and their texts."""
        return dict(self._special)

    def get_vocab(self) -> dict[str, int]:
        """Tokens and their numbers, those that were added too."""
        vocabulary: dict[str, int] | None = vars(self).get("_vocabulary")
        return self._tokenizer.get_vocab(with_added_tokens=True) if vocabulary is None else vocabulary

    @contextlib.contextmanager
    def vocabulary_at_hand(self) -> Iterator[None]:
        """Make `get_vocab` the same dictionary while the body runs: it is as large as the tokenizer."""
        vars(self)["_vocabulary"] = self.get_vocab()
        try:
            yield
        finally:
            vars(self).pop("_vocabulary", None)

    def encode(self, text: Any, add_special_tokens: bool = True, **options: Any) -> list[int]:
        """Numbers of a text's tokens."""
        if options or not isinstance(text, str):
            whole: list[int] = self._become().encode(text, add_special_tokens=add_special_tokens, **options)
            return whole
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids
        return ids

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **options: Any) -> Any:
        """The text of tokens."""
        ids = [token_ids] if isinstance(token_ids, int) else token_ids
        if options or not (isinstance(ids, list) and all(isinstance(i, int) for i in ids)):
            return self._become().decode(token_ids, skip_special_tokens=skip_special_tokens, **options)
        return self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens)

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """Tokens as they are in the vocabulary."""
        if skip_special_tokens:
            return self._become().convert_ids_to_tokens(ids, skip_special_tokens)
        if isinstance(ids, int):
            return self._tokenizer.id_to_token(ids)
        return [self._tokenizer.id_to_token(int(i)) for i in ids]

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """Numbers of tokens; of one that is not there, that of the unknown one."""
        if not isinstance(tokens, str):
            return [self.convert_tokens_to_ids(token) for token in tokens]
        found = self._tokenizer.token_to_id(tokens)
        unknown = self._special.get("unk_token")
        return self._tokenizer.token_to_id(unknown) if found is None and unknown is not None else found

    def apply_chat_template(
        self,
        conversation: Any,
        tools: list[dict[str, Any]] | None = None,
        add_generation_prompt: bool = False,
        tokenize: bool = True,
        return_dict: bool = True,
        **options: Any,
    ) -> Any:
        """A conversation as text or tokens, as transformers' own renders it."""
        template = self.chat_template
        if isinstance(template, dict):
            template = template.get("tool_use" if tools is not None and "tool_use" in template else "default")
        simple = (
            isinstance(template, str)
            and not (tokenize and return_dict)
            and not _ELSEWHERE & options.keys()
            and isinstance(conversation, list)
            and conversation != []
            and all(isinstance(message, dict) and not _REASONING & message.keys() for message in conversation)
            and (tools is None or (isinstance(tools, list) and all(isinstance(tool, dict) for tool in tools)))
            and _is_plain([conversation, tools, options])
        )
        if not simple:
            return self._become().apply_chat_template(
                conversation, tools=tools, add_generation_prompt=add_generation_prompt, tokenize=tokenize,
                return_dict=return_dict, **options,
            )  # fmt: skip
        messages = [{key: value for key, value in message.items() if value is not None} for message in conversation]
        text = _compiled(template).render(
            messages=messages, tools=tools, documents=None, add_generation_prompt=add_generation_prompt,
            **(self._special | options),
        )  # fmt: skip
        return self.encode(text, add_special_tokens=False) if tokenize else text

    def _become(self) -> Any:
        """transformers' own tokenizer in this one's place, where others hold this object."""
        with _becoming:
            if type(self) is Tokenizer:
                whole = vars(self)["_whole"]()
                vars(self).update({**vars(whole), "chat_template": vars(self)["chat_template"]})
                object.__setattr__(self, "__class__", type(whole))
                del vars(self)["_whole"]
        return self


_REASONING = {"reasoning_content", "thinking", "reasoning"}  # of a message: they stand for each other
_ELSEWHERE = {
    "documents", "chat_template", "continue_final_message", "sanitize_control_tokens", "padding", "truncation",
    "max_length", "return_tensors", "return_assistant_tokens_mask", "tokenizer_kwargs", "messages",
}  # fmt: skip


def _is_plain(value: Any) -> bool:
    """Whether it is of JSON's own types alone: others have methods, which no template may call."""
    kind = type(value)
    if kind is dict:
        return all(type(key) is str and _is_plain(item) for key, item in value.items())
    if kind is list:
        return all(map(_is_plain, value))
    return value is None or kind in (str, int, float, bool)


@lru_cache(maxsize=8)
def _compiled(template: str) -> Any:
    """A chat template in the sandbox that transformers has for it."""
    import jinja2.ext
    import jinja2.sandbox

    if tuple(map(int, jinja2.__version__.split(".")[:3])) < (3, 1, 6):
        raise ImportError("jinja2 before 3.1.6 has ways out of its sandbox: pip install -U jinja2")

    class Generation(jinja2.ext.Extension):
        """Blocks of what an assistant says: their bodies."""

        tags = {"generation"}

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.CallBlock(self.call_method("_said"), [], [], body).set_lineno(line)

        def _said(self, caller: Callable[[], str]) -> str:
            return caller()

    class Namespace(jinja2.utils.Namespace):
        """Without the names of Python's internals."""

        def __init__(*arguments: Any, **options: Any) -> None:  # noqa: N805  # so `self` may be a name
            own, *given = arguments
            attributes = dict(*given, **options)
            _check_names(attributes)
            jinja2.utils.Namespace.__init__(own, attributes)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_names((name,))
            jinja2.utils.Namespace.__setitem__(self, name, value)

    def _check_names(names: Iterable[Any]) -> None:
        if any(isinstance(name, str) and name.startswith("_") for name in names):
            raise jinja2.exceptions.SecurityError("names in a namespace cannot begin with an underscore")

    def raise_exception(message: str) -> None:
        raise jinja2.exceptions.TemplateError(message)

    def to_json(
        x: Any, ensure_ascii: bool = False, indent: Any = None, separators: Any = None, sort_keys: bool = False
    ) -> str:
        return json.dumps(x, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)

    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = to_json
    environment.globals.update(
        raise_exception=raise_exception,
        strftime_now=lambda form: datetime.now().strftime(form),
        dict=_Dict(),
        namespace=Namespace,
    )
    return environment.from_string(template)


class _Dict:
    """`dict` without its type's attributes."""

    def __call__(self, *arguments: Any, **options: Any) -> dict[Any, Any]:
        return dict(*arguments, **options)

    def fromkeys(self, *arguments: Any) -> dict[Any, Any]:
        """As dict's."""
        return dict.fromkeys(*arguments)
