"""llama.cpp's importance matrices: the mean squared activation of every input channel of a layer.

Two formats: GGUF with tensors NAME.in_sum2 and NAME.counts, which is written too, and an older one without a
magic number.  Neither tells the architecture.  An expert stack gets one vector, the mean over all tokens that
reach any expert, since its experts share a transform.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from rsv_format.errors import RsvError
from rsv_format.outputs import Output
from rsv_format.replaceable import Kind
from rsv_format.sources import gguf
from rsv_format.sources.base import Array, Floats, library, read_bytes
from rsv_format.sources.gguf_header import MAGIC
from rsv_format.sources.gguf_names import hugging_face_name, llama_cpp_name, mixtral_suffix
from rsv_format.sources.gguf_reader import is_gguf

_GATE_UP = "ffn_gate_up_exps"
_SUMS, _COUNTS = ".in_sum2", ".counts"
# the beginning of what `save_imatrix` and llama.cpp write: general.type is the first or second key
IMATRIX = Kind("an importance matrix", lambda head: head.startswith(MAGIC) and b"imatrix" in head)
_BLOCK = "blk."  # what begins so is llama.cpp's name for a part of a block, known here or not


def load_imatrix(path: str | Path) -> dict[str, Floats]:
    """Read an importance matrix.

    Returns
    -------
    dict
        Layer name, such as "model.layers.0.self_attn.q_proj", to float32 (in_features,).  Experts go by both
        names that mlx-lm has for them, mlp.switch_mlp and block_sparse_moe.switch_mlp; where a file of the
        older kind does not tell their number, theirs are (experts * in_features,).  Names that are not
        llama.cpp's stay as they are.  Layers that saw no token are left out.

    Raises
    ------
    RsvError
        `io_error`; `source_invalid` for a malformed file; `source_unsupported` without gguf.
    """
    path = Path(path)
    means = _from_gguf(path) if is_gguf(path) else _from_legacy(path)
    layers: dict[str, Floats] = {}
    for name, mean in means.items():
        if not (np.isfinite(mean).all() and (mean >= 0).all()):
            raise RsvError("source_invalid", f"{path}: {name}", "has a negative or non-finite mean square")
        for layer in _layer_names(name):
            layers[layer] = mean.astype(np.float32)
    if not layers:
        raise RsvError("source_invalid", str(path), "has no entry for a layer of a known name")
    return layers


def save_imatrix(
    path: str | Path,
    layers: Mapping[str, tuple[Array, Array | int]],
    *,
    datasets: Sequence[str] = (),
    chunks: int = 0,
    chunk_size: int = 0,
    force: bool = False,
) -> None:
    """Write an importance matrix in GGUF, whole or not at all, as llama.cpp's llama-imatrix does.

    Parameters
    ----------
    path : path
    layers : mapping
        Layer name, such as "model.layers.0.self_attn.q_proj", to the sums of squared activations (in_features,)
        and the number of tokens; of an expert stack (experts, in_features) and (experts,).  What llama.cpp has
        no name for goes by its own.  Layers that saw no token are left out.
    datasets : names
        What the tokens were taken from.
    chunks, chunk_size : int
        How many runs there were, and how many tokens each had.
    force : bool
        Replace a file that is no importance matrix, or write-protected; but never a model.

    Raises
    ------
    RsvError
        `io_error`; `missing_dependency` without gguf; `bad_argument` for shapes that do not fit, and if what is at
        the path may not be replaced.
    """
    package = library("gguf", str(path))
    with Output(path, IMATRIX, force=force) as output:
        output.open()
        writer = package.GGUFWriter(output.temporary_path, "imatrix")
        writer.add_type("imatrix")
        writer.add_array(package.Keys.IMatrix.DATASETS, list(datasets))
        writer.add_uint32(package.Keys.IMatrix.CHUNK_COUNT, chunks)
        writer.add_uint32(package.Keys.IMatrix.CHUNK_SIZE, chunk_size)
        stored = {llama_cpp_name(f"{name}.weight") or f"{name}.weight": entry for name, entry in layers.items()}
        for name in sorted(stored):
            sums, counts = (np.asarray(part, np.float32) for part in stored[name])
            sums, counts = np.atleast_2d(sums), counts.reshape(-1, 1)
            if sums.ndim != 2 or sums.size == 0 or sums.shape[0] != counts.shape[0]:
                raise RsvError("bad_argument", name, f"sums {sums.shape} do not fit counts {counts.shape}")
            if counts.any():
                writer.add_tensor(f"{name}{_SUMS}", np.ascontiguousarray(sums))
                writer.add_tensor(f"{name}{_COUNTS}", counts)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()


def _layer_names(name: str) -> list[str]:
    if _GATE_UP in name:  # one matrix for both, of which their common input is known
        return [x for part in ("gate", "up") for x in _layer_names(name.replace(_GATE_UP, f"ffn_{part}_exps"))]
    full = hugging_face_name(name) or ("" if name.startswith(_BLOCK) else name)
    if not full.endswith(".weight"):
        return []
    layer = full.removesuffix(".weight")
    *block, suffix = layer.split(".", 3)
    return list(dict.fromkeys([layer, ".".join([*block, mixtral_suffix(suffix)])]))


def _from_gguf(path: Path) -> dict[str, Array]:
    try:
        tensors = gguf.load_tensors(path)
    except RsvError as e:
        if e.code != "nonfinite_weight":
            raise
        raise RsvError("source_invalid", e.where, e.detail) from None  # what it holds are no weights
    means: dict[str, Array] = {}
    for name in (key.removesuffix(_SUMS) for key in tensors if key.endswith(_SUMS)):
        counts = tensors.get(name + _COUNTS)
        if counts is None:
            raise RsvError("source_invalid", f"{path}: {name}", "has no counts")
        sums, total = np.atleast_2d(tensors[name + _SUMS]).astype(np.float64), counts.astype(np.float64).sum()
        if sums.size == 0 or counts.size != sums.size // sums.shape[-1]:
            raise RsvError("source_invalid", f"{path}: {name}", f"counts {counts.shape} do not fit {sums.shape}")
        if total > 0:
            means[name] = sums.reshape(-1, sums.shape[-1]).sum(0) / total
    return means


def _from_legacy(path: Path) -> dict[str, Array]:
    """i32 entries, each: i32 length, name, i32 calls, i32 count, float32 mean * calls; a trailer is ignored."""
    data = read_bytes(path)
    offset = 0

    def take(count: int, what: str) -> bytes:
        nonlocal offset
        if not 0 <= count <= len(data) - offset:
            raise RsvError("source_invalid", str(path), f"no importance matrix: {what} at byte {offset} does not fit")
        offset += count
        return data[offset - count : offset]

    def integer(what: str) -> int:
        value: int = struct.unpack("<i", take(4, what))[0]
        return value

    entries: dict[str, Array] = {}
    for _ in range(integer("the number of entries")):
        name = take(integer("the length of a name"), "a name").decode("utf-8", "replace")
        calls, count = integer("a number of calls"), integer("a number of values")
        values = np.frombuffer(take(4 * count, "an entry's values"), "<f4").astype(np.float64)
        if count == 0:
            raise RsvError("source_invalid", f"{path}: {name}", "has no values")
        entries[name] = values / max(calls, 1)
    return {name: _per_channel(name, mean, entries, path) for name, mean in entries.items()}


def _per_channel(name: str, mean: Array, entries: dict[str, Array], path: Path) -> Array:
    """An expert stack's entry holds one expert after the other; the router's width tells their number.

    Where the router has no entry, they stay one after the other: whoever knows the layer can tell.
    """
    stem = name.removesuffix("_exps.weight")
    if stem == name:
        return mean
    block = stem.rpartition(".")[0]
    router, gate = entries.get(f"{block}.ffn_gate_inp.weight"), entries.get(f"{block}.ffn_gate_exps.weight")
    if gate is None:
        gate = entries.get(f"{block}.{_GATE_UP}.weight")
    if router is None or gate is None:
        return mean
    if gate.size % router.size or mean.size % (gate.size // router.size):
        raise RsvError(
            "source_invalid", f"{path}: {name}", "cannot be divided into as many experts as the router's has"
        )
    experts: Array = mean.reshape(gate.size // router.size, -1)
    return np.asarray(experts.mean(0))
