"""The choices that `quantize` and `quantize_layers` leave to the caller."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError

Floats = NDArray[np.floating[Any]]
Progress = Callable[[int, int, str], None]
Importance = str | os.PathLike[str] | Mapping[str, Floats]

IMPORTANCES = ("auto", "gains", "none")
DEFAULT_BITS = 4
EMBEDDING_BITS = 5  # of tables: they cost little where 4 cost much (benchmarks/quality.py)


class Calibration(Protocol):
    """What the layers of a model see of some tokens; layers go by the names that `importance.plain_name` gives."""

    @property
    def tokens(self) -> int:
        """How many there are."""

    def importance(self, progress: Progress | None = None) -> Mapping[str, Floats] | None:
        """The mean squared activation of each input channel (in_features,) by layer; None if the model does not run."""

    def moments(self, names: Sequence[str]) -> Iterator[NDArray[np.float32] | None]:
        """For each of some layers, in their order, which is best that of the blocks: the mean of x' x, x
        (in_features,) being its input, float32 (in_features, in_features), which is written over then; None for a layer
        that is not seen."""


@dataclass(frozen=True, kw_only=True)
class QuantizeOptions:
    """How a model is quantized.

    Raises
    ------
    RsvError
        bad_argument.

    Parameters
    ----------
    bits, codebook, window, rotation, persist_rotation, seed
        As `quantize_matrix`; 4 bits unless given.
    bits_per_weight : float, optional
        Instead of bits: linear layers get as many as all can have, 2 to 8 (of a trellis 2 to 6), and those whose
        weighted error is largest one more, so that the summary's bits_per_weight, which counts scales, transforms,
        header and padding too, is at most this. Layers whose importance is not known count like the mean of the others.
    embedding_bits : int or "keep", optional
        1 to 8, of embedding tables and of heads that are not tied to one; "keep" leaves them as they are. If not
        given, 5, or as many as the other layers if those have more.
    importance : "auto", "gains", "none", path or mapping
        "auto" runs the model on random tokens where its architecture is known, and takes the gains of the
        norms that feed the layers, or nothing, where it is not. A path is that of a llama.cpp imatrix file. A
        mapping goes from layer names to mean squared activations (in_features,). Of a stack of experts the
        mean of theirs counts, (experts, in_features) or by the names that they have in the checkpoint.
    calibration : str or Calibration, optional
        A text of the kind that the model will see: importance is measured on it instead of on random tokens. Numpy runs
        llama, mistral, qwen2 and qwen3 on it; for others, what `rsv_mlx.TextCalibration` gives.
    feedback : bool, optional
        False does without what a text is for besides: that later weights put right what earlier ones lose (see
        `feedback`), by what the layers see of it.
    include, exclude : patterns
        Shell-style, on layer names such as "model.layers.0.mlp.up_proj"; exclude wins. Layers left out
        are kept as tensors. Experts that are stacked are one layer: it goes by its own name, such as
        "model.layers.0.mlp.switch_mlp.up_proj", and by each of theirs, "model.layers.0.mlp.experts.3.up_proj".
    """

    bits: int | None = None
    bits_per_weight: float | None = None
    embedding_bits: int | str | None = None
    codebook: str = "lloyd-max"
    window: int | None = None
    rotation: str = "hartley"
    persist_rotation: bool = False
    seed: int = 0
    importance: Importance = "auto"
    calibration: str | Calibration | None = None
    feedback: bool | None = None
    include: Sequence[str] = ()
    exclude: Sequence[str] = ()

    def __post_init__(self) -> None:
        if self.bits_per_weight is not None:
            if self.bits is not None:
                raise RsvError("bad_argument", "bits_per_weight", "cannot be had with a number of bits for all layers")
            if not 0 < self.bits_per_weight < float("inf"):
                raise RsvError("bad_argument", "bits_per_weight", f"{self.bits_per_weight} is no positive number")
        if self.feedback and self.calibration is None:
            raise RsvError("bad_argument", "feedback", "it goes by a calibration, and there is none")
        for name, patterns in (("include", self.include), ("exclude", self.exclude)):
            if isinstance(patterns, str):  # or it would be read letter by letter
                raise RsvError("bad_argument", name, f"want a list of patterns, not the string {patterns!r}")


def table_bits(embedding_bits: int | str | None, bits: int) -> int | None:
    """Bits of an embedding table or a head, where other layers have `bits`; None if it is to stay as it is.

    Raises
    ------
    RsvError
        bad_argument: not an integer, "keep" or None.
    """
    if embedding_bits is None:
        return max(EMBEDDING_BITS, bits)
    if embedding_bits == "keep":
        return None
    if isinstance(embedding_bits, int):
        return embedding_bits
    raise RsvError("bad_argument", "embedding_bits", f"{embedding_bits!r} is neither 1 to 8 nor 'keep'")
