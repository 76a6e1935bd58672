"""Which arrays came through foreign code as they went in, by MLX's graph.

An array object says nothing: `w *= 2` leaves the object and changes the array. What stands in the graph for it does:
every operation makes a node of its own, so two names of one node are one value. MLX writes the graph as text for
those who want to draw it (`mx.export_to_dot`); nothing is evaluated for it.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from io import StringIO

import mlx.core as mx


@dataclass(frozen=True)
class Trace:
    """What became of stubs.

    Attributes
    ----------
    origins : dict
        Name of a result -> name of the stub that it is.
    touched : set
        Stubs that something was computed from, or whose values were looked at.
    """

    origins: dict[str, str]
    touched: set[str]


def make_stub(shape: tuple[int, ...]) -> mx.array:
    """An array that costs nothing until it is evaluated, which leaves a trace: zeros, float32."""
    stub: mx.array = mx.broadcast_to(mx.array(0.0), shape)
    return stub


def alias(array: mx.array) -> mx.array:
    """The same array as an object of its own: changed in place, it leaves the other alone."""
    return array.astype(array.dtype)


def trace(stubs: Mapping[str, mx.array], results: Mapping[str, mx.array]) -> Trace:
    """Find stubs among results.

    Parameters
    ----------
    stubs
        Of `make_stub`; what was given away were their aliases.
    results
        Of whatever ran, by their names.
    """
    before = {f"before {i}": name for i, name in enumerate(stubs)}
    after = {f"after {i}": name for i, name in enumerate(results)}
    # each result is read by one operation more, whose outcome bears its name: a node can have only one
    readers = {label: mx.stop_gradient(results[name]) for label, name in after.items()}
    text = StringIO()
    mx.export_to_dot(text, **readers, **{label: stubs[name] for label, name in before.items()})
    made: dict[str, str] = {}  # operation -> what it makes
    used: list[tuple[str, str]] = []
    for line in text.getvalue().splitlines():
        if line[0] in "{}":  # it declares a node
            continue
        left, _, right = line.partition(" -> ")
        if left.startswith('"'):
            used.append((left[1:-1], right))
        else:
            made[left] = right[1:-1]
    unread = set(made.values())
    origins, touched = {}, {name for label, name in before.items() if label not in unread}
    for label, operation in used:
        if label in before and made[operation] in after:
            origins[after[made[operation]]] = before[label]
        elif label in before:
            touched.add(before[label])
    return Trace(origins, touched)
