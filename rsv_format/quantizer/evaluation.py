"""What quantization does to a model's predictions: its perplexity, and its divergence from its source.

Perplexity can fall while the predictions move away from the source's, so the Kullback-Leibler divergence between the
two distributions of the next token is what to compare quantizations by; llama.cpp's perplexity tool prints the same.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib import resources
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.decoder import Decoder, Fetch, Rows, running
from rsv_format.errors import RsvError
from rsv_format.panics import quiet_panics
from rsv_format.reader import File
from rsv_format.reader import open as open_file
from rsv_format.sources import Source, open_source
from rsv_format.sources.base import reading

TOKENS, WINDOW = 4096, 512
_SPANS = 4  # parts of a window that are told apart: early tokens have little context
_TOGETHER = 2**22  # logits at a time: some numbers in binary64 for each are in memory
_HEAD_STEPS = 8  # of progress

_EXACT = frozenset({"llama", "mistral", "qwen2", "qwen3"})  # families that `Decoder` runs in full
_POSITIONS = ("rope_theta", "rope_type", "type")  # what says of positions no more than `Decoder` knows

Progress = Callable[[int, int, str], None]
Logits = NDArray[np.floating[Any]]


@dataclass(frozen=True)
class Span:
    """The tokens at some positions of the windows."""

    start: int
    stop: int
    source_perplexity: float
    file_perplexity: float
    mean_divergence: float
    same_top: float


@dataclass(frozen=True)
class Evaluation:
    """Predictions of a quantized model beside its source's. Divergences are in nats, from the source.

    Attributes
    ----------
    tokens : int
        That were predicted.
    window : int
        Tokens of context at most.
    source_perplexity, file_perplexity : float
    mean_divergence, divergence_error : float
        The mean, and its standard error as if tokens were independent.
    median_divergence, divergence_99, max_divergence : float
    same_top : float
        Share of the tokens for which both hold the same one most likely.
    probability_rms : float
        Root mean square of the difference of the probabilities of the text's own token.
    spans : tuple of Span
        The same by position in the window.
    """

    tokens: int
    window: int
    source_perplexity: float
    file_perplexity: float
    mean_divergence: float
    divergence_error: float
    median_divergence: float
    divergence_99: float
    max_divergence: float
    same_top: float
    probability_rms: float
    spans: tuple[Span, ...]


def default_text() -> str:
    """Chapters I to III of Alice's Adventures in Wonderland, which are in the public domain."""
    return resources.files("rsv_format.quantizer").joinpath("texts/alice.txt").read_text("utf-8")


