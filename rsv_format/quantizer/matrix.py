"""Quantize one matrix: scale channels, rotate, normalise rows, take the nearest centroids or the best path to some.

W_rot = (W * c) @ R.T with R the rotation and c the channel scales, 1 / d; row i over scale[i] is close to
N(0, 1), scale[i] being the row's root mean square.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError
from rsv_format.layout import row_words
from rsv_format.limits import MAX_IN_FEATURES, MAX_INTEGER, MAX_STACK
from rsv_format.packing import pack_unchecked
from rsv_format.quantizer import feedback, trellis
from rsv_format.quantizer.codebooks import centroids as make_centroids
from rsv_format.quantizer.feedback import Spread
from rsv_format.quantizer.scalar import nearest
from rsv_format.rotation import Floats, Transform, haar, haar_witness, kronecker_split, random_signs
from rsv_format.threads import Room, ordered
from rsv_format.writer import LayerData

Rows = tuple[NDArray[np.uint32], NDArray[np.float32]]  # codes and scales

ROTATIONS: tuple[str, ...] = ("hartley", "haar", "none")

_CHUNK = 2**17  # weights handled at a time by a thread: a chunk and its temporaries stay in the L2 cache
_MAX_CHANNEL_SCALE = 64.0  # a channel's importance is a guess: never trust it beyond this factor
_TINY, _HUGE = 1e-30, 1e30  # sums of squares outside are recomputed in binary64


def quantize_matrix(
    weight: Floats,
    *,
    name: str = "weight",
    bits: int = 4,
    codebook: str = "lloyd-max",
    window: int | None = None,
    rotation: str = "hartley",
    persist_rotation: bool = False,
    seed: int = 0,
    importance: Floats | None = None,
    transform: Transform | None = None,
    spread: Spread | None = None,
    bias: NDArray[Any] | None = None,
    bias_dtype: str | None = None,
    threads: int | None = None,
) -> LayerData:
    """Quantize the weight of a linear layer.

    Parameters
    ----------
    weight : floating (out_features, in_features) or (stack, out_features, in_features)
    name : str
        The layer's, kept in the result and named in errors.
    bits : int
        1 to 8.
    codebook : str
        "lloyd-max" or "uniform", centroids that codes select; "trellis", tables that windows of codes select, with
        three fifths of the error. It takes numba, and longer; more than 6 bits are as "lloyd-max".
    window : int, optional
        Of a trellis, the bits of a window: 8, or 12, which is ten times as long at work.
    rotation, persist_rotation, seed
        As `make_transform`.
    importance : (in_features,), optional
        Mean squared activation of each input channel; see `channel_scales`.
    transform : Transform, optional
        Use this one, made for several layers with one input, instead of making one.
    spread : optional
        Error feedback with what `spread_errors` gives for the layer's input and this transform.
    bias : (rows,), optional, with bias_dtype
        Kept as it is; bfloat16 as uint16 bits.
    threads : int, optional
        One per core if not given.

    Returns
    -------
    LayerData
        A zero row has scale 0, and is reproduced exactly.

    Raises
    ------
    RsvError
        nonfinite_weight, importance_mismatch, bad_argument, missing_dependency.
    """
    if weight.ndim not in (2, 3) or not np.issubdtype(weight.dtype, np.floating) or 0 in weight.shape:
        raise RsvError("bad_argument", name, f"want a floating matrix or stack, not {weight.dtype} {weight.shape}")
    check_shape(name, weight.shape)
    stack, in_features = (1 if weight.ndim == 2 else weight.shape[0]), weight.shape[-1]
    rows = weight.reshape(-1, in_features)
    if transform is not None and transform.dim != in_features:
        raise RsvError("bad_argument", name, f"{in_features} columns for a transform of {transform.dim}")
    if transform is None:
        scales = None if importance is None else channel_scales(importance, column_squares([rows]), name)
        transform = make_transform(
            in_features, rotation=rotation, persist_rotation=persist_rotation, seed=seed, scales=scales
        )
    centroids = make_centroids(codebook, bits, window)
    codes, row_scales = quantize_rows(rows, transform, centroids, bits, spread=spread, name=name, threads=threads)
    return LayerData(name, in_features, bits, codes, row_scales, centroids, transform, bias, bias_dtype, stack)


def check_shape(name: str, shape: tuple[int, ...]) -> None:
    """Refuse a weight (out_features, in_features) or (stack, out_features, in_features) that no file can hold.

    Raises
    ------
    RsvError
        bad_argument.
    """
    if shape[-1] > MAX_IN_FEATURES or math.prod(shape[:-2]) > MAX_STACK:
        raise RsvError("bad_argument", name, f"{shape} is beyond the format's limits")


def make_transform(
    dim: int,
    *,
    rotation: str = "hartley",
    persist_rotation: bool = False,
    seed: int = 0,
    scales: Floats | None = None,
) -> Transform | None:
    """The transform of a group of layers.

    Parameters
    ----------
    dim : int
        in_features.
    rotation : str
        "hartley": random signs, then Hartley (x) Hadamard. "haar": a random orthogonal matrix. "none".
    persist_rotation : bool
        Store a "haar" matrix (4 dim^2 bytes, loads at once) instead of its seed (small, derived at load).
    seed : int
        0 to 2^53 - 1; of the signs and of the Haar matrix.
    scales : floating (dim,), optional
        The channel scales c; the diagonal is signs / c.

    Returns
    -------
    Transform, or None for the identity.

    Raises
    ------
    RsvError
        bad_argument.
    """
    if rotation not in ROTATIONS:
        raise RsvError("bad_argument", "rotation", f"{rotation!r} is not one of {', '.join(ROTATIONS)}")
    if not 0 <= seed <= MAX_INTEGER:
        raise RsvError("bad_argument", "seed", f"{seed} is not in 0..2^53 - 1")
    signs = random_signs(dim, seed) if rotation == "hartley" else None
    values = None
    if scales is not None:
        values = (1 / scales).astype(np.float32)
        if signs is not None:
            plus_minus = Transform(dim, signs=signs).d
            assert plus_minus is not None
            values, signs = values * plus_minus, None
    if rotation == "haar" and dim > 1:
        matrix = haar(dim, seed)
        if persist_rotation:
            return Transform(dim, 1, signs, values, "matrix", None, matrix)
        return Transform(dim, 1, signs, values, "haar", seed, haar_witness(matrix))
    if rotation == "hartley":
        n = kronecker_split(dim)
        return Transform(dim, n, signs, values, "hartley" if n < dim else None)
    return None if values is None else Transform(dim, 1, None, values)


def group_transform(
    dim: int,
    matrices: Iterable[Floats],
    *,
    name: str,
    rotation: str = "hartley",
    persist_rotation: bool = False,
    seed: int = 0,
    importance: Floats | None = None,
) -> Transform | None:
    """The one transform of layers that share an input, as `quantize` makes it.

    Parameters
    ----------
    dim : int
        Their in_features.
    matrices : iterable of floating (rows, dim)
        Their weights, in any pieces; only looked at where there is an importance.
    name : str
        Of the first layer. The signs depend on it, so that no two groups get the same; a Haar matrix does not,
        so that layers of one width share it.
    rotation, persist_rotation, seed
        As `make_transform`.
    importance : (dim,), optional
        See `channel_scales`.

    Raises
    ------
    RsvError
        bad_argument, importance_mismatch.
    """
    scales = None if importance is None else channel_scales(importance, column_squares(matrices), name)
    if rotation != "haar":
        digest = hashlib.sha256(f"{seed}:{name}".encode()).digest()
        seed = int.from_bytes(digest[:8], "little") & MAX_INTEGER
    return make_transform(dim, rotation=rotation, persist_rotation=persist_rotation, seed=seed, scales=scales)


def channel_scales(importance: Floats, squares: NDArray[np.float64], name: str) -> NDArray[np.float64]:
    """c_j proportional to (h_j / sum_i W_ij^2)^(1/4), which minimises sum_j h_j |dW_j|^2 (SPEC section 14).

    Parameters
    ----------
    importance : (in_features,)
        h, the mean squared activation of each input channel; its unit does not matter.
    squares : (in_features,)
        Sum of squares of each column, over all layers that share the input.

    Returns
    -------
    float64 (in_features,), geometric mean 1 before clamping; 1 where a column is zero.

    Raises
    ------
    RsvError
        importance_mismatch: another length, or not finite and non-negative.
    """
    h = np.asarray(importance, np.float64)
    if h.shape != squares.shape:
        raise RsvError("importance_mismatch", name, f"{h.shape} importances for {squares.shape[0]} input channels")
    if not np.isfinite(h).all() or (h < 0).any():
        raise RsvError("importance_mismatch", name, "importances must be finite and not negative")
    used = (h > 0) & (squares > 0) & np.isfinite(squares)  # weights that are not finite are refused later, by place
    if not used.any():
        return np.ones_like(h)
    log_ratio = np.log(np.where(used, h, 1.0)) - np.log(np.where(used, squares, 1.0))
    c = np.exp((log_ratio - log_ratio[used].mean()) / 4)
    c = np.where(squares > 0, np.where(h > 0, c, 0.0), 1.0)
    return np.clip(c, 1 / _MAX_CHANNEL_SCALE, _MAX_CHANNEL_SCALE)


def column_squares(matrices: Iterable[Floats]) -> NDArray[np.float64]:
    """Sum of squares of each column, float64 (in_features,), over matrices (rows, in_features).

    Pieces of a matrix give the very sum that it gives, if all but the last have a multiple of `chunk_rows`.
    """
    total: NDArray[np.float64] | None = None
    for matrix in matrices:
        step = chunk_rows(matrix.shape[1])
        for start in range(0, matrix.shape[0], step):
            chunk = matrix[start : start + step].astype(np.float64)
            squares = np.einsum("ij,ij->j", chunk, chunk)
            total = squares if total is None else total + squares
    assert total is not None
    return total


def chunk_rows(in_features: int) -> int:
    """Rows that are handled at a time."""
    return max(1, _CHUNK // in_features)


def quantize_rows(
    weight: Floats,
    transform: Transform | None,
    centroids: NDArray[np.float32],
    bits: int,
    *,
    spread: Spread | None = None,
    name: str = "weight",
    threads: int | None = None,
) -> tuple[NDArray[np.uint32], NDArray[np.float32]]:
    """Packed codes (rows, row_words) and scales (rows,) of a matrix (rows, in_features)."""
    pieces = quantize_pieces(
        lambda start, stop: weight[start:stop], weight.shape, transform, centroids, bits,
        spread=spread, name=name, room=Room(threads=threads),
    )  # fmt: skip
    return joined(pieces, weight.shape, bits)


def joined(pieces: Iterable[Rows], shape: tuple[int, int], bits: int) -> Rows:
    """The codes and scales of a matrix (rows, in_features), of those of its pieces."""
    codes, scales = np.empty((shape[0], row_words(shape[1], bits)), np.uint32), np.empty(shape[0], np.float32)
    done = 0
    for some_codes, some_scales in pieces:
        piece = slice(done, done + some_scales.size)
        codes[piece], scales[piece] = some_codes, some_scales
        done = piece.stop
    return codes, scales


def quantize_pieces(
    read: Callable[[int, int], Floats],
    shape: tuple[int, int],
    transform: Transform | None,
    centroids: NDArray[np.float32],
    bits: int,
    *,
    spread: Spread | None = None,
    name: str = "weight",
    room: Room,
) -> Iterator[Rows]:
    """Codes and scales of a matrix of which `read` gives rows start to stop, piece by piece, in order.

    How large the pieces are, `room` says; the numbers are the same for all.
    """
    encode, step = _encoder(shape[1], transform, centroids, bits, spread, name)
    if transform is not None:
        transform.rotate(np.zeros((1, transform.dim), np.float32))  # derives what the threads then share

    def work(piece: tuple[int, int]) -> Rows:
        first, end = piece
        rows = read(first, end)
        starts = range(0, end - first, step)
        return joined((encode(rows[i : i + step], first + i) for i in starts), (end - first, shape[1]), bits)

    yield from ordered(work, room.pieces(*shape, step), room.threads)


def _encoder(
    in_features: int,
    transform: Transform | None,
    centroids: NDArray[np.float32],
    bits: int,
    spread: Spread | None,
    name: str,
) -> tuple[Callable[[Floats, int], Rows], int]:
    """A function from rows, of which it is told the first one's number, to codes and scales; how many to give it."""
    encoded: Callable[[NDArray[np.float32]], NDArray[Any]]
    scalar = centroids.size == 2**bits
    step = chunk_rows(in_features)
    if spread is not None:
        encoded, step = feedback.encoder(centroids, bits, spread)
    elif scalar:
        encoded = nearest(centroids)
    else:
        encoded, step = trellis.encoder(centroids, bits)
    multiplier = None if transform is None or transform.d is None else (1 / transform.d).astype(np.float32)

    def encode(rows: Floats, first: int) -> Rows:
        with np.errstate(over="ignore", invalid="ignore"):  # what is not finite is refused below, by its place
            x = rows.astype(np.float32, order="C", copy=multiplier is None)
            if multiplier is not None:
                x = x * multiplier
            scales = _normalise(x, rows, name, first)
        if transform is not None:
            x = transform.rotate(x)
        indices = encoded(x)
        codes = pack_unchecked((indices & (2**bits - 1)).astype(np.uint8, copy=False), bits)
        if not scalar and spread is None:
            scales = _refitted(scales, x, centroids[indices])
        return codes, scales

    return encode, step


