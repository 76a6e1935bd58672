"""Tables that a notebook shows."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import islice

ROWS = 100  # that a notebook shows of one table


def html_table(title: str, columns: Sequence[str], rows: Iterable[Sequence[object]], count: int) -> str:
    """The first of `count` rows under a title; whatever is in them is text."""
    from html import escape  # a notebook has it, and nothing else needs it

    body = "".join(
        "<tr>" + "".join(f"<td style='text-align:left'>{escape(str(cell))}</td>" for cell in row) + "</tr>"
        for row in islice(rows, ROWS)
    )
    head = "".join(f"<th style='text-align:left'>{escape(column)}</th>" for column in columns)
    rest = f"<p>… and {count - ROWS} more</p>" if count > ROWS else ""
    return f"<p><b>{escape(title)}</b></p><table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>{rest}"
