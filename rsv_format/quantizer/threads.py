"""Work on pieces, side by side."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor


def run_threads(work: Callable[[int], None], items: Sequence[int], threads: int | None) -> None:
    """Call `work` on every item; numpy lets threads run side by side."""
    workers = min(threads or os.cpu_count() or 1, len(items))
    if workers <= 1:
        for item in items:
            work(item)
        return
    with ThreadPoolExecutor(workers) as pool:
        for _ in pool.map(work, items):
            pass
