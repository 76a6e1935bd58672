"""Where the bytes of a file went."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from math import prod

from rsv_format.header import TransformEntry
from rsv_format.limits import PROLOGUE_NBYTES
from rsv_format.reader import File, Tensor, open
from rsv_format.roles import tensor_role
from rsv_format.tables import html_table

KINDS: tuple[str, ...] = (
    "codes", "scales", "biases", "codebooks", "diagonals", "factors", "header", "padding", "tensors", "attachments",
)  # fmt: skip
_BLOB_KINDS = {"codebook": "codebooks", "diagonal": "diagonals", "factor": "factors", "tensor": "tensors",
               "attachment": "attachments"}  # fmt: skip
_PART_KINDS = {"codes": "codes", "scales": "scales", "bias": "biases"}


EXCLUDED = "excluded"  # of what is quantized unless it is

_NUMBER = re.compile(r"(?<![^.])\d+(?![^.])")


@dataclass(frozen=True)
class Kept:
    """Tensors that stay as they are, a family of names and one reason."""

    family: str  # their names, with stars for numbers
    reason: str  # a `Role`, or "excluded"
    tensors: int
    weights: int


@dataclass(frozen=True, repr=False)
class Summary:
    """Sizes in bytes, by kind; they add up to the file."""

    nbytes: int
    by_kind: dict[str, int]
    layers: int
    weights: int  # quantized ones
    kept: tuple[Kept, ...]  # the largest first

    @property
    def kept_weights(self) -> int:
        """Numbers in tensors, which stay as they are."""
        return sum(family.weights for family in self.kept)

    @property
    def share(self) -> float:
        """Quantized weights of all, 0 to 1."""
        return self.weights / max(1, self.weights + self.kept_weights)

    @property
    def bits_per_weight(self) -> float:
        """Everything but tensors and attachments, padding too, over the quantized weights."""
        quantized = self.nbytes - self.by_kind["tensors"] - self.by_kind["attachments"]
        return 8 * quantized / self.weights if self.weights else 0.0

    def __repr__(self) -> str:
        facts = f"{self.layers} layers, {self.weights} weights, {self.bits_per_weight:.3f} bits per weight"
        return f"<rsv_format.Summary: {self.nbytes} bytes, {facts}>"

    def _repr_html_(self) -> str:
        title = f"{self.nbytes:,} bytes, {self.weights:,} weights, {self.bits_per_weight:.3f} bits per weight"
        rows = [(kind, f"{n:,}", f"{n / self.nbytes:.1%}") for kind, n in self.by_kind.items() if n]
        return html_table(title, ("kind", "bytes", "share"), rows, len(rows))


def summarize(source: File | str | os.PathLike[str]) -> Summary:
    """Count the bytes of a file.

    Raises
    ------
    RsvError
        Whatever `open` raises.
    """
    if not isinstance(source, File):
        with open(source, mmap=False) as file:
            return summarize(file)
    counts = [_by_kind(file) for file in source.shards or (source,)]
    by_kind = {kind: sum(count[kind] for count in counts) for kind in KINDS}
    weights = sum(entry.rows * entry.in_features for entry in source.header.layers)
    return Summary(source.nbytes, by_kind, len(source.layers), weights, _kept(source))


def _by_kind(file: File) -> dict[str, int]:
    """Bytes of a file, or of a shard by itself."""
    by_kind = dict.fromkeys(KINDS, 0)
    for blob in file.blobs:
        if blob.kind == "layer":
            for part, _, nbytes in file.layers[blob.name].parts:
                by_kind[_PART_KINDS[part]] += nbytes
        else:
            by_kind[_BLOB_KINDS[blob.kind]] += blob.nbytes
    by_kind["header"] = PROLOGUE_NBYTES + file.header_nbytes
    by_kind["padding"] = file.nbytes - sum(by_kind.values())
    return by_kind


def family(name: str) -> str:
    """A name with its numbers starred, the same for every block of a model."""
    return _NUMBER.sub("*", name)


def transform_words(entry: TransformEntry | None) -> str:
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


def why_kept(tensor: Tensor) -> str:
    """Why a tensor is not quantized."""
    role = tensor_role(tensor.name, tensor.dtype, tensor.shape)
    return EXCLUDED if role.is_quantized else role.value


def _kept(file: File) -> tuple[Kept, ...]:
    found: dict[tuple[str, str], list[int]] = {}
    for name, tensor in file.tensors.items():
        found.setdefault((family(name), why_kept(tensor)), []).append(prod(tensor.shape))
    kept = [Kept(name, reason, len(sizes), sum(sizes)) for (name, reason), sizes in found.items()]
    return tuple(sorted(kept, key=lambda x: -x.weights))
