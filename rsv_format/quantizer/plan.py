"""What `quantize` would do, without doing it: layers and bits, the size of the file, time and memory from a trial."""

from __future__ import annotations

import os
import resource
import sys
import time
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from rsv_format.canonical import arrange
from rsv_format.header import build_header
from rsv_format.quantizer.conversion import Job, _given_importance, _opened, _paths, silent
from rsv_format.quantizer.matrix import quantize_matrix
from rsv_format.quantizer.options import QuantizeOptions
from rsv_format.sources import Source, SourceTensor
from rsv_format.splitting import shard_paths
from rsv_format.threads import DEFAULT_MEMORY, Room
from rsv_format.validate import walk

_TRIAL = 2**19  # weights that are quantized to see how long it takes


@dataclass(frozen=True)
class PlannedLayer:
    """A layer to be: `bits` is None where a budget decides, after a pass over the model."""

    name: str
    shape: tuple[int, ...]
    bits: int | None


@dataclass(frozen=True)
class QuantizePlan:
    """What `quantize` would do.

    Attributes
    ----------
    layers : tuple of PlannedLayer
    weights, kept_weights : int
        Numbers that are quantized, and that are kept.
    nbytes : int
        Of the file, if importance is known for every layer; with a budget, the most that it allows.
    bits_per_weight : float
    seconds : float
        For the encoding alone, by a trial on some of the weights: what reading them takes, and to find out which
        channels matter, comes on top.
    shards : int
        How many there would be; 0 if one file is written.
    disk : int
        Bytes of the output's file system that are taken while it is written: with shards, those of the content twice.
    memory : int
        Bytes that this process had at most by the end of the trial. Error feedback takes more.
    """

    layers: tuple[PlannedLayer, ...]
    weights: int
    kept_weights: int
    nbytes: int
    bits_per_weight: float
    seconds: float
    shards: int
    disk: int
    memory: int


def plan(
    source: str | os.PathLike[str] | Source,
    out: str | os.PathLike[str] | None = None,
    *,
    tokenizer: bool = True,
    force: bool = False,
    resume: bool = False,
    threads: int | None = None,
    memory: int = DEFAULT_MEMORY,
    shard_size: int | None = None,
    **options: Any,
) -> QuantizePlan:
    """Say what `quantize` would do with the same parameters; nothing is written, and little is read. Without `out`
    nothing is said of that.

    Raises
    ------
    RsvError
        What `quantize` raises before it begins: bad_argument, source_unsupported, source_invalid, io_error.
    """
    chosen, room = QuantizeOptions(**options), Room(memory, threads)
    with _opened(source, tokenizer) as opened:
        job = Job(opened, chosen, _given_importance(chosen.importance), room, silent)
        if out is None:
            job.least_nbytes()  # which refuses a budget that is too small
        else:
            inputs = [*_paths(source, chosen.importance), *(file.path for file in opened.files)]
            job.journal(out, inputs, force=force, resume=resume, shard_size=shard_size)
        if job.given is None:
            job.importance = dict.fromkeys(job.layers, np.zeros(0))  # its being known tells in the size
        header = arrange(job.header(job.layer_bits))
        blobs, nbytes = walk(header, len(build_header(header)))
        kept_nbytes = sum(blob.nbytes for blob in blobs if blob.kind in ("tensor", "attachment"))
        budget = chosen.bits_per_weight
        if budget is not None:
            nbytes = job._limit(budget) + kept_nbytes
        shards = [] if shard_size is None else shard_paths(header, "", shard_size)
        tensors = {name: opened.tensors[f"{name}.weight"] for name in job.layers}
        weights = sum(prod(tensor.shape) for tensor in tensors.values())
        return QuantizePlan(
            tuple(
                PlannedLayer(name, tensor.shape, None if budget is not None and name not in job.fixed_bits
                             else job.layer_bits[name])
                for name, tensor in tensors.items()
            ),
            weights,
            sum(prod(entry.shape) for entry in header.tensors),
            nbytes,
            8 * (nbytes - kept_nbytes) / weights,
            weights / _rate(job, list(tensors.values())),
            len(shards),
            2 * nbytes if shards else nbytes,
            _peak(),
        )  # fmt: skip


def _rate(job: Job, tensors: list[SourceTensor]) -> float:
    """Weights a second, on some rows of a layer of usual size."""
    tensor = sorted(tensors, key=lambda x: prod(x.shape))[len(tensors) // 2]
    rows, width = tensor.matrix_shape
    part = tensor.row_part(0, max(1, min(rows, _TRIAL // width))).float32()

    def encode(rows: slice) -> None:
        quantize_matrix(
            part[rows],
            name="trial",
            bits=job.plain_bits,
            codebook=job.options.codebook,
            window=job.options.window,
            rotation="none" if job.options.rotation == "none" else "hartley",
            threads=job.room.threads,
        )

    encode(slice(0, 1))  # what is compiled, is compiled
    began = time.perf_counter()
    encode(slice(None))
    return part.size / (time.perf_counter() - began)


def _peak() -> int:
    """Bytes of memory that this process has had at most."""
    unit = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit
