"""Sizes, names and transforms in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from rsv_format.header import TransformEntry


def size(nbytes: int) -> str:
    """As "341 MB", in powers of ten and three digits."""
    return _scaled(nbytes, ("B", "kB", "MB", "GB", "TB", "PB"))


def count(number: int) -> str:
    """As "106 M"."""
    return _scaled(number, ("", "k", "M", "G", "T", "P")).rstrip()


def _scaled(number: float, units: tuple[str, ...]) -> str:
    unit, *larger = units
    for unit_above in larger:
        if number < 999.5:
            break
        number, unit = number / 1000, unit_above
    decimals = 0 if unit == units[0] or number >= 99.95 else 1 if number >= 9.995 else 2
    return f"{number:.{decimals}f} {unit}"


def percent(part: float, whole: float) -> str:
    """As "86.1 %"."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def shape(sides: Iterable[int]) -> str:
    """As "576 x 1536"."""
    return " × ".join(map(str, sides)) or "scalar"


def transform(entry: TransformEntry | None) -> str:
    """The transform T = (F (x) H) diag(d), read from right to left as it is written."""
    if entry is None:
        return "none"
    m = entry.dim // entry.hadamard
    parts = []
    if entry.factor is not None:
        seed = "" if entry.factor.seed is None else f" seed {entry.factor.seed}"
        parts.append(f"{entry.factor.kind} {m}{seed}")
    elif m > 1 and entry.hadamard > 1:
        parts.append(f"identity {m}")
    if entry.hadamard > 1:
        parts.append(f"hadamard {entry.hadamard}")
    text = " ⊗ ".join(parts)
    if entry.diagonal is not None:
        text += f"{' · ' if text else ''}{'signs' if entry.diagonal.kind == 'signs' else 'scales'}"
    return text or "identity"


def table(title: str, *columns: str, **options: Any) -> Table:
    """A table of this tool; a column whose name starts with > is right-aligned."""
    from rich import box
    from rich.table import Table

    made = Table(
        title=f"\n{title}",
        title_justify="left",
        title_style="bold",
        box=box.SIMPLE_HEAD,
        show_edge=False,
        pad_edge=False,
        padding=(0, 1, 0, 0),
        **options,
    )
    for column in columns:
        right = column.startswith(">")
        made.add_column(
            column.removeprefix(">"),
            justify="right" if right else "left",
            no_wrap=right,
            overflow="fold",
            header_style="dim",
        )
    return made
