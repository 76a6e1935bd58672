"""mlx-lm's models and tokenizers, made of a model's own files: data alone, never code that these bring or choose.

What a config or a tokenizer names must be a module that mlx-lm ships, or a tokenizer of transformers; what it counts
must be there in the model's tensors. mlx-lm and transformers only ever see a folder with checked copies.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import json
import os
import pkgutil
import re
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from types import FunctionType, SimpleNamespace
from typing import Any

from mlx.nn.layers.base import Module

from rsv_format import RsvError, is_out_of_memory, quiet_panics
from rsv_mlx import tokenizing
from rsv_mlx.lean import import_mlx_lm

CONFIGS = ("config.json", "generation_config.json")
VOCABULARIES = (
    "tokenizer.json", "tokenizer.model", "vocab.json", "vocab.txt", "tiktoken.model", "spiece.model", "tekken.json",
)  # fmt: skip
DATA = frozenset({
    *CONFIGS, *VOCABULARIES, "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "merges.txt",
    "chat_template.jinja", "chat_template.json", "sentencepiece.bpe.model",
})  # fmt: skip

_CHOOSES = {"tool_parser_type": "mlx_lm.tool_parsers", "chat_template_type": "mlx_lm.chat_templates"}
_NEVER_KEPT = ("auto_map", "custom_pipelines")  # of a config: only remote code needs them
_NEVER_READ = ("vocab.json", "merges.txt", "vocab.txt", "tokenizer.model")  # of what tokenizer.json says alone
_POSITIONAL = ("init_inputs",)  # of a tokenizer: arguments of any meaning
# What decides how many modules a skeleton has, or how long lists in it are. Real models stay far below the floors,
# which spare parts that a file leaves out, as a vision tower.
_BLOCKS = re.compile(r"^(n|num|nb)_(\w+_)?(layers?|blocks?|loops?|stages?)$|^depths?$")
_EXPERTS = re.compile(r"(^|_)(n|num)_(\w+_)?(experts?|groups?)$|_groups$")
_SIZES = re.compile(r"(?<!window)(?<!chunk)_(size|dim|rank|heads)$|^d_model$")
_FEW, _LARGE = 256, 2**20
_LONGEST_REASON = 300  # characters of what a library says


def data_folder(
    files: Iterable[tuple[str, bytes | memoryview]], names: Iterable[str] = DATA
) -> contextlib.AbstractContextManager[Path]:
    """A temporary folder with those files that are data of a model, as mlx-lm and transformers want them.

    Parameters
    ----------
    files : pairs of name and bytes
        Those that are not known, as a .py, are left out.
    names : collection of str
        Those that are wanted.

    Raises
    ------
    RsvError
        unsupported_model: a file that is no JSON, or that chooses code; io_error.
    """
    wanted = DATA.intersection(names)
    return temporary_folder(
        {name: _checked(name, data) for name, data in files if name in wanted or name.endswith(".tiktoken")}
    )


@contextlib.contextmanager
def temporary_folder(files: Mapping[str, bytes | memoryview]) -> Iterator[Path]:
    """A folder with these files; io_error."""
    with contextlib.ExitStack() as stack:
        try:
            folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="rsv-")))
            stack.callback(os.close, lock := os.open(folder, os.O_RDONLY | os.O_CLOEXEC))
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # rsv names folders whose process has died
            for name, data in files.items():
                (folder / name).write_bytes(data)
        except OSError as e:
            raise RsvError("io_error", "temporary folder", e.strerror or str(e)) from e
        yield folder


def _checked(name: str, data: bytes | memoryview) -> bytes | memoryview:
    """A file without what would choose code or another file."""
    if name not in ("config.json", "tokenizer_config.json", "special_tokens_map.json"):
        return data
    tree = json_object(name, data)
    if name == "config.json":
        if tree.get("model_file") is not None:
            raise RsvError("unsupported_model", name, "it brings its own code (model_file), which is never run")
        kept = {key: value for key, value in tree.items() if key not in _NEVER_KEPT and key != "model_file"}
    else:
        kept = {key: value for key, value in tree.items() if not (key.endswith("_file") or key in _POSITIONAL)}
        for key, package in _CHOOSES.items():
            if kept.get(key) is not None:
                _check_module(name, key, kept[key], package)
    if "tokenizer_class" in kept:
        _check_tokenizer_class(name, kept["tokenizer_class"])
    return data if kept == tree else json.dumps(kept).encode()


def json_object(name: str, data: bytes | memoryview) -> dict[str, Any]:
    """The JSON object that a model's file is.

    Raises
    ------
    RsvError
        unsupported_model.
    """
    try:
        tree = json.loads(bytes(data))
    except (ValueError, RecursionError) as e:
        raise RsvError("unsupported_model", name, f"it is no JSON: {reason(e)}") from None
    if not isinstance(tree, dict):
        raise RsvError("unsupported_model", name, "it is no JSON object")
    return tree


def _check_module(name: str, key: str, value: Any, package: str) -> None:
    if value not in modules_of(package):
        raise RsvError("unsupported_model", name, f"{key} {value!r:.80} is none that mlx-lm has, and no code is loaded")


def modules_of(package: str) -> list[str]:
    """The modules that a package ships."""
    return [module.name for module in pkgutil.iter_modules(importlib.import_module(package).__path__)]


def _check_tokenizer_class(name: str, value: Any) -> None:
    """A tokenizer of transformers, or a name that it does not know: then tokenizer.json alone says all."""
    if value in (*tokenizing.AS_IT_IS, *tokenizing.QWEN):
        return
    transformers: Any = importlib.import_module("transformers")
    base = importlib.import_module("transformers.tokenization_utils_base").PreTrainedTokenizerBase
    if value is None:
        return
    try:
        found = getattr(transformers, value, base) if isinstance(value, str) else None
    except (ImportError, RuntimeError) as e:  # made when it is asked for
        if is_out_of_memory(e):
            raise MemoryError(reason(e)) from e
        found = None
    if not (isinstance(found, type) and issubclass(found, base)):
        raise RsvError("unsupported_model", name, f"tokenizer_class {value!r:.80} is no tokenizer")


def skeleton(folder: Path, shapes: Mapping[str, tuple[int, ...]]) -> tuple[Module, dict[str, Any]]:
    """The model of mlx-lm that a config describes, and the config; its random weights are never evaluated.

    Parameters
    ----------
    folder : Path
        Of `data_folder`.
    shapes : mapping
        Names and shapes of the model's layers and tensors, (stack, ...) first for stacks of experts.

    Raises
    ------
    RsvError
        unsupported_model, missing_dependency.
    """
    config = config_of(folder)
    check_config(config, shapes)
    with library("unsupported_model", "config.json"):
        model_class, arguments_class = mlx_lm_utils()._get_classes(config)
        return model_class(arguments_class.from_dict(config)), config


def config_of(folder: Path) -> dict[str, Any]:
    """The config of a folder, as mlx-lm reads it: with the ends of generation_config.json.

    Raises
    ------
    RsvError
        unsupported_model, missing_dependency.
    """
    utils = mlx_lm_utils()
    with library("unsupported_model", "config.json"):
        config: dict[str, Any] = utils.load_config(folder)
    return config


def check_config(config: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]]) -> None:
    """Refuse a model type that mlx-lm does not ship, and counts of modules that the tensors do not show.

    Raises
    ------
    RsvError
        unsupported_model.
    """
    utils = mlx_lm_utils()
    kind = config.get("model_type")
    if not isinstance(kind, str):
        raise RsvError("unsupported_model", "config.json", "it names no model_type")
    if utils.MODEL_REMAPPING.get(kind, kind) not in modules_of("mlx_lm.models"):
        raise RsvError("unsupported_model", "config.json", f"mlx-lm knows no model_type {kind!r:.80}")
    numbers = {part for name in shapes for part in name.split(".") if part.isdecimal()}
    stacks = [shape[0] for shape in shapes.values() if len(shape) > 2]
    blocks = max(_FEW, len(numbers))
    limits = (
        (_BLOCKS, blocks),
        (_EXPERTS, max(blocks, *stacks, 0)),
        (_SIZES, max(_LARGE, 0, *(64 * side for shape in shapes.values() for side in shape))),
    )
    for key, value in _integers(config):
        most = next((most for pattern, most in limits if pattern.search(key)), value)
        if value > most or (value < 0 and _BLOCKS.search(key)):
            detail = f"{key} is {value}, which the tensors do not show"
            raise RsvError("unsupported_model", "config.json", detail)


def _integers(tree: Any) -> Iterator[tuple[str, int]]:
    """Whole numbers of a config under their names, within lists and objects too."""
    waiting: list[tuple[str, Any]] = [("", tree)]
    while waiting:
        key, value = waiting.pop()
        if isinstance(value, Mapping):
            waiting.extend((str(name), item) for name, item in value.items())
        elif isinstance(value, list):
            waiting.extend((key, item) for item in value)
        elif isinstance(value, int) and not isinstance(value, bool):
            yield key, value


def tokenizer(folder: Path, config: Mapping[str, Any], extra: Mapping[str, Any] | None = None) -> Any:
    """The tokenizer of a folder of `data_folder`, as mlx-lm wraps it.

    Raises
    ------
    RsvError
        unsupported_model, missing_dependency; bad_argument where `extra` wants remote code.
    """
    if (extra or {}).get("trust_remote_code"):
        raise RsvError("bad_argument", "tokenizer_config", "trust_remote_code: code in a file is never run")
    with library("unsupported_model", "tokenizer"), quiet_panics():
        files = {path.name: path.read_bytes() for path in folder.iterdir()} if extra is None else {}
        found = tokenizing.read(files, config, lambda files: _of_transformers(files, config))
        if found is None:
            return _wrapped(folder, config, extra)
        made, decoder = found
        seen = files | {tokenizing.FILE: json.dumps({"decoder": decoder}).encode()}
        slim_files = {name: data for name, data in seen.items() if name not in _NEVER_READ}
        with temporary_folder(slim_files) as slim, made.vocabulary_at_hand():
            wrapper = _wrapped(slim, config, None, lambda *_, **__: made)
        wrapper.has_chat_template = made.chat_template is not None or wrapper._chat_template is not None
        return wrapper


def _wrapped(
    folder: Path, config: Mapping[str, Any], extra: Mapping[str, Any] | None, make: Callable[..., Any] | None = None
) -> Any:
    """The tokenizer of a folder in mlx-lm's wrapper: what transformers makes of it, or `make`."""
    utils = mlx_lm_utils()
    load = utils.load_tokenizer
    if make is not None:
        auto = SimpleNamespace(from_pretrained=make)
        load = _with(load, _load_tokenizer=_with(utils._load_tokenizer, AutoTokenizer=auto))
    try:
        options = {**(extra or {}), "trust_remote_code": False, "local_files_only": True}
        return load(folder, options, eos_token_ids=config.get("eos_token_id"))
    except ValueError as e:
        if "trust_remote_code" not in str(e):
            raise
        raise RsvError("unsupported_model", "tokenizer", "it brings its own code, which is never run") from None


