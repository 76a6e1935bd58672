"""Calibration: run a model on text and record the mean squared activation of every input channel."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from mlx.nn.layers.embedding import Embedding
from mlx.nn.layers.linear import Linear
from mlx.nn.layers.quantized import QuantizedEmbedding as AffineEmbedding
from mlx.nn.layers.quantized import QuantizedLinear as AffineLinear
from numpy.typing import NDArray

import rsv_format
from rsv_format import RsvError, is_url, quiet_panics
from rsv_mlx.binding import packed_kind
from rsv_mlx.embedding import QuantizedEmbedding
from rsv_mlx.linear import QuantizedLinear
from rsv_mlx.loading import load
from rsv_mlx.packed import Packed, weight_shape
from rsv_mlx.stream import require_room
from rsv_mlx.switch import QuantizedSwitchLinear, is_switch
from rsv_mlx.untrusted import (
    DATA,
    VOCABULARIES,
    check_config,
    config_of,
    data_folder,
    library,
    mlx_lm_utils,
    skeleton,
    tokenizer,
)

if TYPE_CHECKING:
    from rsv_format import Source

_CHARACTERS = 16  # of a text for each token that is wanted, to begin with; twice as many as words have
CHUNK = 512  # llama.cpp's: what lies further back moves the means little
_SOURCES = (".gguf", ".safetensors")  # single files of the kinds that open_source takes

Counts = tuple[NDArray[np.float64], NDArray[np.float64]]
Progress = Callable[[int, int, str], None]
Experts = tuple[mx.array, int]  # which ones inputs go to, and how many there are
See = Callable[[str, mx.array, Experts | None], None]  # told a layer's path and its input


def calibrate(
    model: Module,
    tokens: Sequence[int],
    *,
    chunk: int = CHUNK,
    bos: int | None = None,
    progress: Progress | None = None,
    found: dict[str, Counts] | None = None,
) -> dict[str, Counts]:
    """Run a language model over tokens, a chunk at a time, and sum up what its linear layers see.

    Parameters
    ----------
    model : Module
        Its layers may be dense or quantized. It is left as it was.
    tokens : sequence of int
    chunk : int
        Tokens that see one another.
    bos : int, optional
        A token to begin every chunk with; it counts as one of them.
    progress : callable(done, total, name), optional
        Told the tokens done and in all.
    found : dict, optional
        What is returned, filled from chunk to chunk: if this is interrupted, it holds what was measured before.

    Returns
    -------
    dict
        Path of a module -> (sums of squares (in_features,), tokens (1,)); of an expert stack (experts,
        in_features) and (experts,). A tied embedding table has what it sees as the head.

    Raises
    ------
    RsvError
        bad_argument: no tokens, or none per chunk; source_invalid: the activations are not finite.
    """
    chunks = chunked(tokens, chunk, bos)
    told = progress or (lambda done, total, name: None)
    found = {} if found is None else found
    seen = Sums()
    with observed(model, seen.see):
        told(0, len(tokens), "")
        for i, part in enumerate(chunks, 1):
            with library("unsupported_model", "config.json"):  # which may say what mlx-lm cannot run
                model(mx.array([part]))
                mx.eval(seen)
            grown: dict[str, Counts] = {}
            for name, (sums, counts) in seen.items():
                wide = np.array(sums, np.float64), np.array(counts, np.float64)
                grown[name] = (found[name][0] + wide[0], found[name][1] + wide[1]) if name in found else wide
            found.update(grown)  # whole chunks only, whenever this is interrupted
            told(min(i * (chunk - (bos is not None)), len(tokens)), len(tokens), f"{len(found)} layers")
            seen.clear()
    for name, (total, _) in found.items():
        if not np.isfinite(total).all():
            raise RsvError("source_invalid", name, "its input is not finite")
    return found


def chunked(tokens: Sequence[int], chunk: int, bos: int | None) -> list[list[int]]:
    """Tokens in chunks of so many, each of which begins with `bos`, if there is one, which counts as one of them.

    Raises
    ------
    RsvError
        bad_argument: no tokens, or none per chunk.
    """
    begin = [] if bos is None else [bos]
    step = chunk - len(begin)
    if step < 1 or not len(tokens):
        raise RsvError("bad_argument", "tokens", f"{len(tokens)} tokens in chunks of {chunk} leave nothing to run")
    return [[*begin, *tokens[start : start + step]] for start in range(0, len(tokens), step)]


def random_importance(model: Module, seed: int = 0) -> dict[str, NDArray[np.float64]]:
    """Mean squared activations of a language model's layers on random tokens: nearly as good as on text, since what
    matters is which channels of the residual stream are strong (benchmarks/quality.py).

    Parameters
    ----------
    model : Module
        Called with tokens, int32 (1, n); its first embedding table tells how many there are.
    seed : int
        Of the tokens.

    Returns
    -------
    dict
        Path of a module -> float64 (in_features,). Empty for a model that does not begin with an embedding table,
        or that does not run.
    """
    rows = table_rows(model)
    if rows is None:
        return {}
    try:
        counts = calibrate(model, rsv_format.random_tokens(rows, seed).tolist())
    except Exception as e:  # a module may want anything but tokens
        if rsv_format.is_out_of_memory(e):
            raise
        return {}
    return {name: np.atleast_2d(sums).sum(axis=0) / seen.sum() for name, (sums, seen) in counts.items()}


def table_rows(model: Module) -> int | None:
    """How many tokens a model's first embedding table has; None without one."""
    tables = (m for _, m in model.named_modules() if packed_kind(m) is QuantizedEmbedding)  # type: ignore
    shape = next((weight_shape(module) for module in tables), None)
    return None if shape is None else shape[0]