def evaluate(
    source: str | os.PathLike[str] | Source,
    file: str | os.PathLike[str] | File,
    *,
    text: str | None = None,
    tokens: int = TOKENS,
    window: int = WINDOW,
    max_order: int | None = None,
    progress: Progress | None = None,
) -> Evaluation:
    """Run a decoder and its quantized form over a text, in numpy, one matrix in memory at a time.

    Parameters
    ----------
    source : path, hub id or Source
        With its config and, as tokenizer.json, its tokenizer.
    file : path or File
        The source, quantized.
    text : str, optional
        `default_text` if not given; it should have had no part in any calibration.
    tokens : int
        How many to predict at most.
    window : int
        Tokens of context at most: the text is cut into pieces of so many.
    max_order : int, optional
        As `rsv_format.open`, for a file that it opens.
    progress : callable(done, total, name), optional

    Raises
    ------
    RsvError
        unsupported_model: not a family that `Decoder` runs in full (rsv_mlx.evaluate runs it); missing_attachment,
        source_invalid, missing_layer, shape_mismatch, bad_argument; what `open_source` and `open` raise.
    """
    if not isinstance(source, Source):
        with open_source(source) as opened:
            return evaluate(
                opened, file, text=text, tokens=tokens, window=window, max_order=max_order, progress=progress
            )
    if not isinstance(file, File):
        with open_file(file, mmap=False, max_order=max_order) as read:
            return evaluate(source, read, text=text, tokens=tokens, window=window, progress=progress)
    config = source.config or {}
    check_family(config, window)
    inputs, targets = text_windows(*encode_text(source, default_text() if text is None else text), tokens, window)
    told = progress or (lambda done, total, name: None)
    with running("source_invalid", source.path):
        blocks = int(config["num_hidden_layers"])
    total = 2 * blocks + _HEAD_STEPS
    sides = []
    for side, fetch in enumerate((_of_source(source), _of_file(file))):

        def block_told(done: int, _: int, name: str, before: int = side * blocks) -> None:
            told(before + done, total, name)

        with running(*(("source_invalid", source.path) if side == 0 else ("missing_layer", "file"))):
            embedding = _whole(fetch, "model.embed_tokens.weight")
            if embedding is None:
                raise KeyError("model.embed_tokens.weight")
            hidden = Decoder(config, fetch, window=window).run(embedding[inputs], block_told)
            head = _whole(fetch, "lm_head.weight")
            head = embedding if head is None else head
            _ = hidden[:1] @ head.T  # they fit
        sides.append((hidden, head))

    def logits() -> Iterator[tuple[Logits, Logits, slice]]:
        step = max(1, _TOGETHER // sides[0][1].shape[0])
        for start in range(0, inputs.size, step):
            told(2 * blocks + _HEAD_STEPS * start // inputs.size, total, "predictions")
            part = slice(start, start + step)
            (a, head_a), (b, head_b) = sides
            yield a[part] @ head_a.T, b[part] @ head_b.T, part

    found = evaluate_logits(((p, q, targets[part]) for p, q, part in logits()), window)
    told(total, total, "")
    return found


def text_windows(
    ids: Sequence[int], bos: int | None, tokens: int, window: int
) -> tuple[NDArray[np.intp], NDArray[np.intp]]:
    """Inputs and the tokens that follow them, in windows one after the other; each begins with `bos`, if there is one.

    Raises
    ------
    RsvError
        bad_argument: fewer than one token to predict.
    """
    if window < 2 or tokens < 1 or len(ids) < 2:
        raise RsvError("bad_argument", "tokens", f"{len(ids)} tokens in windows of {window} leave nothing to predict")
    known = np.asarray(ids[: tokens + (bos is None)], np.intp)
    if bos is None:
        return known[:-1], known[1:]
    inputs = np.concatenate([[bos], known[:-1]])
    inputs[::window] = bos
    return inputs, known


def evaluate_logits(parts: Iterable[tuple[Logits, Logits, NDArray[np.intp]]], window: int) -> Evaluation:
    """Sum up predictions.

    Parameters
    ----------
    parts : iterable of (source logits, file logits, targets)
        (tokens, vocabulary) twice and (tokens,), in the order of the text.
    window : int
        The first token of each window has position 0.

    Raises
    ------
    RsvError
        bad_argument: no tokens, or other shapes; source_invalid, nonfinite_value: logits of the source, of the file,
        that are not finite.
    """
    columns = [_per_token(*part) for part in parts]
    if not columns:
        raise RsvError("bad_argument", "tokens", "there are none to predict")
    loss, other_loss, divergence, same, difference = np.concatenate(columns, axis=1)
    positions = np.arange(loss.size) % window
    length = -(-min(window, loss.size) // _SPANS)
    spans = []
    for start in range(0, min(window, loss.size), length):
        chosen = (positions >= start) & (positions < start + length)
        spans.append(
            Span(
                start, min(start + length, window), float(np.exp(loss[chosen].mean())),
                float(np.exp(other_loss[chosen].mean())), float(divergence[chosen].mean()), float(same[chosen].mean()),
            )
        )  # fmt: skip
    return Evaluation(
        tokens=loss.size,
        window=window,
        source_perplexity=float(np.exp(loss.mean())),
        file_perplexity=float(np.exp(other_loss.mean())),
        mean_divergence=float(divergence.mean()),
        divergence_error=float(divergence.std(ddof=1) / np.sqrt(loss.size)) if loss.size > 1 else 0.0,
        median_divergence=float(np.median(divergence)),
        divergence_99=float(np.quantile(divergence, 0.99)),
        max_divergence=float(divergence.max()),
        same_top=float(same.mean()),
        probability_rms=float(np.sqrt(np.square(difference).mean())),
        spans=tuple(spans),
    )


def _per_token(source: Logits, file: Logits, targets: NDArray[np.intp]) -> NDArray[np.float64]:
    """Losses of both, divergence, whether the top token is the same, and the target's probabilities' difference."""
    if source.shape != file.shape or source.ndim != 2 or source.shape[0] != targets.shape[0]:
        raise RsvError("shape_mismatch", "logits", f"{source.shape} and {file.shape} for {targets.shape[0]} tokens")
    for code, where, values in (("source_invalid", "source", source), ("nonfinite_value", "file", file)):
        if not np.isfinite(values).all():
            raise RsvError(code, where, "its predictions are not finite")
    rows = np.arange(targets.size)
    log_p, log_q = _log_softmax(source), _log_softmax(file)
    divergence = np.einsum("ij,ij->i", np.exp(log_p), log_p - log_q)
    p, q = log_p[rows, targets], log_q[rows, targets]
    same = log_p.argmax(axis=1) == log_q.argmax(axis=1)
    return np.stack([-p, -q, np.maximum(divergence, 0.0), same, np.exp(q) - np.exp(p)])  # rounding can go below 0


def _log_softmax(logits: Logits) -> NDArray[np.float64]:
    shifted = logits.astype(np.float64)
    shifted -= shifted.max(axis=1, keepdims=True)
    shifted -= np.log(np.exp(shifted).sum(axis=1, keepdims=True))
    return shifted


def check_family(config: Mapping[str, Any], window: int) -> None:
    """Refuse what `Decoder` would run otherwise than the model means.

    Raises
    ------
    RsvError
        unsupported_model.
    """
    kind = config.get("model_type")
    if not isinstance(kind, str) or kind not in _EXACT:
        raise RsvError("unsupported_model", "config.json", f"model_type {kind!r} is not one that numpy runs in full")
    for name in ("rope_scaling", "rope_parameters"):
        scaling = config.get(name) or {}
        if (
            not isinstance(scaling, Mapping)
            or any(key not in _POSITIONS for key in scaling)
            or scaling.get("rope_type", "default") != "default"
        ):
            raise RsvError("unsupported_model", "config.json", f"{name} is not known to numpy's forward pass")
    sliding = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if isinstance(sliding, int) and sliding < window:
        raise RsvError("unsupported_model", "config.json", f"a sliding window of {sliding} is shorter than {window}")


def encode_text(source: Source, text: str) -> tuple[list[int], int | None]:
    """The tokens of a text, and the one that texts begin with, if there is one."""
    attached = source.attachments.get("tokenizer.json")
    if attached is None:
        raise RsvError("missing_attachment", "tokenizer.json", f"{source.path} comes without it")
    try:
        from tokenizers import Tokenizer
    except ImportError as e:
        raise RsvError.of_import(e, "tokenizers", "pip install 'rsv-format[sources]'") from e
    with reading("tokenizer.json"), quiet_panics():
        tokenizer = Tokenizer.from_str(attached[1].decode())
        begin = tokenizer.encode("").ids
        return tokenizer.encode(text, add_special_tokens=False).ids, begin[0] if begin else None


def _of_source(source: Source) -> Fetch:
    return lambda name: source.tensors[name].pieces() if name in source.tensors else None


def _of_file(file: File) -> Fetch:
    def fetch(name: str) -> Sequence[Rows] | None:
        if name in file.tensors:
            return [file.tensors[name].float32()]
        layer, _, kind = name.rpartition(".")
        if layer not in file.layers:
            return None
        if kind == "weight":
            return [file.layers[layer].dequantize()]
        bias = file.layers[layer].bias_float32()
        return None if bias is None else [bias]

    return fetch


def _whole(fetch: Fetch, name: str) -> Rows | None:
    pieces = fetch(name)
    return None if pieces is None else np.concatenate([*pieces])