def _of_transformers(files: Mapping[str, bytes], config: Mapping[str, Any]) -> Any:
    with temporary_folder(files) as folder:
        return _wrapped(folder, config, None)._tokenizer


def _with(function: Any, **names: Any) -> Any:
    """The same function, with other meanings of names of its module."""
    return FunctionType(
        function.__code__, {**function.__globals__, **names}, function.__name__, function.__defaults__,
        function.__closure__,
    )  # fmt: skip


def mlx_lm_utils() -> Any:
    """mlx_lm.utils.

    Raises
    ------
    RsvError
        missing_dependency.
    """
    try:
        import_mlx_lm()
        return importlib.import_module("mlx_lm.utils")
    except ImportError as e:
        raise RsvError.of_import(e, "mlx_lm", "pip install 'rsv-format[mlx]'") from e


@contextlib.contextmanager
def library(code: str, where: str) -> Iterator[None]:
    """Around code of mlx-lm, transformers and tokenizers on files that can be wrong in any way: one error."""
    try:
        yield
    except (RsvError, MemoryError):
        raise
    except ImportError as e:
        raise RsvError.of_import(e, where) from e
    except OSError as e:
        if is_out_of_memory(e):
            raise MemoryError(reason(e)) from e
        raise RsvError(code if e.errno is None else "io_error", where, reason(e)) from e
    except SystemExit as e:  # mlx-lm's olmo, without its package
        raise RsvError("missing_dependency", where, "mlx-lm's code ends the program: a package is missing") from e
    except BaseException as e:
        if not isinstance(e, Exception) and type(e).__name__ != "PanicException":  # Rust's is no Exception
            raise
        if is_out_of_memory(e):
            raise MemoryError(reason(e)) from e
        raise RsvError(code, where, reason(e)) from e


def reason(e: BaseException) -> str:
    """What a library says, in a line that is not too long."""
    text = " ".join(str(e).split())
    text = text if len(text) <= _LONGEST_REASON else f"{text[:_LONGEST_REASON]}..."
    return f"{type(e).__name__}: {text}" if text else type(e).__name__
