"""Metal kernels for products with packed codes whose centroids are not evenly spaced: for those MLX has its own.

Each kernel is one text, made for a number of bits and a window when it is first used. What it needs of Metal is little
(a thread's place, threadgroup memory, a barrier, a sum over a simdgroup), so the tests compile the same text as C++. On
a device, a product of each kernel is compared with the generic operations before its first use: if they differ, or it
does not compile, those are used from then on, and a warning says so once.
"""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import mlx.core as mx
import numpy as np

LANES = 32  # of a simdgroup, and codes in a group: so a group of codes is as many words as a code has bits
MOST_ROWS = 8  # of activations that a product by a kernel takes; for more, weights become dense tile by tile
_ROWS_TOGETHER = 8  # simdgroups of a threadgroup, each with a row of the weight
_TABLE_IN_THREADGROUP = 4096  # centroids: 16 KiB, half of what a threadgroup has
_TILE = 2**24  # weights that are dense at a time
_CHECKED_ROWS = 64
_TOLERANCE = 1e-4  # of the largest product: sums in another order


@dataclass(frozen=True)
class Launch:
    """A kernel, and what it is run on."""

    name: str
    header: str
    source: str
    inputs: Sequence[tuple[str, mx.array]]
    constants: Sequence[tuple[str, int]]
    grid: tuple[int, int, int]
    threadgroup: tuple[int, int, int]
    shape: tuple[int, ...]


def usable() -> bool:
    """Whether there is a device for them, and it is the one that is used."""
    return bool(mx.metal.is_available()) and mx.default_device() == mx.gpu


