"""A budget of bits per weight, spent on layers: whole bits for each, where they lower the weighted error most.

The expected error of a layer is D(b) E. D is the codebook's distortion for N(0, 1); a rotation makes weights so
distributed and spreads the error evenly, so that, with c the channel scales and S_j the sum of squares of column j,

    E = sum_i scale[i]^2 * sum_j h_j / c_j^2,   sum_i scale[i]^2 = sum_j c_j^2 S_j / in_features.

D is convex in b: to take, again and again, the step of the largest decrease per byte is optimal but for what is
left at the end. Y. Shoham, A. Gersho, "Efficient bit allocation for an arbitrary set of quantizers", IEEE Trans.
ASSP 36 (1988).

No layer gets fewer bits than all could have alike, and none many more: the sum of the errors says little of what
a model loses when some layers are much worse than the rest. On SmolLM2-135M, 2 to 8 bits with a lower sum gave a
clearly higher perplexity than even bits.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.canonical import arrange
from rsv_format.errors import RsvError
from rsv_format.header import Header, build_header
from rsv_format.layout import row_words
from rsv_format.quantizer.codebooks import TRELLIS_BITS, distortion
from rsv_format.validate import walk

Floats = NDArray[np.floating[Any]]

LEVELS: dict[str, tuple[int, ...]] = {
    "lloyd-max": (2, 3, 4, 5, 6, 7, 8),
    "uniform": (2, 3, 4, 5, 6, 8),  # those for which MLX has kernels
    "trellis": TRELLIS_BITS[1:],
}


@dataclass(frozen=True)
class Demand:
    """What a layer does with bits."""

    name: str
    in_features: int
    rows: int
    error: float  # E: expected weighted error over the codebook's distortion

    def nbytes(self, bits: int) -> int:
        """Size of the codes."""
        return 4 * self.rows * row_words(self.in_features, bits)


def weighted_error(importance: Floats, scales: Floats, squares: Floats) -> float:
    """E of the module's docstring.

    Parameters
    ----------
    importance, scales, squares : (in_features,)
        h, c, and S, the sums of squares of the layer's columns.
    """
    inverse = 1 / np.square(scales, dtype=np.float64)
    return float(np.mean(squares / inverse) * np.sum(importance * inverse))


def quantized_nbytes(header: Header) -> int:
    """Size of the file that the header describes, without tensors and attachments: `Summary.bits_per_weight`'s."""
    header = arrange(header)
    blobs, nbytes = walk(header, len(build_header(header)))
    return nbytes - sum(blob.nbytes for blob in blobs if blob.kind in ("tensor", "attachment"))


def spend(
    demands: Sequence[Demand],
    *,
    kind: str,
    limit: int,
    size: Callable[[Mapping[str, int]], int],
    window: int | None = None,
    reach: int = 1,
) -> dict[str, int]:
    """Bits for each layer.

    Parameters
    ----------
    demands : sequence
    kind : str
        Of the codebooks.
    limit : int
        Bytes that may be used in all.
    size : callable
        From bits by name to bytes in all: codes and everything else.
    window : int, optional
        Of a trellis.
    reach : int
        How many levels above the one that all could have.

    Raises
    ------
    RsvError
        bad_argument: the limit is below the size at the fewest bits.
    """
    names = [demand.name for demand in demands]
    affordable = [i for i, bits in enumerate(LEVELS[kind]) if size(dict.fromkeys(names, bits)) <= limit]
    if not affordable:
        least = size(dict.fromkeys(names, LEVELS[kind][0]))
        raise RsvError("bad_argument", "bits_per_weight", f"it allows {limit} bytes, and {least} are the least")
    levels = LEVELS[kind][affordable[-1] :][: reach + 1]
    even = dict.fromkeys(names, levels[0])
    room = limit - size(even)
    while room > 0:
        bits = _allocated(demands, {bits: distortion(kind, bits, window) for bits in levels}, room)
        excess = size(bits) - limit
        if excess <= 0:
            return bits
        room -= excess  # padding and codebooks have grown too
    return even


def _allocated(demands: Sequence[Demand], distortions: Mapping[int, float], room: int) -> dict[str, int]:
    """The greedy allocation of so many bytes of codes beyond the lowest level, given the distortion at each."""
    levels = sorted(distortions)

    def step(demand: Demand, level: int) -> tuple[float, str, Demand, int, int]:
        nbytes = demand.nbytes(levels[level + 1]) - demand.nbytes(levels[level])
        gain = demand.error * (distortions[levels[level]] - distortions[levels[level + 1]])
        return -gain / nbytes, demand.name, demand, level + 1, nbytes

    chosen = dict.fromkeys((demand.name for demand in demands), levels[0])
    heap = [step(demand, 0) for demand in demands if len(levels) > 1]
    heapq.heapify(heap)
    while heap:
        gain, name, demand, level, nbytes = heapq.heappop(heap)
        if nbytes > room or gain == 0:
            continue  # a smaller layer may still fit
        room -= nbytes
        chosen[name] = levels[level]
        if level + 1 < len(levels):
            heapq.heappush(heap, step(demand, level))
    return chosen
