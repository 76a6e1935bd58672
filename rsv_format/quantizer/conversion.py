"""Quantize a model into a file, group of layers by group; save an open file again."""

from __future__ import annotations

import contextlib
import fnmatch
import hashlib
import itertools
import os
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from rsv_format.canonical import arrange
from rsv_format.errors import RsvError
from rsv_format.header import (
    NO_DIGEST,
    AttachmentEntry,
    CodebookEntry,
    Header,
    LayerEntry,
    TensorEntry,
    TransformEntry,
    build_header,
    replace,
)
from rsv_format.layout import BIAS_DTYPES
from rsv_format.limits import MAX_NAME, MAX_RANK
from rsv_format.outputs import Output, check, unfinished_path
from rsv_format.quantizer.budget import LEVELS, Demand, quantized_nbytes, spend, weighted_error
from rsv_format.quantizer.calibration import DecoderCalibration, block_of
from rsv_format.quantizer.codebooks import centroids
from rsv_format.quantizer.elsewhere import Digests, Moment, Seen, Task, slim, spread_out
from rsv_format.quantizer.feedback import Spread, feedback_importance, spread_errors
from rsv_format.quantizer.importance import norm_gains, plain_name, share_groups
from rsv_format.quantizer.matrix import (
    Rows,
    channel_scales,
    check_shape,
    chunk_rows,
    column_squares,
    group_transform,
    joined,
    make_transform,
    quantize_pieces,
)
from rsv_format.quantizer.options import DEFAULT_BITS, IMPORTANCES, Importance, QuantizeOptions, table_bits
from rsv_format.quantizer.predicates import least_bits
from rsv_format.quantizer.synthetic import synthetic_importance
from rsv_format.quantizer.unfinished import Journal, Measured, facts_of
from rsv_format.reader import File, Layer
from rsv_format.reader import open as open_file
from rsv_format.roles import Role
from rsv_format.rotation import Floats, Transform
from rsv_format.sources import Source, SourceTensor, open_source
from rsv_format.sources.experts import stack_experts
from rsv_format.sources.imatrix import load_imatrix
from rsv_format.splitting import shard_paths, spread
from rsv_format.stored import Disk
from rsv_format.summary import Summary, summarize
from rsv_format.threads import DEFAULT_MEMORY, Room, ordered
from rsv_format.validate import walk
from rsv_format.version import VERSION
from rsv_format.writer import (
    RSV_FILE,
    LayerData,
    Writer,
    diagonal_entry,
    factor_entry,
    transform_entry,
)

_ROWS_NBYTES = 2**24  # of a layer, that are written together
_LARGEST = float(np.finfo(np.float32).max)

Progress = Callable[[int, int, str], None]


@dataclass(frozen=True)
class QuantizeReport:
    """What `quantize` did: where the bytes went, how long it took, and how the importance was found.

    `left_out` are files beside the weights that may be of use and that cannot be attached, such as code. `memory` is
    what was allowed for pieces. `shards` are paths, the first of which is `path`, if shards were asked for.
    """

    path: str
    seconds: float
    layers: int
    weighted_layers: int  # those with an importance
    summary: Summary
    left_out: tuple[str, ...] = ()
    memory: int = DEFAULT_MEMORY
    shards: tuple[str, ...] = ()