def product_of(x: mx.array, codes: mx.array, which: mx.array, centroids: mx.array, bits: int, window: int) -> Launch:
    """x @ centroids[indices[which]].T, a simdgroup for each row of the weight.

    Parameters
    ----------
    x : float32 (pairs, few, in_features)
    codes : uint32 (stack, rows, row_words)
    which : uint32 (pairs,)
        A matrix of the stack for each pair.
    centroids : float32 (2**window,)
    bits, window : int

    Returns
    -------
    Launch
        Of an output float32 (pairs, few, rows).
    """
    pairs, few, in_features = x.shape
    _, rows, words = codes.shape
    down = -(-rows // _ROWS_TOGETHER) * _ROWS_TOGETHER
    return Launch(
        f"rsv_product_{bits}_{window}",
        _header(bits, window),
        _product(bits, window),
        [("x", x), ("codes", codes), ("which", which), ("centroids", centroids), _sizes(in_features, rows, words)],
        [("FEW", few)],
        (LANES, down, pairs),
        (LANES, _ROWS_TOGETHER, 1),
        (pairs, few, rows),
    )


def weights_of(codes: mx.array, centroids: mx.array, bits: int, window: int, in_features: int) -> Launch:
    """centroids[indices], a thread for each group of codes.

    Parameters
    ----------
    codes : uint32 (rows, row_words)
    centroids : float32 (2**window,)
    bits, window, in_features : int

    Returns
    -------
    Launch
        Of an output float32 (rows, in_features).
    """
    rows, words = codes.shape
    across, down = -(-in_features // LANES**2) * LANES, -(-rows // _ROWS_TOGETHER) * _ROWS_TOGETHER
    return Launch(
        f"rsv_weights_{bits}_{window}",
        _header(bits, window),
        _weights(bits, window),
        [("codes", codes), ("centroids", centroids), _sizes(in_features, rows, words)],
        [],
        (across, down, 1),
        (LANES, _ROWS_TOGETHER, 1),
        (rows, in_features),
    )


def run(launch: Launch) -> mx.array:
    """The output of a kernel."""
    kernel: Any = mx.fast.metal_kernel(
        name=launch.name,
        input_names=[name for name, _ in launch.inputs],
        output_names=["out"],
        source=launch.source,
        header=launch.header,
    )
    found: mx.array = kernel(
        inputs=[array for _, array in launch.inputs],
        template=list(launch.constants),
        grid=launch.grid,
        threadgroup=launch.threadgroup,
        output_shapes=[launch.shape],
        output_dtypes=[mx.float32],
    )[0]
    return found


def product(
    x: mx.array,
    codes: mx.array,
    which: mx.array | None,
    centroids: mx.array,
    bits: int,
    window: int,
    generic: Callable[[mx.array, mx.array, mx.array | None], mx.array],
) -> mx.array | None:
    """x @ centroids[indices[which]].T by a kernel; None where there is none that can be trusted.

    Parameters
    ----------
    x : float32 (pairs, n, in_features)
    codes : uint32 (stack, rows, row_words)
    which : uint32 (pairs,), optional
        Not given, the one matrix there is.
    centroids, bits, window
        As `product_of`.
    generic : callable
        The same of x, codes and which, by other operations.

    Returns
    -------
    float32 (pairs, n, rows), or None.
    """
    if not usable() or getattr(_here, "off", False) or 0 in x.shape:
        return None
    pairs, n, in_features = x.shape
    if n > MOST_ROWS and pairs > 1:
        return None

    def ours(x: mx.array, codes: mx.array, which: mx.array | None) -> mx.array:
        return by_kernel(x, codes, which, centroids, bits, window)

    def without(x: mx.array, codes: mx.array, which: mx.array | None) -> mx.array:
        with generic_only():
            return generic(x, codes, which)

    kind = (bits, window, n <= MOST_ROWS)
    if kind not in _trusted:
        _trusted[kind] = _check(kind, n, in_features, codes.shape[-1], ours, without)
    if not _trusted[kind]:
        return None

    @mx.custom_function
    def multiplied(x: mx.array) -> mx.array:
        return ours(x, codes, which)

    @multiplied.vjp
    def backwards(x: mx.array, cotangent: mx.array, output: mx.array) -> mx.array:
        return mx.vjp(lambda x: without(x, codes, which), [x], [cotangent])[1][0]

    found: Any = multiplied(x)
    y: mx.array = found
    return y


def by_kernel(
    x: mx.array, codes: mx.array, which: mx.array | None, centroids: mx.array, bits: int, window: int
) -> mx.array:
    """As `product`, whether it can be trusted or not."""
    pairs, n, _ = x.shape
    if n > MOST_ROWS and pairs == 1:
        return _tiled(x[0], codes[0], centroids, bits, window)[None]
    numbers = mx.zeros((pairs,), mx.uint32) if which is None else which.astype(mx.uint32)
    return run(product_of(x, codes, numbers, centroids, bits, window))


@contextlib.contextmanager
def generic_only() -> Iterator[None]:
    """While the body runs, this thread uses no kernel."""
    before = getattr(_here, "off", False)
    _here.off = True
    try:
        yield
    finally:
        _here.off = before


def _tiled(x: mx.array, codes: mx.array, centroids: mx.array, bits: int, window: int) -> mx.array:
    """(n, in_features) to (n, rows), some of the weight's rows dense at a time."""
    chunk = max(1, _TILE // x.shape[-1])
    products = []
    for start in range(0, codes.shape[0], chunk):
        dense = run(weights_of(codes[start : start + chunk], centroids, bits, window, x.shape[-1]))
        products.append(x @ dense.T)
    return products[0] if len(products) == 1 else mx.concatenate(products, axis=-1)


_here = threading.local()
_trusted: dict[tuple[int, int, bool], bool] = {}


def _check(
    kind: tuple[int, int, bool],
    n: int,
    in_features: int,
    words: int,
    by_kernel: Callable[[mx.array, mx.array, mx.array | None], mx.array],
    generic: Callable[[mx.array, mx.array, mx.array | None], mx.array],
) -> bool:
    """Compare a kernel's product of random numbers, in the shape of a layer, with the generic one."""
    rng = np.random.default_rng(0)
    x = mx.array(rng.standard_normal((1, n, in_features)).astype(np.float32))
    codes = mx.array(rng.integers(0, 2**32, (1, _CHECKED_ROWS, words), np.uint32))
    wanted = generic(x, codes, None)
    mx.eval(wanted)
    try:
        found = by_kernel(x, codes, None)
        mx.eval(found)
        worst = float(mx.abs(found - wanted).max()) / max(float(mx.abs(wanted).max()), 1e-30)
        why = "" if worst <= _TOLERANCE else f"it differs by {worst:.2g}"  # also if it is no number
    except RuntimeError as e:  # it does not compile, or the device does not take it
        why = str(e).splitlines()[0] if str(e) else type(e).__name__
    if why:
        text = f"the Metal kernel for {kind[0]} bits, window {kind[1]} is not used: {why}"
        warnings.warn(text, RuntimeWarning, stacklevel=2)
    return not why


def _sizes(in_features: int, rows: int, words: int) -> tuple[str, mx.array]:
    return "sizes", mx.array(np.array([in_features, rows, words], np.uint32))


def _header(bits: int, window: int) -> str:
    """The index of a column: `window` bits of a row, which begins again behind its last code."""
    return f"""
template <typename Words>
inline uint rsv_index(Words code, uint column, uint in_features) {{
  uint first = column * {bits}u, cycle = in_features * {bits}u;
  if (first + {window}u <= cycle) {{
    uint value = code[first >> 5] >> (first & 31u);
    if ((first & 31u) + {window}u > 32u) value |= code[(first >> 5) + 1u] << (32u - (first & 31u));
    return value & {2**window - 1}u;
  }}
  uint value = 0;
  for (uint i = 0; i < {window}u; i++) {{
    uint bit = (first + i) % cycle;
    value |= ((code[bit >> 5] >> (bit & 31u)) & 1u) << i;
  }}
  return value;
}}
"""


def _table(window: int) -> str:
    """`table`, the centroids: near the threads where they fit."""
    if 2**window > _TABLE_IN_THREADGROUP:
        return "auto table = centroids;"
    return f"""threadgroup float table[{2**window}];
for (uint i = thread_index_in_threadgroup; i < {2**window}u; i += {LANES * _ROWS_TOGETHER}u) table[i] = centroids[i];
threadgroup_barrier(mem_flags::mem_threadgroup);"""


def _group(bits: int, window: int, use: str) -> str:
    """For each column of a group, `use` it: `value` is its weight, `column` its number."""
    lines = []
    for k in range(LANES):
        word, shift = divmod(k * bits, 32)
        value = f"(held[{word}] >> {shift}u)"
        if shift + window > 32:
            value = f"({value} | (held[{word + 1}] << {32 - shift}u))"
        lines.append(f"    {{ float value = table[{value} & {2**window - 1}u]; uint column = first + {k}u; {use} }}")
    unrolled = "\n".join(lines)
    beyond = 1 if 31 * bits % 32 + window > 32 or 31 * bits + window > 32 * bits else 0  # words behind the group's
    load = " ".join(f"held[{i}] = code[group * {bits}u + {i}u];" for i in range(bits + beyond))
    return f"""  uint first = group * {LANES}u;
  if (first * {bits}u + {31 * bits + window}u <= in_features * {bits}u) {{
    uint held[{bits + beyond}];
    {load}
{unrolled}
  }} else {{
    for (uint column = first; column < min(first + {LANES}u, in_features); column++) {{
      float value = table[rsv_index(code, column, in_features)];
      {use}
    }}
  }}"""


def _product(bits: int, window: int) -> str:
    use = "for (int m = 0; m < FEW; m++) sums[m] += value * in[m * in_features + column];"
    return f"""
uint in_features = sizes[0], rows = sizes[1], words = sizes[2];
uint lane = thread_position_in_grid.x, row = thread_position_in_grid.y, pair = thread_position_in_grid.z;
{_table(window)}
if (row >= rows) return;
auto code = codes + (size_t(which[pair]) * rows + row) * words;
auto in = x + size_t(pair) * FEW * in_features;
float sums[FEW];
for (int m = 0; m < FEW; m++) sums[m] = 0;
for (uint group = lane; group * {LANES}u < in_features; group += {LANES}u) {{
{_group(bits, window, use)}
}}
for (int m = 0; m < FEW; m++) {{
  float sum = simd_sum(sums[m]);
  if (lane == 0) out[(size_t(pair) * FEW + m) * rows + row] = sum;
}}
"""


def _weights(bits: int, window: int) -> str:
    return f"""
uint in_features = sizes[0], rows = sizes[1], words = sizes[2];
uint group = thread_position_in_grid.x, row = thread_position_in_grid.y;
{_table(window)}
if (row >= rows || group * {LANES}u >= in_features) return;
auto code = codes + size_t(row) * words;
auto to = out + size_t(row) * in_features;
{{
{_group(bits, window, "to[column] = value;")}
}}
"""
