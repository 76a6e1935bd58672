"""What quantization does to the predictions of any model that mlx-lm runs."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from typing import Any

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

import rsv_format
from rsv_mlx.calibrate import check_tokens, encode, load_anything
from rsv_mlx.untrusted import library


def evaluate(
    source: str | os.PathLike[str],
    file: str | os.PathLike[str],
    *,
    text: str | None = None,
    tokens: int = 4096,
    window: int = 512,
    max_order: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> rsv_format.Evaluation:
    """As `rsv_format.evaluate`, with both models in memory.

    Parameters
    ----------
    source, file : path or hub id
        What `rsv calibrate` takes: RSV files, files and folders of weights.
    text, tokens, window, max_order, progress
        As `rsv_format.evaluate`.

    Raises
    ------
    RsvError
        bad_argument, unsupported_model, missing_attachment; what loading raises.
    """
    models = []
    for spec in (source, file):
        model, tokenizer = load_anything(spec, max_order=max_order)
        models.append(model)
        if len(models) == 1:
            ids, bos = encode(tokenizer, rsv_format.default_text() if text is None else text)
    for model in models:
        check_tokens(model, ids)
    inputs, targets = rsv_format.text_windows(ids, bos, tokens, window)
    told = progress or (lambda done, total, name: None)

    def parts() -> Iterator[tuple[NDArray[np.float32], NDArray[np.float32], NDArray[np.intp]]]:
        for start in range(0, inputs.size, window):
            told(start, inputs.size, "predictions")
            part = slice(start, start + window)
            predicted = [_logits(model, inputs[part]) for model in models]
            yield predicted[0], predicted[1], targets[part]

    found = rsv_format.evaluate_logits(parts(), window)
    told(inputs.size, inputs.size, "")
    return found


def _logits(model: Module, ids: NDArray[np.intp]) -> NDArray[np.float32]:
    with library("unsupported_model", "config.json"):  # which may say what mlx-lm cannot run
        logits: Any = model(mx.array(ids[None].astype(np.int32)))
        return np.array(logits[0].astype(mx.float32))
