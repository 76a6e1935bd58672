"""Floats, packing and transforms as SPEC sections 5 to 7 define them, slowly and without a library."""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from functools import cache, lru_cache

from builder.exact import ln, turn

MASK = 2**64 - 1


def align(x: int, a: int) -> int:
    return -(-x // a) * a


def f32(v: float) -> float:
    """v rounded to binary32."""
    try:
        return struct.unpack("<f", struct.pack("<f", v))[0]
    except OverflowError:
        return math.copysign(math.inf, v)


def f32_bytes(values: Sequence[float]) -> bytes:
    return struct.pack(f"<{len(values)}f", *[f32(v) for v in values])


def f32_list(data: bytes) -> list[float]:
    return list(struct.unpack(f"<{len(data) // 4}f", data))


def f32_hex(v: float) -> str:
    return struct.pack(">f", f32(v)).hex()


def f64_hex(v: float) -> str:
    return struct.pack(">d", v).hex()


def norm(values: Sequence[float]) -> float:
    return math.sqrt(math.fsum(v * v for v in values))


def pack_row(codes: Sequence[int], bits: int) -> bytes:
    """RSV-510."""
    row = 0
    for j, code in enumerate(codes):
        row |= code << (j * bits)
    return row.to_bytes(align(len(codes), 32) // 32 * bits * 4, "little")


def windows(codes: Sequence[int], bits: int, window: int) -> list[int]:
    """RSV-512, from the row's bits."""
    n = len(codes) * bits
    row = sum(code << (j * bits) for j, code in enumerate(codes))
    row = sum(row << (k * n) for k in range(1 + -(-window // n)))  # as far as the last window reaches
    return [row >> p & (2**window - 1) for p in range(0, n, bits)]


def splitmix64(seed: int, k: int) -> int:
    """RSV-710."""
    z = (seed + (k + 1) * 0x9E3779B97F4A7C15) & MASK
    z = (z ^ z >> 30) * 0xBF58476D1CE4E5B9 & MASK
    z = (z ^ z >> 27) * 0x94D049BB133111EB & MASK
    return z ^ z >> 31


def normal_pair(seed: int, k: int) -> tuple[float, float]:
    """RSV-711: deviates 2k and 2k + 1."""
    u1 = (splitmix64(seed, 2 * k) >> 11) + 1
    u2 = splitmix64(seed, 2 * k + 1) >> 11
    r = math.sqrt(-2 * ln(u1, 2**53))
    cos, sin = turn(u2, 2**53)
    return r * cos, r * sin


@cache
def haar(m: int, seed: int, sign_fix: bool = True) -> tuple[tuple[float, ...], ...]:
    """RSV-712: Q in binary64, by Gram and Schmidt, twice; the diagonal of U is positive by construction."""
    g = [v for k in range(-(-m * m // 2)) for v in normal_pair(seed, k)]
    columns: list[list[float]] = []
    for k in range(m):
        v = [g[m * j + k] for j in range(m)]
        for _ in range(2):
            for q in columns:
                c = math.fsum(a * b for a, b in zip(q, v, strict=True))
                v = [a - c * b for a, b in zip(v, q, strict=True)]
        length = norm(v)
        # without the sign fix: the usual result of Householder's method, U[i, i] < 0
        columns.append([a / length for a in v])
    if not sign_fix:
        columns = [[-a for a in column] for column in columns]
    return tuple(tuple(columns[k][j] for k in range(m)) for j in range(m))


def witness(F: Sequence[Sequence[float]]) -> list[float]:
    """RSV-713, of float32(F)."""
    m = len(F)
    u = [((5 * j + 1) % 8 - 3.5) / math.sqrt(5.25 * m) for j in range(m)]
    return [f32(math.fsum(f32(a) * b for a, b in zip(row, u, strict=True))) for row in F]


def hadamard_apply(v: list[float]) -> list[float]:
    """v @ H_n, RSV-703."""
    n, h, v = len(v), 1, list(v)
    while h < n:
        for i in range(0, n, 2 * h):
            for j in range(i, i + h):
                v[j], v[j + h] = v[j] + v[j + h], v[j] - v[j + h]
        h *= 2
    scale = math.sqrt(n)
    return [a / scale for a in v]


def hartley_element(m: int, j: int, k: int) -> float:
    """RSV-705 before its float32."""
    cos, sin = turn(j * k % m, m)
    return (cos + sin) / math.sqrt(m)


def hartley_apply(v: Sequence[float]) -> list[float]:
    """F @ v, by the sum for small orders, by a chirp and two power-of-two transforms for large ones."""
    m = len(v)
    if m <= 128:
        cas = [cos + sin for cos, sin in (turn(k, m) for k in range(m))]
        root = math.sqrt(m)
        return [math.fsum(a * cas[j * k % m] for k, a in enumerate(v)) / root for j in range(m)]
    size, spectrum, chirp = _chirp(m)
    re = [a * c for a, (c, s) in zip(v, chirp, strict=True)] + [0.0] * (size - m)
    im = [-a * s for a, (c, s) in zip(v, chirp, strict=True)] + [0.0] * (size - m)
    _fft(re, im)
    sre, sim = spectrum
    # the inverse transform as the conjugate of the transform of the conjugate
    pre = [a * c - b * d for a, b, c, d in zip(re, im, sre, sim, strict=True)]
    pim = [-(a * d + b * c) for a, b, c, d in zip(re, im, sre, sim, strict=True)]
    _fft(pre, pim)
    out, root = [], math.sqrt(m) * size
    for (c, s), a, b in zip(chirp, pre, pim, strict=False):
        b = -b
        out.append(((a * c + b * s) - (b * c - a * s)) / root)  # Re X - Im X, X = conj(chirp) (a + ib)
    return out


@lru_cache(maxsize=4)
def _chirp(m: int) -> tuple[int, tuple[list[float], list[float]], list[tuple[float, float]]]:
    size = 1 << (2 * m - 1).bit_length()
    chirp = [turn(k * k % (2 * m), 2 * m) for k in range(m)]
    re, im = [0.0] * size, [0.0] * size
    for k, (c, s) in enumerate(chirp):
        re[k], im[k] = c, s
        re[-k], im[-k] = c, s
    _fft(re, im)
    return size, (re, im), chirp


def _fft(re: list[float], im: list[float]) -> None:
    """In place, exp(-2 pi i jk / n), length a power of two."""
    n = len(re)
    j = 0
    for i in range(1, n):
        bit = n >> 1
        while j & bit:
            j ^= bit
            bit >>= 1
        j |= bit
        if i < j:
            re[i], re[j], im[i], im[j] = re[j], re[i], im[j], im[i]
    h = 1
    while h < n:
        twiddles = [turn(k, 2 * h) for k in range(h)]
        for k, (c, s) in enumerate(twiddles):
            for i in range(k, n, 2 * h):
                o = i + h
                a, b = re[o], im[o]
                x, y = a * c + b * s, b * c - a * s
                a, b = re[i], im[i]
                re[i], im[i], re[o], im[o] = a + x, b + y, a - x, b - y
        h *= 2


class Rng:
    """A stream of numbers that depends on a word alone."""

    def __init__(self, word: str) -> None:
        self._seed = int.from_bytes(word.encode()[-32:], "big") * 0x2545F4914F6CDD1D & MASK
        self._k = 0

    def below(self, n: int) -> int:
        self._k += 1
        return splitmix64(self._seed, self._k) % n

    def real(self, low: float, high: float) -> float:
        """A binary32 in [low, high], of 20 random bits."""
        return f32(low + (high - low) * (self.below(2**20) + 1) / 2**20)