def _refitted(scales: NDArray[np.float32], x: NDArray[np.float32], said: NDArray[np.float32]) -> NDArray[np.float32]:
    """The scales of least squares for the centroids (rows, in_features) that stand for the normalised rows x."""
    along, squares = np.einsum("ij,ij->i", x, said), np.einsum("ij,ij->i", said, said)
    with np.errstate(over="ignore"):
        fitted = scales * np.divide(along, squares, out=np.ones_like(along), where=(along > 0) & (squares > 0))
    return np.where(np.isfinite(fitted), fitted, scales)


def _normalise(x: NDArray[np.float32], weight: Floats, name: str, first_row: int) -> NDArray[np.float32]:
    """Divide rows by their root mean square, in place; return it. `weight` is what x was made from, for errors."""
    squares = np.einsum("ij,ij->i", x, x)
    scales = np.sqrt(squares / np.float32(x.shape[1]))
    odd = np.flatnonzero(~((squares > _TINY) & (squares < _HUGE)))
    with np.errstate(divide="ignore"):
        factors = 1 / scales
    factors[odd] = 1
    for row in odd:
        wide = x[row].astype(np.float64)
        scale = float(np.sqrt(np.mean(wide * wide)))
        if not np.isfinite(scale):
            column = int(np.argmax(~np.isfinite(x[row])))
            value = weight[row, column]
            beyond = ", beyond float32 when scaled" if np.isfinite(value) else ""
            raise RsvError("nonfinite_weight", name, f"row {first_row + row}, column {column} is {value}{beyond}")
        scales[row] = scale
        if scale:
            x[row] = wide / scale
    x *= factors[:, None]
    return np.asarray(scales)