def quantize(
    source: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str],
    *,
    tokenizer: bool = True,
    force: bool = False,
    threads: int | None = None,
    memory: int = DEFAULT_MEMORY,
    shard_size: int | None = None,
    resume: bool = False,
    executor: Executor | None = None,
    workers: int | None = None,
    progress: Progress | None = None,
    **options: Any,
) -> QuantizeReport:
    """Quantize the linear layers of a model into an RSV file; keep its other tensors, config and tokenizer.

    Parameters
    ----------
    source : path, hub id or Source
        What `open_source` takes, or gave.
    out : path
        Written whole or not at all; never in the place of what is read.
    tokenizer : bool
        False leaves it out, and opens what has one that cannot be read.
    force : bool
        Replace a file that is not RSV, or write-protected; but never a model in another format.
    threads : int, optional
        One per core if not given.
    memory : int
        Bytes for what is read and encoded at a time, `LEAST_MEMORY` at least: some rows of a matrix, however large
        that is. What there is beside them does not grow with the model, but with its width: error feedback takes a
        float32 (in_features, in_features) for each input of a block. The file is the same for any number.
    shard_size : int, optional
        Write shards instead, as `split` does of the file, all of them or none: while they are written the disk holds
        the content twice.
    resume : bool
        Go on with what an earlier run of the same options and source has left unfinished beside `out`, as a SIGKILL
        leaves it, and leave what is done if this one is interrupted, however that is. The file is the same.
    executor : concurrent.futures.Executor, optional
        Of processes, here or elsewhere, that quantize groups of layers: each reads `source`, a path or hub id that they
        all know, and writes beside `out`, on storage that they share. What is measured before the first layer is
        measured here. `threads` and `memory` are those of each group. The file is the same, where numpy computes alike.
    workers : int, optional
        How many the executor has; twice as many groups are given away at a time. One per core if not given.
    progress : callable(done, total, name), optional
        Told the weights done, all of them, and the layer at work.
    **options
        The fields of `QuantizeOptions`: bits, bits_per_weight, embedding_bits, codebook, window, rotation,
        persist_rotation, seed, importance, calibration, feedback, include, exclude.

    Raises
    ------
    RsvError
        bad_argument, source_unsupported, source_invalid, nonfinite_weight, importance_mismatch, io_error.
    """
    started = time.perf_counter()
    chosen = QuantizeOptions(**options)
    inputs = _paths(source, chosen.importance)
    check(out, RSV_FILE, inputs=inputs, force=force)
    room = Room(memory, threads)
    given = _given_importance(chosen.importance)
    with _opened(source, tokenizer) as opened:
        job = Job(opened, chosen, given, room, progress or silent)
        inputs += [file.path for file in opened.files]
        journal = job.journal(out, inputs, force=force, resume=resume, shard_size=shard_size)
        if journal.measured is None:
            job.measure()
            journal.measured = Measured(job.importance, job.layer_bits)
        job.importance, job.layer_bits = journal.measured.importance, dict(journal.measured.layer_bits)
        output = Output(out, RSV_FILE, inputs=inputs, force=force, taken_up=resume)
        if executor is not None:
            if isinstance(source, Source):
                raise RsvError("bad_argument", "executor", "want a source that other processes can open: its path")
            spec = os.path.abspath(source) if os.path.exists(source) else os.fspath(source)
            job.away = Away(executor, workers or os.cpu_count() or 1, spec, tokenizer)
        path, paths = str(out), list[str]()
        if shard_size is not None:
            write = partial(spread, out=out, shard_size=shard_size, inputs=inputs, force=force)
            paths = job.write_shards(output, journal, write)
            path, summary = paths[0], summarize(paths[0])
        else:
            with job.write(output, journal) as file:
                summary = summarize(file)
                if _repeats(file):
                    save(file, out)
                    summary = summarize(out)
    seconds = time.perf_counter() - started
    return QuantizeReport(path, seconds, len(job.layers), len(job.importance), summary, opened.left_out, memory,
                          tuple(paths))  # fmt: skip


def quantize_layers(
    source: str | os.PathLike[str] | Source,
    *,
    threads: int | None = None,
    memory: int = DEFAULT_MEMORY,
    progress: Progress | None = None,
    **options: Any,
) -> Iterator[LayerData]:
    """The layers that `quantize` writes, one at a time, without a file; parameters and errors are the same.

    A tokenizer is no part of them, and not looked at.

    Layers with one input come one after the other and share one Transform object.
    """
    chosen = QuantizeOptions(**options)
    room = Room(memory, threads)
    given = _given_importance(chosen.importance)
    with _opened(source, tokenizer=chosen.calibration is not None) as opened:
        job = Job(opened, chosen, given, room, progress or silent)
        job.measure()
        yield from job.quantized()
        opened.check_unchanged()


def save(file: File, path: str | os.PathLike[str], *, force: bool = False) -> None:
    """Write an open file again, canonically; `path` may be the one that it was opened from. `force` is `Writer`'s.

    Raises
    ------
    RsvError
        bad_argument, io_error, content_invalid. SPEC section 11.
    """
    codebooks = _firsts((entry.bits, file.codebook(i).tobytes()) for i, entry in enumerate(file.header.codebooks))
    transforms = _firsts(_content(file.transform(i)) for i in range(len(file.header.transforms)))
    books, turns = (sorted(set(firsts)) for firsts in (codebooks, transforms))
    header = replace(
        file.header,
        codebooks=tuple(file.header.codebooks[i] for i in books),
        transforms=tuple(file.header.transforms[i] for i in turns),
        layers=tuple(
            replace(
                layer,
                codebook=books.index(codebooks[layer.codebook]),
                transform=None if layer.transform is None else turns.index(transforms[layer.transform]),
            )
            for layer in file.header.layers
        ),
        requires=(),
    )
    with Writer(path, header, force=force) as writer:
        for position, i in enumerate(books):
            writer.codebook(position, file.codebook(i))
        for position, i in enumerate(turns):
            writer.transform(position, file.transform(i))
        for layer in file.layers.values():
            writer.layer_pieces(layer.name, _rows_of(layer), layer.bias)
        for tensor in file.tensors.values():
            writer.tensor(tensor.name, tensor.array)
        for attachment in file.attachments.values():
            writer.attachment(attachment.name, attachment.data)


