"""What the layers of a model see of a text: how strong each channel is, and how channels go together.

`DecoderCalibration` answers what the quantizer asks of a `Calibration`, for the families that numpy runs, with the
second moments of one block in memory at a time.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Mapping, Sequence

import numpy as np
from numpy.typing import NDArray

from rsv_format.decoder import Decoder, Rows, running
from rsv_format.errors import RsvError
from rsv_format.quantizer.evaluation import check_family, encode_text
from rsv_format.quantizer.importance import plain_name
from rsv_format.quantizer.options import Floats, Progress
from rsv_format.quantizer.synthetic import measured_importance
from rsv_format.sources import Source

CALIBRATION_TOKENS = 8192  # of a text
WINDOW = 512  # of context
_STRIP = 512  # rows of a moment that are made at a time

_BLOCK = re.compile(r"model\.layers\.(\d+)\.")
_TABLE, _HEAD = "model.embed_tokens", "lm_head"


class DecoderCalibration:
    """A model of a known family, run in numpy.

    Parameters
    ----------
    source : Source
    ids : (tokens,)
        Of which each `WINDOW` are a text of their own.
    """

    def __init__(self, source: Source, ids: NDArray[np.intp]) -> None:
        self._source, self._ids = source, ids

    @classmethod
    def of_text(cls, source: Source, text: str) -> DecoderCalibration:
        """With the first `CALIBRATION_TOKENS` of a text.

        Raises
        ------
        RsvError
            unsupported_model: not a family that `Decoder` runs in full; missing_attachment, missing_dependency,
            source_invalid; bad_argument: the text is empty.
        """
        check_family(source.config or {}, WINDOW)
        ids, begin = encode_text(source, text)
        if not ids:
            raise RsvError("bad_argument", "calibration", "the text has no tokens")
        return cls(source, np.array(windows(ids[:CALIBRATION_TOKENS], begin), np.intp))

    @property
    def tokens(self) -> int:
        """How many there are."""
        return self._ids.size

    def importance(self, progress: Progress | None = None) -> Mapping[str, Floats] | None:
        """As `Calibration.importance`."""
        return measured_importance(self._source, self._ids, WINDOW, progress)

    def moments(self, names: Sequence[str]) -> Iterator[NDArray[np.float32] | None]:
        """As `Calibration.moments`; the model runs as far as the block of the layer that is asked for.

        Raises
        ------
        RsvError
            source_invalid: the model cannot be run.
        """
        embedding = self._source.tensors.get(f"{_TABLE}.weight")
        if embedding is None or int(self._ids.max()) >= embedding.shape[0]:
            raise RsvError("source_invalid", self._source.path, "its embedding table does not have these tokens")
        found: dict[str, NDArray[np.float32]] = {}
        wanted = frozenset(names)

        def observe(name: str, x: Rows) -> None:
            if name in wanted:
                if name not in found:
                    found[name] = np.zeros((x.shape[1], x.shape[1]), np.float32)
                add_squares(found[name], x)

        with running("source_invalid", self._source.path):
            decoder = Decoder(self._source.config or {}, self._fetched, observe, WINDOW)
            steps = decoder.steps(embedding.taken(self._ids))
        head = _HEAD if f"{_HEAD}.weight" in self._source.tensors else _TABLE
        reached = -1
        for name in names:
            while reached < min(block_of(name), decoder.blocks):
                found.clear()
                with running("source_invalid", self._source.path):
                    x = next(steps)
                    reached += 1
                    if reached == decoder.blocks:
                        observe(head, x)
            yield mean_of(found.pop(name), self.tokens) if name in found else None

    def _fetched(self, name: str) -> Sequence[Rows] | None:
        tensor = self._source.tensors.get(name)
        return None if tensor is None else tensor.pieces()


def add_squares(moment: NDArray[np.float32], x: Rows) -> None:
    """Add x' x, of x (tokens, in_features), to what is above the diagonal and on it, without another such matrix."""
    for start in range(0, moment.shape[0], _STRIP):
        moment[start : start + _STRIP, start:] += x[:, start : start + _STRIP].T @ x[:, start:]


def mean_of(moment: NDArray[np.float32], tokens: int) -> NDArray[np.float32]:
    """A sum of which `add_squares` has made the upper half, divided, and whole; the same array."""
    moment /= np.float32(tokens)
    for start in range(0, moment.shape[0], _STRIP):
        stop = start + _STRIP
        moment[stop:, start:stop] = moment[start:stop, stop:].T
        square = moment[start:stop, start:stop]
        square[:] = np.triu(square) + np.triu(square, 1).T
    return moment


def windows(ids: Sequence[int], begin: int | None) -> list[int]:
    """Tokens in windows one after the other, each of which begins with `begin`, if there is one."""
    if begin is None:
        return list(ids)
    step = WINDOW - 1
    return [x for start in range(0, len(ids), step) for x in (begin, *ids[start : start + step])]


def block_of(name: str) -> float:
    """The number of the block that a layer is in; infinite for one outside, as the head, which comes last."""
    match = _BLOCK.match(plain_name(name))
    return int(match[1]) if match else math.inf
