"""Mean squared activations without data: the model itself, run on random tokens.

Norm gains alone say little (benchmarks/quality.py): trained residual streams have channels hundreds of times
stronger than others, and only running the model shows them. Random tokens show them almost as well as text.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
from numpy.typing import NDArray

from rsv_format.decoder import Decoder, Rows
from rsv_format.errors import RsvError
from rsv_format.rotation import splitmix64
from rsv_format.sources import Source

_TOKENS = 128  # 512 of them change the result little
_SQUARES = 2**21  # numbers of which squares are taken together
_FIRST_TOKEN = 3  # below lie the ids that most vocabularies keep for control tokens


def synthetic_importance(
    source: Source, seed: int = 0, progress: Callable[[int, int, str], None] | None = None
) -> dict[str, NDArray[np.float64]] | None:
    """Run a decoder on random tokens and record what its linear layers see.

    Parameters
    ----------
    source : Source
        With the config and tensors of a decoder of a known family, by their Hugging Face names.
    seed : int
        Of the tokens.
    progress : callable(done, total, name), optional
        Told the blocks done and in all.

    Returns
    -------
    dict
        Layer name -> mean squared activation of each input channel, float64 (in_features,); an embedding table
        that is the head, too, has what it sees as that. None where the family is not known or the tensors are
        not those of it: `importance.norm_gains` is then the next best.
    """
    embedding = source.tensors.get("model.embed_tokens.weight")
    if embedding is None:
        return None
    return measured_importance(source, random_tokens(embedding.shape[0], seed), progress=progress)


def measured_importance(
    source: Source,
    tokens: NDArray[np.intp],
    window: int | None = None,
    progress: Callable[[int, int, str], None] | None = None,
) -> dict[str, NDArray[np.float64]] | None:
    """As `synthetic_importance`, on given tokens, of which so many at a time are a text of their own."""
    found: dict[str, NDArray[np.float64]] = {}

    def observe(name: str, x: Rows) -> None:
        step = max(1, _SQUARES // x.shape[1])
        for start in range(0, x.shape[0], step):
            part = np.add.reduce(np.square(x[start : start + step], dtype=np.float64), axis=0) / tokens.size
            found[name] = found[name] + part if name in found else part

    def fetch(name: str) -> Sequence[Rows] | None:
        tensor = source.tensors.get(name)
        return None if tensor is None else tensor.pieces()

    try:
        embedding = source.tensors["model.embed_tokens.weight"]
        decoder = Decoder(source.config or {}, fetch, observe, window)
        with np.errstate(over="raise", invalid="raise", divide="raise"):
            last = decoder.run(embedding.taken(tokens), progress)
            observe("lm_head" if "lm_head.weight" in source.tensors else "model.embed_tokens", last)
    except (LookupError, TypeError, ValueError, ArithmeticError) as e:
        if isinstance(e, RsvError):
            raise
        return None
    return found


def random_tokens(vocabulary: int, seed: int = 0, count: int = _TOKENS) -> NDArray[np.intp]:
    """Ids of a vocabulary of so many tokens, the same ones for the same seed: (count,), 128 unless given."""
    first = min(_FIRST_TOKEN, vocabulary - 1)
    return (first + splitmix64(count, seed) % np.uint64(vocabulary - first)).astype(np.intp)