def check_tokens(model: Module, tokens: Sequence[int]) -> None:
    """MLX reads beyond a table where a tokenizer has more tokens than it: refuse them.

    Raises
    ------
    RsvError
        unsupported_model.
    """
    rows = table_rows(model)
    if rows is not None and len(tokens) and not 0 <= min(tokens) <= max(tokens) < rows:
        detail = f"it gives token {max(tokens)}, but the model's table has {rows} rows"
        raise RsvError("unsupported_model", "tokenizer", detail)


def encode(tokenizer: Any, text: str, most: int | None = None) -> tuple[list[int], int | None]:
    """The tokens of a text, or the first `most` of them, and the one that the tokenizer begins texts with, if it does.

    Raises
    ------
    RsvError
        unsupported_model: the tokenizer fails on it.
    """
    with library("unsupported_model", "tokenizer"), quiet_panics():
        begin = tokenizer.encode("")
        bos = tokenizer.bos_token_id if begin and begin[0] == tokenizer.bos_token_id else None
        length = len(text) if most is None else _CHARACTERS * most  # of a long text only what is needed
        while True:
            tokens = list(tokenizer.encode(text[:length], add_special_tokens=False))
            if length >= len(text) or (most is not None and len(tokens) > most):
                return tokens[:most], bos
            length *= 2


def counts_nbytes(model: Module) -> int:
    """About how many bytes `calibrate` finds, as float32."""
    found: list[tuple[str, Module]] = model.named_modules()  # type: ignore[no-untyped-call]
    shapes = [
        weight_shape(module) or () for name, module in found if _watched(module, name, lambda *_: None) is not None
    ]
    return sum(4 * prod(shape[:-2]) * (shape[-1] + 1) for shape in shapes)


@contextlib.contextmanager
def observed(model: Module, see: See) -> Iterator[None]:
    """While the body runs, calls of linear layers are told to `see` before they are done.

    Modules keep their identity and attributes: only their classes are exchanged, for subclasses that look.
    """
    before: list[tuple[Module, type[Module], type[Module]]] = []
    try:
        for name, module in model.named_modules():  # type: ignore[no-untyped-call]
            if isinstance(module, Packed):
                _ = module.codes  # a layer that is yet to be read takes its class then
            watched = _watched(module, name, see)
            if watched is not None:
                before.append((module, type(module), watched))
                module.__class__ = watched
        yield
    finally:
        for module, kind, watched in reversed(before):  # one module may lie at two paths
            if type(module) is watched:  # and a call may have made it another
                module.__class__ = kind


def _watched(module: Module, name: str, see: See) -> type[Module] | None:
    """A subclass of the module's that tells of its inputs under a name, None for what is no linear layer."""
    base: Any = type(module)

    class Watched(base):  # type: ignore[misc]
        def __call__(self, x: mx.array, *args: Any, **kwargs: Any) -> Any:
            see(name, x, None)
            return super().__call__(x, *args, **kwargs)

    class WatchedHead(base):  # type: ignore[misc]
        def as_linear(self, x: mx.array) -> Any:
            see(name, x, None)
            return super().as_linear(x)

    class WatchedExperts(base):  # type: ignore[misc]
        def __call__(self, x: mx.array, indices: mx.array, *args: Any, **kwargs: Any) -> Any:
            see(name, x, (indices, self.num_experts))
            return super().__call__(x, indices, *args, **kwargs)

    if isinstance(module, Linear | AffineLinear | QuantizedLinear):
        return Watched
    if isinstance(module, Embedding | AffineEmbedding | QuantizedEmbedding):
        return WatchedHead
    return WatchedExperts if is_switch(module) or isinstance(module, QuantizedSwitchLinear) else None