def _rows_of(layer: Layer) -> Iterator[Rows]:
    """A layer's codes and scales, some rows at a time."""
    scales = layer.scales
    step = max(1, _ROWS_NBYTES * layer.layout.rows // layer.nbytes)
    for start in range(0, layer.layout.rows, step):
        rows = slice(start, min(start + step, layer.layout.rows))
        yield layer.packed_rows(rows), scales[rows]


def _firsts(keys: Iterable[object]) -> list[int]:
    """For each key the position of the first that is equal."""
    known: dict[object, int] = {}
    return [known.setdefault(key, i) for i, key in enumerate(keys)]


def _content(t: Transform) -> tuple[object, ...]:
    """What equal transforms have in common, in few bytes."""
    stored = (None if x is None else x.reshape(-1).view(np.uint8).data for x in (t.signs, t.values, t.stored))
    digests = (None if data is None else hashlib.sha256(data).digest() for data in stored)
    return t.dim, t.hadamard, t.factor, t.seed, *digests


@dataclass(frozen=True)
class Away:
    """Other processes, and what they know the source by."""

    executor: Executor
    workers: int
    spec: str
    tokenizer: bool


@dataclass(frozen=True)
class _Pieces:
    """A layer that is being quantized."""

    name: str
    transform: Transform | None
    pieces: Iterator[Rows]


@dataclass
class Job:
    """One run of `quantize`: what is to be done; what matters (`measure`); the header, of which only the digests
    are missing; the blobs."""

    source: Source
    options: QuantizeOptions
    given: Mapping[str, Floats] | None  # importance; None if it is to be found
    room: Room
    progress: Progress
    away: Away | None = None

    def __post_init__(self) -> None:
        self.plain_bits = self._plain_bits()
        make_transform(1, rotation=self.options.rotation, seed=self.options.seed)
        for name in self.source.tensors:
            if not 1 <= len(name) <= MAX_NAME or any(c < " " or c == "\x7f" for c in name):
                detail = f"no tensor of a file can have this name: 1 to {MAX_NAME} characters, no control characters"
                raise RsvError("source_unsupported", repr(name)[:80], detail)
            if len(shape := self.source.tensors[name].shape) > MAX_RANK:
                raise RsvError(
                    "source_unsupported", name, f"no tensor of a file has {len(shape)} axes: {MAX_RANK} at most"
                )
        # sorted, so that the result does not depend on the order of the source
        names = sorted(name.removesuffix(".weight") for name in self.source.tensors if self.source.is_linear(name))
        tables = self._table_bits()
        self._refuse_idle_patterns([*names, *tables])
        self.layer_bits = self._sufficient(dict.fromkeys(names, self.plain_bits))
        self.fixed_bits = self._sufficient(tables)
        self.layer_bits |= self.fixed_bits
        self.layers = sorted(self.layer_bits)
        if not self.layers:
            raise RsvError("bad_argument", self.source.path, f"none of {len(names)} linear layers is chosen")
        for name in self.layers:
            check_shape(name, self._weight(name).shape)
        self.biases = {name: bias for name in self.layers if (bias := self._bias(name)) is not None}
        self.groups = [part for group in share_groups(self.layers) for part in self._same_width(group)]
        self.importance: Mapping[str, Floats] = {}
        given = self.options.calibration
        self.calibration = DecoderCalibration.of_text(self.source, given) if isinstance(given, str) else given
        self.feedback = None if self.options.feedback is False else self.calibration  # what it goes by
        if self.feedback is not None:
            self.groups.sort(key=lambda group: block_of(group[0]))  # the model runs through them
        if self.given is not None:
            self.importance = self._shared_importance(self._named_in(self.given))

    def journal(
        self,
        out: str | os.PathLike[str],
        inputs: Iterable[str | os.PathLike[str]],
        *,
        force: bool,
        resume: bool,
        shard_size: int | None = None,
    ) -> Journal:
        """What an earlier run has begun, or nothing yet, once what can be known before the work is in order.

        Raises
        ------
        RsvError
            bad_argument: `out` may not be written, the budget is too small, or what is there was begun otherwise;
            io_error: it does not fit.
        """
        least = self.least_nbytes()
        journal = Journal.of(out, facts_of(self.source, self.options, self.given), resume)
        first = 0 if journal.measured else least
        check(out, RSV_FILE, inputs=inputs, force=force, nbytes=first if shard_size is None else first + least)
        if shard_size is not None:
            for name in shard_paths(self.header(self.layer_bits), out, shard_size):  # nearly: the end checks again
                check(name, RSV_FILE, inputs=inputs, force=force)
        return journal

    def least_nbytes(self) -> int:
        """A size that the file will not be below, as far as can be told before `measure`.

        Raises
        ------
        RsvError
            bad_argument: the budget is below it.
        """
        bits, budget = self.layer_bits, self.options.bits_per_weight
        if budget is not None:
            bits = dict.fromkeys(bits, LEVELS[self.options.codebook][0]) | self.fixed_bits
        header = arrange(self.header(bits))
        if budget is not None and (least := quantized_nbytes(header)) > (limit := self._limit(budget)):
            raise RsvError("bad_argument", "bits_per_weight", f"it allows {limit} bytes, and {least} are the least")
        return walk(header, len(build_header(header)))[1]

    def measure(self) -> None:
        """Find out which channels matter, and what a budget buys: a run of the model, or passes over it."""
        if self.given is None:
            self.importance = self._shared_importance(self._found_importance())
        if self.options.bits_per_weight is not None:
            self.layer_bits = self._spent(self.options.bits_per_weight)

    def write(self, output: Output, journal: Journal) -> File:
        """Stream everything that the journal does not know into a file.

        Returned is that very file, whatever its path means by then.
        """
        with self._writer(output, journal) as writer:
            self._fill(writer, output, journal)
            return open_file(writer.finish())

    def write_shards(self, output: Output, journal: Journal, spread: Callable[..., list[str]]) -> list[str]:
        """The same into a file that stays unfinished, so that a run that ends early can be taken up, and then spread
        over shards, whose paths are returned."""
        with self._writer(output, journal) as writer:
            self._fill(writer, output, journal)
            header = writer.described()
            blobs, nbytes = walk(header, len(build_header(header)))
            with File(Disk(output.descriptor, nbytes), header, blobs, 0) as file:
                paths = spread(file, progress=self._phase("writing shards"))
            writer.forget()
            return paths

    def _writer(self, output: Output, journal: Journal) -> Writer:
        return Writer(output.path, self.header(self.layer_bits), output=output, finished=journal.note)

    def _fill(self, writer: Writer, output: Output, journal: Journal) -> None:
        """Write all blobs that the journal does not know."""
        header = self.header(self.layer_bits)
        positions = {layer.name: layer.transform for layer in header.layers}
        journal.begin(output, writer.nbytes)
        told = self._phase("taking up")
        for i, ((kind, name), digest) in enumerate(journal.blobs.items()):
            told(i, len(journal.blobs), name)
            writer.adopt(kind, name, digest)
        for i, entry in enumerate(header.codebooks):
            if not writer.has_codebook(i):
                writer.codebook(i, self._centroids(entry.bits))

        def is_written(group: list[str]) -> bool:
            position = positions[group[0]]
            has_transform = position is None or writer.has_transform(position)
            return has_transform and all(map(writer.has_layer, group))

        pending = [group for group in self.groups if not is_written(group)]
        if self.away is not None:
            for digests in self._written_elsewhere(self.away, pending, output, journal):
                for kind, name, digest in digests:
                    writer.accept(kind, name, digest)
            pending = []
        for layer in self.layers_in_pieces(pending):
            position = positions[layer.name]
            if layer.transform is not None and position is not None and not writer.has_transform(position):
                writer.transform(position, layer.transform)
            if not writer.has_layer(layer.name):
                writer.layer_pieces(layer.name, layer.pieces, self.bias_of(layer.name))
        for name in self._kept():
            if not writer.has_tensor(name):
                writer.tensor_pieces(name, self._as_kept(name))
        for name, (_, data) in self.source.attachments.items():
            writer.attachment(name, data)
        self.source.check_unchanged()  # raised here, it leaves nothing behind

    def _written_elsewhere(
        self, away: Away, groups: list[list[str]], output: Output, journal: Journal
    ) -> Iterator[Digests]:
        """What other processes have written of some groups."""
        if output.unfinished is None:
            detail = "another run has left something there: --resume or --remove-leftovers"
            raise RsvError("bad_argument", unfinished_path(output.path), detail)
        total = self._weights(self.layers)
        done = total - sum(map(self._weights, groups))
        tokens = None if self.calibration is None else self.calibration.tokens

        def task(group: list[str], moment: Moment | None) -> Task:
            seen = None if self.feedback is None else Seen(self.feedback.tokens, moment)
            return Task(
                away.spec, away.tokenizer, slim(self.options, tokens), self.room, output.unfinished or "", journal.run,
                journal.facts, tuple(group), seen,
            )  # fmt: skip

        def told(finished: Task) -> None:
            nonlocal done
            done += self._weights(finished.group)
            self.progress(done, total, finished.group[0])

        self.progress(done, total, "")
        moments = self._moments(groups)
        tasks = (task(group, next(moments, None)) for group in groups)
        yield from spread_out(away.executor, tasks, 2 * away.workers, told)

    def quantized(self) -> Iterator[LayerData]:
        """The layers, one at a time."""
        for layer in self.layers_in_pieces(self.groups):
            name, weight, bias = layer.name, self._weight(layer.name), self.biases.get(layer.name)
            bits, stack = self.layer_bits[name], prod(weight.shape[:-2])
            codes, scales = joined(layer.pieces, weight.matrix_shape, bits)
            yield LayerData(
                name, weight.shape[-1], bits, codes, scales, self._centroids(bits), layer.transform,
                self.bias_of(name), None if bias is None else bias.dtype, stack,
            )  # fmt: skip
            del codes, scales

    def layers_in_pieces(self, groups: list[list[str]]) -> Iterator[_Pieces]:
        """The layers of some groups, each to be taken, or left out, before the next one."""
        total = self._weights(self.layers)
        done = total - sum(map(self._weights, groups))
        moments = self._moments(groups)
        for group in groups:
            self.progress(done, total, group[0])
            moment = next(moments, None)
            importance = self.importance.get(group[0])
            if importance is not None and moment is not None:
                importance = feedback_importance(importance)
            transform = self._transform(group, importance)
            known = None
            if moment is not None and self.feedback is not None:
                known = spread_errors(moment, self.feedback.tokens, transform, overwrite=True)
            del moment
            for name in group:
                yield _Pieces(name, transform, self._quantized(name, transform, known, done, total))
                done += self._weights([name])
            del known  # before the next one's moment is there
        self.progress(total, total, "")

    def header(self, layer_bits: Mapping[str, int]) -> Header:
        widths = sorted(set(layer_bits.values()))
        transforms: list[TransformEntry] = []
        haar: dict[int, int] = {}  # in_features -> position: without a diagonal of their own, they are equal
        layers = []
        for group in self.groups:
            dim, weighted = self._weight(group[0]).shape[-1], group[0] in self.importance
            entry, position = self._transform_entry(dim, weighted), len(transforms)
            if self.options.rotation == "haar" and not weighted:
                position = haar.setdefault(dim, position)
            if entry is not None and position == len(transforms):
                transforms.append(entry)
            for name in group:
                shape = self._weight(name).shape
                bias = self.biases.get(name)
                layers.append(
                    LayerEntry(
                        name=name,
                        in_features=shape[-1],
                        out_features=shape[-2],
                        stack=prod(shape[:-2]),
                        codebook=widths.index(layer_bits[name]),
                        transform=None if entry is None else position,
                        bias=None if bias is None else bias.dtype,
                        sha256=NO_DIGEST,
                    )
                )
        kept = [self.source.tensors[name] for name in self._kept()]
        return Header(
            tuple(CodebookEntry(bits, self._window(bits), NO_DIGEST) for bits in widths),
            tuple(transforms),
            tuple(layers),
            tuple(TensorEntry(tensor.name, tensor.dtype, tensor.shape, NO_DIGEST) for tensor in kept),
            tuple(
                AttachmentEntry(name, kind, len(data), NO_DIGEST)
                for name, (kind, data) in self.source.attachments.items()
            ),
            self._metadata(),
            (),
            {},
        )

    def _metadata(self) -> dict[str, str]:
        metadata = {
            "generator": f"rsv-format {VERSION}",
            "source": Path(self.source.path).name.encode("utf-8", "backslashreplace").decode(),  # any bytes, on Linux
            "source.kind": self.source.kind,
            **({} if self.source.revision is None else {"source.revision": self.source.revision}),
            "quantizer.codebook": self.options.codebook,
            "quantizer.rotation": self.options.rotation,
            "quantizer.seed": str(self.options.seed),
            "quantizer.importance": self._named_importance(),
        }
        if self.options.codebook == "trellis":
            metadata["quantizer.window"] = str(self._window(self.plain_bits))
        if self.calibration is not None:
            metadata["quantizer.calibration"] = f"{self.calibration.tokens} tokens"
        if self.feedback is not None:
            metadata["quantizer.feedback"] = "true"
        if self.options.bits_per_weight is not None:
            metadata["quantizer.bits_per_weight"] = f"{self.options.bits_per_weight:g}"
        return metadata

    def _plain_bits(self) -> int:
        """The bits of a linear layer, before any budget."""
        bits = DEFAULT_BITS if self.options.bits is None else self.options.bits
        for one in (bits, table_bits(self.options.embedding_bits, bits)):
            if one is not None:
                self._centroids(one)
        return bits

    def _centroids(self, bits: int) -> NDArray[np.float32]:
        return centroids(self.options.codebook, bits, self.options.window)

    def _window(self, bits: int) -> int:
        """Bits of an index."""
        return self._centroids(bits).size.bit_length() - 1

    def _table_bits(self) -> dict[str, int]:
        """Embedding tables and heads, if they are to be layers."""
        bits = table_bits(self.options.embedding_bits, self.plain_bits)
        if bits is None:
            return {}
        tables = [name.removesuffix(".weight") for name in self.source.tensors if self.source.role(name) is Role.TABLE]
        if self.options.embedding_bits is not None and not tables:
            raise RsvError("bad_argument", "embedding_bits", "the source has no embedding table")
        return dict.fromkeys(tables, bits)

    def _sufficient(self, bits: Mapping[str, int]) -> dict[str, int]:
        """Of these layers those that are to be quantized, with as many bits as they need; a budget decides itself."""
        least = {name: least_bits(self.source.config, name) for name in filter(self._chosen, bits)}
        budget = self.options.bits_per_weight is not None
        return {name: bits[name] if budget else max(bits[name], x) for name, x in least.items() if x is not None}

    def _spent(self, bits_per_weight: float) -> dict[str, int]:
        """The bits of each layer that a budget buys; a pass over the source."""

        def size(bits: Mapping[str, int]) -> int:
            return quantized_nbytes(self.header({**bits, **self.fixed_bits}))

        limit, kind, window = self._limit(bits_per_weight), self.options.codebook, self.options.window
        bits = spend(self._demands(), kind=kind, window=window, limit=limit, size=size)
        return bits | self.fixed_bits

    def _limit(self, bits_per_weight: float) -> int:
        """Bytes that a budget allows."""
        return int(bits_per_weight * self._weights(self.layers) / 8)

    def _demands(self) -> list[Demand]:
        """What every layer whose bits are not fixed does with bits."""
        known = [float(np.mean(h)) for h in self.importance.values()]
        usual = float(np.mean(known)) if known else 1.0
        demands: list[Demand] = []
        for group in self.groups:
            if group[0] in self.fixed_bits:
                continue
            self._phase("bits")(len(demands), len(self.layers), group[0])
            dim = self._weight(group[0]).shape[-1]
            squares = {name: column_squares(self._rows(name)) for name in group}
            h, c = np.full(dim, usual), np.ones(dim)
            if group[0] in self.importance:
                h = np.asarray(self.importance[group[0]], np.float64)
                c = channel_scales(h, np.sum(list(squares.values()), axis=0), group[0])
            for name in group:
                error = weighted_error(h, c, squares[name])
                rows = prod(self._weight(name).shape[:-1])
                # what is not finite is refused, by its place, when it is quantized
                demands.append(Demand(name, dim, rows, error if np.isfinite(error) else 0.0))
        return demands

    def _phase(self, label: str) -> Progress:
        """Progress of what comes before the quantizing, told apart by its name."""
        return lambda done, total, name: self.progress(done, total, f"{label}: {name}")

    def _named_importance(self) -> str:
        """What was asked for; a file's path or a mapping is just "given"."""
        wanted = self.options.importance
        return wanted if isinstance(wanted, str) and wanted in IMPORTANCES else "given"

    def _found_importance(self) -> Mapping[str, Floats]:
        """Mean squared activations of the layers for which they can be told from the model."""
        if self.options.importance == "auto":
            told = self._phase("importance")
            if self.calibration is not None:
                measured = self.calibration.importance(told)
                if measured is None:
                    raise RsvError("source_invalid", self.source.path, "the model does not run on the text")
                return self._named_in(measured)
            if found := synthetic_importance(self.source, self.options.seed, told):
                return found
        return self._norm_gains()

    def _named_in(self, given: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Mean squared activations of the layers to which something was given."""
        chosen = {name: h for name in self.layers if (h := self._given(name, given)) is not None}
        if not chosen and self.options.importance != "none":
            raise RsvError("importance_mismatch", "importance", "it names none of the layers that are quantized")
        return chosen

    def _given(self, name: str, found: Mapping[str, Floats]) -> Floats | None:
        """A layer's own importance or the mean of its experts', in_features long."""
        shape = self._weight(name).shape
        names = next((x for x in ([name], self._names(name), [plain_name(name)]) if not found.keys().isdisjoint(x)), [])
        known = {x: _per_channel(found[x], shape) for x in names if x in found}
        for x, h in known.items():
            channel_scales(h, np.ones(shape[-1]), x)  # refuses other lengths and values
        return np.asarray(np.mean(list(known.values()), axis=0)) if known else None

    def _norm_gains(self) -> Mapping[str, Floats]:
        found = {}
        for name, norm in norm_gains(self.source.config, self.layers).items():
            if norm is None or norm[0] not in self.source.tensors:
                continue
            gain = self.source.tensors[norm[0]].float32().astype(np.float64) + norm[1]
            if gain.shape == self._weight(name).shape[-1:]:
                found[name] = gain * gain
        return found

    def _shared_importance(self, known: Mapping[str, Floats]) -> Mapping[str, Floats]:
        """Layers with one input have one importance: the mean of those that are known."""
        shared: dict[str, Floats] = {}
        for group in self.groups:
            found = [known[name] for name in group if name in known]
            if found:
                mean = np.asarray(np.mean(np.stack(found), axis=0), np.float64)
                shared.update({name: mean for name in group})
        return shared

    def _transform_entry(self, dim: int, weighted: bool) -> TransformEntry | None:
        """What `make_transform` will make, before the numbers are known."""
        scales = np.ones(dim) if weighted else None
        if self.options.rotation == "haar" and dim > 1:
            kind, seed = ("matrix", None) if self.options.persist_rotation else ("haar", self.options.seed)
            return TransformEntry(dim, 1, diagonal_entry("values" if weighted else None), factor_entry(kind, seed))
        transform = make_transform(dim, rotation=self.options.rotation, scales=scales)
        return None if transform is None else transform_entry(transform)

    def _transform(self, group: list[str], importance: Floats | None) -> Transform | None:
        return group_transform(
            self._weight(group[0]).shape[-1],
            (piece for name in group for piece in self._rows(name)),
            name=group[0],
            rotation=self.options.rotation,
            persist_rotation=self.options.persist_rotation,
            seed=self.options.seed,
            importance=importance,
        )

    def _moments(self, groups: list[list[str]]) -> Iterator[NDArray[np.float32] | None]:
        """For each group what feedback goes by, None where there is nothing."""
        if self.feedback is None:
            return itertools.repeat(None)
        return self.feedback.moments([plain_name(group[0]) for group in groups])

    def _quantized(
        self, name: str, transform: Transform | None, known: Spread | None, done: int, total: int
    ) -> Iterator[Rows]:
        """A layer's codes and scales, some rows at a time; progress counts from what is done before."""
        weight, bits = self._weight(name), self.layer_bits[name]
        held, (rows, in_features) = weight.held(), weight.matrix_shape
        first = 0
        for codes, scales in quantize_pieces(
            lambda start, stop: held.row_part(start, stop).float32(),
            (rows, in_features),
            transform,
            self._centroids(bits),
            bits,
            spread=known,
            name=name,
            room=self.room,
        ):
            self.progress(done + first * in_features, total, name)
            row = int(np.argmax(scales))
            if float(scales[row]) * in_features > _LARGEST:  # sums of so many are taken to dequantize it
                size = f"row {first + row}, of root mean square {scales[row]:g}"
                raise RsvError("nonfinite_weight", name, f"{size}, overflows float32 when it is dequantized")
            yield codes, scales
            first += scales.size

    def _chosen(self, name: str) -> bool:
        include, exclude = self.options.include, self.options.exclude
        return (not include or self._matches(name, include)) and not self._matches(name, exclude)

    def _matches(self, name: str, patterns: Iterable[str]) -> bool:
        return any(fnmatch.fnmatchcase(x, pattern) for pattern in patterns for x in self._names(name))

    def _refuse_idle_patterns(self, layers: list[str]) -> None:
        """A pattern that matches nothing is a mistake; what is kept anyway may be excluded."""
        weights = [name.removesuffix(".weight") for name in self.source.tensors if name.endswith(".weight")]
        for option, patterns, names in (
            ("include", self.options.include, layers),
            ("exclude", self.options.exclude, weights),
        ):
            for pattern in patterns:
                if not any(self._matches(name, [pattern]) for name in names):
                    raise RsvError("bad_argument", option, f"{pattern!r} matches none of {len(names)} layers")

    def _names(self, name: str) -> list[str]:
        """A layer's name and, of a stack, those of the experts in the checkpoint."""
        return [name, *(expert.name.removesuffix(".weight") for expert in self._weight(name).experts)]

    def _rows(self, name: str) -> Iterator[Floats]:
        """A layer's weight, some rows at a time."""
        weight = self._weight(name)
        return self._read(weight.held(), chunk_rows(weight.shape[-1]), lambda part: part.float32())

    def _as_kept(self, name: str) -> Iterator[NDArray[Any]]:
        """A tensor's values as they are kept, some rows at a time if it can be read so."""
        tensor = self.source.tensors[name]
        if tensor.rows is None:
            return iter([tensor.read()])
        return self._read(tensor, 1, lambda part: part.read())

    def _read(
        self, tensor: SourceTensor, unit: int, read: Callable[[SourceTensor], NDArray[Any]]
    ) -> Iterator[NDArray[Any]]:
        pieces = self.room.pieces(*tensor.matrix_shape, unit)
        return ordered(lambda piece: read(tensor.row_part(*piece)), pieces, self.room.threads)

    def _weight(self, name: str) -> SourceTensor:
        return self.source.tensors[f"{name}.weight"]

    def _weights(self, names: Iterable[str]) -> int:
        """How many the layers have."""
        return sum(prod(self._weight(name).shape) for name in names)

    def _bias(self, name: str) -> SourceTensor | None:
        bias = self.source.tensors.get(f"{name}.bias")
        if bias is None:
            return None
        weight = self._weight(name)
        if bias.dtype not in BIAS_DTYPES or bias.shape != weight.shape[:-1]:
            detail = f"a bias of {bias.dtype} {bias.shape} cannot be kept with a weight {weight.shape}"
            raise RsvError("source_unsupported", f"{name}.bias", f"{detail}: exclude the layer, and both are")
        return bias

    def bias_of(self, name: str) -> NDArray[Any] | None:
        bias = self.biases.get(name)
        return None if bias is None else bias.read().reshape(-1)

    def _kept(self) -> list[str]:
        taken = {f"{name}.weight" for name in self.layers} | {f"{name}.bias" for name in self.biases}
        return [name for name in self.source.tensors if name not in taken]

    def _same_width(self, group: list[str]) -> list[list[str]]:
        """A group of names says nothing of widths: only equal ones can share a transform."""
        widths: dict[int, list[str]] = {}
        for name in group:
            widths.setdefault(self._weight(name).shape[-1], []).append(name)
        return list(widths.values())


def _given_importance(importance: Importance) -> Mapping[str, Floats] | None:
    """What is given, nothing for "none"; None if it is to be found."""
    if isinstance(importance, Mapping):
        return importance
    if importance == "none":
        return {}
    return None if importance in IMPORTANCES else load_imatrix(Path(importance))


@contextlib.contextmanager
def _opened(source: str | os.PathLike[str] | Source, tokenizer: bool) -> Iterator[Source]:
    """A source of the caller's stays open."""
    if isinstance(source, Source):
        yield stack_experts(source if tokenizer else source.without_tokenizer())
    else:
        with open_source(source, tokenizer=tokenizer) as opened:
            yield opened


def _paths(source: str | os.PathLike[str] | Source, importance: Importance) -> list[str | os.PathLike[str]]:
    """What is read, if it lies at these paths."""
    model = source.path if isinstance(source, Source) else source
    return [model] if isinstance(importance, Mapping) else [model, importance]


def _repeats(file: File) -> bool:
    """Whether two transforms came out equal, which only their digests can tell."""
    return len(set(file.header.transforms)) < len(file.header.transforms)


def silent(done: int, total: int, name: str) -> None:
    pass


def _per_channel(h: Floats, shape: tuple[int, ...]) -> NDArray[np.float64]:
    """Experts share their input's transform: the mean of theirs, which are rows or one after the other."""
    wide = np.asarray(h, np.float64)
    if len(shape) == 3 and wide.shape == (shape[0] * shape[-1],):
        wide = wide.reshape(shape[0], shape[-1])
    return wide.mean(axis=0) if wide.ndim == 2 else wide
