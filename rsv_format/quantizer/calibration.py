"""What the layers of a source see when its model runs on a text: second moments, one block's in memory at a time."""

from __future__ import annotations

import re
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray

from rsv_format.decoder import Decoder, Rows, running
from rsv_format.errors import RsvError
from rsv_format.quantizer.evaluation import check_family, encode_text
from rsv_format.sources import Source

TOKENS, WINDOW = 2048, 512

_BLOCK = re.compile(r"model\.layers\.(\d+)\.")
_EMBEDDING = "model.embed_tokens.weight"


def calibration_tokens(source: Source, text: str) -> NDArray[np.intp]:
    """The first `TOKENS` of a text.

    Raises
    ------
    RsvError
        unsupported_model: not a family that `Decoder` runs in full; missing_attachment, missing_dependency,
        source_invalid; bad_argument: the text is empty.
    """
    check_family(source.config or {}, WINDOW)
    ids, _ = encode_text(source, text)
    if not ids:
        raise RsvError("bad_argument", "calibration", "the text has no tokens")
    return np.array(ids[:TOKENS], np.intp)


def block_of(name: str) -> int:
    """The number of the block that a layer is in, -1 for one outside."""
    match = _BLOCK.match(name)
    return int(match[1]) if match else -1


class Moments:
    """The second moments of the inputs of a model's layers, as the model runs on tokens, block by block.

    Parameters
    ----------
    source : Source
        Of a family that `Decoder` knows.
    tokens : (tokens,)
    """

    def __init__(self, source: Source, tokens: NDArray[np.intp]) -> None:
        embedding = source.tensors.get(_EMBEDDING)
        if embedding is None or int(tokens.max()) >= embedding.shape[0]:
            raise RsvError("source_invalid", source.path, "its embedding table does not have these tokens")
        self._source, self._found, self._reached = source, dict[str, NDArray[np.float32]](), -1
        self._last: tuple[Rows, NDArray[np.float32]] | None = None
        with running("source_invalid", source.path):
            embedded = embedding.taken(tokens)
            self._steps = Decoder(source.config or {}, self._fetched, self._observe, WINDOW).steps(embedded)

    def of(self, name: str) -> NDArray[np.float32] | None:
        """The mean of x' x over the tokens, float32 (in_features, in_features); None for a layer that is not seen.

        The model runs as far as the layer's block: layers are to be asked for in the order of their blocks.

        Raises
        ------
        RsvError
            source_invalid: the model cannot be run.
        """
        while self._reached < block_of(name):
            self._found.clear()
            with running("source_invalid", self._source.path):
                if next(self._steps, None) is None:
                    break
            self._reached += 1
            self._last = None
        return self._found.get(name)

    def _observe(self, name: str, x: Rows) -> None:
        if self._last is None or self._last[0] is not x:
            self._last = x, x.T @ x / np.float32(x.shape[0])
        self._found[name] = self._last[1]

    def _fetched(self, name: str) -> Iterable[Rows] | None:
        tensor = self._source.tensors.get(name)
        return None if tensor is None else tensor.pieces()