class Sums(dict[str, tuple[mx.array, mx.array]]):
    """Sums of squares of the inputs of layers, by path, and their counts, lazily: what none depends on is not run."""

    def see(self, name: str, x: mx.array, experts: Experts | None) -> None:
        """For `observed`."""
        sums, counts = _squares(x, experts)
        if name in self:
            sums, counts = self[name][0] + sums, self[name][1] + counts
        self[name] = sums, counts


def _squares(x: mx.array, experts: Experts | None) -> tuple[mx.array, mx.array]:
    """Sums of squares of a layer's inputs and their count; of experts those of each."""
    if experts is None:
        rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
        return mx.square(rows).sum(axis=0), mx.array([float(rows.shape[0])])
    indices, count = experts
    rows = mx.broadcast_to(x, (*indices.shape, *x.shape[-2:]))  # of each expert that a token goes to
    squares = mx.square(rows.astype(mx.float32)).reshape(-1, x.shape[-1])
    numbers, zeros = indices.reshape(-1), mx.zeros((count, x.shape[-1]))
    return zeros.at[numbers].add(squares), zeros[:, 0].at[numbers].add(1.0)


def load_anything(
    spec: str | os.PathLike[str], *, max_order: int | None = None, weights: bool = True
) -> tuple[Module, Any]:
    """A model and its tokenizer, from an RSV file, a source of `rsv_format.open_source`, or by mlx-lm.

    On a CPU the weights become float32, at which MLX is fastest there. `max_order` is `load`'s. Without `weights` they
    are not read: the model is for looking at.

    Raises
    ------
    RsvError
        What `load` and `open_source` raise; unsupported_model; missing_attachment.
    """
    path = Path(spec)
    if is_url(os.fspath(spec)) or path.suffix == ".rsv" or (path.is_file() and not _is_source(path)):
        model, words = load(spec, max_order=max_order, lazy=not weights)
    elif path.is_dir():
        model, words = _from_folder(path)
    else:
        with rsv_format.open_source(spec) as source:  # a file, or of the hub
            model, words = _from_source(source, weights)
    if mx.default_device() == mx.cpu:
        model.set_dtype(mx.float32)
    return model, words


def _is_source(path: Path) -> bool:
    """Whether a file is of a kind that `open_source` takes; GGUF files have names of many kinds."""
    with path.open("rb") as file:
        return path.suffix.lower() in _SOURCES or file.read(4) == b"GGUF"


def _from_source(source: Source, with_weights: bool) -> tuple[Module, Any]:
    with data_folder((name, data) for name, (_, data) in source.attachments.items()) as folder:
        _require(source.path, folder)
        model, config = skeleton(folder, {tensor.name: tensor.shape for tensor in source.tensors.values()})
        if not with_weights:
            return model, tokenizer(folder, config)
        weights = {}
        for name, tensor in source.tensors.items():
            values = tensor.read()
            require_room(values.nbytes)
            array = mx.array(values)
            weights[name] = array.view(mx.bfloat16) if tensor.dtype == "bf16" else array
        with library("unsupported_model", source.path):
            weights = model.sanitize(weights) if hasattr(model, "sanitize") else weights
            model.load_weights(list(weights.items()))
        model.eval()
        return model, tokenizer(folder, config)


def _from_folder(path: Path) -> tuple[Module, Any]:
    """By mlx-lm, which knows quantized folders of many kinds; its code alone is run."""
    names = [name for name in os.listdir(path) if name in DATA or name.endswith(".tiktoken")]
    with library("unsupported_model", str(path)):
        data = {name: (path / name).read_bytes() for name in names if (path / name).is_file()}  # a device has no end
    with data_folder(data.items()) as folder, library("unsupported_model", str(path)):
        _require(str(path), folder)
        shapes = {
            name: array.shape
            for file in path.glob("model*.safetensors")
            for name, array in mx.load(str(file)).items()  # type: ignore[union-attr]
        }  # no weight is read
        check_config(config_of(folder), shapes)
        require_room(sum(file.stat().st_size for file in path.glob("model*.safetensors")))
        settings = _settings(path)
        model, config = mlx_lm_utils().load_model(path, lazy=True, model_config=settings, trust_remote_code=False)
        return model, tokenizer(folder, config)


def _settings(path: Path) -> dict[str, Any] | None:
    """The config with the keys that mlx-lm's models read; None where the folder is of a kind that it alone knows."""
    try:
        with rsv_format.open_source(path, tokenizer=False) as source:
            return source.config
    except RsvError:
        return None


def _require(where: str, folder: Path) -> None:
    config = (folder / "config.json").exists()
    if not config or not any((folder / name).exists() for name in VOCABULARIES):
        missing = "tokenizer.json" if config else "config.json"
        raise RsvError("missing_attachment", missing, f"{where} comes without it, and cannot run")
