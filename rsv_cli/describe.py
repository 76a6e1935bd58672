"""Sizes, names and transforms in words."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table

    from rsv_format.header import TransformEntry

_NARROW = 60  # columns; below them numbers would push names out


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


def age(seconds: float) -> str:
    """As "3 hours"."""
    for unit, length in (("day", 86400), ("hour", 3600), ("minute", 60)):
        if seconds >= length:
            number = int(seconds / length)
            return f"{number} {unit}{'s' if number > 1 else ''}"
    return "seconds"


def percent(part: float, whole: float) -> str:
    """As "86.1 %"."""
    return f"{100 * part / whole:.1f} %" if whole else "-"


def shape(sides: Iterable[int]) -> str:
    """As "576 x 1536"."""
    return " × ".join(map(str, sides)) or "scalar"


def transform(entry: TransformEntry | None) -> str:
    """The transform T = (F (x) H) diag(d) in words."""
    from rsv_format.summary import transform_words

    return transform_words(entry)


def table(title: str, *columns: str, **options: Any) -> Table:
    """A table of this tool; a column whose name starts with > is right-aligned. Where there is no room for columns
    side by side, each row is its first cell on a line and the others below it."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    class Fitting(Table):
        def __rich_console__(self, console: Any, room: Any) -> Any:
            if room.max_width >= _NARROW:
                yield from super().__rich_console__(console, room)
                return
            yield Text(f"\n{title}", "bold")
            for cells in zip(*(column.cells for column in self.columns), strict=True):
                facts = [str(cell) for cell in cells[1:] if isinstance(cell, str | Text) and str(cell)]
                yield Text(str(cells[0]), overflow="fold")
                yield Text(f"  {' · '.join(facts)}", "dim", overflow="fold")

    made = Fitting(
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


def tell_rest(made: Table, rows: int, shown: int) -> None:
    """A last row for those that are not shown."""
    if rows > shown:
        made.add_section()
        made.add_row(f"… and {rows - shown} more; --max-rows shows them, --json says all", style="dim")
