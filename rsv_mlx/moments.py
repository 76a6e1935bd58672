"""What the layers of any model that MLX runs see of a text, for the quantizer's error feedback."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence

import mlx.core as mx
import numpy as np
from mlx.nn.layers.base import Module
from numpy.typing import NDArray

import rsv_format
from rsv_format import RsvError
from rsv_mlx.calibrate import (
    CHUNK,
    Experts,
    Progress,
    calibrate,
    check_tokens,
    chunked,
    encode,
    load_anything,
    observed,
)
from rsv_mlx.packed import weight_shape

_ROOM = 2**30  # bytes of moments that one run of the model collects, if they are those of several layers


class ModelCalibration:
    """A language model and the tokens that it runs on, as `rsv_format.Calibration`.

    Moments come from several runs of the model where all of them do not fit in a gibibyte; each goes as far as the
    last layer that it is for. A stack of experts has one moment, of what all of them see: their own would be larger
    than they are, and each of few tokens.

    Parameters
    ----------
    model : Module
        Its layers may be dense or quantized. It is left as it was.
    ids : sequence of int
    bos : int, optional
        A token to begin every `chunk` with; it counts as one of them.
    chunk : int
        Tokens that see one another.

    Raises
    ------
    RsvError
        bad_argument: no tokens; unsupported_model: tokens that the model does not have.
    """

    def __init__(self, model: Module, ids: Sequence[int], *, bos: int | None = None, chunk: int = CHUNK) -> None:
        self.chunks = chunked(ids, chunk, bos)
        check_tokens(model, ids)
        self.model, self.ids, self.bos, self.chunk = model, ids, bos, chunk
        found: list[tuple[str, Module]] = model.named_modules()  # type: ignore[no-untyped-call]
        self.paths = {rsv_format.plain_name(path): path for path, _ in found}
        self.widths = {path: shape[-1] for path, module in found if (shape := weight_shape(module))}

    @property
    def tokens(self) -> int:
        """How many there are."""
        return sum(len(chunk) for chunk in self.chunks)

    def importance(self, progress: Progress | None = None) -> Mapping[str, NDArray[np.float64]]:
        """The mean squared activation of each input channel (in_features,) by layer."""
        counts = calibrate(self.model, self.ids, chunk=self.chunk, bos=self.bos, progress=progress)
        means = {name: np.atleast_2d(sums).sum(axis=0) / seen.sum() for name, (sums, seen) in counts.items()}
        return {rsv_format.plain_name(name): mean for name, mean in means.items()}

    def moments(self, names: Sequence[str]) -> Iterator[NDArray[np.float32] | None]:
        """For each of some layers, in their order, the mean of x' x, x (in_features,) being its input, float32
        (in_features, in_features); None for a layer that is not seen.

        Raises
        ------
        RsvError
            source_invalid: the activations are not finite.
        """
        room, together = 0, list[str]()
        for name in names:
            size = 4 * self.widths.get(self.paths.get(name, name), 0) ** 2
            if together and room + size > _ROOM:
                yield from self._moments(together)
                room, together = 0, []
            room, together = room + size, [*together, name]
        yield from self._moments(together)

    def _moments(self, names: Sequence[str]) -> Iterator[NDArray[np.float32] | None]:
        """Those of layers whose moments fit in memory together."""
        wanted = {self.paths[name] for name in names if name in self.paths}
        seen: dict[str, tuple[mx.array, int]] = {}  # sums, and of how many

        def see(path: str, x: mx.array, experts: Experts | None) -> None:
            if path in wanted:
                rows = x.reshape(-1, x.shape[-1]).astype(mx.float32)
                moment, count = seen.get(path, (mx.array(0.0), 0))
                seen[path] = moment + rows.T @ rows, count + rows.shape[0]

        if wanted:
            with observed(self.model, see):
                for chunk in self.chunks:
                    self.model(mx.array([chunk]))  # lazily: no further than what is wanted
                    mx.eval([moment for moment, _ in seen.values()])
        for name in names:
            found = seen.pop(self.paths.get(name, ""), None)
            if found is not None and not mx.isfinite(found[0]).all().item():
                raise RsvError("source_invalid", name, "its input is not finite")
            yield None if found is None else np.array(found[0] / found[1])


def text_calibration(
    model: str | os.PathLike[str], text: str, *, max_order: int | None = None, weights: bool = True
) -> ModelCalibration:
    """The model of an RSV file, a source of `rsv_format.open_source` or a folder that mlx-lm knows, on the beginning
    of a text. Without `weights`, which are not read then, it tells whether there would be one.

    Raises
    ------
    RsvError
        What loading raises; unsupported_model, missing_attachment; bad_argument: the text is empty.
    """
    loaded, tokenizer = load_anything(model, max_order=max_order, weights=weights)
    ids, bos = encode(tokenizer, text, rsv_format.CALIBRATION_TOKENS)
    return ModelCalibration(loaded, ids, bos=bos)
