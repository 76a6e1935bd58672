"""Groups of layers, quantized in other processes, on this machine or on others.

A worker reads its own tensors, and writes what it makes of them at its place in the unfinished file, whose journal
tells it the rest: so both lie on storage that all of them share. What comes back are digests. A group that is done
twice, as a worker was lost, is the same twice.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, CancelledError, Executor, Future, wait
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from rsv_format.errors import RsvError, is_out_of_memory
from rsv_format.outputs import Shared
from rsv_format.quantizer.options import Progress, QuantizeOptions
from rsv_format.quantizer.unfinished import Facts, Journal
from rsv_format.threads import Room
from rsv_format.writer import Writer

if TYPE_CHECKING:
    from rsv_format.quantizer.conversion import Job

Digests = list[tuple[str, str, str]]  # kind, name and SHA-256 of blobs
Moment = NDArray[np.float32]


@dataclass(frozen=True)
class Seen:
    """Of a calibration what a group needs."""

    tokens: int
    moment: Moment | None = None

    def importance(self, progress: Progress | None = None) -> None:
        """It is in the journal."""

    def moments(self, names: Sequence[str]) -> Iterator[Moment | None]:
        """That of the one group; a copy, as the task may be done again."""
        return iter([None if self.moment is None else self.moment.copy()])


@dataclass(frozen=True)
class Task:
    """A group of layers.

    Parameters
    ----------
    spec : str
        Of the source.
    tokenizer : bool
        As `quantize`.
    options : QuantizeOptions
        Without what is large.
    room : Room
    path : str
        The unfinished file.
    run : bytes
        Which began it.
    facts : mapping
        By which the source is known.
    group : tuple of str
        Names of layers.
    seen : Seen, optional
    """

    spec: str
    tokenizer: bool
    options: QuantizeOptions
    room: Room
    path: str
    run: bytes
    facts: Facts
    group: tuple[str, ...]
    seen: Seen | None = None


def slim(options: QuantizeOptions, tokens: int | None) -> QuantizeOptions:
    """The same without a mapping and a text, which a file does not tell from a name and a number."""
    importance = options.importance if isinstance(options.importance, str) else "given"
    return replace(options, importance=importance, calibration=None if tokens is None else Seen(tokens))


def spread_out(executor: Executor, tasks: Iterable[Task], most: int, told: Callable[[Task], None]) -> Iterator[Digests]:
    """What becomes of tasks, in any order; no more than `most` are given away at a time.

    Raises
    ------
    RsvError
        What a task raises; io_error: workers were lost, and their executor does not do their work again.
    """
    waiting: dict[Future[Digests], Task] = {}
    try:
        for task in tasks:
            while len(waiting) >= most:
                yield from _done(waiting, told)
            waiting[executor.submit(quantize_group, task)] = task
        while waiting:
            yield from _done(waiting, told)
    finally:
        for future in waiting:
            future.cancel()


def _done(waiting: dict[Future[Digests], Task], told: Callable[[Task], None]) -> Iterator[Digests]:
    ready, _ = wait(waiting, return_when=FIRST_COMPLETED)
    for future in ready:
        task = waiting.pop(future)
        try:
            digests = future.result()
        except RsvError:
            raise
        except (Exception, CancelledError) as e:  # executors have types of their own for lost workers
            if is_out_of_memory(e):
                raise MemoryError(f"in the worker of {task.group[0]}: {e}") from e
            detail = f"{task.group[0]} was not quantized, {type(e).__name__}: {e}"
            raise RsvError("io_error", "workers", detail) from e
        told(task)
        yield digests


def quantize_group(task: Task) -> Digests:
    """In a worker: quantize a group and write it into the unfinished file.

    Raises
    ------
    RsvError
        As `quantize`; io_error: the worker does not see the file or the source that it is about.
    """
    with _alone:
        worker = _worker(task)
        return worker.quantize(task)


_alone = threading.Lock()  # a group takes all threads that it is given
_last: list[_Worker] = []


def _worker(task: Task) -> _Worker:
    if not _last or _last[0].run != task.run or not _last[0].is_current():
        while _last:
            _last.pop().close()
        _last.append(_Worker(task))
    return _last[0]


class _Worker:
    """What is the same for all groups of a run."""

    def __init__(self, task: Task) -> None:
        from rsv_format.quantizer.conversion import Job, silent
        from rsv_format.quantizer.unfinished import facts_of
        from rsv_format.sources import open_source

        self.run = task.run
        journal = Journal.begun(task.path)
        if journal is None or journal.run != task.run or journal.measured is None:
            raise RsvError("io_error", task.path, "a worker does not see this file as it is: is the storage shared?")
        self._source = open_source(task.spec, tokenizer=task.tokenizer)
        found = facts_of(self._source, task.options, None)
        for name, fact in task.facts.items():
            if name.startswith(("file ", "attached ", "tensors", "version")) and found.get(name) != fact:
                detail = f"a worker sees another one, {name}: {found.get(name)}, not {fact}"
                raise RsvError("io_error", task.spec, detail)
        self._job: Job = Job(self._source, task.options, None, task.room, silent)
        self._job.importance, self._job.layer_bits = journal.measured.importance, dict(journal.measured.layer_bits)
        header = self._job.header(self._job.layer_bits)
        self._positions = {layer.name: layer.transform for layer in header.layers}
        self._digests: Digests = []
        self._output = Shared(task.path)
        self._writer = Writer(task.path, header, output=self._output, finished=self._finished)
        self._writer.__enter__()

    def quantize(self, task: Task) -> Digests:
        self._digests = []
        self._job.feedback = task.seen
        for layer in self._job.layers_in_pieces([list(task.group)]):
            position = self._positions[layer.name]
            if layer.transform is not None and position is not None and layer.name == task.group[0]:
                self._writer.transform(position, layer.transform)
            self._writer.layer_pieces(layer.name, layer.pieces, self._job.bias_of(layer.name))
        os.fsync(self._output.descriptor)  # where others see it
        self._source.check_unchanged()
        return self._digests

    def is_current(self) -> bool:
        """Whether the file is still the unfinished one at its path."""
        try:
            return os.path.samestat(os.stat(self._output.path), os.fstat(self._output.descriptor))
        except OSError:
            return False

    def close(self) -> None:
        self._writer.discard()
        self._source.close()

    def _finished(self, kind: str, name: str, sha256: str) -> None:
        self._digests.append((kind, name, sha256))
