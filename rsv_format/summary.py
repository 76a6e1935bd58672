"""Where the bytes of a file went."""

from __future__ import annotations

import os
from dataclasses import dataclass

from rsv_format.limits import PROLOGUE_NBYTES
from rsv_format.reader import File, open

KINDS: tuple[str, ...] = (
    "codes", "scales", "biases", "codebooks", "diagonals", "factors", "header", "padding", "tensors", "attachments",
)  # fmt: skip
_BLOB_KINDS = {"codebook": "codebooks", "diagonal": "diagonals", "factor": "factors", "tensor": "tensors",
               "attachment": "attachments"}  # fmt: skip
_PART_KINDS = {"codes": "codes", "scales": "scales", "bias": "biases"}


@dataclass(frozen=True)
class Summary:
    """Sizes in bytes, by kind; they add up to the file."""

    nbytes: int
    by_kind: dict[str, int]
    layers: int
    weights: int  # quantized ones

    @property
    def bits_per_weight(self) -> float:
        """Everything but tensors and attachments, padding too, over the quantized weights."""
        quantized = self.nbytes - self.by_kind["tensors"] - self.by_kind["attachments"]
        return 8 * quantized / self.weights if self.weights else 0.0


def summarize(source: File | str | os.PathLike[str]) -> Summary:
    """Count the bytes of a file.

    Raises
    ------
    RsvError
        Whatever `open` raises.
    """
    if not isinstance(source, File):
        with open(source) as file:
            return summarize(file)
    by_kind = dict.fromkeys(KINDS, 0)
    for blob in source.blobs:
        if blob.kind == "layer":
            for part, _, nbytes in source.layers[blob.name].parts:
                by_kind[_PART_KINDS[part]] += nbytes
        else:
            by_kind[_BLOB_KINDS[blob.kind]] += blob.nbytes
    by_kind["header"] = PROLOGUE_NBYTES + source.header_nbytes
    by_kind["padding"] = source.nbytes - sum(by_kind.values())
    weights = sum(entry.rows * entry.in_features for entry in source.header.layers)
    return Summary(source.nbytes, by_kind, len(source.layers), weights)
