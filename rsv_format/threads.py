"""Work on pieces, side by side: how large they are, and in what order they come."""

from __future__ import annotations

import contextlib
import os
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from typing import Any, TypeVar

from rsv_format.errors import RsvError

DEFAULT_MEMORY = 64_000_000  # more is not faster: benchmarks/quantize.py
LEAST_MEMORY = 1_000_000

_NBYTES = 16  # for each weight at work: as it is stored, in float32, and the codes that wait to be written
_PIECES = 4  # of a matrix for each thread at least, so that none is idle for long

T = TypeVar("T")
R = TypeVar("R")


@dataclass(frozen=True)
class Room:
    """What a matrix may take while it is worked on; no result depends on it.

    Parameters
    ----------
    memory : int
        Bytes for all pieces that are at work together; `LEAST_MEMORY` at least.
    threads : int, optional
        One per core if not given.

    Raises
    ------
    RsvError
        bad_argument.
    """

    memory: int = DEFAULT_MEMORY
    threads: int | None = None

    def __post_init__(self) -> None:
        if self.memory < LEAST_MEMORY:
            raise RsvError("bad_argument", "memory", f"{self.memory} bytes are too few, {LEAST_MEMORY} are the least")

    def pieces(self, rows: int, width: int, unit: int) -> list[tuple[int, int]]:
        """Where the pieces of a matrix start and stop: all but the last of a multiple of `unit` rows."""
        workers = self.threads or os.cpu_count() or 1
        most = min(self.memory // (workers * _NBYTES * width), -(-rows // (_PIECES * workers)))
        step = max(1, most // unit) * unit
        return [(start, min(start + step, rows)) for start in range(0, rows, step)]


def run_threads(work: Callable[[int], None], items: Sequence[int], threads: int | None) -> None:
    """Call `work` on every item; numpy lets threads run side by side."""
    for _ in ordered(work, items, threads):
        pass


def ordered(work: Callable[[T], R], items: Sequence[T], threads: int | None) -> Iterator[R]:
    """What `work` returns for every item, in their order; no more of it waits than there are threads."""
    workers = min(threads or os.cpu_count() or 1, len(items))
    if workers <= 1:
        with _one_thread_each():
            yield from map(work, items)
        return
    with _one_thread_each(), ThreadPoolExecutor(workers) as pool:
        waiting: deque[Future[R]] = deque()
        try:
            for item in items:
                if len(waiting) > workers:
                    yield waiting.popleft().result()
                waiting.append(pool.submit(work, item))
            while waiting:
                yield waiting.popleft().result()
        finally:
            for future in waiting:
                future.cancel()


def _one_thread_each() -> contextlib.AbstractContextManager[Any]:
    """While it is entered, matrix products take no threads of their own: ours would wait for them, spinning.

    What they round to then does not depend on the number of cores.
    """
    controller = _libraries()
    return contextlib.nullcontext() if controller is None else controller.limit(limits=1, user_api="blas")


@cache
def _libraries() -> Any:
    """Those that have threads, None where it cannot be told."""
    try:
        from threadpoolctl import ThreadpoolController
    except ModuleNotFoundError:
        return None
    return ThreadpoolController()
